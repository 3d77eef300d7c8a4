"""Groups without a backend: a group of one that moves nothing, and groups around another one.

The one of one is for code that insists on a process group, such as the constructor of torch's DDP. Around another one there are
one that passes all on, the manager's, one whose caller sees no errors, and one that fails.
"""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import Any, Protocol

import torch
from torch.distributed import Work
from torch.distributed.distributed_c10d import AllreduceOptions, ReduceOp

from torchft_ckpt.errors import ConfigError, ProcessGroupError
from torchft_ckpt.process_group.base import ProcessGroup, Tensors

_Future = torch.futures.Future[Any]


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


class ProcessGroupWrapper(ProcessGroup):
    """A process group around another one.

    Args:
        timeout: there for torchft's sake: the operations' timeouts are those of `pg`.
        pg: the group to pass everything on to. A subclass that is given none has to do everything itself.
    """

    def __init__(self, timeout: timedelta = timedelta(seconds=60), pg: ProcessGroup | None = None) -> None:
        super().__init__(0, 1)  # type: ignore[call-arg]  # rank and size; the stub lacks this constructor
        self._pg = pg

    @property
    def parent(self) -> ProcessGroup:
        """The group that was handed in.

        Raises:
            ProcessGroupError: none was.
        """
        if self._pg is None:
            raise ProcessGroupError(f"{self!r} is around no group that was handed in")
        return self._pg

    def configure(self, *arguments: Any, **options: Any) -> None:
        self.parent.configure(*arguments, **options)

    def _start_collective(self, collective: str, *arguments: Any) -> Work:
        return getattr(self.parent, collective)(*arguments)

    def abort(self, errored: bool = True) -> None:
        self.parent.abort(errored)

    def shutdown(self) -> None:
        self.parent.shutdown()

    def errored(self) -> Exception | None:
        return self.parent.errored()

    def prepare_store(self, store_addr: str) -> threading.Event:
        return self.parent.prepare_store(store_addr)

    def set_timeout(self, timeout: timedelta) -> None:
        self.parent.set_timeout(timeout)

    def use_hostname(self, hostname: str) -> None:
        self.parent.use_hostname(hostname)

    def size(self) -> int:
        return self.parent.size()

    def rank(self) -> int:
        """Return this process's rank in the group."""
        return self.parent.rank()

    def getBackendName(self) -> str:
        return self.parent.getBackendName()

    def __repr__(self) -> str:
        return f"{type(self).__name__}(pg={self._pg!r})"


class Averager(Protocol):
    """The part of a `Manager` that a managed group uses; this floor does not know managers."""

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


class ErrorSwallowingProcessGroupWrapper(ProcessGroupWrapper):
    """A group whose allreduce never raises: after an error all of them do nothing until the next configure.

    For loops without a Manager, which has to look at `error()` before it uses a result: tensors of a failed allreduce, and of all
    that come after it, hold no average.
    """

    def __init__(self, pg: ProcessGroup) -> None:
        super().__init__(pg=pg)
        self._error: Exception | None = None

    def configure(self, *arguments: Any, **options: Any) -> None:
        self._error = None
        super().configure(*arguments, **options)

    def report_error(self, error: Exception) -> None:
        """Do nothing in each allreduce from now on, until the next configure."""
        self._error = error

    def error(self) -> Exception | None:
        """Return the last error since the last configure."""
        return self._error

    def allreduce(  # type: ignore[override]
        self, tensors: Tensors, opts: AllreduceOptions | ReduceOp | None = None
    ) -> Work:
        if self._error is not None:
            return CompletedWork(tensors)
        try:
            future = super().allreduce(tensors, opts).get_future()
        except (RuntimeError, ProcessGroupError) as error:
            self.report_error(error)
            return CompletedWork(tensors)

        def swallow(done: _Future) -> Any:
            try:
                return done.value()
            except (RuntimeError, ProcessGroupError) as error:
                self.report_error(error)
                return tensors

        return WorkOfFuture(future.then(swallow))


class FakeProcessGroupWrapper(ProcessGroupWrapper):
    """A group whose next allreduce fails when a test says so; the other members' succeeds."""

    def __init__(self, pg: ProcessGroup) -> None:
        super().__init__(pg=pg)
        self._future_error: Exception | None = None

    def configure(self, *arguments: Any, **options: Any) -> None:
        self._future_error = None
        super().configure(*arguments, **options)

    def report_future_error(self, error: Exception) -> None:
        """Let the next allreduce take place, and fail here with this."""
        self._future_error = error

    def allreduce(  # type: ignore[override]
        self, tensors: Tensors, opts: AllreduceOptions | ReduceOp | None = None
    ) -> Work:
        work = super().allreduce(tensors, opts)
        error, self._future_error = self._future_error, None
        if error is None:
            return work

        def fail(_: _Future, error: Exception = error) -> Any:
            raise error

        return WorkOfFuture(work.get_future().then(fail))
