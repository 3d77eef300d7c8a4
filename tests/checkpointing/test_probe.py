"""A probe measures how fast states would come, at the pace at which they are served; who does not answer is left out."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pytest

from torchft_ckpt import HTTPTransport
from torchft_ckpt.checkpointing.protocol import PROBE_BYTES


@contextmanager
def transports(*options: dict[str, Any]) -> Iterator[list[HTTPTransport[Any]]]:
    made = [
        HTTPTransport[Any](hostname="127.0.0.1", bind="127.0.0.1", stall_timeout=timedelta(seconds=5), **one)
        for one in options
    ]
    try:
        yield made
    finally:
        for transport in made:
            transport.shutdown()


@pytest.mark.slow
def test_the_rate_of_all_sources_together_is_measured() -> None:
    """Each gives its zeros in a second; a group that is gone, and one that is none, give nothing."""
    slow = {"max_serve_bytes_per_s": float(PROBE_BYTES)}
    with transports({}, slow, slow) as (receiver, *sources):
        addresses = [source.metadata() for source in sources]
        rate = receiver.measure_rate([*addresses, "http://127.0.0.1:9"])
        assert rate is not None and 0.3 * PROBE_BYTES < rate < 6 * PROBE_BYTES
        assert receiver.measure_rate(["http://127.0.0.1:9"]) is None
        assert receiver.measure_rate([]) is None


def test_the_burst_of_a_source_that_has_sent_nothing_for_a_while_does_not_count() -> None:
    """A tenth of a second of its pace is free then: more than all that a probe is sent."""
    pace = 20.0 * PROBE_BYTES
    with transports({}, {"max_serve_bytes_per_s": pace}) as (receiver, source):
        rate = receiver.measure_rate([source.metadata()])
        assert rate is not None and rate < 1.5 * pace


def test_whoever_does_not_know_the_token_is_given_no_zeros() -> None:
    with transports({"token": "a secret"}, {"token": "a secret"}, {"token": "another"}) as (source, friend, stranger):
        assert friend.measure_rate([source.metadata()]) is not None
        assert stranger.measure_rate([source.metadata()]) is None
