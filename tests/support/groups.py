"""Real replica groups and a real lighthouse as processes, to be killed, stopped and started by tests."""

from __future__ import annotations

import itertools
import json
import os
import queue
import re
import select
import signal
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from support.nursery import Forked
from support.ports import reserved_port
from support.processes import note
from support.waiting import wait_until

TRAINER = "trainer.py"


class Rank:
    """One process of a replica group; its reports are collected on a thread."""

    def __init__(self, options: dict[str, Any], environment: dict[str, str], log: Path, trainer: str) -> None:
        self.name = f"{options['replica_id']}/{environment.get('RANK', '0')}"
        self.events: list[dict[str, Any]] = []
        self._news: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self._reading = threading.Lock()
        """Held from the moment in which something is read until it is in `events`."""
        self.log_path = log
        script = Path(__file__).with_name(trainer)
        path = os.pathsep.join([str(script.parents[1]), os.environ.get("PYTHONPATH", "")])
        variables = {**os.environ, "PYTHONPATH": path, **environment}
        with log.open("ab") as stderr:
            self.process = Forked(script, [json.dumps(options)], variables, stderr.fileno())
        note(f"rank {self.name}", self.process, lambda: f"{self.log()}\nlast events: {self.events[-3:]}")
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        rest, data = b"", b"\n"
        while data:
            self._has_said()
            with self._reading:
                data = os.read(self.process.stdout.fileno(), 1 << 16)
                *lines, rest = (rest + data).split(b"\n")
                for line in lines:
                    event = json.loads(line)
                    self.events.append(event)
                    self._news.put(event)
        self._news.put(None)

    def _has_said(self, wait_ms: int | None = None) -> bool:
        """Whether there is something to read."""
        said = select.poll()
        said.register(self.process.stdout, select.POLLIN)
        return bool(said.poll(wait_ms))

    def is_still(self) -> bool:
        """Whether it has ended; or is stopped, and all that it has said is in `events`."""
        try:
            state = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(") ")[2][0]
        except OSError:  # it is gone
            state = "X"
        with self._reading:
            return state in "ZX" or (state == "T" and not self._has_said(0))

    def wait_for(self, condition: Callable[[dict[str, Any]], bool], timeout_s: float = 240.0) -> dict[str, Any]:
        """Return the first event, of those not waited for yet, that fulfils the condition."""
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                event = self._news.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                raise AssertionError(f"{self.name}: nothing of that kind within {timeout_s} s\n{self.log()}") from None
            if event is None:
                raise AssertionError(f"{self.name} ended with {self.process.wait()}\n{self.log()}")
            if condition(event):
                return event

    def wait_for_step(self, step: int, timeout_s: float = 240.0) -> dict[str, Any]:
        return self.wait_for(lambda e: e["event"] == "step" and e["committed"] and e["step"] >= step, timeout_s)

    def wait_for_event(self, name: str, timeout_s: float = 240.0) -> dict[str, Any]:
        return self.wait_for(lambda e: e["event"] == name, timeout_s)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def signal(self, number: signal.Signals) -> None:
        os.kill(self.process.pid, number)

    def end(self, timeout_s: float = 240.0) -> int:
        code = self.process.wait(timeout_s)
        self._reader.join(30)
        return code

    def steps(self, since: float = 0.0) -> list[dict[str, Any]]:
        return [e for e in self.events if e["event"] == "step" and e["t"] >= since]

    def done(self) -> dict[str, Any]:
        found = [e for e in self.events if e["event"] == "done"]
        assert found, f"{self.name} did not finish\n{self.log()}"
        return found[0]

    def log(self) -> str:
        return self.log_path.read_text()[-4000:]


def all_reach(ranks: Iterable[Rank], step: int, timeout_s: float = 120.0) -> None:
    for rank in ranks:
        rank.wait_for_step(step, timeout_s)


class Job:
    """Groups that train together, in one directory."""

    def __init__(self, directory: Path, lighthouse: str, trainer: str = TRAINER, **options: Any) -> None:
        self.directory = directory
        self._trainer = trainer
        self.lighthouse = lighthouse
        self.options = options
        self.ranks: list[Rank] = []
        self._num_started = 0
        self._ports = ExitStack()

    def start(
        self, name: str, *, ranks: int = 1, environment: dict[str, str] | None = None, **options: Any
    ) -> list[Rank]:
        """Start a replica group; returns its ranks."""
        control = self.control(name)
        control.mkdir(exist_ok=True)
        self._num_started += 1
        stop = self.directory / "stop"
        if stop.exists():
            (control / "stop").write_text(stop.read_text())
        port = str(self._ports.enter_context(reserved_port()))  # rank 0 hosts the group's store there
        started = []
        for rank in range(ranks):
            settings = {
                "replica_id": name,
                "lighthouse": self.lighthouse,
                "control": str(control),
                "seed": 100 * self._num_started + rank,
                **self.options,
                **options,
            }
            variables = {"RANK": str(rank), "WORLD_SIZE": str(ranks)}
            if ranks > 1:
                variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            log = self.directory / f"{name}-{rank}.log"
            started.append(Rank(settings, {**variables, **(environment or {})}, log, self._trainer))
        self.ranks.extend(started)
        return started

    def start_groups(self, num: int, *, until: int) -> list[Rank]:
        """Start so many groups of one rank; return these when all have made so many steps."""
        groups = [self.start(f"group_{i}")[0] for i in range(num)]
        all_reach(groups, until)
        return groups

    def control(self, name: str) -> Path:
        return self.directory / name

    def stop_at(self, step: int) -> None:
        """Tell all groups, those started later as well, to end at a step. It has to lie ahead of all of them."""
        (self.directory / "stop").write_text(str(step))
        for control in self.directory.iterdir():
            if control.is_dir():
                self._tell(control, "stop", step)

    def pause(self, name: str, seconds: float) -> None:
        """Have each further step of a group take so long, instead of `pause_s`."""
        self._tell(self.control(name), "pause", seconds)

    @staticmethod
    def _tell(control: Path, what: str, value: float) -> None:
        new = control / f"{what}.new"
        new.write_text(str(value))
        new.rename(control / what)  # nobody reads half of it

    def stop_soon(self, ahead: int) -> int:
        """Tell all groups to end so many steps on, two at least; return at which. It lies ahead: they stand still meanwhile."""
        living = [rank for rank in self.ranks if rank.process.poll() is None]
        for rank in living:
            rank.process.send_signal(signal.SIGSTOP)
        try:
            wait_until(lambda: all(rank.is_still() for rank in living), "all ranks stand still")
            step: int = max((e["step"] for rank in living for e in rank.steps()), default=0) + ahead
            self.stop_at(step)
        finally:
            for rank in living:
                rank.process.send_signal(signal.SIGCONT)
        return step

    def finish(self, ahead: int = 15) -> list[dict[str, Any]]:
        """End all living groups at one step; return their last reports."""
        living = [rank for rank in self.ranks if rank.process.poll() is None]
        self.stop_soon(ahead)
        for rank in living:
            assert rank.end() == 0, f"{rank.name} failed\n{rank.log()}"
        return [rank.done() for rank in living]

    def close(self) -> None:
        for rank in self.ranks:
            if rank.process.poll() is None:
                rank.process.kill()
            rank.process.wait()
        self._ports.close()


class LighthouseProcess:
    """The command `lighthouse` as a process, at a port that stays its own when it is dead.

    Deaths are known from connections: a group that a busy machine holds up for seconds is not taken for dead.
    """

    def __init__(self, *, min_replicas: int = 2, heartbeat_timeout_ms: int = 10_000) -> None:
        self.options = ["--min-replicas", str(min_replicas), "--heartbeat-timeout-ms", str(heartbeat_timeout_ms)]
        reserved = ExitStack()
        self.port = reserved.enter_context(reserved_port())
        weakref.finalize(self, reserved.close)
        self._start()

    def _start(self) -> None:
        errors, writable = os.pipe()
        arguments = ["lighthouse", *self.options, "--bind", f"127.0.0.1:{self.port}"]
        try:
            self.process = Forked(Path(__file__).with_name("command_line.py"), arguments, dict(os.environ), writable)
        finally:
            os.close(writable)
        line = self.process.stdout.readline()
        match = re.search(r"https?://([\d.]+):(\d+)", line)
        assert match, f"lighthouse did not start: {line!r}"
        self.address = f"{match[1]}:{match[2]}"
        self.log: list[str] = []
        note("lighthouse", self.process, lambda: "".join(self.log))
        self._reader = threading.Thread(target=self._read, args=(errors,), daemon=True)
        self._reader.start()

    def _read(self, errors: int) -> None:
        with os.fdopen(errors) as lines:
            self.log.extend(lines)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def restart(self) -> None:
        self._start()


@contextmanager
def running_job(directory: Path, *, lighthouse: LighthouseProcess | None = None, **options: Any) -> Iterator[Job]:
    """A job with a directory and a lighthouse of its own; everything that was started is ended."""
    directory.mkdir(exist_ok=True)
    own = lighthouse or LighthouseProcess()
    job = Job(directory, own.address, **options)
    try:
        yield job
    finally:
        job.close()
        own.kill()


def discards_in_a_row(steps: list[dict[str, Any]]) -> int:
    longest = run = 0
    for step in steps:
        run = run + 1 if not step["committed"] else 0
        longest = max(longest, run)
    return longest


def longest_gap_s(steps: list[dict[str, Any]]) -> float:
    times = [step["t"] for step in steps if step["committed"]]
    return max((b - a for a, b in itertools.pairwise(times)), default=0.0)
