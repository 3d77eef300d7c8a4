"""The optimizer of a fault-tolerant loop: `zero_grad` begins a step, `step` ends it and steps only what counts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import Optimizer

from torchft_ckpt.errors import ConfigError

if TYPE_CHECKING:
    from torchft_ckpt.manager import Manager


class OptimizerWrapper(Optimizer):
    """Wraps any optimizer, under the name and with the methods of torchft's wrapper.

    Call `zero_grad` before the forward pass and `step` after the backward pass. While the wrapped optimizer steps, the
    write lock of the manager's state is held, and given back also where the step raises.

    Args:
        manager: of this rank.
        optim: the optimizer; hooks are attached to it, so stepping it directly is safe as well.
    """

    def __init__(self, manager: Manager, optim: Optimizer) -> None:
        self.optim = optim
        self.manager = manager
        manager.guard_optimizer(optim)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        self.optim.add_param_group(param_group)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.optim.load_state_dict(state_dict)

    def state_dict(self) -> dict[str, Any]:
        return self.optim.state_dict()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Begin a step, unless one is open in which nothing has happened (`Manager.start_quorum`); then clear the gradients."""
        self.manager.start_quorum()
        self.optim.zero_grad(set_to_none)

    def step(self, closure: object | None = None) -> None:  # type: ignore[override]
        """End the step; step the wrapped optimizer if it counts.

        If the wrapped optimizer raises, the step is committed for the others and half done here: who catches the error
        and goes on heals from them at the next step.

        Raises:
            ConfigError: a closure was passed: it would be evaluated after the vote.
            Also as `Manager.should_commit`, and what the wrapped optimizer raises.
        """
        if closure is not None:
            raise ConfigError("optimizers that use closures are not supported", party="closure")
        if not self.manager.should_commit():
            return
        try:
            self.optim.step()
        except BaseException:
            self.manager.report_torn_state()
            raise
        finally:
            self.manager.allow_state_dict_read()

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        return self.optim.param_groups

    @property
    def state(self) -> Mapping[torch.Tensor, Any]:  # type: ignore[override]
        return self.optim.state

    def __repr__(self) -> str:
        return f"OptimizerWrapper({self.optim!r})"
