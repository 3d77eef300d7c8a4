"""Blocks that this process has received, served on to other receivers of the same snapshot while they are unchanged.

A relay lends the memory that a receive wrote to. It ends before that memory may change: when the state is given up, or when
a trainer is about to write. It copies nothing aside, because whoever loses it has the source. What it sends is verified by
its receivers against the BLAKE3 digests of the source, so a relay is not trusted.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torchft_ckpt.checkpointing.lock import StateDictLock
from torchft_ckpt.checkpointing.serving.snapshot import BlockGoneError, Snapshot
from torchft_ckpt.checkpointing.state.blocks import blocks_in, count_blocks
from torchft_ckpt.checkpointing.state.format import Manifest

_LENT_TIMEOUT_S = 10.0


class Relay:
    """The verified blocks of a receive. Every method may be called from any thread."""

    def __init__(self, manifest: Manifest, views: Callable[[int], list[memoryview]], lock: StateDictLock) -> None:
        self.id = manifest.snapshot
        self.step = manifest.step
        self.total_bytes = manifest.total_bytes
        self.block_bytes = manifest.block_bytes
        self.num_blocks = count_blocks(manifest.total_bytes, manifest.block_bytes)
        self.num_tensors = len(manifest.tensors)
        self.digests: dict[int, bytes] = {}
        self.known_digests: dict[int, bytes] = {}
        self._views: Callable[[int], list[memoryview]] | None = views
        self._lock = lock
        self._changed = threading.Condition()
        self._num_lent = 0

    def __repr__(self) -> str:
        return f"Relay(step={self.step}, {len(self.digests)} of {self.num_blocks} blocks, id={self.id[:8]})"

    def add(self, block: int, digest: bytes) -> None:
        """Serve a block from now on; it has been verified."""
        self.digests[block] = digest

    @property
    def closed(self) -> bool:
        return self._views is None

    def holds(self, start: int, stop: int) -> bool:
        blocks = blocks_in(start, stop, self.block_bytes)
        return not self.closed and all(block in self.digests for block in blocks)

    @contextmanager
    def lend(self, start: int, stop: int) -> Iterator[list[memoryview]]:
        """Lend the memory of bytes [start, stop), within one block.

        Raises:
            BlockGoneError: they are not here, or a writer is about to change them.
        """
        with self._lock.try_read() as readable:
            with self._changed:
                if self._views is None or not readable or not self.holds(start, stop):
                    raise BlockGoneError(f"step {self.step}: bytes {start} to {stop} are not passed on", party="relay")
                block = start // self.block_bytes
                lent = _cut(self._views(block), start - block * self.block_bytes, stop - block * self.block_bytes)
                self._num_lent += 1
            try:
                yield lent
            finally:
                with self._changed:
                    self._num_lent -= 1
                    self._changed.notify_all()

    def close(self) -> None:
        """End it; returns once nothing is lent. May be called again."""
        with self._changed:
            self._views = None
            self._changed.wait_for(lambda: not self._num_lent, _LENT_TIMEOUT_S)

    def note_sent(self, block: int) -> None:
        """Nothing: who has sent what is the source's to know."""

    def contact(self, receiver: str, now: float, *, received: int = 0, address: str | None = None) -> None:
        """Nothing: a relay keeps nothing for anybody."""

    def is_revoked(self, receiver: str | None) -> bool:
        """Never: there are no leases on a relay."""
        return False


Served = Snapshot | Relay
"""A state that a server sends: its own, or the blocks that it has of another's. Any thread may use any member of it."""


def _cut(views: list[memoryview], start: int, stop: int) -> list[memoryview]:
    cut = []
    at = 0
    for view in views:
        low, high = max(start - at, 0), min(stop - at, len(view))
        if low < high:
            cut.append(view[low:high])
        at += len(view)
    return cut
