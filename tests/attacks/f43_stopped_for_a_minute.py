"""A lighthouse and a trainer are stopped for a minute, as by a debugger. What members send meanwhile closes nobody.

64 members of the lighthouse, and 63 ranks at the manager service of the trainer, talk on as they did. What has piled up is more
than a connection may send at once; but the services read it late, and it came in time.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import secrets
import signal
import subprocess
import sys

import aiohttp
from a_lighthouse import running

from torchft_ckpt.core.coordination.messages import (
    PROTOCOL_VERSION,
    Heartbeat,
    Hello,
    JoinProgress,
    LocateState,
    RankHello,
    StateVersion,
    encode,
)
from torchft_ckpt.core.services.proofs import RankProof

TOKEN = "a token of this job"
NUM_MEMBERS = 64
MESSAGES_PER_S = 50
SERVE = """
import sys, threading
from support.services import make_group_service
service = make_group_service(sys.argv[1], world_size=int(sys.argv[2]), token=sys.argv[3])
print(service.address, flush=True)
threading.Event().wait()
"""


async def talk(socket: aiohttp.ClientWebSocketResponse, until: asyncio.Event) -> None:
    """Send as many messages as a member with many ranks that all wait."""
    progress = encode(JoinProgress(quorum_id=1, step=1, reach_s=1.0, takes="w" * 100))
    while not until.is_set() and not socket.closed:
        for _ in range(MESSAGES_PER_S // 2):
            await socket.send_str(progress)
        await socket.send_str(encode(Heartbeat()))
        await asyncio.sleep(0.5)


async def why_closed(socket: aiohttp.ClientWebSocketResponse, *, asks: bool) -> str:
    """Return what a connection ended with; empty: it is open, and answers if it is asked."""
    try:
        if asks:
            await socket.send_str(encode(LocateState(request_id=7, version=StateVersion())))
        while True:
            message = await socket.receive(timeout=20.0 if asks else 5.0)
            if message.type is not aiohttp.WSMsgType.TEXT:
                return f"closed with {socket.close_code}"
            if '"Dropped"' in message.data or '"Refused"' in message.data:
                return message.data[:300]
            if '"StateLocated"' in message.data:
                return ""
    except asyncio.TimeoutError:
        return "no answer within 20 s" if asks else ""
    except (aiohttp.ClientError, ConnectionError) as error:
        return repr(error)


async def attack(lighthouse: str, service: str, pids: list[int], stopped_s: float) -> list[str]:
    """Return how connections ended that should not have."""
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        members, ranks = [], []
        for number in range(NUM_MEMBERS):
            url, token = f"{lighthouse}/v1/groups?job=stopped", {"Authorization": f"Bearer {TOKEN}"}
            members.append(await session.ws_connect(url, headers=token))
            await members[-1].send_str(encode(Hello(protocol=PROTOCOL_VERSION, replica_id=f"g{number}:1")))
            await members[-1].receive(timeout=10.0)
        for rank in range(1, NUM_MEMBERS):
            proof = RankProof(TOKEN, "group:1", secrets.token_hex(16)).authorization
            ranks.append(await session.ws_connect(f"http://{service}/v1/ranks", headers={"Authorization": proof}))
            await ranks[-1].send_str(encode(RankHello(protocol=PROTOCOL_VERSION, group_rank=rank)))
        until = asyncio.Event()
        talking = [asyncio.create_task(talk(socket, until)) for socket in (*members, *ranks)]
        await asyncio.sleep(3.0)
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        await asyncio.sleep(stopped_s)
        for pid in pids:
            os.kill(pid, signal.SIGCONT)
        await asyncio.sleep(3.0)
        until.set()
        await asyncio.gather(*talking, return_exceptions=True)
        ends = await asyncio.gather(*(why_closed(socket, asks=socket in members) for socket in (*members, *ranks)))
        names = [*(f"member {number}" for number in range(len(members))), *(f"rank {n + 1}" for n in range(len(ranks)))]
        return [f"{name}: {end}" for name, end in zip(names, ends, strict=True) if end]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=60.0)
    seconds = parser.parse_args().seconds
    with running("--min-replicas", str(NUM_MEMBERS), "--token", TOKEN) as lighthouse:
        command = [sys.executable, "-c", SERVE, lighthouse.address, str(NUM_MEMBERS), TOKEN]
        trainer = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        try:
            assert trainer.stdout is not None
            service = trainer.stdout.readline().strip()
            ended = asyncio.run(attack(lighthouse.address, service, [lighthouse.pid, trainer.pid], seconds))
        finally:
            trainer.kill()
            trainer.communicate()
    for line in ended:
        print(line)
    if ended:
        print(f"VULNERABLE: {len(ended)} connections ended as their service had been stopped for {seconds:g} s")
        return 1
    print(f"held: none of {2 * NUM_MEMBERS - 1} connections ended as their service had been stopped for {seconds:g} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
