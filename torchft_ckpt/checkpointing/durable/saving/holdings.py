"""Says which ranks of this group hold which boxes of a tensor, by arithmetic alone.

A DTensor's mesh and placements say what each of its ranks holds, so every rank knows it of all. A tensor that is not sharded is
taken to be held by all ranks of the group alike, as DCP does too. Of other classes their adapter may know it (`holders`): that
counts if it is a whole tensor, and right about this rank. Else a rank knows its own boxes only.
"""

from __future__ import annotations

import itertools
import logging
import math
import operator
import weakref
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch

from torchft_ckpt.checkpointing.state.shards import DTensorAdapter, adapter_of
from torchft_ckpt.core.boxes.geometry import Box, fits, missing_boxes, whole

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.placement_types import Placement

logger = logging.getLogger(__name__)
_MAX_OWN_BYTES = 128 * 1024
"""Smaller tensors that no optimizer owns are written by each rank: statistics and random states, which differ."""
_MAX_OWN_RANKS = 64
"""In larger groups they are divided as all others: who reads would have to look through so many copies of each."""


class OwnedBox(NamedTuple):
    """A box of a tensor, and the ranks of the group that hold it, ascending."""

    box: Box
    ranks: tuple[int, ...]


class TensorHoldings(NamedTuple):
    """A tensor, and who holds what of it."""

    fqn: str
    shape: tuple[int, ...]
    itemsize: int
    held: Sequence[OwnedBox]
    """One object for all tensors of one layout."""
    local: Sequence[OwnedBox]
    """The boxes of it that this rank holds."""
    is_derivable: bool
    """Every rank of the group comes to the same `held`."""
    is_same_in_groups: bool = True
    """All replica groups hold the same bits of it; False: each has its own."""
    is_ranks_own: bool = False
    """All ranks of the group hold it whole, and may hold other things in it."""


class Layout(NamedTuple):
    """The layout of a tensor, without its memory."""

    fqn: str
    shape: tuple[int, ...]
    itemsize: int
    is_whole: bool
    """It is not sharded."""
    mesh: DeviceMesh | None = None
    """Of a DTensor."""
    placements: tuple[Placement, ...] = ()
    is_same_in_groups: bool = True
    """As in `TensorHoldings`."""
    declared: Sequence[tuple[Box, Sequence[int]]] | None = None
    """The holders that its adapter names, unchecked."""

    @property
    def may_have_replicas(self) -> bool:
        """Whether several ranks of a group may hold the same of it."""
        is_in_shards = all(placement.is_shard() for placement in self.placements)
        return self.is_whole or self.declared is not None or not is_in_shards


def layout_of(fqn: str, tensor: torch.Tensor, *, num_ranks: int, is_same_in_groups: bool = True) -> Layout:
    """Return the layout of a tensor in a group of so many ranks. Quick, because the trainer waits for it."""
    itemsize = tensor.element_size()
    adapter = adapter_of(tensor)
    if adapter is None:
        return Layout(fqn, tensor.shape, itemsize, True, is_same_in_groups=is_same_in_groups)
    if isinstance(adapter, DTensorAdapter):  # a class that derives from DTensor may have another
        dtensor = cast("DTensor", tensor)
        placements = tuple(dtensor.placements)
        return Layout(fqn, tensor.shape, itemsize, False, dtensor.device_mesh, placements, is_same_in_groups)
    return Layout(
        fqn,
        tensor.shape,
        itemsize,
        False,
        is_same_in_groups=is_same_in_groups,
        declared=adapter.holders(tensor, num_ranks),
    )


class HoldingsIndex:
    """Works holdings out, and remembers them by layout: a model has few. For one thread.

    Args:
        is_replicated: whether a tensor that is not sharded is held by all ranks of the group; False: it is this rank's own,
            as in stages of a pipeline, and so is what it holds of one that lies on some of the ranks.
    """

    def __init__(self, rank: int, num_ranks: int, *, is_replicated: bool = True) -> None:
        self.num_ranks = num_ranks
        self._rank = rank
        self.is_replicated = is_replicated
        self._known: dict[object, tuple[list[OwnedBox], list[OwnedBox]]] = {}
        self._of_meshes: weakref.WeakKeyDictionary[Any, dict[object, tuple[list[OwnedBox], list[OwnedBox]] | None]] = (
            weakref.WeakKeyDictionary()
        )
        self._as_declared: dict[object, tuple[list[OwnedBox], list[OwnedBox]]] = {}
        self._has_warned = False

    def holdings_of(self, layout: Layout, boxes: Iterable[Box]) -> TensorHoldings:
        """Return who holds what of a tensor."""
        fqn, shape, itemsize = layout.fqn, tuple(layout.shape), layout.itemsize
        if layout.is_whole:
            held, mine = self._whole(shape)
            is_small = math.prod(shape) * itemsize < _MAX_OWN_BYTES and 1 < self.num_ranks <= _MAX_OWN_RANKS
            is_own = self.is_replicated and is_small and not layout.is_same_in_groups
            return TensorHoldings(
                fqn, shape, itemsize, held, mine, self.is_replicated, layout.is_same_in_groups, is_own
            )
        own = [box for box in boxes if box.volume]
        known = None if layout.mesh is None else self._on_mesh(shape, layout.mesh, layout.placements)
        if layout.declared is not None:
            known = self._checked(layout, shape, own)
        if known is not None and [held.box for held in known[1]] == sorted(own):
            return TensorHoldings(fqn, shape, itemsize, *known, True, layout.is_same_in_groups)
        alone = [OwnedBox(box, (self._rank,)) for box in own]
        return TensorHoldings(fqn, shape, itemsize, alone, alone, False, layout.is_same_in_groups)

    def _whole(self, shape: tuple[int, ...]) -> tuple[list[OwnedBox], list[OwnedBox]]:
        if shape not in self._known:
            ranks = tuple(range(self.num_ranks)) if self.is_replicated else (self._rank,)
            held = [OwnedBox(whole(shape), ranks)] if 0 not in shape else []
            self._known[shape] = held, held
        return self._known[shape]

    def _checked(
        self, layout: Layout, shape: tuple[int, ...], own: Sequence[Box]
    ) -> tuple[list[OwnedBox], list[OwnedBox]] | None:
        """Return what an adapter says, where nothing speaks against it. A wrong holder would leave a hole."""
        try:
            said = _as_owned_boxes(layout.declared or ())
            key = shape, said
            if key not in self._as_declared:
                held = _whole_tensor(said, shape, self.num_ranks)
                self._as_declared[key] = held, [one for one in held if self._rank in one.ranks]
            known = self._as_declared[key]
            if [held.box for held in known[1]] != sorted(own):
                raise ValueError(f"rank {self._rank} holds other boxes than are said of it")
        except (TypeError, AttributeError, ValueError) as error:
            if not self._has_warned:
                self._has_warned = True
                logger.warning(
                    "the holders that its adapter names for %r do not count, so each rank stores all that it holds of it: %s "
                    "(said once, whatever other tensors there are)",
                    layout.fqn,
                    error,
                )
            return None
        ranks = {rank for one in known[0] for rank in one.ranks}
        return known if self.is_replicated or len(ranks) == self.num_ranks else None  # as on a mesh

    def _on_mesh(
        self, shape: tuple[int, ...], mesh: DeviceMesh, placements: tuple[Placement, ...]
    ) -> tuple[list[OwnedBox], list[OwnedBox]] | None:
        if not self.is_replicated and mesh.mesh.numel() < self.num_ranks:
            return None  # ranks beside it may have something else of this name
        known = self._of_meshes.setdefault(mesh, {})
        key = (shape, placements)
        if key not in known:
            held = _boxes_on_mesh(shape, mesh.mesh, placements, self.num_ranks)
            known[key] = None if held is None else (held, [one for one in held if self._rank in one.ranks])
        return known[key]


def _as_owned_boxes(holders: Iterable[tuple[Box, Iterable[int]]]) -> tuple[OwnedBox, ...]:
    """Return what an adapter says in the form that all ranks have it in, whatever sequences and integers it uses.

    Raises:
        TypeError, AttributeError, ValueError: it is no boxes with ranks.
    """
    boxes = (
        OwnedBox(Box(_integers(box.offsets), _integers(box.sizes)), tuple(sorted(_integers(ranks))))
        for box, ranks in holders
    )
    return tuple(sorted(held for held in boxes if held.box.volume))


def _integers(numbers: Iterable[int]) -> tuple[int, ...]:
    return tuple(operator.index(number) for number in numbers)


def _whole_tensor(said: Sequence[OwnedBox], shape: tuple[int, ...], num_ranks: int) -> list[OwnedBox]:
    """Return what is said, if it is a whole tensor, each element of it once, in the hands of ranks of the group.

    Raises:
        ValueError: it is not.
    """
    for box, ranks in said:
        if not fits(box, shape):
            raise ValueError(f"{box} is no box of a tensor of shape {shape}")
        if not ranks or len(set(ranks)) != len(ranks) or ranks[0] < 0 or ranks[-1] >= num_ranks:
            raise ValueError(f"{box} is said to be held by {ranks} of {num_ranks} ranks")
    if missing := missing_boxes(shape, (box for box, _ in said)):
        raise ValueError(f"nobody is said to hold {missing[0]}")
    if sum(box.volume for box, _ in said) != whole(shape).volume:
        raise ValueError("boxes overlap each other")
    return list(said)


def _boxes_on_mesh(
    shape: tuple[int, ...], mesh: torch.Tensor, placements: Sequence[object], num_ranks: int
) -> list[OwnedBox] | None:
    """Return the boxes of all ranks of a mesh; None if torch does not say, or the mesh reaches beyond this group."""
    try:
        from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset
    except ImportError:
        return None
    ranks_of: dict[Box, list[int]] = {}
    for coordinate in itertools.product(*(range(size) for size in mesh.shape)):
        rank = int(mesh[coordinate])
        if rank >= num_ranks:
            return None
        sizes, offsets = _compute_local_shape_and_global_offset(
            shape,
            tuple(mesh.shape),
            list(coordinate),
            placements,  # type: ignore[arg-type]
        )
        box = Box(tuple(offsets), tuple(sizes))
        if box.volume:
            ranks_of.setdefault(box, []).append(rank)
    return [OwnedBox(box, tuple(sorted(ranks))) for box, ranks in sorted(ranks_of.items())]
