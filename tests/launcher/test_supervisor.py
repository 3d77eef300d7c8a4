"""The launcher's processes, with a small program for torchrun: restarts, signals, status; and how torchrun's lines are marked."""

from __future__ import annotations

import io
import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from support.processes import lives, start
from support.waiting import wait_until

from torchft_ckpt.launcher import agent

LAUNCHER = Path(__file__).parents[1] / "support" / "launched_groups.py"

HEAD = """
import os, signal, subprocess, sys, time
from pathlib import Path
group, folder = os.environ["REPLICA_GROUP_ID"], Path(sys.argv[0]).parent
life = len(list(folder.glob(f"life_{group}_*")))
(folder / f"life_{group}_{life}").write_text(str(os.getpid()))
"""

ENVIRONMENT = {"TORCHFT_CKPT_LIGHTHOUSE": "of-another-job:1", "TORCHFT_LIGHTHOUSE": "of-another-job:2"}

pytestmark = pytest.mark.processes


class Launcher:
    """A launcher that runs, and what it and its groups wrote."""

    def __init__(self, folder: Path, program: str, settings: dict[str, Any], stdout: Any, stderr: Any) -> None:
        self.folder = folder
        (folder / "program.py").write_text(HEAD + program)
        given = {"folder": str(folder / "logs"), "program": str(folder / "program.py"), **settings}
        self.process = start(
            [sys.executable, str(LAUNCHER), json.dumps(given)],
            stdout=stdout,
            stderr=stderr,
            text=True,
            env={name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"} | ENVIRONMENT,
        )

    def end(self) -> tuple[int, list[str], list[str]]:
        """Wait for its end; return its status and the lines of its output and errors."""
        out, errors = self.process.communicate(timeout=200)
        return self.process.returncode, (out or "").splitlines(), (errors or "").splitlines()

    def wait_for(self, *files: str) -> None:
        wait_until(lambda: all((self.folder / name).exists() for name in files), f"files {files}")

    def pid_in(self, file: str) -> int:
        wait_until(lambda: bool((self.folder / file).exists() and (self.folder / file).read_text()), file)
        return int((self.folder / file).read_text())


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Any]:
    launchers: list[Launcher] = []

    def begin(
        program: str,
        *,
        num_groups: int = 2,
        least: int = 1,
        restarts: int = 0,
        left_status: int = 0,
        stdout: Any = subprocess.PIPE,
        stderr: Any = subprocess.PIPE,
        **settings: Any,
    ) -> Launcher:
        plan = {"num_groups": num_groups, "num_all_groups": num_groups, "min_replicas": least, "max_restarts": restarts}
        plan["left_status"] = left_status
        launchers.append(Launcher(tmp_path, program, {"plan": plan, **settings}, stdout, stderr))
        return launchers[-1]

    yield begin
    for launcher in launchers:
        launcher.process.kill()
        launcher.process.wait()
        for life in tmp_path.glob("life_*"):  # where the test failed
            with suppress(ProcessLookupError, ValueError):
                os.kill(int(life.read_text()), signal.SIGKILL)


def test_a_group_that_fails_starts_again_alone_and_all_end_well(launch: Any) -> None:
    launcher = launch("sys.exit(3 if (group, life) == ('1', 0) else 0)", restarts=1)
    status, _, errors = launcher.end()
    assert status == 0
    assert sorted(path.name for path in launcher.folder.glob("life_*")) == ["life_0_0", "life_1_0", "life_1_1"]
    assert "group 1 ended with status 3; it starts again in 1 s (restarts left after that: 0)" in errors


def test_each_group_hears_of_its_place_in_the_job(launch: Any) -> None:
    launcher = launch(
        """
names = "NUM_REPLICA_GROUPS", "TORCHFT_LIGHTHOUSE", "TORCHFT_CKPT_LIGHTHOUSE", "TORCHFT_CKPT_JOB", "CUDA_VISIBLE_DEVICES"
print(*(os.environ[name] for name in names))
print(*sys.argv[1:-3], *sys.argv[-2:])
""",
        devices=["0", "5"],
    )
    status, out, _ = launcher.end()
    assert status == 0
    options = "--standalone --nnodes=1 --nproc-per-node=1 --max-restarts=0 --tee=3 train.py --option"
    assert sorted(out) == [
        options,
        options,
        "2 http://127.0.0.1:1 http://127.0.0.1:1 job 0",
        "2 http://127.0.0.1:1 http://127.0.0.1:1 job 5",
    ]


def test_the_others_end_where_too_few_are_left(launch: Any) -> None:
    launcher = launch(
        """
if group == "0":
    while not (folder / "life_1_0").exists():
        time.sleep(0.01)
    sys.exit(7)
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
time.sleep(60)
""",
        least=2,
    )
    status, _, errors = launcher.end()
    assert status == 7
    assert "group 0 ended with status 7 and has no restart left: groups left 1, needed 2; ending the others" in errors


def test_a_signal_ends_all_groups_and_those_that_stay_are_killed(launch: Any) -> None:
    launcher = launch(
        """
if group == "0":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
else:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
(folder / f"ready_{group}").touch()
time.sleep(60)
""",
        restarts=3,
        end_patience_s=6.0,
    )
    launcher.wait_for("ready_0", "ready_1")
    launcher.process.send_signal(signal.SIGINT)
    status, _, errors = launcher.end()
    assert status == 130
    assert "group 0 has left, or has finished" in errors
    assert "group 1 was ended (status 137)" in errors
    assert not lives(launcher.pid_in("life_1_0"))


def test_a_launcher_whose_groups_leave_says_so_by_its_status(launch: Any) -> None:
    """As where a node is drained: the cluster has to see that the work is not done."""
    launcher = launch(
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))\n(folder / f'ready_{group}').touch()\ntime.sleep(60)",
        left_status=75,
    )
    launcher.wait_for("ready_0", "ready_1")
    launcher.process.send_signal(signal.SIGTERM)
    assert launcher.end()[0] == 75


def test_a_second_signal_kills_at_once(launch: Any) -> None:
    launcher = launch(
        "signal.signal(signal.SIGTERM, lambda *_: (folder / f'asked_{group}').touch())\n"
        "(folder / f'ready_{group}').touch()\n"
        "while True: time.sleep(1)"
    )
    launcher.wait_for("ready_0", "ready_1")
    launcher.process.send_signal(signal.SIGTERM)
    launcher.wait_for("asked_0", "asked_1")
    launcher.process.send_signal(signal.SIGTERM)
    status, _, errors = launcher.end()
    assert status == 143
    assert "SIGTERM: killing the groups that still run" in errors


def test_a_signal_ends_a_job_whose_reader_reads_nothing(launch: Any) -> None:
    """As in `run | less`."""
    readable, writable = os.pipe()
    try:
        launcher = launch(
            """
(folder / f"ready_{group}").touch()
while True: os.write(1, (b"x" * 99 + b"\\n") * 100)
""",
            stdout=writable,
        )
        wait_until(lambda: not select.select([], [writable], [], 0)[1], "the pipe is full")
        launcher.wait_for("ready_0", "ready_1")
        launcher.process.send_signal(signal.SIGINT)
        assert launcher.end()[0] == 130
    finally:
        os.close(readable)
        os.close(writable)


def test_a_job_that_ignores_the_end_of_its_terminal_goes_on(launch: Any) -> None:
    """As under nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        launcher = launch("(folder / f'ready_{group}').touch()\nwhile not (folder / 'go').exists(): time.sleep(0.01)")
    finally:
        signal.signal(signal.SIGHUP, before)
    launcher.wait_for("ready_0", "ready_1")
    launcher.process.send_signal(signal.SIGHUP)
    (launcher.folder / "go").touch()
    assert launcher.end()[0] == 0


def test_lines_of_torchrun_itself_get_the_mark_of_the_group_and_those_of_ranks_keep_theirs() -> None:
    said = io.StringIO()
    stream = agent._Marked(said, "1")
    for text in ("W torchrun\n", "[g1/r0] of a\f\u2028rank\n", "half", "", " a line\nand a whole one\n", "\n"):
        assert stream.write(text) == len(text)
    stream.flush()
    assert said.getvalue().split("\n") == [
        "[g1] W torchrun",
        "[g1/r0] of a\f\u2028rank",
        "[g1] half a line",
        "[g1] and a whole one",
        "[g1] ",
        "",
    ]
