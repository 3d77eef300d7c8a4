"""Finds the elements of a box in memory, and copies them to and from a run of bytes in C order.

A region is what a box of a strided array covers: some dimensions to step over, and runs of bytes that are contiguous. It is
cut into slices of bounded size, so that neither a copy nor a lending takes long. It knows addresses and strides, and what a
manifest says of them; no memory of a tensor.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from torchft_ckpt.checkpointing.state.dtypes import parse_dtype
from torchft_ckpt.checkpointing.state.format import Chunk, Manifest, WireTensor
from torchft_ckpt.checkpointing.state.local_state import box_of
from torchft_ckpt.core.boxes.geometry import Box, relative_to

_WORDS: dict[int, np.dtype[Any]] = {
    1: np.dtype(np.uint8),
    2: np.dtype(np.uint16),
    4: np.dtype(np.uint32),
    8: np.dtype(np.uint64),
}


class Region(NamedTuple):
    """Runs of `run` bytes: the first at `start`, the others where the steps lead. In C order of the box."""

    start: int
    steps: tuple[tuple[int, int], ...]
    """(count, stride in bytes) of each dimension that is not part of the runs."""
    run: int

    @property
    def num_bytes(self) -> int:
        """Its number of bytes."""
        return math.prod([count for count, _ in self.steps]) * self.run

    @property
    def stop(self) -> int:
        """The byte after its last one."""
        return self.start + sum([(count - 1) * stride for count, stride in self.steps]) + self.run


def region_of(base: int, strides: Sequence[int], box: Box, itemsize: int) -> Region:
    """Return the region of a box that is not empty.

    Args:
        base: where element 0, 0, ... of the array is, in bytes.
        strides: of the array, in items, not negative.
        box: in the array's own coordinates.
        itemsize: bytes of an item.
    """
    start = base + sum(low * stride for low, stride in zip(box.offsets, strides, strict=True)) * itemsize
    steps = [
        (size, stride * itemsize) for size, stride in zip(box.sizes, strides, strict=True) if size != 1
    ]  # what has one element in a dimension does not step there
    run = itemsize
    while steps and steps[-1][1] == run:
        run *= steps.pop()[0]
    return Region(start, tuple(steps), run)


def region_in_chunk(manifest: Manifest, entry: WireTensor, chunk: Chunk, box: Box) -> Region:
    """Return where in the byte space a box of a tensor lies that is within one of its chunks."""
    base, itemsize = manifest.segments[chunk.segment][0] + chunk.byte_offset, parse_dtype(entry.dtype).itemsize
    held = box_of(chunk)
    if box == held and chunk.strides is None:
        return Region(base, (), box.volume * itemsize)  # as nearly all are, and there may be thousands
    strides = c_strides(chunk.sizes) if chunk.strides is None else chunk.strides
    return region_of(base, strides, relative_to(box, held), itemsize)


def c_strides(sizes: Sequence[int]) -> tuple[int, ...]:
    """Return the strides, in items, of an array in C order."""
    strides = [1] * len(sizes)
    for dim in range(len(sizes) - 2, -1, -1):
        strides[dim] = strides[dim + 1] * max(sizes[dim + 1], 1)
    return tuple(strides)


def slices(region: Region, max_bytes: int, max_span: int) -> Iterator[Region]:
    """Cut a region into regions of at most `max_bytes`, from whose first to whose last byte are at most `max_span`; in order.

    Both limits are at least the length of one item.
    """
    if not region.steps:
        for at in range(0, region.run, max_bytes):
            yield Region(region.start + at, (), min(max_bytes, region.run - at))
        return
    (count, stride), *inner = region.steps
    row = Region(region.start, tuple(inner), region.run)
    row_span = row.stop - row.start
    at_once = min(max_bytes // row.num_bytes, (max_span - row_span) // stride + 1 if stride else count)
    if at_once < 2 and (row.num_bytes > max_bytes or row_span > max_span):
        for index in range(count):
            yield from slices(row._replace(start=region.start + index * stride), max_bytes, max_span)
        return
    at_once = max(at_once, 1)
    for index in range(0, count, at_once):
        num = min(at_once, count - index)
        steps = ((num, stride), *inner) if num > 1 else tuple(inner)
        yield Region(region.start + index * stride, steps, region.run)


def gather(memory: memoryview, region: Region, into: memoryview) -> None:
    """Copy a region to a run of bytes of its length. `memory` begins at the region's first byte."""
    strided, flat = _arrays(memory, region, into)
    np.copyto(flat, strided)


def scatter(data: memoryview, memory: memoryview, region: Region) -> None:
    """Copy a run of bytes to a region of its length. `memory` begins at the region's first byte."""
    strided, flat = _arrays(memory, region, data)
    np.copyto(strided, flat)


def _arrays(memory: memoryview, region: Region, flat: memoryview) -> tuple[np.ndarray, np.ndarray]:
    counts = tuple(count for count, _ in region.steps)
    strides = tuple(stride for _, stride in region.steps)
    word: np.dtype[Any]
    if region.run in _WORDS:
        word = _WORDS[region.run]
    else:
        counts, strides, word = (*counts, region.run), (*strides, 1), np.dtype(np.uint8)
    strided: np.ndarray = np.ndarray(counts, dtype=word, buffer=memory, strides=strides)
    return strided, np.frombuffer(flat, dtype=word).reshape(counts)
