"""One job from its first process to its last: a lighthouse, and replica groups that are killed and started again.

Each group's place in the network is a machine of its own, and has a launcher (`torchft-ckpt run`), which starts the group again.
This file decides when to kill, and nothing about training. A group that ends by itself, or a job in which nothing happens for
too long, ends the run with an error that names the group and shows its last lines.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from diloco.links import Network
from diloco.records import BEGIN, Finished, Reader, Record, Step, pid_file, sent_bytes
from torchft_ckpt.launcher.agent import signal_at_parents_death

_LOOK_EVERY_S = 0.05
_PATIENCE_S = 120.0
_LIGHTHOUSE_PORT = 29510
_LAST_KILL_AT = 0.9
_OVERDUE = 0.1
"""After so much more progress a kill is not put off any longer until all groups train; one other has to."""
_MANY_RESTARTS = 1000
_NUM_LAST_LINES = 15
_END_PATIENCE_S = 5.0
_end_with_this_process = partial(signal_at_parents_death, signal.SIGTERM)


class JobFailedError(Exception):
    """The job cannot reach its end; the message names the group and what it said last."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Kill:
    """A SIGKILL that was sent; `at_s` on the clock of the records."""

    at_s: float
    group: int


@dataclass(frozen=True, kw_only=True, slots=True)
class JobPlan:
    """What to run.

    Attributes:
        script: what a group runs, with `arguments`.
        num_planned: inner steps of all groups together, of which the records count the progress.
        kills: at which part of the progress (0 to 1) which group is killed, in order.
        kill_every_s: besides, kill the groups in turn, one every so many seconds of training; not near the end.
    """

    name: str
    script: Path
    arguments: Sequence[str]
    num_groups: int
    num_planned: int
    kills: Sequence[tuple[float, int]] = ()
    kill_every_s: float | None = None


@dataclass(kw_only=True, slots=True)
class JobRecord:
    """What happened.

    Attributes:
        records: of each group, of all its lives.
        sent_before: bytes that each group's interface had sent before the job.
        num_sharing: how many groups share one interface, so that each counts all of them.
    """

    name: str
    num_groups: int
    started_s: float
    records: list[list[Record]]
    kills: list[Kill] = field(default_factory=list)
    sent_before: int = 0
    num_sharing: int = 1

    def steps(self) -> list[tuple[int, Step]]:
        """Return all steps of all groups, in the order of time, each with its group."""
        steps = [(g, r) for g, records in enumerate(self.records) for r in records if isinstance(r, Step)]
        return sorted(steps, key=lambda of: of[1].at_s)

    def finished(self) -> list[Finished]:
        """Return the last records of the groups that have ended."""
        return [r for records in self.records for r in records if isinstance(r, Finished)]


def plan_kills(*, num_kills: int, num_groups: int, seed: int) -> list[tuple[float, int]]:
    """Return at which part of the progress which group is to be killed, for `JobPlan.kills`.

    One in each of as many stretches between 0.1 and 0.75, at a random place; every group once before one twice.
    """
    source = random.Random(seed)
    victims: list[int] = []
    while len(victims) < num_kills:
        victims += source.sample(range(num_groups), num_groups)
    stretch = 0.65 / max(num_kills, 1)
    return [(0.1 + stretch * (number + source.random()), victims[number]) for number in range(num_kills)]


class Job:
    """One job; use it once, in a `with` block, which ends every process.

    Args:
        plan: what to run.
        network: where.
        folder: for records and logs.
        say: prints a line.
    """

    def __init__(self, plan: JobPlan, network: Network, folder: Path, say: Callable[[str], None]) -> None:
        self._plan = plan
        self._network = network
        self._folder = folder
        self._say = say
        self._lighthouse: subprocess.Popen[str] | None = None
        self._address = ""
        self._launchers: dict[int, subprocess.Popen[bytes]] = {}
        self._killed: set[int] = set()
        """Process ids of ranks."""
        folder.mkdir(parents=True, exist_ok=True)
        self._readers = [Reader(self._records_of(group)) for group in range(plan.num_groups)]
        for group in range(plan.num_groups):
            pid_file(self._records_of(group)).unlink(missing_ok=True)
        self._begin_in = folder / f"{plan.name}_begin"
        shutil.rmtree(self._begin_in, ignore_errors=True)
        self._begin_in.mkdir()
        self._record = JobRecord(
            name=plan.name,
            num_groups=plan.num_groups,
            started_s=time.monotonic(),
            records=[reader.records for reader in self._readers],
            sent_before=sent_bytes(network.interface) if network.is_shared else 0,
            num_sharing=plan.num_groups if network.is_shared else 1,
        )

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *_: object) -> None:
        processes: list[subprocess.Popen[Any]] = [*self._launchers.values()]
        if self._lighthouse is not None:
            processes.append(self._lighthouse)
        for _ in range(2):  # at the second SIGTERM a launcher kills its group
            for process in processes:
                process.terminate()
            until = time.monotonic() + _END_PATIENCE_S
            for process in processes:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(max(until - time.monotonic(), 0.0))
        for process in processes:
            process.kill()
            process.wait()
        if self._lighthouse is not None and self._lighthouse.stdout is not None:
            self._lighthouse.stdout.close()

    def run(self) -> JobRecord:
        """Run until every group has ended.

        Raises:
            JobFailedError: a group ended by itself, or nothing happened for a long time.
        """
        self._start_lighthouse()
        for group in range(self._plan.num_groups):
            self._start(group)
        heard_s, said = time.monotonic(), 0.0
        while self._launchers:
            time.sleep(_LOOK_EVERY_S)
            now = time.monotonic()
            if any([reader.read_on() for reader in self._readers]):
                heard_s = now
            if now - heard_s > _PATIENCE_S:
                raise JobFailedError(
                    f"{self._plan.name}: nobody trained for {_PATIENCE_S:.0f} s.{self._all_last_lines()}"
                )
            self._let_begin()
            for group in list(self._launchers):
                self._see_end(group)
            self._consider_kill()
            if min(self._progress(), 1.0) - said >= 0.2:
                said = self._progress()
                self._say(f"{self._plan.name}: {said:.0%}")
        return self._record

    def _let_begin(self) -> None:
        """Let the groups train once all of them are ready."""
        begin = self._begin_in / BEGIN
        if not begin.exists() and len(list(self._begin_in.glob("ready_*"))) == self._plan.num_groups:
            begin.touch()

    def _start_lighthouse(self) -> None:
        network, hub = self._network, self._network.hub
        port = 0 if network.is_shared else _LIGHTHOUSE_PORT
        bind = ["--bind", f"{network.address(hub)}:{port}", "--hostname", network.address(hub)]
        command = [sys.executable, "-m", "torchft_ckpt", "lighthouse", *bind]
        # Where nobody is killed all begin together: a group that trains alone for a while sends nothing, and lowers the figure.
        least = max(1, self._plan.num_groups - bool(self._plan.kills))
        with (self._folder / f"{self._plan.name}_lighthouse.log").open("wb") as log:
            self._lighthouse = subprocess.Popen(
                [*network.inside(hub), *command, f"--min-replicas={least}"],
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                preexec_fn=_end_with_this_process,
            )
        said = self._lighthouse.stdout.readline() if self._lighthouse.stdout is not None else ""
        if not said.startswith("lighthouse at "):
            raise JobFailedError(f"the lighthouse did not start; see {log.name}")
        self._address = said.split()[-1]

    def _start(self, group: int) -> None:
        plan, network = self._plan, self._network
        launcher = [
            *(sys.executable, "-m", "torchft_ckpt", "run"),
            "--groups=1",
            f"--first-group={group}",
            f"--all-groups={plan.num_groups}",
            "--min-replicas=1",
            f"--restarts={_MANY_RESTARTS if plan.kill_every_s is not None else len(plan.kills)}",
            f"--lighthouse={self._address}",
            f"--job={plan.name}",
        ]
        script = [
            str(plan.script),
            *plan.arguments,
            f"--records={self._records_of(group)}",
            f"--interface={network.interface}",
            f"--end-with={plan.num_groups}",
            f"--begin-in={self._begin_in}",
        ]
        environment = {
            "TORCHFT_CKPT_HOSTNAME": network.address(group),
            "OMP_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "",
        }
        with self._log_of(group).open("wb") as log:
            self._launchers[group] = subprocess.Popen(
                [*network.inside(group), *launcher, "--", *script],
                env=os.environ | environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # a terminal sends Ctrl-C to this process alone
                preexec_fn=_end_with_this_process,
            )

    def _see_end(self, group: int) -> None:
        """Notice that a group has ended, or that its rank was killed by somebody else."""
        status = self._launchers[group].poll()
        if status == 0:
            del self._launchers[group]
        elif status is not None or self._has_ended_by_itself(group):
            raise JobFailedError(f"{self._plan.name}: group {group} ended by itself.{self._last_lines(group)}")

    def _has_ended_by_itself(self, group: int) -> bool:
        pid = self._pid_of(group)
        if pid is None or pid in self._killed:
            return False
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            self._readers[group].read_on()
            return not any(isinstance(record, Finished) for record in self._readers[group].records[-1:])
        return False

    def _pid_of(self, group: int) -> int | None:
        """Return the process id of a group's rank; None before it has started."""
        try:
            return int(pid_file(self._records_of(group)).read_text())
        except FileNotFoundError:
            return None

    def _consider_kill(self) -> None:
        wanted, is_overdue = self._next_kill()
        least = 2 if is_overdue else self._plan.num_groups
        training = self._training_with(least)
        if wanted is None or len(training) < least:
            return
        group = wanted if wanted in training else training[0]
        pid = self._pid_of(group)
        if pid is None:
            return
        self._killed.add(pid)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        self._record.kills.append(Kill(at_s=time.monotonic(), group=group))
        self._say(f"{self._plan.name}: SIGKILL to group {group}")

    def _next_kill(self) -> tuple[int | None, bool]:
        """Return the group that is to be killed now, if it is time, and whether not to wait until all groups train."""
        number, progress = len(self._record.kills), self._progress()
        if self._plan.kill_every_s is not None:
            began_s = min((reader.records[0].at_s for reader in self._readers if reader.records), default=None)
            is_due = began_s is not None and time.monotonic() > began_s + self._plan.kill_every_s * (number + 1)
            return number % self._plan.num_groups if is_due and progress < _LAST_KILL_AT else None, False
        for at, group in self._plan.kills[number : number + 1]:
            if progress >= at:
                return group, progress >= at + _OVERDUE
        return None, False

    def _progress(self) -> float:
        latest = [reader.records[-1].num_counted for reader in self._readers if reader.records]
        return max(latest, default=0) / self._plan.num_planned

    def _training_with(self, least: int) -> list[int]:
        """Return the groups whose last round, in their present life, was one of at least so many groups."""
        since = {kill.group: kill.at_s for kill in self._record.kills}
        latest = {group: reader.records[-1] for group, reader in enumerate(self._readers) if reader.records}
        return [
            group
            for group, record in latest.items()
            if group in self._launchers
            and isinstance(record, Step)
            and record.at_s > since.get(group, 0.0)
            and record.participants >= least
        ]

    def _records_of(self, group: int) -> Path:
        return self._folder / f"{self._plan.name}_{group}.jsonl"

    def _log_of(self, group: int) -> Path:
        return self._folder / f"{self._plan.name}_{group}.log"

    def _last_lines(self, group: int) -> str:
        lines = self._log_of(group).read_text(errors="replace").splitlines()[-_NUM_LAST_LINES:]
        return "\n".join([f"\nThe last lines of {self._log_of(group)}:", *lines])

    def _all_last_lines(self) -> str:
        return "".join(self._last_lines(group) for group in range(self._plan.num_groups))
