"""Boxes of index space: what two of them share, how a box is made up of others, and what is still missing. Arithmetic only.

A box is a product of intervals, as torch.distributed.checkpoint describes a chunk of a tensor: `offsets` of its first
element in each dimension, and `sizes`. The box of a 0-dim tensor has no dimensions, and one element.

Boxes may be anybody's word. So work and memory grow with the length of what is there, never with a number in it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise, product
from typing import NamedTuple, Protocol

MAX_CELLS = 1 << 16
"""Pieces of one box: a mesh has as many shards at most, but chunks from the network may lie in any way."""
_FREE_COMPARISONS = 1 << 18
_COMPARISONS_PER_BOX = 64


class Box(NamedTuple):
    """A product of intervals: `offsets[d]` up to `offsets[d] + sizes[d]` in each dimension d."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def volume(self) -> int:
        return math.prod(self.sizes)

    def __str__(self) -> str:
        ranges = (f"{low}:{low + size}" for low, size in zip(self.offsets, self.sizes, strict=True))
        return f"[{', '.join(ranges)}]"


def whole(shape: Sequence[int]) -> Box:
    return Box((0,) * len(shape), tuple(shape))


def intersect(a: Box, b: Box) -> Box | None:
    """Return the elements that two boxes of one tensor share; None where there are none."""
    if a == b:
        return a if a.volume else None
    offsets, sizes = [], []
    for a_low, a_size, b_low, b_size in zip(a.offsets, a.sizes, b.offsets, b.sizes, strict=True):
        low = max(a_low, b_low)
        size = min(a_low + a_size, b_low + b_size) - low
        if size <= 0:
            return None
        offsets.append(low)
        sizes.append(size)
    return Box(tuple(offsets), tuple(sizes))


def contains(outer: Box, inner: Box) -> bool:
    """Whether every element of `inner` is in `outer`."""
    return outer == inner or all(
        o_low <= i_low and i_low + i_size <= o_low + o_size
        for o_low, o_size, i_low, i_size in zip(outer.offsets, outer.sizes, inner.offsets, inner.sizes, strict=True)
    )


def fits(box: Box, shape: Sequence[int]) -> bool:
    """Whether a box is one of a tensor of this shape."""
    return len(box.offsets) == len(box.sizes) == len(shape) and contains(whole(shape), box)


def relative_to(box: Box, outer: Box) -> Box:
    """Return a box as seen from one that it lies within: its offsets counted from the first element of that one."""
    return Box(tuple(low - base for low, base in zip(box.offsets, outer.offsets, strict=True)), box.sizes)


class HasPlace(Protocol):
    """A box, under whatever name."""

    @property
    def offsets(self) -> Sequence[int]:
        """Of its first element."""

    @property
    def sizes(self) -> Sequence[int]:
        """In each dimension."""


def are_told_apart(boxes: Sequence[HasPlace]) -> bool:
    """Whether one dimension tells all boxes of one tensor apart, as in the shards of a mesh. False says nothing."""
    if len(boxes) < 2:
        return True
    for dim in range(len(boxes[0].sizes)):
        runs = sorted((box.offsets[dim], box.offsets[dim] + box.sizes[dim]) for box in boxes)
        if all(one[1] <= other[0] for one, other in pairwise(runs)):
            return True
    return False


def refine(wanted: Box, chunks: Sequence[Box]) -> list[Box]:
    """Cut a box so that each piece lies wholly inside or wholly outside of every chunk.

    The pieces are disjoint and make up `wanted`, in C order of their offsets. Where chunks are the shards of a mesh, they are
    as few as can be: neighbours are cut only where a chunk that overlaps `wanted` begins or ends.

    Raises:
        ValueError: there would be more than `MAX_CELLS` pieces.
    """
    if wanted.volume and all(chunk == wanted for chunk in chunks):
        return [wanted]
    touching = [shared for chunk in chunks if (shared := intersect(wanted, chunk)) is not None]
    if not wanted.volume:
        return []
    cuts: list[list[int]] = []
    for dim, (low, size) in enumerate(zip(wanted.offsets, wanted.sizes, strict=True)):
        edges = {low, low + size}
        for shared in touching:
            edges.add(shared.offsets[dim])
            edges.add(shared.offsets[dim] + shared.sizes[dim])
        cuts.append(sorted(edges))
    if math.prod(len(edges) - 1 for edges in cuts) > MAX_CELLS:
        raise ValueError(f"the chunks cut {wanted} into more than {MAX_CELLS} pieces")
    return [
        Box(tuple(low for low, _ in cell), tuple(high - low for low, high in cell))
        for cell in product(*(pairwise(edges) for edges in cuts))
    ]


def split(box: Box, max_volume: int) -> Iterator[Box]:
    """Yield a box in parts of at most `max_volume` elements, each a run of rows of the first dimension that is long enough.

    Parts come in C order, and each is contiguous in a C-order array of the box.
    """
    if box.volume <= max_volume or not box.sizes:
        yield box
        return
    row = box.volume // box.sizes[0]
    if row > max_volume:
        for index in range(box.sizes[0]):
            inner = Box(box.offsets[1:], box.sizes[1:])
            for part in split(inner, max_volume):
                yield Box((box.offsets[0] + index, *part.offsets), (1, *part.sizes))
        return
    step = max_volume // row
    for start in range(0, box.sizes[0], step):
        size = min(step, box.sizes[0] - start)
        yield Box((box.offsets[0] + start, *box.offsets[1:]), (size, *box.sizes[1:]))


# What is still missing


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
