"""The figures of the outer loop's benchmark."""

from __future__ import annotations

from collections.abc import Callable

from diloco.job import JobFailedError
from diloco.links import LinksUnavailableError

from bench import diloco_bytes, diloco_inner, diloco_loss, diloco_sync
from bench.command import run_figures
from bench.processes import ChildEndedError
from bench.run import Run
from bench.table import Section

FIGURES: dict[str, Callable[[Run], Section]] = {
    diloco_bytes.NAME: diloco_bytes.measure,
    diloco_inner.NAME: diloco_inner.measure,
    diloco_sync.NAME: diloco_sync.measure,
    diloco_loss.NAME: diloco_loss.measure,
}


def main() -> None:
    """Measure what the command line asks for; see `run_figures`."""
    run_figures(
        "bench_diloco",
        "Measure the outer loop (DiLoCo) beside data-parallel training. The figures bytes and sync need root, for network"
        " namespaces.",
        FIGURES,
        make_run=Run,
        errors=(ChildEndedError, JobFailedError, LinksUnavailableError, TimeoutError),
    )


if __name__ == "__main__":
    main()
