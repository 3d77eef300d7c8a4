"""Where trainers have their models and batches: the CPU, or a GPU that the environment names.

    TORCHFT_CKPT_TEST_DEVICE=cuda TORCHFT_CKPT_TEST_BACKEND=nccl pytest tests/manager/test_real_failures.py

runs groups on one GPU that they share, over NCCL instead of Gloo.
"""

from __future__ import annotations

import os

import torch

DEVICE = torch.device(os.environ.get("TORCHFT_CKPT_TEST_DEVICE", "cpu"))
USES_NCCL = os.environ.get("TORCHFT_CKPT_TEST_BACKEND") == "nccl"
INNER_BACKEND = "nccl" if USES_NCCL else "gloo"
"""Of a group's own ranks."""
