"""Copies accelerator memory to pinned CPU memory on a side stream, ordered after the training stream.

Host threads never wait for the device here except in `wait`, which a serving thread calls. The trainer's stream is made to
wait for the copies before it may overwrite their source; the trainer's thread waits at most until they are enqueued.
"""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import NamedTuple

import torch

from torchft_ckpt.checkpointing.state.space import Memory, as_bytes
from torchft_ckpt.errors import CheckpointError
from torchft_ckpt.threads import Thread


class StagedSegment(NamedTuple):
    """The bytes of a segment that were copied."""

    first: int
    """Its first byte, in the segment."""
    pinned: torch.Tensor
    """uint8."""


class Staging:
    """One state's accelerator memory on its way to the CPU, in a thread of its own.

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
        self._devices = sorted({memory.tensor.device for memory in memories}, key=str)
        self._written = {}
        for device in self._devices:
            event = torch.Event(device)
            event.record(torch.accelerator.current_stream(device))
            self._written[device] = event
        self._copied: dict[torch.device, torch.Event] = {}
        self._enqueued = threading.Event()
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
            streams = {device: torch.Stream(device) for device in self._devices}
            for device, stream in streams.items():
                stream.wait_event(self._written[device])
            for memory, wanted in zip(self._memories, self._ranges, strict=True):
                if not wanted:
                    self._staged.append(StagedSegment(0, torch.empty(0, dtype=torch.uint8, device="cpu")))
                    continue
                pinned = torch.empty(len(wanted), dtype=torch.uint8, device="cpu", pin_memory=True)
                with streams[memory.tensor.device]:
                    source = as_bytes(memory.tensor.contiguous())[wanted.start : wanted.stop]
                    pinned.copy_(source, non_blocking=True)
                    source.record_stream(streams[memory.tensor.device])
                self._staged.append(StagedSegment(wanted.start, pinned))
            for device, stream in streams.items():
                event = torch.Event(device)
                event.record(stream)
                self._copied[device] = event
        except BaseException as error:  # noqa: BLE001 - handed to whoever waits
            self._failure = error
        finally:
            self._enqueued.set()

    def ready(self) -> bool:
        """Whether the copies are complete (or failed)."""
        return self._enqueued.is_set() and all(event.query() for event in self._copied.values())

    def wait(self, timeout: timedelta) -> list[StagedSegment]:
        """Wait until the copies are complete, and start them if need be; return them in the order of `memories`.

        Raises:
            CheckpointError: the memory could not be staged.
        """
        self.start()
        if self._is_too_late:
            raise CheckpointError("the source was overwritten before anybody wanted it staged", party="staging")
        if not self._enqueued.wait(timeout.total_seconds()):
            raise CheckpointError(f"staging to pinned memory was not enqueued within {timeout}", party="staging")
        if self._failure is not None:
            raise CheckpointError(f"staging to pinned memory failed: {self._failure}", "staging") from self._failure
        for event in self._copied.values():
            event.synchronize()
        return self._staged

    def order_mutation_after(self, timeout: timedelta) -> None:
        """Make the calling thread's current streams wait for the copies, so that it may overwrite the source.

        Raises:
            CheckpointError: the copies were not even enqueued in time.
        """
        with self._start_lock:
            self._is_too_late = not self._is_started
        if self._is_too_late:
            self._memories = []
            return
        if not self._enqueued.wait(timeout.total_seconds()):
            raise CheckpointError(f"staging to pinned memory was not enqueued within {timeout}", party="staging")
        for device, event in self._copied.items():
            torch.accelerator.current_stream(device).wait_event(event)
        self._memories = []
