"""torch_xla's SPMD tensors as boxes: one process holds several shards of a tensor, one on each of its devices.

`state.shards` imports this file when it meets the first tensor on an xla device; that registers the adapter. Nothing of
torch_xla is imported: a process that has not imported it has none of its tensors. Every tensor on an xla device is carried: an
`XLAShardedTensor`, a parameter that `mark_sharding` annotated (its class is that of any other), and one without
annotation, which is whole.

torch_xla pads shards to one size, and a shard of a tensor that does not divide evenly may hold padding alone. Padding is no
part of a box: it is cut off when a shard is read and put back, as zeros, when one is built.

How a result is sharded is known when it was executed. So a state is captured after `torch_xla.sync()`, at a step boundary;
what is still pending then is executed by itself, tensor by tensor, which is right and slow (and where several processes share
a tensor, all have to do it). After the sync, neither reading boxes nor building a tensor compiles or executes anything.

Which process holds which box is told without asking anybody if XLA lets one process know it: if there is one, or if all hold all.
XLA names no device's process, and a host's devices need not follow each other, so of a tensor that is cut it is not known else.

Written for torch_xla 2.9. It makes every NaN of float16 the same NaN on the way to a device.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from torchft_ckpt.checkpointing.state.shards import ShardAdapter, register_own_adapter
from torchft_ckpt.core.boxes.geometry import Box, whole
from torchft_ckpt.errors import StateMismatchError, UnsupportedValueError

_SPMD = "torch_xla.distributed.spmd"
_CARRIED = frozenset({"REPLICATED", "TILED", "PARTIAL"})
_TILES = re.compile(r"^\{devices=\[([0-9,]+)\]")


class LocalShard(NamedTuple):
    """A box that this process holds, once, and the places of its replicas in the list of local shards."""

    box: Box
    places: tuple[int, ...]


def local_shards_of(replicas_and_indices: Sequence[tuple[int, Any]], shape: Sequence[int]) -> list[LocalShard]:
    """Return the distinct boxes of a process in the order of their first replica here; that replica's place comes first.

    Args:
        replicas_and_indices: for each local shard its replica id, and its slice in each dimension of the global tensor. An
            Ellipsis stands for the dimensions that are not named, a slice without an end for the whole dimension.
        shape: of the global tensor.

    Empty shards are left out, unless the whole tensor is empty: then it is one box.
    """
    places: dict[Box, list[tuple[int, int]]] = {}
    for place, (replica, indices) in enumerate(replicas_and_indices):
        places.setdefault(_box_of(indices, shape), []).append((replica, place))
    if not whole(shape).volume:
        return [LocalShard(whole(shape), tuple(range(len(replicas_and_indices))))]
    return [LocalShard(box, tuple(place for _, place in sorted(held))) for box, held in places.items() if box.volume]


def _box_of(indices: Any, shape: Sequence[int]) -> Box:
    """Normalise a shard's indices to the box that they name."""
    named = list(indices) if isinstance(indices, (list, tuple)) else [indices]
    if Ellipsis in named:
        at = named.index(Ellipsis)
        named[at : at + 1] = [slice(None)] * (len(shape) - len(named) + 1)
    if len(named) != len(shape) or not all(isinstance(index, slice) and index.step in (None, 1) for index in named):
        raise ValueError(f"{indices} is no box of a tensor of shape {tuple(shape)}")
    ranges = [index.indices(size) for index, size in zip(named, shape, strict=True)]
    return Box(tuple(low for low, _, _ in ranges), tuple(max(0, high - low) for low, high, _ in ranges))


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


class XLAShardAdapter(ShardAdapter):
    """Tensors on torch_xla's devices.

    `data` moves every local shard from its device to the host once; torch_xla offers no way to leave replicas out, so those
    are moved too, and dropped. A tensor that is replicated on all devices is one box, and is moved once.

    Raises (all but `handles`):
        UnsupportedValueError: a tensor whose sharding is not one of boxes, such as MANUAL.
    """

    shares_memory = False

    def handles(self, tensor: torch.Tensor) -> bool:
        return tensor.device.type == "xla" and _SPMD in sys.modules

    def boxes(self, tensor: torch.Tensor, path: str) -> list[Box]:
        return [shard.box for shard in _local_shards(tensor, path)]

    def data(self, tensor: torch.Tensor, path: str) -> list[torch.Tensor]:
        shards = _local_shards(tensor, path)
        plain = _global_of(tensor)
        with torch.no_grad():
            if _sharding_name(plain) in (None, "REPLICATED"):
                return [plain.cpu()]
            held = [data for data, _ in _runtime()._get_local_shards([plain])[0]]
            return [_without_padding(held[shard.places[0]], shard.box) for shard in shards]

    def holders(self, tensor: torch.Tensor, num_ranks: int) -> Sequence[tuple[Box, Sequence[int]]] | None:
        """See the base class. Known where XLA's processes are the ranks of the group, in that order, and as this file says."""
        runtime = sys.modules["torch_xla.runtime"]
        if runtime.process_count() != num_ranks:
            return None
        if num_ranks == 1:
            return [(shard.box, (0,)) for shard in _local_shards(tensor, "")]
        plain = _global_of(tensor)
        name = _sharding_name(plain)
        if not runtime.is_spmd():  # each process has tensors of its own then
            return None
        return [(whole(plain.shape), range(num_ranks))] if name in (None, "REPLICATED") else None

    def rebuild(self, like: torch.Tensor, data: Sequence[torch.Tensor]) -> torch.Tensor:
        """See the base class. Plain tensors on an xla device are rebuilt as such, with the annotation of `like`.

        Raises:
            StateMismatchError: the data's number, shapes or dtype are not those of the boxes of `like`.
        """
        shards = _local_shards(like, "")
        plain = _global_of(like)
        _check_fits(plain, shards, data)
        if _sharding_name(plain) is None:
            return _dressed_as(like, data[0].to(plain.device))
        padded_shape = _padded_shard_shape(plain)
        padded: list[torch.Tensor | None] = [None] * len(_runtime()._xla_get_runtime_devices())
        for shard, part in zip(shards, data, strict=True):
            filled = _with_padding(part, padded_shape)
            for place in shard.places:
                padded[place] = filled
        with torch.no_grad():
            rebuilt: torch.Tensor = _runtime()._global_tensor_from_cpu_shards(
                [
                    part if part is not None else torch.zeros(padded_shape, dtype=plain.dtype, device="cpu")
                    for part in padded
                ],
                _runtime()._get_xla_op_sharding(plain),
                list(plain.shape),
            )
        return _dressed_as(like, rebuilt)


def _runtime() -> Any:
    """Return torch_xla's own module of bindings; its planners for torch.distributed.checkpoint use the same functions."""
    return sys.modules["torch_xla"]._XLAC


def _global_of(tensor: torch.Tensor) -> torch.Tensor:
    spmd = sys.modules[_SPMD]
    return tensor.global_tensor if isinstance(tensor, spmd.XLAShardedTensor) else tensor


def _dressed_as(like: torch.Tensor, plain: torch.Tensor) -> torch.Tensor:
    """Wrap a tensor on the xla device as `like` is; what is wrapped nowhere stays plain."""
    if _global_of(like) is like:
        return plain
    wrapped: torch.Tensor = type(like)(plain, like.mesh_shape, like.partition_spec)  # type: ignore[attr-defined]
    return wrapped


def _sharding_name(plain: torch.Tensor) -> str | None:
    """Return the name of the kind of sharding; None if there is no annotation."""
    kind = _runtime()._get_xla_sharding_type(plain)
    return None if kind is None else str(sys.modules[_SPMD].ShardingType(kind).name)


def _local_shards(tensor: torch.Tensor, path: str) -> list[LocalShard]:
    plain = _global_of(tensor)
    _runtime()._xla_sync_multi([plain], devices=[], wait=True)  # some microseconds where nothing is pending
    name = _sharding_name(plain)
    if name is None:
        return [LocalShard(whole(plain.shape), (0,))]
    if name not in _CARRIED:
        raise UnsupportedValueError(f"state dict at {path!r}: an xla tensor whose sharding is {name}", path)
    try:
        return local_shards_of(_runtime()._get_local_shard_replica_and_indices([plain])[0], plain.shape)
    except ValueError as error:
        raise UnsupportedValueError(f"state dict at {path!r}: a shard that is no box: {error}", path) from error


def _padded_shard_shape(plain: torch.Tensor) -> tuple[int, ...]:
    """Return the shape that every shard of a tensor has on its device, read from XLA's text of its sharding.

    `{devices=[4,1]0,1,2,3}` has four tiles in dimension 0 and one in dimension 1; what is replicated is a last tile dimension.
    """
    tiles = _TILES.match(_runtime()._get_xla_sharding_spec(plain))
    if tiles is None:
        return tuple(plain.shape)
    counts = _numbers(tiles[1])
    return tuple(-(-size // count) for size, count in zip(plain.shape, counts, strict=False))


def _check_fits(plain: torch.Tensor, shards: Sequence[LocalShard], data: Sequence[torch.Tensor]) -> None:
    wanted = [(shard.box.sizes, plain.dtype) for shard in shards]
    given = [(tuple(part.shape), part.dtype) for part in data]
    if wanted != given:
        raise StateMismatchError(
            f"shards {given[:3]} (of {len(given)}) do not fit an xla tensor whose local shards are {wanted[:3]} (of "
            f"{len(wanted)}); nothing was applied"
        )


def _without_padding(data: torch.Tensor, box: Box) -> torch.Tensor:
    if tuple(data.shape) == box.sizes:
        return data
    return data[tuple(slice(0, size) for size in box.sizes)].contiguous()


def _with_padding(data: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    if tuple(data.shape) == shape:
        return data.contiguous()
    padded = torch.zeros(shape, dtype=data.dtype, device="cpu")
    padded[tuple(slice(0, size) for size in data.shape)] = data
    return padded


register_own_adapter(XLAShardAdapter())
