"""A process group in memory: its members are threads of one process, its network is a `FakeFabric`.

It behaves as ProcessGroupGloo does, as far as a manager can see:
- configure blocks until all members of the same `store_addr` have come, or a timeout;
- a collective completes when every member has started it; an allreduce with the same bits everywhere (reduced in rank order);
- abort frees this member at once, and breaks the connections: the others' operations fail, now or when they start;
- after an error `errored()` is not None until the next configure.

What it does not do: an operation's timeout counts only while somebody waits for its work, and all-to-all splits evenly only.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import Work
from torch.distributed.distributed_c10d import AllreduceOptions, ReduceOp

from torchft_ckpt.errors import (
    CollectiveFailedError,
    ProcessGroupAbortedError,
    ProcessGroupConfigureError,
    ProcessGroupError,
)
from torchft_ckpt.process_group.base import ProcessGroup, Tensors

Reduction = Callable[[list[torch.Tensor]], torch.Tensor]
# From what each rank put in, in rank order, to what one rank gets: one tensor for each of its outputs.
Exchange = Callable[[list[Tensors]], Tensors]


class FakeFabric:
    """The network that fake groups meet on. Any thread may call it."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.configured: list[tuple[str, str, int, int]] = []
        """What was configured, in order: store_addr, replica_id, rank, world_size."""
        self._rings: dict[str, _Ring] = {}

    def join(self, store_addr: str, member: FakeProcessGroup, rank: int, world_size: int) -> _Ring:
        """Enter a member; with `changed` held.

        Raises:
            ProcessGroupConfigureError: the prefix was used before, or the members disagree on the world size.
        """
        ring = self._rings.setdefault(store_addr, _Ring(store_addr, world_size))
        if ring.world_size != world_size or rank in ring.members or ring.error is not None:
            raise ProcessGroupConfigureError(
                f"rank {rank} of {world_size} cannot enter {ring!r}: a store prefix must be used for one group only",
                party=store_addr,
            )
        ring.members[rank] = member
        return ring


class _Operation:
    """A collective: each rank's inputs, outputs and result, and the works to complete."""

    def __init__(self) -> None:
        self.exchanges: dict[int, Exchange] = {}
        self.inputs: dict[int, Tensors] = {}
        self.outputs: dict[int, Tensors] = {}
        self.results: dict[int, Any] = {}
        self.works: dict[int, FakeWork] = {}


class _Ring:
    def __init__(self, store_addr: str, world_size: int) -> None:
        self.store_addr = store_addr
        self.world_size = world_size
        self.members: dict[int, FakeProcessGroup] = {}
        self.operations: dict[int, _Operation] = {}
        self.num_started: dict[int, int] = {}
        self.error: ProcessGroupError | None = None

    def __repr__(self) -> str:
        return f"{self.store_addr} (ranks {sorted(self.members)} of {self.world_size} came)"


class FakeWork(Work):
    """An operation in flight on the fabric."""

    def __init__(self, group: FakeProcessGroup, timeout: timedelta) -> None:
        super().__init__()
        self._group = group
        self._timeout = timeout
        self._over = threading.Event()
        self._error: ProcessGroupError | None = None
        self._future: torch.futures.Future[Any] = torch.futures.Future()

    def finish(self, result: Any, error: ProcessGroupError | None) -> None:
        """Complete it; called once, without the fabric's lock, because callbacks run in it."""
        self._error = error
        self._over.set()
        if error is None:
            self._future.set_result(result)
        else:
            self._future.set_exception(copy.copy(error))

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Block until it is over.

        Raises:
            ProcessGroupError: it failed, or its timeout passed.
        """
        patience = timeout if timeout > timedelta(0) else self._timeout
        if not self._over.wait(patience.total_seconds()):
            self._group.fail(CollectiveFailedError(f"a collective was not done after {patience.total_seconds():.3f} s"))
            self._over.wait()
        if self._error is not None:
            raise copy.copy(self._error)
        return True

    def get_future(self) -> torch.futures.Future[Any]:
        return self._future

    def is_completed(self) -> bool:
        return self._over.is_set()

    def is_success(self) -> bool:
        return self._over.is_set() and self._error is None


class FakeProcessGroup(ProcessGroup):
    """A member on the fabric. Any thread may call it.

    Args:
        fabric: shared by all members.
        timeout: of an operation that somebody waits for, and of configure.
    """

    def __init__(self, fabric: FakeFabric, timeout: timedelta = timedelta(seconds=10)) -> None:
        super().__init__(0, 1)  # type: ignore[call-arg]  # rank and size; the stub lacks this constructor
        self._fabric = fabric
        self._timeout = timeout
        self._ring: _Ring | None = None
        self._rank = 0
        self._world_size = 1
        self._error: ProcessGroupError | None = None
        self._next_error: ProcessGroupError | None = None
        self._hangs_next = False
        self._num_configures = 0

    # --------------------------------------------------------------------------------------------- what a test tells it

    def fail_next(self, error: ProcessGroupError | None = None) -> None:
        """Make this member's next operation fail, as a lost peer would."""
        with self._fabric.changed:
            self._next_error = error or CollectiveFailedError("this collective was told to fail")

    def hang_next(self) -> None:
        """Make this member's next operation never arrive at the others: all wait until an abort or a timeout."""
        with self._fabric.changed:
            self._hangs_next = True

    def fail(self, error: ProcessGroupError) -> None:
        """Break this member's connections now; what is in flight fails with `error` here, and fails at the others too."""
        with self._fabric.changed:
            finished = self._leave(error)
        _finish(finished)

    # ------------------------------------------------------------------------------------------------ the group's contract

    def configure(self, store_addr: str, replica_id: str, rank: int, world_size: int, *_: Any, **__: Any) -> None:
        with self._fabric.changed:
            finished = self._leave(ProcessGroupAbortedError("the fake group was configured anew"))
        _finish(finished)
        with self._fabric.changed:
            self._num_configures += 1
            mine = self._num_configures
            ring = self._fabric.join(store_addr, self, rank, world_size)
            self._ring = ring
            self._fabric.changed.notify_all()
            self._fabric.changed.wait_for(
                lambda: len(ring.members) == world_size or self._ring is not ring or ring.error is not None,
                self._timeout.total_seconds(),
            )
            if self._num_configures != mine or self._ring is not ring:
                raise ProcessGroupAbortedError(f"aborted while connecting {ring!r}", party=replica_id)
            if len(ring.members) < world_size or ring.error is not None:
                error = ProcessGroupConfigureError(f"nobody else came to {ring!r}", party=store_addr)
                self._leave(error)
                raise error
            self._rank, self._world_size, self._error = rank, world_size, None
            self._fabric.configured.append((store_addr, replica_id, rank, world_size))

    def _start_collective(self, collective: str, *arguments: Any) -> Work:
        match collective, *arguments:
            case "allreduce", tensors, opts:
                op = opts.reduceOp if isinstance(opts, AllreduceOptions) else opts
                return self._enter(tensors, tensors, _each(_reduction(op)), tensors, opts)
            case "broadcast", tensors, opts:
                return self._enter(tensors, tensors, lambda parts: parts[opts.rootRank], tensors, opts)
            case "allgather", output_lists, inputs, opts:
                outputs = [tensor for tensors in output_lists for tensor in tensors]

                def gather(parts: list[Tensors]) -> Tensors:
                    return [part[index] for index in range(len(inputs)) for part in parts]

                return self._enter(inputs, outputs, gather, output_lists, opts)
            case "allgather_into_tensor_coalesced", outputs, inputs, opts:
                return self._enter(inputs, outputs, _each(torch.cat), outputs, opts)
            case "alltoall_base", output, given, [], [], opts:
                rank, size = self._rank, self._world_size

                def pick(parts: list[Tensors]) -> Tensors:
                    return [torch.cat([part[0].tensor_split(size)[rank] for part in parts])]

                return self._enter([given], [output], pick, [output], opts)
            case "alltoall_base", *_:
                raise ProcessGroupError("FakeProcessGroup.alltoall_base splits evenly only: pass no sizes")
            case "barrier", opts:
                return self._enter([], [], lambda parts: [], [], opts)
        return super()._start_collective(collective, *arguments)

    def abort(self, errored: bool = True) -> None:
        self.fail(ProcessGroupAbortedError("the fake group was aborted"))

    def shutdown(self) -> None:
        self.fail(ProcessGroupAbortedError("the fake group was shut down"))

    def errored(self) -> Exception | None:
        with self._fabric.changed:
            return self._error

    def set_timeout(self, timeout: timedelta) -> None:
        self._timeout = timeout

    def size(self) -> int:
        return self._world_size

    def rank(self) -> int:
        return self._rank

    def getBackendName(self) -> str:
        return "torchft-ckpt-fake"

    def __repr__(self) -> str:
        return f"FakeProcessGroup(rank={self._rank}, size={self._world_size})"

    # -------------------------------------------------------------------------------------------------------------- inside

    def _enter(self, inputs: Tensors, outputs: Tensors, exchange: Exchange, result: object, opts: object) -> Work:
        """Start an operation whose future's value is `result`."""
        timeout = getattr(opts, "timeout", None)
        work = FakeWork(self, timeout if timeout is not None and timeout > timedelta(0) else self._timeout)
        with self._fabric.changed:
            ring, error = self._ring, self._next_error
            self._next_error = None
            if ring is None:
                raise copy.copy(self._error or ProcessGroupError(f"{self!r} was not configured yet"))
            number = ring.num_started.get(self._rank, 0)
            ring.num_started[self._rank] = number + 1
            operation = ring.operations.setdefault(number, _Operation())
            operation.works[self._rank] = work
            if ring.error is not None:
                error = error or ring.error
            finished: list[tuple[FakeWork, Any, ProcessGroupError | None]] = []
            if error is not None:
                finished = self._leave(error)
            elif self._hangs_next:
                self._hangs_next = False
            else:
                operation.inputs[self._rank] = inputs
                operation.outputs[self._rank] = outputs
                operation.exchanges[self._rank] = exchange
                operation.results[self._rank] = result
                if len(operation.inputs) == ring.world_size:
                    del ring.operations[number]
                    _carry_out(operation)
                    finished = [(done, operation.results[rank], None) for rank, done in operation.works.items()]
        _finish(finished)
        return work

    def _leave(self, error: ProcessGroupError) -> list[tuple[FakeWork, Any, ProcessGroupError | None]]:
        ring, self._ring = self._ring, None
        if ring is None:
            self._error = self._error or error
            return []
        self._error = error
        lost = CollectiveFailedError(f"rank {self._rank} of {ring!r} was lost", party=f"rank {self._rank}")
        finished: list[tuple[FakeWork, Any, ProcessGroupError | None]] = []
        for operation in ring.operations.values():
            for rank, work in operation.works.items():
                finished.append((work, None, error if rank == self._rank else lost))
                if rank != self._rank:
                    ring.members[rank]._lose(ring, lost)
        ring.operations.clear()
        ring.error = ring.error or lost
        self._fabric.changed.notify_all()
        return finished

    def _lose(self, ring: _Ring, error: ProcessGroupError) -> None:
        if self._ring is ring:
            self._ring = None
            self._error = error


def _finish(finished: list[tuple[FakeWork, Any, ProcessGroupError | None]]) -> None:
    for work, result, error in finished:
        work.finish(result, error)


def _reduction(op: object) -> Reduction:
    if op == ReduceOp.SUM:
        return sum_in_order
    if op == ReduceOp.AVG:
        return lambda parts: sum_in_order(parts) / len(parts)
    if op == ReduceOp.MAX:
        return lambda parts: torch.stack(parts).amax(0)
    if op == ReduceOp.MIN:
        return lambda parts: torch.stack(parts).amin(0)
    raise ProcessGroupError(f"FakeProcessGroup reduces by SUM, AVG, MAX and MIN, not by {op}")


def sum_in_order(parts: list[torch.Tensor]) -> torch.Tensor:
    total = parts[0].clone()
    for part in parts[1:]:
        total += part
    return total


def _each(reduction: Reduction) -> Exchange:
    return lambda parts: [reduction(list(tensors)) for tensors in zip(*parts, strict=True)]


def _carry_out(operation: _Operation) -> None:
    parts = [operation.inputs[rank] for rank in sorted(operation.inputs)]
    # All of them before anything is written: an output may be an input.
    received = {rank: exchange(parts) for rank, exchange in operation.exchanges.items()}
    for rank, tensors in received.items():
        for output, tensor in zip(operation.outputs[rank], tensors, strict=True):
            output.detach().copy_(tensor)
