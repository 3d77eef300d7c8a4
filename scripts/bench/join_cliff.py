"""Lets groups come into a running job whose state takes much longer to receive than a step.

Bars, with T0 the time of the transfer, tau a step, and T0 = 3 (tau + 5 s): the group is in at its first attempt, the others stand
still at most 1.1 (T0 - tau), once, and discard nothing. Five groups whose states would take longer than `join_stall_limit`
cost the others at most 1 % of their time.

What the groups give of their states is bounded, their collectives are not: as where a state comes by another network than the
gradients.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from bench import sides
from bench.job import Job, Plan, steps_of
from bench.processes import Child, Children, wait_until
from bench.stats import Step, Verdict, count_within, first_contribution, judge_at_most, median, usual_step
from bench.table import Row, Section, ratio, seconds

STALL_BAR = 1.2
STALL_MORE_S = 0.1
HOPELESS_BAR = 0.01
_STATE_BYTES = 100.8e6
_LONG_STATE_STEPS = 15
_PAUSE_S = 1.0
_NUM_GROUPS = 2
_NUM_HOPELESS = 5
_LONG_S = 600.0
_STOOD_STILL = 1.3
"""A step that takes so many times the usual one stood still."""


def _gaps(steps: Sequence[Step], start: float, end: float) -> list[float]:
    commits = [step.ended for step in steps if step.committed and start <= step.ended <= end]
    return [after - before for before, after in pairwise(commits)]


def _stood_still_s(steps: Sequence[Step], start: float, end: float, usual_s: float) -> list[float]:
    """Return how much longer each step took that took much longer than usual."""
    return [gap - usual_s for gap in _gaps(steps, start, end) if gap > _STOOD_STILL * usual_s]


def _plan(seed: int, serve_bytes_per_s: float, **settings: Any) -> Plan:
    return Plan(
        side=sides.OURS,
        num_groups=_NUM_GROUPS,
        task="100mb",
        seed=seed,
        pause_s=_PAUSE_S,
        serve_bytes_per_s=serve_bytes_per_s,
        settings=settings,
        log_level="INFO",
    )


def _slow_join(seed: int, directory: Path, say: Callable[[str], None]) -> tuple[list[Row], dict[str, Any]]:
    transfer_s = _LONG_STATE_STEPS * (_PAUSE_S + 0.1)
    with Children(directory) as children:
        job = Job(children, _plan(seed, _STATE_BYTES / transfer_s / _NUM_GROUPS))
        job.start()
        joiner = job.prepare(_NUM_GROUPS, seed=seed + 1)  # nothing of the state is here already
        joiner.wait_for("ready", 90)
        wait_until(lambda: all(len(steps_of(child)) > 12 for child in job.groups.values()) or None, 60, "steps")
        survivors = list(job.groups.values())
        step_s = usual_step(steps_of(survivors[0]), num_latest=10) or 0.0
        began = time.monotonic()
        joiner.tell(go=True)

        def contributed() -> float | None:
            step = first_contribution(steps_of(joiner))
            if step is None:
                joiner.require_alive("it is to contribute")
            return None if step is None else step.ended

        ended = wait_until(contributed, 120, "the slow joiner contributes")
        time.sleep(2)
        transfers = (
            [e["t"] for e in joiner.events("transfer_started")],
            [e["t"] for e in joiner.events("transfer_ended")],
        )
    first_s = transfers[1][0] - transfers[0][0]
    # Its first iteration, which it computes alone, is none: an attempt begins with a transfer.
    in_at = next((step.ended for step in steps_of(joiner) if step.committed), ended)
    attempts = sum(started < in_at for started in transfers[0])
    stalls = max((_stood_still_s(steps_of(s), began, ended, step_s) for s in survivors), key=sum)
    discarded = max(count_within([s.ended for s in steps_of(c) if not s.committed], began, ended) for c in survivors)
    bar_s = STALL_BAR * first_s + STALL_MORE_S
    say(f"transfer {first_s:.1f} s, step {step_s:.2f} s, stood still {stalls}, discarded {discarded}")
    rows = [
        Row(
            figure=f"  a transfer of {seconds(first_s)}, a step {seconds(step_s)}: the others stand still, in all",
            ours=seconds(sum(stalls)),
            bar=f"<= {seconds(bar_s)}",
            verdict=judge_at_most(sum(stalls), bar_s),
        ),
        Row(
            figure="    times that they do so",
            ours=str(len([s for s in stalls if s > 1.0])),
            bar="<= 1",
            verdict=judge_at_most(float(len([s for s in stalls if s > 1.0])), 1.0),
        ),
        Row(
            figure="    steps that they discard",
            ours=str(discarded),
            bar="0",
            verdict=judge_at_most(float(discarded), 0.0),
        ),
        Row(
            figure="    attempts of the joiner until it is in",
            ours=str(attempts),
            bar="1",
            verdict=judge_at_most(float(attempts), 1.0),
        ),
        Row(figure="    from its start to its first contributed step", ours=seconds(ended - began)),
    ]
    raw = {"transfers": transfers, "stalls_s": stalls, "discarded": discarded, "step_s": step_s}
    return rows, raw


def _hopeless(
    seed: int, directory: Path, duration_s: float, say: Callable[[str], None]
) -> tuple[list[Row], dict[str, Any]]:
    with Children(directory) as children:
        job = Job(children, _plan(seed, _STATE_BYTES / 600, join_stall_limit_s=60.0))
        job.start()
        joiners: list[Child] = [job.prepare(_NUM_GROUPS + number, seed=seed + 1) for number in range(_NUM_HOPELESS)]
        for joiner in joiners:
            joiner.wait_for("ready", 120)
        wait_until(lambda: all(len(steps_of(child)) > 14 for child in job.groups.values()) or None, 60, "steps")
        survivors = list(job.groups.values())
        step_s = usual_step(steps_of(survivors[0]), num_latest=10) or 0.0
        began = time.monotonic()
        for joiner in joiners:
            joiner.tell(go=True)
            time.sleep(1)
        time.sleep(duration_s)
        ended = time.monotonic()
        stalls = max((_stood_still_s(steps_of(s), began, ended, step_s) for s in survivors), key=sum)
        gaps = _gaps(steps_of(survivors[0]), began, ended)
        discarded = max(
            count_within([s.ended for s in steps_of(c) if not s.committed], began, ended) for c in survivors
        )
    share = sum(stalls) / (ended - began)
    say(f"stood still {stalls}, median step {median(gaps)} before {step_s}, discarded {discarded}")
    rows = [
        Row(
            figure=f"  {_NUM_HOPELESS} groups beyond join_stall_limit, {ended - began:.0f} s: share of the others' time",
            ours=ratio(share),
            bar=f"<= {HOPELESS_BAR:.0%} of 10 min",
            verdict=judge_at_most(share, HOPELESS_BAR) if duration_s >= _LONG_S else Verdict.NOT_RUN,
        ),
        Row(figure="    steps that the others discard", ours=str(discarded)),
        Row(figure=f"    their median step (before {seconds(step_s)})", ours=seconds(median(gaps))),
    ]
    return rows, {"stalls_s": stalls, "gaps_s": gaps, "discarded": discarded}


def run(*, quick: bool, seed: int, log_dir: Path, say: Callable[[str], None]) -> Section:
    """Let one slow group join, then five that never can; judge what that costs the others."""
    for name in ("slow", "hopeless"):
        (log_dir / name).mkdir(parents=True)
    slow_rows, slow = _slow_join(seed, log_dir / "slow", say)
    hopeless_rows, hopeless = _hopeless(seed, log_dir / "hopeless", 60.0 if quick else _LONG_S, say)
    notes = [
        f"{_NUM_GROUPS} groups of one thread, 100.8 MB of state, all trained, SGD; a step waits {_PAUSE_S:g} s",
        f"a step that takes {_STOOD_STILL}x the usual one counts as standing still, for all that is beyond the usual one",
    ]
    return Section(
        name="join_cliff",
        title="What groups cost whose state takes long to receive",
        rows=slow_rows + hopeless_rows,
        notes=notes,
        raw={"slow": slow, "hopeless": hopeless},
    )
