"""Receives from a source that is a process of its own, and is stopped or killed."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
from support.nursery import Forked
from support.source_process import start_source

from torchft_ckpt.checkpointing import HTTPTransport
from torchft_ckpt.errors import SourceLostError, TransferStalledError
from torchft_ckpt.testing.transport_conformance import differences, example_state

pytestmark = pytest.mark.processes
LONG = timedelta(seconds=90)


@pytest.fixture
def source(tmp_path: Path) -> Iterator[tuple[Forked, str]]:
    process, url = start_source(tmp_path / "log")
    try:
        yield process, url
    finally:
        process.kill()
        process.wait(120)


@pytest.fixture
def destination() -> Iterator[HTTPTransport]:
    transport: HTTPTransport = HTTPTransport(hostname="127.0.0.1", bind="127.0.0.1", stall_timeout=LONG)
    yield transport
    transport.shutdown()


def test_a_state_crosses_from_a_process_stalls_while_it_is_stopped_and_is_lost_when_it_is_killed(source, destination):
    process, url = source
    process.send_signal(signal.SIGSTOP)
    hasty: HTTPTransport = HTTPTransport(hostname="127.0.0.1", bind="127.0.0.1", stall_timeout=timedelta(seconds=3))
    with pytest.raises(TransferStalledError, match="it may hang"):
        hasty.recv_checkpoint(0, url, 3, LONG)
    hasty.shutdown()
    process.send_signal(signal.SIGCONT)
    assert differences(destination.recv_checkpoint(0, url, 3, LONG), example_state(3)) == []
    process.kill()
    process.wait(120)
    with pytest.raises(SourceLostError, match="does not accept connections"):
        destination.recv_checkpoint(0, url, 3, LONG)
