"""Kernels that give the same bits twice: on an accelerator the inner loop runs under torch's deterministic algorithms."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils import deterministic

logger = logging.getLogger(__name__)
_WORKSPACE, _SIZES = "CUBLAS_WORKSPACE_CONFIG", (":4096:8", ":16:8")


def prepare_cublas() -> None:
    """Have cuBLAS give the same bits in all streams, if CUDA has not begun; else say what to set."""
    if torch.version.cuda is None or os.environ.get(_WORKSPACE) in _SIZES:
        return
    if torch.cuda.is_initialized():
        logger.warning(
            "set %s=%s before CUDA begins: matrix products may have other bits in each run", _WORKSPACE, _SIZES[0]
        )
    else:
        os.environ.setdefault(_WORKSPACE, _SIZES[0])


@contextmanager
def same_bits(device: torch.device) -> Iterator[None]:
    """Switch deterministic algorithms on, and back. An operation that has none is warned of by its name, and runs.

    A user who has switched them on has chosen how. Memory is not filled, which is the larger part of what they cost.
    """
    if device.type == "cpu" or torch.are_deterministic_algorithms_enabled():
        yield
        return
    memory: Any = deterministic
    fills = memory.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    memory.fill_uninitialized_memory = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)
        memory.fill_uninitialized_memory = fills
