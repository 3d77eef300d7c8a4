"""A state comes over all addresses of its source that prove to be it, and goes on over the others where one is lost."""

from __future__ import annotations

import contextlib
import logging
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
from faulty_proxy import Connection, FaultyProxy
from support.links import connecting
from support.ports import reserved_port
from support.sources import BLOCK, make_transport

from torchft_ckpt.checkpointing import HTTPTransport, http_transport
from torchft_ckpt.checkpointing.fetching import connection as connection_module
from torchft_ckpt.checkpointing.fetching import engine
from torchft_ckpt.checkpointing.progress import TransferProgress
from torchft_ckpt.checkpointing.protocol import parse_metadata, proof_of
from torchft_ckpt.checkpointing.resharding.peers import JobPeers
from torchft_ckpt.checkpointing.serving import handlers
from torchft_ckpt.checkpointing.state import format as format_module
from torchft_ckpt.checkpointing.state.format import Elsewhere
from torchft_ckpt.errors import SourceRefusedError, TransferError
from torchft_ckpt.network import Host

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs all of 127.0.0.0/8")
LONG = timedelta(seconds=90)
STEP = 3
NUM_BLOCKS = 64
TOKEN = "a secret"
IN_FLIGHT = {"whole": BLOCK, "sharded": 4 * BLOCK}
"""Bytes of what a link brings at a time: a block, or the box of a layer."""


def make_state() -> dict[str, torch.Tensor]:
    return {f"layer{number}": torch.full((BLOCK,), float(number)) for number in range(NUM_BLOCKS // 4)}


@pytest.fixture
def source(monkeypatch: pytest.MonkeyPatch) -> Iterator[HTTPTransport[Any]]:
    """It serves at 127.0.0.1, and says that it is at 127.0.0.3 as well, where its port is free, as at 127.0.0.2."""
    monkeypatch.setattr(format_module, "may_be_tried", lambda host: True)
    with reserved_port() as port:
        transport = make_transport(token=TOKEN, port=port)
        elsewhere = Elsewhere(hosts=["127.0.0.3", "127.0.0.1"], key=transport._server.proof_key)
        monkeypatch.setattr(transport, "_elsewhere", lambda: elsewhere)
        transport.send_checkpoint([0], STEP, make_state(), LONG)
        yield transport
        transport.shutdown()


class Receiver:
    """Receives a state in one of the two ways; says when half of it is here."""

    def __init__(self, how: str) -> None:
        self._how = how
        self.has_half = threading.Event()
        self.progress: TransferProgress | None = None

    def _note(self, progress: TransferProgress) -> None:
        self.progress = progress
        if progress.received_bytes >= progress.total_bytes / 2:
            self.has_half.set()

    def receive(self, url: str) -> dict[str, torch.Tensor]:
        transport = make_transport(token=TOKEN)
        try:
            if self._how == "whole":
                return transport.fetch_checkpoint([url], STEP, LONG, on_progress=self._note)
            local = {name: torch.zeros_like(tensor) for name, tensor in make_state().items()}
            return transport.fetch_sharded([[url]], 0, 1, STEP, LONG, local_state=local, on_progress=self._note)
        finally:
            self.has_half.set()
            transport.shutdown()


both_ways = pytest.mark.parametrize("how", ["whole", "sharded"])


def is_all_of(state: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(state[name], tensor) for name, tensor in make_state().items())


def port_of(transport: HTTPTransport[Any]) -> int:
    return parse_metadata(transport.metadata()).port


def held_up(
    receiver: Receiver, then: Callable[[Connection, bytes], bytes]
) -> Callable[[Connection, int, bytes], bytes]:
    """Return a link that passes on a few blocks, and then waits until half of the state has come by another."""

    def fault(connection: Connection, passed: int, data: bytes) -> bytes:
        if passed < 40_000:
            return data
        receiver.has_half.wait(20)
        return then(connection, data)

    return fault


def goes_on(connection: Connection, data: bytes) -> bytes:
    return data


def breaks(connection: Connection, data: bytes) -> bytes:
    connection.cut()
    return b""


@both_ways
def test_what_one_link_does_not_bring_comes_by_another(
    source: HTTPTransport[Any], how: str, caplog: pytest.LogCaptureFixture
) -> None:
    receiver = Receiver(how)
    with (
        caplog.at_level(logging.INFO),
        FaultyProxy(port_of(source), held_up(receiver, goes_on), ("127.0.0.2", port_of(source))) as slow,
    ):
        assert is_all_of(receiver.receive(slow.url))
    (line,) = [record.getMessage() for record in caplog.records if "of its addresses: " in record.getMessage()]
    assert f"by 2 of its addresses: {slow.url}: 0." in line and f", {source.metadata()}: 0." in line and "MB/s" in line


@both_ways
def test_a_link_that_dies_in_the_middle_costs_what_it_had_in_flight(source: HTTPTransport[Any], how: str) -> None:
    receiver = Receiver(how)
    with FaultyProxy(port_of(source), held_up(receiver, breaks), ("127.0.0.2", port_of(source))) as lost:
        assert is_all_of(receiver.receive(lost.url))
    assert receiver.progress is not None and receiver.progress.resent_bytes <= IN_FLIGHT[how]


@both_ways
def test_a_further_link_that_dies_costs_no_more(
    source: HTTPTransport[Any], how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (handlers, connection_module):  # else what a link passes on proves nothing
        monkeypatch.setattr(module, "proof_of", lambda key, nonce, host, port: proof_of(key, nonce, "", 0))
    receiver, port = Receiver(how), port_of(source)
    with (
        FaultyProxy(port, held_up(receiver, goes_on), ("127.0.0.2", port)) as slow,
        FaultyProxy(port, held_up(receiver, breaks), ("127.0.0.3", port)),
    ):
        assert is_all_of(receiver.receive(slow.url))
    assert receiver.progress is not None and receiver.progress.resent_bytes <= IN_FLIGHT[how]


class Stranger:
    """Listens at the port of a source at another address, answers what it likes, remembers what it was sent."""

    def __init__(self, answer: bytes, place: tuple[str, int]) -> None:
        self._answer = answer
        self._listener = socket.create_server(place)
        self.heard = b""
        self._thread = threading.Thread(target=self._talk)
        self._thread.start()

    def _talk(self) -> None:
        client, _ = self._listener.accept()
        with client:
            client.settimeout(60)
            while b"\r\n\r\n" not in self.heard:
                self.heard += client.recv(65536)
            client.sendall(self._answer)
            while data := client.recv(65536):  # until the receiver has gone
                self.heard += data

    def end(self) -> bytes:
        self._thread.join(60)
        self._listener.close()
        return self.heard


def answered(body: bytes, status: str = "200 OK") -> bytes:
    return b"HTTP/1.1 %b\r\nContent-Length: %d\r\n\r\n%b" % (status.encode(), len(body), body)


STRANGE = {
    "another proof": answered(b"0" * 64),
    "a proof and more": answered(b"0" * 4096),
    "nothing": answered(b""),
    "a refusal": answered(b"{}", "404 Not Found"),
    "no HTTP": b"SSH-2.0-OpenSSH\r\n",
}


@both_ways
@pytest.mark.parametrize("answer", STRANGE)
def test_a_stranger_at_an_address_of_the_source_is_told_nothing(
    source: HTTPTransport[Any], how: str, answer: str
) -> None:
    stranger = Stranger(STRANGE[answer], ("127.0.0.3", port_of(source)))
    # Longer than the stranger needs to be asked.
    receiver = Receiver(how)
    asked = threading.Event()

    def wait(connection: Connection, passed: int, data: bytes) -> bytes:
        if passed > 40_000 and not asked.is_set():
            stranger._thread.join(60)
            asked.set()
        return data

    with FaultyProxy(port_of(source), wait, ("127.0.0.2", port_of(source))) as slow:
        assert is_all_of(receiver.receive(slow.url))
    heard = stranger.end().decode()
    assert heard.startswith("GET /v1/checkpoint/proof?nonce=") and heard.count("\r\n\r\n") == 1
    assert TOKEN not in heard and "Authorization" not in heard and "X-Ckpt" not in heard


@both_ways
def test_an_address_at_which_nobody_answers_holds_nothing_up(
    source: HTTPTransport[Any], how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "_TELL_TIMEOUT_S", 60.0)
    monkeypatch.setenv("TORCHFT_CKPT_CONNECT_TIMEOUT_SEC", "300")  # longer than the deadline
    place = ("127.0.0.3", port_of(source))
    with contextlib.ExitStack() as silent:
        silent.enter_context(socket.create_server(place, backlog=0))
        for _ in range(3):  # more than it takes: from now on the system answers nothing
            client = silent.enter_context(socket.socket())
            client.setblocking(False)
            client.connect_ex(place)
        assert is_all_of(Receiver(how).receive(source.metadata())), "it was waited for, until the connect timeout"


def test_who_passes_on_the_proof_of_a_source_does_not_pass_for_it(source: HTTPTransport[Any]) -> None:
    url, key = parse_metadata(source.metadata()), source._server.proof_key

    def prove(host: str, key: str) -> None:
        with connecting(url.further(host, key)) as connection:
            connection.open()

    prove("127.0.0.1", key)
    with pytest.raises(SourceRefusedError, match="does not prove that it is source"):
        prove("127.0.0.1", "0" * 32)
    with FaultyProxy(url.port, listens_at=("127.0.0.3", url.port)):
        with pytest.raises(
            SourceRefusedError, match=r"http://127.0.0.3:\d+ does not prove that it is source http://127.0.0.1"
        ):
            prove("127.0.0.3", key)
    with pytest.raises(TransferError):
        prove("127.0.0.4", key)


def test_a_connection_over_which_nothing_was_proved_carries_no_request(source: HTTPTransport[Any]) -> None:
    route = parse_metadata(source.metadata()).further("127.0.0.1", "0" * 32)
    with connecting(route, headers={"Authorization": f"Bearer {TOKEN}"}) as connection:
        for _ in range(2):
            with pytest.raises(SourceRefusedError, match="does not prove"):
                connection.get("/v1/checkpoint")


def test_a_proof_needs_no_token_and_opens_no_other_door(source: HTTPTransport[Any]) -> None:
    paths = ("proof?nonce=" + "0" * 32, "proof?nonce=1", "proof", "proof/", f"{STEP}/manifest", "")
    statuses = []
    with connecting(parse_metadata(source.metadata())) as connection:
        for path in paths:
            answer = connection.get(f"/v1/checkpoint/{path}")
            statuses.append(answer.status)
            answer.read(4096)
    assert statuses == [200, 416, 416, 401, 401, 401]


def test_a_source_names_its_other_addresses_unless_its_user_chose_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_transport, "other_hosts", lambda known_by, bound: ["10.1.0.5", "fd00::5"])
    named = []
    for hostname in (Host("127.0.0.1", is_chosen=False), Host("127.0.0.1", is_chosen=True), "127.0.0.1"):
        transport = make_transport(token=TOKEN, hostname=hostname, bind=None)
        transport.send_checkpoint([], STEP, make_state(), LONG)
        manifest = JobPeers([[transport.metadata()]], token=TOKEN).manifest(STEP)
        transport.shutdown()
        named.append(manifest.elsewhere.hosts if manifest.elsewhere is not None else None)
    assert named == [["10.1.0.5", "fd00::5"], None, None]
