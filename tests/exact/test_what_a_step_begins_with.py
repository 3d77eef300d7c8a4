"""Ranks begin a step with a microbatch while its quorum forms. If another group is dealt that, it computes it, too."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import pytest
import torch
from support.exact_group import Group
from support.stores import hosted_store
from torch import nn

from torchft_ckpt import LighthouseServer
from torchft_ckpt.exact.loader import Step

NUM_STEPS, LEAVES_AT = 6, 4
"""Of the job; and with group `a` among those who make them."""


class Rank:
    """A rank of a group of some, on a thread of its own."""

    def __init__(self, server: LighthouseServer, name: str, rank: int = 0, store: Any = None) -> None:
        self.name, self.computed, model = name, dict[int, list[int]](), nn.Linear(2, 1)
        self.raises = False
        nn.init.constant_(model.weight, 0.3)
        nn.init.constant_(model.bias, 0.1)
        where = {"rank": 0, "world_size": 1}
        if store is not None:
            where = {"rank": rank, "world_size": 2, "store_addr": "127.0.0.1", "store_port": store.port}
        self.group = Group(server, model, replica_id=name, **where)
        self.steps = self.group.steps(num_steps=NUM_STEPS, shuffle=False)

    def trains(self) -> None:
        """Train to the end of the job, or until this group leaves it."""
        self._iterator = iter(self.steps)
        for step in self._iterator:
            if self.name == "a" and step.number == LEAVES_AT:
                break
            self.group.optimizer.zero_grad()
            self.computed[step.number] = computed = list[int]()
            try:
                self._computes(step, computed)
            except ArithmeticError:
                self._computes(next(self._iterator), computed)
            assert self.group.optimizer.step()
        if self.name == "a":
            self.group.manager.shutdown()

    def _computes(self, step: Step, computed: list[int]) -> None:
        for batch in step:
            assert self.steps.microbatch is not None
            computed.append(self.steps.microbatch)
            if self.raises and step.number == LEAVES_AT:
                self.raises = False
                raise ArithmeticError("out of range")
            self.group.model(0.1 * batch).square().mean().backward()

    def bits(self) -> list[torch.Tensor]:
        return [one.detach() for one in self.group.model.parameters()]


@pytest.fixture
def server() -> Iterator[LighthouseServer]:
    server = LighthouseServer("127.0.0.1:0", min_replicas=1)
    yield server
    server.shutdown()


def train(ranks: list[Rank]) -> None:
    """Have ranks train together, each on a thread."""
    try:
        with ThreadPoolExecutor(len(ranks)) as pool:
            for trained in [pool.submit(rank.trains) for rank in ranks]:
                trained.result()
    finally:
        for rank in ranks:
            rank.group.manager.shutdown()


def all_have_the_bits_of_one_alone(ranks: list[Rank]) -> bool:
    other = LighthouseServer("127.0.0.1:0", min_replicas=1)
    try:
        train([alone := Rank(other, "alone")])
    finally:
        other.shutdown()
    return all(torch.equal(one, want) for rank in ranks for one, want in zip(rank.bits(), alone.bits(), strict=True))


@pytest.mark.parametrize(
    ("is_told", "computed"), [(True, {"b": [2, 0], "c": [3, 1]}), (False, {"b": [2, 0, 1], "c": [3, 2]})]
)
def test_what_was_begun_is_dealt_to_who_has_it_if_that_can_be_told_and_else_to_anybody(
    server: LighthouseServer, monkeypatch: pytest.MonkeyPatch, is_told: bool, computed: dict[str, list[int]]
) -> None:
    if not is_told:
        monkeypatch.setattr("torchft_ckpt.core.coordination.lighthouse.MAX_NODES_TOLD", 0)
    train(ranks := [Rank(server, name) for name in "abc"])
    assert [rank.computed[LEAVES_AT - 1] for rank in ranks] == [[0, 1], [2], [3]]
    assert {rank.name: rank.computed[LEAVES_AT] for rank in ranks[1:]} == computed
    assert all_have_the_bits_of_one_alone(ranks[1:])


def groups_of_two(server: LighthouseServer) -> list[Rank]:
    stores = {name: hosted_store() for name in "abc"}
    with ThreadPoolExecutor(6) as pool:
        made = [pool.submit(Rank, server, name, rank, stores[name]) for name in "abc" for rank in (0, 1)]
        return [rank.result() for rank in made]


def test_what_not_all_ranks_of_a_group_have_begun_is_dealt_to_anybody(server: LighthouseServer) -> None:
    ranks = groups_of_two(server)
    late, decided = ranks[3].steps, ranks[3].steps.decided

    def begins_with_nothing(*, counts: bool) -> None:
        decided(counts=counts)
        late._early = None

    late.decided = begins_with_nothing  # type: ignore[method-assign]
    train(ranks)
    computed = [(rank.name, rank.computed[LEAVES_AT]) for rank in ranks[2:]]
    assert computed == [("b", [2, 0, 1]), ("b", [0, 1]), ("c", [3, 2]), ("c", [3, 2])]
    assert all_have_the_bits_of_one_alone(ranks[2:])


def test_a_rank_that_raises_in_what_its_group_begins_with_begins_with_that_again(
    server: LighthouseServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks that shard a model wait for each other in each microbatch, so none may leave one out that the others compute."""
    monkeypatch.setattr("torchft_ckpt.core.coordination.lighthouse.MAX_NODES_TOLD", 0)
    ranks = groups_of_two(server)
    ranks[3].raises = True
    train(ranks)
    assert [rank.computed[LEAVES_AT] for rank in ranks[2:4]] == [[2, 0, 1], [2, 2, 0, 1]]
    assert all_have_the_bits_of_one_alone(ranks[2:])


def test_who_is_dealt_nothing_in_the_quorum_does_not_change_what_the_others_begin_with(
    server: LighthouseServer,
) -> None:
    rank = Rank(server, "b")
    rank.steps.num_steps = 1
    train([rank])
    now = rank.group.manager.view()
    assert now.quorum is not None
    formed = msgspec.structs.replace(now.quorum, replica_world_size=2, nodes=[None, []], replica_rank=1)
    rank.steps._deal(formed, now, None)
    assert rank.steps._usual == [0, 1, 2, 3]
