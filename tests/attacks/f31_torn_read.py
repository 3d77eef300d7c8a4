"""A source is killed while its state is read into the user's tensors: does the user see that they are torn?

A process of its own serves a state and is killed by SIGKILL when about half of it has come, in each way to read into tensors that
are in use: `dcp.load` by a `PeerReader`, `fetch_checkpoint` and `fetch_sharded` in place, `recv_checkpoint` of a transport that
fills its own state, and a `Checkpointer.load` whose file is damaged behind its first half. It held if, in every run, either
nothing was overwritten, or `state_overwritten` is true and what the user sees says "torn"; and if at least half of the runs were
torn, else nothing was tried.

usage: python f31_torn_read.py [--mib N] [--times N]
"""

from __future__ import annotations

import argparse
import logging
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from torchft_ckpt import Checkpointer, HTTPTransport, PeerReader
from torchft_ckpt.checkpointing.progress import TransferProgress
from torchft_ckpt.errors import CheckpointError

STEP = 3
LONG = timedelta(seconds=60)
NUM_TENSORS = 16
SOURCE = """
import sys, threading
from datetime import timedelta
import torch
from torchft_ckpt import HTTPTransport
size = int(sys.argv[1])
source = HTTPTransport(hostname="127.0.0.1", bind="127.0.0.1", token="", max_serve_bytes_per_s=16 * size)
source.send_checkpoint([], 3, {f"w{n}": torch.ones(size // 4) for n in range(16)}, timedelta(minutes=10))
print(source.metadata(), flush=True)
threading.Event().wait()
"""


class Source:
    """A process that serves the state."""

    def __init__(self, size: int) -> None:
        self._process = subprocess.Popen([sys.executable, "-c", SOURCE, str(size)], stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        self.url = self._process.stdout.readline().strip()

    def kill(self) -> None:
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()

    def kill_midway(self, state: dict[str, torch.Tensor]) -> None:
        """Kill it once about half of the tensors have come."""

        def watch() -> None:
            until = time.monotonic() + 30
            while sum(bool(tensor[-1]) for tensor in state.values()) < NUM_TENSORS // 2 and time.monotonic() < until:
                time.sleep(0.002)
            self.kill()

        threading.Thread(target=watch, daemon=True).start()


def empty(size: int) -> dict[str, torch.Tensor]:
    return {f"w{number}": torch.zeros(size // 4) for number in range(NUM_TENSORS)}


def causes(error: BaseException) -> Iterator[BaseException]:
    """The error, and those that DCP wraps."""
    yield error
    if isinstance(error, CheckpointException):
        for inner, _ in error.failures.values():
            yield inner


def by_peer_reader(url: str, state: dict[str, torch.Tensor]) -> None:
    reader = PeerReader([url], step=STEP, root="", timeout=LONG, stall_timeout=timedelta(seconds=5))
    dcp.load(state, storage_reader=reader, no_dist=True)


def with_transport(
    receive: Callable[[HTTPTransport[dict[str, torch.Tensor]], str, dict[str, torch.Tensor]], object],
) -> Callable[[str, dict[str, torch.Tensor]], None]:
    def run(url: str, state: dict[str, torch.Tensor]) -> None:
        transport = HTTPTransport[dict[str, torch.Tensor]](
            hostname="127.0.0.1", bind="127.0.0.1", token="", state_dict=lambda: state
        )
        transport._receives_in_place = True  # as `PGTransport` does
        try:
            receive(transport, url, state)
        finally:
            transport.shutdown()

    return run


def nothing(progress: TransferProgress) -> None:
    pass


WAYS: dict[str, Callable[[str, dict[str, torch.Tensor]], None]] = {
    "dcp.load by PeerReader": by_peer_reader,
    "fetch_checkpoint in place": with_transport(
        lambda transport, url, state: transport.fetch_checkpoint([url], STEP, LONG, local_state=state, in_place=True)
    ),
    "fetch_sharded in place": with_transport(
        lambda transport, url, state: transport.fetch_sharded(
            [[url]], 0, 1, STEP, LONG, local_state=state, in_place=True
        )
    ),
    "recv_checkpoint in place": with_transport(
        lambda transport, url, state: transport.recv_checkpoint(0, url, STEP, LONG)
    ),
}


def load_damaged(size: int) -> str:
    """Load a checkpoint that is damaged in its second half; return what came of it."""
    with tempfile.TemporaryDirectory() as directory:
        writer = Checkpointer(directory)
        writer.save({f"w{number}": torch.ones(size // 4) for number in range(NUM_TENSORS)}, step=STEP).result()
        (file,) = (path for path in Path(directory).rglob("*") if path.is_file() and path.stat().st_size > size)
        with file.open("r+b") as damaged:
            damaged.seek(file.stat().st_size * 3 // 4)
            damaged.write(bytes(range(256)) * 64)
        state = empty(size)
        outcome = judge(lambda: writer.load(state), state)
        writer.shutdown()
    return outcome


def judge(read: Callable[[], object], state: dict[str, torch.Tensor]) -> str:
    """Return `torn`, `untouched` or `whole`, or what is wrong."""
    try:
        read()
    except (CheckpointError, CheckpointException) as error:
        num_touched = sum(bool(tensor.any()) for tensor in state.values())
        is_owned = any(isinstance(one, CheckpointError) and one.state_overwritten for one in causes(error))
        if num_touched and not (is_owned and "torn" in str(error)):
            return f"WRONG: {num_touched} of {NUM_TENSORS} tensors overwritten, state_overwritten={is_owned}: {error}"
        return f"torn ({num_touched} of {NUM_TENSORS} tensors, and it says so)" if num_touched else "untouched"
    is_whole = all(bool((tensor == 1).all()) for tensor in state.values())
    return "whole" if is_whole else "WRONG: returned a state that is none"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=2, help="of each of 16 tensors")
    parser.add_argument("--times", type=int, default=1, help="how often, in each way")
    options = parser.parse_args()
    logging.getLogger("torchft_ckpt").setLevel(logging.CRITICAL)
    logging.getLogger("torch").setLevel(logging.CRITICAL)
    size = options.mib << 20
    outcomes = []
    for _ in range(options.times):
        for name, read in WAYS.items():
            source, state = Source(size), empty(size)
            try:
                source.kill_midway(state)
                outcome = judge(lambda read=read, source=source, state=state: read(source.url, state), state)  # type: ignore[misc]
            finally:
                source.kill()
            outcomes.append(outcome)
            print(f"{name}: {outcome[:300]}", flush=True)
        outcomes.append(load_damaged(size))
        print(f"Checkpointer.load of a damaged file: {outcomes[-1][:300]}", flush=True)
    num_wrong = sum(outcome.startswith("WRONG") for outcome in outcomes)
    num_torn = sum(outcome.startswith("torn") for outcome in outcomes)
    if num_wrong:
        print(f"VULNERABLE: {num_wrong} of {len(outcomes)} reads that died half-way did not say so")
        return 1
    if 2 * num_torn < len(outcomes):
        print(f"VULNERABLE: only {num_torn} of {len(outcomes)} reads were begun when they died: nothing was shown")
        return 1
    print(f"held: of {len(outcomes)} reads {num_torn} died half-way, and all of these say that the state is torn")
    return 0


if __name__ == "__main__":
    sys.exit(main())
