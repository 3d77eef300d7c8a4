"""A transfer of the blocks of one state: whose digests count, who else may give blocks, and who takes a lost source's place.

The *primary* source is the one whose state is received: the digests and the plain values that count are its own. Other
sources contribute blocks for which they have announced the primary's digest, other receivers blocks that they hold. What any
of these sends counts only with the BLAKE3 digest that the primary announces for it, since the other one can be forged.

When the primary is lost, another source is adopted, with all its digests at once: blocks that are held and differ from it are
missing again, so that at every moment what is held belongs to one source's state.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Mapping
from typing import Protocol

from torchft_ckpt.checkpointing.fetching.receive import Destination
from torchft_ckpt.checkpointing.fetching.transfer_state import WAIT_S, TransferState
from torchft_ckpt.checkpointing.protocol import MAX_ACKNOWLEDGED_RUNS
from torchft_ckpt.checkpointing.state.blocks import format_ranges
from torchft_ckpt.checkpointing.state.format import Manifest
from torchft_ckpt.checkpointing.state.local_state import some_of
from torchft_ckpt.core.transfer.scheduler import (
    Batches,
    TransferLedger,
    blocks_of,
    mask_of,
    mask_of_each,
    units_of,
)
from torchft_ckpt.errors import DigestMismatchError

logger = logging.getLogger(__name__)
_PRIMARY_PATIENCE_S = 2.0


class PassedOn(Protocol):
    """Serves blocks that are here to other receivers."""

    def add(self, block: int, digest: bytes) -> None:
        """Serve a block from now on; it has been verified."""

    def close(self) -> None:
        """End it; returns once nothing is lent."""


class _Announced:
    """The digests that a whole source has announced; bit sets of which they are, and of which are the primary's."""

    __slots__ = ("agreed", "digests", "known")

    def __init__(self) -> None:
        self.digests: dict[int, bytes] = {}
        self.known = 0
        self.agreed = 0


class BlockTransfer(TransferState):
    """The state of one fetch of blocks. Every method may be called from any thread.

    Args:
        sources: their names, the primary first.
        seed: for the order of blocks among many receivers.
    """

    def __init__(self, sources: list[str], seed: int) -> None:
        super().__init__(seed)
        self._expected = list(sources)
        self.primary: str | None = None
        self.ready_at = 0.0
        self._destination: Destination | None = None
        self._successor: str | None = None
        self._lost: str | None = None
        self._names = frozenset(sources)
        self._announced: dict[str, _Announced] = {}
        self._digests: dict[int, bytes] = {}
        self._known = 0
        self._verified: dict[int, bytes] = {}
        self._blake3s: dict[int, bytes] = {}
        """Of the primary."""
        self._checkable = 0
        """The blocks of `_blake3s`, as a bit set: only these may come from others."""
        self._asked = 0
        """Blocks whose BLAKE3 digest the primary was asked for, as a bit set."""
        self._reported: dict[str, int] = {}
        self._relay: PassedOn | None = None
        self._divergent: dict[str, str] = {}
        self._peers: dict[str, int] = {}
        """What they hold, as a bit set."""
        self.has_seen_peers = False
        """Whether there were other receivers."""

    # How it ends

    def _without(self, name: str) -> None:
        if name in self._expected:
            self._expected.remove(name)
        if name == self.primary:
            self.primary, self._lost = None, name
        if name == self._successor:
            self._successor = None

    def _check_sources(self) -> None:
        if self._over or not self._failures:
            return
        if self._ready and self._ledger.is_done:
            return
        if self._expected or (self._ready and not self._ledger.is_hopeless()):
            return
        (error, *others) = self._failures.values()
        self.end(self.why_hopeless() if others else error)

    # How it begins

    def choose_primary(self, name: str, manifest: Manifest) -> bool:
        """Return whether this source, whose manifest is here, is the primary; wait where that is not decided yet.

        The first source is, if it answers soon. A source that has failed, or whose fetch is over, is not.
        """
        patient_until = time.monotonic() + _PRIMARY_PATIENCE_S
        with self.changed:
            self._manifests[name] = manifest
            while not self._over:
                if self._ready and self.primary is None and self._successor is None:
                    # Only named: until it is adopted, the digests that count are those of the one that was lost.
                    self._successor = name
                    return True
                if self._ready:
                    return False
                is_next = bool(self._expected) and name == self._expected[0]
                if self.primary is None and (is_next or time.monotonic() >= patient_until):
                    self.primary = name
                    return True
                self.changed.wait(min(max(patient_until - time.monotonic(), 0.01), WAIT_S))
            return False

    def begin(
        self,
        name: str,
        destination: Destination,
        digests: Mapping[int, bytes],
        held: Mapping[int, bytes],
        share: tuple[int, int],
    ) -> None:
        """Begin to receive the state of the primary; `held` are blocks that are here already, with their digests.

        `share` says which receiver this is, from 0 on, and of how many.
        """
        with self.changed:
            if self._relay is not None:
                self._relay.close()
                self._relay = None
            self.primary, self._successor = name, None
            self._announced = {}
            what = self._divergent.pop(name, None)  # from the one that was lost; now it is that one which differs
            self._divergent = {} if what is None or self._lost is None else {self._lost: what}
            self._destination = destination
            manifest = destination.manifest
            sizes = [manifest.block_bytes] * destination.num_blocks
            if sizes:
                sizes[-1] -= manifest.block_bytes * len(sizes) - manifest.total_bytes
            batches = Batches(first_bytes=2 * manifest.block_bytes, are_runs=True)
            self._ledger = TransferLedger(sizes, batches=batches, pick=self._pick)
            self.step = manifest.step
            self.total_bytes = manifest.total_bytes
            self.wasted_bytes += self.received_bytes  # of what was begun before
            self.received_bytes = 0
            self._peers = {}
            self._ledger.add_source(name)
            self._ledger.take_share(*share)
            self._digests = dict(digests)
            self._known = mask_of_each(digests)
            self._forget_blake3s()
            self._verified = dict(held)
            self._ledger.hold(mask_of_each(held))
            self._skipped = self.skipped_bytes = 0
            self._note_skipped(self._ledger.held)
            self.is_equal = destination.is_equal()
            self._ready = True
            self.ready_at = self._last_arrival_at = time.monotonic()
            self._end_if_done()
            self.changed.notify_all()

    def await_restart(self, name: str) -> bool:
        """Wait until a source whose tensors lie otherwise may begin again: nobody is left who could complete what was begun.

        Returns False if the fetch is over instead.
        """
        with self.changed:
            while not self._over:
                is_free = self.primary is None and self._successor in (None, name)
                if is_free and not any(other in self._announced for other in self._expected):
                    for peer in self._peers:
                        self._ledger.drop_source(peer)  # they hold what was begun
                    self.changed.notify_all()
                    if not self._ledger.num_streams():
                        self._successor = name
                        return True
                self.changed.wait(WAIT_S)
            return False

    @property
    def destination(self) -> Destination | None:
        """Where it is received to, once that is known."""
        return self._destination

    def receives_into(self, memory: object) -> bool:
        with self.changed:
            return memory is self._destination

    def begun(self) -> tuple[str, Manifest, Destination] | None:
        """Return the primary, its manifest and where its state is received to; None while there is none."""
        with self.changed:
            if self.primary is None or self._destination is None or not self._ready:
                return None
            return self.primary, self._manifests[self.primary], self._destination

    # Digests

    def num_blocks(self) -> int:
        """Blocks of the state; 0 before it begins."""
        return self._destination.num_blocks if self._destination is not None else 0

    def unannounced(self, name: str, limit: int) -> int:
        """Return up to `limit` blocks, as a bit set, whose digest of a source is not known, missing ones first."""
        with self.changed:
            announced = self._announced.get(name)
            unknown = ((1 << self.num_blocks()) - 1) & ~(0 if announced is None else announced.known)
            return _lowest(unknown & ~self._ledger.held or unknown, limit)

    def unknown_of(self, blocks: int) -> int:
        """Return those of a bit set of blocks whose digest of the primary is not known."""
        with self.changed:
            return blocks & ~self._known

    def learn_digests(self, name: str, digests: Mapping[int, bytes]) -> None:
        """Note what a source announces. Blocks of another source than the primary may come from it where they agree."""
        with self.changed:
            blocks = mask_of_each(digests)
            if name == self.primary:
                self._digests.update(digests)
                self._known |= blocks
                # What it sent with another digest than it announces now is not its state.
                self._invalidate(
                    mask_of_each(b for b, digest in digests.items() if self._verified.get(b, digest) != digest)
                )
                for other, announced in self._announced.items():
                    self._compare(other, announced, digests)
            elif name in self._announced:
                announced = self._announced[name]
                announced.digests.update(digests)
                announced.known |= blocks
                self._compare(name, announced, digests)
            self.changed.notify_all()

    def add_replica(self, name: str) -> None:
        """Let blocks come from another whole source, as far as its digests turn out to agree."""
        with self.changed:
            self._ledger.add_source(name, 0)
            self._announced.setdefault(name, _Announced())
            self.changed.notify_all()

    def note_divergence(self, name: str, what: str) -> None:
        """Note that a source differs from the primary in something else than blocks."""
        with self.changed:
            self._divergent[name] = what

    def divergences(self) -> dict[str, str]:
        """What differs from the primary, by source."""
        with self.changed:
            found = dict(self._divergent)
            destination = self._destination
            if destination is None:
                return found
            for name, announced in self._announced.items():
                differing = announced.known & self._known & ~announced.agreed if name != self.primary else 0
                blocks = [block for run in blocks_of(differing) for block in run]
                if blocks:
                    found[name] = _what_differs(destination, blocks)
            return found

    def received_in_words(self) -> str:
        """Say of which tensors blocks came, where others were equal here; else empty."""
        with self.changed:
            destination, skipped = self._destination, self._skipped
        if destination is None or not skipped:
            return ""
        received = ((1 << destination.num_blocks) - 1) & ~skipped
        blocks = [block for run in blocks_of(received) for block in run]
        return _what_differs(destination, blocks) if blocks else ""

    def promote(self, name: str, digests: Mapping[int, bytes]) -> None:
        """Make a source the primary, whose every digest is known; what is held and differs is missing again."""
        with self.changed:
            destination = self._destination
            if self._over or destination is None or self.primary not in (None, name):
                return
            differing = [
                block for block, wanted in {**self._digests, **self._verified}.items() if digests[block] != wanted
            ]
            self._invalidate(mask_of_each(differing))
            what = self._divergent.pop(name, None)  # from the one that was lost; now it is that one which differs
            if differing:
                what = _what_differs(destination, sorted(differing))
            if what is not None and self._lost is not None:
                self._divergent[self._lost] = what
            self._digests = dict(digests)
            self._known = mask_of_each(digests)
            self.primary, self._successor = name, None
            destination.retarget(self._manifests[name])
            self._announced.pop(name, None)
            self._ledger.add_source(name)
            self._forget_blake3s()
            for other, announced in self._announced.items():
                announced.agreed = 0
                self._compare(other, announced, announced.digests)
            self.changed.notify_all()

    def next_candidate(self) -> str | None:
        """Return a source to adopt, once, where the primary was lost and one is there that holds the same layout.

        It is named from then on: no other one is, nor elected, before it has been adopted or has failed.
        """
        with self.changed:
            if self.primary is not None or self._successor is not None or not self._ready or self._over:
                return None
            self._successor = next((name for name in self._expected if name in self._announced), None)
            return self._successor

    def is_held_up_by(self, stall_timeout_s: float) -> str | None:
        """Return the primary if it keeps others waiting: no block has come for so long, and another source is there."""
        with self.changed:
            silent_s = time.monotonic() - self._last_arrival_at
            if not self._ready or self._over or self.primary is None or silent_s < stall_timeout_s:
                return None
            return self.primary if any(name in self._announced for name in self._expected) else None

    def _compare(self, name: str, announced: _Announced, digests: Mapping[int, bytes]) -> None:
        """Let blocks come from a source where its digest is the primary's; `digests` are new, of either."""
        agreed = mask_of_each(
            block
            for block in digests
            if block in announced.digests and announced.digests[block] == self._digests.get(block)
        )
        announced.agreed |= agreed
        self._ledger.allow(name, agreed & self._checkable)

    # BLAKE3 digests

    def is_primary(self, name: str) -> bool:
        """Whether a source is the one that announces the digests that count."""
        return name == self.primary

    def await_primary(self) -> str | None:
        """Wait until there is a primary, to ask it for BLAKE3 digests from now on; None if the fetch is over."""
        with self.changed:
            while not self._over and (not self._ready or self.primary is None):
                self.changed.wait(WAIT_S)
            self._asked = self._checkable
            return None if self._over else self.primary

    def await_uncheckable(self, primary: str, limit: int) -> list[int]:
        """Wait until others could give blocks whose BLAKE3 digest the primary was not asked for; return up to `limit`, once.

        Empty where the fetch is over or another source is the primary.
        """
        with self.changed:
            while not self._over and primary == self.primary:
                blocks = _lowest(self._givable() & self._ledger.missing & ~self._asked, limit)
                if blocks:
                    self._asked |= blocks
                    return [block for run in blocks_of(blocks) for block in run]
                self.changed.wait(WAIT_S)
            return []

    def learn_blake3s(self, primary: str, found: Mapping[int, bytes]) -> None:
        """Note the BLAKE3 digests that the primary announces: others may give these blocks now."""
        with self.changed:
            if primary != self.primary:
                return
            self._blake3s.update(found)
            self._checkable |= mask_of_each(found)
            for name, held in self._peers.items():
                self._ledger.allow(name, held & self._checkable)
            for name, announced in self._announced.items():
                self._ledger.allow(name, announced.agreed & self._checkable)
            self.changed.notify_all()

    def _givable(self) -> int:
        """Blocks that others than the primary could give, as a bit set."""
        blocks = 0
        for name, held in self._peers.items():
            blocks |= held if self._ledger.has_source(name) else 0
        for name, announced in self._announced.items():
            blocks |= announced.agreed if self._ledger.has_source(name) else 0
        return blocks

    def _forget_blake3s(self) -> None:
        """Another primary announces what counts: nothing comes from others before it has announced that again."""
        self._blake3s = {}
        self._checkable = self._asked = 0
        for name in (*self._peers, *self._announced):
            self._ledger.forbid(name, -1)

    # Peers

    def meet_peers(self, held_by: Mapping[str, int], sent: int) -> list[str]:
        """Note what other receivers hold and what the primary has sent; return those that are new."""
        with self.changed:
            if self.primary is not None:
                self._ledger.note_sent(self.primary, sent, time.monotonic())
            new = []
            for name, held in held_by.items():
                if name in self._names:
                    continue  # a source is no peer of its receivers, whoever says so
                if name not in self._peers:
                    self._ledger.add_source(name, 0, is_peer=True)
                    new.append(name)
                    self.has_seen_peers = True
                self._peers[name] = held
                self._ledger.allow(name, held & self._checkable)
            self.changed.notify_all()
            return new

    def peer_names(self) -> list[str]:
        """The other receivers that were met, also those that were given up."""
        with self.changed:
            return list(self._peers)

    def attach(self, relay: PassedOn, destination: Destination) -> None:
        """Serve the blocks that are here, and those that come, to other receivers, unless it has begun anew meanwhile."""
        with self.changed:
            if destination is not self._destination:
                relay.close()
                return
            for block, digest in self._verified.items():
                if self._ledger.held >> block & 1:
                    relay.add(block, digest)
            self._relay = relay

    @property
    def relay(self) -> PassedOn | None:
        """What is served on, if anything."""
        return self._relay

    # Streams

    def name_of(self, unit: int) -> str:
        return f"block {unit}"

    def arrived(
        self, stream: int, source: str, path: str, unit: int, digest: bytes, blake3: bytes | None = None
    ) -> bool:
        """Note a block that has come whole; see `TransferState`. It counts if it is the primary's."""
        with self.changed:
            if self._destination is None or self._over:
                return False
            wanted, known = self._digests.get(unit, digest), self._blake3s.get(unit)
            if digest != wanted:
                own = self._announced.get(source)
                if own is not None and own.digests.get(unit) == digest:
                    return False  # it was asked for before another primary was adopted
                raise DigestMismatchError(
                    f"block {unit} from {source} is not the one that it announced before", party=source
                )
            is_forged = blake3 is not None and known is not None and blake3 != known
            if not is_forged:
                if source != self.primary and (blake3 is None or blake3 != known):
                    return False  # the primary has changed since it was asked for
                self._verified[unit] = digest
                now = time.monotonic()
                self._ledger.came(stream, unit, now)
                goes_on = self._note_arrival(stream, path, unit, now)
                if self._relay is not None:
                    self._relay.add(unit, digest)
                self._end_if_done()
                return goes_on
        what = (
            f"block {unit} from {source} does not have the BLAKE3 digest that its primary source announces: it was forged, or "
            "damaged there, and does not count"
        )
        logger.warning("taking nothing more from %s: %s", source, what)
        raise DigestMismatchError(what, party=source)

    # What is said of it

    def unreported(self, source: str) -> str:
        """Return blocks that are held and that a source has not been told of, as `0-3,7`."""
        with self.changed:
            if source in self._peers:
                return ""
            held = self._ledger.held
            if source != self.primary:
                # Only what is the same there: if this source is adopted, the rest is needed of it.
                held &= self._announced[source].agreed if source in self._announced else 0
            unreported = held & ~self._reported.get(source, 0)
            runs = blocks_of(unreported)[:MAX_ACKNOWLEDGED_RUNS]
            self._reported[source] = self._reported.get(source, 0) | sum(mask_of(run) for run in runs)
            return format_ranges(runs)

    def arrived_text(self) -> str:
        """How much is here, for messages."""
        with self.changed:
            if not self._ready:
                return "nothing"
            return f"{self._ledger.held.bit_count()} of {self.num_blocks()} blocks"

    def _end_if_done(self) -> None:
        if self._ledger.is_done:
            self.end(None)


def _what_differs(destination: Destination, blocks: list[int]) -> str:
    names = (name[:120] for name in destination.names_of(blocks))
    some = "one block differs" if len(blocks) == 1 else f"{len(blocks)} blocks differ"
    return f"{some}; what differs is among {some_of(names, ', ')}"


def _lowest(mask: int, limit: int) -> int:
    return mask_of_each(itertools.islice(units_of(mask), limit))
