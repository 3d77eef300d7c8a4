"""Peers at the ends of links, and what every figure over limited links needs beside them."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from bench import sides
from bench.processes import Children
from bench.stats import Verdict, median
from bench.table import Row, Section
from bench.transport_figures import MIB, payload_bytes
from bench.transport_links import Links, LinksUnavailableError
from bench.transport_peer import Peer
from bench.transport_run import Run

_TENSOR_BYTES = 8 * MIB
_LEAD_S = 0.3


def shape_of(total_bytes: int) -> tuple[int, int]:
    """Return the number and the length of the tensors of a state of so many bytes."""
    return total_bytes // _TENSOR_BYTES, _TENSOR_BYTES


@contextmanager
def linked_peers(
    run: Run, name: str, limits: Sequence[bool], shape: tuple[int, int], side: str = sides.OURS
) -> Iterator[list[Peer]]:
    """Start one process for each link; what those with a limit send is limited.

    Raises:
        LinksUnavailableError: links cannot be had here.
    """
    with Links(limits) as links, Children(run.log_dir) as children:
        ends = zip(links.namespaces, links.hosts, strict=True)
        peers = [
            Peer(children, f"{name}-{number}", shape, side=side, host=host, namespace=namespace)
            for number, (namespace, host) in enumerate(ends)
        ]
        yield [peer.ready() for peer in peers]


def receive_together(receivers: Sequence[Peer], sources: Sequence[Peer], step: int) -> float:
    """Let all receivers begin at one moment; return the seconds until the last one has loaded the state."""
    at = time.monotonic() + _LEAD_S
    metadata = [source.metadata for source in sources]
    for receiver in receivers:
        receiver.begin("receive", sources=metadata, step=step, at=at)
    return max(receiver.answer()["ended"] for receiver in receivers) - at


class Busy:
    """How busy all cores of this machine were, whoever used them: whether a figure was the link's or the processor's."""

    def __init__(self) -> None:
        self._ratios: list[float] = []

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Take the mean over the block as one value."""
        idle_before, total_before = _cpu_ticks()
        yield
        idle, total = _cpu_ticks()
        self._ratios.append(1 - (idle - idle_before) / max(total - total_before, 1))

    def __str__(self) -> str:
        return f"{median(self._ratios) or 0:.0%}"


def _cpu_ticks() -> tuple[int, int]:
    """Return the idle and all ticks of all cores since the machine started."""
    ticks = [int(field) for field in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
    return ticks[3] + ticks[4], sum(ticks)


def received_payload(receiver: Peer) -> int:
    """Return the bytes of TCP payload that a peer's link has brought so far."""
    counters = receiver.ask("received")
    return payload_bytes(counters["bytes"], counters["packets"])


def skipped(name: str, title: str, figure: str, bar: str, error: LinksUnavailableError) -> Section:
    """Return the section of a figure that cannot be measured here."""
    row = Row(figure=f"  {figure}", ours="SKIPPED", bar=bar, verdict=Verdict.NOT_RUN)
    return Section(name=name, title=title, rows=[row], notes=[f"SKIPPED: {error}"])
