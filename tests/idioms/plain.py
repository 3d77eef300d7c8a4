"""The plain loop: what all groups together compute, with torch's own DDP and optimizers and no fault tolerance at all.

Each group is a thread. They meet at a `Hub`, which averages in memory. A `Plan` says who contributes to which step, as it was
in the run that is compared; whoever does not contribute to a step adds zeros and takes its outcome, so nobody here ever dies or
heals.
"""

from __future__ import annotations

import functools
import threading
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed import ReduceOp
from torch.distributed.distributed_c10d import AllreduceOptions
from torch.nn import parallel

from torchft_ckpt.checkpointing import StateDictLock
from torchft_ckpt.core.training.shared_step import SharedStep
from torchft_ckpt.process_group import CompletedWork, ProcessGroupDummy
from torchft_ckpt.process_group.base import Tensors

WAIT_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Iteration:
    """One iteration that was voted on."""

    committed: bool
    contributors: frozenset[int]
    """The groups whose gradients are averaged."""
    silent: frozenset[int] = frozenset()
    """The groups that are there and add zeros."""


class Hub:
    """Where the groups' collectives meet; the sum is taken in the order of the groups."""

    def __init__(self, num_groups: int) -> None:
        self._barrier = threading.Barrier(num_groups, timeout=WAIT_S)
        self._brought: list[torch.Tensor | None] = [None] * num_groups

    def reduce(self, group: int, tensor: torch.Tensor, iteration: Iteration, op: object) -> torch.Tensor:
        """Return the reduction over those who contribute; whoever is there besides adds zeros to a sum."""
        self._brought[group] = tensor
        self._barrier.wait()
        parts = [self._brought[group] for group in sorted(iteration.contributors)]
        if op in (ReduceOp.MAX, ReduceOp.MIN):
            stacked = torch.stack(parts)  # type: ignore[arg-type]
            result = stacked.amax(0) if op == ReduceOp.MAX else stacked.amin(0)
        else:
            result = sum(parts[1:], start=parts[0].clone())  # type: ignore[arg-type, union-attr]
            if iteration.silent:
                result += torch.zeros_like(result)  # a zero that was negative is not any more
        if op == ReduceOp.AVG:
            result /= len(parts)
        self._barrier.wait()
        return result

    def give_up(self) -> None:
        self._barrier.abort()


class PlainManager:
    """What a loop asks of its manager, answered from the plan."""

    def __init__(self, hub: Hub, group: int, plan: Sequence[Iteration], *, on_begin: Callable[[], None]) -> None:
        self._on_begin = on_begin
        self._hub = hub
        self._group = group
        self._plan = plan
        self._place = 0
        self._step = 0
        self._is_open = False
        self.sharing = SharedStep()
        self._batches_committed = 0
        self._has_skipped = False
        self.extras: dict[str, Callable[[], Any]] = {}
        self.outer_schedulers: list[Any] = []
        self.state_dict_lock = StateDictLock()

    @property
    def is_over(self) -> bool:
        return self._place >= len(self._plan)

    @property
    def is_open(self) -> bool:
        return self._is_open

    @property
    def iteration(self) -> Iteration:
        """The open one, or between two of them the one that was decided last."""
        place = self._place if self._is_open or self._place == 0 else self._place - 1
        return self._plan[min(place, len(self._plan) - 1)]

    def register_state_dict_fn(
        self, key: str, load_state_dict: Callable[[Any], None], state_dict: Callable[[], Any], **_: Any
    ) -> None:
        self.extras[key] = state_dict

    def set_state_dict_fns(self, load_state_dict: Callable[[Any], None], state_dict: Callable[[], Any]) -> None:
        self.extras["set_state_dict_fns"] = state_dict

    def guard_optimizer(self, optimizer: torch.optim.Optimizer) -> None: ...

    def scheduler(self, scheduler: Any, name: str = "scheduler") -> Any:
        """Have a scheduler step only in iterations that are committed and in which weights have changed."""
        step = scheduler.step
        self.extras[name] = lambda: {key: value for key, value in scheduler.state_dict().items() if key != "step"}
        scheduler.step = lambda *metric: step(*metric) if self._counts and not self._has_skipped else None
        return scheduler

    def outer_scheduler(self, scheduler: Any) -> Any:
        """Have a scheduler of an outer optimizer step in rounds that are committed, and only there."""
        self.extras["scheduler"] = lambda: scheduler.state_dict()
        self.outer_schedulers.append(scheduler)
        return types.SimpleNamespace(step=lambda: None)

    def grad_scaler(self, scaler: Any, name: str = "grad_scaler") -> Any:
        """Have a scaler change its scale only in iterations that are committed; one that overflows is one too."""
        step, update = scaler.step, scaler.update
        self.extras[name] = scaler.state_dict

        def step_or_skip(optimizer: Any) -> bool:
            has_stepped = step(optimizer)
            if has_stepped is None:
                self.sharing.steps(optimizer)
                self._has_skipped = self.should_commit()
            return bool(has_stepped)

        scaler.step = step_or_skip
        scaler.update = lambda: update() if self._counts else update(scaler.get_scale())
        return scaler

    @property
    def _counts(self) -> bool:
        return not self._is_open and self.iteration.committed

    def start_quorum(self, **_: Any) -> None:
        if self._is_open and not self.iteration.committed and not self.sharing.joins_open:
            self._place += 1  # nobody voted here on what the others discarded
        self._is_open, self._has_skipped = True, False
        self._on_begin()

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._step, self._batches_committed = state["step"], state["batches_committed"]

    def ensure_step(self) -> None:
        """A forward pass begins: a loop that has not cleared the gradients of what was discarded tries again without them."""
        if self._is_open:
            return
        if self._place and not self.iteration.committed:
            for optimizer in self.sharing.again():
                for parameter in (p for group in optimizer.param_groups for p in group["params"]):  # type: ignore[attr-defined]
                    parameter.grad = None
        else:
            self.sharing.begins()
        self._is_open, self._has_skipped = True, False

    def wait_quorum(self) -> None: ...

    def should_commit(self) -> bool:
        iteration = self.iteration
        if not self._is_open and self._place:
            return iteration.committed  # asked for again
        self._place += 1
        self._is_open = False
        if iteration.committed:
            self._step += 1
            self._batches_committed += len(iteration.contributors)
        else:
            self._on_begin()
        return iteration.committed

    def allreduce(self, tensor: torch.Tensor, reduce_op: ReduceOp.RedOpType = ReduceOp.AVG) -> CompletedWork:
        iteration = self.iteration
        if iteration.committed:  # else nobody looks at it, and who is there in it is not known
            tensor.copy_(self._hub.reduce(self._group, tensor, iteration, reduce_op))
        return CompletedWork(tensor)

    def current_step(self) -> int:
        return self._step

    def last_step_counted(self) -> bool:
        return self._place > 0 and self._plan[self._place - 1].committed

    def batches_committed(self) -> int:
        return self._batches_committed

    def num_participants(self) -> int:
        return len(self.iteration.contributors)

    def is_participating(self) -> bool:
        return self._group in self.iteration.contributors

    def report_error(self, error: Exception) -> None: ...

    def disallow_state_dict_read(self) -> None: ...

    def allow_state_dict_read(self) -> None: ...


class PlainProcessGroup(ProcessGroupDummy):
    """What torch's DDP exchanges besides gradients: which parameters were used anywhere."""

    def __init__(self, manager: PlainManager) -> None:
        super().__init__(0, 1)
        self._manager = manager

    def allreduce(  # type: ignore[override]
        self, tensors: Tensors, opts: AllreduceOptions | ReduceOp | None = None
    ) -> CompletedWork:
        for tensor in tensors:
            self._manager.allreduce(tensor, ReduceOp.SUM)
        return CompletedWork(tensors)


class PlainDDP(parallel.DistributedDataParallel):
    """torch's DDP over the groups that contribute."""

    def __init__(self, manager: PlainManager, module: nn.Module, **kwargs: Any) -> None:
        options = {"find_unused_parameters": True, **kwargs}
        super().__init__(module, init_sync=False, process_group=PlainProcessGroup(manager), **options)
        self._manager = manager
        self.register_comm_hook(manager, _average)

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled() and self.training:
            self._manager.ensure_step()
        return super().forward(*inputs, **kwargs)


def _average(manager, bucket):  # type: ignore[no-untyped-def]  # torch reads annotations, which are postponed here
    manager.allreduce(bucket.buffer())
    return CompletedWork(bucket.buffer()).get_future()


def drop_unused(manager: PlainManager, parameters: Sequence[nn.Parameter]) -> None:
    """Take the gradients of zeros from who used a parameter that no contributor used; to an optimizer they are not none."""
    used = torch.tensor([parameter.grad is not None for parameter in parameters], dtype=torch.int32)
    manager.allreduce(used, ReduceOp.SUM)
    for parameter, num_groups in zip(parameters, used.tolist(), strict=True):
        if not num_groups:
            parameter.grad = None


def step_as_planned(manager: PlainManager, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Have torch's own optimizer step only in iterations that are committed."""
    zero_grad, step = optimizer.zero_grad, optimizer.step

    @functools.wraps(zero_grad)
    def begin(_: torch.optim.Optimizer, set_to_none: bool = True) -> None:
        if manager.sharing.clears(optimizer, is_decided=not manager.is_open):
            manager.start_quorum()
        zero_grad(set_to_none)

    @functools.wraps(step)
    def end(_: torch.optim.Optimizer, closure: Callable[[], object] | None = None) -> bool:
        if closure is not None:
            closure()
        manager.sharing.steps(optimizer)
        if manager.iteration.committed:
            drop_unused(manager, [p for group in optimizer.param_groups for p in group["params"]])
        counts = manager.should_commit()
        if counts:
            step()
        return counts

    optimizer.zero_grad = types.MethodType(begin, optimizer)  # type: ignore[method-assign]
    optimizer.step = types.MethodType(end, optimizer)  # type: ignore[method-assign]
    return optimizer
