"""A group loads the state at the end of an iteration that does not count, and what its loop changes before its next step goes
back."""

from __future__ import annotations

import logging
import re
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any, cast

import numpy as np
import pytest
import torch
from support.replicas import Replica, Run, lighthouse_of, together
from support.stores import hosted_store
from test_ranks_load_together import Inner, Rank, Slow, group
from torch import nn

from torchft_ckpt import DistributedDataParallel, Optimizer
from torchft_ckpt.checkpointing.lock import StateDictLock
from torchft_ckpt.core.coordination import hold
from torchft_ckpt.ddp import PureDistributedDataParallel
from torchft_ckpt.errors import ConfigError, StateDictLoadError
from torchft_ckpt.manager import coming_in
from torchft_ckpt.manager.coming_in import CameIn
from torchft_ckpt.manager.saving import Onlooking, SaveIdentity, save_identity
from torchft_ckpt.manager.state_registry import StateRegistry

pytestmark = pytest.mark.usefixtures("patient")


class Counting(Replica):
    """Its state has a count, and a large tensor that no optimizer owns."""

    def __init__(self, *arguments: Any, seed: int = 0, **options: Any) -> None:
        self.count, self.average = 0, torch.zeros(64, 64)
        super().__init__(*arguments, seed=seed, **options)

    def state(self) -> dict[str, Any]:
        return {**super().state(), "count": self.count, "average": self.average}

    def load(self, state: dict[str, Any]) -> None:
        super().load(state)
        self.count = state["count"]
        self.average.copy_(state["average"])

    def step(self) -> bool:
        counts = super().step()
        if counts:
            self.count += 1
            self.average.add_(1.0)
        return counts


@pytest.mark.parametrize("use_async_quorum", [True, False])
def test_a_group_is_in_its_first_quorum_as_a_holder_and_the_others_lose_no_step(use_async_quorum: bool) -> None:
    run = Run(use_async_quorum=use_async_quorum)
    joined = Replica(run.server, "c", seed=7, use_async_quorum=use_async_quorum)
    assert not joined.step()
    now = joined.manager.view()
    assert now.came_in and not now.is_behind and joined.manager.statistics().num_healed == 1
    assert joined.step() and joined.manager.is_participating()
    run.ends_alike(joined)


def test_a_group_that_comes_in_calls_its_state_functions_once_before_it_receives_and_three_times_after() -> None:
    """After it has loaded, to know what the loop moves from there on, and as its step begins: the others wait meanwhile."""

    class Counting(Replica):
        calls: list[str] = []

        def state(self) -> dict[str, Any]:
            now = self.manager.view() if hasattr(self, "manager") else None
            if now is not None and now.quorum is not None and now.quorum.held and (now.follows or now.came_in):
                self.calls.append("state")
            return super().state()

        def load(self, state: dict[str, Any]) -> None:
            self.calls = [*self.calls[-1:], "load"]  # it may have been waited for in vain before
            super().load(state)

    run = Run()
    joined = Counting(run.server, "c", seed=7)
    while not joined.manager.is_participating():
        joined.step()
    assert joined.calls == ["state", "load", "state", "state", "state"]
    run.end(joined)


def test_what_the_state_functions_return_after_a_load_is_kept_no_longer_than_until_a_step_begins() -> None:
    """They may return a copy of the whole state."""
    weight, returned = torch.zeros(2), []

    def state() -> dict[str, torch.Tensor]:
        returned.append(weight.clone())
        return {"w": returned[-1]}

    registry = StateRegistry(StateDictLock())
    registry.register("model", lambda saved: None, state)
    assert not registry.not_returned({"model": {"w": torch.zeros(2)}}).paths
    kept = weakref.ref(returned.pop())
    assert kept() is not None
    CameIn(registry).forget()  # as a step begins that no group has come in to
    assert kept() is None


def test_those_who_wait_for_a_group_that_loads_are_told_that_this_time_does_not_count() -> None:
    run, heard = Run(), []

    class Waiting(Replica):
        def load(self, state: dict[str, Any]) -> None:
            give_up_at = time.monotonic() + 60
            while not all(r.manager._client._held_s for r in run.at_work) and time.monotonic() < give_up_at:
                time.sleep(0.01)
            heard.append([r.manager._client._held_s > 0 for r in run.at_work])
            super().load(state)

    joined = Waiting(run.server, "c", seed=7)
    assert not joined.step()
    assert heard == [[True, True]]
    run.end(joined)


def test_those_who_wait_hear_of_state_functions_that_take_long_between_the_load_and_the_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What of it is not the script's loop: they are called for what goes back, and for what is shown."""
    monkeypatch.setattr(hold, "BEGINS_WITHIN_S", 2.0)
    run = Run()

    class Long(Replica):
        has_loaded = False

        def load(self, state: dict[str, Any]) -> None:
            super().load(state)
            self.has_loaded = True

        def state(self) -> dict[str, Any]:
            if self.has_loaded:
                threading.Event().wait(1.4 * hold.BEGINS_WITHIN_S)
            return super().state()

    joined = Long(run.server, "c", seed=7)
    assert not joined.step()
    assert joined.step() and joined.manager.num_participants() == 3
    joined.has_loaded = False
    run.end(joined)
    assert joined.manager.statistics().num_healed == 1
    assert [replica.manager.statistics().num_discarded for replica in run.at_work] == [0, 0]


class Container(torch.optim.SGD):
    """As torchtitan's: its step is that of the `Optimizer` that wraps it, which steps it."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.wrapper: Optimizer | None = None
        self.steps_itself = False

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        if self.wrapper is None or self.steps_itself:
            super().step()
            return
        self.steps_itself = True
        try:
            self.wrapper.step()
        finally:
            self.steps_itself = False


class Contained(Replica):
    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.sgd.wrapper = self.optimizer  # type: ignore[attr-defined]

    def build(self) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        model = torch.nn.Linear(8, 8)
        return model, Container(model.parameters(), lr=0.1, momentum=0.9)

    def step(self) -> bool:
        before = self.manager.statistics().num_committed
        self.optimizer.zero_grad()
        self.model(torch.ones(2, 8)).square().mean().backward()
        for parameter in self.model.parameters():
            assert parameter.grad is not None
            self.manager.allreduce(parameter.grad)
        self.sgd.step()
        return self.manager.statistics().num_committed > before


def test_an_optimizer_that_asks_in_its_own_step_whether_it_counts_loads_there() -> None:
    """It holds the write lock by then, as one that steps does."""
    run = Run(Contained)
    joined = Contained(run.server, "c", seed=7)
    assert not joined.step() and joined.manager.view().came_in
    assert not joined.manager.state_dict_lock.held_for_write()
    run.ends_alike(joined)


def test_who_has_just_come_in_looks_on_as_others_save_until_its_first_step_was_compared() -> None:
    run = Run()
    joined = Replica(run.server, "c", seed=7)
    found = []
    assert not joined.step()
    found.append(save_identity(joined.manager))
    for _ in range(2):
        assert joined.step()
        found.append(save_identity(joined.manager))
    assert [*map(type, found)] == [Onlooking, Onlooking, SaveIdentity]
    assert joined.manager.num_participants() == 3
    run.end(joined)


def test_what_the_loop_changes_before_its_next_step_goes_back_by_name(caplog: pytest.LogCaptureFixture) -> None:
    run = Run(Counting)
    joined = Counting(run.server, "c", seed=7)
    assert not joined.step()
    before = joined.count, joined.sgd.param_groups[0]["lr"]
    joined.count += 1
    joined.sgd.param_groups[0]["lr"] = 5.0
    with caplog.at_level(logging.WARNING, "torchft_ckpt"):
        joined.optimizer.zero_grad()
    assert (joined.count, joined.sgd.param_groups[0]["lr"]) == before
    assert "default.count" in caplog.text and "it is put back" in caplog.text
    run.end(joined)
    assert {replica.count for replica in (*run.at_work, joined)} == {joined.manager.current_step()}


def test_a_large_tensor_that_the_loop_changes_is_received_again_and_copied_from_then_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(coming_in, "MAX_COPIED_BYTES", 1024)
    run = Run(Counting)
    joined = Counting(run.server, "c", seed=7)
    with caplog.at_level(logging.WARNING, "torchft_ckpt"):
        for _ in range(2):
            assert not joined.step()
            joined.average.add_(1.0)
    assert "default.average" in caplog.text and "it is received again" in caplog.text
    assert joined.step(), "it was copied, and is put back"
    run.end(joined)
    assert len({str(replica.average) for replica in (*run.at_work, joined)}) == 1
    assert [replica.manager.statistics().num_discarded for replica in run.at_work] == [0, 0]


class Clearing(Counting):
    """Its load function clears what it has before it reads what it is given."""

    def load(self, state: dict[str, Any]) -> None:
        super().load(state)
        self.average.zero_().add_(state["average"])


def test_a_large_tensor_that_a_load_function_clears_before_it_reads_it_is_not_taken_for_put_back(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It was given what is here, as that had not moved, and put back zeros."""
    monkeypatch.setattr(coming_in, "MAX_COPIED_BYTES", 1024)
    run = Run(Clearing)
    joined = Clearing(run.server, "c", seed=7)
    assert not joined.step()
    joined.count += 1
    with caplog.at_level(logging.WARNING, "torchft_ckpt"):
        joined.optimizer.zero_grad()
    assert "(default.count): that cannot be put back: it is received again" in caplog.text
    run.end(joined)
    assert len({str(replica.average) for replica in (*run.at_work, joined)}) == 1


def test_a_rank_whose_load_function_clears_what_it_is_given_says_so_also_if_only_another_rank_has_moved(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All ranks load then; this one was taken for put back, with zeros."""
    monkeypatch.setattr(coming_in, "MAX_COPIED_BYTES", 1024)
    weight = torch.ones(64, 64)
    registry = StateRegistry(StateDictLock())
    registry.register("model", lambda saved: cast(None, weight.zero_().add_(saved["w"])), lambda: {"w": weight})
    came_in, version = CameIn(registry), cast(Any, object())
    came_in.take(version)
    assert not came_in.put_back(version, agree=lambda moved: True)


class Fragile(Counting):
    """What its load function raises, if it has something to raise."""

    raises: BaseException | None = None

    def load(self, state: dict[str, Any]) -> None:
        raises, self.raises = self.raises, None
        if raises is not None:
            self.model.weight.data.zero_()
            raise raises
        super().load(state)


def test_a_put_back_that_fails_leaves_no_state_and_the_group_comes_in_again(caplog: pytest.LogCaptureFixture) -> None:
    run = Run(Counting)
    joined = Fragile(run.server, "c", seed=7)
    assert not joined.step()
    joined.count += 1
    joined.raises = OSError("no space left on device")
    with caplog.at_level(logging.WARNING, "torchft_ckpt"):
        assert not joined.step()
    assert (
        "that cannot be put back (load_state_dict of 'default' raised OSError: no space left on device" in caplog.text
    )
    assert joined.manager.view().came_in
    run.ends_alike(joined)


def test_a_put_back_that_is_interrupted_leaves_no_state_and_the_group_comes_in_again() -> None:
    run = Run(Counting)
    joined = Fragile(run.server, "c", seed=7)
    assert not joined.step()
    joined.count += 1
    joined.raises = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        joined.optimizer.zero_grad()
    assert joined.manager.view().torn
    assert not joined.step() and joined.manager.view().came_in
    run.ends_alike(joined)


class Unfreezing(Replica):
    """Its bias trains from a step on."""

    unfreezes_at: int | None = None

    def build(self) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = nn.Linear(8, 8)
        return model, torch.optim.SGD([model.weight], lr=0.1, momentum=0.9)

    def step(self) -> bool:
        if self.unfreezes_at is not None and self.manager.current_step() >= self.unfreezes_at:
            self.unfreeze()
        return super().step()

    def unfreeze(self) -> None:
        if len(self.sgd.param_groups) == 1:
            self.optimizer.add_param_group({"params": [self.model.bias]})

    def load(self, state: dict[str, Any]) -> None:
        if len(state["sgd"]["param_groups"]) > 1:
            self.unfreeze()
        super().load(state)


class Forgetting(Unfreezing):
    """Loads by the functions of torch alone."""

    def load(self, state: dict[str, Any]) -> None:
        Replica.load(self, state)


def test_a_group_whose_load_function_adds_no_parameter_group_is_told_which_one_and_what_helps() -> None:
    run = Run(Unfreezing)
    step = max(replica.manager.current_step() for replica in run.at_work) + 10
    for replica in run.at_work:
        replica.unfreezes_at = step
    run.wait_for_steps(12)
    joined = Forgetting(run.server, "c", seed=7)
    with pytest.raises(StateDictLoadError) as error:
        for _ in range(100):
            joined.step()
    assert re.search(
        r"different number of parameter groups; the state has default\.sgd\.param_groups\.1, and this group has not: if its loop"
        r" adds that as it trains, let load_state_dict add it first",
        str(error.value),
    )
    run.last_step = 0
    wait(run._loops, 60)


def test_a_group_that_unfreezes_in_an_iteration_that_did_not_count_comes_in_again_with_the_others_groups(
    caplog: pytest.LogCaptureFixture,
) -> None:
    run = Run(Unfreezing)
    joined = Unfreezing(run.server, "c", seed=7)
    assert not joined.step()
    joined.unfreeze()
    step = max(replica.manager.current_step() for replica in run.at_work) + 50
    for replica in run.at_work:
        replica.unfreezes_at = step  # until then they have another layout than the one that comes
    with caplog.at_level(logging.WARNING, "torchft_ckpt"):
        joined.optimizer.zero_grad()
    assert "default.sgd.param_groups.1" in caplog.text and "it is received again" in caplog.text
    assert joined.manager.view().is_behind and not joined.manager.is_participating()
    assert not joined.step() and joined.manager.view().came_in
    run.end(joined)
    assert len({str(replica.bits()) for replica in (*run.at_work, joined)}) == 1


@pytest.mark.slow
def test_all_ranks_of_a_group_load_again_where_the_loop_of_one_has_changed_something(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """What `load_state_dict` calls collectives for, as those of sharded models do, all ranks of a group load, or none."""
    inner, loads = Inner(2), [0, 0]

    class Moving(Rank):
        def __init__(self, *args: Any, rank: int, **options: Any) -> None:
            self.rank, self.has_moved = rank, False
            super().__init__(*args, rank=rank, **options)

        def load(self, state: dict[str, Any]) -> None:
            inner.call(self.rank, "load")
            super().load(state)
            loads[self.rank] += 1

        def train(self, last_step: list[int]) -> None:
            try:
                assert not self.step()
                if self.rank == 1:
                    self.sgd.param_groups[0]["momentum"] = 5.0
                    self.model.bias.data.add_(1)
                super().train(last_step)
            except BaseException:
                last_step.append(self.manager.current_step() + 3)  # the others end too
                raise

    server = lighthouse_of(1)
    stores = [hosted_store(), hosted_store()]
    stays = group(server, "stays", stores[0], [Slow(), Slow()])
    together(stays, lambda replica: [replica.step() for _ in range(2)])
    back = group(server, "comes_back", stores[1], [Slow(), Slow()], Moving)
    last_step: list[int] = []
    with caplog.at_level(logging.WARNING, "torchft_ckpt"):
        together([*stays, *back], lambda rank: rank.train(last_step))  # type: ignore[attr-defined]
    assert loads == [2, 2] and "default.model.bias" in caplog.text and "it is put back" in caplog.text
    assert len({str(rank.bits()) for rank in (stays[1], back[1])}) == 1
    assert [rank.manager.statistics().num_discarded for rank in stays] == [0, 0]
    for rank in [*stays, *back]:
        rank.manager.shutdown()


class Skipping(Replica):
    """Its loop has iterations that it ends without a vote; each is a way to write one."""

    def forward_seen(self) -> None:
        self.optimizer.zero_grad()
        self.manager.ensure_step()
        self.loss().backward()

    def averaged_by_hand(self) -> None:
        self.optimizer.zero_grad()
        self.loss().backward()
        self.average()

    def before_backward(self) -> None:
        self.optimizer.zero_grad()
        self.loss()

    def loss(self) -> torch.Tensor:
        return self.model(torch.ones(2, 8)).square().mean()

    def average(self) -> None:
        for parameter in self.model.parameters():
            assert parameter.grad is not None
            self.manager.allreduce(parameter.grad).wait()


@pytest.mark.parametrize("iteration", [Skipping.forward_seen, Skipping.averaged_by_hand, Skipping.before_backward])
@pytest.mark.parametrize("use_async_quorum", [True, False])
def test_a_group_that_skips_what_overflows_with_its_own_weights_is_given_others_and_comes_in_at_a_vote(
    iteration: Callable[[Skipping], None], use_async_quorum: bool, caplog: pytest.LogCaptureFixture
) -> None:
    run = Run(use_async_quorum=use_async_quorum)
    joined = Skipping(run.server, "c", seed=7, use_async_quorum=use_async_quorum)
    own, num_skipped = joined.bits(), 0
    with caplog.at_level(logging.WARNING, "torchft_ckpt"):
        while joined.bits() == own:
            iteration(joined)
            num_skipped += 1
            assert num_skipped < 50
    assert "should_commit was not called" in caplog.text
    assert joined.manager.view().is_behind and not joined.manager.is_participating()
    assert not joined.step(), "the loop had cleared gradients, and may have read something, before it had this state"
    assert joined.manager.view().came_in
    assert joined.step() and joined.manager.is_participating()
    run.ends_alike(joined)


def test_a_group_whose_first_twenty_iterations_overflow_is_in_one_vote_later() -> None:
    run = Run()
    joined = Skipping(run.server, "c", seed=7)
    for _ in range(20):
        joined.forward_seen()
    assert not joined.step() and joined.manager.view().came_in
    assert joined.step()
    run.ends_alike(joined)


class Ahead(Replica):
    """Its loop computes in each iteration a forward pass that it goes back through in the next one."""

    is_ahead = True

    def step(self) -> bool:
        graphs = self.manager.hooks.open_graphs
        graphs.closes("ahead")
        if self.is_ahead:
            graphs.opens("ahead")
        return super().step()


def test_a_group_that_always_owes_a_backward_pass_is_told_why_it_stays_out(caplog: pytest.LogCaptureFixture) -> None:
    run = Run()
    joined = Ahead(run.server, "c", seed=7)
    with caplog.at_level(logging.WARNING, "torchft_ckpt"):
        for _ in range(12):
            assert not joined.step()
    assert (
        joined.manager.view().is_behind
        and caplog.text.count("Compute what is only looked at under torch.no_grad()") == 1
    )
    joined.is_ahead = False
    assert not joined.step() and joined.manager.view().came_in
    run.end(joined)


class Surgery(Skipping):
    """Its loop combines the gradients of several tasks by hand (PCGrad), and clears them for each task."""

    num_tasks = 10
    clears_before_backward = True

    def step(self) -> bool:
        parameters, found = list(self.model.parameters()), []
        at_top = parameters[0].detach().clone()
        for task in range(self.num_tasks):
            if not self.clears_before_backward:
                self.optimizer.zero_grad()
            loss = (task + 1) * self.loss()
            if self.clears_before_backward:
                self.optimizer.zero_grad()
            loss.backward()
            found.append([parameter.grad.clone() for parameter in parameters if parameter.grad is not None])
        for parameter, gradients in zip(parameters, zip(*found, strict=True), strict=True):
            parameter.grad = torch.stack(gradients).mean(0)
            self.manager.allreduce(parameter.grad).wait()
        if not self.optimizer.step():
            return False
        with torch.no_grad():
            parameters[0].add_(at_top, alpha=0.01)
        return True


class SurgerySeen(Surgery):
    """The Manager sees its forward passes, as those of DistributedDataParallel within `no_sync`."""

    def loss(self) -> torch.Tensor:
        self.manager.ensure_step()
        return super().loss()


@pytest.mark.parametrize("clears_before_backward", [True, False])
@pytest.mark.parametrize("loop", [Surgery, SurgerySeen])
def test_a_loop_that_clears_gradients_ten_times_in_an_iteration_adds_only_what_it_computed_with_one_state(
    loop: type[Surgery], clears_before_backward: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Surgery, "clears_before_backward", clears_before_backward)
    run = Run(loop)
    joined = loop(run.server, "c", seed=7)
    assert not joined.step() and joined.manager.view().came_in
    run.end(joined)
    assert [replica.manager.statistics().num_discarded for replica in run.at_work] == [0, 0]
    assert joined.manager.statistics().num_corrected == 0
    assert len({str(replica.bits()) for replica in (*run.at_work, joined)}) == 1


def test_the_only_survivor_of_two_that_need_each_other_waits_until_the_other_is_back() -> None:
    run = Run(min_replica_size=2)
    lost = run.at_work.pop()
    lost.manager.shutdown(wait=False)
    joined = Replica(run.server, "c", seed=7, min_replica_size=2)
    run._loops.pop().exception(60)
    run.end(joined)
    assert run.at_work[0].bits() == joined.bits()


class Wrapped(Replica):
    """In DistributedDataParallel, or in one of its kind."""

    wrapper: type[nn.Module] = DistributedDataParallel

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.ddp = self.wrapper(self.manager, self.model)  # type: ignore[call-arg]

    def loss(self) -> torch.Tensor:
        return cast(torch.Tensor, self.ddp(torch.ones(2, 8)).square().mean())

    @property
    def is_begun(self) -> bool:
        return self.manager.view().is_in_step

    def step(self) -> bool:
        self.optimizer.zero_grad()
        self.loss().backward()
        return bool(self.optimizer.step())


def test_a_loop_that_skips_what_overflows_before_its_backward_pass_is_given_another_state() -> None:
    run = Run(Wrapped)
    joined = Wrapped(run.server, "c", seed=7)
    own, num_skipped = joined.bits(), 0
    while joined.bits() == own:
        joined.optimizer.zero_grad()
        joined.loss()
        num_skipped += 1
        assert num_skipped < 50
    assert not joined.step() and joined.manager.view().came_in
    run.ends_alike(joined)


class Purely(Wrapped):
    wrapper = PureDistributedDataParallel


@pytest.fixture
def alone(request: pytest.FixtureRequest) -> Iterator[Wrapped]:
    """A group whose steps begin with a forward pass, as it has made two."""
    server = lighthouse_of(1)
    replica = getattr(request, "param", Wrapped)(server, "alone")
    for _ in range(2):
        assert replica.step()
    replica.optimizer.zero_grad()
    assert not replica.is_begun
    yield replica
    replica.manager.shutdown()
    server.shutdown()


@pytest.mark.parametrize("alone", [Wrapped, Purely], indirect=True)
def test_a_forward_pass_in_eval_mode_that_a_backward_pass_may_follow_begins_the_step(alone: Wrapped) -> None:
    alone.ddp.eval()
    loss = alone.loss()
    assert alone.is_begun, "not in the middle of the backward pass"
    loss.backward()
    assert alone.optimizer.step()
    alone.optimizer.zero_grad()
    assert not alone.is_begun, "it was a forward pass of training"
    alone.ddp.train()
    alone.loss().backward()
    assert alone.optimizer.step()


@pytest.mark.parametrize("alone", [Wrapped, Purely], indirect=True)
def test_an_evaluation_without_gradients_begins_nothing(alone: Wrapped) -> None:
    alone.ddp.eval()
    with torch.no_grad():
        alone.loss()
    assert not alone.is_begun


@pytest.mark.parametrize("alone", [Wrapped, Purely], indirect=True)
def test_an_evaluation_after_the_step_that_forgets_no_grad_begins_nothing_and_the_next_steps_begin_as_before(
    alone: Wrapped,
) -> None:
    for number in range(3):
        alone.loss().backward()
        assert alone.optimizer.step()
        alone.ddp.eval()
        alone.loss().item()
        alone.ddp.train()
        assert not alone.is_begun
        alone.optimizer.zero_grad()
        assert alone.is_begun == (number == 0), "that of the first one might have been trained"


@pytest.mark.parametrize("alone", [Wrapped, Purely], indirect=True)
def test_a_step_whose_forward_pass_was_computed_before_zero_grad_begins_before_the_backward_pass(
    alone: Wrapped,
) -> None:
    alone.loss().backward()
    assert alone.optimizer.step()
    alone.ddp.eval()
    loss = alone.loss()
    alone.optimizer.zero_grad()
    assert alone.is_begun
    loss.backward()
    assert alone.optimizer.step()


def test_an_optimizer_whose_forward_passes_are_not_seen_begins_its_step_in_zero_grad(alone: Wrapped) -> None:
    other = nn.Linear(2, 2)
    optimizer = Optimizer(alone.manager, torch.optim.SGD(other.parameters(), lr=0.1))
    alone.loss().backward()
    assert alone.optimizer.step()
    for _ in range(2):
        optimizer.zero_grad()
        assert alone.is_begun
        for parameter in other.parameters():
            parameter.register_hook(lambda gradient: alone.manager.allreduce(gradient.clone()).wait() and None)
        other(torch.ones(1, 2)).sum().backward()
        assert optimizer.step()


def test_what_a_backward_pass_averages_before_any_forward_pass_is_refused_by_name(alone: Wrapped) -> None:
    weight = torch.ones(2, requires_grad=True)
    weight.register_hook(lambda gradient: alone.manager.allreduce(gradient.clone()).wait() and None)
    with pytest.raises(ConfigError, match=r"a backward pass comes first after zero_grad.*manager\.start_quorum\(\)"):
        weight.sum().backward()
    alone.manager.start_quorum()
    weight.sum().backward()
    assert alone.optimizer.step()


def test_another_thread_begins_no_step(alone: Wrapped) -> None:
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(alone.manager.num_participants).result() == 1, "in the last step"
        averages = pool.submit(alone.manager.allreduce, torch.ones(2))
        with pytest.raises(ConfigError, match="another thread than the loop comes first after zero_grad"):
            averages.result()
        pool.submit(alone.manager.report_error, RuntimeError("of a hook")).result()
        assert not alone.is_begun
    alone.loss().backward()
    assert "of a hook" in str(alone.manager.errored())
    assert not alone.optimizer.step(), "the error is one of the step that was to begin"
    assert alone.step()


class Array(Counting):
    """Its state has a large numpy array that the loop moves in each iteration, whether the step counts or not."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self.seen = np.zeros(300_000)
        super().__init__(*arguments, **options)

    def state(self) -> dict[str, Any]:
        return {**super().state(), "seen": self.seen}

    def load(self, state: dict[str, Any]) -> None:
        super().load(state)
        self.seen = state["seen"]

    def step(self) -> bool:
        counts = super().step()
        self.seen += 1
        return counts


def test_a_large_array_that_the_loop_changes_goes_back() -> None:
    run = Run(Array)
    joined = Array(run.server, "c", seed=7)
    assert not joined.step()
    run.end(joined)
    assert len({one.seen.tobytes() for one in (*run.at_work, joined)}) == 1  # type: ignore[attr-defined]


class Copying(Counting):
    """Its state function returns copies."""

    def state(self) -> dict[str, Any]:
        return {**super().state(), "average": self.average.clone()}


def test_a_state_function_that_returns_copies_is_no_loop_that_changes_something(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(coming_in, "MAX_COPIED_BYTES", 1024)
    run = Run(Copying)
    joined = Copying(run.server, "c", seed=7)
    with caplog.at_level(logging.WARNING, "torchft_ckpt"):
        assert not joined.step()
        assert joined.step()
    assert joined.manager.statistics().num_healed == 1 and "has changed what belongs" not in caplog.text
    run.end(joined)


@pytest.mark.parametrize("wait", [True, False])
def test_a_loop_that_says_whether_it_waits_for_each_quorum_comes_in(wait: bool) -> None:
    class Waits(Replica):
        def step(self) -> bool:
            before = self.manager.statistics().num_committed
            self.sgd.zero_grad()
            self.manager.start_quorum(wait=wait)
            self.model(torch.ones(2, 8)).square().mean().backward()
            for parameter in self.model.parameters():
                assert parameter.grad is not None
                self.manager.allreduce(parameter.grad).wait()
            if self.manager.should_commit():
                self.sgd.step()
            return self.manager.statistics().num_committed > before

    run = Run(Waits)
    joined = Waits(run.server, "c", seed=7)
    assert not joined.step()
    assert joined.step() and joined.manager.is_participating()
    run.end(joined)
    assert len({str(one.bits()) for one in (*run.at_work, joined)}) == 1


class Binarizing(Replica):
    """Computes with the signs of its weights, which it writes by `data`: no version says so."""

    def step(self) -> bool:
        before = self.manager.statistics().num_committed
        self.optimizer.zero_grad()
        kept = [parameter.detach().clone() for parameter in self.model.parameters()]
        for parameter in self.model.parameters():
            parameter.data.copy_(parameter.sign())
        if not hasattr(self, "ddp"):
            self.ddp = DistributedDataParallel(self.manager, self.model)
        self.ddp(torch.ones(2, 8)).square().mean().backward()
        for parameter, value in zip(self.model.parameters(), kept, strict=True):
            parameter.data.copy_(value)
        self.optimizer.step()
        return self.manager.statistics().num_committed > before


def test_who_comes_in_gets_the_weights_and_not_what_the_loop_computes_with() -> None:
    run = Run(Binarizing)
    joined = Binarizing(run.server, "c", seed=7)
    run.end(joined)
    assert len({str(one.bits()) for one in (*run.at_work, joined)}) == 1
    assert all(one.manager.statistics().num_discarded <= 1 for one in run.at_work)
