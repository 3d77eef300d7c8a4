"""A DTensor travels as its local shard, with its box in the global tensor; a shard that is not one box is refused."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from torchft_ckpt.checkpointing.fetching.receive import local_memories
from torchft_ckpt.checkpointing.lock import StateDictLock
from torchft_ckpt.checkpointing.serving.buffers import BufferPool
from torchft_ckpt.checkpointing.serving.snapshot import Snapshot
from torchft_ckpt.checkpointing.state.fit import check_layout
from torchft_ckpt.checkpointing.state.local_state import LocalState
from torchft_ckpt.checkpointing.state.shards import DTensorAdapter
from torchft_ckpt.checkpointing.state.space import plan_space
from torchft_ckpt.errors import LayoutMismatchError, UnsupportedValueError


def local_box(tensor: torch.Tensor, path: str) -> tuple[torch.Tensor, tuple[int, ...], tuple[int, ...]]:
    """What this rank holds of a tensor: data, global shape, offsets."""
    adapter = DTensorAdapter()
    (box,), (data,) = adapter.boxes(tensor, path), adapter.data(tensor, path)
    return data, tuple(tensor.shape), box.offsets


@pytest.fixture(params=range(4))
def rank(request: pytest.FixtureRequest) -> Iterator[int]:
    """One rank of four, the others imagined: collectives do nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=request.param, world_size=4)
    yield request.param
    dist.destroy_process_group()


@pytest.mark.parametrize("rows", [8, 7, 3, 1])
def test_a_sharded_tensor_is_its_local_rows_uneven_or_not(rank, rows):
    full = torch.arange(rows * 2.0).view(rows, 2)
    sharded = distribute_tensor(full, init_device_mesh("cpu", (4,)), [Shard(0)], src_data_rank=None)
    local, global_shape, offsets = local_box(sharded, "w")
    assert global_shape == (rows, 2)
    assert torch.equal(local, full[offsets[0] : offsets[0] + local.shape[0]])
    assert local.data_ptr() == sharded.to_local().data_ptr()


def test_a_tensor_sharded_in_two_dimensions_is_one_box(rank):
    full = torch.arange(30.0).view(6, 5)
    sharded = distribute_tensor(full, init_device_mesh("cpu", (2, 2)), [Shard(0), Shard(1)], src_data_rank=None)
    local, _, (row, column) = local_box(sharded, "w")
    assert torch.equal(local, full[row : row + local.shape[0], column : column + local.shape[1]])


def test_a_replicated_tensor_is_the_whole_box(rank):
    full = torch.arange(6.0)
    replicated = distribute_tensor(full, init_device_mesh("cpu", (4,)), [Replicate()], src_data_rank=None)
    assert local_box(replicated, "w")[1:] == ((6,), (0,))


def test_the_space_holds_the_local_shard_alone(rank):
    full = torch.arange(16.0).view(8, 2)
    sharded = distribute_tensor(full, init_device_mesh("cpu", (4,)), [Shard(0)], src_data_rank=None)
    space = plan_space([("w", sharded)])
    placed = space.placed[0]
    (chunk,) = placed.chunks
    assert (placed.global_shape, chunk.offsets, chunk.sizes) == ((8, 2), (2 * rank, 0), (2, 2))
    assert space.memories[0].copy_out(0, 16) == bytes(full[2 * rank : 2 * rank + 2].clone().untyped_storage())


def test_unreduced_values_are_refused(rank):
    partial = DTensor.from_local(torch.ones(2), init_device_mesh("cpu", (4,)), [Partial()], run_check=False)
    with pytest.raises(UnsupportedValueError, match=r"'w'.*unreduced"):
        local_box(partial, "w")


def test_a_strided_shard_in_the_order_of_fsdp_over_tensor_parallelism_is_one_box(rank):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    full = torch.arange(8.0)
    dp, tp = mesh.get_coordinate()
    local = full.chunk(2)[tp].chunk(2)[dp]
    placements = [_StridedShard(0, split_factor=2), Shard(0)]
    tensor = DTensor.from_local(local, mesh, placements, run_check=False, shape=full.shape, stride=full.stride())
    box, _, (offset,) = local_box(tensor, "w")
    assert torch.equal(box, full[offset : offset + 2])


def test_a_default_device_does_not_matter_to_where_a_strided_shard_lies(rank):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    full = torch.arange(12.0)  # of no other test, because what is known of a mesh is kept
    dp, tp = mesh.get_coordinate()
    local = full.chunk(2)[tp].chunk(2)[dp]
    placements = [_StridedShard(0, split_factor=2), Shard(0)]
    tensor = DTensor.from_local(local, mesh, placements, run_check=False, shape=full.shape, stride=full.stride())
    with torch.device("meta"):
        box, _, (offset,) = local_box(tensor, "w")
    assert torch.equal(box, full[offset : offset + 3])


def test_a_strided_shard_that_is_not_one_box_is_refused(rank):
    mesh = init_device_mesh("cpu", (2, 2))
    local = torch.arange(2.0)
    placements = [Shard(0), _StridedShard(0, split_factor=2)]
    tensor = DTensor.from_local(local, mesh, placements, run_check=False, shape=torch.Size([8]), stride=(1,))
    with pytest.raises(UnsupportedValueError, match="not one box"):
        local_box(tensor, "w")


def test_another_ranks_shard_of_the_same_shape_is_not_received_into(rank):
    full = torch.arange(16.0).view(8, 2)
    sharded = distribute_tensor(full, init_device_mesh("cpu", (4,)), [Shard(0)], src_data_rank=None)
    snapshot = Snapshot({"w": sharded}, step=1, lock=StateDictLock(), pool=BufferPool(4096), num_expected=1)
    own = snapshot.manifest
    (entry,) = own.tensors
    moved = msgspec.structs.replace(entry.chunks[0], offsets=[(entry.chunks[0].offsets[0] + 2) % 8, 0])
    other = msgspec.structs.replace(own, tensors=[msgspec.structs.replace(entry, chunks=[moved])])
    local = LocalState({"w": sharded})
    check_layout(local, own, in_place=True)
    assert len(local_memories(local, own)) == 1
    with pytest.raises(LayoutMismatchError, match=r"w is \[.*\] of float32\[8, 2\] here"):
        check_layout(local, other, in_place=True)


def test_what_arrives_for_a_sharded_tensor_has_its_mesh_and_placements(rank):
    full = torch.arange(14.0).view(7, 2)
    sharded = distribute_tensor(full, init_device_mesh("cpu", (4,)), [Shard(0)], src_data_rank=None)
    adapter = DTensorAdapter()
    data = [local + 1 for local in adapter.data(sharded, "w")]
    rebuilt = adapter.rebuild(sharded, data)
    assert isinstance(rebuilt, DTensor)
    assert (rebuilt.shape, rebuilt.stride(), rebuilt.device_mesh, rebuilt.placements) == (
        sharded.shape,
        sharded.stride(),
        sharded.device_mesh,
        sharded.placements,
    )
    assert rebuilt.to_local().data_ptr() == data[0].data_ptr()
    assert adapter.boxes(rebuilt, "w") == adapter.boxes(sharded, "w")


def test_a_rank_outside_of_the_mesh_holds_nothing_and_says_so(rank):
    mesh = DeviceMesh("cpu", [0, 1, 2], _init_backend=False) if rank < 3 else DeviceMesh("cpu", [0, 1, 2])
    if rank < 3:
        return
    tensor = DTensor.from_local(torch.empty(0), mesh, [Shard(0)], run_check=False, shape=torch.Size([6]), stride=(1,))
    space = plan_space([("w", tensor)])
    assert space.placed[0].chunks == []
    assert space.placed[0].global_shape == (6,)
    assert DTensorAdapter().rebuild(tensor, []).shape == (6,)
