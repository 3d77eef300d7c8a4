"""The lock between the trainer, which mutates the state, and whoever reads it.

Many readers or one writer; a waiting writer goes first. It decides who may touch the live state; it does not know what
the state is or what is done with it.

The lock is `readerwriterlock.RWLockWrite`. What was checked of it: a timed-out acquire of either side takes back every
inner lock, so the lock stays usable; the side is bound to a handle, not to a thread; a handle's `locked()` is set after the
lock was taken and cleared before it is let go. Nothing here repeats that knowledge: each thread that writes has one
handle, and "does this thread hold the write side?" is answered by that handle alone. Where the guarantee ends: an
asynchronous exception (a signal handler that raises) in the middle of an acquire can leave an inner lock taken.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta

from readerwriterlock import rwlock

from torchft_ckpt.config import not_negative
from torchft_ckpt.errors import LockTimeoutError

logger = logging.getLogger(__name__)


class StateDictLock:
    """Reader-writer lock over a live state dict, writers first, every acquire with a timeout.

    The write side belongs to a thread. `acquire_write` and `release_write` are idempotent per thread, because the hooks
    that call them are not always called in pairs: an optimizer's post-step hook does not run where the step raised, so
    the next pre-step hook of that thread may find the lock already its own. A thread that holds the write side may also read.

    Args:
        timeout: default limit of every acquire.
    """

    def __init__(self, timeout: timedelta = timedelta(seconds=60)) -> None:
        self._timeout_s = _seconds(timeout)
        self._rwlock = rwlock.RWLockWrite()
        self._writers = threading.local()
        self._before_write: tuple[Callable[[], None], ...] = ()
        self._callbacks_lock = threading.Lock()

    def add_before_write(self, callback: Callable[[], None]) -> None:
        """Have `callback` called by every writer once it holds the lock and before it may mutate; see also `announce_write`.

        A snapshot uses it to copy aside what it still needs. The callback must not take this lock in another thread
        and wait for it; reading from the calling thread is allowed.
        """
        with self._callbacks_lock:
            self._before_write = (*self._before_write, callback)

    def remove_before_write(self, callback: Callable[[], None]) -> None:
        """Undo `add_before_write`; a callback that is not there is ignored."""
        with self._callbacks_lock:
            self._before_write = tuple(known for known in self._before_write if known != callback)

    def announce_write(self) -> None:
        """Call what every writer calls, without the lock: the state is about to be written to by somebody who has it to himself.

        For a receive into the state, which is long: readers of other memory go on, and the training thread waits. Any thread.
        """
        for callback in self._before_write:
            callback()

    def held_for_write(self) -> bool:
        """Whether the calling thread holds the write side."""
        return self._writer().locked()

    @contextmanager
    def read(self, timeout: timedelta | None = None) -> Iterator[None]:
        """Hold the read side.

        Raises:
            LockTimeoutError: a writer held or awaited the lock for the whole timeout.
        """
        if self.held_for_write():
            yield
            return
        timeout_s = self._timeout_s if timeout is None else _seconds(timeout)
        handle = self._rwlock.gen_rlock()
        if not handle.acquire(blocking=True, timeout=timeout_s):
            raise LockTimeoutError(
                f"state dict lock: no read access within {timeout_s:g} s, a writer (optimizer step) holds or awaits it",
                party="reader",
            )
        try:
            yield
        finally:
            handle.release()

    @contextmanager
    def try_read(self) -> Iterator[bool]:
        """Hold the read side if it is free right now; yields whether it is held."""
        handle = self._rwlock.gen_rlock()
        held = handle.acquire(blocking=False)
        try:
            yield held
        finally:
            if held:
                handle.release()

    @contextmanager
    def write(self, timeout: timedelta | None = None) -> Iterator[None]:
        """Hold the write side. Inside a thread that holds it already, the outer holder keeps it afterwards.

        Raises:
            LockTimeoutError: readers or another writer held the lock for the whole timeout.
        """
        if not self._take(timeout):
            yield
            return
        try:
            yield
        finally:
            self.release_write()

    def acquire_write(self, timeout: timedelta | None = None) -> None:
        """Take the write side for the calling thread, if it does not hold it already.

        Also where it does, readers are told: what this thread has handed out since is about to be written to.

        Raises:
            LockTimeoutError: readers or another writer held the lock for the whole timeout; it was not taken.
        """
        self._take(timeout)

    def release_write(self) -> None:
        """Let the write side go if the calling thread holds it; otherwise do nothing."""
        writer = self._writer()
        if writer.locked():
            writer.release()

    def _take(self, timeout: timedelta | None) -> bool:
        """Take the write side; False if this thread held it already."""
        writer = self._writer()
        if writer.locked():
            self.announce_write()
            return False
        timeout_s = self._timeout_s if timeout is None else _seconds(timeout)
        if not writer.acquire(blocking=True, timeout=timeout_s):
            raise LockTimeoutError(
                f"state dict lock: no write access within {timeout_s:g} s, a reader or another writer holds it",
                party="writer",
            )
        try:
            self.announce_write()
        except BaseException:
            writer.release()
            raise
        return True

    def _writer(self) -> rwlock.Lockable:
        try:
            return self._writers.handle
        except AttributeError:
            self._writers.handle = self._rwlock.gen_wlock()
            return self._writers.handle


def _seconds(timeout: timedelta) -> float:
    return min(not_negative(timeout).total_seconds(), threading.TIMEOUT_MAX / 2)
