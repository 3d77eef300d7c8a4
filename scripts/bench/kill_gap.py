"""Kills groups at random moments and measures what that costs the survivors.

Bars: the median over kills of the longest gap between commits is at most 0.5 s, at 3 and at 5 groups; a survivor discards at
most 1 step. Each kill counts with its worst survivor. Where the survivors die, the job is started anew for the next kill.
"""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench import sides
from bench.job import Job, Plan, steps_of
from bench.processes import Child, ChildEndedError, Children, wait_until
from bench.stats import (
    KillOutcome,
    Verdict,
    first_contribution,
    judge_at_most,
    judge_kill,
    longest_gap,
    median,
    usual_step,
)
from bench.table import NOT_RUN, Row, Section, seconds

GAP_BAR_S = 0.5
DISCARDED_BAR = 1
_PAUSE_S = 0.03
_AFTER_KILL_S = 2.0
_GIVE_UP_S = 45.0
_JOIN_TIMEOUT_MS = {sides.OURS: 60_000, sides.REFERENCE: 100}
"""The default of each. torchft's survivors wait so long for the dead; ours know at once that they are dead."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kill:
    """One kill, and what followed."""

    victim: int
    outcome: KillOutcome
    step_s: float | None
    """Median distance between commits before the kill."""
    join_gap_s: float | None
    """Survivors' longest gap while the killed group came back; None where it did not."""
    errors: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return {
            "victim": self.victim,
            "gap_s": self.outcome.gap_s,
            "discarded": self.outcome.discarded,
            "survivors_died": self.outcome.survivors_died,
            "step_s": self.step_s,
            "join_gap_s": self.join_gap_s,
            "errors": list(self.errors),
        }


def _kill_once(job: Job, victim: int, spare: Child | None, delay_s: float) -> Kill:
    """Let the job run for a random time, kill one group, watch, and send the spare in its place."""
    time.sleep(delay_s)
    survivors = {group: child for group, child in job.groups.items() if group != victim}
    step_s = usual_step(steps_of(next(iter(survivors.values()))))
    killed_at = job.groups[victim].kill()

    def settled() -> bool | None:
        going_on = all(
            child.ended() or sum(s.committed and s.ended > killed_at for s in steps_of(child)) >= 10
            for child in survivors.values()
        )
        return True if going_on and time.monotonic() > killed_at + _AFTER_KILL_S else None

    with contextlib.suppress(TimeoutError):  # the silence up to now is the gap that is reported
        wait_until(settled, _GIVE_UP_S, "survivors commit again")
    end = time.monotonic()
    dead = [child for child in survivors.values() if child.ended()]
    alive = {child.name: steps_of(child) for child in survivors.values() if not child.ended()}
    outcome = judge_kill(alive, len(dead), killed_at, end)
    errors = tuple(event["error"] for child in dead for event in child.events("died"))
    join_gap_s = None
    if spare is not None and not dead:
        job.groups[victim] = spare
        spare.tell(go=True)
        job.wait_for_all_in()
        joined = first_contribution(steps_of(spare))
        if joined is not None:
            gaps = [
                longest_gap([s.ended for s in steps_of(child) if s.committed], end, joined.ended)
                for child in survivors.values()
            ]
            join_gap_s = max((gap for gap in gaps if gap is not None), default=None)
    return Kill(victim=victim, outcome=outcome, step_s=step_s, join_gap_s=join_gap_s, errors=errors)


def _run_kills(plan: Plan, num_kills: int, log_dir: Path, say: Callable[[str], None], broken: list[str]) -> list[Kill]:
    """Make a number of kills, in one job as long as its survivors live.

    What broke a job otherwise (it did not come together, a restarted group did not come back) is added to `broken`.
    """
    side, num_groups, seed = plan.side + (" by hand" if plan.by_hand else ""), plan.num_groups, plan.seed
    rng = random.Random(seed)
    kills: list[Kill] = []
    attempts = 0
    while len(kills) < num_kills and attempts < num_kills + 2:
        attempts += 1
        directory = log_dir / f"{side.replace(' ', '-')}-{num_groups}-job{attempts}"
        directory.mkdir(parents=True)
        with Children(directory) as children:
            try:
                job = Job(children, plan)
                job.start()
                while len(kills) < num_kills:
                    victim = rng.randrange(num_groups)
                    spare = None
                    if len(kills) + 1 < num_kills and not any(kill.outcome.survivors_died for kill in kills):
                        spare = job.prepare(victim)
                        spare.wait_for("ready", 90)
                    kill = _kill_once(job, victim, spare, rng.uniform(0.3, 1.0))
                    kills.append(kill)
                    say(f"{side}, {num_groups} groups, kill {len(kills)}: {kill.as_dict()}")
                    if spare is None or kill.outcome.survivors_died:
                        break
            except (ChildEndedError, TimeoutError) as error:
                say(f"{side}, {num_groups} groups: the job broke and is started anew: {error}")
                broken.append(f"{side}, {num_groups} groups: {str(error).splitlines()[0]}")
    return kills


def _text(kills: list[Kill], figure: Callable[[list[Kill]], str]) -> str:
    """Write a figure, or that survivors died, or that nothing was run."""
    if not kills:
        return NOT_RUN
    died = sum(kill.outcome.survivors_died for kill in kills)
    if died:
        happened = sum(kill.outcome.survivors_died > 0 for kill in kills)
        return f"survivors died ({died}, in {happened} of {len(kills)} kills)"
    return figure(kills)


def _gaps(kills: list[Kill]) -> str:
    gaps = [kill.outcome.gap_s for kill in kills if kill.outcome.gap_s is not None]
    return f"median {seconds(median(gaps))}, max {seconds(max(gaps, default=None))}"


def _discarded(kills: list[Kill]) -> str:
    return f"max {max(kill.outcome.discarded for kill in kills)}"


def _join_gaps(kills: list[Kill]) -> str:
    gaps = [kill.join_gap_s for kill in kills if kill.join_gap_s is not None]
    return f"median {seconds(median(gaps))}, max {seconds(max(gaps))}" if gaps else NOT_RUN


def _step(kills: list[Kill]) -> str:
    return seconds(median([kill.step_s for kill in kills if kill.step_s is not None]))


def _by_hand_rows(by_hand: list[Kill], figure: Callable[[list[Kill]], str]) -> list[Row]:
    name = "    torchft reducing by hand, without its DDP"
    return [Row(figure=name, ours="", reference=_text(by_hand, figure))] if by_hand else []


def _rows(num_groups: int, ours: list[Kill], theirs: list[Kill], by_hand: list[Kill], has_broken: bool) -> list[Row]:
    has_failed = has_broken or any(kill.outcome.survivors_died for kill in ours)
    gap_s = median([kill.outcome.gap_s for kill in ours if kill.outcome.gap_s is not None])
    worst = max((kill.outcome.discarded for kill in ours), default=None)
    name = f"  {num_groups} groups: "
    return [
        Row(
            figure=f"{name}survivors' longest gap after a kill ({len(ours)} kills)",
            ours=_text(ours, _gaps),
            reference=_text(theirs, _gaps),
            bar=f"median <= {GAP_BAR_S} s",
            verdict=Verdict.MISSED if has_failed else judge_at_most(gap_s, GAP_BAR_S),
        ),
        *_by_hand_rows(by_hand, _gaps),
        Row(
            figure=f"{name}steps discarded by a survivor",
            ours=_text(ours, _discarded),
            reference=_text(theirs, _discarded),
            bar=f"max <= {DISCARDED_BAR}",
            verdict=Verdict.MISSED if has_failed else judge_at_most(worst, DISCARDED_BAR),
        ),
        *_by_hand_rows(by_hand, _discarded),
        Row(
            figure=f"{name}survivors' longest gap while it comes back",
            ours=_text(ours, _join_gaps),
            reference=_text(by_hand, _join_gaps) + (" (by hand)" if by_hand else ""),
        ),
        Row(figure=f"{name}a step with nothing failing", ours=_text(ours, _step), reference=_step(theirs)),
    ]


def run(*, quick: bool, seed: int, log_dir: Path, say: Callable[[str], None]) -> Section:
    """Run all kills of both libraries and judge them."""
    rows: list[Row] = []
    raw: dict[str, Any] = {}
    broken: list[str] = []
    for num_groups in (3, 5):
        num_kills = {3: 3, 5: 2}[num_groups] if quick else {3: 7, 5: 6}[num_groups]
        theirs: list[Kill] = []
        by_hand: list[Kill] = []

        def plan(side: str, by_hand: bool = False, groups: int = num_groups) -> Plan:
            return Plan(
                side=side,
                num_groups=groups,
                task="small",
                seed=seed,
                pause_s=_PAUSE_S,
                num_spares=8,
                by_hand=by_hand,
                join_timeout_ms=_JOIN_TIMEOUT_MS[side],
            )

        our_broken: list[str] = []
        ours = _run_kills(plan(sides.OURS), num_kills, log_dir, say, our_broken)
        broken += our_broken
        if sides.is_installed(sides.REFERENCE) and not (quick and num_groups > 3):
            theirs = _run_kills(plan(sides.REFERENCE), 1 if quick else 2, log_dir, say, broken)
            if not quick:
                by_hand = _run_kills(plan(sides.REFERENCE, by_hand=True), 3, log_dir, say, broken)
        rows += _rows(num_groups, ours, theirs, by_hand, bool(our_broken))
        raw[f"{num_groups}_groups"] = {
            sides.OURS: [kill.as_dict() for kill in ours],
            sides.REFERENCE: [kill.as_dict() for kill in theirs],
            f"{sides.REFERENCE}_by_hand": [kill.as_dict() for kill in by_hand],
        }
    errors = sorted({e.split(":")[0] for value in raw.values() for k in value[sides.REFERENCE] for e in k["errors"]})
    raw["broken"] = broken
    notes = [
        f"0.4 M parameters; each forward pass idles {_PAUSE_S * 1000:.0f} ms, a stand-in for an accelerator's work",
        "each kill counts with its worst survivor; both libraries' collectives time out after 10 s",
        "the lighthouse's join timeout is each library's default: ours 60 s, torchft's 100 ms, which favours it here",
    ]
    if errors:
        notes.append(f"torchft's survivors ended with: {', '.join(errors)}")
    notes += [f"a job broke: {line}" for line in broken]
    return Section(name="kill_gap", title="What a SIGKILL costs the survivors", rows=rows, notes=notes, raw=raw)
