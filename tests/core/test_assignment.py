"""Who writes what: every element once, by one who holds it, evenly."""

from __future__ import annotations

import random

import numpy as np
import pytest
from support.thoroughness import by_default

from torchft_ckpt.core.boxes.geometry import Box, whole
from torchft_ckpt.core.durable.assignment import MAX_PIECE_BYTES, Item, assign_writes, split_for_files

MIB = 1024 * 1024


def item(name: str, shape: tuple[int, ...], holders: tuple[int, ...], box: Box | None = None) -> Item:
    return Item(name, box or whole(shape), 4, shape, holders)


def loads_of(items: list[Item], num_members: int) -> list[int]:
    return [
        sum(share.box.volume * items[share.item].itemsize for share in shares)
        for shares in assign_writes(items, num_members)
    ]


def sharded(shape: tuple[int, ...], dim: int, num_ranks: int, num_replicas: int, name: str) -> list[Item]:
    """The boxes of a tensor sharded over each group, as FSDP does: chunks of equal size, the last ones smaller."""
    size = -(-shape[dim] // num_ranks)
    items = []
    for rank in range(num_ranks):
        low, high = min(rank * size, shape[dim]), min((rank + 1) * size, shape[dim])
        offsets, sizes = [0] * len(shape), list(shape)
        offsets[dim], sizes[dim] = low, high - low
        holders = tuple(replica * num_ranks + rank for replica in range(num_replicas))
        items.append(item(name, shape, holders, Box(tuple(offsets), tuple(sizes))))
    return items


def test_two_groups_of_two_write_a_quarter_each() -> None:
    items = [piece for layer in range(9) for piece in sharded((1024, 1000), 0, 2, 2, f"layer{layer}")]
    items += [item(f"norm{layer}", (1000,), (0, 1, 2, 3)) for layer in range(9)]
    loads = loads_of(items, 4)
    assert sum(loads) == sum(it.num_bytes for it in items)
    assert max(loads) <= 1.01 * sum(loads) / 4


def test_what_all_hold_fills_up_what_is_uneven() -> None:
    items = [*sharded((5 * 64, 1024), 0, 4, 1, "odd"), item("table", (4096, 256), (0, 1, 2, 3))]
    loads = loads_of(items, 4)
    assert max(loads) <= 1.1 * sum(loads) / 4


def test_who_writes_more_already_gets_less() -> None:
    already = [3 * MIB, 0, MIB]
    shares = assign_writes([item("w", (2048, 1024), (0, 1, 2))], 3, already)
    loads = [load + sum(share.box.volume * 4 for share in of) for load, of in zip(already, shares, strict=True)]
    assert sum(loads) == 12 * MIB
    assert max(loads) <= 1.02 * 4 * MIB


def test_a_tensor_of_two_long_rows_is_cut_across_them() -> None:
    loads = loads_of([item("wide", (2, 4 * MIB), tuple(range(8)))], 8)
    assert max(loads) <= 1.01 * sum(loads) / 8


def test_what_is_small_or_must_stay_whole_goes_to_one_member() -> None:
    items = [item(f"bias{number}", (256,), (0, 1, 2)) for number in range(300)]
    items.append(Item("value", whole((100_000,)), 1, (100_000,), (0, 1, 2), is_whole=True))
    shares = assign_writes(items, 3)
    assert sorted(share.item for of_member in shares for share in of_member) == list(range(301))
    assert all(share.box == items[share.item].box for of_member in shares for share in of_member)
    assert max(loads_of(items, 3)) <= 1.1 * sum(loads_of(items, 3)) / 3


def test_a_holder_that_is_no_member_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="weight is held by"):
        assign_writes([item("weight", (4,), (0, 4))], 4)
    with pytest.raises(ValueError, match="weight is held by"):
        assign_writes([item("weight", (4,), ())], 4)


@pytest.mark.parametrize("first", range(0, by_default(80, thorough=200), 10))
def test_every_element_has_one_writer_that_holds_it(first: int) -> None:
    for seed in range(first, first + 10):
        rng = random.Random(seed)
        num_ranks, num_replicas = rng.randint(1, 5), rng.randint(1, 4)
        items: list[Item] = []
        for number in range(rng.randint(1, 6)):
            shape = tuple(rng.randint(1, rng.choice([3, 40, 300])) for _ in range(rng.randint(0, 3)))
            if shape and rng.random() < 0.7:
                items += sharded(shape, rng.randrange(len(shape)), num_ranks, num_replicas, f"t{number}")
            else:
                items.append(item(f"t{number}", shape, tuple(range(num_ranks * num_replicas))))
        tensors = {it.name: np.zeros(it.shape, dtype=np.int64) for it in items}
        for member, shares in enumerate(assign_writes(items, num_ranks * num_replicas)):
            for share in shares:
                dealt = items[share.item]
                assert member in dealt.holders
                for piece in split_for_files(share.box, dealt.shape, dealt.itemsize):
                    ranges = tuple(slice(low, low + size) for low, size in zip(piece.offsets, piece.sizes, strict=True))
                    tensors[dealt.name][ranges] += 1
                    assert piece.volume
                    assert piece.volume * dealt.itemsize <= MAX_PIECE_BYTES or max(piece.sizes) == 1
        assert all((counts == 1).all() for counts in tensors.values()), seed


@pytest.mark.parametrize(
    ("shape", "box"),
    [
        ((70_000, 1024), whole((70_000, 1024))),
        ((4, 1024, 20_000), Box((0, 0, 0), (4, 1024, 20_000))),
        ((4096, 4096), Box((0, 2048), (4096, 2048))),
        ((1, 1, 50_000_000), whole((1, 1, 50_000_000))),
        ((), whole(())),
    ],
)
def test_pieces_make_up_the_share_and_none_is_long(shape: tuple[int, ...], box: Box) -> None:
    pieces = split_for_files(box, shape, 4)
    assert sum(piece.volume for piece in pieces) == box.volume
    assert max(piece.volume * 4 for piece in pieces) <= MAX_PIECE_BYTES


def test_a_share_of_columns_is_cut_so_that_half_of_them_can_be_read_alone() -> None:
    pieces = split_for_files(Box((0, 2048), (4096, 2048)), (4096, 4096), 4)
    ends = {piece.offsets[1] for piece in pieces}
    assert 3072 in ends
    assert all(piece.sizes[0] == 4096 for piece in pieces)
