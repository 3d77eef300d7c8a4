"""What is trained and in no state, and what is trained and in no average, is named; and nothing else is."""

from __future__ import annotations

import copy
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed import ReduceOp

from torchft_ckpt.checkpointing import StateDictLock
from torchft_ckpt.manager.checking import leaves_to_compare
from torchft_ckpt.manager.left_out import Averaged, left_out_of
from torchft_ckpt.manager.state_registry import StateRegistry

LIMIT = timedelta(seconds=20)


def trained() -> tuple[nn.Sequential, torch.optim.Optimizer]:
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.randn(4, 2)).square().sum().backward()
    optimizer.step()
    return model, optimizer


def left_out(state: dict[str, Any], optimizer: torch.optim.Optimizer) -> list[str]:
    return left_out_of(state, leaves_to_compare(state, [optimizer]))


def test_what_an_optimizer_remembers_and_no_state_holds_is_named_beside_averaged_weights_of_the_same_shapes() -> None:
    model, optimizer = trained()
    state = {"model": model.state_dict(), "average": copy.deepcopy(model).state_dict()}
    assert left_out(state, optimizer) == [f"optimizer 0.state.{number}.momentum_buffer" for number in range(4)]


def test_a_parameter_that_is_in_no_state_is_named_unless_it_is_frozen() -> None:
    model, optimizer = trained()
    state = {"first": model[0].state_dict(), "sgd": optimizer.state_dict()}
    assert left_out(state, optimizer) == ["optimizer 0.parameter 2", "optimizer 0.parameter 3"]
    model[1].requires_grad_(False)
    assert left_out(state, optimizer) == []


FORMS: dict[str, Callable[[torch.Tensor], Any]] = {
    "as it is": lambda tensor: tensor,
    "a copy": torch.clone,
    "a view": lambda tensor: tensor.view(-1),
    "a copy in another dtype": torch.Tensor.double,
    "an array": lambda tensor: tensor.detach().numpy().copy(),
    "bytes": lambda tensor: tensor.detach().numpy().tobytes(),
}


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_what_a_state_holds_in_whatever_form_is_not_named(form: Callable[[torch.Tensor], Any]) -> None:
    model, optimizer = trained()
    momenta = [form(values["momentum_buffer"]) for values in optimizer.state.values()]
    assert left_out({"model": [form(p) for p in model.parameters()], "momenta": momenta}, optimizer) == []
    flat = torch.cat([value.reshape(-1) for values in optimizer.state.values() for value in values.values()])
    assert left_out({"model": model.state_dict(), "momenta": form(flat)}, optimizer) == []


def test_it_is_named_once_as_soon_as_there_is_something_to_remember(caplog: pytest.LogCaptureFixture) -> None:
    registry, num_captured = StateRegistry(StateDictLock(LIMIT)), 0
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def state_dict() -> dict[str, Any]:
        nonlocal num_captured
        num_captured += 1
        return {"model": model.state_dict()}

    registry.register("default", lambda _: None, state_dict)
    registry.guard(optimizer)
    first = registry.layout()
    assert not caplog.records and first.text == (
        "parameter 0, default.model.weight: 2x2 float32; parameter 1, default.model.bias: 2 float32"
    )
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    assert [registry.layout() for _ in range(3)] == [first] * 3
    (record,) = caplog.records
    assert "optimizer 0.state.0.momentum_buffer, optimizer 0.state.1.momentum_buffer" in record.getMessage()
    assert num_captured == 2, "state_dict functions are asked no oftener than that"


# ------------------------------------------------------------------------------------------------------- what is averaged


def warnings(
    caplog: pytest.LogCaptureFixture,
    average: Callable[[Averaged, nn.Sequential], object],
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] = lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
) -> list[str]:
    """Return what is said of a step in which gradients were averaged like this."""
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2))
    model(torch.randn(4, 2)).square().sum().backward()
    averaged, sgd = Averaged("group_0"), optimizer(model)
    averaged.unchecked.append(sgd)
    averaged.begin_step()
    average(averaged, model)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for _ in range(2):
        averaged.check(sgd, names, step=7, num_groups=2)
    return [record.getMessage() for record in caplog.records]


def by_hand(averaged: Averaged, parameters: Any) -> None:
    for parameter in parameters:
        averaged.note(parameter.grad, ReduceOp.AVG, None)


def copied(averaged: Averaged, model: nn.Module) -> None:
    averaged.note(torch.cat([p.grad.reshape(-1) for p in model.parameters()]), ReduceOp.SUM, None)  # type: ignore[union-attr]


def in_one_memory(averaged: Averaged, model: nn.Module) -> None:
    flat = torch.cat([p.grad.reshape(-1) for p in model.parameters()])  # type: ignore[union-attr]
    averaged.note(flat, ReduceOp.AVG, None)
    for parameter, part in zip(model.parameters(), flat.split([p.numel() for p in model.parameters()]), strict=True):
        parameter.grad = part.view_as(parameter)


AVERAGES: dict[str, Callable[[Averaged, nn.Sequential], object]] = {
    "each gradient": lambda averaged, model: by_hand(averaged, model.parameters()),
    "a flat copy": copied,
    "a flat vector of which the gradients are views": in_one_memory,
    "as somebody says": lambda averaged, model: averaged.note(torch.ones(1), ReduceOp.AVG, list(model.parameters())),
    "one part as somebody says and one by hand": lambda averaged, model: (
        averaged.note(torch.ones(1), ReduceOp.AVG, list(model[0].parameters())),
        by_hand(averaged, model[1].parameters()),
    ),
    "those of which the optimizer trains copies": lambda averaged, model: averaged.note(
        torch.ones(1), ReduceOp.AVG, list(copy.deepcopy(model).parameters())
    ),
    "nothing at all, which is said elsewhere": lambda averaged, model: None,
    "where only the rest is frozen": lambda averaged, model: (
        by_hand(averaged, model[0].parameters()),
        model[1].zero_grad(),
    ),
}


@pytest.mark.parametrize("average", AVERAGES.values(), ids=AVERAGES)
def test_averaged_gradients_are_not_named(
    caplog: pytest.LogCaptureFixture, average: Callable[[Averaged, nn.Sequential], object]
) -> None:
    assert warnings(caplog, average) == []


def test_parameters_beside_the_averaged_ones_are_named_once_also_where_a_metric_is_averaged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def average(averaged: Averaged, model: nn.Sequential) -> None:
        averaged.note(torch.ones(100), ReduceOp.AVG, list(model[0].parameters()))
        averaged.note(torch.ones(3), ReduceOp.AVG, None)
        averaged.note(torch.ones(100), ReduceOp.MAX, None)
        averaged.note(torch.ones(100, dtype=torch.int32), ReduceOp.SUM, None)

    (warning,) = warnings(caplog, average)
    assert (
        "group_0: step 7 was committed by 2 replica groups, and nobody averaged the gradients of parameters" in warning
    )
    assert "SGD trains (2: 1.weight, 1.bias). Each group" in warning
