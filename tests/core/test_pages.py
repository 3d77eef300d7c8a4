"""Which pages fresh memory is touched with: the kind that costs less here, found out by trying."""

from __future__ import annotations

import itertools
import random

import pytest

from torchft_ckpt.core.transfer.pages import PageChoice

MS = 1e-3


def touch(choice: PageChoice, num_pieces: int, huge_s: float, small_s: float) -> tuple[int, float]:
    """Touch so many pieces at those costs; return how many of them as huge pages, and what all of it cost."""
    num_huge, total_s = 0, 0.0
    for _ in range(num_pieces):
        is_huge = choice.is_huge()
        cost_s = huge_s if is_huge else small_s
        choice.took(is_huge, cost_s)
        num_huge += is_huge
        total_s += cost_s
    return num_huge, total_s


def test_it_begins_with_huge_pages():
    assert PageChoice().is_huge()


@pytest.mark.parametrize(
    ("huge_s", "small_s"),
    [(0.2 * MS, 0.9 * MS), (5.0 * MS, 0.9 * MS), (5.0 * MS, 6.4 * MS), (1.0 * MS, 1.0 * MS)],
    ids=["usual", "free memory was taken back", "all memory was taken back", "alike"],
)
def test_trying_the_other_kind_now_and_then_costs_little(huge_s, small_s):
    """1 GiB is 512 pieces."""
    _, total_s = touch(PageChoice(), 512, huge_s, small_s)
    assert total_s <= 1.2 * 512 * min(huge_s, small_s)


def test_it_goes_back_to_huge_pages_when_they_are_cheap_again():
    choice = PageChoice()
    assert touch(choice, 200, 5.0 * MS, 0.9 * MS)[0] < 20
    touch(choice, 100, 0.2 * MS, 0.9 * MS)
    assert touch(choice, 200, 0.2 * MS, 0.9 * MS)[0] > 190


def test_it_leaves_small_pages_that_have_become_dear():
    choice = PageChoice()
    touch(choice, 200, 5.0 * MS, 0.9 * MS)
    touch(choice, 5, 5.0 * MS, 50.0 * MS)
    assert touch(choice, 200, 5.0 * MS, 50.0 * MS)[0] > 190


@pytest.mark.parametrize("huge_s", [0.5 * MS, 0.9 * MS, 1.0 * MS, 5.0 * MS])
def test_kinds_of_pages_meet_in_few_places_however_much_memory_there_is(huge_s):
    choice, chance = PageChoice(), random.Random(3)
    kinds = []
    for _ in range(1 << 19):  # a TiB
        is_huge = choice.is_huge()
        choice.took(is_huge, chance.uniform(0.8, 1.2) * (huge_s if is_huge else 0.9 * MS))
        kinds.append(is_huge)
    assert sum(a != b for a, b in itertools.pairwise(kinds)) <= 1000
    assert huge_s == 0.9 * MS or (sum(kinds[1 << 18 :]) > 1 << 17) == (huge_s < 0.9 * MS)
