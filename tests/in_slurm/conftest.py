"""`scripts/test-slurm` runs this folder; elsewhere it is left out, also where Slurm is installed."""

from __future__ import annotations

import os

if os.environ.get("TORCHFT_CKPT_TESTS_SLURM") != "1":
    collect_ignore_glob = ["test_*.py"]
