"""Measures how many bytes cross the receivers' sockets for what they need, for a number of re-shardings.

Relays between the groups count; see `sharded_proxy`. Speed does not matter here.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import asdict
from typing import Any

from bench.run import Run
from bench.sharded_group import Group, groups
from bench.sharded_layouts import FSDP_TP, PLAIN, Layout, shards
from bench.sharded_proxy import Counted, CountingProxy
from bench.stats import judge_at_most
from bench.table import Row, Section
from bench.transport_figures import MIB

BAR = 1.01
_CASES: dict[str, tuple[Layout, Layout]] = {
    "2 to 4, dimension 0": (shards(2, 0), shards(4, 0)),
    "2 to 4, dimension 1": (shards(2, 1), shards(4, 1)),
    "2 on dimension 0 to 4 on 1": (shards(2, 0), shards(4, 1)),
    "4 to 2, dimension 0": (shards(4, 0), shards(2, 0)),
    "2 to 3, dimension 0, uneven": (shards(2, 0), shards(3, 0)),
    "FSDP2 x TP, 2 x 2, to 4": (FSDP_TP, shards(4, 0)),
    "4 to FSDP2 x TP, 2 x 2": (shards(4, 0), FSDP_TP),
    "plain to 4": (PLAIN, shards(4, 0)),
    "4 to plain": (shards(4, 0), PLAIN),
}
_WIDE = {"8 to 8, dimension 0 to 1 (4 of the 8 measured)": (shards(8, 0), shards(8, 1))}
"""Every receiver asks every source for its manifest: that grows with the product of their numbers."""
_MAX_RECEIVERS = 4
_SMALL = [(512, 512)] * 32
_UNEVEN = [(1031, 257), (257, 1031), (1, MIB // 4 + 1), (MIB // 4 + 3, 1)]
_LARGE = [(2048, 2048)]


def measure(run: Run) -> Section:
    """Move a model of tensors of 1 MiB and a little more from each layout to each other one, and count."""
    shapes = [*_SMALL, *_UNEVEN, *_LARGE]
    raw: dict[str, dict[str, Any]] = {}
    rows = []
    cases = _CASES if run.quick else _CASES | _WIDE
    num_sources = max(source.world_size for source, _ in cases.values())
    with groups(run, num_sources, _MAX_RECEIVERS) as (sources, receivers):
        for number, (name, (source, target)) in enumerate(cases.items()):
            giving, taking = sources.first(source.world_size), receivers.first(min(target.world_size, _MAX_RECEIVERS))
            giving.hold("model", source, shapes)
            needed = taking.hold("model", target, shapes)
            counted = _count(giving, taking, run.seed + number, number + 1)
            part = counted.received / needed
            without = (counted.received - counted.manifests) / needed
            raw[name] = {"needed": needed, **asdict(counted)}
            run.say(f"{name}: {needed} bytes needed, {counted}")
            rows.append(
                Row(
                    figure=f"  {name}",
                    ours=f"{part:.5f}x",
                    bar=f"<= {BAR}x",
                    verdict=judge_at_most(part, BAR),
                )
            )
            rows.append(
                Row(
                    figure="    without manifests; with requests too",
                    ours=f"{without:.5f}x; {(counted.received + counted.sent) / needed:.5f}x",
                )
            )
    tensors = [rows_ * columns * 4 for rows_, columns in shapes]
    notes = [
        f"{len(shapes)} float32 tensors, {len(_SMALL)} of exactly 1 MiB, {len(_UNEVEN)} a little larger with odd lengths, "
        f"{len(_LARGE)} of 16 MiB, {sum(tensors) / MIB:.1f} MiB; every rank is a process, received in place, all bits checked",
        "bytes of TCP payload from the sources to the receivers, counted by relays between them: heads, manifests, elements, "
        "digests; needed: what the receivers hold of the tensors, added up",
    ]
    return Section(
        name="sharded_bytes", title="Bytes pulled over bytes needed, re-sharding", rows=rows, notes=notes, raw=raw
    )


def _count(sources: Group, receivers: Group, seed: int, step: int) -> Counted:
    total = Counted()
    with ExitStack() as stack:
        proxies = [stack.enter_context(CountingProxy(address)) for address in sources.addresses()]
        sources.serve("model", seed, step, num_receivers=receivers.num_ranks)
        receivers.receive("model", [[proxy.address for proxy in proxies]], step, "reshard")
        for proxy in proxies:
            total.add(proxy.counted())
    receivers.check("model", seed)
    return total
