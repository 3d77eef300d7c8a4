"""The processes of a run: starts the groups, kills them as planned, starts them again, tells them where to end.

It ends every process that it started, whatever happens, and touches no other. It trusts nobody to be alive: a group
that exits by itself, or does nothing for too long, ends the run with an error that names it and shows its last lines.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import time
from collections import deque
from collections.abc import Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import msgspec

from demo import events
from demo.chaos import PlannedKill, decide_kill, decide_stop_step
from demo.timeline import Kill, Life, Phase, Timeline, typical_step_s

_NOTICE_STEPS = 20
_WATCH_INTERVAL_S = 0.2
_NUM_LAST_LINES = 20


class RunFailedError(Exception):
    """The run cannot reach its end; the message names the group and what it said last."""


class Audience(Protocol):
    """Who is told what happens while it does."""

    def note(self, timeline: Timeline, text: str) -> None:
        """Something worth a line happened."""

    def refresh(self, timeline: Timeline) -> None:
        """Time has passed; called a few times a second."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunOptions:
    """What is to be run; `patience_s` is how long nothing may happen before the run is given up."""

    num_groups: int
    num_steps: int
    seed: int
    plan: tuple[PlannedKill, ...]
    lighthouse: str
    tokens: Path
    log_folder: Path
    slow_link: bool = False
    restart_delay_s: float = 1.0
    patience_s: float = 60.0

    @property
    def min_replica_size(self) -> int:
        """How many groups must be there for a commit: one may be missing at any time."""
        return max(1, self.num_groups - 1)

    def log_of(self, group: int) -> Path:
        """Where a group's standard error goes."""
        return self.log_folder / f"group_{group}.log"


class Supervisor:
    """One run, from the first process to the last; use it once, on one event loop."""

    def __init__(self, options: RunOptions, audience: Audience) -> None:
        self.timeline = Timeline(num_groups=options.num_groups, started_s=time.monotonic())
        self._options = options
        self._audience = audience
        self._job = f"demo-{os.getpid()}"
        self._processes: dict[int, asyncio.subprocess.Process] = {}
        self._victims: set[int] = set()  # groups whose death is ordered and has not been seen yet
        self._num_ordered = 0
        self._stop_step: int | None = None
        self._side_tasks: set[asyncio.Task[None]] = set()

    async def run(self) -> Timeline:
        """Run until every group has finished.

        Raises:
            RunFailedError: a group exited by itself, or nothing happened for `patience_s`.
        """
        groups = [self._start_task(self._keep_alive(group)) for group in range(self._options.num_groups)]
        watch = self._start_task(self._watch())
        try:
            running: set[asyncio.Task[None]] = set(groups)
            while running:
                done, _ = await asyncio.wait(running | self._side_tasks | {watch}, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()
                self._side_tasks -= done
                running -= done
        finally:
            for task in [*groups, *self._side_tasks, watch]:
                task.cancel()
            await asyncio.gather(*groups, *self._side_tasks, watch, return_exceptions=True)
            await self._end_processes()
        self._audience.refresh(self.timeline)
        return self.timeline

    def _start_task(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        return asyncio.get_running_loop().create_task(work)

    async def _keep_alive(self, group: int) -> None:
        """Live the lives of one group, one after the other, until one of them finishes."""
        self._options.log_of(group).write_bytes(b"")
        for number in range(len(self._options.plan) + 1):
            life = await self._live(group, number)
            if life.finished is not None:
                return
            await asyncio.sleep(self._options.restart_delay_s)

    async def _live(self, group: int, number: int) -> Life:
        """Run one process of a group to its end; raises if that was neither planned nor a finish."""
        with self._options.log_of(group).open("ab") as log:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                str(Path(__file__).resolve().parent),
                "worker",
                f"--group={group}",
                f"--life={number}",
                f"--lighthouse={self._options.lighthouse}",
                f"--tokens={self._options.tokens}",
                f"--min-replica-size={self._options.min_replica_size}",
                *(["--slow-link"] if self._options.slow_link else []),
                f"--seed={self._options.seed}",
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=log,
                start_new_session=True,
                env=os.environ | {"TORCHFT_CKPT_JOB": self._job},
            )
        self._processes[group] = process
        life = Life(group=group, number=number, spawned_s=time.monotonic())
        self.timeline.lives.append(life)
        if process.stdout is None:
            raise RunFailedError(f"group_{group} was started without a pipe")
        async for line in process.stdout:
            try:
                event = events.decode_event(line)
            except msgspec.DecodeError as error:
                raise RunFailedError(f"group_{group} sent {line!r}, which is no event: {error}") from error
            self._take(life, event)
        code = await process.wait()
        life.ended_s = time.monotonic()
        if life.finished is None and group not in self._victims:
            raise RunFailedError(f"group_{group} exited by itself with code {code}.{self._last_lines(group)}")
        self._victims.discard(group)
        return life

    def _take(self, life: Life, event: events.Event) -> None:
        """Record an event and do what follows from it."""
        contributed_before = life.contributed_s is not None
        life.record(event)
        if life.contributed_s is not None and not contributed_before and life.imported_s is not None:
            start_s, join_s = life.imported_s - life.spawned_s, life.contributed_s - life.imported_s
            verb = "starts" if life.number == 0 else "is back:"
            times = f"start {start_s:.1f} s, join {join_s:.2f} s"
            self._audience.note(
                self.timeline, f"group_{life.group} {verb} contributing at step {life.last_step} ({times})"
            )
        if isinstance(event, events.StopAccepted) and event.step >= event.stop_step:
            raise RunFailedError(
                f"group_{life.group} heard of the end at step {event.stop_step} only at step {event.step}"
            )
        if isinstance(event, events.StepEnded):
            self._consider_kill()
            self._consider_stop()

    def _consider_kill(self) -> None:
        kill = decide_kill(
            self._options.plan,
            num_done=self._num_ordered,
            contributing=self.timeline.contributing(),
            num_groups=self._options.num_groups,
        )
        if kill is not None and kill.group not in self._victims:
            self._num_ordered += 1
            self._victims.add(kill.group)
            self._side_tasks.add(self._start_task(self._strike(kill)))

    async def _strike(self, kill: PlannedKill) -> None:
        await asyncio.sleep(kill.delay_steps * (typical_step_s(self.timeline) or 0.0))
        self._processes[kill.group].kill()
        life = self.timeline.life_of(kill.group)
        step = life.last_step if life is not None else 0
        self.timeline.kills.append(Kill(at_s=time.monotonic(), group=kill.group, step=step))
        ordinal = f"{len(self.timeline.kills)} of {len(self._options.plan)}"
        self._audience.note(self.timeline, f"SIGKILL to group_{kill.group} after step {step} (kill {ordinal})")

    def _consider_stop(self) -> None:
        if self._stop_step is not None or self._victims or len(self.timeline.kills) < len(self._options.plan):
            return
        self._stop_step = decide_stop_step(
            num_steps=self._options.num_steps,
            contributing=self.timeline.contributing(),
            num_groups=self._options.num_groups,
            notice_steps=_NOTICE_STEPS,
        )
        if self._stop_step is not None:
            self._audience.note(self.timeline, f"every group contributes; all end after step {self._stop_step}")
            for process in self._processes.values():
                if process.stdin is not None:
                    process.stdin.write(events.encode_line(events.StopAt(stop_step=self._stop_step)))

    async def _watch(self) -> None:
        """Show progress, and give up when there is none."""
        newest, since_s = -1, time.monotonic()
        while True:
            await asyncio.sleep(_WATCH_INTERVAL_S)
            self._audience.refresh(self.timeline)
            now = time.monotonic()
            lives = [
                life for group in range(self._options.num_groups) if (life := self.timeline.life_of(group)) is not None
            ]
            step = max((life.last_step for life in lives), default=0)
            if step > newest or any(life.phase is Phase.FINISHED for life in lives):
                newest, since_s = max(step, newest), max(since_s, *(life.last_event_s for life in lives))
            if now - since_s > self._options.patience_s:
                raise RunFailedError(
                    f"no group committed anything for {now - since_s:.0f} s after step {step}.{self._all_last_lines()}"
                )
            for life in lives:
                if (
                    life.phase in (Phase.STARTING, Phase.JOINING)
                    and now - life.spawned_s > 2 * self._options.patience_s
                ):
                    state = f"still {life.phase.value} after {now - life.spawned_s:.0f} s"
                    raise RunFailedError(f"group_{life.group} is {state}.{self._last_lines(life.group)}")

    def _last_lines(self, group: int) -> str:
        path = self._options.log_of(group)
        with contextlib.suppress(FileNotFoundError), path.open(errors="replace") as log:
            lines = "".join(deque(log, maxlen=_NUM_LAST_LINES))
            return f"\nThe last lines of {path}:\n{lines}"
        return ""

    def _all_last_lines(self) -> str:
        return "".join(self._last_lines(group) for group in range(self._options.num_groups))

    async def _end_processes(self) -> None:
        """End what is alive: by closing its standard input, which a worker takes as the end, then by force."""
        alive = [process for process in self._processes.values() if process.returncode is None]
        for process in alive:
            if process.stdin is not None:
                process.stdin.close()
        for process in alive:
            try:
                await asyncio.wait_for(process.wait(), timeout=2.0)
            except asyncio.TimeoutError:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
                await process.wait()
