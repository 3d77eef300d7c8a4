"""This file decides what of a tensor is still missing, given the boxes that are there. Pure arithmetic of boxes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torchft_ckpt.core.boxes import MAX_CELLS, Box, intersect, whole


def missing_boxes(shape: Sequence[int], boxes: Iterable[Box]) -> list[Box]:
    """Return what no box covers, as boxes that are apart from each other; nothing where all is covered. Boxes may overlap.

    Raises:
        ValueError: it would be more than `MAX_CELLS` boxes.
    """
    return subtract([whole(shape)], boxes)


def subtract(wanted: Sequence[Box], boxes: Iterable[Box]) -> list[Box]:
    """Return what of boxes that are apart from each other no other box covers, as boxes that are.

    Raises:
        ValueError: it would be more than `MAX_CELLS` boxes.
    """
    left = [box for box in wanted if box.volume]
    for box in sorted(set(boxes)):
        if not left:
            return []
        left = [rest for one in left for rest in _cut_out(one, box)]
        if len(left) > MAX_CELLS:
            raise ValueError(f"what the boxes leave is more than {MAX_CELLS} boxes")
    return left


def _cut_out(box: Box, hole: Box) -> list[Box]:
    """Return what is left of a box without a hole: slabs below and above it, dimension by dimension."""
    shared = intersect(box, hole)
    if shared is None or not shared.volume:
        return [box]
    slabs: list[Box] = []
    offsets, sizes = [*box.offsets], [*box.sizes]
    for dim, (low, size) in enumerate(zip(shared.offsets, shared.sizes, strict=True)):
        below, above = low - offsets[dim], offsets[dim] + sizes[dim] - low - size
        if below:
            slabs.append(Box(tuple(offsets), (*sizes[:dim], below, *sizes[dim + 1 :])))
        if above:
            start = (*offsets[:dim], low + size, *offsets[dim + 1 :])
            slabs.append(Box(start, (*sizes[:dim], above, *sizes[dim + 1 :])))
        offsets[dim], sizes[dim] = low, size
    return slabs
