"""Feeds the loop of a framework from a `StepLoader`: what the framework takes for a batch is a step of the job.

Its loader gives a `StandIn` for each step. The integration reads the step's microbatches, and runs for each what the framework
runs for a batch. A step that does not count is tried again within the same iteration. So iterations are steps, and nobody has to
know a place in the data: that follows from the step.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, SequentialSampler, distributed

from torchft_ckpt.data import DistributedSampler
from torchft_ckpt.errors import ConfigError
from torchft_ckpt.exact.loader import StepLoader

if TYPE_CHECKING:
    from torchft_ckpt.manager import Manager

logger = logging.getLogger(__name__)
_WORKERS = "num_workers prefetch_factor persistent_workers multiprocessing_context worker_init_fn timeout pin_memory"
"""What a `StepLoader` takes of a `DataLoader` as it is."""


class StandIn(dict[str, torch.Tensor]):
    """Stands for the samples of a step, in a framework that wants a batch: it has as many, of nothing."""


def feed(
    manager: Manager,
    loader: Any,
    size: int,
    *,
    accumulates: int,
    seed: int,
    part: tuple[int, int] = (0, 1),
    shuffles: type = RandomSampler,
) -> tuple[StepLoader | None, Any]:
    """Return a `StepLoader` of what a loader reads, whose microbatches are its batches; and a loader of stand-ins in its place.

    What has no access by index trains as it would: then there is no StepLoader, and a warning says so. Raises `ConfigError` as
    `StepLoader`, and for a loader of another kind, an order of samples, or an accumulation of gradients (`accumulates` batches)
    that is not a step's. A class derived from a sampler of torch's may have any order.

    `size`: of the global batch. `seed`: of the order, if the sampler has none. `part`: see `rank_in_microbatch` of `StepLoader`.
    `shuffles`: a further class of samplers that shuffle.
    """
    if not isinstance(loader, DataLoader):
        name = type(loader).__name__
        raise ConfigError(
            f"{name} with global_batch_size: steps are read from the data set of a DataLoader", party=name
        )
    data: Any = loader.dataset
    if isinstance(data, IterableDataset):
        name = type(data).__name__
        logger.warning("%s has no access by index: it trains as without global_batch_size, and not exactly", name)
        return None, loader
    if accumulates != 1:
        raise ConfigError("leave the accumulation of gradients out: global_batch_size says it", party="accumulation")
    batches: Any = getattr(loader.batch_sampler, "batch_sampler", loader.batch_sampler)
    sampler: Any = batches.sampler if type(batches) is BatchSampler else batches
    kind, source = type(sampler), getattr(sampler, "data_source", getattr(sampler, "dataset", ()))
    is_whole = len(source) == len(data)
    if is_whole and kind in (distributed.DistributedSampler, DistributedSampler):
        is_shuffled, seed = sampler.shuffle, sampler.seed
    elif (
        is_whole and kind in (RandomSampler, shuffles) and not sampler.replacement and sampler.num_samples == len(data)
    ):
        is_shuffled = True
    elif is_whole and kind is SequentialSampler:
        is_shuffled = False
    else:
        raise ConfigError(
            f"{kind.__name__} with global_batch_size: a step has samples of the whole data set in order, or shuffled",
            party=kind.__name__,
        )
    steps = StepLoader(
        manager,
        data,
        global_batch_size=size,
        microbatch_size=batches.batch_size * part[1],
        seed=seed,
        shuffle=is_shuffled,
        rank_in_microbatch=part,
        collate_fn=loader.collate_fn,
        **{name: getattr(loader, name) for name in _WORKERS.split()},
    )
    places: Any = range(max(1, len(data) // size) * size)
    nothing = StandIn(samples=torch.empty(size, 0, device="cpu"))
    return steps, DataLoader(places, batch_size=size, collate_fn=lambda _: StandIn(nothing))
