"""Managers that average over a group in memory and know no lighthouse: what a backward pass computes."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import ReduceOp, Work

from support.fake_process_group import FakeFabric, FakeProcessGroup
from torchft_ckpt.core.training.graphs import OpenGraphs
from torchft_ckpt.manager.collectives import ManagedWork, done_work

LIMIT = timedelta(seconds=20)


class Averaging:
    """Stands for a manager: averages over the groups that contribute, as a manager does, and notes what it was asked for.

    Args:
        group: of this replica, connected.
        num_contributing: how many members contribute.
        contributes: whether this one does.
    """

    computes_by_microbatches = False

    def __init__(self, group: FakeProcessGroup, num_contributing: int, contributes: bool = True) -> None:
        self.num_contributing = num_contributing
        self.contributes = contributes
        self.asked: list[tuple[torch.dtype, tuple[int, ...], ReduceOp.RedOpType]] = []
        self.errors: list[Exception] = []
        self._group = group
        self.hooks, self.open_graphs = self, OpenGraphs(lambda: None)

    def ensure_step(self, *, is_training: bool = True) -> None: ...

    def is_participating(self) -> bool:
        return self.contributes

    def allreduce(
        self, tensor: torch.Tensor, *, reduce_op: ReduceOp.RedOpType = ReduceOp.AVG, of: object = None
    ) -> Work:
        self.asked.append((tensor.dtype, tuple(tensor.shape), reduce_op))
        if self.errors:
            return done_work(tensor, self._has_failed)
        if not self.contributes:
            tensor.zero_()
        divisor = self.num_contributing if reduce_op == ReduceOp.AVG else None

        def finish(done: torch.futures.Future[Any]) -> torch.Tensor:
            done.value()
            return tensor if divisor is None else tensor.div_(divisor)

        return ManagedWork(self._group.allreduce([tensor]).get_future().then(finish), self._has_failed)

    def _has_failed(self) -> bool:
        return bool(self.errors)


def connect(fabric: FakeFabric, rank: int, contributes: Sequence[bool]) -> Averaging:
    """Return the manager of one replica, when all have come."""
    group = FakeProcessGroup(fabric, LIMIT)
    group.configure("store/averaging", f"group_{rank}", rank, len(contributes))
    return Averaging(group, sum(contributes), contributes[rank])


def connect_alone() -> Any:
    """Return the manager of a replica that trains alone."""
    return connect(FakeFabric(), 0, [True])
