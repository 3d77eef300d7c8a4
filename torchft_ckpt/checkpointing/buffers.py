"""Block-sized buffers into which a snapshot copies what it still needs, reused while any snapshot is open.

Fresh memory costs several times the copy (page faults), and it is the trainer that would wait. So buffers are touched before
they are needed, and go back to a shelf instead of to the system. When the last user leaves, everything is freed.
"""

from __future__ import annotations

import ctypes
import threading

import torch


class BufferPool:
    """Hands out uint8 CPU tensors of one length. Every method may be called from any thread.

    Args:
        block_bytes: length of each buffer.
    """

    def __init__(self, block_bytes: int) -> None:
        self.block_bytes = block_bytes
        self._lock = threading.Lock()
        self._free: list[torch.Tensor] = []
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

    def take(self) -> torch.Tensor:
        """Return a buffer with undefined contents; one that was touched before if there is one."""
        with self._lock:
            self._num_taken += 1
            if self._free:
                return self._free.pop()
        return torch.empty(self.block_bytes, dtype=torch.uint8)

    def give(self, buffer: torch.Tensor) -> None:
        """Give a buffer back that `take` returned."""
        with self._lock:
            self._num_taken -= 1
            if self._users:
                self._free.append(buffer)

    def touch_one(self, user: object, limit: int) -> bool:
        """Add one touched free buffer unless `limit` are free or the user has left; return whether one was added."""
        with self._lock:
            if user not in self._users or len(self._free) >= limit:
                return False
        buffer = torch.empty(self.block_bytes, dtype=torch.uint8)
        ctypes.memset(buffer.data_ptr(), 0, self.block_bytes)  # on this thread alone, without the interpreter's lock
        with self._lock:
            if user not in self._users:
                return False
            self._free.append(buffer)
            return True

    def held_bytes(self) -> int:
        """Memory held now: taken and free buffers together."""
        with self._lock:
            return (self._num_taken + len(self._free)) * self.block_bytes
