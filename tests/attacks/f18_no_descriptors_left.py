"""A source at its limit of open files: it takes a connection with the last descriptor and has none to send from.

Every descriptor of this process is taken but a few, while a receiver in another process connects. Held: it gets the state; it
does not wait for a source that says nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import resource
import subprocess
import sys
import time
from datetime import timedelta
from typing import Any

import torch

from torchft_ckpt import HTTPTransport
from torchft_ckpt.errors import CheckpointError

STEP = 3
STALL_S = 8.0


def receive(metadata: str) -> int:
    """Be the receiver: print the sum of what came, and how long it took."""
    receiver: HTTPTransport[Any] = HTTPTransport(
        hostname="127.0.0.1", bind="127.0.0.1", num_chunks=1, stall_timeout=timedelta(seconds=STALL_S)
    )
    began = time.monotonic()
    try:
        state = receiver.recv_checkpoint(0, metadata, STEP, timedelta(seconds=30))
        print(f"sum {state['w'].sum().item():.0f} after {time.monotonic() - began:.2f} s")
        return 0
    except CheckpointError as error:
        print(f"{type(error).__name__} after {time.monotonic() - began:.2f} s: {str(error)[:200]}")
        return 1
    finally:
        receiver.shutdown()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--receive", default="", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.receive:
        return receive(arguments.receive)
    logging.basicConfig(level=logging.WARNING)
    torch.set_num_threads(1)
    state = {"w": torch.ones(4 << 18)}
    source: HTTPTransport[Any] = HTTPTransport(hostname="127.0.0.1", bind="127.0.0.1")
    source.send_checkpoint([1], STEP, state, timedelta(minutes=5))
    taken: list[int] = []
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    outcomes = []
    for num_free in (3, 2, 1):  # its connections come one after the other
        receiver = subprocess.Popen(
            [sys.executable, __file__, "--receive", source.metadata()], stdout=subprocess.PIPE, text=True
        )
        resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 64, hard))
        with contextlib.suppress(OSError):
            while True:
                taken.append(os.open("/dev/null", os.O_RDONLY))
        for _ in range(num_free):
            os.close(taken.pop())
        try:
            told, _ = receiver.communicate(timeout=60)
        finally:
            receiver.kill()
            for descriptor in taken:
                os.close(descriptor)
            taken.clear()
        print(f"{num_free} descriptors free: {told.strip().splitlines()[-1] if told else 'nothing was said'}")
        outcomes.append(told)
        source.send_checkpoint([1], STEP, state, timedelta(minutes=5))
    source.shutdown()
    is_right = [f"sum {4 << 18}" in told for told in outcomes]
    if all(is_right):
        print("held: with 3, 2 and 1 descriptors left each receiver got the state")
        return 0
    print(f"VULNERABLE: with 3, 2 and 1 descriptors left the receivers got the state: {is_right}")
    return 1


if __name__ == "__main__":
    sys.exit(main())
