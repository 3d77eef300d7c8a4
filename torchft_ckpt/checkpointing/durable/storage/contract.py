"""The contract between durable checkpoints and a place that holds files: a directory here, or an object store.

A file is written under another name and appears under its own one whole, or never. Nothing is decided by what a place says
about clocks, owners or order. Paths are relative to the place, with `/` between names.
"""

from __future__ import annotations

import errno
import logging
import re
import secrets
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from types import TracebackType

from torchft_ckpt.checkpointing.durable.names import METADATA, TEMPORARY, parse_part
from torchft_ckpt.checkpointing.state.local_state import some_of
from torchft_ckpt.errors import StorageError

logger = logging.getLogger(__name__)


class OutputFile(ABC):
    """A file that is being written. Used by one thread at a time.

    A context manager: what was not committed when it is left is abandoned. After a write that failed nothing can be committed.

    Attributes:
        position: how many bytes were written.
    """

    def __init__(self, location: str, path: str) -> None:
        self.position: int = 0
        self._location = location
        self._path = path
        self._is_sound = True
        """No write has failed."""
        self._is_over = False
        """It was committed or abandoned."""

    @abstractmethod
    def write(self, data: bytes | bytearray | memoryview) -> int:
        """Write all of the data behind what was written before, and return how many bytes that were.

        Args:
            data: contiguous, of any item size.

        Raises:
            StorageError: not all of it was written, or the file was committed or abandoned before.
        """

    @abstractmethod
    def commit(self, *, sync_directory: bool = True) -> None:
        """Make the file appear under its name, in place of what was there, so that it outlives a crash of the machine.

        Args:
            sync_directory: False: until another file of the directory is committed, a crash may take the name back.

        Raises:
            StorageError: something failed. What is under the name then is what was there before, or all of the new file.
        """

    @abstractmethod
    def abandon(self) -> None:
        """Remove what was written, as far as that can be done; does nothing after `commit` or `abandon`.

        Raises no `StorageError`: what is left behind is logged.
        """

    def _check_writable(self) -> None:
        where = f"{self._location}/{self._path}"
        if self._is_over:
            raise StorageError(f"{where}: it was committed or abandoned before", where)
        if not self._is_sound:
            raise StorageError(f"{where}: a write failed, it can only be abandoned", where)

    def __enter__(self) -> OutputFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.abandon()


class Storage(ABC):
    """A place that holds files. May be used by several threads at once, and by other processes beside this one.

    All that fails raises `StorageError`, whose message has `location` and the path, and whose `errno` is that of its cause.

    Attributes:
        location: where it is, for messages.
    """

    location: str
    _logged: frozenset[str] | set[str] = frozenset()
    """Checkpoints of which somebody was told that something stays."""

    @abstractmethod
    def names(self, directory: str = "") -> list[str]:
        """Return the names of the entries of a directory, sorted; none if there is no such directory."""

    @abstractmethod
    def size(self, path: str) -> int | None:
        """Return the length of a file in bytes; None if there is no such file."""

    def read(self, path: str, start: int = 0, stop: int | None = None) -> bytes:
        """Return exactly the bytes from `start` up to `stop`, or to the end.

        Raises:
            StorageError: also if the file ends before `stop`.
        """
        end = self.size(path) if stop is None else stop
        if end is None:
            raise failed(self.location, path, "reading", FileNotFoundError(errno.ENOENT, "there is no such file"))
        if not 0 <= start <= end:
            raise self._short(path, start, end)
        data = bytearray(end - start)
        self.read_into(path, start, memoryview(data))
        return bytes(data)

    @abstractmethod
    def read_into(self, path: str, start: int, memory: memoryview) -> None:
        """Fill memory with the bytes from `start` on.

        Args:
            start: of its first byte that is wanted.
            memory: contiguous and writable; undefined after an error.

        Raises:
            StorageError: also if the file ends before the memory is full.
        """

    @abstractmethod
    def make_directory(self, path: str) -> None:
        """Make a directory, and those above it, so that it outlives a crash of the machine. It may be there already."""

    @abstractmethod
    def create(self, path: str) -> OutputFile:
        """Begin a file in a directory that is there. What is under its name now stays until it is committed."""

    @abstractmethod
    def remove_checkpoint(self, directory: str) -> bool:
        """Remove what this library wrote of a checkpoint, and its directory if nothing else is in it; it need not be there.

        Files that have another name than this library writes, links and directories stay, and so does a checkpoint's directory
        that is itself a link, with all that it leads to. `.metadata` goes first, then manifests, then the rest: wherever this
        stops, what is left is no whole checkpoint, and it may be called again.

        Returns:
            Whether nothing of it is left. What stays is logged as a warning, once for each storage and checkpoint.
        """

    def _note_kept(self, directory: str, names: Collection[str] | None) -> None:
        """Log what stays of a checkpoint: entries of its directory; None if the directory is no directory of its own."""
        if directory in self._logged:
            return
        self._logged = {*self._logged, directory}
        if names is None:
            logger.warning(
                "%s/%s is a link or no directory: it is left alone, with all that it leads to", self.location, directory
            )
        else:
            logger.warning(
                "%s/%s stays, without what was saved there: this library did not write %s, which is left alone",
                self.location,
                directory,
                some_of((repr(name[:120]) for name in sorted(names)), ", "),
            )

    def _short(self, path: str, start: int, end: int) -> StorageError:
        where = f"{self.location}/{path}"
        return StorageError(f"{where}: bytes from {start} on were wanted, and it ends at {end}", where)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.location!r})"


# What both places need


def path_below(location: str, path: str) -> str:
    """Return a relative path as it was given; "" is the place itself.

    Raises:
        StorageError: it would lead out of the place, or no file can have it.
    """
    if path and not is_path_within(path):
        raise StorageError(f"{location}: {path[:300]!r} is no path within it", location)
    return path


def is_path_within(path: str) -> bool:
    """Whether a relative path leads to below where it begins, on every system, and files can have it."""
    try:
        path.encode(errors="surrogateescape")
    except UnicodeEncodeError:
        return False
    return "\0" not in path and all(name not in ("", ".", "..") and "\\" not in name for name in path.split("/"))


def temporary_path(path: str) -> str:
    """Return the name under which a file is written before it has its own."""
    return f"{path}{TEMPORARY}{secrets.randbelow(10**12):012d}"


def removal_order(name: str) -> int:
    """Sort key of the files of a checkpoint: what makes it one goes first."""
    return 0 if name == METADATA else 1 if parse_part(name) is not None else 2


def as_byte_view(data: bytes | bytearray | memoryview) -> memoryview:
    """Return contiguous data as a flat view of bytes."""
    view = memoryview(data)
    return view.cast("B") if view.nbytes else memoryview(b"")


def without_credentials(location: str) -> str:
    """Return a URL without the name and password that it may have, for messages."""
    return re.sub(r"://[^/@]*@", "://***@", location)


@contextmanager
def storage_errors(location: str, path: str, doing: str, *, kind: type[Exception] = OSError) -> Iterator[None]:
    """Turn each error of a kind in the block into a `StorageError` that says where, and doing what."""
    try:
        yield
    except StorageError:
        raise
    except kind as error:
        raise failed(location, path, doing, error) from error


def failed(location: str, path: str, doing: str, cause: Exception) -> StorageError:
    """Return the error to raise from `cause`."""
    where = f"{location}/{path}" if path else location
    error = StorageError(f"{where}: {doing} failed: {type(cause).__name__}: {cause}", where)
    if isinstance(cause, OSError):
        error.errno = cause.errno
    return error
