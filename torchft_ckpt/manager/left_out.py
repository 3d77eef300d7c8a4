"""Finds what is trained here and comes apart between replica groups: what is in no state, and what nobody averages."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.distributed import ReduceOp

from torchft_ckpt.checkpointing.state.shards import is_dtensor, memory_of
from torchft_ckpt.core.coordination.messages import name_some
from torchft_ckpt.manager.checking import CheckedLeaf
from torchft_ckpt.manager.optimizer_settings import with_inner
from torchft_ckpt.manager.volatile import leaves_in

logger = logging.getLogger(__name__)

_SAMPLE_ELEMENTS = 16


def left_out_of(state: Any, owned: Iterable[CheckedLeaf]) -> list[str]:
    """Return what optimizers train, and remember of it, that a state does not hold, neither as that memory nor as a copy.

    Nothing where that is not known, because the state has as many bytes in another form. Frozen parameters do not count, nor
    single numbers that are remembered, as Adam's steps are. On the training thread.

    Args:
        state: as the registered functions returned it.
        owned: by optimizers, as `leaves_to_compare` found it beside this state.
    """
    trained = [
        (leaf, part)
        for leaf in owned
        if isinstance(leaf.value, torch.Tensor)
        if (leaf.value.requires_grad if ".parameter " in leaf.place else leaf.value.numel() > 1)
        for part in memory_of(leaf.value)
    ]
    lacking = [
        (leaf.name, part) for leaf, part in trained if leaf.name == leaf.place
    ]  # else it is at a path of the state
    if not lacking:
        return []
    known = {part.data_ptr() for _, part in trained}
    leaves = list(leaves_in(state))
    parts = [part for leaf in leaves if isinstance(leaf, torch.Tensor) for part in memory_of(leaf)]
    parts = [part for part in parts if part.data_ptr() not in known]
    copies = {_sample(part) for part in parts}
    lacking = [(name, part) for name, part in lacking if _sample(part) not in copies]
    sizes = {part.numel() for _, part in lacking}
    others = [part.nbytes for part in parts if part.numel() not in sizes]
    others += [memoryview(leaf).nbytes for leaf in leaves if not isinstance(leaf, torch.Tensor)]
    return [name for name, _ in lacking] if sum(others) < sum(part.nbytes for _, part in lacking) else []


def _sample(part: torch.Tensor) -> tuple[int, str]:
    return part.numel(), str(part.detach().reshape(-1)[:_SAMPLE_ELEMENTS].tolist())


class Averaged:
    """Which gradients were averaged in the open step, until each optimizer has taken a step with others. Any thread may note.

    Args:
        party: this rank's name.
    """

    def __init__(self, party: str) -> None:
        self._party = party
        self.unchecked: list[torch.optim.Optimizer] = []
        """What they train has to be averaged, and they have not taken a step with others."""
        self._named: dict[int, Sequence[torch.nn.Parameter]] = {}
        """Of which somebody said that their gradients are averaged, each list once."""
        self._tensors: list[tuple[int, int]] = []
        """Memory and elements of those of which nobody said what they hold."""

    def begin_step(self) -> None:
        self._named.clear()
        self._tensors.clear()

    def note(
        self, tensor: torch.Tensor, reduce_op: ReduceOp.RedOpType, of: Sequence[torch.nn.Parameter] | None
    ) -> None:
        """A tensor is averaged; `of`: the parameters whose gradients it holds."""
        if of is not None:
            self._named[id(of)] = of
        elif tensor.is_floating_point() and reduce_op in (ReduceOp.AVG, ReduceOp.SUM):
            self._tensors += [(part.untyped_storage().data_ptr(), part.numel()) for part in memory_of(tensor)]

    def check(self, optimizer: torch.optim.Optimizer, names: Mapping[int, str], step: int, num_groups: int) -> None:
        """An optimizer takes a step that several groups have averaged something in: name what it trains by its own gradients.

        Nothing is said where copies of these may have been averaged, because as many other elements were.

        Args:
            optimizer: the one that steps.
            names: of all parameters of optimizers, by `id`.
            step: which.
            num_groups: that have committed it.
        """
        if optimizer not in self.unchecked or not (self._named or self._tensors):
            return
        self.unchecked.remove(optimizer)
        named = {id(parameter): parameter for parameters in self._named.values() for parameter in parameters}
        others, own = dict(self._tensors), dict[int, torch.Tensor]()
        averaged = set(others)
        for parameter in (p for one in with_inner([optimizer]) for group in one.param_groups for p in group["params"]):
            gradient = parameter.grad
            if gradient is None or is_dtensor(parameter) or gradient.layout is not torch.strided:
                continue  # sharded ones are named where `fully_shard` is told to average
            others.pop(place := gradient.untyped_storage().data_ptr(), None)
            if place not in averaged and id(parameter) not in named:
                own[id(parameter)] = parameter
        num_others = sum(others.values()) + sum(p.numel() for key, p in named.items() if key not in names)
        if sum(parameter.numel() for parameter in own.values()) > num_others:
            logger.warning(
                "%s: step %d was committed by %d replica groups, and nobody averaged the gradients of parameters that %s"
                " trains (%d: %s). Each group goes on with its own, and they drift apart. Put them into a module that"
                " DistributedDataParallel wraps, or average their gradients by Manager.allreduce",
                self._party,
                step,
                num_groups,
                type(optimizer).__name__,
                len(own),
                name_some(names.get(key) or f"one of shape {tuple(p.shape)}" for key, p in own.items()),
            )
