"""The newest whole checkpoint of storages, as one rank alone finds it."""

from __future__ import annotations

from collections.abc import Sequence

from torchft_ckpt.checkpointing.durable.cooperative_read.lookup import Candidates
from torchft_ckpt.checkpointing.durable.cooperative_read.ranks import Ranks
from torchft_ckpt.checkpointing.durable.reading.checkpoint import Checkpoint
from torchft_ckpt.checkpointing.durable.storage.contract import Storage


def newest_whole(storages: Sequence[Storage], *, step: int | None = None) -> Checkpoint:
    """Return it; raises as `Candidates.newest`."""
    return Candidates(storages, Ranks(), step=step).newest().checkpoint
