"""A state on a faked device: copied to the host, sent over a link, and copied to another one's device, each with so many GB/s.

No GPU is needed. It shows whether the three overlap, and what the receiver keeps on its host; not how fast a GPU is.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from support.fake_accelerator import FakeAccelerator, fake_accelerator

from bench.transport_memory import PeakMemory
from torchft_ckpt import HTTPTransport
from torchft_ckpt.checkpointing.fetching.block_transfer import BlockTransfer

LIMIT = timedelta(seconds=120)
MIB = 1 << 20
TENSOR_BYTES = 16 * MIB
BAR, FIRST_BYTE_S, HOST_BYTES = 1.3, 0.05, 128 * MIB


def state_of(device: FakeAccelerator, num_bytes: int, seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    made = {}
    for number in range(num_bytes // TENSOR_BYTES):
        made[f"p{number}"] = device.tensor(torch.randint(256, (TENSOR_BYTES,), dtype=torch.uint8, generator=generator))
    return made


def first_of(gave: Callable[..., None]) -> tuple[Callable[..., None], list[float]]:
    came_at: list[float] = []

    def note(self: BlockTransfer, path: str, num_bytes: int) -> None:
        if not came_at:
            came_at.append(time.monotonic())
        gave(self, path, num_bytes)

    return note, came_at


def serve(num_bytes: int, gb_per_s: float) -> None:
    with fake_accelerator(num_bytes, gb_per_s * 1e9) as device:
        state = state_of(device, num_bytes, 0)
        source: HTTPTransport[Any] = HTTPTransport(
            timeout=LIMIT, hostname="127.0.0.1", max_serve_bytes_per_s=gb_per_s * 1e9
        )
        for _ in range(2):
            source.send_checkpoint([], 1, state, LIMIT)
            command = [sys.executable, "-m", "bench.fake_device", "--mib", str(num_bytes // MIB)]
            command += ["--gb-per-s", str(gb_per_s), "--source", source.metadata()]
            subprocess.run(command, check=True, timeout=LIMIT.total_seconds())
            source.disallow_checkpoint()
        source.shutdown()


def receive(num_bytes: int, gb_per_s: float, address: str) -> None:
    with fake_accelerator(2 * num_bytes, gb_per_s * 1e9) as device:
        local, expected = state_of(device, num_bytes, 1), state_of(device, num_bytes, 0)
        receiver: HTTPTransport[Any] = HTTPTransport(timeout=LIMIT, hostname="127.0.0.1")
        note, came_at = first_of(BlockTransfer.gave)
        BlockTransfer.gave = note  # type: ignore[method-assign]
        memory, began = PeakMemory(), time.monotonic()
        receiver.fetch_checkpoint([address], 1, LIMIT, local_state=local, in_place=True)
        took_s, host_bytes = time.monotonic() - began, memory.growth_bytes()
        one_s = num_bytes / (gb_per_s * 1e9)
        equal = all(torch.equal(device.read(local[name]), expected[name]) for name in local)
        print(
            f"{num_bytes // MIB} MiB at {gb_per_s:g} GB/s: {took_s:.2f} s, {took_s / one_s:.2f}x of one of the three "
            f"(bar {BAR}); first byte {(came_at[0] - began) * 1e3:.0f} ms (bar {FIRST_BYTE_S * 1e3:.0f}); the receiver's host "
            f"{host_bytes / MIB:.0f} MiB (bar {HOST_BYTES // MIB}); {'every bit is there' if equal else 'BITS DIFFER'}",
            flush=True,
        )
        receiver.shutdown()
        sys.exit(not equal)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mib", type=int, default=1024, help="size of the state (default: %(default)s)")
    parser.add_argument(
        "--gb-per-s", type=float, default=1.0, help="of the link and of each copy (default: %(default)s)"
    )
    parser.add_argument("--source", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.source is None:
        serve(options.mib * MIB, options.gb_per_s)
    else:
        receive(options.mib * MIB, options.gb_per_s, options.source)


if __name__ == "__main__":
    main()
