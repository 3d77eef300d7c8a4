"""What the threads of one fetch share, under one condition: what is missing, who brings it over which path, and how it ends.

Whose state counts is said where it differs: of blocks one source's is (`block_transfer`), of boxes one group's
(`resharding.transfer`).
"""

from __future__ import annotations

import random
import threading
import time
from abc import ABC, abstractmethod

from torchft_ckpt.checkpointing.state.format import Manifest
from torchft_ckpt.checkpointing.state.memory import SLICE_BYTES
from torchft_ckpt.core.transfer.paths import Path, Paths
from torchft_ckpt.core.transfer.scheduler import Batches, TransferLedger, units_of
from torchft_ckpt.errors import CheckpointError

WAIT_S = 1.0


class TransferState(ABC):
    """The state of one fetch. Every method may be called from any thread.

    Args:
        seed: for the order of units among many receivers.
    """

    def __init__(self, seed: int = 0) -> None:
        self.changed = threading.Condition()
        self._pick = random.Random(seed).randrange
        self._failures: dict[str, CheckpointError] = {}
        self._over = False
        self._outcome: CheckpointError | None = None
        self._ready = False
        self._manifests: dict[str, Manifest] = {}
        self._ledger = TransferLedger((), batches=Batches(first_bytes=0), pick=self._pick)
        self._paths = Paths(SLICE_BYTES)
        self._arrived_over: dict[str, int] = {}
        self._last_arrival_at = 0.0
        self.step = 0
        """Of the state that is received, once it is ready."""
        self.total_bytes = 0
        self.received_bytes = 0
        self.skipped_bytes = 0
        """Were here already."""
        self._skipped = 0
        """Units that were, as a bit set."""
        self.is_equal = False
        """All units were here already, in the local state."""
        self.wasted_bytes = 0
        self.brought_bytes = 0
        """Came from sources and peers, verified or not."""

    # How it ends

    @property
    def over(self) -> bool:
        """Whether there is an outcome."""
        return self._over

    @property
    def outcome(self) -> CheckpointError | None:
        """Why it failed, once it is over; None if all is here."""
        return self._outcome

    def end(self, outcome: CheckpointError | None) -> None:
        """Set the outcome; the first one counts."""
        with self.changed:
            if not self._over:
                self._over, self._outcome = True, outcome
                self.changed.notify_all()

    def fail_source(self, name: str, error: CheckpointError) -> None:
        """Ask a source for nothing more; end the fetch where nobody is left who could complete it."""
        with self.changed:
            if self._over:
                return
            self._failures.setdefault(name, error)
            self._ledger.drop_source(name)
            self._without(name)
            self._check_sources()
            self.changed.notify_all()

    def fail_peer(self, name: str) -> None:
        """Ask another receiver for nothing more."""
        with self.changed:
            self._ledger.drop_source(name)
            self._check_sources()
            self.changed.notify_all()

    def failures(self) -> dict[str, CheckpointError]:
        """Why sources were dropped."""
        with self.changed:
            return dict(self._failures)

    def _without(self, name: str) -> None:  # noqa: B027 - nothing by default
        """With `changed` held: forget a source that has failed."""

    @abstractmethod
    def _check_sources(self) -> None:
        """With `changed` held: end the fetch where what is missing cannot be had any more."""

    def why_hopeless(self, what: str = "") -> CheckpointError:
        """Return the error of a fetch that no source is left for."""
        (first, error), *others = self._failures.items()
        also = "".join(f"; {name}: {str(other)[:300]}" for name, other in others)
        return type(error)(f"no source is left{what}. {first}: {error}{also}", party=error.party)

    def pause(self, pause_s: float) -> bool:
        """Wait for some seconds; return False, at once, if it is over."""
        with self.changed:
            return not self.changed.wait_for(lambda: self._over, pause_s)

    def manifest_of(self, name: str) -> Manifest | None:
        """The manifest that a source sent."""
        with self.changed:
            return self._manifests.get(name)

    @abstractmethod
    def arrived_text(self) -> str:
        """How much is here, for messages."""

    @property
    def is_ready(self) -> bool:
        """Whether it is known what is to be received."""
        return self._ready

    # Streams

    @abstractmethod
    def is_primary(self, name: str) -> bool:
        """Whether the state that counts is a source's own: what it sends needs no BLAKE3 digest."""

    @abstractmethod
    def name_of(self, unit: int) -> str:
        """What a unit is called in messages."""

    @abstractmethod
    def arrived(
        self, stream: int, source: str, path: str, unit: int, digest: bytes, blake3: bytes | None = None
    ) -> bool:
        """Note a unit that has come whole; whether the stream goes on with its batch.

        Args:
            blake3: its BLAKE3 digest; None if the source's own state counted when the unit came.

        Raises:
            DigestMismatchError: the source is to blame for what it sent.
        """

    def open_stream(self, source: str, path: str) -> int:
        """Add a stream from a source over a path."""
        with self.changed:
            return self._ledger.open_stream(source, time.monotonic(), path)

    def receives_into(self, memory: object) -> bool:
        """Whether units are received into this memory, and not into another since the fetch began again."""
        return True

    def next_batch(self, stream: int, source: str, path: str) -> list[int] | None:
        """Wait for work; return what a stream is to ask for next.

        None if the stream is to end: the fetch is over, or its source or path was dropped.
        """
        with self.changed:
            while not self._over and self._ledger.has_source(source) and self._paths.is_used(path):
                batch = self._next_batch(stream)
                if batch:
                    return batch
                self._check_sources()
                self.changed.wait(WAIT_S)
            return None

    def _next_batch(self, stream: int) -> list[int]:
        return self._ledger.next_batch(stream, time.monotonic())

    def asked_of(self, stream: int) -> set[int]:
        """What a stream was asked for and has not arrived: its memory is that stream's alone."""
        with self.changed:
            return {*self._ledger.asked_of(stream)}

    def _note_arrival(self, stream: int, path: str, unit: int, now: float) -> bool:
        """With `changed` held: a unit that `came` is here; whether the stream goes on with its batch."""
        self._last_arrival_at = now
        self._arrived_over[path] = self._arrived_over.get(path, 0) + 1
        self.received_bytes += self._ledger.size(unit)
        return self._ledger.arrived(stream, unit)

    def _note_skipped(self, units: int) -> None:
        """With `changed` held: units that are held were here already."""
        self._skipped |= units
        self.skipped_bytes += self._ledger.num_bytes(units_of(units))

    def _invalidate(self, units: int) -> None:
        """With `changed` held: of these units, those that are held are not those that are wanted."""
        units &= self._ledger.held
        received_bytes = self._ledger.num_bytes(units_of(units & ~self._skipped))
        self.received_bytes -= received_bytes
        self.wasted_bytes += received_bytes
        self.skipped_bytes -= self._ledger.num_bytes(units_of(units & self._skipped))
        self._skipped &= ~units
        self._ledger.invalidate(units)

    def give_back(self, stream: int) -> None:
        """Have others bring what a stream was asked for and has not arrived; it does not write there any more."""
        with self.changed:
            self._ledger.give_back(stream)
            self.changed.notify_all()

    def close_stream(self, stream: int, wasted_bytes: int = 0) -> None:
        """Take a stream off; what it had in flight goes to others."""
        with self.changed:
            self._ledger.close_stream(stream)
            self.wasted_bytes += wasted_bytes
            self.changed.notify_all()

    def num_arrived_over(self, path: str) -> int:
        """Units that have come over a path."""
        with self.changed:
            return self._arrived_over.get(path, 0)

    def overdue(self) -> list[int]:
        """Return streams to cut; their sources are asked last from now on."""
        with self.changed:
            if not self._ready or self._over:
                return []
            numbers = self._ledger.overdue(time.monotonic())
            for number in numbers:
                self._ledger.demote(number)
            return numbers

    def num_sources(self) -> int:
        """Sources that have not been dropped."""
        with self.changed:
            return self._ledger.num_sources()

    # Paths

    def add_path(self, source: str, path: str) -> None:
        """Measure a path to a source from now on, and drop it where others are much faster."""
        with self.changed:
            self._paths.add(source, path, time.monotonic())

    def is_used(self, path: str) -> bool:
        """Whether more is to come over a path."""
        with self.changed:
            return self._paths.is_used(path)

    def await_use(self, source: str, path: str) -> bool:
        """Wait until more is to come over a path; False if the source or the fetch is over before."""
        with self.changed:
            while not self._over and self._ledger.has_source(source) and not self._paths.is_used(path):
                self.changed.wait(WAIT_S)
            return not self._over and self._ledger.has_source(source)

    def gave(self, path: str, num_bytes: int) -> None:
        """Count what has come over a path, as it comes."""
        with self.changed:
            self.brought_bytes += num_bytes
            self._paths.gave(path, num_bytes, time.monotonic())

    def judge_paths(self) -> tuple[dict[str, list[int]], list[str]]:
        """Return the streams to cut because their paths are slow, by path, and the paths to use again."""
        with self.changed:
            if not self._ready or self._over:
                return {}, []
            slow, again = self._paths.judge(time.monotonic(), self._ledger.idle_sources())
            self.changed.notify_all()
            return {path: self._ledger.streams_over(path) for path in slow}, again

    def lose_path(self, path: str) -> list[str] | None:
        """Note that a path is broken; return those to use again instead. None: it was the last to its source."""
        with self.changed:
            self.changed.notify_all()
            return self._paths.lose(path)

    def paths_to(self, source: str) -> dict[str, Path]:
        """The paths to a source, with what came over each."""
        with self.changed:
            return self._paths.to(source)
