"""A member asks for large answers and does not read them: the lighthouse held all of them, 1,024 messages of up to 16 MB each."""

from __future__ import annotations

import argparse
import asyncio
import sys

import aiohttp
from a_lighthouse import Lighthouse, running

from torchft_ckpt.core.coordination.messages import (
    PROTOCOL_VERSION,
    Heartbeat,
    Hello,
    LocateState,
    Outcome,
    StateVersion,
    encode,
)

MOST_GROWTH_BYTES = 100 << 20
"""What four members may have said, what waits for one, and as much again for what Python keeps."""


def hello(name: str, num_bytes: int) -> str:
    version = StateVersion(step=3, quorum_id=1, epoch="z")
    return encode(
        Hello(
            protocol=PROTOCOL_VERSION,
            replica_id=name,
            version=version if num_bytes else StateVersion(),
            last_quorum_id=1 if num_bytes else 0,
            last_epoch="z" if num_bytes else "",
            last_quorum_size=4 if num_bytes else 0,
            last_outcome=Outcome.COMMIT if num_bytes else None,
            newest_step=3 if num_bytes else 0,
            checkpoint_addresses=["a" * 4000] * (num_bytes // 4000),
        )
    )


async def attack(lighthouse: Lighthouse, num_questions: int, num_bytes: int) -> int:
    """Return by how much the lighthouse grew."""
    before = lighthouse.resident_bytes
    url = f"{lighthouse.address}/v1/groups"
    async with aiohttp.ClientSession() as session:
        holders = []
        for number in range(4):
            socket = await session.ws_connect(url, max_msg_size=1 << 26)
            await socket.send_str(hello(f"h{number}:1", num_bytes))
            holders.append(socket)
        asker = await session.ws_connect(url, max_msg_size=1 << 26)
        await asker.send_str(hello("asker:1", 0))
        await asyncio.sleep(0.5)
        connection = asker._response.connection
        assert connection is not None and connection.transport is not None
        connection.transport.pause_reading()  # type: ignore[attr-defined]
        try:
            for number in range(num_questions):
                await asker.send_str(encode(LocateState(request_id=number, version=StateVersion())))
                for socket in holders:
                    if not socket.closed:
                        await socket.send_str(encode(Heartbeat()))
                await asyncio.sleep(0.01)
        except (ConnectionError, aiohttp.ClientError):
            print("the lighthouse closed the connection")
        await asyncio.sleep(1.0)
        return lighthouse.resident_bytes - before


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("questions", nargs="?", type=int, default=60, help="how often the member asks")
    num_questions = parser.parse_args().questions
    grown = []
    # 250 kB each is as much as four members may say, 4 MB each was.
    for num_bytes in (250_000, 4_000_000):
        with running("--min-replicas", "2") as lighthouse:
            grown.append(asyncio.run(attack(lighthouse, num_questions, num_bytes)))
        print(
            f"{grown[-1] >> 20} MiB more after {num_questions} questions, with {num_bytes} bytes of addresses a member"
        )
    if max(grown) > MOST_GROWTH_BYTES:
        print(f"VULNERABLE: the lighthouse grew by {max(grown) >> 20} MiB")
        return 1
    print(f"held: the lighthouse grew by {max(grown) >> 20} MiB at most")
    return 0


if __name__ == "__main__":
    sys.exit(main())
