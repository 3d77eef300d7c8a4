"""This file decides what of a tensor, or of ranks, is still missing, given what is there. Pure arithmetic.

What is there may be anybody's word. So work and memory grow with the length of what is there, never with a number in it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise

from torchft_ckpt.core.boxes.geometry import MAX_CELLS, Box, intersect, whole

_FREE_COMPARISONS = 1 << 18
_COMPARISONS_PER_BOX = 64


def max_comparisons(num_boxes: int) -> int:
    """Return how many comparisons so many boxes of one tensor are worth.

    Of shards of a mesh a handful for each is enough. Boxes can be chosen so that each is compared with half of the others.
    """
    return _FREE_COMPARISONS + _COMPARISONS_PER_BOX * num_boxes


def missing_numbers(there: Iterable[int], count: int) -> list[range]:
    """Return which numbers from 0 up to `count` are not there, as runs, in order."""
    edges = [-1, *sorted({number for number in there if 0 <= number < count}), count]
    return [range(low + 1, high) for low, high in pairwise(edges) if low + 1 < high]


def missing_boxes(shape: Sequence[int], boxes: Iterable[Box]) -> list[Box]:
    """Return what no box covers, as boxes that are apart from each other; nothing where all is covered. Boxes may overlap.

    Raises:
        ValueError: as `subtract`.
    """
    return subtract([whole(shape)], boxes)


def subtract(wanted: Sequence[Box], boxes: Iterable[Box]) -> list[Box]:
    """Return what of boxes that are apart from each other no other box covers, as boxes that are.

    Raises:
        ValueError: it would be more than `MAX_CELLS` boxes, or take more comparisons than shards of a mesh do.
    """
    left = [box for box in wanted if box.volume]
    passed: list[Box] = []
    """Those that end before the box that it is the turn of begins: no later one reaches them."""
    ordered = sorted(boxes)
    budget = max_comparisons(len(ordered))
    for box in ordered:
        if box.offsets:
            low = box.offsets[0]
            passed += [one for one in left if one.offsets[0] + one.sizes[0] <= low]
            left = [one for one in left if one.offsets[0] + one.sizes[0] > low]
        if not left:
            break
        budget -= len(left)
        if budget < 0:
            raise ValueError(f"{len(ordered)} boxes lie so that too many of them have to be compared with each other")
        left = [rest for one in left for rest in _cut_out(one, box)]
        if len(passed) + len(left) > MAX_CELLS:
            raise ValueError(f"what the boxes leave is more than {MAX_CELLS} boxes")
    return passed + left


def _cut_out(box: Box, hole: Box) -> list[Box]:
    """Return what is left of a box without a hole: slabs below and above it, dimension by dimension."""
    if box == hole:
        return []
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
