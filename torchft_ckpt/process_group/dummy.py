"""A group of one that moves nothing: for code that insists on a process group, such as the constructor of torch's DDP."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
from torch.distributed import Work
from torch.distributed.distributed_c10d import (
    AllgatherOptions,
    AllreduceCoalescedOptions,
    AllreduceOptions,
    AllToAllOptions,
    BarrierOptions,
    BroadcastOptions,
    ReduceOp,
    ReduceScatterOptions,
)

from torchft_ckpt.errors import ConfigError
from torchft_ckpt.process_group.base import ProcessGroup, Tensors


class CompletedWork(Work):
    """An operation that was over when it was started.

    Args:
        result: the value of its future.
    """

    def __init__(self, result: Any) -> None:
        super().__init__()
        self._future: torch.futures.Future[Any] = torch.futures.Future()
        self._future.set_result(result)

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Return at once."""
        return True

    def get_future(self) -> torch.futures.Future[Any]:
        """Return the future, which has its value."""
        return self._future

    def is_completed(self) -> bool:
        """It is."""
        return True

    def is_success(self) -> bool:
        """It is."""
        return True

    def synchronize(self) -> None:
        """Nothing to wait for."""


class ProcessGroupDummy(ProcessGroup):
    """A group of one member. Collectives copy what they would copy in a group of one, and return completed work.

    Args:
        rank: must be 0.
        world: must be 1.

    Raises:
        ConfigError: another rank or size was asked for.
    """

    def __init__(self, rank: int, world: int) -> None:
        if (rank, world) != (0, 1):
            raise ConfigError(f"ProcessGroupDummy is a group of one, not rank {rank} of {world}", party="world")
        super().__init__(rank, world)  # type: ignore[call-arg]  # rank and size; the stub lacks this constructor
        self.configure_count = 0

    def configure(
        self,
        store_addr: str,
        replica_id: str,
        rank: int,
        world_size: int,
        quorum_id: int | None = None,
        group_rank: int | None = None,
        group_world_size: int | None = None,
        global_ranks: list[int] | None = None,
    ) -> None:
        """Count it, and do nothing: it stays a group of one."""
        self.configure_count += 1

    def allreduce(  # type: ignore[override]
        self, tensors: Tensors, opts: AllreduceOptions | ReduceOp | None = None
    ) -> Work:
        return CompletedWork(tensors)

    def allreduce_coalesced(self, tensors: Tensors, opts: AllreduceCoalescedOptions | None = None) -> Work:
        return CompletedWork(tensors)

    def allgather(  # type: ignore[override]
        self, output_tensors: list[Tensors], input_tensor: Tensors, opts: AllgatherOptions | None = None
    ) -> Work:
        for outputs, tensor in zip(output_tensors, input_tensor, strict=True):
            outputs[0].copy_(tensor)
        return CompletedWork(output_tensors)

    def allgather_into_tensor_coalesced(
        self, output_tensors: Tensors, input_tensors: Tensors, opts: AllgatherOptions | None = None
    ) -> Work:
        return _copy(output_tensors, input_tensors)

    def alltoall_base(  # type: ignore[override]
        self,
        output_buffer: torch.Tensor,
        input_buffer: torch.Tensor,
        output_split_sizes: list[int],
        input_split_sizes: list[int],
        opts: AllToAllOptions | None = None,
    ) -> Work:
        return _copy([output_buffer], [input_buffer])

    def barrier(self, opts: BarrierOptions | None = None) -> Work:  # type: ignore[override]
        return CompletedWork(None)

    def broadcast(  # type: ignore[override]
        self, tensor_list: Tensors, opts: BroadcastOptions | None = None
    ) -> Work:
        return CompletedWork(tensor_list)

    def reduce_scatter(  # type: ignore[override]
        self, output_tensors: Tensors, input_tensors: list[Tensors], opts: ReduceScatterOptions | None = None
    ) -> Work:
        return _copy(output_tensors, [inputs[0] for inputs in input_tensors])

    def reduce_scatter_tensor_coalesced(
        self, output_tensors: Tensors, input_tensors: Tensors, opts: ReduceScatterOptions | None = None
    ) -> Work:
        return _copy(output_tensors, input_tensors)

    def send(self, tensors: Tensors, dst_rank: int, tag: int = 0) -> Work:
        return CompletedWork(None)

    def recv(self, tensors: Tensors, src_rank: int, tag: int = 0) -> Work:
        return CompletedWork(None)

    def size(self) -> int:
        return 1

    def getBackendName(self) -> str:
        return "torchft-ckpt-dummy"

    def set_timeout(self, timeout: timedelta) -> None:
        """Do nothing: no operation takes time."""


def _copy(outputs: Tensors, inputs: Tensors) -> Work:
    for output, tensor in zip(outputs, inputs, strict=True):
        output.copy_(tensor)
    return CompletedWork(outputs)
