"""Passes operations on to an inner group: one that was handed in, or one that each configure makes anew.

It decides which inner group an operation goes to and what `errored()` says. How an inner group lives and ends is
`session.py`'s; how one is made is a subclass's `_make_inner`.
"""

from __future__ import annotations

import copy
import threading
import warnings
from collections.abc import Callable
from datetime import timedelta

import torch
from torch.distributed import ProcessGroup as TorchProcessGroup
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

from torchft_ckpt.errors import ConfigError, ProcessGroupAbortedError, ProcessGroupError
from torchft_ckpt.process_group.base import ProcessGroup, Tensors
from torchft_ckpt.process_group.rendezvous import prepare_store
from torchft_ckpt.process_group.session import Phase, Session
from torchft_ckpt.process_group.store import StoreAddress

_CONNECT_TIMEOUT_MAX = timedelta(seconds=10)


def _accelerators() -> list[torch.device]:
    return [torch.device("cuda", torch.cuda.current_device())] if torch.cuda.is_available() else []


def set_default_timeout(group: TorchProcessGroup, timeout: timedelta) -> None:
    """Set the timeout of operations of torch's group whose options give none."""
    if hasattr(group, "set_timeout"):
        group.set_timeout(timeout)
        return
    for kind in group._device_types:  # an older torch, which does it for each backend
        group._get_backend(kind)._set_default_timeout(timeout)


class ProcessGroupWrapper(ProcessGroup):
    """A process group around another one.

    Args:
        timeout: of each operation whose options give none.
        pg: the group to pass everything on to; None if a subclass makes one at each configure.
        connect_timeout: of configure as a whole; by default `timeout`, but at most 10 s.
    """

    def __init__(
        self,
        timeout: timedelta = timedelta(seconds=60),
        pg: ProcessGroup | None = None,
        *,
        connect_timeout: timedelta | None = None,
    ) -> None:
        super().__init__(0, 1)  # type: ignore[call-arg]  # rank and size; the stub lacks this constructor
        self._timeout = timeout
        self._connect_timeout = min(timeout, _CONNECT_TIMEOUT_MAX) if connect_timeout is None else connect_timeout
        self._pg = pg
        self._rank = 0
        self._world_size = 1
        self._lock = threading.Lock()
        self._session: Session | None = None
        self._last_error: ProcessGroupError | None = None

    @property
    def parent(self) -> ProcessGroup:
        """The group that was handed in.

        Raises:
            ProcessGroupError: none was: each configure makes an inner group of its own, which is not handed out.
        """
        if self._pg is None:
            raise ProcessGroupError(f"{self!r} is around no group that was handed in")
        return self._pg

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
        if self._pg is not None:
            self._pg.configure(
                store_addr, replica_id, rank, world_size, quorum_id, group_rank, group_world_size, global_ranks
            )
            return
        if not 0 <= rank < world_size:
            raise ConfigError(f"rank {rank} is not in a group of {world_size}", party="rank")
        address = StoreAddress.parse(store_addr)
        name = self.getBackendName()
        label = f"{name} group of quorum {quorum_id}, rank {rank} of {world_size} ({replica_id}), store {store_addr}"
        timeout_s = self._connect_timeout.total_seconds()

        def connect(session: Session) -> TorchProcessGroup:
            return self._make_inner(session, address, rank, world_size, global_ranks)

        session = Session(label, connect, _accelerators())
        self._end(ProcessGroupAbortedError(f"{name} group left for quorum {quorum_id}"), successor=session)
        # The connecting thread keeps its own deadline; the second more is for its better worded error.
        session.connect(timeout_s + 1.0)
        with self._lock:
            if self._session is session:
                self._rank = rank
                self._world_size = world_size

    def _make_inner(
        self,
        session: Session,
        address: StoreAddress,
        rank: int,
        world_size: int,
        global_ranks: list[int] | None,
    ) -> TorchProcessGroup:
        """Connect to the other members; runs on the session's thread and ends within the connect timeout."""
        raise NotImplementedError(f"{type(self).__name__} does not implement _make_inner")

    def abort(self, errored: bool = True) -> None:
        if self._pg is not None:
            self._pg.abort(errored)
        elif not self._is_inherited():
            self._end(ProcessGroupAbortedError(f"{self.getBackendName()} group was aborted"), successor=None)

    def shutdown(self) -> None:
        if self._pg is not None:
            self._pg.shutdown()
            return
        if self._is_inherited():
            return
        with self._lock:
            session = self._session
        self._end(ProcessGroupAbortedError(f"{self.getBackendName()} group was shut down"), successor=None)
        if session is not None:
            session.join(5.0)

    def _is_inherited(self) -> bool:
        """Whether this is a forked child, and what is configured its parent's."""
        session = self._session  # without the lock, which a thread of the parent may have held
        return session is not None and session.is_inherited

    def errored(self) -> Exception | None:
        if self._pg is not None:
            return self._pg.errored()
        with self._lock:
            if self._session is None or self._session.phase is Phase.CONNECTING:
                return self._last_error
            return self._session.error

    def prepare_store(self, store_addr: str) -> threading.Event:
        return self._pg.prepare_store(store_addr) if self._pg is not None else prepare_store(store_addr)

    def set_timeout(self, timeout: timedelta) -> None:
        if self._pg is not None:
            self._pg.set_timeout(timeout)
            return
        self._timeout = timeout
        with self._lock:
            session = self._session
        if session is not None:
            session.apply(lambda pg: set_default_timeout(pg, timeout))

    def use_hostname(self, hostname: str) -> None:
        if self._pg is not None:
            self._pg.use_hostname(hostname)

    def _end(self, error: ProcessGroupError, successor: Session | None) -> None:
        """End the current session and put another in its place; `error` is what `errored()` says meanwhile."""
        with self._lock:
            session, self._session = self._session, successor
            # Before the session ends: whoever it lets go may ask errored() at once.
            if session is not None:
                self._last_error = session.error or error
            elif successor is None:
                self._last_error = self._last_error or error
        if session is not None:
            session.end(error)

    def _run(self, call: Callable[[TorchProcessGroup], Work], opts: object = None) -> Work:
        """Start an operation on the inner group; `opts` are its options, which may give a timeout."""
        if self._pg is not None:
            return call(self._pg)
        with self._lock:
            session, error = self._session, self._last_error
        if session is not None:
            return session.run(call)
        if error is not None:
            raise copy.copy(error)
        raise ProcessGroupError(f"{self!r} was not configured yet")

    def allreduce(  # type: ignore[override]
        self, tensors: Tensors, opts: AllreduceOptions | ReduceOp | None = None
    ) -> Work:
        opts = AllreduceOptions() if opts is None else opts
        return self._run(lambda pg: pg.allreduce(tensors, opts), opts)

    def allreduce_coalesced(self, tensors: Tensors, opts: AllreduceCoalescedOptions | None = None) -> Work:
        opts = AllreduceCoalescedOptions() if opts is None else opts
        return self._run(lambda pg: pg.allreduce_coalesced(tensors, opts), opts)

    def allgather(  # type: ignore[override]
        self, output_tensors: list[Tensors], input_tensor: Tensors, opts: AllgatherOptions | None = None
    ) -> Work:
        opts = AllgatherOptions() if opts is None else opts
        return self._run(lambda pg: pg.allgather(output_tensors, input_tensor, opts), opts)

    def allgather_into_tensor_coalesced(
        self, output_tensors: Tensors, input_tensors: Tensors, opts: AllgatherOptions | None = None
    ) -> Work:
        opts = AllgatherOptions() if opts is None else opts
        return self._run(lambda pg: pg.allgather_into_tensor_coalesced(output_tensors, input_tensors, opts), opts)

    def alltoall_base(  # type: ignore[override]
        self,
        output_buffer: torch.Tensor,
        input_buffer: torch.Tensor,
        output_split_sizes: list[int],
        input_split_sizes: list[int],
        opts: AllToAllOptions | None = None,
    ) -> Work:
        opts = AllToAllOptions() if opts is None else opts
        return self._run(
            lambda pg: pg.alltoall_base(output_buffer, input_buffer, output_split_sizes, input_split_sizes, opts),
            opts,
        )

    def barrier(self, opts: BarrierOptions | None = None) -> Work:  # type: ignore[override]
        opts = BarrierOptions() if opts is None else opts
        return self._run(lambda pg: pg.barrier(opts), opts)

    def broadcast(self, tensor_list: Tensors, opts: BroadcastOptions | None = None) -> Work:  # type: ignore[override]
        opts = BroadcastOptions() if opts is None else opts
        return self._run(lambda pg: pg.broadcast(tensor_list, opts), opts)

    def reduce_scatter(  # type: ignore[override]
        self, output_tensors: Tensors, input_tensors: list[Tensors], opts: ReduceScatterOptions | None = None
    ) -> Work:
        opts = ReduceScatterOptions() if opts is None else opts
        return self._run(lambda pg: pg.reduce_scatter(output_tensors, input_tensors, opts), opts)

    def reduce_scatter_tensor_coalesced(
        self, output_tensors: Tensors, input_tensors: Tensors, opts: ReduceScatterOptions | None = None
    ) -> Work:
        opts = ReduceScatterOptions() if opts is None else opts
        return self._run(lambda pg: pg.reduce_scatter_tensor_coalesced(output_tensors, input_tensors, opts), opts)

    def send(self, tensors: Tensors, dst_rank: int, tag: int = 0) -> Work:
        return self._run(lambda pg: pg.send(tensors, dst_rank, tag))

    def recv(self, tensors: Tensors, src_rank: int, tag: int = 0) -> Work:
        return self._run(lambda pg: pg.recv(tensors, src_rank, tag))

    def size(self) -> int:
        return self._world_size if self._pg is None else self._pg.size()

    def rank(self) -> int:
        """Return this process's rank in the group."""
        return self._rank if self._pg is None else self._pg.rank()

    def getBackendName(self) -> str:
        if self._pg is None:
            raise NotImplementedError(f"{type(self).__name__} does not implement getBackendName")
        return self._pg.getBackendName()

    def __repr__(self) -> str:
        if self._pg is not None:
            return f"{type(self).__name__}(pg={self._pg!r})"
        return f"{type(self).__name__}(rank={self.rank()}, size={self.size()})"

    def __del__(self) -> None:
        # Operations in flight keep the session alive; it must not be left to end on one of the backend's threads.
        session = self.__dict__.get("_session")
        if session is not None:
            try:
                session.end(ProcessGroupAbortedError("the process group was dropped without a shutdown"))
            except RuntimeError as error:  # no thread can be started any more: the interpreter exits
                warnings.warn(f"process group dropped at exit: {error}", ResourceWarning, stacklevel=1)
