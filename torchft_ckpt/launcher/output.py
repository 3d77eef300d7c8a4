"""The launcher's standard streams, each written by a thread of its own: a reader that does not read holds up nothing else.

`core/services/line_queue.py` decides what is kept, who waits and what is left out.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import select
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from torchft_ckpt.core.services.line_queue import LineQueue, Put
from torchft_ckpt.threads import Thread

CAPACITY = 1 << 20
PATIENCE_S = 5.0
"""A stream that takes nothing for so long is stuck."""
FLUSH_S = 10.0
"""So long the end of the launcher may wait for a stream that takes something now and then."""

_log = logging.getLogger(__name__)


class OutputStream:
    """A stream of this process, and the thread that writes to it. It stays usable when it fails: it then takes everything, and
    writes it nowhere.

    Args:
        name: for the log.
        descriptor: of the stream.
        capacity: of what is kept for it, in bytes.
        patience_s: after so long without taking anything it is stuck.
    """

    def __init__(self, name: str, descriptor: int, *, capacity: int = CAPACITY, patience_s: float = PATIENCE_S) -> None:
        self.name = name
        self._descriptor = descriptor
        self._queue = LineQueue(capacity=capacity, patience_s=patience_s)
        self._changed = threading.Condition()
        self._is_closing = False
        self._is_given_up = False
        self._is_awaited = False
        """Somebody waits for room."""
        self._has_reader = True
        self._loop: asyncio.AbstractEventLoop | None = None
        self._room: asyncio.Event | None = None
        self._at_readers_end: Callable[[], None] | None = None
        self._thread = Thread(self._write_all, f"writes {name}")
        self._thread.start()

    @property
    def num_bytes(self) -> int:
        """The bytes that wait, or are being written. Any thread."""
        with self._changed:
            return self._queue.num_bytes

    def attach(self, at_readers_end: Callable[[], None]) -> None:
        """From now on `write` may be called on the running event loop.

        Args:
            at_readers_end: called there once, when nobody can read the stream any more.
        """
        with self._changed:
            self._loop, self._room = asyncio.get_running_loop(), asyncio.Event()
            self._at_readers_end = at_readers_end
            if not self._has_reader:
                self._loop.call_soon(at_readers_end)

    def detach(self) -> None:
        """The event loop is about to end."""
        with self._changed:
            self._loop = self._room = self._at_readers_end = None

    async def write(self, lines: Sequence[bytes], is_urgent: Callable[[], bool]) -> bool:
        """Have lines written, each with its end; return once there is room for them, or they are left out.

        Args:
            lines: what to write.
            is_urgent: whether not to wait for room; asked again at each `hurry`.

        Returns:
            whether they were taken.
        """
        room = self._room
        if room is None:
            raise RuntimeError("internal error: no event loop is attached")
        while True:
            room.clear()
            now = time.monotonic()
            with self._changed:
                became = self._queue.put(lines, now, is_urgent=is_urgent())
                patience_s = self._queue.stuck_at(now) - now
                self._is_awaited = self._is_awaited or became is Put.NO_ROOM
                self._changed.notify_all()
            if became is not Put.NO_ROOM:
                return became is Put.TAKEN
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(room.wait(), patience_s)

    def hurry(self) -> None:
        """Have all that wait in `write` ask whether they are urgent; on the event loop."""
        if self._room is not None:
            self._room.set()

    def write_now(self, line: bytes) -> None:
        """Have a line written, or left out where too much waits already. Any thread; it waits for nothing."""
        with self._changed:
            self._queue.put([line], time.monotonic(), is_urgent=True)
            self._changed.notify_all()

    def close(self, limit_s: float = FLUSH_S) -> int:
        """Wait until everything is written, the stream is stuck, or the time is over. What is written to the descriptor later
        blocks in none of these cases.

        Args:
            limit_s: the longest to wait.

        Returns:
            how many bytes were not written.
        """
        until = time.monotonic() + limit_s
        with self._changed:
            self._is_closing = True
            self._queue.say_what_is_missing()
            self._changed.notify_all()
            while self._queue.num_bytes and not self._queue.is_stuck(now := time.monotonic()) and now < until:
                self._changed.wait(min(until, self._queue.stuck_at(now)) - now)
            num_left = self._queue.num_bytes
            if num_left:
                self._is_given_up = True
                self._lead_nowhere()
        if num_left:
            self._thread.let_go()
        else:
            self._thread.join()
        return num_left

    def _write_all(self) -> None:
        while piece := self._next():
            try:
                self._write(piece)
            except OSError as error:
                self._go_on_without(error)
            with self._changed:
                self._queue.written()
                self._changed.notify_all()
                if self._is_awaited and self._room is not None:
                    self._call(self._room.set)
                    self._is_awaited = False

    def _next(self) -> bytes:
        with self._changed:
            while not self._is_given_up:
                if (piece := self._queue.begin(time.monotonic())) or self._is_closing:
                    return piece
                self._changed.wait()
            return b""

    def _write(self, piece: bytes) -> None:
        rest = memoryview(piece)
        while rest:
            try:
                rest = rest[os.write(self._descriptor, rest) :]
            except BlockingIOError:  # whoever gave us the stream has made it so
                select.select([], [self._descriptor], [])

    def _go_on_without(self, error: OSError) -> None:
        with self._changed:
            if self._is_given_up:
                return
            self._lead_nowhere()
            if isinstance(error, BrokenPipeError):
                self._has_reader = False
                self._call(self._at_readers_end)
                return
        _log.error("%s cannot be written any more: %s; the job goes on", self.name, error)

    def _lead_nowhere(self) -> None:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self._descriptor)
        os.close(nowhere)

    def _call(self, function: Callable[[], Any] | None) -> None:
        if self._loop is not None and function is not None:
            self._loop.call_soon_threadsafe(function)


class Output:
    """Standard output and standard error of a launcher, for a `with` block. Within it the log goes the same way.

    At the end of the block everything is written out, for `FLUSH_S` at most.

    Args:
        capacity: of what is kept for each stream, in bytes.
        patience_s: after so long without taking anything a stream is stuck.
    """

    def __init__(self, *, capacity: int = CAPACITY, patience_s: float = PATIENCE_S) -> None:
        self._capacity = capacity
        self._patience_s = patience_s
        self._exits = contextlib.ExitStack()

    def __enter__(self) -> Output:
        self.out = self._stream("standard output", sys.stdout)
        self.errors = self._stream("standard error", sys.stderr)
        for handler in logging.getLogger().handlers:
            if isinstance(handler, logging.StreamHandler) and handler.stream is sys.stderr:
                handler.setStream(_LogLines(self.errors))
                self._exits.callback(handler.setStream, sys.stderr)
        return self

    def __exit__(self, *_: object) -> None:
        if num_left := self.out.close():
            _log.warning("nobody reads standard output: bytes that were not written: %d", num_left)
        self.errors.close()
        self._exits.close()

    def _stream(self, name: str, stream: Any) -> OutputStream:
        stream.flush()
        return OutputStream(name, stream.fileno(), capacity=self._capacity, patience_s=self._patience_s)


class _LogLines:
    """What a log handler writes to."""

    def __init__(self, stream: OutputStream) -> None:
        self._stream = stream

    def write(self, text: str) -> None:
        self._stream.write_now(text.encode(errors="backslashreplace"))

    def flush(self) -> None:
        """Nothing is kept here."""
