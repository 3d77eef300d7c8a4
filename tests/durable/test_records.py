"""A record is what `torch.save` makes of a tensor: torch reads it, and the raw data are where we say."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import xxhash
from support.scripted_fs import Disk, Fault, ScriptedSystem

from torchft_ckpt.checkpointing.durable.format import records
from torchft_ckpt.checkpointing.durable.format.manifest import DIGEST_BLOCK_BYTES, digest_table_bytes, table_of
from torchft_ckpt.checkpointing.durable.format.records import Record, value_record, write_tensor
from torchft_ckpt.checkpointing.durable.storage.local_storage import LocalStorage
from torchft_ckpt.errors import CheckpointError, StorageError

SMALL, LARGE = 100, 3 * DIGEST_BLOCK_BYTES + 8
"""In bytes: one is made in memory, the other passes through."""
DTYPES = [
    torch.uint8,
    torch.bool,
    torch.int16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float32,
    torch.complex64,
    torch.int64,
    torch.complex128,
]


def tensor_of(dtype: torch.dtype, num_bytes: int) -> torch.Tensor:
    raw = torch.randint(0, 2 if dtype is torch.bool else 256, (num_bytes // 16 * 16,), dtype=torch.uint8)
    return raw.view(dtype)


def raw_of(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.reshape(-1).view(torch.uint8).numpy())


def written(tensors: list[torch.Tensor]) -> tuple[bytes, list[Record]]:
    """The file that has these records, one behind the other."""
    disk = Disk()
    storage = LocalStorage("/c", ScriptedSystem(disk=disk))
    storage.make_directory("")
    with storage.create("file") as file:
        found = [write_tensor(file, tensor) for tensor in tensors]
        file.commit()
    return disk.files()["/c/file"], found


@pytest.mark.parametrize("num_bytes", [SMALL, DIGEST_BLOCK_BYTES, DIGEST_BLOCK_BYTES + 16, LARGE])
@pytest.mark.parametrize("dtype", DTYPES)
def test_torch_reads_the_record_and_the_raw_data_are_where_it_says(dtype: torch.dtype, num_bytes: int) -> None:
    torch.manual_seed(num_bytes)
    tensors = [tensor_of(dtype, num_bytes).clone() for _ in range(3)]
    content, found = written(tensors)
    end = 0
    for tensor, record in zip(tensors, found, strict=True):
        raw = raw_of(tensor)
        read = torch.load(io.BytesIO(content[record.offset : record.offset + record.length]), weights_only=True)
        assert (read.dtype, read.shape) == (dtype, tensor.shape)
        assert raw_of(read) == raw
        assert content[record.data_offset : record.data_offset + len(raw)] == raw
        table = content[record.digests_offset : record.digests_offset + digest_table_bytes(len(raw))]
        assert table == table_of(memoryview(raw))
        assert xxhash.xxh3_128_hexdigest(table) == record.digest
        assert record.offset >= end
        end = record.digests_offset + len(table)
    assert end == len(content)


@pytest.mark.parametrize("shape", [(), (1,), (2, 3, 4), (1, 1, 1, 1)])
def test_the_shape_is_kept(shape: tuple[int, ...]) -> None:
    content, (record,) = written([torch.ones(shape)])
    read = torch.load(io.BytesIO(content[record.offset : record.offset + record.length]), weights_only=True)
    assert read.shape == shape


def test_a_record_costs_little_beside_its_data() -> None:
    for num_bytes in (16, SMALL, DIGEST_BLOCK_BYTES, LARGE, 1024 * 1024):
        content, _ = written([tensor_of(torch.uint8, num_bytes).clone()])
        assert len(content) <= num_bytes * (1 + 16 / DIGEST_BLOCK_BYTES) + 2100


def test_blocks_are_digested_each_for_itself_and_for_its_place() -> None:
    data = bytes(2 * DIGEST_BLOCK_BYTES + 1)
    table = table_of(memoryview(data))
    assert len(table) == digest_table_bytes(len(data)) == 48
    assert len({table[:16], table[16:32], table[32:]}) == 3
    assert table[16:32] == xxhash.xxh3_128_digest(bytes(DIGEST_BLOCK_BYTES), seed=1)
    assert table_of(memoryview(b"")) == b""


@pytest.mark.parametrize("num_bytes", [SMALL, LARGE])
@pytest.mark.parametrize("fault", [Fault.ENOSPC, Fault.EIO])
def test_an_error_of_the_disk_is_named_whatever_torch_makes_of_it(num_bytes: int, fault: Fault) -> None:
    def write(system: ScriptedSystem) -> None:
        storage = LocalStorage("/c", system)
        storage.make_directory("")
        with storage.create("file") as file:
            write_tensor(file, tensor_of(torch.uint8, num_bytes).clone())

    system = ScriptedSystem()
    write(system)
    numbers = [operation.number for operation in system.log if operation.name == "write"]
    assert len(numbers) > (num_bytes == LARGE)
    for number in numbers:
        failing = ScriptedSystem({number: fault})
        with pytest.raises(StorageError, match="/c/file: writing failed"):
            write(failing)
        assert failing.num_open == 0
        assert not failing.files()


def test_a_torch_that_writes_otherwise_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """In pieces, say, or compressed: then nobody knows where the raw data are."""
    tensor = tensor_of(torch.uint8, LARGE).clone()

    def in_two(value: torch.Tensor, file: Any) -> None:
        data = raw_of(value)
        file.write(data[:100])
        file.write(data[100:])

    monkeypatch.setattr(records.torch, "save", in_two)
    with pytest.raises(CheckpointError, match="in one piece"):
        written([tensor])


@pytest.mark.parametrize("value", [None, 1, 2.5, "x", (1, None), [1, {"a": 2}], b"x", np.arange(3)])
def test_torch_reads_the_record_of_a_value(tmp_path: Path, value: object) -> None:
    read = torch.load(io.BytesIO(value_record(value)), weights_only=False)
    if isinstance(value, np.ndarray):
        assert read.tolist() == value.tolist()
    else:
        assert read == value
