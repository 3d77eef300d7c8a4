"""Gloo with an abort, for CPU tensors (and CUDA tensors through host memory).

Gloo itself cannot be aborted; see `sockets.py` for how it is done here on Linux: within milliseconds, from any thread, for
operations and for a configure in progress. Gloo forgets a send or receive that was halfway when its connection broke, and
one of its threads then sleeps until the operation's timeout; `session.py` completes the work 0.05 s after the abort all
the same. On other systems configure and abort return at once too, but operations end by their timeouts.

One failed operation ends the group on this rank, so that its neighbours notice at once. Gloo also forgets an operation
that a neighbour starts just as the connection ends (1 of 100 tries on a busy machine). Under a `Manager` the lighthouse says
that the quorum broke, which aborts it; without one it takes until its timeout.

An allreduce gives bit-identical results on all ranks: each chunk is reduced on one rank of the ring and copied on.
"""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import ProcessGroup as TorchProcessGroup
from torch.distributed import ProcessGroupGloo as TorchProcessGroupGloo

from torchft_ckpt import config
from torchft_ckpt.network import host_of_gloo, host_of_interface
from torchft_ckpt.process_group.session_group import Meeting, SessionProcessGroup, set_default_timeout
from torchft_ckpt.process_group.sockets import create_gloo_device


class ProcessGroupGloo(SessionProcessGroup):
    """A reconfigurable Gloo group.

    Args:
        timeout: of each operation whose options give none; `set_timeout` changes it.
        connect_timeout: of configure as a whole; by default `timeout`, but at most 10 s.
        hostname: address of this process to listen on and publish to the others. By default
            `TORCHFT_CKPT_HOSTNAME`, else what the `Manager` was told, else that of the interface which `GLOO_SOCKET_IFNAME`
            names, else the address that routes to the store: loopback if the store is there.
        interface: network interface to listen on, instead of `hostname`.

    Raises:
        ConfigError: the interface that was named is unknown, or is down, or has no address.
    """

    connects_beside = True

    def __init__(
        self,
        timeout: timedelta = timedelta(seconds=60),
        *,
        connect_timeout: timedelta | None = None,
        hostname: str | None = None,
        interface: str | None = None,
    ) -> None:
        super().__init__(timeout, connect_timeout)
        self._interface = interface or ""
        if self._interface:
            self._hostname = host_of_interface(self._interface, "interface")
        else:
            self._hostname = config.resolve(hostname or None, config.HOSTNAME, "", str)
        self._is_given = bool(self._interface or self._hostname)
        self._hostname = self._hostname or host_of_gloo()

    def getBackendName(self) -> str:
        return "torchft-ckpt-gloo"

    def use_hostname(self, hostname: str) -> None:
        if not self._is_given:
            self._hostname = hostname

    def _listens_at(self, meeting: Meeting) -> str:
        return meeting.local_host if meeting.world_size == 1 else self._hostname or meeting.local_host

    def _why_apart(self, meeting: Meeting) -> str:
        return (
            "one of them died since or cannot be reached at the address that it listens on"
            f" (ours is {self._listens_at(meeting)}); torch says"
        )

    def _connect(self, meeting: Meeting) -> TorchProcessGroup:
        interface = "" if self._hostname else self._interface  # left to Gloo where interfaces cannot be read
        device, sockets = create_gloo_device("" if interface else self._listens_at(meeting), interface)
        if sockets is not None:
            meeting.session.on_end(sockets.shutdown_connections, sockets.leave, ends_connections=True)
        options: Any = TorchProcessGroupGloo._Options()  # type: ignore[attr-defined]  # the stub lacks it
        options._devices = [device]
        options._timeout = timedelta(seconds=max(0.01, meeting.deadline - time.monotonic()))
        if meeting.global_ranks:
            options.global_ranks_in_group = meeting.global_ranks
        backend = TorchProcessGroupGloo(meeting.store, meeting.rank, meeting.world_size, options)
        meeting.session.keep(backend)
        group = TorchProcessGroup(meeting.store, meeting.rank, meeting.world_size)
        group._set_default_backend(TorchProcessGroup.BackendType.GLOO)
        for kind in ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]:
            group._register_backend(torch.device(kind), TorchProcessGroup.BackendType.GLOO, backend)
        backend._set_sequence_number_for_group()
        set_default_timeout(group, self._timeout)
        return group
