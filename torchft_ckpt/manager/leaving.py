"""How this rank leaves its job on purpose: it is asked to by a signal or by the operator, ends its step, saves, and goes.

A signal becomes a wish of the whole group (`core.coordination.group`). The lighthouse says with which step the group leaves, so
all of its ranks leave after the same one, and the other groups do not wait for it from then on. The training thread finds out
when it asks `should_leave`, or begins the next step. Then it saves, and the group has left when all of its ranks have.

Between two steps that are far apart, as in an outer loop, the ranks agree on a call of `should_leave` in which they leave.

What hangs holds nobody up: after the deadline the group goes as it is.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from datetime import timedelta
from types import FrameType
from typing import Any

from torchft_ckpt.core.coordination.messages import GroupBroken, GroupToRank, LeaveAt, LeaveWish, LetGo
from torchft_ckpt.core.training.ledger import Waits
from torchft_ckpt.errors import ConfigError, GroupLeftError
from torchft_ckpt.manager.clearing import Clearing
from torchft_ckpt.manager.step_client import StepClient
from torchft_ckpt.manager.timekeeping import Timekeeper

logger = logging.getLogger(__name__)

Handler = Callable[[int, "FrameType | None"], Any] | int | signal.Handlers | None
DEADLINE = timedelta(seconds=25)
"""Five seconds less than Kubernetes, torchrun and Slurm wait by default between SIGTERM and SIGKILL."""


class WayOut:
    """The way out of one rank. Methods belong to the training thread, unless they say otherwise.

    Args:
        client: of this rank.
        clearing: knows how many collectives this rank has issued since its last step began.
    """

    def __init__(self, client: StepClient, clearing: Clearing, timekeeper: Timekeeper) -> None:
        self._client = client
        self._timekeeper = timekeeper
        self._clearing = clearing
        self._owner = os.getpid()
        self._save: Callable[[], object] | None = None
        self._deadline_s = DEADLINE.total_seconds()
        self._plans: dict[int, tuple[Callable[[], object] | None, float]] = {}
        """By signal: what takes the place of the two above when it is the first that comes."""
        self._handlers: dict[int, Handler] = {}
        """By signal: what was there before."""
        self._signal: int | None = None
        """The first that came."""
        self._go_at: float | None = None
        """On the monotonic clock: when the group goes as it is. None: nobody has asked it to leave."""
        self._is_at_it = False
        """The training thread saves and leaves, or has done so."""
        self._is_done = False
        """It has, or the script knows from this object that the group has left."""
        self._is_shut_down = False
        self._interrupts = False
        """The main thread is to be interrupted, wherever it is."""
        self._interrupting = threading.Lock()
        """Held while the signal is sent that interrupts, so that it finds our handler. The handler takes no lock."""
        self.is_saving = False
        """`save` runs."""
        self._calls = threading.Condition()
        """Guards the next three."""
        self._num_calls = 0
        """Of `should_leave`, as long as no step has ended with the group's leaving."""
        self._wait_in_call: int | None = None
        """The group leaves between two steps: in which call this rank waits until it is known at which one. None: it does not."""
        self._leave_at_call: int | None = None
        """At which call all ranks of the group leave, or the first one after it that is between two steps."""

    # -------------------------------------------------------------------------------------------------- being asked to

    def leave_on(self, number: int, save: Callable[[], object] | None, deadline: timedelta) -> None:
        """See `Manager.leave_on`."""
        if deadline <= timedelta(0):
            raise ConfigError(f"deadline={deadline}: a positive duration was expected", "deadline")
        if threading.current_thread() is not threading.main_thread():
            raise ConfigError("leave_on has to be called on the main thread, where Python handles signals", "leave_on")
        plan = self._plans[number] = save, deadline.total_seconds()  # before the handler, which may run at once
        try:
            before = signal.signal(number, self._handle)
        except (OSError, ValueError) as error:
            raise ConfigError(f"signal {number!r} cannot be handled: {error}", "leave_on") from error
        self._handlers.setdefault(number, before)
        if self._go_at is None:
            self._save, self._deadline_s = plan

    def leaves_on(self, number: int) -> bool:
        """Return whether `leave_on` was called for a signal. Any thread."""
        return number in self._plans

    def _handle(self, number: int, frame: FrameType | None) -> None:
        """The signal's handler: on the main thread, in the middle of anything, so it takes no lock and writes no log."""
        before = self._handlers.get(number)
        if (
            os.getpid() != self._owner or self._is_shut_down
        ):  # a forked child; or nobody takes this handler away any more
            signal.signal(number, signal.SIG_DFL if before is None else before)
            os.kill(os.getpid(), number)
            return
        if self._interrupts:
            self._interrupts = False
            if not self._script_knows:
                self._is_done = True
                raise GroupLeftError("the time to leave is over", "leave_on")
            return
        is_first = self._signal is None
        if is_first:
            self._signal = number
            if self._go_at is None:
                self._save, self._deadline_s = self._plans[number]
            self._client.send(LeaveWish(reason=_name_of(number)))
            self._client.schedule(0.0, self._say_so)
            self._begin_countdown()
        if callable(before) and not (is_first and before is signal.default_int_handler):
            before(number, frame)

    def _say_so(self) -> None:
        logger.warning(
            "%s: %s: this replica group leaves its job after its step; after %g s it goes in any case",
            self._client.replica_id,
            self._why(),
            self._deadline_s,
        )

    def _why(self) -> str:
        return "it was asked to leave" if self._signal is None else _name_of(self._signal)

    def _begin_countdown(self) -> None:
        """Any thread, and the signal's handler."""
        if self._go_at is None:
            self._go_at = time.monotonic() + self._deadline_s
            self._client.schedule(self._deadline_s, self._time_is_over)

    def heard(self, message: GroupToRank) -> None:
        """The group was told to leave, or has left; on the coordination thread."""
        if isinstance(message, GroupBroken):
            with self._calls:
                self._calls.notify_all()
            if self._client.has_left and not self._is_at_it:
                self._interrupt()
            return
        self._begin_countdown()
        with self._calls:
            if isinstance(message, LetGo):
                self._wait_in_call = self._num_calls + 1
                self._client.send(LeaveAt(call=self._wait_in_call))
            elif isinstance(message, LeaveAt):
                self._leave_at_call = message.call
                self._calls.notify_all()

    def _time_is_over(self) -> None:
        """On the coordination thread."""
        if self._is_done:
            return
        if not self._client.has_left:
            logger.error(
                "%s has not left its job within %g s: it goes as it is; %s",
                self._client.replica_id,
                self._deadline_s,
                "its save is not done" if self.is_saving else "its loop did not come to the end of the step",
            )
            self._client.go(f"it goes as it is, {self._deadline_s:g} s after it was asked to leave")
        self._interrupt()

    @property
    def _script_knows(self) -> bool:
        """Whether the script is on its way out: a second error would only break off its own cleanup."""
        return self._is_done or self._client.has_told_main_thread

    def _interrupt(self) -> None:
        """Raise a `GroupLeftError` on the main thread, which may wait for what never comes. Any other thread.

        Nothing is raised where the script knows already, and once at most.
        """
        with self._interrupting:
            number = next(iter(self._handlers), None)
            main = threading.main_thread().ident
            if number is not None and main is not None and not (self._script_knows or self._interrupts):
                self._interrupts = True
                signal.pthread_kill(main, number)

    # -------------------------------------------------------------------------------------------------------- leaving

    def should_leave(self) -> bool:
        """See `Manager.should_leave`."""
        if not self._is_at_it and not self._client.view().is_leaving:
            self._count_call()
        return self._leaves_now()

    def _count_call(self) -> None:
        """Leave in this call, if the ranks of the group have agreed on it; where they are about to, wait for that."""
        with self._calls:
            self._num_calls += 1
            if self._wait_in_call is None or self._num_calls < self._wait_in_call:
                return
            until = time.monotonic() if self._go_at is None else self._go_at
            while self._leave_at_call is None and not self._client.is_over and (left_s := until - time.monotonic()) > 0:
                self._calls.wait(left_s)
            is_here = self._leave_at_call is not None and self._num_calls >= self._leave_at_call
        if is_here and self._client.view().is_between_steps:
            self._client.leave_between_steps()

    def _leaves_now(self) -> bool:
        if not self._is_at_it and self._client.view().is_leaving:
            self._leave()
        elif not self._is_at_it and self._client.has_left:
            self._is_done = True  # the answer says so; a `save` that asks is not at its end yet
        return self._is_at_it or self._client.has_left

    def check(self) -> None:
        """See that a step may begin. One that is open is over.

        Raises:
            GroupLeftError: none does any more.
        """
        if not self._client.may_begin() or self._client.has_left:
            self._leaves_now()
            self._is_done = True
            raise GroupLeftError(
                f"replica group {self._client.replica_id} has left its job: it begins no step any more",
                self._client.replica_id,
            )

    def _leave(self) -> None:
        """Save, and wait until all ranks of the group have; at most until the deadline."""
        self._is_at_it = True
        client = self._client
        until = time.monotonic() + self._deadline_s if self._go_at is None else self._go_at
        # Who waits in a collective after the step, for a metric say, is not to wait while this rank saves.
        client.send(LeaveWish(is_told=True, issued=[self._clearing.count]))
        try:
            self._save_state(until)
            client.leave(self._why(), until)
            self._is_done = True
        except GroupLeftError:  # the time is over
            self._is_done = True
        logger.info("%s has left its job at step %d: %s", client.replica_id, client.view().version.step, self._why())

    def _save_state(self, until: float) -> None:
        """Call `save`, and wait for what it returns. What goes wrong is logged: the group leaves all the same."""
        name = self._client.replica_id
        if self._save is None:
            return
        if self._client.view().is_behind:
            logger.warning("%s leaves without a save: others hold a newer state", name)
            return
        self.is_saving = True
        try:
            with self._timekeeper.waiting(Waits.SAVE):
                saved = self._save()
                if isinstance(saved, Future) and self._is_there(saved, until):
                    saved.result()
        except GroupLeftError:
            raise
        except Exception:
            logger.exception("%s leaves, and its save has failed", name)
        finally:
            self.is_saving = False

    def _is_there(self, saved: Future[Any], until: float) -> bool:
        """Wait for a save at most until a moment on the monotonic clock; return whether it has ended."""
        done, _ = wait([saved], max(until - time.monotonic(), 0.0))
        if not done:
            logger.error("%s leaves, and its save is not done", self._client.replica_id)
        return bool(done)

    def shutdown(self) -> None:
        """The Manager ends: signals are handled as before, where none has come. What was asked to leave ignores further ones."""
        with self._interrupting:
            self._is_done = True
        if self._signal is not None or threading.current_thread() is not threading.main_thread():
            self._is_shut_down = self._signal is None
            return
        for number, before in self._handlers.items():
            if signal.getsignal(number) == self._handle:
                signal.signal(number, signal.SIG_DFL if before is None else before)


def _name_of(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # of real-time signals only two have names
        return f"signal {number}"
