"""Measures seconds a quorum against the number of replica groups, over real sockets, for both lighthouses.

Bars: our time grows linearly with the number of groups, and is below torchft's from 256 groups on. For each size both
lighthouses run in processes of their own with equally many client processes, and take turns. Ours is charged with a whole
step (quorum and commit vote, both of which its lighthouse decides), torchft's with its quorum alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench import sides
from bench.processes import Child, Children
from bench.stats import Verdict, growth_exponent, judge_at_most, median, pair_ratios, round_durations
from bench.table import NOT_RUN, Row, Section, ratio, seconds

SIZES = (16, 64, 256, 1000)
AHEAD_FROM = 256
EXPONENT_BAR = 1.15
"""Linear is 1, quadratic 2; what lies between is noise of caches and schedulers."""
NUM_OTHER_JOBS = 50
BESIDE_SIZE = 256
BESIDE_BAR = 1.03
"""No more than alone; what lies above 1 is noise of schedulers."""
_NUM_CLIENTS = 2
_READY_S = 120


@dataclass(slots=True)
class _Fleet:
    """One lighthouse and its client processes, and what was measured on them."""

    lighthouse: Child
    clients: list[Child]
    blocks: int = 0
    round_s: list[float] = field(default_factory=list)
    """Median of each turn."""
    quorum_s: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)
    """The lighthouse's processor seconds a round, of each turn."""

    def play(self, rounds: int, timeout_s: float) -> list[dict[str, list[float]]]:
        """Play one block on all clients at once; return what each reported."""
        self.blocks += 1
        for client in self.clients:
            client.tell(rounds=rounds)
        return [client.wait_for("rounds", timeout_s, count=self.blocks) for client in self.clients]

    def measure(self, rounds: int, timeout_s: float) -> None:
        """Play one turn and keep its medians."""
        cpu_before_s = self.lighthouse.cpu_s()
        reports = self.play(rounds, timeout_s)
        self.cpu_s.append((self.lighthouse.cpu_s() - cpu_before_s) / rounds)
        ended = [report["ended"] for report in reports]
        self.round_s.append(median(round_durations(ended)) or 0.0)
        if all("formed" in report for report in reports):
            formed = [max(times) for times in zip(*(report["formed"] for report in reports), strict=True)]
            before = [max(times) for times in zip(*ended, strict=True)]
            self.quorum_s.append(median([b - a for a, b in zip(before, formed[1:], strict=False)]) or 0.0)

    def forget(self) -> None:
        """Drop what was measured so far: it only warmed up."""
        for figures in (self.round_s, self.quorum_s, self.cpu_s):
            figures.clear()


def _start(children: Children, side: str, size: int, num_other_jobs: int = 0) -> _Fleet:
    """Start a lighthouse and the groups of one job. `num_other_jobs`: of two groups each, which wait for more."""
    settings = {
        "min_replicas": size,
        "join_timeout_ms": 100,
        "quorum_tick_ms": 100,
        "heartbeat_timeout_ms": 300_000,
    }
    lighthouse = children.start("bench.lighthouse_worker", {"side": side, "settings": settings}, f"{side}-lighthouse")
    address = lighthouse.wait_for("address", _READY_S)["address"]
    clients = []
    share = size // _NUM_CLIENTS
    for number in range(_NUM_CLIENTS):
        options = {"side": side, "address": address, "first": number * share, "count": share}
        clients.append(children.start("bench.lighthouse_client", options, f"{side}-client{number}"))
    for client in clients:
        client.wait_for("ready", _READY_S)
    if num_other_jobs:
        options = {
            "side": side,
            "address": address,
            "first": 0,
            "count": 2 * num_other_jobs,
            "num_jobs": num_other_jobs,
        }
        others = children.start("bench.lighthouse_client", options, f"{side}-other-jobs")
        others.wait_for("ready", _READY_S)
        others.tell(rounds=1)
    return _Fleet(lighthouse=lighthouse, clients=clients)


def _rounds_a_turn(size: int, seconds_a_round: float, turn_s: float) -> int:
    return max(3, min(200, int(turn_s / max(seconds_a_round, 1e-4))))


def _measure(
    size: int, names: list[str], turns: int, turn_s: float, log_dir: Path, say: Callable[[str], None]
) -> dict[str, _Fleet]:
    directory = log_dir / f"{size}"
    directory.mkdir(parents=True)
    with Children(directory) as children:
        fleets = {name: _start(children, name, size) for name in names}
        rounds: dict[str, int] = {}
        for name, fleet in fleets.items():
            fleet.play(1, 300)
            fleet.measure(3, 300)
            rounds[name] = _rounds_a_turn(size, fleet.round_s[-1], turn_s)
            fleet.forget()
        for _ in range(turns):
            for name, fleet in fleets.items():
                fleet.measure(rounds[name], 300)
        for name, fleet in fleets.items():
            say(f"{size} groups, {name}: {seconds(median(fleet.round_s))}, {rounds[name]} rounds a turn")
        return fleets


def _measure_beside(turns: int, turn_s: float, log_dir: Path) -> tuple[float | None, float | None]:
    """Return how many times as long a step takes beside other jobs, and how many times the lighthouse's processor time."""
    log_dir.mkdir(parents=True)
    with Children(log_dir) as children:
        alone = _start(children, sides.OURS, BESIDE_SIZE)
        beside = _start(children, sides.OURS, BESIDE_SIZE, NUM_OTHER_JOBS)
        for fleet in (alone, beside):
            fleet.play(1, 300)
            fleet.measure(3, 300)
        rounds = _rounds_a_turn(BESIDE_SIZE, alone.round_s[-1], turn_s)
        for fleet in (alone, beside):
            fleet.forget()
        for _ in range(turns):
            for fleet in (alone, beside):
                fleet.measure(rounds, 300)
        return median(pair_ratios(beside.round_s, alone.round_s)), median(pair_ratios(beside.cpu_s, alone.cpu_s))


def _growth(fleets: dict[int, dict[str, _Fleet]], side: str, sizes: Iterable[int]) -> str:
    if any(side not in fleets[size] for size in sizes):
        return NOT_RUN
    exponent = growth_exponent({size: median(fleets[size][side].cpu_s) or 0.0 for size in sizes})
    return NOT_RUN if exponent is None else f"{exponent:.2f}"


def run(*, quick: bool, seed: int, log_dir: Path, say: Callable[[str], None]) -> Section:
    """Measure all sizes on both sides and judge growth and rank."""
    names = [sides.OURS] + ([sides.REFERENCE] if sides.is_installed(sides.REFERENCE) else [])
    fleets = {size: _measure(size, names, 2 if quick else 4, 0.4 if quick else 1.2, log_dir, say) for size in SIZES}
    ours = {size: median(fleets[size][sides.OURS].round_s) or 0.0 for size in SIZES}
    rows: list[Row] = []
    for size in SIZES:
        theirs = fleets[size].get(sides.REFERENCE)
        to_torchft = median(pair_ratios(fleets[size][sides.OURS].round_s, theirs.round_s)) if theirs else None
        has_bar = size >= AHEAD_FROM
        rows.append(
            Row(
                figure=f"  {size} groups: ours a step (quorum and vote), torchft a quorum",
                ours=f"{seconds(ours[size])} ({ratio(to_torchft)} torchft's)" if theirs else seconds(ours[size]),
                reference=seconds(median(theirs.round_s) if theirs else None),
                bar="< 1x torchft's" if has_bar else "",
                verdict=judge_at_most(to_torchft, 1.0) if has_bar else Verdict.NO_BAR,
            )
        )
        mine = fleets[size][sides.OURS]
        rows += [
            Row(
                figure="    of it the quorum; each group's part",
                ours=f"quorum {seconds(median(mine.quorum_s))}; {ours[size] / size * 1e6:.0f} us a group",
                reference=f"{(median(theirs.round_s) or 0.0) / size * 1e6:.0f} us a group" if theirs else NOT_RUN,
            ),
            Row(
                figure="    the lighthouse's processor time for it",
                ours=seconds(median(mine.cpu_s)),
                reference=seconds(median(theirs.cpu_s) if theirs else None),
            ),
        ]
    large = {size: ours[size] for size in SIZES if size >= 64}
    exponent = growth_exponent(large)
    reference = None
    if sides.REFERENCE in names:
        reference = growth_exponent({s: median(fleets[s][sides.REFERENCE].round_s) or 0.0 for s in large})
    rows.append(
        Row(
            figure=f"  growth from {min(large)} to {max(large)} groups: exponent (1 linear, 2 quadratic)",
            ours=NOT_RUN if exponent is None else f"{exponent:.2f}",
            reference=NOT_RUN if reference is None else f"{reference:.2f}",
            bar=f"<= {EXPONENT_BAR}",
            verdict=judge_at_most(exponent, EXPONENT_BAR),
        )
    )
    rows.append(
        Row(
            figure="    the same of the lighthouse's processor time alone",
            ours=_growth(fleets, sides.OURS, large),
            reference=_growth(fleets, sides.REFERENCE, large),
        )
    )
    beside, beside_cpu = _measure_beside(4 if quick else 8, 0.4 if quick else 1.2, log_dir / "jobs")
    rows.append(
        Row(
            figure=f"  {BESIDE_SIZE} groups beside {NUM_OTHER_JOBS} other jobs whose groups wait: a step",
            ours=f"{ratio(beside)} alone; processor time {ratio(beside_cpu)}",
            reference="one job",
            bar=f"<= {BESIDE_BAR}x",
            verdict=judge_at_most(beside, BESIDE_BAR),
        )
    )
    notes = [
        f"loopback sockets, one a group, {_NUM_CLIENTS} client processes on each side beside the lighthouse's own process",
        "torchft's groups vote within themselves, so its lighthouse decides no commit: it is charged with less work",
    ]
    raw: dict[str, Any] = {
        str(size): {
            name: {"round_s": fleet.round_s, "quorum_s": fleet.quorum_s, "lighthouse_cpu_s": fleet.cpu_s}
            for name, fleet in fleets[size].items()
        }
        for size in SIZES
    }
    return Section(name="lighthouse", title="What a quorum costs the lighthouse", rows=rows, notes=notes, raw=raw)
