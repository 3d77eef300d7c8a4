"""What the threads of one fetch share, under one condition: the ledger, whose digests count, and how it ends.

The *primary* source is the one whose state is received: the digests and the plain values that count are its own. Other
sources contribute blocks for which they have announced the primary's digest. When the primary is lost, another source is
adopted, with all its digests at once: blocks that are held and differ from it are missing again, so that at every moment
what is held belongs to one source's state.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Mapping

from torchft_ckpt.checkpointing.blocks import block_range, format_ranges
from torchft_ckpt.checkpointing.format import Manifest
from torchft_ckpt.checkpointing.protocol import MAX_ACKNOWLEDGED_RUNS
from torchft_ckpt.checkpointing.receive import Destination
from torchft_ckpt.checkpointing.relay import Relay
from torchft_ckpt.core.transfer import SourceKind, TransferLedger, blocks_of, mask_of
from torchft_ckpt.errors import CheckpointError, DigestMismatchError

logger = logging.getLogger(__name__)
_PRIMARY_PATIENCE_S = 2.0
_WAIT_S = 1.0


class TransferState:
    """The state of one fetch. Every method may be called from any thread.

    Args:
        sources: their names, the primary first.
        seed: for the order of blocks among many receivers.
    """

    def __init__(self, sources: list[str], seed: int) -> None:
        self.changed = threading.Condition()
        self._pick = random.Random(seed).randrange
        self._expected = list(sources)
        self._failures: dict[str, CheckpointError] = {}
        self._over = False
        self._outcome: CheckpointError | None = None
        self.primary: str | None = None
        self._ready = False
        self.ready_at = 0.0
        self._destination: Destination | None = None
        self._ledger = TransferLedger(0, pick=self._pick)
        self._manifests: dict[str, Manifest] = {}
        self._announced: dict[str, dict[int, bytes]] = {}
        self._digests: dict[int, bytes] = {}
        self._verified: dict[int, bytes] = {}
        self._reported: dict[str, int] = {}
        self._arrived_from: dict[str, int] = {}
        self._relay: Relay | None = None
        self._divergent: dict[str, str] = {}
        self._peers: set[str] = set()
        self._received_bytes = 0
        self._wasted_bytes = 0
        self._skipped = 0

    # How it ends

    @property
    def over(self) -> bool:
        """Whether there is an outcome."""
        return self._over

    @property
    def outcome(self) -> CheckpointError | None:
        """Why it failed, once it is over; None where all is here."""
        return self._outcome

    def end(self, outcome: CheckpointError | None) -> None:
        """Set the outcome; the first one counts."""
        with self.changed:
            if not self._over:
                self._over = True
                self._outcome = outcome
                self.changed.notify_all()

    def fail_source(self, name: str, error: CheckpointError) -> None:
        """Ask a source for nothing more; end the fetch where nobody is left who could complete it."""
        with self.changed:
            if self._over:
                return
            self._failures.setdefault(name, error)
            if name in self._expected:
                self._expected.remove(name)
            self._ledger.drop_source(name)
            if name == self.primary:
                self.primary = None
            self._end_if_hopeless()
            self.changed.notify_all()

    def fail_peer(self, name: str) -> None:
        """Ask another receiver for nothing more."""
        with self.changed:
            self._ledger.drop_source(name)
            self._end_if_hopeless()
            self.changed.notify_all()

    def _end_if_hopeless(self) -> None:
        if self._over or not self._failures:
            return
        if self._ready and self._ledger.is_done:
            return
        if self._expected or (self._ready and not self._ledger.is_hopeless()):
            return
        self.end(self._why_hopeless())

    def _why_hopeless(self) -> CheckpointError:
        (first, error), *others = self._failures.items()
        if not others:
            return error
        also = "; ".join(f"{name}: {str(other)[:300]}" for name, other in others)
        return type(error)(f"no source is left. {first}: {error}; {also}", party=error.party)

    # How it begins

    def elect(self, name: str, manifest: Manifest) -> bool:
        """Return whether this source, whose manifest is here, is the primary; wait where that is not decided yet.

        The first source is, if it answers soon. A source that has failed, or whose fetch is over, is not.
        """
        patient_until = time.monotonic() + _PRIMARY_PATIENCE_S
        with self.changed:
            self._manifests[name] = manifest
            while not self._over:
                if self.primary is None and self._expected:
                    if name == self._expected[0] or self._ready or time.monotonic() >= patient_until:
                        self.primary = name
                        return True
                elif self._ready:
                    return False
                self.changed.wait(min(max(patient_until - time.monotonic(), 0.01), _WAIT_S))
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
            self.primary = name
            self._announced = {}
            self._destination = destination
            self._ledger = TransferLedger(destination.num_blocks, pick=self._pick)
            self._ledger.add_source(name, SourceKind.PRIMARY)
            self._ledger.take_share(*share)
            self._digests = dict(digests)
            self._verified = dict(held)
            for block in held:
                self._ledger.hold(1 << block)
            self._skipped = len(held)
            self._ready = True
            self.ready_at = time.monotonic()
            self._end_if_done()
            self.changed.notify_all()

    def await_restart(self, name: str) -> bool:
        """Wait until a source whose tensors lie otherwise may begin again: nobody is left who could complete what was begun.

        Returns False where the fetch is over instead.
        """
        with self.changed:
            while not self._over:
                is_abandoned = self.primary in (None, name) and not any(
                    other in self._announced for other in self._expected
                )
                if is_abandoned and not self._ledger.num_streams():
                    self.primary = name
                    return True
                self.changed.wait(_WAIT_S)
            return False

    @property
    def destination(self) -> Destination | None:
        """Where it is received to, once that is known."""
        return self._destination

    def manifest_of(self, name: str) -> Manifest | None:
        """The manifest that a source sent."""
        with self.changed:
            return self._manifests.get(name)

    # Digests

    def num_blocks(self) -> int:
        """Blocks of the state; 0 before it begins."""
        return self._destination.num_blocks if self._destination is not None else 0

    def unknown_digests(self, limit: int) -> int:
        """Return up to `limit` blocks, as a bit set, whose digest of the primary is not known, missing ones first."""
        with self.changed:
            return self._without_digest(self._digests, limit)

    def learn_digests(self, name: str, digests: Mapping[int, bytes]) -> None:
        """Note what a source announces. Blocks of another source than the primary may come from it where they agree."""
        with self.changed:
            self._announced.setdefault(name, {}).update(digests)
            if name == self.primary:
                self._digests.update(digests)
                for other in self._announced:
                    if other != name:
                        self._allow_agreed(other)
            else:
                self._allow_agreed(name)
            self.changed.notify_all()

    def unannounced(self, name: str, limit: int) -> int:
        """Return up to `limit` blocks, as a bit set, whose digest of a source is not known, missing ones first."""
        with self.changed:
            return self._without_digest(self._announced.get(name, {}), limit)

    def unknown_of(self, blocks: int) -> int:
        """Return those of a bit set of blocks whose digest of the primary is not known."""
        with self.changed:
            return blocks & ~sum(1 << block for block in self._digests)

    def add_replica(self, name: str) -> None:
        """Let blocks come from another whole source, as far as its digests turn out to agree."""
        with self.changed:
            self._ledger.add_source(name, SourceKind.REPLICA, 0)
            self._announced.setdefault(name, {})
            self._allow_agreed(name)

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
                blocks = sorted(
                    b for b, d in announced.items() if name != self.primary and self._digests.get(b, d) != d
                )
                if blocks:
                    names = destination.names_of(blocks)
                    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
                    found[name] = f"{len(blocks)} blocks differ, of {', '.join(n[:120] for n in names[:5])}{more}"
            return found

    def adopt(self, name: str, digests: Mapping[int, bytes]) -> None:
        """Make a source the primary, whose every digest is known; what is held and differs is missing again."""
        with self.changed:
            destination = self._destination
            if self._over or destination is None:
                return
            self._ledger.invalidate(sum(1 << b for b, held in self._verified.items() if digests[b] != held))
            self._digests = dict(digests)
            self._announced[name] = dict(digests)
            self.primary = name
            destination.retarget(self._manifests[name])
            self._ledger.add_source(name, SourceKind.PRIMARY)
            for other in self._announced:
                if other != name:
                    self._ledger.forbid(other, (1 << self.num_blocks()) - 1)
                    self._allow_agreed(other)
            self.changed.notify_all()

    def heir(self) -> str | None:
        """Return a source to adopt where the primary was lost and one is there that holds the same layout."""
        with self.changed:
            if self.primary is not None or not self._ready or self._over or self._ledger.is_done:
                return None
            return next((name for name in self._expected if name in self._announced), None)

    def _without_digest(self, known: Mapping[int, bytes], limit: int) -> int:
        unknown = [block for block in range(self.num_blocks()) if block not in known]
        unknown.sort(key=lambda block: self._ledger.held >> block & 1)
        return sum(1 << block for block in unknown[:limit])

    def _allow_agreed(self, name: str) -> None:
        announced = self._announced[name]
        agreed = sum(1 << block for block, digest in announced.items() if self._digests.get(block) == digest)
        self._ledger.allow(name, agreed)

    # Peers

    def meet_peers(self, held_by: Mapping[str, int], sent: int) -> list[str]:
        """Note what other receivers hold and what the primary has sent; return those that are new."""
        with self.changed:
            known = sum(1 << block for block in self._digests)
            if self.primary is not None:
                self._ledger.note_sent(self.primary, sent, time.monotonic())
            new = []
            for name, held in held_by.items():
                if name in self._peers:
                    self._ledger.allow(name, held & known)
                    continue
                self._peers.add(name)
                self._ledger.add_source(name, SourceKind.PEER, held & known)
                new.append(name)
            self.changed.notify_all()
            return new

    def peer_names(self) -> list[str]:
        """The other receivers that were met, also those that were given up."""
        with self.changed:
            return list(self._peers)

    @property
    def has_seen_peers(self) -> bool:
        """Whether there were other receivers."""
        return bool(self._peers)

    def attach(self, relay: Relay) -> None:
        """Serve the blocks that are here, and those that come, to other receivers."""
        with self.changed:
            for block, digest in self._verified.items():
                if self._ledger.held >> block & 1:
                    relay.add(block, digest)
            self._relay = relay

    @property
    def relay(self) -> Relay | None:
        """What is served on, if anything."""
        return self._relay

    # Streams

    def open_stream(self, source: str) -> int:
        """Add a stream."""
        with self.changed:
            return self._ledger.open_stream(source, time.monotonic())

    def next_run(self, stream: int, source: str) -> tuple[range, str] | None:
        """Wait for work; return a run of blocks and what to acknowledge with it.

        None where the stream is to end: the fetch is over, or its source was dropped.
        """
        with self.changed:
            while not self._over and self._ledger.has_source(source):
                run = self._ledger.next_run(stream, time.monotonic())
                if run is not None:
                    return run, self._unreported(source)
                self._end_if_hopeless()
                self.changed.wait(_WAIT_S)
            return None

    def check_digest(self, source: str, block: int, actual: bytes, announced: bytes) -> None:
        """Check a block that has been received.

        Raises:
            DigestMismatchError: it is not what came with it, or not the primary's.
        """
        if actual != announced:
            raise DigestMismatchError(
                f"block {block} from {source} does not have the digest that came with it: it was changed on the way",
                party=source,
            )
        wanted = self._digests.get(block)
        if wanted is not None and actual != wanted:
            raise DigestMismatchError(
                f"block {block} from {source} is not the one that it announced before", party=source
            )

    def arrived(self, stream: int, source: str, block: int, digest: bytes) -> bool:
        """Note a verified block; whether the stream goes on with its run."""
        with self.changed:
            destination = self._destination
            if destination is None or self._over:
                return False
            if self._digests.get(block, digest) != digest:  # the primary has changed since the check
                self._ledger.invalidate(1 << block)
                return False
            self._verified[block] = digest
            goes_on = self._ledger.arrived(stream, block, time.monotonic())
            self._arrived_from[source] = self._arrived_from.get(source, 0) + 1
            manifest = destination.manifest
            start, stop = block_range(block, manifest.total_bytes, manifest.block_bytes)
            self._received_bytes += stop - start
            if self._relay is not None:
                self._relay.add(block, digest)
            self._end_if_done()
            return goes_on

    def close_stream(self, stream: int, wasted_bytes: int = 0) -> None:
        """Take a stream off; what it had in flight goes to others."""
        with self.changed:
            self._ledger.close_stream(stream)
            self._wasted_bytes += wasted_bytes
            self.changed.notify_all()

    def num_arrived_from(self, source: str) -> int:
        """Blocks that a source has brought."""
        with self.changed:
            return self._arrived_from.get(source, 0)

    def overdue(self) -> list[int]:
        """Return streams to cut; their sources are asked last from now on."""
        with self.changed:
            if not self._ready or self._over:
                return []
            numbers = self._ledger.overdue(time.monotonic())
            for number in numbers:
                self._ledger.demote(number)
            return numbers

    def pause(self, pause_s: float) -> bool:
        """Wait for some seconds; return False, at once, where it is over."""
        with self.changed:
            return not self.changed.wait_for(lambda: self._over, pause_s)

    def unreported(self, source: str) -> str:
        """Return blocks that are held and that a source has not been told of, as `0-3,7`."""
        with self.changed:
            return self._unreported(source)

    def numbers(self) -> tuple[int, int, int, int, int]:
        """Total, received, skipped and wasted bytes, and the number of sources."""
        with self.changed:
            destination = self._destination
            if destination is None:
                return 0, 0, 0, 0, 0
            manifest = destination.manifest
            skipped = min(self._skipped * manifest.block_bytes, manifest.total_bytes)
            return (
                manifest.total_bytes,
                self._received_bytes,
                skipped,
                self._wasted_bytes,
                self._ledger.num_sources(),
            )

    def arrived_text(self) -> str:
        """How much is here, for messages."""
        with self.changed:
            if not self._ready:
                return "nothing"
            return f"{self._ledger.counts().num_held} of {self.num_blocks()} blocks"

    def _unreported(self, source: str) -> str:
        if source in self._peers:
            return ""
        held = self._ledger.held
        if source != self.primary:
            # Only what is the same there: if this source is adopted, the rest is needed of it.
            announced = self._announced.get(source, {})
            held &= sum(1 << block for block, digest in announced.items() if self._verified.get(block) == digest)
        unreported = held & ~self._reported.get(source, 0)
        runs = blocks_of(unreported)[:MAX_ACKNOWLEDGED_RUNS]
        self._reported[source] = self._reported.get(source, 0) | sum(mask_of(run) for run in runs)
        return format_ranges(runs)

    def _end_if_done(self) -> None:
        if self._ledger.is_done:
            self.end(None)
