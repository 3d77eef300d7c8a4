"""A job that trains, for attacks on it: a lighthouse and groups of ranks, each a process, and what outsiders see of them."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
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
        directory: for logs and steps.
        token: of lighthouse, manager services and transports; empty for none.
        num_groups, num_ranks: groups, and ranks in each.
    """

    def __init__(self, directory: Path, token: str, num_groups: int = 2, num_ranks: int = 2) -> None:
        self._directory = directory.resolve()
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self._env = os.environ | {"TORCHFT_CKPT_TOKEN": token, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
        try:
            self._start(
                "lighthouse", ["-m", "torchft_ckpt", "lighthouse", "--min-replicas", "1", "--bind", "127.0.0.1:0"]
            )
            self.lighthouse = self._await_lighthouse()
            for group in range(num_groups):
                store_port = _free_port()
                for rank in range(num_ranks):
                    name = f"g{group}r{rank}"
                    arguments = {
                        "group": f"g{group}",
                        "rank": rank,
                        "world-size": num_ranks,
                        "lighthouse": self.lighthouse,
                        "store-port": store_port,
                        "out": self._directory / f"{name}.steps",
                    }
                    options = [text for key, value in arguments.items() for text in (f"--{key}", str(value))]
                    self._start(name, [str(HERE / "job_rank.py"), *options])
            self.ranks = [name for name in self.processes if name != "lighthouse"]
            deadline = time.monotonic() + START_TIMEOUT_S
            while any(self.last(name).get("step", 0) < 3 for name in self.ranks):
                if time.monotonic() > deadline or self.ended():
                    raise RuntimeError(f"the job did not begin to train: {self.ended()}; logs in {directory}")
                time.sleep(0.2)
            self.addresses = {name: json.loads(self._lines(name)[0]) for name in self.ranks}
        except BaseException:
            self.stop()
            raise

    def _start(self, name: str, arguments: list[str]) -> None:
        with self.log(name).open("wb") as log:
            self.processes[name] = subprocess.Popen(
                [sys.executable, *arguments],
                cwd=self._directory,  # what `-m` finds in the directory that it is started in goes first
                env=self._env,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def _await_lighthouse(self) -> str:
        """Return its address, `HOST:PORT`, once it has said it."""
        deadline = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline:
            _, _, address = self.log("lighthouse").read_text(errors="replace").partition("lighthouse at http://")
            if "\n" in address:
                return address.split("\n")[0].strip()
            time.sleep(0.1)
        raise RuntimeError(f"the lighthouse did not start: {self.log('lighthouse').read_text(errors='replace')}")

    def log(self, name: str) -> Path:
        """Return where a process writes."""
        return self._directory / f"{name}.log"

    def _lines(self, name: str) -> list[str]:
        path = self._directory / f"{name}.steps"
        return [line for line in path.read_text().splitlines() if line.endswith("}")] if path.exists() else []

    def last(self, name: str) -> dict[str, Any]:
        """Return what a rank said of its last step; nothing before the first."""
        lines = self._lines(name)
        return json.loads(lines[-1]) if len(lines) > 1 else {}

    def longest_gap_s(self, name: str, since: float, until: float) -> float:
        """Return the longest time without a step of a rank, between two moments of the monotonic clock."""
        times = [json.loads(line)["t"] for line in self._lines(name)[1:]]
        times = [since, *(moment for moment in times if since <= moment <= until), until]
        return max(after - before for before, after in pairwise(times))

    def sample(self, name: str) -> Sample:
        """Return what a process uses. Raises `OSError` where it has ended."""
        of_process = Path(f"/proc/{self.processes[name].pid}")
        status = dict(line.split(":", 1) for line in (of_process / "status").read_text().splitlines() if ":" in line)
        resident_kib, num_threads = int(status["VmRSS"].split()[0]), int(status["Threads"])
        return Sample(resident_kib / 1024, num_threads, len(list((of_process / "fd").iterdir())))

    def ended(self) -> dict[str, int]:
        """Return the exit codes of the processes that have ended."""
        return {name: code for name, process in self.processes.items() if (code := process.poll()) is not None}

    def stop(self) -> None:
        """End all processes, the lighthouse last. May be called twice."""
        for name in reversed(self.processes):
            if name != "lighthouse":
                self.processes[name].terminate()
        for name in reversed(self.processes):
            process = self.processes[name]
            if name == "lighthouse":
                process.terminate()
            try:
                process.wait(15)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]
