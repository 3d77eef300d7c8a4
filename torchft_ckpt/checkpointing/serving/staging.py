"""Copies accelerator memory to the host on a side stream, ordered after the training stream.

It is done on threads of its own. Nobody waits for the device here but those, and who calls `wait`; the trainer's thread waits
for the copies before it may overwrite their source.
"""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import NamedTuple

import torch

from torchft_ckpt.checkpointing.state.device_memory import BUFFER_BYTES, contiguous_after, copy_to_host
from torchft_ckpt.checkpointing.state.space import Memory, as_bytes
from torchft_ckpt.errors import CheckpointError
from torchft_ckpt.threads import NUM_COPY_THREADS, Thread, parallel_map


class StagedSegment(NamedTuple):
    """The bytes of a segment that were copied."""

    first: int
    """Its first byte, in the segment."""
    host: torch.Tensor
    """uint8."""


class Staging:
    """One state's accelerator memory on its way to the CPU, in threads of its own.

    Args:
        memories: segments on accelerators. Constructed in the thread whose current stream wrote them.
        starts_now: False: it starts when somebody wants the copies, and costs nothing if nobody does.
    """

    def __init__(self, memories: list[Memory], *, starts_now: bool = True) -> None:
        self._memories = memories
        self._start_lock = threading.Lock()
        self._ranges = [range(memory.length) for memory in memories]
        self._is_started = False
        self._is_too_late = False
        self._written = {}
        for device in sorted({memory.tensor.device for memory in memories}, key=str):
            event = torch.Event(device)
            event.record(torch.accelerator.current_stream(device))
            self._written[device] = event
        self._is_over = threading.Event()
        self._failure: BaseException | None = None
        self._staged: list[StagedSegment] = []
        if starts_now:
            self.start()

    def start(self, ranges: list[range] | None = None) -> None:
        """Begin to copy, if it has not begun, and the source may not have been overwritten. Any thread.

        Args:
            ranges: which bytes of each segment are wanted; default: all.
        """
        with self._start_lock:
            if self._is_started or self._is_too_late:
                return
            self._is_started = True
            self._ranges = ranges or self._ranges
        Thread(self._run, "torchft_ckpt-staging").start()

    def _run(self) -> None:
        try:
            parts: list[tuple[Memory, StagedSegment, range]] = []
            for memory, wanted in zip(self._memories, self._ranges, strict=True):
                staged = StagedSegment(wanted.start, torch.empty(len(wanted), dtype=torch.uint8, device="cpu"))
                self._staged.append(staged)
                # What is not contiguous is made so once, and copied as a whole.
                most = BUFFER_BYTES if memory.tensor.is_contiguous() else max(len(wanted), 1)
                parts += [(memory, staged, wanted[at : at + most]) for at in range(0, len(wanted), most)]
            parallel_map(self._copy, parts, NUM_COPY_THREADS, "torchft_ckpt-staging")
        except BaseException as error:  # noqa: BLE001 - handed to whoever waits
            self._failure = error
        finally:
            self._memories = []
            self._is_over.set()

    def _copy(self, part: tuple[Memory, StagedSegment, range]) -> None:
        memory, staged, wanted = part
        written = self._written[memory.tensor.device]
        tensor = memory.tensor if memory.tensor.is_contiguous() else contiguous_after(memory.tensor, written)
        source = as_bytes(tensor)[wanted.start : wanted.stop]
        copy_to_host(source, staged.host.data_ptr() + wanted.start - staged.first, written)

    def ready(self) -> bool:
        """Whether the copies are complete (or failed)."""
        return self._is_over.is_set()

    def wait(self, timeout: timedelta) -> list[StagedSegment]:
        """Wait until the copies are complete, and start them if need be; return them in the order of `memories`.

        Raises:
            CheckpointError: the memory could not be staged.
        """
        self.start()
        if self._is_too_late:
            raise CheckpointError("the source was overwritten before anybody wanted it staged", party="staging")
        self._wait(timeout)
        if self._failure is not None:
            raise CheckpointError(
                f"the state was not copied to the host: {self._failure}", "staging"
            ) from self._failure
        return self._staged

    def order_mutation_after(self, timeout: timedelta) -> None:
        """Wait for the copies, so that the caller may overwrite their source.

        Raises:
            CheckpointError: they were not complete in time.
        """
        with self._start_lock:
            self._is_too_late = not self._is_started
        if self._is_too_late:
            self._memories = []
            return
        self._wait(timeout)

    def _wait(self, timeout: timedelta) -> None:
        if not self._is_over.wait(timeout.total_seconds()):
            raise CheckpointError(f"the state was not copied to the host within {timeout}", party="staging")
