"""Records: what `torch.save` makes of a tensor, so that DCP reads it, and where the raw data are in it, so that we need not.

A record is an uncompressed zip file in which the tensor's data are one entry. It is written by torch itself, digested on the
way, and followed by the table of digests. Nothing in it is unpickled here.
This file knows one tensor at a time, nothing of checkpoints.
"""

from __future__ import annotations

import io
import struct
import zipfile
from typing import IO, NamedTuple, cast

import torch
import xxhash

from torchft_ckpt.checkpointing.durable.format.manifest import table_of
from torchft_ckpt.checkpointing.durable.storage.contract import OutputFile
from torchft_ckpt.checkpointing.state.space import as_bytes
from torchft_ckpt.errors import CheckpointError, StorageError

_BUFFERED_BYTES = 64 * 1024
"""Smaller records are made in memory. The only longer write of a longer one is that of its data."""
_NOT_IN_ONE_PIECE = "torch.save did not write the data of a tensor in one piece"
_LOCAL_HEADER = b"PK\x03\x04"
_LOCAL_HEADER_BYTES = 30
_ZIP_ERRORS = (
    zipfile.BadZipFile,
    NotImplementedError,
    RuntimeError,
    ValueError,
    struct.error,
    EOFError,
    OverflowError,
    OSError,
)
"""The exceptions that `zipfile` raises on a crafted file."""


class Record(NamedTuple):
    """The place of a record in its file, in bytes."""

    offset: int
    length: int
    data_offset: int
    digests_offset: int
    digest: str
    """Of the table of digests."""


def write_tensor(file: OutputFile, tensor: torch.Tensor) -> Record:
    """Write the record of a tensor, then its table of digests.

    Args:
        file: where to.
        tensor: on the CPU, contiguous, with elements, and with a storage that holds nothing else: torch saves all of it.

    Raises:
        StorageError: it could not be written.
        CheckpointError: torch wrote it in a form that is not known here.
    """
    data = as_bytes(tensor)
    view = data.numpy().data
    offset = file.position
    if len(view) <= _BUFFERED_BYTES:
        buffer = io.BytesIO()
        torch.save(tensor, buffer)
        data_offset = offset + _data_offset(buffer)
        file.write(buffer.getbuffer())
    else:
        passing = _Passing(file, len(view))
        try:
            torch.save(tensor, cast("IO[bytes]", passing))
        except (RuntimeError, StorageError) as error:  # torch's own, or that of its attempt to end the file
            if passing.failure is None or passing.failure is error:
                raise
            raise passing.failure from error
        if passing.data_offset is None:
            raise CheckpointError(_NOT_IN_ONE_PIECE, party="torch.save")
        data_offset = passing.data_offset
    length = file.position - offset
    table = table_of(view)
    digests_offset = file.position
    file.write(table)
    return Record(offset, length, data_offset, digests_offset, xxhash.xxh3_128_hexdigest(table))


class _Passing:
    """Hands what torch writes on to a file, and notes where the data were."""

    def __init__(self, file: OutputFile, data_bytes: int) -> None:
        self._file = file
        self._data_bytes = data_bytes
        self.data_offset: int | None = None
        self.failure: StorageError | None = None

    def write(self, data: bytes | memoryview) -> int:
        if len(data) == self._data_bytes:
            self.data_offset = self._file.position
        try:
            self._file.write(data)
        except StorageError as error:
            self.failure = self.failure or error
            raise
        return len(data)

    def flush(self) -> None:
        """Nothing is held back here."""


def _data_offset(record: io.BytesIO) -> int:
    """Return where a tensor's data begin in its record. Nothing that we choose lies before them."""
    content = record.getvalue()
    name_at = content.find(b"archive/data/0")
    if name_at < 0 or not content.startswith(_LOCAL_HEADER, name_at - _LOCAL_HEADER_BYTES):
        raise CheckpointError(_NOT_IN_ONE_PIECE, party="torch.save")
    return name_at + sum(struct.unpack_from("<HH", content, name_at - 4))


def value_record(value: object) -> bytes:
    """Return the record of a value that is no tensor."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def record_problems(record: bytes, what: str) -> list[str]:
    """Return what is wrong with a whole record: it is no uncompressed zip file, or an entry has not its checksum."""
    try:
        with zipfile.ZipFile(io.BytesIO(record)) as archive:
            infos = archive.infolist()
            plain = (zipfile.ZIP_STORED, 0)
            if not infos or any((info.compress_type, info.file_size - info.compress_size) != plain for info in infos):
                return [f"{what} cannot be read: it is empty, or compressed"]
            if sum(info.file_size for info in infos) > len(record):  # they share bytes, and each would be read
                return [f"{what} cannot be read: its entries are longer than it is"]
            # torch computes checksums for all entries, or was told to compute none.
            damaged = archive.testzip() if any(info.CRC for info in infos) else None
    except _ZIP_ERRORS as error:
        return [f"{what} cannot be read: it is no zip file, or damaged: {str(error)[:200]}"]
    return [] if damaged is None else [f"{what} is damaged in {damaged.partition('/')[2][:120]!r}"]
