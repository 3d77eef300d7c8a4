"""How the sharded benchmark's groups hold their tensors, and what is in each element. It knows no processes and no transport.

A rank needs no real process group for that: a mesh of the given shape is enough, and nothing is communicated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from torchft_ckpt.core.boxes.geometry import Box, whole

_ODD = 2_654_435_761
_INT32 = 1 << 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """How a group holds a model.

    Attributes:
        mesh: the lengths of the mesh; their product is the number of ranks.
        placements: in turn of the tensors, one for each dimension of the mesh: `S0`, `S1`, `R`, or `T0/2`, which is a shard of
            dimension 0 strided by two, as FSDP2 puts over a tensor that is sharded by tensor parallelism. Empty: plain tensors.
    """

    mesh: tuple[int, ...]
    placements: tuple[tuple[str, ...], ...] = ()

    @property
    def world_size(self) -> int:
        """How many ranks there are."""
        size = 1
        for length in self.mesh:
            size *= length
        return size


def shards(num_ranks: int, dim: int) -> Layout:
    """Return the layout of tensors that are sharded along one dimension."""
    return Layout(mesh=(num_ranks,), placements=((f"S{dim}",),))


PLAIN = Layout(mesh=(1,))
FSDP_TP = Layout(mesh=(2, 2), placements=(("T0/2", "S0"), ("S0", "S1")))
"""FSDP2 over tensor parallelism: column-wise and row-wise parallel weights in turn."""


@dataclass(slots=True)
class Held:
    """A tensor as one rank holds it."""

    given: Tensor
    local: Tensor
    """The memory of this rank; contiguous, float32, two-dimensional."""
    box: Box
    index: int
    num_columns: int


def hold(layout: Layout, rank: int, shapes: Sequence[tuple[int, int]]) -> list[Held]:
    """Make the tensors that a rank of a group holds. Their memory has been written to."""
    mesh = _mesh(layout, rank) if layout.placements else None
    held = []
    for index, shape in enumerate(shapes):
        if mesh is None:
            whole_tensor = torch.zeros(shape)
            held.append(Held(whole_tensor, whole_tensor, whole(shape), index, shape[1]))
            continue
        placements = [_placement(text) for text in layout.placements[index % len(layout.placements)]]
        sizes, offsets = compute_local_shape_and_global_offset(shape, mesh, placements)
        local = torch.zeros(sizes)
        given = DTensor.from_local(
            local, mesh, placements, run_check=False, shape=torch.Size(shape), stride=(shape[1], 1)
        )
        held.append(Held(given, local, Box(tuple(offsets), tuple(sizes)), index, shape[1]))
    return held


def _mesh(layout: Layout, rank: int) -> DeviceMesh:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if dist.is_initialized():
        dist.destroy_process_group()
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=layout.world_size)
    return init_device_mesh("cpu", layout.mesh)


def _placement(text: str) -> Placement:
    kind, rest = text[0], text[1:]
    if kind == "R":
        return Replicate()
    if kind == "T":
        dim, split_factor = rest.split("/")
        return _StridedShard(int(dim), split_factor=int(split_factor))
    return Shard(int(rest))


def fill(held: Sequence[Held], seed: int) -> None:
    """Give every element the bits that its place in the whole tensor says; with another seed none keeps its own."""
    for tensor in held:
        _write(tensor.local.view(torch.int32), tensor, seed)


def wrong(held: Sequence[Held], seed: int) -> list[int]:
    """Return which tensors do not have, bit by bit, what `fill` with this seed gives them."""
    differing = []
    for tensor in held:
        expected = torch.empty(tensor.box.sizes, dtype=torch.int32)
        _write(expected, tensor, seed)
        if not torch.equal(expected, tensor.local.view(torch.int32)):
            differing.append(tensor.index)
    return differing


def _write(integers: Tensor, tensor: Held, seed: int) -> None:
    (first_row, first_column), (num_rows, num_columns) = tensor.box.offsets, tensor.box.sizes
    start = seed * 7919 + tensor.index * 104_729
    rows = _wrapped(torch.arange(first_row, first_row + num_rows) * tensor.num_columns, start)
    columns = _wrapped(torch.arange(first_column, first_column + num_columns), 0)
    torch.add(rows.unsqueeze(1), columns.unsqueeze(0), out=integers)


def _wrapped(places: Tensor, start: int) -> Tensor:
    """Return `places * _ODD + start` as 32-bit integers, so that the sum of two of them is that of their places."""
    half = _INT32 // 2
    return ((places * _ODD + start + half) % _INT32 - half).to(torch.int32)
