"""Buckets cut out of flat memory, for every size and cap, against tensors that are reduced one by one."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torchft_ckpt.outer.memory import FlatBuffers, buckets_of

DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.float16]
SHAPES = st.sampled_from([(), (0,), (1,), (7,), (3, 0, 2), (2, 3), (4, 4), (5, 1, 3), (64,), (33, 3)])
TENSORS = st.lists(st.tuples(SHAPES, st.sampled_from(DTYPES)), max_size=12)
CAPS = st.one_of(st.integers(1, 64), st.sampled_from([132, 256, 257, 10_000]))


def values_of(shapes: list[tuple[tuple[int, ...], torch.dtype]], seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape, dtype in shapes]


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(TENSORS, CAPS, st.integers(0, 1000))
def test_buckets_reduce_to_what_single_tensors_reduce_to(
    shapes: list[tuple[tuple[int, ...], torch.dtype]], cap_bytes: int, seed: int
) -> None:
    mine, theirs = values_of(shapes, seed), values_of(shapes, seed + 1)
    sides = []
    for values in (mine, theirs):
        views, flats = FlatBuffers().lay_out(values)
        for view, value in zip(views, values, strict=True):
            view.copy_(value)
        sides.append((views, list(buckets_of(flats, cap_bytes))))

    for one, other in zip(sides[0][1], sides[1][1], strict=True):
        one.add_(other)

    assert [bits(view) for view in sides[0][0]] == [bits(a + b) for a, b in zip(mine, theirs, strict=True)]
    for bucket in sides[0][1]:
        assert bucket.numel() == 1 or bucket.nbytes <= cap_bytes


@settings(max_examples=200, deadline=None)
@given(TENSORS, TENSORS)
def test_memory_is_used_again_and_no_tensor_overlaps_another(
    first: list[tuple[tuple[int, ...], torch.dtype]], second: list[tuple[tuple[int, ...], torch.dtype]]
) -> None:
    buffers = FlatBuffers()
    buffers.lay_out(values_of(first, 0))
    values = values_of(second, 1)
    views, flats = buffers.lay_out(values)
    for view, value in zip(views, values, strict=True):
        view.copy_(value)

    assert [bits(view) for view in views] == [bits(value) for value in values]
    assert sum(flat.numel() for flat in flats) == sum(value.numel() for value in values)
    before = [flat.data_ptr() for flat in flats]
    assert [flat.data_ptr() for flat in buffers.lay_out(values)[1]] == before
