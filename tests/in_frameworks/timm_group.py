"""`recorded.py` for a script of timm, also where torchvision's operators do not fit to this torch."""

from __future__ import annotations

import sys

import recorded
import torch


def stand_in_for_operators() -> None:
    """Let torchvision be imported: its wheel on PyPI has operators for torch with CUDA, and none of them is used here."""
    try:
        import torchvision  # noqa: F401
    except RuntimeError:
        for name in [name for name in sys.modules if name.startswith("torchvision")]:
            del sys.modules[name]
        for name in ("nms", "qnms"):
            torch.library.define(f"torchvision::{name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


if __name__ == "__main__":
    stand_in_for_operators()
    recorded.main()
