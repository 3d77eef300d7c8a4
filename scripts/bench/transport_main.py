"""The figures of the transport's benchmark."""

from __future__ import annotations

import sys
from collections.abc import Callable

from bench import (
    sharded_bytes,
    sharded_speed,
    sides,
    transport_failover,
    transport_first,
    transport_footprint,
    transport_held,
    transport_small,
    transport_sources,
    transport_swarm,
    transport_torn,
    transport_two_links,
    transport_wire,
)
from bench.command import run_figures
from bench.processes import ChildEndedError
from bench.table import Section
from bench.transport_peer import CommandFailedError
from bench.transport_run import Run

FIGURES: dict[str, Callable[[Run], Section]] = {
    "first": transport_first.measure,
    "first_without_place": transport_first.measure_without_place,
    "repeated": transport_wire.measure,
    "small": transport_small.measure,
    "held": transport_held.measure,
    "torn": transport_torn.measure,
    "memory": transport_footprint.measure,
    "three_sources": transport_sources.measure,
    "swarm": transport_swarm.measure,
    "failover": transport_failover.measure,
    "two_links": transport_two_links.measure,
}
SHARDED: dict[str, Callable[[Run], Section]] = {
    "sharded_bytes": sharded_bytes.measure,
    "sharded_same": sharded_speed.measure_same,
    "sharded_dim0": sharded_speed.measure_rows,
    "sharded_dim1": sharded_speed.measure_columns,
}


def main() -> None:
    """Measure what the command line asks for; see `run_figures`."""
    if not sides.is_installed(sides.REFERENCE):
        print("torchft is not installed here: its columns are marked 'not run'.", file=sys.stderr)
    run_figures(
        "bench_transport",
        "Measure the checkpoint transport, beside torchft 0.2.0 and raw sockets. The figures over limited links"
        " (three_sources, swarm, failover, two_links) need root, for network namespaces. Sharded figures come with --sharded.",
        FIGURES,
        make_run=Run,
        more={"sharded": SHARDED},
        errors=(ChildEndedError, CommandFailedError, ConnectionError, TimeoutError),
    )


if __name__ == "__main__":
    main()
