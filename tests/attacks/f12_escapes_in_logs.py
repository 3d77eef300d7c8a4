"""Names and reasons with escape sequences and forged lines: they went to the lighthouse's log, and terminal, as they were."""

from __future__ import annotations

import argparse
import asyncio
import sys
import time

import aiohttp
from a_lighthouse import Lighthouse, running

from torchft_ckpt.core.coordination.messages import PROTOCOL_VERSION, Hello, Leave, QuorumRequest, StateVersion, encode

NAME = "g\x1b]0;owned\x07\x1b[2J\x1b[1;31mX\n2026-01-01 00:00:00,000 INFO group_0 is gone: forged line"


async def attack(address: str) -> None:
    async with aiohttp.ClientSession() as session:
        for name in (NAME, "g:1"):
            socket = await session.ws_connect(f"{address}/v1/groups")
            for said in (
                Hello(protocol=PROTOCOL_VERSION, replica_id=name),
                QuorumRequest(request_id=1, version=StateVersion()),
                Leave(reason="bye \x1b[8m\nforged too"),
            ):
                await socket.send_str(encode(said))
            await asyncio.sleep(0.3)
        socket = await session.ws_connect(f"{address}/v1/groups")
        await socket.send_str('{"type":"\\u001b[31mHello"}')
        await socket.receive()


def logged(lighthouse: Lighthouse) -> bytes:
    """Return the log, when what was said last is in it."""
    until = time.monotonic() + 10
    while b"Hello" not in lighthouse.logged() and time.monotonic() < until:
        time.sleep(0.1)
    return lighthouse.logged()


def main() -> int:
    argparse.ArgumentParser(description=__doc__).parse_args()
    with running("--min-replicas", "2") as lighthouse:
        asyncio.run(attack(lighthouse.address))
        log = logged(lighthouse)
    num_escapes = log.count(b"\x1b")
    num_forged = sum(line.startswith((b"2026-01-01", b"forged")) for line in log.splitlines())
    what = f"{num_escapes} escape characters and {num_forged} forged lines in {len(log)} bytes of log"
    if num_escapes or num_forged or b"bye" not in log:
        print(f"VULNERABLE: {what}")
        return 1
    print(f"held: {what}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
