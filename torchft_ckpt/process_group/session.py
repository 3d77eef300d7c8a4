"""One life of an inner process group: from connecting, over running operations, to its end.

    CONNECTING --connected--> LIVE --end(error)--> ENDED
         `-----------------end(error)----------------^

Rules that this file keeps, whatever the backend:
- Connecting happens on a thread of its own. A caller that waits for it returns at once when the session ends, even if the
  backend cannot be interrupted; the thread then ends by its own timeouts.
- The inner group is dropped on one thread only, the reaper, after the last call into it has returned. A backend's
  destructor joins its worker threads: run by a callback on such a thread, it would end the process; run by the trainer,
  it would block it.
- Works are over soon after their session has ended, even those that the backend forgets, where it is certain that nothing
  writes to their tensors any more.
- A session ends once, with one error. An operation that fails ends it, which closes this rank's connections, so that a
  lost peer's failure travels around the ring at once instead of by timeouts.

It does not know stores, sockets or which backend there is: those come as `connect` and as interrupts.
"""

from __future__ import annotations

import copy
import enum
import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch
from torch.distributed import ProcessGroup as TorchProcessGroup
from torch.distributed import Work

from torchft_ckpt.errors import (
    CollectiveFailedError,
    ProcessGroupAbortedError,
    ProcessGroupConfigureError,
    ProcessGroupError,
    TorchftCkptError,
)
from torchft_ckpt.network import keep_for_ever, leave_to_parent
from torchft_ckpt.threads import Condition, Event, Thread, end_at_exit

logger = logging.getLogger(__name__)

_T = TypeVar("_T")

# Gloo forgets a send that was half written when its connection broke, and a receive that was half read: the thread that
# waits for it sleeps until the operation's timeout. So works are completed by us, this long after their session ended,
# when a backend thread that is not asleep has long left the tensors alone.
_GRACE_S = 0.05
_REAP_INTERVALS_S = (0.01, 0.05, 0.25)


class SessionPhase(enum.Enum):
    """The three phases of a session's life."""

    CONNECTING = "connecting"
    LIVE = "live"
    ENDED = "ended"


class Session:
    """One inner process group. Any thread may call any method.

    Args:
        label: names the group in errors and thread names, as in "quorum 7, rank 1 of 3".
        connect: makes the inner group; runs on the session's thread, registers interrupts by `on_end`, and must be
            bounded in time by itself.
        devices: the accelerators whose tensors the operations' futures may carry.
    """

    def __init__(
        self,
        label: str,
        connect: Callable[[Session], TorchProcessGroup],
        devices: Sequence[torch.device] = (),
    ) -> None:
        self.label = label
        self.devices: list[int | str | torch.device] = list(devices)
        self._connect: Callable[[Session], TorchProcessGroup] | None = connect
        self._changed = Condition()
        self._phase = SessionPhase.CONNECTING
        self._error: ProcessGroupError | None = None
        # The only reference to the inner group; emptied by the reaper.
        self._slot: list[TorchProcessGroup] = []
        self._parts: list[object] = []
        self._num_calls = 0
        self._works: set[SessionWork] = set()
        self._interrupts: list[Callable[[], object]] = []
        self._closers: list[Callable[[], object]] = []
        self._connections_die = False
        self._released = threading.Event()
        self._exits = threading.Event()
        self._owner = os.getpid()
        self._thread = Thread(self._run_connect, f"pg-connect {label}")
        self._reaper = Thread(self._reap, f"pg-reap {label}")

    def __repr__(self) -> str:
        return f"Session({self.label}, {self._phase.value})"

    @property
    def phase(self) -> SessionPhase:
        return self._phase

    @property
    def is_inherited(self) -> bool:
        """Whether this process is a forked child of the one that made the session: the connections are its parent's."""
        return os.getpid() != self._owner

    @property
    def error(self) -> ProcessGroupError | None:
        """The error that ended the session; None before."""
        return self._error

    def connect(self, timeout_s: float) -> None:
        """Connect, and return when the group is live. Call once.

        Raises:
            ProcessGroupConfigureError: connecting failed or took longer than the timeout.
            ProcessGroupAbortedError: the session was ended by another thread.
        """
        end_at_exit(self._end_at_exit)
        self._thread.start()
        with self._changed:
            self._changed.wait_for(lambda: self._phase is not SessionPhase.CONNECTING, timeout_s)
            connected_in_time = self._phase is not SessionPhase.CONNECTING
        if not connected_in_time:
            self.end(ProcessGroupConfigureError(f"{self.label}: not connected within {timeout_s:.1f} s"))
        if self._error is not None:
            raise copy.copy(self._error) from self._error.__cause__

    def on_end(
        self,
        interrupt: Callable[[], object],
        close: Callable[[], object] | None = None,
        *,
        ends_connections: bool = False,
    ) -> None:
        """Register what makes blocked calls of the backend return, and what frees resources after all have returned.

        Called by `connect`. The interrupt may run several times, on any thread, and must not block. `ends_connections`
        says that after it the backend cannot write to a tensor any more, so that works may be completed before the
        backend's threads have ended.

        Raises:
            ProcessGroupAbortedError: the session has ended meanwhile; `close` was registered all the same.
        """
        with self._changed:
            if close is not None:
                self._closers.append(close)
            self._interrupts.append(interrupt)
            self._connections_die = self._connections_die or ends_connections
        self.raise_if_ended()

    def keep(self, part: object) -> None:
        """Drop a backend of the inner group after the group itself. Called by `connect`.

        The destructor of a backend waits for its threads, which may want the interpreter lock. An older torch gives that
        lock back where Python drops the backend, but not where it drops the group and the group the backend.
        """
        leave_to_parent(part)
        self._parts.append(part)

    def raise_if_ended(self) -> None:
        """Let `connect` ask between its steps.

        Raises:
            ProcessGroupAbortedError: the session has ended.
        """
        if self._error is not None:
            raise ProcessGroupAbortedError(f"{self.label}: aborted while connecting") from self._error

    def run(self, call: Callable[[TorchProcessGroup], Work]) -> Work:
        """Start an operation and return its work, whose errors are this library's and end the session.

        Raises:
            ProcessGroupError: the session has ended (its error is raised again), or is not connected yet.
        """
        with self._changed:
            if self._error is not None:
                raise copy.copy(self._error) from self._error.__cause__
            if self._phase is not SessionPhase.LIVE:
                raise ProcessGroupError(f"{self.label}: still connecting")
            self._num_calls += 1
        try:
            return SessionWork(self, call(self._slot[0]))
        except RuntimeError as error:
            if self._error is not None:
                raise copy.copy(self._error) from error.with_traceback(None)
            # The traceback's frames would keep the inner group alive.
            raise error.with_traceback(None) from None
        finally:
            with self._changed:
                self._num_calls -= 1
                self._changed.notify_all()

    def apply(self, change: Callable[[TorchProcessGroup], object]) -> None:
        """Change a setting of the inner group; does nothing unless the session is live."""
        with self._changed:
            if self._phase is SessionPhase.LIVE:
                change(self._slot[0])

    def end(self, error: ProcessGroupError) -> bool:
        """End the session: operations in flight and the connecting thread are interrupted, later ones refused.

        Does not wait for them, and does not drop the inner group on the caller's thread. Does nothing in a forked child.

        Returns:
            Whether this call ended it; False if it had ended before, and then `error` is dropped.
        """
        if self.is_inherited:
            return False
        with self._changed:
            if self._phase is SessionPhase.ENDED:
                return False
            self._phase = SessionPhase.ENDED
            self._error = error
            interrupts = list(self._interrupts)
            self._changed.notify_all()
        for interrupt in interrupts:
            interrupt()
        self._reaper.start()
        return True

    def fail(self, cause: BaseException) -> ProcessGroupError:
        """Return the error to raise for an operation that failed with `cause`; ends the session if nobody has."""
        first_line = str(cause).partition("\n")[0].partition(". This is typically")[0][:300]
        self.end(
            CollectiveFailedError(
                f"{self.label}: a collective failed ({first_line}); a peer was lost, aborted or did not answer in "
                "time. The tensors must not be used, and the group must be configured again"
            )
        )
        assert self._error is not None  # end() has set it, now or earlier
        return copy.copy(self._error)

    def join(self, timeout_s: float) -> bool:
        """Wait until an ended session has let go of everything; return whether it has."""
        return self._released.wait(timeout_s)

    def opened(self, work: SessionWork) -> None:
        """Remember an operation until it is over."""
        with self._changed:
            self._works.add(work)

    def closed(self, work: SessionWork) -> bool:
        """Forget an operation; return whether it was remembered."""
        with self._changed:
            if work not in self._works:
                return False
            self._works.remove(work)
            self._changed.notify_all()
            return True

    def _run_connect(self) -> None:
        failure: Exception | None = None
        # It refers to the process group, which refers to us: after this, nothing keeps a dropped group.
        connect, self._connect = self._connect, None
        assert connect is not None  # runs once
        try:
            self._slot.append(connect(self))
            leave_to_parent(self._slot[0])
        except (RuntimeError, OSError, ValueError, TorchftCkptError) as error:
            failure = error.with_traceback(None)
        finally:
            with self._changed:
                if self._slot and self._phase is SessionPhase.CONNECTING:
                    self._phase = SessionPhase.LIVE
                    self._changed.notify_all()
            if not self._slot:
                self.end(_as_configure_error(self.label, failure))

    def _reap(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._num_calls == 0)
            self._changed.wait_for(lambda: not self._works, _GRACE_S)
            forgotten = [work.inner for work in self._works] if self._connections_die else []
        if self._connections_die:
            self._finish_works()
        attempt = 0
        while self._thread.is_alive() and not self._exits.is_set():
            for interrupt in list(self._interrupts):
                interrupt()
            self._thread.join(_REAP_INTERVALS_S[min(attempt, len(_REAP_INTERVALS_S) - 1)])
            attempt += 1
        # To drop the group takes until its operations are over: here that can be waited for no longer than the process goes on.
        while not all(work.is_completed() for work in forgotten):
            if self._exits.wait(_REAP_INTERVALS_S[-1]):
                keep_for_ever((self._slot, self._parts))
                return
        started = time.monotonic()
        self._slot.clear()
        self._parts.clear()
        self._finish_works()
        for close in self._closers:
            close()
        self._released.set()
        logger.debug("%s: inner group dropped in %.3f s", self.label, time.monotonic() - started)

    def _end_at_exit(self) -> None:
        """An operation in flight must not hold the process until its timeout; the reaper is waited for."""
        self._exits.set()
        self.end(ProcessGroupAbortedError(f"{self.label}: the process exits"))

    def _finish_works(self) -> None:
        with self._changed:
            works = list(self._works)
        for work in works:
            work.finish(None, self._error)


class SessionWork(Work):
    """An operation in flight. Its errors are `ProcessGroupError`s and end its session."""

    def __init__(self, session: Session, work: Work) -> None:
        super().__init__()
        self._session = session
        self.inner = work
        self._over = Event()
        self._error: ProcessGroupError | None = None
        self._lock = threading.Lock()
        self._settle: Callable[[Exception | None], Any] | None = None
        self._ends = False
        """Its end is known: nobody can settle it any more."""
        self._is_given = False
        """Somebody has the future: it stays as the backend completes it."""
        self._future: torch.futures.Future[Any] | None = None
        try:
            future = work.get_future()
        except RuntimeError:  # a few of Gloo's operations have none; wait() still tells
            return
        # Not `then`: it turns every exception into a RuntimeError.
        self._future = torch.futures.Future(devices=session.devices)
        session.opened(self)
        future.add_done_callback(self._pass_on)

    def _pass_on(self, future: torch.futures.Future[Any]) -> None:
        try:
            value = future.value()
        except RuntimeError as error:
            self.finish(None, self._session.fail(error))
        else:
            self.finish(value, None)

    def finish(self, value: Any, error: ProcessGroupError | None) -> None:
        """Complete the future; a second call does nothing."""
        if not self._session.closed(self):
            return
        assert self._future is not None
        with self._lock:
            self._ends = True
            settle, self._settle = self._settle, None
        self._error = error
        if settle is not None:
            value, error = settle(None if error is None else copy.copy(error)), None
        if error is None:
            try:
                self._future.set_result(value)
            except RuntimeError as refused:  # tensors on a device that the future was not made for
                self._error = error = self._session.fail(refused)
        self._over.set()
        if error is not None:
            self._future.set_exception(copy.copy(error))

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Block until the operation is over.

        Args:
            timeout: give up waiting (not the operation) after this; zero waits as long as the operation itself may take.

        Raises:
            ProcessGroupError: the operation failed or the group was aborted; its tensors must not be used.
            TimeoutError: it is not over yet.
        """
        if self._future is None:
            try:
                return self.inner.wait(timeout)
            except RuntimeError as error:
                raise self._session.fail(error) from error.with_traceback(None)
        if not self._over.wait(timeout.total_seconds() if timeout > timedelta(0) else None):
            raise TimeoutError(f"{self._session.label}: an operation is not over after {timeout.total_seconds():.3f} s")
        if self._error is not None:
            raise copy.copy(self._error)
        return self.inner.wait()  # returns at once, and orders the current stream after the operation

    def get_future(self) -> torch.futures.Future[Any]:
        """Return the future with the list of result tensors.

        Raises:
            RuntimeError: the backend has none for this operation.
        """
        with self._lock:
            self._is_given = True
        return self.inner.get_future() if self._future is None else self._future

    def settled(self, settle: Callable[[Exception | None], _T]) -> torch.futures.Future[_T]:
        """Return a future of what `settle` makes of the operation's end. Call it once.

        It is the work's own future, unless somebody has that one already, or it may refuse tensors for their device.

        Args:
            settle: gets the error, or None; it must not raise. It runs where the operation completes, on a thread and, on an
                accelerator, on a stream of the backend.

        Raises:
            RuntimeError: the backend has no future for this operation.
        """
        with self._lock:
            is_free = not self._ends and not self._is_given and not self._session.devices
            if self._future is not None and is_free:
                self._settle = settle
                return self._future
        return self.get_future().then(lambda done: settle(_error_of(done)))

    def is_completed(self) -> bool:
        """Whether the operation is over, with or without success."""
        return self._over.is_set() if self._future is not None else self.inner.is_completed()

    def is_success(self) -> bool:
        """Whether the operation is over and succeeded."""
        return self.is_completed() and self._error is None and self.inner.is_success()

    def synchronize(self) -> None:
        """Make the current stream wait for the operation."""
        self.inner.synchronize()


def settled(work: Work, settle: Callable[[Exception | None], _T]) -> torch.futures.Future[_T]:
    """Return what `SessionWork.settled` returns, of any work."""
    if isinstance(work, SessionWork):
        return work.settled(settle)
    return work.get_future().then(lambda done: settle(_error_of(done)))


def _error_of(done: torch.futures.Future[Any]) -> Exception | None:
    try:
        done.value()
    except Exception as error:  # noqa: BLE001 - whatever a backend raises
        return error
    return None


def _as_configure_error(label: str, failure: Exception | None) -> ProcessGroupError:
    """Return the error to end a session with whose connecting failed; `failure` is None if it was none we expect."""
    if isinstance(failure, ProcessGroupAbortedError):
        return failure
    reason = "connecting broke off" if failure is None else str(failure).partition("\n")[0][:500]
    error = ProcessGroupConfigureError(f"{label}: {reason}", party=getattr(failure, "party", None))
    error.__cause__ = failure
    return error
