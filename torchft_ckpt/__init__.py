"""torchft_ckpt: fault-tolerant live recovery for PyTorch training.

The public names are loaded on first use (PEP 562), so that `python -m torchft_ckpt lighthouse` never imports torch.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import TYPE_CHECKING

from torchft_ckpt.compat import names as _names

if TYPE_CHECKING:
    from torchft_ckpt.checkpointer import Checkpointer, Restored, Tier
    from torchft_ckpt.checkpointing import (
        CheckpointTransport,
        HTTPTransport,
        ProgressBar,
        ShardAdapter,
        TransferProgress,
        fetch,
        register_shard_adapter,
        register_state_class,
        serve,
    )
    from torchft_ckpt.checkpointing.durable.reading.loading import checkpoints_in, load_checkpoint
    from torchft_ckpt.checkpointing.durable.saving.saver import SavedCheckpoint, SaveMode
    from torchft_ckpt.coordination import LighthouseServer
    from torchft_ckpt.data import DistributedSampler
    from torchft_ckpt.ddp import DistributedDataParallel
    from torchft_ckpt.exact import StepLoader
    from torchft_ckpt.fsdp import set_all_reduce_hook
    from torchft_ckpt.integrations.dcp.peer_reader import PeerReader
    from torchft_ckpt.integrations.dcp.planners import ShardLoadPlanner, ShardSavePlanner
    from torchft_ckpt.local_sgd import DiLoCo, LocalSGD
    from torchft_ckpt.manager import Manager, WorldSizeMode
    from torchft_ckpt.optimizer import OptimizerWrapper
    from torchft_ckpt.optimizer import OptimizerWrapper as Optimizer
    from torchft_ckpt.process_group import ProcessGroup, ProcessGroupGloo, ProcessGroupNCCL

__version__ = "0.1.0"

_HOME = {
    "CheckpointTransport": ("torchft_ckpt.checkpointing", "CheckpointTransport"),
    "Checkpointer": ("torchft_ckpt.checkpointer", "Checkpointer"),
    "DiLoCo": ("torchft_ckpt.local_sgd", "DiLoCo"),
    "DistributedDataParallel": ("torchft_ckpt.ddp", "DistributedDataParallel"),
    "DistributedSampler": ("torchft_ckpt.data", "DistributedSampler"),
    "HTTPTransport": ("torchft_ckpt.checkpointing", "HTTPTransport"),
    "LighthouseServer": ("torchft_ckpt.coordination", "LighthouseServer"),
    "LocalSGD": ("torchft_ckpt.local_sgd", "LocalSGD"),
    "Manager": ("torchft_ckpt.manager", "Manager"),
    "Optimizer": ("torchft_ckpt.optimizer", "OptimizerWrapper"),
    "OptimizerWrapper": ("torchft_ckpt.optimizer", "OptimizerWrapper"),
    "PeerReader": ("torchft_ckpt.integrations.dcp.peer_reader", "PeerReader"),
    "ProcessGroup": ("torchft_ckpt.process_group", "ProcessGroup"),
    "ProcessGroupGloo": ("torchft_ckpt.process_group", "ProcessGroupGloo"),
    "ProcessGroupNCCL": ("torchft_ckpt.process_group", "ProcessGroupNCCL"),
    "ProgressBar": ("torchft_ckpt.checkpointing", "ProgressBar"),
    "Restored": ("torchft_ckpt.checkpointer", "Restored"),
    "SaveMode": ("torchft_ckpt.checkpointing.durable.saving.saver", "SaveMode"),
    "SavedCheckpoint": ("torchft_ckpt.checkpointing.durable.saving.saver", "SavedCheckpoint"),
    "ShardAdapter": ("torchft_ckpt.checkpointing", "ShardAdapter"),
    "ShardLoadPlanner": ("torchft_ckpt.integrations.dcp.planners", "ShardLoadPlanner"),
    "ShardSavePlanner": ("torchft_ckpt.integrations.dcp.planners", "ShardSavePlanner"),
    "StepLoader": ("torchft_ckpt.exact", "StepLoader"),
    "Tier": ("torchft_ckpt.checkpointer", "Tier"),
    "TransferProgress": ("torchft_ckpt.checkpointing", "TransferProgress"),
    "WorldSizeMode": ("torchft_ckpt.manager", "WorldSizeMode"),
    "checkpoints_in": ("torchft_ckpt.checkpointing.durable.reading.loading", "checkpoints_in"),
    "fetch": ("torchft_ckpt.checkpointing", "fetch"),
    "load_checkpoint": ("torchft_ckpt.checkpointing.durable.reading.loading", "load_checkpoint"),
    "register_shard_adapter": ("torchft_ckpt.checkpointing", "register_shard_adapter"),
    "register_state_class": ("torchft_ckpt.checkpointing", "register_state_class"),
    "serve": ("torchft_ckpt.checkpointing", "serve"),
    "set_all_reduce_hook": ("torchft_ckpt.fsdp", "set_all_reduce_hook"),
}

__all__ = [
    "CheckpointTransport",
    "Checkpointer",
    "DiLoCo",
    "DistributedDataParallel",
    "DistributedSampler",
    "HTTPTransport",
    "LighthouseServer",
    "LocalSGD",
    "Manager",
    "Optimizer",
    "OptimizerWrapper",
    "PeerReader",
    "ProcessGroup",
    "ProcessGroupGloo",
    "ProcessGroupNCCL",
    "ProgressBar",
    "Restored",
    "SaveMode",
    "SavedCheckpoint",
    "ShardAdapter",
    "ShardLoadPlanner",
    "ShardSavePlanner",
    "StepLoader",
    "Tier",
    "TransferProgress",
    "WorldSizeMode",
    "checkpoints_in",
    "fetch",
    "load_checkpoint",
    "register_shard_adapter",
    "register_state_class",
    "serve",
    "set_all_reduce_hook",
]


_names.install()
_of_torchft = _names.lookup(__name__)


def __getattr__(name: str) -> object:
    if name in _HOME:
        module, attribute = _HOME[name]
        value = getattr(importlib.import_module(module), attribute)
        globals()[name] = value
        return value
    if name in _names.TABLE or (
        not name.startswith("_") and importlib.util.find_spec(f"{__name__}.{name}") is not None
    ):
        return importlib.import_module(f"{__name__}.{name}")
    return _of_torchft(name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME])
