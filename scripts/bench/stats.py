"""Turns recorded times into figures. It knows neither processes nor libraries: numbers in, numbers out."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import pairwise


class Verdict(Enum):
    """What a figure says about its bar."""

    MET = "met"
    MISSED = "MISSED"
    NOT_RUN = "not run"
    NO_BAR = ""


def median(values: Sequence[float]) -> float | None:
    """Return the median (mean of the middle two for an even count), or None where there is no value."""
    if not values:
        return None
    ordered = sorted(values)
    middle = len(ordered) // 2
    if len(ordered) % 2:
        return ordered[middle]
    return (ordered[middle - 1] + ordered[middle]) / 2


def longest_gap(times: Sequence[float], start: float, end: float) -> float | None:
    """Return the longest distance between neighbouring times, over the intervals that overlap `[start, end]`.

    A silence that lasts until `end` counts too, up to `end`: who never commits again has a long gap, not none.

    Args:
        times: ascending, seconds.
        start: beginning of the window, seconds on the same clock.
        end: end of the window.

    Returns:
        Seconds, or None where no time lies before `end`.
    """
    known = [time for time in times if time <= end]
    later = [time for time in times if time > end]
    if not known:
        return None
    edges = [*known, later[0] if later else end]
    gaps = [b - a for a, b in pairwise(edges) if b > start]
    return max(gaps, default=None)


def count_within(times: Sequence[float], start: float, end: float) -> int:
    """Count the times in `[start, end]`."""
    return sum(1 for time in times if start <= time <= end)


def pair_ratios(numerators: Sequence[float], denominators: Sequence[float]) -> list[float]:
    """Divide neighbour by neighbour: element i of both was measured one right after the other."""
    return [a / b for a, b in zip(numerators, denominators, strict=True)]


def round_durations(completions: Sequence[Sequence[float]]) -> list[float]:
    """Return how long each round took, from when each of several processes had the last answer of each round.

    Args:
        completions: for each process, one time for each round, seconds on one common clock.

    Returns:
        One duration fewer than there are rounds: the first round only sets the clock.
    """
    ends = [max(times) for times in zip(*completions, strict=True)]
    return [b - a for a, b in pairwise(ends)]


def growth_exponent(seconds_by_size: Mapping[int, float]) -> float | None:
    """Return the exponent p of the least-squares fit `seconds = c * size ** p`; 1 is linear, 2 quadratic.

    None where fewer than two sizes were measured.
    """
    points = [(math.log(size), math.log(seconds)) for size, seconds in seconds_by_size.items() if seconds > 0]
    if len(points) < 2:
        return None
    mean_x = sum(x for x, _ in points) / len(points)
    mean_y = sum(y for _, y in points) / len(points)
    spread = sum((x - mean_x) ** 2 for x, _ in points)
    return sum((x - mean_x) * (y - mean_y) for x, y in points) / spread


def judge_at_most(value: float | None, bar: float) -> Verdict:
    """Return whether a figure, where smaller is better, keeps its bar."""
    if value is None:
        return Verdict.NOT_RUN
    return Verdict.MET if value <= bar else Verdict.MISSED


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One attempt at a training step of one group, as its process reported it."""

    ended: float
    """Seconds, CLOCK_MONOTONIC."""
    committed: bool
    participating: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class KillOutcome:
    """What one kill cost the survivors."""

    gap_s: float | None
    """Longest gap between commits of the survivor that had the longest one."""
    discarded: int
    """Discarded steps of the survivor that discarded the most."""
    survivors_died: int


def usual_step(steps: Sequence[Step], num_latest: int = 20) -> float | None:
    """Return the median distance in seconds between the latest commits, or None where there are fewer than two."""
    commits = [step.ended for step in steps if step.committed][-num_latest:]
    return median([b - a for a, b in pairwise(commits)])


def judge_kill(survivors: Mapping[str, Sequence[Step]], died: int, killed_at: float, end: float) -> KillOutcome:
    """Work out what a kill cost, from what each survivor reported.

    Args:
        survivors: the steps of each survivor that is still alive, in order.
        died: how many survivors ended on their own after the kill.
        killed_at: when the signal was sent, seconds.
        end: end of the window that is looked at, seconds.
    """
    gaps: list[float] = []
    discarded = 0
    for steps in survivors.values():
        gap = longest_gap([step.ended for step in steps if step.committed], killed_at, end)
        if gap is not None:
            gaps.append(gap)
        discarded = max(discarded, count_within([s.ended for s in steps if not s.committed], killed_at, end))
    return KillOutcome(gap_s=max(gaps, default=None), discarded=discarded, survivors_died=died)


def first_contribution(steps: Sequence[Step]) -> Step | None:
    """Return the first committed step to which the group contributed, or None."""
    return next((step for step in steps if step.committed and step.participating), None)
