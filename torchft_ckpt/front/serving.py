"""Serves an aiohttp application on sockets that listen, behind the limits of `limits`. On its event loop only."""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections.abc import Sequence

from aiohttp import web
from aiohttp.typedefs import Handler

from torchft_ckpt.front.acceptor import Acceptor
from torchft_ckpt.front.limits import ClientLimits, FrontLimits, SparseLog, refuse

logger = logging.getLogger(__name__)
_LINGER_S = 1.0
_CLOSE_TIMEOUT_S = 2.5


class Front:
    """The front of one service, from `start` until `close`.

    Args:
        app: with its routes.
        listeners: of `network.listen`; closed by `close`.
        name: of the server, for messages: "the lighthouse".
        token: that clients show as `Authorization: Bearer`, empty for none. The application refuses those that do not.
        limits: what clients may take.
        ssl_context: speak TLS with this one.
        handler_cancellation: a handler whose client has gone away is cancelled.
        shutdown_timeout_s: how long handlers may take to end at `close`.

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
        ssl_context: ssl.SSLContext | None = None,
        handler_cancellation: bool = False,
        shutdown_timeout_s: float = 1.0,
    ) -> None:
        self._name = name
        self._listeners = listeners
        self._ssl_context = ssl_context
        self._clients = ClientLimits(limits, asyncio.get_running_loop(), token=token, name=name)
        self.log = self._clients.log
        app.middlewares[:0] = [self._clients.middleware, _refuse_web_pages]
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
