"""Measures what a step of StepLoader costs where nothing fails, over one of DistributedDataParallel with accumulation.

Bars: 1.10x on loopback, 1.02x on links of 1 Gbit/s, for 2 and for 3 groups of 4 microbatches each. Each group is a process with
both jobs in it, which take their steps in turns, each first in turn: whatever else the machine does falls on both. Figures are
medians over pairs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from bench import sides
from bench.diloco_skipped import skipped
from bench.processes import Child, Children
from bench.run import Run
from bench.stats import judge_at_most, median, pair_ratios
from bench.table import Row, Section, ratio, seconds
from bench.transport_links import Links, LinksUnavailableError

NUM_MICROBATCHES = 4
"""Of each group."""
_RATE = "1gbit"
_NUM_COLD = 3
"""Pairs that are left out: memory is allocated, StepLoader watches the loop."""


def measure_on_loopback(run: Run) -> Section:
    """Measure with 2 and with 3 groups, and judge."""
    return _section("loopback", "A step in which nothing fails, loopback", 1.10, [_pairs(run, n, None) for n in (2, 3)])


def measure_on_links(run: Run) -> Section:
    """Measure with 2 and with 3 groups in network namespaces, and judge."""
    title, bar = "A step in which nothing fails, links of 1 Gbit/s", 1.02
    sizes = []
    try:
        for num_groups in (2, 3):
            with Links([True] * num_groups, rate=_RATE) as links:
                sizes.append(_pairs(run, num_groups, links))
    except LinksUnavailableError as error:
        return skipped("links", title, "over DDP with accumulation", f"<= {bar}x", error)
    return _section("links", title, bar, sizes)


def start(children: Children, num_groups: int, links: Links | None, seed: int, **more: Any) -> list[Child]:
    """Start a lighthouse, and groups that wait for what to do. `more`: what they are told."""
    where: list[dict[str, str]] = [{}] * num_groups
    if links is not None:
        both = zip(links.namespaces, links.hosts, strict=True)
        where = [{"namespace": namespace, "host": host} for namespace, host in both]
    most = {"join_timeout_ms": 60_000, "heartbeat_timeout_ms": 30_000}
    settings = {"min_replicas": more.get("min_replicas", num_groups), **most}
    lighthouse = children.start("bench.lighthouse_worker", {"side": sides.OURS, "settings": settings, **where[0]}, "lh")
    told = {
        "lighthouse": lighthouse.wait_for("address", 300)["address"],
        "num_groups": num_groups,
        "num_microbatches": num_groups * NUM_MICROBATCHES,
        "seed": seed,
        **more,
    }
    groups = [
        children.start("bench.step_worker", {**told, "group": group, **where[group]}, f"group{group}")
        for group in range(num_groups)
    ]
    for child in groups:
        child.wait_for("ready", 300)
    return groups


def _pairs(run: Run, num_groups: int, links: Links | None) -> dict[str, list[dict[str, float]]]:
    """Return by side what each pair took: the mean over the groups."""
    num_pairs = run.num_repeats(60, 15) + _NUM_COLD
    with Children(run.log_dir) as children:
        groups = start(children, num_groups, links, run.seed)
        for child in groups:
            child.tell(num_pairs=num_pairs)
        ends = [child.wait_for("pairs", 60 + 30 * num_pairs)["steps"] for child in groups]
    found: dict[str, list[dict[str, float]]] = {}
    for side in ("ddp", "exact"):
        together = zip(*(end[side][_NUM_COLD:] for end in ends), strict=True)
        found[side] = [{key: sum(one[key] for one in some) / len(some) for key in some[0]} for some in together]
    run.say(f"{num_groups} groups: {over(found, 'wall_s'):.3f}, CPU {over(found, 'cpu_s'):.3f}")
    return found


def over(found: Mapping[str, Sequence[Mapping[str, float]]], key: str) -> float:
    """Return what StepLoader takes of something over DDP: the median over pairs."""
    ratios = pair_ratios(*([one[key] for one in found[side]] for side in ("exact", "ddp")))
    return median(ratios) or 0.0


def _section(name: str, title: str, bar: float, sizes: Sequence[dict[str, list[dict[str, float]]]]) -> Section:
    rows = []
    for num_groups, found in zip((2, 3), sizes, strict=True):
        wall = over(found, "wall_s")
        walls = {side: median([one["wall_s"] for one in found[side]]) for side in found}
        rows += [
            Row(
                figure=f"  {num_groups} groups of {NUM_MICROBATCHES} microbatches, over DDP with accumulation",
                ours=ratio(wall),
                bar=f"<= {bar}x",
                verdict=judge_at_most(wall, bar),
            ),
            Row(figure="    a step", ours=seconds(walls["exact"]), reference=seconds(walls["ddp"])),
            Row(figure="    processor time of a group, over DDP's", ours=ratio(over(found, "cpu_s"))),
        ]
    notes = [
        "a process of one thread for each group; a transformer with 2.6 M fp32 parameters (10.4 MB of gradients), AdamW;"
        f" medians of {len(sizes[0]['ddp'])} pairs",
    ]
    return Section(name=name, title=title, rows=rows, notes=notes, raw={str(n): one for n, one in enumerate(sizes, 2)})
