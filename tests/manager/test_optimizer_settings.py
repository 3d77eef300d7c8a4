"""What optimizers are set to reaches the replica that heals, also where one optimizer steps others."""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from torchft_ckpt.manager import optimizer_settings
from torchft_ckpt.manager.optimizer_settings import settings_of, with_inner


class Several(torch.optim.Optimizer):
    """Steps others, and owns their parameters in name only."""

    def __init__(self, *inner: torch.optim.Optimizer, held: str) -> None:
        parameters = [p for optimizer in inner for group in optimizer.param_groups for p in group["params"]]
        super().__init__(parameters, {})
        by_number = dict(enumerate(inner))
        self.held: Any = {
            "list": list(inner),
            "dict": by_number,
            "mapping": MappingProxyType(by_number),
            "itself": inner[0],
        }[held]


def sgd(**settings: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(nn.Linear(2, 2).parameters(), **{"lr": 0.5, **settings})


def take_settings(optimizers: list[torch.optim.Optimizer], settings: Any) -> list[str]:
    """Of the same groups in the same order."""
    here = [[f"{n} {m}" for m in range(len(optimizer.param_groups))] for n, optimizer in enumerate(optimizers)]
    there = [[f"{n} {m}" for m in range(len(groups or ()))] for n, groups in enumerate(settings or ())]
    return optimizer_settings.take_settings(optimizers, settings, here=here, there=there)


@pytest.mark.parametrize(("held", "count"), [("list", 2), ("dict", 2), ("mapping", 2), ("itself", 1)])
def test_optimizers_inside_of_one_are_found_once(held: str, count: int) -> None:
    inner = [sgd(), sgd()]
    outer = Several(*inner, held=held)
    assert with_inner([outer, inner[0]]) == [outer, *inner[:count]]


def test_settings_that_differ_are_taken_and_named() -> None:
    source, healing = [sgd(lr=0.25, momentum=0.5)], [sgd(lr=0.5, momentum=0.5)]
    weights = healing[0].param_groups[0]["params"]
    settings = settings_of(source)
    source[0].param_groups[0]["lr"] = 0.0  # a scheduler goes on while they are on their way
    assert take_settings(healing, settings) == ["optimizer 0.param_groups.0.lr: 0.5, at the source 0.25"]
    assert healing[0].param_groups[0]["lr"] == 0.25 and healing[0].param_groups[0]["params"] is weights
    assert take_settings(healing, settings) == []


def test_a_tensor_stays_where_it_is() -> None:
    source, healing = [sgd(lr=torch.tensor(0.25))], [sgd(lr=torch.tensor(0.5))]
    rate = healing[0].param_groups[0]["lr"]
    assert len(take_settings(healing, settings_of(source))) == 1
    assert healing[0].param_groups[0]["lr"] is rate and rate.item() == 0.25


def test_values_of_numpy_are_those_of_python() -> None:
    assert take_settings([sgd(lr=0.5)], settings_of([sgd(lr=np.float64(0.5))])) == []


@pytest.mark.parametrize(
    "settings",
    [None, [], "no list", [[]], [None], [["no group"]], [[{}], [{}]], [[{"unknown": 1, "params": []}]]],
)
def test_what_does_not_fit_the_optimizers_is_left_alone(settings: object) -> None:
    optimizer = sgd()
    before = optimizer.state_dict()
    assert take_settings([optimizer], settings) == []
    assert optimizer.state_dict() == before


def test_what_cannot_travel_is_left_out() -> None:
    optimizer = sgd()
    optimizer.param_groups[0]["callback"] = lambda: None
    optimizer.param_groups[0]["table"] = torch.zeros(4)
    assert {"callback", "table", "params"}.isdisjoint(settings_of([optimizer])[0][0])
