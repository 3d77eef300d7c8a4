"""Starts a job's replica groups on this machine, each by torchrun; starts again what fails; ends everything that it started."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from torchft_ckpt import config
from torchft_ckpt.core.services.launching import LaunchedJob, LaunchPlan, shell_status
from torchft_ckpt.launcher.agent import LAUNCHER

END_PATIENCE_S = 30.0
"""The time that a group may take to end after SIGTERM."""

_TORCHRUN = (sys.executable, "-m", "torchft_ckpt.launcher.agent")

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Launch:
    """The settings of a run.

    Args:
        command: the training script and its arguments, as torchrun takes them.
        log_folder: where torchrun keeps what each rank says, a folder for each group.
        devices: names of this machine's GPUs; none for training on the CPU.
        torchrun: the command that runs a group; it takes torchrun's options, and `command` behind them.
        end_patience_s: after how long a group that was sent SIGTERM is killed.
    """

    plan: LaunchPlan
    command: Sequence[str]
    lighthouse: str
    job: str
    log_folder: Path
    devices: Sequence[str] = ()
    torchrun: Sequence[str] = _TORCHRUN
    end_patience_s: float = END_PATIENCE_S


class Supervisor:
    """One job, from its first process to its last. Use it once, from the main thread: it takes SIGINT, SIGTERM and SIGHUP."""

    def __init__(self, launch: Launch) -> None:
        self._launch = launch
        self._job = LaunchedJob(launch.plan)
        self._processes: dict[int, asyncio.subprocess.Process] = {}
        """Of the groups that run: their torchruns."""
        self._waiting: dict[int, asyncio.Task[None]] = {}
        self._has_news = asyncio.Event()
        self._kill_at: float | None = None

    async def run(self) -> int:
        """Run until no group runs and none will; return the exit status."""
        loop = asyncio.get_running_loop()
        numbers = [signal.SIGINT, signal.SIGTERM]
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # nohup has the job outlive its terminal
            numbers.append(signal.SIGHUP)
        for number in numbers:
            loop.add_signal_handler(number, self._interrupt, number)
        try:
            while True:
                for group in self._job.to_start(time.monotonic()):
                    await self._start(group)
                self._end_what_has_to_end()
                if self._job.is_over:
                    return self._job.exit_status
                await self._wait()
                for task in self._waiting.values():
                    if task.done():
                        task.result()
        finally:
            for group in list(self._processes):
                self._kill(group)
            await asyncio.gather(*self._waiting.values(), return_exceptions=True)
            for number in numbers:
                loop.remove_signal_handler(number)

    def _interrupt(self, number: signal.Signals) -> None:
        """End all groups; at once, if they are asked to end already."""
        if self._job.is_stopping:
            _log.warning("%s: killing the groups that still run", number.name)
            self._kill_at = time.monotonic()
        else:
            _log.warning(
                "%s: ending the groups that run; they have %g s, and a second signal kills them",
                number.name,
                self._launch.end_patience_s,
            )
        self._job.stop(128 + number)
        self._has_news.set()

    def _end_what_has_to_end(self) -> None:
        if not self._job.is_stopping:
            return
        now = time.monotonic()
        if self._kill_at is None:
            self._kill_at = now + self._launch.end_patience_s
            for process in self._processes.values():
                with contextlib.suppress(ProcessLookupError):
                    process.terminate()
        elif now >= self._kill_at:
            self._kill_at = math.inf
            for group in self._processes:
                self._kill(group)

    async def _wait(self) -> None:
        until = min(at for at in (self._job.next_start(), self._kill_at, math.inf) if at is not None)
        timeout = None if until == math.inf else max(until - time.monotonic(), 0.0)
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._has_news.wait(), timeout)
        self._has_news.clear()

    async def _start(self, group: int) -> None:
        launch = self._launch
        process = await asyncio.create_subprocess_exec(
            *launch.torchrun,
            "--standalone",
            "--nnodes=1",
            f"--nproc-per-node={launch.plan.ranks_per_group}",
            "--max-restarts=0",
            "--tee=3",
            f"--log-dir={launch.log_folder / f'group_{group}'}",
            *launch.command,
            stdin=asyncio.subprocess.DEVNULL,
            start_new_session=True,  # a terminal sends Ctrl-C to the launcher alone
            env={**os.environ, **self._settings(group)},
        )
        self._processes[group] = process
        self._waiting[group] = asyncio.create_task(self._see_end(group, process))

    def _settings(self, group: int) -> dict[str, str]:
        launch = self._launch
        devices = launch.plan.devices_of(group, launch.devices)
        return {
            **dict.fromkeys(config.JOB, launch.job),
            "REPLICA_GROUP_ID": str(group),
            "NUM_REPLICA_GROUPS": str(launch.plan.num_all_groups),
            **dict.fromkeys(config.LIGHTHOUSE, launch.lighthouse),
            "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": f"[g{group}/r${{rank}}] ",
            "PYTHONUNBUFFERED": "1",  # torchrun copies its ranks' lines to its own output without flushing it
            LAUNCHER: str(os.getpid()),
        } | ({"CUDA_VISIBLE_DEVICES": ",".join(devices)} if devices else {})

    async def _see_end(self, group: int, process: asyncio.subprocess.Process) -> None:
        try:
            status = await process.wait()
            del self._processes[group]
            was_stopping = self._job.is_stopping
            delay_s = self._job.ended(group, status, time.monotonic())
            self._say_end(group, status, delay_s, was_stopping)
        finally:
            self._has_news.set()

    def _say_end(self, group: int, status: int, delay_s: float | None, was_stopping: bool) -> None:
        how = f"with status {status}" if status >= 0 else f"by {signal.Signals(-status).name}"
        if status == 0:
            _log.info("group %d has left, or has finished" if was_stopping else "group %d has finished", group)
        elif delay_s is not None:
            left = self._job.restarts_left(group)
            _log.warning(
                "group %d ended %s; it starts again in %g s (restarts left after that: %d)", group, how, delay_s, left
            )
        elif was_stopping:
            _log.info("group %d was ended (status %d)", group, shell_status(status))
        else:
            what = "ending the others" if self._job.is_stopping else "the others go on"
            num_left, least = self._job.num_left, self._launch.plan.min_replicas
            _log.error(
                "group %d ended %s and has no restart left: groups left %d, needed %d; %s",
                group,
                how,
                num_left,
                least,
                what,
            )

    def _kill(self, group: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._processes[group].kill()
