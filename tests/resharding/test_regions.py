"""Where a box lies in memory, how it is cut, copied out and copied in: against numpy's own indexing."""

from __future__ import annotations

import random

import numpy as np
import pytest

from torchft_ckpt.checkpointing.state.regions import Region, c_strides, gather, region_of, scatter, slices
from torchft_ckpt.core.boxes.geometry import Box, whole

DTYPES = [np.uint8, np.uint16, np.float32, np.int64, np.complex128]


def random_array(chance: random.Random) -> np.ndarray:
    """An array of any strides that are not negative, of distinct values, with room around it."""
    num_dims = chance.randint(0, 4)
    shape = [chance.randint(1, 6) for _ in range(num_dims)]
    steps = [chance.choice([1, 1, 1, 2, 3]) for _ in shape]
    dtype = np.dtype(chance.choice(DTYPES))
    room = [size * step for size, step in zip(shape, steps, strict=True)]
    base = np.arange(int(np.prod(room)) * dtype.itemsize, dtype=np.uint32).astype(np.uint8).view(dtype).reshape(room)
    order = list(range(num_dims))
    if chance.random() < 0.5:
        chance.shuffle(order)
    return base[tuple(slice(None, None, step) for step in steps)].transpose(order)


def random_box(chance: random.Random, shape: tuple[int, ...]) -> Box:
    offsets, sizes = [], []
    for size in shape:
        low = chance.randrange(size)
        offsets.append(low)
        sizes.append(chance.randint(1, size - low))
    return Box(tuple(offsets), tuple(sizes))


def bytes_of(array: np.ndarray) -> tuple[memoryview, int]:
    """All the memory that an array is a view of, and where its first element is in it."""
    base = array
    while base.base is not None:
        base = base.base
    offset = array.__array_interface__["data"][0] - base.__array_interface__["data"][0]
    return memoryview(base.reshape(-1).view(np.uint8)), offset  # type: ignore[arg-type]


def in_box(array: np.ndarray, box: Box) -> np.ndarray:
    return array[(*(slice(low, low + size) for low, size in zip(box.offsets, box.sizes, strict=True)), ...)]


@pytest.mark.parametrize("first_seed", range(0, 1500, 250))
def test_a_box_of_any_array_is_copied_out_and_in_as_numpy_does(first_seed):
    for seed in range(first_seed, first_seed + 250):
        print("seed", seed)
        chance = random.Random(seed)
        array = random_array(chance)
        box = random_box(chance, array.shape)
        itemsize = array.itemsize
        memory, base = bytes_of(array)
        strides = [stride // itemsize for stride in array.strides]
        region = region_of(base, strides, box, itemsize)
        expected = in_box(array, box).tobytes()
        assert region.num_bytes == len(expected)

        max_bytes = itemsize * chance.randint(1, 40)
        max_span = itemsize * chance.choice([1, 4, 10, 100, 10_000])
        pieces = list(slices(region, max_bytes, max_span))
        found = b""
        for piece in pieces:
            assert 0 < piece.num_bytes <= max_bytes
            assert not piece.steps or piece.stop - piece.start <= max_span
            assert region.start <= piece.start and piece.stop <= region.stop
            into = memoryview(bytearray(piece.num_bytes))
            gather(memory[piece.start : piece.stop], piece, into)
            found += bytes(into)
        assert found == expected

        other = random_array_like(array)
        other_memory, other_base = bytes_of(other)
        outside = np.ones(array.shape, bool)
        in_box(outside, box)[...] = False
        before = other[outside].tobytes()
        at = 0
        shift = other_base - base
        for piece in pieces:
            data = memoryview(found[at : at + piece.num_bytes])
            scatter(data, other_memory[piece.start + shift : piece.stop + shift], piece)
            at += piece.num_bytes
        assert in_box(other, box).tobytes() == expected
        assert other[outside].tobytes() == before, "bytes outside of the box were written"


def random_array_like(array: np.ndarray) -> np.ndarray:
    """Other memory, seen with the same strides."""
    memory, offset = bytes_of(array)
    copy = np.full(len(memory), 0x77, np.uint8)
    return np.ndarray(array.shape, array.dtype, buffer=copy, offset=offset, strides=array.strides)


def test_a_contiguous_box_is_one_run():
    assert region_of(64, (12, 4, 1), Box((1, 0, 0), (2, 3, 4)), 4) == Region(64 + 48, (), 96)
    assert region_of(0, (), whole(()), 8) == Region(0, (), 8)


def test_a_column_is_stepped_over():
    assert region_of(0, (10, 1), Box((0, 2), (3, 1)), 4) == Region(8, ((3, 40),), 4)


@pytest.mark.parametrize("sizes", [(), (3,), (2, 3, 4), (2, 0, 4), (0,)])
def test_strides_in_c_order_are_those_of_numpy(sizes):
    strides = np.empty([max(size, 1) for size in sizes], np.uint8).strides
    assert c_strides(sizes) == tuple(strides)
