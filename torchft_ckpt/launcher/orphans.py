"""Processes whose parent was killed. Linux only: elsewhere these functions do nothing, and such processes live on.

A group's ranks are children of its torchrun, in sessions of their own. A killed torchrun ends none of them.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
from collections.abc import Collection, Mapping
from pathlib import Path

_PR_SET_PDEATHSIG = 1  # prctl(2)
_PR_SET_CHILD_SUBREAPER = 36


def adopt_orphans() -> None:
    """Become the parent of each descendant whose own parent dies, until this process ends."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def signal_at_parents_death(number: signal.Signals) -> None:
    """Have the kernel send this process a signal when the thread that started it ends."""
    _prctl(_PR_SET_PDEATHSIG, number)


def kill_orphans(environment: Mapping[str, str], known: Collection[int]) -> list[int]:
    """Send SIGKILL to the children of this process that have these variables, and reap them; return their process ids.

    Args:
        environment: names and values that a child must have had when it was started.
        known: process ids of children that are no orphans, and stay.
    """
    killed: list[int] = []
    while orphans := [pid for pid in _children() if pid not in known and _was_started_with(pid, environment)]:
        for pid in orphans:  # their children are adopted in turn, so look again
            with contextlib.suppress(ProcessLookupError, ChildProcessError):
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
        killed += orphans
    return killed


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
