"""A stand-in for SPMD tensors such as torch_xla's: several shards in one process, padded, replicated, each on a "device".

It has the shape of `XLAShardedTensor` (`local_shards` with `data`, `indices`, `replica_id`; `load_local_shards_`), counts how
many shards went from a device to the host, and refuses every operation that would gather or change it otherwise.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from torchft_ckpt.checkpointing.state.shards import ShardAdapter, register_shard_adapter, unregister_shard_adapter
from torchft_ckpt.core.boxes.geometry import Box
from torchft_ckpt.integrations.xla import LocalShard, local_shards_of


@dataclass
class Shard:
    """`indices` are a slice in each dimension, or an Ellipsis where the tensor is replicated. `data` may be padded."""

    data: torch.Tensor
    indices: Any
    replica_id: int


@dataclass(frozen=True)
class Layout:
    """How many tiles each dimension is cut into, and how many replicas each tile has. `held`: the places in this process.

    `places`: those of each rank, where they are known.
    """

    tiles: tuple[int, ...]
    num_replicas: int = 1
    held: tuple[int, ...] | None = None
    places: tuple[tuple[int, ...], ...] | None = None

    def of_rank(self, rank: int) -> Layout:
        """Return the layout as a rank has it."""
        assert self.places is not None
        return replace(self, held=self.places[rank])

    def boxes_of(self, places: Sequence[int], shape: Sequence[int]) -> list[Box]:
        """Return the boxes of a process that has these places."""
        every = replace(self, held=None).shards(shape)
        return [shard.box for shard in local_shards_of([every[place] for place in places], shape)]

    def shards(self, shape: Sequence[int]) -> list[tuple[int, Any]]:
        """Return replica id and indices of each local shard, replicas beside each other, as XLA lays them out."""
        steps = [-(-size // count) for size, count in zip(shape, self.tiles, strict=True)]
        every: list[tuple[int, Any]] = []
        for cell in itertools.product(*(range(count) for count in self.tiles)):
            ranges = [
                slice(min(at * step, size), min((at + 1) * step, size), 1)
                for at, step, size in zip(cell, steps, shape, strict=True)
            ]
            indices = Ellipsis if set(self.tiles) <= {1} else ranges
            every.extend((replica, indices) for replica in range(self.num_replicas))
        return every if self.held is None else [every[place] for place in self.held]

    def padded(self, shape: Sequence[int]) -> tuple[int, ...]:
        return tuple(-(-size // count) for size, count in zip(shape, self.tiles, strict=True))


class SpmdTensor(torch.Tensor):
    """The double. `num_moved` counts the shards that went to the host."""

    layout_: Layout
    shards_: list[Shard]
    num_moved: int

    @staticmethod
    def __new__(cls, shape: Sequence[int], dtype: torch.dtype, layout: Layout) -> SpmdTensor:
        tensor = torch.Tensor._make_wrapper_subclass(cls, tuple(shape), dtype=dtype)
        tensor.layout_, tensor.num_moved = layout, 0
        padding = torch.full(layout.padded(shape), 77, device="cpu").to(dtype)
        tensor.shards_ = [Shard(padding.clone(), indices, replica) for replica, indices in layout.shards(shape)]
        return tensor

    @classmethod
    def of(cls, full: torch.Tensor, layout: Layout) -> SpmdTensor:
        """Shard a whole tensor."""
        tensor = cls(full.shape, full.dtype, layout)
        for shard in tensor.shards_:
            part = full[_index(shard)]
            shard.data[tuple(slice(0, size) for size in part.shape)] = part
        return tensor

    @property
    def local_shards(self) -> list[Shard]:
        """Every local shard, moved from its device to the host."""
        self.num_moved += len(self.shards_)
        return [Shard(shard.data.clone(), shard.indices, shard.replica_id) for shard in self.shards_]

    def load_local_shards_(self, shards: Sequence[Shard]) -> None:
        """Put shards on their devices, all of them at once."""
        assert [shard.data.shape for shard in shards] == [shard.data.shape for shard in self.shards_]
        self.shards_ = [Shard(shard.data.clone(), shard.indices, shard.replica_id) for shard in shards]

    def full(self) -> torch.Tensor:
        """Look at the whole tensor. All replicas must agree; what no shard here holds is zero."""
        whole = torch.zeros(self.shape, dtype=self.dtype, device="cpu")
        for shard in self.shards_:
            target = whole[_index(shard)]
            target.copy_(shard.data[tuple(slice(0, size) for size in target.shape)])
        again = SpmdTensor.of(whole, self.layout_)
        for mine, other in zip(self.shards_, again.shards_, strict=True):
            held = tuple(slice(0, size) for size in whole[_index(mine)].shape)
            assert torch.equal(bits_of(mine.data[held]), bits_of(other.data[held])), "replicas differ"
        return whole

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default and all(isinstance(arg, SpmdTensor) for arg in args):
            target, source = args
            assert target.layout_ == source.layout_
            target.shards_ = [Shard(shard.data.clone(), shard.indices, shard.replica_id) for shard in source.shards_]
            return target
        if func is torch.ops.aten.detach.default:
            (tensor,) = args
            same = SpmdTensor(tensor.shape, tensor.dtype, tensor.layout_)
            same.shards_ = tensor.shards_
            return same
        raise NotImplementedError(f"{func} on a sharded tensor would gather it")

    def __repr__(self) -> str:  # type: ignore[override]
        return f"SpmdTensor({tuple(self.shape)}, {self.dtype}, {self.layout_})"


class SpmdAdapter(ShardAdapter):
    """What a user writes for such a class."""

    shares_memory = False

    def handles(self, tensor: torch.Tensor) -> bool:
        return isinstance(tensor, SpmdTensor)

    def boxes(self, tensor: torch.Tensor, path: str) -> list[Box]:
        return [shard.box for shard in _local(tensor)]

    def data(self, tensor: torch.Tensor, path: str) -> list[torch.Tensor]:
        assert isinstance(tensor, SpmdTensor)
        moved = tensor.local_shards
        return [
            moved[places[0]].data[tuple(slice(0, size) for size in box.sizes)].contiguous()
            for box, places in _local(tensor)
        ]

    def holders(self, tensor: torch.Tensor, num_ranks: int) -> Sequence[tuple[Box, Sequence[int]]] | None:
        assert isinstance(tensor, SpmdTensor)
        layout = tensor.layout_
        if layout.places is None or len(layout.places) != num_ranks:
            return None
        ranks_of: dict[Box, list[int]] = {}
        for rank, places in enumerate(layout.places):
            for box in layout.boxes_of(places, tensor.shape):
                ranks_of.setdefault(box, []).append(rank)
        return list(ranks_of.items())

    def rebuild(self, like: torch.Tensor, data: Sequence[torch.Tensor]) -> torch.Tensor:
        assert isinstance(like, SpmdTensor)
        rebuilt = SpmdTensor(like.shape, like.dtype, like.layout_)
        shards = rebuilt.local_shards
        rebuilt.num_moved = 0
        for (box, places), part in zip(_local(like), data, strict=True):
            assert (tuple(part.shape), part.dtype, type(part)) == (box.sizes, like.dtype, torch.Tensor)
            for place in places:
                shards[place].data[tuple(slice(0, size) for size in box.sizes)] = part
        rebuilt.load_local_shards_(shards)
        return rebuilt


class SilentAdapter(SpmdAdapter):
    """One that does not say who holds what."""

    def holders(self, tensor: torch.Tensor, num_ranks: int) -> None:
        return ShardAdapter.holders(self, tensor, num_ranks)  # type: ignore[func-returns-value]


@contextmanager
def registered(adapter: ShardAdapter) -> Iterator[None]:
    """Have an adapter asked within."""
    register_shard_adapter(adapter)
    try:
        yield
    finally:
        unregister_shard_adapter(adapter)


def random_spmd_layout(dice: random.Random, num_dims: int, num_ranks: int) -> Layout:
    """Return tiles with replicas, whose places are dealt to the ranks in any way, each to one."""
    tiles = tuple(dice.choice((1, 1, 2, 3)) for _ in range(num_dims))
    num_replicas = dice.randint(1, 3)
    ranks = [dice.randrange(num_ranks) for _ in range(math.prod(tiles) * num_replicas)]
    places = (tuple(place for place, owner in enumerate(ranks) if owner == rank) for rank in range(num_ranks))
    return Layout(tiles, num_replicas, places=tuple(places))


def _index(shard: Shard) -> Any:
    return shard.indices if shard.indices is Ellipsis else tuple(shard.indices)


def _local(tensor: torch.Tensor) -> list[LocalShard]:
    assert isinstance(tensor, SpmdTensor)
    return local_shards_of([(shard.replica_id, shard.indices) for shard in tensor.shards_], tensor.shape)


_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def bits_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's bits as integers, so that NaN and -0.0 compare."""
    tensor = tensor.detach().contiguous()
    return tensor.reshape(-1).view(_INTEGERS[tensor.element_size()])


def random_bits(shape: Sequence[int], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Return a tensor of random bits, NaN among them."""
    size = torch.empty(tuple(shape), dtype=dtype)
    generator = torch.Generator().manual_seed(seed)
    raw = torch.randint(0, 256, (size.numel() * size.element_size(),), dtype=torch.uint8, generator=generator)
    return raw.view(dtype).view(tuple(shape))
