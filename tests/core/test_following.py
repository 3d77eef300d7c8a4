"""What a scheduler's call does, by what happened before it: the table of `core.training.following`."""

from __future__ import annotations

from typing import Any

import pytest

from torchft_ckpt.core.training.following import Call, Follower
from torchft_ckpt.errors import ConfigError


def follower() -> Follower:
    return Follower("the scheduler 'warm-up'", "step", "optimizer.step()")


def in_step(*, counts: bool, is_wrapped: bool = True) -> Follower:
    """Return one whose step has just been decided."""
    one = follower()
    one.begins()
    one.decided(counts=counts, is_wrapped=is_wrapped)
    return one


def stepped() -> Follower:
    """Return one whose optimizer has taken a step that counts."""
    one = in_step(counts=True)
    one.optimizer_ended(has_stepped=True)
    return one


def moves(one: Follower) -> bool:
    """Call it, and let it move where it may."""
    may_move = one.may_move()
    if may_move:
        one.moved()
    return may_move


def test_it_moves_once_where_its_optimizer_has_taken_a_step_that_counts() -> None:
    one = stepped()
    assert moves(one)
    one.begins()
    one.decided(counts=True, is_wrapped=True)
    one.optimizer_ended(has_stepped=True)
    assert moves(one)


def test_its_call_is_ignored_in_a_step_that_is_discarded_and_in_one_that_is_open() -> None:
    discarded = in_step(counts=False)
    assert not moves(discarded)
    assert not moves(discarded), "again"
    discarded.begins()
    assert not moves(discarded), "the step is open"


def test_what_no_wrapper_steps_is_owed_with_the_decision() -> None:
    assert moves(in_step(counts=True, is_wrapped=False))


def test_an_optimizer_that_says_twice_that_it_stepped_makes_one_move() -> None:
    one = stepped()
    assert moves(one)
    one.optimizer_ended(has_stepped=True)
    assert one.now is Call.MADE
    one.begins()


def test_an_optimizer_that_skips_a_step_that_counts_makes_none() -> None:
    one = in_step(counts=True)
    one.optimizer_ended(has_stepped=False)
    assert not moves(one)


@pytest.mark.parametrize("event", ["the next step begins", "the state is to be saved"])
def test_a_move_that_is_missing_is_named_and_then_made_up_for(event: str) -> None:
    one = stepped()
    with pytest.raises(
        ConfigError, match=f"{event}, and the scheduler 'warm-up' has not followed the last step"
    ) as said:
        one.check(event)
    assert said.value.party == "the scheduler 'warm-up'"
    assert moves(one)
    one.check(event)


def test_a_step_does_not_begin_where_a_move_is_missing() -> None:
    one = stepped()
    with pytest.raises(ConfigError):
        one.begins()
    assert moves(one)


@pytest.mark.parametrize(
    ("one", "says"),
    [
        (follower(), "before the first step: move it before it is given to the Manager"),
        (in_step(counts=True), "in a step that counts and that its optimizer has not taken"),
        (stepped(), "a second time after one step that counts"),
    ],
    ids=["before the first step", "before its optimizer", "twice"],
)
def test_a_call_that_a_plain_loop_would_follow_and_that_would_be_wrong_is_refused(one: Any, says: str) -> None:
    if one.now is Call.OWED:
        moves(one)
    with pytest.raises(ConfigError, match=says):
        moves(one)


def test_nothing_is_owed_once_its_state_was_loaded() -> None:
    """The optimizer's state is that of the same checkpoint, which has this step's move or does not know the step."""
    one = stepped()
    one.loaded()
    one.check("the next step begins")
    assert not moves(one)


def test_to_load_its_state_before_the_first_step_begins_nothing() -> None:
    one = follower()
    one.loaded()
    with pytest.raises(ConfigError, match="before the first step"):
        moves(one)


def test_a_move_that_raised_is_still_missing() -> None:
    one = stepped()
    assert one.may_move()
    with pytest.raises(ConfigError, match="has not followed"):
        one.begins()
