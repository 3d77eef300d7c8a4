"""What waits for a peer that does not read is bounded, who is asked is who was meant, and web pages are not answered."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable

import aiohttp
import pytest
from aiohttp import web

from torchft_ckpt import LighthouseServer
from torchft_ckpt.__main__ import main
from torchft_ckpt.coordination.channel import MAX_QUEUED_BYTES, Channel
from torchft_ckpt.core.coordination.jobs import DEFAULT_JOB
from torchft_ckpt.core.coordination.messages import (
    MAX_MESSAGE_BYTES,
    PROTOCOL_VERSION,
    Hello,
    Leave,
    Refused,
    Source,
    StateLocated,
    decode_from_lighthouse,
    encode,
)
from torchft_ckpt.front.limits import FrontLimits
from torchft_ckpt.front.serving import Front
from torchft_ckpt.network import listen


class NeverReads:
    """A WebSocket whose peer does not read."""

    async def send_str(self, text: str) -> None:
        await asyncio.Event().wait()


def large(num_bytes: int) -> StateLocated:
    """An answer of so many bytes, in characters of four each, or a little less."""
    source = Source(replica_id="a", replica_rank=0, checkpoint_addresses=["\N{GRINNING FACE}" * (num_bytes // 4)])
    return StateLocated(request_id=1, sources=[source])


async def test_what_waits_is_bounded_by_bytes(caplog: pytest.LogCaptureFixture) -> None:
    channel = Channel(NeverReads(), None, "the group at x", 1.0)  # type: ignore[arg-type]
    for number in range(8):
        await asyncio.sleep(0)
        assert not channel._writer.done(), number
        channel.send(large(1 << 20))
    await asyncio.wait([channel._writer], timeout=5)
    assert channel._writer.done()
    assert channel._queued_bytes <= MAX_QUEUED_BYTES
    assert "the group at x does not read, 7" in caplog.text


async def test_a_message_that_the_peer_could_not_take_is_not_sent(caplog: pytest.LogCaptureFixture) -> None:
    channel = Channel(NeverReads(), None, "the group at x", 1.0)  # type: ignore[arg-type]
    channel.send(large(MAX_MESSAGE_BYTES))
    await asyncio.wait([channel._writer], timeout=5)
    assert channel._writer.done()
    assert "a StateLocated of 4194" in caplog.text
    assert channel._outgoing.empty()


async def test_bytes_that_were_sent_wait_no_longer() -> None:
    class Reads:
        async def send_str(self, text: str) -> None: ...

        async def close(self) -> None: ...

    channel = Channel(Reads(), None, "the group at x", 1.0)  # type: ignore[arg-type]
    for _ in range(12):
        channel.send(large(1 << 20))
        await asyncio.sleep(0)
    assert (channel._queued_bytes, channel._writer.done()) == (0, False)
    channel.close()
    await channel.wait_closed()


@contextlib.asynccontextmanager
async def answering(handler: Callable[[web.Request], Awaitable[web.StreamResponse]]) -> AsyncIterator[str]:
    """Somebody who answers all that is asked; yields his address."""
    app = web.Application()
    app.router.add_get("/{path:.*}", handler)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    yield f"127.0.0.1:{runner.addresses[0][1]}"
    await runner.cleanup()


async def test_a_redirect_is_not_followed_and_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    asked: list[str] = []

    async def elsewhere(request: web.Request) -> web.StreamResponse:
        asked.append(request.path)
        raise web.HTTPFound("/elsewhere")

    async with answering(elsewhere) as address:
        for command in ("status", "allow-step-loss"):
            assert await asyncio.to_thread(main, [command, "--lighthouse", address]) == 1
            assert "it redirects to /elsewhere, which is not followed" in capsys.readouterr().err
    assert asked == ["/", "/v1/groups"]


async def test_a_web_page_is_not_answered_and_all_others_are() -> None:
    async def answer(request: web.Request) -> web.StreamResponse:
        return web.Response(text="here")

    app = web.Application()
    app.router.add_get("/", answer)
    (listener,) = listen("127.0.0.1", 0, 16)
    front = Front(app, [listener], name="the server", token="", limits=FrontLimits())
    await front.start()
    url = f"http://127.0.0.1:{listener.getsockname()[1]}/"
    async with aiohttp.ClientSession() as session:
        for origin, status in (("https://example.org", 403), ("null", 403), (None, 200)):
            async with session.get(url, headers={"Origin": origin} if origin else {}) as response:
                assert response.status == status
    await front.close()


async def test_a_web_page_cannot_open_the_websocket_of_a_lighthouse() -> None:
    server = LighthouseServer("127.0.0.1:0", min_replicas=1)
    async with aiohttp.ClientSession() as session:
        with pytest.raises(aiohttp.WSServerHandshakeError) as raised:
            await session.ws_connect(f"{server.address()}/v1/groups", origin="https://example.org")
    assert raised.value.status == 403
    server.shutdown()


async def test_messages_end_where_a_peer_pinged_and_has_gone() -> None:
    """aiohttp raises where it cannot answer the ping, which must not become an error of the server."""

    class PingsAndGoes(NeverReads):
        def __aiter__(self) -> AsyncIterator[aiohttp.WSMessage]:
            return self._read()

        async def _read(self) -> AsyncIterator[aiohttp.WSMessage]:
            yield aiohttp.WSMessage(aiohttp.WSMsgType.TEXT, "said before", None)
            raise ConnectionResetError("Cannot write to closing transport")

    channel = Channel(PingsAndGoes(), None, "the group at x", 1.0)  # type: ignore[arg-type]
    assert [message async for message in channel.messages()] == ["said before"]
    channel.abort()


async def test_a_client_that_goes_in_its_handshake_is_no_error_of_the_server(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def gone(self: web.WebSocketResponse, request: web.BaseRequest) -> None:
        raise ConnectionResetError("Cannot write to closing transport")

    server = LighthouseServer("127.0.0.1:0", min_replicas=1)
    monkeypatch.setattr(web.WebSocketResponse, "prepare", gone)
    async with aiohttp.ClientSession() as session:
        with pytest.raises(aiohttp.WSServerHandshakeError, match="400"):
            await session.ws_connect(f"{server.address()}/v1/groups")
    server.shutdown()
    assert "Traceback" not in caplog.text


DEEP = b'{"a":' + b"[" * 200_000 + b"]" * 200_000 + b"}"


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (None, "its status is longer than 1 MiB"),
        (b"no json", "its status cannot be read"),
        (DEEP, "its status cannot be read"),
        (b"\xff\xfe\xfd", "its status cannot be read"),
        (b"3", "it is no JSON object"),
        (b"gzip", "it compresses its answer"),
    ],
    ids=["endless", "no JSON", "deep", "no text", "a number", "compressed"],
)
async def test_status_of_something_else_is_one_line(
    body: bytes | None, why: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torchft_ckpt.coordination.asking.MAX_STATUS_BYTES", 1 << 20)

    async def answer(request: web.Request) -> web.StreamResponse:
        if body == b"gzip":
            return web.Response(body=b"", headers={"Content-Encoding": "gzip"})
        if body is not None:
            return web.Response(body=body, content_type="application/json")
        response = web.StreamResponse()
        await response.prepare(request)
        with contextlib.suppress(ConnectionError):
            while True:
                await response.write(b" " * (1 << 16))
        return response

    async with answering(answer) as address:
        assert await asyncio.to_thread(main, ["status", "--lighthouse", address]) == 1
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert f"what answers at {address} is no lighthouse of ours" in err
    assert why in err


async def test_no_name_and_no_reason_writes_to_the_log_of_a_lighthouse_as_it_likes(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    server = LighthouseServer("127.0.0.1:0", min_replicas=2)
    hostile = "x\x1b[2J\x1b]0;owned\x07\n2026-01-01 INFO forged"
    async with aiohttp.ClientSession() as session:
        for said in (
            [encode(Hello(protocol=PROTOCOL_VERSION, replica_id=hostile))],
            [encode(Hello(protocol=PROTOCOL_VERSION, replica_id="x:1")), encode(Leave(reason=hostile))],
            ['{"type":"\\u001b[31mHello"}'],
        ):
            socket = await session.ws_connect(f"{server.address()}/v1/groups")
            for text in said:
                await socket.send_str(text)
            async for message in socket:
                if message.type is aiohttp.WSMsgType.TEXT:
                    heard = decode_from_lighthouse(message.data, "the lighthouse")
                    assert not isinstance(heard, Refused) or heard.reason.isprintable()
    server.shutdown()
    lines = [record.getMessage() for record in caplog.records]
    assert all(line.isprintable() for line in lines)
    assert f"job {DEFAULT_JOB}: x:1 is gone: x\\x1b[2J" in "\n".join(lines)
