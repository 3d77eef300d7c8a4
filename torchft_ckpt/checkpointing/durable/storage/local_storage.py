"""Files of durable checkpoints in a directory of this machine, or of a network file system that is mounted here.

A file is written beside its name, fsynced, renamed, and its directory fsynced. An fsync that failed is never tried again: what
was to be written may be gone from memory by then, and a second one would say that all is well. Nothing is written through a link
that is below the directory: somebody may have put it there. The raw operations are those of an `OsSystem`, so that tests can put
one in its place that fails where they say.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import stat
from collections.abc import Iterator
from typing import cast

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
)
from torchft_ckpt.errors import StorageError

logger = logging.getLogger(__name__)

_WRITEBACK_BYTES = 8 * 1024 * 1024
_MAX_TRANSFER_BYTES = 1 << 30  # some systems refuse more in one call
_NO_FSYNC_OF_DIRECTORIES = {errno.EINVAL, errno.ENOTSUP}
_GONE = (FileNotFoundError, NotADirectoryError)
_NO_DIRECTORY = {errno.ENOTDIR, errno.ELOOP, errno.EMLINK}
"""The errors of systems that were to open a directory and found a link, or a file."""
_REMOVE_ATTEMPTS = 3


class OsSystem:
    """The operations of the operating system that `LocalStorage` is made of. Each raises OSError as those of `os` do."""

    def open_new(self, path: str) -> int:
        """Make an empty file, open it to write and return its handle; FileExistsError where there is one."""
        with self._parent_of(path) as (directory, name):
            return os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666, dir_fd=directory)

    @contextlib.contextmanager
    def _parent_of(self, path: str) -> Iterator[tuple[int, str]]:
        above = os.path.dirname(path.rstrip("/"))
        directory = OsSystem.open_directory(self, above)
        try:
            yield directory, path[len(above) :].lstrip("/")
        finally:
            os.close(directory)

    def open_existing(self, path: str) -> int:
        """Open a file to read and return its handle."""
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def write(self, handle: int, data: memoryview) -> int:
        """Write behind what was written; may write less than all of it."""
        return os.write(handle, data)

    def begin_writeback(self, handle: int, start: int, length: int) -> None:
        """Have the disk begin with what was written there, so that `fsync` has less to wait for. Promises nothing."""
        # Linux starts to write dirty pages when it is told that they are not needed, and returns at once.
        if hasattr(os, "posix_fadvise"):
            with contextlib.suppress(OSError):
                os.posix_fadvise(handle, start, length, os.POSIX_FADV_DONTNEED)

    def read_into(self, handle: int, memory: memoryview, start: int) -> int:
        """Read from `start` on; may read less than there is, and 0 bytes at the end only."""
        return os.preadv(handle, [memory], start)

    def fsync(self, handle: int) -> None:
        """Make the content of a file outlive a crash of the machine."""
        os.fsync(handle)

    def close(self, handle: int) -> None:
        """Close a file. The handle is gone, also if this raises."""
        os.close(handle)

    def rename(self, old: str, new: str) -> None:
        """Give a file another name in its directory, in place of what has that name."""
        with self._parent_of(old) as (directory, name), self._parent_of(new) as (to, new_name):
            os.rename(name, new_name, src_dir_fd=directory, dst_dir_fd=to)

    def fsync_directory(self, path: str) -> None:
        """Make the entries of a directory outlive a crash of the machine."""
        handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(handle)
        except OSError as error:
            # Some network file systems have no fsync of directories: their server answers a rename when it is durable.
            if error.errno not in _NO_FSYNC_OF_DIRECTORIES:
                raise
        finally:
            os.close(handle)

    def mkdir(self, path: str) -> None:
        """Make a directory; FileExistsError where there is something."""
        os.mkdir(path)

    def open_directory(self, path: str) -> int:
        """Open a directory and return its handle; NotADirectoryError of anything else, a link to a directory included."""
        return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)

    def listdir(self, directory: str | int) -> list[str]:
        """Return the names in a directory, in any order. It is given by its path or its handle."""
        return os.listdir(directory)

    def is_file(self, path: str, directory: int | None = None) -> bool:
        """Whether this is a file (a link to one is none); FileNotFoundError where there is nothing.

        `directory`, the handle of an open one, is what a relative path begins at; so for `unlink`.
        """
        return stat.S_ISREG(os.stat(path, dir_fd=directory, follow_symlinks=False).st_mode)

    def file_size(self, path: str) -> int | None:
        """Return the length of a file, None of anything else; FileNotFoundError where there is nothing."""
        found = os.stat(path)
        return found.st_size if stat.S_ISREG(found.st_mode) else None

    def unlink(self, path: str, directory: int | None = None) -> None:
        """Remove a file, or a link and not what it leads to."""
        os.unlink(path, dir_fd=directory)

    def rmdir(self, path: str) -> None:
        os.rmdir(path)


class LocalStorage(Storage):
    """A directory."""

    def __init__(self, location: str | os.PathLike[str], system: OsSystem | None = None) -> None:
        self.location = os.path.abspath(os.fspath(location))
        self._system = OsSystem() if system is None else system

    def names(self, directory: str = "") -> list[str]:
        with storage_errors(self.location, directory, "listing"):
            try:
                return sorted(self._system.listdir(self._full(directory)))
            except _GONE:
                return []

    def size(self, path: str) -> int | None:
        with storage_errors(self.location, path, "looking for its length"):
            try:
                return self._system.file_size(self._full(path))
            except _GONE:
                return None

    def read_into(self, path: str, start: int, memory: memoryview) -> None:
        with storage_errors(self.location, path, "reading"):
            view, done, handle = as_byte_view(memory), 0, self._system.open_existing(self._full(path))
            try:
                while done < len(view):
                    part = view[done : done + _MAX_TRANSFER_BYTES]
                    count = self._system.read_into(handle, part, start + done)
                    if not count:
                        raise self._short(path, start, start + done)
                    done += count
            finally:
                self._system.close(handle)

    def make_directory(self, path: str) -> None:
        with storage_errors(self.location, path, "making the directory"):
            at = self._full("")
            self._make_location(at)
            for name in path_below(self.location, path).split("/") if path else ():
                above, at = at, os.path.join(at, name)
                self._mkdir(at)
                # Also if it was there: who made it may have died before this.
                self._system.fsync_directory(above)

    def create(self, path: str) -> OutputFile:
        with storage_errors(self.location, path, "creating"):
            return _LocalOutputFile(self.location, path, self._full(path), self._system)

    def remove_checkpoint(self, directory: str) -> bool:
        if not directory:
            raise StorageError(f"{self.location}: only what is in it can be removed", self.location)
        with storage_errors(self.location, directory, "removing"):
            path = self._full(directory)
            try:
                handle = self._system.open_directory(path)
            except FileNotFoundError:
                return True
            except OSError as error:
                if error.errno not in _NO_DIRECTORY:
                    raise
                self._note_kept(directory, None)
                return False
            # Whatever comes to the place of the directory meanwhile, a link for one, nothing is removed but what is in this one.
            try:
                kept = self._remove_files(path, handle)
            finally:
                self._system.close(handle)
            if kept:
                self._note_kept(directory, kept)
            return not kept

    def _full(self, path: str) -> str:
        at = os.path.realpath(self.location)  # the user may have made a link of it
        return os.path.join(at, path_below(self.location, path)) if path else at

    def _make_location(self, path: str) -> None:
        above = os.path.dirname(path)
        try:
            made = self._mkdir(path)
        except FileNotFoundError:
            self._make_location(above)
            made = self._mkdir(path)
        try:
            self._system.fsync_directory(above)
        except PermissionError:
            if made:
                raise
            # A directory that was given to us, in one that we may not even list: whoever made it saw to it.

    def _mkdir(self, path: str) -> bool:
        try:
            self._system.mkdir(path)
        except FileExistsError:
            self._system.close(self._system.open_directory(path))  # NotADirectoryError
            return False
        return True

    def _remove_files(self, path: str, handle: int) -> set[str]:
        """Remove files of ours from an open directory, then the directory; return what keeps it."""
        for attempt in range(_REMOVE_ATTEMPTS):
            kept: set[str] = set()
            by_order: dict[int, list[str]] = {}
            for name in sorted(self._system.listdir(handle)):
                if may_be_removed(name):
                    by_order.setdefault(removal_order(name), []).append(name)
                else:
                    kept.add(name)
            for _, names in sorted(by_order.items()):
                kept.update(name for name in names if not self._remove_file(name, handle))
                self._system.fsync_directory(path)
            if kept:
                return kept
            try:
                self._system.rmdir(path)
            except FileNotFoundError:
                return set()
            except OSError as error:
                # Somebody wrote to it meanwhile: the temporary file of a `.metadata`, for one.
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST) or attempt == _REMOVE_ATTEMPTS - 1:
                    raise
            else:
                self._system.fsync_directory(os.path.dirname(path))
                return set()
        return set()

    def _remove_file(self, name: str, handle: int) -> bool:
        """Remove a file from an open directory; return False if it is none, and stays."""
        with contextlib.suppress(FileNotFoundError):  # another one removes it too
            if not self._system.is_file(name, handle):
                return False
            self._system.unlink(name, handle)
        return True


class _LocalOutputFile(OutputFile):
    def __init__(self, location: str, path: str, full: str, system: OsSystem) -> None:
        super().__init__(location, path)
        self._final = full
        self._temporary = temporary_path(full)
        self._system = system
        self._handle: int | None = system.open_new(self._temporary)
        self._begun = 0
        """So many bytes the disk was told to begin with."""

    def write(self, data: bytes | bytearray | memoryview) -> int:
        handle = self._writable()
        view = as_byte_view(data)
        done = 0
        self._is_sound = False
        with storage_errors(self._location, self._path, "writing"):
            while done < len(view):
                count = self._system.write(handle, view[done : done + _MAX_TRANSFER_BYTES])
                if count <= 0:
                    raise OSError(errno.EIO, "nothing was written")
                done += count
                self.position += count
        self._is_sound = True
        if self.position - self._begun >= _WRITEBACK_BYTES:
            self._system.begin_writeback(handle, self._begun, self.position - self._begun)
            self._begun = self.position
        return done

    def commit(self, *, sync_directory: bool = True) -> None:
        handle = self._writable()
        with storage_errors(self._location, self._path, "committing"):
            try:
                self._system.fsync(handle)
                self._handle = None
                self._system.close(handle)
                self._system.rename(self._temporary, self._final)
            except OSError:
                self.abandon()
                raise
            self._is_over = True
            if sync_directory:
                self._system.fsync_directory(os.path.dirname(self._final))

    def abandon(self) -> None:
        if self._is_over:
            return
        self._is_over = True
        handle, self._handle = self._handle, None
        try:
            if handle is not None:
                self._system.close(handle)
        except OSError as error:
            logger.warning("%s", failed(self._location, self._path, "closing what is abandoned", error))
        try:
            self._system.unlink(self._temporary)
        except FileNotFoundError:
            return  # its directory was removed, or a rename that failed was done
        except OSError as error:
            logger.warning("%s", failed(self._location, self._path, f"removing {self._temporary}", error))

    def _writable(self) -> int:
        self._check_writable()
        return cast("int", self._handle)  # closed by what ends the file alone
