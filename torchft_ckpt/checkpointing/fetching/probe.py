"""Measures how fast states would come from some sources, before there is one to be fetched."""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Sequence
from concurrent.futures import wait

from torchft_ckpt.checkpointing.address import parse_metadata
from torchft_ckpt.checkpointing.fetching.memory import SLICE_BYTES
from torchft_ckpt.checkpointing.fetching.options import FetchOptions
from torchft_ckpt.checkpointing.fetching.source import SourceClient
from torchft_ckpt.errors import StateFormatError
from torchft_ckpt.threads import in_background

logger = logging.getLogger(__name__)
_LONGEST_S = 5.0


def measure_rate(sources: Sequence[str], options: FetchOptions) -> float | None:
    """Return the bytes a second that come from all sources together; None: none of them answers.

    Takes as long as a few MiB take, and `_LONGEST_S` at most.

    Args:
        sources: addresses as `HTTPTransport.metadata` returns them.
        options: how to fetch.
    """
    clients: list[SourceClient] = []

    def receive(address: str) -> tuple[int, float, float]:
        began = time.monotonic()
        num_bytes = 0
        try:
            client = SourceClient(parse_metadata(address), None, options)
            clients.append(client)
            try:
                client.connect()
                began = time.monotonic()
                num_bytes = client.receive_probe(memoryview(bytearray(SLICE_BYTES)))
            finally:
                client.release()
        except Exception as error:  # noqa: BLE001 - what it sent may have raised it
            logger.info("%s is not probed: %s", address, StateFormatError.of(error, address))
        return num_bytes, began, time.monotonic()

    probes = [in_background(functools.partial(receive, address), "torchft_ckpt-probe") for address in sources]
    late = wait(probes, _LONGEST_S).not_done
    if late:  # a few MiB that take so long: as good as nothing
        for client in list(clients):
            client.close()
    received = [probe.result() for probe in probes if probe not in late]
    num_bytes = sum(count for count, _, _ in received)
    began = min((began for count, began, _ in received if count), default=0.0)
    ended = max((ended for count, _, ended in received if count), default=0.0)
    return num_bytes / (ended - began) if ended > began else None
