"""What every figure of the transport benchmark is told, and the processes that most of them need."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from bench import sides
from bench.processes import Children
from bench.transport_peer import Peer


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """How to measure.

    Attributes:
        quick: fewer repetitions, smaller states where links are limited.
        repeat: repetitions of every figure, where the user asked for a number.
        seed: of what the states are filled with, and of moments.
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

    def settings(self) -> list[int]:
        """Return the reference's numbers of chunks that are tried; none where it is not installed."""
        if not sides.is_installed(sides.REFERENCE):
            return []
        return [0, 4, 8] if self.quick else [0, 2, 4, 8]


@contextmanager
def pair(run: Run, name: str, shape: tuple[int, int], side: str, num_chunks: int = 0) -> Iterator[tuple[Peer, Peer]]:
    """Start a source and a receiver, fresh, with models of one shape, and end them."""
    with Children(run.log_dir) as children:
        source = Peer(children, f"{name}-source", shape, side=side, num_chunks=num_chunks)
        receiver = Peer(children, f"{name}-receiver", shape, side=side, num_chunks=num_chunks)
        yield source.ready(), receiver.ready()
