"""Optimizers change the state: each step of a guarded one takes the write lock, and says for which step it is."""

from __future__ import annotations

import logging

import torch

from torchft_ckpt.manager.optimizer_settings import guard_steps, with_inner
from torchft_ckpt.manager.serving import StateServing
from torchft_ckpt.manager.state_registry import StateRegistry
from torchft_ckpt.manager.step import Steps
from torchft_ckpt.manager.step_client import StepClient
from torchft_ckpt.manager.timekeeping import Timekeeper

logger = logging.getLogger(__name__)


class StepGuard:
    """Guards the steps of optimizers, and other changes of the state. On the training thread."""

    def __init__(
        self,
        client: StepClient,
        registry: StateRegistry,
        serving: StateServing,
        steps: Steps,
        timekeeper: Timekeeper,
    ) -> None:
        self._client = client
        self._registry = registry
        self._serving = serving
        self._steps = steps
        self._timekeeper = timekeeper
        self._has_warned_of_steps = False

    def begins_change(self, *, by_optimizer: bool = False) -> None:
        """The state is about to change: take the write lock, once what is being served has been copied aside."""
        self._client.changes_state(by_optimizer=by_optimizer)
        with self._timekeeper.copying():
            self._serving.end_offer()
            self._registry.lock.acquire_write()

    def guard(self, optimizer: torch.optim.Optimizer) -> None:
        """See `Manager.guard_optimizer`."""
        self._registry.guard(optimizer)
        guard_steps(
            optimizer,
            lambda: self._enters(optimizer),
            self._leaves,
            ended=lambda: self._steps.ends_taking(optimizer),
        )
        held = _ids_of_parameters(optimizer)
        for inner in with_inner([optimizer])[1:]:  # SAM's second step is one of the optimizer that it holds
            if held & _ids_of_parameters(inner):
                inner.register_step_pre_hook(self._before_inner_step)

    @torch.compiler.disable
    def _before_inner_step(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        self._steps.may_take(optimizer)

    @torch.compiler.disable
    def _enters(self, optimizer: torch.optim.Optimizer) -> None:
        registry = self._registry
        if not registry.in_function:
            registry.microbatches.refuse("step() of an optimizer")
        self._steps.begins_to_take(optimizer)
        if registry.in_function == "get" and not self._has_warned_of_steps:
            self._has_warned_of_steps = True
            logger.warning(
                "%s: a state_dict function steps the optimizer, as torch's get_optimizer_state_dict does where there is no"
                " state yet: Adam then counts one step more than in a loop that does not; return optimizer.state_dict() instead",
                self._client.replica_id,
            )
        if not registry.is_explicitly_locked and registry.in_function != "load":
            self.begins_change(by_optimizer=not registry.in_function and registry.is_used_by_loops)

    @torch.compiler.disable
    def _leaves(self) -> None:
        if self._registry.in_function != "load":  # there the lock is held for all of it
            self._registry.lock.release_write()


def _ids_of_parameters(optimizer: torch.optim.Optimizer) -> set[int]:
    return {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
