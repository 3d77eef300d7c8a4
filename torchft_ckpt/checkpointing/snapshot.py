"""The state of one step, fixed while it is served, without a copy as long as nobody mutates it.

A snapshot is *live* at first: reads copy small slices out of the trainer's own memory, under the read side of the state
dict lock. `detach` makes it *detaching*: what receivers still need is copied aside, block by block, while reads go on out of
the live memory, which nobody mutates before `detach` has returned. Then it is *detached*: reads come from the copies.
`close` frees it. It decides who still needs what; it does not know the network or the time.

Locks: the state dict lock first, then `_mutex`, never the other way. `detach` takes only `_mutex`, so a thread that holds the
write side can call it; both hold `_mutex` for one copy, of a slice or a block, so that is what one waits for the other.
"""

from __future__ import annotations

import bisect
import logging
import threading
import uuid
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from enum import Enum

import torch

from torchft_ckpt.checkpointing.blocks import block_range, count_blocks
from torchft_ckpt.checkpointing.buffers import BufferPool
from torchft_ckpt.checkpointing.format import Manifest, build_manifest, encode_manifest
from torchft_ckpt.checkpointing.lock import StateDictLock
from torchft_ckpt.checkpointing.space import Memory, plan_space
from torchft_ckpt.checkpointing.staging import Staging
from torchft_ckpt.checkpointing.tree import TreeEncoder
from torchft_ckpt.errors import CheckpointError

logger = logging.getLogger(__name__)
_STAGING_TIMEOUT = timedelta(seconds=120)


class Phase(Enum):
    """Where the bytes of a snapshot are."""

    LIVE = "live"
    DETACHING = "detaching"
    DETACHED = "detached"
    CLOSED = "closed"


class BlockGoneError(CheckpointError):
    """Bytes were asked for that every known receiver had, or whose snapshot was closed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotStatistics:
    """What a snapshot is doing, for people and tests."""

    step: int
    phase: Phase
    num_blocks: int
    num_blocks_copied_aside: int
    num_receivers_expected: int
    num_receivers_seen: int
    num_receivers_done: int


class Snapshot:
    """A state that can be read as bytes. Every method may be called from any thread.

    Args:
        state: the state; tensors are referred to, everything else is captured now.
        step: the step that it is the state of.
        lock: the lock that the trainer mutates the state under.
        pool: where copies go; its block length is the block length of this snapshot.
        num_expected: how many receivers were told to fetch it.

    Raises:
        UnsupportedValueError: the state holds something that cannot be carried.
    """

    def __init__(self, state: object, *, step: int, lock: StateDictLock, pool: BufferPool, num_expected: int) -> None:
        encoder = TreeEncoder()
        tree = encoder.encode(state)
        space = plan_space(encoder.tensors)
        self.step = step
        self.id = uuid.uuid4().hex
        self.manifest: Manifest = build_manifest(
            step=step, snapshot=self.id, block_bytes=pool.block_bytes, tree=tree, space=space
        )
        self.total_bytes = space.total_bytes
        self.num_blocks = count_blocks(space.total_bytes, pool.block_bytes)
        self.digests: dict[int, bytes] = {}
        self._encode_lock = threading.Lock()
        self._encoded: bytes | None = None
        self._lock = lock
        self._pool = pool
        self._starts = space.starts
        self._memories: list[Memory | None] = list(space.memories)
        self._num_on_cpu = sum(memory.device.type == "cpu" for memory in space.memories)
        staged = space.memories[self._num_on_cpu :]
        self._staging = Staging(staged) if staged else None
        self._staged: list[torch.Tensor] = []
        self._detaching = threading.Lock()
        self._mutex = threading.Lock()
        self._phase = Phase.LIVE
        self._copies: dict[int, torch.Tensor] = {}
        self._num_expected = num_expected
        self._seen: set[str] = set()
        self._done: set[str] = set()
        self._received: dict[str, set[int]] = {}  # of receivers at work: blocks that they have verified
        pool.open(self.id)

    def __repr__(self) -> str:
        return f"Snapshot(step={self.step}, {self._phase.value}, {self.total_bytes} bytes, id={self.id[:8]})"

    def manifest_bytes(self) -> bytes:
        """Return the manifest as JSON; encoded once."""
        with self._encode_lock:
            if self._encoded is None:
                self._encoded = encode_manifest(self.manifest)
            return self._encoded

    # Who needs what

    def register(self, receiver: str) -> bool:
        """Note that a receiver starts from the first block; False if not everything is there any more."""
        with self._mutex:
            if not self._can_begin():
                return False
            self._seen.add(receiver)
            self._done.discard(receiver)
            self._received[receiver] = set()
            return True

    def acknowledge(self, receiver: str, blocks: Iterable[int]) -> None:
        """Note that a receiver has these blocks, verified; copies that nobody needs any more are freed."""
        with self._mutex:
            received = self._received.get(receiver)
            if received is None:
                return
            received.update(blocks)
            if self._phase is Phase.DETACHED:
                self._free_unneeded()

    def finish(self, receiver: str) -> None:
        """Note that a receiver has everything, or has given up; the last one closes a detached snapshot."""
        with self._mutex:
            if self._received.pop(receiver, None) is not None:
                self._done.add(receiver)
            if self._phase is Phase.DETACHED:
                self._free_unneeded()

    def touch_buffer_ahead(self) -> bool:
        """Touch one buffer that a `detach` now would fill; False if there is nothing left to prepare."""
        with self._mutex:
            if self._phase is not Phase.LIVE:
                return False
            # An upper bound in constant time, because this is asked once a buffer.
            num_needed = self._num_live_blocks()
            if len(self._seen) >= self._num_expected:
                num_needed -= min((len(received) for received in self._received.values()), default=num_needed)
        return self._pool.touch_one(self.id, num_needed)

    @property
    def closed(self) -> bool:
        """Whether nothing can be read any more."""
        return self._phase is Phase.CLOSED

    def statistics(self) -> SnapshotStatistics:
        """What it is doing now."""
        with self._mutex:
            return SnapshotStatistics(
                step=self.step,
                phase=self._phase,
                num_blocks=self.num_blocks,
                num_blocks_copied_aside=len(self._copies),
                num_receivers_expected=self._num_expected,
                num_receivers_seen=len(self._seen),
                num_receivers_done=len(self._done),
            )

    # Reading

    def holds(self, start: int, stop: int) -> bool:
        """Whether bytes [start, stop) can be read now."""
        with self._mutex:
            return self._holds(start, stop)

    def try_read(self, start: int, stop: int) -> bytes | None:
        """Return a copy of bytes [start, stop), or None if that would mean waiting for a lock or for staging.

        Raises:
            BlockGoneError: they are not there any more.
        """
        staging = self._staging
        if staging is not None and not staging.ready():
            return None
        with self._lock.try_read() as readable:
            if not self._mutex.acquire(blocking=False):
                return None
            try:
                if self._phase is Phase.LIVE and not readable:
                    return None
                return self._copy_out(start, stop)
            finally:
                self._mutex.release()

    def read(self, start: int, stop: int) -> bytes:
        """Return a copy of bytes [start, stop); keep the range small, the trainer may wait for it.

        Raises:
            BlockGoneError: they are not there any more.
            LockTimeoutError: the lock was not free in time.
        """
        staging = self._staging
        if staging is not None:
            staging.wait(_STAGING_TIMEOUT)
        with self._mutex:
            if self._phase is not Phase.LIVE:
                return self._copy_out(start, stop)
        with self._lock.read():
            with self._mutex:
                return self._copy_out(start, stop)

    # Ending

    def detach(self) -> None:
        """Return once the live state may be mutated: copy aside what receivers still need. May be called again.

        Reads go on between the blocks. Never waits for a receiver. Where the copies cannot be made the snapshot is closed;
        nothing is raised, because the caller is the trainer.
        """
        with self._detaching:
            with self._mutex:
                if self._phase is not Phase.LIVE:
                    return
                self._phase = Phase.DETACHING
                staging = self._staging
            try:
                if staging is not None:
                    staging.order_mutation_after(_STAGING_TIMEOUT)
                for block in range(self._num_live_blocks()):
                    self._copy_aside_if_needed(block)
            except (CheckpointError, RuntimeError, MemoryError) as error:
                # The trainer must not pay for a receiver: that one learns that the state is gone, and asks again.
                logger.warning("%r cannot be kept for its receivers and is closed: %s", self, error)
                self.close()
                return
            with self._mutex:
                if self._phase is Phase.DETACHING:
                    self._memories = [None] * len(self._memories)
                    self._phase = Phase.DETACHED
                    logger.debug("%r: %d of %d blocks copied aside", self, len(self._copies), self.num_blocks)
                    self._free_unneeded()

    def close(self) -> None:
        """Free everything; reads fail from now on. May be called again."""
        with self._mutex:
            self._close()

    def _close(self) -> None:
        if self._phase is Phase.CLOSED:
            return
        self._phase = Phase.CLOSED
        self._memories = [None] * len(self._memories)
        for buffer in self._copies.values():
            self._pool.give(buffer)
        self._copies.clear()
        self._staging = None
        self._staged = []
        self._pool.close(self.id)

    # All below: with _mutex held

    def _can_begin(self) -> bool:
        """Whether a receiver that starts now will find every block."""
        if self._phase is Phase.DETACHING:
            return len(self._seen) < self._num_expected  # then everything is being copied aside
        return self._holds(0, self.total_bytes)

    def _holds(self, start: int, stop: int) -> bool:
        if self._phase is not Phase.DETACHED:
            return self._phase is not Phase.CLOSED
        blocks = range(start // self._pool.block_bytes, count_blocks(stop, self._pool.block_bytes))
        return all(block in self._copies or not self._has_live_bytes(block) for block in blocks)

    def _has_live_bytes(self, block: int) -> bool:
        """Whether the block has bytes of CPU segments: staged ones need no copy. These come first in the space."""
        return block < self._num_live_blocks()

    def _num_live_blocks(self) -> int:
        if self._num_on_cpu == len(self._starts):
            return self.num_blocks
        return count_blocks(self._starts[self._num_on_cpu], self._pool.block_bytes) if self._num_on_cpu else 0

    def _is_needed(self, block: int) -> bool:
        if len(self._seen) < self._num_expected:
            return True
        return any(block not in received for received in self._received.values())

    def _free_unneeded(self) -> None:
        if len(self._seen) < self._num_expected:
            return
        if not self._received:
            self._close()
            return
        for block in [block for block in self._copies if not self._is_needed(block)]:
            self._pool.give(self._copies.pop(block))

    def _pieces(self, start: int, stop: int) -> Iterator[tuple[int, int, int, int]]:
        """Yield (segment, first byte in it, byte after the last in it, position in the space)."""
        segments = self.manifest.segments
        index = max(bisect.bisect_right(self._starts, start) - 1, 0)
        while index < len(segments) and self._starts[index] < stop:
            begin, length = segments[index]
            low, high = max(start, begin), min(stop, begin + length)
            if low < high:
                yield index, low - begin, high - begin, low
            index += 1

    def _copy_aside_if_needed(self, block: int) -> None:
        with self._mutex:
            if self._phase is Phase.DETACHING and self._is_needed(block):
                self._copies[block] = self._copy_aside(block)

    def _copy_aside(self, block: int) -> torch.Tensor:
        """Copy the CPU bytes of a block into a buffer. Padding and staged bytes are left undefined: reads don't use them."""
        start, stop = block_range(block, self.total_bytes, self._pool.block_bytes)
        buffer = self._pool.take()
        for index, low, high, position in self._pieces(start, stop):
            if index < self._num_on_cpu:
                self._live(index).copy_to(low, high, buffer[position - start : position - start + high - low])
        return buffer

    def _live(self, index: int) -> Memory:
        memory = self._memories[index]
        if memory is None:
            raise BlockGoneError(f"step {self.step}: the live state is not available any more", party="snapshot")
        return memory

    def _copy_out(self, start: int, stop: int) -> bytes:
        if not self._holds(start, stop):
            raise BlockGoneError(f"step {self.step}: bytes {start} to {stop} are not served any more", party="snapshot")
        parts: list[bytes] = []
        at = start
        for index, low, high, position in self._pieces(start, stop):
            if position > at:
                parts.append(bytes(position - at))
            at = position + high - low
            if index >= self._num_on_cpu:
                parts.append(self._staged_memory(index).copy_out(low, high))
            elif self._phase is not Phase.DETACHED:
                parts.append(self._live(index).copy_out(low, high))
            else:
                parts += self._copied_parts(position, at)
        if at < stop:
            parts.append(bytes(stop - at))
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def _copied_parts(self, start: int, stop: int) -> Iterator[bytes]:
        block_bytes = self._pool.block_bytes
        while start < stop:
            block = start // block_bytes
            end = min(stop, (block + 1) * block_bytes)
            memory = Memory(self._copies[block], block_bytes, packed=False)
            yield memory.copy_out(start - block * block_bytes, end - block * block_bytes)
            start = end

    def _staged_memory(self, index: int) -> Memory:
        if not self._staged and self._staging is not None:
            self._staged = self._staging.wait(_STAGING_TIMEOUT)
        pinned = self._staged[index - self._num_on_cpu]
        return Memory(pinned, pinned.numel(), packed=False)
