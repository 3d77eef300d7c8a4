"""The lighthouse over real sockets: who may talk to it, what nonsense gets, and what the command line shows."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import aiohttp
import pytest
from support.ports import reserved_port
from support.processes import run, start

from torchft_ckpt import LighthouseServer
from torchft_ckpt.__main__ import main
from torchft_ckpt.core.coordination.messages import (
    PROTOCOL_VERSION,
    FromLighthouse,
    Hello,
    QuorumBroken,
    QuorumFormed,
    QuorumRequest,
    Refused,
    StateVersion,
    ToLighthouse,
    Welcome,
    decode_from_lighthouse,
    encode,
)
from torchft_ckpt.errors import ConfigError


@pytest.fixture
def lighthouse() -> Iterator[LighthouseServer]:
    server = LighthouseServer("127.0.0.1:0", min_replicas=2, heartbeat_timeout_ms=10_000)
    yield server
    server.shutdown()


class Group:
    """A replica group made of one WebSocket."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self.socket = socket

    async def say(self, message: ToLighthouse) -> None:
        await self.socket.send_str(encode(message))

    async def hear(self, kind: type[FromLighthouse]) -> FromLighthouse:
        while True:
            data = await self.socket.receive_str(timeout=60)
            message = decode_from_lighthouse(data, "lighthouse")
            if isinstance(message, kind):
                return message


async def connect(session: aiohttp.ClientSession, server: LighthouseServer, name: str, life: int = 1) -> Group:
    group = Group(await session.ws_connect(f"{server.address()}/v1/groups"))
    await group.say(
        Hello(protocol=PROTOCOL_VERSION, replica_id=f"{name}:{life}", store_address="127.0.0.1:1", init_sync=False)
    )
    await group.hear(Welcome)
    return group


def request(number: int) -> QuorumRequest:
    return QuorumRequest(request_id=number, version=StateVersion())


async def test_a_closed_connection_is_pushed_to_the_others_at_once(lighthouse: LighthouseServer) -> None:
    async with aiohttp.ClientSession() as session:
        groups = [await connect(session, lighthouse, name) for name in ("a", "b", "c")]
        for group in groups:
            await group.say(request(1))
        formed = [await group.hear(QuorumFormed) for group in groups]
        assert [f.replica_rank for f in formed if isinstance(f, QuorumFormed)] == [0, 1, 2]
        groups[2].socket.get_extra_info("socket").shutdown(socket.SHUT_RDWR)
        for group in groups[:2]:
            broken = await asyncio.wait_for(group.hear(QuorumBroken), 2)
            assert isinstance(broken, QuorumBroken) and broken.lost and broken.replica_id == "c:1"


@pytest.mark.parametrize(
    "nonsense",
    [
        "",
        "[]",
        "{}",
        '{"type":"Hello"}',
        '{"type":"Hello","protocol":-1,"replica_id":"x"}',
        "\x80pickle",
        "[" * 100_000,
    ],
)
async def test_nonsense_is_refused_and_harms_nobody(lighthouse: LighthouseServer, nonsense: str) -> None:
    async with aiohttp.ClientSession() as session:
        good = await connect(session, lighthouse, "good")
        bad = Group(await session.ws_connect(f"{lighthouse.address()}/v1/groups"))
        await bad.socket.send_str(nonsense)
        refused = await bad.hear(Refused)
        assert isinstance(refused, Refused) and refused.code == "protocol"
        await good.say(request(1))
        other = await connect(session, lighthouse, "other")
        await other.say(request(1))
        await good.hear(QuorumFormed)


async def test_a_message_before_hello_is_refused(lighthouse: LighthouseServer) -> None:
    async with aiohttp.ClientSession() as session:
        group = Group(await session.ws_connect(f"{lighthouse.address()}/v1/groups"))
        await group.say(request(1))
        refused = await group.hear(Refused)
        assert isinstance(refused, Refused) and "Hello" in refused.reason


async def test_a_message_beyond_the_limit_ends_its_connection_only(lighthouse: LighthouseServer) -> None:
    async with aiohttp.ClientSession() as session:
        good = await connect(session, lighthouse, "good")
        bad = await connect(session, lighthouse, "bad")
        with contextlib.suppress(ConnectionError):  # it may be closed while we send
            await bad.socket.send_str('{"type":"Leave","reason":"' + "x" * (8 << 20) + '"}')
        closed = await bad.socket.receive(timeout=60)
        assert closed.type in (aiohttp.WSMsgType.CLOSE, aiohttp.WSMsgType.CLOSED, aiohttp.WSMsgType.ERROR)
        await good.say(request(1))
        other = await connect(session, lighthouse, "other")
        await other.say(request(1))
        await good.hear(QuorumFormed)


async def test_status_shows_who_is_there_and_what_is_waited_for(
    lighthouse: LighthouseServer, capsys: pytest.CaptureFixture[str]
) -> None:
    async with aiohttp.ClientSession() as session:
        group = await connect(session, lighthouse, "a")
        await group.say(request(1))
        await asyncio.to_thread(main, ["status", "--job", "default", "--lighthouse", lighthouse.address()])
    status = json.loads(capsys.readouterr().out)
    assert [member["replica_id"] for member in status["members"]] == ["a:1"]
    assert status["settings"]["min_replicas"] == 2


async def test_status_shows_who_is_away_as_long_as_they_are(lighthouse: LighthouseServer) -> None:
    async with aiohttp.ClientSession() as session:

        async def status() -> dict[str, Any]:
            async with session.get(f"{lighthouse.address()}/", params={"job": "default"}) as response:
                return dict(await response.json())

        async def without(*groups: Group) -> dict[str, Any]:
            await asyncio.gather(*(group.socket.close() for group in groups))
            while (shown := await status())["members"]:
                await asyncio.sleep(0.01)
            return shown

        groups = [await connect(session, lighthouse, name) for name in ("a", "b")]
        for group in groups:
            await group.say(request(1))
        await groups[0].hear(QuorumFormed)
        gone = await without(*groups)
        assert (gone["reason"], sorted(gone["lost"])) == ("no group is here", ["a:1", "b:1"])
        assert re.fullmatch(r"its connection closed.* \(\d+ s ago\)", gone["lost"]["a:1"])
        back = await connect(session, lighthouse, "a", life=2)
        assert list((await status())["lost"]) == ["b:1"]
        assert sorted((await without(back))["lost"]) == ["a:2", "b:1"]


def test_a_token_guards_the_status_too(capsys: pytest.CaptureFixture[str]) -> None:
    server = LighthouseServer("127.0.0.1:0", min_replicas=1, token="secret")
    address = server.address()
    assert main(["status", "--lighthouse", address, "--token", "guess"]) == 1
    assert "refused our token" in capsys.readouterr().err
    assert main(["allow-step-loss", "--lighthouse", address, "--token", "guess"]) == 1
    assert main(["status", "--lighthouse", address, "--token", "secret"]) == 0
    server.shutdown()


async def test_a_probe_needs_no_token_and_learns_nothing() -> None:
    server = LighthouseServer("127.0.0.1:0", min_replicas=1, token="secret")
    async with aiohttp.ClientSession() as session, session.get(f"{server.address()}/healthz") as response:
        assert (response.status, await response.text()) == (200, "ok\n")
    server.shutdown()


def test_commands_against_nobody_say_so(capsys: pytest.CaptureFixture[str]) -> None:
    with reserved_port() as port:
        for command in ("status", "allow-step-loss"):
            assert main([command, "--lighthouse", f"127.0.0.1:{port}"]) == 1
            said = capsys.readouterr().err
            assert f"no lighthouse answers at 127.0.0.1:{port}" in said and "ssl:" not in said


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"bind": "127.0.0.1", "min_replicas": 1}, "has no port"),
        ({"bind": "127.0.0.1:70000", "min_replicas": 1}, "between 0 and 65535"),
        ({"bind": "127.0.0.1:0", "min_replicas": 0}, "min_replicas=0"),
        ({"bind": "127.0.0.1:0", "min_replicas": 1, "join_timeout_ms": 0}, "join_timeout_ms=0"),
        ({"bind": "127.0.0.1:0", "min_replicas": 1, "heartbeat_timeout_ms": 9}, "expected at least 10"),
    ],
)
def test_bad_arguments_are_named(arguments: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LighthouseServer(**arguments)


def test_shutdown_ends_the_thread_and_frees_the_port() -> None:
    with reserved_port() as port:
        server = LighthouseServer(f"127.0.0.1:{port}", min_replicas=1)
        server.shutdown()
        server.shutdown()
        assert not [t for t in threading.enumerate() if t.name == "torchft_ckpt-lighthouse"]
        LighthouseServer(f"127.0.0.1:{port}", min_replicas=1).shutdown()


@pytest.mark.processes
@pytest.mark.parametrize(
    "spelled",
    [
        ["--min-replicas", "1"],
        ["--min_replicas", "1", "--join_timeout_ms", "1", "--quorum_tick_ms", "1", "--heartbeat_timeout_ms", "1000"],
    ],
    ids=["ours", "torchft's"],
)
def test_the_command_runs_without_torch_and_ends_on_sigterm(spelled: list[str]) -> None:
    probe = (
        "import sys; from torchft_ckpt.__main__ import main;"
        f"code = main(['lighthouse', '--bind', '127.0.0.1:0', *{spelled!r}]);"
        "sys.exit(code or ('torch' in sys.modules))"
    )
    process = start([sys.executable, "-c", probe], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline().startswith("lighthouse at http://127.0.0.1:")
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=120) == 0


@pytest.mark.processes
def test_the_command_says_that_its_port_is_taken(lighthouse: LighthouseServer) -> None:
    address = lighthouse.address().removeprefix("http://")
    second = run(
        [sys.executable, "-m", "torchft_ckpt", "lighthouse", "--min-replicas", "1", "--bind", address],
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert second.returncode == 1
    assert f"the lighthouse cannot listen on {address}" in second.stderr
