"""Decides which bytes of which memory make up the byte space of a state: its segments, in order.

A segment is what one or more tensors share: tied weights and overlapping views of one storage become one segment, so they
are sent once and tied again. Nothing is copied here. It does not know JSON, the network or locks.
"""

from __future__ import annotations

import bisect
import ctypes
import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from torchft_ckpt.checkpointing.state import device_memory
from torchft_ckpt.checkpointing.state.dtypes import CARRIED_DTYPES
from torchft_ckpt.checkpointing.state.shards import MeshLayout, adapter_of
from torchft_ckpt.errors import CheckpointError, UnsupportedValueError

ALIGN_BYTES = 64
_MAX_ITEMSIZE = 16
_ZEROS = (0,) * 64
_WHOLE: list[tuple[int, tuple[int, ...] | None]] = [(0, None)]


class Placed(NamedTuple):
    """The place of one box of a tensor: the box, and its bytes inside a segment.

    `strides` (elements) is None if the box is the segment's bytes in C order.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    segment: int
    byte_offset: int
    strides: tuple[int, ...] | None


class PlacedTensor(NamedTuple):
    """One tensor: its global shape, and where its boxes that are here lie."""

    path: str
    dtype: torch.dtype
    global_shape: tuple[int, ...]
    chunks: list[Placed]
    layout: MeshLayout | None = None


class Memory:
    """The live bytes of one segment: a run of one storage, or a strided tensor read in C order."""

    __slots__ = ("_address", "_packed", "_view", "length", "tensor")

    def __init__(self, tensor: torch.Tensor, length: int, *, packed: bool) -> None:
        self.tensor = tensor
        self.length = length
        self._packed = packed
        self._view: memoryview | None = None
        self._address = 0

    def addresses(self) -> range:
        """Return the addresses of its bytes on the host; of a strided tensor only the first."""
        first = self.tensor.data_ptr()
        return range(first, first + (1 if self._packed else self.length))

    def copy_out(self, start: int, stop: int) -> bytes:
        """Return a copy of bytes [start, stop). The memory must be on the CPU.

        Raises:
            CheckpointError: the storage was freed or shrunk since the state was handed over.
        """
        self._check_alive()
        if self._packed:
            itemsize = self.tensor.element_size()
            first, last = start // itemsize, -(-stop // itemsize)
            data = b"".join(
                ctypes.string_at(piece.data_ptr(), piece.numel() * itemsize)
                for piece in _c_order(self.tensor, first, last)
            )
            return data[start - first * itemsize : stop - first * itemsize]
        return ctypes.string_at(self.tensor.data_ptr() + start, stop - start)

    def copy_to(self, start: int, stop: int, address: int) -> None:
        """Copy bytes [start, stop) to an address on the CPU.

        Not by `Tensor.copy_`: that splits over all of OpenMP's threads and waits for the slowest, which on a machine with
        busy cores took up to a hundred times as long as one thread does.
        """
        if self._packed:
            data = self.copy_out(start, stop)
            ctypes.memmove(address, data, len(data))
            return
        self._check_alive()
        ctypes.memmove(address, self.tensor.data_ptr() + start, stop - start)

    def view(self, start: int, stop: int) -> memoryview:
        """Return bytes [start, stop) as memory: the live one, or a copy where it is strided. On the CPU.

        The view does not keep the tensor alive, nor `Tensor.numpy` in its way: that would fix the storage's size for good.

        Raises:
            CheckpointError: the storage was freed or shrunk since the state was handed over.
        """
        if self._packed:
            return memoryview(self.copy_out(start, stop))
        address = self.tensor.data_ptr()
        if self._view is None or address != self._address:  # a storage may have been freed, and filled again elsewhere
            self._check_alive()
            self._view = memory_at(address, self.length)
            self._address = address
        return self._view[start:stop] if stop - start != self.length else self._view

    def _check_alive(self) -> None:
        tensor = self.tensor
        num_elements = _span(tensor) + 1 if self._packed else tensor.numel()
        end = (int(tensor.storage_offset()) + num_elements) * tensor.element_size()
        if self.length and tensor.untyped_storage().nbytes() < end:
            raise CheckpointError("a tensor's storage was freed while its state was being served", party="state_dict")


@dataclass(frozen=True, slots=True)
class Space:
    """The byte space of one state. `starts[i]` is the first byte of segment i; segments on the CPU come first."""

    memories: list[Memory]
    starts: list[int]
    lengths: list[int]
    placed: list[PlacedTensor]
    total_bytes: int


class _Piece:
    """One box of a tensor on its way into the space: what it is, and the addresses [low, high) of its bytes."""

    __slots__ = (
        "device",
        "high",
        "index",
        "is_contiguous",
        "low",
        "nbytes",
        "offsets",
        "path",
        "sizes",
        "tensor",
    )

    def __init__(self, index: int, path: str, tensor: torch.Tensor, offsets: tuple[int, ...] | None) -> None:
        self.index = index
        self.path = path
        self.tensor = tensor
        self.device = "" if device_memory.accelerator.is_on_host(tensor) else str(tensor.device)
        self.sizes = tuple(tensor.shape)
        self.offsets = _ZEROS[: len(self.sizes)] if offsets is None else offsets
        self.nbytes = tensor.nbytes
        self.low = tensor.data_ptr()
        self.is_contiguous = tensor.is_contiguous()
        self.high = self.low + (self.nbytes if self.is_contiguous else span_of(tensor))

    def same_view(self, other: _Piece) -> bool:
        a, b = self.tensor, other.tensor
        return self.low == other.low and (a.dtype, a.shape, a.stride()) == (b.dtype, b.shape, b.stride())


_BY_LOW = operator.attrgetter("low")
_NOT_PLACED = Placed((), (), 0, 0, None)


def plan_space(tensors: list[tuple[str, torch.Tensor]]) -> Space:
    """Lay the tensors out in one byte space.

    Args:
        tensors: (path, tensor) pairs; sharded tensors stand for the boxes that are here.

    Raises:
        UnsupportedValueError: a tensor that cannot be carried; the message has its path.
    """
    pieces: list[_Piece] = []
    counts: list[int] = []
    layouts: list[MeshLayout | None] = []
    for path, tensor in tensors:
        adapter = adapter_of(tensor)
        if adapter is None:
            pieces.append(_piece(len(pieces), path, tensor, None))
            counts.append(1)
            layouts.append(None)
            continue
        boxes, data = adapter.boxes_and_data(tensor, path)
        counts.append(len(boxes))
        layouts.append(adapter.layout(tensor))
        for box, local in zip(boxes, data, strict=True):
            if local.dtype != tensor.dtype or tuple(local.shape) != box.sizes:
                raise _refuse(path, f"a shard {local.dtype}{[*local.shape]} of a {tensor.dtype} tensor, for {box}, it")
            pieces.append(_piece(len(pieces), path, local, box.offsets))
    groups = [[piece] for piece in pieces] if _lie_apart(pieces) else _groups_of(pieces)
    memories: list[Memory] = []
    starts: list[int] = []
    lengths: list[int] = []
    placed: list[Placed] = [_NOT_PLACED] * len(pieces)
    end = 0
    for segment, group in enumerate(groups):
        first = group[0]
        if len(group) == 1:
            memory = Memory(first.tensor, first.nbytes, packed=not first.is_contiguous)
            placed[first.index] = Placed(first.offsets, first.sizes, segment, 0, None)
        else:
            memory, places = _segment(group)
            for piece, (byte_offset, strides) in zip(group, places, strict=True):
                placed[piece.index] = Placed(piece.offsets, piece.sizes, segment, byte_offset, strides)
        start = -(-end // ALIGN_BYTES) * ALIGN_BYTES
        end = start + memory.length
        starts.append(start)
        lengths.append(memory.length)
        memories.append(memory)
    of_tensors: list[PlacedTensor] = []
    at = 0
    for (path, tensor), count, layout in zip(tensors, counts, layouts, strict=True):
        of_tensors.append(PlacedTensor(path, tensor.dtype, tuple(tensor.shape), placed[at : at + count], layout))
        at += count
    return Space(memories, starts, lengths, of_tensors, end)


def segment_ranges(starts: list[int], lengths: list[int], start: int, stop: int) -> Iterator[tuple[int, int, int, int]]:
    """Yield what bytes [start, stop) of a byte space consist of; what lies between the pieces is padding.

    Each piece is (segment, first byte in it, byte after the last in it, position in the space).
    """
    index = max(bisect.bisect_right(starts, start) - 1, 0)
    while index < len(starts) and starts[index] < stop:
        begin = starts[index]
        low, high = max(start, begin), min(stop, begin + lengths[index])
        if low < high:
            yield index, low - begin, high - begin, low
        index += 1


def memory_at(address: int, num_bytes: int) -> memoryview:
    """Return memory of this process as bytes. The view keeps nothing alive: whoever has it keeps the owner."""
    return memoryview((ctypes.c_char * num_bytes).from_address(address)).cast("B")


def is_plain_memory(tensor: torch.Tensor) -> bool:
    """Whether the values of a tensor are what its memory on the CPU holds: who writes bytes there has written the values."""
    return device_memory.accelerator.is_on_host(tensor) and _is_plain(tensor)


def is_plain_on_device(tensor: torch.Tensor) -> bool:
    """Whether it is the same of a tensor's memory on this process's kind of accelerator."""
    accelerator = device_memory.accelerator
    return not accelerator.is_on_host(tensor) and accelerator.can_copy(tensor.device) and _is_plain(tensor)


def _is_plain(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided and not tensor.is_conj() and not tensor.is_neg()


def has_elements_here(tensor: torch.Tensor) -> bool:
    """Whether a tensor that was read from a record is dense and has elements: records can hold meta and nested ones."""
    return tensor.layout is torch.strided and tensor.is_cpu and not tensor.is_nested


def span_of(tensor: torch.Tensor) -> int:
    """Return the bytes from the first to the last element of a tensor that has some, whatever lies between."""
    return (_span(tensor) + 1) * tensor.element_size()


def lies_apart(tensor: torch.Tensor) -> bool:
    """Whether no two elements of a tensor share memory; of one whose dimensions interleave it says no, whether they do or not."""
    reach = 1
    for stride, size in () if tensor.is_contiguous() else sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride < reach:
            return False
        reach += (size - 1) * stride
    return True


def are_one_place(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether the elements of tensors lie at the same addresses, those of one number at the same one, and no two others do."""
    places = {(tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()) for tensor in tensors}
    return len(places) == 1 and lies_apart(tensors[0])


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a contiguous tensor as a uint8 tensor on the same memory."""
    itemsize = tensor.element_size()
    return _storage_bytes(tensor, int(tensor.storage_offset()) * itemsize, tensor.numel() * itemsize)


def _storage_bytes(tensor: torch.Tensor, start: int, length: int) -> torch.Tensor:
    view = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return view.set_(tensor.untyped_storage(), start, (length,))  # type: ignore[call-overload]


def _piece(index: int, path: str, tensor: torch.Tensor, offsets: tuple[int, ...] | None) -> _Piece:
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer):
        raise _refuse(path, f"a tensor subclass {type(tensor).__module__}.{type(tensor).__qualname__}")
    if tensor.requires_grad:
        tensor = tensor.detach()
    if tensor.layout is not torch.strided or tensor.is_nested:
        raise _refuse(path, f"a tensor of layout {tensor.layout}{' (nested)' if tensor.is_nested else ''}")
    if tensor.dtype not in CARRIED_DTYPES or tensor.is_quantized:
        raise _refuse(path, f"a tensor of dtype {tensor.dtype}")
    if tensor.is_conj() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg()
    piece = _Piece(index, path, tensor, offsets)
    if piece.device and not device_memory.accelerator.can_copy(tensor.device):
        raise _refuse(path, f"a tensor on device {tensor.device}")
    return piece


def _span(tensor: torch.Tensor) -> int:
    """Elements between the first and the last one of a tensor that has some."""
    return sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def _refuse(path: str, what: str) -> UnsupportedValueError:
    return UnsupportedValueError(f"state dict at {path!r}: {what} cannot be carried", path)


def _overlaps_itself(piece: _Piece) -> bool:
    """Whether the view names a byte twice (`expand`): such a view is sent by value."""
    return piece.nbytes > piece.high - piece.low


def _lie_apart(pieces: list[_Piece]) -> bool:
    """Whether all are on the CPU and no two share a byte, as in nearly every state; False says nothing."""
    reach = 0
    for piece in sorted(pieces, key=_BY_LOW):
        if piece.low < reach or piece.device or not 0 < piece.nbytes <= piece.high - piece.low:
            return False
        reach = piece.high
    return True


def _groups_of(pieces: list[_Piece]) -> list[list[_Piece]]:
    groups = _group_overlapping([piece for piece in pieces if piece.nbytes and not _overlaps_itself(piece)])
    groups += [[piece] for piece in pieces if not piece.nbytes or _overlaps_itself(piece)]
    groups.sort(key=_place_in_space)
    return groups


def _group_overlapping(pieces: list[_Piece]) -> list[list[_Piece]]:
    groups: list[list[_Piece]] = []
    reach, device = 0, None
    pieces = sorted(pieces, key=_BY_LOW)
    if any(piece.device for piece in pieces):
        pieces.sort(key=lambda piece: piece.device)
    for piece in pieces:
        if piece.low >= reach or piece.device != device:
            groups.append([piece])
            reach, device = piece.high, piece.device
        else:
            groups[-1].append(piece)
            reach = max(reach, piece.high)
    return groups


def _place_in_space(group: list[_Piece]) -> tuple[bool, int]:
    """Segments on the CPU come first; then in the order of their first tensor."""
    first = group[0].index if len(group) == 1 else min(piece.index for piece in group)
    return bool(group[0].device), first


def _segment(group: list[_Piece]) -> tuple[Memory, list[tuple[int, tuple[int, ...] | None]]]:
    """Return the memory of what several pieces share, and for each of them its byte offset and strides in it."""
    first = group[0]
    if all(piece.same_view(first) for piece in group):
        return Memory(first.tensor, first.nbytes, packed=not first.is_contiguous), _WHOLE * len(group)
    # The hull starts where every piece is a whole number of its own items away from it.
    storage_start = first.tensor.untyped_storage().data_ptr()
    low = storage_start + (min(piece.low for piece in group) - storage_start) // _MAX_ITEMSIZE * _MAX_ITEMSIZE
    high = max(piece.high for piece in group)
    holder = next((piece.tensor for piece in group if _within_storage(piece.tensor, low, high)), None)
    misplaced = any((piece.low - low) % piece.tensor.element_size() for piece in group)
    if holder is None or misplaced:
        path = first.path
        raise _refuse(path, "a tensor that overlaps another one of a different storage")
    start = low - holder.untyped_storage().data_ptr()
    memory = Memory(_storage_bytes(holder, start, high - low), high - low, packed=False)
    return memory, [(piece.low - low, tuple(piece.tensor.stride())) for piece in group]


def _within_storage(tensor: torch.Tensor, low: int, high: int) -> bool:
    storage = tensor.untyped_storage()
    return storage.data_ptr() <= low and high <= storage.data_ptr() + storage.nbytes()


def _c_order(tensor: torch.Tensor, first: int, last: int) -> list[torch.Tensor]:
    if first >= last:
        return []
    if tensor.dim() == 0 or tensor.is_contiguous():
        return [tensor.reshape(-1)[first:last]]
    if tensor.dim() == 1:
        return [tensor[first:last].contiguous()]
    row = tensor[0].numel()
    start_row, stop_row = first // row, last // row
    pieces: list[torch.Tensor] = []
    if first % row:
        pieces += _c_order(tensor[start_row], first % row, min(row, last - start_row * row))
        start_row += 1
    if start_row < stop_row:
        pieces.append(tensor[start_row:stop_row].contiguous())
    if last % row and start_row <= stop_row:
        pieces += _c_order(tensor[stop_row], 0, last % row)
    return pieces
