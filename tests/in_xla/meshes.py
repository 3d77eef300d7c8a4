"""Tensors on meshes of four devices, and how to look at them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch_xla
import torch_xla.distributed.spmd as xs


@dataclass(frozen=True)
class Layout:
    """A mesh's shape, the mesh axis of each dimension (None: not sharded), and the order of the devices in the mesh."""

    mesh: tuple[int, ...]
    spec: tuple[int | tuple[int, ...] | None, ...]
    devices: tuple[int, ...] = (0, 1, 2, 3)

    def of(self, full: torch.Tensor) -> Any:
        """Shard a tensor of the host."""
        mesh = xs.Mesh(np.array(self.devices), self.mesh, tuple("xyz"[: len(self.mesh)]))
        sharded = xs.mark_sharding(full.to("xla"), mesh, self.spec)
        torch_xla.sync()
        return sharded


LAYOUTS = {
    "rows": Layout((4,), (0, None)),
    "columns": Layout((4,), (None, 0)),
    "grid": Layout((2, 2), (0, 1)),
    "grid the other way": Layout((2, 2), (1, 0), (3, 1, 0, 2)),
    "rows of both axes": Layout((2, 2), ((0, 1), None)),
    "partially replicated": Layout((2, 2), (0, None)),
    "replicated beside columns": Layout((2, 2), (None, 0)),
    "replicated": Layout((4,), (None, None)),
}
SHAPES = {"even": (8, 4), "uneven": (7, 5), "with shards of padding alone": (5, 2), "one row": (1, 9)}


def spec_of(tensor: Any) -> str:
    """Return XLA's text of a tensor's sharding."""
    plain = tensor.global_tensor if isinstance(tensor, xs.XLAShardedTensor) else tensor
    text: str = torch_xla._XLAC._get_xla_sharding_spec(plain)
    return text


def on_devices(tensor: Any) -> list[tuple[str, Any, int, list[int]]]:
    """Return what each device holds, without padding, as integers: nothing is gathered, replicas are seen one by one."""
    shards: Sequence[Any] = xs.wrap_if_sharded(tensor).local_shards
    return [
        (shard.shard_device, shard.indices, shard.replica_id, bits_of(_without_padding(shard)).tolist())
        for shard in shards
    ]


def _without_padding(shard: Any) -> torch.Tensor:
    if shard.indices is Ellipsis:
        return shard.data
    return shard.data[tuple(slice(0, index.stop - index.start) for index in shard.indices)]


_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def bits_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().reshape(-1).view(_INTEGERS[tensor.element_size()])
