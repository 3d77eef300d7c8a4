"""A part of the model that is exchanged as one: its parameters, and the copy of what all replicas agreed on last.

The *backup* holds the global parameters. Inner steps never touch it; it changes when a round is committed or a state is
loaded, under the write lock of the manager's state, so it can be served at any time in between.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.profiler import record_function

from torchft_ckpt.checkpointing.state.versions import Counted, count_writes, is_changed
from torchft_ckpt.errors import ConfigError
from torchft_ckpt.manager.optimizer_settings import with_inner
from torchft_ckpt.outer.memory import FlatBuffers, copy_for, local_of, shaped_like


class Fragment(ABC):
    """Some parameters that are exchanged as one. A subclass says what is averaged of them, and what becomes of the average.

    Parameters that need no gradient are in the backup, and are not averaged. A replica's shards of DTensors are averaged
    with the same rank's shards of the other replica groups. Used by the training thread.

    Args:
        module: its parameters are the fragment's.
        inner_optimizer: trains them.
        buffers: memory for the values of a round.
        backup_device: where the backup is.
        pin_memory: pin it, if it is on the host and there is an accelerator.
        keep_inner_state: copy the inner optimizer's state when a round begins, so that it can go back.
    """

    outer_optimizer: torch.optim.Optimizer | None = None
    """Steps the global parameters."""

    def __init__(
        self,
        module: nn.Module,
        inner_optimizer: torch.optim.Optimizer,
        buffers: FlatBuffers,
        *,
        backup_device: torch.device,
        pin_memory: bool,
        keep_inner_state: bool,
    ) -> None:
        self.params = dict(module.named_parameters())
        self.trained = {name: param for name, param in self.params.items() if param.requires_grad}
        self._buffers = buffers
        self.original_parameters = {
            name: copy_for(local_of(param), backup_device, pin_memory) for name, param in self.params.items()
        }
        kept = list(self.trained.values()) if keep_inner_state else []
        self._inner_state = InnerStateBackup(inner_optimizer, kept, backup_device, pin_memory)
        self._frozen: dict[str, Sequence[Counted]] = {}
        self._values: list[torch.Tensor] = []
        self._flat_values: list[torch.Tensor] = []

    @torch.no_grad()
    def prepare(self) -> None:
        """Compute what this replica contributes to the round."""
        self._lay_out()
        for name, value in zip(self.trained, self._values, strict=True):
            self._compute(local_of(self.trained[name]), self.original_parameters[name], value)

    @torch.no_grad()
    def prepare_nothing(self) -> None:
        """Take part in the round without a contribution: the averages will be there as well."""
        self._lay_out()
        for flat in self._flat_values:
            flat.zero_()

    def values(self) -> list[torch.Tensor]:
        """The memory of this round's values: one tensor for each parameter that is trained."""
        return self._values

    def flat_values(self) -> list[torch.Tensor]:
        """The same memory, as one flat tensor for each dtype and device."""
        return self._flat_values

    @abstractmethod
    def apply(self, *, merge: bool) -> None:
        """The round is committed, and the values are averages: take them, in parameters and backup.

        The caller holds the write lock of the manager's state.

        Args:
            merge: the parameters hold inner work after PREPARE, of which a part may be kept.
        """

    @torch.no_grad()
    def restore_parameters(self) -> None:
        """Put the global parameters in place of the local ones."""
        with record_function("torchft::local_sgd::restore_parameters"):
            for name, param in self.params.items():
                local_of(param).copy_(self.original_parameters[name], non_blocking=True)
        self._count_frozen()

    def restore(self) -> None:
        """Go back to the backup, and the inner optimizer's state to what it was when the round began."""
        self.restore_parameters()
        self._inner_state.restore()

    def begin_round(self) -> None:
        """Note the state of the inner optimizer as that to which a discarded round goes back."""
        self._inner_state.save()

    def check_inner_state(self) -> None:
        """See, after an inner step, that the inner optimizer's state can go back; raises as `InnerStateBackup.check_found`."""
        self._inner_state.check_found()

    @torch.no_grad()
    def save_parameters(self) -> None:
        """Make the parameters of now the global ones."""
        with record_function("torchft::local_sgd::save_parameters"):
            for name, param in self.params.items():
                self.original_parameters[name].copy_(local_of(param), non_blocking=True)
        self._count_frozen()

    def _count_frozen(self) -> None:
        self._frozen = {name: count_writes(param) for name, param in self.params.items() if name not in self.trained}

    def is_written(self, name: str) -> bool:
        """Whether the script has given a parameter that is not exchanged another value than the global one."""
        local, backup = local_of(self.params[name]), self.original_parameters[name]
        return is_changed(self._frozen.get(name, ())) and not torch.equal(local.to(backup.device), backup)

    @torch.no_grad()
    def global_parameters(self) -> dict[str, torch.Tensor]:
        """Return the backup as the state of a replica: the parts of sharded parameters with their place in them."""
        return {name: shaped_like(backup, self.params[name]) for name, backup in self.original_parameters.items()}

    @torch.no_grad()
    def load_backup(self, received: Mapping[str, torch.Tensor]) -> None:
        """Take global parameters that were received; the caller has checked names and shapes."""
        for name, tensor in received.items():
            self.original_parameters[name].copy_(local_of(tensor))

    def complain_about(self, received: object) -> str:
        """Say why a received backup is none of this fragment; empty if it is one."""
        if not isinstance(received, Mapping) or set(received) != set(self.original_parameters):
            return "it has other parameters"
        for name, mine in self.original_parameters.items():
            theirs = received[name]
            if not isinstance(theirs, torch.Tensor) or (theirs.dtype, local_of(theirs).shape) != (
                mine.dtype,
                mine.shape,
            ):
                return f"{name} is not {mine.dtype} of shape {tuple(mine.shape)}"
        return ""

    def _lay_out(self) -> None:
        self._values, self._flat_values = self._buffers.lay_out(self._locals())

    def _locals(self) -> list[torch.Tensor]:
        return [local_of(param) for param in self.trained.values()]

    @abstractmethod
    def _compute(self, local: torch.Tensor, backup: torch.Tensor, value: torch.Tensor) -> None:
        """Write one parameter's value, on its device."""


class AveragedFragment(Fragment):
    """LocalSGD: the parameters themselves are averaged."""

    def _compute(self, local: torch.Tensor, backup: torch.Tensor, value: torch.Tensor) -> None:
        value.copy_(local)

    @torch.no_grad()
    def apply(self, *, merge: bool) -> None:
        """Take the averages. Inner work after PREPARE is not there: LocalSGD exchanges without delay."""
        for name, value in zip(self.trained, self._values, strict=True):
            local_of(self.trained[name]).copy_(value)
            self.original_parameters[name].copy_(value, non_blocking=True)


class PseudoGradientFragment(Fragment):
    """DiLoCo: what the replicas moved away from the global parameters is averaged, as a gradient of an outer optimizer.

    Args:
        outer_optimizer: steps the global parameters; it may own other fragments' as well.
        update_alpha: how much of the local parameters stays after a round: 0 none, 1 everything (arXiv 2501.18512).
    """

    def __init__(
        self,
        module: nn.Module,
        *arguments: Any,
        outer_optimizer: torch.optim.Optimizer,
        update_alpha: float,
        **options: Any,
    ) -> None:
        super().__init__(module, *arguments, **options)
        self.outer_optimizer: torch.optim.Optimizer = outer_optimizer
        self._update_alpha = update_alpha
        owned = {id(param) for group in outer_optimizer.param_groups for param in group["params"]}
        for name, param in self.trained.items():
            if id(param) not in owned:
                raise ConfigError(f"the outer optimizer of this fragment does not have {name}", party="outer_optimizer")

    def _compute(self, local: torch.Tensor, backup: torch.Tensor, value: torch.Tensor) -> None:
        if backup.device == local.device:
            torch.sub(backup, local, out=value)
        else:
            value.copy_(backup, non_blocking=True).sub_(local)

    @torch.no_grad()
    def apply(self, *, merge: bool) -> None:
        """Step the outer optimizer from the global parameters, then merge what is local into them."""
        alpha = self._update_alpha if merge else 0.0
        kept = [local.clone() for local in self._locals()] if alpha else []
        self.restore_parameters()
        with self._outer_gradients():
            self.outer_optimizer.step()
        self.save_parameters()
        for local, before in zip(self._locals(), kept, strict=False):
            local.lerp_(before, alpha)

    @contextmanager
    def _outer_gradients(self) -> Iterator[None]:
        """Give the outer optimizer this fragment's averages as its only gradients; give back what was there."""
        owned: Sequence[torch.Tensor] = [
            param for group in self.outer_optimizer.param_groups for param in group["params"]
        ]
        before = [param.grad for param in owned]
        try:
            for param in owned:
                param.grad = None
            for param, value in zip(self.trained.values(), self._values, strict=True):
                param.grad = shaped_like(value, param)
            yield
        finally:
            for param, grad in zip(owned, before, strict=True):
                param.grad = grad


class InnerStateBackup:
    """A copy of the inner optimizer's state (Adam's moments, say) of some parameters when their round began, to go back to it.

    An optimizer may be made of others (one for each part of the model, or a wrapper around one): these hold the state then, and
    are found where it refers to them. Used by the training thread.

    Args:
        optimizer: whose state is kept; its hyperparameters are not.
        device: where the copy is.
        pin_memory: pin it, if it is on the host and there is an accelerator.
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
        is_torchs = type(self._optimizer).state_dict is Optimizer.state_dict
        if not self._params or is_torchs or len(with_inner([self._optimizer])) > 1:
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
        return list({id(one.state): one.state for one in with_inner([self._optimizer])}.values())

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
