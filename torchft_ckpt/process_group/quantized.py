"""An allreduce that sends a byte for an element: all-to-all of quantised chunks, sum at each chunk's owner, all-gather.

With W ranks each sends (W-1)/W of the tensor twice, as a ring does, but in bytes of `quantization.py`'s messages: about a
quarter of what fp32 takes. The owner sums in fp32, in rank order, and quantises the result; everybody, the owner too, decodes
the same bytes, so all ranks end with the same bits.

For int8, where the sum is divided by D, an element's error is at most

    sum over ranks of scale_r / 2 / D  +  scale_out / 2

and fp32 rounding (`quantization.ERROR_SLACK` of these scales, times W), with `scale_r` of the element's block at rank r, a
127th of the block's largest magnitude, and `scale_out` of the same block of the result. A rank that gives zeros adds no error.
A tensor of lower precision than fp32 is rounded once more at the end.

It knows the process group's contract, no backend.
"""

from __future__ import annotations

import time
from datetime import timedelta

import torch
from torch.distributed.distributed_c10d import AllgatherOptions, AllToAllOptions

from torchft_ckpt.process_group.base import ProcessGroup
from torchft_ckpt.process_group.quantization import (
    Codec,
    chunk_layout,
    decode_chunk,
    encode_chunk,
    reduce_messages,
)

_SHORTEST_TIMEOUT_S = 0.001


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
