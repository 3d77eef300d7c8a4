"""TLS between a source and a receiver: who is believed, and what is said where it does not come about."""

from __future__ import annotations

import contextlib
import datetime
import socket
import ssl
import threading
import time
from collections.abc import Iterator

import pytest
import torch
import trustme
from support.certificates import client_context, server_context
from support.links import connecting, listening, serving

from torchft_ckpt.checkpointing import HTTPTransport
from torchft_ckpt.checkpointing.protocol import SourceAddress, parse_metadata
from torchft_ckpt.checkpointing.serving.http_server import CheckpointServer
from torchft_ckpt.checkpointing.serving.snapshot_registry import SnapshotRegistry
from torchft_ckpt.checkpointing.state.blocks import DIGEST_BYTES
from torchft_ckpt.errors import ConfigError, SourceLostError, SourceRefusedError

PATH = "/v1/checkpoint/3/blocks/0-0"
MIB = 1024 * 1024
LONG = datetime.timedelta(seconds=90)
LONG_AGO = datetime.datetime(2020, 1, 1, tzinfo=datetime.timezone.utc)


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.fixture(scope="module")
def stranger() -> trustme.CA:
    return trustme.CA()


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
def test_a_state_arrives_bit_equal_over_tls(authority, version):
    tensor = torch.randint(-(2**62), 2**62, (MIB,), generator=torch.Generator().manual_seed(7))  # 8 MiB
    raw = tensor.numpy().tobytes()
    context = client_context(authority)
    context.maximum_version = context.minimum_version = version
    with (
        serving({"w": tensor}, context=server_context(authority, "127.0.0.1"), block_bytes=MIB) as source,
        connecting(source, context) as link,
    ):
        received = bytearray(len(raw))
        for first, last in ((0, 2), (3, 5), (6, 7)):
            answer = link.get(f"/v1/checkpoint/3/blocks/{first}-{last}")
            assert answer.status == 200
            for block in range(first, last + 1):
                answer.read_into(memoryview(received)[block * MIB : (block + 1) * MIB])
                answer.read_into(memoryview(bytearray(DIGEST_BYTES)))
    assert received == raw


def transport(server: ssl.SSLContext | None, client: ssl.SSLContext | None) -> HTTPTransport:
    return HTTPTransport(hostname="127.0.0.1", bind="127.0.0.1", ssl_context=server, client_ssl_context=client)


def test_a_transport_with_contexts_serves_and_fetches_over_tls(authority):
    state = {"w": torch.randn(MIB, generator=torch.Generator().manual_seed(8)), "step": 3}
    source = transport(server_context(authority, "127.0.0.1"), None)
    destination = transport(None, client_context(authority))
    try:
        source.send_checkpoint([1], 3, state, LONG)
        received = destination.recv_checkpoint(0, source.metadata(), 3, LONG)
    finally:
        destination.shutdown()
        source.shutdown()
    assert source.metadata().startswith("https://")
    assert (received["step"], torch.equal(received["w"].view(torch.int32), state["w"].view(torch.int32))) == (3, True)


def test_a_transport_does_not_fetch_from_a_source_that_it_cannot_verify(authority, stranger):
    source = transport(server_context(stranger, "127.0.0.1"), None)
    destination = transport(None, client_context(authority))
    try:
        source.send_checkpoint([1], 3, {"w": torch.zeros(4)}, LONG)
        with pytest.raises(SourceRefusedError, match="does not verify"):
            destination.recv_checkpoint(0, source.metadata(), 3, LONG)
    finally:
        destination.shutdown()
        source.shutdown()


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1"])
def test_a_source_is_believed_under_each_name_that_its_certificate_has(authority, host):
    try:
        socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET).close()
    except OSError:
        pytest.skip(f"no {host} here")
    bind = host if ":" in host else "127.0.0.1"
    with serving(context=server_context(authority, "127.0.0.1", "::1", "localhost"), bind=bind) as source:
        named = parse_metadata(str(SourceAddress(host, source.port, "https")))
        with connecting(named, client_context(authority)) as link:
            assert link.get(PATH).status == 404


@pytest.mark.parametrize(
    ("why", "text"),
    [
        ("another authority", "unable to get local issuer|self.signed"),
        ("expired", "expired"),
        ("another host", "mismatch|not valid for"),
        ("an authority that only we know", "unable to get local issuer|self.signed"),
    ],
)
def test_a_certificate_that_does_not_verify_is_refused_with_the_reason(authority, stranger, why, text):
    server = {
        "another authority": lambda: server_context(stranger, "127.0.0.1"),
        "expired": lambda: server_context(authority, "127.0.0.1", not_after=LONG_AGO),
        "another host": lambda: server_context(authority, "127.0.0.2", "localhost"),
        "an authority that only we know": lambda: server_context(authority, "127.0.0.1"),
    }[why]()
    context = None if why == "an authority that only we know" else client_context(authority)
    with serving(context=server) as source, connecting(source, context) as link:
        with pytest.raises(SourceRefusedError, match=f"does not verify.*({text})") as raised:
            link.get(PATH)
    assert raised.value.party == str(source)


def test_another_address_of_a_source_has_a_certificate_for_the_name_that_the_source_is_known_by(authority):
    context = server_context(authority, "a.source")
    with serving(context=context) as there:
        server = SourceAddress("a.source", there.port, "https").further(there.host, "0" * 32)
        with connecting(server, client_context(authority)) as connection:
            with pytest.raises(SourceRefusedError, match="does not prove that it is source https:"):
                connection.open()
        stranger = SourceAddress("another.source", there.port, "https").further(there.host, "0" * 32)
        with connecting(stranger, client_context(authority)) as connection:
            with pytest.raises(SourceRefusedError, match="its certificate does not verify"):
                connection.open()


def test_a_source_that_should_speak_tls_is_never_asked_without(authority):
    heard: list[bytes] = []

    def talk(client: socket.socket) -> None:
        heard.append(client.recv(65536))
        client.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi")

    with listening(talk, "https") as source, connecting(source, client_context(authority)) as link:
        with pytest.raises(SourceRefusedError, match="plain http"):
            link.get(PATH)
    assert [data[:1] for data in heard] == [b"\x16"]


def test_asking_a_plain_server_over_tls_is_named(authority):
    with serving() as source:
        with connecting(SourceAddress(source.host, source.port, "https"), client_context(authority)) as link:
            with pytest.raises(SourceRefusedError, match="plain http"):
                link.get(PATH)


def test_asking_a_tls_server_without_tls_is_answered_with_what_to_do(authority):
    with serving(context=server_context(authority, "127.0.0.1")) as source:
        with connecting(SourceAddress(source.host, source.port)) as link:
            answer = link.get(PATH)
            refusal = answer.refusal()
            assert (answer.status, refusal.error) == (400, "https_only")
            assert "https://" in str(answer.refused(refusal))


@pytest.mark.parametrize("drips", [False, True])
def test_a_handshake_that_does_not_end_is_given_up_at_the_connect_timeout(authority, drips):
    over, was_waited_for = threading.Event(), threading.Event()

    def talk(client: socket.socket) -> None:
        client.sendall(b"\x16\x03\x03\x3f\xff")  # a long record begins
        for _ in range(2000):  # so long that nobody who gives up at the timeout sees the end of it
            if over.wait(0.02):
                return
            if drips:
                client.sendall(b"\x02")
        was_waited_for.set()

    started = time.monotonic()
    with (
        listening(talk, "https") as source,
        connecting(source, client_context(authority), connect_timeout_s=0.3) as link,
    ):
        try:
            with pytest.raises(SourceLostError, match="timed out"):
                link.get(PATH)
        finally:
            over.set()
    assert (time.monotonic() - started >= 0.3, was_waited_for.is_set()) == (True, False)


def test_a_handshake_is_woken_by_close(authority):
    begun, over = threading.Event(), threading.Event()

    def talk(client: socket.socket) -> None:
        client.recv(65536)
        begun.set()
        over.wait(20)

    with listening(talk, "https") as source, connecting(source, client_context(authority)) as link:
        failures: list[BaseException] = []

        def ask() -> None:
            try:
                link.get(PATH)
            except SourceLostError as error:
                failures.append(error)

        thread = threading.Thread(target=ask)
        thread.start()
        assert begun.wait(120)
        link.close()
        thread.join(60)
        over.set()
        assert [type(failure) for failure in failures] == [SourceLostError]


def test_a_read_over_tls_is_woken_by_close(authority):
    with (
        serving(context=server_context(authority, "127.0.0.1")) as source,
        connecting(source, client_context(authority)) as link,
    ):
        link.get(PATH).read(MIB)
        threading.Timer(0.2, link.close).start()
        with pytest.raises(SourceLostError):
            link.get("/v1/checkpoint/3/manifest?wait_s=10")


def test_with_client_certificates_those_that_have_one_are_served(authority, stranger):
    with serving({"w": torch.arange(5)}, context=server_context(authority, "127.0.0.1", clients=stranger)) as source:
        with connecting(source, client_context(authority, vouched_for_by=stranger)) as link:
            assert link.get(PATH).read(MIB)[:-DIGEST_BYTES] == torch.arange(5).numpy().tobytes()


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
@pytest.mark.parametrize("has_one", [False, True])
def test_with_client_certificates_others_are_turned_away(authority, stranger, has_one, version):
    context = client_context(authority, vouched_for_by=trustme.CA() if has_one else None)
    context.maximum_version = version
    with (
        serving(context=server_context(authority, "127.0.0.1", clients=stranger)) as source,
        connecting(source, context) as link,
    ):
        with pytest.raises((SourceLostError, SourceRefusedError), match=r"TLS|certificate"):
            link.get(PATH)


def test_a_server_that_stops_closes_its_tls_connections(authority):
    with contextlib.ExitStack() as opened:
        with serving(context=server_context(authority, "127.0.0.1")) as source:
            link = opened.enter_context(connecting(source, client_context(authority)))
            link.get(PATH).read(MIB)
        with pytest.raises(SourceLostError):
            link.get(PATH)


def test_a_context_for_the_other_side_is_named(authority):
    with pytest.raises(ConfigError, match="ssl_context"):
        CheckpointServer(
            SnapshotRegistry(), bind="127.0.0.1", port=0, token=None, ssl_context=client_context(authority)
        )
    with pytest.raises(ConfigError, match="ssl_context"):
        with connecting(SourceAddress("127.0.0.1", 1, "https"), server_context(authority, "127.0.0.1")):
            pass


@pytest.fixture
def victim(authority) -> Iterator[HTTPTransport[object]]:
    """A transport with TLS at both sides, and a token."""
    transport: HTTPTransport[object] = HTTPTransport(
        hostname="127.0.0.1",
        token="hidden",
        ssl_context=server_context(authority, "127.0.0.1"),
        client_ssl_context=client_context(authority),
    )
    yield transport
    transport.shutdown()


@pytest.mark.parametrize("call", ["fetch", "fetch_sharded"])
def test_a_transport_that_serves_https_asks_a_plain_source_for_nothing(victim, call) -> None:
    """The lighthouse names sources, in plain HTTP: whoever changes its packets must not turn TLS off."""
    heard: list[bytes] = []
    with listening(lambda sock: heard.append(sock.recv(4096))) as source:
        plain = f"http://{source.host}:{source.port}"
        if call == "fetch":
            with pytest.raises(SourceRefusedError, match="speaks plain http"):
                victim.fetch_checkpoint([plain], 3, LONG)
        else:
            with pytest.raises(SourceRefusedError, match="speaks plain http"):
                victim.fetch_sharded([[plain]], 0, 1, 3, LONG, local_state={"w": torch.zeros(4)})
    assert not heard


@pytest.mark.parametrize("metadata", ["http://h:1", "https://h:1", "https://[::1]:443", "http://10.0.0.1:65535"])
def test_metadata_is_read_and_written_with_its_scheme(metadata):
    assert str(parse_metadata(metadata)) == metadata
