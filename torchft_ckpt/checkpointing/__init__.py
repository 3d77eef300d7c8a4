"""Moving and holding state: the transport contract, its HTTP implementation, the lock over the live state."""

from __future__ import annotations

from torchft_ckpt.checkpointing.http_transport import HTTPTransport, PGTransport
from torchft_ckpt.checkpointing.lock import StateDictLock
from torchft_ckpt.checkpointing.progress import ProgressBar, TransferProgress
from torchft_ckpt.checkpointing.serve_and_fetch import fetch, serve
from torchft_ckpt.checkpointing.state.classes import register_state_class
from torchft_ckpt.checkpointing.state.shards import ShardAdapter, register_shard_adapter
from torchft_ckpt.checkpointing.transport import CheckpointTransport

__all__ = [
    "CheckpointTransport",
    "HTTPTransport",
    "PGTransport",
    "ProgressBar",
    "ShardAdapter",
    "StateDictLock",
    "TransferProgress",
    "fetch",
    "register_shard_adapter",
    "register_state_class",
    "serve",
]
