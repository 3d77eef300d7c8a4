"""A job that trains, for attacks on it: a lighthouse and groups of ranks, each a process, and what outsiders see of them."""

from __future__ import annotations

import os
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from support import groups

START_TIMEOUT_S = 120.0


@dataclass(frozen=True)
class Sample:
    """What a process uses now."""

    resident_mib: float
    num_threads: int
    num_descriptors: int


class Job:
    """Runs from the end of the constructor, where every rank has made a few steps, until `stop`.

    Args:
        directory: for logs.
        token: of lighthouse, manager services and transports; empty for none.
        num_groups, num_ranks: groups, and ranks in each.
    """

    def __init__(self, directory: Path, token: str, num_groups: int = 2, num_ranks: int = 2) -> None:
        os.environ["TORCHFT_CKPT_TOKEN"] = token
        self._lighthouse = groups.LighthouseProcess(min_replicas=1, heartbeat_timeout_ms=5000)
        self._job = groups.Job(directory.resolve(), self._lighthouse.address, pause_s=0.03, min_replica_size=1)
        try:
            started = [rank for n in range(num_groups) for rank in self._job.start(f"g{n}", ranks=num_ranks)]
            self._ranks = {rank.name.replace("/", "r"): rank for rank in started}
            self.addresses = {name: rank.wait_for_event("ready", START_TIMEOUT_S) for name, rank in self._ranks.items()}
            for rank in started:
                rank.wait_for_step(3, START_TIMEOUT_S)
        except BaseException:
            self.stop()
            raise
        self.lighthouse, self.ranks = self._lighthouse.address, list(self._ranks)
        self.processes = {"lighthouse": self._lighthouse.process, **{n: r.process for n, r in self._ranks.items()}}

    def log(self, name: str) -> str:
        """Return what a process has written."""
        if name == "lighthouse":
            return "".join(self._lighthouse.log)
        return self._ranks[name].log_path.read_text(errors="replace")

    def last(self, name: str) -> dict[str, Any]:
        """Return at which step a rank is, and how many it has discarded."""
        steps = self._ranks[name].steps()
        return {"step": steps[-1]["step"], "discarded": sum(step["discarded"] for step in steps)}

    def longest_gap_s(self, name: str, since: float, until: float) -> float:
        """Return the longest time without a step of a rank, between two moments of the monotonic clock."""
        times = [step["t"] for step in self._ranks[name].steps(since) if step["t"] <= until]
        return max(after - before for before, after in pairwise([since, *times, until]))

    def sample(self, name: str) -> Sample:
        """Return what a process uses. Raises `OSError` if it has ended."""
        of_process = Path(f"/proc/{self.processes[name].pid}")
        status = dict(line.split(":", 1) for line in (of_process / "status").read_text().splitlines() if ":" in line)
        resident_kib, num_threads = int(status["VmRSS"].split()[0]), int(status["Threads"])
        return Sample(resident_kib / 1024, num_threads, len(list((of_process / "fd").iterdir())))

    def ended(self) -> dict[str, int]:
        """Return the exit codes of the processes that have ended."""
        return {name: code for name, process in self.processes.items() if (code := process.poll()) is not None}

    def stop(self) -> None:
        """End all processes, the lighthouse last."""
        self._job.close()
        self._lighthouse.kill()
