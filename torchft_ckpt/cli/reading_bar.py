"""A bar for people who wait until something is read: it looks at a counter now and then, and decides nothing."""

from __future__ import annotations

import contextlib
import shutil
import sys
import threading
from collections.abc import Iterator
from typing import Protocol

_INTERVAL_S = 0.1
_FILE_INTERVAL_S = 5.0


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
    from tqdm import tqdm  # type: ignore[import-untyped]

    class Bar(tqdm):
        monitor_interval = 0  # else tqdm starts a thread that outlives the bar

    size = shutil.get_terminal_size() if sys.stderr.isatty() else None
    bar = Bar(
        desc=title,
        total=total_bytes,
        unit="iB",
        unit_scale=True,
        unit_divisor=1024,
        miniters=1,
        mininterval=_INTERVAL_S if size else _FILE_INTERVAL_S,
        ncols=size.columns if size else None,  # told, because tqdm draws nothing where a terminal says 0
        nrows=size.lines if size else None,
        leave=size is None,
        file=sys.stderr,
    )
    first = reader.bytes_read
    is_over = threading.Event()

    def draw() -> None:
        while not is_over.wait(_INTERVAL_S):
            bar.update(min(reader.bytes_read - first, total_bytes) - bar.n)

    thread = threading.Thread(target=draw, name="torchft_ckpt-bar", daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()
        bar.update(min(reader.bytes_read - first, total_bytes) - bar.n)
        bar.close()
