"""Records of values, which anybody may have written: what torch saves is read, and nothing takes more than it has."""

from __future__ import annotations

import io
import os
import pickle
import random
import struct
import zipfile
from collections import UserDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.serialization import safe_globals

from torchft_ckpt.errors import CheckpointDamagedError, UnsupportedValueError
from torchft_ckpt.integrations.dcp.reader import load_record


class Runs:
    """Runs something when it is unpickled."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = function, arguments

    def __reduce__(self) -> Any:
        return self.call


class Plain:
    """A class of a program's own."""

    def __init__(self, number: int) -> None:
        self.number = number


def record_with(pickled: bytes, data: bytes = b"", name: str = "data.pkl") -> bytes:
    """A record whose pickle is this."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_STORED) as archive:
        for entry, content in {name: pickled, "byteorder": b"little", "data/0": data, "version": b"3\n"}.items():
            archive.writestr(f"archive/{entry}", content)
    return buffer.getvalue()


@pytest.mark.parametrize(
    "value",
    [
        *(torch.arange(12.0).reshape(3, 4).t(), torch.zeros(1).expand(9), torch.empty(0, 3), torch.tensor([1j]).conj()),
        *(torch.ones(3, 3).to_sparse(), torch.empty(4, device="meta"), torch.nn.Parameter(torch.ones(3))),
        {"a": [1, (2.5, None)], (1, "b"): {3}, "of a module": torch.nn.Linear(2, 2).state_dict()},
    ],
    ids=range(8),
)
def test_what_torch_loads_as_weights_is_read(value: object) -> None:
    """Its tensors are looked at, each kind of them: which claim more bytes than the record has."""
    (loaded,) = load_record(record_of((value,)), "it")  # type: ignore[misc]
    assert repr(loaded) == repr(value)


@pytest.mark.filterwarnings("ignore:.*quantize.* are deprecated", "ignore:TypedStorage is deprecated")
def test_quantized_tensors_are_read() -> None:
    channels = torch.quantize_per_channel(torch.ones(2, 2), torch.ones(2), torch.zeros(2), 0, torch.qint8)
    tensors = [torch.quantize_per_tensor(torch.ones(4), 0.5, 3, torch.quint8), channels]
    assert repr(load_record(record_of(tensors), "it")) == repr(tensors)


def test_arrays_and_classes_that_the_program_allows_are_read() -> None:
    array = np.float64(2.5)
    with pytest.raises(UnsupportedValueError, match=r"needs numpy.*multiarray\.scalar"):
        load_record(record_of(array), "it")
    with pytest.raises(UnsupportedValueError, match=r"needs .*Plain"):
        load_record(record_of([Plain(5)]), "it")
    with safe_globals([Plain]):
        (plain,) = load_record(record_of([Plain(5)]), "it")  # type: ignore[misc]
    assert plain.number == 5


@pytest.mark.parametrize("value", [range(2, 9, 3), UserDict(a=1)], ids=["range", "UserDict"])
def test_what_pickles_name_as_python_2_did_is_read_where_the_program_allows_it(value: object) -> None:
    record = record_of([value])
    with pytest.raises(UnsupportedValueError, match=f"needs .*{type(value).__name__}"):
        load_record(record, "it")
    with safe_globals([type(value)]):
        assert load_record(record, "it") == [value]


# Damaged, or hostile


def long(number: int) -> bytes:
    data = pickle.encode_long(number)
    return b"\x8a" + bytes([len(data)]) + data


STORAGE = b"(X\x07\x00\x00\x00storagectorch\nFloatStorage\nX\x01\x00\x00\x000X\x03\x00\x00\x00cpu%btQ"
CLAIMS = {
    "a storage that is longer than its bytes": STORAGE % long(1 << 20),
    "a storage of a negative length": STORAGE % long(-4),
    "a storage that is not there": STORAGE.replace(b"\x000X", b"\x007X") % b"K\x01",
}


@pytest.mark.parametrize("claim", CLAIMS)
def test_a_storage_that_claims_more_than_is_there_is_refused(claim: str) -> None:
    with pytest.raises(CheckpointDamagedError):
        load_record(record_with(b"\x80\x02" + CLAIMS[claim] + b".", b"\0" * 4), "it")


def test_a_record_whose_entries_are_longer_than_it_is_refused() -> None:
    """Two names of the same bytes: each would be read, and so little stands for much."""
    record = bytearray(record_with(b"\x80\x02N.", bytes(10_000)))
    last = record.rfind(b"PK\x01\x02")  # of the version, which is now where the data are
    at = record.find(b"PK\x01\x02", record.find(b"PK\x01\x02", record.find(b"PK\x01\x02") + 1) + 1)
    record[last + 16 : last + 28] = record[at + 16 : at + 28]
    with pytest.raises(CheckpointDamagedError, match="its entries are longer than it is"):
        load_record(bytes(record), "it")


def test_a_record_with_an_entry_of_two_lengths_is_refused() -> None:
    record = bytearray(record_with(b"\x80\x02" + STORAGE % b"K\x04" + b".", bytes(4)))
    at = record.find(b"PK\x01\x02", record.find(b"PK\x01\x02", record.find(b"PK\x01\x02") + 1) + 1)
    struct.pack_into("<I", record, at + 24, 16)
    with pytest.raises(CheckpointDamagedError, match="cannot be read"):
        load_record(bytes(record), "it")


def record_of(value: object) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def test_a_record_that_would_execute_something_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedValueError, match=r"the record.*(posix|nt)\.system"):
        load_record(record_of(Runs(os.system, f"touch {tmp_path / 'executed'}")), "the record")
    assert not (tmp_path / "executed").exists()


@pytest.mark.parametrize("seed", range(5))
def test_spoiled_records_are_refused_or_right(seed: int) -> None:
    rng = random.Random(seed)
    data = record_of({"a": list(range(50))})
    outcomes = set()
    for _ in range(60):
        spoiled = bytearray(data)
        spoiled[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        try:
            outcomes.add(str(load_record(bytes(spoiled), "it")))
        except (CheckpointDamagedError, UnsupportedValueError) as error:
            assert str(error).startswith("it ")  # noqa: PT017
    assert outcomes <= {str({"a": list(range(50))})}


def test_records_that_are_compressed_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "bomb"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", b"\x80\x02N.")
        archive.writestr("archive/data/0", bytes(10_000_000))
    with pytest.raises(CheckpointDamagedError, match="cannot be read"):
        load_record(path.read_bytes(), "it")
