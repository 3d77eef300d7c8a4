"""The memory that a state is received into, and the state made of it once it is whole.

It knows the format; it does not know where the bytes come from. Each segment has memory of its own, so that a tensor that
outlives the others does not keep them.
"""

from __future__ import annotations

import bisect
import sys
import threading

import numpy as np
import torch

from torchft_ckpt.checkpointing.blocks import block_range, count_blocks
from torchft_ckpt.checkpointing.dtypes import parse_dtype
from torchft_ckpt.checkpointing.format import Manifest, TensorEntry
from torchft_ckpt.checkpointing.tree import decode_tree
from torchft_ckpt.errors import DigestMismatchError, TransferError

_KEEP_FROM_BYTES = 64 * 1024


def _num_references(buffers: list[np.ndarray], index: int) -> int:
    return sys.getrefcount(buffers[index])


_UNREFERENCED = _num_references([np.empty(1, dtype=np.uint8)], 0)
"""What `_num_references` says of a buffer that only the list refers to; measured, because it differs between Pythons."""


class BufferShelf:
    """Keeps the memory of a receive for the next one: fresh memory costs more than the network. From any thread.

    Only memory that nobody refers to any more is handed out again.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: dict[int, list[np.ndarray]] = {}

    def keep(self, buffers: list[np.ndarray]) -> None:
        """Keep these for the next receive, instead of what was kept before."""
        with self._lock:
            self._kept = {}
            for buffer in buffers:
                if buffer.nbytes >= _KEEP_FROM_BYTES:
                    self._kept.setdefault(buffer.nbytes, []).append(buffer)

    def take(self, num_bytes: int) -> np.ndarray:
        """Return uint8 memory of that length with undefined contents."""
        with self._lock:
            candidates = self._kept.get(num_bytes, [])
            for index in range(len(candidates)):
                if _num_references(candidates, index) == _UNREFERENCED:
                    return candidates.pop(index)
        return np.empty(num_bytes, dtype=np.uint8)

    def clear(self) -> None:
        """Free what is kept."""
        self.keep([])


class Destination:
    """Receives the blocks of one state. Different blocks may be received on different threads.

    Args:
        manifest: a manifest that has been checked.
        shelf: where memory is taken from.

    Raises:
        TransferError: there is not enough memory.
    """

    def __init__(self, manifest: Manifest, shelf: BufferShelf) -> None:
        self.manifest = manifest
        self.num_blocks = count_blocks(manifest.total_bytes, manifest.block_bytes)
        self._starts = [offset for offset, _ in manifest.segments]
        try:
            self.buffers = [shelf.take(length) for _, length in manifest.segments]
        except MemoryError as error:
            raise TransferError(
                f"no memory for the {manifest.total_bytes} bytes that the source announces", party="memory"
            ) from error

    def pieces(self, block: int) -> list[memoryview]:
        """Return the memory of a block, in order: parts of segments, and throw-away bytes for the padding between them.

        What is written there counts for nothing until every block has been verified.
        """
        start, stop = block_range(block, self.manifest.total_bytes, self.manifest.block_bytes)
        pieces: list[memoryview] = []
        at = start
        index = max(bisect.bisect_right(self._starts, start) - 1, 0)
        while at < stop and index < len(self._starts):
            begin, length = self.manifest.segments[index]
            if at < begin:
                gap = min(begin, stop) - at
                pieces.append(memoryview(bytearray(gap)))
                at += gap
            end = min(stop, begin + length)
            if at < end:
                pieces.append(self.buffers[index].data[at - begin : end - begin])
                at = end
            index += 1
        if at < stop:
            pieces.append(memoryview(bytearray(stop - at)))
        return pieces

    def give_up(self) -> list[np.ndarray]:
        """Return the memory, to which this object does not refer any more."""
        buffers, self.buffers = self.buffers, []
        return buffers

    def assemble(self) -> object:
        """Return the state; call it once every block is in. Tensors of one segment share its memory."""
        whole = [torch.from_numpy(buffer) for buffer in self.buffers]
        tensors = [_tensor(entry, whole[entry.chunks[0].segment]) for entry in self.manifest.tensors]
        return decode_tree(self.manifest.tree, tensors)


def verify(block: int, actual: bytes, announced: bytes, party: str) -> None:
    """Check a block's digest against the one that came with it.

    Raises:
        DigestMismatchError: they differ.
    """
    if actual != announced:
        raise DigestMismatchError(
            f"block {block} from {party} does not have the digest that came with it: it was changed on the way",
            party=party,
        )


def _tensor(entry: TensorEntry, memory: torch.Tensor) -> torch.Tensor:
    chunk = entry.chunks[0]
    dtype = parse_dtype(entry.dtype)
    empty = torch.empty(0, dtype=dtype)
    if 0 in chunk.sizes:
        return torch.empty(chunk.sizes, dtype=dtype)
    start = chunk.byte_offset // dtype.itemsize
    strides = torch.empty(chunk.sizes, device="meta").stride() if chunk.strides is None else tuple(chunk.strides)
    return empty.set_(memory.untyped_storage(), start, tuple(chunk.sizes), strides)
