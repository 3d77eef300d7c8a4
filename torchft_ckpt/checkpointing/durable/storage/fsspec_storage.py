"""Files of durable checkpoints wherever fsspec reaches: object stores, remote file systems, memory.

Where the file system can rename (`mv` of its own), a file is written beside its name and renamed. An object store cannot, but
shows an object only when its upload is closed: there it is written under its own name. fsspec has no fsync: what a closed file
is worth is what the store promises (object stores: that it is durable). `file://` is a directory of this machine: `open_storage`
makes a `LocalStorage` of it.

Listings are never taken from fsspec's cache.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import posixpath
from typing import Any

from torchft_ckpt.checkpointing.durable.names import may_be_removed
from torchft_ckpt.checkpointing.durable.storage.contract import (
    OutputFile,
    Storage,
    as_byte_view,
    failed,
    path_below,
    removal_order,
    storage_errors,
    temporary_path,
    without_credentials,
)
from torchft_ckpt.checkpointing.durable.storage.local_storage import LocalStorage
from torchft_ckpt.errors import ConfigError, StorageError

logger = logging.getLogger(__name__)

_READ_BYTES = 64 * 1024 * 1024
_WRITE_BYTES = 64 * 1024 * 1024
_GONE = (FileNotFoundError, NotADirectoryError)


_errors = functools.partial(storage_errors, kind=Exception)
"""Those of client libraries (botocore's, aiohttp's and others) are no OSErrors."""


class FsspecStorage(Storage):
    """A directory of an fsspec file system.

    Raises:
        ConfigError: fsspec does not know the scheme, what it needs is not installed, or it refuses the options.
    """

    def __init__(self, location: str, **storage_options: Any) -> None:
        import fsspec  # type: ignore[import-untyped]  # late: most jobs save to a directory

        self.location = without_credentials(location).rstrip("/")
        try:
            self._fs, root = fsspec.core.url_to_fs(location, **storage_options)
        except (ImportError, ValueError, TypeError) as error:
            raise ConfigError(f"location={self.location!r} cannot be used: {error}", "location") from error
        except OSError as error:  # some connect at once
            raise failed(self.location, "", "opening", error) from error
        self._root: str = self._fs._strip_protocol(root).rstrip("/")
        if any(sign in self._root for sign in "*?["):
            raise ConfigError(f"location={self.location!r}: fsspec would take *, ? or [ for a pattern", "location")

    def names(self, directory: str = "") -> list[str]:
        with _errors(self.location, directory, "listing"):
            return sorted(self._kinds(directory))

    def size(self, path: str) -> int | None:
        full = self._full(path)
        with _errors(self.location, path, "looking for its length"):
            self._fs.invalidate_cache(self._fs._parent(full))
            try:
                info = self._fs.info(full)
            except _GONE:
                return None
        return int(info["size"]) if info["type"] == "file" else None

    def read_into(self, path: str, start: int, memory: memoryview) -> None:
        view = as_byte_view(memory)
        with _errors(self.location, path, "reading"):
            for at in range(0, len(view), _READ_BYTES):
                part = view[at : at + _READ_BYTES]
                data = self._fs.cat_file(self._full(path), start=start + at, end=start + at + len(part))
                if len(data) != len(part):
                    raise self._short(path, start, start + at + len(data))
                part[:] = data

    def make_directory(self, path: str) -> None:
        full = self._full(path)
        if _is_memory(self._fs):
            return  # it needs none, and making them is not safe there where several threads do so
        with _errors(self.location, path, "making the directory"):
            self._fs.makedirs(full, exist_ok=True)

    def create(self, path: str) -> OutputFile:
        with _errors(self.location, path, "creating"):
            return _FsspecOutputFile(self.location, path, self._full(path), self._fs)

    def remove_checkpoint(self, directory: str) -> bool:
        """See `Storage.remove_checkpoint`. A link that is put there meanwhile may be followed."""
        if not directory:
            raise StorageError(f"{self.location}: only what is in it can be removed", self.location)
        full = self._full(directory)
        with _errors(self.location, directory, "removing"):
            above, _, name = directory.rpartition("/")
            kind = self._kinds(above).get(name)
            if kind is None:
                return True
            if kind != "directory":
                self._note_kept(directory, None)
                return False
            kinds = self._kinds(directory)
            ours = [name for name, kind in kinds.items() if kind == "file" and may_be_removed(name)]
            for name in sorted(ours, key=lambda name: (removal_order(name), name)):
                with contextlib.suppress(FileNotFoundError):  # another one removes it too
                    self._fs.rm_file(f"{full}/{name}")
            kept = self.names(directory)
            if kept:
                self._note_kept(directory, kept)
                return False
            with contextlib.suppress(FileNotFoundError):  # some have no directories
                self._fs.rmdir(full)
            self._fs.invalidate_cache(self._fs._parent(full))
            return True

    def _kinds(self, directory: str) -> dict[str, str]:
        """Return the entries of a directory, and of each whether it is a `file`, a `directory` or, somewhere, a `link`."""
        full = self._full(directory)
        self._fs.invalidate_cache(full)
        try:
            entries = self._fs.ls(full, detail=True)
        except _GONE:
            return {}
        names = {str(entry["name"]).strip("/"): str(entry["type"]) for entry in entries}
        # Of a file, and of an object that marks a directory, the listing is the path itself.
        return {posixpath.basename(name): kind for name, kind in names.items() if name != full.strip("/")}

    def _full(self, path: str) -> str:
        return f"{self._root}/{path_below(self.location, path)}" if path else self._root


class _FsspecOutputFile(OutputFile):
    def __init__(self, location: str, path: str, full: str, fs: Any) -> None:
        super().__init__(location, path)
        self._final = full
        self._fs = fs
        # Uploads appear when they are closed. `memory://` shows a file from its first byte on, and copies it at once.
        self._is_upload = not _renames(fs) and not _is_memory(fs)
        self._written = full if self._is_upload else temporary_path(full)
        self._file: Any = fs.open(self._written, "wb")

    def write(self, data: bytes | bytearray | memoryview) -> int:
        self._check_writable()
        view = as_byte_view(data)
        self._is_sound = False
        with _errors(self._location, self._path, "writing"):
            for at in range(0, len(view), _WRITE_BYTES):
                part = view[at : at + _WRITE_BYTES]
                self._file.write(part)
                self.position += len(part)
        self._is_sound = True
        return len(view)

    def commit(self, *, sync_directory: bool = True) -> None:
        self._check_writable()
        try:
            with _errors(self._location, self._path, "committing"):
                self._file.close()
                if not self._is_upload:
                    self._fs.mv(self._written, self._final)
        except StorageError:
            self.abandon()
            raise
        self._is_over = True
        with _errors(self._location, self._path, "committing"):
            self._fs.invalidate_cache(self._fs._parent(self._final))
            length = self._fs.info(self._final)["size"]
            if length != self.position:  # not every client says so when an upload is cut, or a rename refused
                where = f"{self._location}/{self._path}"
                raise StorageError(f"{where}: {self.position} bytes were written, it has {length}", where)

    def abandon(self) -> None:
        if self._is_over:
            return
        self._is_over = True
        try:
            if self._is_upload:
                # Not closed: that would make it visible, as it would when it is collected as garbage.
                self._file.closed = True
                self._file.discard()
            else:
                try:
                    self._file.close()  # which writes what is in its buffer: on a full disk that fails
                finally:
                    self._fs.rm_file(self._written)
        except FileNotFoundError:
            return  # its directory was removed
        except Exception:
            logger.warning(
                "%s/%s: it was abandoned, and something may be left", self._location, self._path, exc_info=True
            )


def _renames(fs: Any) -> bool:
    """Whether it has a `mv` of its own, and not the one that copies."""
    from fsspec import AbstractFileSystem

    return type(fs).mv is not AbstractFileSystem.mv


def _is_memory(fs: Any) -> bool:
    from fsspec.implementations.memory import MemoryFileSystem  # type: ignore[import-untyped]

    return isinstance(fs, MemoryFileSystem)


def open_storage(location: str | os.PathLike[str], **storage_options: object) -> Storage:
    """Return a directory of this machine, or for `scheme://...` what fsspec knows under that scheme.

    Args:
        location: a path, of which a leading `~` is the user's home, or a URL of fsspec; that of a file is a path as well. Need
            not be there yet.
        storage_options: of fsspec's file system (credentials, endpoint).

    Raises:
        ConfigError: fsspec does not know the scheme, what it needs is not installed, or it refuses the options.
        StorageError: fsspec connects at once to such a place, and could not.
    """
    text = os.fspath(location)
    if text.startswith(("file://", "local://")) and "::" not in text:
        from fsspec.implementations.local import LocalFileSystem  # type: ignore[import-untyped]

        return LocalStorage(LocalFileSystem._strip_protocol(text))
    if "://" in text or "::" in text:
        return FsspecStorage(text, **storage_options)
    if storage_options:
        raise ConfigError(
            f"location={text!r} is a local path: it takes no options ({', '.join(sorted(storage_options))})", "location"
        )
    if not text:
        raise ConfigError("location='': a path or a URL was expected", "location")
    return LocalStorage(os.path.expanduser(text))
