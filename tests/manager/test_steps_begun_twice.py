"""A step that is begun again before anything has happened in it goes on: batches are skipped, `zero_grad` called at both ends."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch
from support.at_once import at_once
from support.fake_process_group import FakeFabric, FakeProcessGroup
from support.replicas import Replica
from support.stores import hosted_store
from torch import nn

from torchft_ckpt import DistributedDataParallel, LighthouseServer, Optimizer
from torchft_ckpt.errors import GroupBrokenError, QuorumTimeoutError

SHORT = timedelta(seconds=20)


class Group(Replica):
    """One rank with a model, an optimizer."""

    def __init__(self, job: Job, name: str, **options: Any) -> None:
        super().__init__(job.lighthouse, name, pg=FakeProcessGroup(job.fabric), **options)

    def backward(self) -> None:
        self.model(torch.ones(2, 8)).square().mean().backward()
        for parameter in self.model.parameters():
            self.manager.allreduce(parameter.grad)  # type: ignore[arg-type]

    def quorum(self) -> int:
        """Return the quorum of the open step; a step that was abandoned makes the next one meet in a new quorum."""
        self.manager.wait_quorum()
        return self.manager.statistics().quorum_id


class Job:
    """A lighthouse, and what the groups meet on."""

    def __init__(self, lighthouse: LighthouseServer) -> None:
        self.lighthouse = lighthouse
        self.fabric = FakeFabric()
        self.groups: list[Group] = []

    def start(self, *names: str, **options: Any) -> list[Group]:
        with ThreadPoolExecutor(len(names)) as pool:
            groups = list(pool.map(lambda name: Group(self, name, **options), names))
        self.groups += groups
        return groups

    def shutdown(self) -> None:
        for group in self.groups:
            group.manager.shutdown()


@contextlib.contextmanager
def running(min_replicas: int) -> Iterator[Job]:
    lighthouse = LighthouseServer("127.0.0.1:0", min_replicas=min_replicas)
    job = Job(lighthouse)
    try:
        yield job
    finally:
        job.shutdown()
        lighthouse.shutdown()


@pytest.fixture
def group() -> Iterator[Group]:
    """A group that has committed a step, alone."""
    with running(1) as job:
        (group,) = job.start("group")
        group.step()
        yield group


def test_skipped_batches_and_zero_grad_at_both_ends_of_the_iteration_cost_no_step() -> None:
    """It was a livelock: each `zero_grad` discarded the step that the other group was in."""
    num_steps = 20

    def train(group: Group, skips: bool) -> int:
        num_skipped = 0
        while group.manager.current_step() < num_steps:
            if group.manager.statistics().num_discarded > 5:
                job.shutdown()  # else the other one would wait for this group
            group.optimizer.zero_grad()
            if skips and num_skipped < group.manager.current_step() // 3:
                num_skipped += 1
                continue
            group.backward()
            group.optimizer.step()
            group.optimizer.zero_grad()
        return num_skipped

    with running(2) as job:
        first, second = job.start("a", "b", min_replica_size=2)
        num_skipped = at_once(lambda: train(first, False), lambda: train(second, True))
        statistics = [group.manager.statistics() for group in job.groups]
        assert num_skipped == [0, 6]
        assert [(s.num_committed, s.num_discarded, s.quorum_id) for s in statistics] == [(num_steps, 0, 1)] * 2
        assert first.bits() == second.bits()


def test_a_step_that_is_begun_again_is_the_same_one(group: Group) -> None:
    group.optimizer.zero_grad()
    before = group.quorum()
    for _ in range(3):
        group.optimizer.zero_grad()
    assert group.quorum() == before
    group.backward()
    group.optimizer.step()
    assert group.manager.statistics().num_discarded == 0
    assert group.manager.current_step() == 2


@pytest.mark.parametrize(
    "happen",
    [
        lambda group: group.backward(),
        lambda group: group.manager.report_error(ValueError("the batch cannot be read")),
        lambda group: (group.manager.disallow_state_dict_read(), group.manager.allow_state_dict_read()),
        lambda group: group.manager.load_state_dict({"step": 1, "batches_committed": 1}),
        lambda group: group.manager.newest_step_of_peers(timedelta(seconds=5)),
        lambda group: group.manager.start_quorum(contributes=False, wait=True),
        lambda group: group.model.weight.requires_grad_(False),
    ],
    ids=["collective", "error", "state changed", "restored", "peers asked", "other arguments", "frozen"],
)
def test_a_step_in_which_something_has_happened_begins_anew(group: Group, happen: Callable[[Group], object]) -> None:
    group.optimizer.zero_grad()
    before = group.quorum()
    for parameter in group.model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    happen(group)
    group.optimizer.zero_grad()
    assert group.quorum() > before


def test_a_rank_that_begins_twice_and_one_that_begins_once_are_in_one_step() -> None:
    store = hosted_store()
    with running(1) as job:
        shared = {"world_size": 2, "store_addr": "127.0.0.1", "store_port": store.port}
        ranks = at_once(*(lambda rank=rank: job.start("group", rank=rank, **shared)[0] for rank in range(2)))  # type: ignore[misc]

        def train(rank: Group, times: int) -> None:
            for _ in range(5):
                for _ in range(times):
                    rank.optimizer.zero_grad()
                rank.backward()
                rank.optimizer.step()

        at_once(lambda: train(ranks[0], 2), lambda: train(ranks[1], 1))
        statistics = [rank.manager.statistics() for rank in ranks]
        assert [(s.num_committed, s.num_discarded, s.quorum_id) for s in statistics] == [(5, 0, 1)] * 2


def test_a_rank_that_goes_on_with_a_step_which_the_other_abandons_follows_it() -> None:
    store = hosted_store()
    with running(1) as job:
        shared = {"world_size": 2, "store_addr": "127.0.0.1", "store_port": store.port}
        ranks = at_once(*(lambda rank=rank: job.start("group", rank=rank, **shared)[0] for rank in range(2)))  # type: ignore[misc]

        def train(rank: Group, fails: bool) -> None:
            rank.optimizer.zero_grad()
            if fails:
                rank.backward()
            while rank.manager.current_step() < 3:
                rank.step()

        at_once(lambda: train(ranks[0], False), lambda: train(ranks[1], True))
        assert [rank.manager.statistics().num_committed for rank in ranks] == [3, 3]


def test_a_quorum_that_was_not_there_in_time_is_asked_for_again() -> None:
    with running(2) as job:
        (group,) = job.start("group", quorum_retries=0, quorum_timeout=timedelta(seconds=0.1))
        for _ in range(2):
            with pytest.raises(QuorumTimeoutError):
                group.optimizer.zero_grad()


def test_a_group_that_was_shut_down_says_so_in_an_open_step_too(group: Group) -> None:
    group.optimizer.zero_grad()
    group.manager.shutdown()
    with pytest.raises(GroupBrokenError, match="was shut down"):
        group.optimizer.zero_grad()


class Deferring(Group):
    """Its forward pass is seen, so that begins its steps."""

    def __init__(self, job: Job, name: str, **options: Any) -> None:
        super().__init__(job, name, **options)
        self.ddp = DistributedDataParallel(self.manager, self.model)

    def tries(self, *, writes: bool, counts: bool = True) -> bool:
        """Make a step, and write to weights before its forward pass; return whether `zero_grad` had begun it."""
        self.optimizer.zero_grad()
        is_begun = not self.manager._steps.is_deferred
        if writes:
            with torch.no_grad():
                self.model.weight.mul_(0.5)
        self.ddp(torch.ones(2, 8)).square().mean().backward()
        if not counts:
            self.manager.report_error(ValueError("the batch cannot be read"))
        assert self.optimizer.step() is counts
        return is_begun


def test_a_loop_that_writes_to_weights_before_its_forward_pass_again_as_a_step_is_tried_again_does_so_seldom() -> None:
    """`if manager.current_step() % 100 == 0: validate()`, and that step is discarded: from then on `zero_grad` began each step,
    and who came in ended with a ReplicasDifferError."""
    with running(1) as job:
        group = Deferring(job, "group")
        job.groups.append(group)
        for _ in range(3):
            group.tries(writes=False)
        group.tries(writes=True, counts=False)
        group.tries(writes=True)
        assert [group.tries(writes=False) for _ in range(3)] == [False] * 3
        group.tries(writes=True)
        assert group.tries(writes=False), "in another step soon after that: it writes for the step that begins"


def test_what_a_discarded_step_wrote_goes_back_also_if_weights_were_written_to_before_its_forward_pass() -> None:
    """Weights as they were written to stay: they may be the tail of the step before."""

    class Centred(Deferring):
        def __init__(self, job: Job, name: str, **options: Any) -> None:
            self.center, self.count = torch.zeros(2), 1000
            super().__init__(job, name, **options)

        def state(self) -> dict[str, Any]:
            return {**super().state(), "center": self.center, "count": self.count}

        def sees(self, *_: object) -> None:
            self.center.add_(1)
            self.count += 1

    with running(1) as job:
        group = Centred(job, "group")
        job.groups.append(group)
        for _ in range(3):
            group.tries(writes=False)
        group.model.register_forward_hook(group.sees)
        before = group.model.weight.detach().clone()
        group.tries(writes=True, counts=False)
        assert (group.center.tolist(), group.count) == ([0.0, 0.0], 1000)
        assert torch.equal(group.model.weight, before * 0.5)


def test_an_optimizer_that_the_loop_trains_on_with_is_guarded_again_though_its_state_is_returned_no_more() -> None:
    """Two of a GAN, and the state function returned the first alone until it came to return the second alone."""

    class Two(Group):
        is_late = False

        def __init__(self, job: Job, name: str, **options: Any) -> None:
            self.other = nn.Linear(8, 8)
            self.adam = torch.optim.Adam(self.other.parameters())
            super().__init__(job, name, **options)
            self.optimizers = [self.optimizer, Optimizer(self.manager, self.adam)]

        def state(self) -> dict[str, Any]:
            now = self.adam if self.is_late else self.sgd
            return {"model": self.model.state_dict(), "other": self.other.state_dict(), "now": now.state_dict()}

        def tries(self) -> list[str]:
            for optimizer in self.optimizers:
                optimizer.zero_grad()
            self.other(self.model(torch.ones(2, 8))).square().mean().backward()
            assert [optimizer.step() for optimizer in self.optimizers] == [True, True]
            return sorted(type(one).__name__ for one in self.manager.hooks.registry.guarded())

    with running(1) as job:
        group = Two(job, "group")
        job.groups.append(group)
        assert group.tries() == ["Adam", "SGD"]
        group.is_late = True
        # So it is looked anew whose state is returned.
        group.adam.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})
        assert group.tries() == ["Adam"]
        assert [group.tries() for _ in range(3)][-1] == ["Adam", "SGD"]
        assert group.manager.current_step() == 5
