"""Which ranks of this group hold which boxes of a tensor, by arithmetic alone.

A DTensor's mesh and placements say what each of its ranks holds, so every rank knows it of all. A tensor that is not sharded is
taken to be held by all ranks of the group alike, as DCP does too. Of other classes a rank knows its own boxes only.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch

from torchft_ckpt.checkpointing.state.shards import adapter_of, is_dtensor
from torchft_ckpt.core.boxes import Box, whole

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.placement_types import Placement


class Held(NamedTuple):
    """A box of a tensor, and the ranks of the group that hold it, ascending."""

    box: Box
    ranks: tuple[int, ...]


class TensorHoldings(NamedTuple):
    """A tensor, and who holds what of it."""

    fqn: str
    shape: tuple[int, ...]
    itemsize: int
    held: Sequence[Held]
    """One object for all tensors of one layout."""
    mine: Sequence[Held]
    """What this rank holds of it."""
    is_known_to_all: bool
    """Every rank of the group comes to the same `held`."""
    is_alike: bool = True
    """All replica groups hold the same bits of it; False: each has its own."""


class Layout(NamedTuple):
    """What there is to know of a tensor's layout, without its memory."""

    fqn: str
    shape: tuple[int, ...]
    itemsize: int
    is_whole: bool
    """It is not sharded."""
    mesh: DeviceMesh | None = None
    """Of a DTensor."""
    placements: tuple[Placement, ...] = ()
    is_alike: bool = True
    """As in `TensorHoldings`."""


def layout_of(fqn: str, tensor: torch.Tensor, *, is_alike: bool = True) -> Layout:
    """Return the layout of a tensor. Quick, because the trainer waits for it."""
    itemsize = tensor.element_size()
    is_whole = adapter_of(tensor) is None
    if not is_whole and is_dtensor(tensor):
        dtensor = cast("DTensor", tensor)
        placements = tuple(dtensor.placements)
        return Layout(fqn, tensor.shape, itemsize, False, dtensor.device_mesh, placements, is_alike)
    return Layout(fqn, tensor.shape, itemsize, is_whole, is_alike=is_alike)


class HoldingsIndex:
    """Works holdings out, and remembers them by layout: a model has few. For one thread.

    Args:
        rank: of this process in its group.
        num_ranks: of the group.
        is_replicated: whether a tensor that is not sharded is held by all ranks of the group; False: it is this rank's own,
            as in stages of a pipeline.
    """

    def __init__(self, rank: int, num_ranks: int, *, is_replicated: bool = True) -> None:
        self._rank = rank
        self._num_ranks = num_ranks
        self._is_replicated = is_replicated
        self._known: dict[object, tuple[list[Held], list[Held]]] = {}
        self._of_meshes: weakref.WeakKeyDictionary[Any, dict[object, tuple[list[Held], list[Held]] | None]] = (
            weakref.WeakKeyDictionary()
        )

    def holdings_of(self, layout: Layout, boxes: Iterable[Box]) -> TensorHoldings:
        """Return who holds what of a tensor.

        Args:
            layout: of the tensor.
            boxes: what this rank holds of it.
        """
        fqn, shape, itemsize = layout.fqn, tuple(layout.shape), layout.itemsize
        if layout.is_whole:
            held, mine = self._whole(shape)
            return TensorHoldings(fqn, shape, itemsize, held, mine, self._is_replicated, layout.is_alike)
        own = [box for box in boxes if box.volume]
        on_mesh = None if layout.mesh is None else self._on_mesh(shape, layout.mesh, layout.placements)
        if on_mesh is not None and [held.box for held in on_mesh[1]] == own:
            return TensorHoldings(fqn, shape, itemsize, *on_mesh, True, layout.is_alike)
        alone = [Held(box, (self._rank,)) for box in own]
        return TensorHoldings(fqn, shape, itemsize, alone, alone, False, layout.is_alike)

    def _whole(self, shape: tuple[int, ...]) -> tuple[list[Held], list[Held]]:
        if shape not in self._known:
            ranks = tuple(range(self._num_ranks)) if self._is_replicated else (self._rank,)
            held = [Held(whole(shape), ranks)] if 0 not in shape else []
            self._known[shape] = held, held
        return self._known[shape]

    def _on_mesh(
        self, shape: tuple[int, ...], mesh: DeviceMesh, placements: tuple[Placement, ...]
    ) -> tuple[list[Held], list[Held]] | None:
        known = self._of_meshes.setdefault(mesh, {})
        key = (shape, placements)
        if key not in known:
            held = _boxes_on_mesh(shape, mesh.mesh, placements, self._num_ranks)
            known[key] = None if held is None else (held, [one for one in held if self._rank in one.ranks])
        return known[key]


def _boxes_on_mesh(
    shape: tuple[int, ...], mesh: torch.Tensor, placements: Sequence[object], num_ranks: int
) -> list[Held] | None:
    """Return the boxes of all ranks of a mesh; None where torch does not say, or the mesh reaches beyond this group."""
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
    return [Held(box, tuple(sorted(ranks))) for box, ranks in sorted(ranks_of.items())]
