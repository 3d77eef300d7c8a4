"""One WebSocket: how it begins, messages out in order and bounded, messages in until it closes. It knows no protocol above
that.

A peer that does not read cannot make us hold its messages without limit, nor hold up anybody else: what is to be sent
waits in a queue of its own, bounded by messages and by bytes, and a queue that runs over closes the connection. So does a
message that the peer could not take: what `core` sends is far smaller, whatever it was told.

A client connects to the address that it was given and to no other: it does not follow redirects (`client_session`).
"""

from __future__ import annotations

import asyncio
import logging
import re
import socket
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any

import aiohttp
from aiohttp import web

from torchft_ckpt.core.coordination.messages import MAX_MESSAGE_BYTES, Message, encode
from torchft_ckpt.core.services.handshakes import CERTIFICATE_IS_MISSING
from torchft_ckpt.core.text import printable
from torchft_ckpt.errors import TlsError
from torchft_ckpt.front.limits import REFUSAL_HEADER, becomes_websocket, showed_token
from torchft_ckpt.front.serving import Front
from torchft_ckpt.network import keep_from_forked_children, set_dead_peer_timeout, without_mapping
from torchft_ckpt.tls import Tls

logger = logging.getLogger(__name__)

MAX_QUEUED_MESSAGES = 1024
MAX_QUEUED_BYTES = 8 << 20
CLOSE_TIMEOUT_S = 1.0
_IN_A_ROW = 4
_SSL_OF_AIOHTTP = re.compile(r" ssl:(default|True|<[^>]*>)")
_REFUSALS = {
    "https_only": "it speaks TLS, and none is set up here; set TORCHFT_CKPT_TLS_CERT, _KEY and _CA",
    "certificate": f"it asks us: {CERTIFICATE_IS_MISSING}",
}


def request_socket(request: web.Request) -> socket.socket | None:
    return request.transport.get_extra_info("socket") if request.transport is not None else None


def client_of(request: web.Request) -> str:
    """Return the address that a request came from, for people."""
    return without_mapping(request.remote or "an unknown address")


def refuse_token(request: web.Request, front: Front) -> web.Response:
    front.log.warning("refused %s: wrong or missing token", client_of(request))
    return web.json_response({"error": "wrong or missing token"}, status=401)


async def open_websocket(
    request: web.Request, front: Front, headers: Mapping[str, str] | None = None
) -> web.WebSocketResponse:
    """Shake hands with a client that may come in; who then does not introduce itself in time is cut by the front.

    Args:
        request: has shown the token, where there is one.
        front: before the service.
        headers: of the answer, besides those of a handshake.

    Raises:
        web.HTTPBadRequest: it is no handshake of a WebSocket, or the client has gone.
        web.HTTPTooManyRequests: the client had too many closed, as they sent too much.
    """
    showed_token(request)
    await becomes_websocket(request)
    websocket = web.WebSocketResponse(max_msg_size=MAX_MESSAGE_BYTES, compress=False, timeout=1.0)
    websocket.headers.update(headers or {})
    try:
        await websocket.prepare(request)
    except ValueError as error:  # of a key that is not ASCII, say
        front.log.warning("refused %s: not the handshake of a WebSocket", client_of(request))
        refusal = web.HTTPBadRequest(text="not the handshake of a WebSocket")
        refusal.force_close()  # what comes is taken for messages already
        raise refusal from error
    except ConnectionError as error:  # nobody reads this answer either
        raise web.HTTPBadRequest(text="the connection was lost") from error
    return websocket


def cause_of(error: BaseException, tls: Tls | None = None) -> str:
    """Say why a connection failed. aiohttp writes behind each address how it uses TLS, also where it uses none."""
    if tls is not None and tls.certificate and _was_closed(error):
        return f"it closed the connection, and its log says why: perhaps it does not accept our certificate {tls.certificate}"
    return _SSL_OF_AIOHTTP.sub("", str(error)) or type(error).__name__


def _was_closed(error: BaseException) -> bool:
    """Whether the other side closed a connection that it had accepted: by a reset, if it had left unread what we sent."""
    closed = isinstance(error, aiohttp.ServerDisconnectedError | aiohttp.ClientOSError | ConnectionError)
    return closed and not isinstance(error, aiohttp.ClientConnectorError)


def service_url(address: str, path: str, tls: Tls | None) -> str:
    return f"{'http' if tls is None else 'https'}://{address}{path}"


def secured(tls: Tls | None) -> dict[str, Any]:
    """Return the arguments of aiohttp's requests that have it speak TLS as we do."""
    return {} if tls is None else {"ssl": tls.client()}


def raise_if_tls(failed: BaseException | Mapping[str, str], party: str, address: str, tls: Tls | None) -> None:
    """Raise where TLS, or its absence, is why a connection came to nothing; else return.

    Args:
        failed: what it raised, or the headers of an answer.

    Raises:
        TlsError: nothing was said that is not for everybody.
    """
    cause = failed if isinstance(failed, BaseException) else None
    headers = failed if not isinstance(failed, BaseException) else getattr(failed, "headers", None) or {}
    why = _REFUSALS.get(headers.get(REFUSAL_HEADER, ""), "")
    if not why and tls is not None and cause is not None:
        why = tls.why_not(cause, was_closed=_was_closed(cause))
    if why:
        raise TlsError(f"no TLS with {party} at {address}: {why}", address) from cause


async def read_at_most(response: aiohttp.ClientResponse, most: int) -> bytes:
    """Return the body; of one that is longer than so many bytes the begin, which is longer, too."""
    body = bytearray()
    async for chunk in response.content.iter_chunked(1 << 16):
        body += chunk
        if len(body) > most:
            break
    return bytes(body)


def client_session(
    headers: Mapping[str, str] | None = None, traces: Sequence[aiohttp.TraceConfig] = ()
) -> aiohttp.ClientSession:
    """Return a session that goes only where it is told to: a redirect is an `aiohttp.ClientError` that names its target."""

    async def refuse(
        _session: aiohttp.ClientSession, _context: object, redirect: aiohttp.TraceRequestRedirectParams
    ) -> None:
        place = printable(redirect.response.headers.get("Location", "")[:200])
        raise aiohttp.ClientError(f"it redirects to {place}, which is not followed")

    trace = aiohttp.TraceConfig()
    trace.on_request_redirect.append(refuse)
    return aiohttp.ClientSession(headers=headers, trace_configs=[trace, *traces])


class Channel:
    """A WebSocket with a writer task. Use on its event loop only.

    Args:
        websocket: an open one, of either side.
        sock: the connection below it, None where the platform does not give it.
        name: the peer, for the log.
        dead_peer_timeout_s: give the connection up when what was sent is not acknowledged for so long.
    """

    def __init__(
        self,
        websocket: web.WebSocketResponse | aiohttp.ClientWebSocketResponse,
        sock: socket.socket | None,
        name: str,
        dead_peer_timeout_s: float,
    ) -> None:
        self._websocket = websocket
        self._sock = sock
        self._name = name
        if sock is not None:
            set_dead_peer_timeout(sock, dead_peer_timeout_s)
            keep_from_forked_children(sock)
        self._outgoing: asyncio.Queue[str | None] = asyncio.Queue()
        self._queued_bytes = 0
        self._writer = asyncio.get_running_loop().create_task(self._write())
        self.sent_at = asyncio.get_running_loop().time()
        """The time, on the loop's clock, when a message was last handed to the socket."""
        self._is_closing = False
        self.charge: Callable[[int], object] = lambda _: None
        """Called with the bytes of each message that is sent."""

    def send(self, message: Message) -> None:
        """Queue a message. After `close` it is dropped."""
        if self._writer.done():
            return
        text = encode(message)
        num_bytes = _num_bytes(text)
        if num_bytes > MAX_MESSAGE_BYTES:
            kind = type(message).__name__
            logger.error("a %s of %d bytes is more than %s takes: closing", kind, num_bytes, self._name)
            self.abort()
        elif self._outgoing.qsize() >= MAX_QUEUED_MESSAGES or self._queued_bytes + num_bytes > MAX_QUEUED_BYTES:
            logger.warning("%s does not read, %d bytes wait for it: closing", self._name, self._queued_bytes)
            self.abort()
        else:
            self._queued_bytes += num_bytes
            self._outgoing.put_nowait(text)
            self.charge(num_bytes)

    def end(self, message: Message) -> None:
        """Send one last message in place of those that wait, and close."""
        while not self._outgoing.empty():
            self._outgoing.get_nowait()
        self.send(message)
        self.close()

    def close(self) -> None:
        """Close after what was queued has been sent. Nothing more is read."""
        self._is_closing = True
        if not self._writer.done():
            self._outgoing.put_nowait(None)

    async def wait_closed(self) -> None:
        """Wait, for a second at most, until what was queued before `close` was sent and the socket is closed."""
        done, _ = await asyncio.wait([self._writer], timeout=CLOSE_TIMEOUT_S)
        if not done:
            self.abort()
            await asyncio.gather(self._writer, return_exceptions=True)

    async def messages(self) -> AsyncIterator[str | bytes]:
        """Yield what comes in; ends when the connection does, for whatever reason, or with `close` or `abort`.

        Now and then others have their turn: aiohttp hands on all that it has read without a pause.
        """
        num_read = 0
        try:
            async for message in self._websocket:
                if self._is_closing or message.type not in (aiohttp.WSMsgType.TEXT, aiohttp.WSMsgType.BINARY):
                    break
                yield message.data
                num_read += 1
                if num_read % _IN_A_ROW == 0:
                    await asyncio.sleep(0)
        except ConnectionError as error:  # its ping was to be answered, and it has gone
            logger.debug("the connection to %s ended: %r", self._name, error)

    def abort(self) -> None:
        """End the connection now; what was not sent is lost."""
        self._is_closing = True
        self._writer.cancel()
        if self._sock is not None:
            try:
                self._sock.shutdown(socket.SHUT_RDWR)
            except OSError as error:
                logger.debug("the connection to %s was gone already: %s", self._name, error)

    async def _write(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            while (text := await self._outgoing.get()) is not None:
                self.sent_at = loop.time()
                await self._websocket.send_str(text)
                self._queued_bytes -= _num_bytes(text)
            await self._websocket.close()
        except (ConnectionError, aiohttp.ClientError, RuntimeError) as error:
            logger.debug("sending to %s ended: %r", self._name, error)


def _num_bytes(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode())
