"""Reads checkpoints that torch.distributed.checkpoint wrote: ordinary ones, and rank-local ones of `use_collectives=False`.

The metadata of all ranks are put together before anything is planned, and it is proved that they cover every tensor; DCP does
neither, and loads half a tensor without an error where rank-local files meet another mesh. DCP's own load is not used for
another reason, too: it unpickles metadata and plain values as they are, with all that they say.

A record is what `torch.save` makes of a tensor or value. It is read whole, its checksums are compared, where DCP wrote any, and
`torch.load(weights_only=True)` loads it, which executes nothing. What a crafted one has torch do is not bounded: it may take
memory and time, or end the process. A tensor that stands for more bytes than it has is refused, because DCP writes none.
Whether rank-local files of two saves are mixed in one directory cannot be known: they have no name of their save in common.

A `.metadata` is a pickle, of which nothing is executed. Python's own unpickler reads it, held to DCP's classes and plain values;
a `find_class` alone would let it set attributes of the classes that are let through, which everybody has. What comes of it is
looked at whole. What a crafted one costs is not bounded, as with records.
"""

from __future__ import annotations

import io
import pickle
import re
import struct
import threading
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import PurePosixPath, PureWindowsPath
from typing import Any, ClassVar, NamedTuple

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
from torchft_ckpt.checkpointing.durable.format.records import record_problems
from torchft_ckpt.checkpointing.durable.names import METADATA
from torchft_ckpt.checkpointing.durable.reading.checkpoint import SavedTensor
from torchft_ckpt.checkpointing.durable.reading.pieces import (
    Cell,
    PlannedValues,
    Reading,
    StateReader,
    copy_box,
    structure_of_paths,
)
from torchft_ckpt.checkpointing.durable.storage.contract import Storage, is_path_within
from torchft_ckpt.checkpointing.state.classes import KnownClasses
from torchft_ckpt.checkpointing.state.containers import Path, walk
from torchft_ckpt.checkpointing.state.dtypes import DTYPES
from torchft_ckpt.checkpointing.state.format import MAX_DIMS
from torchft_ckpt.checkpointing.state.local_state import box_of, some_of
from torchft_ckpt.checkpointing.state.space import as_bytes, has_elements_here
from torchft_ckpt.core.boxes.geometry import Box, fits, missing_boxes
from torchft_ckpt.errors import (
    CheckpointDamagedError,
    CheckpointNotFoundError,
    StorageError,
    UnsupportedValueError,
)
from torchft_ckpt.memory import gc_paused

_RANK_LOCAL = re.compile(r"\A__(0|[1-9][0-9]{0,6})\.metadata\Z")
_LARGE_BYTES = 64 * 1024 * 1024
"""Of a record. While it is loaded it takes about three times its length; of larger ones one is loaded at a time."""
_CRAFTED = (
    *(ArithmeticError, AssertionError, AttributeError, BufferError, EOFError, ImportError, LookupError, MemoryError),
    *(OSError, RuntimeError, TypeError, ValueError, pickle.UnpicklingError, struct.error, zipfile.BadZipFile),
)
"""The exceptions that a pickle, or a record of `torch.save`, raises that nobody wrote."""
_REFUSED = re.compile(r"GLOBAL ([\w.]{1,200})")


class DCPChunk(NamedTuple):
    """A box of a tensor, and the record that it is in."""

    box: Box
    tensor: SavedTensor
    path: str
    offset: int
    length: int

    def __str__(self) -> str:
        return f"the record in {self.path} of {self.tensor.fqn[:120]} {self.box}"


class DCPReader(StateReader[DCPChunk]):
    """Reads one directory of DCP's. For any number of `read`s, on any thread.

    Args:
        storage: where it is.
        directory: its path there; by default the place itself.

    Raises:
        CheckpointNotFoundError: there is no metadata of DCP.
        CheckpointDamagedError: the metadata is damaged, or is not only DCP's; a rank's is missing; tensors are not covered;
            files are missing or too short. The message says which.
        UnsupportedValueError: it was written by an extension of DCP, or has tensors that are not dense.
        StorageError: the storage failed.
    """

    def __init__(self, storage: Storage, directory: str = "") -> None:
        super().__init__()
        self._storage = storage
        self._directory = directory
        self._tensors: dict[str, SavedTensor] = {}
        self._pieces: dict[str, list[DCPChunk]] = {}
        self._values: dict[str, tuple[Path, _StorageInfo]] = {}
        self._one_large_at_a_time = threading.Lock()
        for name, metadata in self._read_metadata():
            self._add(name, metadata)
        self._check()

    @property
    def location(self) -> str:
        return f"{self._storage.location}/{self._directory}" if self._directory else self._storage.location

    @property
    def tensors(self) -> Mapping[str, SavedTensor]:
        return self._tensors

    def structure_at(self, path: Path) -> Any:
        tensors = {fqn: tensor.path for fqn, tensor in self._tensors.items()}
        return structure_of_paths(tensors, (path for path, _ in self._values.values()), path)

    def plan_values(self, names: Collection[str] | None = None, classes: KnownClasses | None = None) -> PlannedValues:
        values = {
            fqn: (path, self._load_value(fqn, info))
            for fqn, (path, info) in self._values.items()
            if names is None or fqn in names
        }
        return PlannedValues(values.keys(), [], lambda: values)

    # What there is

    def _read_metadata(self) -> Iterator[tuple[str, Metadata]]:
        names = self._storage.names(self._directory)
        ranks = sorted(int(match[1]) for name in names if (match := _RANK_LOCAL.match(name)) is not None)
        if METADATA in names and ranks:
            raise self._damaged(f"has {METADATA} and __{ranks[0]}{METADATA}: two saves are mixed in it")
        if METADATA not in names and not ranks:
            raise CheckpointNotFoundError(f"{self.location} has no {METADATA} of DCP", self.location)
        if ranks and ranks[-1] != len(ranks) - 1:
            absent = next(number for number, rank in enumerate(ranks) if number != rank)
            raise self._damaged(f"has __{ranks[-1]}{METADATA}, but no __{absent}{METADATA}")
        for name in [METADATA] if not ranks else [f"__{rank}{METADATA}" for rank in ranks]:
            path = self._path(name)
            size = self._storage.size(path)
            if size is None or size > MAX_METADATA_BYTES:
                raise self._damaged(f"has a {name} of {size} bytes")
            yield name, load_metadata(self._storage.read(path, 0, size), f"{self.location}/{name}")

    def _add(self, name: str, metadata: Metadata) -> None:
        paths = metadata.planner_data or {}
        stored: Mapping[MetadataIndex, _StorageInfo] = metadata.storage_data
        for fqn, described in metadata.state_dict_metadata.items():
            path = tuple(paths.get(fqn, (fqn,)))
            if isinstance(described, TensorStorageMetadata):
                self._add_tensor(name, fqn, path, described, stored)
                continue
            info = stored.get(MetadataIndex(fqn))
            if info is None:
                raise self._damaged(f"has no record of the value {fqn[:120]}, which {name} lists")
            self._values.setdefault(fqn, (path, info))
            self._see(fqn, info)

    def _add_tensor(
        self,
        name: str,
        fqn: str,
        path: Path,
        described: TensorStorageMetadata,
        stored: Mapping[MetadataIndex, _StorageInfo],
    ) -> None:
        if described.properties.layout is not torch.strided:
            raise UnsupportedValueError(f"{self.location}: {fqn[:120]} is not dense", fqn)
        tensor = SavedTensor(fqn, path, described.properties.dtype, tuple(described.size), [])
        known = self._tensors.setdefault(fqn, tensor)
        if known[:4] != tensor[:4]:
            raise self._damaged(
                f"has {fqn[:120]} as {known.dtype}{[*known.shape]}, and as {tensor.dtype}{[*tensor.shape]} in {name}"
            )
        pieces = self._pieces.setdefault(fqn, [])
        for chunk in described.chunks:
            box = box_of(chunk)
            info = stored.get(MetadataIndex(fqn, chunk.offsets))
            if info is not None and box.volume:
                self._see(fqn, info)
                pieces.append(DCPChunk(box, known, self._path(info.relative_path), info.offset, info.length))

    def _see(self, fqn: str, info: _StorageInfo) -> None:
        if info.transform_descriptors:
            how = ", ".join(info.transform_descriptors)[:200]
            raise UnsupportedValueError(f"{self.location}: {fqn[:120]} was written by extensions of DCP: {how}", fqn)

    def _check(self) -> None:
        holes: list[str] = []
        for fqn, tensor in self._tensors.items():
            try:
                missing = missing_boxes(tensor.shape, [piece.box for piece in self._pieces[fqn]])
            except ValueError as error:
                raise self._damaged(f"has {fqn[:120]} in too many pieces: {error}") from error
            holes += [f"{fqn[:120]} {missing[0]}"] if missing else []
        if holes:
            raise self._damaged(f"is not whole: no rank saved {some_of(holes)}")
        ends: dict[str, int] = {}
        for pieces in self._pieces.values():
            for piece in pieces:
                ends[piece.path] = max(ends.get(piece.path, 0), piece.offset + piece.length)
        for _, info in self._values.values():
            path = self._path(info.relative_path)
            ends[path] = max(ends.get(path, 0), info.offset + info.length)
        checks = [lambda path=path: (path, self._storage.size(path)) for path in ends]
        for path, size in self._parallel_map(checks):
            if size is None or size < ends[path]:
                raise self._damaged(
                    f"is not whole: {path} {'is not there' if size is None else f'has {size} bytes'}, {ends[path]} are needed"
                )

    # Reading

    def _pieces_of(self, name: str) -> Iterable[DCPChunk]:
        return self._pieces[name]

    def _carry_out(self, cells: Sequence[Cell[DCPChunk]], reading: Reading[DCPChunk]) -> None:
        by_piece: dict[int, list[Cell[DCPChunk]]] = {}
        for cell in sorted(cells, key=lambda cell: (cell.piece.path, cell.piece.offset)):
            by_piece.setdefault(id(cell.piece), []).append(cell)
        self._parallel_map([partial(self._read_piece, of_piece, reading) for of_piece in by_piece.values()])

    def _read_piece(self, cells: list[Cell[DCPChunk]], reading: Reading[DCPChunk]) -> None:
        """Read a record, and give each cell what it takes from it."""
        piece = cells[0].piece
        try:
            with self._one_large_at_a_time if piece.length > _LARGE_BYTES else nullcontext():
                data = as_bytes(self._load_piece(piece)).numpy().data
                reading.is_written = True
                for cell in cells:
                    copy_box(data, 0, piece.box, cell.box, cell.want)
        except (CheckpointDamagedError, UnsupportedValueError, StorageError) as error:
            reading.fail(piece, cells, error)

    def _load_piece(self, piece: DCPChunk) -> torch.Tensor:
        self._count(piece.length)
        tensor = load_record(self._storage.read(piece.path, piece.offset, piece.offset + piece.length), str(piece))
        if not isinstance(tensor, torch.Tensor) or not has_elements_here(tensor):
            raise UnsupportedValueError(f"{piece} holds a {type(tensor).__qualname__}, no dense tensor", str(piece))
        if (tensor.dtype, tuple(tensor.shape)) != (piece.tensor.dtype, piece.box.sizes):
            raise CheckpointDamagedError(f"{piece} holds a {tensor.dtype}{[*tensor.shape]}", piece.path)
        held = tensor.untyped_storage().nbytes()
        if held < tensor.nbytes:  # DCP gives an expanded tensor memory of its own before it writes it
            raise CheckpointDamagedError(f"{piece} is damaged: it has {held} bytes for {tensor.nbytes}", piece.path)
        return tensor.detach().resolve_conj().resolve_neg().contiguous()

    def _load_value(self, fqn: str, info: _StorageInfo) -> object:
        path = self._path(info.relative_path)
        record = self._storage.read(path, info.offset, info.offset + info.length)
        return load_record(record, f"the record in {path} of the value {fqn[:120]}")

    def _path(self, name: str) -> str:
        return f"{self._directory}/{name}" if self._directory else name

    def _damaged(self, what: str) -> CheckpointDamagedError:
        return CheckpointDamagedError(f"{self.location} {what}", self.location)


def load_record(record: bytes, what: str) -> object:
    """Return what `torch.save` wrote, as far as `torch.load(weights_only=True)` takes it.

    Raises:
        CheckpointDamagedError: it is no record, or damaged.
        UnsupportedValueError: it is whole, and needs a class that is not known to be harmless; the message names it.
    """
    if problems := record_problems(record, what):
        raise CheckpointDamagedError(problems[0], what)
    try:
        loaded = torch.load(io.BytesIO(record), map_location="cpu", weights_only=True)
        held = [
            one.untyped_storage()
            for _, one in walk([loaded])
            if isinstance(one, torch.Tensor) and has_elements_here(one)
        ]
        if any(storage.nbytes() > len(record) for storage in held):  # torch 2.9 has read what lies behind the record
            raise ValueError("it claims more bytes than it has")
        return loaded
    except pickle.UnpicklingError as error:
        named = _REFUSED.search(str(error))
        needed = "more than weights" if named is None else named[1]
        raise UnsupportedValueError(
            f"{what} is not read, because it could execute code: it needs {needed}", what
        ) from error
    except _CRAFTED as error:
        raise CheckpointDamagedError(f"{what} cannot be read: {str(error)[:200]}", what) from error


# What `.metadata` says


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
    except _CRAFTED as error:
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
    """Return what was unpickled, if it is what DCP writes. Raises `_CRAFTED`."""
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
