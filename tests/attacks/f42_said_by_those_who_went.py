"""Members that come, say much, and go: a lighthouse kept it, in a job that forms no quorum, for ever.

First 100 MiB of Hellos with many short addresses, whose connections are closed at once. Then the same from members that stay.
Then votes on steps of an earlier life. The lighthouse is in a process of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys

import aiohttp
from a_lighthouse import Lighthouse, running

from torchft_ckpt.core.coordination.messages import PROTOCOL_VERSION, CommitVote, Heartbeat, Hello, encode

NUM_MEMBERS = 420
NUM_VOTES = 500
MOST_GROWTH_BYTES = 50 << 20


def hello(number: int) -> str:
    return encode(
        Hello(
            protocol=PROTOCOL_VERSION,
            replica_id=f"x{number}:1",
            last_quorum_id=1,
            last_epoch="old",
            last_quorum_size=1000,
            checkpoint_addresses=["aa"] * 50_000,
        )
    )


def vote(number: int) -> str:
    return encode(
        CommitVote(
            quorum_id=1,
            epoch="old",
            step=number,
            approve=True,
            num_voters=1000,
            state_digests=[f"{one:032x}" for one in range(8000)],
            reason="r" * 4000,
        )
    )


async def come(session: aiohttp.ClientSession, url: str, number: int) -> aiohttp.ClientWebSocketResponse:
    socket = await session.ws_connect(url, max_msg_size=1 << 26)
    await socket.send_str(hello(number))
    await socket.receive()
    return socket


async def attack(lighthouse: Lighthouse) -> dict[str, int]:
    """Return by how much the lighthouse has grown after each part."""
    url, grown = f"{lighthouse.address}/v1/groups?job=attacked", {}
    before = lighthouse.resident_bytes
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        keeper = await come(session, url, -1)  # the job is never without a member
        for number in range(NUM_MEMBERS):
            await (await come(session, url, number)).close()
            with contextlib.suppress(aiohttp.ClientError, ConnectionError):
                await keeper.send_str(encode(Heartbeat()))
        grown["Hellos of members that are gone"] = lighthouse.resident_bytes - before
        staying = []
        for number in range(NUM_MEMBERS):
            staying.append(await come(session, url, number))
            for socket in (keeper, *staying) if number % 50 == 0 else ():
                with contextlib.suppress(aiohttp.ClientError, ConnectionError):  # it was dropped
                    await socket.send_str(encode(Heartbeat()))
        grown["Hellos of members that stay"] = lighthouse.resident_bytes - before
        for socket in staying:
            await socket.close()
        voter = await come(session, url, NUM_MEMBERS)
        try:
            for number in range(NUM_VOTES):
                await voter.send_str(vote(number))
                await asyncio.sleep(0.1 if number % 10 == 9 else 0.0)
        except (ConnectionError, aiohttp.ClientError):
            print("the lighthouse closed the connection of the one that votes")
        await asyncio.sleep(1.0)
        grown["votes in doubt"] = lighthouse.resident_bytes - before
    await asyncio.sleep(1.0)
    grown["all are gone"] = lighthouse.resident_bytes - before
    return grown


def main() -> int:
    with running("--min-replicas", "2") as lighthouse:
        grown = asyncio.run(attack(lighthouse))
    for what, num_bytes in grown.items():
        print(f"{num_bytes >> 20} MiB more: {what}")
    worst = max(grown.values())
    if worst > MOST_GROWTH_BYTES:
        print(f"VULNERABLE: the lighthouse grew by {worst >> 20} MiB")
        return 1
    print(f"held: the lighthouse grew by {worst >> 20} MiB at most")
    return 0


if __name__ == "__main__":
    sys.exit(main())
