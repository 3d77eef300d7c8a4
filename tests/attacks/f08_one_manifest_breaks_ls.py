"""One manifest whose `written_at_s` is no time ended `checkpoints ls` of the whole directory with a traceback."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import xxhash

from torchft_ckpt import Checkpointer


def listing(place: Path) -> subprocess.CompletedProcess[str]:
    """Run `checkpoints ls`."""
    command = [sys.executable, "-m", "torchft_ckpt", "checkpoints", "ls", str(place)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def main() -> int:
    """Spoil the clock of the oldest of three checkpoints, and list them."""
    place = Path(tempfile.mkdtemp(prefix="attack-"))
    failed: list[str] = []
    try:
        checkpointer = Checkpointer(str(place))
        for step in (1, 2, 3):
            checkpointer.save({"w": torch.ones(10)}, step=step).result(60)
        checkpointer.shutdown()
        part = next(sorted(place.iterdir())[0].glob("part-*.json"))
        body = json.loads(part.read_bytes().partition(b"\n")[2])
        for written_at_s in (1e300, -1e300):
            data = json.dumps({**body, "written_at_s": written_at_s}).encode()
            digest = xxhash.xxh3_128_hexdigest(data)
            head = {"format": "torchft_ckpt.durable", "version": 2, "bytes": len(data), "digest": digest}
            part.write_bytes(json.dumps(head).encode() + b"\n" + data)
            done = listing(place)
            lines = (done.stdout + done.stderr).strip().splitlines()
            print(f"written_at_s = {written_at_s}: exit {done.returncode}: {lines[-1]}")
            if done.returncode or sum("step-" in line for line in lines) != 3:
                failed.append(lines[-1])
    finally:
        shutil.rmtree(place)
    print(f"VULNERABLE: {failed[0]}" if failed else "held: all three checkpoints are listed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
