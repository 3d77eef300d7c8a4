"""Names the two libraries that are compared and where each keeps the same public names. Nothing else differs in use."""

from __future__ import annotations

import importlib
import importlib.util
from types import SimpleNamespace

OURS = "torchft_ckpt"
REFERENCE = "torchft"
PLAIN = "plain"

_HOMES = {
    OURS: {"LighthouseServer": "torchft_ckpt", "HTTPTransport": "torchft_ckpt"},
    REFERENCE: {"LighthouseServer": "torchft.coordination", "HTTPTransport": "torchft.checkpointing"},
}
_NAMES = ("Manager", "DistributedDataParallel", "Optimizer", "ProcessGroupGloo")


def is_installed(side: str) -> bool:
    """Whether the library can be imported here at all."""
    return importlib.util.find_spec(side) is not None


def load(side: str) -> SimpleNamespace:
    """Import what a training script needs from one of the two libraries."""
    homes = {**dict.fromkeys(_NAMES, side), **_HOMES[side]}
    return SimpleNamespace(**{name: getattr(importlib.import_module(home), name) for name, home in homes.items()})


def load_lighthouse(side: str) -> type:
    """Import the lighthouse's class of one of the two libraries."""
    return getattr(importlib.import_module(_HOMES[side]["LighthouseServer"]), "LighthouseServer")  # noqa: B009
