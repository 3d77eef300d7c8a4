"""A group of one that moves nothing: for code that insists on a process group, such as the constructor of torch's DDP."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
from torch.distributed import Work

from torchft_ckpt.errors import ConfigError
from torchft_ckpt.process_group.base import ProcessGroup, Tensors


class WorkOfFuture(Work):
    """An operation that is over, and ends, as a future does."""

    def __init__(self, future: torch.futures.Future[Any]) -> None:
        super().__init__()
        self._future = future

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Block until it is over; raises what the future has."""
        self._future.wait()
        return True

    def get_future(self) -> torch.futures.Future[Any]:
        return self._future

    def is_completed(self) -> bool:
        return self._future.done()


class CompletedWork(WorkOfFuture):
    """An operation that was over when it was started.

    Args:
        result: the value of its future.
    """

    def __init__(self, result: Any) -> None:
        super().__init__(torch.futures.Future())
        self._future.set_result(result)

    def is_success(self) -> bool:
        return True

    def synchronize(self) -> None:
        """There is nothing to wait for."""


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

    def configure(self, *arguments: Any, **options: Any) -> None:
        """Count it, and do nothing: it stays a group of one."""
        self.configure_count += 1

    def _start_collective(self, collective: str, *arguments: Any) -> Work:
        match collective, *arguments:
            case "allreduce" | "allreduce_coalesced" | "broadcast", tensors, _:
                return CompletedWork(tensors)
            case "allgather", outputs, inputs, _:
                _copy([tensors[0] for tensors in outputs], inputs)
                return CompletedWork(outputs)
            case "reduce_scatter", outputs, inputs, _:
                return _copy(outputs, [tensors[0] for tensors in inputs])
            case "allgather_into_tensor_coalesced" | "reduce_scatter_tensor_coalesced", outputs, inputs, _:
                return _copy(outputs, inputs)
            case "alltoall_base", output, given, _, _, _:
                return _copy([output], [given])
            case "barrier" | "send" | "recv", *_:
                return CompletedWork(None)
        return super()._start_collective(collective, *arguments)

    def size(self) -> int:
        return 1

    def getBackendName(self) -> str:
        return "torchft-ckpt-dummy"

    def set_timeout(self, timeout: timedelta) -> None:
        """No operation takes time."""


def _copy(outputs: Tensors, inputs: Tensors) -> Work:
    for output, tensor in zip(outputs, inputs, strict=True):
        output.copy_(tensor)
    return CompletedWork(outputs)
