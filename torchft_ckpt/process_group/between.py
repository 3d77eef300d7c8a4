"""Groups around another one with an allreduce of their own: the manager's, one whose caller sees no errors, one that fails."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any, Protocol

import torch
from torch.distributed import Work
from torch.distributed.distributed_c10d import AllreduceOptions, ReduceOp

from torchft_ckpt.errors import ProcessGroupError
from torchft_ckpt.process_group.base import ProcessGroup, Tensors
from torchft_ckpt.process_group.dummy import CompletedWork
from torchft_ckpt.process_group.wrapper import ProcessGroupWrapper

_Future = torch.futures.Future[Any]


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


class _WorkOf(Work):
    """An operation that is over, and ends, as a future does."""

    def __init__(self, future: _Future) -> None:
        super().__init__()
        self._future = future

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Block until it is over; raises what the future has."""
        self._future.wait()
        return True

    def get_future(self) -> _Future:
        """Return the future."""
        return self._future

    def is_completed(self) -> bool:
        """Whether it is over."""
        return self._future.done()


class _ErrorSwallowingWork(_WorkOf):
    """One whose errors go to its group."""


class ErrorSwallowingProcessGroupWrapper(ProcessGroupWrapper):
    """A group whose allreduce never raises: after an error all of them do nothing until the next configure.

    For loops without a Manager, which has to look at `error()` before it uses a result: tensors of a failed allreduce, and of all
    that come after it, hold no average.

    Args:
        pg: the group around which this is.
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

        return _ErrorSwallowingWork(future.then(swallow))


class FakeProcessGroupWrapper(ProcessGroupWrapper):
    """A group whose next allreduce fails when a test says so; the other members' succeeds.

    Args:
        pg: the group around which this is.
    """

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
        return work if error is None else _WorkOf(work.get_future().then(_raise(error)))


def _raise(error: Exception) -> Callable[[_Future], Any]:
    def fail(_: _Future) -> Any:
        raise error

    return fail
