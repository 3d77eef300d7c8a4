"""The contract of a reconfigurable process group, and its registration with torch.

A group is configured once for each quorum, works until it is aborted or an operation fails, and is then configured again.
Names and signatures are those of torchft 0.2.0. This file knows no backend.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup as TorchProcessGroup
from torch.distributed import Store, Work
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

Tensors = list[torch.Tensor]


class ProcessGroup(TorchProcessGroup):
    """A process group whose members change while the process lives.

    Collectives return a `Work` at once. They raise, and their works and futures fail, with a `ProcessGroupError`; after
    that `errored()` is not None and the group must be configured again before it is used.
    Every method may be called from any thread; operations of one group must be started in the same order on all ranks.

    A subclass implements the collectives one by one, or `_start_collective` for all of them.
    """

    _group_name: str | None = None
    connects_beside = False
    """Whether it has `connect_beside`."""

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
        """Leave the old members and connect to new ones; block until all are connected.

        A configure or an operation that is in progress is aborted first.

        Args:
            store_addr: `host:port/prefix` of a TCPStore. All ranks give the same; a prefix must never be used twice.
            replica_id: name of this replica group, for logs and errors.
            rank: of this process in the new group, 0 <= rank < world_size.
            world_size: number of members.
            quorum_id: the quorum that this group serves, for logs and errors.
            group_rank: rank inside the replica group.
            group_world_size: ranks in a replica group.
            global_ranks: the global rank of each member.

        Raises:
            ProcessGroupConfigureError: the members or the store could not be reached in time; may be tried again.
            ProcessGroupAbortedError: another thread called `abort` or `configure` meanwhile.
            ConfigError: an argument cannot be used.
        """
        raise NotImplementedError(f"{type(self).__name__} does not implement configure")

    def connect_beside(self, store_addr: str, replica_id: str, rank: int, world_size: int) -> Callable[[], None]:
        """Begin to connect to members while the present ones go on. Does not block.

        A `configure` with the same `store_addr` takes what was made. What was made so before, and not taken, is given up.

        Args:
            store_addr, replica_id, rank, world_size: as of `configure`.

        Returns:
            what waits until all are connected; call it once. It raises as `configure`.
        """
        raise NotImplementedError(f"{type(self).__name__} does not implement connect_beside")

    def allreduce(  # type: ignore[override]
        self, tensors: Tensors, opts: AllreduceOptions | ReduceOp | None = None
    ) -> Work:
        """Reduce tensors over all ranks in place; the future's value is the list of tensors."""
        return self._start_collective("allreduce", tensors, opts or AllreduceOptions())

    def allreduce_coalesced(self, tensors: Tensors, opts: AllreduceCoalescedOptions | None = None) -> Work:
        """Reduce several tensors over all ranks in one operation, in place."""
        return self._start_collective("allreduce_coalesced", tensors, opts or AllreduceCoalescedOptions())

    def allgather(  # type: ignore[override]
        self, output_tensors: list[Tensors], input_tensor: Tensors, opts: AllgatherOptions | None = None
    ) -> Work:
        """Gather `input_tensor[i]` of every rank into `output_tensors[i]`, one tensor a rank."""
        return self._start_collective("allgather", output_tensors, input_tensor, opts or AllgatherOptions())

    def allgather_into_tensor_coalesced(
        self, output_tensors: Tensors, input_tensors: Tensors, opts: AllgatherOptions | None = None
    ) -> Work:
        """Gather `input_tensors[i]` of every rank, concatenated, into `output_tensors[i]`."""
        return self._start_collective(
            "allgather_into_tensor_coalesced", output_tensors, input_tensors, opts or AllgatherOptions()
        )

    def alltoall_base(  # type: ignore[override]
        self,
        output_buffer: torch.Tensor,
        input_buffer: torch.Tensor,
        output_split_sizes: list[int],
        input_split_sizes: list[int],
        opts: AllToAllOptions | None = None,
    ) -> Work:
        """Send a slice of `input_buffer` to every rank and receive one from each; empty sizes split evenly."""
        sizes = output_split_sizes, input_split_sizes
        return self._start_collective("alltoall_base", output_buffer, input_buffer, *sizes, opts or AllToAllOptions())

    def barrier(self, opts: BarrierOptions | None = None) -> Work:  # type: ignore[override]
        """Complete when every rank has called it."""
        return self._start_collective("barrier", opts or BarrierOptions())

    def broadcast(self, tensor_list: Tensors, opts: BroadcastOptions | None = None) -> Work:  # type: ignore[override]
        """Copy the tensors of rank `opts.rootRank` to all ranks, in place."""
        return self._start_collective("broadcast", tensor_list, BroadcastOptions() if opts is None else opts)

    def broadcast_one(self, tensor: torch.Tensor, root: int) -> Work:
        """Copy one tensor of rank `root` to all ranks, in place."""
        opts = BroadcastOptions()
        opts.rootRank = root
        return self.broadcast([tensor], opts)

    def reduce_scatter(  # type: ignore[override]
        self, output_tensors: Tensors, input_tensors: list[Tensors], opts: ReduceScatterOptions | None = None
    ) -> Work:
        """Reduce lists of tensors over all ranks; each rank keeps the tensor of its index."""
        return self._start_collective("reduce_scatter", output_tensors, input_tensors, opts or ReduceScatterOptions())

    def reduce_scatter_tensor_coalesced(
        self, output_tensors: Tensors, input_tensors: Tensors, opts: ReduceScatterOptions | None = None
    ) -> Work:
        """Reduce tensors over all ranks; each rank keeps the slice of its index."""
        return self._start_collective(
            "reduce_scatter_tensor_coalesced", output_tensors, input_tensors, opts or ReduceScatterOptions()
        )

    def send(self, tensors: Tensors, dst_rank: int, tag: int = 0) -> Work:
        """Send a tensor to one rank."""
        return self._start_collective("send", tensors, dst_rank, tag)

    def recv(self, tensors: Tensors, src_rank: int, tag: int = 0) -> Work:
        """Receive a tensor from one rank, in place."""
        return self._start_collective("recv", tensors, src_rank, tag)

    def _start_collective(self, collective: str, *arguments: Any) -> Work:
        """Start the collective of that name, which all the methods above come to.

        Args:
            collective: the name of the method, which is the same in torch's own groups.
            arguments: those of the method, in order and all of them; options come last, with torch's defaults if none were given.
        """
        raise NotImplementedError(f"{type(self).__name__} does not implement {collective}")

    def size(self) -> int:
        """Return the number of members."""
        raise NotImplementedError(f"{type(self).__name__} does not implement size")

    def getBackendName(self) -> str:
        """Return a name for logs and for torch's registry."""
        raise NotImplementedError(f"{type(self).__name__} does not implement getBackendName")

    def abort(self, errored: bool = True) -> None:
        """End the operations and the configure in progress, with errors, soon. Does not wait for them; idempotent.

        In a forked child `abort` and `shutdown` do nothing: the connections are the parent's.

        Args:
            errored: there for torchft's sake; an aborted group has an error until it is configured again.
        """

    def shutdown(self) -> None:
        """Abort, and give back threads and descriptors. The group may be configured again."""

    def errored(self) -> Exception | None:
        """Return why the group must be configured again, or None while it works or was never used."""
        return None

    def prepare_store(self, store_addr: str) -> threading.Event:
        """Begin to connect to a store that a later `configure` may name; a new connection can take seconds.

        Args:
            store_addr: `host:port`.

        Returns:
            an event that is set when the attempt is over; whether it went well shows in `configure`.
        """
        done = threading.Event()
        done.set()
        return done

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the timeout of the operations started from now on, where their options give none."""
        raise NotImplementedError(f"{type(self).__name__} does not implement set_timeout")

    def use_hostname(self, hostname: str) -> None:
        """Listen at this address from the next `configure` on, unless the group was given one of its own.

        A `Manager` tells it what its user chose. Backends that find their own interfaces, as NCCL does, do nothing.
        """

    def register(self, name: str) -> TorchProcessGroup:
        """Make the group known to torch under a unique name, for DeviceMesh and functional collectives; call once.

        torch sees a group of one, because its meshes cannot change size; operations go to all members.
        """
        registered = f"{self.getBackendName()}:{name}"

        def create(prefix_store: Store, rank: int, world_size: int, timeout: float) -> TorchProcessGroup:
            return self

        devices = ["cpu"]
        if torch.accelerator.is_available():
            accelerator = torch.accelerator.current_accelerator()
            if accelerator is not None:
                devices.append(accelerator.type)
        dist.Backend.register_backend(registered, create, devices=devices)
        group = dist.new_group(ranks=[dist.get_rank()], backend=registered, group_desc=registered)
        return cast(TorchProcessGroup, group)

    def unregister(self) -> None:
        """Undo `register`."""
        dist.destroy_process_group(self)

    @property
    def group_name(self) -> str:  # type: ignore[override]
        """The name that torch gave at registration."""
        if self._group_name is None:
            raise ValueError(f"{self!r} is not registered with torch")
        return self._group_name

    def _set_group_name(self, name: str) -> None:
        self._group_name = name

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"
