"""The entries of a record of `torch.save`, an uncompressed zip file. It is taken apart, and nothing in it is unpickled."""

from __future__ import annotations

import io
import struct
import zipfile
import zlib
from typing import NamedTuple

_LOCAL_HEADER = b"PK\x03\x04"
_LOCAL_HEADER_BYTES = 30
_ZIP_ERRORS = (zipfile.BadZipFile, NotImplementedError, ValueError, struct.error, EOFError, OverflowError, OSError)
"""The exceptions that `zipfile` raises on a crafted file."""


class ArchiveError(ValueError):
    """A record is not what torch writes, or damaged."""


class Entry(NamedTuple):
    """An entry of a record."""

    content: memoryview
    crc: int | None
    """None where torch was told not to compute it."""


def entries_of(record: bytes) -> dict[str, Entry]:
    """Return the entries of a record by name, without the name of the archive that they begin with.

    Raises:
        ArchiveError: it is no uncompressed zip file, or its entries do not lie within it.
    """
    view = memoryview(record)
    try:
        with zipfile.ZipFile(io.BytesIO(record)) as archive:
            infos = archive.infolist()
        if not infos or sum(info.file_size for info in infos) > len(record):
            raise ArchiveError("its entries are longer than it is")
        # torch says so for all of them, or for none.
        has_crc = any(info.CRC for info in infos)
        entries: dict[str, Entry] = {}
        for info in infos:
            called = f"its entry {info.filename[:120]!r}"
            if info.compress_type != zipfile.ZIP_STORED or info.compress_size != info.file_size or info.flag_bits & 1:
                raise ArchiveError(f"{called} is compressed or encrypted")
            header = view[info.header_offset : info.header_offset + _LOCAL_HEADER_BYTES]
            if info.header_offset < 0 or header[:4] != _LOCAL_HEADER:
                raise ArchiveError(f"{called} is not where it should be")
            start = info.header_offset + _LOCAL_HEADER_BYTES + sum(struct.unpack("<HH", header[26:30]))
            content = view[start : start + info.file_size]
            if len(content) < info.file_size:
                raise ArchiveError(f"{called} is not within it")
            name = info.filename.partition("/")[2]
            if name in entries:
                raise ArchiveError(f"{called} is there twice")
            entries[name] = Entry(content, info.CRC if has_crc else None)
    except ArchiveError:
        raise
    except _ZIP_ERRORS as error:
        raise ArchiveError(f"it is no zip file, or damaged: {str(error)[:200]}") from error
    return entries


def record_problems(record: bytes, what: str) -> list[str]:
    """Return what is wrong with a whole record: that it can be taken apart, and each entry has its checksum."""
    try:
        entries = entries_of(record)
    except ArchiveError as error:
        return [f"{what} cannot be read: {error}"]
    return [
        f"{what} is damaged in {name[:120]!r}"
        for name, entry in entries.items()
        if entry.crc is not None and zlib.crc32(entry.content) != entry.crc
    ]
