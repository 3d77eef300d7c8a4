"""Decides which block of a transfer comes from which source. It knows no digests, sockets, threads or clock.

Sets of blocks are integers used as bit sets: block b is bit b. A source may be asked for the blocks that are eligible of it:
all for the primary, those with agreeing digests for another replica, those that it holds for a peer that receives the same
state itself. Blocks are handed out in runs of neighbours, one run a stream at a time:

1. A run takes about `run_s` seconds at the rate seen so far, and never more than a fair share of what is missing, so that
   streams finish together and little is in flight when one of them is lost.
2. Of many receivers of one source, each asks it first for a share of its own, then for what it has not sent to anybody: so
   each block leaves it about once, and the receivers get the rest from each other, the rarest first. While what was sent
   last has not arrived anywhere, nothing is sent a second time. Runs are short then.
3. What a lost stream had in flight goes back to the missing; what has arrived stays.
4. When nothing is missing but in flight, a stream that is expected to need much longer than an idle one would is cut, and
   its path is asked only for what nobody else can give.

A stream takes blocks over one path to its source: one of the source's addresses. `paths` decides which of them are used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum

_CUT_FACTOR = 3.0
_TRANSIT_FACTOR = 3.0
_MIN_PATIENCE_S = 1.0


class SourceKind(Enum):
    """What a source is to this receiver."""

    PRIMARY = "primary"
    REPLICA = "replica"
    PEER = "peer"


@dataclass(slots=True)
class _Source:
    kind: SourceKind
    eligible: int
    sent: int = 0
    sent_changed_at: float = 0.0


@dataclass(slots=True)
class _Stream:
    source: str
    path: str
    run: range
    since: float
    """When the block that it is at was asked for, or the one before it arrived."""
    block_s: float | None = None
    """Smoothed seconds a block."""
    is_idle: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferCounts:
    """Blocks so far."""

    num_held: int
    num_arrived: int
    num_requeued: int


class TransferLedger:
    """The blocks of one transfer.

    Args:
        num_blocks: how many there are.
        pick: `pick(n)` returns any of `range(n)`: for the order of blocks where others receive the same state.
        run_s: how long a run should take.
    """

    def __init__(self, num_blocks: int, *, pick: Callable[[int], int], run_s: float = 1.0) -> None:
        self._all = (1 << num_blocks) - 1
        self._num_blocks = num_blocks
        self._missing = self._all
        self._held = 0
        self._pick = pick
        self._run_s = run_s
        self._sources: dict[str, _Source] = {}
        self._streams: dict[int, _Stream] = {}
        self._demoted: set[str] = set()
        """Paths."""
        self._next_stream = 0
        self._share = self._all
        self._num_arrived = 0
        self._num_requeued = 0

    # Sources

    def add_source(self, name: str, kind: SourceKind, eligible: int | None = None) -> None:
        """Let blocks come from a source: all of them, or the eligible ones."""
        self._sources[name] = _Source(kind, self._all if eligible is None else eligible & self._all)
        self._demoted -= {name, *(stream.path for stream in self._streams.values() if stream.source == name)}

    def allow(self, name: str, blocks: int) -> None:
        """Add blocks to those that may come from a source; one that was dropped stays so."""
        if name in self._sources:
            self._sources[name].eligible |= blocks & self._all

    def forbid(self, name: str, blocks: int) -> None:
        """Take blocks off those that may come from a source."""
        if name in self._sources:
            self._sources[name].eligible &= ~blocks

    def note_sent(self, name: str, blocks: int, now: float) -> None:
        """Replace what a source has sent or is sending to anybody."""
        source = self._sources.get(name)
        if source is not None and source.sent != blocks:
            source.sent = blocks
            source.sent_changed_at = now

    def take_share(self, index: int, num_receivers: int) -> None:
        """Be one of several receivers of the same state: ask for the own share of the blocks first."""
        start, stop = (self._num_blocks * i // num_receivers for i in (index, index + 1))
        self._share = mask_of(range(start, stop)) if num_receivers > 1 else self._all

    def drop_source(self, name: str) -> None:
        """Ask it for nothing more; its streams still have to be closed with `close_stream`."""
        self._sources.pop(name, None)

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
        return any(source.kind is SourceKind.PEER for source in self._sources.values())

    # Streams

    def open_stream(self, source: str, now: float, path: str = "") -> int:
        """Add a stream from a source over a path, which where none is named has the source's name; return its number."""
        self._next_stream += 1
        self._streams[self._next_stream] = _Stream(source, path or source, range(0), now)
        return self._next_stream

    def next_run(self, stream: int, now: float) -> range | None:
        """Return the blocks that a stream is to ask for next, or None where there is nothing for it now."""
        this = self._streams[stream]
        self._requeue(this)
        source = self._sources.get(this.source)
        candidates = 0 if source is None else self._missing & source.eligible
        if this.path in self._demoted:
            candidates &= ~self._eligible_of_able()
        this.is_idle = not candidates
        if source is None or not candidates:
            return None
        if self._share == self._all and not self.has_peers():
            first = _first_from(candidates, 0)
            this.run = range(first, first + min(_ones_from(candidates, first), self._run_limit(this)))
        else:
            candidates = self._among_many(source, candidates, this, now)
            if not candidates:
                this.is_idle = True
                return None
            first = _first_from(candidates, self._pick(self._num_blocks))
            limit = 1 if self.has_peers() else max(self._run_limit(this) // 4, 1)
            this.run = range(first, first + min(_ones_from(candidates, first), limit))
        this.since = now
        self._missing &= ~mask_of(this.run)
        return this.run

    def arrived(self, stream: int, block: int, now: float) -> bool:
        """Note that a stream has brought a block, verified; whether it goes on with its run.

        It does not where the source was dropped or the rest of the run was given to others.
        """
        this = self._streams[stream]
        took = max(now - this.since, 1e-6)
        this.block_s = took if this.block_s is None else 0.7 * this.block_s + 0.3 * took
        this.since = now
        self._num_arrived += 1
        self._held |= 1 << block
        self._missing &= ~(1 << block)
        this.run = range(block + 1, this.run.stop) if block in this.run else range(0)
        return bool(this.run) and this.source in self._sources

    def is_asked_for(self, stream: int, block: int) -> bool:
        """Whether a stream was asked for a block and has not brought it: nobody else is asked for it meanwhile."""
        this = self._streams.get(stream)
        return this is not None and block in this.run

    def close_stream(self, stream: int) -> None:
        """Take a stream off; what it had in flight is missing again."""
        this = self._streams.pop(stream, None)
        if this is not None:
            self._requeue(this)

    def demote(self, stream: int) -> None:
        """Ask over the path of a stream that was cut for nothing that can be had otherwise."""
        if stream in self._streams:
            self._demoted.add(self._streams[stream].path)

    def idle_sources(self) -> set[str]:
        """Return the sources with a stream that has nothing to ask for."""
        return {stream.source for stream in self._streams.values() if stream.is_idle}

    def streams_over(self, path: str) -> list[int]:
        """Return the streams that take blocks over a path."""
        return [number for number, stream in self._streams.items() if stream.path == path]

    def overdue(self, now: float) -> list[int]:
        """Return the streams to cut: nothing else is missing, and an idle stream would be done much sooner."""
        if self._missing & self._eligible_of_idle():
            return []
        idle = [s for s in self._streams.values() if s.is_idle and s.source in self._sources and s.block_s is not None]
        cut = []
        for number, stream in self._streams.items():
            able = [
                s.block_s
                for s in idle
                if s.block_s is not None and self._sources[s.source].eligible & mask_of(stream.run)
            ]
            if not stream.run or not able:
                continue
            patience_s = max(_CUT_FACTOR * min(able) * len(stream.run), _MIN_PATIENCE_S)
            if now - stream.since > patience_s:
                cut.append(number)
        return cut

    # Blocks

    def hold(self, blocks: int) -> None:
        """Note blocks that are held without having been sent."""
        self._held |= blocks & self._all
        self._missing &= ~blocks

    def invalidate(self, blocks: int) -> None:
        """Note that held blocks are not those that are wanted: they are missing again."""
        blocks &= self._held
        self._held &= ~blocks
        self._missing |= blocks

    @property
    def held(self) -> int:
        """Blocks that are held."""
        return self._held

    @property
    def missing(self) -> int:
        """Blocks that are neither held nor asked for."""
        return self._missing

    @property
    def is_done(self) -> bool:
        """Whether every block is held."""
        return self._held == self._all

    def in_flight(self) -> int:
        """Blocks that have been asked for."""
        blocks = 0
        for stream in self._streams.values():
            blocks |= mask_of(stream.run)
        return blocks

    def is_hopeless(self) -> bool:
        """Whether blocks are neither held nor in flight nor eligible of any source that is left."""
        reachable = self._held | self.in_flight()
        for source in self._sources.values():
            reachable |= source.eligible
        return reachable != self._all

    def counts(self) -> TransferCounts:
        """Blocks so far."""
        return TransferCounts(
            num_held=self._held.bit_count(),
            num_arrived=self._num_arrived,
            num_requeued=self._num_requeued,
        )

    def validate(self) -> None:
        """Check the invariants; for tests.

        Raises:
            RuntimeError: one is broken.
        """
        in_flight = 0
        for stream in self._streams.values():
            mask = mask_of(stream.run)
            if mask & in_flight or mask & self._missing:
                raise RuntimeError(f"blocks {stream.run} are handed out twice, or also missing")
            in_flight |= mask
        if self._missing & self._held or (self._missing | self._held | in_flight) != self._all:
            raise RuntimeError("each block must be missing, in flight or held")

    def _requeue(self, stream: _Stream) -> None:
        left = mask_of(stream.run) & ~self._held
        self._num_requeued += left.bit_count()
        self._missing |= left
        stream.run = range(0)

    def _among_many(self, source: _Source, candidates: int, stream: _Stream, now: float) -> int:
        """Return the best of the candidates where others receive the same state; none where it is better to wait."""
        once, twice = self._held_by_peers()
        if source.kind is SourceKind.PEER:
            return candidates & ~twice or candidates
        unsent = candidates & ~source.sent & ~once
        if unsent:
            return unsent & self._share or unsent
        in_transit = candidates & ~once
        patience_s = max(_TRANSIT_FACTOR * (stream.block_s or 0.0), _MIN_PATIENCE_S)
        if in_transit and self.has_peers() and now - source.sent_changed_at < patience_s:
            return 0
        return in_transit or candidates & ~twice or candidates

    def _held_by_peers(self) -> tuple[int, int]:
        """Return the blocks that at least one, and at least two other receivers hold."""
        once = twice = 0
        for source in self._sources.values():
            if source.kind is SourceKind.PEER:
                twice |= once & source.eligible
                once |= source.eligible
        return once, twice

    def _eligible_of_idle(self) -> int:
        blocks = 0
        for stream in self._streams.values():
            if stream.is_idle and stream.source in self._sources:
                blocks |= self._sources[stream.source].eligible
        return blocks

    def _eligible_of_able(self) -> int:
        blocks = 0
        for stream in self._streams.values():
            source = self._sources.get(stream.source)
            if source is not None and stream.path not in self._demoted:
                blocks |= source.eligible
        return blocks

    def _run_limit(self, stream: _Stream) -> int:
        share = max(self._missing.bit_count() // (2 * max(len(self._streams), 1)), 1)
        if stream.block_s is None:
            return min(share, 2)
        return min(share, max(int(self._run_s / stream.block_s), 1))


def mask_of(blocks: range) -> int:
    """Return a run of blocks as a bit set."""
    return ((1 << len(blocks)) - 1) << blocks.start if blocks else 0


def mask_of_each(blocks: Iterable[int]) -> int:
    """Return blocks, none of them twice, as a bit set."""
    return sum(1 << block for block in blocks)


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
    """Return how many neighbours from `first` on are in the set."""
    upper = mask >> first
    return ((upper + 1) & ~upper).bit_length() - 1
