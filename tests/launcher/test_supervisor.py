"""The launcher's processes, with a small program for torchrun: restarts, output, signals, what a killed group leaves behind."""

from __future__ import annotations

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
from support.processes import start
from support.waiting import wait_until

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


def lives(pid: int) -> bool:
    with suppress(ProcessLookupError, FileNotFoundError):
        os.kill(pid, 0)
        return ") Z " not in Path(f"/proc/{pid}/stat").read_text()
    return False


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
        f"[g0] {options}",
        "[g0] 2 http://127.0.0.1:1 http://127.0.0.1:1 job 0",
        f"[g1] {options}",
        "[g1] 2 http://127.0.0.1:1 http://127.0.0.1:1 job 5",
    ]


def test_whole_lines_are_copied_and_those_of_ranks_keep_their_marks(launch: Any) -> None:
    launcher = launch(
        """
sys.stdout.write(f"[g{group}/r0] of a rank\\n" + 70_000 * group + "\\nhalf")
sys.stdout.flush()
time.sleep(0.05)
sys.stdout.write(" a line")
sys.stderr.write("an error\\n")
"""
    )
    status, out, errors = launcher.end()
    assert status == 0
    for group in "01":
        assert [line for line in out if line.startswith(f"[g{group}/")] == [f"[g{group}/r0] of a rank"]
        mine = [line.removeprefix(f"[g{group}] ") for line in out if line.startswith(f"[g{group}]")]
        assert "".join(mine[:-1]) == 70_000 * group
        assert mine[-1] == "half a line"
        assert f"[g{group}] an error" in errors


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


@pytest.mark.skipif(sys.platform != "linux", reason="orphans are found on Linux alone")
def test_a_killed_group_leaves_nothing_behind_and_no_other_group_is_touched(launch: Any) -> None:
    """As where torchrun itself is killed: its ranks are in sessions of their own, and keep its output open."""
    launcher = launch(
        """
if life == 0:
    rank = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(600)"], start_new_session=True)
    (folder / f"rank_{group}").write_text(str(rank.pid))
while not (folder / "life_1_1").exists():
    time.sleep(0.01)
while not (folder / "go").exists():
    time.sleep(0.01)
if life == 0:
    rank.kill()
""",
        restarts=1,
    )
    ranks = [launcher.pid_in(f"rank_{group}") for group in range(2)]
    os.kill(launcher.pid_in("life_1_0"), signal.SIGKILL)
    launcher.wait_for("life_1_1")
    assert [lives(rank) for rank in ranks] == [True, False]
    (launcher.folder / "go").touch()
    status, _, errors = launcher.end()
    assert status == 0
    assert "group 1 left processes behind (1); they were killed" in errors


def test_a_job_whose_output_nobody_reads_ends(launch: Any) -> None:
    """Standard output is buffered here, as it is for users: what could not be written is not tried again at the end."""
    launcher = launch("print(1, flush=True)\ntime.sleep(60)", end_patience_s=30.0)
    launcher.process.stdout.close()
    _, errors = launcher.process.communicate(timeout=200)
    assert launcher.process.returncode == 128 + signal.SIGPIPE
    assert "SIGPIPE: ending the groups that run" in errors


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


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no disk that is always full")
def test_a_job_whose_log_cannot_be_written_goes_on(launch: Any) -> None:
    with Path("/dev/full").open("w") as full:
        status, _, errors = launch("print(1, flush=True)", stdout=full).end()
    assert status == 0
    assert any("standard output cannot be written any more" in line for line in errors)


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
