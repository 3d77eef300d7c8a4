"""Counts the bytes that a group sends for an inner step, beside data-parallel training of the same model by the same groups.

Bars: 1/sync_every of data-parallel training's plus 2 %; with int8 a quarter of that. Each group has a network namespace, and
what counts is its interface's counter: payload, headers, votes, heartbeats. From the end of one round to the end of
another with whole turns of the fragments between them; who starts up or joins is not in it.
"""

from __future__ import annotations

from diloco.job import JobFailedError, JobRecord
from diloco.links import LinksUnavailableError

from bench.diloco_figures import bytes_a_step
from bench.diloco_jobs import DDP, DEMO_GPT, DILOCO, arguments_of, inner_steps, options_of, run_job
from bench.diloco_skipped import skipped
from bench.run import Run
from bench.stats import judge_at_most, median
from bench.table import Row, Section, ratio

NAME = "bytes"
TITLE = "Bytes that a group sends for an inner step, over data-parallel training's"
SLACK = 1.02
_FIRST_ROUND = 4
_FIRST_STEP = 10


def _of_job(record: JobRecord, first: int, last: int, steps_a_round: int) -> float:
    """Return the mean over the groups.

    Raises:
        JobFailedError: none of them was there for both rounds.
    """
    counts = [
        bytes_a_step(steps, first_round=first, last_round=last, steps_a_round=steps_a_round)
        for steps in inner_steps(record)
    ]
    known = [count for count in counts if count is not None]
    if not known:
        raise JobFailedError(f"{record.name}: no group was in rounds {first} and {last}")
    return sum(known) / len(known)


def measure(run: Run) -> Section:
    """Run the three trainings on links without a limit, and judge the ratios."""
    task = {"groups": 2 if run.quick else 4, **DEMO_GPT, "batch_size": 2, "seed": run.seed, "kills": 0}
    outer = arguments_of(**task, sync_every=20, fragments=2, delay=2, inner_steps=120 if run.quick else 240)
    every_step = arguments_of(**task, inner_steps=60)
    options = options_of(outer)
    last_round = _FIRST_ROUND + options.fragments * (2 if run.quick else 8)
    figures: dict[str, list[float]] = {"ddp": [], "fp32": [], "int8": []}
    try:
        for number in range(run.num_repeats(3, 1)):
            ddp = run_job(run, f"ddp-{number}", DDP, every_step, is_counted=True)
            figures["ddp"].append(_of_job(ddp, _FIRST_STEP, _FIRST_STEP + 40, 1))
            for name, extra in (("fp32", {}), ("int8", {"quantize": True})):
                record = run_job(run, f"{name}-{number}", DILOCO, [*outer, *arguments_of(**extra)], is_counted=True)
                figures[name].append(_of_job(record, _FIRST_ROUND, last_round, options.period))
            run.say(f"bytes a step: { {name: round(values[-1]) for name, values in figures.items()} }")
    except LinksUnavailableError as error:
        return skipped(NAME, TITLE, "fp32", f"<= {SLACK}/sync_every", error)
    rows = []
    for name, quarter in (("fp32", 1), ("int8", 4)):
        share = (median(figures[name]) or 0.0) / (median(figures["ddp"]) or 1.0)
        bar = SLACK / options.sync_every / quarter
        rows.append(
            Row(
                figure=f"  {name}, sync_every={options.sync_every}",
                ours=f"{share:.5f}  (1/{1 / share:.1f})",
                bar=f"<= {bar:.5f}",
                verdict=judge_at_most(share, bar),
            )
        )
        rows.append(
            Row(
                figure="    over what is exchanged alone, as a ring sends it",
                ours=ratio(share * options.sync_every * quarter),
            )
        )
    notes = [
        f"{options.groups} groups in network namespaces, the demo's GPT of width {options.width}, {options.fragments} fragments; "
        f"data-parallel: {(median(figures['ddp']) or 0.0) / 1e3:.0f} kB a step",
        "torchft 0.2.0's DiLoCo is not run: its manager would need a store and a lighthouse of its own in the namespaces",
        f"rounds {_FIRST_ROUND} to {last_round}; the median of {len(figures['ddp'])}",
    ]
    return Section(name=NAME, title=TITLE, rows=rows, notes=notes, raw=figures)
