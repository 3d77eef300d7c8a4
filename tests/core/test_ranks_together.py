"""The ranks of a group apply redo entries together: up to where all have them."""

from __future__ import annotations

from random import Random

import pytest

from torchft_ckpt.core.coordination.messages import ApplyRedo, RedoFetched
from torchft_ckpt.core.coordination.ranks_together import Replaying


def fetched(step: int, *, is_newest: bool = False, failure: str = "") -> RedoFetched:
    return RedoFetched(request_id=1, step=step, is_newest=is_newest, failure=failure)


def test_an_entry_is_applied_when_all_ranks_have_it() -> None:
    ranks = Replaying(2)
    assert ranks.fetched(0, fetched(7)) is None
    assert ranks.fetched(1, fetched(5)) == ApplyRedo(request_id=0, step=5)
    assert ranks.fetched(0, fetched(9)) is None
    assert ranks.fetched(1, fetched(8)) == ApplyRedo(request_id=0, step=8)


def test_the_last_entry_is_the_newest_that_all_have_once_each_was_at_the_newest() -> None:
    ranks = Replaying(2)
    ranks.fetched(0, fetched(5, is_newest=True))
    ranks.fetched(0, fetched(6))  # the others made a step meanwhile
    assert ranks.fetched(1, fetched(5)) == ApplyRedo(request_id=0, step=5)
    assert ranks.fetched(1, fetched(5, is_newest=True)) == ApplyRedo(request_id=0, step=5, is_last=True)
    assert ranks.fetched(1, fetched(6)) is None


@pytest.mark.parametrize("is_gone", [False, True])
def test_where_one_rank_cannot_replay_none_does(is_gone: bool) -> None:
    ranks = Replaying(2)
    ranks.fetched(0, fetched(5))
    ranks.fetched(1, fetched(6))
    why = "group rank 1: its log has ended"
    told = ranks.give_up(why) if is_gone else ranks.fetched(1, fetched(6, failure="its log has ended"))
    assert told == ApplyRedo(request_id=0, step=5, failure=why)
    assert ranks.fetched(0, fetched(8, is_newest=True)) is None
    assert ranks.give_up("again") is None


def test_of_a_group_that_does_not_replay_nothing_is_given_up() -> None:
    assert Replaying(2).give_up("group rank 1 gave the step up") is None


@pytest.mark.parametrize("seed", range(200))
def test_whatever_the_ranks_find_all_apply_the_same_entries_in_order_and_come_to_an_end(seed: int) -> None:
    """Each rank fetches at its own pace from a log that grows. None applies an entry that another one lacks."""
    rng = Random(seed)
    num_ranks, head = rng.randint(1, 4), 10
    ranks = Replaying(num_ranks)
    held = [5] * num_ranks
    told: ApplyRedo | None = None
    for _ in range(10_000):
        if told is not None and told.is_last:
            break
        head += rng.random() < 0.1
        rank = rng.randrange(num_ranks)
        if held[rank] < head:
            held[rank] += 1
            answer = ranks.fetched(rank, fetched(held[rank]))
        else:
            answer = ranks.fetched(rank, fetched(held[rank], is_newest=True))
        if answer is None:
            continue
        assert told is None or answer.step >= told.step
        assert answer.step == min(held)
        told = answer
    assert told is not None and told.is_last
