"""Lines that another process appends to a file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Generic, TypeVar

T = TypeVar("T")


class LineReader(Generic[T]):
    """Reads a file that grows, line by line.

    Args:
        path: of the file, which exists.
        decode: makes a record of a line; what it raises comes through.
    """

    def __init__(self, path: Path, decode: Callable[[bytes], T]) -> None:
        self._path = path
        self._decode = decode
        self._at = 0

    def read_on(self) -> list[T]:
        """Return the records of the lines that were completed since the last call."""
        with self._path.open("rb") as file:
            file.seek(self._at)
            whole, newline, _ = file.read().rpartition(b"\n")
        self._at += len(whole) + len(newline)
        return [self._decode(line) for line in whole.splitlines()]
