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

import asyncio
import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import timedelta

from readerwriterlock import rwlock

from torchft_ckpt.config import not_negative
from torchft_ckpt.errors import CheckpointError, LockTimeoutError

logger = logging.getLogger(__name__)


class StateDictLock:
    """Reader-writer lock over a live state dict, writers first, every acquire with a timeout.

    The write side belongs to a thread. `acquire_write` and `release_write` are idempotent per thread, because the hooks
    that call them are not always called in pairs: an optimizer's post-step hook does not run where the step raised, so
    the next pre-step hook of that thread may find the lock already its own.

    - A read within a write of the same thread is let through at once, and takes nothing: it sees what the writer has done so far.
    - A write within a `read()` of the same thread could never begin: it raises at once.
    - Asyncio tasks of one thread are one writer to the lock. A task that holds the write side and awaits something lets others
      run: these would read or write in the middle of its change, so they get an error instead; tasks that it has started since
      are part of it. Do not await while you hold the lock.
    - A thread that ends while it holds the write side takes it along: nobody can give it back. Whoever asks then gets an error
      that says so, at once.

    Args:
        timeout: default limit of every acquire.
    """

    def __init__(self, timeout: timedelta = timedelta(seconds=60)) -> None:
        self._timeout_s = _seconds(timeout)
        self._rwlock = rwlock.RWLockWrite()
        self._here = _OfThread()
        self._owner: threading.Thread | None = None
        """The thread that holds the write side."""
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
        """Whether the calling thread holds the write side.

        Raises:
            CheckpointError: it does, for another task of its event loop.
        """
        if not self._writer().locked():
            return False
        self._check_same_task()
        return True

    def held_for_step(self) -> bool:
        """Whether the calling thread holds the write side by `acquire_write`, as hooks of an optimizer do, and not by `write`."""
        return self._writer().locked() and not self._here.num_writes

    @contextmanager
    def read(self, timeout: timedelta | None = None) -> Iterator[None]:
        """Hold the read side.

        Raises:
            LockTimeoutError: a writer held or awaited the lock for the whole timeout, or ended with it.
            CheckpointError: another task of this thread holds the write side.
        """
        if self.held_for_write():
            yield
            return
        handle = self._rwlock.gen_rlock()
        self._acquire(handle, timeout, "reader", "no read access", "a writer (optimizer step) holds or awaits it")
        self._here.num_reads += 1
        try:
            yield
        finally:
            self._here.num_reads -= 1
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

        Raises: as `acquire_write`.
        """
        is_outer = self._take(timeout)
        self._here.num_writes += 1
        try:
            yield
        finally:
            self._here.num_writes -= 1
            if is_outer:
                self.release_write()

    def acquire_write(self, timeout: timedelta | None = None) -> None:
        """Take the write side for the calling thread, if it does not hold it already.

        Also where it does, readers are told: what this thread has handed out since is about to be written to.

        Raises:
            LockTimeoutError: readers or another writer held the lock for the whole timeout, or ended with it; it was not taken.
            CheckpointError: this thread is reading, or another task of it holds the write side.
        """
        self._take(timeout)

    def release_write(self) -> None:
        """Let the write side go if the calling thread holds it; otherwise do nothing.

        Raises:
            CheckpointError: another task of this thread holds it.
        """
        if self.held_for_write():
            self._let_go()

    def _let_go(self) -> None:
        token, self._here.token = self._here.token, None
        _held_in_context.set(tuple(held for held in _held_in_context.get() if held is not token))
        self._owner = None
        self._writer().release()

    def _take(self, timeout: timedelta | None) -> bool:
        """Take the write side; False if this thread held it already."""
        if self.held_for_write():
            self.announce_write()
            return False
        if self._here.num_reads:
            raise CheckpointError(
                "state dict lock: this thread, or another task of it, is reading and asks to write, which would wait for itself;"
                " end the read first",
                party="writer",
            )
        self._acquire(self._writer(), timeout, "writer", "no write access", "a reader or another writer holds it")
        self._owner = threading.current_thread()
        self._here.token = token = object()
        self._here.task = _running_task()
        _held_in_context.set((*_held_in_context.get(), token))
        try:
            self.announce_write()
        except BaseException:
            self._let_go()
            raise
        return True

    def _acquire(self, handle: rwlock.Lockable, timeout: timedelta | None, party: str, what: str, why: str) -> None:
        timeout_s = self._timeout_s if timeout is None else _seconds(timeout)
        self._check_owner(party)
        if not handle.acquire(blocking=True, timeout=timeout_s):
            self._check_owner(party)
            raise LockTimeoutError(f"state dict lock: {what} within {timeout_s:g} s, {why}", party=party)

    def _check_same_task(self) -> None:
        """If a task took the write side of this thread, see that this task, or one that it has started since, is running.

        One that has ended with it holds it no more than any other: each may give it back.
        """
        task = self._here.task
        is_anothers = task is not None and not task.done() and self._here.token not in _held_in_context.get()
        if is_anothers and _running_task() is not None:
            raise CheckpointError(
                "state dict lock: another asyncio task of this thread holds the write side, and has awaited something in the "
                "middle of its change; do not await while you hold it",
                party="writer",
            )

    def _check_owner(self, party: str) -> None:
        owner = self._owner
        if owner is not None and not owner.is_alive():
            raise LockTimeoutError(
                f"state dict lock: thread {owner.name!r} ended while it held the write side, so nobody can give it back; "
                "use write() as a context manager there, and start the process again",
                party=party,
            )

    def _writer(self) -> rwlock.Lockable:
        if self._here.handle is None:
            self._here.handle = self._rwlock.gen_wlock()
        return self._here.handle


class _OfThread(threading.local):
    handle: rwlock.Lockable | None = None
    token: object = None
    """Of the write side that it holds."""
    task: asyncio.Task[object] | None = None
    """The task that took it, if one did."""
    num_reads = num_writes = 0


_held_in_context: ContextVar[tuple[object, ...]] = ContextVar("torchft_ckpt_write_sides", default=())
"""Tokens of the write sides that this context holds. Tasks have a context of their own, a copy of that which started them."""


def _running_task() -> asyncio.Task[object] | None:
    return asyncio.current_task() if asyncio._get_running_loop() is not None else None


def _seconds(timeout: timedelta) -> float:
    return min(not_negative(timeout).total_seconds(), threading.TIMEOUT_MAX / 2)
