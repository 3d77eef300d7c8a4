"""Block-sized buffers into which a snapshot copies what it still needs, under a budget, reused while any snapshot is open.

Fresh memory costs several times the copy (page faults), and it is the trainer that would wait. So buffers ask for huge
pages, some are touched before they are needed, and they go back to a cache instead of to the system. When the last user
leaves, everything is unmapped.
"""

from __future__ import annotations

import ctypes
import mmap
import threading

HUGE_PAGE_BYTES = 2 * 1024 * 1024
TOUCH_AHEAD_BYTES = 56 * 1024 * 1024
"""At most so much is prepared before anybody knows whether it will be needed."""


class Buffer:
    """Private memory of its own mapping: it goes back to the system with the last reference."""

    __slots__ = ("_exported", "address", "view")

    def __init__(self, num_bytes: int) -> None:
        padding = HUGE_PAGE_BYTES if num_bytes >= HUGE_PAGE_BYTES else 0
        mapping = mmap.mmap(-1, num_bytes + padding)
        if padding and hasattr(mmap, "MADV_HUGEPAGE"):
            mapping.madvise(mmap.MADV_HUGEPAGE)
        self._exported = (ctypes.c_char * (num_bytes + padding)).from_buffer(mapping)
        start = ctypes.addressof(self._exported)
        skipped = -start % HUGE_PAGE_BYTES if padding else 0
        self.address = start + skipped
        self.view = memoryview(mapping)[skipped : skipped + num_bytes]

    def touch(self) -> None:
        """Have the system back it with memory now; on this thread, without the interpreter's lock."""
        ctypes.memset(self.address, 0, len(self.view))


class BufferPool:
    """Hands out buffers of one length. Every method may be called from any thread.

    Args:
        budget_bytes: at most so much is to be taken at a time; whoever takes asks `num_available` before.
    """

    def __init__(self, block_bytes: int, budget_bytes: int | None = None) -> None:
        self.block_bytes = block_bytes
        self.budget_bytes = budget_bytes
        self._lock = threading.Lock()
        self._free: list[Buffer] = []
        self._num_taken = 0
        self._users: set[object] = set()

    def open(self, user: object) -> None:
        """Keep free buffers from now on until `close` was called for every user."""
        with self._lock:
            self._users.add(user)

    def close(self, user: object) -> None:
        """End one user's claim; the last one frees the buffers. A user that is not known is ignored."""
        with self._lock:
            self._users.discard(user)
            if not self._users:
                self._free.clear()

    def num_available(self) -> int | None:
        """Return the number of buffers that the budget has left, or None if there is no budget."""
        if self.budget_bytes is None:
            return None
        with self._lock:
            return max(self.budget_bytes // self.block_bytes - self._num_taken, 0)

    def take(self) -> Buffer:
        """Return a buffer with undefined contents; one that was touched before if there is one.

        Raises:
            OSError, MemoryError: the system has no memory.
        """
        with self._lock:
            if self._free:
                self._num_taken += 1
                return self._free.pop()
        buffer = Buffer(self.block_bytes)
        with self._lock:
            self._num_taken += 1
        return buffer

    def give(self, buffer: Buffer | None) -> None:
        """Give back what `take` returned; None if somebody still reads it, so that it cannot be used again."""
        with self._lock:
            self._num_taken -= 1
            if self._users and buffer is not None:
                self._free.append(buffer)

    def touch_one(self, user: object, limit: int) -> bool:
        """Add one touched free buffer unless `limit` are free or the user has left; return whether one was added."""
        limit = min(limit, max(TOUCH_AHEAD_BYTES // self.block_bytes, 1))
        available = self.num_available()
        if available is not None:
            limit = min(limit, available)
        with self._lock:
            if user not in self._users or len(self._free) >= limit:
                return False
        buffer = Buffer(self.block_bytes)
        buffer.touch()
        with self._lock:
            if user not in self._users:
                return False
            self._free.append(buffer)
            return True

    def held_bytes(self) -> int:
        """Memory held now: taken and free buffers together."""
        with self._lock:
            return (self._num_taken + len(self._free)) * self.block_bytes
