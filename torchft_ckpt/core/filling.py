"""This file decides who writes what a lost writer left out. Those who look at the same manifests get the same answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torchft_ckpt.core.boxes import Box, contains, refine
from torchft_ckpt.core.shares import Item, deal_shares


def deal_holes(
    holes: Mapping[str, Sequence[Box]],
    held: Mapping[str, Mapping[int, Sequence[Box]]],
    sizes: Mapping[str, tuple[tuple[int, ...], int]],
    num_members: int,
) -> list[list[tuple[str, Box]]]:
    """Return what each member writes of the holes; what nobody holds is nobody's.

    Args:
        holes: by name, boxes that are missing, apart from each other.
        held: by name, the boxes that each member who is known to have got so far holds.
        sizes: by name, the shape of the tensor and the bytes of an element.
        num_members: members are numbered from 0.

    Raises:
        ValueError: the boxes are those of no mesh.
    """
    items: list[Item] = []
    for name in sorted(holes):
        holders = held.get(name, {})
        shape, itemsize = sizes[name]
        everything = sorted({box for boxes in holders.values() for box in boxes})
        for hole in sorted(holes[name]):
            for cell in refine(hole, everything):
                able = tuple(
                    sorted(member for member, boxes in holders.items() if any(contains(box, cell) for box in boxes))
                )
                if able:
                    items.append(Item(name, cell, itemsize, shape, able))
    return [[(items[share.item].name, share.box) for share in shares] for shares in deal_shares(items, num_members)]


def deal_names(missing: Sequence[str], held: Mapping[str, Sequence[int]]) -> dict[str, int]:
    """Return who writes which of the missing values: one of those that hold it."""
    able = {name: sorted(held.get(name, ())) for name in sorted(missing)}
    return {name: members[number % len(members)] for number, (name, members) in enumerate(able.items()) if members}
