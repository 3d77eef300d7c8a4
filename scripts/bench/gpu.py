"""Steps of a trainer on a GPU while its state is copied to the host, or received."""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch

from torchft_ckpt import HTTPTransport
from torchft_ckpt.checkpointing.lock import StateDictLock
from torchft_ckpt.checkpointing.progress import TransferProgress
from torchft_ckpt.checkpointing.serving.buffers import BufferPool
from torchft_ckpt.checkpointing.serving.snapshot import Snapshot

GIB = 1 << 30
LIMIT = timedelta(seconds=120)
NUM_TENSORS = 64
KINDS = ("nothing here", "all equal here", "all equal, in place", "all different here")


def state_of(num_bytes: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator("cuda").manual_seed(0)
    numel = num_bytes // NUM_TENSORS // 4
    return {f"p{i}": torch.randn(numel, generator=generator, device="cuda") for i in range(NUM_TENSORS)}


def in_words(times_s: list[float]) -> str:
    return f"median {statistics.median(times_s) * 1e3:.2f} ms, longest {max(times_s) * 1e3:.2f} ms, of {len(times_s)}"


class Steps:
    """Steps of some milliseconds: products of matrices, then a wait for the GPU."""

    def __init__(self) -> None:
        self._matrix = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
        self.one()

    def one(self) -> float:
        began = time.monotonic()
        for _ in range(20):
            self._matrix @ self._matrix
        torch.cuda.synchronize()
        return time.monotonic() - began

    def until(self, is_over: Callable[[], bool]) -> list[float]:
        times_s = [self.one()]
        while not is_over():
            times_s.append(self.one())
        return times_s


def measure_staging(state: dict[str, torch.Tensor], steps: Steps) -> None:
    ends = time.monotonic() + 1
    print(f"a step alone: {in_words(steps.until(lambda: time.monotonic() > ends))}")
    for time_of in ("first", "second"):
        began = time.monotonic()
        snapshot = Snapshot(state, step=1, lock=StateDictLock(), pool=BufferPool(4 << 20), num_expected=1)
        staging: Any = snapshot._staging
        times_s = steps.until(staging.ready)
        print(
            f"the {time_of} time the state goes to the host: {time.monotonic() - began:.2f} s; a step: {in_words(times_s)}"
        )
        snapshot.close()


def measure_receiving(state: dict[str, torch.Tensor], gib: float) -> None:
    source: HTTPTransport[Any] = HTTPTransport(timeout=LIMIT, hostname="127.0.0.1")
    for kind in KINDS:
        source.send_checkpoint([], 1, state, LIMIT)
        command = [
            sys.executable,
            "-m",
            "bench.gpu",
            "--gib",
            str(gib),
            "--receive",
            kind,
            "--source",
            source.metadata(),
        ]
        subprocess.run(command, check=True, timeout=LIMIT.total_seconds())
        source.disallow_checkpoint()
    source.shutdown()


def receive(kind: str, address: str, gib: float) -> None:
    transport: HTTPTransport[Any] = HTTPTransport(timeout=LIMIT, hostname="127.0.0.1")
    local = None if kind == KINDS[0] else state_of(int(gib * GIB))
    if kind == KINDS[3]:
        torch._foreach_add_(list((local or {}).values()), 1)
    torch.cuda.synchronize()
    for time_of in ("first", "second"):
        seen: list[TransferProgress] = []
        began = time.monotonic()
        transport.fetch_checkpoint(
            [address], 1, LIMIT, local_state=local, in_place=kind == KINDS[2], on_progress=seen.append
        )
        took_s = time.monotonic() - began
        print(
            f"{kind}, the {time_of} time: {took_s:.2f} s, {seen[-1].received_bytes / GIB:.2f} GiB received", flush=True
        )
    transport.shutdown()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gib", type=float, default=4.0, help="size of the state (default: %(default)s)")
    parser.add_argument("--receive", choices=KINDS, help=argparse.SUPPRESS)
    parser.add_argument("--source", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.receive is not None:
        receive(options.receive, options.source, options.gib)
        return
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {options.gib} GiB in {NUM_TENSORS} tensors")
    steps = Steps()
    state = state_of(int(options.gib * GIB))
    measure_staging(state, steps)
    measure_receiving(state, options.gib)


if __name__ == "__main__":
    main()
