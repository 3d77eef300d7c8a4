"""The benchmark's statistics and table, on made-up times."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

from bench import stats
from bench.stats import KillOutcome, Step, Verdict


def steps(*attempts: tuple[float, bool]) -> list[Step]:
    return [Step(ended=ended, committed=committed, participating=True) for ended, committed in attempts]


@pytest.mark.parametrize(
    ("values", "expected"), [([], None), ([3.0], 3.0), ([5.0, 1.0, 3.0], 3.0), ([4.0, 1.0, 2.0, 9.0], 3.0)]
)
def test_the_median_is_the_middle_or_the_mean_of_the_middle_two(values: list[float], expected: float | None) -> None:
    assert stats.median(values) == expected


def test_the_longest_gap_is_looked_for_around_the_kill_and_not_before_it() -> None:
    commits = [0.0, 5.0, 5.1, 5.2, 5.6, 5.7]
    assert stats.longest_gap(commits, start=5.25, end=5.65) == pytest.approx(0.4)


def test_a_gap_that_begins_before_the_kill_counts_whole() -> None:
    assert stats.longest_gap([1.0, 3.0, 3.1], start=2.9, end=3.05) == pytest.approx(2.0)


def test_silence_until_the_end_is_a_gap() -> None:
    assert stats.longest_gap([1.0, 1.1], start=1.2, end=9.1) == pytest.approx(8.0)


def test_who_never_committed_has_no_gap() -> None:
    assert stats.longest_gap([], start=0.0, end=1.0) is None


def test_a_kill_counts_with_its_worst_survivor() -> None:
    survivors = {
        "a": steps((0.9, True), (1.2, False), (1.3, True), (1.4, True)),
        "b": steps((0.9, True), (1.2, False), (1.3, False), (1.5, True)),
    }
    outcome = stats.judge_kill(survivors, died=1, killed_at=1.0, end=1.45)
    assert outcome == KillOutcome(gap_s=pytest.approx(0.6), discarded=2, survivors_died=1)


def test_a_step_discarded_before_the_kill_is_not_blamed_on_it() -> None:
    outcome = stats.judge_kill({"a": steps((0.5, False), (0.9, True), (1.1, True))}, died=0, killed_at=1.0, end=1.1)
    assert outcome.discarded == 0


def test_a_kill_that_nobody_survived_has_no_gap() -> None:
    assert stats.judge_kill({}, died=2, killed_at=1.0, end=2.0) == KillOutcome(
        gap_s=None, discarded=0, survivors_died=2
    )


def test_the_first_contribution_is_committed_and_participated_in() -> None:
    healing = Step(ended=1.0, committed=True, participating=False)
    discarded = Step(ended=2.0, committed=False, participating=True)
    contributed = Step(ended=3.0, committed=True, participating=True)
    assert stats.first_contribution([healing, discarded, contributed]) == contributed


def test_a_round_ends_when_the_slowest_process_has_its_answer() -> None:
    assert stats.round_durations([[1.0, 2.0, 4.0], [1.5, 1.8, 4.5]]) == pytest.approx([0.5, 2.5])


def test_pairs_are_divided_neighbour_by_neighbour() -> None:
    assert stats.pair_ratios([2.0, 9.0], [1.0, 3.0]) == [2.0, 3.0]


@pytest.mark.parametrize("power", [1.0, 2.0])
def test_the_growth_exponent_tells_linear_from_quadratic(power: float) -> None:
    measured = {size: 3e-5 * size**power for size in (64, 256, 1000)}
    assert stats.growth_exponent(measured) == pytest.approx(power)


def test_one_size_has_no_growth() -> None:
    assert stats.growth_exponent({64: 0.1}) is None


@pytest.mark.parametrize(("value", "expected"), [(0.5, Verdict.MET), (0.5001, Verdict.MISSED), (None, Verdict.NOT_RUN)])
def test_a_figure_at_its_bar_keeps_it(value: float | None, expected: Verdict) -> None:
    assert stats.judge_at_most(value, 0.5) is expected
