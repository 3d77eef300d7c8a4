"""Who reads what, where several members want the same boxes. Each member works it out alone, from what all of them said.

A box is read by one of those who want it and can read it, or, where none of these can, by one who can. It knows neither files
nor sockets; how shares are cut is in `core/durable/assignment.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from torchft_ckpt.checkpointing.durable.names import PartName
from torchft_ckpt.checkpointing.durable.reading.checkpoint import SavedTensor
from torchft_ckpt.core.boxes.geometry import Box, are_told_apart, contains, fits, refine, whole
from torchft_ckpt.core.durable.assignment import Item, assign_writes

Boxes = Mapping[str, Sequence[Box]]
"""By the name of a tensor, boxes of it."""


def deal_reading(
    tensors: Mapping[str, SavedTensor],
    wanted: Mapping[int, Boxes],
    readers: Mapping[PartName, frozenset[int]] | None,
    num_members: int,
) -> list[list[tuple[str, Box]]]:
    """Return what each member reads: everything that is wanted once, as far as anybody can read it.

    A share lies wholly inside or outside of every box that is wanted. Names and boxes that the checkpoint has not are nobody's.

    Args:
        wanted: by member, what it wants.
        readers: who can read which part; None where all members can read all of them.
        num_members: members are numbered from 0.
    """
    everybody = frozenset(wanted)
    by_name: dict[str, dict[Box, set[int]]] = {}
    for member, boxes in wanted.items():
        for name, of_name in boxes.items():
            if name in tensors:
                known = by_name.setdefault(name, {})
                for box in of_name:
                    if box.volume and fits(box, tensors[name].shape):
                        known.setdefault(box, set()).add(member)
    items: list[Item] = []
    for name in sorted(by_name):
        tensor = tensors[name]
        for box, wanting in _apart(tensor.shape, by_name[name]):
            for cell, able in _by_readers(tensor, box, readers, everybody):
                holders = (wanting & able) or able
                if holders:
                    items.append(Item(name, cell, tensor.dtype.itemsize, tensor.shape, tuple(sorted(holders))))
    shares = assign_writes(items, num_members)
    return [[(items[share.item].name, share.box) for share in of_member] for of_member in shares]


def _apart(shape: Sequence[int], wanted: Mapping[Box, set[int]]) -> Iterable[tuple[Box, frozenset[int]]]:
    """Return boxes that do not overlap and make up all that is wanted, each with those who want it."""
    boxes = sorted(wanted)
    if not are_told_apart(boxes):
        try:
            cells = refine(whole(shape), boxes)
        except ValueError:
            cells = boxes  # no mesh's: what overlaps is read more than once
        around = ((cell, [box for box in boxes if contains(box, cell)]) for cell in cells)
        return [(cell, frozenset().union(*(wanted[box] for box in outer))) for cell, outer in around if outer]
    return [(box, frozenset(wanted[box])) for box in boxes]


def _by_readers(
    tensor: SavedTensor, box: Box, readers: Mapping[PartName, frozenset[int]] | None, everybody: frozenset[int]
) -> Iterable[tuple[Box, frozenset[int]]]:
    """Cut a box where those who can read it change."""
    if readers is None:
        return [(box, everybody)]
    pieces = [(piece.box, readers.get(piece.part.name, frozenset()) & everybody) for piece in tensor.pieces]
    try:
        cells = refine(box, [piece for piece, _ in pieces])
    except ValueError:
        return []
    return [(cell, frozenset().union(*(able for piece, able in pieces if contains(piece, cell)))) for cell in cells]
