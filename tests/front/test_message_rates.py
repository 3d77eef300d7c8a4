"""What one WebSocket may send: who sends more is told so and closed, nothing of it is read, and its client comes back slowly."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable
from typing import Any

import pytest
from test_services_front import (
    Address,
    asks,
    connected,
    frame,
    handshake,
    lighthouse,
    manager_service,
    needs_linux,
    speaks,
)

from torchft_ckpt.core.coordination.messages import (
    PROTOCOL_VERSION,
    Dropped,
    Heartbeat,
    Hello,
    LocateState,
    Outcome,
    RankHello,
    Refused,
    StateLocated,
    StateVersion,
    decode_from_lighthouse,
    decode_group_to_rank,
    encode,
)
from torchft_ckpt.front import limits
from torchft_ckpt.front.limits import ClientLimits, FrontLimits, GuardedConnection

HELLO = frame(encode(Hello(protocol=PROTOCOL_VERSION, replica_id="g:1")))
BEAT = frame(encode(Heartbeat()))


def hears(sock: socket.socket) -> list[bytes]:
    """Return the messages that come until the connection is closed, however it is."""
    received = b""
    with contextlib.suppress(ConnectionError):
        while data := sock.recv(65536):
            received += data
    said = []
    while received and received[0] == 0x81:
        long = received[1] == 126
        start, length = (4, int.from_bytes(received[2:4], "big")) if long else (2, received[1])
        said.append(received[start : start + length])
        received = received[start + length :]
    return said


@pytest.fixture
def one_overrun_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "REOPENINGS_PER_S", 1e-3)
    monkeypatch.setattr(limits, "OVERRUNS_AT_ONCE", 1.0)
    monkeypatch.setattr(limits, "_MAX_TURN_S", 0.01)


@pytest.mark.parametrize("flood", [BEAT * 5000, b"\x89\x80mask" * 5000, b"\x01\x80mask" + b"\x00\x80mask" * 5000])
def test_a_member_that_sends_more_than_it_may_is_told_so_and_closed(flood: bytes) -> None:
    """Messages, pings, and pieces of a message that hold nothing."""
    with lighthouse() as address, speaks(address, "/v1/groups") as sock:
        sock.sendall(HELLO)
        with contextlib.suppress(ConnectionError):
            sock.sendall(flood)
        said = decode_from_lighthouse(hears(sock)[-1], "the lighthouse")
        assert isinstance(said, Dropped)
        assert said.reason.startswith(
            "it sent or asked for more than 4000 messages a second, or as many times 4096 bytes; its connection was closed"
        )


def test_a_rank_that_sends_more_than_it_may_is_told_so_and_closed() -> None:
    with manager_service() as address, speaks(address, "/v1/ranks") as sock:
        sock.sendall(frame(encode(RankHello(protocol=PROTOCOL_VERSION, group_rank=1))) + BEAT * 5000)
        said = decode_group_to_rank(hears(sock)[-1], "the service")
        assert isinstance(said, Refused)
        assert (said.code, "sent or asked for more than 4000 messages" in said.reason) == ("rate", True)


@pytest.mark.parametrize(
    "first", [encode(Heartbeat()), "x" * 5000, encode(Hello(protocol=PROTOCOL_VERSION, replica_id="g:1"))]
)
def test_a_manager_service_reads_nothing_of_one_that_is_no_rank(first: str) -> None:
    with manager_service() as address, speaks(address, "/v1/ranks") as sock:
        sock.sendall(frame(first) + frame(encode(RankHello(protocol=PROTOCOL_VERSION, group_rank=1))))
        (said,) = hears(sock)
        refused = decode_group_to_rank(said, "the service")
        assert isinstance(refused, Refused)
        assert refused.code in ("protocol", "version")


@pytest.mark.parametrize("serving", [lighthouse, manager_service])
@pytest.mark.parametrize("before", [b"", b"GET /healthz HTTP/1.1\r\nHost: h\r\n\r\n"])
def test_who_speaks_before_the_handshake_is_answered_is_refused(
    serving: Callable[[], contextlib.AbstractContextManager[Address]], before: bytes
) -> None:
    """What comes so early would not be counted."""
    path = "/v1/groups" if serving is lighthouse else "/v1/ranks"
    with serving() as address, connected(address) as sock:
        sock.sendall(before + handshake(path) + BEAT)
        answered = b""
        while b"HTTP/1.1 400" not in answered:
            data = sock.recv(65536)
            assert data, answered
            answered += data
        assert b" 101 " not in answered


@needs_linux
@pytest.mark.usefixtures("one_overrun_at_once")
def test_the_client_of_one_that_sent_too_much_waits_before_it_opens_more_and_others_do_not() -> None:
    with lighthouse() as address:
        for _ in range(2):
            with speaks(address, "/v1/groups") as sock, contextlib.suppress(ConnectionError):
                sock.sendall(BEAT * 5000)
                hears(sock)
        assert asks(address, handshake("/v1/groups")).startswith(b"HTTP/1.1 429 ")
        with connected(address, "127.0.0.2") as sock:
            sock.sendall(handshake("/v1/groups"))
            assert sock.recv(12) == b"HTTP/1.1 101"


def test_short_questions_for_long_answers_count_as_those(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MESSAGES_AT_ONCE", 1000.0)
    monkeypatch.setattr(limits, "MESSAGES_PER_S", 1.0)  # or a slow machine would give it more meanwhile
    version = StateVersion(step=3, quorum_id=1, epoch="old")
    holder = Hello(
        protocol=PROTOCOL_VERSION,
        replica_id="h:1",
        version=version,
        newest_step=3,
        last_quorum_id=1,
        last_quorum_size=2,
        last_epoch="old",
        last_outcome=Outcome.COMMIT,
        checkpoint_addresses=["a" * 4000] * 15,
    )
    with lighthouse() as address, speaks(address, "/v1/groups") as holds, speaks(address, "/v1/groups") as sock:
        holds.sendall(frame(encode(holder)))
        assert holds.recv(1)
        sock.sendall(HELLO)
        with contextlib.suppress(ConnectionError):
            sock.sendall(b"".join(frame(encode(LocateState(request_id=n, version=StateVersion()))) for n in range(600)))
        *answers, said = [decode_from_lighthouse(data, "the lighthouse") for data in hears(sock)]
        located = [answer for answer in answers if isinstance(answer, StateLocated)]
        assert located[0].sources[0].checkpoint_addresses == ["a" * 4000] * 15
        assert (isinstance(said, Dropped), len(located) < 200) == (True, True)


class Clock:
    """A loop that is only a clock."""

    def __init__(self) -> None:
        self.now = 0.0

    def time(self) -> float:
        return self.now

    def call_at(self, when: float, function: Callable[[], None]) -> Any:
        return self

    call_later = call_at

    def cancel(self) -> None:
        """No timer runs."""


class Taken(asyncio.Protocol):
    """What aiohttp would get."""

    def __init__(self) -> None:
        self.num_bytes = 0

    def data_received(self, data: bytes) -> None:
        self.num_bytes += len(data)


def websocket() -> tuple[Clock, GuardedConnection, Taken, list[str]]:
    clock, taken, told = Clock(), Taken(), list[str]()
    loop: Any = clock
    connection = GuardedConnection(taken, ClientLimits(FrontLimits(), loop, token="", name="it"), "127.0.0.1")
    connection.on_overrun = told.append
    assert connection.begin_messages()
    return clock, connection, taken, told


def test_a_service_that_was_stopped_closes_nobody() -> None:
    """A minute of a member that makes 400 messages a second, which comes in reads of 256 KiB; then it goes on as before."""
    clock, connection, taken, told = websocket()
    clock.now = 60.0
    minute = BEAT * (60 * 400)
    for at in range(0, len(minute), limits._READ_BYTES):
        connection.data_received(minute[at : at + limits._READ_BYTES])
    for _ in range(600):
        clock.now += 0.1
        connection.data_received(BEAT * 40)
    assert (told, taken.num_bytes) == ([], 2 * len(minute))


def test_what_was_not_used_meanwhile_is_not_saved_up() -> None:
    clock, connection, taken, told = websocket()
    clock.now = 60.0
    connection.data_received(BEAT)
    connection.data_received(BEAT * 2000)
    assert (len(told), taken.num_bytes) == (1, len(BEAT))
    connection.data_received(BEAT)
    assert (len(told), taken.num_bytes) == (1, len(BEAT))


def test_few_messages_are_too_many_where_they_are_long() -> None:
    _, connection, taken, told = websocket()
    head = b"\x81\xff" + (1 << 40).to_bytes(8, "big") + b"mask"
    connection.data_received(head)
    for _ in range(32):
        connection.data_received(bytes(limits._READ_BYTES))
    assert (len(told), taken.num_bytes) == (1, len(head) + 31 * limits._READ_BYTES)
