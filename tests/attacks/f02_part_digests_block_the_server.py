"""Asks a source for digests of parts, as much as one request may hold, to use up its CPU and its serving threads.

First eight requests for the digests of 128 parts each, every one the whole of a tensor (3.8 kB a request), whose sender hangs up
after half a second. Then another address asks on 48 connections, without a pause, for as much as one request may have. An honest
receiver recovers meanwhile. Held: the source is idle soon after the sender has gone, and the recovery takes its share of time.
"""

from __future__ import annotations

import argparse
import http.client
import json
import subprocess
import sys
import threading
import time
from datetime import timedelta
from typing import Any

import torch

from torchft_ckpt import HTTPTransport
from torchft_ckpt.errors import CheckpointError

STEP = 3
NUM_PARTS = 128
NUM_CONNECTIONS = 48
MAX_CPU_S = 1.0
"""Of the source, after the one who asked has gone."""
ALLOWED_BYTES = 64 * 1024 * 1024


def ask(connection: http.client.HTTPConnection, num_parts: int, num_elements: int) -> int:
    """Ask for the digest of the first elements of the tensor, so many times; return how long the body was."""
    body = json.dumps({"parts": [[0, 0, seed, [0], [num_elements]] for seed in range(num_parts)]}).encode()
    connection.request("POST", f"/v1/checkpoint/{STEP}/parts/digests", body=body)
    return len(body)


def crowd(port: int, seconds: float, num_elements: int) -> None:
    """Ask on many connections from another address until the time is over."""
    until = time.monotonic() + seconds
    num_parts = max(min(ALLOWED_BYTES // (4 * num_elements), NUM_PARTS), 1)

    def asks() -> None:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60, source_address=("127.0.0.2", 0))
        while time.monotonic() < until:
            try:
                ask(connection, num_parts, num_elements)
                connection.getresponse().read()
            except (OSError, http.client.HTTPException):
                connection.close()
                time.sleep(0.05)

    threads = [threading.Thread(target=asks, daemon=True) for _ in range(NUM_CONNECTIONS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(until - time.monotonic(), 0.0))


def recover(source: HTTPTransport[Any], label: str) -> float | None:
    """Receive the state; return the seconds, None where it failed."""
    receiver: HTTPTransport[Any] = HTTPTransport(hostname="127.0.0.1", bind="127.0.0.1")
    began = time.monotonic()
    try:
        receiver.recv_checkpoint(0, source.metadata(), STEP, timedelta(seconds=120))
        print(f"{label}: an honest recovery took {time.monotonic() - began:.2f} s")
        return time.monotonic() - began
    except CheckpointError as error:
        print(f"{label}: an honest recovery FAILED after {time.monotonic() - began:.2f} s: {error}")
        return None
    finally:
        receiver.shutdown()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mib", type=int, default=64, help="of the tensor")
    parser.add_argument("--crowd", type=int, default=0, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    num_elements = arguments.mib << 18
    if arguments.crowd:
        crowd(arguments.crowd, 600, min(num_elements, ALLOWED_BYTES // 4))
        return 0
    torch.set_num_threads(1)
    state = {"w": torch.zeros(num_elements), "small": torch.zeros(1 << 18)}
    source: HTTPTransport[Any] = HTTPTransport(hostname="127.0.0.1", bind="127.0.0.1")
    port = int(source.metadata().rsplit(":", 1)[1])

    def serve() -> None:
        source.send_checkpoint([1], STEP, state, timedelta(minutes=10))

    serve()
    before_s = recover(source, "before")
    serve()
    connections = [http.client.HTTPConnection("127.0.0.1", port) for _ in range(8)]
    num_bytes = sum(ask(connection, NUM_PARTS, num_elements) for connection in connections)
    time.sleep(0.5)
    for connection in connections:
        connection.close()
    print(f"8 requests, {num_bytes} bytes in all, were sent, and their connections closed after 0.5 s")
    began_s, cpu_s, num_idle = time.monotonic(), 0.0, 0
    while num_idle < 3 and time.monotonic() - began_s < 120:  # others may use this machine, too
        at_s = time.process_time()
        time.sleep(0.5)
        cpu_s += time.process_time() - at_s
        num_idle = num_idle + 1 if time.process_time() - at_s < 0.02 else 0
    print(f"after that the source used {cpu_s:.1f} s of CPU")
    asking = subprocess.Popen([sys.executable, __file__, "--mib", str(arguments.mib), "--crowd", str(port)])
    try:
        time.sleep(3)
        during_s = recover(source, f"beside {NUM_CONNECTIONS} connections that ask for digests")
    finally:
        asking.kill()
        asking.wait()
    source.shutdown()
    if before_s is None or during_s is None or cpu_s > MAX_CPU_S or during_s > 4 * before_s + 3:
        print(
            f"VULNERABLE: {cpu_s:.1f} s of CPU for nobody; a recovery of {before_s} s took {during_s} s beside the attack"
        )
        return 1
    print(
        f"held: {cpu_s:.1f} s of CPU for nobody; a recovery of {before_s:.2f} s took {during_s:.2f} s beside the attack"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
