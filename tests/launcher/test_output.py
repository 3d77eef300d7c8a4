"""A launcher's streams on real pipes: nobody reads one for a while, the reader of one is gone, one is set not to block."""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Iterator
from contextlib import suppress

import pytest
from support.waiting import wait_until

from torchft_ckpt.launcher.supervisor import OutputStream

PIPE_BYTES = 1 << 16


class Pipe:
    """A pipe whose writable end is a stream; it notes when the stream says that its reader is gone."""

    def __init__(self) -> None:
        self.readable, self.writable = os.pipe()
        self.told: list[bool] = []
        self.stream = OutputStream("a pipe", self.writable, lambda: self.told.append(True))

    def fill(self) -> None:
        """Have nothing fit into it any more."""
        os.set_blocking(self.writable, False)
        with suppress(BlockingIOError):
            while True:
                os.write(self.writable, b"-" * 1023 + b"\n")
        os.set_blocking(self.writable, True)

    def read_until(self, end: bytes) -> bytes:
        said = b""
        while not said.endswith(end):
            said += os.read(self.readable, PIPE_BYTES)
        return said


@pytest.fixture
def pipe() -> Iterator[Pipe]:
    made = Pipe()
    yield made
    for descriptor in (made.readable, made.writable):
        with suppress(OSError):
            os.close(descriptor)


@pytest.mark.parametrize("blocks", [True, False])
def test_a_line_waits_until_it_is_read_and_no_other_comes_in_between(pipe: Pipe, blocks: bool) -> None:
    pipe.fill()
    os.set_blocking(pipe.writable, blocks)
    lines = [letter * 3 * PIPE_BYTES + b"\n" for letter in (b"a", b"b")]
    writers = [threading.Thread(target=pipe.stream.write, args=[line]) for line in lines]
    for writer in writers:
        writer.start()
    assert all(writer.is_alive() for writer in writers)
    said = pipe.read_until(b"\n")
    while len(said) < sum(map(len, lines)) or not said.endswith(b"\n"):
        said += pipe.read_until(b"\n")
    for writer in writers:
        writer.join()
    assert sorted(said.replace(b"-" * 1023 + b"\n", b"").splitlines(keepends=True)) == lines


def test_the_end_of_the_reader_is_told_once_and_everything_goes_nowhere(pipe: Pipe) -> None:
    pipe.fill()
    writer = threading.Thread(target=pipe.stream.write, args=[b"nobody hears\n"])
    writer.start()
    wait_until(lambda: not select.select([], [pipe.writable], [], 0)[1], "the pipe is full")
    os.close(pipe.readable)
    writer.join()
    pipe.stream.write(b"x" * 5 * PIPE_BYTES)
    assert pipe.told == [True]
