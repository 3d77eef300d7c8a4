"""Serves an aiohttp application on sockets that listen, behind the limits of `limits`. On its event loop only.

Each connection is counted in before anything else is done for it, and then TLS is spoken with it. asyncio's own server would
do a TLS handshake before it asks whether the connection is wanted, and would answer a client that speaks plain HTTP to a TLS
port with silence.
"""

from __future__ import annotations

import asyncio
import errno
import functools
import logging
import socket
import ssl
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, TypeAlias

from aiohttp import web
from aiohttp.typedefs import Handler

from torchft_ckpt.core.services.admission import client_of_address
from torchft_ckpt.core.services.handshakes import CERTIFICATE_IS_MISSING
from torchft_ckpt.front.limits import (
    ClientLimits,
    FrontLimits,
    GuardedConnection,
    SparseLog,
    lacks_certificate,
    raw_refusal,
    refuse,
)
from torchft_ckpt.network import keep_from_forked_children
from torchft_ckpt.tls import why_not

if TYPE_CHECKING:
    from aiohttp.typedefs import Middleware

logger = logging.getLogger(__name__)
_LINGER_S = 1.0
_CLOSE_TIMEOUT_S = 2.5
_ACCEPTS_AT_ONCE = 8  # so few that who has just come is heard before many others have come
_PAUSE_S = 1.0
_NO_ROOM = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}
_TLS_HANDSHAKE = b"\x16"
ServerContext: TypeAlias = ssl.SSLContext | Callable[[], ssl.SSLContext] | None
_SPEAKS_HTTPS = raw_refusal(
    "400 Bad Request", "https_only", "this server speaks https only: its address must begin with https://"
)


class Front:
    """The front of one service, from `start` until `close`.

    Args:
        token: that clients show as `Authorization: Bearer`, empty for none. The application refuses those that do not.
        ssl_context: https is spoken with it, and nothing else. Or a function that returns the one for the next connection.
        without_certificate: paths for clients that show none; None: all, as far as the context lets them in. It concerns
            contexts that ask for certificates.
        handler_cancellation: a handler whose client has gone away is cancelled.

    Attributes:
        log: for what clients do wrong.
    """

    def __init__(
        self,
        app: web.Application,
        listeners: Sequence[socket.socket],
        *,
        name: str,
        token: str,
        limits: FrontLimits,
        ssl_context: ServerContext = None,
        without_certificate: Collection[str] | None = None,
        handler_cancellation: bool = False,
        shutdown_timeout_s: float = 1.0,
    ) -> None:
        self._name = name
        self._listeners = listeners
        self._ssl_context = ssl_context
        self._clients = ClientLimits(limits, asyncio.get_running_loop(), token=token, name=name)
        self.log = self._clients.log
        app.middlewares[:0] = [self._clients.middleware, _refuse_web_pages]
        if ssl_context is not None and without_certificate is not None:
            app.middlewares.insert(1, _wants_certificate(without_certificate))
        self._runner = web.AppRunner(
            app,
            access_log=None,
            logger=SparseLog(logger),
            handler_cancellation=handler_cancellation,
            shutdown_timeout=shutdown_timeout_s,
            max_line_size=limits.max_header_bytes,
            max_field_size=limits.max_header_bytes,
            lingering_time=min(_LINGER_S, limits.head_timeout_s),
            auto_decompress=False,
        )
        self._acceptor: Acceptor | None = None

    async def start(self) -> None:
        """Accept connections from now on."""
        await self._runner.setup()
        if self._runner.server is None:  # only before `setup`
            raise OSError("aiohttp gave no server")
        self._acceptor = Acceptor(self._listeners, self._runner.server, self._clients, self._ssl_context)
        self._acceptor.start()

    def stop_accepting(self) -> None:
        """Accept nothing more. May be called again."""
        if self._acceptor is not None:
            self._acceptor.stop()

    async def close(self) -> None:
        """Let handlers end, cut what is open then, close the listeners."""
        self.stop_accepting()
        try:
            try:
                await asyncio.wait_for(self._runner.cleanup(), 2 * _CLOSE_TIMEOUT_S)
            finally:
                if self._acceptor is not None:
                    await self._acceptor.close(_CLOSE_TIMEOUT_S)
        except asyncio.TimeoutError:
            logger.warning("connections of %s did not close in time", self._name)
        finally:
            for listener in self._listeners:
                listener.close()


@web.middleware
async def _refuse_web_pages(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Refuse what a web page asks for: a browser inside the network would ask wherever any page tells it to.

    Browsers name the page's origin in each WebSocket and each POST; nobody else does.
    """
    if "Origin" in request.headers:
        return refuse(403, "web_page", "web pages are not answered")
    return await handler(request)


def _wants_certificate(but_at: Collection[str]) -> Middleware:
    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.path not in but_at and lacks_certificate(request):
            return refuse(403, "certificate", CERTIFICATE_IS_MISSING)
        return await handler(request)

    return check


class Acceptor:
    """Accepts connections from `start` until `stop`.

    Args:
        listeners: listening sockets that do not block; they stay the caller's.
        clients: where connections are counted.
    """

    def __init__(
        self,
        listeners: Sequence[socket.socket],
        make_protocol: Callable[[], asyncio.Protocol],
        clients: ClientLimits,
        ssl_context: ServerContext,
    ) -> None:
        self._listeners = listeners
        self._make_protocol = make_protocol
        self._clients = clients
        self._ssl_context = ssl_context
        self._loop = clients.loop
        self._resuming: asyncio.TimerHandle | None = None
        self._opening: set[asyncio.Task[None]] = set()

    def start(self) -> None:
        """Accept from now on."""
        self._resuming = None
        for listener in self._listeners:
            self._loop.add_reader(listener, self._accept, listener)

    def stop(self) -> None:
        """Accept nothing more, and give up what is still being opened."""
        self._stop_reading()
        if self._resuming is not None:
            self._resuming.cancel()
        for task in self._opening:
            task.cancel()

    async def close(self, timeout_s: float) -> None:
        """Cut every connection; return when all are closed. After `stop`.

        Raises:
            asyncio.TimeoutError: some are not.
        """
        if self._opening:
            await asyncio.wait(self._opening, timeout=timeout_s)
        await self._clients.abort_all(timeout_s)

    def _stop_reading(self) -> None:
        for listener in self._listeners:
            self._loop.remove_reader(listener)

    def _accept(self, listener: socket.socket) -> None:
        for _ in range(_ACCEPTS_AT_ONCE):  # then others have their turn
            try:
                sock, address = listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                if error.errno not in _NO_ROOM:
                    raise
                self._clients.log.error("%s cannot accept connections: %s", self._clients.name, error)
                self._stop_reading()
                if self._resuming is not None:
                    self._resuming.cancel()
                self._resuming = self._loop.call_later(_PAUSE_S, self.start)
                return
            connection = GuardedConnection(self._make_protocol(), self._clients, client_of_address(str(address[0])))
            if not self._clients.admit(connection):
                sock.close()
                continue
            keep_from_forked_children(sock)
            sock.setblocking(False)
            task = connection.opening = self._loop.create_task(self._open(sock, connection))
            self._opening.add(task)
            task.add_done_callback(functools.partial(self._opened, sock, connection))

    def _opened(self, sock: socket.socket, connection: GuardedConnection, task: asyncio.Task[None]) -> None:
        self._opening.discard(task)
        if task.cancelled():
            sock.close()
            connection.leave()
            return
        error = task.exception()
        if error is not None:
            sock.close()
            connection.leave()
            ended = isinstance(error, ConnectionError | asyncio.TimeoutError)
            level = logging.DEBUG if ended else logging.WARNING
            why = why_not(error) or str(error) or repr(error)
            self._clients.log.log(level, "a connection of %s was not opened: %s", connection.client, why)

    async def _open(self, sock: socket.socket, connection: GuardedConnection) -> None:
        if self._ssl_context is None:
            await self._loop.connect_accepted_socket(lambda: connection, sock)
            return
        deadline = self._loop.time() + self._clients.limits.head_timeout_s
        await asyncio.wait_for(self._readable(sock), deadline - self._loop.time())
        if sock.recv(1, socket.MSG_PEEK) not in (_TLS_HANDSHAKE, b""):
            sock.recv(64 * 1024)  # what is left unread would make the kernel take the answer back
            sock.send(_SPEAKS_HTTPS)
            raise OSError("it speaks plain http, and this service https only")
        await self._loop.connect_accepted_socket(
            lambda: connection,
            sock,
            ssl=self._ssl_context() if callable(self._ssl_context) else self._ssl_context,
            ssl_handshake_timeout=max(deadline - self._loop.time(), 0.001),
        )

    async def _readable(self, sock: socket.socket) -> None:
        readable = asyncio.Event()
        self._loop.add_reader(sock, readable.set)
        try:
            await readable.wait()
        finally:
            self._loop.remove_reader(sock)
