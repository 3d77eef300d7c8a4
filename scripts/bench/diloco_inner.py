"""Measures what DiLoCo costs an inner step that exchanges nothing.

Bar: 1.02x of the same step without it, twice.

- *In a process of its own*: two jobs of as many groups live at once, one with DiLoCo and one that only trains, in processes with
  torch's Gloo group connected as any data-parallel script has it. They take turns of one round (ABBA ...), so that
  whatever else the machine does falls on both. The one whose turn it is not is stopped by SIGSTOP, heartbeats and all: what the
  manager's threads cost is in the turns of the first alone. Every core is busy training, so what they use is missing there.
- *Beside a twin*: a second model in the same process that knows nothing of DiLoCo, step by step in turn with the first. This is
  what DiLoCo does in the step itself, and fine enough to tell a thousandth.

Figures are medians over pairs. Steps that begin or end a transfer are left out, and those beside one have a row of their own.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence

from diloco.options import Options

from bench import sides
from bench.diloco_figures import Kind, kind_of
from bench.diloco_jobs import DEMO_GPT, arguments_of, options_of
from bench.processes import Child, Children
from bench.run import Run
from bench.stats import judge_at_most, median, pair_ratios
from bench.table import Row, Section, ratio, seconds

NAME = "inner"
TITLE = "An inner step with DiLoCo over one without, outside of sync steps"
BAR = 1.02
_NUM_COLD = 1
"""Steps at the beginning of a turn that are left out: another process had the caches."""
Taken = tuple[float, float, float]
"""A step as the worker reports it: seconds, processor seconds, the twin's seconds."""


def measure(run: Run) -> Section:
    """Let both jobs take turns, then one with twins, and judge the medians of the pairs."""
    arguments = arguments_of(
        groups=2, **DEMO_GPT, batch_size=12, sync_every=20, fragments=2, delay=2, alpha=0.5, seed=run.seed, kills=0
    )
    options = options_of(arguments)
    num_turns = run.num_repeats(100, 16)
    with_it, without = _in_turns(run, arguments, num_turns)
    twins = _beside_twins(run, arguments, num_turns // 2)

    def over(kind: Kind, column: int) -> float | None:
        plain = [_median_of(turn, options, Kind.PLAIN, column) for turn in without]
        return median(pair_ratios([_median_of(turn, options, kind, column) for turn in with_it], plain))

    own = over(Kind.PLAIN, 0)
    beside = median(
        [step[0] / step[2] for turn in twins for steps in turn for step in _of_kind(steps, options, Kind.PLAIN)]
    )
    plain_s = median([_median_of(turn, options, Kind.PLAIN, 0) for turn in without])
    rows = [
        Row(figure="  in a process of its own", ours=ratio(own), bar=f"<= {BAR}x", verdict=judge_at_most(own, BAR)),
        Row(
            figure="  beside a twin in its process",
            ours=ratio(beside),
            bar=f"<= {BAR}x",
            verdict=judge_at_most(beside, BAR),
        ),
        Row(figure="    in a process of its own, processor time of all threads", ours=ratio(over(Kind.PLAIN, 1))),
        Row(figure="    in a process of its own, while a transfer is under way", ours=ratio(over(Kind.BESIDE, 0))),
        Row(figure="    an inner step without DiLoCo", ours=seconds(plain_s)),
    ]
    notes = [
        f"{options.groups} groups of one thread on {os.cpu_count()} cores, the demo's GPT of width {options.width}, loopback; "
        f"rounds of {options.period} inner steps, delay {options.delay}; medians over {num_turns} pairs of rounds",
        "a transfer takes processor time, here from the cores that train: only links are slow where nothing else is",
    ]
    raw = {"with": with_it, "without": without, "twins": twins}
    return Section(name=NAME, title=TITLE, rows=rows, notes=notes, raw=raw)


def _in_turns(run: Run, arguments: Sequence[str], num_turns: int) -> tuple[list[list[list[Taken]]], ...]:
    """Return the steps of each turn and group, with DiLoCo and without."""
    period = options_of(arguments).period
    turns: dict[str, list[list[list[Taken]]]] = {"on": [], "off": []}
    with Children(run.log_dir) as children:
        jobs = {
            "on": _start(run, children, arguments, _start_lighthouse(children)),
            "off": _start(run, children, arguments, ""),
        }
        for groups in jobs.values():
            _pause(groups)
        for turn in range(num_turns + 1):
            for name in ["on", "off"] if turn % 2 else ["off", "on"]:
                taken = _take_turn(jobs[name], turn, (turn + 1) * period)
                _pause(jobs[name])
                if turn:  # in the first memory is allocated
                    turns[name].append(taken)
            run.say(f"turn {turn} of {num_turns}")
    return turns["on"], turns["off"]


def _beside_twins(run: Run, arguments: Sequence[str], num_turns: int) -> list[list[list[Taken]]]:
    """Return the steps of each turn and group of a job whose groups have twins."""
    period = options_of(arguments).period
    with Children(run.log_dir) as children:
        groups = _start(run, children, arguments, _start_lighthouse(children), has_twin=True)
        return [_take_turn(groups, turn, (turn + 1) * period) for turn in range(num_turns + 1)][1:]


def _start_lighthouse(children: Children) -> str:
    settings = {"min_replicas": 2, "join_timeout_ms": 60_000, "heartbeat_timeout_ms": 30_000}
    lighthouse = children.start("bench.lighthouse_worker", {"side": sides.OURS, "settings": settings}, "lighthouse")
    return str(lighthouse.wait_for("address", 60)["address"])


def _start(
    run: Run, children: Children, arguments: Sequence[str], lighthouse: str, has_twin: bool = False
) -> list[Child]:
    rendezvous = run.log_dir / "rendezvous"
    rendezvous.unlink(missing_ok=True)
    groups = []
    for group in range(options_of(arguments).groups):
        settings = {
            "group": group,
            "arguments": arguments,
            "lighthouse": lighthouse,
            "has_twin": has_twin,
            "init_method": f"file://{rendezvous.resolve()}",
        }
        groups.append(children.start("bench.diloco_worker", settings, f"{'on' if lighthouse else 'off'}-{group}"))
    for child in groups:
        child.wait_for("ready", 90)
    for child in groups:
        child.tell(go=True)
    for child in groups:
        child.wait_for("entered", 60)
    return groups


def _take_turn(groups: Sequence[Child], number: int, until: int) -> list[list[Taken]]:
    """Let a job take its steps up to one; return each group's."""
    for child in groups:
        os.kill(child.pid, signal.SIGCONT)
        child.tell(until=until)
    return [child.wait_for("turn", 60, count=number + 1)["steps"] for child in groups]


def _pause(groups: Sequence[Child]) -> None:
    for child in groups:
        os.kill(child.pid, signal.SIGSTOP)


def _of_kind(steps: Sequence[Taken], options: Options, kind: Kind) -> list[Taken]:
    """Return the steps of a turn, which is one round, that do this."""
    return [
        step
        for position, step in enumerate(steps, start=1)
        if position > _NUM_COLD and kind_of(position, options.period, options.delay) is kind
    ]


def _median_of(turn: Sequence[Sequence[Taken]], options: Options, kind: Kind, column: int) -> float:
    """Return the median over all groups of one column of a turn."""
    return median([step[column] for steps in turn for step in _of_kind(steps, options, kind)]) or 0.0
