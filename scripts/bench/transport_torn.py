"""Counts the states that arrive torn while the source's trainer steps flat out, each step writing every parameter.

After step n every element is n: a state that arrived is right where all its elements are the step that was asked for.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from bench import sides
from bench.stats import judge_at_most, median
from bench.table import Row, Section
from bench.transport_peer import CommandFailedError, Peer
from bench.transport_run import Run, pair
from bench.transport_states import SHAPES
from bench.transport_trainer import BY_DISALLOW, BY_HOOK, BY_NOTHING

_REFERENCE_CHUNKS = 4
_MOST_AHEAD = 40


@dataclass(slots=True)
class _Count:
    torn: int = 0
    other_step: int = 0
    failed: int = 0
    good: int = 0
    steps_meanwhile: list[float] = field(default_factory=list)

    @property
    def wrong(self) -> int:
        return self.torn + self.other_step


def _once(source: Peer, receiver: Peer, ahead: int, count: _Count) -> None:
    served = source.ask("serve", ahead=ahead)
    try:
        receiver.ask("receive", sources=[source.metadata], step=served["step"])
    except CommandFailedError:
        count.failed += 1
        return
    steps = source.ask("steps")["steps"]
    values = receiver.ask("values")["values"]
    count.steps_meanwhile.append(max(steps - served["step"], 0))
    if len(values) > 1:
        count.torn += 1
    elif values != [served["step"]]:
        count.other_step += 1
    else:
        count.good += 1


def _count(run: Run, side: str, guard: str, num_transfers: int) -> _Count:
    """Let one pair of processes transfer so often; each second time the receiver asks before the step is there (ours)."""
    count = _Count()
    moments = random.Random(run.seed)
    with pair(run, f"{side}-{guard}", SHAPES["torn"], side, _REFERENCE_CHUNKS) as (source, receiver):
        source.ask("train", guard=guard)
        for number in range(num_transfers):
            is_early = side == sides.OURS and number % 2 == 1
            _once(source, receiver, moments.randint(5, _MOST_AHEAD) if is_early else 0, count)
        source.ask("rest")
    run.say(f"{side} by {guard}: {count}")
    return count


def measure(run: Run) -> Section:
    """Drive ours both ways that protect a state, and the reference both as its Manager does and without."""
    num_transfers = run.repeat or (40 if run.quick else 200)
    guards = (BY_DISALLOW, BY_HOOK)
    ours = {guard: _count(run, sides.OURS, guard, num_transfers) for guard in guards}
    theirs = None
    if sides.is_installed(sides.REFERENCE):
        theirs = _count(run, sides.REFERENCE, BY_NOTHING, max(num_transfers // 4, 1))
    names = {BY_DISALLOW: "disallow_checkpoint before each step", BY_HOOK: "the optimizer's hooks around each step"}
    rows = [
        Row(
            figure=f"  torn or of another step, {names[guard]}",
            ours=f"{count.wrong} of {num_transfers}",
            reference="see the notes" if guard == BY_DISALLOW else _of(theirs),
            bar="0",
            verdict=judge_at_most(count.wrong + count.failed, 0),
        )
        for guard, count in ours.items()
    ]
    rows.append(
        Row(
            figure="    transfers that failed",
            ours=str(sum(count.failed for count in ours.values())),
            reference="not run" if theirs is None else str(theirs.failed),
        )
    )
    meanwhile = median([steps for count in ours.values() for steps in count.steps_meanwhile])
    notes = [
        f"{SHAPES['torn'][0]} tensors of 1 MiB; the trainer serves at a step boundary and steps on at once, "
        f"{meanwhile:.0f} steps until the receiver has it (median); every other receiver asks before the step is reached",
        "torchft beside the hooks: a loop whose inner steps write the parameters with no disallow_checkpoint in between "
        "(it has no hooks; its receivers get live CPU tensors); "
        f"{0 if theirs is None else median(theirs.steps_meanwhile) or 0:.0f} steps meanwhile",
        "torchft's own Manager calls disallow_checkpoint after an allreduce that waits until the receiver has loaded: then "
        "nothing tears, and the trainer is held for the whole transfer instead (see the figure `held`)",
    ]
    raw = {guard: _plain(count) for guard, count in ours.items()}
    raw["torchft"] = {} if theirs is None else _plain(theirs)
    title = "Torn states with a trainer stepping flat out"
    return Section(name="torn", title=title, rows=rows, notes=notes, raw=raw)


def _of(count: _Count | None) -> str:
    return "not run" if count is None else f"{count.wrong} of {count.wrong + count.good} received"


def _plain(count: _Count) -> dict[str, object]:
    return {"torn": count.torn, "other_step": count.other_step, "failed": count.failed, "good": count.good}
