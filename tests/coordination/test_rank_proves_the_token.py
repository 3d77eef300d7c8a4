"""A rank and the manager service of its group prove the token to each other; who was put in between is told nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta

import aiohttp
import pytest
from aiohttp import web
from support.services import make_group_service

from torchft_ckpt import LighthouseServer
from torchft_ckpt.coordination import GroupService, RankSession, group_service
from torchft_ckpt.coordination.loop_thread import LoopThread
from torchft_ckpt.core.services.proofs import PROOF_HEADER, RankProof
from torchft_ckpt.errors import AuthenticationError, GroupBrokenError
from torchft_ckpt.network import listen

LONG = timedelta(seconds=30)
TOKEN = "a secret"


def rank_of(address: str, *, token: str = TOKEN, replica_id: str = "group:1") -> RankSession:
    return RankSession(
        address=address,
        group_rank=1,
        on_message=lambda message: None,
        token=token,
        heartbeat_interval=LONG,
        connect_timeout=LONG,
        replica_id=replica_id,
    )


@pytest.fixture
def service() -> Iterator[GroupService]:
    lighthouse = LighthouseServer("127.0.0.1:0", min_replicas=1, token=TOKEN)
    service = make_group_service(lighthouse.address(), token=TOKEN, heartbeat_interval=LONG, connect_timeout=LONG)
    yield service
    service.shutdown("the test is over")
    lighthouse.shutdown()


@contextmanager
def stranger(proves: Callable[[str], str]) -> Iterator[tuple[str, list[str]]]:
    """Somebody who takes every rank in; yields its address, and what it was shown. `proves`: given that, its own proof."""
    shown: list[str] = []

    async def serve(request: web.Request) -> web.WebSocketResponse:
        shown.append(str(dict(request.headers)))
        websocket = web.WebSocketResponse(timeout=0.1)
        websocket.headers[PROOF_HEADER] = proves(request.headers["Authorization"])
        await websocket.prepare(request)
        async for message in websocket:
            shown.append(str(message.data))
        return websocket

    async def start() -> None:
        await runner.setup()
        await web.SockSite(runner, listener).start()

    app = web.Application()
    app.add_routes([web.get("/v1/ranks", serve)])
    runner = web.AppRunner(app, shutdown_timeout=1.0)
    [listener] = listen("127.0.0.1", 0, 8)
    thread = LoopThread("stranger")
    thread.run(start())
    yield f"127.0.0.1:{listener.getsockname()[1]}", shown
    thread.finish(runner.cleanup)


def test_a_rank_is_taken_in_that_knows_the_token_and_means_this_group(service: GroupService) -> None:
    for differs in ({"token": "guess"}, {"token": ""}, {"replica_id": "group:0"}):
        with pytest.raises((AuthenticationError, GroupBrokenError), match=r"refused the token of group rank 1|401"):
            rank_of(service.address, **differs)
    rank = rank_of(service.address)
    rank.shutdown("the test is over")


@pytest.mark.parametrize(
    "proves",
    [
        lambda shown: "",
        lambda shown: shown.rpartition(" ")[2],
        lambda shown: RankProof("guess", "group:1", shown.split()[1]).answer,
        lambda shown: RankProof(TOKEN, "group:0", shown.split()[1]).answer,
        lambda shown: RankProof(TOKEN, "group:1", "0" * 32).answer,
    ],
    ids=["nothing", "the rank's own", "another token", "of an earlier start", "an old answer"],
)
def test_a_rank_tells_a_stranger_neither_the_token_nor_anything_else(proves: Callable[[str], str]) -> None:
    with stranger(proves) as (address, shown):
        with pytest.raises(AuthenticationError, match=f"{address} does not prove .* group rank 1 told it nothing"):
            rank_of(address)
    assert len(shown) == 1 and TOKEN not in shown[0] and "Bearer" not in shown[0]


def statuses(service: GroupService, *authorizations: str) -> list[int]:
    """Return how the service answers those who connect with these headers, one after the other."""

    async def connect() -> list[int]:
        seen = []
        for authorization in authorizations:
            async with aiohttp.ClientSession() as session:
                try:
                    url = f"http://{service.address}/v1/ranks"
                    async with session.ws_connect(url, headers={"Authorization": authorization}):
                        seen.append(101)
                except aiohttp.WSServerHandshakeError as error:
                    seen.append(error.status)
        return seen

    return asyncio.run(connect())


def test_what_a_rank_has_shown_opens_no_second_door(service: GroupService) -> None:
    shown = RankProof(TOKEN, "group:1", "1" * 32).authorization
    assert statuses(service, shown, shown, f"Bearer {TOKEN}") == [101, 401, 401]


def test_however_many_prove_the_token_what_they_have_shown_takes_a_bounded_place(
    service: GroupService, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(group_service, "_MAX_PROOFS", 3)
    shown = [RankProof(TOKEN, "group:1", nonce * 9999).authorization for nonce in "12345"]
    assert statuses(service, *shown, *shown[2:]) == [101] * 5 + [401] * 3
    assert [len(known) for known in service._proofs_used] == [64] * 3
