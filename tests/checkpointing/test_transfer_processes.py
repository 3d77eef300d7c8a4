"""Receives from a source that is a process of its own, and is stopped or killed."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from datetime import timedelta

import pytest
from support.processes import start

from torchft_ckpt.checkpointing import HTTPTransport
from torchft_ckpt.errors import SourceLostError, TransferStalledError
from torchft_ckpt.testing.transport_conformance import differences, example_state

pytestmark = pytest.mark.processes
LONG = timedelta(seconds=30)
SOURCE = """
import sys
from datetime import timedelta
from torchft_ckpt.checkpointing import HTTPTransport
from torchft_ckpt.testing.transport_conformance import example_state
transport = HTTPTransport(hostname="127.0.0.1", bind="127.0.0.1")
transport.send_checkpoint([1], 3, example_state(3), timedelta(seconds=60))
print(transport.metadata(), flush=True)
sys.stdin.read()
transport.shutdown()
"""


@pytest.fixture
def source() -> Iterator[tuple[subprocess.Popen[str], str]]:
    process = start([sys.executable, "-c", SOURCE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin is not None and process.stdout is not None
    try:
        yield process, process.stdout.readline().strip()
    finally:
        process.send_signal(signal.SIGCONT)
        process.stdin.close()
        process.stdout.close()
        if process.wait(30) not in (0, -signal.SIGKILL):
            pytest.fail(f"the source ended with {process.returncode}")


@pytest.fixture
def destination() -> Iterator[HTTPTransport]:
    transport: HTTPTransport = HTTPTransport(hostname="127.0.0.1", bind="127.0.0.1", stall_timeout=timedelta(seconds=1))
    yield transport
    transport.shutdown()


def test_a_state_crosses_from_a_process_stalls_while_it_is_stopped_and_is_lost_when_it_is_killed(source, destination):
    process, url = source
    process.send_signal(signal.SIGSTOP)
    with pytest.raises(TransferStalledError, match="it may hang"):
        destination.recv_checkpoint(0, url, 3, LONG)
    process.send_signal(signal.SIGCONT)
    assert differences(destination.recv_checkpoint(0, url, 3, LONG), example_state(3)) == []
    process.kill()
    process.wait(30)
    with pytest.raises(SourceLostError, match="does not accept connections"):
        destination.recv_checkpoint(0, url, 3, LONG)
