"""A source that is a process of its own, to be stopped and killed: `source_process.py [BLOCK_BYTES]`. It says its address."""

from __future__ import annotations

import os
import signal
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

from support.nursery import Forked
from support.processes import note
from torchft_ckpt.checkpointing import HTTPTransport
from torchft_ckpt.testing.transport_conformance import example_state


def start_source(log: Path, *block_bytes: int) -> tuple[Forked, str]:
    """Return the process, which serves `example_state(3)` of step 3, and its address."""
    script = Path(__file__)
    path = os.pathsep.join([str(script.parents[1]), os.environ.get("PYTHONPATH", "")])
    arguments = [str(number) for number in block_bytes]
    with log.open("wb") as errors:
        process = Forked(script, arguments, {**os.environ, "PYTHONPATH": path}, errors.fileno())
    note("the source", process, log)
    return process, process.stdout.readline().strip()


def main() -> None:
    options = {"block_bytes": int(sys.argv[1])} if sys.argv[1:] else {}
    transport: HTTPTransport[Any] = HTTPTransport(hostname="127.0.0.1", bind="127.0.0.1", **options)
    transport.send_checkpoint([1], 3, example_state(3), timedelta(seconds=60))
    print(transport.metadata(), flush=True)
    signal.pause()


if __name__ == "__main__":
    main()
