"""What every figure of a benchmark is told."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """How to measure.

    Attributes:
        quick: fewer repetitions, smaller states and shorter jobs.
        repeat: repetitions of every figure, where the user asked for a number.
        seed: of values, weights, batches and moments.
        log_dir: where the processes' logs go.
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
