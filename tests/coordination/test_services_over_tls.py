"""Lighthouse, manager service and commands over TLS: who is let in, who is told what, and that no token goes out in the clear."""

from __future__ import annotations

import contextlib
import datetime
import http.client
import json
import logging
import socket
import ssl
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import trustme
from support.certificates import VARIABLES, Files
from support.links import listening
from support.services import make_group_service
from support.waiting import Heard

from torchft_ckpt import HTTPTransport, LighthouseServer
from torchft_ckpt.__main__ import main
from torchft_ckpt.checkpointing.fetching.connection import SourceConnection
from torchft_ckpt.checkpointing.protocol import parse_metadata
from torchft_ckpt.coordination import GroupService, RankSession
from torchft_ckpt.core.coordination.messages import PROTOCOL_VERSION, Hello
from torchft_ckpt.errors import ConfigError, SourceLostError, SourceRefusedError, TlsError
from torchft_ckpt.integrations.dcp.peer_reader import PeerReader
from torchft_ckpt.tls import Tls

AUTHORITY, STRANGER = trustme.CA(), trustme.CA()
LONG_AGO = datetime.datetime(2020, 1, 1, tzinfo=datetime.timezone.utc)
SECRET = "the-secret-of-the-job"
AMPLE = timedelta(seconds=60)


@pytest.fixture
def files(tmp_path: Path) -> Files:
    return Files(tmp_path / "host", AUTHORITY)


def tls_of(files: Files, *, certificate: bool = True) -> Tls:
    cert, key, authority = files.variables().values()
    return Tls(cert, key, authority) if certificate else Tls("", "", authority)


@contextmanager
def lighthouse(files: Files | None, token: str = "") -> Iterator[LighthouseServer]:
    with serving(None if files is None else tls_of(files).server, token) as server:
        yield server


@contextmanager
def serving(context: Any, token: str = "") -> Iterator[LighthouseServer]:
    server = LighthouseServer("127.0.0.1:0", 1, token=token, ssl_context=context, heartbeat_timeout_ms=60_000)
    try:
        yield server
    finally:
        server.shutdown()


def join(address: str, tls: Tls | None, **changes: Any) -> None:
    """Have a group of one come in, and leave."""
    make_group_service(address, world_size=1, tls=tls, **changes).shutdown("the test is over")


def get(server: LighthouseServer, path: str, context: ssl.SSLContext, token: str = "") -> tuple[int, bytes]:
    host, port = server.address().partition("://")[2].rsplit(":", 1)
    connection = http.client.HTTPSConnection(host, int(port), context=context, timeout=60)
    connection.request("GET", path, headers={"Authorization": f"Bearer {token}"} if token else {})
    answer = connection.getresponse()
    found = answer.status, answer.read()
    connection.close()
    return found


@contextmanager
def hearing(answer: bytes) -> Iterator[tuple[str, list[bytes]]]:
    """Somebody who writes down what he hears in the clear, and answers so; yields his address and what he has heard."""
    heard: list[bytes] = []

    def talk(client: socket.socket) -> None:
        heard.append(client.recv(65536))
        client.sendall(answer)

    with listening(talk) as there:
        yield f"{there.host}:{there.port}", heard


# ------------------------------------------------------------------------------------------------------- who is let in


def test_members_need_a_certificate_readers_the_token_and_probes_nothing(files: Files) -> None:
    with lighthouse(files, SECRET) as server:
        assert server.address().startswith("https://127.0.0.1:")
        anonymous = tls_of(files, certificate=False).client()
        assert get(server, "/healthz", anonymous) == (200, b"ok\n")
        assert get(server, "/", anonymous)[0] == 401
        status, body = get(server, "/", anonymous, SECRET)
        assert (status, json.loads(body)["jobs"]) == (200, {})
        assert get(server, "/metrics", anonymous)[0] == 401
        assert get(server, "/metrics", anonymous, SECRET)[0] in (200, 501), "501 without the extra metrics"
        status, body = get(server, "/v1/groups", anonymous, SECRET)
        assert (status, json.loads(body)["error"]) == (403, "certificate")
        join(server.address(), tls_of(files), token=SECRET)


@pytest.mark.parametrize("has_one", [False, True])
def test_without_a_token_who_shows_no_certificate_stays_a_stranger(files: Files, has_one: bool) -> None:
    """Else anybody could fill the places of members."""
    with lighthouse(files) as server:
        host, port = server.address().removeprefix("https://").rsplit(":", 1)
        context = tls_of(files, certificate=has_one).client()
        connection = http.client.HTTPSConnection(host, int(port), context=context, timeout=60)
        connection.request("GET", "/healthz")
        assert connection.getresponse().read() == b"ok\n"
        clients = server._front._clients
        assert [clients._admission.knows(one) for one in clients._connections] == [has_one]
        connection.close()


def test_a_member_without_a_certificate_is_told_what_to_set(files: Files) -> None:
    with lighthouse(files) as server:
        with pytest.raises(
            TlsError, match=r"no TLS with the lighthouse at 127.* set TORCHFT_CKPT_TLS_CERT and TORCHFT_CKPT_TLS_KEY"
        ):
            join(server.address(), tls_of(files, certificate=False))


def test_an_authority_that_is_not_named_asks_for_no_certificates(files: Files) -> None:
    cert, key, authority = files.variables().values()
    with serving(Tls(cert, key, "").server) as server:
        join(server.address(), Tls("", "", authority))


def test_ranks_of_a_group_speak_tls_with_their_manager_service(files: Files, tmp_path: Path) -> None:
    other = Files(tmp_path / "other", AUTHORITY, "192.0.2.7")
    with lighthouse(files) as server:
        service = make_group_service(server.address(), tls=tls_of(files), token=SECRET)
        settings: dict[str, Any] = {
            "address": service.address,
            "group_rank": 1,
            "on_message": lambda message: None,
            "token": SECRET,
            "heartbeat_interval": timedelta(seconds=2),
            "connect_timeout": AMPLE,
            "replica_id": "group:1",
        }
        try:
            with pytest.raises(
                TlsError, match=r"manager service \(group rank 0\) at .* it speaks TLS, and none is set up here"
            ):
                RankSession(**settings)
            with pytest.raises(TlsError, match=r"set TORCHFT_CKPT_TLS_CERT and TORCHFT_CKPT_TLS_KEY"):
                RankSession(**settings, tls=tls_of(files, certificate=False))
            RankSession(**settings, tls=tls_of(other)).shutdown("the test is over")
        finally:
            service.shutdown("the test is over")


# ------------------------------------------------------------------------------------------- who does not come together


def believing_the_stranger(files: Files) -> Files:
    return Files(files.key.parent / "stranger", STRANGER)


def test_a_member_that_believes_another_authority_says_so_at_once(files: Files) -> None:
    other = believing_the_stranger(files)
    with lighthouse(files) as server:
        said = rf"its certificate does not verify with {other.authority} \(TORCHFT_CKPT_TLS_CA\).*; set TORCHFT_CKPT_TLS_CA"
        with pytest.raises(TlsError, match=said) as raised:
            join(server.address(), tls_of(other))
    assert raised.value.party == server.address().removeprefix("https://")


def serving_anyway(certificate: Files) -> ssl.SSLContext:
    """What a server has that does not look at its own certificate."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate.certificate, certificate.key)
    return context


@pytest.mark.parametrize(
    ("names", "not_after", "said"),
    [
        (("192.0.2.7", "elsewhere"), None, "IP address mismatch.*; use an address that is in it"),
        (("127.0.0.1",), LONG_AGO, "certificate has expired; renew it there, which needs no restart"),
    ],
)
def test_a_lighthouse_whose_certificate_does_not_verify_is_named(
    files: Files, tmp_path: Path, names: tuple[str, ...], not_after: datetime.datetime | None, said: str
) -> None:
    bad = Files(tmp_path / "bad", AUTHORITY, *names, not_after=not_after)
    with serving(serving_anyway(bad)) as server, pytest.raises(TlsError, match=said):
        join(server.address(), tls_of(files))


def test_a_member_whose_certificate_expires_meanwhile_hears_that_it_is_its_own(
    files: Files, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    mine = Files(tmp_path / "mine", AUTHORITY)
    tls = tls_of(mine)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    AUTHORITY.configure_trust(context)
    AUTHORITY.issue_cert("x", not_before=LONG_AGO - timedelta(days=1), not_after=LONG_AGO).configure_cert(context)
    mine.renew(AUTHORITY, not_after=LONG_AGO)
    tls.client = lambda: context  # type: ignore[method-assign]  # as if it were read before it expired
    with lighthouse(files) as server:
        with pytest.raises(
            TlsError, match=r"it closed the connection: the certificate .*host.pem .*expired; make a new one"
        ):
            join(server.address(), tls)
        source = SourceConnection(
            parse_metadata(server.address()), headers={}, connect_timeout_s=60, stall_timeout_s=60, ssl_context=tls
        )
        with pytest.raises((SourceLostError, SourceRefusedError), match=r"host\.pem .*expired"):
            source.get("/")
        source.release()
    assert "a connection of 127.0.0.1 was not opened: its certificate does not verify" in caplog.text


def test_a_client_whose_certificate_is_of_a_stranger_hears_where_to_look(
    files: Files, tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    """It believes both authorities, and the lighthouse one of them."""
    other = Files(tmp_path / "other", STRANGER)
    other.authority.write_bytes(AUTHORITY.cert_pem.bytes() + STRANGER.cert_pem.bytes())
    options = [
        f"--tls-{name}={path}" for name, path in zip(("cert", "key", "ca"), other.variables().values(), strict=True)
    ]
    with lighthouse(files) as server:
        assert main(["status", "--lighthouse", server.address(), *options]) == 1
    assert (
        f"its log says why: perhaps it does not accept our certificate {other.certificate}" in capsys.readouterr().err
    )
    assert "a connection of 127.0.0.1 was not opened: its certificate does not verify: " in caplog.text


@pytest.mark.parametrize("command", ["status", "allow-step-loss"])
def test_a_server_that_leaves_our_request_unread_is_no_lighthouse_that_is_away(
    files: Files, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """So it ends where what we asked was there before our certificate had been looked at: with a reset."""
    options = [
        f"--tls-{name}={path}" for name, path in zip(("cert", "key", "ca"), files.variables().values(), strict=True)
    ]
    context = tls_of(files).server()
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def reset() -> None:
            with contextlib.suppress(OSError):  # the listener is closed
                while True:  # aiohttp asks once more by itself
                    client, _ = listener.accept()
                    with context.wrap_socket(client, server_side=True) as secured:
                        secured.recv(1)
                        secured.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

        thread = threading.Thread(target=reset)
        thread.start()
        assert main([command, "--lighthouse", f"127.0.0.1:{listener.getsockname()[1]}", *options]) == 1
        listener.shutdown(socket.SHUT_RDWR)
        thread.join(60)
    said = f"its log says why: perhaps it does not accept our certificate {files.certificate}"
    assert said in capsys.readouterr().err


def test_a_context_of_a_client_serves_nobody_and_is_refused(files: Files) -> None:
    with pytest.raises(ConfigError, match="ssl_context is one for clients; a server needs PROTOCOL_TLS_SERVER"):
        LighthouseServer("127.0.0.1:0", 1, ssl_context=tls_of(files).client())


def test_a_plain_member_that_meets_a_tls_lighthouse_is_told_so(
    files: Files, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    with lighthouse(files) as server:
        plain = server.address().removeprefix("https://")
        said = "it speaks TLS, and none is set up here; set TORCHFT_CKPT_TLS_CERT, _KEY and _CA"
        with pytest.raises(TlsError, match=f"no TLS with the lighthouse at {plain}: {said}"):
            join(plain, None)
        for command in ("status", "allow-step-loss"):
            assert main([command, "--lighthouse", plain]) == 1
            assert said in capsys.readouterr().err
    assert "it speaks plain http, and this service https only" in caplog.text


def test_a_tls_member_that_meets_a_plain_lighthouse_says_nothing_to_it(
    files: Files, capsys: pytest.CaptureFixture[str]
) -> None:
    options = [
        f"--tls-{name}={path}" for name, path in zip(("cert", "key", "ca"), files.variables().values(), strict=True)
    ]
    with lighthouse(None, SECRET) as server:
        plain = server.address().removeprefix("http://")
        with pytest.raises(TlsError, match=r"it speaks plain http, and TLS is set up here; set TORCHFT_CKPT_TLS_CERT"):
            join(plain, tls_of(files), token=SECRET)
        assert main(["status", "--lighthouse", plain, "--token", SECRET, *options]) == 1
        assert "it speaks plain http, and TLS is set up here" in capsys.readouterr().err
        with pytest.raises(ConfigError, match="that is plain http, and TLS is set up here: nothing is sent there"):
            join(f"http://{plain}", tls_of(files), token=SECRET)


# --------------------------------------------------------------------------------------------- no token in the clear


def test_no_token_is_sent_in_the_clear_whatever_the_address_looks_like(
    files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {**files.variables(), "TORCHFT_CKPT_TOKEN": SECRET}.items():
        monkeypatch.setenv(name, value)
    with hearing(b"HTTP/1.1 101 Switching Protocols\r\n\r\n") as (address, heard):
        for told in (address, f"http://{address}", f"ws://{address}", f"https://{address}"):
            with pytest.raises((TlsError, ConfigError)):
                join(told, tls_of(files), token=SECRET, connect_timeout=AMPLE)
            for command in ("status", "drain", "forget-job", "inspect"):
                more = [] if command != "drain" else ["group"]
                named = [told] if command == "inspect" else [*more, "--lighthouse", told]
                assert main([command, *named]) in (1, 2)
            with pytest.raises((TlsError, ConfigError)):
                PeerReader(lighthouse=told, job="j").read_metadata()
            with pytest.raises((SourceRefusedError, ConfigError)):
                PeerReader([told]).read_metadata()
        transport: HTTPTransport[object] = HTTPTransport(hostname="127.0.0.1", bind="127.0.0.1")
        with pytest.raises(SourceRefusedError, match="speaks plain http"):
            transport.recv_checkpoint(0, f"http://{address}", 1, AMPLE)
        transport.shutdown()
    assert heard and not [data for data in heard if not data.startswith(b"\x16")], "it began without a handshake"


def test_a_redirect_of_a_tls_lighthouse_into_the_clear_is_not_followed(
    files: Files, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in files.variables().items():
        monkeypatch.setenv(name, value)
    context = tls_of(files).server()
    with hearing(b"") as (plain, heard), socket.create_server(("127.0.0.1", 0)) as listener:
        answer = f"HTTP/1.1 302 Found\r\nLocation: http://{plain}/\r\nContent-Length: 0\r\n\r\n".encode()

        def redirect() -> None:
            for _ in range(2):
                client, _ = listener.accept()
                with context.wrap_socket(client, server_side=True) as secured:
                    secured.recv(65536)
                    secured.sendall(answer)

        thread = threading.Thread(target=redirect)
        thread.start()
        for command in ("status", "allow-step-loss"):
            address = f"127.0.0.1:{listener.getsockname()[1]}"
            assert main([command, "--lighthouse", address, "--token", SECRET]) == 1
            assert f"it redirects to http://{plain}/, which is not followed" in capsys.readouterr().err
        thread.join(60)
    assert heard == []


# ------------------------------------------------------------------------------------------------------- renewal


class Group:
    """A group of one, whose connections are counted."""

    def __init__(self, address: str, tls: Tls) -> None:
        self.num_hellos, self.came_back = 0, threading.Event()
        self.service: GroupService = make_group_service(
            address, world_size=1, hello=self.hello, tls=tls, heartbeat_interval=timedelta(seconds=0.1)
        )

    def hello(self) -> Hello:
        self.num_hellos += 1
        if self.num_hellos > 1:
            self.came_back.set()
        return Hello(protocol=PROTOCOL_VERSION, replica_id="group:1", group_world_size=1)

    def end(self) -> None:
        self.service.shutdown("the test is over")


def test_a_certificate_that_is_renewed_is_shown_to_new_ones_and_those_that_are_here_stay(files: Files) -> None:
    with lighthouse(files) as server, ending(Group(server.address(), tls_of(files))) as group:
        host, port = server.address().removeprefix("https://").split(":")

        def shown() -> str:
            return ssl.get_server_certificate((host, int(port))).strip()

        before = shown()
        renewed = files.renew(AUTHORITY).decode().strip()
        assert before != renewed == shown()
        assert group.num_hellos == 1


@contextmanager
def ending(group: Group) -> Iterator[Group]:
    try:
        yield group
    finally:
        group.end()


def test_a_lighthouse_that_comes_back_with_a_bad_certificate_ends_no_group_and_is_renewed(
    files: Files, tmp_path: Path
) -> None:
    now = good, bad = [tls_of(files).server(), serving_anyway(Files(tmp_path / "bad", STRANGER))]
    refused: list[Exception] = []
    heard, log = Heard("does not verify"), logging.getLogger("torchft_ckpt.coordination.lighthouse_connection")
    log.addHandler(heard)
    try:
        with serving(lambda: now[0]) as server, ending(Group(server.address(), tls_of(files))) as group:
            group.service._user_on_refused = refused.append
            now[0] = bad
            (channel,) = server._channels.values()
            server._thread.call_soon(channel.abort)
            assert heard.there.wait(60)
            now[0] = good
            assert group.came_back.wait(60)
            assert refused == []
    finally:
        log.removeHandler(heard)


# ---------------------------------------------------------------------------------------------------------- plain jobs


def test_a_plain_service_has_nothing_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)

    def never(*_: object) -> None:
        raise AssertionError("a context was made")

    monkeypatch.setattr(ssl.SSLContext, "load_cert_chain", never)
    monkeypatch.setattr("torchft_ckpt.tls.Tls.__init__", never)
    with lighthouse(None) as server:
        assert server.address().startswith("http://")
        join(server.address(), None)
    transport: HTTPTransport[object] = HTTPTransport(hostname="127.0.0.1", bind="127.0.0.1")
    assert transport.metadata().startswith("http://")
    transport.shutdown()


def test_an_https_address_without_files_says_which_to_name() -> None:
    with pytest.raises(ConfigError, match=r"no TLS is set up here; set TORCHFT_CKPT_TLS_CA"):
        join("https://127.0.0.1:1", None)
