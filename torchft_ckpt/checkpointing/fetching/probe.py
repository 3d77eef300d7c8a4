"""Measures how fast states would come from some sources, before there is one to be fetched."""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections.abc import Sequence

from torchft_ckpt.checkpointing.address import parse_metadata
from torchft_ckpt.checkpointing.fetching.memory import SLICE_BYTES
from torchft_ckpt.checkpointing.fetching.options import FetchOptions
from torchft_ckpt.checkpointing.fetching.source import SourceClient
from torchft_ckpt.errors import CheckpointError
from torchft_ckpt.threads import in_background

logger = logging.getLogger(__name__)


def measure_rate(sources: Sequence[str], options: FetchOptions) -> float | None:
    """Return the bytes a second that come from all sources together; None: none of them answers.

    Takes as long as a few MiB take, and at most two stall timeouts.

    Args:
        sources: addresses as `HTTPTransport.metadata` returns them.
        options: how to fetch.
    """
    num_sources = len(sources)
    are_connected = threading.Barrier(num_sources + 1)

    def receive(address: str) -> tuple[int, float]:
        client: SourceClient | None = None
        try:
            client = SourceClient(parse_metadata(address), None, options)
            client.connect()
        except CheckpointError as error:
            logger.info("%s is not probed: %s", address, error)
            client = None
        are_connected.wait()
        try:
            num_bytes = 0 if client is None else client.receive_probe(memoryview(bytearray(SLICE_BYTES)))
        except CheckpointError as error:
            logger.info("%s is not probed: %s", address, error)
            num_bytes = 0
        finally:
            if client is not None:
                client.release()
        return num_bytes, time.monotonic()

    received = [in_background(functools.partial(receive, address), "torchft_ckpt-probe") for address in sources]
    are_connected.wait()
    began = time.monotonic()
    ended = [one.result() for one in received]
    num_bytes = sum(count for count, _ in ended)
    took_s = max((at for count, at in ended if count), default=began) - began
    return num_bytes / took_s if took_s > 0 else None
