"""Records of values, which anybody may have written: what torch saves is read, and nothing takes more than it has."""

from __future__ import annotations

import io
import os
import pickle
import random
import resource
import struct
import zipfile
from collections import Counter, OrderedDict, UserDict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.serialization import safe_globals

from torchft_ckpt.errors import CheckpointDamagedError, UnsupportedValueError
from torchft_ckpt.integrations.dcp.value_records import load_record


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


def record_with(pickled: bytes, data: bytes = b"") -> bytes:
    """A record whose pickle is this."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_STORED) as archive:
        for name, content in {"data.pkl": pickled, "byteorder": b"little", "data/0": data, "version": b"3\n"}.items():
            archive.writestr(f"archive/{name}", content)
    return buffer.getvalue()


SHARED = [1, 2]
TRANSPOSED = torch.arange(6.0).reshape(2, 3).t()
PARAMETER = torch.nn.Parameter(torch.ones(3))
MARKED = torch.nn.Parameter(torch.ones(3))
MARKED.note = "of the user"  # type: ignore[attr-defined]
MODULE = torch.nn.Linear(2, 2).state_dict()


@pytest.mark.parametrize(
    "value",
    [
        None,
        7,
        -(2**400),
        2.5,
        "text",
        b"\x00\xff",
        bytearray(b"abc"),
        bytearray(),
        1 + 2j,
        {"a": [1, "x", (2.5, None)], 5: True, (1, "b"): (), b"key": {}, None: []},
        {1, 2, "three", (4, 5)},
        set(),
        OrderedDict(a=1, b=OrderedDict()),
        Counter("banana"),
        torch.Size([3, 4]),
        torch.float8_e4m3fn,
        torch.device("cpu"),
        torch.device("cuda:1"),
        torch.strided,
        torch.per_tensor_affine,
        [SHARED, SHARED],
        list(range(5000)),
        {f"key {n}": (n, float(n)) for n in range(2000)},
        [b"the same"] * 500,
        MODULE,
    ],
    ids=lambda value: type(value).__name__,
)
def test_plain_values_are_read_as_torch_reads_them(value: object) -> None:
    record = record_of(value)
    loaded = load_record(record, "it")
    assert type(loaded) is type(value)
    if value is MODULE:
        assert loaded._metadata == MODULE._metadata  # type: ignore[attr-defined]
        value, loaded = {k: v.tolist() for k, v in MODULE.items()}, {k: v.tolist() for k, v in loaded.items()}  # type: ignore[attr-defined]
    assert loaded == value
    if isinstance(value, list) and value[0] is SHARED:
        assert loaded[0] is loaded[1]  # type: ignore[index]


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(12.0).reshape(3, 4),
        TRANSPOSED,
        torch.arange(9)[::2],
        torch.zeros(1).expand(1000),
        torch.empty(0, 3),
        torch.tensor([1j]).conj(),
        torch.ones(4, dtype=torch.uint16),
        torch.ones(4).to(torch.float8_e5m2),
        PARAMETER,
        MARKED,
        torch.ones(3, 3).to_sparse(),
        torch.empty(4, device="meta"),
    ],
    ids=str,
)
def test_tensors_inside_of_values_are_read_as_torch_reads_them(tensor: torch.Tensor) -> None:
    (loaded,) = load_record(record_of((tensor,)), "it")  # type: ignore[misc]
    (expected,) = torch.load(io.BytesIO(record_of((tensor,))), weights_only=True)
    assert type(loaded) is type(expected) and repr(loaded) == repr(expected)
    assert getattr(loaded, "note", "") == getattr(tensor, "note", "")


@pytest.mark.filterwarnings("ignore:.*quantize.* are deprecated", "ignore:TypedStorage is deprecated")
def test_quantized_tensors_are_read() -> None:
    tensors = [
        torch.quantize_per_tensor(torch.ones(4), 0.5, 3, torch.quint8),
        torch.quantize_per_channel(torch.ones(2, 2), torch.ones(2), torch.zeros(2), 0, torch.qint8),
    ]
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


@dataclass(frozen=True)
class Key:
    """A program's own class whose instances differ in their attributes alone."""

    number: int


def test_keys_of_a_class_that_the_program_allows_may_be_as_many_as_it_likes() -> None:
    value = {Key(number): number for number in range(1000)}
    with safe_globals([Key]):
        assert load_record(record_of(value), "it") == value


@pytest.mark.parametrize("value", [range(2, 9, 3), UserDict(a=1)], ids=["range", "UserDict"])
def test_what_pickles_name_as_python_2_did_is_read_where_the_program_allows_it(value: object) -> None:
    record = record_of([value])
    with pytest.raises(UnsupportedValueError, match=rf"needs {type(value).__module__}\.{type(value).__name__}"):
        load_record(record, "it")
    with safe_globals([type(value)]):
        assert load_record(record, "it") == [value]


# Hostile


def tuples(depth: int, *, wide: bool) -> bytes:
    """A tuple in tuples: `wide`, each holds the one before twice, so that 2**depth values are hashed."""
    return b"N" + b"".join(b"q\x01h\x01\x86" if wide else b"\x85" for _ in range(depth))


def long(number: int) -> bytes:
    data = pickle.encode_long(number)
    return b"\x8a" + bytes([len(data)]) + data


STORAGE = b"(X\x07\x00\x00\x00storagectorch\nFloatStorage\nX\x01\x00\x00\x000X\x03\x00\x00\x00cpu%btQ"
LATIN = b"X\x06\x00\x00\x00latin1"
TEXT = b"X" + struct.pack("<I", 10_000) + b"x" * 10_000 + b"q\x00" + LATIN + b"q\x01\x86q\x02"
REBUILD = b"ctorch._utils\n_rebuild_tensor_v2\n"
BOMBS = {
    "bytearray of 1 TiB": pickle.dumps(Runs(bytearray, 1 << 40), 2),
    "a hundred bytearrays": pickle.dumps([Runs(bytearray, 200 << 20) for _ in range(100)], 2),
    "one text as bytearrays, a thousand times": b"\x80\x02]("
    + b"c_codecs\nencode\n"
    + TEXT
    + b"Rq\x04"
    + b"c__builtin__\nbytearray\nh\x04\x85R" * 1000
    + b"e.",
    "bytearray of a list": pickle.dumps(Runs(bytearray, [1, 2]), 2),
    "encode with a codec": b"\x80\x02c_codecs\nencode\nX\x01\x00\x00\x00xX\x04\x00\x00\x00idna\x86R.",
    "one text as bytes, a thousand times": b"\x80\x02]("
    + TEXT
    + b"c_codecs\nencode\nq\x03h\x02R"
    + b"h\x03h\x02R" * 1000
    + b"e.",
    "one list as sets, a thousand times": b"\x80\x02](]q\x00("
    + b"".join(b"M" + struct.pack("<H", n) for n in range(3000))
    + b"ec__builtin__\nset\nq\x03h\x00\x85q\x02R"
    + b"h\x03h\x02R" * 1000
    + b"e.",
    "a storage of 1 TiB": b"\x80\x02ctorch.storage\nUntypedStorage\n" + long(1 << 40) + b"\x85R.",
    "a tensor of 1 TiB": b"\x80\x02ctorch\nFloatTensor\n" + long(1 << 40) + b"\x85R.",
    "a tensor of 1 TiB that is newly made": b"\x80\x02ctorch\nTensor\n" + long(1 << 40) + b"\x85\x81.",
    "a storage that is longer than its bytes": b"\x80\x02" + STORAGE % long(1 << 20) + b".",
    "a storage of a negative length": b"\x80\x02" + STORAGE % long(-4) + b".",
    "a quantized tensor of 1 TiB": b"\x80\x02ctorch._utils\n_rebuild_qtensor\n("
    + STORAGE % b"K\x01"
    + b"K\x00"
    + long(1 << 40)
    + b"\x85K\x00\x85ctorch\nper_tensor_affine\nG\x3f\xf0\x00\x00\x00\x00\x00\x00K\x00\x87\x89}tR.",
    "an expanded tensor that is copied": b"\x80\x02ctorch._utils\n_rebuild_device_tensor_from_cpu_tensor\n("
    + REBUILD
    + b"("
    + STORAGE % b"K\x01"
    + b"K\x00"
    + long(1 << 40)
    + b"\x85K\x00\x85\x89ccollections\nOrderedDict\n)RtRctorch\nfloat64\nX\x03\x00\x00\x00cpu\x89tR.",
    "a call inside of a call": b"\x80\x02ctorch._tensor\n_rebuild_from_type_v2\n(c__builtin__\nbytearray\nctorch\nTensor\n"
    + long(1 << 40)
    + b"\x85}tR.",
    "a call in the place of a storage's device": b"\x80\x02"
    + STORAGE.replace(b"X\x03\x00\x00\x00cpu", b"c__builtin__\nbytearray\n" + long(1 << 40) + b"\x85R") % b"K\x01"
    + b".",
    "calls of calls, 5,000 deep": b"\x80\x02"
    + b"ctorch._tensor\n_rebuild_from_type_v2\n(ctorch._tensor\n_rebuild_from_type_v2\nctorch\nTensor\n" * 5000
    + b"N"
    + b"\x85}tR" * 5000
    + b".",
    "a key of 2**60 values": b"\x80\x02}" + tuples(60, wide=True) + b"Ns.",
    "a key nested 100,000 deep": b"\x80\x02}" + tuples(100_000, wide=False) + b"Ns.",
    "a set of a key of 2**60 values": b"\x80\x02c__builtin__\nset\n]" + tuples(60, wide=True) + b"a\x85R.",
    "keys of one hash": b"\x80\x02}(" + b"".join(long(n * (2**61 - 1)) + b"N" for n in range(1, 200)) + b"u.",
    "a call beside the value": b"\x80\x02c__builtin__\nbytearray\n" + long(1 << 40) + b"\x85RN.",
    "a call below an open mark": b"\x80\x02c__builtin__\nbytearray\n" + long(1 << 40) + b"\x85R(N.",
    "the state of a tensor": b"\x80\x02"
    + REBUILD
    + b"("
    + STORAGE % b"K\x01"
    + b"K\x00K\x01\x85K\x01\x85\x89NtR(NNNtb.",
}


@pytest.mark.parametrize("bomb", BOMBS)
def test_what_stands_for_more_than_it_has_is_refused(bomb: str) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises((CheckpointDamagedError, UnsupportedValueError), match=r"^it "):
        load_record(record_with(BOMBS[bomb], b"\0" * 4), "it")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200 << 10


def test_a_record_in_which_readers_of_zip_files_may_find_two_pickles_is_read_as_it_was_looked_at() -> None:
    """torch's reader takes capitals for small letters."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_STORED) as archive:
        archive.writestr("archive/DATA.PKL", BOMBS["bytearray of 1 TiB"])
        archive.writestr("archive/data.pkl", b"\x80\x02K\x05.")
        archive.writestr("archive/version", b"3\n")
    assert load_record(buffer.getvalue(), "it") == 5


def test_a_record_of_many_entries_is_taken_apart_in_little_time() -> None:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_STORED) as archive:
        archive.writestr("archive/data.pkl", b"\x80\x02K\x05.")
        for number in range(3000):
            archive.writestr(f"archive/data/{number}", b"")
        archive.writestr("archive/version", b"3\n")
    assert load_record(buffer.getvalue(), "it") == 5


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
