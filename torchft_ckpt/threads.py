"""Threads of the library, and their end with the process.

All of them are daemon threads, as none may hold up the end of a process whose training loop has ended. But while the
interpreter ends, CPython (before 3.14) unwinds a daemon thread that comes back from C++ to Python (`pthread_exit`), and where
that passes C++ that must not be unwound, such as a destructor, the process aborts: "terminate called without an active
exception". A thread inside of torch is such a one. So when the process exits, all that was named to `end_at_exit` is shut
down, the newest first, and then the threads are waited for, in `atexit`, before the interpreter begins to end.

Not `concurrent.futures.ThreadPoolExecutor`: its threads are waited for before `atexit`, when nobody has told them to end, and
from then on it refuses work, the last save's too.
"""

from __future__ import annotations

import atexit
import collections
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from typing import Any, TypeVar

logger = logging.getLogger(__name__)

_T = TypeVar("_T")
_R = TypeVar("_R")

NUM_COPY_THREADS = min(4, os.cpu_count() or 1)
"""So many threads copy or digest memory at once: more of them are no faster."""
_EXIT_TIMEOUT_S = 10.0

# Of one thread again and again: what the garbage collector drops in the middle may start a thread to end itself.
_lock = threading.RLock()
_running: weakref.WeakSet[threading.Thread] = weakref.WeakSet()
_to_end: list[weakref.WeakMethod[Callable[[], object]]] = []


class Thread(threading.Thread):
    """A daemon thread that is waited for when the process exits.

    Args:
        name: of the thread.
    """

    def __init__(self, target: Callable[..., object], name: str, args: Sequence[Any] = ()) -> None:
        super().__init__(target=target, name=name, args=args, daemon=True)

    def start(self) -> None:
        """Start it. Raises `RuntimeError` where no thread can be started."""
        super().start()
        with _lock:
            _running.add(self)

    def let_go(self) -> None:
        """The exit of the process does not wait for it any more: it hangs in a call of the kernel, and nothing else ends that."""
        with _lock:
            _running.discard(self)


def in_background(work: Callable[[], _T], name: str) -> Future[_T]:
    """Do something once on a thread of its own; its result or error is the future's."""
    future: Future[_T] = Future()
    Thread(_fulfil, name, (future, work)).start()
    return future


def end_at_exit(shutdown: Callable[[], object]) -> None:
    """Call a bound method when the process exits, before those that were named earlier, unless its object is gone by then.

    It must be harmless after a call by the user. In a forked child it is not called: what a process has is its own to end.
    """
    with _lock:
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
        self._changed = threading.Condition()
        self._jobs: collections.deque[tuple[Future[Any], Callable[[], Any]]] = collections.deque()
        self._threads: list[threading.Thread] = []
        self._is_shut_down = False
        end_at_exit(self._end)

    def submit(self, fn: Callable[..., _T], /, *args: Any, **kwargs: Any) -> Future[_T]:
        """Run a function on a thread; its result or error is the future's.

        Raises:
            RuntimeError: after `shutdown`, or no thread can be started.
        """
        future: Future[_T] = Future()
        with self._changed:
            if self._is_shut_down:
                raise RuntimeError(f"{self._name} was shut down and takes no work")
            if not self._threads:
                self._start()
            self._jobs.append((future, lambda: fn(*args, **kwargs)))
            self._changed.notify()
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False, timeout_s: float | None = None) -> None:
        """End the threads after what was submitted; may be called twice.

        Args:
            cancel_futures: what has not begun is not done.
            timeout_s: wait at most so long; None: as long as it takes.
        """
        with self._changed:
            self._is_shut_down = True
            cancelled = [future for future, _ in self._jobs] if cancel_futures else []
            if cancel_futures:
                self._jobs.clear()
            self._changed.notify_all()
        for future in cancelled:
            future.cancel()
            future.set_running_or_notify_cancel()  # tells those that wait for it
        if wait:
            _join(self._threads, timeout_s)

    def _start(self) -> None:
        for number in range(self._num_threads):
            thread = Thread(self._run, f"{self._name}_{number}")
            try:
                thread.start()
            except RuntimeError:
                if not self._threads:
                    raise
                return
            self._threads.append(thread)

    def _end(self) -> None:
        self.shutdown(wait=False, cancel_futures=True)

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._jobs and not self._is_shut_down:
                    self._changed.wait()
                if not self._jobs:
                    return
                future, call = self._jobs.popleft()
            _fulfil(future, call)
            del future, call  # an idle thread keeps nothing alive


def parallel_map(
    work: Callable[[_T], _R], items: Sequence[_T], num_threads: int, name: str = "torchft_ckpt"
) -> list[_R]:
    """Return what `work` returns for each item, in their order. Does it on a few threads, this one among them.

    Where it raises, no more is begun, and the error of the first such item is raised once all that was begun has ended. Where
    no more threads can be had, those that there are do all of it.

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
            try:
                done[place] = work(items[place])
            except BaseException as error:  # noqa: BLE001 - raised below
                errors[place] = error
            if errors:
                return

    threads: list[threading.Thread] = []
    try:
        for _ in range(min(num_threads, len(items)) - 1):
            thread = Thread(take, name)
            thread.start()
            threads.append(thread)
    except RuntimeError:
        pass  # there are no more
    take()
    _join(threads, None)
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
