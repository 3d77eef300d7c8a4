"""The sum over real process groups has the same bits whoever holds which microbatches, by both ways to send."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch
from support.at_once import at_once

from torchft_ckpt import ProcessGroupGloo
from torchft_ckpt.core.training.microbatches import Node, accept, cover, deal, fold
from torchft_ckpt.exact.kernels import same_bits
from torchft_ckpt.exact.tree_sum import TreeSum


class ByAllToAll(ProcessGroupGloo):
    """It is told from NCCL by its name alone."""

    def getBackendName(self) -> str:
        return "torchft-like-nccl"


def together(size: int, does: Callable[[int], Any]) -> list[Any]:
    """Run a function for each rank, on a thread each; return what they return."""
    return at_once(*(partial(does, rank) for rank in range(size)))


@pytest.fixture
def connect() -> Iterator[Callable[[type[ProcessGroupGloo], int], list[ProcessGroupGloo]]]:
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    made: list[ProcessGroupGloo] = []

    def connected(kind: type[ProcessGroupGloo], size: int) -> list[ProcessGroupGloo]:
        groups = [kind(timeout=timedelta(seconds=20)) for _ in range(size)]
        address = f"127.0.0.1:{store.port}/{len(made)}"
        made.extend(groups)
        together(size, lambda rank: groups[rank].configure(address, f"g{rank}", rank, size))
        return groups

    yield connected
    for group in made:
        group.shutdown()


@pytest.mark.parametrize("kind", [ProcessGroupGloo, ByAllToAll])
@pytest.mark.parametrize("size", [2, 3])
def test_every_deal_of_the_same_microbatches_has_the_same_sum_in_all_ranks(
    connect: Callable[..., list[ProcessGroupGloo]], kind: type[ProcessGroupGloo], size: int
) -> None:
    rng = random.Random(size)
    groups = connect(kind, size)
    for count in (7, 2, 12):
        leaves = [
            [torch.randn(33) * 10.0 ** rng.randint(-4, 4), torch.randn(5, dtype=torch.float64)] for _ in range(count)
        ]
        wanted = fold(
            {(n, n + 1): leaves[n] for n in range(count)},
            count,
            lambda a, b: [x + y for x, y in zip(a, b, strict=True)],
        )
        for attempt in range(3):
            claims: list[list[Node]] = [[] for _ in range(size)]
            for number in rng.sample(range(count), attempt):
                claims[rng.randrange(size)].append((number, number + 1))
            dealt = [cover(mine, count) for mine in deal(count, accept(claims, count))]

            def sums(rank: int) -> list[torch.Tensor]:
                held = {node: node_of(leaves, node) for node in dealt[rank]}  # noqa: B023
                before = {node: [flat.clone() for flat in flats] for node, flats in held.items()}
                out = [torch.empty(33), torch.empty(5, dtype=torch.float64)]
                way = TreeSum(count, dealt, held, out)  # noqa: B023
                way.reduce(groups[rank], out[0], divisor=None, timeout=timedelta(seconds=20))
                assert all(torch.equal(a, b) for node in held for a, b in zip(held[node], before[node], strict=True))
                return out

            for found in together(size, sums):
                assert found is not None and all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def node_of(leaves: list[list[torch.Tensor]], node: Node) -> list[torch.Tensor]:
    if node[1] - node[0] == 1:
        return [flat.clone() for flat in leaves[node[0]]]
    half = 1 << ((node[1] - node[0] - 1).bit_length() - 1)
    left, right = node_of(leaves, (node[0], node[0] + half)), node_of(leaves, (node[0] + half, node[1]))
    return [a + b for a, b in zip(left, right, strict=True)]


def test_a_rank_whose_neighbour_is_gone_says_so_and_can_be_connected_anew(
    connect: Callable[..., list[ProcessGroupGloo]],
) -> None:
    groups = connect(ProcessGroupGloo, 2)
    groups[1].abort()
    out = [torch.empty(4)]
    way = TreeSum(2, [[(0, 1)], [(1, 2)]], {(0, 1): [torch.ones(4)]}, out)
    with pytest.raises(RuntimeError):
        way.reduce(groups[0], out[0], divisor=None, timeout=timedelta(seconds=5))
    assert groups[0].errored() is not None


def test_deterministic_algorithms_are_on_in_the_inner_loop_alone_and_a_users_choice_stays() -> None:
    gpu, fills = torch.device("cuda"), torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    with pytest.raises(KeyError), same_bits(gpu):
        assert torch.are_deterministic_algorithms_enabled() and torch.is_deterministic_algorithms_warn_only_enabled()
        assert not torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
        raise KeyError
    assert not torch.are_deterministic_algorithms_enabled()
    assert torch.utils.deterministic.fill_uninitialized_memory == fills  # type: ignore[attr-defined]
    with same_bits(torch.device("cpu")):
        assert not torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        with same_bits(gpu):
            assert not torch.is_deterministic_algorithms_warn_only_enabled()
        assert torch.are_deterministic_algorithms_enabled()
    finally:
        torch.use_deterministic_algorithms(False)
