"""A source that strangers crowd serves those who have the token all the same."""

from __future__ import annotations

import contextlib
import socket
import sys
from collections.abc import Iterator
from datetime import timedelta

import pytest
import torch
from faulty_proxy import Connection, FaultyProxy
from support.ports import is_open
from support.waiting import wait_until

from torchft_ckpt import HTTPTransport
from torchft_ckpt.checkpointing.fetching import source as asking
from torchft_ckpt.checkpointing.protocol import SourceAddress, parse_metadata
from torchft_ckpt.config import parse_host_port

LONG = timedelta(seconds=90)
TOKEN = "secret"
needs_linux = pytest.mark.skipif(sys.platform != "linux", reason="needs all of 127.0.0.0/8")


@needs_linux
def test_strangers_on_all_places_do_not_keep_a_receiver_out() -> None:
    source: HTTPTransport[object] = HTTPTransport(
        hostname="127.0.0.1", bind="127.0.0.1", token=TOKEN, max_connections=8, max_connections_per_client=4
    )
    receiver: HTTPTransport[dict[str, torch.Tensor]] = HTTPTransport(hostname="127.0.0.1", token=TOKEN)
    state = {"w": torch.arange(1000)}
    source.send_checkpoint([1], 3, state, LONG)
    address = parse_host_port(source.metadata(), what="address")
    with contextlib.ExitStack() as opened:
        hosts = ["127.0.0.1", "127.0.0.2", "127.0.0.3"]
        squatting = [
            opened.enter_context(socket.create_connection(address, timeout=60, source_address=(host, 0)))
            for host in hosts
            for _ in range(4)
        ]
        wait_until(lambda: sum(map(is_open, squatting)) == 8)
        received = receiver.recv_checkpoint(0, source.metadata(), 3, LONG)
    assert torch.equal(received["w"], state["w"])
    for transport in (receiver, source):
        transport.shutdown()


def test_a_receiver_whose_first_connection_is_cut_comes_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asking, "_UNANSWERED_PAUSES_S", (0.01, 0.01))
    source: HTTPTransport[object] = HTTPTransport(hostname="127.0.0.1", bind="127.0.0.1")
    receiver: HTTPTransport[dict[str, torch.Tensor]] = HTTPTransport(hostname="127.0.0.1")
    state = {"w": torch.arange(1000)}
    source.send_checkpoint([1], 3, state, LONG)
    with cutting(source, num_cut=2) as (address, seen):
        received = receiver.recv_checkpoint(0, str(address), 3, LONG)
    assert torch.equal(received["w"], state["w"]) and len(seen) >= 3
    for transport in (receiver, source):
        transport.shutdown()


@contextlib.contextmanager
def cutting(source: HTTPTransport[object], num_cut: int) -> Iterator[tuple[SourceAddress, dict[Connection, bool]]]:
    """Stand in front of a source, and cut the first connections unanswered."""
    seen: dict[Connection, bool] = {}

    def fault(connection: Connection, passed: int, data: bytes) -> bytes:
        if seen.setdefault(connection, len(seen) < num_cut):
            connection.cut()
            return b""
        return data

    with FaultyProxy(parse_metadata(source.metadata()).port, fault) as proxy:
        yield parse_metadata(proxy.url), seen
