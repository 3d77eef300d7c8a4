"""`.metadata`: what we write, plain DCP reads; what others write is read without being executed."""

from __future__ import annotations

import io
import os
import pickle
import pickletools
import struct
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from support.durable_parts import NAME, PartsDouble, rows, storage_in
from support.newest import newest_whole
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from torchft_ckpt.checkpointing.durable.reading.checkpoint import read_checkpoint
from torchft_ckpt.checkpointing.durable.saving.dcp_metadata import build_metadata
from torchft_ckpt.core.boxes.geometry import Box, whole
from torchft_ckpt.errors import CheckpointDamagedError
from torchft_ckpt.integrations.dcp.reader import load_metadata

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


def state() -> dict[str, Any]:
    return {
        "model": {"w": torch.arange(48, dtype=torch.float32).reshape(12, 4), "half": torch.ones(5).bfloat16()},
        "scalar": torch.tensor(7),
        "empty": torch.empty(0, 3),
        "step": 120,
        "groups": [{"lr": 0.5, "name": "a"}, {"lr": 0.25}],
        "seen": np.arange(4),
    }


def with_metadata(double: PartsDouble, tmp_path: Path) -> Path:
    directory = tmp_path / str(NAME)
    (directory / ".metadata").write_bytes(build_metadata(newest_whole([double.storage])))
    return directory


def in_parts(tmp_path: Path) -> PartsDouble:
    """Two replicas of two ranks; what they wrote overlaps."""
    double = PartsDouble(state(), storage_in(tmp_path), num_replicas=2, num_ranks=2)
    others = {"model.half": [whole((5,))], "scalar": [whole(())], "seen": [whole((4,))]}
    double.write(0, 0, pieces={"model.w": rows((12, 4), [0, 5])[:1]}, values=["step"])
    double.write(0, 1, pieces={"model.w": rows((12, 4), [5]), **others})
    double.write(1, 0, pieces={"model.w": rows((12, 4), [0, 3, 9])[:2], "scalar": [whole(())]}, values=["step", "seen"])
    double.write(1, 1, pieces={})
    return double


# Writing


def test_pieces_that_others_make_superfluous_are_left_out(tmp_path: Path) -> None:
    double = in_parts(tmp_path)
    described = load_metadata(build_metadata(newest_whole([double.storage]))).state_dict_metadata["model.w"]
    assert isinstance(described, TensorStorageMetadata)
    assert sum(chunk.sizes.numel() for chunk in described.chunks) == 48


def test_pieces_that_begin_at_one_element_are_not_confused(tmp_path: Path) -> None:
    double = PartsDouble({"w": torch.arange(16.0).reshape(4, 4)}, storage_in(tmp_path), num_replicas=3)
    double.write(0, pieces={"w": [Box((0, 0), (4, 2))]})
    double.write(1, pieces={"w": [Box((0, 0), (2, 4)), Box((0, 2), (2, 2))]})
    double.write(2, pieces={"w": [Box((2, 2), (2, 2))]})
    directory = with_metadata(double, tmp_path)
    loaded = {"w": torch.zeros(4, 4)}
    dcp.load(loaded, storage_reader=FileSystemReader(directory), no_dist=True)
    assert torch.equal(loaded["w"], double.state["w"])


def test_pieces_that_dcp_would_confuse_are_refused(tmp_path: Path) -> None:
    double = PartsDouble({"w": torch.arange(16.0).reshape(4, 4)}, storage_in(tmp_path))
    double.write(pieces={"w": [Box((0, 0), (4, 2)), Box((0, 0), (2, 4)), Box((2, 2), (2, 2))]})
    with pytest.raises(CheckpointDamagedError, match="begins at the same element"):
        build_metadata(read_checkpoint([double.storage], NAME))


# Reading what is harmless


def test_what_dcp_writes_is_read_as_its_own_unpickler_reads_it(tmp_path: Path) -> None:
    saved = {**state(), "ordered": OrderedDict(a=1, b=torch.ones(2))}
    dcp.save(saved, checkpoint_id=tmp_path / "dcp", no_dist=True)
    data = (tmp_path / "dcp" / ".metadata").read_bytes()
    ours, theirs = load_metadata(data), pickle.loads(data)  # noqa: S301
    assert ours.state_dict_metadata == theirs.state_dict_metadata
    assert ours.storage_data == theirs.storage_data
    assert ours.planner_data == theirs.planner_data
    assert getattr(ours, "version", None) == getattr(theirs, "version", None)
    assert ours.storage_meta is not None
    assert ours.storage_meta.save_id == theirs.storage_meta.save_id


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_every_protocol_that_objects_have_is_read(protocol: int) -> None:
    metadata = a_metadata()
    assert load_metadata(pickle.dumps(metadata, protocol=protocol)) == metadata


def test_what_python_pickles_otherwise_is_read() -> None:
    data = pickle.dumps(a_metadata(checkpoint_id=Path("/nowhere/at/all")), protocol=2)
    loaded = load_metadata(pickletools.optimize(data))
    assert loaded.storage_meta is not None and loaded.storage_meta.save_id == "s"


def a_metadata(
    *,
    fqn: Any = "w",
    chunks: Any = None,
    info: Any = None,
    paths: Any = None,
    checkpoint_id: Any = None,
    size: Any = None,
) -> Metadata:
    size = torch.Size((4, 2)) if size is None else size
    chunks = [ChunkStorageMetadata(torch.Size((0, 0)), torch.Size((4, 2)))] if chunks is None else chunks
    info = _StorageInfo("__0_0.distcp", 0, 100) if info is None else info
    metadata = Metadata(
        {fqn: TensorStorageMetadata(TensorProperties(torch.float32), size, chunks), "step": BytesStorageMetadata()},
        planner_data={"w": ("w",), "step": ("step",)} if paths is None else paths,
        storage_data={MetadataIndex("w", torch.Size((0, 0)), 0): info, MetadataIndex("step"): info},
        storage_meta=StorageMeta(checkpoint_id=checkpoint_id, save_id="s"),
    )
    return metadata


# Hostile


class Runs:
    """Runs something when it is unpickled."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = function, arguments

    def __reduce__(self) -> Any:
        return self.call


def hostile(tmp_path: Path) -> dict[str, bytes]:
    marker = tmp_path / "executed"
    touch = f"open({str(marker)!r}, 'w').close()"
    crafted = torch.ones(1)
    saved = io.BytesIO()
    torch.save({"x": Runs(exec, touch)}, saved)
    calls = {
        "os.system": Runs(os.system, f"touch {marker}"),
        "builtins.eval": Runs(eval, f"__import__('os').system('touch {marker}')"),
        "builtins.exec": Runs(exec, touch),
        "torch.load of bytes": Runs(torch.load, io.BytesIO(saved.getvalue())),
        "torch.hub": Runs(torch.hub.load, "some/where", "model"),
        "open": Runs(open, str(marker), "w"),
        "a tensor": crafted,
        "getattr of a class": Runs(getattr, Metadata, "__init__"),
    }
    pickles = {name: pickle.dumps(value) for name, value in calls.items()}
    pickles |= {f"{name} in a size": pickle.dumps(a_metadata(size=value)) for name, value in calls.items()}
    pickles |= {f"{name} in a path": pickle.dumps(a_metadata(paths={"w": value})) for name, value in calls.items()}
    pickles |= {f"{name} before it": pickle.dumps(value)[:-1] + b"0" + good() for name, value in calls.items()}
    return pickles


def good() -> bytes:
    return pickle.dumps(a_metadata())


def test_nothing_of_a_hostile_pickle_is_executed(tmp_path: Path) -> None:
    accepted = []
    for name, data in hostile(tmp_path).items():
        try:
            load_metadata(data)
        except CheckpointDamagedError:
            continue
        accepted.append(name)
    assert accepted == []
    assert not (tmp_path / "executed").exists()


def like_dicts() -> bytes:
    """Metadata with objects for dicts, of which `items()` is a call of OrderedDict."""
    new = b"ctorch.distributed.checkpoint.metadata\nMetadata\n)\x81"
    like = new + b"}\x8c\x05itemsccollections\nOrderedDict\nsb"
    return (
        b"\x80\x04" + new + b"}(\x8c\x13state_dict_metadata" + like + b"\x8c\x0cstorage_data" + like
        + b"\x8c\x0cplanner_dataNub."
    )  # fmt: skip


def deep(inner: bytes, level: bytes, depth: int) -> bytes:
    return b"\x80\x04" + inner * depth + b"N" + level * depth + b"."


@pytest.mark.slow
@pytest.mark.parametrize(
    "data",
    [
        b"",
        b".",
        b"\x80\x04.",
        b"N.",
        good()[:-1],
        good()[:100],
        good().replace(b"Metadata", b"Metadatb"),
        deep(b"", b"\x85", 500_000),  # tuples in tuples
        deep(b"]", b"a", 500_000),  # lists in lists
        deep(b"}", b"Ns", 500_000),
        b"\x80\x04Nr\xff\xff\xff\xff.",  # a memo of 4 billion places
        b"\x80\x04\x8a\xff" + b"\xff" * 255 + b".",  # a long of 255 bytes
        b"\x80\x04\x8b" + struct.pack("<i", 2**31 - 1) + b"1.",
        b"\x80\x04\x8d" + struct.pack("<Q", 2**62) + b"x.",  # a string that is longer than memory
        b"\x80\x05\x96" + struct.pack("<Q", 2**62) + b"x.",
        b"\x80\x04\x82\x01.",  # an extension
        b"\x80\x04(cos\nsystem\no.",
        b"(S'true'\nios\nsystem\n.",
        b"\x80\x04cbuiltins\ngetattr\ncos\nsystem\n\x85R.",
        b"\x80\x04ctorch\nSize\n}b.",  # the state of a class
        b"\x80\x04ctorch\nSize\nN}\x86b.",
        b"\x80\x04ctorch.distributed.checkpoint.metadata\nMetadata\nN}\x8c\x01xNs\x86b.",
        b"\x80\x04ctorch.distributed.checkpoint.metadata\n_MEM_FORMAT_ENCODING\nK\x00\x85R}\x8c\x01xNsb.",  # of all
        b"\x80\x04cbuiltins\ngetattr\n(ctorch.distributed.checkpoint.metadata\nMetadata\n\x8c\x08__init__tR.",
        b"\x80\x05\x96" + struct.pack("<Q", 1) + b"x\x94\x98h\x00Kxa.",  # bytes that grow while they are looked at
        b"\x80\x04ctorch.serialization\n_get_layout\nN" + b"\x85" * 5000 + b"R.",  # an unknown key that has no text
        b"\x80\x04ctorch.serialization\n_get_layout\n\x8c\x01x\x85R.",
        like_dicts(),
        b"\x80\x04]\x94h\x00a.",  # a list that holds itself
        b"\x80\x04h\x07.",
        b"\x80\x04\x8c\x01x\x94(h\x00h\x00d.",
        b"\x80\x04Pos.system\n.",
        pickle.dumps({"state_dict_metadata": {}}),
        pickle.dumps(a_metadata(fqn=5)),
        pickle.dumps(a_metadata(size=torch.Size((-1, 2)))),
        pickle.dumps(a_metadata(size=(2**63, 1))),
        pickle.dumps(a_metadata(size=(1,) * 65)),
        pickle.dumps(a_metadata(size=(2**62, 2**62))),
        pickle.dumps(a_metadata(chunks=[ChunkStorageMetadata(torch.Size((1, 0)), torch.Size((4, 2)))])),
        pickle.dumps(a_metadata(chunks=[ChunkStorageMetadata(torch.Size((0,)), torch.Size((4, 2)))])),
        pickle.dumps(a_metadata(chunks=5)),
        pickle.dumps(a_metadata(chunks="")),
        pickle.dumps(a_metadata(size=b"\4\2")),
        pickle.dumps(a_metadata(size={4: None, 2: None})),
        pickle.dumps(a_metadata(info=_StorageInfo("x", 0, 1, "gzip"))),  # type: ignore[arg-type]
        pickle.dumps(a_metadata(chunks=[_StorageInfo("x", 0, 1)])),
        pickle.dumps(a_metadata(info=_StorageInfo("../secret", 0, 1))),
        pickle.dumps(a_metadata(info=_StorageInfo("/etc/passwd", 0, 1))),
        pickle.dumps(a_metadata(info=_StorageInfo("a/../../b", 0, 1))),
        pickle.dumps(a_metadata(info=_StorageInfo("..\\secret", 0, 1))),
        pickle.dumps(a_metadata(info=_StorageInfo("a\0b", 0, 1))),
        pickle.dumps(a_metadata(info=_StorageInfo("a\ud800", 0, 1))),
        pickle.dumps(a_metadata(info=_StorageInfo("x", -1, 1))),
        pickle.dumps(a_metadata(info=_StorageInfo("x", 0, True))),
        pickle.dumps(a_metadata(info=_StorageInfo(None, 0, 1))),
        pickle.dumps(a_metadata(info=5)),
        pickle.dumps(a_metadata(paths={"w": ("w", 1.5)})),
        pickle.dumps(a_metadata(paths={"w": ["w"]})),
        pickle.dumps(a_metadata(paths=[1])),
    ],
)
def test_what_is_no_metadata_of_dcp_is_refused_by_name(data: bytes) -> None:
    with pytest.raises(CheckpointDamagedError, match=r"dir/\.metadata is not DCP's metadata"):
        load_metadata(data, "dir/.metadata")
