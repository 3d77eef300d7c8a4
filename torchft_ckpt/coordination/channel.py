"""One WebSocket: messages out in order and bounded, messages in until it closes. It knows no protocol above that.

A peer that does not read cannot make us hold its messages without limit, nor hold up anybody else: what is to be sent
waits in a queue of its own, and a queue that runs over closes the connection.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator

import aiohttp
from aiohttp import web

from torchft_ckpt.core.messages import Message, encode

logger = logging.getLogger(__name__)

MAX_QUEUED_MESSAGES = 1024
CLOSE_TIMEOUT_S = 1.0


class Channel:
    """A WebSocket with a writer task. Use on its event loop only.

    Args:
        socket: an open WebSocket, of either side.
        name: the peer, for the log.
    """

    def __init__(self, socket: web.WebSocketResponse | aiohttp.ClientWebSocketResponse, name: str) -> None:
        self._socket = socket
        self._name = name
        self._outgoing: asyncio.Queue[str | None] = asyncio.Queue()
        self._writer = asyncio.get_running_loop().create_task(self._write())
        self.sent_at = asyncio.get_running_loop().time()
        """When something was last handed to the socket, on the loop's clock."""

    def send(self, message: Message) -> None:
        """Queue a message. After `close` it is dropped."""
        if self._writer.done():
            return
        if self._outgoing.qsize() >= MAX_QUEUED_MESSAGES:
            logger.warning("%s does not read, %d messages wait for it: closing", self._name, MAX_QUEUED_MESSAGES)
            self._writer.cancel()
            self._abort()
            return
        self._outgoing.put_nowait(encode(message))

    def close(self) -> None:
        """Close after what was queued has been sent."""
        if not self._writer.done():
            self._outgoing.put_nowait(None)

    async def wait_closed(self) -> None:
        """Wait until what was queued before `close` was sent, and the socket is closed."""
        await asyncio.gather(self._writer, return_exceptions=True)

    async def messages(self) -> AsyncIterator[str | bytes]:
        """Yield what comes in; ends when the connection does, for whatever reason."""
        try:
            async for message in self._socket:
                if message.type not in (aiohttp.WSMsgType.TEXT, aiohttp.WSMsgType.BINARY):
                    break
                yield message.data
        finally:
            self._writer.cancel()

    def _abort(self) -> None:
        transport = self._socket.get_extra_info("transport")
        if transport is None and isinstance(self._socket, web.WebSocketResponse):
            writer = getattr(self._socket, "_writer", None)
            transport = getattr(writer, "transport", None)
        if transport is not None:
            transport.abort()

    async def _write(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            while (text := await self._outgoing.get()) is not None:
                self.sent_at = loop.time()
                await self._socket.send_str(text)
            await asyncio.wait_for(self._socket.close(), CLOSE_TIMEOUT_S)
        except (ConnectionError, aiohttp.ClientError, asyncio.TimeoutError, RuntimeError) as error:
            logger.debug("sending to %s ended: %r", self._name, error)
            self._abort()
