"""A lighthouse that says what no lighthouse should, and a trainer in a process of its own that has to live with it.

It is no attack by itself: `f15_hostile_lighthouse.py` tells it what to say.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from aiohttp import web

from torchft_ckpt.core.coordination.messages import PROTOCOL_VERSION

TRAINER = r"""
import logging, sys, torch
from datetime import timedelta
from torch import nn
logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(name)s %(levelname)s %(message)s")
from torchft_ckpt import Manager, Optimizer, ProcessGroupGloo
torch.set_num_threads(1)
module = nn.Linear(8, 8)
limit = timedelta(seconds=float(sys.argv[2]))
manager = Manager(
    ProcessGroupGloo(timeout=limit), module.load_state_dict, module.state_dict, min_replica_size=1, timeout=limit,
    lighthouse_addr=sys.argv[1], hostname="127.0.0.1", replica_id="g0", connect_timeout=limit, token="top secret",
    quorum_timeout=limit, quorum_retries=0,
)
optimizer = Optimizer(manager, torch.optim.SGD(module.parameters(), lr=0.1))
for _ in range(4):
    optimizer.zero_grad()
    module(torch.randn(2, 8)).sum().backward()
    optimizer.step()
    print("step", manager.current_step(), flush=True)
manager.shutdown()
"""
ADDRESS_SPACE_BYTES = 8 << 30
STARTS_S = 180.0
"""A trainer imports torch."""
WELCOME = {
    "type": "Welcome",
    "protocol": PROTOCOL_VERSION,
    "epoch": "e",
    "heartbeat_timeout_s": 5.0,
    "store_address": "",
}


@dataclass
class Case:
    """What the lighthouse says in the place of what it should."""

    welcome: dict[str, Any] = field(default_factory=dict)
    formed: dict[str, Any] = field(default_factory=dict)
    first: list[str | bytes] = field(default_factory=list)
    """Said after the welcome."""
    redirects: bool = False
    refuses: str = ""


@dataclass
class Seen:
    """What became of the trainer."""

    asked_at: float | None = None
    """When the trainer asked for its first step, or connected where it got no further."""
    num_asked: int = 0
    num_messages: int = 0
    was_redirected: bool = False
    status: int | None = None
    """Its exit status; None where it was still running."""
    peak_bytes: int = 0
    took_s: float = 0.0
    log: str = ""


def formed(request: dict[str, Any], changes: dict[str, Any]) -> str:
    """Return the quorum of one group that a request is answered with."""
    return json.dumps(
        {
            "type": "QuorumFormed",
            "request_id": request["request_id"],
            "quorum_id": 1,
            "epoch": "e",
            "version": {"step": 0, "quorum_id": 1, "epoch": "e"},
            "role": "healthy",
            "replica_rank": 0,
            "replica_world_size": 1,
            "contributor_rank": 0,
            "num_contributors": 1,
            "num_voters": 1,
            "store_address": request.get("store_address", ""),
            "names_state": True,
            **changes,
        }
    )


@contextlib.asynccontextmanager
async def lighthouse(case: Case, seen: Seen) -> AsyncIterator[int]:
    """Serve a lighthouse that behaves as a case says; yields its port."""

    async def groups(request: web.Request) -> web.StreamResponse:
        seen.asked_at = seen.asked_at or time.monotonic()
        if case.redirects:
            raise web.HTTPFound("/elsewhere")
        socket = web.WebSocketResponse(max_msg_size=1 << 24)
        await socket.prepare(request)
        await socket.receive()
        if case.refuses:
            await socket.send_str(json.dumps({"type": "Refused", "code": "x", "reason": case.refuses}))
            await socket.close()
            return socket
        await socket.send_str(json.dumps({**WELCOME, **case.welcome}))
        for said in case.first:
            with contextlib.suppress(ConnectionError):
                await (socket.send_str(said) if isinstance(said, str) else socket.send_bytes(said))
        async for message in socket:
            if message.type is not aiohttp.WSMsgType.TEXT:
                break
            said = json.loads(message.data)
            seen.num_messages += 1
            if said["type"] == "QuorumRequest":
                seen.asked_at = time.monotonic() if seen.num_asked == 0 else seen.asked_at
                seen.num_asked += 1
                await socket.send_str(formed(said, case.formed))
            elif said["type"] == "CommitVote":
                decided = {name: said[name] for name in ("quorum_id", "epoch", "step")}
                await socket.send_str(json.dumps({"type": "CommitDecided", **decided, "outcome": "commit"}))
        return socket

    async def elsewhere(request: web.Request) -> web.StreamResponse:
        seen.was_redirected = True
        return web.Response(text="x")

    app = web.Application()
    app.add_routes([web.get("/v1/groups", groups), web.get("/elsewhere", elsewhere)])
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield runner.addresses[0][1]
    finally:
        await runner.cleanup()


def limited() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (ADDRESS_SPACE_BYTES, ADDRESS_SPACE_BYTES))


async def try_case(case: Case, *, most_s: float, patience_s: float = 5.0) -> Seen:
    """Let a trainer meet a lighthouse, and end it so many seconds after it asked for its first step at the latest."""
    seen = Seen()
    async with lighthouse(case, seen) as port:
        process = subprocess.Popen(
            [sys.executable, "-c", TRAINER, f"127.0.0.1:{port}", str(patience_s)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            preexec_fn=limited,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
        began = time.monotonic()
        reading = asyncio.get_running_loop().run_in_executor(None, process.communicate)
        while process.poll() is None and time.monotonic() < (seen.asked_at or began + STARTS_S) + most_s:
            await asyncio.sleep(0.1)
            with contextlib.suppress(OSError), open(f"/proc/{process.pid}/status") as lines:
                kib = [int(line.split()[1]) for line in lines if line.startswith("VmHWM")]
                seen.peak_bytes = max(seen.peak_bytes, kib[0] << 10) if kib else seen.peak_bytes
        seen.status, seen.took_s = process.poll(), time.monotonic() - began
        process.kill()
        seen.log = (await reading)[0]
    return seen
