"""Before and after each step of an optimizer, whatever becomes of the step and whoever wraps it besides."""

from __future__ import annotations

import copy

import pytest
import torch

from torchft_ckpt.manager.optimizer_settings import guard_steps


class Fails(torch.optim.SGD):
    """Raises where it is told to."""

    fails = False

    def step(self, closure: object = None) -> str:  # type: ignore[override]
        if self.fails:
            raise ZeroDivisionError
        super().step()
        return "stepped"


def guarded() -> tuple[Fails, list[str]]:
    optimizer = Fails([torch.nn.Parameter(torch.ones(2))], lr=1.0)
    said: list[str] = []
    guard_steps(optimizer, lambda: said.append("before"), lambda: said.append("after"))
    return optimizer, said


def test_a_step_is_between_the_two_and_returns_what_it_returns() -> None:
    optimizer, said = guarded()
    assert (optimizer.step(), said[0], said[-1]) == ("stepped", "before", "after")


def test_a_step_that_raises_is_over_as_well() -> None:
    optimizer, said = guarded()
    optimizer.fails = True
    with pytest.raises(ZeroDivisionError):
        optimizer.step()
    assert said[-1] == "after"


@pytest.mark.parametrize("scheduler_first", [True, False])
def test_a_scheduler_that_wraps_the_step_too_changes_nothing(scheduler_first: bool) -> None:
    optimizer = Fails([torch.nn.Parameter(torch.ones(2))], lr=1.0)
    said: list[str] = []
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1) if scheduler_first else None
    guard_steps(optimizer, lambda: said.append("before"), lambda: said.append("after"))
    scheduler = scheduler or torch.optim.lr_scheduler.StepLR(optimizer, 1)
    optimizer.step()
    scheduler.step()
    assert (said[0], said[-1], optimizer.param_groups[0]["lr"]) == ("before", "after", 0.1)
    said.clear()
    optimizer.fails = True
    with pytest.raises(ZeroDivisionError):
        optimizer.step()
    assert said[-1] == "after"


def test_a_guarded_optimizer_is_copied_as_any() -> None:
    optimizer, _ = guarded()
    copied = copy.deepcopy(optimizer.state_dict())
    optimizer.load_state_dict(copied)
    assert optimizer.step() == "stepped"
