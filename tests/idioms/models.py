"""What the loops train, and helpers that users have in some form of their own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from idioms.harness import Job, states
from torch import nn
from torch.nn import functional as F


def mlp(*, bias: bool = True) -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 8, bias=bias), nn.Tanh(), nn.Linear(8, 3, bias=bias))


def error(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Return the mean squared error."""
    inputs, targets = batch
    return F.mse_loss(model(inputs), targets)


def set_up(
    job: Job, kind: type[torch.optim.Optimizer], *, model: nn.Module | None = None, **settings: Any
) -> tuple[nn.Module, torch.optim.Optimizer, nn.Module, torch.optim.Optimizer]:
    """Return model and optimizer, and both in their wrappers: the first lines of the README's loop, for what differs later."""
    module = mlp() if model is None else model
    inner = kind(module.parameters(), **settings)
    job.manager(*states(model=module, optimizer=inner))
    return module, inner, job.ddp(module), job.optimizer(inner)


def make_steps(job: Job, ddp: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Train as the README's loop does."""
    while job.goes_on():
        optimizer.zero_grad()
        error(ddp, job.batch()).backward()
        optimizer.step()


class Each(nn.Module):
    """Models that are trained beside each other on the same batches: loops that differ in a part alone are one run of groups."""

    def __init__(self, **models: nn.Module) -> None:
        super().__init__()
        self.models = nn.ModuleDict(models)

    def forward(self, inputs: torch.Tensor) -> dict[str, torch.Tensor]:
        return {name: model(inputs) for name, model in self.models.items()}


def errors(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Return the sum of the mean squared errors of those that an `Each` holds."""
    inputs, targets = batch
    return torch.stack([F.mse_loss(out, targets.to(out.dtype)).float() for out in model(inputs).values()]).sum()


class Box:
    """A value with `state_dict` and `load_state_dict`, as users write small classes of their own."""

    def __init__(self, **values: Any) -> None:
        self.__dict__.update(values)

    def state_dict(self) -> dict[str, Any]:
        return dict(self.__dict__)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(name)


class Chosen(nn.Module):
    """Runs the parts that `choose` names: a mixture of experts, dropped layers, alternating branches."""

    def __init__(self, num_parts: int, choose: Callable[[], list[int]]) -> None:
        super().__init__()
        self.stem = nn.Linear(6, 8)
        self.parts = nn.ModuleList(nn.Linear(8, 8) for _ in range(num_parts))
        self.head = nn.Linear(8, 3)
        self._choose = choose

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.stem(inputs))
        for number in self._choose():
            hidden = hidden + torch.tanh(self.parts[number](hidden))
        return self.head(hidden)
