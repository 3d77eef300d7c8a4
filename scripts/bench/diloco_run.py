"""What every figure of the outer loop's benchmark is told, and the row of one that cannot be measured here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from bench.stats import Verdict
from bench.table import Row, Section


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """How to measure.

    Attributes:
        quick: fewer repetitions, shorter jobs.
        repeat: repetitions of every figure, where the user asked for a number.
        seed: of weights, batches and moments.
        log_dir: where the processes' records and logs go.
        say: prints a line where the user wants to see every measurement.
    """

    quick: bool
    repeat: int | None
    seed: int
    log_dir: Path
    say: Callable[[str], None]

    def num_repeats(self, full: int, quick: int) -> int:
        """Return how often to measure."""
        return self.repeat or (quick if self.quick else full)


def skipped(name: str, title: str, figure: str, bar: str, error: Exception) -> Section:
    """Return the section of a figure that cannot be measured here."""
    row = Row(figure=f"  {figure}", ours="SKIPPED", bar=bar, verdict=Verdict.NOT_RUN)
    return Section(name=name, title=title, rows=[row], notes=[f"SKIPPED: {error}"])
