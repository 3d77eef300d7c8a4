"""Measures how long a trainer is held by a save: by `save` itself, and by the step that follows."""

from __future__ import annotations

import os
import time
from typing import Any

from bench.durable_group import Ranks, clean, directory, place_of, ranks
from bench.durable_model import HSDP
from bench.durable_save import NUM_RANKS
from bench.durable_worker import DCP, DCP_ASYNC, DCP_ASYNC_KEPT, DCP_ASYNC_LOCAL, OURS
from bench.run import Run
from bench.stats import Verdict, judge_at_most, median
from bench.table import Row, Section, ratio, seconds
from bench.transport_figures import spread

BAR = 1.2
_BUSY_S = 0.6
_SLOT_S = 1.6
_PAUSE_S = 0.7
_AT_ONCE, _AFTER_PASSES, _TOGETHER = "at once", "after passes", "at once, all ranks together"


class _Held:
    """What was measured one way; a value for each rank of each round."""

    def __init__(self) -> None:
        self.held_s: list[float] = []
        self.save_s: list[float] = []
        self.copy_s: list[float] = []
        self.clone_s: list[float] = []

    def add(self, answers: list[dict[str, Any]]) -> None:
        self.held_s += [answer["save_s"] + answer["hook_s"] for answer in answers]
        self.save_s += [answer["save_s"] for answer in answers]
        self.copy_s += [answer["copy_s"] for answer in answers]
        self.clone_s += [answer["clone_s"] for answer in answers]

    def over_copy(self) -> list[float]:
        return [held / copy for held, copy in zip(self.held_s, self.copy_s, strict=True)]

    def over_clone(self) -> list[float]:
        return [held / clone for held, clone in zip(self.held_s, self.clone_s, strict=True)]


def _once(job: Ranks, how: str, when: str, place: str, step: int, copy_first: bool) -> list[dict[str, Any]]:
    """Have each rank save and step, and copy: in turn, or all at the same time."""
    slot_s = 0.0 if when == _TOGETHER else _SLOT_S
    begin = time.monotonic() + 0.3
    save_at = [begin + _PAUSE_S + slot_s * rank for rank in range(NUM_RANKS)]
    end = save_at[-1] + 2 * _PAUSE_S
    copy_at = [at - _PAUSE_S if copy_first else end + (slot_s and _PAUSE_S) * rank for rank, at in enumerate(save_at)]
    common = {"do": "hold_up", "how": how, "location": place, "step": step}
    busy_s = _BUSY_S if when == _AFTER_PASSES else 0.0
    return job.each(
        [{**common, "copy_at": copy_at[rank], "save_at": save_at[rank], "busy_s": busy_s} for rank in range(NUM_RANKS)]
    )


def measure(run: Run) -> Section:
    """Save and step at once, and save, run a forward and backward pass, and step."""
    ways = (
        (OURS, _AT_ONCE),
        (OURS, _AFTER_PASSES),
        (OURS, _TOGETHER),
        (DCP_ASYNC, _TOGETHER),
        (DCP_ASYNC_KEPT, _TOGETHER),
        (DCP_ASYNC_LOCAL, _TOGETHER),
        (DCP, _TOGETHER),
    )
    measured = {way: _Held() for way in ways}
    num_repeats = run.num_repeats(9, 3)
    step = 0
    with directory() as root, ranks(run, NUM_RANKS, "hsdp") as job:
        (root / "ours").mkdir()
        job.hold(HSDP, quick=run.quick)
        held_bytes = sum(job.held_bytes) / NUM_RANKS
        written_bytes = job.unique_bytes / NUM_RANKS
        job.all("open", location=str(root / "ours"))
        for number in range(-1, num_repeats):
            for how, when in ways:
                if how != OURS and number >= (num_repeats + 1) // 2:
                    continue
                step += 1
                clean(root)
                job.all("fill", version=step)
                answers = _once(job, how, when, str(place_of(how, root, step)), step, bool(number % 2))
                if number >= 0:
                    measured[how, when].add(answers)
                text = "; ".join(
                    f"save {one['save_s'] * 1e3:.1f} hook {one['hook_s'] * 1e3:.1f} "
                    f"copy {one['copy_s'] * 1e3:.1f} clone {one['clone_s'] * 1e3:.1f} ms"
                    for one in answers
                )
                run.say(f"{how}, {when}: {text}")
                if how == OURS and number in (-1, num_repeats - 1):
                    # Each rank stepped once before its save, and once while it was written.
                    job.load(OURS, root / "ours", step + 1)
    rows = []
    for when, name in (
        (_AT_ONCE, "a step directly after save()"),
        (_AFTER_PASSES, f"a step {_BUSY_S:g} s of passes later"),
        (_TOGETHER, "directly, 4 ranks at the same time on these cores"),
    ):
        held = measured[OURS, when]
        theirs = measured[DCP_ASYNC, _TOGETHER] if when == _TOGETHER else None
        middle = median(held.over_copy())
        rows += [
            Row(
                figure=f"  {name}: held over a copy of what is held",
                ours=ratio(middle),
                reference="" if theirs is None else ratio(median(theirs.over_copy())),
                bar=f"<= {BAR}x" if theirs is None else "",
                verdict=judge_at_most(middle, BAR) if theirs is None else Verdict.NO_BAR,
            ),
            Row(
                figure="    over clone(), torch's copy into fresh memory",
                ours=ratio(median(held.over_clone())),
                reference="" if theirs is None else ratio(median(theirs.over_clone())),
            ),
            Row(
                figure="    over a copy of the bytes that the rank writes",
                ours=ratio(None if middle is None else middle * held_bytes / written_bytes),
            ),
            Row(
                figure="    held, of which save() itself; a copy",
                ours=f"{seconds(median(held.held_s))}, {seconds(median(held.save_s))}; {seconds(median(held.copy_s))}",
                reference="" if theirs is None else seconds(median(theirs.held_s)),
            ),
        ]
    for how, name in (
        (DCP_ASYNC_KEPT, "async_save, stager kept"),
        (DCP_ASYNC_LOCAL, "async_save, rank-local"),
        (DCP, "dcp.save"),
    ):
        one = measured[how, _TOGETHER]
        rows.append(
            Row(
                figure=f"    {name}: over a copy of what is held",
                ours="",
                reference=f"{ratio(median(one.over_copy()))}, {seconds(median(one.held_s))}",
            )
        )
    notes = [
        f"each of 4 ranks holds {held_bytes / 1e6:.0f} MB and writes {written_bytes / 1e6:.0f} MB; held: save() plus what the "
        "optimizer's pre-step hook takes longer than without a save; the step changes every element at once, and the "
        "checkpoint has those from before it",
        "a copy: torch's copy_ of all tensors that the rank holds, one by one, into memory that was written to before, on one "
        "thread of torch as torchrun sets it; before or after the save in turn; the hook copies on up to 4 threads",
        f"ranks in turn, so that each has the cores for itself, as trainers have: with all of them on {os.cpu_count()} cores "
        "it is the scheduler that is measured; DCP's saves need all ranks at the same time, so ours is measured that way too, "
        "without a bar; DCP: until async_save returns",
        f"median of {num_repeats * NUM_RANKS} pairs, ratios {spread(measured[OURS, _AT_ONCE].over_copy())}, "
        f"{spread(measured[OURS, _AFTER_PASSES].over_copy())} and {spread(measured[OURS, _TOGETHER].over_copy())}",
    ]
    raw = {f"{how}, {when}": vars(held) for (how, when), held in measured.items()}
    return Section(name="held", title="Trainer held by a save", rows=rows, notes=notes, raw=raw)
