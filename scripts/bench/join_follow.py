"""Lets a group come into a running job that needs longer than a step to receive the state: it follows, and nobody waits for it.

Symbols: S bytes of state, G of gradients a step, B bytes/s of the joiner's link, tau a step, T0 = S / B, rho = G / (tau B).

Bars: while a group follows, the others' median step is at most 1.02x, the 99th percentile 1.10x, no step is longer by more than
1.2 `clone(S)`, and they discard nothing. From its first `start_quorum` to the beginning of the first step
that it adds to it takes at most 1.15 T0 / (1 - rho) + 3 tau. At the join it receives nothing of what optimizers own.

The link of the joiner is limited both ways, in network namespaces: its collectives go over it, too, once it is in.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from bench import sides
from bench.job import Job, Plan
from bench.processes import Child, Children, wait_until
from bench.stats import Verdict, judge_at_most, median
from bench.table import Row, Section, ratio, seconds
from bench.transport_links import Links, LinksUnavailableError

MEDIAN_BAR = 1.02
P99_BAR = 1.10
CLONES_BAR = 1.2
CATCH_UP_BAR = 1.15
_PAUSE_S = 2.0
_NUM_GROUPS = 2
_NUM_BEFORE = 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A state and a link."""

    name: str
    task: str
    state_bytes: float
    gradient_bytes: float
    rho: float
    """Of the link."""


_ALL_TRAINED = {"task": "25mb", "state_bytes": 3 * 25.2e6, "gradient_bytes": 25.2e6}
_FROZEN = {"task": "100mb_frozen", "state_bytes": 100.8e6 + 2 * 4.2e6, "gradient_bytes": 4.2e6}
CASES = [
    *(Case(name=f"all trained, rho {rho:g}", rho=rho, **_ALL_TRAINED) for rho in (0.3, 0.5, 0.7, 0.8)),  # type: ignore[arg-type]
    Case(name="96 % frozen, T0 = 20 tau", rho=20 * 4.2e6 / 109.2e6, **_FROZEN),  # type: ignore[arg-type]
]


def _steps(child: Child) -> list[dict[str, Any]]:
    return [event for event in child.events("step") if event["committed"]]


def _lengths(steps: Sequence[dict[str, Any]]) -> list[float]:
    return [after["t"] - before["t"] for before, after in pairwise(steps)]


def _cpu_s(steps: Sequence[dict[str, Any]]) -> float:
    return (steps[-1]["cpu_s"] - steps[0]["cpu_s"]) / max(len(steps) - 1, 1)


def _clone_s(num_bytes: float) -> float:
    state = torch.zeros(int(num_bytes) // 4)
    began = time.monotonic()
    state.clone()
    return time.monotonic() - began


def _run_case(case: Case, seed: int, directory: Path, say: Callable[[str], None]) -> tuple[list[Row], dict[str, Any]]:
    rate = case.gradient_bytes / (case.rho * _PAUSE_S)
    with Links([False, True], f"{rate * 8 / 1e6:.1f}mbit", both_ways=True) as links, Children(directory) as children:
        places = tuple(zip(links.namespaces, links.hosts, strict=True))
        plan = Plan(
            side=sides.OURS,
            num_groups=_NUM_GROUPS,
            task=case.task,
            seed=seed,
            pause_s=_PAUSE_S,
            optimizer="adamw",
            places=places,
            log_level="INFO",
        )
        job = Job(children, plan)
        job.start()
        joiner = job.prepare(_NUM_GROUPS, seed=seed + 1)
        joiner.wait_for("ready", 90)
        survivors = list(job.groups.values())
        wait_until(lambda: all(len(_steps(child)) > _NUM_BEFORE for child in survivors) or None, 300, "steps")
        before = [_steps(child)[3:] for child in survivors]
        joiner.tell(go=True)
        ready = joiner.wait_for("manager_ready", 60)["t"]

        def contributing() -> dict[str, Any] | None:
            joiner.require_alive("it is to contribute")
            return next((step for step in _steps(joiner) if step["participating"]), None)

        first = wait_until(contributing, 600, f"the joiner contributes ({case.name})")
        time.sleep(2 * _PAUSE_S)
        transfers = list(joiner.events("transfer_ended"))
        discarded = [e for s in survivors for e in s.events("step") if not e["committed"] and e["t"] > ready]
        during = [
            [step for step in _steps(child) if ready <= step["t"] and step["participants"] == _NUM_GROUPS]
            for child in survivors
        ]
        tail = [[step for step in _steps(child) if step["t"] >= ready] for child in survivors]
    tau = median(_lengths(before[0])) or _PAUSE_S
    rho = case.gradient_bytes / (tau * rate)
    t0 = case.state_bytes / rate
    bar_s = CATCH_UP_BAR * t0 / (1 - rho) + 3 * tau
    took_s = first["began"] - ready
    lengths = max((_lengths(steps) for steps in during), key=lambda found: max(found, default=0.0))
    longest_s = max(lengths, default=0.0)
    join_s = max((max(_lengths(steps), default=0.0) for steps in tail), default=0.0)
    ordered = sorted(lengths)
    p99 = ordered[int(0.99 * (len(ordered) - 1))] if ordered else 0.0
    usual = sorted(_lengths(before[0]))
    usual_p99 = usual[int(0.99 * (len(usual) - 1))]
    clone_s = _clone_s(case.state_bytes)
    pulled = [transfer["received_bytes"] for transfer in transfers][1:]
    say(
        f"{case.name}: B {rate / 1e6:.1f} MB/s, tau {tau:.2f}, T0 {t0:.1f}, rho {rho:.2f}, took {took_s:.1f} (bar {bar_s:.1f})"
    )
    say(f"    {len(lengths)} steps meanwhile, longest {longest_s:.2f}, at the join {join_s:.2f}, pulled {pulled}")
    longest_bar = usual[-1] + CLONES_BAR * clone_s
    rows = [
        Row(
            figure=f"  {case.name}: T0 {seconds(t0)}, tau {seconds(tau)}; until the first step that it adds to",
            ours=seconds(took_s),
            bar=f"<= {seconds(bar_s)}",
            verdict=judge_at_most(took_s, bar_s),
        ),
        Row(
            figure=f"    the others' median step meanwhile ({len(lengths)} steps)",
            ours=ratio((median(lengths) or 0.0) / tau),
            bar=f"<= {MEDIAN_BAR}x",
            verdict=judge_at_most((median(lengths) or 0.0) / tau, MEDIAN_BAR) if lengths else Verdict.NOT_RUN,
        ),
        Row(
            figure="    99th percentile",
            ours=ratio(p99 / usual_p99),
            bar=f"<= {P99_BAR}x",
            verdict=judge_at_most(p99 / usual_p99, P99_BAR) if lengths else Verdict.NOT_RUN,
        ),
        Row(
            figure=f"    longest (before {seconds(usual[-1])}, clone(S) {seconds(clone_s)})",
            ours=seconds(longest_s),
            bar=f"<= {seconds(longest_bar)}",
            verdict=judge_at_most(longest_s, longest_bar) if lengths else Verdict.NOT_RUN,
        ),
        Row(figure="    longest until it contributes, the join too", ours=seconds(join_s)),
        Row(
            figure="    steps that the others discard",
            ours=str(len(discarded)),
            bar="0",
            verdict=judge_at_most(float(len(discarded)), 0.0),
        ),
        Row(
            figure="    received at the join",
            ours=f"{sum(pulled) / 1e6:.2f} MB",
            bar="0",
            verdict=judge_at_most(float(sum(pulled)), 0.0),
        ),
        Row(
            figure=f"    CPU seconds a step of a survivor (before {_cpu_s(before[0]):.2f})",
            ours=f"{_cpu_s(during[0]):.2f}" if len(during[0]) > 1 else "-",
        ),
    ]
    raw = {
        "tau_s": tau,
        "t0_s": t0,
        "rho": rho,
        "took_s": took_s,
        "lengths_s": lengths,
        "pulled": pulled,
        "before_s": usual,
    }
    return rows, raw


def run(*, quick: bool, seed: int, log_dir: Path, say: Callable[[str], None]) -> Section:
    """Let groups follow at several rates of their link; judge how long it takes them, and what it costs the others."""
    rows: list[Row] = []
    raw: dict[str, Any] = {}
    for number, case in enumerate(CASES[1:2] if quick else CASES):
        directory = log_dir / f"case{number}"
        directory.mkdir(parents=True)
        try:
            found, raw[case.name] = _run_case(case, seed + number, directory, say)
        except LinksUnavailableError as error:
            rows.append(Row(figure=f"  {case.name}: {error}", ours="-", verdict=Verdict.NOT_RUN))
            continue
        rows += found
    notes = [
        f"{_NUM_GROUPS} groups of one thread, AdamW; a step sleeps {_PAUSE_S:g} s; the joiner's link is limited both ways",
        "with the warm-up: the joiner's first iteration is its own, before it receives anything",
    ]
    return Section(
        name="join_follow",
        title="What a group costs that follows before it joins, and how long that takes",
        rows=rows,
        notes=notes,
        raw=raw,
    )
