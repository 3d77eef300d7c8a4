"""torchft's reader-writer lock, for code that took it from there. Here the state is behind `checkpointing.StateDictLock`."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

from readerwriterlock import rwlock

from torchft_ckpt.errors import LockTimeoutError


class RWLock:
    """Many readers or one writer; a waiting writer goes first. Any thread may release what another has acquired.

    Args:
        timeout: seconds of each acquire; negative: without limit.
    """

    def __init__(self, timeout: float = -1) -> None:
        self._timeout = timeout
        self._lock = rwlock.RWLockWrite()
        self._writer = self._lock.gen_wlock()
        self._readers: deque[rwlock.Lockable] = deque()

    def r_acquire(self) -> None:
        """Take the read side; raises `LockTimeoutError`, a TimeoutError."""
        reader = self._lock.gen_rlock()
        self._acquire(reader, "read")
        self._readers.append(reader)

    def r_release(self) -> None:
        """Let one read side go; raises IndexError where none is held."""
        self._readers.pop().release()

    def w_acquire(self) -> None:
        """Take the write side; raises `LockTimeoutError`, a TimeoutError."""
        self._acquire(self._writer, "write")

    def w_release(self) -> None:
        self._writer.release()

    def w_locked(self) -> bool:
        return self._writer.locked()

    @contextmanager
    def r_lock(self) -> Iterator[None]:
        self.r_acquire()
        try:
            yield
        finally:
            self.r_release()

    @contextmanager
    def w_lock(self) -> Iterator[None]:
        self.w_acquire()
        try:
            yield
        finally:
            self.w_release()

    def _acquire(self, side: rwlock.Lockable, name: str) -> None:
        if not side.acquire(blocking=True, timeout=self._timeout):
            raise LockTimeoutError(f"RWLock: no {name} access within {self._timeout:g} s, another holds it", party=name)
