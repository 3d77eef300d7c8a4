"""Says which samples a rank of a replica group reads, when all groups read different ones."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch.utils import data

from torchft_ckpt import config
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
        group_rank: inside the group, below `num_replicas`; default: the rank of the default process group, or without one `RANK`,
            as the Manager takes it. With `num_replicas` given, of as many ranks only.
        num_replicas: ranks in the group that read different samples; default: the size of the default process group, or without
            one `WORLD_SIZE`, or 1.
        kwargs: of PyTorch's sampler: `shuffle`, `seed`, `drop_last`.

    Raises:
        ConfigError: `replica_rank` or `group_rank` is out of range, or the group has several ranks and nothing says which one
            this is.
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
                f"replica_rank={replica_rank} (REPLICA_GROUP_ID) is not in 0..{num_replica_groups - 1} (NUM_REPLICA_GROUPS)",
                "replica_rank",
            )
        group_rank, num_replicas = _place_in_group(group_rank, num_replicas)
        self.global_rank = group_rank + num_replicas * replica_rank
        self.global_world_size = num_replicas * num_replica_groups
        super().__init__(dataset, rank=self.global_rank, num_replicas=self.global_world_size, **kwargs)


def _place_in_group(group_rank: int | None, num_replicas: int | None) -> tuple[int, int]:
    """Return which rank this is, and of how many: what was given counts, then the process group, then the environment."""
    if dist.is_initialized():
        found_rank, found_size = dist.get_rank(), dist.get_world_size()
    else:
        found_size = config.resolve(None, config.WORLD_SIZE, 1, config.parse_count)
        found_rank = config.resolve(None, config.RANK, 0 if found_size == 1 else -1, config.parse_count)
    size = found_size if num_replicas is None else num_replicas
    rank = group_rank
    if rank is None and num_replicas == 1:
        rank = 0
    elif rank is None and size == found_size:
        rank = found_rank
    if rank is None or not 0 <= rank < size:
        told = "nothing says which one this is" if rank in (None, -1) else f"this one is group_rank={rank}"
        raise ConfigError(
            f"the sampler's group has num_replicas={size} ranks that read different samples, and {told}: pass group_rank and"
            " num_replicas, or set RANK and WORLD_SIZE as torchrun does",
            party="group_rank",
        )
    return rank, size
