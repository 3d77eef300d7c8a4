"""A run: the launcher's groups, killed as planned and told where to end. The launcher starts again what is killed.

It ends the launcher, which ends every process that it started, whatever happens. It trusts nobody to be alive: a group that
ends by itself, or does nothing for too long, ends the run with an error that names it and shows its last lines.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter, deque
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

import msgspec

from demo import events
from demo.chaos import PlannedKill, decide_kill, decide_stop_step
from demo.lines import LineReader
from demo.timeline import Kill, Life, Phase, Timeline, typical_step_s
from torchft_ckpt.launcher.agent import signal_at_parents_death

_NOTICE_STEPS = 20
_LOOK_EVERY_S = 0.02
_REFRESH_EVERY_S = 0.2
_NUM_LAST_LINES = 20
_END_PATIENCE_S = 5.0
_end_with_this_process = partial(signal_at_parents_death, signal.SIGTERM)


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
    lighthouse_port: int
    tokens: Path
    folder: Path
    slow_link: bool = False
    stop_step: int | None = None
    """The step after which all end; None: that is decided as the run goes on."""
    patience_s: float = 180.0

    @property
    def log(self) -> Path:
        """The file for what the launcher and its groups say."""
        return self.folder / "log.txt"

    @property
    def events(self) -> Path:
        """The folder for the events of the groups."""
        return self.folder / "events"

    @property
    def goodput(self) -> Path:
        """The folder for the library's own events: what time was spent on."""
        return self.folder / "goodput"

    @property
    def global_batch_size(self) -> int:
        """Samples in a step, of two microbatches for each group."""
        return self.num_groups * 2 * self.microbatch_size

    @property
    def microbatch_size(self) -> int:
        """Samples in a microbatch."""
        return 1 if self.slow_link else 6

    def command(self) -> list[str]:
        """Return the launcher's command line."""
        kills = Counter(kill.group for kill in self.plan)
        return [
            *(sys.executable, "-m", "torchft_ckpt", "run"),
            f"--groups={self.num_groups}",
            f"--min-replicas={max(1, self.num_groups - 1)}",  # one group may be missing at any time
            f"--restarts={max(kills.values(), default=0)}",
            f"--bind=127.0.0.1:{self.lighthouse_port}",
            "--",
            str(Path(__file__).resolve().parent),
            "worker",
            f"--events={self.events}",
            f"--tokens={self.tokens}",
            f"--min-replica-size={max(1, self.num_groups - 1)}",
            f"--global-batch-size={self.global_batch_size}",
            f"--microbatch-size={self.microbatch_size}",
            f"--seed={self.seed}",
            *(["--slow-link"] if self.slow_link else []),
        ]


class Supervisor:
    """One run, from the first process to the last; use it once."""

    def __init__(self, options: RunOptions, audience: Audience) -> None:
        self.timeline = Timeline(num_groups=options.num_groups, started_s=time.monotonic())
        self._options = options
        self._audience = audience
        self._readers: dict[int, LineReader[events.Event]] = {}
        self._victim: PlannedKill | None = None
        """The kill that is ordered, and whose group has not ended yet."""
        self._strike_at = self._refresh_at = 0.0
        self._num_ordered = 0
        self._stop_step = options.stop_step
        self._newest_step, self._news_s = -1, time.monotonic()

    def run(self) -> Timeline:
        """Run until every group has finished.

        Raises:
            RunFailedError: a group ended by itself, or nothing happened for `patience_s`.
        """
        options = self._options
        for folder in (options.events, options.goodput):
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
        if options.stop_step is not None:
            events.order_stop(options.events, options.stop_step)
        with options.log.open("wb") as log:
            launcher = subprocess.Popen(
                options.command(),
                env=os.environ | {"CUDA_VISIBLE_DEVICES": "", "TORCHFT_CKPT_EVENTS": str(options.goodput)},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # a terminal sends Ctrl-C to the demo alone
                preexec_fn=_end_with_this_process,
            )
        try:
            while (status := launcher.poll()) is None:
                time.sleep(_LOOK_EVERY_S)
                self._look()
            self._look()
            if status != 0:
                raise RunFailedError(f"the launcher ended with status {status}.{self._last_lines('')}")
        finally:
            _end(launcher)
        return self.timeline

    def _look(self) -> None:
        """Take in what happened, and do what follows from it."""
        for group in range(self._options.num_groups):
            self._read(group)
        self._strike()
        self._consider_kill()
        self._consider_stop()
        self._consider_giving_up()
        if (now := time.monotonic()) >= self._refresh_at:
            self._refresh_at = now + _REFRESH_EVERY_S
            self._audience.refresh(self.timeline)

    def _read(self, group: int) -> None:
        life = self.timeline.life_of(group)
        if life is not None:
            self._take(life)
            if life.ended_s is None and life.pid is not None and not _is_running(life.pid):
                self._take(life)  # what it said last
                life.ended_s = time.monotonic()
                was_killed = self._victim is not None and self._victim.group == group
                if was_killed:
                    self._victim = None
                elif life.finished is None:
                    raise RunFailedError(f"group_{group} ended by itself.{self._last_lines(f'[g{group}')}")
        number = 0 if life is None else life.number + 1
        reader = events.read_life(self._options.events, group, number)
        if reader is not None and (life is None or life.ended_s is not None):
            self._readers[group] = reader
            self.timeline.lives.append(Life(group=group, number=number, spawned_s=time.monotonic()))

    def _take(self, life: Life) -> None:
        """Record the new events of a life."""
        contributed_before = life.contributed_s is not None
        try:
            for event in self._readers[life.group].read_on():
                life.record(event)
        except msgspec.DecodeError as error:
            raise RunFailedError(f"group_{life.group} wrote a line that is no event: {error}") from error
        if life.contributed_s is not None and not contributed_before and life.imported_s is not None:
            start_s, join_s = life.imported_s - life.spawned_s, life.contributed_s - life.imported_s
            verb = "starts" if life.number == 0 else "is back:"
            times = f"start {start_s:.1f} s, join {join_s:.2f} s"
            self._audience.note(
                self.timeline, f"group_{life.group} {verb} contributing at step {life.last_step} ({times})"
            )

    def _consider_kill(self) -> None:
        if self._victim is not None:
            return
        self._victim = decide_kill(
            self._options.plan,
            num_done=self._num_ordered,
            contributing=self.timeline.contributing(),
            num_groups=self._options.num_groups,
        )
        if self._victim is not None:
            self._num_ordered += 1
            self._strike_at = time.monotonic() + self._victim.delay_steps * (typical_step_s(self.timeline) or 0.0)

    def _strike(self) -> None:
        """Kill the victim when its moment has come."""
        if self._victim is None or len(self.timeline.kills) == self._num_ordered or time.monotonic() < self._strike_at:
            return
        life = self.timeline.life_of(self._victim.group)
        if life is None or life.pid is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.kill(life.pid, signal.SIGKILL)
        self.timeline.kills.append(Kill(at_s=time.monotonic(), group=life.group, step=life.last_step))
        ordinal = f"{len(self.timeline.kills)} of {len(self._options.plan)}"
        self._audience.note(
            self.timeline, f"SIGKILL to group_{life.group} after step {life.last_step} (kill {ordinal})"
        )

    def _consider_stop(self) -> None:
        if self._stop_step is not None or self._victim or len(self.timeline.kills) < len(self._options.plan):
            return
        self._stop_step = decide_stop_step(
            num_steps=self._options.num_steps,
            contributing=self.timeline.contributing(),
            num_groups=self._options.num_groups,
            notice_steps=_NOTICE_STEPS,
        )
        if self._stop_step is not None:
            self._audience.note(self.timeline, f"every group contributes; all end after step {self._stop_step}")
            events.order_stop(self._options.events, self._stop_step)

    def _consider_giving_up(self) -> None:
        """Give up when there is no progress."""
        now, patience_s = time.monotonic(), self._options.patience_s
        lives = [
            life for group in range(self._options.num_groups) if (life := self.timeline.life_of(group)) is not None
        ]
        step = max((life.last_step for life in lives), default=0)
        if step > self._newest_step or any(life.phase is Phase.FINISHED for life in lives):
            self._newest_step = max(step, self._newest_step)
            self._news_s = max([self._news_s, *(life.last_event_s for life in lives)])
        if now - self._news_s > patience_s:
            raise RunFailedError(
                f"no group committed anything for {now - self._news_s:.0f} s after step {step}.{self._last_lines('')}"
            )
        for life in lives:
            if life.phase in (Phase.STARTING, Phase.JOINING) and now - life.spawned_s > 2 * patience_s:
                state = f"still {life.phase.value} after {now - life.spawned_s:.0f} s"
                raise RunFailedError(f"group_{life.group} is {state}.{self._last_lines(f'[g{life.group}')}")

    def _last_lines(self, beginning: str) -> str:
        """Return the last lines of the log that begin so."""
        with self._options.log.open(errors="replace") as log:
            lines = "".join(deque((line for line in log if line.startswith(beginning)), maxlen=_NUM_LAST_LINES))
        return f"\nIts last lines in {self._options.log}:\n{lines}"


def _is_running(pid: int) -> bool:
    """Return whether a process has not been killed or ended; the launcher's torchrun reaps those that have."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def _end(launcher: subprocess.Popen[bytes]) -> None:
    """End a launcher that runs: a first SIGTERM lets its groups end, a second one kills them."""
    for _ in range(2):
        if launcher.poll() is None:
            launcher.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                launcher.wait(_END_PATIENCE_S)
    launcher.kill()
    launcher.wait()
