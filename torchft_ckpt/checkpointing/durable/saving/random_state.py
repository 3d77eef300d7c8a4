"""The state of this process's random number generators: Python's, numpy's, torch's on the CPU and on each CUDA device."""

from __future__ import annotations

import logging
import random
from typing import Any

import numpy as np
import torch

logger = logging.getLogger(__name__)


def get_random_state() -> dict[str, Any]:
    """Return it, as plain values and tensors."""
    state: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state_all()
    return state


def set_random_state(state: dict[str, Any]) -> None:
    """Set what `get_random_state` returned. Devices that this process does not have are left out, with a line in the log.

    Raises:
        TypeError, ValueError, KeyError: it is none.
    """
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    saved = state.get("cuda", [])
    devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    for device, of_device in enumerate(saved[:devices]):
        torch.cuda.set_rng_state(of_device, device)
    if len(saved) != devices:
        logger.info("random states of %d CUDA devices were saved, here are %d", len(saved), devices)
