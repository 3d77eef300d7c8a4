"""What is trained and in no state is named, and nothing else is."""

from __future__ import annotations

import copy
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import nn

from torchft_ckpt.checkpointing import StateDictLock
from torchft_ckpt.manager.checking import leaves_to_compare
from torchft_ckpt.manager.left_out import left_out_of
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
