"""Names and formats of the commands' output: leaves by their paths, lengths, counts, and a bar while something is read."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Collection, Iterator, Sequence
from typing import Protocol

import torch

from torchft_ckpt.checkpointing.progress import make_bar
from torchft_ckpt.checkpointing.state.tree import MAX_DEPTH, join_path
from torchft_ckpt.core.text import one_line
from torchft_ckpt.errors import UnsupportedValueError
from torchft_ckpt.threads import Thread

_BAR_INTERVAL_S = 0.1


def leaves(value: object, path: str = "", depth: int = 0) -> Iterator[tuple[str, object]]:
    """Yield (path, leaf) in the order of the tree, by the paths of the state format: keys and positions, joined by dots.

    Empty containers are leaves, so that none is lost. The caller has to bound the number of leaves: lists that share each other
    have more of them than they have bytes.

    Raises:
        UnsupportedValueError: it is nested too deep, as a container that holds itself is.
    """
    if depth > MAX_DEPTH:
        raise UnsupportedValueError(
            f"{path[:120]}: nested deeper than {MAX_DEPTH} levels (a container that holds itself?)", path[:120]
        )
    if isinstance(value, dict) and value:
        for key, item in value.items():
            yield from leaves(item, join_path(path, key), depth + 1)
    elif isinstance(value, (list, tuple)) and value and not isinstance(value, torch.Size):
        for position, item in enumerate(value):
            yield from leaves(item, join_path(path, position), depth + 1)
    else:
        yield path or "state", value


def format_bytes(num_bytes: int) -> str:
    """Write a length for people: `1.50 GiB`."""
    if num_bytes < 1024:
        return f"{num_bytes} B"
    size, units = num_bytes / 1024, ["KiB", "MiB", "GiB", "TiB"]
    while size >= 1023.995 and len(units) > 1:
        size /= 1024
        units.pop(0)
    return f"{size:.2f} {units[0]}"


def format_count(count: int, what: str) -> str:
    """Write a number of things: `1 tensor`, `2 tensors`."""
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


def aligned(rows: Sequence[Sequence[str]], right: Collection[int] = ()) -> list[str]:
    """Return a line for each row, the columns below each other; `right`: the places of those that end there."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            text.rjust(width) if place in right else text.ljust(width)
            for place, (text, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


class Reader(Protocol):
    """Something that reads."""

    bytes_read: int
    """So far."""


@contextlib.contextmanager
def reading_bar(title: str, total_bytes: int, reader: Reader) -> Iterator[None]:
    """Draw a bar on standard error while the block runs, or print a line every few seconds at most if that is no terminal."""
    bar = make_bar(one_line(title), total_bytes, sys.stderr, stays=not sys.stderr.isatty())
    first = reader.bytes_read
    is_over = threading.Event()

    def update() -> None:
        bar.update(min(reader.bytes_read - first, total_bytes) - bar.n)

    def draw() -> None:
        while not is_over.wait(_BAR_INTERVAL_S):
            update()

    thread = Thread(draw, "torchft_ckpt-bar")
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()
        update()
        bar.close()
