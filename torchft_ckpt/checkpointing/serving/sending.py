"""The body of one response, blocks or parts, and how it gets into a socket: lent memory goes straight to the system.

A body knows where it is and hashes what it sends; a burst sends from a thread until the socket is full, the body is done, or
its turn is over. Memory is lent for one send that does not wait, so the trainer never waits for a client. It does not know
HTTP or the event loop.
"""

from __future__ import annotations

import contextlib
import select
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import Enum

from torchft_ckpt.checkpointing.serving.parts import SLICE_BYTES, neighbours, read_region, slices_of
from torchft_ckpt.checkpointing.serving.relay import Served
from torchft_ckpt.checkpointing.serving.snapshot import BlockGoneError, Snapshot
from torchft_ckpt.checkpointing.state.blocks import (
    DIGEST_BYTES,
    block_range,
    digest_of,
    sample_range,
    start_blake3,
    start_digest,
)
from torchft_ckpt.checkpointing.state.regions import Region
from torchft_ckpt.core.services.proofs import PartDigest
from torchft_ckpt.core.services.rate import bucket_of_bytes, piece_bytes

_MAX_VIEWS = 1000
_GATHER_FROM_VIEWS = 16
_COPIED_BYTES = 64 * 1024
"""Shorter runs are gathered, so that many small parts are one read, and one send."""
_TURN_S = 0.2
_LONG_TURN_S = 0.05
"""Of what sends nothing, so that who sends waits little for it."""
_FULL_MS = 5


class Body:
    """Parts of what is served, in order, each followed by its digest.

    The bytes of a part are lent and sent as they are where they lie in one long run; else a slice at a time is gathered.

    Args:
        regions: where they lie.
        hashers: of their digests, of `DIGEST_BYTES` each. One is begun when the one before has ended.
        length: of all parts and digests, in bytes.
    """

    def __init__(self, served: Served, regions: Iterable[Region], hashers: Iterator[PartDigest], length: int) -> None:
        self._served = served
        self.length = length
        self._left = length
        self._hashers = hashers
        self._run: list[Region] = []
        """Neighbours, among them the next one: these are read together."""
        self._read: tuple[list[Region], bytearray] = [], bytearray()
        self._slices = self._with_ends(regions)
        self._next: Region | _End | None = next(self._slices, _END)
        self._scratch = memoryview(bytearray(SLICE_BYTES))
        self._out = memoryview(b"")
        """Bytes of our own that wait to be sent."""
        self._at = self._end = self._hashed = 0
        """The contiguous slice that is being sent."""
        self._hasher: PartDigest | None = None

    @property
    def done(self) -> bool:
        """Whether everything was taken."""
        return not self._left

    def advance(self, send: Callable[[list[memoryview]], int], max_bytes: int = SLICE_BYTES) -> int:
        """Hand the next bytes to `send`, which returns how many it took; return that.

        Raises:
            BlockGoneError: they are not there any more.
        """
        if not self._out and self._at >= self._end:
            self._begin_slice()
        if not self._out:
            taken = self._send_lent(send, min(self._at + max_bytes, self._end))
            self._at += taken
        if self._out:
            taken = send([self._out[:max_bytes]])
            self._out = self._out[taken:]
        self._left -= taken
        return taken

    def _begin_slice(self) -> None:
        """Go on to what comes next: a long run of live memory, or our copy of as much else as there is room for."""
        filled = 0
        while (region := self._next) is not _END:
            if region is None:  # a part has ended
                if filled + DIGEST_BYTES > SLICE_BYTES:
                    break
                digest = b"" if self._hasher is None else self._hasher.digest()
                self._scratch[filled : filled + DIGEST_BYTES] = digest
                filled += DIGEST_BYTES
                self._hasher = None
            else:
                if not region.steps and region.run > _COPIED_BYTES:
                    if not filled:
                        self._hasher = self._hasher or next(self._hashers)
                        self._at = self._hashed = region.start
                        self._end = region.stop
                        self._next = next(self._slices, _END)
                    break
                if filled + region.num_bytes > SLICE_BYTES:
                    break
                self._hasher = self._hasher or next(self._hashers)
                out = self._gathered(region, self._scratch[filled:])
                self._hasher.update(out)
                filled += len(out)
            self._next = next(self._slices, _END)
        self._out = self._scratch[:filled]

    def _with_ends(self, regions: Iterable[Region]) -> Iterator[Region | None]:
        """Yield the slices of all regions, and None after the last one of each."""
        for self._run in neighbours(regions, _COPIED_BYTES):
            for region in self._run:
                yield from slices_of(region)
                yield None

    def _gathered(self, region: Region, out: memoryview) -> memoryview:
        """Copy a slice to `out`; return the part of it that was filled."""
        if len(self._run) < 2:
            return read_region(self._served, region, out)
        start = self._run[0].start
        if self._read[0] is not self._run:
            self._read = self._run, bytearray(self._run[-1].stop - start)
            read_region(self._served, Region(start, (), len(self._read[1])), memoryview(self._read[1]))
        out = out[: region.run]
        out[:] = memoryview(self._read[1])[region.start - start : region.stop - start]
        return out

    def _send_lent(self, send: Callable[[list[memoryview]], int], end: int) -> int:
        """Send live memory up to a byte, or make our own copy of it, which is to be sent; return how many bytes are done."""
        with self._served.lend(self._at, end) as views:
            if self._hashed < end:
                skipped = self._hashed - self._at  # what was hashed before, but did not fit into the socket
                for view in views:
                    if skipped < len(view) and self._hasher is not None:
                        self._hasher.update(view[skipped:] if skipped else view)
                    skipped = max(skipped - len(view), 0)
                self._hashed = end
            if len(views) <= _GATHER_FROM_VIEWS:
                return send(views)
            # Else each small piece that a socket takes would cost a lending.
            filled = 0
            for view in views:
                self._scratch[filled : filled + len(view)] = view
                filled += len(view)
        self._out = self._scratch[:filled]
        return filled


def body_of_parts(
    served: Served,
    regions: Sequence[Region],
    seeds: Iterable[int],
    start: Callable[[int], PartDigest] = start_digest,
) -> Body:
    """Return a body of parts. `start` begins the digest of one, given its seed."""
    return Body(served, regions, map(start, seeds), sum(region.num_bytes + DIGEST_BYTES for region in regions))


def body_of_blocks(served: Served, run: range) -> Body:
    """Return a body of blocks. Their digests are computed on the way where they are not known."""
    start, stop = run.start * served.block_bytes, min(run.stop * served.block_bytes, served.total_bytes)
    spans = (block_range(block, served.total_bytes, served.block_bytes) for block in run)
    regions = (Region(low, (), high - low) for low, high in spans)
    return Body(served, regions, (_BlockDigest(served, block) for block in run), stop - start + DIGEST_BYTES * len(run))


class _BlockDigest:
    """The digest of a block that is being sent: the known one, or that of the bytes that pass."""

    def __init__(self, served: Served, block: int) -> None:
        self._served = served
        self._block = block
        self._hasher = None if block in served.digests else start_digest(block)
        served.note_sent(block)

    def update(self, data: bytes | memoryview, /) -> None:
        if self._hasher is not None:
            self._hasher.update(data)

    def digest(self) -> bytes:
        if self._hasher is not None:
            self._served.digests[self._block] = self._hasher.digest()
        return self._served.digests[self._block]


class _End(Enum):
    END = "end"


_END = _End.END


class Pace:
    """Bounds what all senders of a server send together. From any thread.

    Args:
        bytes_per_s: of the bodies of answers; None: no bound.
    """

    def __init__(self, bytes_per_s: float | None = None) -> None:
        self._lock = threading.Lock()
        self._bucket = None if bytes_per_s is None else bucket_of_bytes(bytes_per_s, time.monotonic())
        self._piece_bytes = SLICE_BYTES if bytes_per_s is None else piece_bytes(bytes_per_s)

    def give_back(self, num_bytes: int) -> None:
        """Let others send what was reserved and is not sent."""
        if self._bucket is not None:
            with self._lock:
                self._bucket.reserve(-num_bytes, time.monotonic())

    def reserve(self, most_bytes: int) -> tuple[int, float]:
        """Reserve the next piece, of so many bytes at most; return its bytes, and when it may be sent (`time.monotonic`)."""
        num_bytes, now = min(self._piece_bytes, most_bytes), time.monotonic()
        if self._bucket is None:
            return num_bytes, now
        with self._lock:
            return num_bytes, now + self._bucket.reserve(num_bytes, now)


class Turns:
    """The turns of one body: its sender waits for its own and wakes once for each, however many send. By one thread at a time."""

    def __init__(self, pace: Pace, num_bytes: int) -> None:
        self._pace = pace
        self._not_reserved = num_bytes
        self.left = 0
        """So many bytes may be sent once `wait_s` is over."""
        self._at = 0.0

    def wait_s(self) -> float:
        """Return the seconds until something may be sent."""
        if self.left <= 0:  # a body may send a few bytes more than it is told to
            num_bytes, self._at = self._pace.reserve(self._not_reserved)
            self._not_reserved -= num_bytes
            self.left += num_bytes
        return max(self._at - time.monotonic(), 0.0)

    def sent(self, num_bytes: int) -> None:
        self.left -= num_bytes

    def end(self) -> None:
        """No more of the body is sent."""
        self._pace.give_back(max(self.left, 0))


class Turn(Enum):
    """The end of a burst."""

    DONE = "done"
    FULL = "full"
    OVER = "over"
    AHEAD = "ahead of the pace"


def send_burst(body: Body, sock: socket.socket, stop: threading.Event, turns: Turns) -> Turn:
    """Send from the calling thread for one turn. The socket does not block.

    Raises:
        OSError: the connection has ended.
        BlockGoneError: bytes of the body are not there any more.
    """

    def send(views: list[memoryview]) -> int:
        try:
            return sock.send(views[0]) if len(views) == 1 else sock.sendmsg(views[:_MAX_VIEWS])
        except BlockingIOError:
            return 0

    poller = select.poll()
    poller.register(sock, select.POLLOUT)
    until = time.monotonic() + _TURN_S
    while not body.done:
        if stop.is_set():
            return Turn.OVER
        if turns.wait_s():
            return Turn.AHEAD
        taken = body.advance(send, turns.left)
        turns.sent(taken)
        if not taken and not poller.poll(_FULL_MS):
            return Turn.FULL
        if time.monotonic() > until:
            return Turn.OVER
    return Turn.DONE


def digest_burst(digests: Iterator[bytes | None], found: list[bytes], stop: threading.Event) -> bool:
    """Compute digests on the calling thread for one turn, and append them to `found`; return whether these are all.

    Raises:
        BlockGoneError: bytes are not there any more.
    """
    until = time.monotonic() + _LONG_TURN_S
    while not stop.is_set() and time.monotonic() < until:
        digest = next(digests, b"")
        if digest == b"":
            return True
        if digest is not None:
            found.append(digest)
    return False


def digest_blocks(served: Served, blocks: Sequence[int]) -> dict[int, bytes]:
    """Return the digests of blocks; computed where they are not known, which takes as long as reading them.

    Raises:
        BlockGoneError: one is not there any more.
    """
    return {block: _digest_block(served, block) for block in blocks}


def sample_blocks(served: Served, blocks: Sequence[int]) -> dict[int, bytes]:
    """Return a digest of a few bytes of each block, for a receiver that looks for blocks which it may hold already.

    Raises:
        BlockGoneError: one is not there any more.
    """
    samples = {}
    for block in blocks:
        with served.lend(*sample_range(block, served.total_bytes, served.block_bytes)) as views:
            samples[block] = digest_of(block, b"".join(views))
    return samples


def note_blake3s(snapshot: Snapshot, blocks: Sequence[int]) -> None:
    """Have the snapshot know the BLAKE3 digests of blocks, computed where it does not. Leaves out those that are gone."""
    for block in blocks:
        if block not in snapshot.blake3s:
            hasher = start_blake3()
            with contextlib.suppress(BlockGoneError):
                _read_block(snapshot, block, hasher.update)
                snapshot.blake3s[block] = hasher.digest()


def _digest_block(served: Served, block: int) -> bytes:
    """Return the digest of a block; of one that has not changed since an earlier state was served, that of then.

    Raises:
        BlockGoneError: it is not there any more.
    """
    known = served.digests.get(block) or served.known_digests.get(block)
    if known is None:
        hasher = start_digest(block)
        _read_block(served, block, hasher.update)
        known = served.digests[block] = hasher.digest()
    return known


def _read_block(served: Served, block: int, update: Callable[[memoryview], object]) -> None:
    """Feed the bytes of a block to a hasher, in order.

    Raises:
        BlockGoneError: it is not there any more.
    """
    start, stop = block_range(block, served.total_bytes, served.block_bytes)
    for at in range(start, stop, SLICE_BYTES):
        with served.lend(at, min(at + SLICE_BYTES, stop)) as views:
            for view in views:
                update(view)
