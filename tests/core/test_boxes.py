"""Boxes against a deliberately dumb oracle: sets of index tuples."""

from __future__ import annotations

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st
from support.thoroughness import by_default

from torchft_ckpt.core.boxes.geometry import Box, contains, intersect, refine, split, whole

Index = tuple[int, ...]


def elements(box: Box) -> set[Index]:
    """Every index of a box."""
    return set(
        itertools.product(
            *(range(low, low + size) for low, size in zip(box.offsets, box.sizes, strict=True)),
        )
    )


def in_c_order(box: Box) -> list[Index]:
    return sorted(elements(box))


@st.composite
def boxes(draw: st.DrawFn, num_dims: int, least: int = 0) -> Box:
    offsets = tuple(draw(st.integers(0, 5)) for _ in range(num_dims))
    return Box(offsets, tuple(draw(st.integers(least, 5)) for _ in range(num_dims)))


@st.composite
def several(draw: st.DrawFn, num: int, least: int = 0) -> list[Box]:
    num_dims = draw(st.integers(0, 3))
    return [draw(boxes(num_dims, least)) for _ in range(num)]


def test_a_box_without_dimensions_has_one_element():
    scalar = whole(())
    assert (scalar.volume, elements(scalar), str(scalar)) == (1, {()}, "[]")
    assert intersect(scalar, scalar) == scalar
    assert contains(scalar, scalar)
    assert refine(scalar, []) == [scalar]
    assert list(split(scalar, 1)) == [scalar]


def test_a_box_is_named_by_its_ranges():
    assert str(Box((1, 0), (2, 5))) == "[1:3, 0:5]"


@given(several(2))
def test_two_boxes_share_the_elements_that_both_have(pair):
    a, b = pair
    shared = intersect(a, b)
    assert (set() if shared is None else elements(shared)) == elements(a) & elements(b)


@given(several(2, least=1))
def test_a_box_contains_another_one_where_it_has_all_its_elements(pair):
    outer, inner = pair
    assert contains(outer, inner) == (elements(inner) <= elements(outer))


@settings(max_examples=by_default(100, thorough=300))
@given(several(5))
def test_a_box_is_cut_into_pieces_that_are_in_or_out_of_each_chunk(given_boxes):
    wanted, *chunks = given_boxes
    pieces = refine(wanted, chunks)
    found = [index for piece in pieces for index in in_c_order(piece)]
    assert len(found) == len(set(found)), "an element twice"
    assert set(found) == elements(wanted)
    assert pieces == sorted(pieces, key=lambda piece: piece.offsets)
    for piece, chunk in itertools.product(pieces, chunks):
        of_piece, of_chunk = elements(piece), elements(chunk)
        assert of_piece, "a piece of nothing"
        assert of_piece <= of_chunk or not of_piece & of_chunk
        assert contains(chunk, piece) == (of_piece <= of_chunk)


def test_the_shards_of_a_mesh_are_cut_only_where_they_begin_or_end():
    rows = [Box((low, 0), (2, 6)) for low in range(0, 8, 2)]
    assert refine(Box((1, 0), (4, 6)), rows) == [
        Box((1, 0), (1, 6)),
        Box((2, 0), (2, 6)),
        Box((4, 0), (1, 6)),
    ]
    assert refine(Box((0, 2), (8, 3)), [whole((8, 6))]) == [Box((0, 2), (8, 3))]


@settings(max_examples=by_default(100, thorough=300))
@given(several(1), st.integers(1, 40))
def test_a_box_is_split_into_contiguous_parts_in_c_order(one, max_volume):
    (box,) = one
    parts = list(split(box, max_volume))
    order = in_c_order(box)
    assert [index for part in parts for index in in_c_order(part)] == order, "not the order of a C array"
    assert all(part.volume <= max_volume for part in parts)
    if order:
        assert all(part.volume for part in parts)


def test_a_box_is_split_into_runs_of_whole_rows_where_they_fit():
    assert list(split(Box((2, 0), (5, 4)), 8)) == [Box((2, 0), (2, 4)), Box((4, 0), (2, 4)), Box((6, 0), (1, 4))]
    assert list(split(Box((2, 0), (2, 4)), 3)) == [
        Box((2, 0), (1, 3)),
        Box((2, 3), (1, 1)),
        Box((3, 0), (1, 3)),
        Box((3, 3), (1, 1)),
    ]
