"""Decides which unit of a transfer comes from which source. It knows no tensors, digests, sockets, threads or clock.

A unit is a block of a state's bytes, or a box of one of its tensors. Sets of units are integers used as bit sets: unit u is
bit u. A source may be asked for the units that are eligible of it: all for the source of the blocks of a whole state, those with
agreeing digests for another replica, those that it holds for a peer that receives the same state itself, the boxes within its
shards for a rank. Units are handed out in batches, one batch a stream at a time:

1. A batch takes about `Batches.seconds` at the rate seen so far, and never more than a fair share of what is missing, so that
   streams finish together and little is in flight when one of them is lost.
2. Blocks are asked for as runs of neighbours. Of boxes those come first that the fewest sources can give: who could give
   them has less else to do then, and so all sources send about the same number of bytes.
3. Of many receivers of one source, each asks it first for a share of its own, then for what it has not sent to anybody: so
   each unit leaves it about once, and the receivers get the rest from each other, the rarest first. While what was sent
   last has not arrived anywhere, nothing is sent a second time. Batches are small then.
4. What a lost stream had in flight goes back to the missing; what has arrived stays.
5. When nothing is missing but in flight, a stream that is expected to need much longer than an idle one would is cut, and
   its path is asked only for what nobody else can give.

A stream takes units over one path to its source: one of the source's addresses. `paths` decides which of them are used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

_CUT_FACTOR = 3.0
_TRANSIT_FACTOR = 3.0
_MIN_PATIENCE_S = 1.0
_UNKNOWN_RATE = 1e6
"""Bytes a second that a stream is taken to do before it has brought anything."""
_MEMORY = 0.7
"""How much of the older measure of a stream's rate is kept with each unit that arrives."""
_WINDOW = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Batches:
    """How much a stream is asked for at once; one unit at least, whatever its size."""

    first_bytes: int
    """While the stream's rate is not known."""
    seconds: float = 1.0
    max_bytes: int = 1 << 62
    max_units: int = 1 << 62
    are_runs: bool = False
    """Whether a batch has to be a run of neighbours."""


@dataclass(slots=True)
class _Source:
    is_peer: bool
    eligible: int
    sent: int = 0
    sent_changed_at: float = 0.0


@dataclass(slots=True)
class _Stream:
    source: str
    path: str
    since: float
    """When the unit that it is at was asked for, or the one before it arrived."""
    asked: dict[int, None] = field(default_factory=dict)
    """What it is to bring, in order."""
    bytes_brought: float = 0.0
    seconds_taken: float = 0.0
    """Both fade, so that what was brought last counts most."""
    is_idle: bool = True

    def rate(self) -> float | None:
        """Bytes a second; None where nothing has come."""
        return self.bytes_brought / self.seconds_taken if self.seconds_taken else None


class TransferLedger:
    """The units of one transfer.

    Args:
        sizes: bytes of each unit.
        batches: how much is asked for at once.
        pick: `pick(n)` returns any of `range(n)`: for the order of units where others receive the same state.
    """

    def __init__(self, sizes: Sequence[int], *, batches: Batches, pick: Callable[[int], int]) -> None:
        self._sizes = sizes
        self._batches = batches
        self._pick = pick
        self._all = (1 << len(sizes)) - 1
        self._missing = self._all
        self._missing_bytes = sum(sizes)
        self._held = 0
        self._sources: dict[str, _Source] = {}
        self._streams: dict[int, _Stream] = {}
        self._demoted: set[str] = set()
        """Paths."""
        self._next_stream = 0
        self._share = self._all
        self._by_rarity: list[int] | None = None
        """The units that one source can give, those that two can, and so on; None: to be worked out again."""

    # Sources

    def add_source(self, name: str, eligible: int | None = None, *, is_peer: bool = False) -> None:
        """Let units come from a source: all of them, or the eligible ones. A peer is a receiver of the same state."""
        self._sources[name] = _Source(is_peer, self._all if eligible is None else eligible & self._all)
        self._demoted -= {name, *(stream.path for stream in self._streams.values() if stream.source == name)}
        self._by_rarity = None

    def allow(self, name: str, units: int) -> None:
        """Add units to those that may come from a source; one that was dropped stays so."""
        if name in self._sources:
            self._sources[name].eligible |= units & self._all
            self._by_rarity = None

    def forbid(self, name: str, units: int) -> None:
        """Take units off those that may come from a source."""
        if name in self._sources:
            self._sources[name].eligible &= ~units
            self._by_rarity = None

    def note_sent(self, name: str, units: int, now: float) -> None:
        """Replace what a source has sent or is sending to anybody."""
        source = self._sources.get(name)
        if source is not None and source.sent != units:
            source.sent = units
            source.sent_changed_at = now

    def take_share(self, index: int, num_receivers: int) -> None:
        """Be one of several receivers of the same state: ask for the own share of the units first."""
        start, stop = (len(self._sizes) * i // num_receivers for i in (index, index + 1))
        self._share = mask_of(range(start, stop)) if num_receivers > 1 else self._all

    def drop_source(self, name: str) -> None:
        """Ask it for nothing more; its streams still have to be closed with `close_stream`."""
        if self._sources.pop(name, None) is not None:
            self._by_rarity = None

    def has_source(self, name: str) -> bool:
        """Whether it has been added, and not been dropped."""
        return name in self._sources

    def num_streams(self) -> int:
        """Streams that are open."""
        return len(self._streams)

    def num_sources(self) -> int:
        """Sources that have not been dropped."""
        return len(self._sources)

    def has_peers(self) -> bool:
        """Whether another receiver is a source."""
        return any(source.is_peer for source in self._sources.values())

    # Streams

    def open_stream(self, source: str, now: float, path: str = "") -> int:
        """Add a stream from a source over a path, which where none is named has the source's name; return its number."""
        self._next_stream += 1
        self._streams[self._next_stream] = _Stream(source, path or source, now)
        return self._next_stream

    def next_batch(self, stream: int, now: float) -> list[int]:
        """Return the units that a stream is to ask for next, in order; none where there is nothing for it now.

        What it was asked for and has not brought is missing again.
        """
        this = self._streams[stream]
        self.give_back(stream)
        source = self._sources.get(this.source)
        candidates = 0 if source is None else self._missing & source.eligible
        if this.path in self._demoted:
            candidates &= ~self._eligible_of_able()
        is_among_many = self._share != self._all or self.has_peers()
        if source is not None and candidates and is_among_many:
            candidates = self._among_many(source, candidates, this, now)
        this.is_idle = not candidates
        if not candidates:
            return []
        start, limit = 0, self._batch_limit(this, candidates)
        if is_among_many:
            start, limit = self._pick(len(self._sizes)), 1 if self.has_peers() else limit // 4
        batch = self._cut(self._in_order(candidates, start), limit)
        this.asked = dict.fromkeys(batch)
        this.since = now
        self._missing &= ~mask_of_each(batch)
        self._missing_bytes -= self.num_bytes(batch)
        return batch

    def came(self, stream: int, unit: int, now: float) -> None:
        """Note that a stream has brought a unit, which may still have to be verified."""
        this = self._streams[stream]
        this.bytes_brought = _MEMORY * this.bytes_brought + self._sizes[unit]
        this.seconds_taken = _MEMORY * this.seconds_taken + max(now - this.since, 1e-6)
        this.since = now

    def arrived(self, stream: int, unit: int) -> bool:
        """Note that a unit that `came` is verified; whether the stream goes on with its batch.

        It does not where the source was dropped or the rest of the batch was given to others.
        """
        this = self._streams[stream]
        if unit in this.asked:
            del this.asked[unit]
        else:
            self._take_from_missing(1 << unit)
        self._held |= 1 << unit
        return bool(this.asked) and this.source in self._sources

    def asked_of(self, stream: int) -> list[int]:
        """Return what a stream was asked for and has not brought: nobody else is asked for it meanwhile."""
        this = self._streams.get(stream)
        return [] if this is None else [*this.asked]

    def give_back(self, stream: int) -> None:
        """Note that a stream brings nothing more of its batch: what it has not brought is missing again."""
        this = self._streams[stream]
        left = [unit for unit in this.asked if not self._held >> unit & 1]
        self._missing |= mask_of_each(left)
        self._missing_bytes += self.num_bytes(left)
        this.asked = {}

    def close_stream(self, stream: int) -> None:
        """Take a stream off; what it had in flight is missing again."""
        if stream in self._streams:
            self.give_back(stream)
            del self._streams[stream]

    def demote(self, stream: int) -> None:
        """Ask over the path of a stream that was cut for nothing that can be had otherwise."""
        if stream in self._streams:
            self._demoted.add(self._streams[stream].path)

    def idle_sources(self) -> set[str]:
        """Return the sources with a stream that has nothing to ask for."""
        return {stream.source for stream in self._streams.values() if stream.is_idle}

    def streams_over(self, path: str) -> list[int]:
        """Return the streams that take units over a path."""
        return [number for number, stream in self._streams.items() if stream.path == path]

    def overdue(self, now: float) -> list[int]:
        """Return the streams to cut: nothing else is missing, and an idle stream would be done much sooner."""
        idle = [stream for stream in self._streams.values() if stream.is_idle and stream.source in self._sources]
        if any(self._missing & self._sources[stream.source].eligible for stream in idle):
            return []
        cut = []
        for number, stream in self._streams.items():
            asked = mask_of_each(stream.asked)
            able = [other for other in idle if self._sources[other.source].eligible & asked]
            rate = max((known for other in able if (known := other.rate()) is not None), default=None)
            if rate is None:
                # Nobody knows whether those are faster. Once, another path is tried; a path is not cut for itself.
                if stream.path in self._demoted or all(other.path == stream.path for other in able):
                    continue
                rate = _UNKNOWN_RATE
            if now - stream.since > max(_CUT_FACTOR * self.num_bytes(stream.asked) / rate, _MIN_PATIENCE_S):
                cut.append(number)
        return cut

    # Units

    def hold(self, units: int) -> None:
        """Note units that are held without having been sent."""
        self._held |= units & self._all
        self._take_from_missing(units)

    def invalidate(self, units: int) -> None:
        """Note that held units are not those that are wanted: they are missing again."""
        units &= self._held
        self._held &= ~units
        self._missing |= units
        self._missing_bytes += self.num_bytes(units_of(units))

    @property
    def held(self) -> int:
        """Units that are held."""
        return self._held

    @property
    def missing(self) -> int:
        """Units that are neither held nor asked for."""
        return self._missing

    @property
    def is_done(self) -> bool:
        """Whether every unit is held."""
        return self._held == self._all

    def in_flight(self) -> int:
        """Units that have been asked for."""
        return mask_of_each(unit for stream in self._streams.values() for unit in stream.asked)

    def is_hopeless(self) -> bool:
        """Whether units are neither held nor in flight nor eligible of any source that is left."""
        reachable = self._held | self.in_flight()
        for source in self._sources.values():
            reachable |= source.eligible
        return reachable != self._all

    def validate(self) -> None:
        """Check the invariants; for tests.

        Raises:
            RuntimeError: one is broken.
        """
        in_flight = 0
        for stream in self._streams.values():
            mask = mask_of_each(stream.asked)
            if mask & in_flight or mask & self._missing:
                raise RuntimeError(f"units {list(stream.asked)} are handed out twice, or also missing")
            in_flight |= mask
        if self._missing & self._held or (self._missing | self._held | in_flight) != self._all:
            raise RuntimeError("each unit must be missing, in flight or held")
        if self._missing_bytes != self.num_bytes(units_of(self._missing)):
            raise RuntimeError("missing bytes are miscounted")

    def size(self, unit: int) -> int:
        """Return the bytes of a unit."""
        return self._sizes[unit]

    def num_bytes(self, units: Iterable[int]) -> int:
        """Return the bytes of some units."""
        return sum(self._sizes[unit] for unit in units)

    def _take_from_missing(self, units: int) -> None:
        units &= self._missing
        self._missing ^= units
        self._missing_bytes -= self.num_bytes(units_of(units))

    def _in_order(self, candidates: int, start: int) -> Iterator[int]:
        """Yield what a batch may be made of, the first first: neighbours from a unit on, or those that few can give."""
        if self._batches.are_runs:
            first = _first_from(candidates, start)
            yield from range(first, first + _ones_from(candidates, first))
            return
        if self._by_rarity is None:
            self._by_rarity = self._levels()
        for level in self._by_rarity:
            yield from units_of(candidates & level)

    def _cut(self, units: Iterator[int], limit: int) -> list[int]:
        batch: list[int] = []
        num_bytes = 0
        for unit in units:
            num_bytes += self._sizes[unit]
            if batch and (num_bytes > limit or len(batch) == self._batches.max_units):
                break
            batch.append(unit)
        return sorted(batch)

    def _batch_limit(self, stream: _Stream, candidates: int) -> int:
        wanted, num_streams = self._missing_bytes, len(self._streams)
        if not self._batches.are_runs:  # of blocks any source may still turn out to have all
            wanted = wanted * candidates.bit_count() // self._missing.bit_count()
            able = (other for other in self._streams.values() if other.source in self._sources)
            num_streams = sum(bool(self._sources[other.source].eligible & candidates) for other in able)
        fair = wanted // (2 * num_streams)
        rate = stream.rate()
        if rate is None:
            return min(fair, self._batches.first_bytes)
        return min(fair, int(rate * self._batches.seconds), self._batches.max_bytes)

    def _levels(self) -> list[int]:
        """Return the units that exactly one source can give, exactly two, and so on."""
        at_least: list[int] = []
        for source in self._sources.values():
            more = source.eligible
            for number, units in enumerate(at_least):
                at_least[number], more = units | more, units & more
                if not more:
                    break
            if more:
                at_least.append(more)
        return [units & ~more for units, more in zip(at_least, [*at_least[1:], 0], strict=True)]

    def _among_many(self, source: _Source, candidates: int, stream: _Stream, now: float) -> int:
        """Return the best of the candidates where others receive the same state; none where it is better to wait."""
        once, twice = self._held_by_peers()
        if source.is_peer:
            return candidates & ~twice or candidates
        unsent = candidates & ~source.sent & ~once
        if unsent:
            return unsent & self._share or unsent
        in_transit = candidates & ~once
        rate = stream.rate()
        unit_s = 0.0 if rate is None else self._sizes[0] / rate
        patience_s = max(_TRANSIT_FACTOR * unit_s, _MIN_PATIENCE_S)
        if in_transit and self.has_peers() and now - source.sent_changed_at < patience_s:
            return 0
        return in_transit or candidates & ~twice or candidates

    def _held_by_peers(self) -> tuple[int, int]:
        """Return the units that at least one, and at least two other receivers hold."""
        once = twice = 0
        for source in self._sources.values():
            if source.is_peer:
                twice |= once & source.eligible
                once |= source.eligible
        return once, twice

    def _eligible_of_able(self) -> int:
        """Return what streams over paths that were not demoted can bring."""
        units = 0
        for stream in self._streams.values():
            source = self._sources.get(stream.source)
            if source is not None and stream.path not in self._demoted:
                units |= source.eligible
        return units


def mask_of(units: range) -> int:
    """Return a run of units as a bit set."""
    return ((1 << len(units)) - 1) << units.start if units else 0


def mask_of_each(units: Iterable[int]) -> int:
    """Return units as a bit set."""
    units = [*units]
    bits = bytearray(max(units) // 8 + 1 if units else 0)
    for unit in units:
        bits[unit >> 3] |= 1 << (unit & 7)
    return int.from_bytes(bits, "little")


def units_of(mask: int) -> Iterator[int]:
    """Yield the units of a bit set, in order. A window at a time: a set of millions is not copied for each of them."""
    at = 0
    while mask:
        zeros = (mask & -mask).bit_length() - 1
        mask >>= zeros
        at += zeros
        window = mask & ((1 << _WINDOW) - 1)
        while window:
            lowest = window & -window
            yield at + lowest.bit_length() - 1
            window ^= lowest
        mask >>= _WINDOW
        at += _WINDOW


def blocks_of(mask: int, most: int | None = None) -> list[range]:
    """Return a bit set as runs of blocks, in order; the first so many of them."""
    runs: list[range] = []
    start = 0
    while mask and len(runs) != most:
        zeros = (mask & -mask).bit_length() - 1
        mask >>= zeros
        ones = _ones_from(mask, 0)
        runs.append(range(start + zeros, start + zeros + ones))
        mask >>= ones
        start += zeros + ones
    return runs


def _first_from(mask: int, start: int) -> int:
    """Return the first block of a set at or after `start`, else the first of all; the set is not empty."""
    upper = mask >> start
    if upper:
        return start + (upper & -upper).bit_length() - 1
    return (mask & -mask).bit_length() - 1


def _ones_from(mask: int, first: int) -> int:
    upper = mask >> first
    return ((upper + 1) & ~upper).bit_length() - 1
