"""Members of other versions meet: whoever of the two can tell refuses the other, and names both versions and who it is."""

from __future__ import annotations

import json
import queue
import re
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from support.services import make_group_service

from torchft_ckpt import LighthouseServer
from torchft_ckpt.coordination import GroupService, RankSession
from torchft_ckpt.coordination.loop_thread import LoopThread
from torchft_ckpt.core.coordination.messages import PROTOCOL_VERSION, SAME_EVERYWHERE, GroupBroken
from torchft_ckpt.errors import ProtocolError, ProtocolVersionError
from torchft_ckpt.network import listen

OURS, THEIRS = PROTOCOL_VERSION, PROTOCOL_VERSION + 1
BOTH = f"speaks protocol {THEIRS}, this replica group {OURS}"
LONG = timedelta(seconds=30)


def group(lighthouse: str, world_size: int = 1) -> GroupService:
    return make_group_service(lighthouse, world_size=world_size, heartbeat_interval=LONG, connect_timeout=LONG)


@contextmanager
def answering(text: str) -> Iterator[str]:
    """A server that answers a first message, whatever it is, with `text`; yields its address."""

    async def serve(request: web.Request) -> web.WebSocketResponse:
        websocket = web.WebSocketResponse(timeout=1.0)
        await websocket.prepare(request)
        await websocket.receive()
        await websocket.send_str(text)
        await websocket.receive()
        return websocket

    async def start() -> None:
        await runner.setup()
        await web.SockSite(runner, listener).start()

    app = web.Application()
    app.add_routes([web.get("/v1/groups", serve), web.get("/v1/ranks", serve)])
    runner = web.AppRunner(app, shutdown_timeout=1.0)
    [listener] = listen("127.0.0.1", 0, 8)
    thread = LoopThread("another version")
    thread.run(start())
    yield f"127.0.0.1:{listener.getsockname()[1]}"
    thread.finish(runner.cleanup)


async def answer_to(said: dict[str, Any], url: str) -> tuple[str, str]:
    """Say a first message; return code and reason of the refusal."""
    async with aiohttp.ClientSession() as session, session.ws_connect(url) as socket:
        await socket.send_str(json.dumps(said))
        refusal = json.loads((await socket.receive(timeout=30)).data)
    return refusal["code"], refusal["reason"]


@pytest.mark.parametrize(
    ("said", "who"),
    [
        ({"type": "Hello", "protocol": THEIRS, "replica_id": "new:1"}, "new:1"),
        ({"type": "Hello", "protocol": THEIRS, "replica_id": "new:1", "version": 7}, "new:1 (the group at 127.0.0.1)"),
        ({"type": "Greeting", "protocol": THEIRS}, "the group at 127.0.0.1"),
    ],
)
async def test_the_lighthouse_refuses_a_hello_of_another_version(said: dict[str, Any], who: str) -> None:
    lighthouse = LighthouseServer("127.0.0.1:0", min_replicas=1)
    reason = f"the lighthouse speaks protocol {OURS}, {who} speaks {THEIRS}; {SAME_EVERYWHERE}"
    assert await answer_to(said, f"{lighthouse.address()}/v1/groups") == ("version", reason)
    lighthouse.shutdown()


@pytest.mark.parametrize(
    ("said", "who"),
    [
        ({"type": "RankHello", "protocol": THEIRS, "group_rank": 1}, "group rank 1"),
        ({"type": "RankHello", "protocol": THEIRS, "group_rank": [1, 1]}, "a rank at 127.0.0.1"),
    ],
)
async def test_the_manager_service_refuses_a_rank_of_another_version(said: dict[str, Any], who: str) -> None:
    lighthouse = LighthouseServer("127.0.0.1:0", min_replicas=1)
    service = group(lighthouse.address(), world_size=2)
    reason = f"the manager service speaks protocol {OURS}, {who} speaks {THEIRS}; {SAME_EVERYWHERE}"
    assert await answer_to(said, f"http://{service.address}/v1/ranks") == ("version", reason)
    service.shutdown("the test is over")
    lighthouse.shutdown()


@pytest.mark.parametrize(
    ("said", "kind", "message"),
    [
        ({"type": "Welcome", "protocol": THEIRS, "epoch": "e", "heartbeat_timeout_s": 5}, ProtocolVersionError, BOTH),
        ({"type": "Hail", "protocol": THEIRS}, ProtocolVersionError, BOTH),
        ({"type": "Refused", "why": "?"}, ProtocolError, f"cannot be read: .*replica group speaks protocol {OURS}"),
        ({"type": "JoinerWaiting"}, ProtocolError, "did not answer a hello, but sent JoinerWaiting"),
    ],
)
def test_a_group_will_not_have_a_lighthouse_of_another_version(
    said: dict[str, Any], kind: type[Exception], message: str
) -> None:
    with answering(json.dumps(said)) as address:
        with pytest.raises(kind, match=f"the lighthouse at {address} .*{message}"):
            group(address)


def test_a_rank_that_cannot_read_its_service_names_the_version_that_it_speaks() -> None:
    heard: queue.Queue[object] = queue.Queue()
    with answering('{"type": "Hail"}') as address:
        rank = RankSession(
            address=address,
            group_rank=1,
            on_message=heard.put,
            token="",
            heartbeat_interval=LONG,
            connect_timeout=LONG,
        )
        broken = heard.get(timeout=LONG.total_seconds())
        rank.shutdown("the test is over")
    assert isinstance(broken, GroupBroken)
    assert re.search(f"group rank 0 at {address} .*cannot be read.*speaks protocol {OURS}", broken.reason)
