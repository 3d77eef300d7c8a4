"""What of a tensor is missing, against an oracle that counts elements."""

from __future__ import annotations

import random

import numpy as np
import pytest
from support.thoroughness import by_default

from torchft_ckpt.core.boxes import Box
from torchft_ckpt.core.coverage import missing_boxes


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
