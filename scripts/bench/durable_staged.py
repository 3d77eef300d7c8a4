"""Measures what a save of several replica groups stages on one rank, and how long a step directly after it is held.

Shares are arithmetic, so the ranks of one group are enough: they save as that group of a job would whose others are not there.
"""

from __future__ import annotations

import time
from typing import Any

from bench.durable_group import clean, directory, ranks
from bench.durable_model import FSDP, WHOLE
from bench.durable_worker import OURS
from bench.run import Run
from bench.stats import judge_at_most, median
from bench.table import Row, Section, ratio, seconds
from bench.transport_figures import spread

HELD_BAR, STAGED_BAR = 1.2, 1.05
TENSOR_S = 20e-6
"""Allowed for each tensor, beside the copy."""
SHAPES = ((8, 1), (2, 2))
REDUNDANCIES = (1, 2)
_WIDTHS = {1: 1024, 2: 1472}
"""By the ranks of a group: with it each holds about 1 GB."""
_PAUSE_S = 1.5


def measure(run: Run) -> Section:
    """For each shape and redundancy: save, step at once, and copy as much as is staged."""
    rows: list[Row] = []
    notes: list[str] = []
    raw: dict[str, Any] = {}
    for num_groups, num_ranks in SHAPES:
        for redundancy in REDUNDANCIES:
            name = f"{num_groups} groups of {num_ranks}, redundancy {redundancy}"
            answers = _measure_one(run, num_groups, num_ranks, redundancy)
            raw[name] = answers
            share = median([answer["share_bytes"] for answer in answers]) or 0.0
            overs = [_over_copy(answer) for answer in answers]
            staged = max(answer["staged_bytes"] / answer["share_bytes"] for answer in answers)
            held = median([answer["save_s"] + answer["hook_s"] for answer in answers])
            copied = median([_copy_s(answer) for answer in answers])
            per_tensor = median([answer["save_s"] / answer["num_tensors"] * 1e6 for answer in answers])
            middle = median(overs)
            rows += [
                Row(
                    figure=f"  {name}: held, less {TENSOR_S * 1e6:.0f} µs a tensor, over a copy of the shares",
                    ours=ratio(middle),
                    bar=f"<= {HELD_BAR}x",
                    verdict=judge_at_most(middle, HELD_BAR),
                ),
                Row(
                    figure="    bytes staged over redundancy times the share",
                    ours=f"{staged:.3f}",
                    bar=f"<= {STAGED_BAR}",
                    verdict=judge_at_most(staged, STAGED_BAR),
                ),
                Row(figure="    held; a copy of the shares", ours=f"{seconds(held)}; {seconds(copied)}"),
                Row(figure="    save() itself, a tensor", ours="" if per_tensor is None else f"{per_tensor:.1f} µs"),
            ]
            notes.append(
                f"{name}: {share / 1e6:.0f} MB staged of {answers[0]['held_bytes'] / 1e6:.0f}; {spread(overs)}"
            )
    notes.append(
        "a copy: torch's copy_ of all tensors that the rank holds, into memory written to before, scaled to the shares"
    )
    return Section(name="staged", title="Staged for a save of several groups", rows=rows, notes=notes, raw=raw)


def _copy_s(answer: dict[str, Any]) -> float:
    return float(answer["copy_s"] * answer["share_bytes"] / answer["held_bytes"])


def _over_copy(answer: dict[str, Any]) -> float:
    held_s = answer["save_s"] + answer["hook_s"] - TENSOR_S * answer["num_tensors"]
    return float(held_s / _copy_s(answer))


def _measure_one(run: Run, num_groups: int, num_ranks: int, redundancy: int) -> list[dict[str, Any]]:
    measured: list[dict[str, Any]] = []
    with directory() as root, ranks(run, num_ranks, f"staged-{num_groups}-{redundancy}") as job:
        (root / "ours").mkdir()
        layout = WHOLE if num_ranks == 1 else FSDP
        job.hold(layout, quick=run.quick, width=0 if run.quick else _WIDTHS[num_ranks])
        place = str(root / "ours")
        job.all("open", location=place, num_groups=num_groups, redundancy=redundancy)
        for number in range(-1, run.num_repeats(7, 2)):
            clean(root)
            begin = time.monotonic() + 0.3
            save_at = [begin + _PAUSE_S + 2 * _PAUSE_S * rank for rank in range(num_ranks)]
            end = save_at[-1] + 2 * _PAUSE_S
            copy_at = [at - _PAUSE_S if number % 2 else end + _PAUSE_S * rank for rank, at in enumerate(save_at)]
            common = {"do": "hold_up", "how": OURS, "location": place, "step": number + 2, "busy_s": 0.0}
            answers = job.each(
                [
                    {**common, "copy_at": copy_at[rank], "save_at": save_at[rank], "closes": False}
                    for rank in range(num_ranks)
                ]
            )
            if number >= 0:
                measured += answers
            for one in answers:
                run.say(
                    f"save {one['save_s'] * 1e3:.1f} hook {one['hook_s'] * 1e3:.1f} copy {_copy_s(one) * 1e3:.1f} ms, staged"
                    f" {one['staged_bytes'] / one['share_bytes']:.3f}"
                )
    return measured
