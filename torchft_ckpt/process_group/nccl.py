"""NCCL with an abort and timeouts that do not end the process.

The differences from torch's own group:
- Communicators are non-blocking and connected eagerly in configure, so that a dead peer shows there and
  `ncclCommAbort` can end it.
- torch's watchdog may end the process on a timeout. These variables turn that off, unless the user has set them:
  `TORCH_NCCL_ASYNC_ERROR_HANDLING=0` (no tear-down), `TORCH_NCCL_ENABLE_MONITORING=0` (no heartbeat monitor),
  `TORCH_NCCL_RETHROW_CUDA_ERRORS=0`, and `TORCH_NCCL_NONBLOCKING_TIMEOUT` (seconds; our connect timeout). torch reads
  them when a group is made.
- Instead each operation is followed by a CUDA event on a side stream, and a thread looks at it when the operation's time
  is up: not reached means that a peer is lost, and the group is aborted.

A failed NCCL operation is noticed late: `wait()` only orders streams, and an aborted kernel just ends. So ask `errored()`
before results are used; it waits for the operations in flight (each of which has a timeout).
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import ProcessGroup as TorchProcessGroup
from torch.distributed import Work

from torchft_ckpt.errors import CollectiveFailedError, ConfigError
from torchft_ckpt.process_group.session import SessionPhase
from torchft_ckpt.process_group.session_group import Meeting, SessionProcessGroup
from torchft_ckpt.threads import Thread


class OperationWatch:
    """Calls `on_timeout` when an operation is not done at its deadline. Any thread may call it.

    Args:
        on_timeout: called at most once, on the watch's thread, with the operation's timeout in seconds.
    """

    def __init__(self, on_timeout: Callable[[float], object]) -> None:
        self._on_timeout = on_timeout
        self._changed = threading.Condition()
        self._pending: list[tuple[float, float, torch.cuda.Event]] = []
        """Deadline, timeout in seconds and event, the soonest deadline first."""
        self._is_open = True
        self._thread = Thread(self._run, "nccl-operation-watch")
        self._thread.start()

    def add(self, event: torch.cuda.Event, timeout_s: float) -> None:
        with self._changed:
            self._pending = [entry for entry in self._pending if not entry[2].query()]
            self._pending.append((time.monotonic() + timeout_s, timeout_s, event))
            self._pending.sort(key=lambda entry: entry[0])
            self._changed.notify_all()

    def wait_until_idle(self) -> None:
        """Wait until every operation added so far is done; the timeouts bound it."""
        with self._changed:
            events = [event for _, _, event in self._pending]
        for event in events:
            event.synchronize()

    def close(self) -> None:
        """End the thread; operations are watched no longer."""
        with self._changed:
            self._is_open = False
            self._changed.notify_all()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                if not self._is_open:
                    return
                if not self._pending:
                    self._changed.wait()
                    continue
                deadline, timeout_s, event = self._pending[0]
                left_s = deadline - time.monotonic()
                if left_s > 0:
                    self._changed.wait(left_s)
                    continue
                del self._pending[0]
                is_done = event.query()
            if not is_done:
                self._on_timeout(timeout_s)
                return


class ProcessGroupNCCL(SessionProcessGroup):
    """A reconfigurable NCCL group, on the current CUDA device of the thread that calls `configure`.

    Args:
        timeout: of each operation whose options give none; `set_timeout` changes it.
        connect_timeout: of configure as a whole; by default `timeout`, but at most 10 s.

    Raises:
        ConfigError: this build of torch has no NCCL.
    """

    def __init__(self, timeout: timedelta = timedelta(seconds=60), *, connect_timeout: timedelta | None = None) -> None:
        if not torch.distributed.is_nccl_available():
            raise ConfigError("this build of torch has no NCCL; use ProcessGroupGloo", party="pg")
        super().__init__(timeout, connect_timeout)
        self._watch: OperationWatch | None = None
        self._device = torch.device("cuda", 0)
        self._side_stream: Any = None

    def configure(self, *arguments: Any, **options: Any) -> None:
        self._device = torch.device("cuda", torch.cuda.current_device())
        super().configure(*arguments, **options)

    def errored(self) -> Exception | None:
        """Wait for the operations in flight, then return why the group must be configured again, or None."""
        watch = self._watch
        if watch is not None:
            watch.wait_until_idle()
        return super().errored()

    def getBackendName(self) -> str:
        return "torchft-ckpt-nccl"

    def _why_apart(self, meeting: Meeting) -> str:
        return "NCCL could not connect them"

    def _connect(self, meeting: Meeting) -> TorchProcessGroup:
        from torch.distributed import ProcessGroupNCCL as TorchProcessGroupNCCL

        session = meeting.session
        for variable in ("ASYNC_ERROR_HANDLING", "ENABLE_MONITORING", "RETHROW_CUDA_ERRORS"):
            os.environ.setdefault(f"TORCH_NCCL_{variable}", "0")
        connect_timeout_s = self._connect_timeout.total_seconds()
        os.environ.setdefault("TORCH_NCCL_NONBLOCKING_TIMEOUT", str(max(1, round(connect_timeout_s))))
        torch.cuda.set_device(self._device)  # of this thread
        options: Any = TorchProcessGroupNCCL.Options()
        options.config.blocking = 0
        if meeting.global_ranks:
            options.global_ranks_in_group = meeting.global_ranks
        backend = TorchProcessGroupNCCL(meeting.store, meeting.rank, meeting.world_size, options)
        aborter = Thread(backend.abort, "nccl-abort")
        watch = OperationWatch(
            lambda timeout_s: session.end(
                CollectiveFailedError(
                    f"{session.label}: a collective was not done after {timeout_s:.1f} s; a peer is lost or hangs. The "
                    "tensors must not be used, and the group must be configured again"
                )
            )
        )

        def close() -> None:
            watch.close()
            aborter.join(connect_timeout_s)

        # ncclCommAbort may take its time: nobody waits for it but the reaper.
        session.on_end(_once(aborter.start), close)
        backend._set_sequence_number_for_group()
        backend.eager_connect_single_device(self._device)
        self._side_stream = torch.cuda.Stream(self._device)
        self._watch = watch
        group = TorchProcessGroup(meeting.store, meeting.rank, meeting.world_size)
        group._set_default_backend(TorchProcessGroup.BackendType.NCCL)
        group._register_backend(torch.device("cuda"), TorchProcessGroup.BackendType.NCCL, backend)
        return group

    def set_timeout(self, timeout: timedelta) -> None:
        # torch's own timeout stays out of the way; see above.
        self._timeout = timeout

    def _start_collective(self, collective: str, *arguments: Any) -> Work:
        if _has_host_tensor(arguments):
            raise ConfigError(
                f"{collective} got a tensor on the CPU, and NCCL takes tensors on the GPU: move it there, or give the Manager a"
                " ProcessGroupGloo",
                party="tensor",
            )
        work = super()._start_collective(collective, *arguments)
        watch, session = self._watch, self._session
        if watch is not None and session is not None and session.phase is SessionPhase.LIVE:
            event = torch.cuda.Event()
            with torch.cuda.stream(self._side_stream):
                work.wait()
                event.record()
            timeout = getattr(arguments[-1], "timeout", None)  # of the options, which come last
            timeout_s = timeout.total_seconds() if timeout is not None and timeout > timedelta(0) else 0.0
            watch.add(event, timeout_s or self._timeout.total_seconds())
        return work


def _has_host_tensor(value: object) -> bool:
    if isinstance(value, torch.Tensor):
        return value.is_cpu
    return isinstance(value, (list, tuple)) and any(map(_has_host_tensor, value))


def _once(action: Callable[[], object]) -> Callable[[], None]:
    lock = threading.Lock()
    left = [action]

    def act() -> None:
        with lock:
            todo = left.pop() if left else None
        if todo is not None:
            todo()

    return act
