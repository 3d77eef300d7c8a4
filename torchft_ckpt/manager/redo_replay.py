"""Applies entries of a redo log with the optimizers that are here: the same settings, the same gradients, their own `step`.

An optimizer steps by its guarded `step`, so what hangs on it is replayed, too: an average of the weights that is kept by a hook.
Whether the state is then the source's to the last bit is not assumed: the join compares.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch

from torchft_ckpt.checkpointing.state.local_state import copy_to
from torchft_ckpt.checkpointing.state.redo_entry import OptimizerStep, RedoEntry
from torchft_ckpt.checkpointing.state.shards import adapter_of
from torchft_ckpt.errors import StateMismatchError, torn_where_it_raises
from torchft_ckpt.manager.optimizer_settings import take_settings, with_inner
from torchft_ckpt.manager.redo_recording import parameters_of


def apply_entry(entry: RedoEntry, optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Bring the state from `entry.after`, which is here, to `entry.version`. On the training thread.

    The gradients that are here stay what they are, and settings become those that the source had in this step.

    Args:
        entry: that was checked for these optimizers.
        optimizers: that are guarded, in the order in which all replicas guard them.

    Raises:
        StateMismatchError: an optimizer has other parameter groups here; nothing was applied.
        CheckpointError: an optimizer raised in its step; the state is torn.
    """
    for step in entry.steps:
        _check_groups(step, optimizers[step.optimizer])
    with torn_where_it_raises(f"the replay of step {entry.version.step}", "optimizer"):
        for step in entry.steps:
            _replay(step, optimizers[step.optimizer])


def _check_groups(step: OptimizerStep, optimizer: torch.optim.Optimizer) -> None:
    there = [len(groups) for groups in step.settings]
    here = [len(member.param_groups) for member in with_inner([optimizer])]
    if there != here:
        raise StateMismatchError(
            f"optimizer {step.optimizer} and those in it have {there} parameter groups at the source, and {here} here",
            party="optimizer",
        )


def _replay(step: OptimizerStep, optimizer: torch.optim.Optimizer) -> None:
    take_settings(with_inner([optimizer]), step.settings)
    with _gradients(parameters_of(optimizer), step.gradients), _attributes(optimizer, step):
        optimizer.step()


@contextlib.contextmanager
def _gradients(parameters: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor | None]) -> Iterator[None]:
    own = [parameter.grad for parameter in parameters]
    try:
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = None if gradient is None else _like(parameter, gradient)
        yield
    finally:
        for parameter, gradient in zip(parameters, own, strict=True):
            parameter.grad = gradient


def _like(parameter: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    """Return a gradient on the device and in the layout of its parameter, of which a part may be here."""
    adapter = adapter_of(parameter)
    if adapter is not None:
        boxes = adapter.boxes(parameter, "a parameter")
        return adapter.rebuild(parameter, [local.view(box.sizes) for box in boxes])
    if parameter.is_contiguous():
        return local.to(parameter.device)
    gradient = torch.empty_like(parameter, dtype=local.dtype, requires_grad=False)
    copy_to(gradient, local)
    return gradient


@contextlib.contextmanager
def _attributes(optimizer: torch.optim.Optimizer, step: OptimizerStep) -> Iterator[None]:
    """What a gradient scaler gives the optimizer, for the time of its step."""
    for name, value in step.attributes.items():
        setattr(optimizer, name, value)
    try:
        yield
    finally:
        for name in step.attributes:
            delattr(optimizer, name)
