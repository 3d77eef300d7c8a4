"""Counts the bytes that a rank sends for the sum of a step, over those that a ring's allreduce sends.

Bars, with 4 microbatches a group: 1.01 where all groups are there, 1.5 where one is away. Each rank is a thread in a network
namespace of its own, and what counts is its interface's counter, headers and all.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import TypeVar

import torch

from bench.diloco_skipped import skipped
from bench.run import Run
from bench.stats import judge_at_most
from bench.step import NUM_MICROBATCHES
from bench.table import Row, Section, ratio
from bench.transport_links import Links, LinksUnavailableError, enter
from torchft_ckpt import ProcessGroupGloo
from torchft_ckpt.core.training.microbatches import cover, deal
from torchft_ckpt.exact.tree_sum import TreeSum

NAME, TITLE = "bytes", f"Bytes of a sum over a ring's, {NUM_MICROBATCHES} microbatches a group"
_LIMIT = timedelta(seconds=60)
_NUM_ELEMENTS = 840 << 10
"""3.4 MB, which each number of ranks here divides."""

T = TypeVar("T")


def measure(run: Run) -> Section:
    """Count with 3 and with 8 groups, and with one less of each."""
    rows, raw = [], {}
    try:
        for num_groups in (3, 8):
            for num_away, bar in ((0, 1.01), (1, 1.5)):
                counts = _count(num_groups - num_away, num_groups * NUM_MICROBATCHES)
                raw[f"{num_groups} groups, {num_away} away"] = counts
                shares = [tree / ring for ring, tree in counts]
                run.say(f"{num_groups} groups, {num_away} away: {shares}")
                rows += [
                    Row(
                        figure=f"  {num_groups} groups, {'one away' if num_away else 'all there'}: the rank that sends most",
                        ours=ratio(max(shares)),
                        bar=f"<= {bar}x",
                        verdict=judge_at_most(round(max(shares), 3), bar),
                    ),
                    Row(figure="    the mean of all ranks", ours=ratio(sum(shares) / len(shares))),
                ]
    except LinksUnavailableError as error:
        return skipped(NAME, TITLE, "3 and 8 groups", "<= 1.01x", error)
    notes = [f"{4 * _NUM_ELEMENTS / 1e6:.1f} MB of fp32, Gloo, each rank in a network namespace; headers are counted"]
    return Section(name=NAME, title=TITLE, rows=rows, notes=notes, raw=raw)


def _count(num_ranks: int, num_microbatches: int) -> list[tuple[int, int]]:
    """Return what each rank sends for an allreduce, and for a sum by the tree."""
    nodes = [cover(mine, num_microbatches) for mine in deal(num_microbatches, [[]] * num_ranks)]
    barrier, port = threading.Barrier(num_ranks, timeout=_LIMIT.total_seconds()), [0]

    def of(rank: int) -> tuple[int, int]:
        enter(links.namespaces[rank])
        store = None
        if rank == 0:
            store = torch.distributed.TCPStore(links.hosts[0], 0, is_master=True, wait_for_workers=False)
            port[0] = store.port
        barrier.wait()
        group = ProcessGroupGloo(_LIMIT, hostname=links.hosts[rank])
        group.configure(f"{links.hosts[0]}:{port[0]}/sum", str(rank), rank, num_ranks)
        tensor = torch.ones(_NUM_ELEMENTS)
        held = {node: [torch.ones(_NUM_ELEMENTS)] for node in nodes[rank]}
        way = TreeSum(num_microbatches, nodes, held, [tensor])

        def sent_by(does: Callable[[], object]) -> int:
            barrier.wait()
            before = _sent()
            barrier.wait()
            does()
            barrier.wait()
            return _sent() - before

        try:
            return (
                sent_by(lambda: group.allreduce([tensor]).wait()),
                sent_by(lambda: way.reduce(group, tensor, divisor=None, timeout=_LIMIT)),
            )
        finally:
            group.shutdown()

    with Links([False] * num_ranks) as links:
        return _together(num_ranks, of)


def _together(num: int, does: Callable[[int], T]) -> list[T]:
    """Call a function for each number, on a thread each; return what they return.

    Raises:
        LinksUnavailableError: one of them raised.
    """
    found: dict[int, T] = {}
    errors: list[Exception] = []

    def run(number: int) -> None:
        try:
            found[number] = does(number)
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(num)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return [found[number] for number in range(num)]


def _sent() -> int:
    """Return the bytes that the member in whose namespace this thread runs has sent over its link."""
    for line in Path("/proc/thread-self/net/dev").read_text().splitlines():
        name, _, counters = line.partition(":")
        if name.strip() == "eth0":
            return int(counters.split()[8])
    raise LinksUnavailableError("there is no eth0 in this namespace")
