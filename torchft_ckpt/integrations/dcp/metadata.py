"""Reads DCP's `.metadata`, which is a pickle, and executes nothing of it. DCP's own readers unpickle whatever it says.

Python's own unpickler reads it, held to plain values and an allow-list: each object is made here, of members whose types were
checked. A `find_class` alone would not do: the unpickler would still set attributes of the classes that are let through, call
them with any arguments and hash any key. The one that is written in C would also take memory for a memo of 2**32 places.
"""

from __future__ import annotations

import io
import pickle
import struct
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, TypeVar, cast

import torch
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
from torchft_ckpt.checkpointing.durable.saving.dcp_metadata import if_known
from torchft_ckpt.checkpointing.durable.storage.contract import is_path_within
from torchft_ckpt.checkpointing.state.dtypes import DTYPES
from torchft_ckpt.checkpointing.state.format import MAX_DIMS
from torchft_ckpt.checkpointing.state.local_state import box_of
from torchft_ckpt.core.boxes.geometry import fits
from torchft_ckpt.errors import CheckpointDamagedError
from torchft_ckpt.memory import gc_paused

MAX_METADATA_BYTES = 512 * 1024 * 1024
_MAX_COUNT = 2**62
_MAX_MEMBERS = 16
"""Of an object. DCP's have up to five."""
_MAX_PATH_KEYS = 256
_MAX_PATH_CHARS = 16 * 1024
"""Of the keys that lead to a tensor together, and of the path of a file."""
_MAX_INDEX = 2**31
_DCP = "torch.distributed.checkpoint.metadata"
_FILES = "torch.distributed.checkpoint.filesystem"
_SHARDED = "torch.distributed._shard.sharded_tensor.metadata"
_LAYOUT, _UNUSED = object(), object()
_PATHS = ("Path", "PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath")
_ALLOWED: dict[tuple[str, str], object] = {
    **{(_DCP, kind.__name__): kind for kind in (Metadata, TensorStorageMetadata, BytesStorageMetadata)},
    **{(_DCP, kind.__name__): kind for kind in (ChunkStorageMetadata, MetadataIndex, StorageMeta)},
    **dict.fromkeys([(_DCP, "TensorProperties"), (_SHARDED, "TensorProperties")], TensorProperties),
    (_FILES, "_StorageInfo"): _StorageInfo,
    ("torch", "Size"): torch.Size,
    ("collections", "OrderedDict"): OrderedDict,
    **{("torch", name): dtype for name, dtype in DTYPES.items()},
    ("torch.serialization", "_get_layout"): _LAYOUT,
    # They are in the properties of tensors and in `storage_meta`, and nothing is made of them.
    (_DCP, "_MEM_FORMAT_ENCODING"): _UNUSED,
    (_SHARDED, "MEM_FORMAT_ENCODING"): _UNUSED,
    ("builtins", "getattr"): _UNUSED,  # by which Python 3.11.0 to 3.11.3 name a member of an enumeration
    **dict.fromkeys([(module, kind) for module in ("pathlib", "pathlib._local") for kind in _PATHS], _UNUSED),
}
_T = TypeVar("_T")
_MAX_ALIKE = 64
"""Keys of one hash, of which each is compared with all others."""
_AS_IN_PYTHON = (
    *(pickle.PROTO, pickle.FRAME, pickle.STOP, pickle.MARK),
    *(pickle.NONE, pickle.NEWTRUE, pickle.NEWFALSE),
    *(pickle.BININT, pickle.BININT1, pickle.BININT2, pickle.LONG1, pickle.BINFLOAT),
    *(pickle.SHORT_BINUNICODE, pickle.BINUNICODE, pickle.BINUNICODE8, pickle.SHORT_BINBYTES, pickle.BINBYTES),
    *(pickle.EMPTY_TUPLE, pickle.TUPLE, pickle.TUPLE1, pickle.TUPLE2, pickle.TUPLE3, pickle.EMPTY_LIST),
    *(pickle.BINPUT, pickle.LONG_BINPUT, pickle.MEMOIZE, pickle.BINGET, pickle.LONG_BINGET),
    *(pickle.GLOBAL, pickle.STACK_GLOBAL),
)
_DAMAGE = (
    *(ArithmeticError, AttributeError, EOFError, LookupError, TypeError, ValueError),
    *(pickle.UnpicklingError, struct.error),
)
"""The exceptions that Python's unpickler raises on a crafted pickle."""


class _PickleError(ValueError):
    """It is no pickle of plain values and objects that were allowed."""


class _Pairs(list[tuple[object, object]]):
    """A dict, as its (key, value) pairs: a hostile key may be nested without end, or be chosen for its hash."""

    __slots__ = ()


def load_metadata(data: bytes, where: str = ".metadata") -> Metadata:
    """Return what a `.metadata` says. Nothing in it is executed; what is not DCP's own is refused.

    Boxes lie within their tensors, offsets and lengths are not negative, and files have relative paths below the directory.
    Whether boxes cover tensors, and files are there, is not looked at. `storage_meta` has no `checkpoint_id`.

    Raises:
        CheckpointDamagedError: it is no metadata of DCP, or holds something else; the message names it.
    """
    if len(data) > MAX_METADATA_BYTES:
        raise CheckpointDamagedError(f"{where} has {len(data)} bytes, more than {MAX_METADATA_BYTES}", where)
    try:
        with gc_paused():
            return _made(_MetadataUnpickler(data).load(), Metadata)
    except _PickleError as error:
        raise CheckpointDamagedError(f"{where} is not DCP's metadata, or damaged: {error}", where) from error


class _MetadataUnpickler(pickle._Unpickler):
    """Makes DCP's objects, each once its members were looked at; what was made is not changed again.

    What a pickle shares is looked at for each that has it: that is bounded by how long each may be.
    """

    stack: list[Any]
    metastack: list[list[Any]]
    pop_mark: Callable[[], list[Any]]

    def __init__(self, data: bytes) -> None:
        super().__init__(io.BytesIO(data))
        self._max_chunks = len(data)
        self._num_chunks = 0
        self._is_made = False

    def load(self) -> object:
        try:
            loaded = super().load()
        except _PickleError:
            raise
        except KeyError as error:
            raise _PickleError(f"it uses the opcode {error}") from error
        except _DAMAGE as error:
            raise _PickleError(f"it is no pickle, or damaged: {str(error)[:200]}") from error
        if self.stack or self.metastack:  # who looks at what is loaded would not see it
            raise _PickleError("it leaves several values")
        return loaded

    def find_class(self, module: str, name: str) -> object:
        found = _ALLOWED.get((module, name))
        if found is None:
            raise _PickleError(f"it names {module[:80]}.{name[:80]}, which has no place there; nothing was executed")
        return found

    def _make(self) -> None:
        arguments = self.stack.pop()
        of = self.stack[-1]
        if of is torch.Size and type(arguments) is tuple and len(arguments) == 1:
            made: object = _dims(arguments[0])
        elif of is _LAYOUT:
            made = torch.strided if arguments == ("torch.strided",) else torch.sparse_coo  # or another that is not read
        elif of is _UNUSED:
            made = None
        elif of is OrderedDict and arguments == ():
            made = _Pairs()
        elif type(of) is type and of in _MADE and arguments == ():
            made = object.__new__(of)
        else:
            raise _PickleError("it calls what is no class, or with what DCP does not write")
        self.stack[-1] = made

    def _build(self) -> None:
        state = self.stack.pop()
        made = self.stack[-1]
        kind = type(made)
        if kind not in _MEMBERS or vars(made):
            raise _PickleError("it sets the state of what is no new object")
        members = state if kind is TensorProperties else _members_of(state, kind.__name__)
        kind.__init__(made, **_MEMBERS[kind](self, members))

    def _append(self, values: list[object]) -> None:
        if type(self.stack[-1]) is not list:
            raise _PickleError("it appends to what is no list")
        self.stack[-1] += values

    def _set_items(self, flat: list[object]) -> None:
        if type(self.stack[-1]) is not _Pairs:
            raise _PickleError("it sets items of what is no dict")
        self.stack[-1] += zip(flat[::2], flat[1::2], strict=True)

    def _take(self, count: int) -> list[object]:
        return [self.stack.pop() for _ in range(count)][::-1]

    dispatch: ClassVar[dict[int, Callable[[Any], None]]] = {
        **{opcode[0]: pickle._Unpickler.dispatch[opcode[0]] for opcode in _AS_IN_PYTHON},
        pickle.EMPTY_DICT[0]: lambda self: self.stack.append(_Pairs()),
        pickle.APPEND[0]: lambda self: self._append(self._take(1)),
        pickle.APPENDS[0]: lambda self: self._append(self.pop_mark()),
        pickle.SETITEM[0]: lambda self: self._set_items(self._take(2)),
        pickle.SETITEMS[0]: lambda self: self._set_items(self.pop_mark()),
        pickle.REDUCE[0]: _make,
        pickle.NEWOBJ[0]: _make,
        pickle.BUILD[0]: _build,
    }

    def _metadata(self, members: dict[str, object]) -> dict[str, object]:
        if self._is_made:
            raise _PickleError("it has a second Metadata")
        self._is_made = True
        described = [(_text(fqn), value) for fqn, value in _pairs(members.get("state_dict_metadata"))]
        num_chunks = 0
        for _, value in described:
            if type(value) is not BytesStorageMetadata:
                num_chunks += len(_made(value, TensorStorageMetadata).chunks)
        self._check_chunks(num_chunks)
        stored = [
            (_made(index, MetadataIndex), _made(info, _StorageInfo))
            for index, info in _pairs(members.get("storage_data"))
        ]
        if max(Counter(hash(index) for index, _ in stored).values(), default=0) > _MAX_ALIKE:
            raise _PickleError("it has offsets that were chosen to have one hash")
        paths, meta, version = (members.get(name) for name in ("planner_data", "storage_meta", "version"))
        return {
            "state_dict_metadata": dict(described),
            "planner_data": None if paths is None else {_text(fqn): _path(path) for fqn, path in _pairs(paths)},
            "storage_data": dict(stored),
            "storage_meta": None if meta is None else _made(meta, StorageMeta),
            **if_known(Metadata, version=None if version is None else _text(version)),
        }

    def _tensor(self, members: dict[str, object]) -> dict[str, object]:
        size, properties = _dims(members.get("size")), _made(members.get("properties"), TensorProperties)
        if is_too_large(size, properties.dtype.itemsize):
            raise _PickleError(f"a tensor of {[*size]} has more than 2**62 bytes")
        listed = _sequence(members.get("chunks"))
        self._num_chunks += len(listed)
        self._check_chunks(self._num_chunks)
        chunks = [_made(chunk, ChunkStorageMetadata) for chunk in listed]
        for chunk in chunks:
            if not fits(box_of(chunk), size):
                raise _PickleError(f"a chunk at {[*chunk.offsets]} is not within {[*size]}")
        return {"size": size, "properties": properties, "chunks": chunks}

    def _check_chunks(self, num_chunks: int) -> None:
        """See that tensors have no more chunks than are written there: of a list that they share each is looked at for each."""
        if num_chunks > self._max_chunks:
            raise _PickleError(f"its tensors have more chunks than it has bytes, {self._max_chunks}")

    def _chunk(self, members: dict[str, object]) -> dict[str, object]:
        offsets, sizes = _dims(members.get("offsets")), _dims(members.get("sizes"))
        if len(offsets) != len(sizes):
            raise _PickleError("a chunk has other dimensions than its offsets")
        return {"offsets": offsets, "sizes": sizes}

    def _properties(self, state: Any) -> dict[str, object]:
        given = state[:6] if type(state) is tuple else ()
        dtype, layout, requires_grad, _, _, strides = (*given, *(None,) * 6)[:6]
        if not isinstance(dtype, torch.dtype):
            raise _PickleError("a tensor has no dtype that is known here")
        return {
            "dtype": dtype,
            "layout": torch.strided if layout is None else layout,
            "requires_grad": requires_grad is True,
            **if_known(TensorProperties, strides=None if strides is None else tuple(_dims(strides))),
        }

    def _index(self, members: dict[str, object]) -> dict[str, object]:
        offset, number = members.get("offset"), members.get("index")
        if number is not None and type(number) is not int:
            raise _PickleError("an index is no number")
        return {
            "fqn": _text(members.get("fqn")),
            "offset": None if offset is None else _dims(offset),
            "index": number,
        }

    def _info(self, members: dict[str, object]) -> dict[str, object]:
        path, transforms = _text(members.get("relative_path")), members.get("transform_descriptors")
        if len(path) > _MAX_PATH_CHARS or not is_path_within(path):
            raise _PickleError(f"{path[:120]!r} is no path within the directory")
        if transforms is not None and len(_sequence(transforms)) > _MAX_MEMBERS:
            raise _PickleError(f"a record went through more than {_MAX_MEMBERS} transforms")
        return {
            "relative_path": path,
            "offset": _count(members.get("offset")),
            "length": _count(members.get("length")),
            "transform_descriptors": None if transforms is None else [_text(name) for name in _sequence(transforms)],
        }

    def _meta(self, members: dict[str, object]) -> dict[str, object]:
        ids = {name: members.get(name) for name in ("save_id", "load_id")}
        return {name: None if value is None else _text(value) for name, value in ids.items()}


_MEMBERS: dict[type, Callable[[_MetadataUnpickler, Any], dict[str, object]]] = {
    Metadata: _MetadataUnpickler._metadata,
    TensorStorageMetadata: _MetadataUnpickler._tensor,
    ChunkStorageMetadata: _MetadataUnpickler._chunk,
    TensorProperties: _MetadataUnpickler._properties,
    MetadataIndex: _MetadataUnpickler._index,
    _StorageInfo: _MetadataUnpickler._info,
    StorageMeta: _MetadataUnpickler._meta,
}
"""The arguments that objects are made with, by their class: those of `__init__` that come of members in a pickle."""
_MADE = frozenset([*_MEMBERS, BytesStorageMetadata])


def _made(value: object, kind: type[_T]) -> _T:
    if type(value) is not kind or not vars(value):
        raise _PickleError(f"where a {kind.__name__} should be there is something else")
    return value


def _members_of(state: object, kind: str) -> dict[str, object]:
    if type(state) is not _Pairs:
        raise _PickleError(f"where a {kind} should be there is something else")
    if len(state) > _MAX_MEMBERS:
        raise _PickleError(f"a {kind} has {len(state)} members")
    return {_text(key): item for key, item in state}


def _pairs(value: object) -> _Pairs:
    if type(value) is not _Pairs:
        raise _PickleError("where a dict should be there is something else")
    return value


def _sequence(value: object) -> Sequence[object]:
    if type(value) not in (list, tuple):
        raise _PickleError("where a list should be there is something else")
    return cast("Sequence[object]", value)


def _text(value: object) -> str:
    if type(value) is not str:
        raise _PickleError("where a name should be there is something else")
    return value


def _count(value: object) -> int:
    if type(value) is not int or not 0 <= value <= _MAX_COUNT:
        raise _PickleError("a number is none, negative or too large")
    return value


def _dims(value: object) -> torch.Size:
    if type(value) not in (torch.Size, tuple, list):
        raise _PickleError("a size is none")
    dims = cast("Sequence[object]", value)
    if len(dims) > MAX_DIMS:
        raise _PickleError(f"a size has {len(dims)} dimensions")
    return torch.Size([_count(dim) for dim in dims])


def _path(value: object) -> tuple[str | int, ...]:
    if type(value) is not tuple or not all(type(key) in (str, int) for key in value):
        raise _PickleError("a path of keys is none")
    if not all(0 <= key <= _MAX_INDEX for key in value if type(key) is int):  # greater ones can all have one hash
        raise _PickleError("a path has a number that is no place in a list")
    if len(value) > _MAX_PATH_KEYS or sum(len(key) for key in value if isinstance(key, str)) > _MAX_PATH_CHARS:
        raise _PickleError(f"a path has more than {_MAX_PATH_KEYS} keys, or {_MAX_PATH_CHARS} characters")
    return value
