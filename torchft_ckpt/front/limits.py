"""Limits of what one client may take of a server: connections, requests, memory for a head, and time without doing anything.

A client is a peer's IPv4 address or IPv6 network. `core.services.admission` decides which connections are kept; this file does
not know what is served. Everything here runs on the server's event loop only.

aiohttp limits one line of a head, but neither the whole of it nor the time that it takes to come, and not how many
connections there are. So each connection is a `GuardedConnection`: it hands what comes on to aiohttp's own protocol, counts,
and holds one timer. A middleware tells it when a request is being answered. The timer also bounds how long a client that opens
a WebSocket may take to introduce itself; from then on the handler watches the connection.

What comes on a WebSocket is counted before aiohttp takes it apart. Who sends too much is told so and closed, and nothing more of
it is read, also what lies in the kernel. Its client waits before it opens another.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import socket
import ssl
import struct
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, fields
from typing import Any, cast

import msgspec
from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from torchft_ckpt.core.services.admission import Admission, ConnectionLimits
from torchft_ckpt.core.services.rate import FrameCounter, RateLimiter, TokenBucket
from torchft_ckpt.errors import ConfigError
from torchft_ckpt.network import bearer_matches, max_descriptors

logger = logging.getLogger(__name__)
_LOG_PAUSE_S = 1.0
_REFUSAL_DELAY_S = 0.05
_LATE = 0.5
_LINGER_S = 1.0
_SHARE_OF_DESCRIPTORS = 4
REFUSAL_HEADER = "X-Ckpt-Refusal"
"""Has the name of a refusal: a WebSocket's client sees no body."""
_END_OF_HEAD = b"\r\n\r\n"
MESSAGES_PER_S, MESSAGES_AT_ONCE = 4000.0, 2000.0
"""Of one WebSocket, each `_MESSAGE_BYTES` of them counting as one. A trainer that computes nothing makes some 300 a second."""
REOPENINGS_PER_S, OVERRUNS_AT_ONCE = 1.0, 10.0
"""Of a client: WebSockets that it opens once it had so many closed, as they sent too much."""
_MESSAGE_BYTES = 4096
_MAX_TURN_S = 10.0
_READ_BYTES = 256 * 1024  # asyncio reads at most so much at once: less was all there was
# Of Linux's struct tcp_info: where tcpi_unacked, tcpi_bytes_acked and tcpi_notsent_bytes are, and where the last one ends.
_UNACKED, _BYTES_ACKED, _NOTSENT, _TCP_INFO_BYTES = 24, 120, 144, 148


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontLimits:
    """Limits of what clients may take of a server, whatever it serves.

    A stranger is a client that has not shown the token or, in a job without one, that has not made a request.

    Args:
        max_connections: open at once, all clients together; never more than half of the descriptors that the process may have.
        max_connections_per_client: open at once from one client: without the token where there is one, else in all. With the
            token it may have more, up to half of all.
        max_strangers: open at once without the token, all clients together; never more than a quarter of the descriptors
            that the process may have.
        max_requests_per_s: of one client, for ever; twice as many may come at once.
        head_timeout_s: how long the head of a request may take to come, then its body, and a TLS handshake; how long a
            connection may stay open on which nothing is asked and nothing is on its way, and how long a WebSocket may take to
            introduce itself.

    Raises:
        ConfigError: a limit is not positive.
    """

    max_connections: int = 256
    max_connections_per_client: int = 64
    max_strangers: int = 256
    max_requests_per_s: float = 2000.0
    head_timeout_s: float = 10.0
    max_header_bytes: int = 16 * 1024
    max_body_bytes: int = 64 * 1024

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if value is not None and not 0 < value < math.inf:
                raise ConfigError(
                    f"{field.name}={value!r} cannot be used; expected a positive number", party=field.name
                )


class SparseLog(logging.LoggerAdapter):
    """A logger that writes at most one warning or error a second: what peers do wrong must not fill a disk.

    A request that cannot be read is reported in a short line, without a word of it: it may hold the token.
    """

    def __init__(self, to: logging.Logger, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(to, {})
        self._clock = clock
        self._silent_until = -math.inf
        self._num_left_out = 0

    def log(self, level: int, msg: object, *args: object, **kwargs: Any) -> None:
        if level >= logging.WARNING:
            now = self._clock()
            if now < self._silent_until:
                self._num_left_out += 1
                return
            self._silent_until = now + _LOG_PAUSE_S
            if self._num_left_out:
                msg = f"{msg} ({self._num_left_out} more such lines were left out before)"
                self._num_left_out = 0
        unreadable = kwargs.get("exc_info")
        if isinstance(unreadable, HttpProcessingError):
            kwargs["exc_info"] = None
            msg, args = f"{msg}: %s", (*args, type(unreadable).__name__)
        super().log(level, msg, *args, **kwargs)


class ClientLimits:
    """Keeps count of all clients of one server.

    Args:
        token: that who is known has shown; empty: whoever makes a request is known, if he has a
            certificate where he was asked for one.
    """

    def __init__(self, limits: FrontLimits, loop: asyncio.AbstractEventLoop, *, token: str, name: str) -> None:
        self.limits = limits
        self.loop = loop
        self.name = name
        self.log = SparseLog(logger)
        self._token = token
        self._rates = RateLimiter(limits.max_requests_per_s, max(2 * limits.max_requests_per_s, 1.0))
        self.overruns = RateLimiter(REOPENINGS_PER_S, OVERRUNS_AT_ONCE)
        """Of each client: WebSockets that were closed because they sent too much, and that it opens after that."""
        total = max(min(limits.max_connections, max_descriptors() // 2), 1)
        self._admission = Admission(
            ConnectionLimits(
                total=total,
                strangers=max(min(limits.max_strangers, max_descriptors() // _SHARE_OF_DESCRIPTORS), 1),
                per_client=limits.max_connections_per_client,
                binds_known=not token,
                known_per_client=max(limits.max_connections_per_client, total // 2),
            )
        )
        self._connections: set[GuardedConnection] = set()
        """Those that were admitted."""
        self._emptied = asyncio.Event()

    def admit(self, connection: GuardedConnection) -> bool:
        """Count a connection in, or refuse it; another one may be cut for it. It is counted out by its `leave`."""
        verdict = self._admission.admit(connection, connection.client)
        if verdict.reason:
            what = (
                "one that had not shown the token was cut for one more"
                if verdict.is_admitted
                else "one more was refused"
            )
            self.log.warning("%s: %s, %s of %s", self.name, verdict.reason, what, connection.client)
        if isinstance(verdict.cut, GuardedConnection):
            verdict.cut.abort()
        if verdict.is_admitted:
            self._connections.add(connection)
        return verdict.is_admitted

    def leave(self, connection: GuardedConnection) -> None:
        """Count a connection out that was admitted; once."""
        self._admission.leave(connection)
        self._connections.discard(connection)
        if not self._connections:
            self._emptied.set()

    def show(self, connection: GuardedConnection) -> None:
        """Keep a place for a connection whose client has shown the token."""
        self._admission.show(connection)

    async def abort_all(self, timeout_s: float) -> None:
        """Cut every connection that was admitted; return when all are closed.

        Raises:
            asyncio.TimeoutError: some are not.
        """
        for connection in list(self._connections):
            connection.abort()
        self._emptied.clear()
        if self._connections:
            await asyncio.wait_for(self._emptied.wait(), timeout_s)

    @web.middleware
    async def middleware(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        """Refuse what is over a limit, before the token is looked at; note what is being answered."""
        connection = _connection_of(request)
        if connection is None:
            return refuse(400, "lost", "the connection was lost before its request was looked at")
        is_known = self._admission.knows(connection)
        shows_token = bearer_matches(request.headers.get("Authorization"), self._token)
        if not is_known and shows_token and (self._token or not lacks_certificate(request)):
            is_known = True
            self.show(connection)
        with connection.answering(lambda: request.content.is_eof()):
            # Who is known has a rate of its own: strangers behind the same address do not use it up.
            if self._rates.take((connection.client, is_known), self.loop.time()) > 0:
                # A little late, so that who asks again at once gets little of this thread for it.
                await asyncio.sleep(_REFUSAL_DELAY_S)
                return refuse(
                    429,
                    "too_many_requests",
                    f"{connection.client} made more than {self.limits.max_requests_per_s:g} requests a second",
                )
            # A body of unknown length (chunked) counts as too long: no request of this protocol has one.
            length = request.content_length
            if request.body_exists and (length is None or length > self.limits.max_body_bytes):
                response = refuse(413, "too_large", f"the body is longer than {self.limits.max_body_bytes} bytes")
                response.force_close()
                return response
            return await handler(request)


class GuardedConnection(asyncio.Protocol):
    """aiohttp's protocol for one connection, with a timer and a count of bytes in front of it.

    The timer runs while nothing is being answered, or not all of the request is here. Bytes that come do not extend it, except
    the first one of a next head.

    Args:
        inner: aiohttp's protocol; it is called as if this one were not there.
        clients: where connections are counted.
        client: whose connection it is; to be admitted before it is opened.
    """

    def __init__(self, inner: asyncio.Protocol, clients: ClientLimits, client: str) -> None:
        self.inner = inner
        self.client = client
        self.clients = clients
        self._limits = clients.limits
        self._loop = clients.loop
        self._transport: asyncio.Transport | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._deadline = 0.0
        self._num_unanswered_bytes = 0
        self._has_head = False
        """Whether the head of the request that is coming is here whole."""
        self._last_bytes = b""
        """Before that: what may be the beginning of the head's end."""
        self._num_acknowledged: int | None = None
        self._answering = False
        self._is_whole: Callable[[], bool] = lambda: True
        self._num_after_head = 0
        """Bytes that came behind the head that came last."""
        self._has_messages = False
        """Whether what comes are messages, and no requests any more."""
        self._frames = FrameCounter()
        self._allowance = TokenBucket(MESSAGES_PER_S, MESSAGES_AT_ONCE, MESSAGES_AT_ONCE, self._loop.time())
        self._is_over = False
        """Whether it sent too much: nothing more of it is taken."""
        self.on_overrun: Callable[[str], None] = lambda _: self.abort()
        """Tells the client what it did, and closes the connection; it is cut a moment later in any case."""
        self._between_requests = False
        self._left = False
        self.opening: asyncio.Task[None] | None = None
        """Opens it; nothing has come on it before."""

    def leave(self) -> None:
        """Count this connection out. May be called again."""
        if not self._left:
            self._left = True
            self.clients.leave(self)

    def abort(self) -> None:
        """Close the connection without waiting for anything."""
        if self._transport is not None:
            self._transport.abort()
        elif self.opening is not None:
            self.opening.cancel()

    def begin_messages(self) -> bool:
        """Take what comes for frames, before the handshake is answered; close it if `end_wait` does not follow in time.

        Returns whether nothing has come that nobody may send before that answer.
        """
        self._has_messages, self._allowance.at = not self._num_after_head, self._loop.time()
        self._arm()
        return self._has_messages

    def end_wait(self) -> None:
        """Let it be silent for as long as its request is being answered."""
        if not self._is_over:
            self._disarm()

    @contextlib.contextmanager
    def answering(self, is_whole: Callable[[], bool] = lambda: True) -> Iterator[None]:
        """While a request is being answered the connection is not idle, however long that takes, once its body has come.

        `is_whole` says whether all of its body has come: what comes after that is the head of another one.
        """
        self._answering = True
        self._num_unanswered_bytes = 0
        self._is_whole = is_whole
        self._arm()
        self._disarm_if_whole()
        try:
            yield
        finally:
            self._num_unanswered_bytes = 0
            self._has_head, self._last_bytes = not is_whole(), b""
            self._answering, self._is_whole = False, lambda: True
            self._between_requests = True
            if self._transport is not None:
                self._arm()

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._arm()
        self.inner.connection_made(transport)

    def data_received(self, data: bytes) -> None:
        if self._has_messages:
            amount = self._frames.count(data) + len(data) / _MESSAGE_BYTES
            if self.spend(amount, is_all=len(data) < _READ_BYTES):
                self.inner.data_received(data)
            elif self._transport is not None:
                self._transport.pause_reading()  # each time: aiohttp reads on when it has handed on what it had
            return
        self._num_after_head += len(data)
        if not self._has_head:
            joined = self._last_bytes + data
            end = joined.find(_END_OF_HEAD)
            self._has_head = end >= 0
            self._num_after_head = len(joined) - end - len(_END_OF_HEAD) if self._has_head else 0
            head_bytes = self._num_unanswered_bytes - len(self._last_bytes)
            head_bytes += end + len(_END_OF_HEAD) if self._has_head else len(joined)
            self._last_bytes = joined[1 - len(_END_OF_HEAD) :]
            if head_bytes > self._limits.max_header_bytes:
                self._refuse_too_large(head_is_whole=self._has_head)
                return
        self._num_unanswered_bytes += len(data)
        if self._num_unanswered_bytes > self._limits.max_header_bytes + self._limits.max_body_bytes:
            self._refuse_too_large(head_is_whole=True)
            return
        if self._between_requests and not self._answering:
            self._between_requests = False
            self._arm()
        self.inner.data_received(data)
        if self._answering:
            self._disarm_if_whole()

    def eof_received(self) -> bool | None:
        return self.inner.eof_received()

    def pause_writing(self) -> None:
        self.inner.pause_writing()

    def resume_writing(self) -> None:
        self.inner.resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._disarm()
        self.leave()
        self.inner.connection_lost(exc)

    def spend(self, amount: float, *, is_all: bool) -> bool:
        """Whether it may have sent, or asked for, so much; from the first time that it may not it is over."""
        now = self._loop.time()
        if self._is_over or self._allowance.read(amount, now, is_all=is_all):
            return not self._is_over
        self._is_over = True
        self.clients.overruns.reserve(self.client, now, _MAX_TURN_S)
        what = f"or asked for more than {MESSAGES_PER_S:g} messages a second, or as many times {_MESSAGE_BYTES} bytes"
        self.clients.log.warning("%s: a connection of %s sent %s; it was closed", self.clients.name, self.client, what)
        self.on_overrun(what)
        self._disarm()
        self._timer = self._loop.call_later(_LINGER_S, self.abort)
        return False

    # The timer

    def _arm(self) -> None:
        self._disarm()
        self._num_acknowledged = None
        self._deadline = self._loop.time() + self._limits.head_timeout_s
        self._timer = self._loop.call_at(self._deadline, self._expire)

    def _disarm_if_whole(self) -> None:
        """A request that is here whole may be answered for as long as that takes."""
        if self._timer is not None and self._is_whole():
            self._disarm()

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _expire(self) -> None:
        if self._transport is None:
            return
        if self._loop.time() > self._deadline + _LATE * self._limits.head_timeout_s:
            self._arm()  # this process was held up; what the client sent meanwhile has not been read
            return
        acknowledged = acknowledged_bytes(self._transport)
        if acknowledged is not None and acknowledged != self._num_acknowledged:
            self._arm()  # the end of an answer is still on its way to a slow reader
            self._num_acknowledged = acknowledged
            return
        what = "introduction" if self._has_messages else "request"
        logger.debug("a connection of %s was closed: no %s within %g s", self.client, what, self._limits.head_timeout_s)
        self._transport.abort()

    def _refuse_too_large(self, *, head_is_whole: bool) -> None:
        if self._transport is None or self._transport.is_closing():
            return
        self.clients.log.warning("%s sent more than a request may have; its connection was closed", self.client)
        if self._answering:
            self._transport.abort()
            return
        message = (
            f"a request may have a head of at most {self._limits.max_header_bytes} bytes "
            f"and a body of at most {self._limits.max_body_bytes} bytes"
        )
        status = "413 Content Too Large" if head_is_whole else "431 Request Header Fields Too Large"
        self._transport.write(raw_refusal(status, "too_large", message))
        self._transport.close()


def showed_token(request: web.Request) -> None:
    """Keep a place for the connection of a request: its client has shown that it knows the token.

    For handlers to whom it is shown in another way than as `Authorization: Bearer`, which the front sees for itself.
    """
    connection = _connection_of(request)
    if connection is not None:
        connection.clients.show(connection)


async def becomes_websocket(request: web.Request) -> None:
    """Take what comes on the connection of a request for messages, which is closed if `introduced` does not follow in time.

    Raises:
        web.HTTPTooManyRequests: its client had too many closed, as they sent too much.
        web.HTTPBadRequest: it has gone, or sent something behind its handshake.
    """
    connection, now = _connection_of(request), asyncio.get_running_loop().time()
    if connection is not None and connection.clients.overruns.knows(connection.client, now):
        wait_s = connection.clients.overruns.reserve(connection.client, now, _MAX_TURN_S)
        await asyncio.sleep(wait_s if wait_s <= _MAX_TURN_S else _MAX_TURN_S / 2)
        if wait_s > _MAX_TURN_S:
            raise web.HTTPTooManyRequests(text="connections of this client sent too much")
    if connection is None or not connection.begin_messages():
        raise web.HTTPBadRequest(text="nothing may be sent before the answer to a handshake")


def on_overrun(request: web.Request, tell: Callable[[str], None]) -> Callable[[int], object]:
    """Have a function called if the WebSocket that a request became sends too much; it tells the client and closes it.

    Returns what is to be called with the bytes of each answer: short questions for long answers count as those.
    """
    connection = _connection_of(request)
    if connection is None:
        return lambda _: None
    connection.on_overrun = tell
    return lambda num_bytes: connection.spend(num_bytes / _MESSAGE_BYTES, is_all=False)


def introduced(request: web.Request) -> None:
    """It is known who speaks on the WebSocket that a request became: it may be silent for as long as its handler lets it."""
    connection = _connection_of(request)
    if connection is not None:
        connection.end_wait()


def _connection_of(request: web.Request) -> GuardedConnection | None:
    protocol = None if request.transport is None else request.transport.get_protocol()
    return protocol if isinstance(protocol, GuardedConnection) else None


def lacks_certificate(request: web.Request) -> bool:
    """Whether a client was asked for a certificate and has shown none."""
    secured = request.get_extra_info("ssl_object")
    return secured is not None and secured.context.verify_mode != ssl.CERT_NONE and not secured.getpeercert()


def refuse(status: int, error: str, message: str) -> web.Response:
    body = msgspec.json.encode({"error": error, "message": message})
    return web.Response(status=status, body=body, content_type="application/json", headers={REFUSAL_HEADER: error})


def raw_refusal(status: str, error: str, message: str) -> bytes:
    """Return a refusal as the bytes of the last answer on a connection, if there is no request to answer."""
    body = msgspec.json.encode({"error": error, "message": message})
    head = (
        f"HTTP/1.1 {status}\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n{REFUSAL_HEADER}: {error}\r\n"
        "Connection: close\r\n\r\n"
    )
    return head.encode("ascii") + body


def acknowledged_bytes(transport: asyncio.Transport) -> int | None:
    """Return how many bytes the peer has acknowledged so far, None if it has acknowledged all there are.

    The kernel tells it, because it holds more than the transport does, and a TLS transport does not tell all that it holds. On
    systems whose kernel does not tell, the answer is a number that changes with what the transport holds.
    """
    num_held = transport.get_write_buffer_size()
    sock = transport.get_extra_info("socket")
    if sock is not None and hasattr(socket, "TCP_INFO"):
        with contextlib.suppress(OSError):  # not TCP, or closed
            info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
            if len(info) == _TCP_INFO_BYTES:
                (num_unacked,) = struct.unpack_from("=I", info, _UNACKED)
                (num_acknowledged,) = struct.unpack_from("=Q", info, _BYTES_ACKED)
                (num_unsent,) = struct.unpack_from("=I", info, _NOTSENT)
                return int(num_acknowledged) if num_unacked or num_unsent or num_held else None
    return -num_held if num_held else None
