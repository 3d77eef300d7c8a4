"""A device that is none: its memory is memory of the host that nobody but this file may read.

Each kind of work happens as late as it may, so whoever does not wait for it is found out, each time. What a script's own stream
was given (`write`) is done when an event after it comes; a copy is made when somebody waits for it, out of what lies there then.
So a copy that is not ordered after a write gets the old bytes, one whose source is overwritten too early gets the new ones, and
what is never waited for never arrives.
"""

from __future__ import annotations

import mmap
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from torchft_ckpt.checkpointing.state import device_memory

_ALIGN = 512


@dataclass(eq=False)
class _Stream:
    """Work that was begun and is not done yet, in order."""

    todo: list[Callable[[], None]] = field(default_factory=list)
    num_begun: int = 0
    num_done: int = 0
    free_at: float = 0.0


@dataclass(frozen=True)
class _Event:
    stream: _Stream
    number: int
    """Of works that come before it."""
    at: float = 0.0


class FakeAccelerator(device_memory.Accelerator):
    """An accelerator with so many bytes of memory, and a bus of that many bytes a second each way (None: no time passes).

    Args:
        num_bytes: more is refused, as out of memory.
        refuses_pinned: whether memory of the host cannot be pinned.
    """

    def __init__(self, num_bytes: int = 64 << 20, bytes_per_s: float | None = None) -> None:
        super().__init__()
        self._memory = mmap.mmap(-1, num_bytes)
        whole = torch.frombuffer(self._memory, dtype=torch.uint8)
        self._first, self._stop = whole.data_ptr(), whole.data_ptr() + num_bytes
        self._end = 0
        self._bytes_per_s = bytes_per_s
        self._busy = threading.RLock()
        self._current = _Stream()
        self._sides = {True: _Stream(), False: _Stream()}
        self._aside = _Stream()
        self.is_on_host = self._is_on_host
        self.refuses_pinned = False
        self.copies_left: int | None = None
        """After so many copies the device fails; None: never."""
        self.num_pinned = 0
        """Bytes."""
        self.num_copied = {True: 0, False: 0}
        """Bytes to the host, and to the device."""

    # What a script does

    def tensor(self, value: torch.Tensor) -> torch.Tensor:
        """Return a copy on the device, laid out as it is."""
        span = 1 + sum((size - 1) * stride for size, stride in zip(value.shape, value.stride(), strict=True))
        num_bytes = span * value.element_size()
        start, self._end = self._end, self._end + -(-num_bytes // _ALIGN) * _ALIGN
        if self._end > len(self._memory):
            self._end = start
            raise torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {num_bytes} bytes")
        flat = torch.frombuffer(memoryview(self._memory)[start : start + num_bytes], dtype=value.dtype)
        made = flat.as_strided(value.shape, value.stride())
        made.copy_(value)
        return made

    def write(self, tensor: torch.Tensor, value: float, *, is_aside: bool = False) -> None:
        """Have the current stream, or another one, fill a tensor, and count a write; it is done when the stream gets to it."""
        torch.autograd.graph.increment_version(tensor)
        self._begin(self._aside if is_aside else self._current, lambda: tensor.data.fill_(value))

    def synchronize(self) -> None:
        """Wait for the current stream."""
        self.wait(_Event(self._current, self._current.num_begun))

    def read(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return what the current stream finds in a tensor."""
        self.synchronize()
        return tensor.detach().clone()

    # What a device does

    def _is_on_host(self, tensor: torch.Tensor) -> bool:
        return tensor.is_cpu and not self._first <= tensor.data_ptr() < self._stop

    def can_copy(self, device: torch.device) -> bool:
        return device.type == "cpu"

    def pinned(self, num_bytes: int) -> torch.Tensor:
        if self.refuses_pinned:
            raise RuntimeError("CUDA error: out of memory (cudaHostAlloc)")
        self.num_pinned += num_bytes
        return torch.empty(num_bytes, dtype=torch.uint8)

    def now(self, device: torch.device) -> Any:
        with self._busy:
            return _Event(self._current, self._current.num_begun)

    def begin_copy(self, target: torch.Tensor, source: torch.Tensor, after: Any, *, is_to_host: bool) -> Any:
        def copy() -> None:
            if self.copies_left is not None:
                self.copies_left -= 1
                if self.copies_left < 0:
                    raise RuntimeError("CUDA error: an illegal memory access was encountered")
            if after is not None:
                self._do_until(after)
            target.copy_(source)
            self.num_copied[is_to_host] += source.numel()

        return self._begin(self._sides[is_to_host], copy, source.numel())

    def contiguous(self, tensor: torch.Tensor, after: Any) -> torch.Tensor:
        with self._busy:
            self._do_until(after)
            return self.tensor(tensor.contiguous())

    def after_writes(self, device: torch.device) -> Any:
        with self._busy:
            stream = self._sides[False]
            return _Event(stream, stream.num_begun, stream.free_at)

    def wait(self, event: Any) -> None:
        time.sleep(max(0.0, event.at - time.monotonic()))
        with self._busy:
            self._do_until(event)

    def finish(self, device: torch.device) -> None:
        for stream in (self._current, self._aside, *self._sides.values()):
            self.wait(_Event(stream, stream.num_begun))

    def _begin(self, stream: _Stream, work: Callable[[], None], num_bytes: int = 0) -> _Event:
        with self._busy:
            stream.todo.append(work)
            stream.num_begun += 1
            if self._bytes_per_s is not None:
                stream.free_at = max(stream.free_at, time.monotonic()) + num_bytes / self._bytes_per_s
            return _Event(stream, stream.num_begun, stream.free_at)

    def _do_until(self, event: _Event) -> None:
        stream = event.stream
        while stream.num_done < event.number:
            stream.todo[0]()  # what fails is not done: whoever waits for it learns that, again and again
            del stream.todo[0]
            stream.num_done += 1


@contextmanager
def fake_accelerator(num_bytes: int = 64 << 20, bytes_per_s: float | None = None) -> Iterator[FakeAccelerator]:
    """Have this process use such a device instead of its own."""
    with pytest.MonkeyPatch.context() as patch:
        fake = FakeAccelerator(num_bytes, bytes_per_s)
        patch.setattr(device_memory, "accelerator", fake)
        yield fake
