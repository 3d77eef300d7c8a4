"""The wrapper is an optimizer to whatever takes one: schedulers, hooks, torch's state dict functions."""

from __future__ import annotations

import contextlib
import copy
import inspect
import logging
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.replicas import lighthouse_of, manager_of
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.optim import lr_scheduler

from torchft_ckpt import DistributedDataParallel, Optimizer
from torchft_ckpt.errors import ConfigError
from torchft_ckpt.manager.optimizer_settings import guard_steps


class Votes:
    """Stands for a manager: answers votes by script, and notes what is asked of it."""

    is_in_state_dict_fn = False

    def __init__(self, *answers: bool) -> None:
        self.answers, self.hooks = list(answers), self
        self.said: list[str] = []

    def guard_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        guard_steps(optimizer, lambda: self.said.append("locked"), self.allow_state_dict_read)

    def wraps_optimizer(self, optimizer: object) -> None: ...

    def begins_step(self, optimizer: object) -> bool:
        return True

    def takes_step(self, optimizer: object) -> None: ...

    def took_step(self, optimizer: object, *, has_stepped: bool = True) -> None: ...

    def start_quorum(self) -> None: ...

    def should_commit(self) -> bool:
        return self.answers.pop(0) if self.answers else True

    def allow_state_dict_read(self) -> None:
        self.said.append("free")

    taking_step = contextlib.nullcontext


def wrapped(*answers: bool) -> tuple[Optimizer, torch.optim.Optimizer, Any]:
    weight = torch.nn.Parameter(torch.ones(2))
    weight.grad = torch.ones(2)
    inner, votes = torch.optim.SGD([weight], lr=0.1, momentum=0.9), Votes(*answers)
    return Optimizer(votes, inner), inner, votes  # type: ignore[arg-type]


SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda epoch: 0.9**epoch),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, lambda _: 0.9),
    "StepLR": lambda o: lr_scheduler.StepLR(o, 2),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [1, 3]),
    "ConstantLR": lambda o: lr_scheduler.ConstantLR(o, total_iters=2),
    "LinearLR": lambda o: lr_scheduler.LinearLR(o, total_iters=3),
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.9),
    "PolynomialLR": lambda o: lr_scheduler.PolynomialLR(o, total_iters=4),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 4),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 2),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, step_size_up=2),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.2, total_steps=6),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, total_iters=2), lr_scheduler.ExponentialLR(o, 0.9)], [2]
    ),
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.LinearLR(o, total_iters=2), lr_scheduler.ExponentialLR(o, 0.9)]
    ),
    "SWALR": lambda o: torch.optim.swa_utils.SWALR(o, 0.05, anneal_epochs=3),
}


def rates(make: Callable[[torch.optim.Optimizer], Any], optimizer: torch.optim.Optimizer) -> list[tuple[float, float]]:
    scheduler = make(optimizer)
    seen = []
    for number in range(5):
        group = optimizer.param_groups[0]
        seen.append((float(group["lr"]), float(group["momentum"])))
        optimizer.step()
        scheduler.step(*([float(number)] if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau) else []))
    return seen


@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_scheduler_of_the_wrapper_does_what_it_does_of_the_optimizer_itself(name: str) -> None:
    wrapper, inner, _ = wrapped()
    assert rates(SCHEDULERS[name], wrapper) == rates(SCHEDULERS[name], wrapped()[1])
    assert wrapper.defaults is inner.defaults


def test_all_schedulers_of_torch_are_in_the_table() -> None:
    named = {
        name for name, kind in vars(lr_scheduler).items() if inspect.isclass(kind) and name in lr_scheduler.__all__
    }
    assert named - {"LRScheduler"} == set(SCHEDULERS) - {"SWALR"}


def test_step_hooks_run_where_the_step_counts_while_the_state_is_locked() -> None:
    wrapper, _, votes = wrapped(True, False, True)
    wrapper.register_step_pre_hook(lambda *_: votes.said.append("before"))
    handle = wrapper.register_step_post_hook(lambda *_: votes.said.append("after"))
    wrapper.step()
    assert votes.said[:4] == ["locked", "before", "after", "free"]
    votes.said.clear()
    wrapper.step()
    assert votes.said == []
    handle.remove()
    wrapper.step()
    assert "after" not in votes.said


def test_state_dict_hooks_are_those_of_the_optimizer() -> None:
    wrapper, inner, _ = wrapped()
    said: list[str] = []
    wrapper.register_state_dict_pre_hook(lambda _: said.append("saves"))
    wrapper.register_state_dict_post_hook(lambda _, state: {**state, "mark": 7})
    wrapper.register_load_state_dict_pre_hook(lambda _, state: said.append("loads"))
    wrapper.register_load_state_dict_post_hook(lambda _: said.append("loaded"))
    state = wrapper.state_dict()
    wrapper.load_state_dict(inner.state_dict())
    assert (state["mark"], said) == (7, ["saves", "saves", "loads", "loaded"])


def test_every_public_method_and_attribute_of_an_optimizer_is_there() -> None:
    wrapper, inner, _ = wrapped()
    assert [
        name for name in [*vars(inner), *dir(torch.optim.Optimizer)] if name[0] != "_" and not hasattr(wrapper, name)
    ] == []


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_copy_is_refused_and_what_to_copy_is_named(copied: Callable[[object], object]) -> None:
    with pytest.raises(ConfigError, match="two of them would do so twice; copy or save its `state_dict"):
        copied(wrapped()[0])


def test_a_copy_of_what_holds_a_wrapper_is_refused_by_name() -> None:
    scheduler = lr_scheduler.OneCycleLR(wrapped()[0], 0.2, total_steps=6)
    with pytest.raises(ConfigError, match="Optimizer is not copied"):
        copy.deepcopy(scheduler)
    assert copy.deepcopy(scheduler.state_dict())["total_steps"] == 6


@pytest.mark.parametrize("of_wrapper", [False, True])
@pytest.mark.parametrize("use_async_quorum", [False, True])
def test_a_state_dict_function_that_steps_the_optimizer_is_warned_of(
    of_wrapper: bool, use_async_quorum: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """torch's get_optimizer_state_dict does, with the optimizer that it is given; nobody votes then."""
    server = lighthouse_of(1)
    model = torch.nn.Linear(2, 2)
    adam = torch.optim.Adam(model.parameters())
    optimizers = [adam]
    manager = manager_of(
        server,
        lambda _: None,
        lambda: get_optimizer_state_dict(model, optimizers[-1]),
        use_async_quorum=use_async_quorum,
    )
    optimizer = Optimizer(manager, adam)
    optimizers += [optimizer] * of_wrapper
    with caplog.at_level(logging.WARNING, "torchft_ckpt.manager"):
        for _ in range(2):
            manager.hooks.registry.capture()
            optimizer.zero_grad()
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
    assert sum("return optimizer.state_dict() instead" in message for message in caplog.messages) == 1
    assert (manager.current_step(), {int(state["step"]) for state in adam.state.values()}) == (2, {3})


def test_a_load_that_steps_the_optimizer_keeps_the_lock_to_its_end() -> None:
    server = lighthouse_of(1)
    adam = torch.optim.Adam([torch.nn.Parameter(torch.ones(2))])
    held: list[bool] = []

    def load(_: object) -> None:
        adam.step()
        held.append(manager.state_dict_lock.held_for_write())

    manager = manager_of(server, load, adam.state_dict)
    manager.guard_optimizer(adam)
    manager.hooks.registry.load({"default": {}})
    assert held == [True]


@pytest.mark.slow
@pytest.mark.parametrize("what", ["step", "train step"])
def test_a_step_that_torch_compiles_is_a_step(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As torch's tutorial compiles `lambda: optimizer.step()`: what asks the other groups is left out of the graph."""
    # Groups that are threads of one process, as in other tests, may leave theirs behind in torch.
    monkeypatch.setattr(torch.nn.parallel.DistributedDataParallel, "_active_ddp_module", None)
    server = lighthouse_of(1)
    model = torch.nn.Linear(2, 2)
    adamw = torch.optim.AdamW(model.parameters())
    manager = manager_of(server, lambda _: None, lambda: {"model": model.state_dict()})
    ddp, optimizer = DistributedDataParallel(manager, model), Optimizer(manager, adamw)
    step = torch.compile(lambda: optimizer.step(), backend="eager") if what == "step" else optimizer.step

    def train() -> bool:
        optimizer.zero_grad()
        ddp(torch.ones(1, 2)).sum().backward()
        return step()

    compiled = torch.compile(train, backend="eager") if what == "train step" else train
    assert [compiled() for _ in range(3)] == [True] * 3
    assert manager.current_step() == 3
