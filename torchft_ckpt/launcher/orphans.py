"""Processes whose parent was killed. Linux only: elsewhere these functions do nothing, and such processes live on.

A group's ranks are children of its torchrun, in sessions of their own. A killed torchrun ends none of them.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import signal
import sys
import time
from collections.abc import Mapping, Set
from pathlib import Path

_PR_SET_PDEATHSIG = 1  # prctl(2)
_PR_SET_CHILD_SUBREAPER = 36
_LOOK_EVERY_S = 0.02


def adopt_orphans() -> None:
    """Become the parent of each descendant whose own parent dies, until this process ends."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def signal_at_parents_death(number: signal.Signals) -> None:
    """Have the kernel send this process a signal when the thread that started it ends."""
    _prctl(_PR_SET_PDEATHSIG, number)


async def kill_orphans(environment: Mapping[str, str], known: Set[int], limit_s: float) -> tuple[int, int]:
    """Kill the children of this process that have these variables, and those that they leave behind; reap them.

    Args:
        environment: names and values that a child must have had when it was started.
        known: process ids of children that are no orphans, and stay.
        limit_s: how long to wait for their end; what hangs in the kernel does not end by SIGKILL.

    Returns:
        how many were killed, and how many of them have not ended.
    """
    num_killed, ending = 0, set[int]()
    until = time.monotonic() + limit_s
    while True:
        found = {pid for pid in _children() if pid not in known | ending and _was_started_with(pid, environment)}
        for pid in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        num_killed += len(found)
        ending = {pid for pid in ending | found if not _has_ended(pid)}
        is_late = time.monotonic() > until
        if is_late or not (found or ending):
            return num_killed, len(ending)
        # Children of those that have ended are adopted: look again.
        await asyncio.sleep(_LOOK_EVERY_S)


def _has_ended(pid: int) -> bool:
    try:
        return os.waitpid(pid, os.WNOHANG)[0] == pid
    except ChildProcessError:
        return True


def _children() -> list[int]:
    if sys.platform != "linux":
        return []
    children: list[int] = []
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # a thread that has ended; a kernel without CONFIG_PROC_CHILDREN
            children += map(int, (task / "children").read_text().split())
    return children


def _was_started_with(pid: int, environment: Mapping[str, str]) -> bool:
    try:
        variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return False
    return all(os.fsencode(f"{name}={value}") in variables for name, value in environment.items())


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value)
