"""`Manager.scheduler`: the object that was given, in the state, whose `step` follows the steps of its optimizer that count."""

from __future__ import annotations

import contextlib
import copy
import pickle
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from support.fake_process_group import FakeFabric, FakeProcessGroup
from support.replicas import manager_of
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.optim import lr_scheduler

from torchft_ckpt import Checkpointer, DiLoCo, LighthouseServer, LocalSGD, Optimizer
from torchft_ckpt.checkpointing import StateDictLock
from torchft_ckpt.errors import ConfigError
from torchft_ckpt.manager.followers import Followers
from torchft_ckpt.manager.state_registry import StateRegistry

LIMIT = timedelta(seconds=20)

SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, warm_up),
    "StepLR": lambda o: lr_scheduler.StepLR(o, 2),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.2, total_steps=6),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 2),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, total_iters=2), lr_scheduler.ExponentialLR(o, 0.9)], [2]
    ),
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.LinearLR(o, total_iters=2), lr_scheduler.ExponentialLR(o, 0.9)]
    ),
    "SWALR": lambda o: torch.optim.swa_utils.SWALR(o, 0.05, anneal_epochs=3),
}


def warm_up(step: int) -> float:
    return min(1.0, (step + 1) / 3)


def sgd() -> torch.optim.SGD:
    weight = nn.Parameter(torch.ones(2))
    weight.grad = torch.ones(2)
    return torch.optim.SGD([weight], lr=0.1, momentum=0.9)


def rates(optimizer: torch.optim.Optimizer) -> tuple[float, float]:
    group = optimizer.param_groups[0]
    return group["lr"], group["momentum"]


def metric(scheduler: object, value: float) -> list[float]:
    return [value] if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau) else []


@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_scheduler_goes_through_its_rates_and_waits_in_steps_that_are_discarded(name: str) -> None:
    optimizer, plain = sgd(), sgd()
    expected, scheduler = SCHEDULERS[name](plain), SCHEDULERS[name](optimizer)
    followers = Followers(StateRegistry(StateDictLock()))
    followers.wraps(optimizer)
    assert followers.scheduler(scheduler, "scheduler") is scheduler
    assert isinstance(scheduler, type(expected)) and type(scheduler).__name__ == name
    for number, counts in enumerate([True, False, True, True, False, False, True]):
        followers.begins(is_torn=False)
        followers.decided(counts=counts)
        if counts:
            optimizer.step()
            followers.optimizer_ended(optimizer, has_stepped=True)
            plain.step()
            expected.step(*metric(expected, float(number)))
        scheduler.step(*metric(scheduler, float(number)))
        assert rates(optimizer) == rates(plain)
    assert scheduler.state_dict().keys() == expected.state_dict().keys(), "nothing of ours travels"


@pytest.mark.filterwarnings("ignore:Detected call", "ignore:Seems like")
@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))])  # noqa: S301 - its own
@pytest.mark.parametrize("name", ["LambdaLR", "OneCycleLR", "ReduceLROnPlateau", "SequentialLR"])
def test_a_copy_is_a_scheduler_of_its_plain_class(copied: Callable[[Any], Any], name: str) -> None:
    scheduler = SCHEDULERS[name](sgd())
    plain = type(scheduler)
    twin = copied(Followers(StateRegistry(StateDictLock())).scheduler(scheduler, "scheduler"))
    assert type(twin) is plain and type(scheduler) is not plain
    twin.step(*metric(twin, 1.0))
    with pytest.raises(ConfigError, match="before the first step"):
        scheduler.step(*metric(scheduler, 1.0))


def test_what_it_cannot_follow_is_refused() -> None:
    followers = Followers(StateRegistry(StateDictLock()))
    optimizer = sgd()
    scheduler = followers.scheduler(lr_scheduler.StepLR(optimizer, 2), "scheduler")
    with pytest.raises(ConfigError, match="this StepLR follows a Manager already"):
        followers.scheduler(scheduler, "other")
    with pytest.raises(ConfigError, match="registered under 'scheduler' already"):
        followers.scheduler(lr_scheduler.StepLR(optimizer, 2), "scheduler")
    with pytest.raises(ConfigError, match="Schedule is no LRScheduler of torch: register it by register_state_dict_fn"):
        followers.scheduler(type("Schedule", (), {})(), "mine")
    accelerated = type("AcceleratedScheduler", (), {"scheduler": lr_scheduler.StepLR(optimizer, 2)})()
    with pytest.raises(
        ConfigError, match=r"AcceleratedScheduler wraps a scheduler of torch, in its attribute `scheduler`"
    ):
        followers.scheduler(accelerated, "accelerated")


class Group:
    """A replica group of one rank that trains alone."""

    def __init__(self, lighthouse: LighthouseServer, pairs: int = 1) -> None:
        self.models = [nn.Linear(3, 3) for _ in range(pairs)]
        self.inner = [torch.optim.AdamW(model.parameters(), lr=0.1) for model in self.models]
        self.manager = manager_of(lighthouse, self.load, self.state, name="group", pg=FakeProcessGroup(FakeFabric()))

    def load(self, state: dict[str, Any]) -> None:
        for module, saved in zip([*self.models, *self.inner], state["all"], strict=True):
            module.load_state_dict(saved)

    def state(self) -> dict[str, Any]:
        return {"all": [module.state_dict() for module in [*self.models, *self.inner]]}

    def backward(self, *numbers: int, fails: bool = False) -> None:
        for number in numbers or [0]:
            self.models[number](torch.ones(2, 3)).square().mean().backward()
        if fails:
            self.manager.report_error(RuntimeError("a bad batch"))

    def scaled_backward(self, scaler: torch.amp.GradScaler, *, overflows: bool = False, fails: bool = False) -> None:
        loss = self.models[0](torch.ones(2, 3)).square().mean()
        scaler.scale(loss * (torch.inf if overflows else 1.0)).backward()
        if fails:
            self.manager.report_error(RuntimeError("a bad batch"))

    def weights(self) -> list[float]:
        return [value for weights in self.models[0].parameters() for value in weights.flatten().tolist()]

    def rate(self, number: int = 0) -> float:
        return round(float(self.inner[number].param_groups[0]["lr"]), 10)


@contextlib.contextmanager
def alone(pairs: int = 1) -> Iterator[Group]:
    lighthouse = LighthouseServer("127.0.0.1:0", min_replicas=1)
    group = Group(lighthouse, pairs)
    try:
        yield group
    finally:
        group.manager.shutdown()
        lighthouse.shutdown()


def halving(optimizer: torch.optim.Optimizer) -> lr_scheduler.ExponentialLR:
    return lr_scheduler.ExponentialLR(optimizer, 0.5)


@pytest.mark.parametrize("of_wrapper", [False, True])
def test_step_returns_whether_it_counts_and_the_scheduler_follows(of_wrapper: bool) -> None:
    with alone() as group:
        optimizer = Optimizer(group.manager, group.inner[0])
        scheduler = group.manager.scheduler(halving(optimizer if of_wrapper else group.inner[0]))
        seen = []
        for fails in [False, True, False]:
            optimizer.zero_grad()
            group.backward(fails=fails)
            seen.append(optimizer.step())
            scheduler.step()
        assert seen == [True, False, True]
        assert (group.rate(), group.manager.current_step()) == (0.025, 2)
        assert group.manager.hooks.registry.capture()["scheduler"]["last_epoch"] == 2


def test_a_scheduler_that_does_not_follow_stops_the_next_step_the_save_and_the_hand_over(tmp_path: Path) -> None:
    with alone() as group:
        optimizer = Optimizer(group.manager, group.inner[0])
        scheduler = group.manager.scheduler(halving(optimizer), "warm-up")
        checkpointer = Checkpointer(str(tmp_path), manager=group.manager)
        optimizer.zero_grad()
        group.backward()
        optimizer.step()
        for event in (optimizer.zero_grad, group.manager.hand_over, checkpointer.save):
            with pytest.raises(
                ConfigError, match=r"the scheduler 'warm-up' has not followed .*: call its step\(\) after"
            ):
                event()
        scheduler.step()
        saved = checkpointer.save().result(60)
        optimizer.zero_grad()
        checkpointer.shutdown()
        assert (saved.step, group.rate()) == (1, 0.05)


def test_an_exception_before_the_scheduler_does_not_leave_it_behind_in_silence() -> None:
    with alone() as group:
        optimizer = Optimizer(group.manager, group.inner[0])
        scheduler = group.manager.scheduler(halving(optimizer))
        optimizer.zero_grad()
        group.backward()
        with contextlib.suppress(RuntimeError):
            optimizer.step()
            raise RuntimeError("the logger's disk is full")
        optimizer_cleared = False
        with pytest.raises(ConfigError, match="the next step begins, and the scheduler 'scheduler' has not followed"):
            optimizer.zero_grad()
            optimizer_cleared = True
        scheduler.step()
        optimizer.zero_grad()
        group.backward(fails=True)
        assert (optimizer_cleared, optimizer.step(), group.rate()) == (False, False, 0.05)


def test_a_loop_without_the_wrapper_steps_its_schedulers_after_the_decision() -> None:
    with alone() as group:
        manager, inner = group.manager, group.inner[0]
        manager.guard_optimizer(inner)
        scheduler = manager.scheduler(halving(inner))
        for fails in [True, False]:
            manager.start_quorum()
            inner.zero_grad()
            group.backward(fails=fails)
            if manager.should_commit():
                inner.step()
            scheduler.step()
        assert group.rate() == 0.05


def test_of_two_optimizers_that_share_a_step_each_scheduler_follows_its_own() -> None:
    with alone(pairs=2) as group:
        optimizers = [Optimizer(group.manager, inner) for inner in group.inner]
        first, second = (group.manager.scheduler(halving(o), f"scheduler {n}") for n, o in enumerate(optimizers))
        for optimizer in optimizers:
            optimizer.zero_grad()
        group.backward(0, 1)
        optimizers[0].step()
        with pytest.raises(ConfigError, match="its optimizer has not taken"):
            second.step()
        optimizers[1].step()
        first.step()
        second.step()
        assert (group.rate(0), group.rate(1)) == (0.05, 0.05)


def test_of_two_optimizers_with_a_step_each_the_one_that_waits_owes_nothing() -> None:
    with alone(pairs=2) as group:
        optimizers = [Optimizer(group.manager, inner) for inner in group.inner]
        schedulers = [group.manager.scheduler(halving(o), f"scheduler {n}") for n, o in enumerate(optimizers)]
        for number in [0, 0, 1, 0]:
            optimizers[number].zero_grad()
            group.backward(number)
            optimizers[number].step()
            schedulers[number].step()
        assert (group.rate(0), group.rate(1)) == (0.0125, 0.05)


def test_the_step_by_which_torch_makes_state_moves_no_schedule() -> None:
    """`get_optimizer_state_dict` steps an optimizer that has none, with a learning rate of 0."""
    with alone(pairs=2) as group:
        optimizers = [Optimizer(group.manager, inner) for inner in group.inner]
        schedulers = [group.manager.scheduler(halving(o), f"scheduler {n}") for n, o in enumerate(optimizers)]
        optimizers[0].zero_grad()
        group.backward(0)
        optimizers[0].step()
        schedulers[0].step()
        get_optimizer_state_dict(group.models[1], group.inner[1])
        optimizers[0].zero_grad()
        assert (group.rate(0), group.rate(1)) == (0.05, 0.1)


@pytest.mark.parametrize("loads", ["scheduler", "manager"])
def test_what_is_loaded_by_hand_owes_nothing(loads: str) -> None:
    with alone() as group:
        optimizer = Optimizer(group.manager, group.inner[0])
        scheduler = group.manager.scheduler(halving(optimizer))
        saved = copy.deepcopy((scheduler.state_dict(), group.manager.state_dict(), group.inner[0].state_dict()))
        optimizer.zero_grad()
        group.backward()
        optimizer.step()
        group.inner[0].load_state_dict(saved[2])
        if loads == "scheduler":
            scheduler.load_state_dict(saved[0])
        else:
            group.manager.load_state_dict(saved[1])
        scheduler.step()
        optimizer.zero_grad()
        assert group.rate() == 0.1


def test_an_optimizer_that_raises_in_its_step_leaves_nothing_to_follow() -> None:
    """The replica heals then, schedule and all."""
    with alone(pairs=2) as group:
        optimizers = [Optimizer(group.manager, inner) for inner in group.inner]
        for number, optimizer in enumerate(optimizers):
            group.manager.scheduler(halving(optimizer), f"scheduler {number}")
        group.inner[1].register_step_post_hook(lambda *_: 1 / 0)
        for optimizer in optimizers:
            optimizer.zero_grad()
        group.backward(0, 1)
        optimizers[0].step()
        with pytest.raises(ZeroDivisionError):
            optimizers[1].step()
        group.manager.start_quorum(wait=False)  # there is nobody to heal from
        assert group.manager.is_behind


def test_the_parts_of_a_container_of_optimizers_each_have_a_scheduler() -> None:
    class Container(torch.optim.Optimizer):
        """Steps several as one, as torchtitan's does."""

        def __init__(self, parts: list[torch.optim.Optimizer]) -> None:
            self.parts = parts
            super().__init__([p for part in parts for group in part.param_groups for p in group["params"]], {})

        def step(self, closure: None = None) -> None:  # type: ignore[override]
            for part in self.parts:
                part.step()

    with alone(pairs=2) as group:
        optimizer = Optimizer(group.manager, Container(list(group.inner)))
        schedulers = [group.manager.scheduler(halving(o), f"scheduler {n}") for n, o in enumerate(group.inner)]
        for fails in [False, True]:
            optimizer.zero_grad()
            group.backward(0, 1, fails=fails)
            optimizer.step()
            for scheduler in schedulers:
                scheduler.step()
        assert (group.rate(0), group.rate(1)) == (0.05, 0.05)


@pytest.mark.parametrize("is_early", [True, False], ids=["given before the loop is made", "given after it"])
def test_the_scheduler_of_an_outer_optimizer_moves_with_each_round_that_counts_however_it_is_called(
    is_early: bool,
) -> None:
    with alone() as group:
        outer = torch.optim.SGD(group.models[0].parameters(), lr=0.8)
        scheduler = group.manager.scheduler(halving(outer)) if is_early else None
        loop = DiLoCo(group.manager, [group.models[0]], group.inner[0], outer, sync_every=2)
        scheduler = scheduler or group.manager.scheduler(halving(outer))
        assert "scheduler" not in group.manager.hooks.registry._moving, "inner steps would have to wait for it"
        rates = []
        with loop:
            for inner_step in range(6):
                group.models[0](torch.ones(1, 3)).sum().backward()
                group.inner[0].step()
                for _ in range(inner_step % 3):
                    scheduler.step()
                rates.append(outer.param_groups[0]["lr"])
        assert rates == [0.8, 0.4, 0.4, 0.2, 0.2, 0.1]


def test_an_outer_scheduler_that_needs_a_metric_is_refused_when_the_loop_is_made() -> None:
    with alone() as group:
        outer = torch.optim.SGD(group.models[0].parameters(), lr=0.8)
        group.manager.scheduler(lr_scheduler.ReduceLROnPlateau(outer))
        with pytest.raises(ConfigError, match=r"needs a metric.*round_counted"):
            DiLoCo(group.manager, [group.models[0]], group.inner[0], outer, sync_every=2)


def test_the_schedulers_of_inner_optimizers_of_an_outer_loop_are_refused() -> None:
    with alone() as group:
        group.manager.scheduler(halving(group.inner[0]))
        loop = LocalSGD(group.manager, group.models[0], group.inner[0], sync_every=1)
        with pytest.raises(ConfigError, match="rounds of DiLoCo or LocalSGD"), loop:
            group.backward()
            group.inner[0].step()


def scaling(group: Group) -> torch.amp.GradScaler:
    return group.manager.grad_scaler(torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2))


def test_a_scaler_grows_in_steps_that_count_and_keeps_its_scale_and_count_in_others() -> None:
    with alone() as group:
        optimizer, scaler = Optimizer(group.manager, group.inner[0]), scaling(group)
        seen = []
        for fails in [False, True, True, False]:
            optimizer.zero_grad()
            group.scaled_backward(scaler, fails=fails)
            stepped = scaler.step(optimizer)
            scaler.update()
            seen.append((stepped, scaler.get_scale(), scaler._get_growth_tracker()))
        assert seen == [(True, 8.0, 1), (False, 8.0, 1), (False, 8.0, 1), (True, 16.0, 0)]
        assert group.manager.hooks.registry.capture()["grad_scaler"]["scale"] == 16.0


def test_an_overflow_counts_as_a_step_in_which_weights_and_schedule_stay() -> None:
    with alone() as group:
        optimizer, scaler = Optimizer(group.manager, group.inner[0]), scaling(group)
        scheduler = group.manager.scheduler(halving(optimizer))
        before = group.weights()
        optimizer.zero_grad()
        group.scaled_backward(scaler, overflows=True)
        assert scaler.step(optimizer) is False
        scaler.update()
        scheduler.step()
        optimizer.zero_grad()
        assert (group.weights() == before, group.manager.current_step()) == (True, 1)
        assert (scaler.get_scale(), group.rate()) == (4.0, 0.1)


def test_an_overflow_in_a_step_that_is_discarded_changes_no_scale() -> None:
    """Another group may have found none: what it had was not averaged."""
    with alone() as group:
        optimizer, scaler = Optimizer(group.manager, group.inner[0]), scaling(group)
        optimizer.zero_grad()
        group.scaled_backward(scaler, overflows=True, fails=True)
        assert scaler.step(optimizer) is False
        scaler.update()
        optimizer.zero_grad()
        group.scaled_backward(scaler)
        assert (scaler.step(optimizer), scaler.get_scale(), group.manager.current_step()) == (True, 8.0, 1)


def test_an_update_that_is_missing_stops_the_next_step() -> None:
    with alone() as group:
        optimizer, scaler = Optimizer(group.manager, group.inner[0]), scaling(group)
        optimizer.zero_grad()
        group.scaled_backward(scaler)
        scaler.step(optimizer)
        with pytest.raises(
            ConfigError, match=r"the gradient scaler 'grad_scaler' .*: call its update\(\) after scaler.step"
        ):
            optimizer.zero_grad()
        scaler.update()
        optimizer.zero_grad()


def test_a_step_of_an_optimizer_that_is_not_scaled_needs_no_update() -> None:
    with alone(pairs=2) as group:
        scaling(group)
        optimizer = Optimizer(group.manager, group.inner[1])
        for _ in range(2):
            optimizer.zero_grad()
            group.backward(1)
            assert optimizer.step()


def test_a_scaler_follows_a_loop_without_the_wrapper() -> None:
    with alone() as group:
        manager, inner, scaler = group.manager, group.inner[0], scaling(group)
        manager.guard_optimizer(inner)
        seen = []
        for fails in [True, False]:
            manager.start_quorum()
            inner.zero_grad()
            group.scaled_backward(scaler, fails=fails)
            if manager.should_commit():
                scaler.step(inner)
                scaler.update()
            seen.append(scaler._get_growth_tracker())
        assert seen == [0, 1]


def test_a_scaler_is_given_the_wrapper_and_not_the_optimizer_in_it() -> None:
    with alone() as group:
        optimizer, scaler = Optimizer(group.manager, group.inner[0]), scaling(group)
        optimizer.zero_grad()
        group.scaled_backward(scaler)
        for given in (scaler.unscale_, scaler.step):
            with pytest.raises(ConfigError, match="give unscale_ and step that Optimizer"):
                given(group.inner[0])
        scaler.unscale_(optimizer)
        assert scaler.step(optimizer)
        scaler.update()


def test_a_scaler_that_is_not_enabled_is_registered_and_left_alone() -> None:
    with alone() as group:
        scaler = torch.amp.GradScaler("cpu", enabled=False)
        assert type(group.manager.grad_scaler(scaler)) is torch.amp.GradScaler
        optimizer = Optimizer(group.manager, group.inner[0])
        for fails in [False, True]:
            optimizer.zero_grad()
            group.scaled_backward(scaler, fails=fails)
            assert scaler.step(optimizer) is not fails
            scaler.update()


def test_a_copy_of_a_scaler_is_plain_and_what_is_no_scaler_is_refused() -> None:
    with alone() as group:
        scaler = scaling(group)
        for twin in (copy.deepcopy(scaler), pickle.loads(pickle.dumps(scaler))):  # noqa: S301 - its own
            assert (type(twin), twin.get_scale()) == (torch.amp.GradScaler, 8.0)
        with pytest.raises(ConfigError, match="this GradScaler follows a Manager already"):
            group.manager.grad_scaler(scaler, "other")
        with pytest.raises(ConfigError, match=r"StepLR is no torch.amp.GradScaler"):
            group.manager.grad_scaler(lr_scheduler.StepLR(group.inner[0], 2), "other")  # type: ignore[type-var]
