"""Measures what `check_equal_every=100` costs a job in which nothing fails.

Bars: a step takes at most 1.01x as long on average, and one beside which a state is digested at most 1.1x of the median. Two jobs
live at once and take turns of 100 steps, one of which is checked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

from bench import sides
from bench.job import Job, Plan
from bench.overhead import take_turn
from bench.processes import Children
from bench.stats import judge_at_most, median, pair_ratios
from bench.table import Row, Section, ratio, seconds

MEAN_BAR = 1.01
CHECKED_BAR = 1.1
_EVERY = 100
_NUM_GROUPS = 2


def _durations(job: Job) -> Iterator[tuple[int, float]]:
    """Yield the step that each of a job's iterations began with, and how long it took."""
    for child in job.groups.values():
        for before, after in pairwise(child.events("step")):
            yield before["step"], after["t"] - before["t"]


def run(*, quick: bool, seed: int, log_dir: Path, say: Callable[[str], None]) -> Section:
    """Let a job with checks and one without take turns; judge the median of the pairs, and the steps that were checked."""
    num_turns = 4 if quick else 16
    means: dict[int, list[float]] = {0: [], _EVERY: []}
    jobs: dict[int, Job] = {}
    first = 0
    with Children(log_dir) as children:
        for every in means:
            plan = Plan(
                side=sides.OURS,
                name=f"every_{every}",
                num_groups=_NUM_GROUPS,
                task="transformer",
                seed=seed,
                settings={"check_equal_every": every},
            )
            jobs[every] = Job(children, plan)
            jobs[every].start(log_dir=log_dir)
            # From the middle between two checks on: what a turn begins and ends with is not what is looked at.
            first = (
                max(c.events("step")[-1]["step"] for c in jobs[every].groups.values()) // _EVERY * _EVERY + _EVERY // 2
            )
            take_turn(jobs[every], first)
        for turn in range(num_turns):
            for every, found in means.items():
                found.append(take_turn(jobs[every], first + (turn + 1) * _EVERY)[0])
            say(
                f"turn {turn}: "
                + ", ".join(f"every {every}: {found[-1] * 1000:.1f} ms" for every, found in means.items())
            )
        timed = [
            (step, took_s)
            for step, took_s in _durations(jobs[_EVERY])
            if step >= first and step % _EVERY != _EVERY // 2
        ]
    usual_s = median([took_s for _, took_s in timed])
    checked = [took_s for step, took_s in timed if step % _EVERY == 0]
    checked_s = median(checked)
    of_mean = median(pair_ratios(means[_EVERY], means[0]))
    of_checked = None if checked_s is None or usual_s is None else checked_s / usual_s
    rows = [
        Row(
            figure=f"  mean step with a check each {_EVERY}, over none",
            ours=ratio(of_mean),
            bar=f"<= {MEAN_BAR}x",
            verdict=judge_at_most(of_mean, MEAN_BAR),
        ),
        Row(
            figure="  step that is checked, over the median step",
            ours=ratio(of_checked),
            bar=f"<= {CHECKED_BAR}x",
            verdict=judge_at_most(of_checked, CHECKED_BAR),
        ),
        Row(figure="    median step", ours=seconds(usual_s)),
        Row(figure="    slowest step that was checked", ours=seconds(max(checked, default=None))),
    ]
    notes = [
        f"{_NUM_GROUPS} processes of one thread; a transformer with 2.6 M fp32 parameters, AdamW: 31 MB are digested",
        f"{num_turns} pairs of turns of {_EVERY} steps, each with one check",
    ]
    raw: dict[str, Any] = {"mean_s": {str(every): found for every, found in means.items()}, "checked_s": checked}
    return Section(name="check_equal", title="What comparing states costs", rows=rows, notes=notes, raw=raw)
