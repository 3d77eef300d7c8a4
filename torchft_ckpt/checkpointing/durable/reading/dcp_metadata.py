"""DCP's `.metadata`: written for our checkpoints, so that plain `torch.distributed.checkpoint` reads them, and read of its own.

It is a pickle. This is the one file of the package that writes one; reading is left to `inert_pickle`, which executes nothing:
each object is made here, of values whose types were checked. DCP's own readers do unpickle it, with all that this means.
"""

from __future__ import annotations

import dataclasses
import pickle
from collections.abc import Callable, Sequence
from typing import TypeVar, cast

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

from torchft_ckpt.checkpointing.durable.format.inert_pickle import (
    InertPickleError,
    Made,
    Mapping,
    Name,
    check_hashes,
    read_pickle,
)
from torchft_ckpt.checkpointing.durable.format.manifest import is_too_large
from torchft_ckpt.checkpointing.durable.reading.checkpoint import Checkpoint, Piece, SavedTensor, minimal_cover
from torchft_ckpt.checkpointing.durable.storage.contract import is_path_within
from torchft_ckpt.checkpointing.state.collector import collector_paused
from torchft_ckpt.checkpointing.state.dtypes import DTYPES
from torchft_ckpt.checkpointing.state.format import MAX_DIMS
from torchft_ckpt.core.boxes import Box
from torchft_ckpt.core.coverage import subtract
from torchft_ckpt.errors import CheckpointDamagedError

MAX_METADATA_BYTES = 512 * 1024 * 1024
_PROTOCOL = 4
_VERSION = "1.0.0"
_MAX_COUNT = 2**62
_MAX_MEMBERS = 16
"""Of an object. DCP's have up to five."""
_MAX_PATH_KEYS = 256
_MAX_PATH_CHARS = 16 * 1024
_DCP = "torch.distributed.checkpoint.metadata"
_FILES = "torch.distributed.checkpoint.filesystem"
_SHARDED = "torch.distributed._shard.sharded_tensor.metadata"
_CLASSES = {
    **{Name(_DCP, kind): kind for kind in ("Metadata", "TensorStorageMetadata", "BytesStorageMetadata")},
    **{Name(_DCP, kind): kind for kind in ("ChunkStorageMetadata", "MetadataIndex", "StorageMeta")},
    **{Name(module, "TensorProperties"): "TensorProperties" for module in (_DCP, _SHARDED)},
    Name(_FILES, "_StorageInfo"): "_StorageInfo",
    Name("torch", "Size"): "Size",
    Name("collections", "OrderedDict"): "OrderedDict",
}
_DTYPES = {Name("torch", name): dtype for name, dtype in DTYPES.items()}
_UNUSED = frozenset(
    {
        # They are in the properties of tensors and in `storage_meta`, and nothing is made of them here.
        Name(_DCP, "_MEM_FORMAT_ENCODING"),
        Name(_SHARDED, "MEM_FORMAT_ENCODING"),
        Name("builtins", "getattr"),  # by which Python 3.11.0 to 3.11.3 name a member of an enumeration
        Name("torch.serialization", "_get_layout"),
        *(
            Name(module, kind)
            for module in ("pathlib", "pathlib._local")
            for kind in ("Path", "PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath")
        ),
    }
)
_ALLOWED = frozenset({*_CLASSES, *_DTYPES, *_UNUSED})
_T = TypeVar("_T")


# Writing


def build_metadata(checkpoint: Checkpoint) -> bytes:
    """Return the `.metadata` of a checkpoint whose files all lie in one directory.

    Where pieces overlap, those that the others make superfluous are left out: each element is read once, or nearly so.

    Raises:
        CheckpointDamagedError: pieces that are needed begin at the same element, and DCP, which names them by that, would take
            one for the other.
    """
    described: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
    paths: dict[str, tuple[str | int, ...]] = {}
    stored: dict[MetadataIndex, _StorageInfo] = {}
    with collector_paused():
        for tensor in checkpoint.tensors.values():
            if tensor.fqn in checkpoint.values:
                continue  # an array, which DCP takes for a value
            pieces = _pieces_by_offsets(tensor)
            paths[tensor.fqn] = tensor.path
            described[tensor.fqn] = TensorStorageMetadata(
                properties=TensorProperties(dtype=tensor.dtype),
                size=torch.Size(tensor.shape),
                chunks=[
                    ChunkStorageMetadata(torch.Size(piece.box.offsets), torch.Size(piece.box.sizes)) for piece in pieces
                ],
            )
            for number, piece in enumerate(pieces):
                entry = piece.entry
                file = piece.part.manifest.files[entry.file].name
                index = MetadataIndex(tensor.fqn, torch.Size(piece.box.offsets), number)
                stored[index] = _StorageInfo(file, entry.offset, entry.length)
        for fqn, value in checkpoint.values.items():
            entry_of_value = value.entry
            paths[fqn] = value.path
            described[fqn] = BytesStorageMetadata()
            file = value.part.manifest.files[entry_of_value.file].name
            stored[MetadataIndex(fqn)] = _StorageInfo(file, entry_of_value.offset, entry_of_value.length)
        metadata = Metadata(
            state_dict_metadata=described,
            planner_data=paths,
            storage_data=stored,
            storage_meta=StorageMeta(save_id=checkpoint.name.save_id),
        )
        _set_version(metadata, _VERSION)
        return pickle.dumps(metadata, protocol=_PROTOCOL)


def _pieces_by_offsets(tensor: SavedTensor) -> list[Piece]:
    """Return a cover in which no two pieces begin at the same element."""
    candidates = tensor
    while True:
        try:
            pieces = minimal_cover(candidates)
        except ValueError as error:
            raise CheckpointDamagedError(f"{tensor.fqn[:120]} is in too many pieces: {error}", tensor.fqn) from error
        first: dict[tuple[int, ...], Piece] = {}
        twins = [piece for piece in pieces if first.setdefault(piece.box.offsets, piece) is not piece]
        if not twins:
            return pieces
        for out in (twins[0], first[twins[0].box.offsets]):
            rest = [piece for piece in candidates.pieces if piece.box != out.box]
            if not subtract([out.box], [piece.box for piece in rest]):
                candidates = candidates._replace(pieces=rest)
                break
        else:
            raise CheckpointDamagedError(
                f"{tensor.fqn[:120]}: DCP cannot tell {twins[0].box} from {first[twins[0].box.offsets].box}, which begins "
                "at the same element, and both are needed; torchft_ckpt reads this checkpoint all the same",
                tensor.fqn,
            )


def _set_version(metadata: Metadata, version: str | None) -> None:
    if any(member.name == "version" for member in dataclasses.fields(Metadata)):
        metadata.version = version  # newer than torch 2.7


# Reading


def load_metadata(data: bytes, where: str = ".metadata") -> Metadata:
    """Return what a `.metadata` says. Nothing in it is executed; what is not DCP's own is refused.

    Boxes lie within their tensors, offsets and lengths are not negative, and files have relative paths below the directory.
    Whether boxes cover tensors, and files are there, is not looked at. `storage_meta` has no `checkpoint_id`.

    Args:
        data: of the file.
        where: its name, for messages.

    Raises:
        CheckpointDamagedError: it is no metadata of DCP, or holds something else; the message names it.
    """
    if len(data) > MAX_METADATA_BYTES:
        raise CheckpointDamagedError(f"{where} has {len(data)} bytes, more than {MAX_METADATA_BYTES}", where)
    try:
        with collector_paused():
            return _Maker(len(data)).metadata(read_pickle(data, _ALLOWED))
    except InertPickleError as error:
        raise CheckpointDamagedError(f"{where} is not DCP's metadata, or damaged: {error}", where) from error


class _Maker:
    """Makes DCP's objects of what a pickle describes. What the pickle shares is made once.

    Args:
        num_bytes: of the pickle. What tensors share is looked at for each of them: chunks of all together at most so often.
    """

    def __init__(self, num_bytes: int) -> None:
        self._known: dict[tuple[int, str], object] = {}
        self._max_chunks = num_bytes

    def metadata(self, root: object) -> Metadata:
        """Return the whole of it."""
        state = self._state(root, "Metadata")
        described = self._pairs(state.get("state_dict_metadata"))
        self._count_chunks(described)
        stored = [
            (self._once(index, self._index), self._once(info, self._info))
            for index, info in self._pairs(state.get("storage_data"))
        ]
        check_hashes((hash(index) for index, _ in stored), "offsets")
        metadata = Metadata(
            state_dict_metadata={self._text(fqn): self._once(value, self._described) for fqn, value in described},
            planner_data=self._paths(state.get("planner_data")),
            storage_data=dict(stored),
            storage_meta=self._storage_meta(state.get("storage_meta")),
        )
        version = state.get("version")
        _set_version(metadata, None if version is None else self._text(version))
        return metadata

    def _once(self, value: object, make: Callable[[object], _T]) -> _T:
        key = (id(value), make.__name__)  # alive, because the root holds it
        if key not in self._known:
            self._known[key] = make(value)
        return cast(_T, self._known[key])

    def _count_chunks(self, described: Sequence[tuple[object, object]]) -> None:
        """See that tensors have no more chunks than are written there: of a list that they share each is looked at for each."""
        num_chunks = 0
        for _, value in described:
            if _kind(value) != "BytesStorageMetadata":
                num_chunks += len(self._sequence(self._state(value, "TensorStorageMetadata").get("chunks")))
                if num_chunks > self._max_chunks:
                    raise InertPickleError(f"its tensors have more chunks than it has bytes, {self._max_chunks}")

    def _described(self, value: object) -> TensorStorageMetadata | BytesStorageMetadata:
        if _kind(value) == "BytesStorageMetadata":
            return BytesStorageMetadata()
        state = self._state(value, "TensorStorageMetadata")
        size = self._dims(state.get("size"))
        chunks = self._once(state.get("chunks"), self._chunks)
        properties = self._once(state.get("properties"), self._properties)
        if is_too_large(size, properties.dtype.itemsize):
            raise InertPickleError(f"a tensor of {[*size]} has more than 2**62 bytes")
        for chunk in chunks:
            inside = len(chunk.sizes) == len(size) and all(
                low + length <= whole for low, length, whole in zip(chunk.offsets, chunk.sizes, size, strict=True)
            )
            if not inside:
                raise InertPickleError(f"a chunk at {[*chunk.offsets]} is not within {[*size]}")
        return TensorStorageMetadata(properties, size, chunks)

    def _chunks(self, value: object) -> list[ChunkStorageMetadata]:
        return [self._once(item, self._chunk) for item in self._sequence(value)]

    def _chunk(self, value: object) -> ChunkStorageMetadata:
        state = self._state(value, "ChunkStorageMetadata")
        offsets, sizes = self._dims(state.get("offsets")), self._dims(state.get("sizes"))
        if len(offsets) != len(sizes):
            raise InertPickleError("a chunk has other dimensions than its offsets")
        return ChunkStorageMetadata(offsets, sizes)

    def _properties(self, value: object) -> TensorProperties:
        state = value.state if isinstance(value, Made) and _kind(value) == "TensorProperties" else None
        dtype = _DTYPES.get(state[0]) if isinstance(state, tuple) and state and type(state[0]) is Name else None
        if dtype is None or not isinstance(state, tuple):
            raise InertPickleError("a tensor has no dtype that is known here")
        layout = state[1] if len(state) > 1 else None
        properties = TensorProperties(dtype=dtype)
        if isinstance(layout, Made) and layout.arguments != ("torch.strided",):
            properties.layout = torch.sparse_coo  # or another that is not strided: nothing here reads any of these
        properties.requires_grad = len(state) > 2 and state[2] is True
        if len(state) > 5 and state[5] is not None and hasattr(properties, "strides"):
            properties.strides = tuple(self._dims(state[5]))  # newer than torch 2.13; not read here
        return properties

    def _index(self, value: object) -> MetadataIndex:
        state = self._state(value, "MetadataIndex")
        offset, number = state.get("offset"), state.get("index")
        if number is not None and type(number) is not int:
            raise InertPickleError("an index is no number")
        return MetadataIndex(self._text(state.get("fqn")), None if offset is None else self._dims(offset), number)

    def _info(self, value: object) -> _StorageInfo:
        state = self._state(value, "_StorageInfo")
        path = self._text(state.get("relative_path"))
        if not is_path_within(path):
            raise InertPickleError(f"{path[:120]!r} is no path within the directory")
        info = _StorageInfo(path, _count(state.get("offset")), _count(state.get("length")))
        if state.get("transform_descriptors") is not None:
            info.transform_descriptors = self._once(state["transform_descriptors"], self._names)
        return info

    def _names(self, value: object) -> list[str]:
        return [self._text(name) for name in self._sequence(value)]

    def _storage_meta(self, value: object) -> StorageMeta | None:
        if value is None:
            return None
        state = self._state(value, "StorageMeta")
        meta = StorageMeta()
        for member in ("save_id", "load_id"):
            text = state.get(member)
            if text is not None:
                setattr(meta, member, self._text(text))
        return meta

    def _paths(self, value: object) -> dict[str, tuple[str | int, ...]] | None:
        if value is None:
            return None
        return {self._text(fqn): self._once(path, self._path) for fqn, path in self._pairs(value)}

    def _path(self, value: object) -> tuple[str | int, ...]:
        if type(value) is not tuple or not all(type(key) in (str, int) for key in value):
            raise InertPickleError("a path of keys is none")
        if len(value) > _MAX_PATH_KEYS or sum(len(key) for key in value if isinstance(key, str)) > _MAX_PATH_CHARS:
            raise InertPickleError(f"a path has more than {_MAX_PATH_KEYS} keys, or {_MAX_PATH_CHARS} characters")
        return value

    def _dims(self, value: object) -> torch.Size:
        if isinstance(value, Made) and _kind(value) == "Size" and len(value.arguments) == 1:
            value = value.arguments[0]
        if type(value) not in (tuple, list):
            raise InertPickleError("a size is none")
        dims = cast("Sequence[object]", value)
        if len(dims) > MAX_DIMS:
            raise InertPickleError(f"a size has {len(dims)} dimensions")
        return torch.Size([_count(dim) for dim in dims])

    def _state(self, value: object, kind: str) -> dict[str, object]:
        """Return the members of an object of a class."""
        state = value.state if isinstance(value, Made) and _kind(value) == kind else None
        if not isinstance(state, Mapping):
            raise InertPickleError(f"where a {kind} should be there is something else")
        if len(state) > _MAX_MEMBERS:
            raise InertPickleError(f"a {kind} has {len(state)} members")
        return {self._text(key): item for key, item in state}

    def _pairs(self, value: object) -> list[tuple[object, object]]:
        if isinstance(value, Mapping):
            return value
        if isinstance(value, Made) and _kind(value) == "OrderedDict":
            return value.items
        raise InertPickleError("where a dict should be there is something else")

    def _sequence(self, value: object) -> Sequence[object]:
        if type(value) not in (list, tuple):
            raise InertPickleError("where a list should be there is something else")
        return cast("Sequence[object]", value)

    def _text(self, value: object) -> str:
        if type(value) is not str:
            raise InertPickleError("where a name should be there is something else")
        return value


def _kind(value: object) -> str | None:
    return _CLASSES.get(value.of) if isinstance(value, Made) else None


def _count(value: object) -> int:
    if type(value) is not int or not 0 <= value <= _MAX_COUNT:
        raise InertPickleError("a number is none, negative or too large")
    return value


def box_of(chunk: ChunkStorageMetadata) -> Box:
    """Return the box of a chunk."""
    return Box(tuple(chunk.offsets), tuple(chunk.sizes))
