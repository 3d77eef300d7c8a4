"""A rank turns first to the ranks of its own number in groups of as many ranks as its own."""

from __future__ import annotations

import pytest

from torchft_ckpt.core.coordination.recovery import same_rank_peers

TWO = ["a0", "a1"]
OTHER_TWO = ["b0", "b1"]
FOUR = ["c0", "c1", "c2", "c3"]


@pytest.mark.parametrize(
    ("groups", "rank", "world_size", "expected"),
    [
        ([TWO], 1, 2, ["a1"]),
        ([TWO, OTHER_TWO], 0, 2, ["a0", "b0"]),
        ([TWO, FOUR, OTHER_TWO], 1, 2, ["a1", "b1"]),
        ([FOUR, TWO], 1, 2, []),
        ([TWO], 3, 4, []),
        ([["", ""], TWO], 1, 2, ["a1"]),
        ([[], TWO], 0, 2, ["a0"]),
        ([["a0", ""], OTHER_TWO], 1, 2, ["b1"]),
        ([["a0", ""]], 1, 2, []),
        ([], 0, 1, []),
        ([[]], 0, 1, []),
        ([["only"]], 0, 1, ["only"]),
    ],
    ids=[
        "one group of the same size",
        "the primary's first",
        "a group of another size beside it is left aside",
        "the primary is of another size",
        "more ranks here than there",
        "a primary that is not known at all counts as none",
        "an empty primary counts as none",
        "another group's peer makes up for one that is not known",
        "no peer is known",
        "no groups",
        "an empty group",
        "groups of one",
    ],
)
def test_a_rank_turns_to_the_ranks_of_its_number(groups, rank, world_size, expected):
    assert same_rank_peers(groups, rank, world_size) == expected
