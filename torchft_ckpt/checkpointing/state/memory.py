"""Fresh memory to receive into, and touching it ahead of the data.

The first touch of a page costs more than what is written to it: the system finds memory and clears it. Here that is done piece
by piece with as few faults as can be, and on another thread than that which waits for the data. It needs Linux 5.14; elsewhere
memory is touched by who writes to it.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import sys
import time
from collections.abc import Callable

import numpy as np

from torchft_ckpt.core.transfer.pages import PageChoice

SLICE_BYTES = 1024 * 1024
"""So much is received at a time."""
_HUGE_PAGE_BYTES = 2 * 1024 * 1024
TOUCH_FROM_BYTES = _HUGE_PAGE_BYTES
"""Shorter memory is not worth the calls."""
_PAGE_BYTES = mmap.PAGESIZE
_MADV_HUGEPAGE = 14
_MADV_POPULATE_WRITE = 23

ReadInto = Callable[[memoryview], None]
"""Fills memory with what comes next."""
Update = Callable[[memoryview], object]
"""Takes bytes that have come."""


def fresh_memory(num_bytes: int) -> np.ndarray:
    """Return uint8 memory with undefined contents. Long memory is a mapping of its own, which the last reference gives back.

    Raises:
        MemoryError: there is not enough.
    """
    if num_bytes >= _HUGE_PAGE_BYTES and _madvise() is not None:
        try:
            # One huge page more, so that the memory can begin where one may.
            mapping = mmap.mmap(-1, num_bytes + _HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError:  # there is a limit to the number of mappings, too
            pass
        else:
            whole = np.frombuffer(mapping, dtype=np.uint8)
            start = -whole.ctypes.data % _HUGE_PAGE_BYTES
            return whole[start : start + num_bytes]
    return np.empty(num_bytes, dtype=np.uint8)


class Toucher:
    """Has the system back memory that `fresh_memory` returned, without changing what is in it. Any thread, several at once."""

    def __init__(self) -> None:
        self._choice = PageChoice()

    def touch(self, view: memoryview) -> None:
        """Touch a part of such memory; what cannot be touched is left to who writes to it. Other threads go on meanwhile."""
        madvise = _madvise()
        if madvise is None or len(view) < _PAGE_BYTES:
            return
        address = ctypes.addressof(ctypes.c_char.from_buffer(view))
        low, end = address - address % _PAGE_BYTES, address + len(view)
        end += -end % _PAGE_BYTES
        while low < end:
            high = min(low - low % _HUGE_PAGE_BYTES + _HUGE_PAGE_BYTES, end)
            # The time that this thread ran, not that for which others ran instead.
            if high - low < _HUGE_PAGE_BYTES:
                madvise(low, high - low, _MADV_POPULATE_WRITE)
            else:
                is_huge = self._choice.is_huge()
                started = time.thread_time()
                if is_huge:
                    madvise(low, high - low, _MADV_HUGEPAGE)
                madvise(low, high - low, _MADV_POPULATE_WRITE)
                self._choice.took(is_huge, time.thread_time() - started)
            low = high


@functools.cache
def _madvise() -> Callable[[int, int, int], int] | None:
    """Return the system's own function, which Python's holds the interpreter for; None if it does not know how to touch."""
    if sys.platform != "linux":
        return None
    try:
        madvise = ctypes.CDLL(None).madvise
    except (OSError, AttributeError):
        return None
    madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    probe = mmap.mmap(-1, _PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    is_known = madvise(ctypes.addressof(ctypes.c_char.from_buffer(probe)), _PAGE_BYTES, _MADV_POPULATE_WRITE) == 0
    return madvise if is_known else None
