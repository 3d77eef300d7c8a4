"""One manifest of a kilobyte that says `num_ranks = 2**62`: every reader listed the missing ranks until the kernel ended it.

A good older checkpoint lies beside it. Readers have 4 GiB of address space.
"""

from __future__ import annotations

import json
import resource
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import xxhash

from torchft_ckpt import Checkpointer

MAX_BYTES = 4 << 30
LOAD = """
import sys, torch
from torchft_ckpt import Checkpointer
checkpointer = Checkpointer(sys.argv[1])
state = {"w": torch.zeros(10)}
print("restored step", checkpointer.load(state).step, state["w"].sum().item())
checkpointer.shutdown()
"""


def save(place: Path, step: int) -> Path:
    """Save a checkpoint; return its directory."""
    checkpointer = Checkpointer(str(place))
    checkpointer.save({"w": torch.full((10,), float(step))}, step=step).result(60)
    checkpointer.shutdown()
    return next(path for path in place.iterdir() if path.name.startswith(f"step-{step:012d}."))


def spoil(checkpoint: Path) -> int:
    """Have its manifest count 2**62 ranks, with the right digest; return its length."""
    part = next(checkpoint.glob("part-*.json"))
    body = json.loads(part.read_bytes().partition(b"\n")[2])
    body["num_ranks"] = 2**62
    data = json.dumps(body).encode()
    digest = xxhash.xxh3_128_hexdigest(data)
    head = {"format": "torchft_ckpt.durable", "version": 2, "bytes": len(data), "digest": digest}
    return part.write_bytes(json.dumps(head).encode() + b"\n" + data)


def run(*command: str) -> tuple[int, str]:
    """Return the exit status and the last line of a reader that has little memory."""
    done = subprocess.run(
        [sys.executable, *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (MAX_BYTES, MAX_BYTES)),
    )
    return done.returncode, (done.stdout.strip().splitlines() or [""])[-1]


def main() -> int:
    """Spoil the newer of two checkpoints, and read them in every way."""
    place = Path(tempfile.mkdtemp(prefix="attack-"))
    try:
        save(place, 1)
        print(f"a manifest of {spoil(save(place, 2))} bytes, beside a good checkpoint of step 1")
        tries = {
            "a restarted trainer": run("-c", LOAD, str(place)),
            "ls": run("-m", "torchft_ckpt", "checkpoints", "ls", str(place)),
            "export": run("-m", "torchft_ckpt", "checkpoints", "export", str(place), "-o", str(place / "out")),
            "verify": run("-m", "torchft_ckpt", "checkpoints", "verify", "--quiet", "--step", "2", str(place)),
        }
    finally:
        shutil.rmtree(place)
    for name, (status, told) in tries.items():
        print(f"{name}: exit {status}: {told[:200]}")
    expected = {"a restarted trainer": 0, "ls": 0, "export": 0, "verify": 1}
    wrong = [name for name, (status, _) in tries.items() if status != expected[name]]
    if wrong or tries["a restarted trainer"][1] != "restored step 1 10.0" or "MemoryError" in tries["verify"][1]:
        print(f"VULNERABLE: {', '.join(wrong) or 'the trainer'} could not read the good checkpoint, or did not say why")
        return 1
    print("held: the manifest is left aside with a reason, and the older checkpoint is read")
    return 0


if __name__ == "__main__":
    sys.exit(main())
