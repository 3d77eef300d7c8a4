"""The body of one response, blocks or parts, and how it gets into a socket: lent memory goes straight to the system.

A body knows where it is and hashes what it sends; a burst sends from a thread until the socket is full, the body is done, or
its turn is over. Memory is lent for one send that does not wait, so the trainer never waits for a client. It does not know
HTTP or the event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import select
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor, Future
from enum import Enum
from functools import partial
from typing import Any, TypeVar

from torchft_ckpt.checkpointing.protocol import BoxRequest
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
from torchft_ckpt.checkpointing.state.format import Manifest
from torchft_ckpt.checkpointing.state.local_state import box_of
from torchft_ckpt.checkpointing.state.regions import Region, gather, region_in_chunk, slices
from torchft_ckpt.core.boxes.geometry import contains
from torchft_ckpt.core.services.fairness import FairQueue
from torchft_ckpt.core.services.rate import bucket_of_bytes, piece_bytes

T = TypeVar("T")


class FairThreads:
    """Runs turns of work; each ends by itself, within a fraction of a second. By the server's event loop only.

    Args:
        executor: has the threads.
    """

    def __init__(self, executor: Executor, num_threads: int) -> None:
        self._executor = executor
        self._queue: FairQueue[tuple[asyncio.Future[Any], Callable[[], Any]]] = FairQueue(
            num_threads, max(num_threads // 2, 1)
        )

    def run(self, client: str, work: Callable[..., T], *args: Any, is_long: bool = False) -> asyncio.Future[T]:
        """Have a turn done for a client; its result or error is the future's.

        A turn whose future is cancelled before it began is left out. One that has begun goes on to its end all the same.

        Args:
            work, args: called on a thread.
            is_long: whether it sends nothing and takes all of its turn.
        """
        outcome: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._queue.put(client, (outcome, partial(work, *args)), is_long=is_long)
        self._begin()
        return outcome

    def _begin(self) -> None:
        while (begun := self._queue.begin()) is not None:
            client, (outcome, work), is_long = begun
            if outcome.done():
                self._queue.end(client, is_long=is_long)
                continue
            try:
                done = self._executor.submit(work)
            except RuntimeError as error:  # the server has been stopped
                self._queue.end(client, is_long=is_long)
                outcome.set_exception(error)
                continue
            done.add_done_callback(partial(self._wake, outcome.get_loop(), outcome, client, is_long))

    def _wake(
        self,
        loop: asyncio.AbstractEventLoop,
        outcome: asyncio.Future[Any],
        client: str,
        is_long: bool,
        done: Future[Any],
    ) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(self._ended, outcome, client, is_long, done)

    def _ended(self, outcome: asyncio.Future[Any], client: str, is_long: bool, done: Future[Any]) -> None:
        self._queue.end(client, is_long=is_long)
        if done.cancelled():
            outcome.cancel()
        elif not outcome.done():
            error = done.exception()
            if error is None:
                outcome.set_result(done.result())
            else:
                outcome.set_exception(error)
        self._begin()


SLICE_BYTES = 1024 * 1024
_PADDING_BYTES = 64
_MAX_SPAN_BYTES = 4 * 1024 * 1024


def regions_of(manifest: Manifest, parts: Sequence[BoxRequest]) -> list[Region]:
    """Return where the parts lie in the byte space.

    Raises:
        ValueError: there is no such part.
    """
    return [_region(manifest, part) for part in parts]


def _region(manifest: Manifest, part: BoxRequest) -> Region:
    if part.tensor >= len(manifest.tensors) or part.chunk >= len(manifest.tensors[part.tensor].chunks):
        raise ValueError(f"there is no chunk {part.chunk} of tensor {part.tensor}")
    entry = manifest.tensors[part.tensor]
    chunk = entry.chunks[part.chunk]
    box, held = box_of(part), box_of(chunk)
    if not len(box.offsets) == len(box.sizes) == len(held.sizes) or not box.volume or not contains(held, box):
        raise ValueError(f"{box} is not within {held} of tensor {part.tensor}")
    return region_in_chunk(manifest, entry, chunk, box)


def digest_parts(served: Served, regions: Sequence[Region]) -> Iterator[bytes | None]:
    """Yield the BLAKE3 digests of parts, in order, without sending them.

    And None after each slice, where the work may be left.

    Raises:
        BlockGoneError: one is not there any more.
    """
    scratch = memoryview(bytearray(SLICE_BYTES))
    for some in neighbours(regions, SLICE_BYTES):
        start, stop = some[0].start, some[-1].stop
        data = read_region(served, Region(start, (), stop - start), scratch) if len(some) > 1 else scratch[:0]
        for region in some:
            hasher = start_blake3()
            for piece in slices_of(region) if not data else ():
                hasher.update(read_region(served, piece, scratch))
                yield None
            if data:
                hasher.update(data[region.start - start : region.stop - start])
            yield hasher.digest()


def neighbours(regions: Iterable[Region], max_bytes: int) -> Iterator[list[Region]]:
    """Yield regions in their order, together if they are runs that lie close to each other, of so many bytes in all."""
    some: list[Region] = []
    for region in regions:
        if some and (
            region.steps
            or some[-1].steps
            or not 0 <= region.start - some[-1].stop < _PADDING_BYTES
            or region.stop - some[0].start > max_bytes
        ):
            yield some
            some = []
        some.append(region)
    if some:
        yield some


def slices_of(region: Region, max_span: int = _MAX_SPAN_BYTES) -> Iterator[Region]:
    """Yield a region in slices that `read_region` takes, in C order, each from first byte to last at most `max_span` long."""
    return slices(region, SLICE_BYTES, min(max_span, _MAX_SPAN_BYTES))


def read_region(served: Served, region: Region, scratch: memoryview) -> memoryview:
    """Copy a slice of at most `SLICE_BYTES` to `scratch`; return the part of it that was filled."""
    out = scratch[: region.num_bytes]
    with served.lend(region.start, region.stop) as views:
        memory = views[0] if len(views) == 1 else memoryview(b"".join(views))
        gather(memory, region, out)
    return out


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

    def __init__(self, served: Served, regions: Iterable[Region], hashers: Iterator[Any], length: int) -> None:
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
        self._hasher: Any = None

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
        for self._run in neighbours(regions, _COPIED_BYTES):
            for region in self._run:
                yield from slices_of(region)
                yield None

    def _gathered(self, region: Region, out: memoryview) -> memoryview:
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


def body_of_parts(served: Served, regions: Sequence[Region], seeds: Iterable[int]) -> Body:
    """Return a body of parts, each with a digest of its seed."""
    return Body(served, regions, map(start_digest, seeds), sum(region.num_bytes + DIGEST_BYTES for region in regions))


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
    """Return the digests of blocks; computed if they are not known, which takes as long as reading them.

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
    ranges = [sample_range(block, served.total_bytes, served.block_bytes) for block in blocks]
    if isinstance(served, Snapshot):
        served.peek(ranges)
    for block, (start, stop) in zip(blocks, ranges, strict=True):
        with served.lend(start, stop) as views:
            samples[block] = digest_of(block, b"".join(views))
    return samples


def note_blake3s(snapshot: Snapshot, blocks: Sequence[int]) -> None:
    """Have the snapshot know the BLAKE3 digests of blocks, computed if it does not. Leaves out those that are gone."""
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
