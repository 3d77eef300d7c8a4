"""The snapshots that one process serves, newest first: which one answers for a step, and when each one ends.

It knows steps, receivers and leases; it does not know HTTP, and time is handed in.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from enum import Enum

from torchft_ckpt.checkpointing.snapshot import Snapshot


class Answer(Enum):
    """What can be said about a step that is asked for."""

    SERVING = "serving"
    NOT_YET = "not_yet"
    OVER = "over"


@dataclass(slots=True)
class _Lease:
    snapshot: Snapshot
    ends: float


class Shelf:
    """Keeps open snapshots. Every method may be called from any thread.

    Args:
        max_snapshots: how many may be open; beyond that the oldest one is closed, whoever is reading it.
    """

    def __init__(self, max_snapshots: int = 2) -> None:
        self._max_snapshots = max_snapshots
        self._lock = threading.Lock()
        self._leases: list[_Lease] = []  # newest first
        self._newest_step: int | None = None

    def put(self, snapshot: Snapshot, *, lease_ends: float) -> list[Snapshot]:
        """Serve a snapshot until `lease_ends`; return those that had to be closed for it."""
        with self._lock:
            self._leases.insert(0, _Lease(snapshot, lease_ends))
            self._newest_step = snapshot.step
            closing = [lease.snapshot for lease in self._leases[self._max_snapshots :]]
            del self._leases[self._max_snapshots :]
        for old in closing:
            old.close()
        return closing

    def find(self, step: int) -> tuple[Answer, Snapshot | None]:
        """Return the newest open snapshot of a step, or why there is none."""
        with self._lock:
            self._drop_closed()
            for lease in self._leases:
                if lease.snapshot.step == step:
                    return Answer.SERVING, lease.snapshot
            # The newest step itself may be served again: a discarded step is tried again from the same state.
            if self._newest_step is None or step >= self._newest_step:
                return Answer.NOT_YET, None
            return Answer.OVER, None

    def find_by_id(self, snapshot_id: str) -> Snapshot | None:
        """Return an open snapshot by its id."""
        with self._lock:
            self._drop_closed()
            return next((lease.snapshot for lease in self._leases if lease.snapshot.id == snapshot_id), None)

    def serving_step(self) -> int | None:
        """The newest step that is open."""
        with self._lock:
            self._drop_closed()
            return self._leases[0].snapshot.step if self._leases else None

    def register(self, snapshot: Snapshot, receiver: str) -> bool:
        """Start a receiver on a snapshot, and take it off the others: it fetches one state at a time."""
        if not snapshot.register(receiver):
            return False
        for other in self.open_snapshots():
            if other is not snapshot:
                other.finish(receiver)
        return True

    def detach_all(self) -> None:
        """Return once the live state may be mutated."""
        for snapshot in self.open_snapshots():
            snapshot.detach()

    def expire(self, now: float) -> list[Snapshot]:
        """Close the snapshots whose lease has ended; return them."""
        with self._lock:
            ended = [lease.snapshot for lease in self._leases if lease.ends <= now]
            self._leases = [lease for lease in self._leases if lease.ends > now]
        for snapshot in ended:
            snapshot.close()
        return ended

    def close_all(self) -> None:
        """Close every snapshot."""
        self.expire(float("inf"))

    def open_snapshots(self) -> list[Snapshot]:
        """Those that are open, newest first."""
        with self._lock:
            self._drop_closed()
            return [lease.snapshot for lease in self._leases]

    def _drop_closed(self) -> None:
        self._leases = [lease for lease in self._leases if not lease.snapshot.closed]
