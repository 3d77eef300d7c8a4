"""Keeps what one process serves: its snapshots, newest first, and relays of others'. It says which one answers, and ends each.

It knows steps, receivers and leases; it does not know HTTP, and time is handed in.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from enum import Enum

from torchft_ckpt.checkpointing.protocol import Index, SnapshotEntry
from torchft_ckpt.checkpointing.serving.relay import Relay, Served
from torchft_ckpt.checkpointing.serving.snapshot import Snapshot
from torchft_ckpt.checkpointing.state.format import FORMAT_NAME, FORMAT_VERSION

MAX_RELAYS = 4
FRESH_S = 2.0
"""A state that its owner has left for so long is not the newest any more, though it is kept for those who receive it."""
_MAX_REMEMBERED = 8
_MAX_WISHES = 16


class Availability(Enum):
    """The answer to whoever asks for a step."""

    SERVING = "serving"
    NOT_YET = "not_yet"
    OVER = "over"


@dataclass(slots=True)
class _Lease:
    snapshot: Snapshot
    ends: float
    left_at: float | None = None
    """The moment at which the owner went on to another step."""
    is_retired: bool = False
    """Nobody gets it who asks from now on, see `goes_on_for`: the state of its step is to be served anew."""

    def goes_on_for(self, receiver: str | None) -> bool:
        """Whether one that comes again gets it though it is retired: a learner, once the state of now is of a later step."""
        return self.left_at is not None and self.snapshot.outlives_step and self.snapshot.is_known_to(receiver)


class SnapshotRegistry:
    """Keeps open snapshots. Every method may be called from any thread.

    Args:
        max_snapshots: how many may be open; beyond that the oldest one is closed, whoever is reading it.
    """

    def __init__(self, max_snapshots: int = 2) -> None:
        self._max_snapshots = max_snapshots
        self._lock = threading.Lock()
        self._leases: list[_Lease] = []  # newest first
        self._relays: list[tuple[Relay, float]] = []
        self._newest_step: int | None = None
        self._requests: dict[int | None, float] = {}
        """Steps that were asked for and are not served, None for any, and when they were asked for last."""
        self._revoked: dict[str, frozenset[str]] = {}
        self._cannot: tuple[int, str] | None = None

    def cannot(self, step: int, why: str) -> None:
        """The state of a step, which is the newest, cannot be sent: who waits for it is told why, until another one is served."""
        with self._lock:
            self._cannot = step, why

    def why_not(self, step: int) -> str:
        """Say why the state of a step cannot be sent; empty: it can, as far as is known."""
        cannot = self._cannot
        return cannot[1] if cannot is not None and cannot[0] == step else ""

    def put(self, snapshot: Snapshot, *, lease_ends: float, now: float = 0.0) -> list[Snapshot]:
        """Serve a snapshot until `lease_ends`. The oldest that no learner receives may have to be closed for it: return those of
        them that somebody waits for.
        """
        with self._lock:
            self._drop_closed()
            self._cannot = None
            self._leases.insert(0, _Lease(snapshot, lease_ends))
            self._come_to(snapshot.step, now)
            self._requests = {
                step: at for step, at in self._requests.items() if step is not None and step > snapshot.step
            }
            for_learners = [lease for lease in self._leases[1:] if lease.snapshot.outlives_step]
            others = [lease for lease in self._leases[1:] if not lease.snapshot.outlives_step]
            closing = [lease.snapshot for lease in [*for_learners, *others][self._max_snapshots - 1 :]]
            self._leases = [lease for lease in self._leases if lease.snapshot not in closing]
        awaited = [old for old in closing if old.is_awaited]
        for old in closing:
            old.close()
        return awaited

    def is_at(self, step: int, now: float) -> bool:
        """The owner is at a step: earlier ones are over. Returns whether somebody waits for one."""
        with self._lock:
            changed = self._newest_step != step
            self._come_to(step, now)
            return changed and bool(self._requests)

    def _come_to(self, step: int, now: float) -> None:
        self._newest_step = step
        for lease in self._leases:
            if lease.snapshot.step == step:
                lease.left_at = None
            elif lease.left_at is None:
                lease.left_at = now

    def find(self, step: int, receiver: str | None = None) -> tuple[Availability, Snapshot | None]:
        """Return the newest open snapshot of a step that a receiver may get, or why there is none."""
        with self._lock:
            self._drop_closed()
            for lease in self._leases:
                if lease.snapshot.step == step and (not lease.is_retired or lease.goes_on_for(receiver)):
                    return Availability.SERVING, lease.snapshot
            # The newest step itself may be served again: a discarded step is tried again from the same state.
            if self._newest_step is None or step >= self._newest_step:
                return Availability.NOT_YET, None
            return Availability.OVER, None

    def find_latest(self, now: float) -> Snapshot | None:
        """Return the newest open snapshot; where there is none, or its owner left it long ago, note that one was asked for."""
        with self._lock:
            self._drop_closed()
            for lease in self._leases:
                is_fresh = lease.left_at is None or now - lease.left_at <= FRESH_S
                if is_fresh and not lease.is_retired and not lease.snapshot.is_changed:
                    return lease.snapshot
            self._requests[None] = now
            return None

    def request_snapshot(self, step: int, now: float) -> None:
        """Note that somebody waits for a step that is not served yet; of too many, the one furthest ahead is forgotten."""
        with self._lock:
            self._requests[step] = now
            if len(self._requests) > _MAX_WISHES:
                furthest = max(wanted for wanted in self._requests if wanted is not None)
                over = [wanted for wanted in self._requests if wanted is not None and wanted < (self._newest_step or 0)]
                for wanted in over or [furthest]:
                    del self._requests[wanted]

    def has_pending_request(self, step: int, now: float, max_age_s: float) -> bool:
        """Whether somebody has asked lately for this step, or for whatever is newest, and it was not served.

        Not while others receive as many snapshots as may be open: one more would end one of theirs.
        """
        with self._lock:
            asked_at = [self._requests[wanted] for wanted in (None, step) if wanted in self._requests]
            if asked_at:
                self._drop_closed()
                num_received = sum(lease.snapshot.is_received for lease in self._leases)
                if num_received >= self._max_snapshots:
                    return False
        return any(now - at <= max_age_s for at in asked_at)

    def find_by_id(self, snapshot_id: str) -> Served | None:
        with self._lock:
            self._drop_closed()
            for lease in self._leases:
                if lease.snapshot.id == snapshot_id:
                    return lease.snapshot
            return next((relay for relay, _ in self._relays if relay.id == snapshot_id), None)

    def add_relay(self, relay: Relay, *, ends: float) -> None:
        """Serve what a receive has, until `ends`."""
        with self._lock:
            self._relays.insert(0, (relay, ends))
            closing = [old for old, _ in self._relays[MAX_RELAYS:]]
            del self._relays[MAX_RELAYS:]
        for old in closing:
            old.close()

    def index(self, now: float) -> Index:
        """Return what is served now."""
        with self._lock:
            self._drop_closed()
            leases = list(self._leases)
            relays = [relay for relay, _ in self._relays]
        entries = [
            _entry(
                lease.snapshot,
                lease.snapshot.phase.value,
                lease.snapshot.statistics().num_receivers_seen,
                is_fresh=lease.left_at is None or now - lease.left_at <= FRESH_S,
            )
            for lease in leases
        ]
        entries += [_entry(relay, "relay", 0) for relay in relays]
        return Index(format=FORMAT_NAME, version=FORMAT_VERSION, newest_step=self._newest_step, snapshots=entries)

    def serving_step(self) -> int | None:
        """The newest step that is open."""
        with self._lock:
            self._drop_closed()
            return self._leases[0].snapshot.step if self._leases else None

    def register(self, snapshot: Snapshot, receiver: str, now: float, client: str = "") -> bool:
        """Start a receiver of a client on a snapshot, and take it off the others: it fetches one state at a time."""
        if not snapshot.register(receiver, now, client):
            return False
        for other in self.open_snapshots():
            if other is not snapshot:
                other.finish(receiver)
        return True

    def detach_all(self) -> None:
        """Return once the live state may be mutated."""
        self._close_relays(float("inf"))
        for snapshot in self.open_snapshots():
            snapshot.detach()

    def withdraw_all(self) -> None:
        """Return once the live state may be mutated: nobody who was told to fetch it needs it any more.

        What was served without naming receivers is for those who look on from outside: these still get it, and so do learners.
        """
        self._close_relays(float("inf"))
        for snapshot in self.open_snapshots():
            if snapshot.is_of_its_step_alone:
                snapshot.close()
            else:
                snapshot.detach()

    def retire_all(self, *, keeps_awaited: bool = False) -> bool:
        """Give no snapshot to new receivers; close those of a step for which nobody waits any more. Nothing is copied.

        Return whether any was left alone.

        Args:
            keeps_awaited: leave those alone that somebody receives, or was told to come for.
        """
        self._close_relays(float("inf"))
        with self._lock:
            self._drop_closed()
            retired = [lease for lease in self._leases if not (keeps_awaited and lease.snapshot.is_awaited)]
            for lease in retired:
                lease.is_retired = True
            over = [lease.snapshot for lease in retired if lease.snapshot.is_of_its_step_alone]
            is_any_left = len(retired) < len(self._leases)
        for snapshot in over:
            snapshot.close()
        return is_any_left

    def lapse(self, silent_since: float) -> None:
        """End the leases of receivers that have not been heard of since."""
        for snapshot in self.open_snapshots():
            snapshot.lapse(silent_since)

    def expire(self, now: float) -> list[Snapshot]:
        """Close the snapshots and relays whose time has ended; return the snapshots."""
        self._close_relays(now)
        with self._lock:
            ended = [lease.snapshot for lease in self._leases if lease.ends <= now]
            self._leases = [lease for lease in self._leases if lease.ends > now]
        for snapshot in ended:
            snapshot.close()
        return ended

    def close_all(self) -> None:
        self.expire(float("inf"))

    def open_snapshots(self) -> list[Snapshot]:
        """Those that are open, newest first."""
        with self._lock:
            self._drop_closed()
            return [lease.snapshot for lease in self._leases]

    def was_revoked(self, snapshot_id: str, receiver: str | None) -> bool:
        """Whether a snapshot that is closed by now was taken from a receiver because it was too slow."""
        with self._lock:
            self._drop_closed()
            return receiver in self._revoked.get(snapshot_id, ())

    def _remember_revoked(self, snapshot: Snapshot) -> None:
        revoked = snapshot.revoked()
        if revoked:
            self._revoked[snapshot.id] = revoked
            while len(self._revoked) > _MAX_REMEMBERED:
                del self._revoked[next(iter(self._revoked))]

    def _close_relays(self, now: float) -> None:
        with self._lock:
            ended = [relay for relay, ends in self._relays if ends <= now]
            self._relays = [(relay, ends) for relay, ends in self._relays if ends > now]
        for relay in ended:
            relay.close()

    def _drop_closed(self) -> None:
        for lease in self._leases:
            if lease.snapshot.closed:
                self._remember_revoked(lease.snapshot)
        self._leases = [lease for lease in self._leases if not lease.snapshot.closed]
        self._relays = [(relay, ends) for relay, ends in self._relays if not relay.closed]


def _entry(served: Snapshot | Relay, phase: str, num_receivers: int, *, is_fresh: bool = True) -> SnapshotEntry:
    return SnapshotEntry(
        step=served.step,
        snapshot=served.id,
        total_bytes=served.total_bytes,
        num_tensors=served.num_tensors,
        num_blocks=served.num_blocks,
        phase=phase,
        num_receivers=num_receivers,
        is_fresh=is_fresh,
    )
