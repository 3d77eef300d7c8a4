"""Gloo with an abort, for CPU tensors (and CUDA tensors through host memory).

Gloo itself cannot be aborted; see `sockets.py` for how it is done here on Linux: within milliseconds, from any thread, for
operations and for a configure in progress. On other systems an aborted operation ends by its timeout, and configure and
abort still return at once. One failed operation ends the group on this rank, so its neighbours notice at once.

An allreduce gives bit-identical results on all ranks: each chunk is reduced on one rank of the ring and copied on.
"""

from __future__ import annotations

import threading
import time
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import DistStoreError, HashStore, Store
from torch.distributed import ProcessGroup as TorchProcessGroup
from torch.distributed import ProcessGroupGloo as TorchProcessGroupGloo

from torchft_ckpt import config
from torchft_ckpt.errors import ProcessGroupConfigureError
from torchft_ckpt.process_group.session import Session
from torchft_ckpt.process_group.sockets import create_gloo_device, shutdown_awaited_connection
from torchft_ckpt.process_group.store import StoreAddress, connect_store, find_route
from torchft_ckpt.process_group.wrapper import ProcessGroupWrapper

# How long an abort may go unnoticed by a thread that waits at the store; nobody waits for that thread.
_WAIT_SLICE_S = 0.1


class ProcessGroupGloo(ProcessGroupWrapper):
    """A reconfigurable Gloo group.

    Args:
        timeout: of each operation whose options give none; `set_timeout` changes it.
        connect_timeout: of configure as a whole; by default `timeout`, but at most 10 s.
        hostname: address of this process to listen on and publish to the others. By default
            `TORCHFT_CKPT_HOSTNAME`, else the address that routes to the store: loopback if the store is there.
        interface: network interface to listen on, instead of `hostname`.
    """

    def __init__(
        self,
        timeout: timedelta = timedelta(seconds=60),
        *,
        connect_timeout: timedelta | None = None,
        hostname: str | None = None,
        interface: str | None = None,
    ) -> None:
        super().__init__(timeout, connect_timeout=connect_timeout)
        self._interface = interface or ""
        self._hostname = "" if self._interface else config.resolve(hostname, config.HOSTNAME, "", str)

    def getBackendName(self) -> str:
        return "torchft-ckpt-gloo"

    def _make_inner(
        self,
        session: Session,
        address: StoreAddress,
        rank: int,
        world_size: int,
        global_ranks: list[int] | None,
    ) -> TorchProcessGroup:
        deadline = time.monotonic() + self._connect_timeout.total_seconds()

        def left_s() -> float:
            return max(0.001, deadline - time.monotonic())

        store: Store
        if world_size == 1:
            store, hostname = HashStore(), "127.0.0.1"
        else:
            route = find_route(address, left_s())
            hostname = self._hostname or route.local_host
            thread_id = threading.get_native_id()
            session.on_end(lambda: shutdown_awaited_connection(thread_id, route.peer))
            store = connect_store(address, left_s())
        if self._interface:
            hostname = ""
        device, sockets = create_gloo_device(hostname, self._interface)
        if sockets is not None:
            session.on_end(sockets.shutdown_connections, sockets.close)
        options: Any = TorchProcessGroupGloo._Options()  # type: ignore[attr-defined]  # the stub lacks it
        options._devices = [device]
        if global_ranks:
            options.global_ranks_in_group = global_ranks
        if world_size > 1:
            _meet(store, session, rank, world_size, hostname or self._interface, deadline)
        options._timeout = timedelta(seconds=left_s())
        try:
            backend = TorchProcessGroupGloo(store, rank, world_size, options)
        except RuntimeError as error:
            raise ProcessGroupConfigureError(
                f"{session.label}: all ranks came to the store, but one of them died since or cannot be reached at the "
                f"address that it published; torch says: {str(error).partition(chr(10))[0][:300]}",
                party=str(address),
            ) from error.with_traceback(None)
        group = TorchProcessGroup(store, rank, world_size)
        group._set_default_backend(TorchProcessGroup.BackendType.GLOO)
        for kind in _device_types():
            group._register_backend(torch.device(kind), TorchProcessGroup.BackendType.GLOO, backend)
        backend._set_sequence_number_for_group()
        group.set_timeout(self._timeout)
        return group


def _device_types() -> list[str]:
    return ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]


def _meet(store: Store, session: Session, rank: int, world_size: int, where: str, deadline: float) -> None:
    """Announce this rank and wait for the others, before Gloo does, whose waiting cannot be broken off.

    Raises:
        ProcessGroupAbortedError: the session ended meanwhile.
        ProcessGroupConfigureError: the deadline passed; names the absent ranks.
    """

    def key(other: int) -> str:
        return f"torchft_ckpt/listening/{other}"

    store.set(key(rank), where)
    absent = list(range(world_size))
    while True:
        session.raise_if_ended()
        absent = [other for other in absent if not store.check([key(other)])]
        if not absent:
            return
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            names = ", ".join(map(str, absent))
            raise ProcessGroupConfigureError(
                f"{session.label}: rank(s) {names} never came to the store within the connect timeout; "
                "they died, or have other members in mind",
                party=names,
            )
        try:
            store.wait([key(other) for other in absent], timedelta(seconds=min(left_s, _WAIT_SLICE_S)))
        except DistStoreError:  # the slice is over
            continue
