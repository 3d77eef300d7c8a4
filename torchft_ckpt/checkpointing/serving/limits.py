"""Limits of what clients may take of a checkpoint server, beyond those of any server."""

from __future__ import annotations

from dataclasses import dataclass

from torchft_ckpt.checkpointing.protocol import MAX_BODY_BYTES
from torchft_ckpt.front.limits import FrontLimits


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerLimits(FrontLimits):
    """Limits of what clients may take of a checkpoint server.

    The rate is generous because an honest receiver is fast: it asks for at most 16 MiB at a time, so a machine that pulls at
    200 Gbit/s over all its ranks makes 1,500 requests a second, and many joiners may sit behind one address. What is left
    for a hostile one is a bounded part of one thread. One receiver uses at most 64 connections.

    Args:
        max_serve_bytes_per_s: bytes of states that all clients together are sent; None: no bound.
    """

    max_body_bytes: int = MAX_BODY_BYTES
    max_serve_bytes_per_s: float | None = None
