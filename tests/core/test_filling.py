"""Who writes what a lost writer left out: all of it that anybody holds, once, by one who holds it, and all agree."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
from support.thoroughness import by_default

from torchft_ckpt.core.boxes import Box, contains, whole
from torchft_ckpt.core.coverage import subtract
from torchft_ckpt.core.filling import deal_holes, deal_names

KIB = 1024


def at(box: Box) -> tuple[slice, ...]:
    return tuple(slice(low, low + size) for low, size in zip(box.offsets, box.sizes, strict=True))


def random_box(dice: random.Random, shape: tuple[int, ...]) -> Box:
    lows = [dice.randrange(size) for size in shape]
    return Box(tuple(lows), tuple(dice.randint(1, size - low) for low, size in zip(lows, shape, strict=True)))


def test_the_only_holder_fills_all_of_it() -> None:
    hole = Box((2, 0), (3, 4))
    assert deal_holes({"w": [hole]}, {"w": {3: [whole((8, 4))]}}, {"w": ((8, 4), 4)}, 5) == [
        [],
        [],
        [],
        [("w", hole)],
        [],
    ]


def test_what_nobody_holds_is_nobodys() -> None:
    assert deal_holes({"w": [whole((8,))]}, {}, {"w": ((8,), 4)}, 2) == [[], []]
    held = {"w": {0: [Box((0,), (3,))], 1: [Box((5,), (3,))]}}
    dealt = deal_holes({"w": [whole((8,))]}, held, {"w": ((8,), 4)}, 2)
    assert dealt == [[("w", Box((0,), (3,)))], [("w", Box((5,), (3,)))]]


def test_a_large_hole_is_divided_evenly_among_those_who_hold_it() -> None:
    shape = (1024, KIB)
    held = {"w": {member: [whole(shape)] for member in (1, 2, 4)}}
    dealt = deal_holes({"w": [whole(shape)]}, held, {"w": (shape, 4)}, 5)
    loads = [sum(4 * box.volume for _, box in share) for share in dealt]
    assert loads[0] == loads[3] == 0
    assert sum(loads) == 4 * math.prod(shape)
    assert max(loads) - min(loads[1], loads[2], loads[4]) <= 128 * KIB


def test_holes_of_several_tensors_go_to_several_holders() -> None:
    names = [f"t{number}" for number in range(40)]
    held = {name: {0: [whole((64,))], 1: [whole((64,))]} for name in names}
    dealt = deal_holes({name: [whole((64,))] for name in names}, held, {name: ((64,), 4) for name in names}, 2)
    assert sorted(name for share in dealt for name, _ in share) == sorted(names)
    assert len(dealt[0]) == len(dealt[1]) == 20


@pytest.mark.parametrize("first", range(0, by_default(80, thorough=150), 10))
def test_each_element_that_somebody_holds_is_dealt_once_to_one_of_its_holders(first: int) -> None:
    for seed in range(first, first + 10):
        dice = random.Random(seed)
        num_members = dice.randint(1, 5)
        holes: dict[str, list[Box]] = {}
        held: dict[str, dict[int, list[Box]]] = {}
        sizes: dict[str, tuple[tuple[int, ...], int]] = {}
        for name in ("a", "b", "c")[: dice.randint(1, 3)]:
            shape = tuple(dice.randint(1, 7) for _ in range(dice.randint(0, 3)))
            sizes[name] = (shape, dice.choice([1, 4, 64 * KIB]))
            there = [random_box(dice, shape) for _ in range(dice.randint(0, 2))]
            holes[name] = subtract([whole(shape)], there)
            members = dice.sample(range(num_members), dice.randint(0, num_members))
            held[name] = {member: [random_box(dice, shape) for _ in range(dice.randint(1, 2))] for member in members}
        dealt = deal_holes(holes, held, sizes, num_members)
        assert dealt == deal_holes(dict(reversed(holes.items())), dict(reversed(held.items())), sizes, num_members)
        for name, (shape, _) in sizes.items():
            count, expected = np.zeros(shape, dtype=int), np.zeros(shape, dtype=int)
            for member, share in enumerate(dealt):
                for dealt_name, box in share:
                    if dealt_name == name:
                        count[at(box)] += 1
                        assert any(contains(own, box) for own in held[name][member])
            for boxes in held[name].values():
                for box in boxes:
                    expected[at(box)] = 1
            mask = np.zeros(shape, dtype=int)
            for hole in holes[name]:
                mask[at(hole)] = 1
            assert np.array_equal(count, expected * mask), (seed, name)


def test_names_go_round_among_those_who_hold_them() -> None:
    held = {"a": [2, 0], "b": [0, 2], "c": [2, 0], "d": [], "e": [1]}
    assert deal_names(["e", "d", "c", "b", "a", "x"], held) == {"a": 0, "b": 2, "c": 0, "e": 1}
    assert deal_names(["a", "b", "c"], held) == deal_names(["c", "a", "b"], held)
    assert deal_names([], held) == {}
