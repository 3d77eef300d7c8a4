"""Who receives a snapshot: what each has, where it serves it, and whose lease was revoked or has lapsed.

It decides which blocks are still needed. It knows no bytes, locks or clock: the snapshot calls it under its own mutex, and
times are handed in. Sets of blocks are integers used as bit sets.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass

from torchft_ckpt.checkpointing.protocol import MAX_PEERS

MAX_RECEIVERS = 4096
"""Of one snapshot at once."""
MAX_NAMES = 65536
"""Of receivers of one snapshot, over its life."""


@dataclass(slots=True)
class _Receiver:
    received: int
    last_contact_s: float
    address: str = ""


@dataclass(frozen=True, slots=True)
class PeerBlocks:
    """A receiver that serves what it holds."""

    address: str
    held: int


class Receivers:
    """The receivers of one snapshot.

    Args:
        num_blocks: how many blocks the snapshot has.
        num_expected: how many receivers were told to fetch it.
    """

    def __init__(self, num_blocks: int, num_expected: int) -> None:
        self._all = (1 << num_blocks) - 1
        self._num_told = self._num_expected = num_expected
        self._seen: dict[str, int] = {}  # by name, in which place they came
        self._active: dict[str, _Receiver] = {}
        self._done: dict[str, str] = {}
        self._revoked: set[str] = set()
        self._unseen_revoked = False

    @property
    def num_expected(self) -> int:
        return self._num_expected

    def expect(self, num_receivers: int) -> None:
        """Where ranks were told to fetch it, all ranks of their groups come."""
        self._num_expected = max(self._num_expected, self._num_told * num_receivers)

    @property
    def num_seen(self) -> int:
        return len(self._seen)

    @property
    def num_done(self) -> int:
        return len(self._done)

    @property
    def num_active(self) -> int:
        return len(self._active)

    @property
    def awaits_more(self) -> bool:
        """Whether somebody who was told to come has not come yet, and may."""
        return len(self._seen) < self._num_expected and not self._unseen_revoked

    def has_room_for(self, name: str) -> bool:
        """Whether a receiver may start: names cost nothing to make, and each has to be looked at while the trainer waits."""
        return name in self._active or (len(self._active) < MAX_RECEIVERS and len(self._seen) < MAX_NAMES)

    def add(self, name: str, now: float) -> None:
        """A receiver starts from the first block."""
        self._seen.setdefault(name, len(self._seen))
        self._done.pop(name, None)
        self._revoked.discard(name)
        known = self._active.get(name)
        self._active[name] = _Receiver(0, now, known.address if known else "")

    def share_of(self, name: str) -> tuple[int, int]:
        """Return which receiver this is, from 0 on, and of how many."""
        place = self._seen.get(name, 0)
        return place, max(self._num_expected, len(self._seen), 1)

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
            receiver.address = address or receiver.address

    def acknowledge(self, name: str, blocks: int) -> None:
        """It has these blocks, verified."""
        if name in self._active:
            self._active[name].received |= blocks & self._all

    def finish(self, name: str) -> None:
        """It has everything, or has given up."""
        receiver = self._active.pop(name, None)
        if receiver is not None:
            self._done[name] = receiver.address

    def needed(self) -> int:
        """Blocks that somebody may still ask for."""
        if self.awaits_more:
            return self._all
        blocks = 0
        for receiver in self._active.values():
            blocks |= self._all & ~receiver.received
        return blocks

    def lapse(self, silent_since: float) -> list[str]:
        """End the leases of those who have not been heard of since; return their names."""
        gone = [name for name, receiver in self._active.items() if receiver.last_contact_s < silent_since]
        for name in gone:
            del self._active[name]
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
            revoked.append(f"{self._num_expected - len(self._seen)} receivers that have not come yet")
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
            del self._active[name]
            self._revoked.add(name)
            revoked.append(f"receiver {name}")
        return revoked

    def peers_of(self, name: str) -> list[PeerBlocks]:
        """Return others that serve what they hold; which ones, where there are many, depends on the name alone."""
        peers = [
            (other, PeerBlocks(receiver.address, receiver.received))
            for other, receiver in self._active.items()
            if other != name and receiver.address and receiver.received
        ]
        peers += [
            (other, PeerBlocks(address, self._all))
            for other, address in self._done.items()
            if other != name and address
        ]
        peers.sort(key=lambda peer: zlib.crc32(f"{name} {peer[0]}".encode()))
        return [peer for _, peer in peers[:MAX_PEERS]]
