"""What the inner optimizer remembered of some parameters when their round began (Adam's moments, say), to go back to it."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch

from torchft_ckpt.outer.memory import copy_for, local_of, shaped_like


class InnerStateBackup:
    """A copy of an optimizer's state of some parameters. Used by the training thread.

    Args:
        optimizer: whose state is kept; its hyperparameters are not.
        params: the parameters.
        device: where the copy is.
        pin_memory: pin it, where it is on the host and there is an accelerator.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, params: Sequence[torch.Tensor], device: torch.device, pin_memory: bool
    ) -> None:
        self._optimizer = optimizer
        self._params = list(params)
        self._device = device
        self._pin_memory = pin_memory
        self._kept: list[dict[str, Any] | None] = [None] * len(self._params)

    @torch.no_grad()
    def save(self) -> None:
        """Keep the state of now, in the memory of the copy before."""
        for index, param in enumerate(self._params):
            state = self._optimizer.state.get(param)
            self._kept[index] = self._copy(state, self._kept[index] or {}) if state else None

    @torch.no_grad()
    def restore(self) -> None:
        """Bring back what was kept; a parameter of which nothing was known then is forgotten."""
        for param, kept in zip(self._params, self._kept, strict=True):
            if kept is None:
                self._optimizer.state.pop(param, None)
                continue
            state = self._optimizer.state[param]
            for key in [key for key in state if key not in kept]:
                del state[key]
            for key, value in kept.items():
                if not isinstance(value, torch.Tensor):
                    state[key] = copy.deepcopy(value)
                elif isinstance(state.get(key), torch.Tensor):
                    local_of(state[key]).copy_(value)
                else:
                    state[key] = _as_state(value, param)

    def _copy(self, state: dict[str, Any], before: dict[str, Any]) -> dict[str, Any]:
        kept: dict[str, Any] = {}
        for key, value in state.items():
            if not isinstance(value, torch.Tensor):
                kept[key] = copy.deepcopy(value)
                continue
            local, memory = local_of(value), before.get(key)
            fits = isinstance(memory, torch.Tensor) and (memory.shape, memory.dtype) == (local.shape, local.dtype)
            kept[key] = memory.copy_(local) if fits else copy_for(local, self._device, self._pin_memory)  # type: ignore[union-attr]
        return kept


def _as_state(value: torch.Tensor, param: torch.Tensor) -> torch.Tensor:
    """Return optimizer state made anew: on the parameter's device and mesh where it has its shape, else on the host."""
    local = local_of(param)
    if value.shape != local.shape or not value.dim():
        return value.clone()
    return shaped_like(value.to(local.device, copy=True), param)
