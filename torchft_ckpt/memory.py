"""The memory that this process may use.

Python's cyclic collector is kept out of bursts that make many small objects, none of them in cycles. A state of some thousand
tensors makes tens of thousands of them within milliseconds. Without that, each burst set off full collections over everything
that torch has imported, and took two to three times as long; the trainer waits for some of them.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def gc_paused() -> Iterator[None]:
    """Pause the collector for the whole process. If another thread has paused it, that one starts it again."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def memory_bytes(root: Path = Path("/")) -> int | None:
    """Return the machine's memory, or the limit of this process's control group where that is less, as in a container.

    Args:
        root: of the file system in which Linux tells the limits.

    Returns:
        None: neither is known.
    """
    try:
        machine = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    except (ValueError, OSError, AttributeError):
        machine = []
    return min([*machine, *_limits(root)], default=None)


def _limits(root: Path) -> Iterator[int]:
    """Yield the memory limits of the control groups that this process is in, of version 2 and 1 (cgroups(7))."""
    for line in _read(root / "proc/self/cgroup").splitlines():
        controllers, _, path = line.partition(":")[2].partition(":")
        if controllers == "":
            top, name = root / "sys/fs/cgroup", "memory.max"
        elif "memory" in controllers.split(","):
            top, name = root / "sys/fs/cgroup/memory", "memory.limit_in_bytes"
        else:
            continue
        # In a container the path may be the machine's, of which the file system shows the container's part alone: its top.
        group = top / path.strip("/")
        for place in (group, *(parent for parent in group.parents if parent.is_relative_to(top))):
            text = _read(place / name).strip()
            if text.isdigit():  # else there is no limit ("max"), or no file
                yield int(text)


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, UnicodeError):
        return ""
