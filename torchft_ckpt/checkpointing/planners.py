"""Where the planners for torch.distributed.checkpoint were: they are in `torchft_ckpt.integrations.dcp.planners`."""

from __future__ import annotations

from torchft_ckpt.compat.deprecated import moved_names

_HOME = "torchft_ckpt.integrations.dcp.planners"

__getattr__ = moved_names(__name__, ShardLoadPlanner=_HOME, ShardSavePlanner=_HOME)
