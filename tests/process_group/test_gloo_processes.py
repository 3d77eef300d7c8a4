"""Members as real processes that die or freeze in the middle of an allreduce; the survivors are told to abort."""

from __future__ import annotations

import json
import os
import queue
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.nursery import Forked

pytestmark = [
    pytest.mark.processes,
    pytest.mark.slow,
    pytest.mark.skipif(not os.path.isdir("/proc/self/fdinfo"), reason="an abort needs Linux's /proc"),
]

# Operations time out after 300 s; anything near this shows that it was an abort that freed them.
FREED_WITHIN_S = 60.0
LARGE = 4_000_000  # float32: 16 MB, some tens of milliseconds an allreduce


class Member:
    """A process of its own; it is told what to do through a named pipe, and its answers are collected on a thread."""

    def __init__(self, directory: Path) -> None:
        self._log = directory / "log"
        pipe = directory / "commands"
        os.mkfifo(pipe)
        self._commands = os.open(pipe, os.O_RDWR)  # to open it for writing only would wait for the reader
        script = Path(__file__).with_name("gloo_member.py")
        with self._log.open("wb") as stderr:
            self.process = Forked(script, [str(pipe)], dict(os.environ), stderr.fileno())
        self._answers: queue.SimpleQueue[dict[str, object]] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        for line in self.process.stdout:
            self._answers.put(json.loads(line))
        self._answers.put({"gone": True})

    def tell(self, command: str) -> None:
        os.write(self._commands, command.encode() + b"\n")

    def answer(self, timeout_s: float = 60.0) -> dict[str, object]:
        try:
            return self._answers.get(timeout=timeout_s)
        except queue.Empty:
            return {"silent": True}

    def is_fit(self) -> bool:
        """Whether it is alive and has nothing left to say from an earlier test."""
        if self.process.poll() is not None:
            return False
        self.tell("ping")
        return self.answer() == {"pong": True}

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self._reader.join(60)
        os.close(self._commands)

    def log(self) -> str:
        return f"member {self.process.pid}: {self._log.read_text()[-2000:]}"


@pytest.fixture(scope="module")
def pool() -> Iterator[list[Member]]:
    """Members that one test leaves to the next."""
    pool: list[Member] = []
    yield pool
    for member in pool:
        member.close()


@pytest.fixture
def members(pool: list[Member], tmp_path: Path) -> Iterator[list[Member]]:
    fit = [member for member in pool if member.is_fit()]
    for member in pool:
        if member not in fit:
            member.close()
    directories = [tmp_path / str(number) for number in range(4 - len(fit))]
    for directory in directories:
        directory.mkdir()
    new = [Member(directory) for directory in directories]
    pool[:] = [*fit, *new]
    assert [member.answer(150.0) for member in new] == [{"ready": True}] * len(new)
    yield list(pool)
    for member in pool:
        print(member.log())  # pytest shows it where the test failed


def configure(members: list[Member], address: str) -> None:
    for rank, member in enumerate(members):
        member.tell(f"configure {address} {rank} {len(members)}")
    assert [member.answer() for member in members] == [{"configured": True}] * len(members)


def reduce_forever(members: list[Member]) -> None:
    for member in members:
        member.tell(f"reduce_forever {LARGE}")
    assert [member.answer() for member in members] == [{"started": True}] * len(members)
    time.sleep(0.2)  # into the middle of one of many


def abort(members: list[Member]) -> tuple[list[dict[str, object]], float]:
    """Tell them to abort; return what their operations ended with, and how long that took."""
    told = time.monotonic()
    for member in members:
        member.tell("abort")
    answers = [member.answer(FREED_WITHIN_S) for member in members]
    ended = [float(str(answer.pop("time_s"))) for answer in answers]
    print(f"operations ended {[f'{at - told:.4f}' for at in ended]} s after the abort was sent")
    return answers, max(ended) - told


def digests(members: list[Member]) -> set[object]:
    for rank, member in enumerate(members):
        member.tell(f"reduce 100003 {rank}")
    return {member.answer()["digest"] for member in members}


def test_survivors_of_a_kill_are_freed_and_go_on(members: list[Member], new_address: Callable[[], str]) -> None:
    configure(members, new_address())
    reduce_forever(members)
    victim, survivors = members[1], [members[0], *members[2:]]
    victim.process.kill()
    victim.process.wait()
    answers, took_s = abort(survivors)
    assert {answer["error"] for answer in answers} <= {"ProcessGroupAbortedError", "CollectiveFailedError"}
    assert took_s < FREED_WITHIN_S
    configure(survivors, new_address())
    assert len(digests(survivors)) == 1


def test_survivors_of_a_freeze_are_freed_and_it_can_come_back(
    members: list[Member], new_address: Callable[[], str]
) -> None:
    configure(members, new_address())
    reduce_forever(members)
    frozen, survivors = members[2], [*members[:2], members[3]]
    os.kill(frozen.process.pid, signal.SIGSTOP)
    answers, took_s = abort(survivors)
    assert {answer["error"] for answer in answers} <= {"ProcessGroupAbortedError", "CollectiveFailedError"}
    assert took_s < FREED_WITHIN_S
    configure(survivors, new_address())
    assert len(digests(survivors)) == 1
    os.kill(frozen.process.pid, signal.SIGCONT)
    abort([frozen])
    configure(members, new_address())
    assert len(digests(members)) == 1


def test_a_configure_that_waits_for_a_killed_member_is_freed(
    members: list[Member], new_address: Callable[[], str]
) -> None:
    members[3].process.kill()
    members[3].process.wait()
    address = new_address()
    for rank, member in enumerate(members[:3]):
        member.tell(f"configure {address} {rank} 4")
    time.sleep(0.2)
    answers, took_s = abort(members[:3])
    assert answers == [{"error": "ProcessGroupAbortedError", "errored": "ProcessGroupAbortedError"}] * 3
    assert took_s < FREED_WITHIN_S
    configure(members[:3], new_address())
    assert len(digests(members[:3])) == 1
