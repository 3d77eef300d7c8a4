"""The order in which collectives reach the process group.

The rule: they start in the order of the calls, and one that consists of several starts all its parts before the next call's
first. It depends on the program alone, never on what has finished when; so ranks that make the same calls in the same order
start the same collectives in the same order, however fast each of them is.

To keep it, a job of several parts runs on a thread, and while that thread has anything to do, all that is called later
queues behind it. While it has nothing to do every earlier call has started all its parts, so a simple one may start right
where it was called. The thread lives only while there is something to do.

Who calls from several threads has to order the calls himself. What bypasses the queue (an operation on the process group
itself) must wait for the jobs before it. A job knows nothing of the step that it belongs to.
"""

from __future__ import annotations

import collections
import contextlib
import threading
from collections.abc import Callable, Iterator

import torch

from torchft_ckpt.threads import Thread

Job = Callable[[], None]


class CollectiveQueue:
    """A queue of jobs that run in order, on a thread that comes and goes. Any thread may call it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._jobs: collections.deque[Job] = collections.deque()
        self._is_running = False
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    @property
    def is_idle(self) -> bool:
        """Whether nothing is before a collective that is issued now: it may start where it was called.

        That stays so until the caller queues a job.
        """
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
            with _stream(stream):
                stream.wait_event(event)
                tensor.record_stream(stream)
                job()

        return run


@contextlib.contextmanager
def _stream(stream: torch.cuda.Stream) -> Iterator[None]:
    with torch.cuda.device(stream.device), torch.cuda.stream(stream):
        yield
