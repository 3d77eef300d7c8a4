"""Measures how long a group takes from `Manager(...)` to its first contributed step, with 100 MB of parameters.

Bar: 1 s. Two models of the same size: one is trained whole, so that each step reduces 100 MB, which on few cores takes
longer than the recovery itself; of the other only a part is trained, so that what is seen is the recovery. The first is
measured in both modes: with `use_async_quorum` a group heals beside a step to which it adds nothing, without it heals
before the step that it contributes to, and the others wait for it.

How fast a large state comes through a Manager is measured with 1 GiB that is all different in the joiner, with few and short
steps beside it.

Ours is killed with SIGKILL and started again in a running job. torchft's survivors do not live through that, so its third
group joins two that train: the same situation for whoever joins. Both take turns in fresh jobs.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench import sides
from bench.job import Job, Plan, steps_of
from bench.processes import Child, ChildEndedError, Children, wait_until
from bench.stats import Verdict, first_contribution, judge_at_most, longest_gap, median, usual_step
from bench.table import NOT_RUN, Row, Section, ratio, seconds
from bench.transport_figures import judge_at_least

BAR_S = 1.0
_NUM_GROUPS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Rejoin:
    """One way back into the job, in seconds."""

    total_s: float
    """From the first line after `Manager(...)` to the commit of the first contributed step."""
    waiting_s: float
    """Until the transfer of the state began: connecting, and waiting for the others' step to end."""
    transfer_s: float
    steps_s: float
    """From the end of the transfer to that commit."""
    num_steps: int
    """Steps that it went through, the contributed one included."""
    survivors_gap_s: float | None
    """Longest distance between commits of a survivor meanwhile."""
    step_s: float | None
    """Median distance between commits of the survivors before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """What is measured, in how many jobs."""

    name: str
    title: str
    task: str
    num_jobs: int
    use_async_quorum: bool = True
    bar_s: float | None = BAR_S
    bar_of_transfer: float | None = None
    """Times torchft's speed."""
    own_weights: bool = False
    """The joiner begins with other weights, so that nothing of the state is there already."""
    pause_s: float = 0.0


_CASES = (
    Case(name="100mb", title="100 MB, all trained", task="100mb", num_jobs=3),
    Case(
        name="100mb_sync",
        title="100 MB, all trained, use_async_quorum=False",
        task="100mb",
        num_jobs=2,
        use_async_quorum=False,
    ),
    Case(name="100mb_frozen", title="100 MB, 4 MB trained", task="100mb_frozen", num_jobs=2),
    *(
        Case(
            name=f"1gib{'' if use_async_quorum else '_sync'}",
            title=f"1 GiB, 4 MB trained{'' if use_async_quorum else ', use_async_quorum=False'}",
            task="1gib_frozen",
            num_jobs=3,
            use_async_quorum=use_async_quorum,
            bar_s=None,
            bar_of_transfer=1.5,
            own_weights=True,
            pause_s=0.1,
        )
        for use_async_quorum in (True, False)
    ),
)


def _measure(job: Job, joiner: Child, group: int, timeout_s: float = 60) -> Rejoin:
    others = list(job.groups.values())
    step_s = usual_step(steps_of(others[0]), num_latest=10)
    job.groups[group] = joiner
    joiner.tell(go=True)
    ready_at = joiner.wait_for("manager_ready", timeout_s)["t"]

    def contributed() -> float | None:
        step = first_contribution(steps_of(joiner))
        if step is None:
            joiner.require_alive("it is to contribute")
        return None if step is None else step.ended

    ended_at = wait_until(contributed, timeout_s, "the joiner contributes")
    started = [e["t"] for e in joiner.events("transfer_started") if e["t"] < ended_at]
    ended = [e["t"] for e in joiner.events("transfer_ended") if e["t"] < ended_at]
    first, last = (started[0], ended[-1]) if started and ended else (ended_at, ended_at)
    gaps = [longest_gap([s.ended for s in steps_of(o) if s.committed], ready_at, ended_at) for o in others]
    return Rejoin(
        total_s=ended_at - ready_at,
        waiting_s=first - ready_at,
        transfer_s=last - first,
        steps_s=ended_at - last,
        num_steps=sum(step.ended <= ended_at for step in steps_of(joiner)),
        survivors_gap_s=max((gap for gap in gaps if gap is not None), default=None),
        step_s=step_s,
    )


def _wait_for_commits(job: Job, number: int, timeout_s: float = 45) -> None:
    since = time.monotonic()

    def enough() -> bool | None:
        done = [sum(s.committed and s.ended > since for s in steps_of(child)) for child in job.groups.values()]
        return True if min(done) >= number else None

    wait_until(enough, timeout_s, f"{number} commits")


def _run_job(
    side: str, case: Case, number: int, seed: int, directory: Path, say: Callable[[str], None], broken: list[str]
) -> list[Rejoin]:
    """Let groups come into one job; what keeps one from that is added to `broken`."""
    directory.mkdir(parents=True)
    plan = Plan(
        side=side,
        num_groups=_NUM_GROUPS,
        task=case.task,
        seed=seed,
        num_spares=number,
        use_async_quorum=case.use_async_quorum,
        pause_s=case.pause_s,
    )
    rejoins: list[Rejoin] = []
    with Children(directory) as children:
        try:
            job = Job(children, plan)
            job.start(_NUM_GROUPS if side == sides.OURS else _NUM_GROUPS - 1)
            for turn in range(number):
                group = _NUM_GROUPS - 1 - turn % 2 if side == sides.OURS else _NUM_GROUPS - 1
                joiner = job.prepare(group, seed=seed + 1000 * (turn + 1) if case.own_weights else None)
                joiner.wait_for("ready", 90)
                if side == sides.OURS:
                    job.groups.pop(group).kill()
                    _wait_for_commits(job, 5)
                rejoins.append(_measure(job, joiner, group))
                say(f"{side}, {case.name}: {rejoins[-1]}")
                job.wait_for_all_in()
        except (ChildEndedError, TimeoutError) as error:
            say(f"{side}: the job broke: {error}")
            broken.append(f"{side}, {case.name}: {str(error).splitlines()[0]}")
    return rejoins


def _column(rejoins: list[Rejoin], name: str) -> str:
    values = [getattr(rejoin, name) for rejoin in rejoins if getattr(rejoin, name) is not None]
    return seconds(median(values)) if values else NOT_RUN


def _rows(case: Case, ours: list[Rejoin], theirs: list[Rejoin], has_broken: bool) -> list[Row]:
    total_s = median([rejoin.total_s for rejoin in ours])
    verdict = Verdict.NO_BAR if case.bar_s is None else judge_at_most(total_s, case.bar_s)

    def spread(rejoins: list[Rejoin]) -> str:
        if not rejoins:
            return NOT_RUN
        return f"median {_column(rejoins, 'total_s')}, max {seconds(max(r.total_s for r in rejoins))}"

    rows = [
        Row(
            figure=f"  {case.title}: Manager(...) to first contributed step ({len(ours)} rejoins)",
            ours=spread(ours),
            reference=spread(theirs),
            bar="" if case.bar_s is None else f"median <= {case.bar_s:.0f} s",
            verdict=Verdict.MISSED if has_broken else verdict,
        )
    ]
    if case.bar_of_transfer is not None:
        ours_s, theirs_s = (median([r.transfer_s for r in side]) for side in (ours, theirs))
        gain = None if ours_s is None or theirs_s is None else theirs_s / ours_s
        rows.append(
            Row(
                figure="    speed of the transfer, times torchft's",
                ours=ratio(gain),
                bar=f">= {case.bar_of_transfer:.1f}x",
                verdict=judge_at_least(gain, case.bar_of_transfer),
            )
        )
    parts = {
        "waiting_s": "of it waiting, for the others' step and in set-up",
        "transfer_s": "of it transfer",
        "steps_s": "of it steps, after the transfer",
        "survivors_gap_s": "survivors' longest gap meanwhile",
        "step_s": "a step of the survivors before",
    }
    rows += [
        Row(figure=f"    {text}", ours=_column(ours, name), reference=_column(theirs, name))
        for name, text in parts.items()
    ]
    steps = [str(max((r.num_steps for r in side), default=NOT_RUN)) for side in (ours, theirs)]
    rows.append(
        Row(figure="    most steps gone through, the contributed one included", ours=steps[0], reference=steps[1])
    )
    return rows


def run(*, quick: bool, seed: int, log_dir: Path, say: Callable[[str], None]) -> Section:
    """Let groups of both libraries come (back) into a running job, in turns, and judge ours."""
    rows: list[Row] = []
    raw: dict[str, Any] = {}
    broken: list[str] = []
    for case in _CASES:
        ours: list[Rejoin] = []
        theirs: list[Rejoin] = []
        our_broken: list[str] = []
        for turn in range(1 if quick else case.num_jobs):
            for side, number, rejoins, failures in (
                (sides.OURS, 2, ours, our_broken),
                (sides.REFERENCE, 1, theirs, broken),
            ):
                if sides.is_installed(side):
                    directory = log_dir / f"{side}-{case.name}-{turn}"
                    rejoins += _run_job(side, case, number, seed + turn, directory, say, failures)
        broken += our_broken
        rows += _rows(case, ours, theirs, bool(our_broken))
        raw[case.name] = {
            sides.OURS: [asdict(rejoin) for rejoin in ours],
            sides.REFERENCE: [asdict(rejoin) for rejoin in theirs],
        }
    notes = [
        "25.2 M fp32 parameters in 48 tensors, SGD, three groups of one thread",
        "ours: SIGKILL and restart; torchft: a third group joins two, since its survivors die of a SIGKILL",
        "the lighthouse's join timeout is 60 s for both: with torchft's default of 100 ms its job may never settle",
    ]
    notes += [f"a job broke: {line}" for line in broken]
    raw["broken"] = broken
    return Section(
        name="rejoin", title="How long a restarted group takes to contribute", rows=rows, notes=notes, raw=raw
    )
