"""A file system in memory that fails where a test says, and knows what a crash of the machine would leave of it.

A `Disk` is what outlives processes: each file has its content as processes see it and as it is durable, each directory its
entries as they are seen and as they are durable. A `ScriptedSystem` is one process that uses a disk: its operations are numbered
from 0, and a fault can be put at each number. Several may use one disk, and each dies for itself.

What a crash leaves is decided by a seed, as badly as POSIX allows: of a file that was not fsynced any blocks may be old, new or
zeros, and it may have any length between; of the changes to a directory that was not fsynced any may be lost, whichever was
done first. An fsync that failed leaves what it was to write unwritten, also when it is tried again.
"""

from __future__ import annotations

import errno
import os
import random
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

import xxhash

from torchft_ckpt.checkpointing.durable.storage.local_storage import OsSystem

CRASH_BLOCK_BYTES = 512


class ProcessDied(BaseException):
    """The process was killed. No OSError and no Exception: nothing may handle it."""


class Fault(Enum):
    """What happens at an operation."""

    ENOSPC = "there is no room: nothing is done"
    EIO = "an error: nothing is done; of fsync, what it was to write is lost"
    EIO_DONE = "it is done, and reported as failed"
    SHORT = "of a write or a read, a part is done and reported; of other operations, nothing special"
    DEATH_BEFORE = "the process dies, and nothing is done"
    DEATH_WITHIN = "the process dies; of a write, a part is done"
    DEATH_AFTER = "the process dies when it is done"


DEATHS = (Fault.DEATH_BEFORE, Fault.DEATH_WITHIN, Fault.DEATH_AFTER)
ERRORS = (Fault.ENOSPC, Fault.EIO, Fault.EIO_DONE)


class Operation(NamedTuple):
    """One line of the log."""

    number: int
    name: str
    path: str
    detail: str

    def __str__(self) -> str:
        return f"{self.number:4d} {self.name} {self.path} {self.detail}".rstrip()


@dataclass(eq=False)
class File:
    """What a file contains, and would after a crash."""

    content: bytearray = field(default_factory=bytearray)
    durable: bytes = b""
    is_lost: bool = False
    """Whether a failed fsync took its unwritten blocks: no later one brings them back."""

    def after_crash(self, dice: random.Random) -> File:
        """Return what is left of it."""
        now, before = bytes(self.content), self.durable
        if now != before:
            length = dice.choice([len(now), len(before), dice.randint(*sorted((len(now), len(before))))])
            kept = dice.choice([0.0, 0.5, 1.0])
            blocks = []
            for at in range(0, length, CRASH_BLOCK_BYTES):
                source = now if dice.random() < kept else before
                end = min(at + CRASH_BLOCK_BYTES, length)
                blocks.append(source[at:end].ljust(end - at, b"\0"))
            now = b"".join(blocks)
        return File(bytearray(now), now)


@dataclass(eq=False)
class Directory:
    """Its entries, those that are durable, and what was done to it since: each the names it set, None where removed."""

    entries: dict[str, File | Directory] = field(default_factory=dict)
    durable: dict[str, File | Directory] = field(default_factory=dict)
    pending: list[dict[str, File | Directory | None]] = field(default_factory=list)

    def change(self, names: dict[str, File | Directory | None]) -> None:
        """Set or remove entries at once."""
        self.pending.append(names)
        _apply(self.entries, names)

    def fsync(self) -> None:
        """Make its entries durable."""
        self.durable = dict(self.entries)
        self.pending.clear()

    def after_crash(self, dice: random.Random, done: dict[int, File | Directory]) -> Directory:
        """Return what is left of it and of all below it; `done` holds what was visited, since a file may be met twice."""
        entries = dict(self.durable)
        kept = dice.choice([0.0, 0.5, 1.0])
        for names in self.pending:
            if dice.random() < kept:
                _apply(entries, names)
        left: dict[str, File | Directory] = {}
        for name, entry in entries.items():
            if id(entry) not in done:
                done[id(entry)] = entry.after_crash(dice) if isinstance(entry, File) else entry.after_crash(dice, done)
            left[name] = done[id(entry)]
        return Directory(left, dict(left))


def _apply(entries: dict[str, File | Directory], names: dict[str, File | Directory | None]) -> None:
    for name, entry in names.items():
        if entry is None:
            entries.pop(name, None)
        else:
            entries[name] = entry


class Disk:
    """What the processes of a machine, or of several that mount it, share.

    Args:
        capacity_bytes: of all content together; a write beyond is cut short, then refused.
    """

    def __init__(self, capacity_bytes: int | None = None, root: Directory | None = None) -> None:
        self.capacity_bytes = capacity_bytes
        self.root = Directory() if root is None else root
        self.lock = threading.RLock()

    def after_crash(self, seed: int) -> Disk:
        """Return what a machine finds that starts after this one lost its power. This disk stays as it is."""
        with self.lock:
            return Disk(self.capacity_bytes, self.root.after_crash(random.Random(seed), {}))

    def find(self, path: str) -> File | Directory:
        """Return what is there; FileNotFoundError or NotADirectoryError as of the operating system."""
        at: File | Directory = self.root
        for name in path.split("/"):
            if name:
                if not isinstance(at, Directory):
                    raise _error(errno.ENOTDIR, path)
                if name not in at.entries:
                    raise _error(errno.ENOENT, path)
                at = at.entries[name]
        if path.endswith("/") and not isinstance(at, Directory):
            raise _error(errno.ENOTDIR, path)
        return at

    def directory(self, path: str) -> Directory:
        """Return the directory that is there."""
        found = self.find(path)
        if not isinstance(found, Directory):
            raise _error(errno.ENOTDIR, path)
        return found

    def file(self, path: str) -> File:
        """Return the file that is there."""
        found = self.find(path)
        if not isinstance(found, File):
            raise _error(errno.EISDIR, path)
        return found

    def files(self) -> dict[str, bytes]:
        """Return what processes see now: the content of each file, by its path."""
        with self.lock:
            return dict(_walk(self.root, ""))

    def fingerprint(self) -> tuple[tuple[str, bytes], ...]:
        """Return what tells it from disks on which processes see anything else: all paths, with digests of what files contain."""
        with self.lock:
            return tuple(
                (path, xxhash.xxh3_128_digest(content)) for path, content in _walk(self.root, "", folders=True)
            )

    def put(self, path: str, content: bytes) -> None:
        """Have a durable file there, and its directories, as if from long ago; what had its name is gone. For damage, too."""
        with self.lock:
            *above, name = [part for part in path.split("/") if part]
            at = self.root
            for part in above:
                if part not in at.entries:
                    at.entries[part] = at.durable[part] = Directory()
                below = at.entries[part]
                assert isinstance(below, Directory), path
                at = below
            at.entries[name] = at.durable[name] = File(bytearray(content), content)

    def num_bytes(self) -> int:
        """Return how much room is taken."""
        return sum(len(content) for _, content in _walk(self.root, ""))


class ScriptedSystem(OsSystem):
    """A process that uses a disk.

    Args:
        faults: what happens at which operation. Operations that are beyond the last, or where nothing is said, work.
        disk: the disk; its own new one where None.
        seed: of how much is done of what is done in part.

    Attributes:
        disk: the disk.
        num_operations: how many were begun.
        log: all of them, in order.
        is_dead: whether it died: each further operation raises `ProcessDied`.
    """

    def __init__(self, faults: Mapping[int, Fault] | None = None, *, disk: Disk | None = None, seed: int = 0) -> None:
        self.faults = dict(faults or {})
        self.disk = Disk() if disk is None else disk
        self.log: list[Operation] = []
        self.is_dead = False
        self._dice = random.Random(seed)
        self._open: dict[int, tuple[str, File | Directory]] = {}
        self._next_handle = 3

    @property
    def num_operations(self) -> int:
        return len(self.log)

    @property
    def num_open(self) -> int:
        """How many handles were not closed."""
        return len(self._open)

    def files(self) -> dict[str, bytes]:
        """Return what processes see now: the content of each file, by its path."""
        return self.disk.files()

    def after_crash(self, seed: int, faults: Mapping[int, Fault] | None = None) -> ScriptedSystem:
        """Return a process on the machine that starts after this one lost its power; all that it finds is durable."""
        return ScriptedSystem(faults, disk=self.disk.after_crash(seed), seed=seed)

    def after_kill(self, faults: Mapping[int, Fault] | None = None) -> ScriptedSystem:
        """Return another process on this machine, which goes on: it sees all that this one did."""
        return ScriptedSystem(faults, disk=self.disk)

    # Operations

    def open_new(self, path: str) -> int:
        with self._operation("open_new", path):
            directory, name = self._parent(path)
            if name in directory.entries:
                raise _error(errno.EEXIST, path)
            file = File()
            directory.change({name: file})
            return self._handle(path, file)

    def open_existing(self, path: str) -> int:
        with self._operation("open_existing", path):
            return self._handle(path, self.disk.file(path))

    def write(self, handle: int, data: memoryview) -> int:
        path, file = self._opened(handle)
        with self._operation("write", path, f"{len(data)} at {len(file.content)}", file, data) as limit:
            count = self._room(len(data)) if limit is None else min(limit, self._room(len(data)))
            if data and not count:
                raise _error(errno.ENOSPC, path)
            file.content += data[:count]
            return count

    def begin_writeback(self, handle: int, start: int, length: int) -> None:
        """Nothing: it is a hint."""

    def read_into(self, handle: int, memory: memoryview, start: int) -> int:
        path, file = self._opened(handle)
        with self._operation("read_into", path, f"{len(memory)} at {start}", None, memory) as limit:
            part = file.content[start : start + (len(memory) if limit is None else limit)]
            memory[: len(part)] = part
            return len(part)

    def fsync(self, handle: int) -> None:
        path, file = self._opened(handle)
        with self._operation("fsync", path, "", file):
            if not file.is_lost:
                file.durable = bytes(file.content)

    def close(self, handle: int) -> None:
        path = self._at("", handle)
        with self._operation("close", path):
            self._open.pop(handle)

    def rename(self, old: str, new: str) -> None:
        with self._operation("rename", old, new):
            directory, old_name = self._parent(old)
            other, new_name = self._parent(new)
            assert other is directory, "only within a directory"
            file = self.disk.file(old)
            if isinstance(directory.entries.get(new_name), Directory):
                raise _error(errno.EISDIR, new)
            if old_name != new_name:
                directory.change({old_name: None, new_name: file})

    def fsync_directory(self, path: str) -> None:
        with self._operation("fsync_directory", path):
            self.disk.directory(path).fsync()

    def mkdir(self, path: str) -> None:
        with self._operation("mkdir", path):
            if not path.strip("/"):
                raise _error(errno.EEXIST, path)
            directory, name = self._parent(path)
            if name in directory.entries:
                raise _error(errno.EEXIST, path)
            directory.change({name: Directory()})

    def open_directory(self, path: str) -> int:
        with self._operation("open_directory", path):
            return self._handle(path, self.disk.directory(path))

    def listdir(self, directory: str | int) -> list[str]:
        path = self._at("", directory) if isinstance(directory, int) else directory
        with self._operation("listdir", path):
            names = list(self.disk.directory(path).entries)
            random.Random(len(names)).shuffle(names)
            return names

    def is_file(self, path: str, directory: int | None = None) -> bool:
        path = self._at(path, directory)
        with self._operation("is_file", path):
            return isinstance(self.disk.find(path), File)

    def file_size(self, path: str) -> int | None:
        with self._operation("file_size", path):
            found = self.disk.find(path)
            return len(found.content) if isinstance(found, File) else None

    def unlink(self, path: str, directory: int | None = None) -> None:
        path = self._at(path, directory)
        with self._operation("unlink", path):
            directory, name = self._parent(path)
            self.disk.file(path)
            directory.change({name: None})

    def rmdir(self, path: str) -> None:
        with self._operation("rmdir", path):
            directory, name = self._parent(path)
            if self.disk.directory(path).entries:
                raise _error(errno.ENOTEMPTY, path)
            directory.change({name: None})

    # Inside

    @contextmanager
    def _operation(
        self, name: str, path: str, detail: str = "", file: File | None = None, data: memoryview | None = None
    ) -> Iterator[int | None]:
        """Number it, and do to it what was planned. Gives how much of `data` may be done, None where all of it."""
        with self.disk.lock:
            self._check_alive()
            fault = self.faults.get(len(self.log))
            self.log.append(Operation(len(self.log), name, path, f"{detail} {fault.name if fault else ''}".strip()))
            if fault is Fault.DEATH_BEFORE:
                self._die()
            if fault in (Fault.ENOSPC, Fault.EIO):
                if name == "fsync" and file is not None:
                    file.is_lost = True
                if name == "close":
                    self._forget(path)
                raise _error(errno.ENOSPC if fault is Fault.ENOSPC else errno.EIO, path)
            limit = None
            if fault in (Fault.SHORT, Fault.DEATH_WITHIN) and data is not None and len(data) > 1:
                limit = self._dice.randint(1, len(data) - 1)
            elif fault is Fault.DEATH_WITHIN:
                self._die()
            try:
                yield limit
            except OSError:
                if fault in DEATHS:
                    self._die()
                if fault is not Fault.EIO_DONE:
                    raise
            if fault in DEATHS:
                self._die()
            if fault is Fault.EIO_DONE:
                raise _error(errno.EIO, path)

    def _die(self) -> None:
        self.is_dead = True
        self._check_alive()

    def _check_alive(self) -> None:
        if self.is_dead:
            raise ProcessDied(f"after {self.log[-1] if self.log else 'nothing'}")

    def _parent(self, path: str) -> tuple[Directory, str]:
        above, name = os.path.split(path.rstrip("/"))
        return self.disk.directory(above), name

    def _at(self, path: str, directory: int | None) -> str:
        """Return where a path leads that may begin at an open directory. Nothing is ever renamed above it here."""
        if directory is None:
            return path
        with self.disk.lock:
            self._check_alive()
            if directory not in self._open:
                raise OSError(errno.EBADF, os.strerror(errno.EBADF))
            base = self._open[directory][0]
        return f"{base}/{path}" if path else base

    def _handle(self, path: str, file: File | Directory) -> int:
        self._next_handle += 1
        self._open[self._next_handle] = (path, file)
        return self._next_handle

    def _opened(self, handle: int) -> tuple[str, File]:
        with self.disk.lock:
            self._check_alive()
            path, file = self._open.get(handle, ("", None))
            if not isinstance(file, File):
                raise OSError(errno.EBADF, os.strerror(errno.EBADF))
            return path, file

    def _forget(self, path: str) -> None:
        for handle in [handle for handle, (opened, _) in self._open.items() if opened == path][:1]:
            del self._open[handle]

    def _room(self, wanted: int) -> int:
        if self.disk.capacity_bytes is None:
            return wanted
        return max(0, min(wanted, self.disk.capacity_bytes - self.disk.num_bytes()))


def _error(number: int, path: str) -> OSError:
    return OSError(number, os.strerror(number), path)


def _walk(directory: Directory, path: str, *, folders: bool = False) -> Iterator[tuple[str, bytes]]:
    """Give each file with its content; with `folders` each directory too, its path ending with a slash."""
    for name, entry in sorted(directory.entries.items()):
        if isinstance(entry, File):
            yield f"{path}/{name}", bytes(entry.content)
        else:
            if folders:
                yield f"{path}/{name}/", b""
            yield from _walk(entry, f"{path}/{name}", folders=folders)
