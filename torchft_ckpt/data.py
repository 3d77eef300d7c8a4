"""Which samples a rank of a replica group reads, when all groups read different ones."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch.utils import data

from torchft_ckpt.errors import ConfigError


class DistributedSampler(data.distributed.DistributedSampler):
    """PyTorch's sampler over `num_replicas * num_replica_groups` shards; shard `group_rank + num_replicas * replica_rank`.

    The number of replica groups is the largest that the job will have. Samples of a group that is down are not read by
    anybody, and a batch whose step was discarded is not read again: over many epochs that evens out, on a small
    data set it may not.

    Args:
        dataset: to sample from.
        replica_rank: of this replica group, 0 to `num_replica_groups` - 1.
        num_replica_groups: the largest number of groups, the same on all.
        group_rank: inside the group; default: the rank of the default process group, or 0 without one.
        num_replicas: ranks in the group; default: its size, or 1.
        kwargs: of PyTorch's sampler: `shuffle`, `seed`, `drop_last`.

    Raises:
        ConfigError: `replica_rank` is out of range.
    """

    def __init__(
        self,
        dataset: data.Dataset,
        replica_rank: int,
        num_replica_groups: int,
        group_rank: int | None = None,
        num_replicas: int | None = None,
        **kwargs: Any,
    ) -> None:
        if not 0 <= replica_rank < num_replica_groups:
            raise ConfigError(
                f"replica_rank={replica_rank} is not in 0..{num_replica_groups - 1} (num_replica_groups)",
                "replica_rank",
            )
        if group_rank is None:
            group_rank = dist.get_rank() if dist.is_initialized() else 0
        if num_replicas is None:
            num_replicas = dist.get_world_size() if dist.is_initialized() else 1
        self.global_rank = group_rank + num_replicas * replica_rank
        self.global_world_size = num_replicas * num_replica_groups
        super().__init__(dataset, rank=self.global_rank, num_replicas=self.global_world_size, **kwargs)
