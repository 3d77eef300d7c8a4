"""The manager's view of its process group, for code that takes a process group and knows nothing of managers."""

from __future__ import annotations

from typing import Protocol

import torch
from torch.distributed import Work
from torch.distributed.distributed_c10d import AllreduceOptions, ReduceOp

from torchft_ckpt.process_group.base import ProcessGroup, Tensors
from torchft_ckpt.process_group.wrapper import ProcessGroupWrapper


class Averager(Protocol):
    """What is used here of a `Manager`, which this floor does not know."""

    _pg: ProcessGroup

    def allreduce(self, tensor: torch.Tensor, *, reduce_op: ReduceOp.RedOpType = ...) -> Work: ...

    def num_participants(self) -> int: ...


class ManagedProcessGroup(ProcessGroupWrapper):
    """A group whose allreduce is the manager's and whose size is the number of participants.

    Errors of an allreduce go to the manager, which discards the step; the caller sees none. Everything else goes to the
    manager's process group as it is.

    Args:
        manager: whose process group this is.
    """

    def __init__(self, manager: Averager) -> None:
        super().__init__(pg=manager._pg)
        self._manager = manager

    def allreduce(  # type: ignore[override]
        self, tensors: Tensors | torch.Tensor, opts: AllreduceOptions | ReduceOp | None = None
    ) -> Work:
        """Reduce one tensor over the participants, in place.

        Raises:
            ValueError: more than one tensor was given.
        """
        if isinstance(tensors, torch.Tensor):
            tensors = [tensors]
        if len(tensors) != 1:
            raise ValueError(f"ManagedProcessGroup.allreduce takes one tensor, not {len(tensors)}")
        if opts is None:
            return self._manager.allreduce(tensors[0])
        reduce_op = opts.reduceOp if isinstance(opts, AllreduceOptions) else opts
        # ReduceOp and its RedOpType compare equal; the stub does not know.
        return self._manager.allreduce(tensors[0], reduce_op=reduce_op)  # type: ignore[arg-type]

    def size(self) -> int:
        return self._manager.num_participants()
