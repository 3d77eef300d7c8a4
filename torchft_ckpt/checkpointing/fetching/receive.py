"""The memory that the blocks of a state are received into. What is made of it, once it is whole, the state's target says.

Each segment of the byte space goes into one memory: that of a local tensor where the state is received in place and it fits,
else memory of its own, so that a tensor that outlives the others does not keep them. It knows the format; it does not know
where the bytes come from, and not which of them are there.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Sequence

import numpy as np
import torch

from torchft_ckpt.checkpointing.state import device_memory
from torchft_ckpt.checkpointing.state.blocks import block_range, count_blocks, digest_of, sample_range, start_digest
from torchft_ckpt.checkpointing.state.description import Description
from torchft_ckpt.checkpointing.state.device_memory import DeviceMemory
from torchft_ckpt.checkpointing.state.dtypes import DTYPES
from torchft_ckpt.checkpointing.state.fit import check_layout
from torchft_ckpt.checkpointing.state.format import Chunk, Manifest, WireTensor
from torchft_ckpt.checkpointing.state.local_state import LocalMemory, LocalState, whole_tensor
from torchft_ckpt.checkpointing.state.memory import TOUCH_FROM_BYTES, ReadInto, Toucher, Update, fresh_memory
from torchft_ckpt.checkpointing.state.space import segment_ranges
from torchft_ckpt.checkpointing.state.target import StateTarget
from torchft_ckpt.errors import TransferError
from torchft_ckpt.memory import gc_paused

_SCATTER_BELOW_BYTES = 128 * 1024
"""Blocks whose pieces are smaller on average are received as one and then copied to where they belong."""


def _num_references(buffers: list[np.ndarray], index: int) -> int:
    return sys.getrefcount(buffers[index])


_UNREFERENCED = _num_references([np.empty(1, dtype=np.uint8)], 0)
"""What `_num_references` says of a buffer that only the list refers to; measured, because it differs between Pythons."""


class BufferCache:
    """Keeps the memory of a receive for the next one: fresh memory costs more than the network. From any thread.

    Only memory that nobody refers to any more is handed out again. What a failed receive had got is in it, and is found
    there: memory of the same length is handed out in the order in which it was kept.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: dict[int, list[np.ndarray]] = {}

    def keep(self, buffers: Sequence[np.ndarray]) -> None:
        """Keep these for the next receive, instead of what was kept before."""
        with self._lock:
            self._kept = {}
            for buffer in reversed(buffers):
                self._kept.setdefault(buffer.nbytes, []).append(buffer)

    def take(self, num_bytes: int) -> np.ndarray:
        """Return uint8 memory of that length with undefined contents."""
        kept = self.take_kept(num_bytes)
        return fresh_memory(num_bytes) if kept is None else kept

    def take_kept(self, num_bytes: int) -> np.ndarray | None:
        """Return memory of that length that was kept; None if the next one is not there, or in use."""
        with self._lock:
            candidates = self._kept.get(num_bytes)
            if not candidates:
                return None
            is_free = _num_references(candidates, -1) == _UNREFERENCED
            buffer = candidates.pop()  # also one that is in use, so that the others are found in their places
            return buffer if is_free else None

    @property
    def is_empty(self) -> bool:
        """Whether nothing is kept."""
        with self._lock:
            return not any(self._kept.values())

    def clear(self) -> None:
        """Free what is kept."""
        self.keep([])


class Destination:
    """Receives the blocks of one state. Different blocks may be received on different threads.

    Args:
        cache: where memory is taken from.
        local: the state that is here. None is for who only looks: he gets the source's boxes, tuples and plain values.

    Raises:
        TransferError: there is not enough memory.
        LayoutMismatchError: the same tensors are there, but other boxes of them than here.
        StateMismatchError: the state does not fit, see `fit.check_layout`.
    """

    def __init__(
        self,
        manifest: Manifest,
        cache: BufferCache,
        *,
        local: LocalState | None = None,
        in_place: bool = False,
    ) -> None:
        self.manifest = manifest
        self.num_blocks = count_blocks(manifest.total_bytes, manifest.block_bytes)
        is_kept = not cache.is_empty
        self.is_overwritten = False
        self._starts = [offset for offset, _ in manifest.segments]
        self._lengths = [length for _, length in manifest.segments]
        self._local = local
        self._in_place = in_place and local is not None
        self._target = StateTarget(local, in_place=in_place)
        self._as_they_are: set[str] = set()
        self._direct: dict[int, LocalMemory | DeviceMemory] = {}
        old: dict[int, memoryview | DeviceMemory] = {}
        if local is not None:
            self._as_they_are = check_layout(local, manifest, in_place=in_place)
            memories = local_memories(local, manifest)
            if in_place:
                self._direct = memories
            else:
                old = {index: _bytes_of(memory) for index, memory in memories.items()}
        self._on_device = {m.tensor.device: m for m in self._direct.values() if isinstance(m, DeviceMemory)}
        """One that is received into, of each device."""
        self._holds_old_contents = is_kept or bool(self._direct)
        self._buffers: dict[int, np.ndarray] = {}
        views: list[memoryview | DeviceMemory] = []
        try:
            for index, (_, length) in enumerate(manifest.segments):
                direct = self._direct.get(index)
                if direct is None:
                    buffer = self._buffers[index] = cache.take(length)
                    views.append(buffer.data)
                else:
                    views.append(_bytes_of(direct))
                    kept = cache.take_kept(length)
                    if kept is not None:
                        old[index] = kept.data
        except MemoryError as error:
            raise TransferError(
                f"no memory for the {manifest.total_bytes} bytes that the source announces", party="memory"
            ) from error
        self._views = views
        self._old = [old.get(index) for index in range(len(self._starts))] if old else []
        """By segment, memory that nothing is received into, and that may hold what is wanted: of the local state, or of a receive
        before into memory of its own. Empty where there is none."""
        self._toucher = Toucher()
        self._touched: set[int] = set()
        self._of_local: set[int] = set()
        """Blocks that were copied from the local state."""
        for device in self._on_device:
            # No stream writes there any more, nor to what a tensor that was just made for it was before.
            device_memory.accelerator.finish(device)

    def retarget(self, manifest: Manifest) -> None:
        """Take the plain values from another source's manifest; its tensors lie in the same places."""
        self.manifest = manifest

    @property
    def may_hold_blocks(self) -> bool:
        """Whether there is local memory that may hold some of the blocks already."""
        return bool(self._old or self._holds_old_contents)

    def views(self, block: int) -> list[memoryview]:
        """Return the memory of a block, in order: parts of segments, and throw-away bytes for the padding between them.

        What is written there counts for nothing until every block has been verified. Of what lies on a device these are copies.
        """
        start, stop = block_range(block, self.manifest.total_bytes, self.manifest.block_bytes)
        return self._cut(self._views, start, stop)

    def touch(self, block: int) -> None:
        """Have the system back fresh memory of a block, unless that was done or another thread is at it."""
        if block in self._touched:
            return
        self._touched.add(block)
        start, stop = block_range(block, self.manifest.total_bytes, self.manifest.block_bytes)
        for segment, low, high, _ in segment_ranges(self._starts, self._lengths, start, stop):
            if self._lengths[segment] >= TOUCH_FROM_BYTES and segment in self._buffers:
                self._toucher.touch(self._buffers[segment].data[low:high])

    def receive(self, unit: int, read_into: ReadInto, scratch: memoryview, update: Update) -> None:
        """Receive a block; see `streams.Memory`."""
        self.is_overwritten = self.is_overwritten or bool(self._direct)
        self.touch(unit)
        start, stop = block_range(unit, self.manifest.total_bytes, self.manifest.block_bytes)
        if self._on_device:
            for at in range(start, stop, len(scratch)):
                part = scratch[: stop - at]
                read_into(part)
                update(part)
                self._write(at, part)
            return
        views = self.views(unit)
        if stop - start < _SCATTER_BELOW_BYTES * len(views):
            _receive_scattered(views, stop - start, read_into, scratch, update)
        else:
            for view in views:
                for at in range(0, len(view), len(scratch)):
                    part = view[at : at + len(scratch)]
                    read_into(part)
                    update(part)

    def wipe(self, unit: int) -> None:
        """Write zeros over a block that does not count: the next receive may look here for what it need not fetch."""
        start, stop = block_range(unit, self.manifest.total_bytes, self.manifest.block_bytes)
        self._write(start, memoryview(bytes(stop - start)))

    def _write(self, start: int, data: memoryview) -> None:
        for segment, low, high, at in segment_ranges(self._starts, self._lengths, start, start + len(data)):
            self._views[segment][low:high] = data[at - start : at - start + high - low]

    def settle(self) -> None:
        """Wait until all that was received is where it belongs.

        Raises:
            TransferError: a device has failed.
        """
        for memory in self._on_device.values():
            memory.settle()

    def _sample_range(self, block: int) -> tuple[int, int]:
        return sample_range(block, self.manifest.total_bytes, self.manifest.block_bytes)

    def samples(self, block: int) -> set[bytes]:
        """Return the digests of a block's samples in the local state and in what was received before, if there are such."""
        start, stop = self._sample_range(block)
        memories: list[Sequence[memoryview | DeviceMemory | None]] = [self._old] if self._old else []
        if self._holds_old_contents:
            memories.append(self._views)
        samples = [b"".join(self._cut(memory, start, stop)) for memory in memories]
        return {digest_of(block, sample) for sample in samples if len(sample) == stop - start}

    def _copy_old(self, views: list[memoryview], start: int, stop: int) -> bool:
        """Copy bytes of the local state to where they would be received; False where not all of them are here."""
        old = self._cut(self._old, start, stop)
        if len(old) != len(views):
            return False
        self.is_overwritten = self.is_overwritten or bool(self._direct)
        for view, known in zip(views, old, strict=True):
            np.copyto(np.frombuffer(view, np.uint8), np.frombuffer(known, np.uint8))  # lets other threads run
        return True

    def take_local(self, block: int, wanted: bytes) -> bool:
        """Take a block from what was received before, or from the local state, if it has the wanted digest; whether it did.

        Where it is not received in place it is copied first, so that a state that changes meanwhile does no harm.
        """
        views = self.views(block)
        if self._holds_old_contents and _digest_of_views(block, views) == wanted:
            return True
        if not self._old:
            return False
        start, stop = block_range(block, self.manifest.total_bytes, self.manifest.block_bytes)
        if not self._copy_old(views, start, stop) or _digest_of_views(block, views) != wanted:
            return False
        if self._on_device:
            self._write(start, memoryview(b"".join(views)))
        if not self._direct:
            self._of_local.add(block)
        return True

    def is_equal(self) -> bool:
        """Whether every block was copied from the local state, and no tensor of that has other memory than was looked at."""
        if self._local is None or len(self._of_local) != self.num_blocks:
            return False
        places: dict[int, set[int]] = {}  # by segment; tensors that are tied there alone have several here
        for entry in self.manifest.tensors:
            held = self._local.get(entry.fqn)
            if held is None or len(held.data) != len(entry.chunks):
                return False
            for chunk, data in zip(entry.chunks, held.data, strict=True):
                if 0 not in chunk.sizes:
                    places.setdefault(chunk.segment, set()).add(device_memory.accelerator.place_of(data))
        return all(len(found) == 1 for found in places.values())

    def names_of(self, blocks: Sequence[int]) -> list[str]:
        """Return the names of the tensors that have bytes in these blocks."""
        block_bytes = self.manifest.block_bytes
        segments = {
            segment
            for block in blocks
            for segment, *_ in segment_ranges(
                self._starts, self._lengths, block * block_bytes, (block + 1) * block_bytes
            )
        }
        return [
            entry.fqn for entry in self.manifest.tensors if any(chunk.segment in segments for chunk in entry.chunks)
        ]

    def give_up(self) -> list[np.ndarray]:
        """Return the memory of its own, to which this object does not refer any more."""
        buffers = list(self._buffers.values())
        self._buffers, self._views = {}, []
        return buffers

    def assemble(self) -> object:
        """Return the state; call it once every block is in. Tensors of one segment share its memory.

        Where it was received in place these are the local tensors themselves, if there is one of that name.

        Raises:
            TransferError: a device has failed.
        """
        self.is_overwritten = self.is_overwritten or self._in_place
        self.settle()
        with gc_paused():
            chunks = self._assemble_chunks()
            received = [self._received(entry, own) for entry, own in zip(self.manifest.tensors, chunks, strict=True)]
            description = Description(tree=self.manifest.tree, tensors=self.manifest.tensors)
            return self._target.finish(description, received)

    def _received(self, entry: WireTensor, chunks: list[torch.Tensor]) -> torch.Tensor | list[torch.Tensor]:
        """Return the chunks of a tensor whose boxes are here as well; of any other the tensor, as it is at the source."""
        if self._local is None or entry.fqn in self._as_they_are:
            return whole_tensor(entry, chunks)
        return chunks if self._local.get(entry.fqn) is not None else self._local.made(entry, chunks)

    def _assemble_chunks(self) -> list[list[torch.Tensor]]:
        num_chunks = [0] * len(self.manifest.segments)
        for entry in self.manifest.tensors:
            for chunk in entry.chunks:
                num_chunks[chunk.segment] += 1
        storages: dict[int, torch.UntypedStorage] = {}
        received = []
        for entry in self.manifest.tensors:
            dtype = DTYPES[entry.dtype]
            shards = []
            for chunk in entry.chunks:
                index = chunk.segment
                direct = self._direct.get(index)
                if direct is not None and num_chunks[index] == 1:
                    shards.append(direct.tensor)
                elif direct is None and num_chunks[index] == 1:
                    shards.append(_only_tensor(chunk, dtype, self._buffers[index]))
                else:
                    if index not in storages:
                        memory = torch.from_numpy(self._buffers[index]) if direct is None else direct.tensor
                        storages[index] = memory.untyped_storage()
                    base = 0 if direct is None else int(direct.tensor.storage_offset()) * direct.tensor.element_size()
                    shards.append(_tensor(chunk, dtype, storages[index], base))
            received.append(shards)
        return received

    def _cut(self, memories: Sequence[memoryview | DeviceMemory | None], start: int, stop: int) -> list[memoryview]:
        """Return the memory of bytes [start, stop); incomplete where a segment has none."""
        views: list[memoryview] = []
        at = start
        for segment, low, high, position in segment_ranges(self._starts, self._lengths, start, stop):
            if position > at:
                views.append(memoryview(bytearray(position - at)))
            memory = memories[segment]
            if memory is not None:
                views.append(memory[low:high])
            at = position + high - low
        if at < stop:
            views.append(memoryview(bytearray(stop - at)))
        return views


def local_memories(local: LocalState, manifest: Manifest) -> dict[int, LocalMemory | DeviceMemory]:
    """Return, by segment, the memory of a local tensor that has exactly the segment's bytes.

    Segments without one are left out: no tensor of that name is here, or it is strided. Where the state is not received in place,
    a tensor of another shape may have as many bytes; these are compared by their digests.
    """
    known: dict[int, LocalMemory | DeviceMemory] = {}
    for entry in manifest.tensors:
        for chunk, memory in zip(entry.chunks, local.memories(entry.fqn), strict=False):
            if memory is None or chunk.strides is not None or chunk.segment in known:
                continue
            if memory.num_bytes == manifest.segments[chunk.segment][1]:
                known[chunk.segment] = memory
    return known


def _bytes_of(memory: LocalMemory | DeviceMemory) -> memoryview | DeviceMemory:
    return memory.view if isinstance(memory, LocalMemory) else memory


def _receive_scattered(
    views: list[memoryview],
    num_bytes: int,
    read_into: ReadInto,
    scratch: memoryview,
    update: Update,
) -> None:
    index, filled = 0, 0
    for at in range(0, num_bytes, len(scratch)):
        part = scratch[: num_bytes - at]
        read_into(part)
        update(part)
        taken = 0
        while taken < len(part):
            view = views[index]
            count = min(len(view) - filled, len(part) - taken)
            view[filled : filled + count] = part[taken : taken + count]
            taken += count
            filled += count
            if filled == len(view):
                index, filled = index + 1, 0


def _digest_of_views(block: int, views: list[memoryview]) -> bytes:
    hasher = start_digest(block)
    for view in views:
        hasher.update(view)
    return hasher.digest()


def _only_tensor(chunk: Chunk, dtype: torch.dtype, memory: np.ndarray) -> torch.Tensor:
    if chunk.strides is not None or not memory.nbytes or chunk.byte_offset or chunk.sizes.count(0):
        return _tensor(chunk, dtype, torch.from_numpy(memory).untyped_storage(), 0)
    flat = torch.frombuffer(memory, dtype=dtype)
    if len(chunk.sizes) == 1:
        return flat
    return flat.view(chunk.sizes)


def _tensor(chunk: Chunk, dtype: torch.dtype, storage: torch.UntypedStorage, base: int) -> torch.Tensor:
    """Return one tensor of a segment that begins `base` bytes into a storage."""
    if 0 in chunk.sizes:
        return torch.empty(chunk.sizes, dtype=dtype, device="cpu")
    start = (base + chunk.byte_offset) // dtype.itemsize
    strides = torch.empty(chunk.sizes, device="meta").stride() if chunk.strides is None else tuple(chunk.strides)
    return torch.empty(0, dtype=dtype, device=storage.device).set_(storage, start, tuple(chunk.sizes), strides)
