"""Copies accelerator memory to the host, ordered after the training stream, part by part: what is asked for comes first.

It is done on threads of its own. Nobody waits for the device here but those, and who asks for bytes, for these alone; the
trainer's thread waits for all of it before it may overwrite the source.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import NamedTuple

import torch

from torchft_ckpt.checkpointing.state import device_memory
from torchft_ckpt.checkpointing.state.memory import TOUCH_FROM_BYTES, Toucher, fresh_memory
from torchft_ckpt.checkpointing.state.space import ALIGN_BYTES, Memory, as_bytes
from torchft_ckpt.errors import CheckpointError
from torchft_ckpt.threads import NUM_COPY_THREADS, Condition, Thread, parallel_map


class _Staged(NamedTuple):
    """A segment, or as much of it as is wanted."""

    wanted: range
    at: int
    """Its first byte on the host."""
    first: int
    """The number of its first part."""
    part_bytes: int


class Staging:
    """One state's accelerator memory on its way to the host, in threads of its own. Every method may be called from any thread.

    Args:
        memories: segments on accelerators. Constructed in the thread whose current stream wrote them.
        starts_now: False: it starts when somebody wants the copies, and costs nothing if nobody does.
        look: called with a segment's number each time when a part of it was copied, before anybody gets it.
    """

    def __init__(
        self, memories: list[Memory], *, starts_now: bool = True, look: Callable[[int], None] = lambda segment: None
    ) -> None:
        self._look = look
        self._toucher = Toucher()
        self._accelerator = device_memory.accelerator
        devices = {memory.tensor.device for memory in memories}
        self._written = {device: self._accelerator.now(device) for device in sorted(devices, key=str)}
        self._changed = Condition()
        # All below belong to `_changed`.
        self._memories = memories
        self._is_started = self._is_too_late = self._is_ended = False
        self._failure: BaseException | None = None
        self._segments: list[_Staged] = []
        self._parts: list[tuple[int, range]] = []
        """What is copied at once: of which segment, which bytes."""
        self._host = memoryview(b"")
        self._next = 0
        """The part after that which was asked for last: who asks for one reads on from there."""
        self._asked: deque[int] = deque()
        self._taken = self._done = bytearray()
        self._peeked: dict[tuple[int, int, int], memoryview] = {}
        self._num_peeking = 0
        if starts_now:
            self.start()

    def start(self, ranges: list[range] | None = None) -> None:
        """Begin to copy, if it has not begun, and the source may not have been overwritten.

        Args:
            ranges: which bytes of each segment are wanted; default: all.
        """
        with self._changed:
            if self._is_started or self._is_too_late or self._is_ended:
                return
            self._is_started = True
            end = 0
            for segment, memory in enumerate(self._memories):
                wanted = range(memory.length) if ranges is None else ranges[segment]
                # What is not contiguous is made so once, and copied as a whole.
                most = device_memory.TO_HOST_BYTES if memory.tensor.is_contiguous() else max(len(wanted), 1)
                self._segments.append(_Staged(wanted, end, len(self._parts), most))
                self._parts += [(segment, wanted[at : at + most]) for at in range(0, len(wanted), most)]
                end += -(-len(wanted) // ALIGN_BYTES) * ALIGN_BYTES
            self._taken, self._done = bytearray(len(self._parts)), bytearray(len(self._parts))
            try:
                self._host = fresh_memory(end).data
                if self._parts:
                    Thread(self._run, "torchft_ckpt-staging").start()
                else:
                    self._memories = []
            except (MemoryError, RuntimeError) as error:
                self._failure = error

    def _run(self) -> None:
        num_threads = min(NUM_COPY_THREADS, len(self._parts))
        try:
            parallel_map(lambda _: self._work(), range(num_threads), num_threads, "torchft_ckpt-staging")
        except BaseException as error:  # noqa: BLE001 - handed to whoever waits
            self._fail(error)
        with self._changed:
            self._changed.wait_for(lambda: not self._num_peeking)
            self._memories = []

    def _fail(self, error: BaseException) -> None:
        with self._changed:
            self._failure = self._failure or error
            self._changed.notify_all()

    def _work(self) -> None:
        for number in iter(self._take, None):
            try:
                self._copy(*self._parts[number])
            except BaseException as error:
                self._fail(error)
                raise
            with self._changed:
                # After a failure nobody waits for the rest: what it was copied from may have been overwritten meanwhile.
                self._done[number] = self._failure is None
                self._changed.notify_all()

    def _take(self) -> int | None:
        with self._changed:
            if self._is_over():
                return None
            while self._asked:
                if not self._taken[number := self._asked.popleft()]:
                    break
            else:
                number = self._taken.find(0, self._next)
                number = self._taken.find(0) if number < 0 else number
            if number >= 0:
                self._taken[number] = 1
            return number if number >= 0 else None

    def _copy(self, segment: int, wanted: range) -> None:
        memory, written = self._memories[segment], self._written[self._memories[segment].tensor.device]
        view = self._view(segment, wanted)
        if len(self._host) >= TOUCH_FROM_BYTES:
            self._toucher.touch(view)
        tensor = (
            memory.tensor if memory.tensor.is_contiguous() else self._accelerator.contiguous(memory.tensor, written)
        )
        self._accelerator.copy_to_host([(as_bytes(tensor)[wanted.start : wanted.stop], view)], written)
        self._look(segment)

    def _view(self, segment: int, wanted: range) -> memoryview:
        staged = self._segments[segment]
        at = staged.at + wanted.start - staged.wanted.start
        return self._host[at : at + len(wanted)]

    def ready(self) -> bool:
        """Whether the copies are complete (or failed)."""
        return self._is_started and self._is_over()

    def _is_over(self) -> bool:
        return self._is_ended or self._failure is not None or 0 not in self._done

    def wait(self, timeout: timedelta) -> None:
        """Wait until the copies are complete, and start them if need be.

        Raises:
            CheckpointError: the memory could not be staged.
        """
        self.start()
        with self._changed:
            self._wait_for(self._is_over, timeout)
            self._raise_failure()

    def get(self, segment: int, low: int, high: int, timeout: timedelta) -> memoryview | None:
        """Return bytes [low, high) of a segment once they are there; None if they were not wanted, or all was ended.

        Raises:
            CheckpointError: they could not be staged.
        """
        self.start()
        with self._changed:
            staged = self._segments[segment] if self._segments else _Staged(range(0), 0, 0, 1)
            first, last = (staged.first + (at - staged.wanted.start) // staged.part_bytes for at in (low, high - 1))
            if self._is_ended or not (staged.wanted.start <= low < high <= staged.wanted.stop):
                self._raise_failure()
                return None
            if self._done.find(0, first, last + 1) >= 0:
                self._raise_failure()
                if (segment, low, high) in self._peeked:
                    return self._peeked[segment, low, high]
                self._asked.extend(range(first, last + 1))
                self._next = last + 1
                self._wait_for(lambda: self._done.find(0, first, last + 1) < 0 or self._is_over(), timeout)
                if self._done.find(0, first, last + 1) >= 0:
                    self._raise_failure()
                    return None
            return self._view(segment, range(low, high))

    def peek(self, wanted: Iterable[tuple[int, int, int]]) -> None:
        """Copy bytes [low, high) of segments alone, a few of each, ahead of the parts that they are in. `get` has them then."""
        self.start()
        with self._changed:
            if self._is_over() or self._is_too_late:
                return
            self._num_peeking += 1
        try:
            by_device: dict[torch.device, list[tuple[torch.Tensor, memoryview]]] = {}
            peeked = {}
            for segment, low, high in wanted:
                tensor, staged = self._memories[segment].tensor, self._segments[segment].wanted
                if tensor.is_contiguous() and staged.start <= low < high <= staged.stop:
                    host = peeked[segment, low, high] = memoryview(bytearray(high - low))
                    by_device.setdefault(tensor.device, []).append((as_bytes(tensor)[low:high], host))
            for device, pieces in by_device.items():
                self._accelerator.copy_to_host(pieces, self._written[device])
            for segment, *_ in peeked:
                self._look(segment)
            with self._changed:
                self._peeked.update(peeked)
        except RuntimeError as error:
            self._fail(error)
        finally:
            with self._changed:
                self._num_peeking -= 1
                self._changed.notify_all()

    def order_mutation_after(self, timeout: timedelta) -> None:
        """Wait for the copies, so that the caller may overwrite their source.

        Raises:
            CheckpointError: they were not complete in time.
        """
        with self._changed:
            self._is_too_late = not self._is_started
            if self._is_too_late:
                self._memories = []
            else:
                self._wait_for(lambda: self._is_over() and not self._num_peeking, timeout)

    def end(self) -> None:
        """Copy no more; nobody gets anything from now on."""
        with self._changed:
            self._is_ended = True
            self._changed.notify_all()

    def _wait_for(self, is_so: Callable[[], bool], timeout: timedelta) -> None:
        if not self._changed.wait_for(is_so, timeout.total_seconds()):
            raise CheckpointError(f"the state was not copied to the host within {timeout}", party="staging")

    def _raise_failure(self) -> None:
        if self._is_too_late:
            raise CheckpointError("the source was overwritten before anybody wanted it staged", party="staging")
        if self._failure is not None:
            what = f"the state was not copied to the host: {self._failure}"
            raise CheckpointError(what, "staging") from self._failure
