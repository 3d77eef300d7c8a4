"""Memory of an outer loop: local shards, copies on the backup device, and flat buffers for what is averaged."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch.distributed.tensor import DTensor


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor without its history: of a DTensor, this rank's shard. It shares the memory."""
    plain = tensor.detach()
    return plain.to_local() if isinstance(plain, DTensor) else plain


def extract_local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy of the tensor, without gradient and history: of a DTensor, of this rank's shard."""
    return local_of(tensor).clone()


def shaped_like(local: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """Return a local shard as a DTensor where `tensor` is one. It shares the memory, on whatever device that is.

    Made as FSDP2 makes what it offloads: `DTensor.from_local` would move it to the mesh's device.
    """
    return DTensor(local, tensor._spec, requires_grad=False) if isinstance(tensor, DTensor) else local


def copy_for(tensor: torch.Tensor, device: torch.device, pin_memory: bool) -> torch.Tensor:
    """Return a copy of a local tensor, dense, on the backup device; pinned if that helps."""
    is_pinned = pin_memory and device.type == "cpu" and torch.accelerator.is_available()
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, device=device, pin_memory=is_pinned)
    return copy.copy_(tensor)


class FlatBuffers:
    """Memory for the values of one round, reused from round to round: one flat tensor for each dtype and device.

    What is averaged lies in it end to end, so a bucket is a part of it, and nothing is packed or unpacked.
    """

    def __init__(self) -> None:
        self._flat: dict[tuple[torch.dtype, torch.device], torch.Tensor] = {}

    def lay_out(self, like: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Return memory for tensors of these shapes, dtypes and devices, with undefined contents.

        Returns:
            the tensors, dense; and the flat tensors that they lie in, one for each dtype and device, in the order in which
            those first occur. No tensor overlaps another; a flat tensor holds nothing else.
        """
        kinds = list(dict.fromkeys((tensor.dtype, tensor.device) for tensor in like))
        total = dict.fromkeys(kinds, 0)
        places = []
        for tensor in like:
            kind = (tensor.dtype, tensor.device)
            places.append((kind, total[kind]))
            total[kind] += tensor.numel()
        for kind, numel in total.items():
            if kind not in self._flat or self._flat[kind].numel() < numel:
                self._flat[kind] = torch.empty(numel, dtype=kind[0], device=kind[1])
        views = [
            self._flat[kind][at : at + tensor.numel()].view(tensor.shape)
            for tensor, (kind, at) in zip(like, places, strict=True)
        ]
        return views, [self._flat[kind][: total[kind]] for kind in kinds]


def buckets_of(flats: Sequence[torch.Tensor], cap_bytes: int) -> Iterator[torch.Tensor]:
    """Cut flat tensors into buckets of at most `cap_bytes` (one element at least); no bucket mixes dtypes."""
    for flat in flats:
        yield from (bucket for bucket in flat.split(max(1, cap_bytes // flat.element_size())) if bucket.numel())
