"""A lighthouse in a process of its own, for the attacks on one."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from typing import IO


@dataclass
class Lighthouse:
    """One that runs."""

    address: str
    pid: int
    log: IO[bytes]

    @property
    def resident_bytes(self) -> int:
        with open(f"/proc/{self.pid}/status") as lines:
            return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmRSS"))


@contextlib.contextmanager
def running(*options: str) -> Iterator[Lighthouse]:
    """Run a lighthouse at a free port."""
    command = [sys.executable, "-m", "torchft_ckpt", "lighthouse", "--bind", "127.0.0.1:0", *options]
    with tempfile.NamedTemporaryFile() as log:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
        assert process.stdout is not None
        try:
            yield Lighthouse(process.stdout.readline().split()[-1], process.pid, log)
        finally:
            process.kill()
            process.communicate()
