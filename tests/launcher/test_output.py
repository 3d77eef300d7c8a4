"""A launcher's streams on real pipes: one that nobody reads, one whose reader is gone, one that is set not to block."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import pytest
from support.waiting import wait_until

from torchft_ckpt.launcher.output import OutputStream

PIPE_BYTES = 1 << 16


NAME = "a pipe"


class Pipe:
    """A pipe, and the stream that writes to it; at first it is full."""

    def __init__(self) -> None:
        self.readable, self.writable = os.pipe()
        self._read = b""

    def stream(self, **settings: float) -> OutputStream:
        self.fill()
        return OutputStream(NAME, self.writable, **settings)

    def fill(self) -> None:
        os.set_blocking(self.writable, False)
        with suppress(BlockingIOError):
            while os.write(self.writable, b"-" * (PIPE_BYTES - 1) + b"\n"):
                pass
        os.set_blocking(self.writable, True)

    def read_lines(self, until: bytes) -> list[bytes]:
        """Read as far as the line `until`; return the lines before it and itself, without those that filled the pipe."""
        while until not in self._read:
            self._read += os.read(self.readable, PIPE_BYTES)
        before, _, self._read = self._read.partition(until)
        return [line for line in (before + until).splitlines() if not line.startswith(b"-")]

    def close_reader(self) -> None:
        os.close(self.readable)
        self.readable = -1


@pytest.fixture
def pipe() -> Iterator[Pipe]:
    pipe = Pipe()
    yield pipe
    if pipe.readable >= 0:
        pipe.close_reader()  # which ends the stream's thread
    wait_until(lambda: all(thread.name != f"writes {NAME}" for thread in threading.enumerate()), "the thread is gone")
    os.close(pipe.writable)


@contextmanager
def attached(stream: OutputStream, at_readers_end: Callable[[], None] = lambda: None) -> Iterator[None]:
    stream.attach(at_readers_end)
    try:
        yield
    finally:
        stream.detach()


def never() -> bool:
    return False


def urgently() -> bool:
    return True


async def test_who_writes_waits_for_a_reader_and_nothing_is_lost(pipe: Pipe) -> None:
    stream = pipe.stream(capacity=10, patience_s=1e9)
    with attached(stream):
        assert await stream.write([b"first line\n"], never)
        writing = asyncio.create_task(stream.write([b"second line\n"], never))
        await asyncio.sleep(0.02)
        assert not writing.done(), "there is no room, and the event loop goes on"
        lines = await asyncio.to_thread(pipe.read_lines, b"first line\n")
        assert await writing
    lines += pipe.read_lines(b"second line\n")
    assert lines == [b"first line", b"second line"]
    assert stream.close() == 0


async def test_a_group_that_has_ended_does_not_wait(pipe: Pipe) -> None:
    stream = pipe.stream(capacity=10, patience_s=1e9)
    with attached(stream):
        await stream.write([b"first line\n"], never)
        has_ended = asyncio.Event()
        writing = asyncio.create_task(stream.write([b"2nd\n"], has_ended.is_set))
        await asyncio.sleep(0)
        has_ended.set()
        stream.hurry()
        assert await asyncio.wait_for(writing, 30)
        assert await stream.write([b"third line\n"], urgently)
        assert not await stream.write([b"too much\n"], urgently)
    assert stream.close(limit_s=0.0) >= len(b"first line\n2nd\nthird line\n")


async def test_lines_for_a_stuck_stream_are_left_out_and_it_says_so_when_it_is_read_again(pipe: Pipe) -> None:
    stream = pipe.stream(capacity=10, patience_s=0.02)
    with attached(stream):
        assert await stream.write([b"first line\n"], never)
        assert not await stream.write([b"second\n", b"third\n"], never)
        lines = await asyncio.to_thread(pipe.read_lines, b"first line\n")
        wait_until(lambda: stream.num_bytes == 0, "it is written")
        assert await stream.write([b"fourth\n"], never)
    lines += pipe.read_lines(b"fourth\n")
    assert lines == [
        b"first line",
        b"[launcher] lines that are left out here, because nobody read this: 2",
        b"fourth",
    ]
    assert stream.close() == 0


def test_the_end_does_not_wait_for_a_stuck_stream_and_nothing_after_it_blocks(pipe: Pipe) -> None:
    stream = pipe.stream(patience_s=0.02)
    stream.write_now(b"last words\n")
    assert stream.close(limit_s=1e6) == len(b"last words\n")
    os.write(pipe.writable, b"-" * 2 * PIPE_BYTES)


def test_the_end_waits_for_a_slow_stream_until_its_time_is_over(pipe: Pipe) -> None:
    stream = pipe.stream(patience_s=1e6)
    stream.write_now(b"last words\n")
    begin = time.monotonic()
    assert stream.close(limit_s=0.05) == len(b"last words\n")
    assert time.monotonic() - begin >= 0.05


def test_the_end_writes_out_what_is_left(pipe: Pipe) -> None:
    stream = pipe.stream()
    for number in range(100):
        stream.write_now(b"%d\n" % number)
    reading = threading.Timer(0.02, lambda: said.extend(pipe.read_lines(b"\n99\n")))
    said: list[bytes] = []
    reading.start()
    assert stream.close() == 0
    reading.join()
    assert said == [b"%d" % number for number in range(100)]


async def test_the_end_of_the_reader_is_told_once_and_everything_is_taken(pipe: Pipe) -> None:
    told: list[bool] = []
    stream = pipe.stream(capacity=10, patience_s=1e6)
    with attached(stream, lambda: told.append(True)):
        await stream.write([b"first line\n"], never)
        waiting = asyncio.create_task(stream.write([b"second line\n"], never))
        await asyncio.sleep(0)
        pipe.close_reader()
        assert await asyncio.wait_for(waiting, 30)
        wait_until(lambda: stream.num_bytes == 0, "all is taken")
        assert await stream.write([b"x" * 5 * PIPE_BYTES], urgently)
        assert stream.close() == 0
        await asyncio.sleep(0)
    assert told == [True]


async def test_a_reader_that_was_gone_before_the_event_loop_is_told_too(pipe: Pipe) -> None:
    stream = pipe.stream()
    pipe.close_reader()
    stream.write_now(b"nobody hears\n")
    assert stream.close() == 0
    told = asyncio.Event()
    with attached(stream, told.set):
        await asyncio.wait_for(told.wait(), 30)


def test_a_stream_that_is_set_not_to_block_is_waited_for(pipe: Pipe) -> None:
    stream = pipe.stream(patience_s=1e6)
    os.set_blocking(pipe.writable, False)
    stream.write_now(b"last words\n")
    assert pipe.read_lines(b"last words\n") == [b"last words"]
    assert stream.close() == 0
