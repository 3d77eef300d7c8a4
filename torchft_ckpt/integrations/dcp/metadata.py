"""Reads DCP's `.metadata`, which is a pickle, and executes nothing of it. DCP's own readers unpickle whatever it says.

Python's own unpickler reads it, held to DCP's classes and plain values; a `find_class` alone would let it set attributes of the
classes that are let through, which everybody has. What comes of it is looked at whole. What a crafted one costs is not bounded:
it may take memory and time, or end the process.
"""

from __future__ import annotations

import io
import pickle
import struct
from collections import OrderedDict
from collections.abc import Callable
from pathlib import PurePosixPath, PureWindowsPath
from typing import Any, ClassVar

import torch
from torch.distributed.checkpoint import metadata as dcp
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

from torchft_ckpt.checkpointing.durable.format.manifest import is_too_large
from torchft_ckpt.checkpointing.durable.storage.contract import is_path_within
from torchft_ckpt.checkpointing.state.dtypes import DTYPES
from torchft_ckpt.checkpointing.state.format import MAX_DIMS
from torchft_ckpt.checkpointing.state.local_state import box_of
from torchft_ckpt.core.boxes.geometry import fits
from torchft_ckpt.errors import CheckpointDamagedError
from torchft_ckpt.memory import gc_paused

MAX_METADATA_BYTES = 512 * 1024 * 1024
_MAX_COUNT = 2**62
_DCP = "torch.distributed.checkpoint.metadata"
_SHARDED = "torch.distributed._shard.sharded_tensor.metadata"
_BUILT = {Metadata, TensorStorageMetadata, BytesStorageMetadata, ChunkStorageMetadata, MetadataIndex, StorageMeta} | {
    TensorProperties,
    _StorageInfo,
}
"""The classes whose objects get a state."""
_ENCODING: Any = dcp._MEM_FORMAT_ENCODING


def _member(of: Any, name: str) -> object:
    """As `getattr`, by which Python 3.11.0 to 3.11.3 name a member of an enumeration."""
    if of is not _ENCODING:
        raise ValueError("it asks for the attribute of what is no enumeration")
    return _ENCODING[name]


_ALLOWED: dict[tuple[str, str], object] = {
    **{(_DCP, kind.__name__): kind for kind in _BUILT},
    (_SHARDED, "TensorProperties"): TensorProperties,
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): _StorageInfo,
    ("torch", "Size"): torch.Size,
    ("collections", "OrderedDict"): OrderedDict,
    **{("torch", name): dtype for name, dtype in DTYPES.items()},
    ("torch.serialization", "_get_layout"): torch.serialization._get_layout,
    (_DCP, "_MEM_FORMAT_ENCODING"): _ENCODING,
    (_SHARDED, "MEM_FORMAT_ENCODING"): _ENCODING,
    ("builtins", "getattr"): _member,
    **{
        (module, kind): PureWindowsPath if "Windows" in kind else PurePosixPath
        for module in ("pathlib", "pathlib._local")
        for kind in ("Path", "PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath")
    },
}
_DAMAGE = (
    *(ArithmeticError, AttributeError, BufferError, EOFError, LookupError, MemoryError, RuntimeError, TypeError),
    *(ValueError, pickle.UnpicklingError, struct.error),
)
"""The exceptions that a crafted pickle raises."""


def load_metadata(data: bytes, where: str = ".metadata") -> Metadata:
    """Return what a `.metadata` says. Nothing in it is executed; what is not DCP's own is refused.

    Boxes lie within their tensors, offsets and lengths are not negative, and files have relative paths below the directory.
    Whether boxes cover tensors, and files are there, is not looked at.

    Raises:
        CheckpointDamagedError: it is no metadata of DCP, or holds something else; the message names it.
    """
    if len(data) > MAX_METADATA_BYTES:
        raise CheckpointDamagedError(f"{where} has {len(data)} bytes, more than {MAX_METADATA_BYTES}", where)
    try:
        with gc_paused():
            return _checked(_Unpickler(io.BytesIO(data)).load())
    except _DAMAGE as error:
        # The text of a KeyError is what its key says of itself, which may be nested without end.
        what = "it has an unknown key, or opcode" if isinstance(error, KeyError) else str(error)[:300]
        raise CheckpointDamagedError(f"{where} is not DCP's metadata, or damaged: {what}", where) from error


_BUILD: Callable[[Any], None] = pickle._Unpickler.dispatch[pickle.BUILD[0]]


class _Unpickler(pickle._Unpickler):
    stack: list[Any]

    def find_class(self, module: str, name: str) -> object:
        found = _ALLOWED.get((module, name))
        if found is None:
            raise ValueError(f"it names {module[:80]}.{name[:80]}, which has no place there; nothing was executed")
        return found

    def get_extension(self, code: int) -> None:
        raise ValueError("it has an extension")

    def _build(self) -> None:
        if type(self.stack[-2]) not in _BUILT:
            raise ValueError("it sets the state of what is no object of DCP's")
        _BUILD(self)

    dispatch: ClassVar[dict[int, Callable[[Any], None]]] = {
        **pickle._Unpickler.dispatch,
        pickle.BUILD[0]: _build,
    }


def _checked(metadata: Any) -> Metadata:
    """Return what was unpickled, if it is what DCP writes. Raises `_DAMAGE`."""
    _see(type(metadata) is Metadata, "no Metadata")
    tables = metadata.state_dict_metadata, metadata.storage_data, metadata.planner_data or {}
    _see(all(type(table) in (dict, OrderedDict) for table in tables), "something else where a dict should be")
    for fqn, described in metadata.state_dict_metadata.items():
        _see(type(fqn) is str, "a tensor without a name")
        if type(described) is not BytesStorageMetadata:
            _see(type(described) is TensorStorageMetadata, "something else than tensors and values")
            _check_tensor(described)
    for index, info in metadata.storage_data.items():
        _see(type(index) is MetadataIndex and type(index.fqn) is str, "a record without a name")
        _see(index.offset is None or _are_dims(index.offset), "a record without offsets")
        _see(type(info) is _StorageInfo and _are_dims((info.offset, info.length)), "a record that is nowhere")
        path, transforms = info.relative_path, info.transform_descriptors
        _see(type(path) is str and is_path_within(path), f"{str(path)[:120]!r}, which is no path within the directory")
        are_names = type(transforms) in (list, tuple) and all(type(name) is str for name in transforms)
        _see(transforms is None or are_names, "transforms without names")
    for fqn, path in tables[2].items():
        is_path = type(path) is tuple and all(type(key) in (str, int) for key in path)
        _see(type(fqn) is str and is_path, "a path of keys that is none")
    return metadata


def _check_tensor(described: TensorStorageMetadata) -> None:
    size, properties = described.size, described.properties
    _see(type(properties) is TensorProperties and isinstance(properties.dtype, torch.dtype), "a tensor without a dtype")
    _see(_are_dims(size) and not is_too_large(size, properties.dtype.itemsize), "a tensor of more than 2**62 bytes")
    _see(type(described.chunks) in (list, tuple), "chunks that are no list")
    for chunk in described.chunks:
        _see(type(chunk) is ChunkStorageMetadata, "a chunk that is none")
        is_box = _are_dims(chunk.offsets) and _are_dims(chunk.sizes) and len(chunk.offsets) == len(chunk.sizes)
        _see(is_box and fits(box_of(chunk), size), f"a chunk that is not within {[*size]}")


def _are_dims(dims: Any) -> bool:
    is_listed = type(dims) in (torch.Size, tuple, list) and len(dims) <= MAX_DIMS
    return is_listed and all(type(dim) is int and 0 <= dim <= _MAX_COUNT for dim in dims)


def _see(holds: bool, what: str) -> None:
    if not holds:
        raise ValueError(f"it has {what}")
