"""Decides which part of a re-sharded state comes from which rank. It knows no tensors, digests, sockets, threads or clock.

A part is a box that lies wholly within what each of its holders has. Parts are first dealt out so that all holders have about
the same number of bytes to send: those that few can give first, the large ones first, each to the holder that has least to
do. A stream that has nothing left takes from the holder that has most left, so the end comes for all at once. What a lost
holder was to give is dealt out anew, and what it was asked for once that is given back; a part that nobody can give any more
makes the transfer hopeless. A holder may have several streams, over several paths.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(slots=True)
class _Holder:
    parts: set[int] = field(default_factory=set)
    """What it can give."""
    queue: dict[int, None] = field(default_factory=dict)
    """What it is to give, in order."""
    queued_bytes: int = 0


class PartLedger:
    """The parts of one transfer.

    Args:
        sizes: bytes of each part.
        holders: by name, the parts that it can give.
    """

    def __init__(self, sizes: Sequence[int], holders: Mapping[str, Iterable[int]]) -> None:
        self._sizes = sizes
        self._holders = {name: _Holder(parts=set(parts)) for name, parts in holders.items()}
        self._held: set[int] = set()
        self._in_flight: dict[int, str] = {}
        self._orphans: set[int] = set()
        """Missing parts that nobody can give."""
        self._deal(range(len(sizes)))

    @property
    def is_done(self) -> bool:
        """Whether every part is held."""
        return len(self._held) == len(self._sizes)

    @property
    def num_missing(self) -> int:
        """How many parts are not held."""
        return len(self._sizes) - len(self._held)

    def orphans(self) -> list[int]:
        """Return the missing parts that nobody can give, in order."""
        return sorted(self._orphans)

    def queued_bytes(self, holder: str) -> int:
        """Return what a holder is still to be asked for."""
        known = self._holders.get(holder)
        return 0 if known is None else known.queued_bytes

    def next_batch(self, holder: str, max_bytes: int, max_parts: int) -> list[int]:
        """Return what to ask a holder for next, in order; nothing where there is nothing for it now.

        At least one part, whatever its size; never more than its share of what is left, so that little is in flight when
        a holder is lost.
        """
        this = self._holders.get(holder)
        if this is None:
            return []
        if not this.queue:
            self._take_over(this)
        limit = min(max_bytes, max(this.queued_bytes // 2, 1))
        batch: list[int] = []
        num_bytes = 0
        for part in this.queue:
            if batch and (num_bytes + self._sizes[part] > limit or len(batch) == max_parts):
                break
            batch.append(part)
            num_bytes += self._sizes[part]
        for part in batch:
            self._unqueue(this, part)
            self._in_flight[part] = holder
        return sorted(batch)

    def arrived(self, part: int) -> None:
        """Note that a part has arrived, verified; also one that was given back meanwhile."""
        if self._in_flight.pop(part, None) is None:
            self._orphans.discard(part)
            for holder in self._holders.values():
                if part in holder.queue:
                    self._unqueue(holder, part)
        self._held.add(part)

    def give_back(self, parts: Iterable[int]) -> None:
        """Note that parts that were asked for did not come: they are dealt out anew."""
        lost = [part for part in parts if self._in_flight.pop(part, None) is not None]
        self._deal(lost)

    def forbid(self, holder: str, part: int) -> None:
        """Never ask a holder for a part again: what it has is not what is wanted."""
        known = self._holders.get(holder)
        if known is not None:
            known.parts.discard(part)
            if part in known.queue:
                self._unqueue(known, part)
                self._deal([part])

    def allow(self, holder: str, parts: Iterable[int]) -> None:
        """Note that a holder has parts that are wanted after all."""
        known = self._holders.get(holder)
        if known is not None:
            parts = [*parts]
            known.parts.update(parts)
            again = self._orphans.intersection(parts)
            self._orphans -= again
            self._deal(again)

    def drop(self, holder: str) -> None:
        """Ask a holder for nothing more; what it had to give is dealt out anew, what it gave stays.

        What it has been asked for is not asked for elsewhere before it is given back: a stream may still write it.
        """
        known = self._holders.pop(holder, None)
        if known is not None:
            self._deal(known.queue)

    def invalidate(self, parts: Iterable[int]) -> None:
        """Note that held parts are not those that are wanted: they are missing again."""
        gone = [part for part in parts if part in self._held]
        self._held.difference_update(gone)
        self._deal(gone)

    def holders_of(self, part: int) -> list[str]:
        """Return who can give a part."""
        return [name for name, holder in self._holders.items() if part in holder.parts]

    def validate(self) -> None:
        """Check the invariants; for tests.

        Raises:
            RuntimeError: one is broken.
        """
        places = [*self._held, *self._in_flight, *self._orphans]
        for holder in self._holders.values():
            places += holder.queue
            if holder.queued_bytes != sum(self._sizes[part] for part in holder.queue):
                raise RuntimeError("queued bytes are miscounted")
            if not holder.queue.keys() <= holder.parts:
                raise RuntimeError("a holder is to give what it has not")
        if sorted(places) != list(range(len(self._sizes))):
            raise RuntimeError("each part must be queued once, in flight, held or an orphan")

    def _deal(self, parts: Iterable[int]) -> None:
        able = {part: [holder for holder in self._holders.values() if part in holder.parts] for part in parts}
        order = sorted(able, key=lambda part: (len(able[part]), -self._sizes[part], part))
        dealt: dict[int, list[int]] = {}
        for part in order:
            if not able[part]:
                self._orphans.add(part)
                continue
            least = min(able[part], key=lambda holder: holder.queued_bytes)
            least.queued_bytes += self._sizes[part]
            dealt.setdefault(id(least), []).append(part)
        for holder in self._holders.values():
            for part in sorted(dealt.get(id(holder), ())):
                holder.queue[part] = None

    def _take_over(self, this: _Holder) -> None:
        """Give an idle holder half of what the busiest one has left, as far as it can give that."""
        others = sorted(self._holders.values(), key=lambda holder: -holder.queued_bytes)
        for other in others:
            shared = [part for part in other.queue if part in this.parts]
            if other is this or not shared:
                continue
            wanted = max(other.queued_bytes // 2, 1)
            for part in reversed(shared):
                if wanted <= 0:
                    break
                wanted -= self._sizes[part]
                self._unqueue(other, part)
                this.queue[part] = None
                this.queued_bytes += self._sizes[part]
            return

    def _unqueue(self, holder: _Holder, part: int) -> None:
        del holder.queue[part]
        holder.queued_bytes -= self._sizes[part]
