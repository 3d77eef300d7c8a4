"""Finds what is trained here and comes apart between replica groups: what is in no state, and what nobody averages."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.distributed import ReduceOp

from torchft_ckpt.checkpointing.state.shards import is_dtensor, memory_of
from torchft_ckpt.core.coordination.messages import name_some
from torchft_ckpt.manager.optimizer_settings import with_inner
from torchft_ckpt.manager.volatile import leaves_in

logger = logging.getLogger(__name__)

_SAMPLE_ELEMENTS = 16


def left_out_of(state: Any, optimizers: Sequence[torch.optim.Optimizer], names: Mapping[int, str]) -> list[str]:
    """Return what optimizers train, and remember of it, that a state does not hold, neither as that memory nor as a copy.

    Nothing where that is not known, because the state has as many bytes in another form. Parameters that are frozen do not count,
    nor single numbers that are remembered, as Adam's steps are. On the training thread.

    Args:
        state: as the registered functions returned it.
        optimizers: each once.
        names: of their parameters, by `id`.
    """
    leaves = list(leaves_in(state))
    parts = [part for leaf in leaves if isinstance(leaf, torch.Tensor) for part in memory_of(leaf)]
    addresses = {part.data_ptr() for part in parts}
    trained = {part.data_ptr(): (name, part) for name, part in _trained(optimizers, names)}
    lacking = [trained[address] for address in trained if address not in addresses]
    if not lacking:
        return []
    parts = [part for part in parts if part.data_ptr() not in trained]
    copies = {_sample(part) for part in parts}
    lacking = [(name, part) for name, part in lacking if _sample(part) not in copies]
    sizes = {part.numel() for _, part in lacking}
    others = [part.nbytes for part in parts if part.numel() not in sizes]
    others += [memoryview(leaf).nbytes for leaf in leaves if not isinstance(leaf, torch.Tensor)]
    return [name for name, _ in lacking] if sum(others) < sum(part.nbytes for _, part in lacking) else []


def _trained(
    optimizers: Sequence[torch.optim.Optimizer], names: Mapping[int, str]
) -> Iterator[tuple[str, torch.Tensor]]:
    for optimizer in optimizers:
        kind = type(optimizer).__name__
        for parameter in (parameter for group in optimizer.param_groups for parameter in group["params"]):
            if not parameter.requires_grad:
                continue
            name = names[id(parameter)]
            yield from ((name, part) for part in memory_of(parameter))
            state = optimizer.state.get(parameter)
            for key, value in state.items() if isinstance(state, Mapping) else ():
                if isinstance(value, torch.Tensor) and value.numel() > 1:
                    yield from ((f"{key} of {name} in {kind}", part) for part in memory_of(value))


def _sample(part: torch.Tensor) -> tuple[int, str]:
    return part.numel(), str(part.detach().reshape(-1)[:_SAMPLE_ELEMENTS].tolist())


class Averaged:
    """Which gradients were averaged in the open step, until each optimizer has taken a step with others.

    Any thread may note; the rest belongs to the training thread.

    Args:
        party: this rank's name.
    """

    def __init__(self, party: str) -> None:
        self._party = party
        self._unchecked: list[torch.optim.Optimizer] = []
        self._named: dict[int, Sequence[torch.nn.Parameter]] = {}
        """The parameters whose gradients somebody said to average, each list once."""
        self._tensors: list[tuple[int, int, int]] = []
        """Address, bytes and elements of those of which nobody has said what they hold."""

    def watch(self, optimizer: torch.optim.Optimizer) -> None:
        """What this one trains has to be averaged."""
        self._unchecked.append(optimizer)

    @property
    def is_noting(self) -> bool:
        return bool(self._unchecked)

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
            self._tensors += [(part.data_ptr(), part.nbytes, part.numel()) for part in memory_of(tensor)]

    def check(
        self, optimizer: torch.optim.Optimizer, names: Mapping[int, str], *, step: int, num_participants: int
    ) -> None:
        """An optimizer takes a step that several groups have averaged something in: name what it trains by its own gradients.

        Nothing is said where a copy of these gradients may have been averaged, because so many other elements were.
        """
        if optimizer not in self._unchecked or not (self._named or self._tensors):
            return
        self._unchecked.remove(optimizer)
        own: dict[int, torch.Tensor] = {}
        named = {id(parameter) for parameters in self._named.values() for parameter in parameters}
        spare = list(self._tensors)
        for parameter in (p for one in with_inner([optimizer]) for group in one.param_groups for p in group["params"]):
            gradient = parameter.grad
            if gradient is None or is_dtensor(parameter) or gradient.layout is not torch.strided:
                continue  # sharded ones are named where `fully_shard` is told to average
            holders = [t for t in self._tensors if t[0] <= gradient.data_ptr() < t[0] + t[1]]
            spare = [t for t in spare if t not in holders]
            if not holders and id(parameter) not in named:
                own[id(parameter)] = parameter
        num_elements = sum(parameter.numel() for parameter in own.values())
        if own and num_elements > sum(t[2] for t in spare):
            logger.warning(
                "%s: step %d was committed by %d replica groups, and nobody averaged the gradients of %d parameters that %s"
                " trains: %s. Each group goes on with its own, and they drift apart. Put them into a module that"
                " DistributedDataParallel wraps, or average their gradients by Manager.allreduce",
                self._party,
                step,
                num_participants,
                len(own),
                type(optimizer).__name__,
                name_some(names.get(key, f"one of shape {tuple(parameter.shape)}") for key, parameter in own.items()),
            )
