"""The figures of the benchmark of steps of StepLoader."""

from __future__ import annotations

from collections.abc import Callable

from bench import step, step_bytes, step_death
from bench.command import run_figures
from bench.processes import ChildEndedError
from bench.run import Run
from bench.table import Section

FIGURES: dict[str, Callable[[Run], Section]] = {
    "loopback": step.measure_on_loopback,
    "links": step.measure_on_links,
    "bytes": step_bytes.measure,
    "death": step_death.measure,
}


def main() -> None:
    """Measure what the command line asks for; see `run_figures`."""
    run_figures(
        "bench_step",
        "Measure steps of StepLoader beside data-parallel training with accumulation. The figures links and bytes need root, for"
        " network namespaces.",
        FIGURES,
        make_run=Run,
        errors=(ChildEndedError, TimeoutError),
        reference="DDP",
    )


if __name__ == "__main__":
    main()
