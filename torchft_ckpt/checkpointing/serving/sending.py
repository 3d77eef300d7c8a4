"""The body of one response, and how it gets into a socket: lent memory goes straight to the system, without a copy of ours.

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
from collections.abc import Callable, Iterator, Sequence
from enum import Enum
from typing import Protocol

from torchft_ckpt.checkpointing.serving.relay import Served
from torchft_ckpt.checkpointing.serving.snapshot import BlockGoneError, Snapshot
from torchft_ckpt.checkpointing.state.blocks import (
    DIGEST_BYTES,
    block_range,
    count_blocks,
    digest_of,
    sample_range,
    start_blake3,
    start_digest,
)
from torchft_ckpt.core.rate import bucket_of_bytes, piece_bytes

SLICE_BYTES = 1024 * 1024
_MAX_VIEWS = 1000
_GATHER_FROM_VIEWS = 16
_TURN_S = 0.2
_LONG_TURN_S = 0.05
"""Of what sends nothing, so that who sends waits little for it."""
_FULL_MS = 5


class Sendable(Protocol):
    """What a burst sends."""

    length: int
    """Bytes in all."""

    @property
    def done(self) -> bool:
        """Whether everything was taken."""

    def advance(self, send: Callable[[list[memoryview]], int], max_bytes: int = SLICE_BYTES) -> int:
        """Hand the next bytes to `send`, which returns how many it took; return that."""


class Body:
    """Blocks of what is served, in order, each followed by its digest, which is computed on the way where it is not known.

    Args:
        served: where they come from.
        start, stop: bytes of whole blocks.
    """

    def __init__(self, served: Served, start: int, stop: int) -> None:
        self._served = served
        self._at = start
        self._stop = stop
        self._trailer = memoryview(b"")
        self._gathered = memoryview(b"")
        self._scratch: memoryview | None = None
        num_blocks = count_blocks(stop, served.block_bytes) - start // served.block_bytes
        self.length = stop - start + DIGEST_BYTES * num_blocks
        self._begin_block()

    @property
    def done(self) -> bool:
        """Whether everything was taken."""
        return self._at >= self._stop and not self._trailer and not self._gathered

    def advance(self, send: Callable[[list[memoryview]], int], max_bytes: int = SLICE_BYTES) -> int:
        """Hand the next bytes to `send`, which returns how many it took; return that.

        Raises:
            BlockGoneError: they are not there any more.
        """
        if self._trailer:
            taken = send([self._trailer])
            self._trailer = self._trailer[taken:]
            if not self._trailer and self._at < self._stop:
                self._begin_block()
            return taken
        if self._gathered:
            taken = send([self._gathered])
            self._gathered = self._gathered[taken:]
            return self._advanced(taken)
        end = min(self._at + max_bytes, self._end)
        with self._served.lend(self._at, end) as views:
            if len(views) > _GATHER_FROM_VIEWS:
                self._gather(views)
                views = [self._gathered]
            if self._hasher is not None and self._hashed < end:
                self._hash(views, end)
            taken = 0 if self._gathered else send(views)
        if self._gathered:
            taken = send([self._gathered])
            self._gathered = self._gathered[taken:]
        return self._advanced(taken)

    def _advanced(self, taken: int) -> int:
        self._at += taken
        if self._at == self._end:
            self._end_block()
        return taken

    def _gather(self, views: list[memoryview]) -> None:
        """Copy many small pieces into one, so that a socket that takes a part at a time does not cost a lending each."""
        if self._scratch is None:
            self._scratch = memoryview(bytearray(SLICE_BYTES))
        scratch, at = self._scratch, 0
        for view in views:
            scratch[at : at + len(view)] = view
            at += len(view)
        self._gathered = scratch[:at]

    def _begin_block(self) -> None:
        self._block = self._at // self._served.block_bytes
        _, self._end = block_range(self._block, self._served.total_bytes, self._served.block_bytes)
        self._hasher = None if self._block in self._served.digests else start_digest(self._block)
        self._hashed = self._at
        self._served.note_sent(self._block)

    def _hash(self, views: list[memoryview], end: int) -> None:
        skipped = self._hashed - self._at  # what was hashed before, but did not fit into the socket
        for view in views:
            if skipped < len(view):
                self._hasher.update(view[skipped:] if skipped else view)  # type: ignore[union-attr]
            skipped = max(skipped - len(view), 0)
        self._hashed = end

    def _end_block(self) -> None:
        if self._hasher is not None:
            self._served.digests[self._block] = self._hasher.digest()
        self._trailer = memoryview(self._served.digests[self._block])


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
        """Count what was sent."""
        self.left -= num_bytes

    def end(self) -> None:
        """No more of the body is sent."""
        self._pace.give_back(max(self.left, 0))


class Turn(Enum):
    """How a burst ended."""

    DONE = "done"
    FULL = "full"
    OVER = "over"
    AHEAD = "ahead of the pace"


def send_burst(body: Sendable, sock: socket.socket, stop: threading.Event, turns: Turns) -> Turn:
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
    """Return the digest of a block.

    Raises:
        BlockGoneError: it is not there any more.
    """
    known = served.digests.get(block)
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
