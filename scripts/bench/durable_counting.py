"""Counts bytes that leave files, for both libraries at the same place: what each read of the operating system returned."""

from __future__ import annotations

import io
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.filesystem import FileSystem

from torchft_ckpt.checkpointing.durable.storage.local_storage import OsSystem


class Count:
    """Bytes so far; any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.num_bytes = 0

    def add(self, num_bytes: int | None) -> None:
        """Note a read."""
        with self._lock:
            self.num_bytes += num_bytes or 0


@contextmanager
def counting_ours() -> Iterator[Count]:
    """Count what is read through the one operation by which `LocalStorage` reads: data, digests and manifests."""
    count = Count()
    plain = OsSystem.read_into

    def read_into(self: OsSystem, handle: int, memory: memoryview, start: int) -> int:
        num_bytes = plain(self, handle, memory, start)
        count.add(num_bytes)
        return num_bytes

    OsSystem.read_into = read_into  # type: ignore[method-assign]
    try:
        yield count
    finally:
        OsSystem.read_into = plain  # type: ignore[method-assign]


class CountingReader(FileSystemReader):
    """DCP's reader, on files that count what is read of them: data and metadata."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self.count = Count()
        self.fs = _CountingFileSystem(self.count)


class _CountingFileSystem(FileSystem):
    def __init__(self, count: Count) -> None:
        super().__init__()
        self._count = count

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[Any]:
        with io.BufferedReader(_CountingFile(path, self._count)) as stream:
            yield stream


class _CountingFile(io.FileIO):
    def __init__(self, path: str | os.PathLike[str], count: Count) -> None:
        super().__init__(path, "rb")
        self._count = count

    def readinto(self, memory: Any) -> int:
        num_bytes = super().readinto(memory)
        self._count.add(num_bytes)
        return num_bytes or 0

    def read(self, size: int | None = -1) -> bytes:
        data = super().read(-1 if size is None else size) or b""
        self._count.add(len(data))
        return data

    def readall(self) -> bytes:
        data = super().readall() or b""
        self._count.add(len(data))
        return data


def drop_cached(directory: Path) -> None:
    """Have the system forget what it keeps in memory of the files of a directory, where it can; they were fsynced."""
    for path in directory.rglob("*"):
        if path.is_file() and hasattr(os, "posix_fadvise"):
            handle = os.open(path, os.O_RDONLY)
            try:
                os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(handle)
