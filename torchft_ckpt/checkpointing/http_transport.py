"""Placeholder while the parts are written."""

from __future__ import annotations

from torchft_ckpt.checkpointing.transport import CheckpointTransport


class HTTPTransport(CheckpointTransport[object]):
    """Placeholder."""
