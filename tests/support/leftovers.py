"""What a test starts has ended when the test ends: else it does its work in the middle of another test, at random.

What was told to end takes a moment to, and is waited for. What still runs then fails the test that started it.
"""

from __future__ import annotations

import gc
import os
import select
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import suppress

import pytest

from support import nursery

PATIENCE_S = 60.0
"""All that was left is waited for so long together; only a failure takes it."""
_SET_BY_OTHERS = ("PYTEST_", "TORCHINDUCTOR_", "TRITON_", "CUDA_", "KMP_", "MPL")
"""So begin variables that a library sets when it is first used, as torch does when its compiler is imported."""


def none_left(by: str) -> Iterator[None]:
    """Yield once; then fail if a thread or a process that was started meanwhile goes on, or if this process is changed.

    Raises:
        pytest.fail.Exception: `by`, and what it has left.
    """
    threads, processes, settings = {*threading.enumerate()}, _processes(), _settings()
    yield
    left: list[str] = []
    for patience_s in (min(1.0, PATIENCE_S), PATIENCE_S):
        until = time.monotonic() + patience_s
        left = [_where(thread) for thread in _threads_that_go_on(threads, until)]
        left += [f"process {pid}" for pid in _processes() - processes if not _ends(pid, until)]
        if not left:
            break
        gc.collect()  # a worker of a DataLoader ends with its iterator, which the frames of a caught error may hold
    left += [f"{name}: {value!r}" for name, value in _settings().items() ^ settings.items()]
    if left:
        pytest.fail(f"{by} has left to the next one:\n" + "\n".join(left), pytrace=False)


def _threads_that_go_on(before: set[threading.Thread], until: float) -> list[threading.Thread]:
    before = before | {threading.current_thread()}
    while started := [thread for thread in threading.enumerate() if thread not in before and _is_ours(thread)]:
        for thread in started:  # one that ends may have started another
            with suppress(RuntimeError):  # its start was interrupted
                thread.join(max(until - time.monotonic(), 0.0))
            if thread.is_alive():
                return [one for one in started if one.is_alive()]
            before.add(thread)
    return []


def _is_ours(thread: threading.Thread) -> bool:
    """Not one of C++ that once called Python, and not that of the nursery, which is everybody's."""
    return not isinstance(thread, threading._DummyThread) and thread.name != nursery.NAME


def _where(thread: threading.Thread) -> str:
    frame = sys._current_frames().get(thread.ident or 0)
    return f"thread {thread.name}\n" + "".join(traceback.format_stack(frame)[-6:] if frame else [])


def _processes() -> set[int]:
    """Return the children of this process and of its nursery, as far as the system says."""
    found: set[int] = set()
    with suppress(OSError, AttributeError):  # there is no child, or no such call in this system
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT | os.WNOHANG)
        for parent in [os.getpid(), *nursery.pids()]:
            for task in os.listdir(f"/proc/{parent}/task"):
                with suppress(FileNotFoundError), open(f"/proc/{parent}/task/{task}/children") as children:
                    found.update(map(int, children.read().split()))
    return found - {*nursery.pids()}


def _ends(pid: int, until: float) -> bool:
    """Wait for the end of a process; whoever started it may yet ask how it ended."""
    try:
        process = os.pidfd_open(pid)
    except OSError:
        return True
    try:
        ended = select.poll()  # not `select`, which takes no descriptor beyond the 1024th
        ended.register(process, select.POLLIN)
        return bool(ended.poll(max(until - time.monotonic(), 0.0) * 1000))
    finally:
        os.close(process)


def _settings() -> dict[str, str]:
    """Return what belongs to the process and can be changed by anybody."""
    settings = {f"variable {name}": value for name, value in os.environ.items() if not name.startswith(_SET_BY_OTHERS)}
    return {**settings, "working directory": os.getcwd()}
