"""The state of one step, fixed while it is served, without a copy as long as nobody mutates it.

A snapshot is *live* at first: senders borrow small slices of the trainer's own memory, under the read side of the state
dict lock, for as long as one non-blocking send takes. `detach` makes it *detaching*: what receivers still need is copied
aside, block by block, while lending goes on out of the live memory, which nobody mutates before `detach` has returned. Then
it is *detached*: bytes come from the copies. `close` frees it. What is needed is decided in `receivers`; this file knows
where bytes are. It does not know the network or the time.

Memory that is live is lent and copied as long as the versions of its tensors are those of the capture (`state/versions.py`). A
tensor that was written to without the lock is *changed*: its bytes are not to be had any more, but from copies made before.

Locks: the state dict lock first, then `_changed`, never the other way. `detach` takes only `_changed`, so a thread that holds
the write side can call it; it waits at last until no slice of live memory is lent any more.
"""

from __future__ import annotations

import functools
import logging
import threading
import uuid
import zlib
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from enum import Enum
from typing import NamedTuple

import torch

from torchft_ckpt.checkpointing.lock import StateDictLock
from torchft_ckpt.checkpointing.serving.buffers import Buffer, BufferPool
from torchft_ckpt.checkpointing.serving.receivers import PeerBlocks, Receivers
from torchft_ckpt.checkpointing.serving.staging import Staging
from torchft_ckpt.checkpointing.serving.unchanged import Marked, mark, storages_of
from torchft_ckpt.checkpointing.state import device_memory
from torchft_ckpt.checkpointing.state.blocks import block_range, blocks_in, count_blocks
from torchft_ckpt.checkpointing.state.format import (
    MAX_MANIFEST_BYTES,
    Elsewhere,
    Manifest,
    build_manifest,
    encode_manifest,
)
from torchft_ckpt.checkpointing.state.local_state import some_of
from torchft_ckpt.checkpointing.state.space import Memory, Space, plan_space, segment_ranges
from torchft_ckpt.checkpointing.state.tree import TreeEncoder, largest_value
from torchft_ckpt.checkpointing.state.versions import Counted, StateVersions, count_writes, is_changed
from torchft_ckpt.core.transfer.scheduler import blocks_of, mask_of
from torchft_ckpt.errors import CheckpointError, StateChangedError
from torchft_ckpt.memory import gc_paused
from torchft_ckpt.threads import NUM_COPY_THREADS, Condition, parallel_map

logger = logging.getLogger(__name__)
_STAGING_TIMEOUT = timedelta(seconds=120)
_RETRY_S = 0.002
_LENT_TIMEOUT_S = 10.0
_PADDING = memoryview(bytes(64))
_SPREAD_FROM_BYTES = 16 * 1024 * 1024


class SnapshotPhase(Enum):
    """The place of a snapshot's bytes."""

    LIVE = "live"
    DETACHING = "detaching"
    DETACHED = "detached"
    CLOSED = "closed"


class BlockGoneError(CheckpointError):
    """Bytes were asked for that every known receiver had, or whose snapshot was closed."""


class _TensorOfSegment(NamedTuple):
    path: str
    tensor: torch.Tensor
    counted: Sequence[Counted]


class _Change(NamedTuple):
    path: str
    """Of the tensor."""
    copied: int
    """The blocks that had been copied aside before; a bit for each."""


class _Lent(NamedTuple):
    views: list[memoryview]
    live: list[int]
    """The segments whose live memory is among it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotStatistics:
    """The work of a snapshot, for people and tests."""

    step: int
    phase: SnapshotPhase
    num_blocks: int
    num_blocks_copied_aside: int
    num_receivers_expected: int
    num_receivers_seen: int
    num_receivers_done: int


class Snapshot:
    """A state that can be read as bytes. Every method may be called from any thread.

    Args:
        state: the state; tensors are referred to, everything else is captured now.
        lock: the lock that the trainer mutates the state under.
        pool: where copies go; its block length is the block length of this snapshot.
        see_tensors: called once with the tensors and their paths, in the order of the manifest; it must not keep them.
        versions: of the tensors when the state was captured; default: now.
        elsewhere: where else its server is.

    Raises:
        UnsupportedValueError: the state holds something that cannot be carried.
    """

    def __init__(
        self,
        state: object,
        *,
        step: int,
        lock: StateDictLock,
        pool: BufferPool,
        num_expected: int,
        see_tensors: Callable[[Sequence[tuple[str, torch.Tensor]]], None] | None = None,
        versions: StateVersions | None = None,
        elsewhere: Elsewhere | None = None,
        outlives_step: bool = False,
        before: Marked | None = None,
    ) -> None:
        self.outlives_step = outlives_step
        """Some receive it while later steps are made: it is not withdrawn when its step is committed."""
        with gc_paused():
            encoder = TreeEncoder()
            self._tree = encoder.encode(state)
            space = plan_space(encoder.tensors)
            self._versions = versions
            self._tensors = _by_segment(space, encoder.tensors, count_writes if versions is None else versions.of)
            if see_tensors is not None:
                see_tensors(encoder.tensors)
        self.num_values = encoder.num_items - len(encoder.tensors)
        """About so many leaves are no tensors; a flat list is one."""
        self.arrays = frozenset(encoder.arrays)
        """Places in the manifest of what are numpy arrays."""
        self._elsewhere = elsewhere
        self.step = step
        self.id = uuid.uuid4().hex
        self.block_bytes = pool.block_bytes
        self.total_bytes = space.total_bytes
        self.num_blocks = count_blocks(space.total_bytes, pool.block_bytes)
        self.num_tensors = len(space.placed)
        segments = [[one.tensor for one in segment] for segment in self._tensors]
        self.marked = mark(step, pool.block_bytes, space, segments, versions, before)
        self.digests, self.known_digests = self.marked.digests, self.marked.known
        self.blake3s: dict[int, bytes] = {}
        """By block; of those that were asked about."""
        self.space = replace(space, memories=[])
        """The places of its tensors in the byte space, without their memory."""
        self._manifest_lock = threading.Lock()
        self._manifest: Manifest | None = None
        self._encoded: bytes | None = None
        self._deflated: bytes | None = None
        self._lock = lock
        self._pool = pool
        self._starts = space.starts
        self._memories: list[Memory | None] = list(space.memories)
        self._lengths = space.lengths
        self._num_on_cpu = sum([device_memory.accelerator.is_on_host(memory.tensor) for memory in space.memories])
        self._still = self.marked.still & self._live_blocks() if outlives_step else 0
        """Blocks that stay live when it is detached: training does not write to them. A bit set."""
        self._trained = None if versions is None else versions.trained
        self._detaching = threading.Lock()
        self._changed = Condition()
        # All below belong to `_changed`.
        self._phase = SnapshotPhase.LIVE
        self._copies: dict[int, Buffer] = {}
        self._copied = 0
        """The blocks of `_copies`, as a bit set."""
        self._reads_copies = False
        """Live memory may not be any more what blocks of `_copies` are, so these are read from the copies."""
        self._changes: dict[int, _Change] = {}
        """By segment."""
        self._knows_staged = False
        """Whether staged memory is what was captured is known."""
        self._receivers = Receivers(self.num_blocks, num_expected)
        self._sent = 0
        self._num_lent_live = 0
        self._lent: Counter[int] = Counter()
        pool.open(self.id)
        staged = space.memories[self._num_on_cpu :]
        self._staging = Staging(staged, starts_now=num_expected > 0, look=self._look_at_staged) if staged else None

    def __repr__(self) -> str:
        return f"Snapshot(step={self.step}, {self._phase.value}, {self.total_bytes} bytes, id={self.id[:8]})"

    @property
    def manifest(self) -> Manifest:
        """All of the state but its bytes; built when it is first asked for."""
        with self._manifest_lock:
            if self._manifest is None:
                with gc_paused():
                    self._manifest = build_manifest(
                        step=self.step,
                        snapshot=self.id,
                        block_bytes=self.block_bytes,
                        tree=self._tree,
                        space=self.space,
                        elsewhere=self._elsewhere,
                    )
            return self._manifest

    def manifest_bytes(self) -> bytes:
        """Return the manifest as JSON; encoded once."""
        manifest = self.manifest
        with self._manifest_lock:
            if self._encoded is None:
                self._encoded = encode_manifest(manifest)
                if len(self._encoded) > MAX_MANIFEST_BYTES:
                    _say_once_what_is_large(largest_value(manifest.tree))
            return self._encoded

    def deflated_manifest_bytes(self) -> bytes:
        """Return the same, compressed (RFC 1950); compressed once."""
        encoded = self.manifest_bytes()
        with self._manifest_lock:
            if self._deflated is None:
                self._deflated = zlib.compress(encoded, 1)
            return self._deflated

    # Who needs what

    def register(self, receiver: str, now: float = 0.0, client: str = "", *, received: int = 0) -> bool:
        """Note that a receiver of a client starts from the first block; False if not everything is there any more.

        Args:
            now: in seconds.
            received: blocks that it does not need, a bit set. What of them lies on an accelerator is not staged, if it is the
                first receiver: nobody else is to come then.
        """
        with self._changed:
            if not self._can_begin():
                return False
            self._receivers.add(receiver, now, client)
            self._receivers.acknowledge(receiver, received)
            if self._staging is not None:
                self._staging.start(self._staged_ranges(~received) if received else None)
            return True

    def expect(self, num_receivers: int) -> None:
        """Note that so many come for it, all of the same group: until they have come, all of it is kept for them."""
        with self._changed:
            self._receivers.expect(num_receivers)

    @property
    def is_of_its_step_alone(self) -> bool:
        """Whether it is for those who were told to come, and for none of them when the step is over."""
        return bool(self.statistics().num_receivers_expected) and not self.outlives_step

    def is_known_to(self, receiver: str | None) -> bool:
        """Whether a receiver has begun to receive it."""
        with self._changed:
            return self._receivers.is_known(receiver)

    def is_revoked(self, receiver: str | None) -> bool:
        """Whether the receiver's lease was ended because it was too slow."""
        with self._changed:
            return self._receivers.is_revoked(receiver)

    def revoked(self) -> frozenset[str]:
        """The receivers that lost their lease."""
        with self._changed:
            return self._receivers.revoked()

    def contact(self, receiver: str, now: float, *, received: int = 0, address: str | None = None) -> None:
        """Note that a receiver is alive, has these blocks (a bit set), and serves them at an address.

        Copies that nobody needs any more are freed.
        """
        with self._changed:
            self._receivers.contact(receiver, now, address)
            if received and self._receivers.acknowledge(receiver, received) and self._phase is SnapshotPhase.DETACHED:
                self._free_unneeded()

    def finish(self, receiver: str) -> None:
        """Note that a receiver has everything, or has given up; the last one closes a detached snapshot."""
        with self._changed:
            self._receivers.finish(receiver)
            if self._phase is SnapshotPhase.DETACHED:
                self._free_unneeded()

    def lapse(self, silent_since: float) -> None:
        """End the leases of receivers that have not been heard of since."""
        with self._changed:
            for name in self._receivers.lapse(silent_since):
                logger.info("%r: the lease of receiver %s has lapsed, it is silent", self, name)
            if self._phase is SnapshotPhase.DETACHED:
                self._free_unneeded()

    def share_of(self, receiver: str) -> tuple[int, int]:
        """Return which receiver this is, from 0 on, and of how many."""
        with self._changed:
            return self._receivers.share_of(receiver)

    def peers_of(self, receiver: str) -> list[PeerBlocks]:
        """Return other receivers that serve what they hold."""
        with self._changed:
            return self._receivers.peers_of(receiver)

    def note_sent(self, block: int) -> None:
        """Note that a block is being sent to somebody."""
        with self._changed:
            self._sent |= 1 << block

    def sent(self) -> int:
        """The blocks that have been sent to anybody, as a bit set."""
        with self._changed:
            return self._sent

    def touch_buffer_ahead(self) -> bool:
        """Touch one buffer that a `detach` now would fill; False if there is nothing left to prepare."""
        with self._changed:
            if self._phase is not SnapshotPhase.LIVE:
                return False
            num_needed = (self._receivers.needed() & self._live_blocks() & ~self._still).bit_count()
        return self._pool.touch_one(self.id, num_needed)

    def copy_ahead(self) -> bool:
        """Copy one more block aside that a `detach` now would copy, so that it has less to do; False if nothing is left to do.

        For a reader that will be long, on its own thread. Waits while a writer holds the lock or waits for it, up to the lock's
        timeout. Without effect if the budget has no room.

        Raises:
            LockTimeoutError: a writer held the lock for the whole timeout.
        """
        with self._lock.read():
            with self._changed:
                if self._phase is not SnapshotPhase.LIVE or self._pool.num_available() == 0:
                    return False
                wanted = self._to_copy()
                if not wanted:
                    return False
            self._copy_block(wanted.bit_length() - 1, SnapshotPhase.LIVE)  # the last: readers begin at the first
        return True

    def set_apart(self, addresses: Collection[int], *, among: int | None = None) -> bool:
        """Copy aside at once what may change though nobody announces it, and read it from the copies from then on.

        The caller sees to it that nothing changes meanwhile, and that nothing was copied or lent before. Nothing is raised,
        because the caller is the trainer.

        Args:
            addresses: on the host, in the memory of tensors or arrays of the state.
            among: only blocks of these, a bit set; default: all.

        Returns:
            whether it is set apart; False if the budget or the system has no room.
        """
        blocks: set[int] = set()
        ordered = sorted(addresses)
        for index, memory in enumerate(self._memories[: self._num_on_cpu]):
            there = range(0) if memory is None else memory.addresses()
            place = bisect_left(ordered, there.start)
            if memory is not None and place < len(ordered) and ordered[place] in there:
                start = self._starts[index]
                blocks.update(blocks_in(start, start + memory.length, self.block_bytes))
        if among is not None:
            blocks = {block for block in blocks if among >> block & 1}
        with self._changed:
            num_available = self._pool.num_available()
            if num_available is not None and len(blocks) > num_available:
                return False
        try:
            self._copy_blocks(sorted(blocks), SnapshotPhase.LIVE)
        except (CheckpointError, RuntimeError, MemoryError, OSError) as error:
            logger.warning("%r: what may change was not copied aside: %s", self, error)
            return False
        return True

    @property
    def phase(self) -> SnapshotPhase:
        return self._phase

    @property
    def closed(self) -> bool:
        """Whether nothing can be read any more."""
        return self._phase is SnapshotPhase.CLOSED

    @property
    def is_changed(self) -> bool:
        """Whether a tensor of it is known to have been written to without the lock."""
        return bool(self._changes)

    @property
    def is_awaited(self) -> bool:
        """Whether somebody who was told to come has not come yet, or somebody has begun to receive it and has not ended."""
        with self._changed:
            return self._receivers.awaits_more or self.is_received

    @property
    def is_received(self) -> bool:
        """Whether somebody has begun to receive it, and has not ended."""
        with self._changed:
            return self._receivers.num_active > 0

    def statistics(self) -> SnapshotStatistics:
        with self._changed:
            return SnapshotStatistics(
                step=self.step,
                phase=self._phase,
                num_blocks=self.num_blocks,
                num_blocks_copied_aside=len(self._copies),
                num_receivers_expected=self._receivers.num_expected,
                num_receivers_seen=self._receivers.num_seen,
                num_receivers_done=self._receivers.num_done,
            )

    # Reading

    def holds(self, start: int, stop: int) -> bool:
        """Whether bytes [start, stop) can be read now."""
        with self._changed:
            return self._holds(start, stop)

    def raise_if_changed(self, start: int, stop: int, *, looks: bool = True) -> None:
        """Look whether bytes [start, stop) were written to without the lock.

        Args:
            start, stop: bytes.
            looks: False: only ask what was seen before.

        Raises:
            StateChangedError: they were, and cannot be had.
        """
        with self._changed:
            if looks:
                self._look_at_all(start, stop)
            path = self._changed_in(start, stop)
        if path is not None:
            raise self._changed_error(path)

    @contextmanager
    def lend(self, start: int, stop: int) -> Iterator[list[memoryview]]:
        """Lend the memory of bytes [start, stop): views in order. Give it back at once, the trainer may wait for it.

        Waits for a writer that has not detached this snapshot, and for these bytes to be staged.

        Raises:
            BlockGoneError: they are not there any more.
            StateChangedError: they were written to without the lock, maybe while they were lent: they must not be used then.
        """
        staged = self._await_staged(start, stop)
        while True:
            with self._lock.try_read() as readable:
                with self._changed:
                    lent = (
                        self._views(start, stop, staged) if readable or self._phase is not SnapshotPhase.LIVE else None
                    )
                    if lent is None:
                        self._changed.wait(_RETRY_S)
                        continue
                    is_live, is_counted = self._note_lent(start, stop)
                    tensors = self._tensors
                try:
                    yield lent.views
                finally:
                    with self._changed:
                        # Before it is returned: who waits for that changes the memory then.
                        changed = [path for index in lent.live if (path := self._look_at(index, tensors))]
                        self._note_returned(start, stop, is_live=is_live, is_counted=is_counted)
                if changed:
                    raise self._changed_error(changed[0])
                return

    def peek(self, ranges: Iterable[tuple[int, int]]) -> None:
        """Have a few bytes of each of these ranges to lend before all that lies around them was staged."""
        staging = self._staging
        if staging is not None:
            pieces = (
                piece for start, stop in ranges for piece in segment_ranges(self._starts, self._lengths, start, stop)
            )
            n = self._num_on_cpu
            staging.peek([(index - n, low, high) for index, low, high, _ in pieces if index >= n])

    def _await_staged(self, start: int, stop: int) -> dict[int, memoryview]:
        """Return what of these bytes was staged, by segment, once it is there. Of what was not wanted nothing is."""
        staging, staged = self._staging, dict[int, memoryview]()
        if staging is not None:
            for index, low, high, _ in segment_ranges(self._starts, self._lengths, start, stop):
                place = index - self._num_on_cpu
                if place >= 0 and (view := staging.get(place, low, high, _STAGING_TIMEOUT)) is not None:
                    staged[index] = view
        return staged

    def read(self, start: int, stop: int) -> bytes:
        """Return a copy of bytes [start, stop); keep the range small, the trainer may wait for it.

        Raises:
            BlockGoneError: they are not there any more.
        """
        with self.lend(start, stop) as views:
            return b"".join(views)

    # Ending

    def stage(self) -> None:
        """Wait until what lies on accelerators is on the host, then detach: it is let go. Not on the trainer's thread."""
        staging = self._staging
        try:
            if staging is not None:
                staging.wait(_STAGING_TIMEOUT)
            self.detach()
        except CheckpointError as error:
            logger.warning("%r cannot be kept for its receivers and is closed: %s", self, error)
            self.close()

    def detach(self) -> None:
        """Return once the live state may be mutated: copy aside what receivers still need. May be called again.

        Lending goes on between the blocks. Never waits for a receiver. Where the copies cannot be made the snapshot is
        closed; nothing is raised, because the caller is the trainer. Over budget, the slowest receivers lose their lease.
        """
        with self._detaching:
            with self._changed:
                if self._phase is SnapshotPhase.DETACHED and self._is_trained():
                    logger.info("%r is closed: what was frozen is trained now", self)
                    self._close()
                if self._phase is not SnapshotPhase.LIVE:
                    return
                if self._receivers.needed():
                    self._look_at_all_staged()
                    self._look_at_all(0, self.total_bytes)
                self._phase = SnapshotPhase.DETACHING
                self._changed.notify_all()
                self._fit_into_budget()
                staging = self._staging
            try:
                if staging is not None:
                    staging.order_mutation_after(_STAGING_TIMEOUT)
                with self._changed:
                    wanted = self._to_copy()  # looked at once: there may be thousands of receivers
                self._copy_blocks([block for run in blocks_of(wanted) for block in run], SnapshotPhase.DETACHING)
            except (CheckpointError, RuntimeError, MemoryError, OSError) as error:
                # The trainer must not pay for a receiver: that one learns that the state is gone, and asks again.
                logger.warning("%r cannot be kept for its receivers and is closed: %s", self, error)
                self.close()
                return
            with self._changed:
                if self._phase is SnapshotPhase.DETACHING:
                    self._forget_live()
                    self._phase = SnapshotPhase.DETACHED
                    self._changed.notify_all()
                    logger.debug("%r: %d of %d blocks copied aside", self, len(self._copies), self.num_blocks)
                    self._free_unneeded()
                if not self._changed.wait_for(lambda: not self._num_lent_live, _LENT_TIMEOUT_S):
                    logger.error("%r: live memory is still lent after %g s", self, _LENT_TIMEOUT_S)
                    self._close()

    def close(self) -> None:
        """Free everything; reads fail from now on. Returns once no live memory is lent. May be called again."""
        with self._changed:
            self._close()
            self._changed.wait_for(lambda: not self._num_lent_live, _LENT_TIMEOUT_S)

    # All below: with `_changed` held, but the copying

    def _close(self) -> None:
        if self._phase is SnapshotPhase.CLOSED:
            return
        self._phase = SnapshotPhase.CLOSED
        self._forget_live()
        for block in list(self._copies):
            self._free(block)
        if self._staging is not None:
            self._staging.end()
        self._staging = None
        self._pool.close(self.id)
        self._changed.notify_all()

    def _forget_live(self) -> None:
        """Let go of the memory that the trainer writes to."""
        keeps = 0 if self._phase is SnapshotPhase.CLOSED else self._still
        ends = zip(self._starts, self._lengths, strict=True)
        kept = [bool(keeps & self._blocks_of(start, start + length)) for start, length in ends]
        self._memories = [memory if keep else None for memory, keep in zip(self._memories, kept, strict=True)]
        self._tensors = [those if keep else [] for those, keep in zip(self._tensors, kept, strict=True)]
        self._versions = None

    def _is_trained(self) -> bool:
        """Whether the next step of an optimizer may write to what stays live."""
        if not self._still or self._trained is None:
            return False
        trained = self._trained()
        return any(trained & storages_of(tensor) for those in self._tensors for _, tensor, _ in those)

    # What was changed without the lock

    def _look_at(self, index: int, tensors: Sequence[Sequence[_TensorOfSegment]]) -> str | None:
        """Return the path of a tensor of a segment that was changed; note the first time that it was."""
        for path, tensor, counted in tensors[index]:
            if is_changed(counted):
                if index in self._changes:
                    return path
                self._changes[index] = _Change(path, self._copied if index < self._num_on_cpu else 0)
                if self._versions is not None:
                    self._versions.note_changed(tensor)
                elif self._phase is SnapshotPhase.DETACHED:
                    self.marked.moved.add(index)
                return path
        return None

    def _look_at_all(self, start: int, stop: int) -> None:
        for index, *_ in segment_ranges(self._starts, self._lengths, start, stop):
            if index < self._num_on_cpu:
                self._look_at(index, self._tensors)

    def _look_at_staged(self, segment: int) -> None:
        """A part of it has been staged, and counts if it is what was captured. Without holding `_changed`."""
        with self._changed:
            if not self._knows_staged and self._phase is not SnapshotPhase.CLOSED:
                self._look_at(self._num_on_cpu + segment, self._tensors)

    def _look_at_all_staged(self) -> None:
        """Once: whether what has been staged, or is being staged in order before the next write, is what was captured."""
        if not self._knows_staged and self._phase is not SnapshotPhase.CLOSED:
            self._knows_staged = True
            for index in range(self._num_on_cpu, len(self._starts)):
                self._look_at(index, self._tensors)

    def _changed_in(self, start: int, stop: int) -> str | None:
        """Return the path of a tensor whose bytes in [start, stop) cannot be had, because it was changed."""
        if not self._changes:
            return None
        for index, low, high, position in segment_ranges(self._starts, self._lengths, start, stop):
            change = self._changes.get(index)
            blocks = blocks_in(position, position + high - low, self.block_bytes)
            if change is not None and not all(change.copied >> block & 1 for block in blocks):
                return change.path
        return None

    def _changed_error(self, path: str) -> StateChangedError:
        return StateChangedError(
            f"step {self.step}: {path[:200]!r} was written to in place after the state was captured, outside of optimizer.step "
            "and without the write side of the state dict lock"
            + (", or steps before had left it alone" if self._still else ""),
            party=path[:200],
        )

    # Bytes

    def _can_begin(self) -> bool:
        """Whether a receiver that starts now will find every block."""
        if self._phase is SnapshotPhase.DETACHING:
            return self._receivers.awaits_more  # then everything is being copied aside
        return self._holds(0, self.total_bytes)

    def _holds(self, start: int, stop: int) -> bool:
        if self._phase is SnapshotPhase.CLOSED or self._changed_in(start, stop) is not None:
            return False
        if self._phase is not SnapshotPhase.DETACHED:
            return True
        last = min(count_blocks(stop, self.block_bytes), self._num_live_blocks())
        return all(
            block in self._copies or self._still >> block & 1 for block in range(start // self.block_bytes, last)
        )

    def _num_live_blocks(self) -> int:
        """Blocks with bytes of CPU segments, which come first in the space; staged ones need no copy."""
        if self._num_on_cpu == len(self._starts):
            return self.num_blocks
        return count_blocks(self._starts[self._num_on_cpu], self.block_bytes) if self._num_on_cpu else 0

    def _to_copy(self) -> int:
        """Blocks that a receiver needs, that the trainer would change, and that were not copied yet; a bit for each."""
        return self._receivers.needed() & self._live_blocks() & ~(self._copied | self._still)

    def _blocks_of(self, start: int, stop: int) -> int:
        return mask_of(blocks_in(start, stop, self.block_bytes))

    def _live_blocks(self) -> int:
        return (1 << self._num_live_blocks()) - 1

    def _fit_into_budget(self) -> None:
        num_available = self._pool.num_available()
        if num_available is None:
            return
        to_copy = self._live_blocks() & ~(self._copied | self._still)
        revoked = self._receivers.revoke_until(lambda blocks: (blocks & to_copy).bit_count() <= num_available)
        if revoked:
            logger.warning(
                "%r: the copies would exceed staging_budget_bytes=%d; leases are revoked: %s",
                self,
                self._pool.budget_bytes,
                some_of(revoked),
            )

    def _free_unneeded(self) -> None:
        needed = self._receivers.needed()
        if not needed and not self._receivers.num_active:
            self._close()
            return
        for run in blocks_of(self._copied & ~needed):
            for block in run:
                self._free(block)

    def _keep(self, block: int, buffer: Buffer) -> None:
        self._copies[block] = buffer
        self._copied |= 1 << block

    def _free(self, block: int) -> None:
        buffer = self._copies.pop(block)
        self._copied &= ~(1 << block)
        self._pool.give(None if self._lent[block] else buffer)

    def _copy_blocks(self, blocks: Sequence[int], phase: SnapshotPhase) -> None:
        """The trainer waits, so large copies are spread over a few threads, as torch does."""
        if len(blocks) * self.block_bytes < _SPREAD_FROM_BYTES or NUM_COPY_THREADS < 2:
            for block in blocks:
                self._copy_block(block, phase)
            return
        parallel_map(lambda block: self._copy_block(block, phase), blocks, NUM_COPY_THREADS, "torchft_ckpt-detach")

    def _copy_block(self, block: int, phase: SnapshotPhase) -> None:
        """Copy a block in this phase, without holding `_changed`: nobody mutates the live memory before the caller returns."""
        with self._changed:
            if self._phase is not phase or block in self._copies:
                return
            memories = self._memories
        buffer = self._copy_aside(block, memories)
        with self._changed:
            if self._phase is phase:
                self._look_at_all(*block_range(block, self.total_bytes, self.block_bytes))
                self._keep(block, buffer)  # it counts for what had not changed by now
                self._reads_copies = True
            else:  # the source may have changed under the copy
                self._pool.give(buffer)

    def _copy_aside(self, block: int, memories: list[Memory | None]) -> Buffer:
        """Copy the CPU bytes of a block into a buffer. Padding and staged bytes are left undefined: reads don't use them."""
        start, stop = block_range(block, self.total_bytes, self.block_bytes)
        buffer = self._pool.take()
        try:
            for index, low, high, position in segment_ranges(self._starts, self._lengths, start, stop):
                memory = memories[index]
                if index < self._num_on_cpu and memory is not None:
                    memory.copy_to(low, high, buffer.address + position - start)
        except BaseException:
            self._pool.give(buffer)
            raise
        return buffer

    def _note_lent(self, start: int, stop: int) -> tuple[bool, bool]:
        """Return whether live memory may be lent, and whether its blocks are counted as lent."""
        is_live = self._phase is not SnapshotPhase.DETACHED
        if self._still:  # nobody waits for what he leaves alone
            is_live = is_live and bool(self._blocks_of(start, stop) & ~self._still)
        is_counted = self._reads_copies or self._phase is SnapshotPhase.DETACHED
        self._num_lent_live += is_live
        if is_counted:
            self._lent.update(blocks_in(start, stop, self.block_bytes))
        return is_live, is_counted

    def _note_returned(self, start: int, stop: int, *, is_live: bool, is_counted: bool) -> None:
        if is_live:
            self._num_lent_live -= 1
            if not self._num_lent_live:
                self._changed.notify_all()
        if not is_counted:
            return
        for block in blocks_in(start, stop, self.block_bytes):
            self._lent[block] -= 1
            if not self._lent[block]:
                del self._lent[block]

    def _live(self, index: int) -> Memory:
        memory = self._memories[index]
        if memory is None:
            raise BlockGoneError(f"step {self.step}: the live state is not available any more", party="snapshot")
        return memory

    def _views(self, start: int, stop: int, staged: Mapping[int, memoryview]) -> _Lent:
        if not self._holds(start, stop):
            path = self._changed_in(start, stop)
            if path is not None and self._phase is not SnapshotPhase.CLOSED:
                raise self._changed_error(path)
            raise BlockGoneError(f"step {self.step}: bytes {start} to {stop} are not served any more", party="snapshot")
        views: list[memoryview] = []
        live: list[int] = []
        at = start
        may_be_copied = self._reads_copies or self._phase is SnapshotPhase.DETACHED
        for index, low, high, position in segment_ranges(self._starts, self._lengths, start, stop):
            if position > at:
                views.append(_PADDING[: position - at])
            at = position + high - low
            if index >= self._num_on_cpu:
                if index not in staged:
                    raise BlockGoneError(f"step {self.step}: a segment was staged in part", party="snapshot")
                views.append(staged[index])
            elif may_be_copied:
                views += self._views_of_either(index, low, position, at, live)
            else:
                views.append(self._live(index).view(low, high))
                live.append(index)
        if at < stop:
            views.append(_PADDING[: stop - at])
        return _Lent(views, live)

    def _views_of_either(self, index: int, low: int, start: int, stop: int, live: list[int]) -> Iterator[memoryview]:
        """Views of bytes [start, stop), which begin at `low` in the memory of that index; of copies where there are any.

        Where there are not, the index is added to `live`.
        """
        at = start
        while at < stop:
            block = at // self.block_bytes
            first = block * self.block_bytes
            end = min(stop, first + self.block_bytes)
            if block in self._copies:
                yield self._copies[block].view[at - first : end - first]
            else:
                yield self._live(index).view(low + at - start, low + end - start)
                live.append(index)
            at = end

    def _staged_ranges(self, needed: int) -> list[range]:
        """Return which bytes of each segment on an accelerator lie in these blocks: one run, from the first to the last."""
        ranges: list[range] = []
        for start, length in zip(self._starts[self._num_on_cpu :], self._lengths[self._num_on_cpu :], strict=True):
            first = start // self.block_bytes
            of_segment = needed >> first & ((1 << (count_blocks(start + length, self.block_bytes) - first)) - 1)
            low = first + (of_segment & -of_segment).bit_length() - 1
            high = first + of_segment.bit_length()
            inside = range(max(low * self.block_bytes - start, 0), min(high * self.block_bytes - start, length))
            ranges.append(inside if of_segment and length else range(0))
        return ranges


def _by_segment(
    space: Space, tensors: Sequence[tuple[str, torch.Tensor]], counted_of: Callable[[torch.Tensor], Sequence[Counted]]
) -> list[list[_TensorOfSegment]]:
    found: list[list[_TensorOfSegment]] = [[] for _ in space.memories]
    for (path, tensor), placed in zip(tensors, space.placed, strict=True):
        of_tensor = _TensorOfSegment(path, tensor, counted_of(tensor))
        for chunk in placed.chunks:
            found[chunk.segment].append(of_tensor)
    return found


@functools.cache
def _say_once_what_is_large(path: str) -> None:
    logger.warning(
        "the plain values of this state are so large that no group can heal from here: what describes it has more than %d bytes,"
        " the most that a receiver takes (HTTPTransport(max_manifest_bytes=...)). The largest is %r: put it into a tensor",
        MAX_MANIFEST_BYTES,
        path,
    )
