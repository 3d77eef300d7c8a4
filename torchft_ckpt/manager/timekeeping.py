"""The ledger of the training thread, kept by the clock: threads say here what begins and what ends."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

import torch

from torchft_ckpt.core.coordination.waiting import Phase
from torchft_ckpt.core.training.ledger import Account, Ledger, State, Waits
from torchft_ckpt.threads import Condition


class Timekeeper:
    """Keeps the ledger of this rank. Any thread.

    Args:
        is_spare: this group does not train.
        clock: monotonic, in seconds.
    """

    def __init__(self, *, is_spare: bool = False, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._ledger = Ledger(clock())
        self._lock = Condition()
        self._trainer = threading.get_ident()
        self._outside = State.SPARE if is_spare else State.OUTSIDE
        self._between = State.BETWEEN
        self._num_saves = 0
        """So many are being written: what is copied aside then is copied for them."""
        self.num_ended_saves = {"saved": 0, "failed": 0}

    def begins_step(self, *, is_round: bool = False) -> None:
        """The training thread, which is the one that calls, begins a step. One that is open was abandoned.

        `is_round`: the step is a round of an outer loop, so what is computed between two of them is a part of the next one.
        """
        self._trainer, self._between = threading.get_ident(), State.STEP if is_round else State.BETWEEN
        self._goes(self._between)
        self._goes(State.STEP)

    def goes_outside(self) -> None:
        """It asks, beside the quorum, for the state of the others."""
        self._goes(self._outside)

    def goes_between(self) -> None:
        """It is between two steps."""
        self._goes(self._between)

    def _goes(self, state: State) -> None:
        with self._lock:
            self._ledger.goes(state, self._clock())

    def took_step(self) -> None:
        """The optimizers have taken the step, if one was to be taken."""
        if self._ledger.state is State.TAKING:
            self._goes(self._between)

    @contextlib.contextmanager
    def waiting(self, what: Waits) -> Iterator[None]:
        """Around a wait of the training thread. Of another one it counts in a backward pass, which that thread waits for."""
        if threading.get_ident() != self._trainer and torch._C._current_graph_task_id() == -1:
            yield
            return
        who = object()
        try:
            with self._lock:
                self._ledger.waits(who, what, self._clock())
            yield
        finally:
            with self._lock:
                self._ledger.ends(who, self._clock())

    def reduces(self, is_open: bool) -> None:
        """See `Ledger.reduces`."""
        with self._lock:
            self._ledger.reduces(is_open, self._clock())

    def copying(self) -> contextlib.AbstractContextManager[None]:
        """Around what copies aside what is served or saved, as the state is about to change."""
        return self.waiting(Waits.SAVE if self._num_saves else Waits.NEWCOMER)

    def saves(self, saved: Future[Any]) -> None:
        """A save is being written until this is done."""
        with self._lock:
            self._num_saves += 1
        saved.add_done_callback(self._is_saved)

    def _is_saved(self, saved: Future[Any]) -> None:
        with self._lock:
            self._num_saves -= 1
            is_saved = not saved.cancelled() and saved.exception() is None
            self.num_ended_saves["saved" if is_saved else "failed"] += 1

    def quorum_is_at(self, what: Waits | None) -> None:
        """See `Ledger.quorum_is_at`."""
        with self._lock:
            self._ledger.quorum_is_at(what, self._clock())

    def keeps(self, part: float) -> None:
        """See `Ledger.keeps`."""
        with self._lock:
            self._ledger.keeps(part)

    def ends_step(self, fate: Account, *, is_to_take: bool) -> dict[str, float]:
        """A step is decided. Returns what was spent since the last time, by accounts. `is_to_take`: optimizers take it now."""
        with self._lock:
            now = self._clock()
            self._ledger.settles(fate, now)
            is_ours = is_to_take and fate is Account.PRODUCTIVE  # a spare takes the steps of the others
            self._ledger.goes(State.TAKING if is_ours else self._between, now)
            return self._ledger.take()

    def seconds(self) -> dict[Account, float]:
        """Return what was spent on each account so far; the open step is in none yet."""
        with self._lock:
            self._ledger.passes(self._clock())
            return dict(self._ledger.seconds)

    def phases(self, *, of_step: bool = False) -> dict[Phase, float]:
        """Return how long steps were in which phase so far, the open one too; `of_step`: that alone."""
        with self._lock:
            self._ledger.passes(self._clock())
            return self._ledger.phases_of_step() if of_step else dict(self._ledger.phases)

    def close(self) -> dict[str, float]:
        """This life ends. Returns what was spent since the last time."""
        with self._lock:
            self._ledger.closes(self._clock())
            return self._ledger.take()
