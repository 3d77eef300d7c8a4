"""`Manager.allreduce(should_quantize=...)` against a real lighthouse: groups of one, each on a thread."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

import pytest
import torch
from support.at_once import at_once
from support.replicas import lighthouse_of, manager_of
from torch.distributed import ReduceOp

from torchft_ckpt import LighthouseServer, ProcessGroupGloo, WorldSizeMode

T = TypeVar("T")
SHORT = timedelta(seconds=20)


class Replica:
    """A weight with its manager."""

    def __init__(self, lighthouse: LighthouseServer, name: str, **options: Any) -> None:
        self.weight = torch.zeros(1)
        self.group = ProcessGroupGloo(timeout=SHORT)
        self.manager = manager_of(
            lighthouse,
            lambda state: self.weight.copy_(state["weight"]),
            lambda: {"weight": self.weight},
            name=name,
            pg=self.group,
            **options,
        )

    def step(self, gradients: list[torch.Tensor], quantize: list[Any]) -> bool:
        self.manager.start_quorum()
        for gradient, choice in zip(gradients, quantize, strict=True):
            self.manager.allreduce(gradient, choice)
        return self.manager.should_commit()


def make(num: int, **options: Any) -> list[Replica]:
    options.setdefault("min_replica_size", num)
    server = lighthouse_of(num)
    with ThreadPoolExecutor(num) as pool:
        return list(pool.map(lambda i: Replica(server, f"group_{i}", **options), range(num)))


def together(replicas: list[Replica], act: Callable[[Replica, int], T]) -> list[T]:
    return at_once(*(partial(act, replica, rank) for rank, replica in enumerate(replicas)))


def test_plain_and_quantised_gradients_of_a_step_are_averaged_together() -> None:
    replicas = make(2)
    choices = [True, False, "fp8", "int8", False]
    gradients = [[torch.full((1000,), 127.0 * (i + rank)) for i in range(5)] for rank in range(2)]
    committed = together(replicas, lambda replica, rank: replica.step(gradients[rank], choices))
    assert committed == [True, True]
    assert all(torch.equal(a.view(torch.int32), b.view(torch.int32)) for a, b in zip(*gradients, strict=True))
    assert [g[0].item() for g in gradients[0]] == pytest.approx([127.0 * (i + 0.5) for i in range(5)], rel=1e-6)


@pytest.mark.slow
def test_a_spare_adds_zeros_and_gets_the_same_bits() -> None:
    replicas = make(3, min_replica_size=2, world_size_mode=WorldSizeMode.FIXED_WITH_SPARES)
    gradients = [[torch.linspace(-1, 1, 700)] for _ in range(3)]
    assert together(replicas, lambda replica, rank: replica.step(gradients[rank], ["int8"])) == [True] * 3
    assert all(torch.equal(given[0].view(torch.int32), gradients[0][0].view(torch.int32)) for given in gradients)
    assert (gradients[0][0] - torch.linspace(-1, 1, 700)).abs().max() <= 1.001 / 127


def test_a_group_that_aborts_discards_the_step_and_the_next_one_counts() -> None:
    replicas = make(2)

    def step(replica: Replica, rank: int) -> list[bool]:
        replica.manager.start_quorum()
        replica.manager.wait_quorum()
        if rank == 1:
            replica.group.abort()
        replica.manager.allreduce(torch.ones(10), "int8")
        return [replica.manager.should_commit(), replica.step([torch.ones(10)], ["int8"])]

    assert together(replicas, step) == [[False, True]] * 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tensor", "choice", "op", "said"),
    [
        (torch.ones(2), "int4", ReduceOp.AVG, "should_quantize"),
        (torch.ones(2, dtype=torch.int64), "int8", ReduceOp.SUM, "floating point"),
        (torch.ones(2), True, ReduceOp.MAX, "AVG and SUM"),
    ],
    ids=["unknown", "integers", "maximum"],
)
def test_what_cannot_be_quantised_is_refused(
    tensor: torch.Tensor, choice: Any, op: ReduceOp.RedOpType, said: str
) -> None:
    (replica,) = make(1)
    replica.manager.start_quorum()
    with pytest.raises(ValueError, match=said):
        replica.manager.allreduce(tensor, choice, op)


def test_a_group_that_is_alone_keeps_its_gradients_exact() -> None:
    (replica,) = make(1)
    gradient = torch.tensor([127.0, 0.3])
    assert replica.step([gradient], ["int8"])
    assert gradient.tolist() == torch.tensor([127.0, 0.3]).tolist()
