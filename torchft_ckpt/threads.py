"""Threads of the library, and their end with the process.

All of them are daemon threads, as none may hold up the end of a process whose training loop has ended. But while the
interpreter ends, CPython (before 3.14) unwinds a daemon thread that comes back from C++ to Python (`pthread_exit`), and where
that passes C++ that must not be unwound, such as a destructor, the process aborts: "terminate called without an active
exception". A thread inside of torch is such a one. So when the process exits, all that was named to `end_at_exit` is shut
down, the newest first, and then the threads are waited for, in `atexit`, before the interpreter begins to end.

Not `concurrent.futures.ThreadPoolExecutor`: its threads are waited for before `atexit`, when nobody has told them to end, and
from then on it refuses work, the last save's too.

The main thread may be interrupted at any moment, by Ctrl-C or a signal handler that raises, and the script may go on. What it
shares with these threads must stay usable then: see `Condition`. It is safe where CPython takes interrupts, between two calls.
A second interrupt in the clean-up of a first one is not: what waited for a thread to end, or put something back, has not then.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import logging
import os
import sys
import threading
import time
import traceback
import weakref
from _thread import RLock
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

logger = logging.getLogger(__name__)

_T = TypeVar("_T")
_R = TypeVar("_R")

NUM_COPY_THREADS = min(4, os.cpu_count() or 1)
"""So many threads copy or digest memory at once: more of them are no faster."""
_EXIT_TIMEOUT_S = 10.0
_MOST_CALLS = 100

# Of one thread again and again: what the garbage collector drops in the middle may start a thread to end itself.
_lock = threading.RLock()
_running: weakref.WeakSet[threading.Thread] = weakref.WeakSet()
_to_end: list[weakref.WeakMethod[Callable[[], object]]] = []


def stacks_in_words() -> str:
    """Return where each Python thread of this process is, the innermost call first. It reads no file, and waits for nothing."""
    names, lines = {thread.ident: thread.name for thread in threading.enumerate()}, []
    for ident, innermost in sys._current_frames().items():
        calls = itertools.islice(traceback.walk_stack(innermost), _MOST_CALLS)
        lines.append(f"thread {names.get(ident, ident)}:")
        lines += [f"  {frame.f_code.co_filename}:{line} in {frame.f_code.co_name}" for frame, line in calls]
    return "\n".join(lines) + "\n"


class Condition(RLock):  # type: ignore[misc]  # it is final in typeshed alone
    """A `threading.Condition` that is left in order by an interrupt at any moment.

    Python's enters by a function in Python: who is interrupted in there has taken the lock, and is in no `with` block that gives
    it back. This one is the lock, so `with` takes it in one step. And who is interrupted in Python's `notify` may have taken a
    waiter off the list and woken nobody; here each takes itself off. A signal handler may wait for what its thread waits for.

    But Python 3.14 may take an interrupt between a lock's `__enter__` and the block (cpython issue 148874; not so before, nor in
    3.15): it leaves the lock taken.
    """

    def __init__(self) -> None:
        self._waiting: dict[SimpleQueue[None], None] = {}

    def wait(self, timeout: float | None = None) -> bool:
        """Let go until somebody notifies, or so long; return whether somebody did."""
        bell: SimpleQueue[None] = SimpleQueue()
        held: list[tuple[int, int]] = []
        self._waiting[bell] = None
        try:
            # Lets go and keeps how often it was held, in one step of C.
            held.extend(map(RLock._release_save, (self,)))  # type: ignore[attr-defined]
            bell.get(timeout=None if timeout is None else max(timeout, 0.0))
        except Empty:
            return False
        finally:
            try:
                if held:
                    self._acquire_restore(held[0])  # type: ignore[attr-defined]  # unlike `acquire` it is not interrupted
            finally:
                self._waiting.pop(bell, None)
        return True

    def wait_for(self, is_so: Callable[[], bool], timeout: float | None = None) -> bool:
        """Wait until something is so, or so long; return whether it is."""
        until = None if timeout is None else time.monotonic() + timeout
        while not is_so():
            left_s = None if until is None else until - time.monotonic()
            if left_s is not None and left_s <= 0:
                return False
            self.wait(left_s)
        return True

    def notify_all(self) -> None:
        """Wake all that wait."""
        for bell in [*self._waiting]:
            bell.put(None)


class Event:
    """A `threading.Event` that is left in order by an interrupt at any moment."""

    def __init__(self) -> None:
        self._changed = Condition()
        self._is_set = False

    def is_set(self) -> bool:
        return self._is_set

    def set(self) -> None:
        with self._changed:
            self._is_set = True
            self._changed.notify_all()

    def clear(self) -> None:
        self._is_set = False

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until it is set, or so long; return whether it is."""
        with self._changed:
            return self._changed.wait_for(self.is_set, timeout)


def new_future() -> Future[Any]:
    """Return a future that is left in order by an interrupt at any moment of who waits for it."""
    future: Future[Any] = Future()
    future._condition = Condition()  # type: ignore[assignment]
    return future


def is_done(future: Future[Any], timeout: float | None = None) -> bool:
    """Wait until a `new_future` is done, or so long; return whether it is."""
    with future._condition:
        return future._condition.wait_for(future.done, timeout)


class Thread(threading.Thread):
    """A daemon thread that is waited for when the process exits.

    Args:
        name: of the thread.
    """

    def __init__(self, target: Callable[..., object], name: str, args: Sequence[Any] = ()) -> None:
        super().__init__(target=target, name=name, args=args, daemon=True)

    def start(self) -> None:
        """Start it. Raises `RuntimeError` where no thread can be started."""
        with _lock:
            _running.add(self)  # first, as one whose start is interrupted may run nevertheless
        super().start()

    def let_go(self) -> None:
        """The exit of the process does not wait for it any more: it hangs in a call of the kernel, and nothing else ends that."""
        with _lock:
            _running.discard(self)


def in_background(work: Callable[[], _T], name: str) -> Future[_T]:
    """Do something once on a thread of its own; its result or error is the future's."""
    future: Future[_T] = new_future()
    Thread(_fulfil, name, (future, work)).start()
    return future


def end_at_exit(shutdown: Callable[[], object]) -> None:
    """Call a bound method when the process exits, before those that were named earlier, unless its object is gone by then.

    It must be harmless after a call by the user. In a forked child it is not called: what a process has is its own to end.
    """
    with _lock:
        if len(_to_end).bit_count() < 2:  # at powers of two alone, as to look at all of them takes time
            _to_end[:] = [method for method in _to_end if method() is not None]
        _to_end.append(weakref.WeakMethod(shutdown))


class Threads(Executor):
    """A few threads that run what is submitted, in its order. They start with the first of it.

    Args:
        name: of the threads.
    """

    def __init__(self, name: str, num_threads: int = 1) -> None:
        self._name = name
        self._num_threads = num_threads
        self._lock = threading.RLock()
        self._jobs: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        """None: each thread ends."""
        self._threads: dict[int, threading.Thread] = {}
        """By number. A thread that runs, and one whose start returns, enters it if its number is free; else it ends at once. So
        there is one of each, also if a start was interrupted, of which nobody knows whether it runs."""
        self._is_shut_down = False
        end_at_exit(self._end)

    def submit(self, fn: Callable[..., _T], /, *args: Any, **kwargs: Any) -> Future[_T]:
        """Run a function on a thread; its result or error is the future's.

        Raises:
            RuntimeError: after `shutdown`, or no thread can be started.
        """
        future = new_future()
        self.fulfil(future, lambda: fn(*args, **kwargs))
        return future

    def fulfil(self, future: Future[_T], work: Callable[[], _T]) -> None:
        """Do something on a thread, whose result or error becomes that of a `new_future`. Raises as `submit`."""
        with self._lock:
            if self._is_shut_down:
                raise RuntimeError(f"{self._name} was shut down and takes no work")
            if not self._threads:
                self._start()
            self._jobs.put((future, work))

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False, timeout_s: float | None = None) -> None:
        """End the threads after what was submitted; may be called twice.

        Args:
            cancel_futures: what has not begun is not done.
            timeout_s: wait at most so long; None: as long as it takes.
        """
        cancelled: list[Future[Any]] = []
        with self._lock:
            self._is_shut_down = True
            with contextlib.suppress(Empty):
                while cancel_futures:
                    job = self._jobs.get_nowait()
                    cancelled += [] if job is None else [job[0]]
            self._jobs.put(None)
        for future in cancelled:
            future.cancel()
            future.set_running_or_notify_cancel()  # tells those that wait for it
        if wait:
            _join([*self._threads.values()], timeout_s)

    def _start(self) -> None:
        for number in range(self._num_threads):
            thread = Thread(self._run, f"{self._name}_{number}", (number,))
            try:
                thread.start()
            except RuntimeError:
                if not self._threads:
                    raise
                return
            self._threads.setdefault(number, thread)

    def _end(self) -> None:
        self.shutdown(wait=False, cancel_futures=True)

    def _run(self, number: int) -> None:
        thread = threading.current_thread()
        if self._threads.setdefault(number, thread) is not thread:
            return
        while (job := self._jobs.get()) is not None:
            _fulfil(*job)
            del job  # an idle thread keeps nothing alive
        self._jobs.put(None)  # for the next one


def parallel_map(
    work: Callable[[_T], _R], items: Sequence[_T], num_threads: int, name: str = "torchft_ckpt"
) -> list[_R]:
    """Return what `work` returns for each item, in their order. Does it on a few threads, this one among them.

    Where it raises, or is interrupted, no more is begun, and the error of the first such item is raised once all that was
    begun has ended. Where no more threads can be had, those that there are do all of it.

    Args:
        work: for any thread.
        num_threads: at once, at most.
        name: of the threads.
    """
    done: dict[int, _R] = {}
    errors: dict[int, BaseException] = {}
    places = iter(range(len(items)))  # each is taken once, whoever asks

    def take() -> None:
        for place in places:
            if errors:
                return
            try:
                done[place] = work(items[place])
            except BaseException as error:  # noqa: BLE001 - raised below
                errors[place] = error

    threads: list[threading.Thread] = []
    try:
        with contextlib.suppress(RuntimeError):  # there are no more
            for _ in range(min(num_threads, len(items)) - 1):
                threads.append(Thread(take, name))
                threads[-1].start()
        take()
        _join([thread for thread in threads if thread.is_alive()], None)
    except BaseException as error:
        errors[-1] = error
        _join([thread for thread in threads if thread.is_alive()], None)
        raise
    if errors:
        interrupt = (error for error in errors.values() if not isinstance(error, Exception))
        raise next(interrupt, errors[min(errors)])
    return [done[place] for place in range(len(items))]


def _fulfil(future: Future[_T], work: Callable[[], _T]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        future.set_result(work())
    except BaseException as error:  # noqa: BLE001 - it belongs to whoever waits for the future
        future.set_exception(error)


def _join(threads: Sequence[threading.Thread], timeout_s: float | None) -> None:
    """Wait for threads, but not for the one that calls."""
    until = None if timeout_s is None else time.monotonic() + timeout_s
    for thread in threads:
        if thread is not threading.current_thread():
            thread.join(None if until is None else max(until - time.monotonic(), 0.0))


@atexit.register
def _end_all() -> None:
    with _lock:
        methods = [method() for method in reversed(_to_end)]
    interrupt: BaseException | None = None
    for shutdown in methods:
        if shutdown is not None:
            try:
                shutdown()
            except Exception as error:  # noqa: BLE001 - the others are still to be ended
                logger.warning("%r could not be ended when the process exited: %s", shutdown, error)
            except BaseException as error:  # noqa: BLE001 - raised below
                interrupt = error
    del methods
    until = time.monotonic() + _EXIT_TIMEOUT_S
    while (left := _alive()) and time.monotonic() < until:  # one that ends may start another
        _join(left, max(until - time.monotonic(), 0.0))
    if names := sorted(thread.name for thread in left if thread.is_alive()):
        logger.warning("threads that have not ended when the process exits: %s", ", ".join(names))
    if interrupt is not None:
        raise interrupt


def _alive() -> list[threading.Thread]:
    with _lock:
        return [thread for thread in _running if thread.is_alive() and thread is not threading.current_thread()]


def _forget() -> None:
    """In a forked child: threads and all that they work for are the parent's."""
    global _lock
    _lock = threading.RLock()
    _running.clear()
    _to_end.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
