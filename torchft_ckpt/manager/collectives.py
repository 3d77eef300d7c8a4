"""Allreduce whose errors end the step and nothing else.

What goes wrong in a collective is noted, the tensor is handed on as it is, and the step is discarded at the vote: no
exception reaches the training loop, no replica waits for one that is gone. The averaging runs where the collective
completes, so it overlaps with the backward pass. What goes wrong in one that was issued after the vote changes nothing about
the step: only its own `wait` says so.

A collective starts when it is clear that all groups issue the same one (`clearing.py`): at once where that is known. One that a
member waits in for longer than usual is reported, so that nobody waits for a group that will not come.

Collectives reach the process group in the order of the calls, and one that consists of several starts all its parts before the
next call's first. That depends on the program alone, never on what has finished when; so ranks that make the same calls in the
same order start the same collectives in the same order, however fast each of them is. Who calls from several threads has to
order the calls himself.
"""

from __future__ import annotations

import collections
import functools
import logging
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Protocol, TypeVar

import torch
from torch.distributed import AllreduceOptions, ReduceOp, Work
from torch.futures import Future

from torchft_ckpt.core.coordination.sequence import Clearance
from torchft_ckpt.errors import CollectiveFailedError
from torchft_ckpt.manager.clearing import Clearing, Issued
from torchft_ckpt.process_group.session import settled
from torchft_ckpt.threads import Thread

if TYPE_CHECKING:
    from torchft_ckpt.process_group import ProcessGroup

logger = logging.getLogger(__name__)

REPORT_WAIT_S = 0.5
"""A collective that takes longer is reported to the lighthouse, once: it knows whether all others will come."""

T = TypeVar("T")
Job = Callable[[], None]


class ExceptionWithTraceback(Exception):
    """An error of the step, with where it came from, as torchft reports it.

    Args:
        e: the error.
    """

    def __init__(self, e: Exception) -> None:
        self.original_exception = e
        self.stack_trace = "".join(traceback.format_exception(e))
        super().__init__(f"{e}\n{self.stack_trace}")


class Way(Protocol):
    """A way of its own to reduce a tensor."""

    @property
    def name(self) -> str:
        """Equal in all ranks that may reduce together."""
        ...

    def reduce(self, group: ProcessGroup, tensor: torch.Tensor, *, divisor: int | None, timeout: timedelta) -> None:
        """Sum the tensor over the group and divide it, to the end. What it raises has aborted the group."""
        ...


class ManagedWork(Work):
    """A collective under the manager's care: waiting for it never raises.

    Args:
        future: completes with the tensor, whether the collective went well or not.
        failed: whether the step or this collective has failed.
    """

    def __init__(self, future: Future[torch.Tensor], failed: Callable[[], bool]) -> None:
        super().__init__()
        self._future = future
        self._failed = failed

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait for the averaged tensor. False: this collective or its step has failed, the tensor must not be used.

        `timeout` is there for the interface: how long a collective may take is the manager's `timeout`.
        """
        self._future.wait()
        return not self._failed()

    def get_future(self) -> Future[torch.Tensor]:
        """Return a future of the averaged tensor. It never fails."""
        return self._future

    def synchronize(self) -> None:
        self._future.wait()

    def block_current_stream(self, timeout: timedelta | None = None) -> None:
        self._future.wait()


@dataclass(slots=True)
class _StepReduction:
    """One allreduce of the step."""

    issued: Issued
    tensor: torch.Tensor
    op: ReduceOp | ReduceOp.RedOpType
    divisor: int | None
    timeout: timedelta
    step_has_failed: Callable[[], bool]
    way: Way | None
    is_failed: bool = False

    def has_failed(self) -> bool:
        return self.is_failed or self.step_has_failed()


class CollectiveQueue:
    """Starts jobs in order, on a thread that lives only while there is something to do. Any thread may call it.

    While the thread has anything to do, all that is called later queues behind it. While it has nothing to do every earlier
    call has started all its parts, so a simple collective may start right where it was called. An operation on the process
    group itself, which bypasses the queue, must wait for the jobs before it. A job knows nothing of the step that it belongs
    to.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._jobs: collections.deque[Job] = collections.deque()
        self._is_running = False
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    @property
    def is_idle(self) -> bool:
        """Whether a collective that is issued now may start where it was called. It stays so until the caller queues a job."""
        with self._lock:
            return not self._is_running

    def run(self, job: Job, tensor: torch.Tensor) -> None:
        """Queue a job.

        Args:
            job: must not raise. It may block; what is called later waits.
            tensor: that it works on. If it is on a GPU the job runs on a stream of the queue, after what the caller's current
                stream has been given so far.

        Raises:
            RuntimeError: no thread can be started; the job was not queued.
        """
        with self._lock:
            self._jobs.append(self._on_stream(job, tensor))
            if self._is_running:
                return
            try:
                Thread(self._run, "torchft_ckpt-collectives").start()
            except RuntimeError:
                self._jobs.pop()
                raise
            self._is_running = True

    def _run(self) -> None:
        while True:
            with self._lock:
                if not self._jobs:
                    self._is_running = False
                    return
                job = self._jobs.popleft()
            job()

    def _on_stream(self, job: Job, tensor: torch.Tensor) -> Job:
        if not tensor.is_cuda:
            return job
        if tensor.device not in self._streams:
            self._streams[tensor.device] = torch.cuda.Stream(tensor.device)
        stream = self._streams[tensor.device]
        caller = torch.cuda.current_stream(tensor.device)
        event = torch.cuda.Event()
        event.record(caller)

        def run() -> None:
            with torch.cuda.device(stream.device), torch.cuda.stream(stream):
                stream.wait_event(event)
                tensor.record_stream(stream)
                job()

        return run


class Collectives:
    """The open collectives of the step.

    Args:
        on_error: called on any thread with what went wrong.
        schedule: calls a function later, on a thread that must not be blocked.
        on_wait: called, on that thread, with a collective of the step that has been waited in for a while.
        reduces: told that a collective is open, and that none is any more. It does not block.
    """

    def __init__(
        self,
        process_group: ProcessGroup,
        clearing: Clearing,
        *,
        on_error: Callable[[Exception], None],
        schedule: Callable[[float, Callable[[], object]], None],
        on_wait: Callable[[Issued], object],
        reduces: Callable[[bool], None] = lambda is_open: None,
    ) -> None:
        self._process_group = process_group
        self._clearing = clearing
        self._on_error = on_error
        self._schedule = schedule
        self._on_wait = on_wait
        self._reduces = reduces
        self._queue = CollectiveQueue()
        self._lock = threading.Lock()
        self._open: list[Future[torch.Tensor]] = []
        self._num_unfinished = 0
        self._last_progress_at = 0.0
        self._last_reported: int | None = None
        self._is_looking = False

    def begin_step(self, *, is_new_quorum: bool) -> None:
        self._clearing.begin_step(is_new_quorum=is_new_quorum)
        with self._lock:
            self._open.clear()
            self._last_reported = None

    def allreduce(
        self,
        tensor: torch.Tensor,
        *,
        op: ReduceOp | ReduceOp.RedOpType,
        divisor: int | None,
        timeout: timedelta,
        failed: Callable[[], bool],
        way: Way | None = None,
    ) -> ManagedWork:
        """Reduce `tensor` in place over the replica groups, then divide it by `divisor` if there is one.

        Args:
            op: the reduction; a sum where there is a way.
            timeout: of the collective, once it is its turn.
            failed: whether the step has failed.
            way: of its own to reduce it. In a group of one it is not used, and the tensor stays as it is.
        """
        issued = self._clearing.issue(tensor, op, divisor, way)
        reduction = _StepReduction(issued, tensor, op, divisor, timeout, failed, way)
        with self._lock:
            now = time.monotonic()
            if self._num_unfinished == 0:
                self._last_progress_at = now
                self._reduces(True)
            self._num_unfinished += 1
            self._look_later()
        future = self._start(reduction)
        if future is None:
            return done_work(tensor, reduction.has_failed)
        with self._lock:
            self._open.append(future)
        return ManagedWork(future, reduction.has_failed)

    def _start(self, reduction: _StepReduction) -> Future[torch.Tensor] | None:
        """Start, or queue; None if that failed, which has been noted."""
        tensor = reduction.tensor
        has_peers = self._process_group.size() > 1
        is_clear = reduction.issued.clearance is Clearance.KNOWN or not has_peers
        has_a_way = reduction.way is not None and has_peers
        try:
            if is_clear and not has_a_way and self._queue.is_idle:
                return self._begin(reduction)
            later = future_for(tensor)
            run = self._run_in_its_way if has_a_way else self._run_later
            self._queue.run(functools.partial(run, reduction, later, is_clear=is_clear), tensor)
        except Exception as error:  # noqa: BLE001 - whatever a backend raises, it is this step's error and no more
            self._end(reduction, error)
            return None
        return later

    def _begin(self, reduction: _StepReduction) -> Future[torch.Tensor]:
        options = AllreduceOptions()
        options.reduceOp = reduction.op  # type: ignore[assignment]
        options.timeout = reduction.timeout
        work = self._process_group.allreduce([reduction.tensor], options)
        return settled(work, functools.partial(self._divide, reduction))

    def _run_later(self, reduction: _StepReduction, later: Future[torch.Tensor], *, is_clear: bool) -> None:
        try:
            self._clear(reduction, is_clear=is_clear)
            self._begin(reduction).add_done_callback(lambda _: later.set_result(reduction.tensor))
        except Exception as error:  # noqa: BLE001 - as above
            later.set_result(self._end(reduction, error))

    def _run_in_its_way(self, reduction: _StepReduction, later: Future[torch.Tensor], *, is_clear: bool) -> None:
        """Reduce to the end, and complete the future; as a job of the queue."""
        way, failure = reduction.way, None
        try:
            self._clear(reduction, is_clear=is_clear)
            if way is not None:
                group, tensor, timeout = self._process_group, reduction.tensor, reduction.timeout
                way.reduce(group, tensor, divisor=reduction.divisor, timeout=timeout)
        except Exception as error:  # noqa: BLE001 - as above
            failure = error
        later.set_result(self._end(reduction, failure))

    def _clear(self, reduction: _StepReduction, *, is_clear: bool) -> None:
        if is_clear:
            return
        issued = reduction.issued
        if reduction.step_has_failed():
            # One before it did not start: the others are still in theirs, and would take this comparison for it.
            raise CollectiveFailedError(f"collective {issued.index + 1} was not started: the step had failed")
        self._clearing.clear(issued, reduction.tensor.device, reduction.timeout)

    def _divide(self, reduction: _StepReduction, error: Exception | None) -> torch.Tensor:
        """Divide the sum, unless it has failed. On any thread."""
        if error is None and reduction.divisor is not None:
            try:
                reduction.tensor.div_(reduction.divisor)
            except Exception as failure:  # noqa: BLE001 - as above
                error = failure
        return self._end(reduction, error)

    def _end(self, reduction: _StepReduction, error: Exception | None) -> torch.Tensor:
        """Note that a collective is over, and what went wrong; return its tensor."""
        if error is not None:
            reduction.is_failed = True
            self._on_error(error)
        with self._lock:
            self._num_unfinished -= 1
            self._last_progress_at = time.monotonic()
            if self._num_unfinished == 0:
                self._reduces(False)
        return reduction.tensor

    def has_open(self) -> bool:
        """Return whether collectives were issued that `wait_all` has not waited for."""
        with self._lock:
            return bool(self._open)

    def wait_all(self) -> None:
        """Wait until no collective of this step is open. They end by their timeout or by an abort at the latest."""
        with self._lock:
            futures, self._open = self._open, []
        for future in futures:
            future.wait()

    def _look_later(self) -> None:
        if not self._is_looking:
            self._is_looking = True
            waited_s = time.monotonic() - self._last_progress_at
            self._schedule(REPORT_WAIT_S - waited_s if waited_s < REPORT_WAIT_S else REPORT_WAIT_S, self._look)

    def _look(self) -> None:
        """Report the collective that is waited in, if nothing has gone on for a while."""
        with self._lock:
            self._is_looking = False
            index = self._clearing.count - self._num_unfinished
            if self._num_unfinished == 0 or index < 0:
                return
            self._look_later()
            has_stopped = time.monotonic() - self._last_progress_at >= REPORT_WAIT_S
            if not has_stopped or self._last_reported == index:
                return
            self._last_reported = index
        issued = self._clearing.issued(index)
        if issued is not None and issued.clearance is not Clearance.ASK:  # that was reported when it was asked for
            self._on_wait(issued)


def fill_with_nothing(tensor: torch.Tensor, op: ReduceOp | ReduceOp.RedOpType) -> None:
    """Overwrite a tensor with what changes nothing in a reduction: zeros, but for MAX, MIN and PRODUCT."""
    if op == ReduceOp.PRODUCT:
        tensor.fill_(1)
    elif op == ReduceOp.MAX or op == ReduceOp.MIN:
        lowest, highest = (
            (-torch.inf, torch.inf)
            if tensor.is_floating_point()
            else (torch.iinfo(tensor.dtype).min, torch.iinfo(tensor.dtype).max)
        )
        tensor.fill_(lowest if op == ReduceOp.MAX else highest)
    else:
        tensor.zero_()


def done_work(tensor: torch.Tensor, failed: Callable[[], bool]) -> ManagedWork:
    """Return work that is complete, for a step that has failed already."""
    future = future_for(tensor)
    future.set_result(tensor)
    return ManagedWork(future, failed)


def future_for(tensor: torch.Tensor) -> Future[torch.Tensor]:
    """Return a future that may complete with such a tensor: it knows the device, to order streams."""
    return Future(devices=[tensor.device]) if tensor.device.type != "cpu" else Future()


def first_of(
    future: Future[T],
    *,
    default: T,
    timeout: timedelta,
    schedule: Callable[[float, Callable[[], object]], None],
    on_error: Callable[[Exception], None],
) -> Future[T]:
    """Return a future that completes with `future`'s value, or with `default` when that fails or takes too long."""
    result: Future[T] = Future()
    lock = threading.Lock()
    is_done = False

    def claim() -> bool:
        nonlocal is_done
        with lock:
            was_done, is_done = is_done, True
        return not was_done

    def finish(done: Future[T]) -> None:
        value = default
        try:
            value = done.value()
        except Exception as error:  # noqa: BLE001 - whatever it is, it is this step's error and no more
            on_error(error)
        if claim():
            result.set_result(value)

    def expire() -> None:
        if claim():
            on_error(TimeoutError(f"a future did not complete within {timeout.total_seconds():g} s"))
            result.set_result(default)

    future.add_done_callback(finish)
    schedule(timeout.total_seconds(), expire)
    return result
