"""The receivers of a snapshot: what each has, where it serves it, and whose lease was revoked or has lapsed.

It decides which blocks are still needed. It knows no bytes, locks or clock: the snapshot calls it under its own mutex, and
times are handed in. Sets of blocks are integers used as bit sets.

Names cost nothing to make, and each has to be looked at while the trainer waits: `core/services/fairness.py` says which ones are
kept. Who comes is always taken, so no number of others keeps it out while the state is served. Any of them counts as one that
was told to come.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass

from torchft_ckpt.checkpointing.protocol import MAX_PEERS
from torchft_ckpt.core.services.fairness import Places

MAX_RECEIVERS = 4096
"""Of one snapshot at once."""
MAX_SERVING = 256
"""Of them, and of those that are done, whose addresses are told to others."""
MAX_NAMES = 16384
"""Of receivers of one snapshot that are remembered."""


@dataclass(slots=True)
class _Receiver:
    received: int
    last_contact_s: float
    client: str


@dataclass(frozen=True, slots=True)
class PeerBlocks:
    """A receiver that serves what it holds."""

    address: str
    held: int


class Receivers:
    """The receivers of one snapshot."""

    def __init__(self, num_blocks: int, num_expected: int) -> None:
        self._all = (1 << num_blocks) - 1
        self._num_announced = self.num_expected = num_expected
        self.num_seen = 0
        self._seen: dict[str, int] = {}  # by name, in which place they came
        self._active: dict[str, _Receiver] = {}
        self._places = Places(MAX_RECEIVERS)
        """Of those that are active."""
        self._addresses: dict[str, str] = {}
        """The addresses at which receivers serve that are active or done."""
        self._serving = Places(MAX_SERVING)
        """Of those that have an address."""
        self._done: set[str] = set()
        self._revoked: set[str] = set()
        self._unseen_revoked = False

    def expect(self, num_receivers: int) -> None:
        """Expect all ranks of a group, if one of them was told to fetch it."""
        self.num_expected = max(self.num_expected, self._num_announced * num_receivers)

    def is_known(self, receiver: str | None) -> bool:
        """Whether a receiver of this name has come, and has not lost its lease."""
        return receiver in self._seen and receiver not in self._revoked

    @property
    def num_done(self) -> int:
        return len(self._done)

    @property
    def num_active(self) -> int:
        return len(self._active)

    @property
    def awaits_more(self) -> bool:
        """Whether somebody who was told to come has not come yet, and may."""
        return self.num_seen < self.num_expected and not self._unseen_revoked

    def add(self, name: str, now: float, client: str = "") -> None:
        """A receiver of a client starts from the first block. If there are too many, another one is not kept for any more."""
        if name not in self._seen:
            self._seen[name] = self.num_seen
            self.num_seen += 1
            if len(self._seen) > MAX_NAMES:
                self._forget(next(known for known in self._seen if known not in self._active))
        if name not in self._active:
            self._withdraw_address(name)  # what it serves is of the time before
        self._done.discard(name)
        self._revoked.discard(name)
        self._active[name] = _Receiver(0, now, client)
        lost = self._places.admit(name, client)
        if lost is not None:
            self._drop(lost)

    def _drop(self, name: str) -> None:
        del self._active[name]
        self._places.drop(name)
        self._withdraw_address(name)

    def _withdraw_address(self, name: str) -> None:
        self._serving.drop(name)
        self._addresses.pop(name, None)

    def _forget(self, name: str) -> None:
        del self._seen[name]
        self._done.discard(name)
        self._revoked.discard(name)
        self._withdraw_address(name)

    def share_of(self, name: str) -> tuple[int, int]:
        """Return which receiver this is, from 0 on, and of how many."""
        place = self._seen.get(name, 0)
        return place, max(self.num_expected, self.num_seen, 1)

    def is_revoked(self, name: str | None) -> bool:
        """Whether this receiver lost its lease; one that was told to come but has not may have lost it, too."""
        return name in self._revoked or (self._unseen_revoked and name not in self._seen)

    def revoked(self) -> frozenset[str]:
        """The receivers that lost their lease."""
        return frozenset(self._revoked)

    def contact(self, name: str, now: float, address: str | None = None) -> None:
        """It has asked for something, or taken some of what it is being sent."""
        receiver = self._active.get(name)
        if receiver is not None:
            receiver.last_contact_s = now
            self._places.hear(name)
            self._serving.hear(name)
            if address:
                self._addresses[name] = address
                lost = self._serving.admit(name, receiver.client)
                if lost is not None:
                    del self._addresses[lost]

    def acknowledge(self, name: str, blocks: int) -> bool:
        """It has these blocks, verified; returns whether that was not known."""
        receiver = self._active.get(name)
        if receiver is None or not blocks & self._all & ~receiver.received:
            return False
        receiver.received |= blocks & self._all
        return True

    def finish(self, name: str) -> None:
        """It has everything, or has given up."""
        if self._active.pop(name, None) is not None:
            self._places.drop(name)
            self._done.add(name)

    def needed(self) -> int:
        """Blocks that somebody may still ask for."""
        if self.awaits_more:
            return self._all
        held_by_all = self._all
        for receiver in self._active.values():
            held_by_all &= receiver.received
            if not held_by_all:
                break
        return self._all & ~held_by_all

    def lapse(self, silent_since: float) -> list[str]:
        """End the leases of those who have not been heard of since; return their names."""
        gone = [name for name, receiver in self._active.items() if receiver.last_contact_s < silent_since]
        for name in gone:
            self._drop(name)
            self._revoked.add(name)
        return gone

    def revoke_until(self, fits: Callable[[int], bool]) -> list[str]:
        """End leases until what is needed fits: first of those who have not even come, then of who has least.

        One look at each, however many have registered: the trainer waits.

        Args:
            fits: whether so many blocks can be kept, a bit set; of fewer blocks it says the same or yes.

        Returns:
            whose leases they were.
        """
        if fits(self.needed()):
            return []
        revoked: list[str] = []
        if self.awaits_more:
            revoked.append(f"{self.num_expected - self.num_seen} receivers that have not come yet")
            self._unseen_revoked = True
        slowest_last = sorted(
            self._active, key=lambda name: (self._active[name].received.bit_count(), name), reverse=True
        )
        blocks = num_kept = 0
        for name in slowest_last:
            blocks |= self._all & ~self._active[name].received
            if not fits(blocks):
                break
            num_kept += 1
        for name in reversed(slowest_last[num_kept:]):
            self._drop(name)
            self._revoked.add(name)
            revoked.append(f"receiver {name}")
        return revoked

    def peers_of(self, name: str) -> list[PeerBlocks]:
        """Return others that serve what they hold; which ones, if there are many, depends on the name alone."""
        peers = []
        for other, address in self._addresses.items():
            receiver = self._active.get(other)
            held = self._all if receiver is None else receiver.received
            if other != name and held:
                peers.append((zlib.crc32(f"{name} {other}".encode()), PeerBlocks(address, held)))
        peers.sort(key=lambda peer: peer[0])
        return [peer for _, peer in peers[:MAX_PEERS]]
