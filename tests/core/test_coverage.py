"""What of a tensor is missing, against an oracle that counts elements."""

from __future__ import annotations

import random

import numpy as np
import pytest
from support.thoroughness import by_default

from torchft_ckpt.core.boxes import geometry
from torchft_ckpt.core.boxes.geometry import Box, missing_boxes, missing_numbers, subtract


def at(box: Box) -> tuple[slice, ...]:
    return tuple(slice(low, low + size) for low, size in zip(box.offsets, box.sizes, strict=True))


def test_a_scalar_is_there_or_not() -> None:
    assert missing_boxes((), []) == [Box((), ())]
    assert missing_boxes((), [Box((), ())]) == []


def test_an_empty_tensor_lacks_nothing() -> None:
    assert missing_boxes((0, 5), []) == []


def test_a_missing_row_is_named() -> None:
    assert missing_boxes((4, 3), [Box((0, 0), (2, 3)), Box((3, 0), (1, 3))]) == [Box((2, 0), (1, 3))]


@pytest.mark.parametrize("first", range(0, by_default(100, thorough=300), 10))
def test_exactly_what_no_box_covers_is_missing_once(first: int) -> None:
    for seed in range(first, first + 10):
        rng = random.Random(seed)
        shape = tuple(rng.randint(1, 6) for _ in range(rng.randint(1, 3)))
        boxes = []
        covered = np.zeros(shape, dtype=np.int64)
        for _ in range(rng.randint(0, 6)):
            lows = [rng.randrange(size) for size in shape]
            sizes = [rng.randint(0, size - low) for low, size in zip(lows, shape, strict=True)]
            boxes.append(Box(tuple(lows), tuple(sizes)))
            covered[at(boxes[-1])] = 1
        for box in missing_boxes(shape, boxes):
            assert box.volume
            covered[at(box)] += 1
        assert (covered == 1).all(), seed


def test_exactly_the_numbers_that_are_not_there_are_missing() -> None:
    for seed in range(300):
        rng = random.Random(seed)
        count = rng.randint(0, 12)
        there = [rng.randint(-2, 14) for _ in range(rng.randint(0, 8))]
        runs = missing_numbers(there, count)
        assert [number for run in runs for number in run] == [n for n in range(count) if n not in there], seed
        assert all(runs), seed
    assert missing_numbers([5], 2**62) == [range(5), range(6, 2**62)]


def test_boxes_that_would_take_hours_to_compare_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every second column is there: each further one would be compared with all gaps before it."""
    monkeypatch.setattr(geometry, "_FREE_COMPARISONS", 1000)
    columns = [Box((0, column), (2, 1)) for column in range(0, 400, 2)]
    with pytest.raises(ValueError, match="200 boxes lie so that too many of them have to be compared"):
        subtract([Box((0, 0), (2, 400))], columns)


def test_shards_of_a_mesh_and_their_gaps_are_few_comparisons() -> None:
    rows = [Box((row, 0), (1, 4)) for row in range(0, 6000, 2)]
    assert len(subtract([Box((0, 0), (6000, 4))], rows)) == 3000
    grid = [Box((row, column), (1, 1)) for row in range(50) for column in range(50)]
    random.Random(0).shuffle(grid)
    assert subtract([Box((0, 0), (50, 50))], grid) == []
    assert subtract([Box((0, 0), (50, 50))], grid[1:]) == [grid[0]]
    columns = [Box((0, column), (9, 1)) for column in range(0, 1024, 2)]
    assert len(subtract([Box((0, 0), (9, 1024))], columns)) == 512
