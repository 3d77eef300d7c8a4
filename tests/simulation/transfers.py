"""Moving the state from a healthy rank to a healing one: it takes time, fails, stalls with its source, or is torn."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from random import Random

from simulation.clock import Clock, Process
from torchft_ckpt.core.coordination.messages import StateVersion

TELL_S = 0.2


class Arrival(Enum):
    """How a transfer ended."""

    WHOLE = "whole"
    FAILED = "failed"
    TORN = "torn"


@dataclass(slots=True, eq=False)
class Snapshot:
    """What a rank serves."""

    version: StateVersion
    value: object
    process: Process
    request: int | None = None
    """Of that rank, in which its values were these: those that no step changes move from one attempt at a step to the next.
    None: they do not."""
    outlives_step: bool = False
    """Who receives it goes on when its owner asks anew."""
    is_open: bool = True


class Transfers:
    """All snapshots and transfers of the job.

    Args:
        clock, rng: time and chance.
        stall_timeout_s: how long a receiver waits for a source that says nothing.
    """

    def __init__(self, clock: Clock, rng: Random, stall_timeout_s: float) -> None:
        self._clock, self._rng = clock, rng
        self._stall_timeout_s = stall_timeout_s
        self._snapshots: dict[str, Snapshot] = {}
        self.duration_s = (0.02, 0.15)
        self.staging_s = 0.0
        self.failure_rate = 0.0
        self.torn_rate = 0.0

    def serve(self, address: str, snapshot: Snapshot) -> None:
        """Open a snapshot at an address; the one before is gone."""
        self._snapshots[address] = snapshot

    def withdraw(self, address: str) -> None:
        """What is served at an address is not the state of that name any more."""
        self._snapshots.pop(address, None)

    def retire(self, address: str) -> None:
        """The owner leaves the attempt at a step that it was captured in: nobody who comes from now on gets that."""
        if (snapshot := self._snapshots.pop(address, None)) is not None:
            snapshot.is_open = snapshot.outlives_step

    def fetch(
        self,
        address: str,
        version: StateVersion,
        process: Process,
        done: Callable[[Arrival, Snapshot | None], None],
        tell: Callable[[float], None] | None = None,
        part: float = 1.0,
    ) -> None:
        """Fetch the state of a version; `done` is called once, in the receiver's process.

        Args:
            tell: called there a few times a second with the seconds that are left.
            part: of the state, that is not there yet.
        """
        self._try(address, version, process, done, tell, part, self._clock.now + self._stall_timeout_s)

    def _try(
        self,
        address: str,
        version: StateVersion,
        process: Process,
        done: Callable[[Arrival, Snapshot | None], None],
        tell: Callable[[float], None] | None,
        part: float,
        give_up_at: float,
    ) -> None:
        snapshot = self._snapshots.get(address)
        if snapshot is None or snapshot.version != version or snapshot.process.is_stopped:
            if self._clock.now >= give_up_at or (snapshot is not None and not snapshot.process.is_alive):
                done(Arrival.FAILED, None)
            else:
                self._clock.after(
                    0.01, process, lambda: self._try(address, version, process, done, tell, part, give_up_at)
                )
            return
        took_s = self._rng.uniform(*self.duration_s) * part + self.staging_s
        is_failing = self._rng.random() < self.failure_rate
        is_torn = self._rng.random() < self.torn_rate

        ends_at, rate = self._clock.now + took_s, self._rng.uniform(0.5, 1.5)

        def go_on() -> None:
            left_s = ends_at - self._clock.now
            if tell is not None and left_s > 0:
                tell(left_s * rate)  # what is measured is about right
                self._clock.after(TELL_S, process, go_on)

        if tell is not None:
            go_on()

        def arrive() -> None:
            if is_torn:
                done(Arrival.TORN, None)
            elif is_failing or not snapshot.process.is_alive or not snapshot.is_open:
                done(Arrival.FAILED, None)
            elif snapshot.process.is_stopped:
                self._clock.after(self._stall_timeout_s, process, lambda: done(Arrival.FAILED, None))
            else:
                done(Arrival.WHOLE, snapshot)

        self._clock.after(took_s * (0.5 if is_failing else 1.0), process, arrive)
