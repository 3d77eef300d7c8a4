"""One group hands its state over, and another takes it: the lighthouse decides once for both."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_catching_up import Looker, job_in_a_phase, look

from torchft_ckpt.core.coordination.messages import StateLocated


def asks(member: Looker, **moves: bool) -> StateLocated:
    member.located = None
    member.says(member.replica.locate(**moves))
    assert member.located is not None
    return member.located


def test_a_state_comes_from_whoever_stands_still_for_it_and_both_are_told() -> None:
    job, (old, other) = job_in_a_phase("old", "other")
    new = look(job, "new")
    assert not asks(old, hands_over=True).taken_by
    told = asks(new, takes_over=True)
    assert [source.replica_id for source in told.sources] == ["old:1"], "the other one trains on"
    new.replica.caught_up(told.version)
    assert asks(new, takes_over=True).is_held
    assert asks(old, hands_over=True).taken_by == "new:1"
    assert not asks(other).is_finished


def test_one_that_is_alone_with_what_it_took_holds_it() -> None:
    job, (old,) = job_in_a_phase("old")
    new = look(job, "new")
    asks(old, hands_over=True)
    new.replica.caught_up(asks(new, takes_over=True).version)
    old.dies()
    assert asks(new, takes_over=True).is_held


def test_nothing_is_there_to_take_from_those_who_train() -> None:
    job, _ = job_in_a_phase("a", "b")
    told = asks(look(job, "new"), takes_over=True)
    assert told.version.proven and not told.is_held and not told.sources


def test_who_catches_up_otherwise_is_told_as_ever() -> None:
    job, (a, _) = job_in_a_phase("a", "b")
    c = look(job, "c")
    c.catches_up()
    assert not asks(a, hands_over=True).taken_by


@pytest.mark.slow
@given(st.lists(st.sampled_from(["offers", "ends", "trains", "takes"]), max_size=12))
@settings(max_examples=200, deadline=None)
def test_in_whatever_order_it_happens_both_are_told_the_same(events: list[str]) -> None:
    """The oracle: who takes a state has it if it came at a time at which the old group stood still, and still does."""
    job, (old,) = job_in_a_phase("old")
    new = look(job, "new")
    stands_still = has_come = is_taken = False
    for event in events:
        if event == "takes":
            told = asks(new, takes_over=True)
            is_taken = is_taken or (has_come and stands_still)
            assert told.is_held == (has_come and stands_still)
            if told.sources:
                assert stands_still
                new.replica.caught_up(told.version)
                has_come = True
        elif event == "trains":
            old.asks_as()
            stands_still = False
        else:
            stands_still = event == "offers"
            assert bool(asks(old, hands_over=stands_still).taken_by) == is_taken
        if is_taken:
            assert asks(old).taken_by == "new:1", "its last question decides"
            break
