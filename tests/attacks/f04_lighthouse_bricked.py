"""One member says what is allowed, and what the lighthouse makes of it is more than any other member takes.

A job that trains stood for ever when somebody had said the largest quorum id that was allowed, once, and gone; two members with
4 MB of addresses made answers of 8 MB. One that claims a later step than the job's stopped it until an operator freed it. If he
asked for a quorum with it, too, the trainer ended, as he named no store to meet at.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import subprocess
import sys
import threading
import time

import aiohttp
import msgspec
from a_lighthouse import running

from torchft_ckpt.core.coordination.lighthouse import LighthouseState
from torchft_ckpt.core.coordination.lighthouse_events import LighthouseSettings, Received, Send
from torchft_ckpt.core.coordination.messages import (
    MAX_MESSAGE_BYTES,
    PROTOCOL_VERSION,
    Hello,
    LocateState,
    Outcome,
    QuorumRequest,
    StateVersion,
    decode_to_lighthouse,
    encode,
)
from torchft_ckpt.errors import ProtocolError

TRAINER = r"""
import sys, time, torch
from torch import nn
from torchft_ckpt import Manager, Optimizer, ProcessGroupGloo
torch.set_num_threads(1)
module = nn.Linear(8, 8)
manager = Manager(
    ProcessGroupGloo(), module.load_state_dict, module.state_dict, min_replica_size=1, lighthouse_addr=sys.argv[1],
    hostname="127.0.0.1", replica_id="g0",
)
optimizer = Optimizer(manager, torch.optim.SGD(module.parameters(), lr=0.1))
while True:
    optimizer.zero_grad()
    module(torch.randn(2, 8)).sum().backward()
    optimizer.step()
    print(manager.current_step(), flush=True)
    time.sleep(0.05)
"""


def hello(**fields: object) -> str:
    """Return the Hello, written out: what is said need not be what this version would say."""
    said = Hello(
        protocol=PROTOCOL_VERSION, replica_id="x:1", last_epoch="old", last_quorum_size=1, last_outcome=Outcome.COMMIT
    )
    return encode(msgspec.structs.replace(said, **fields))


LATER = StateVersion(step=10**9 - 1000, quorum_id=1, epoch="old")
CLAIMS = {
    "quorum 2**62 - 1": [hello(last_quorum_id=2**62 - 1)],
    "quorum 2**53 - 1": [hello(last_quorum_id=2**53 - 1)],
    "a state of quorum 2**53 - 1": [hello(version=StateVersion(step=1, quorum_id=2**53 - 1, epoch="old"))],
    "newest step 2**53 - 1": [hello(newest_step=2**53 - 1)],
    "a state of step 2**52": [hello(version=StateVersion(step=2**52, quorum_id=1, epoch="old"))],
    "a later state, and asked for a quorum": [
        hello(version=LATER),
        encode(QuorumRequest(request_id=1, version=LATER, can_serve=True)),
    ],
}


async def say_once(address: str, texts: list[str]) -> None:
    async with aiohttp.ClientSession() as session:
        socket = await session.ws_connect(f"{address}/v1/groups")
        for text in texts:
            await socket.send_str(text)
        await asyncio.sleep(0.5)


def largest_answer() -> int:
    """Return the bytes of the largest answer that two members with 4 MB of addresses lead to, in the core."""
    state = LighthouseState(LighthouseSettings(min_replicas=1), epoch="e1")
    addresses = ["http://" + "a" * 4000 + ":1"] * 1020
    version = StateVersion(step=3, quorum_id=1, epoch="e0")
    largest = 0
    for name in ("x:1", "y:1", "good:1"):
        said = Hello(
            protocol=PROTOCOL_VERSION,
            replica_id=name,
            version=version if name != "good:1" else StateVersion(),
            checkpoint_addresses=addresses if name != "good:1" else [],
        )
        for text in (encode(said), encode(LocateState(request_id=1, version=said.version))):
            try:
                message = decode_to_lighthouse(text, name)
            except ProtocolError:
                break
            for done in state.handle(Received(name, message), 0.1):
                if isinstance(done, Send):
                    largest = max(largest, len(encode(done.message)))
    return largest


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "seconds", nargs="?", type=float, default=4.0, help="how long steps are waited for after each claim"
    )
    seconds = parser.parse_args().seconds
    wrong = []
    num_bytes = largest_answer()
    print(f"the largest answer has {num_bytes} bytes, members take {MAX_MESSAGE_BYTES}")
    if num_bytes > MAX_MESSAGE_BYTES:
        wrong.append(f"an answer of {num_bytes} bytes")
    with running("--min-replicas", "1", "--heartbeat-timeout-ms", "2000") as lighthouse:
        trainer = subprocess.Popen(
            [sys.executable, "-c", TRAINER, lighthouse.address],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
        steps: list[str] = []
        threading.Thread(target=lambda: steps.extend(iter(trainer.stdout.readline, "")), daemon=True).start()  # type: ignore[union-attr]
        until = time.monotonic() + 120
        while len(steps) < 10 and time.monotonic() < until:
            time.sleep(0.1)
        for claim, texts in CLAIMS.items():
            asyncio.run(say_once(lighthouse.address, texts))
            time.sleep(1.5)
            before = len(steps)
            time.sleep(seconds)
            made = len(steps) - before
            print(f"{made} steps in {seconds:g} s after one that named {claim}, and had gone")
            if not made:
                wrong.append(f"no step after one that named {claim}")
                break
        trainer.kill()
        trainer.wait()
    print(f"VULNERABLE: {'; '.join(wrong)}" if wrong else "held: the job trained on after each claim")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
