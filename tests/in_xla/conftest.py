"""Four virtual CPU devices of torch_xla in SPMD mode. `scripts/test-xla` runs this folder; elsewhere it is skipped."""

from __future__ import annotations

import importlib.util
import os

if importlib.util.find_spec("torch_xla") is not None:
    os.environ.setdefault("PJRT_DEVICE", "CPU")
    os.environ.setdefault("CPU_NUM_DEVICES", "4")
    import torch_xla.runtime

    torch_xla.runtime.use_spmd()
