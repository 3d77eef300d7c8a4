"""The kill plan: random, seeded, and never more than the job can bear."""

from __future__ import annotations

from collections import Counter

import pytest
from demo.chaos import PlannedKill, decide_kill, decide_stop_step, plan_kills
from hypothesis import given
from hypothesis import strategies as st


def test_the_same_seed_gives_the_same_plan_and_another_seed_another() -> None:
    plans = [plan_kills(seed=seed, num_kills=6, num_groups=3, num_steps=1000) for seed in (4, 4, 5)]

    assert (plans[0] == plans[1], plans[0] == plans[2]) == (True, False)


@given(
    seed=st.integers(0, 10**6),
    num_kills=st.integers(0, 12),
    num_groups=st.integers(2, 6),
    num_steps=st.integers(20, 2000),
)
def test_kills_come_in_order_away_from_both_ends_and_fall_on_all_groups_alike(
    seed: int, num_kills: int, num_groups: int, num_steps: int
) -> None:
    plan = plan_kills(seed=seed, num_kills=num_kills, num_groups=num_groups, num_steps=num_steps)

    steps = [kill.step for kill in plan]
    per_group = Counter({group: 0 for group in range(num_groups)})
    per_group.update(kill.group for kill in plan)
    assert len(plan) == num_kills
    assert steps == sorted(set(steps))
    assert all(num_steps // 10 <= step < num_steps - num_steps // 10 for step in steps)
    assert max(per_group.values()) - min(per_group.values()) <= 1
    assert all(0 <= kill.delay_steps < 1 for kill in plan)


@pytest.mark.parametrize(
    ("num_kills", "num_groups", "num_steps", "what"),
    [(1, 1, 100, "somebody must survive"), (90, 3, 100, "do not fit"), (-1, 3, 100, "do not fit")],
)
def test_a_plan_that_cannot_be_is_refused(num_kills: int, num_groups: int, num_steps: int, what: str) -> None:
    with pytest.raises(ValueError, match=what):
        plan_kills(seed=0, num_kills=num_kills, num_groups=num_groups, num_steps=num_steps)


KILL = PlannedKill(step=50, group=1, delay_steps=0.5)


@pytest.mark.parametrize(
    ("contributing", "num_groups", "expected"),
    [
        pytest.param({0: 50, 1: 50, 2: 50}, 3, KILL, id="its step is reached and all are there"),
        pytest.param({0: 49, 1: 49, 2: 49}, 3, None, id="its step is not reached"),
        pytest.param({0: 90, 2: 90}, 3, None, id="the victim is not back from its last death"),
        pytest.param({0: 90, 1: 90}, 3, None, id="another group is still away"),
        pytest.param({0: 90, 1: 90, 4: 90}, 5, KILL, id="two of five are away but two survive"),
        pytest.param({0: 50, 1: 50}, 2, KILL, id="with two groups one survivor is enough"),
    ],
)
def test_a_kill_waits_for_its_step_its_victim_and_its_survivors(
    contributing: dict[int, int], num_groups: int, expected: PlannedKill | None
) -> None:
    assert decide_kill([KILL], num_done=0, contributing=contributing, num_groups=num_groups) == expected


def test_no_kill_follows_the_last() -> None:
    assert decide_kill([KILL], num_done=1, contributing={0: 99, 1: 99, 2: 99}, num_groups=3) is None


@pytest.mark.parametrize(
    ("contributing", "expected"),
    [
        pytest.param({0: 100, 1: 100}, None, id="far from the end"),
        pytest.param({0: 165, 1: 165}, 200, id="near the end"),
        pytest.param({0: 165}, None, id="a group is away"),
        pytest.param({0: 230, 1: 231}, 251, id="past the planned end because somebody came back late"),
    ],
)
def test_the_end_is_announced_ahead_of_every_group_and_only_to_a_whole_job(
    contributing: dict[int, int], expected: int | None
) -> None:
    assert decide_stop_step(num_steps=200, contributing=contributing, num_groups=2, notice_steps=20) == expected
