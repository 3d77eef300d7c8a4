"""Stores of torch for the ranks of one group in one process."""

from __future__ import annotations

from torch.distributed import TCPStore


def hosted_store(port: int = 0) -> TCPStore:
    """Return a store that is hosted already, as torchrun does. Keep it: it ends with the last reference."""
    return TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
