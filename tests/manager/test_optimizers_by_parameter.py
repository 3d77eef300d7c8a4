"""Groups, and starts from checkpoints, whose scripts name optimizers or parameters in another order: each gets its own state."""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from support.replicas import Replica, shutdown
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

from torchft_ckpt import Checkpointer, LighthouseServer, Optimizer
from torchft_ckpt.checkpointing import StateDictLock
from torchft_ckpt.manager.state_registry import StateRegistry

RATES = {"front": 0.01, "back": 0.05}


class TwoOptimizers(Replica):
    """Two layers of one shape, an optimizer for each, under keys of their own.

    Args:
        order: in which they are guarded.
        is_stale: load_state_dict leaves learning rates alone.
        is_reversed: the optimizers get their parameters in the other order.
        as_list: the optimizers are a list in the state, in the order of guarding.
    """

    def __init__(
        self,
        lighthouse: LighthouseServer,
        name: str,
        order: tuple[str, ...] = ("front", "back"),
        *,
        is_stale: bool = False,
        is_reversed: bool = False,
        as_list: bool = False,
        **options: Any,
    ) -> None:
        self.order, self.is_stale, self.is_reversed, self.as_list = order, is_stale, is_reversed, as_list
        super().__init__(lighthouse, name, **options)
        self.wrapped = [self.optimizer, Optimizer(self.manager, self.optimizers[order[1]])]

    def build(self) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        parts = {"front": model[0], "back": model[1]}
        self.optimizers = {
            name: torch.optim.Adam([*part.parameters()][:: -1 if self.is_reversed else 1], lr=RATES[name])
            for name, part in parts.items()
        }
        return model, self.optimizers[self.order[0]]

    def state(self) -> dict[str, Any]:
        states = {name: optimizer.state_dict() for name, optimizer in self.optimizers.items()}
        return {
            "model": self.model.state_dict(),
            "optim": [states[name] for name in self.order] if self.as_list else states,
        }

    def load(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        for name, optimizer in self.optimizers.items():
            rates = [group["lr"] for group in optimizer.param_groups]
            optimizer.load_state_dict(state["optim"][self.order.index(name) if self.as_list else name])
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = rate if self.is_stale else group["lr"]

    def step(self) -> bool:
        before = self.manager.statistics().num_committed
        for optimizer in self.wrapped:
            optimizer.zero_grad()
        self.model(torch.ones(2, 8)).square().mean().backward()
        for parameter in self.model.parameters():
            assert parameter.grad is not None
            self.manager.allreduce(parameter.grad)
        for optimizer in self.wrapped:
            optimizer.step()
        return self.manager.statistics().num_committed > before

    def rates(self) -> list[float]:
        return [self.optimizers[name].param_groups[0]["lr"] for name in RATES]


def train_together(one: Replica, joins: Replica) -> None:
    """The first one trains on until the other one is in; then both train to one step."""
    last_step = [1 << 30]

    def train(replica: Replica) -> None:
        while replica.manager.current_step() < last_step[0]:
            replica.step()

    with ThreadPoolExecutor(1) as pool:
        trained = pool.submit(train, one)
        try:
            while not joins.manager.is_participating():
                joins.step()
            last_step[0] = joins.manager.current_step() + 5
            train(joins)
        finally:
            last_step[0] = min(last_step[0], one.manager.current_step() + 5)
        trained.result(60)


@pytest.mark.parametrize("is_stale", [False, True])
def test_groups_that_guard_their_optimizers_in_another_order_train_together(
    lighthouse: LighthouseServer, is_stale: bool, caplog: pytest.LogCaptureFixture
) -> None:
    one = TwoOptimizers(lighthouse, "one")
    one.step()
    for name, optimizer in one.optimizers.items():
        optimizer.param_groups[0]["lr"] = RATES[name] * 2  # as a schedule does
    waits: dict[str, Any] = {
        "quorum_timeout": timedelta(minutes=2),
        "quorum_retries": 0,
    }  # one that is kept apart waits for ever
    other = TwoOptimizers(lighthouse, "other", ("back", "front"), seed=7, is_stale=is_stale, **waits)
    with caplog.at_level(logging.WARNING):
        train_together(one, other)
    assert one.rates() == other.rates() == [0.02, 0.1]
    assert one.bits() == other.bits()
    said = [record.message for record in caplog.records if "did not set" in record.message]
    assert bool(said) is is_stale and all("0.01, at the source 0.02" in text for text in said)


def test_a_checkpoint_is_restored_whatever_the_order_of_guarding(lighthouse: LighthouseServer, tmp_path: Path) -> None:
    one = TwoOptimizers(lighthouse, "one")
    one.step()
    checkpointer = Checkpointer(tmp_path, manager=one.manager)
    checkpointer.save().result(60)
    checkpointer.shutdown()
    shutdown(one)
    other = TwoOptimizers(lighthouse, "one", ("back", "front"), seed=7)
    checkpointer = Checkpointer(tmp_path, manager=other.manager)
    checkpointer.restore(step=1)
    assert other.bits() == one.bits()
    for name in RATES:
        mine, theirs = (replica.optimizers[name].state_dict()["state"] for replica in (one, other))
        assert {n: s["exp_avg"].tolist() for n, s in mine.items()} == {
            n: s["exp_avg"].tolist() for n, s in theirs.items()
        }
    checkpointer.shutdown()


# Settings by themselves


def settings_between(
    there: list[torch.optim.Optimizer], state_there: Any, here: list[torch.optim.Optimizer], state_here: Any
) -> list[str]:
    """Have the optimizers of one registry take the settings of another's."""
    registries = []
    for optimizers, state in ((there, state_there), (here, state_here)):
        registry = StateRegistry(StateDictLock())
        registry.register("default", lambda state: None, state)
        for optimizer in optimizers:
            registry.guard(optimizer)
        registry.layout()
        registries.append(registry)
    return registries[1].take_settings(registries[0].capture_to_serve().own)


def test_groups_of_parameters_get_the_settings_of_the_same_parameters(caplog: pytest.LogCaptureFixture) -> None:
    def script(rates: list[float]) -> tuple[list[torch.optim.Optimizer], Any]:
        weights = {name: nn.Parameter(torch.zeros(2)) for name in ("a", "b", "c")}
        ordered = [weights[name] for name in ("abc" if rates[0] == 1.0 else "cba")]
        groups = [{"params": [p], "lr": lr} for p, lr in zip(ordered, rates, strict=True)]
        return [torch.optim.SGD(groups, lr=0.5)], lambda: dict(weights)

    there, here = script([1.0, 2.0, 3.0]), script([9.0, 9.0, 9.0])
    settings_between(*there, *here)
    assert [group["lr"] for group in here[0][0].param_groups] == [3.0, 2.0, 1.0]
    assert caplog.text == ""


def test_where_nothing_says_whose_settings_they_are_it_is_said_and_nothing_is_set(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def script(rates: list[float]) -> tuple[list[torch.optim.Optimizer], Any]:
        return [torch.optim.SGD([nn.Parameter(torch.zeros(2))], lr=rate) for rate in rates], lambda: {"n": 1}

    there, here = script([1.0, 2.0]), script([2.0, 1.0])
    assert settings_between(*there, *here) == []
    assert [optimizer.param_groups[0]["lr"] for optimizer in here[0]] == [2.0, 1.0]
    assert "no settings for the parameters of optimizer 0.param_groups.0, optimizer 1.param_groups.0" in caplog.text


class Fused(Replica):
    """A layer whose state is returned in two halves, as copies, and optimizers whose state dict is flat and stale.

    So does torchtitan with fused projections: neither the memory of the parameter nor the groups of the optimizers are in the
    state. What a learning rate belongs to is known by the other parameters of its group, or by shapes.
    """

    def build(self) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4, bias=False))
        groups = [
            {"params": [*model[0].parameters()], "lr": 0.01},
            {"params": [model[1].weight], "lr": 0.05},
        ]
        return model, torch.optim.SGD(groups, momentum=0.5)

    def state(self) -> dict[str, Any]:
        halves = {
            f"{n}.{half}": part for n in (0, 1) for half, part in enumerate(self.model[n].weight.detach().chunk(2))
        }
        moments = {str(n): state["momentum_buffer"] for n, state in enumerate(self.optimizer.state.values())}
        return {"bias": self.model[0].bias, **{key: part.clone() for key, part in halves.items()}, "moments": moments}

    def load(self, state: dict[str, Any]) -> None:
        with torch.no_grad():
            self.model[0].bias.copy_(state["bias"])
            for n in (0, 1):
                self.model[n].weight.copy_(torch.cat([state[f"{n}.0"], state[f"{n}.1"]]))
            for parameter, moment in zip(self.model.parameters(), state["moments"].values(), strict=False):
                self.optimizer.state[parameter]["momentum_buffer"] = moment.clone()


def test_the_rate_of_a_parameter_that_the_state_has_in_parts_comes_with_it(
    lighthouse: LighthouseServer, caplog: pytest.LogCaptureFixture
) -> None:
    one = Fused(lighthouse, "one")
    one.step()
    for group in one.optimizer.param_groups:
        group["lr"] *= 2
    other = Fused(lighthouse, "other", seed=7)
    with caplog.at_level(logging.WARNING):
        train_together(one, other)
    assert [group["lr"] for group in other.optimizer.param_groups] == [0.02, 0.1]
    assert one.bits() == other.bits()
    assert not any("has no settings" in record.message for record in caplog.records)


class Holds(torch.optim.SGD):
    """Steps by another optimizer of the same parameters that it holds, as containers and SAM do."""

    def __init__(self, parameters: Any, **settings: Any) -> None:
        super().__init__(parameters, **settings)
        self.inner = torch.optim.Adam(self.param_groups[0]["params"], lr=settings["lr"])

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.inner.step()


class Containing(Replica):
    """Its state is what torch returns of the inner optimizer, for which torch steps that if it has no state yet."""

    def build(self) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = nn.Linear(8, 8)
        return model, Holds(model.parameters(), lr=0.01)

    def state(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optim": get_optimizer_state_dict(self.model, self.sgd.inner)}

    def load(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        set_optimizer_state_dict(self.model, self.sgd.inner, state["optim"])


def test_an_optimizer_that_another_one_holds_may_step_in_a_state_function(lighthouse: LighthouseServer) -> None:
    one = Containing(lighthouse, "one")
    assert one.step()
    other = Containing(lighthouse, "other", seed=7)
    train_together(one, other)
    assert one.bits() == other.bits()
