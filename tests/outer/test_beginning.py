"""When an outer loop begins: in the first forward pass of what it trains, not where it is entered; what it can go back to."""

from __future__ import annotations

from typing import Any
from unittest.mock import create_autospec

import pytest
import torch
from support.fake_outer_manager import FakeOuterManager, Hub
from support.replicas import manager_of
from torch import nn

from torchft_ckpt import DiLoCo, LighthouseServer, LocalSGD, Manager
from torchft_ckpt.core.training.outer_schedule import OuterSchedule
from torchft_ckpt.errors import ConfigError
from torchft_ckpt.outer.fragment import InnerStateBackup
from torchft_ckpt.process_group import ProcessGroupDummy


class CountingManager(FakeOuterManager):
    """Counts the quorums; where there are `others`, what it gets of them are parameters of this value."""

    num_quorums = 0
    others: float | None = None
    loop: Any = None

    def start_quorum(self, **_: object) -> None:
        self.num_quorums += 1
        if self.others is not None:
            state = self.loop.state_dict()
            backups = [
                {name: torch.full_like(p, self.others) for name, p in f.items()} for f in state["original_parameters"]
            ]
            self.others = None
            self.loop._load_state({**state, "original_parameters": backups})


def build(
    kind: str = "diloco", others: float | None = None
) -> tuple[nn.Module, torch.optim.Optimizer, CountingManager, Any]:
    torch.manual_seed(0)
    model, manager = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)), CountingManager(Hub(1), 0)
    inner = torch.optim.AdamW(model.parameters(), lr=0.1)
    outer = torch.optim.SGD(model.parameters(), lr=0.7)
    loop: Any = LocalSGD(manager, model, inner, 4) if kind == "local_sgd" else DiLoCo(manager, [model], inner, outer, 4)
    manager.loop, manager.others = loop, others
    return model, inner, manager, loop


def step(model: nn.Module, inner: torch.optim.Optimizer, forward: Any = None) -> None:
    inner.zero_grad()
    (forward or model)(torch.ones(5, 3)).square().mean().backward()
    inner.step()


def test_the_first_forward_pass_begins_and_not_the_with_statement() -> None:
    model, _, manager, loop = build()
    with loop as name:
        assert (name, manager.num_quorums) == (loop, 0)
        nn.Linear(1, 1)(torch.ones(1))  # of something else
        assert manager.num_quorums == 0
        model(torch.ones(1, 3))
        assert manager.num_quorums == 1
        model(torch.ones(1, 3))
        assert manager.num_quorums == 1


def test_parameters_of_others_are_there_before_the_first_forward_pass() -> None:
    model, inner, _, loop = build(others=0.5)
    seen: list[float] = []
    model[0].register_forward_pre_hook(lambda module, _: seen.append(float(module.weight.detach().mean())))
    with loop:
        step(model, inner)
    assert seen == [0.5]


def test_where_no_forward_pass_is_seen_gradients_of_other_parameters_move_nothing() -> None:
    model, inner, manager, loop = build(others=0.5)

    def forward(inputs: torch.Tensor) -> torch.Tensor:
        return inputs @ model[0].weight.T

    with loop:
        step(model, inner, forward)
        assert manager.num_quorums == 1
        assert all(bool((param == 0.5).all()) for param in model.parameters())
        step(model, inner, forward)
        assert not bool((model[0].weight == 0.5).all())


def test_a_beginning_that_fails_is_tried_again() -> None:
    model, inner, manager, loop = build()
    with loop:
        manager.offer_state = lambda: (_ for _ in ()).throw(RuntimeError("nobody is there"))  # type: ignore[method-assign]
        with pytest.raises(RuntimeError, match="nobody"):
            step(model, inner)
        del manager.offer_state
        step(model, inner)
        assert manager.num_quorums == 1


def test_what_waits_for_a_forward_pass_goes_with_the_loop() -> None:
    model, _, manager, loop = build()
    with loop:
        pass
    model(torch.ones(1, 3))
    assert manager.num_quorums == 0


def test_sync_averages_at_once_and_counts_anew() -> None:
    model, inner, manager, loop = build("local_sgd")
    with pytest.raises(RuntimeError, match="not entered"):
        loop.sync()
    with loop:
        for _ in range(3):
            step(model, inner)
        loop.sync()
        assert manager.current_step() == 1
        for _ in range(3):
            step(model, inner)
        assert manager.current_step() == 1
        step(model, inner)
        assert manager.current_step() == 2


class Container(torch.optim.Optimizer):
    """Made of others, one for each parameter, as training frameworks have it; its own state is empty."""

    def __init__(self, params: list[torch.Tensor]) -> None:
        self.optimizers = [torch.optim.AdamW([param], lr=0.1) for param in params]
        super().__init__(params, {})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for optimizer in self.optimizers:
            optimizer.step()

    def state_dict(self) -> dict[str, Any]:
        return {str(index): optimizer.state_dict() for index, optimizer in enumerate(self.optimizers)}


class Secretive(torch.optim.Optimizer):
    """What it remembers is where nobody finds it."""

    def __init__(self, params: list[torch.Tensor]) -> None:
        super().__init__(params, {})
        self.moments: list[torch.Tensor] = []

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.moments.append(torch.ones(1))

    def state_dict(self) -> dict[str, Any]:
        return {"moments": self.moments}


def test_a_discarded_round_takes_the_state_of_contained_optimizers_back() -> None:
    param = nn.Parameter(torch.ones(3))
    container = Container([param])
    backup = InnerStateBackup(container, [param], torch.device("cpu"), pin_memory=False)
    param.grad = torch.ones(3)
    container.step()
    backup.save()
    before = {key: value.clone() for key, value in container.optimizers[0].state[param].items()}
    container.step()
    backup.check_found()
    backup.restore()
    after = container.optimizers[0].state[param]
    assert after.keys() == before.keys()
    assert all(torch.equal(after[key], before[key]) for key in before)
    assert param not in container.state


def test_an_inner_state_that_cannot_be_set_back_is_refused_by_name_before_the_first_round() -> None:
    model, _, manager, _ = build()
    inner = Secretive(list(model.parameters()))
    outer = torch.optim.SGD(model.parameters(), lr=0.7)
    with DiLoCo(manager, [model], inner, outer, 1), pytest.raises(ConfigError, match="inner optimizer Secretive"):
        step(model, inner)
    assert manager.current_step() == 0
    with DiLoCo(manager, [model], inner, outer, 1, restore_inner_optimizer=False):
        step(model, inner)
    assert manager.current_step() == 1


def test_an_optimizer_that_remembers_nothing_is_no_complaint() -> None:
    model, _, manager, _ = build()
    inner, outer = torch.optim.SGD(model.parameters(), lr=0.1), torch.optim.SGD(model.parameters(), lr=0.7)
    with DiLoCo(manager, [model], inner, outer, 1):
        step(model, inner)
    assert manager.current_step() == 1


def test_an_outer_loop_tells_its_manager_the_schedule_by_which_it_knows_the_places_of_others() -> None:
    lighthouse = LighthouseServer("127.0.0.1:0", min_replicas=1)
    manager = manager_of(lighthouse, None, None, name="group_0", pg=ProcessGroupDummy(0, 1))
    try:
        assert manager.hooks.outer_schedule is None
        model = nn.Linear(3, 2)
        inner, outer = torch.optim.SGD(model.parameters()), torch.optim.SGD(model.parameters())
        DiLoCo(manager, [model], inner, outer, 4, fragment_sync_delay=1)
        assert manager.hooks.outer_schedule == OuterSchedule(4, sync_delay=1)
    finally:
        manager.shutdown()
        lighthouse.shutdown()


def test_a_users_test_may_give_an_outer_loop_a_stand_in_of_a_manager() -> None:
    """`create_autospec` knows methods and properties; what a Manager's constructor assigns, it does not have."""
    stand_in = create_autospec(Manager)
    stand_in.current_step.return_value = 0
    model = nn.Linear(2, 2)
    optimizers = [torch.optim.SGD(model.parameters(), lr=1.0) for _ in range(2)]
    with DiLoCo(stand_in, [model], *optimizers, sync_every=2):
        assert stand_in.hooks.outer_schedule.sync_every == 2
