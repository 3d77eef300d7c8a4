"""What one client may take of a server, and that the others are served meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import itertools
import json
import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import trustme
from support.certificates import client_context, server_context
from support.links import connecting, listening, serving
from support.waiting import wait_until

from torchft_ckpt.checkpointing.fetching.connection import SourceConnection
from torchft_ckpt.checkpointing.protocol import SourceAddress
from torchft_ckpt.checkpointing.serving.http_server import ServerLimits
from torchft_ckpt.errors import ConfigError, SourceLostError
from torchft_ckpt.front.limits import ClientLimits, GuardedConnection, SparseLog

PATH = "/v1/checkpoint/3/manifest"
HEAD = f"GET {PATH} HTTP/1.1\r\nHost: h\r\n".encode()
SHORT_S = 0.5
"""A limit that is waited for. What is to come within it comes at once, but for what a busy machine takes."""
other_addresses = pytest.mark.skipif(
    sys.platform != "linux", reason="needs all of 127.0.0.0/8 on the loopback interface"
)


def connected(source: SourceAddress, from_host: str = "127.0.0.1") -> socket.socket:
    return socket.create_connection((source.host, source.port), timeout=60, source_address=(from_host, 0))


def ended(sock: socket.socket) -> bool:
    """Read to the end; whether nothing but the end came."""
    try:
        return sock.recv(65536) == b""
    except ConnectionResetError:
        return True


def answer_to(sock: socket.socket, request: bytes) -> tuple[int, dict[str, object]]:
    """Send a request and return the status and the refusal in its answer."""
    sock.sendall(request)
    response = http.client.HTTPResponse(sock)
    response.begin()
    return response.status, json.loads(response.read())


@contextlib.contextmanager
def asked(source: SourceAddress, request: bytes) -> Iterator[tuple[socket.socket, int, dict[str, object]]]:
    """A connection, and the answer to a request on it. It is made again if it was closed before all of that was sent."""
    for may_be_late in (True, True, True, True, False):
        with connected(source) as sock:
            try:
                answer = answer_to(sock, request)
            except (http.client.RemoteDisconnected, ConnectionError):
                if may_be_late:
                    continue
                raise
            yield sock, *answer
            return


# Time


def test_a_head_that_drips_is_cut_off_while_others_are_served():
    started = time.monotonic()
    with serving(head_timeout_s=SHORT_S) as source, connecting(source) as other, connected(source) as slow:
        statuses, is_cut_off = set(), False
        slow.settimeout(0.02)
        for byte in HEAD.ljust(
            500, b"a"
        ):  # no wait between two bytes is as long as the limit, all of them are much longer
            answer = other.get(PATH)
            answer.read(4096)
            statuses.add(answer.status)
            try:
                slow.sendall(bytes([byte]))
                is_cut_off = slow.recv(1) == b""
            except TimeoutError:
                continue
            except ConnectionError:
                is_cut_off = True
            break
        took_s = time.monotonic() - started
    assert (is_cut_off, took_s >= SHORT_S, statuses) == (True, True, {404})


@pytest.mark.parametrize("sent", [b"", b"G", HEAD, HEAD + b"X-Long: "])
def test_a_connection_that_does_not_finish_its_request_is_closed(sent):
    with serving(head_timeout_s=SHORT_S) as source, connected(source) as sock:
        sock.sendall(sent)
        assert ended(sock)


@pytest.mark.parametrize("sent", [b"", b"\x16", b"\x16\x03\x01"])
def test_a_tls_handshake_that_does_not_come_is_given_up(sent):
    with serving(context=server_context(trustme.CA(), "127.0.0.1"), head_timeout_s=SHORT_S) as source:
        with connected(source) as sock:
            sock.sendall(sent)
            assert ended(sock)


def test_a_connection_is_closed_when_the_body_of_a_request_does_not_come():
    """Without the token it is answered before its body is there."""
    post = b"POST /v1/checkpoint/3/parts HTTP/1.1\r\nHost: h\r\nContent-Length: 100\r\n\r\n"
    with serving(token="secret", head_timeout_s=SHORT_S) as source, asked(source, post) as (sock, status, _):
        assert status == 401 and ended(sock)


@pytest.mark.slow
def test_a_body_that_comes_in_pieces_is_waited_for_and_its_answer_is_not_held_to_a_time():
    post = f"POST {PATH.replace('manifest', 'parts')} HTTP/1.1\r\nHost: h\r\nContent-Length: 4\r\n\r\n".encode()
    with serving(head_timeout_s=4 * SHORT_S) as source, connected(source) as sock:
        sock.sendall(post + b"no")
        time.sleep(SHORT_S / 4)
        assert answer_to(sock, b"pe")[0] == 404
        request = f"GET {PATH}?wait_s={6 * SHORT_S} HTTP/1.1\r\nHost: h\r\n\r\n".encode()
        assert answer_to(sock, request)[1]["error"] == "not_yet"


def test_a_connection_is_closed_when_nothing_more_is_asked_on_it():
    with serving(head_timeout_s=SHORT_S) as source, asked(source, HEAD + b"\r\n") as (sock, status, _):
        assert status == 404 and ended(sock)


def test_a_request_that_is_held_up_by_the_server_is_not_idle():
    request = f"GET {PATH}?wait_s={3 * SHORT_S} HTTP/1.1\r\nHost: h\r\n\r\n".encode()
    with serving(head_timeout_s=SHORT_S) as source, asked(source, request) as (_, _, refusal):
        assert refusal["error"] == "not_yet"


def large_state() -> dict[str, str]:
    """A state whose manifest is longer than what kernels keep for a connection."""
    return {"text": "x" * 12_000_000}


@pytest.mark.slow
@pytest.mark.parametrize("tls", [False, True])
def test_an_answer_that_is_read_slowly_arrives_whole(tls):
    authority = trustme.CA()
    context = server_context(authority, "127.0.0.1") if tls else None
    with serving(large_state(), context=context, head_timeout_s=2.0) as source:
        with connecting(source, client_context(authority) if tls else None) as link:
            answer = link.get(PATH)
            body = bytearray(answer.length or 0)
            for at in range(0, len(body), 500_000):
                time.sleep(0.12)
                answer.read_into(memoryview(body)[at : at + 500_000])
    assert len(json.loads(body)["tree"]) > 0


@pytest.mark.slow
def test_a_manifest_that_is_read_slowly_is_not_given_up():
    """The system passes on that there is room only where there is room for much of what it holds: megabytes."""
    with serving({"text": "x" * (64 << 20)}, head_timeout_s=4 * SHORT_S) as source, connected(source) as sock:
        sock.sendall(HEAD + b"\r\n")
        until, num_read = time.monotonic() + 10 * SHORT_S, 0
        while time.monotonic() < until:
            num_read += len(sock.recv(128 * 1024))
            time.sleep(SHORT_S / 10)
        sock.settimeout(60)
        while part := sock.recv(1 << 20):
            num_read += len(part)
            if num_read > 64 << 20:
                break
    assert num_read > 64 << 20


def test_an_answer_that_nobody_reads_is_given_up(monkeypatch):
    given_up, transport = threading.Event(), asyncio.selector_events._SelectorTransport
    abort = transport.abort
    monkeypatch.setattr(transport, "abort", lambda self: (abort(self), given_up.set()))
    with serving(large_state(), head_timeout_s=SHORT_S) as source, connected(source) as sock:
        sock.sendall(HEAD + b"\r\n")
        assert given_up.wait(60)
        response = http.client.HTTPResponse(sock)
        with pytest.raises((http.client.IncompleteRead, ConnectionError)):
            response.begin()
            response.read()


# Connections


@other_addresses
def test_idle_connections_of_one_client_do_not_keep_another_one_out():
    with serving() as source, contextlib.ExitStack() as stack:
        idle = [stack.enter_context(connected(source, "127.0.0.2")) for _ in range(300)]
        for sock in idle:
            sock.settimeout(0)
        with connecting(source) as link:
            status = link.get(PATH).status

        def num_closed() -> int:
            closed = 0
            for sock in idle:
                with contextlib.suppress(BlockingIOError):
                    closed += ended(sock)
            return closed

        wait_until(lambda: num_closed() >= 300 - 64)
        assert (status, num_closed()) == (404, 300 - 64)


@pytest.mark.parametrize("limit", ["max_connections", "max_connections_per_client"])
def test_a_connection_too_many_is_closed_at_once_and_there_is_room_again_later(limit):
    with serving(**{limit: 2}) as source, connected(source) as first, connected(source) as second:
        assert [answer_to(sock, HEAD + b"\r\n")[0] for sock in (first, second)] == [404, 404]
        with connected(source) as third:
            assert ended(third)
        second.close()

        def admitted() -> bool:
            with connecting(source) as link, contextlib.suppress(SourceLostError):
                return link.get(PATH).status == 404
            return False

        wait_until(admitted)


def test_a_receiver_that_finds_no_room_is_told_what_it_may_be():
    with serving(max_connections=1) as source, connected(source) as only:
        answer_to(only, HEAD + b"\r\n")
        with connecting(source) as link, pytest.raises(SourceLostError, match="too many connections"):
            link.get(PATH)


# Lengths


@pytest.mark.parametrize(
    ("rest", "status"),
    [
        (b"X-Long: " + b"a" * 20_000 + b"\r\n\r\n", 413),
        (b"X-Long: " + b"a" * 20_000, 431),
        (b"".join(b"X-%d: %s\r\n" % (number, b"a" * 900) for number in range(20)), 431),
        (b"Content-Length: 40000\r\n\r\n", 413),
        (b"Content-Length: 100000\r\n\r\n" + b"a" * 100_000, 413),
        (b"Transfer-Encoding: chunked\r\n\r\n", 413),
    ],
)
def test_a_request_that_is_too_long_is_refused_and_ends_the_connection(rest, status):
    with serving(head_timeout_s=SHORT_S) as source, asked(source, HEAD + rest) as (sock, answered, refusal):
        assert (answered, refusal["error"]) == (status, "too_large")
        with contextlib.suppress(ConnectionError):
            assert ended(sock)


def test_a_short_body_is_accepted():
    with serving() as source, connected(source) as sock:
        assert answer_to(sock, HEAD + b"Content-Length: 1024\r\n\r\n" + b"a" * 1024)[0] == 404
        assert answer_to(sock, HEAD + b"\r\n")[0] == 404


def test_a_body_that_comes_while_the_request_is_answered_already_is_no_head_of_another():
    with serving() as source, connected(source) as sock:
        sock.sendall(
            HEAD.replace(b"GET", b"POST", 1).replace(b"/manifest", b"/parts") + b"Content-Length: 30000\r\n\r\n"
        )
        time.sleep(0.2)
        assert answer_to(sock, b"a" * 30_000)[0] in (404, 405)
        assert answer_to(sock, HEAD + b"X-Long: " + b"a" * 16_000 + b"\r\n\r\n")[0] == 404


def test_a_long_but_permitted_head_is_accepted():
    with serving() as source, connected(source) as sock:
        assert answer_to(sock, HEAD + b"X-Long: " + b"a" * 16_000 + b"\r\n\r\n")[0] == 404


def test_bytes_without_end_while_a_request_is_answered_end_the_connection():
    with serving() as source, connected(source) as sock:
        sock.sendall(HEAD.replace(PATH.encode(), PATH.encode() + b"?wait_s=10") + b"\r\n")
        time.sleep(0.1)
        answer = b""
        with contextlib.suppress(ConnectionError):
            sock.sendall(b"a" * 100_000)
            while data := sock.recv(65536):
                answer += data
    assert b"not_yet" not in answer


def test_requests_that_come_together_are_answered_one_after_the_other():
    with serving() as source, connected(source) as sock:
        sock.sendall(3 * (HEAD + b"\r\n"))
        answers = b""
        while answers.count(b'"not_yet"') < 3:
            answers += sock.recv(65536)
        assert answers.count(b"HTTP/1.1 404") == 3


# Rate


def ask_until_refused(link: SourceConnection, most: int = 500) -> str:
    """Ask until an answer has status 429; return its error."""
    for _ in range(most):
        answer = link.get(PATH)
        refusal = answer.refusal()
        if answer.status == 429:
            return refusal.error
    return f"no refusal in {most} answers"


@pytest.mark.slow
def test_who_asks_too_often_is_refused_until_it_has_waited():
    with serving(max_requests_per_s=5) as source, connecting(source) as link:
        refused = ask_until_refused(link)
        time.sleep(1)
        afterwards = link.get(PATH).status
    assert (refused, afterwards) == ("too_many_requests", 404)


def test_requests_without_the_token_count_too():
    with serving(token="secret", max_requests_per_s=1) as source, connecting(source) as link:
        assert ask_until_refused(link) == "too_many_requests"


@other_addresses
def test_one_client_that_asks_too_often_costs_another_one_nothing():
    with serving(max_requests_per_s=1) as source, connecting(source) as link, connected(source, "127.0.0.2") as other:
        ask_until_refused(link)
        assert answer_to(other, HEAD + b"\r\n")[0] == 404


# The receiver's side of a kept-alive connection


@pytest.mark.parametrize("tls", [False, True])
def test_a_connection_that_was_closed_while_it_was_idle_is_opened_again(tls):
    authority = trustme.CA()
    context = server_context(authority, "127.0.0.1") if tls else None
    with serving(context=context, head_timeout_s=SHORT_S) as source:
        with connecting(source, client_context(authority) if tls else None) as link:
            statuses = []
            for method in ("GET", "POST", "GET"):
                answer = link.get(PATH if method == "GET" else "/v1/checkpoint/3/done", method=method)
                answer.read(4096)
                statuses.append(answer.status)
                time.sleep(2 * SHORT_S)
    assert (statuses[0], len(statuses), statuses[2]) == (404, 3, 404)


@contextlib.contextmanager
def answering_a_few(num_answers: int) -> Iterator[tuple[SourceAddress, list[int]]]:
    """Answers so many requests on its first connection and none on the others; counts requests by connection."""
    requests: list[int] = []

    def talk(client: socket.socket) -> None:
        requests.append(0)
        while client.recv(65536):
            requests[-1] += 1
            if len(requests) > 1 or requests[-1] > num_answers:
                break
            client.sendall(b"HTTP/1.1 204 No Content\r\nContent-Length: 0\r\n\r\n")

    with listening(talk) as source:
        yield source, requests


@pytest.mark.parametrize(("num_answers", "requests"), [(0, [1]), (1, [2, 1]), (2, [3, 1])])
def test_an_unanswered_request_is_sent_again_once_and_only_if_the_connection_had_answered(num_answers, requests):
    with answering_a_few(num_answers) as (source, seen), connecting(source) as link:
        link.open()
        with pytest.raises(SourceLostError, match="unanswered"):
            for _ in range(num_answers + 1):
                link.get(PATH).read(0)
    assert seen == requests


def test_a_connection_that_this_side_closed_is_not_opened_again():
    with serving() as source, connecting(source) as link:
        link.get(PATH).read(4096)
        link.close()
        with pytest.raises(SourceLostError):
            link.get(PATH)


# Nothing is left


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="needs Linux's /proc")
@pytest.mark.parametrize("tls", [False, True])
def test_a_server_that_stops_leaves_no_thread_and_no_descriptor(tls):
    authority = trustme.CA()
    context = server_context(authority, "127.0.0.1") if tls else None

    def held() -> tuple[int, set[threading.Thread]]:
        return len(os.listdir("/proc/self/fd")), set(threading.enumerate())

    before = held()
    with contextlib.ExitStack() as clients:
        with serving(large_state(), context=context, max_connections_per_client=20) as source:
            idle = [clients.enter_context(connected(source)) for _ in range(25)]
            for sock, sent in zip(idle, itertools.cycle([b"", b"\x16\x03\x01", HEAD, HEAD + b"\r\n"]), strict=False):
                with contextlib.suppress(ConnectionError):
                    sock.sendall(sent)
            idle[0].close()

            def admitted() -> bool:
                with connecting(source, client_context(authority) if tls else None) as link:
                    with contextlib.suppress(SourceLostError):
                        return link.get(PATH).status == 200
                return False

            wait_until(admitted)
        with contextlib.suppress(ConnectionError):
            for sock in idle[1:]:
                while sock.recv(1024 * 1024):
                    pass

    def left() -> tuple[int, set[threading.Thread]]:
        num_descriptors, threads = held()
        return max(num_descriptors - before[0], 0), threads - before[1]

    wait_until(lambda: left() == (0, set()), "no thread and no descriptor is left")


# With time handed in


class HandedTime:
    """The part of an event loop that a guarded connection uses, with a clock that is set by hand."""

    def __init__(self) -> None:
        self.now = 0.0
        self._timers: list[tuple[float, Callable[[], None]]] = []

    def time(self) -> float:
        return self.now

    def call_at(self, when: float, callback: Callable[[], None]) -> HandedTimer:
        self._timers.append((when, callback))
        return HandedTimer(lambda: self._timers.remove((when, callback)))

    def advance_to(self, now: float) -> None:
        """Fire what is due on the way, each at its time."""
        while due := sorted(timer for timer in self._timers if timer[0] <= now):
            self.now = max(self.now, due[0][0])
            self._timers.remove(due[0])
            due[0][1]()
        self.now = now

    def hang_until(self, now: float) -> None:
        """Fire what was due meanwhile only now."""
        due, self.now = [timer for timer in self._timers if timer[0] <= now], now
        for timer in due:
            self._timers.remove(timer)
            timer[1]()


class HandedTimer:
    def __init__(self, cancel: Callable[[], None]) -> None:
        self._cancel = cancel

    def cancel(self) -> None:
        with contextlib.suppress(ValueError):  # fired
            self._cancel()


class HeldTransport(asyncio.Transport):
    """A transport to nowhere that still holds `num_held` bytes."""

    num_held = 0

    def __init__(self) -> None:
        super().__init__()
        self.aborted_at: float | None = None
        self.loop: HandedTime | None = None

    def get_write_buffer_size(self) -> int:
        return self.num_held

    def abort(self) -> None:
        self.aborted_at = self.loop.now if self.loop else -1.0


@pytest.fixture
def guarded() -> tuple[GuardedConnection, HeldTransport, HandedTime]:
    loop, transport = HandedTime(), HeldTransport()
    transport.loop = loop
    clients = ClientLimits(ServerLimits(head_timeout_s=10), loop, token="", name="the server")  # type: ignore[arg-type]
    connection = GuardedConnection(asyncio.Protocol(), clients, "client")
    clients.admit(connection)
    connection.connection_made(transport)
    return connection, transport, loop


def test_bytes_of_a_first_head_do_not_extend_its_time(guarded):
    connection, transport, loop = guarded
    for second in range(1, 15):
        loop.advance_to(second)
        connection.data_received(b"a")
    assert transport.aborted_at == 10


def test_a_next_head_has_its_time_from_its_first_byte_on(guarded):
    connection, transport, loop = guarded
    with connection.answering():
        loop.advance_to(100)
    for second in (109, 112, 115, 118):
        loop.advance_to(second)
        connection.data_received(b"a")
    loop.advance_to(200)
    assert transport.aborted_at == 119


def test_no_time_passes_while_a_request_is_answered(guarded):
    connection, transport, loop = guarded
    with connection.answering():
        loop.advance_to(1000)
        connection.data_received(b"a")
    loop.advance_to(1009)
    assert transport.aborted_at is None


def test_an_answer_on_its_way_keeps_a_connection_as_long_as_it_gets_shorter(guarded):
    connection, transport, loop = guarded
    with connection.answering():
        pass
    for num_held in (500, 400, 399):
        transport.num_held = num_held
        loop.advance_to(loop.now + 10)
    loop.advance_to(200)
    assert transport.aborted_at == 40


def test_a_server_that_was_held_up_itself_does_not_blame_its_clients(guarded):
    connection, transport, loop = guarded
    loop.hang_until(60)
    connection.data_received(b"a")
    loop.advance_to(69)
    assert transport.aborted_at is None
    loop.advance_to(71)
    assert transport.aborted_at == 70


def test_what_peers_do_wrong_is_logged_once_a_second(caplog):
    now = [0.0]
    log = SparseLog(logging.getLogger("test"), clock=lambda: now[0])
    for now[0] in (0.0, 0.1, 0.9, 1.0, 1.5, 3.0):
        log.warning("at %g", now[0])
    assert [record.getMessage() for record in caplog.records] == [
        "at 0",
        "at 1 (2 more such lines were left out before)",
        "at 3 (1 more such lines were left out before)",
    ]


@pytest.mark.parametrize("token", [None, "s"])
def test_of_a_request_that_cannot_be_read_no_word_is_logged(token, caplog):
    """It may be one of a client whose token has a character that no header can hold."""
    with serving({}, token=token) as source, socket.create_connection((source.host, source.port)) as sock:
        sock.sendall(b"GET / HTTP/1.1\r\nHost: h\r\nAuthorization: Bearer hid\x00den\r\n\r\n")
        while sock.recv(4096):
            pass
    assert not [record for record in caplog.records if "den" in record.getMessage()]


@pytest.mark.parametrize("field", ["max_connections", "max_requests_per_s", "head_timeout_s", "max_serve_bytes_per_s"])
@pytest.mark.parametrize("value", [0, -1, float("nan"), float("inf")])
def test_limits_that_are_none_are_named(field, value):
    with pytest.raises(ConfigError, match=field):
        ServerLimits(**{field: value})


@pytest.mark.parametrize("tls", [False, True])
def test_what_all_receivers_together_are_sent_stays_within_the_bound(tls: bool) -> None:
    authority = trustme.CA()
    context = server_context(authority, "127.0.0.1") if tls else None
    bound, num_bytes = 8_000_000, 1_000_000
    with serving({"w": torch.zeros(num_bytes // 4)}, context=context, max_serve_bytes_per_s=bound) as source:
        started = time.monotonic()

        def receive() -> None:
            with connecting(source, client_context(authority) if tls else None) as link:
                assert len(link.get("/v1/checkpoint/3/blocks/0-244").read(2 * num_bytes)) > num_bytes

        with ThreadPoolExecutor(2) as pool:
            for received in [pool.submit(receive) for _ in range(2)]:
                received.result(60)
        took_s = time.monotonic() - started
    # Those of a tenth of a second leave at once, and the last piece of 20 ms when its turn begins.
    assert took_s >= 2 * num_bytes / bound - 0.1 - 2 * 0.02
