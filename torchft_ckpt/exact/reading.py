"""Reads the samples of microbatches: which they are follows from the step alone, and so do the random numbers of what reads them.

Workers are those of a stock `DataLoader`, whose sampler is told what will be wanted. So they read ahead what this group computes
if nothing changes. What another group has computed until now is read when it is wanted.
"""

from __future__ import annotations

import itertools
import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from torchft_ckpt.core.training.microbatches import random_key, sample_at
from torchft_ckpt.errors import ConfigError, SampleError

Key: TypeAlias = tuple[int, int]
"""A step and the number of a microbatch in it."""
_NOTHING = (-1, -1)
"""The key that a worker gets while nothing is to be read ahead: a `DataLoader` wants some as it begins."""
_REFUSED = {
    "sampler": "the step says which samples it has: pass order=f(position) -> index",
    "batch_sampler": "the step says which samples it has: pass order=f(position) -> index",
    "batch_size": "pass global_batch_size and microbatch_size",
    "drop_last": "a step's samples run across the end of an epoch",
    "generator": "random numbers follow from `seed`",
}


def set_random_state(key: int) -> None:
    """Seed the generators of Python, numpy and torch, on the current device too if it is in use."""
    random.seed(key)
    np.random.seed(key & 0xFFFFFFFF)
    torch.default_generator.manual_seed(key)
    if torch.cuda.is_initialized():
        torch.cuda.default_generators[torch.cuda.current_device()].manual_seed(key)


@dataclass(frozen=True)
class Samples(Dataset[Any]):
    """The microbatches of all steps, by step and number. It is also what a worker gets.

    Args:
        dataset: with access by index; None: `read` reads.
        order: which sample is at a position of the endless stream; None: a permutation by `seed`, or if not `shuffle` the order
            of the data set.
        read: returns a microbatch, by step and number.
        part: which of how many equal parts of each microbatch is read.
    """

    dataset: Any
    num_samples: int | None
    global_batch_size: int
    microbatch_size: int
    seed: int
    shuffle: bool
    order: Callable[[int], Any] | None
    read: Callable[[int, int], Any] | None
    part: tuple[int, int]
    collate: Callable[[list[Any]], Any]

    def __getitem__(self, key: Key) -> tuple[Key, Any]:
        """Return a microbatch with its key; if it cannot be read a `SampleError` in its place, for whoever comes to want it."""
        if key == _NOTHING:
            return key, None
        step, number = key
        set_random_state(self.random_key(step, f"read {number}"))
        try:
            return key, self._read(step, number)
        except Exception as error:  # noqa: BLE001 - whatever a data set raises
            told = str(error) if isinstance(error, SampleError) else f"{type(error).__name__}: {error}"
            failed = SampleError(f"microbatch {number} of step {step} cannot be read: {told}", party=str(self.dataset))
            failed.__cause__ = error
            return key, failed

    def random_key(self, step: int, what: int | str) -> int:
        """Return the key of what is done for this part."""
        return random_key(self.seed, step, what if self.part[1] == 1 else f"{what}, part {self.part[0]}")

    def _read(self, step: int, number: int) -> Any:
        if self.read is not None:
            return self.read(step, number)
        place, num_parts = self.part
        size = self.microbatch_size // num_parts
        first = step * self.global_batch_size + number * self.microbatch_size + place * size
        indices = [self._index(position) for position in range(first, first + size)]
        if hasattr(self.dataset, "__getitems__"):
            return self.collate(self.dataset.__getitems__(indices))
        return self.collate([self._sample(index) for index in indices])

    def _sample(self, index: Any) -> Any:
        try:
            return self.dataset[index]
        except Exception as error:
            raise SampleError(f"sample {index}: {type(error).__name__}: {error}") from error

    def _index(self, position: int) -> Any:
        if self.order is not None:
            return self.order(position)
        num_samples = self.num_samples or 1
        return sample_at(position, num_samples, self.seed) if self.shuffle else position % num_samples


class Reader(Iterable[Key]):
    """Reads microbatches, ahead where there are workers. On the training thread. It is the sampler of its `DataLoader`.

    Args:
        samples: what is read.
        options: of the `DataLoader`.
    """

    def __init__(self, samples: Samples, options: dict[str, Any]) -> None:
        self._samples, self._options = samples, options
        self._batches: Iterator[tuple[Key, Any]] | None = None
        self._here: dict[Key, Any] = {}
        self._requested: set[Key] = set()
        self._urgent: deque[Key] = deque()
        self._ahead: Iterator[Key] = iter(())
        self._step, self._later = -1, list[int]()

    def will_want(self, step: int, now: Sequence[int], later: Sequence[int]) -> None:
        """This rank is about to ask for these microbatches of a step, and for those of each step after it, if nothing changes."""
        self._here = {key: batch for key, batch in self._here.items() if key[0] >= step}
        self._urgent = deque((step, number) for number in now)
        if step < self._step or self._later != later:
            steps = itertools.count(step + 1) if later else ()
            self._ahead = ((after, number) for after in steps for number in later)
        self._step, self._later = step, [*later]

    def __iter__(self) -> Iterator[Key]:
        while True:
            key = self._urgent.popleft() if self._urgent else next(self._ahead, _NOTHING)
            if key == _NOTHING:
                yield key
            if key[0] >= self._step and key not in self._requested and key not in self._here:
                self._requested.add(key)
                yield key

    def get(self, step: int, number: int) -> Any:
        """Return a microbatch.

        Raises:
            SampleError: it cannot be read.
            RuntimeError: a worker has died.
        """
        key = (step, number)
        if self._batches is None:
            how = {"batch_size": None, "sampler": self, "collate_fn": _as_it_is, **self._options}
            self._batches = iter(DataLoader(self._samples, **how))
        while key not in self._here:
            if key not in self._requested:
                self._urgent.appendleft(key)
            read, batch = next(self._batches)
            self._requested.discard(read)
            if read[0] >= self._step:
                self._here[read] = batch
        batch = self._here.pop(key)
        if isinstance(batch, SampleError):
            raise batch
        return batch


def _as_it_is(batch: Any) -> Any:
    return batch


def check_source(dataset: Any, read: object, order: object, options: dict[str, Any]) -> int | None:
    """Return how many samples there are, None where nobody says so; raise `ConfigError` where they cannot be read by index."""
    for name, why in _REFUSED.items():
        if name in options:
            raise ConfigError(f"StepLoader takes no {name}: {why}", party=name)
    if (dataset is None) == (read is None):
        raise ConfigError(
            "StepLoader reads from a data set, or by read=f(step, microbatch): pass one of them", party="dataset"
        )
    if isinstance(dataset, IterableDataset) or (dataset is not None and not hasattr(dataset, "__getitem__")):
        raise ConfigError(
            f"{type(dataset).__name__} has no access by index, and a death would lose its place: use a data set with"
            " __getitem__ (MosaicML Streaming has one; an index of the files of WebDataset makes one; a stream can be packed"
            " into rows ahead), or read=f(step, microbatch)",
            party="dataset",
        )
    num_samples = len(dataset) if hasattr(dataset, "__len__") else None
    if num_samples is None and order is None and read is None:
        raise ConfigError(f"{type(dataset).__name__} has no length: pass order=f(position) -> index", party="dataset")
    if num_samples == 0:
        raise ConfigError("the data set is empty", party="dataset")
    return num_samples
