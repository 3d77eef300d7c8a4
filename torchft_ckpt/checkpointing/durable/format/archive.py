"""Where things lie in what `torch.save` writes: an uncompressed zip file, in which a plain tensor is one run of bytes.

It finds, and checks that what it found can be; it reads as little as it may, and executes nothing.
"""

from __future__ import annotations

import io
import math
import struct
import zipfile
import zlib
from collections.abc import Callable
from typing import NamedTuple

import torch

from torchft_ckpt.checkpointing.durable.format.inert_pickle import InertPickleError, Made, Name, Persistent, read_pickle
from torchft_ckpt.checkpointing.state.dtypes import DTYPES
from torchft_ckpt.checkpointing.state.regions import c_strides
from torchft_ckpt.errors import StorageError

WINDOW_BYTES = 4 * 1024
"""At the beginning and the end of a record: what surrounds the data of a tensor."""
_LOCAL_HEADER = b"PK\x03\x04"
_LOCAL_HEADER_BYTES = 30
_MAX_PICKLE_BYTES = 1024 * 1024
_REBUILD_2 = Name("torch._utils", "_rebuild_tensor_v2")
_REBUILD_3 = Name("torch._utils", "_rebuild_tensor_v3")
UNTYPED = Name("torch.storage", "UntypedStorage")
_NO_HOOKS = Name("collections", "OrderedDict")
STORAGES = {
    Name("torch", f"{kind}Storage"): dtype
    for kind, dtype in {
        "Double": torch.float64,
        "Float": torch.float32,
        "Half": torch.float16,
        "BFloat16": torch.bfloat16,
        "Long": torch.int64,
        "Int": torch.int32,
        "Short": torch.int16,
        "Char": torch.int8,
        "Byte": torch.uint8,
        "Bool": torch.bool,
        "ComplexDouble": torch.complex128,
        "ComplexFloat": torch.complex64,
    }.items()
}
_DTYPE_NAMES = {Name("torch", name): dtype for name, dtype in DTYPES.items()}
_ALLOWED = frozenset({_REBUILD_2, _REBUILD_3, UNTYPED, _NO_HOOKS, *STORAGES, *_DTYPE_NAMES})

ReadBytes = Callable[[int, int], bytes]
"""Returns the bytes of a record from its first argument up to its second."""


class ArchiveError(ValueError):
    """A record is not what torch writes, or damaged."""


class Entry(NamedTuple):
    """An entry of a record."""

    name: str
    start: int
    """Of its content, in bytes of the record."""
    num_bytes: int
    crc: int | None
    """None where torch was told not to compute it."""


class PlainTensor(NamedTuple):
    """Where a record has the elements of a tensor, in C order."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    crc: int | None
    """Of all of its bytes, where these are all of its storage and it is known."""


def entries_of(read: ReadBytes, length: int) -> dict[str, Entry]:
    """Return the entries of a record by name, without the name of the archive that they begin with.

    Raises:
        ArchiveError: it is no uncompressed zip file, or its entries do not lie within it.
        StorageError: it could not be read.
    """
    return _entries(_Window(read, length), length)


def _entries(window: _Window, length: int) -> dict[str, Entry]:
    try:
        with zipfile.ZipFile(window) as archive:
            infos = archive.infolist()
        if not infos or sum(info.file_size for info in infos) > length:
            raise ArchiveError("its entries are longer than it is")
        # torch says so for all of them, or for none.
        has_crc = any(info.CRC for info in infos)
        entries: dict[str, Entry] = {}
        for info in infos:
            if info.compress_type != zipfile.ZIP_STORED or info.compress_size != info.file_size or info.flag_bits & 1:
                raise ArchiveError(f"its entry {info.filename[:120]!r} is compressed or encrypted")
            header = window.at(info.header_offset, _LOCAL_HEADER_BYTES)
            if header[:4] != _LOCAL_HEADER:
                raise ArchiveError(f"its entry {info.filename[:120]!r} is not where it should be")
            start = info.header_offset + _LOCAL_HEADER_BYTES + sum(struct.unpack("<HH", header[26:30]))
            if start + info.file_size > length:
                raise ArchiveError(f"its entry {info.filename[:120]!r} is not within it")
            name = info.filename.partition("/")[2]
            if name in entries:
                raise ArchiveError(f"its entry {info.filename[:120]!r} is there twice")
            entries[name] = Entry(name, start, info.file_size, info.CRC if has_crc else None)
    except (zipfile.BadZipFile, NotImplementedError, ValueError, struct.error, EOFError, OverflowError) as error:
        if window.failure is not None:
            raise window.failure from error
        if isinstance(error, ArchiveError):
            raise
        raise ArchiveError(f"it is no zip file, or damaged: {str(error)[:200]}") from error
    return entries


def plain_tensor(read: ReadBytes, length: int) -> PlainTensor | None:
    """Return where a record has a tensor's elements; None where it is of another kind than a dense tensor in C order.

    Raises:
        ArchiveError: it is damaged, or no record.
        StorageError: it could not be read.
    """
    window = _Window(read, length)
    entries = _entries(window, length)
    pickled, order = entries.get("data.pkl"), entries.get("byteorder")
    if pickled is None or pickled.num_bytes > _MAX_PICKLE_BYTES or (order is not None and order.num_bytes > 16):
        return None
    if order is not None and _content(window, order) != b"little":
        return None
    try:
        root = read_pickle(_content(window, pickled), _ALLOWED)
    except InertPickleError:
        return None
    found = _described(root)
    if found is None:
        return None
    dtype, shape, key, first = found
    data = entries.get(f"data/{key}")
    start, num_bytes = first * dtype.itemsize, math.prod(shape) * dtype.itemsize
    if data is None or start + num_bytes > data.num_bytes:
        raise ArchiveError(f"it has {0 if data is None else data.num_bytes} bytes for a {dtype}{[*shape]}")
    return PlainTensor(dtype, shape, data.start + start, data.crc if num_bytes == data.num_bytes else None)


def record_problems(record: bytes, what: str) -> list[str]:
    """Return what is wrong with a whole record: that it can be taken apart, and each entry has its checksum."""
    try:
        entries = entries_of(lambda start, stop: record[start:stop], len(record))
    except ArchiveError as error:
        return [f"{what} cannot be read: {error}"]
    return [
        f"{what} is damaged in {entry.name[:120]!r}"
        for entry in entries.values()
        if entry.crc is not None and zlib.crc32(record[entry.start : entry.start + entry.num_bytes]) != entry.crc
    ]


class _Window(io.RawIOBase):
    """A record as a file; its beginning and its end are read in one go each."""

    def __init__(self, read: ReadBytes, length: int) -> None:
        super().__init__()
        self._read = read
        self._length = length
        self._at = 0
        self._known: list[tuple[int, bytes]] = []
        self.failure: StorageError | None = None
        """`zipfile` takes any OSError for a sign that a file is no zip file."""

    def at(self, start: int, num_bytes: int) -> bytes:
        """Return bytes.

        Raises:
            ArchiveError: they are not within the record.
        """
        if start < 0 or start + num_bytes > self._length:
            raise ArchiveError("it refers to bytes beyond it")
        for low, data in self._known:
            if low <= start and start + num_bytes <= low + len(data):
                return data[start - low : start - low + num_bytes]
        low, high = start, start + num_bytes
        if high > self._length - WINDOW_BYTES:
            low, high = min(low, max(self._length - WINDOW_BYTES, 0)), self._length
        elif low < WINDOW_BYTES:
            low, high = 0, max(high, WINDOW_BYTES)
        try:
            data = self._read(low, high)
        except StorageError as error:
            self.failure = error
            raise
        if low == 0 or high == self._length:  # there may be many entries in between
            self._known = [*self._known[-3:], (low, data)]
        return data[start - low : start - low + num_bytes]

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = 0) -> int:
        at = offset + (0, self._at, self._length)[whence]
        if at < 0:
            raise ArchiveError("it is too short")
        self._at = at
        return at

    def read(self, size: int = -1) -> bytes:
        stop = self._length if size is None or size < 0 else min(self._at + size, self._length)
        data = self.at(self._at, stop - self._at) if stop > self._at else b""
        self._at += len(data)
        return data


def _content(window: _Window, entry: Entry) -> bytes:
    data = window.at(entry.start, entry.num_bytes)
    if entry.crc is not None and zlib.crc32(data) != entry.crc:
        raise ArchiveError(f"its entry {entry.name[:120]!r} does not have its checksum")
    return data


def _described(root: object) -> tuple[torch.dtype, tuple[int, ...], str, int] | None:
    """Return dtype, shape, name of the storage and the first element there of a dense tensor in C order."""
    if not isinstance(root, Made) or root.of not in (_REBUILD_2, _REBUILD_3) or root.state is not None or root.items:
        return None
    arguments = root.arguments
    if len(arguments) != (6 if root.of == _REBUILD_2 else 7):
        return None  # with metadata: it may be a conjugate
    place, first, shape, strides = arguments[:4]
    key = place.key if isinstance(place, Persistent) else None
    if type(key) is not tuple or len(key) != 5 or key[0] != "storage" or type(key[2]) is not str:
        return None
    if type(key[1]) is not Name or not _are_counts((first,)) or not _are_counts(shape) or not _are_counts(strides):
        return None
    if root.of == _REBUILD_2:
        dtype = STORAGES.get(key[1])
    else:
        dtype = _DTYPE_NAMES.get(arguments[6]) if type(arguments[6]) is Name and key[1] == UNTYPED else None
    if dtype is None or type(first) is not int or type(shape) is not tuple or type(strides) is not tuple:
        return None
    in_c_order = len(shape) == len(strides) and all(
        size == 1 or stride == c_stride for size, stride, c_stride in zip(shape, strides, c_strides(shape), strict=True)
    )
    return (dtype, shape, key[2], first) if in_c_order or 0 in shape else None


def _are_counts(values: object) -> bool:
    return type(values) is tuple and all(type(value) is int and 0 <= value < 2**62 for value in values)
