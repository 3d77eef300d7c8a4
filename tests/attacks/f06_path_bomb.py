"""A short manifest whose paths are long: one key of 300 kB above 20,000 children makes 6 GB of names for who puts them together.

A real source serves such a state. `inspect`, `pull`, `fetch_sharded` and `PeerReader` meet it, each in a process of its own with
4 GiB of address space. It held if each of them says by name why not, or gets the state, with little memory.

usage: python f06_path_bomb.py [--key CHARS] [--children N]
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import tempfile
from datetime import timedelta
from pathlib import Path

import torch

from torchft_ckpt import HTTPTransport

LIMIT_BYTES = 4 << 30
LIMIT_MIB = 1024
"""A victim that holds more than that has put names together."""

IN_A_TRAINER = """
import sys
from datetime import timedelta
import torch
from torchft_ckpt import HTTPTransport, PeerReader
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torchft_ckpt.errors import TorchftCkptError
try:
    if sys.argv[2] == "fetch_sharded":
        transport = HTTPTransport(hostname="127.0.0.1", bind="127.0.0.1")
        try:
            transport.fetch_sharded([[sys.argv[1]]], 0, 1, 3, timedelta(seconds=60), local_state={"w": torch.zeros(1024)})
        finally:
            transport.shutdown()
    else:
        reader = PeerReader([sys.argv[1]], step=3, root="", timeout=timedelta(seconds=60))
        dcp.load({"w": torch.zeros(1024)}, storage_reader=reader, no_dist=True)
    print("the state")
except (TorchftCkptError, CheckpointException) as error:
    print("refused:", str(error).strip().splitlines()[-1][:300])
"""
REPORT_PEAK = """
import resource, sys
print("peak MiB:", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024)
"""
COMMAND_LINE = """
import sys
from torchft_ckpt.__main__ import main
status = main(sys.argv[1:])
"""


def run_victim(code: str, *arguments: str) -> tuple[bool, str]:
    """Run it; return whether it held, and its last words."""
    done = subprocess.run(
        [sys.executable, "-c", code + REPORT_PEAK, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (LIMIT_BYTES, LIMIT_BYTES)),
    )
    lines = done.stdout.strip().splitlines()
    peak = [int(line.rpartition(" ")[2]) for line in lines if line.startswith("peak MiB:")]
    words = " | ".join(line[:160] for line in lines[-3:])
    is_named = any(line.startswith(("refused: ", "torchft_ckpt: ", "the state")) for line in lines)
    has_failed = done.returncode != 0 or "MemoryError" in done.stdout
    return is_named and not has_failed and bool(peak) and peak[0] < LIMIT_MIB, words


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--key", type=int, default=300_000, help="characters of the key")
    parser.add_argument("--children", type=int, default=20_000, help="leaves below it")
    options = parser.parse_args()
    source = HTTPTransport[object](hostname="127.0.0.1", bind="127.0.0.1", token="")
    state = {"w": torch.zeros(1024), "k" * options.key: [0] * options.children}
    source.send_checkpoint([], 3, state, timedelta(minutes=30))
    url = source.metadata()
    fallen = []
    with tempfile.TemporaryDirectory() as directory:
        file = str(Path(directory) / "state.safetensors")
        victims = {
            "inspect": (COMMAND_LINE, "inspect", url),
            "pull": (COMMAND_LINE, "pull", url, "-o", file, "--force", "--quiet"),
            "fetch_sharded": (IN_A_TRAINER, url, "fetch_sharded"),
            "PeerReader": (IN_A_TRAINER, url, "PeerReader"),
        }
        for name, (code, *arguments) in victims.items():
            has_held, words = run_victim(code, *arguments)
            print(f"{name}: {'held' if has_held else 'FELL'}: {words}", flush=True)
            fallen += [] if has_held else [name]
    source.shutdown()
    if fallen:
        print(
            f"VULNERABLE: a key of {options.key} characters above {options.children} leaves fells {', '.join(fallen)}"
        )
        return 1
    print(f"held: a key of {options.key} characters above {options.children} leaves costs none of them much memory")
    return 0


if __name__ == "__main__":
    sys.exit(main())
