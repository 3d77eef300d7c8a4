"""Which samples a rank reads: no two ranks of a job the same, whether it is told its place or finds it."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist

from torchft_ckpt import DistributedSampler
from torchft_ckpt.errors import ConfigError

SAMPLES: Any = range(24)


@pytest.fixture(autouse=True)
def not_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(variable, raising=False)


def launched(monkeypatch: pytest.MonkeyPatch, rank: int | None, world_size: int | None) -> None:
    for variable, value in (("RANK", rank), ("WORLD_SIZE", world_size)):
        if value is not None:
            monkeypatch.setenv(variable, str(value))


def read(group: int, **place: int) -> list[int]:
    return list(DistributedSampler(SAMPLES, group, 2, shuffle=False, **place))


def test_ranks_that_torchrun_started_read_different_samples_without_being_told_their_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = []
    for group in range(2):
        for rank in range(3):
            launched(monkeypatch, rank, 3)
            found.append(read(group))
    assert sorted(sample for samples in found for sample in samples) == list(SAMPLES)
    assert found == [read(group, group_rank=rank, num_replicas=3) for group in range(2) for rank in range(3)]


def test_a_group_of_one_needs_no_place() -> None:
    assert [read(0), read(1)] == [list(range(0, 24, 2)), list(range(1, 24, 2))]


def test_what_is_given_counts_and_not_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    launched(monkeypatch, 3, 4)
    assert read(0, group_rank=1, num_replicas=2) == list(range(1, 24, 4))
    assert read(1, num_replicas=1) == list(range(1, 24, 2)), (
        "its ranks read the same, as those of a tensor-parallel group"
    )
    assert read(0, group_rank=1) == list(range(1, 24, 8))


def test_the_process_group_counts_before_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    launched(monkeypatch, 0, 1)
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_rank", lambda: 1)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    assert read(0) == list(range(1, 24, 4))


@pytest.mark.parametrize(
    ("rank", "world_size", "given", "message"),
    [
        (None, 2, {}, "num_replicas=2 ranks .* nothing says which one"),
        (None, None, {"num_replicas": 2}, "num_replicas=2 ranks .* nothing says which one"),
        (3, 4, {"num_replicas": 2}, "num_replicas=2 ranks .* nothing says which one"),
        (1, None, {}, "num_replicas=1 .* group_rank=1"),
        (None, None, {"group_rank": 1}, "num_replicas=1 .* group_rank=1"),
        (0, 2, {"group_rank": 2}, "num_replicas=2 .* group_rank=2"),
    ],
)
def test_where_it_cannot_know_its_place_it_says_so(
    rank: int | None, world_size: int | None, given: dict[str, int], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    launched(monkeypatch, rank, world_size)
    with pytest.raises(ConfigError, match=message):
        read(0, **given)
