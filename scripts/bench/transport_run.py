"""What every figure of the transport benchmark is told, and the processes that most of them need."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import bench.run
from bench import sides
from bench.processes import Children
from bench.transport_peer import Peer


@dataclass(frozen=True, slots=True, kw_only=True)
class Run(bench.run.Run):
    """How to measure, beside the reference."""

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
