"""An allreduce that sends a byte for an element, and the codecs that make it.

It is an all-to-all of quantised chunks, a sum at each chunk's owner, and an all-gather. With W ranks each sends (W-1)/W of the
tensor twice, as a ring does, but in bytes: about a quarter of what fp32 takes. The owner sums in fp32, in rank order, and
quantises the result; everybody, the owner too, decodes the same bytes, so all ranks end with the same bits.

For int8, where the sum is divided by D, an element's error is at most

    sum over ranks of scale_r / 2 / D  +  scale_out / 2

and fp32 rounding (`ERROR_SLACK` of these scales, times W), with `scale_r` of the element's block at rank r, a 127th of the
block's largest magnitude, and `scale_out` of the same block of the result. A rank that gives zeros adds no error. A tensor of
lower precision than fp32 is rounded once more at the end.

A message holds one chunk of a flat tensor: first an fp32 scale for each block, then a byte for each element, block by block.

For a block with largest magnitude `a`, `scale = max(a / 127, 2**-126)` for int8 and `max(a / 448, 2**-126)` for fp8 (e4m3):

- int8: `q = round_half_even(x / scale)`, in -127..127. `|decoded - x| <= scale / 2` but for fp32 rounding (`ERROR_SLACK`).
- fp8: `q = e4m3(x / scale)`, 3 bits of mantissa. `|decoded - x| <= max(|x| / 16, scale / 1024)`, likewise.
- A block of zeros decodes to zeros. A block with a value that is infinite or NaN, or beyond fp32, decodes to NaNs.

Each operation is exactly rounded: a GPU makes the bytes and the values that a CPU makes (of NaNs only machines of one kind
do). Nothing here waits for a GPU, or knows a backend.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Literal

import torch
from torch.distributed.distributed_c10d import AllgatherOptions, AllToAllOptions

from torchft_ckpt.errors import ConfigError
from torchft_ckpt.process_group.base import ProcessGroup

Quantization = Literal["int8", "fp8"]

BLOCK = 512
"""Elements that share a scale, in any tensor that is large enough: scales are 0.8 % of a message."""

ERROR_SLACK = 2.0**-14
"""Of a block's scale: what rounding to fp32 while encoding and decoding may add to the errors stated above."""

_SHORTEST_TIMEOUT_S = 0.001
_SCALE_BYTES = 4
_SMALLEST_SCALE = 2.0**-126
_LARGEST_FLOAT = torch.finfo(torch.float32).max
# Adding it to a float of small magnitude leaves the float, rounded half to even, in the low bits. Unlike a cast, whose result
# for NaN the language leaves open, this is defined for every value.
_ROUNDER = 1.5 * 2.0**23
# Elements that are worked on at once: on a CPU what the cache holds, elsewhere what memory allows.
_SEGMENT_CPU = 2**18
_SEGMENT = 2**26


@dataclass(frozen=True, slots=True)
class Codec:
    """One way to make a byte of a float."""

    name: Quantization
    dtype: torch.dtype
    largest: float
    """Magnitude of the largest byte."""

    def encode(self, blocks: torch.Tensor, scales: torch.Tensor, values: torch.Tensor) -> None:
        """Encode `blocks` (n, block), fp32, into `scales` (n, 1), fp32, and `values` (n, block) of `dtype`."""
        torch.amax(blocks.abs(), dim=1, keepdim=True, out=scales)
        _divide(scales, self.largest).masked_fill_(scales.isinf(), torch.nan)
        # From above, so that rounding makes no infinity of the largest float.
        scales.clamp_(_SMALLEST_SCALE, _LARGEST_FLOAT / self.largest * (1 - 2.0**-23))
        scaled = blocks / scales
        if self.dtype is torch.int8:
            values.copy_(scaled.add_(_ROUNDER).view(torch.int32))  # keeps the low byte
        else:
            values.copy_(scaled)

    def reduce(self, group: ProcessGroup, tensor: torch.Tensor, *, divisor: int | None, timeout: timedelta) -> None:
        """See `allreduce_quantized`."""
        allreduce_quantized(group, tensor, self, divisor=divisor, timeout=timeout)


INT8 = Codec("int8", torch.int8, 127.0)
FP8 = Codec("fp8", torch.float8_e4m3fn, 448.0)


def find_codec(should_quantize: bool | Quantization) -> Codec | None:
    """Return the codec that a caller asked for; True means int8, False none.

    Raises:
        ConfigError: there is none of that name.
    """
    if isinstance(should_quantize, bool):
        return INT8 if should_quantize else None
    for codec in (INT8, FP8):
        if codec.name == should_quantize:
            return codec
    message = f"should_quantize={should_quantize!r}: there are True, False, 'int8' and 'fp8'"
    raise ConfigError(message, party="should_quantize")


@dataclass(frozen=True, slots=True)
class ChunkLayout:
    """A flat tensor of `numel` elements, cut into `num_chunks` chunks of whole blocks.

    All chunks are equally large; the last ones may end beyond the tensor, or lie beyond it, and are then filled with zeros.
    """

    numel: int
    num_chunks: int
    block: int
    blocks_per_chunk: int

    @property
    def chunk_numel(self) -> int:
        """Elements of a chunk."""
        return self.block * self.blocks_per_chunk

    @property
    def message_bytes(self) -> int:
        """Bytes of a message with one chunk."""
        return self.blocks_per_chunk * (_SCALE_BYTES + self.block)

    def chunk_of(self, flat: torch.Tensor, index: int) -> torch.Tensor:
        """Return what a chunk covers of a flat tensor: a view, shorter than a chunk at the tensor's end."""
        start = min(self.numel, index * self.chunk_numel)
        return flat[start : start + self.chunk_numel]


def chunk_layout(numel: int, num_chunks: int) -> ChunkLayout:
    """Cut `numel` elements into chunks as evenly as blocks of at most `BLOCK` elements allow."""
    blocks_per_chunk = max(1, -(-numel // (BLOCK * num_chunks)))
    block = max(1, -(-numel // (blocks_per_chunk * num_chunks)))
    return ChunkLayout(numel, num_chunks, -(-block // _SCALE_BYTES) * _SCALE_BYTES, blocks_per_chunk)


def encode_chunk(codec: Codec, chunk: torch.Tensor, message: torch.Tensor, layout: ChunkLayout) -> None:
    """Encode a chunk.

    Args:
        chunk: flat, contiguous, of a real floating point dtype; where it is shorter than a chunk zeros are added.
        message: flat uint8, `layout.message_bytes` long; written.
    """
    scales, values = _parts(codec, message, layout)
    for first, last in _segments(layout, chunk.device):
        codec.encode(_blocks(chunk, first, last, layout.block), scales[first:last], values[first:last])


def decode_chunk(codec: Codec, message: torch.Tensor, chunk: torch.Tensor, layout: ChunkLayout) -> None:
    """Decode a message into a chunk that `layout.chunk_of` gave, of any real floating point dtype."""
    scales, values = _parts(codec, message, layout)
    for first, last in _segments(layout, chunk.device):
        target = chunk[first * layout.block : last * layout.block]
        target.copy_(_decoded(scales[first:last], values[first:last]).view(-1)[: target.numel()])


def reduce_messages(
    codec: Codec, messages: torch.Tensor, reduced: torch.Tensor, layout: ChunkLayout, divisor: int | None
) -> None:
    """Decode messages of one chunk, add them up in fp32 in their order, divide, and encode the result.

    Args:
        messages: uint8, (number of messages, `layout.message_bytes`), contiguous.
        reduced: flat uint8, `layout.message_bytes` long; written.
        divisor: of the sum; None leaves the sum as it is.
    """
    parts = [_parts(codec, message, layout) for message in messages]
    out_scales, out_values = _parts(codec, reduced, layout)
    for first, last in _segments(layout, messages.device):
        (scales, values), *others = parts
        total = _decoded(scales[first:last], values[first:last])
        for scales, values in others:
            total.add_(_decoded(scales[first:last], values[first:last]))
        if divisor is not None:
            _divide(total, divisor)
        codec.encode(total, out_scales[first:last], out_values[first:last])


def _divide(tensor: torch.Tensor, divisor: float) -> torch.Tensor:
    """Divide in place, exactly rounded: on a GPU torch multiplies by the reciprocal of a number, but not by that of a tensor."""
    return tensor.div_(tensor.new_full((), divisor))


def _decoded(scales: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    return values.to(torch.float32).mul_(scales)


def _parts(codec: Codec, message: torch.Tensor, layout: ChunkLayout) -> tuple[torch.Tensor, torch.Tensor]:
    """Return views of a message: scales (blocks, 1) and values (blocks, block)."""
    num_scale_bytes = layout.blocks_per_chunk * _SCALE_BYTES
    scales = message[:num_scale_bytes].view(torch.float32).view(-1, 1)
    return scales, message[num_scale_bytes:].view(codec.dtype).view(-1, layout.block)


def _segments(layout: ChunkLayout, device: torch.device) -> Iterator[tuple[int, int]]:
    step = max(1, (_SEGMENT_CPU if device.type == "cpu" else _SEGMENT) // layout.block)
    for first in range(0, layout.blocks_per_chunk, step):
        yield first, min(first + step, layout.blocks_per_chunk)


def _blocks(chunk: torch.Tensor, first: int, last: int, block: int) -> torch.Tensor:
    """Return blocks of a chunk in fp32, zeros after its end."""
    flat = chunk[first * block : last * block]
    missing = (last - first) * block - flat.numel()
    flat = flat.to(torch.float32)
    if missing:
        flat = torch.cat([flat, flat.new_zeros(missing)])
    return flat.view(last - first, block)


@torch.no_grad()
def allreduce_quantized(
    group: ProcessGroup, tensor: torch.Tensor, codec: Codec, *, divisor: int | None, timeout: timedelta
) -> None:
    """Sum a tensor over all ranks, quantised, and divide it, in place. Call it on a thread that may block.

    On a CPU it returns when the result is there; on an accelerator as soon as all is queued on the current stream, if the
    group's works do so as well. The two collectives are started one after the other; no other may be started on this group
    between them.

    Args:
        group: connected.
        tensor: any shape, strides and real floating point dtype; the same shape and dtype on all ranks. Sums are in fp32:
            what is beyond its range becomes NaN with its block, as do infinities. Not to be used if an error is raised.
        codec: the same on all ranks.
        divisor: of the sum; None for the sum itself. The same on all ranks.
        timeout: of both collectives together, from the start of the first.

    Raises:
        Exception: what a collective or torch raised. The group was aborted then, so that no rank waits for this one, and no
            later collective of this rank meets a part of this one.
    """
    try:
        _allreduce(group, tensor.detach(), codec, divisor, timeout.total_seconds())
    except Exception:
        group.abort()
        raise


def _allreduce(group: ProcessGroup, tensor: torch.Tensor, codec: Codec, divisor: int | None, timeout_s: float) -> None:
    if tensor.numel() == 0:
        return
    num_ranks = group.size()
    layout = chunk_layout(tensor.numel(), num_ranks)
    flat = tensor.reshape(-1)  # a view where it can be, else a copy
    all_messages = torch.empty((num_ranks, layout.message_bytes), dtype=torch.uint8, device=tensor.device)
    received = torch.empty_like(all_messages)
    for rank, message in enumerate(all_messages):
        encode_chunk(codec, layout.chunk_of(flat, rank), message, layout)
    deadline = time.monotonic() + timeout_s

    exchange = AllToAllOptions()
    exchange.timeout = timedelta(seconds=timeout_s)
    group.alltoall_base(received.view(-1), all_messages.view(-1), [], [], exchange).wait()
    reduced = torch.empty_like(received[0])
    reduce_messages(codec, received, reduced, layout, divisor)

    gather = AllgatherOptions()
    gather.timeout = timedelta(seconds=max(_SHORTEST_TIMEOUT_S, deadline - time.monotonic()))
    group.allgather([list(all_messages)], [reduced], gather).wait()
    for rank, message in enumerate(all_messages):
        decode_chunk(codec, message, layout.chunk_of(flat, rank), layout)
    if flat.data_ptr() != tensor.data_ptr():
        tensor.copy_(flat.view(tensor.shape))
