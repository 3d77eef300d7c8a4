"""The figures of the benchmark of durable checkpoints."""

from __future__ import annotations

from collections.abc import Callable

from bench import durable_cold, durable_held, durable_reshard, durable_save, durable_staged
from bench.command import run_figures
from bench.processes import ChildEndedError
from bench.run import Run
from bench.table import Section
from bench.transport_peer import CommandFailedError

FIGURES: dict[str, Callable[[Run], Section]] = {
    "size": durable_save.measure_size,
    "held": durable_held.measure,
    "staged": durable_staged.measure,
    "wall": durable_save.measure_wall,
    "reshard": durable_reshard.measure,
    "cold": durable_cold.measure,
}


def main() -> None:
    """Measure what the command line asks for; see `run_figures`."""
    run_figures(
        "bench_durable",
        "Measure durable checkpoints beside torch.distributed.checkpoint (DCP): HSDP on 2 x 2 ranks, 300 MB of state,"
        " real processes on one disk, fsync on.",
        FIGURES,
        make_run=Run,
        errors=(ChildEndedError, CommandFailedError, ConnectionError, TimeoutError),
        reference="DCP",
    )


if __name__ == "__main__":
    main()
