"""Copies the memory of an accelerator to the host, through a few pinned buffers that all copies of the process share.

A device copies to pinned memory by itself, at the speed of the bus. But while memory is pinned, nothing else that the process
does with the device goes on: on an H100, pinning 4 GiB took 1.6 s, in which steps of 4 ms took up to 485 ms. So these buffers are
pinned once, and nothing else is.
"""

from __future__ import annotations

import contextlib
import ctypes
import queue
import threading
from collections.abc import Iterator

import torch

from torchft_ckpt.checkpointing.state.space import as_bytes

NUM_BUFFERS = 4
BUFFER_BYTES = 16 * 1024 * 1024


class _Ring:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._free: queue.SimpleQueue[torch.Tensor] = queue.SimpleQueue()
        self._num_made = 0
        self._streams: dict[torch.device, torch.Stream] = {}

    @contextlib.contextmanager
    def buffer(self) -> Iterator[torch.Tensor]:
        with self._lock:
            if self._free.empty() and self._num_made < NUM_BUFFERS:
                self._free.put(torch.empty(BUFFER_BYTES, dtype=torch.uint8, device="cpu", pin_memory=True))
                self._num_made += 1
        buffer = self._free.get()
        try:
            yield buffer
        finally:
            self._free.put(buffer)

    def stream_of(self, device: torch.device) -> torch.Stream:
        with self._lock:
            if device not in self._streams:
                self._streams[device] = torch.Stream(device)
            return self._streams[device]


_ring = _Ring()


def copy_to_host(source: torch.Tensor, address: int, after: torch.Event | None = None) -> None:
    """Copy bytes to the host, and return when they are there. Any thread.

    Args:
        source: uint8, contiguous, on an accelerator; the caller keeps it.
        address: of as many bytes on the host.
        after: an event of the device that the copy is made after.
    """
    stream = _ring.stream_of(source.device)
    for start in range(0, source.numel(), BUFFER_BYTES):
        part = source[start : start + BUFFER_BYTES]
        done = torch.Event(source.device, blocking=True)
        with _ring.buffer() as buffer:
            with stream:
                if after is not None:
                    stream.wait_event(after)
                buffer[: part.numel()].copy_(part, non_blocking=True)
                done.record(stream)
            done.synchronize()
            ctypes.memmove(address + start, buffer.data_ptr(), part.numel())


def contiguous_after(tensor: torch.Tensor, after: torch.Event) -> torch.Tensor:
    """Return a contiguous copy on the device, on which `copy_to_host` may be called. It is made after an event of the device."""
    stream = _ring.stream_of(tensor.device)
    with stream:
        stream.wait_event(after)
        return tensor.contiguous()


class DeviceMemory:
    """The bytes of a contiguous tensor on an accelerator. A part is copied to the host when it is asked for. Any thread.

    It does not wait for what is still to be written there. A caller who needs the bytes of a certain moment checks their digest.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self._bytes = as_bytes(tensor.detach())

    @property
    def num_bytes(self) -> int:
        """How long it is."""
        return self._bytes.numel()

    def __getitem__(self, part: slice) -> memoryview:
        wanted = self._bytes[part]
        host = torch.empty(wanted.numel(), dtype=torch.uint8, device="cpu")
        copy_to_host(wanted, host.data_ptr())
        view: memoryview = host.numpy().data
        return view
