"""Which box of the global tensor a DTensor's local shard is. Arithmetic only: no communication, no copy.

`torch.distributed.tensor` takes a second to import, so that is left to who has a DTensor: it is imported then.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, TypeGuard

import torch

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

from torchft_ckpt.errors import UnsupportedValueError


def is_dtensor(tensor: torch.Tensor) -> TypeGuard[DTensor]:
    """Whether it is a DTensor. Where nobody has imported that module, nobody can have made one."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def local_box(tensor: DTensor, path: str) -> tuple[torch.Tensor, tuple[int, ...], tuple[int, ...]]:
    """Return the local tensor (sharing memory with the DTensor), the global shape and the box's offsets.

    Raises:
        UnsupportedValueError: values that are not yet reduced, a rank outside the mesh, or a shard that is not one box.
    """
    from torch.distributed.tensor import Partial
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    mesh, placements = tensor.device_mesh, tensor.placements
    if any(isinstance(placement, Partial) for placement in placements):
        raise UnsupportedValueError(f"state dict at {path!r}: a DTensor with unreduced (Partial) values", path)
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        raise UnsupportedValueError(f"state dict at {path!r}: this rank is outside the DTensor's mesh", path)
    with torch.no_grad():
        local = tensor.to_local()
    if type(local) is not torch.Tensor:  # a replicated result that is still being gathered
        wait = getattr(local, "wait", None)
        local = wait() if callable(wait) else local
    shape, offsets = compute_local_shape_and_global_offset(tuple(tensor.shape), mesh, placements)
    if tuple(local.shape) != tuple(shape):
        raise UnsupportedValueError(
            f"state dict at {path!r}: the local shard has shape {tuple(local.shape)}, its placements say {tuple(shape)}",
            path,
        )
    if any(hasattr(placement, "split_factor") for placement in placements):
        _check_one_box(tensor, list(coordinate), tuple(shape), tuple(offsets), path)
    return local, tuple(tensor.shape), tuple(offsets)


def _check_one_box(
    tensor: DTensor, coordinate: list[int], shape: tuple[int, ...], offsets: tuple[int, ...], path: str
) -> None:
    """Shard the row numbers of every dimension as the placements do, and see that they come out as one run.

    Strided shards (FSDP2 over tensor parallelism) can be one box or not, depending on their order.
    """
    for dim, size in enumerate(tensor.shape):
        rows = torch.arange(size)
        for mesh_dim, placement in enumerate(tensor.placements):
            if getattr(placement, "dim", None) == dim:
                rows = _split_rows(placement, rows, tensor.device_mesh.size(mesh_dim))[coordinate[mesh_dim]]
        if rows.numel() and not torch.equal(rows, torch.arange(offsets[dim], offsets[dim] + shape[dim])):
            raise UnsupportedValueError(
                f"state dict at {path!r}: the local shard is not one box of the global tensor in dimension {dim} "
                f"(placements {tensor.placements})",
                path,
            )


def _split_rows(placement: Any, rows: torch.Tensor, num_shards: int) -> list[torch.Tensor]:
    """Cut row numbers as a placement cuts its dimension."""
    from torch.distributed.tensor import Shard

    split_factor = getattr(placement, "split_factor", None)
    flat = Shard(0) if split_factor is None else type(placement)(0, split_factor=split_factor)
    parts, _ = flat._split_tensor(rows, num_shards, with_padding=False)
    return list(parts)
