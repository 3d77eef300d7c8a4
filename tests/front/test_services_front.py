"""What strangers can take of the services of coordination: little, for a short time, and no place of those who have the token."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import dataclasses
import functools
import logging
import secrets
import socket
import sys
import time
from collections.abc import Callable, Iterator
from datetime import timedelta

import pytest
from aiohttp import web
from support.ports import is_open
from support.services import make_group_service
from support.waiting import wait_until

from torchft_ckpt import LighthouseServer
from torchft_ckpt.config import parse_host_port
from torchft_ckpt.coordination import group_service, lighthouse_server
from torchft_ckpt.coordination.loop_thread import LoopThread
from torchft_ckpt.core.coordination.messages import PROTOCOL_VERSION, Hello, RankHello, encode
from torchft_ckpt.core.services.proofs import RankProof
from torchft_ckpt.front import serving as serving_module
from torchft_ckpt.front.limits import FrontLimits, showed_token
from torchft_ckpt.front.serving import Front
from torchft_ckpt.network import listen

LONG = timedelta(seconds=20)
TOKEN = "secret"
SHORT_S = 0.8
needs_linux = pytest.mark.skipif(sys.platform != "linux", reason="needs all of 127.0.0.0/8 and /proc")
Address = tuple[str, int]


@contextlib.contextmanager
def lighthouse(token: str = TOKEN) -> Iterator[Address]:
    server = LighthouseServer("127.0.0.1:0", min_replicas=1, token=token)
    try:
        yield parse_host_port(server.address(), what="address")
    finally:
        server.shutdown()


@contextlib.contextmanager
def manager_service(token: str = TOKEN, hostname: str = "127.0.0.1", world_size: int = 2) -> Iterator[Address]:
    with lighthouse(token) as (host, port):
        service = make_group_service(
            f"{host}:{port}", world_size=world_size, hostname=hostname, token=token, connect_timeout=LONG
        )
        try:
            yield parse_host_port(service.address, what="address")
        finally:
            service.shutdown("the test is over")


of_websockets = pytest.mark.parametrize(
    ("serving", "path", "hello"),
    [
        (lighthouse, "/v1/groups", Hello(protocol=PROTOCOL_VERSION, replica_id="g:1")),
        (manager_service, "/v1/ranks", RankHello(protocol=PROTOCOL_VERSION, group_rank=1)),
    ],
    ids=["lighthouse", "manager service"],
)
of_all = pytest.mark.parametrize("serving", [lighthouse, manager_service])


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fronts wait for a moment only."""
    limits = dataclasses.replace(lighthouse_server._LIMITS, head_timeout_s=SHORT_S)
    monkeypatch.setattr(lighthouse_server, "_LIMITS", limits)
    monkeypatch.setattr(group_service, "FrontLimits", functools.partial(FrontLimits, head_timeout_s=SHORT_S))


def connected(address: Address, from_host: str = "127.0.0.1") -> socket.socket:
    return socket.create_connection(address, timeout=60, source_address=(from_host, 0))


def handshake(path: str, token: str = TOKEN, key: bytes = base64.b64encode(bytes(16))) -> bytes:
    shown = (
        RankProof(token, "group:1", secrets.token_hex(16)).authorization if path == "/v1/ranks" else f"Bearer {token}"
    )
    lines = [f"GET {path} HTTP/1.1", "Host: h", f"Authorization: {shown}", "Connection: Upgrade"]
    lines += ["Upgrade: websocket", "Sec-WebSocket-Version: 13"]
    return "\r\n".join(lines).encode() + b"\r\nSec-WebSocket-Key: " + key + b"\r\n\r\n"


def frame(text: str) -> bytes:
    """One masked message, by a mask of zeros."""
    assert len(text) < 65536
    return b"\x81" + (bytes([0x80 | 126]) + len(text).to_bytes(2, "big")) + bytes(4) + text.encode()


def speaks(address: Address, path: str) -> socket.socket:
    """Return a connection that has become a WebSocket."""
    sock = connected(address)
    sock.sendall(handshake(path))
    assert sock.recv(65536).startswith(b"HTTP/1.1 101")
    return sock


def asks(address: Address, request: bytes) -> bytes:
    with connected(address) as sock, contextlib.suppress(ConnectionResetError):
        sock.sendall(request)
        return sock.recv(65536)
    return b""


@of_all
@pytest.mark.usefixtures("impatient")
def test_a_head_that_drips_is_cut_off(serving: Callable[[], contextlib.AbstractContextManager[Address]]) -> None:
    with serving() as address, connected(address) as slow:
        slow.sendall(b"GET / HTTP/1.1\r\nX-Slow: ")

        def is_cut() -> bool:
            with contextlib.suppress(OSError):
                slow.send(b"a")
            return not is_open(slow)

        wait_until(is_cut)


@of_websockets
@pytest.mark.usefixtures("impatient")
def test_a_websocket_that_does_not_say_hello_is_closed_and_one_that_did_may_be_silent(
    serving: Callable[[], contextlib.AbstractContextManager[Address]], path: str, hello: Hello | RankHello
) -> None:
    with serving() as address, speaks(address, path) as silent, speaks(address, path) as introduced:
        introduced.sendall(frame(encode(hello)))
        wait_until(lambda: not is_open(silent))
        time.sleep(2 * SHORT_S)
        assert is_open(introduced)


@needs_linux
@of_websockets
def test_strangers_take_few_descriptors_and_no_place_of_one_that_showed_the_token(
    serving: Callable[[], contextlib.AbstractContextManager[Address]],
    path: str,
    hello: Hello | RankHello,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("torchft_ckpt.front.limits.max_descriptors", lambda: 160)
    with serving() as address, speaks(address, path) as early, contextlib.ExitStack() as opened:
        early.sendall(frame(encode(hello)))
        strangers = [opened.enter_context(connected(address, "127.0.0.2")) for _ in range(100)]
        wait_until(lambda: sum(map(is_open, strangers)) == 40)  # a quarter of what it may have
        assert [is_open(strangers[0]), is_open(strangers[-1]), is_open(early)] == [False, True, True]
        assert asks(address, handshake(path)).startswith(b"HTTP/1.1 101")


@of_websockets
@pytest.mark.parametrize("token", [TOKEN, ""], ids=["with a token", "without one"])
def test_many_come_in_from_one_address(
    serving: Callable[..., contextlib.AbstractContextManager[Address]], path: str, hello: Hello | RankHello, token: str
) -> None:
    """As groups behind one address do, and the ranks of a group on one host. All have connected before the first speaks."""
    options = {} if serving is lighthouse else {"world_size": 150}
    with serving(token, **options) as address, contextlib.ExitStack() as opened:
        for _ in range(3):
            socks = [opened.enter_context(connected(address)) for _ in range(50)]
            for sock in socks:
                sock.sendall(handshake(path, token))
            assert [sock.recv(12) for sock in socks] == [b"HTTP/1.1 101"] * 50


@pytest.mark.parametrize("token", [TOKEN, ""], ids=["with a token", "without one"])
def test_a_lighthouse_takes_half_of_the_descriptors_of_its_process(token: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torchft_ckpt.front.limits.max_descriptors", lambda: 40)
    request = f"GET /healthz HTTP/1.1\r\nHost: h\r\nAuthorization: Bearer {token}\r\n\r\n".encode()
    with lighthouse(token) as address, contextlib.ExitStack() as opened:
        socks = []
        for _ in range(30):
            sock = opened.enter_context(connected(address))
            with contextlib.suppress(ConnectionError):
                sock.sendall(request)
                sock.recv(12)
            socks.append(sock)
        wait_until(lambda: sum(map(is_open, socks)) == 20)
        assert all(map(is_open, socks[:20]))


MALFORMED = {
    "a head that is none": b"GET / HTTP/1.1\r\nHost\x00: \x1b[31m" + b"A" * 8000 + b"\r\n\r\n",
    "a path of zeros": b"GET /" + b"\x00" * 8000 + b" HTTP/1.1\r\n\r\n",
    "a wrong token": b"GET / HTTP/1.1\r\nHost: h\r\nAuthorization: Bearer guess\r\n\r\n",
    "no method": b"\x1b[31m" * 1000 + b"\r\n\r\n",
}


@of_all
@pytest.mark.parametrize("request_", MALFORMED.values(), ids=MALFORMED)
def test_strangers_write_a_short_line_to_the_log_now_and_then(
    serving: Callable[[], contextlib.AbstractContextManager[Address]],
    request_: bytes,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.INFO), serving() as address:
        caplog.clear()
        started = time.monotonic()
        for _ in range(30):
            assert asks(address, request_)[9:10] in (b"4", b"")
        took_s = time.monotonic() - started
        log = "".join(logging.Formatter("%(message)s").format(record) + "\n" for record in caplog.records)
    assert len(log) <= 600 * (took_s + 2)
    assert "\x1b" not in log and "AAAA" * 100 not in log


@of_websockets
@pytest.mark.parametrize("key", [b"\xc3\xa9" * 12, b"short", b""])
def test_a_handshake_with_a_key_that_is_none_is_a_bad_request(
    serving: Callable[[], contextlib.AbstractContextManager[Address]],
    path: str,
    hello: Hello | RankHello,
    key: bytes,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with serving() as address:
        answer = asks(address, handshake(path, key=key))
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert "Traceback" not in caplog.text


@needs_linux
@pytest.mark.parametrize(("hostname", "elsewhere"), [("127.0.0.3", False), ("localhost", True)])
def test_the_manager_service_listens_where_its_ranks_are_told_to_come(hostname: str, elsewhere: bool) -> None:
    with manager_service(hostname=hostname) as (host, port):
        connected((host, port)).close()
        try:
            connected(("127.0.0.4", port)).close()
            is_elsewhere = True
        except ConnectionRefusedError:
            is_elsewhere = False
    assert (host, is_elsewhere) == (hostname, elsewhere)


def test_a_handler_that_is_shown_the_token_in_a_way_of_its_own_has_a_place_kept() -> None:
    """A token that is proved, and not sent, is not seen by the front."""

    async def prove(request: web.Request) -> web.Response:
        showed_token(request)
        return web.Response()

    async def serve(listeners: list[socket.socket]) -> Front:
        app = web.Application()
        app.add_routes([web.get("/", prove)])
        limits = FrontLimits(max_connections=4, max_connections_per_client=2)
        front = Front(app, listeners, name="the server", token=TOKEN, limits=limits)
        await front.start()
        return front

    thread = LoopThread("front")
    listeners = listen("127.0.0.1", 0, 16)
    address = listeners[0].getsockname()
    front = thread.run(serve(listeners))
    with contextlib.ExitStack() as opened:
        socks = [opened.enter_context(connected(address)) for _ in range(2)]
        socks[0].sendall(b"GET / HTTP/1.1\r\nHost: h\r\n\r\n")
        assert socks[0].recv(12) == b"HTTP/1.1 200"
        socks += [opened.enter_context(connected(address)) for _ in range(3)]
        wait_until(lambda: list(map(is_open, socks)) == [True, False, False, True, True])
    thread.finish(front.close)


def test_connections_are_cut_though_the_application_does_not_end_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving_module, "_CLOSE_TIMEOUT_S", 0.05)

    async def serve(listeners: list[socket.socket]) -> Front:
        app = web.Application()
        app.on_shutdown.append(lambda app: asyncio.sleep(20))
        front = Front(app, listeners, name="the server", token="", limits=FrontLimits())
        await front.start()
        return front

    thread = LoopThread("front")
    listeners = listen("127.0.0.1", 0, 16)
    front = thread.run(serve(listeners))
    with connected(listeners[0].getsockname()) as idle:
        wait_until(lambda: len(front._clients._connections) == 1)
        thread.run(front.close())
        assert not is_open(idle)
    thread.finish(lambda: asyncio.sleep(0))
