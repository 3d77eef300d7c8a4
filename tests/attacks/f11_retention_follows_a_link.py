"""A checkpoint's directory that is a symbolic link: `keep_last` emptied the directory behind it.

Beside the link lies a checkpoint into which somebody put a file of his own; that file went, too.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from pathlib import Path

import torch

from torchft_ckpt import Checkpointer

PRECIOUS = ["data", "data/raw.bin", "thesis.tex"]


def main() -> int:
    """Save four times, keeping one; say what is left of what nobody saved."""
    root = Path(tempfile.mkdtemp(prefix="attack-"))
    try:
        precious, place = root / "precious", root / "checkpoints"
        (precious / "data").mkdir(parents=True)
        (precious / "thesis.tex").write_text("years of work")
        (precious / "data/raw.bin").write_bytes(b"x" * 1000)
        place.mkdir()
        (place / "step-000000000001.q1-archived").symlink_to(precious)
        notes = place / "step-000000000002.q1-notes/notes.txt"
        notes.parent.mkdir()
        notes.write_text("what I saw in step 2")
        checkpointer = Checkpointer(str(place), keep_last=1)
        for step in (10, 20, 30, 40):
            checkpointer.save({"w": torch.ones(1000)}, step=step).result(60)
            checkpointer.wait()
        checkpointer.shutdown()
        left = sorted(str(path.relative_to(precious)) for path in precious.rglob("*")) if precious.exists() else []
        kept = sorted(os.listdir(place))
        print(f"the linked directory: {left}\nthe place of the checkpoints: {kept}")
        removed = not any("000020" in name for name in kept)
        if left == PRECIOUS and notes.exists() and removed:
            print("held: the link, what it leads to and the foreign file are untouched, and old checkpoints went")
            return 0
        lost = [*(set(PRECIOUS) - set(left)), *([] if notes.exists() else ["notes.txt"])]
        print(f"VULNERABLE: lost are {sorted(lost)}; old checkpoints {'went' if removed else 'stay'}")
        return 1
    finally:
        shutil.rmtree(root)


if __name__ == "__main__":
    sys.exit(main())
