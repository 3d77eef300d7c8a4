"""Starts the processes of one replica group on this machine, as torchrun does: one that ends badly ends them all.

A group holds its model in parts, so without one of its ranks it has none: it is ended as a whole and started again, and gets its
state from the other groups. The ranks meet at a store in this process, at a port that the system chooses.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from datetime import timedelta
from types import FrameType

from torch.distributed import TCPStore

_WATCH_S = 0.05
_SIGNAL_AT_PARENTS_DEATH = 1  # PR_SET_PDEATHSIG
_END_TIMEOUT_S = 10.0


def is_rank() -> bool:
    """Return whether this process is a rank already, of this launcher or of torchrun."""
    return "RANK" in os.environ


def end_with_launcher() -> None:
    """In a rank, on Linux: be killed when the launcher is."""
    if sys.platform == "linux" and "TORCHFT_EXAMPLE_LAUNCHER" in os.environ:
        ctypes.CDLL(None).prctl(_SIGNAL_AT_PARENTS_DEATH, signal.SIGKILL)
        if os.getppid() != int(os.environ["TORCHFT_EXAMPLE_LAUNCHER"]):
            raise SystemExit("the launcher is gone already")


def launch(group_size: int, max_restarts: int) -> int:
    """Run this script once for each rank, again after a failure; return the exit status.

    Args:
        group_size: number of processes.
        max_restarts: how often the group is started again.
    """
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        signal.signal(number, _stop)
    code = 0
    for attempt in range(max_restarts + 1):
        # A fresh one each time: PyTorch's process group would find the addresses of those that are gone.
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))
        ranks = [_start(rank, group_size, store.port, attempt) for rank in range(group_size)]
        try:
            code = _watch(ranks)
        finally:
            _end(ranks)
        if code == 0:
            return 0
        left = max_restarts - attempt
        print(
            f"a rank ended with status {code}; its group is ended; restarts left: {left}", file=sys.stderr, flush=True
        )
    return 1


def _start(rank: int, group_size: int, port: int, attempt: int) -> subprocess.Popen[bytes]:
    environment = {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(group_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": str(attempt),
        "TORCHFT_EXAMPLE_LAUNCHER": str(os.getpid()),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
    }
    return subprocess.Popen([sys.executable, *sys.argv], env=os.environ | environment)


def _watch(ranks: Sequence[subprocess.Popen[bytes]]) -> int:
    """Return 0 when all have ended well, or the status of the first that did not."""
    while True:
        codes = [rank.poll() for rank in ranks]
        for code in codes:
            if code:
                return code
        if None not in codes:
            return 0
        time.sleep(_WATCH_S)


def _end(ranks: Sequence[subprocess.Popen[bytes]]) -> None:
    """End those that are left; what they hold is worth nothing without the others."""
    for rank in ranks:
        if rank.poll() is None:
            rank.kill()
    for rank in ranks:
        rank.wait(_END_TIMEOUT_S)


def _stop(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)
