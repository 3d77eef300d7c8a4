"""A bar for people who wait until something is read: it looks at a counter now and then, and decides nothing."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator
from typing import Protocol

from torchft_ckpt.checkpointing.progress import make_bar
from torchft_ckpt.core.text import one_line
from torchft_ckpt.threads import Thread

_INTERVAL_S = 0.1


class Counts(Protocol):
    """Something that reads."""

    bytes_read: int
    """So far."""


@contextlib.contextmanager
def reading_bar(title: str, total_bytes: int, reader: Counts) -> Iterator[None]:
    """Draw a bar on standard error while the block runs. Where that is no terminal, a line every few seconds at most.

    Args:
        title: what is read.
        total_bytes: about how much that is.
        reader: what reads it.
    """
    bar = make_bar(one_line(title), total_bytes, sys.stderr, stays=not sys.stderr.isatty())
    first = reader.bytes_read
    is_over = threading.Event()

    def draw() -> None:
        while not is_over.wait(_INTERVAL_S):
            bar.update(min(reader.bytes_read - first, total_bytes) - bar.n)

    thread = Thread(draw, "torchft_ckpt-bar")
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()
        bar.update(min(reader.bytes_read - first, total_bytes) - bar.n)
        bar.close()
