"""A lighthouse, and replica groups that each run one script of a framework as its user starts it; one is killed and comes back.

    with FrameworkJob(tmp_path, SCRIPT, "--steps=30") as job:
        first, second = job.start(0), job.start(1)
        second.wait_for_step(8)
        second.kill()
        again = job.start(1)
        assert_equal_states(first.end(), again.end())

A script logs at INFO, so that the Manager's line of each step is in its output, and prints its state at the end by
`fingerprints.print_state`.
"""

from __future__ import annotations

import json
import os
import re
import signal
from contextlib import ExitStack, suppress
from pathlib import Path
from types import TracebackType
from typing import Any

import torch.distributed.run
from fingerprints import MARK
from support.launched import REPO, fork_into
from support.waiting import wait_until

from torchft_ckpt import LighthouseServer
from torchft_ckpt.core.coordination.messages import group_name

TORCHRUN = Path(torch.distributed.run.__file__)
_STEP = re.compile(r"step=(\d+) quorum=\d+ participants=(\d+)/\d+ verdict=(\S+) heal=(\S+)")
WARM = "verdict=left_behind"
"""A group that comes in says so when its first iteration is over, which it computes alone."""
State = dict[str, Any]


class Group:
    """One run of a replica group's script. Its output, that of all its ranks, is in `log_path`."""

    def __init__(
        self, log_path: Path, script: Path, arguments: list[str], environment: dict[str, str], number: int = 0
    ) -> None:
        self.log_path, self.number = log_path, number
        self.process = fork_into(log_path, script, *arguments, **environment)

    def log(self) -> str:
        """Return what it has said so far."""
        return self.log_path.read_text(errors="replace")

    def steps(self, verdict: str = "commit") -> list[tuple[int, int]]:
        """Return (committed steps before it, participants) of each step that ended so, in order, of all ranks."""
        return [(int(step), int(num)) for step, num, how, _ in _STEP.findall(self.log()) if how == verdict]

    def wait_for(self, pattern: str, timeout_s: float = 240.0) -> None:
        """Return once its output has a match; the test fails where it ends before, or takes longer."""

        def is_there() -> bool:
            found = re.search(pattern, self.log(), re.MULTILINE) is not None
            assert found or self.process.poll() is None, f"{self.log_path.name} ended without {pattern!r}"
            return found

        wait_until(is_there, f"{pattern!r} in {self.log_path.name}", timeout_s)

    def wait_for_step(self, step: int, *, participants: int | None = None, timeout_s: float = 240.0) -> None:
        """Return once it has committed `step` steps of the job or more, the last one with so many groups, if that is given."""

        def is_there() -> bool:
            found = any(at + 1 >= step and participants in (None, num) for at, num in self.steps())
            assert found or self.process.poll() is None, f"{self.log_path.name} ended before step {step}"
            return found

        wait_until(is_there, f"a committed step {step} in {self.log_path.name}", timeout_s)

    def kill(self) -> None:
        """SIGKILL the script and whatever it has started, torchrun's ranks say."""
        assert self.process.poll() is None, f"{self.log_path.name} has ended before it was killed"
        self.close()

    def end(self, timeout_s: float = 240.0) -> State:
        """Wait until it has ended well; return what it printed by `print_state`, of its first rank to do so."""
        code = self.process.wait(timeout=timeout_s)
        assert code == 0, f"{self.log_path.name} ended with {code}"
        return self.states()[0]

    def states(self) -> list[State]:
        """Return what its ranks printed by `print_state`, in the order in which they did. torchrun may put a prefix before it."""
        lines = [line.partition(MARK)[2] for line in self.log().splitlines() if MARK in line]
        assert lines, f"{self.log_path.name} printed no state"
        return [json.loads(line) for line in lines]

    def close(self) -> None:
        """End it at once, where it still runs, with all that it has started."""
        if self.process.poll() is None:
            for pid in [self.process.pid, *_descendants(self.process.pid)]:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self.process.wait(timeout=30)


class FrameworkJob:
    """A lighthouse, and groups that run `script` with `arguments`; ends what still runs at its end.

    Args:
        folder: for the logs, `group_0.log` and, of its second run, `group_0.2.log`.
        script: of a replica group.
        arguments: of each group's script. `{group}` in one is the group's number.
        num_groups: said to the scripts as `NUM_REPLICA_GROUPS`.
        min_replicas: of the lighthouse, and so `join_timeout_ms`.
        nproc: ranks of a group, which torchrun starts; None: without torchrun, one process.
        by: a module that runs the script, for torchrun.
        environment: further variables of the groups.
    """

    def __init__(
        self,
        folder: Path,
        script: Path,
        *arguments: str,
        num_groups: int = 2,
        min_replicas: int = 1,
        join_timeout_ms: int = 60_000,
        nproc: int | None = None,
        by: str | None = None,
        environment: dict[str, str] | None = None,
    ) -> None:
        self._folder, self._script, self._arguments, self._nproc, self._by = folder, script, arguments, nproc, by
        self._num_started: dict[int, int] = {}
        self._stack = ExitStack()
        self.lighthouse = LighthouseServer(
            bind="127.0.0.1:0", min_replicas=min_replicas, join_timeout_ms=join_timeout_ms
        )
        self._stack.callback(self.lighthouse.shutdown)
        self._environment = {
            "TORCHFT_LIGHTHOUSE": self.lighthouse.address(),
            "NUM_REPLICA_GROUPS": str(num_groups),
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": f"{REPO}{os.pathsep}{Path(__file__).parent}",
            "PYTHONUNBUFFERED": "1",
            # What a framework would look for on a network is not there.
            "HF_HUB_OFFLINE": "1",
            **(environment or {}),
        }

    def wait_until_asks(self, run: Group, timeout_s: float = 240.0) -> None:
        """Return once a group has computed its first iteration, alone, and asks for a quorum: it is about to come in."""
        run.wait_for(WARM, timeout_s)
        wait_until(lambda: self.asks(run), f"{run.log_path.name} asks for a quorum", timeout_s)

    def wait_until_met(self, *runs: Group, timeout_s: float = 240.0) -> None:
        """Return once each of these has made a step, or those who have let it in as they make the next one."""

        def is_in(run: Group) -> bool:
            assert run.process.poll() is None, f"{run.log_path.name} has ended"
            return bool(run.steps()) or (bool(run.steps("left_behind")) and self.asks(run))

        wait_until(lambda: all(map(is_in, runs)), "the groups train together", timeout_s)

    def asks(self, run: Group) -> bool:
        """Whether all ranks of a group wait for a quorum."""
        jobs = [*self.lighthouse._jobs.states.values()]
        return any(group_name(name).endswith(f"_{run.number}") for job in jobs for name in [*job._job.waiting])

    def start(self, group: int, *arguments: str) -> Group:
        """Start a group, or start it again, with further arguments."""
        number = self._num_started[group] = self._num_started.get(group, 0) + 1
        log_path = self._folder / (f"group_{group}.log" if number == 1 else f"group_{group}.{number}.log")
        given = [argument.replace("{group}", str(group)) for argument in (*self._arguments, *arguments)]
        script = self._script
        if self._nproc is not None:
            run = ["-m", self._by, str(script)] if self._by else [str(script)]
            given = ["--standalone", "--nnodes=1", f"--nproc-per-node={self._nproc}", *run, *given]
            script = TORCHRUN
        started = Group(log_path, script, given, {**self._environment, "REPLICA_GROUP_ID": str(group)}, group)
        self._stack.callback(started.close)
        return started

    def __enter__(self) -> FrameworkJob:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._stack.close()


def assert_equal_states(*states: State) -> None:
    """The test fails where states differ, and says in which step, tensor or value."""
    first, *others = states
    assert others and first["values"], "there is nothing to compare"
    for other in others:
        assert other["step"] == first["step"]
        mine, theirs = first["values"], other["values"]
        different = {
            path: (mine.get(path), theirs.get(path))
            for path in sorted({*mine, *theirs})
            if mine.get(path) != theirs.get(path)
        }
        assert different == {}


def _descendants(pid: int) -> list[int]:
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has ended meanwhile
            parent = int(stat.read_text(errors="replace").rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(stat.parent.name))
    found = [pid]
    for one in found:
        found += children.get(one, [])
    return found[1:]
