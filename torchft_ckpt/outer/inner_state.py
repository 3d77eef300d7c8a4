"""What the inner optimizer remembered of some parameters when their round began (Adam's moments, say), to go back to it.

An optimizer may be made of others (one for each part of the model, or a wrapper around one): these hold the state then, and are
found where it refers to them.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from torchft_ckpt.errors import ConfigError
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
        self, optimizer: Optimizer, params: Sequence[torch.Tensor], device: torch.device, pin_memory: bool
    ) -> None:
        self._optimizer = optimizer
        self._params = list(params)
        self._device = device
        self._pin_memory = pin_memory
        self._kept: list[list[dict[str, Any] | None]] = [[] for _ in self._params]

    @torch.no_grad()
    def save(self) -> None:
        """Keep the state of now, in the memory of the copy before."""
        states = self._states()
        for index, param in enumerate(self._params):
            before = self._kept[index] if len(self._kept[index]) == len(states) else [None] * len(states)
            self._kept[index] = [
                self._copy(state[param], kept or {}) if state.get(param) else None
                for state, kept in zip(states, before, strict=True)
            ]

    @torch.no_grad()
    def restore(self) -> None:
        """Bring back what was kept; a parameter of which nothing was known then is forgotten."""
        for param, kept in zip(self._params, self._kept, strict=True):
            for state, of_param in zip(self._states(), kept, strict=False):
                _set_back(state, param, of_param)

    def check_found(self) -> None:
        """See that the state is where it can be set back, once there is some: after an inner step.

        Raises:
            ConfigError: it is nowhere in the optimizer, which says in its own way what its state is.
        """
        if type(self._optimizer).state_dict is Optimizer.state_dict or len(list(_all_of(self._optimizer))) > 1:
            return
        if not any(state.get(param) for state in self._states() for param in self._params):
            name = type(self._optimizer).__name__
            raise ConfigError(
                f"what the inner optimizer {name} remembers of its parameters was not found, neither in {name}.state nor in"
                " optimizers that it refers to: a discarded round could not set it back (restore_inner_optimizer=False does not)",
                party="inner_optimizer",
            )

    def _states(self) -> list[MutableMapping[torch.Tensor, Any]]:
        """Each optimizer's state, that of a wrapper and of the wrapped once. A load puts another object in its place."""
        return list({id(one.state): one.state for one in _all_of(self._optimizer)}.values())

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


def _all_of(optimizer: Optimizer, seen: tuple[Optimizer, ...] = ()) -> Iterator[Optimizer]:
    """Yield an optimizer and those that it refers to by attributes, alone or in lists and mappings; always in the same order."""
    yield optimizer
    for value in vars(optimizer).values():
        parts = value.values() if isinstance(value, Mapping) else value if isinstance(value, (list, tuple)) else [value]
        for part in parts:
            if isinstance(part, Optimizer) and not any(part is known for known in (*seen, optimizer)):
                yield from _all_of(part, (*seen, optimizer))


def _set_back(states: MutableMapping[torch.Tensor, Any], param: torch.Tensor, kept: dict[str, Any] | None) -> None:
    if kept is None:
        states.pop(param, None)
        return
    state = states.setdefault(param, {})
    for key in [key for key in state if key not in kept]:
        del state[key]
    for key, value in kept.items():
        if not isinstance(value, torch.Tensor):
            state[key] = copy.deepcopy(value)
        elif isinstance(state.get(key), torch.Tensor):
            local_of(state[key]).copy_(value)
        else:
            state[key] = _as_state(value, param)


def _as_state(value: torch.Tensor, param: torch.Tensor) -> torch.Tensor:
    """Return optimizer state made anew: on the parameter's device and mesh where it has its shape, else on the host."""
    local = local_of(param)
    if value.shape != local.shape or not value.dim():
        return value.clone()
    return shaped_like(value.to(local.device, copy=True), param)
