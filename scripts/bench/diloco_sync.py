"""Measures how long the inner step is that ends a transfer, where `fragment_sync_delay` covers the transfer.

Bar: 1.2x of an inner step that exchanges nothing. On links of 25 Mbit/s, where a fragment's transfer takes several inner
steps; the same without a delay says how long that is. Beside it the step that begins a transfer.
"""

from __future__ import annotations

from diloco.links import LinksUnavailableError

from bench.diloco_figures import Kind, by_kind, joined, over_plain
from bench.diloco_jobs import DEMO_GPT, DILOCO, arguments_of, inner_steps, options_of, run_job
from bench.diloco_skipped import skipped
from bench.run import Run
from bench.stats import judge_at_most, median
from bench.table import Row, Section, ratio, seconds

NAME = "sync"
RATE_MBIT = 25.0
TITLE = f"The inner step that ends a transfer over one that exchanges nothing, links of {RATE_MBIT:g} Mbit/s"
BAR = 1.2
_SKIP_ROUNDS = 3


def measure(run: Run) -> Section:
    """Run the job with and without a delay, and judge the median of all groups' sync steps."""
    num_rounds = 10 if run.quick else 24
    period = 14
    common = {
        "groups": 2,
        **DEMO_GPT,
        "batch_size": 24,
        "sync_every": 2 * period,
        "fragments": 2,
        "kills": 0,
        "seed": run.seed,
    }
    common["inner_steps"] = num_rounds * period
    covered = arguments_of(**common, delay=9)
    uncovered = arguments_of(**common, delay=0)
    durations: dict[str, list[dict[Kind, list[float]]]] = {"covered": [], "uncovered": []}
    try:
        for number in range(run.num_repeats(3, 1)):
            for name, arguments in (("covered", covered), ("uncovered", uncovered)):
                record = run_job(run, f"{name}-{number}", DILOCO, arguments, rate_mbit=RATE_MBIT)
                delay = options_of(arguments).delay
                durations[name] += [by_kind(steps, period, delay, _SKIP_ROUNDS) for steps in inner_steps(record)]
    except LinksUnavailableError as error:
        return skipped(NAME, TITLE, "sync step over an inner step", f"<= {BAR}x", error)
    kinds, bare = joined(durations["covered"]), joined(durations["uncovered"])
    plain_s = median(kinds[Kind.PLAIN])
    figure = over_plain(kinds, Kind.SYNC)
    rows = [
        Row(
            figure="  the sync step over an inner step",
            ours=ratio(figure),
            bar=f"<= {BAR}x",
            verdict=judge_at_most(figure, BAR),
        ),
        Row(figure="    of the group that waits least", ours=ratio(min(_each(durations["covered"], Kind.SYNC)))),
        Row(figure="    the step that begins a transfer", ours=ratio(over_plain(kinds, Kind.PREPARE))),
        Row(figure="    a step beside a transfer", ours=ratio(over_plain(kinds, Kind.BESIDE))),
        Row(
            figure="    the sync step without a delay: with the transfer in it", ours=ratio(over_plain(bare, Kind.SYNC))
        ),
        Row(figure="    an inner step", ours=seconds(plain_s)),
    ]
    options = options_of(covered)
    notes = [
        f"{options.groups} groups in network namespaces, the demo's GPT of width {options.width}, {options.fragments} fragments, "
        f"rounds of {period} inner steps, delay {options.delay}; medians over all rounds of {len(durations['covered'])} groups",
    ]
    raw = {
        name: [{kind.value: values for kind, values in group.items()} for group in groups]
        for name, groups in durations.items()
    }
    return Section(name=NAME, title=TITLE, rows=rows, notes=notes, raw=raw)


def _each(groups: list[dict[Kind, list[float]]], kind: Kind) -> list[float]:
    return [value for group in groups if (value := over_plain(group, kind)) is not None]
