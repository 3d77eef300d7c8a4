"""Measures what a death costs a job of StepLoader beyond the microbatches that are computed again.

A bar: 0.15 s. One of 3 groups of 4 microbatches kills itself in the second microbatch of a step. What counts is the time that
the others spend on that step outside of the inner loop's body, over what they spend so on another step: to notice, to meet, to
connect and to vote again. Microbatches are slept, so that what the two others compute does not share cores.
"""

from __future__ import annotations

from bench.processes import Children
from bench.run import Run
from bench.stats import judge_at_most, median
from bench.step import NUM_MICROBATCHES, start
from bench.table import Row, Section, seconds

NAME, TITLE, BAR_S = "death", "A death in a step", 0.15
_NUM_GROUPS, _STEP, _NUM_STEPS = 3, 10, 14
_MICROBATCH_S = 0.1


def measure(run: Run) -> Section:
    """Have a group die in each of some jobs, and judge."""
    deaths = [_one(run) for _ in range(run.num_repeats(8, 3))]
    beyond = median([one["beyond_s"] for one in deaths]) or 0.0
    rows = [
        Row(
            figure="  beyond the missing microbatches: to notice, meet, connect and vote again",
            ours=seconds(beyond),
            bar=f"<= {BAR_S} s",
            verdict=judge_at_most(beyond, BAR_S),
        ),
        Row(figure="    the longest of them", ours=seconds(max(one["beyond_s"] for one in deaths))),
        Row(figure="  the missing microbatches, computed by the two others", ours=seconds(_mid(deaths, "missing_s"))),
        Row(figure="  a step in which nobody dies", ours=seconds(_mid(deaths, "step_s"))),
    ]
    notes = [
        f"{_NUM_GROUPS} groups of {NUM_MICROBATCHES} microbatches of {_MICROBATCH_S} s; one is killed in the second one of step"
        f" {_STEP}; medians of {len(deaths)} jobs, in each of the group that took longer"
    ]
    return Section(name=NAME, title=TITLE, rows=rows, notes=notes, raw={"deaths": deaths})


def _mid(deaths: list[dict[str, float]], key: str) -> float:
    return median([one[key] for one in deaths]) or 0.0


def _one(run: Run) -> dict[str, float]:
    with Children(run.log_dir) as children:
        groups = start(children, _NUM_GROUPS, None, run.seed, min_replicas=_NUM_GROUPS - 1, sleeps_s=_MICROBATCH_S)
        for child in groups:
            child.tell(num_steps=_NUM_STEPS, dies=_STEP if child is groups[-1] else None)
        ends = [child.wait_for("steps", 60 + 30 * _NUM_STEPS * _MICROBATCH_S)["steps"] for child in groups[:-1]]
    found = []
    for steps in ends:
        usual, hit = steps[_STEP - 4 : _STEP], steps[_STEP]
        outside = median([one["wall_s"] - one["inside_s"] for one in usual]) or 0.0
        inside = median([one["inside_s"] for one in usual]) or 0.0
        found.append(
            {
                "beyond_s": hit["wall_s"] - hit["inside_s"] - outside,
                "missing_s": hit["inside_s"] - inside,
                "step_s": outside + inside,
            }
        )
    run.say(f"a death: {found}")
    return max(found, key=lambda one: one["beyond_s"])
