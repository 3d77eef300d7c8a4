"""What the integrations of frameworks read their steps by: a stock loader, of which a StepLoader and stand-ins are made."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from support.exact_group import Group
from torch.utils.data import (
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    TensorDataset,
    WeightedRandomSampler,
    distributed,
)

from torchft_ckpt import DistributedSampler
from torchft_ckpt.errors import ConfigError
from torchft_ckpt.exact.feeding import feed

Make = Callable[..., Group]
ROWS = TensorDataset(torch.arange(20.0).view(10, 2))


class Longest(RandomSampler):
    """Has an order of its own."""


class Wrapped(distributed.DistributedSampler[Any]):
    """Goes over another sampler, as Lightning's does with those that it does not know."""


def loader_with(sampler: Any) -> DataLoader[Any]:
    return DataLoader(ROWS, batch_size=2, sampler=sampler)


@pytest.mark.parametrize(
    ("sampler", "order"),
    [
        (SequentialSampler(ROWS), {"shuffle": 0, "seed": 3}),
        (RandomSampler(ROWS), {"shuffle": 1, "seed": 3}),
        (DistributedSampler(ROWS, 1, 2, group_rank=0, num_replicas=1, seed=5), {"shuffle": 1, "seed": 5}),
        (
            DistributedSampler(ROWS, 1, 2, group_rank=0, num_replicas=1, shuffle=False, seed=5),
            {"shuffle": 0, "seed": 5},
        ),
        (distributed.DistributedSampler(ROWS, num_replicas=2, rank=1, seed=6), {"shuffle": 1, "seed": 6}),
    ],
)
def test_a_step_has_samples_of_the_whole_data_set_in_the_order_of_the_loader(
    make_group: Make, sampler: Any, order: dict[str, int]
) -> None:
    steps, loader = feed(make_group().manager, loader_with(sampler), 4, accumulates=1, seed=3)
    assert steps is not None
    assert steps.geometry() == {"global_batch_size": 4, "microbatch_size": 2, "num_samples": 10, **order}
    assert [len(one["samples"]) for one in loader] == [4, 4]


def test_a_data_set_smaller_than_a_step_has_one_in_an_epoch(make_group: Make) -> None:
    _, loader = feed(make_group().manager, loader_with(None), 16, accumulates=1, seed=3)
    assert len(loader) == 1


@pytest.mark.parametrize(
    ("sampler", "accumulates", "why"),
    [
        (WeightedRandomSampler([1.0] * 10, 10), 1, "WeightedRandomSampler"),
        (RandomSampler(ROWS, replacement=True), 1, "RandomSampler"),
        (RandomSampler(ROWS, num_samples=5), 1, "RandomSampler"),
        (SequentialSampler(range(5)), 1, "SequentialSampler"),
        (Longest(ROWS), 1, "Longest"),
        (Wrapped(ROWS, num_replicas=1, rank=0), 1, "Wrapped"),
        (None, 2, "accumulation of gradients"),
    ],
)
def test_what_is_not_a_steps_is_refused(make_group: Make, sampler: Any, accumulates: int, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        feed(make_group().manager, loader_with(sampler), 4, accumulates=accumulates, seed=3)


def test_samplers_that_a_framework_shuffles_by_are_known_to_it(make_group: Make) -> None:
    steps, _ = feed(make_group().manager, loader_with(Longest(ROWS)), 4, accumulates=1, seed=3, shuffles=Longest)
    assert steps is not None and steps.geometry()["shuffle"] == 1


def test_what_is_no_data_loader_is_refused(make_group: Make) -> None:
    with pytest.raises(ConfigError, match="list with global_batch_size"):
        feed(make_group().manager, [ROWS[0]], 4, accumulates=1, seed=3)


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(5))


def test_a_stream_goes_on_as_it_was_and_a_warning_says_so(make_group: Make, caplog: pytest.LogCaptureFixture) -> None:
    stream = DataLoader(Stream(), batch_size=2)
    with caplog.at_level(logging.WARNING):
        assert feed(make_group().manager, stream, 4, accumulates=2, seed=3) == (None, stream)
    assert "Stream has no access by index" in caplog.text
