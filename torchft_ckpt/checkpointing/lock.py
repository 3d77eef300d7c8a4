"""The lock between the trainer, which mutates the state, and whoever reads it.

Many readers or one writer; a waiting writer goes first. It decides who may touch the live state; it does not know what
the state is or what is done with it.

It is no `readerwriterlock`: that one's inner locks are taken in functions in Python, so an interrupt (Ctrl-C, a signal handler
that raises) between taking one and the block that gives it back leaves it taken for ever. Here there is no inner lock. Who
reads, and who writes or waits to, stands in a dict, each change of which is one step of C; a reader enters its name before it
looks for writers, and a writer before it looks for readers, so one of them sees the other.

What holds at an interrupt at any point, one at a time: whoever was taking a side, or giving it back, does not stand there any
more once the exception is dropped; or it is a thread's write side, and `held_for_write` says so, and `release_write` of that
thread gives it back. Who waits is told of each change, and looks by himself besides, as an interrupt may come in the way of that.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import timedelta
from queue import Empty, SimpleQueue

from torchft_ckpt.config import not_negative
from torchft_ckpt.errors import CheckpointError, LockTimeoutError

logger = logging.getLogger(__name__)

_LOOK_AGAIN_S = 1.0


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
        self._readers: dict[object, threading.Thread] = {}
        """By token. Also of who has just come, and finds a writer."""
        self._writers: dict[threading.Thread, _Turn] = {}
        """Those that write or wait to, in order: it is the first one's turn once nobody reads. No reader enters meanwhile."""
        self._bells: dict[SimpleQueue[None], None] = {}
        """Of those that wait."""
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
        turn = self._turn()
        if turn is None or not turn.has_come:
            return False
        self._check_same_task(turn)
        return True

    def held_for_step(self) -> bool:
        """Whether the calling thread holds the write side by `acquire_write`, as hooks of an optimizer do, or waits for it."""
        turn = self._turn()
        return turn is not None and (turn.is_for_step or not turn.has_come)

    @contextmanager
    def read(self, timeout: timedelta | None = None) -> Iterator[None]:
        """Hold the read side.

        Raises:
            LockTimeoutError: a writer held or awaited the lock for the whole timeout, or ended with it.
            CheckpointError: another task of this thread holds the write side, or this thread waits for it.
        """
        if self.held_for_write():
            yield
            return
        self._check_waits_not_for_itself(reads=False)
        token = object()
        try:
            try:
                why = "no read access", "a writer (optimizer step) holds or awaits it"
                self._wait(lambda: self._enters(token), timeout, "reader", *why)
                yield
            finally:
                self._leave(token)
        finally:  # again, as an interrupt may come in the way of that
            self._leave(token)

    @contextmanager
    def try_read(self) -> Iterator[bool]:
        """Hold the read side if it is free right now; yields whether it is held."""
        token = object()
        try:
            try:
                yield self._enters(token)
            finally:
                self._leave(token)
        finally:
            self._leave(token)

    @contextmanager
    def write(self, timeout: timedelta | None = None) -> Iterator[None]:
        """Hold the write side. Inside a thread that holds it already, the outer holder keeps it afterwards.

        Raises: as `acquire_write`.
        """
        if self.held_for_write():
            self.announce_write()
            yield
            return
        thread, turn = threading.current_thread(), _Turn(_running_task())
        try:
            try:
                self._take(thread, turn, timeout)
                yield
            finally:
                self._let_go(thread, turn)
        finally:
            self._let_go(thread, turn)

    def acquire_write(self, timeout: timedelta | None = None) -> None:
        """Take the write side for the calling thread, if it does not hold it already.

        Also if it does, readers are told: what this thread has handed out since is about to be written to.

        Raises:
            LockTimeoutError: readers or another writer held the lock for the whole timeout, or ended with it; it was not taken.
            CheckpointError: this thread is reading, or waits to write, or another task of it holds the write side.
        """
        if self.held_for_write():
            self.announce_write()
            return
        thread, turn, is_taken = threading.current_thread(), _Turn(_running_task(), is_for_step=True), False
        try:
            try:
                self._take(thread, turn, timeout)
                is_taken = True
            finally:
                if not is_taken:
                    self._let_go(thread, turn)
        finally:
            if not is_taken:
                self._let_go(thread, turn)

    def release_write(self) -> None:
        """Let the write side go if the calling thread holds it; otherwise do nothing.

        Raises:
            CheckpointError: another task of this thread holds it.
        """
        if self.held_for_write() and (turn := self._turn()) is not None:
            self._let_go(threading.current_thread(), turn)

    def _turn(self) -> _Turn | None:
        return self._writers.get(threading.current_thread())

    def _enters(self, token: object) -> bool:
        """Take the read side, unless somebody writes or waits to."""
        if self._writers:
            return False
        self._readers[token] = threading.current_thread()
        if not self._writers:
            return True
        self._leave(token)  # one has come since
        return False

    def _leave(self, token: object) -> None:
        """Give a read side back; may be called again."""
        if self._readers.pop(token, None) is not None:
            self._tell()

    def _take(self, thread: threading.Thread, turn: _Turn, timeout: timedelta | None) -> None:
        """Take the write side. Whatever it raises, the caller lets go."""
        self._check_waits_not_for_itself(reads=True)
        self._writers[thread] = turn
        why = "no write access", "a reader or another writer holds it"
        self._wait(lambda: [*self._writers][:1] == [thread] and not self._readers, timeout, "writer", *why)
        if turn.task is not None:
            _held_in_context.set((*_held_in_context.get(), turn))
        turn.has_come = True
        self.announce_write()

    def _let_go(self, thread: threading.Thread, turn: _Turn) -> None:
        """Give a turn back; may be called again, by any thread."""
        if self._writers.get(thread) is turn:
            self._writers.pop(thread)
            self._tell()
            if turn.task is not None:
                _held_in_context.set(tuple(held for held in _held_in_context.get() if held is not turn))

    def _wait(self, may_go: Callable[[], bool], timeout: timedelta | None, party: str, what: str, why: str) -> None:
        timeout_s = self._timeout_s if timeout is None else _seconds(timeout)
        if may_go():
            return
        until, bell = time.monotonic() + timeout_s, SimpleQueue[None]()
        try:
            self._bells[bell] = None
            while not may_go():
                self._check_owner(party)
                left_s = until - time.monotonic()
                if left_s <= 0:
                    raise LockTimeoutError(f"state dict lock: {what} within {timeout_s:g} s, {why}", party=party)
                with suppress(Empty):
                    bell.get(timeout=min(left_s, _LOOK_AGAIN_S))
        finally:
            self._bells.pop(bell, None)

    def _tell(self) -> None:
        for bell in [*self._bells]:
            bell.put(None)

    def _check_waits_not_for_itself(self, *, reads: bool) -> None:
        waits = self._turn() is not None
        if waits or (reads and threading.current_thread() in [*self._readers.values()]):
            does = "waits to write, and a signal handler asks for the lock" if waits else "is reading and asks to write"
            raise CheckpointError(
                f"state dict lock: this thread, or another task of it, {does}, which would wait for itself; end that first",
                party="writer",
            )

    def _check_same_task(self, turn: _Turn) -> None:
        """If a task took the write side of this thread, see that this task, or one that it has started since, is running.

        One that has ended with it holds it no more than any other: each may give it back.
        """
        is_anothers = turn.task is not None and not turn.task.done() and turn not in _held_in_context.get()
        if is_anothers and _running_task() is not None:
            raise CheckpointError(
                "state dict lock: another asyncio task of this thread holds the write side, and has awaited something in the "
                "middle of its change; do not await while you hold it",
                party="writer",
            )

    def _check_owner(self, party: str) -> None:
        owner = next((thread for thread in [*self._writers] if not thread.is_alive()), None)
        if owner is not None:
            raise LockTimeoutError(
                f"state dict lock: thread {owner.name!r} ended while it held the write side, so nobody can give it back; "
                "use write() as a context manager there, and start the process again",
                party=party,
            )


@dataclass(slots=True, eq=False)
class _Turn:
    """A thread's to write."""

    task: asyncio.Task[object] | None
    """The task that asked for it, if one did."""
    is_for_step: bool = False
    has_come: bool = False


_held_in_context: ContextVar[tuple[_Turn, ...]] = ContextVar("torchft_ckpt_write_sides", default=())
"""The write sides that this context holds. Tasks have a context of their own, a copy of that which started them."""


def _running_task() -> asyncio.Task[object] | None:
    return asyncio.current_task() if asyncio._get_running_loop() is not None else None


def _seconds(timeout: timedelta) -> float:
    return min(not_negative(timeout).total_seconds(), threading.TIMEOUT_MAX / 2)
