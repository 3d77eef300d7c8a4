"""All that touches a device's memory: which tensors lie there, and copies between it and the host, in the order of streams.

A device copies to and from pinned memory by itself, at the speed of the bus. But while memory is pinned, nothing else that the
process does with the device goes on: on an H100, pinning 4 GiB took 1.6 s, in which steps of 4 ms took up to 485 ms. So a few
buffers for each direction are pinned once, all copies of the process share them, and nothing else is pinned.
"""

from __future__ import annotations

import operator
import queue
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from torchft_ckpt.errors import TransferError
from torchft_ckpt.threads import Thread

TO_HOST_BYTES = 4 * 1024 * 1024
"""So much is copied to the host at a time: who waits for it waits for a few of these."""
_NUM_TO_HOST = 8
_TO_DEVICE_BYTES = 1024 * 1024
_NUM_TO_DEVICE = 16


class Accelerator:
    """The accelerator of this process, by torch's streams and events. Any thread. A test puts another one in its place."""

    def __init__(self) -> None:
        self.is_on_host: Callable[[torch.Tensor], bool] = operator.attrgetter("is_cpu")
        """Whether the host reads a tensor's memory."""
        self._lock = threading.Lock()
        self._streams: dict[tuple[torch.device, bool], tuple[Any, threading.Lock]] = {}
        self._to_host = _Ring(self, _NUM_TO_HOST, TO_HOST_BYTES)
        self._to_device = _Ring(self, _NUM_TO_DEVICE, _TO_DEVICE_BYTES)

    # What a device does

    def can_copy(self, device: torch.device) -> bool:
        """Whether it is this process's kind of accelerator, whose memory can be copied."""
        accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        return accelerator is not None and accelerator.type == device.type

    def pinned(self, num_bytes: int) -> torch.Tensor:
        """Return uint8 memory on the host that devices copy from and to.

        Raises:
            RuntimeError: it is refused.
        """
        return torch.empty(num_bytes, dtype=torch.uint8, device="cpu", pin_memory=True)

    def now(self, device: torch.device) -> Any:
        """Return an event after all that the current stream of this thread was given so far."""
        _be_on(device)
        event = torch.Event(device)
        event.record(torch.accelerator.current_stream(device))
        return event

    def begin_copy(self, target: torch.Tensor, source: torch.Tensor, after: Any, *, is_to_host: bool) -> Any:
        """Begin to copy bytes, one side of which is pinned; return an event after it.

        Copies of one direction are made in the order in which they begin. After `after`: an event of the device, or None.
        """
        device = (source if is_to_host else target).device
        done = torch.Event(device, blocking=True)
        with self._on_stream(device, is_to_host) as stream:
            if after is not None:
                stream.wait_event(after)
            target.copy_(source, non_blocking=True)
            done.record(stream)
        return done

    def contiguous(self, tensor: torch.Tensor, after: Any) -> torch.Tensor:
        """Return a contiguous copy on the device, from which bytes may be copied to the host. It is made after an event.

        Raises:
            RuntimeError: the device has no room for it.
        """
        with self._on_stream(tensor.device, is_to_host=True) as stream:
            stream.wait_event(after)
            return tensor.contiguous()

    def after_writes(self, device: torch.device) -> Any:
        """Return an event after all copies to a device that have begun."""
        event = torch.Event(device, blocking=True)
        event.record(self._stream(device, is_to_host=False)[0])
        return event

    def finish(self, device: torch.device) -> None:
        """Wait until the device has done all that it was given so far, on every stream."""
        torch.accelerator.synchronize(device)

    def wait(self, event: Any) -> None:
        """Wait on this thread until an event has come.

        Raises:
            RuntimeError: the device has failed.
        """
        event.synchronize()

    @contextmanager
    def _on_stream(self, device: torch.device, is_to_host: bool) -> Iterator[Any]:
        stream, lock = self._stream(device, is_to_host)
        # A stream keeps in itself what was current before: of one thread at a time, or one is left on another's.
        with lock, stream:
            yield stream

    def _stream(self, device: torch.device, is_to_host: bool) -> tuple[Any, threading.Lock]:
        _be_on(device)
        with self._lock:
            if (device, is_to_host) not in self._streams:
                self._streams[device, is_to_host] = torch.Stream(device), threading.Lock()
            return self._streams[device, is_to_host]

    # By means of these

    def place_of(self, tensor: torch.Tensor) -> int:
        """Return the address of a tensor's memory, apart from those of other devices."""
        return tensor.data_ptr() + (0 if self.is_on_host(tensor) else (1 + (tensor.device.index or 0)) << 64)

    def copy_to_host(self, pieces: Iterable[tuple[torch.Tensor, memoryview]], after: Any) -> None:
        """Copy bytes of one device to as many of the host, and return when all are there; many short pieces are waited for once.

        Args:
            pieces: uint8, contiguous, and where they go.
            after: an event of the device that the copies are made after.
        """
        size = TO_HOST_BYTES
        todo = deque((a[at : at + size], b[at : at + size]) for a, b in pieces for at in range(0, len(b), size))
        while todo:
            with self._to_host.buffer() as buffer:
                copied, filled = list[tuple[memoryview, torch.Tensor]](), 0
                while todo and filled + len(todo[0][1]) <= size:
                    source, target = todo.popleft()
                    copied.append((target, buffer.memory[filled : filled + len(target)]))
                    buffer.busy_until = self.begin_copy(copied[-1][1], source, after, is_to_host=True)
                    filled += len(target)
                self.wait(buffer.busy_until)
                for target, view in copied:
                    np.copyto(np.frombuffer(target, np.uint8), view.numpy())  # lets other threads run

    def begin_copy_to_device(self, data: memoryview, target: torch.Tensor, after: Any) -> None:
        """Begin to copy bytes of the host to a device; they may be overwritten at once. `after_writes` is after it."""
        for start in range(0, len(data), _TO_DEVICE_BYTES):
            part = target[start : start + _TO_DEVICE_BYTES]
            with self._to_device.buffer() as buffer:
                view = buffer.memory[: part.numel()]
                np.copyto(view.numpy(), np.frombuffer(data[start : start + part.numel()], np.uint8))
                buffer.busy_until = self.begin_copy(part, view, after, is_to_host=False)


def _be_on(device: torch.device) -> None:
    """Have a thread of the library stay on a device: each time torch went back to the first one it would take memory there."""
    if isinstance(threading.current_thread(), Thread):
        torch.accelerator.set_device_index(device.index)


class _Buffer:
    def __init__(self, memory: torch.Tensor) -> None:
        self.memory = memory
        self.busy_until: Any = None
        """The event of the last copy from or to it that has begun."""


class _Ring:
    def __init__(self, accelerator: Accelerator, num_buffers: int, num_bytes: int) -> None:
        self._accelerator = accelerator
        self._num_bytes = num_bytes
        self._lock = threading.Lock()
        self._free: queue.SimpleQueue[_Buffer] = queue.SimpleQueue()
        self._num_made, self._num_most = 0, num_buffers

    @contextmanager
    def buffer(self) -> Iterator[_Buffer]:
        with self._lock:
            if self._free.empty() and self._num_made < self._num_most:
                try:
                    self._free.put(_Buffer(self._accelerator.pinned(self._num_bytes)))
                    self._num_made += 1
                except RuntimeError:
                    if not self._num_made:
                        raise
                    self._num_most = self._num_made  # the system allows no more: these do, more slowly
        buffer = self._free.get()
        try:
            busy_until, buffer.busy_until = buffer.busy_until, None
            if busy_until is not None:
                self._accelerator.wait(busy_until)
            yield buffer
        finally:
            self._free.put(buffer)


accelerator = Accelerator()


class DeviceMemory:
    """The bytes of a contiguous tensor on a device, as memory of the host that is copied when it is asked for. Any thread.

    Args:
        tensor: kept.
        data: its bytes, uint8.
        after: an event that they are read and written after.
    """

    def __init__(self, tensor: torch.Tensor, data: torch.Tensor, after: Any) -> None:
        self.tensor = tensor
        self._bytes = data
        self._after = after
        self._is_written = False

    @property
    def num_bytes(self) -> int:
        """How long it is."""
        return self._bytes.numel()

    def __getitem__(self, part: slice) -> memoryview:
        wanted = self._bytes[part]
        host = np.empty(wanted.numel(), dtype=np.uint8)
        # What is written comes after `_after`, too.
        after = accelerator.after_writes(self.tensor.device) if self._is_written else self._after
        accelerator.copy_to_host([(wanted, host.data)], after)
        return host.data

    def __setitem__(self, part: slice, data: memoryview) -> None:
        """Begin to write; see `settle`.

        Raises:
            TransferError: the device has failed.
        """
        self._is_written = True
        with naming_failure_of_device():
            accelerator.begin_copy_to_device(data, self._bytes[part], self._after)

    def settle(self) -> None:
        """Wait until all that was written on its device is there.

        Raises:
            TransferError: the device has failed.
        """
        with naming_failure_of_device():
            accelerator.wait(accelerator.after_writes(self.tensor.device))


@contextmanager
def naming_failure_of_device() -> Iterator[None]:
    """Around copies to a device.

    Raises:
        TransferError: it has failed.
    """
    try:
        yield
    except RuntimeError as error:
        raise TransferError(f"what arrived was not copied to the device: {error}", party="device") from error
