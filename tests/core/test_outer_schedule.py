"""When a fragment is exchanged, against a clock hand that is moved one inner step at a time."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchft_ckpt.core.training.outer_schedule import Action, OuterSchedule, RoundOutcome, after_vote
from torchft_ckpt.errors import ConfigError


@st.composite
def schedules(draw: st.DrawFn) -> OuterSchedule:
    num_fragments, period = draw(st.integers(1, 6)), draw(st.integers(1, 9))
    return OuterSchedule(num_fragments * period, num_fragments, draw(st.integers(0, period - 1)))


@given(schedules())
def test_each_round_prepares_once_and_ends_the_delay_later(schedule: OuterSchedule) -> None:
    by_step = {step: schedule.actions(step) for step in range(1, schedule.period + 1)}

    prepares = [step for step, actions in by_step.items() if Action.PREPARE in actions]
    syncs = [step for step, actions in by_step.items() if Action.SYNC in actions]
    assert syncs == [schedule.period]
    assert prepares == [schedule.period - schedule.sync_delay]


@given(schedules(), st.integers(0, 1000))
def test_every_fragment_is_exchanged_once_in_sync_every_steps(schedule: OuterSchedule, first: int) -> None:
    rounds = range(first, first + schedule.num_fragments)

    assert sorted(map(schedule.fragment_of, rounds)) == list(range(schedule.num_fragments))
    assert schedule.period * schedule.num_fragments == schedule.sync_every


def test_without_delay_a_round_is_prepared_before_it_ends() -> None:
    assert OuterSchedule(4).actions(4) == (Action.PREPARE, Action.SYNC)


@pytest.mark.parametrize(
    ("sync_every", "num_fragments", "delay", "party"),
    [
        (0, 1, 0, "sync_every"),
        (5, 2, 0, "sync_every"),
        (2, 3, 0, "sync_every"),
        (4, 0, 0, "model_fragments"),
        (4, 2, 2, "fragment_sync_delay"),
        (4, 2, -1, "fragment_sync_delay"),
    ],
)
def test_a_schedule_that_cannot_be_is_refused_by_the_argument(
    sync_every: int, num_fragments: int, delay: int, party: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        OuterSchedule(sync_every, num_fragments, delay)

    assert caught.value.party == party


@pytest.mark.parametrize(
    ("committed", "is_behind", "retries_left", "expected"),
    [
        (True, False, 0, RoundOutcome.APPLY),
        (True, False, 1, RoundOutcome.APPLY),
        (False, False, 1, RoundOutcome.RETRY),
        (False, False, 0, RoundOutcome.RESTORE),
        (False, True, 1, RoundOutcome.REJOIN),
        (False, True, 0, RoundOutcome.REJOIN),
    ],
)
def test_a_round_is_taken_tried_again_taken_back_or_fetched(
    committed: bool, is_behind: bool, retries_left: int, expected: RoundOutcome
) -> None:
    assert after_vote(committed=committed, is_behind=is_behind, retries_left=retries_left) is expected
