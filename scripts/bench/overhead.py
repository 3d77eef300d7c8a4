"""Measures what a step costs with nothing failing, against plain DDP on Gloo and against torchft.

Bars: at most 1.15x plain DDP, and not above torchft. All jobs live at once and take turns (ABCABC ...), so that whatever else
the machine does falls on all of them; figures are medians over pairs of neighbouring turns.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench import sides
from bench.job import Job, Plan
from bench.processes import Children
from bench.stats import judge_at_most, median, pair_ratios
from bench.table import Row, Section, ratio, seconds

PLAIN_BAR = 1.15
TORCHFT_BAR = 1.0
_NUM_GROUPS = 3
_STEPS_A_TURN = 8


def take_turn(job: Job, target: int) -> tuple[float, float]:
    """Let one job train up to a step; return seconds a step, and processor seconds a step of all its groups together."""
    seen = {group: len(child.events("step")) for group, child in job.groups.items()}
    for child in job.groups.values():
        child.tell(until=target)
    walls: list[float] = []
    cpu_s = 0.0
    for group, child in job.groups.items():
        while True:
            steps = child.events("step")[seen[group] :]
            if steps and steps[-1]["step"] >= target:
                break
            child.wait_for("step", 60, count=seen[group] + len(steps) + 1)
        walls.append((steps[-1]["t"] - steps[0]["t"]) / (len(steps) - 1))
        cpu_s += (steps[-1]["cpu_s"] - steps[0]["cpu_s"]) / (len(steps) - 1)
    return sum(walls) / len(walls), cpu_s


def run(*, quick: bool, seed: int, log_dir: Path, say: Callable[[str], None]) -> Section:
    """Let plain DDP and both libraries take turns, and judge the medians of the pairs."""
    names = [sides.PLAIN, sides.OURS]
    if sides.is_installed(sides.REFERENCE):
        names.append(sides.REFERENCE)
    num_turns = 6 if quick else 20
    walls: dict[str, list[float]] = {name: [] for name in names}
    cpus: dict[str, list[float]] = {name: [] for name in names}
    with Children(log_dir) as children:
        jobs: dict[str, Job] = {}
        targets: dict[str, int] = {}
        for name in names:
            plan = Plan(side=name, num_groups=_NUM_GROUPS, task="transformer", seed=seed)
            jobs[name] = Job(children, plan)
            jobs[name].start(log_dir=log_dir)
            # A step that none of its groups has reached yet: there they all stop, until it is their turn.
            targets[name] = max(c.events("step")[-1]["step"] for c in jobs[name].groups.values()) + _STEPS_A_TURN
            take_turn(jobs[name], targets[name])
        for turn in range(-1, num_turns):
            for name in names:
                targets[name] += _STEPS_A_TURN
                wall_s, cpu_s = take_turn(jobs[name], targets[name])
                if turn >= 0:
                    walls[name].append(wall_s)
                    cpus[name].append(cpu_s)
            if turn >= 0:
                say(f"turn {turn}: " + ", ".join(f"{name} {walls[name][-1] * 1000:.1f} ms" for name in names))
    to_plain = {name: median(pair_ratios(walls[name], walls[sides.PLAIN])) for name in names}
    to_torchft = median(pair_ratios(walls[sides.OURS], walls[sides.REFERENCE])) if sides.REFERENCE in names else None
    rows = [
        Row(
            figure="  a step over plain DDP on Gloo",
            ours=ratio(to_plain[sides.OURS]),
            reference=ratio(to_plain.get(sides.REFERENCE)),
            bar=f"<= {PLAIN_BAR}x",
            verdict=judge_at_most(to_plain[sides.OURS], PLAIN_BAR),
        ),
        Row(
            figure="  a step over torchft's",
            ours=ratio(to_torchft),
            bar=f"<= {TORCHFT_BAR:.0f}x",
            verdict=judge_at_most(to_torchft, TORCHFT_BAR),
        ),
        Row(
            figure=f"    a step, wall time (plain DDP {seconds(median(walls[sides.PLAIN]))})",
            ours=seconds(median(walls[sides.OURS])),
            reference=seconds(median(walls.get(sides.REFERENCE, []))),
        ),
        Row(
            figure=f"    a step, processor time of all groups (plain DDP {seconds(median(cpus[sides.PLAIN]))})",
            ours=seconds(median(cpus[sides.OURS])),
            reference=seconds(median(cpus.get(sides.REFERENCE, []))),
        ),
    ]
    notes = [
        f"{_NUM_GROUPS} processes of one thread; a transformer with 2.6 M fp32 parameters (10.4 MB of gradients), AdamW",
        f"medians over {num_turns} pairs of turns of {_STEPS_A_TURN} steps, the first step of each turn left out",
    ]
    raw: dict[str, Any] = {"step_s": walls, "cpu_s": cpus}
    return Section(name="overhead", title="What a step costs with nothing failing", rows=rows, notes=notes, raw=raw)
