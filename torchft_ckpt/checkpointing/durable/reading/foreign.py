"""Reads checkpoints that torch.distributed.checkpoint wrote: ordinary ones, and rank-local ones of `use_collectives=False`.

The metadata of all ranks are put together before anything is planned, and it is proved that they cover every tensor; DCP does
neither, and loads half a tensor without an error where rank-local files meet another mesh. Nothing is unpickled but by torch's
unpickler for weights.

DCP's records have no digests. Of a dense tensor in C order only the bytes that are needed are read, unchecked, or the whole
record, whose CRC-32 is then compared. Any other tensor is read as a whole record into memory, by `torch.load`; one that stands
for more bytes than it has is refused, because DCP writes none.
Whether rank-local files of two saves are mixed in one directory cannot be known: they have no name of their save in common.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata

from torchft_ckpt.checkpointing.durable.format.archive import ArchiveError, PlainTensor, plain_tensor
from torchft_ckpt.checkpointing.durable.names import METADATA
from torchft_ckpt.checkpointing.durable.reading.checkpoint import NUM_THREADS, SavedTensor
from torchft_ckpt.checkpointing.durable.reading.dcp_metadata import (
    MAX_METADATA_BYTES,
    box_of,
    load_metadata,
)
from torchft_ckpt.checkpointing.durable.reading.pieces import (
    GAP_BYTES,
    RUN_BYTES,
    SMALL_BYTES,
    Cell,
    PieceReader,
    Reading,
    copy_box,
    cut_by_span,
    new_memory,
    spans_of,
)
from torchft_ckpt.checkpointing.durable.reading.structure import structure_of_paths
from torchft_ckpt.checkpointing.durable.reading.value_records import load_record
from torchft_ckpt.checkpointing.state.classes import KnownClasses
from torchft_ckpt.checkpointing.state.containers import Path
from torchft_ckpt.checkpointing.state.local_state import some_of
from torchft_ckpt.checkpointing.state.regions import c_strides, region_of
from torchft_ckpt.checkpointing.state.space import as_bytes
from torchft_ckpt.core.boxes import Box, relative_to
from torchft_ckpt.core.coverage import missing_boxes
from torchft_ckpt.errors import (
    CheckpointDamagedError,
    CheckpointError,
    CheckpointNotFoundError,
    StorageError,
    UnsupportedValueError,
)

if TYPE_CHECKING:
    from torchft_ckpt.checkpointing.durable.storage.contract import Storage

_RANK_LOCAL = re.compile(r"\A__(0|[1-9][0-9]{0,6})\.metadata\Z")


class ForeignPiece(NamedTuple):
    """A box of a tensor, and the record that it is in."""

    box: Box
    tensor: SavedTensor
    path: str
    offset: int
    length: int

    def __str__(self) -> str:
        return f"the record in {self.path} of {self.tensor.fqn[:120]} {self.box}"


class ForeignReader(PieceReader[ForeignPiece]):
    """Reads one directory of DCP's. For any number of `read`s, on any thread.

    Args:
        storage: where it is.
        directory: its path there; by default the place itself.
        num_threads: how many reads there are at once.

    Raises:
        CheckpointNotFoundError: there is no metadata of DCP.
        CheckpointDamagedError: the metadata is damaged, or is not only DCP's; a rank's is missing; tensors are not covered; files
            are missing or too short. The message says which.
        UnsupportedValueError: it was written by an extension of DCP, or has tensors that are not dense.
        StorageError: the storage failed.
    """

    def __init__(self, storage: Storage, directory: str = "", *, num_threads: int = NUM_THREADS) -> None:
        super().__init__(num_threads)
        self._storage = storage
        self._directory = directory
        self._tensors: dict[str, SavedTensor] = {}
        self._pieces: dict[str, list[ForeignPiece]] = {}
        self._values: dict[str, tuple[Path, _StorageInfo]] = {}
        for name, metadata in self._read_metadata():
            self._add(name, metadata)
        self._check()

    @property
    def location(self) -> str:
        """What it reads, for messages."""
        return f"{self._storage.location}/{self._directory}" if self._directory else self._storage.location

    @property
    def tensors(self) -> Mapping[str, SavedTensor]:
        """The tensors that are there, by fqn; their `pieces` are not listed."""
        return self._tensors

    def structure_at(self, path: Path) -> Any:
        """Return the containers that were saved below a path, as far as DCP's paths show them.

        Raises:
            StateMismatchError: a key may have been a number or its text.
        """
        tensors = {fqn: tensor.path for fqn, tensor in self._tensors.items()}
        return structure_of_paths(tensors, (path for path, _ in self._values.values()), path)

    def values(self, names: Collection[str] | None = None) -> dict[str, tuple[Path, object]]:
        """Return the values that are no tensors, by fqn, with the keys that lead to them. Of several ranks' the first one's.

        Args:
            names: of those that are wanted; default: all.

        Raises:
            CheckpointDamagedError: a record is damaged.
            UnsupportedValueError: one needs more than torch loads with `weights_only=True`.
            StorageError: one could not be read.
        """
        return {
            fqn: (path, self._load_value(fqn, info))
            for fqn, (path, info) in self._values.items()
            if names is None or fqn in names
        }

    def readable_values(self) -> tuple[dict[str, object], dict[str, CheckpointError]]:
        """Return the values that can be read, by fqn, and why others cannot."""
        readable: dict[str, object] = {}
        unreadable: dict[str, CheckpointError] = {}
        for fqn, (_, info) in self._values.items():
            try:
                readable[fqn] = self._load_value(fqn, info)
            except CheckpointError as error:
                unreadable[fqn] = error
        return readable, unreadable

    def own(self, replica_id: str, rank: int, classes: KnownClasses | None = None) -> object | None:
        """Return None: DCP keeps nothing for one rank alone."""
        return None

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
                pieces.append(ForeignPiece(box, known, self._path(info.relative_path), info.offset, info.length))

    def _see(self, fqn: str, info: _StorageInfo) -> None:
        if info.transform_descriptors:
            how = ", ".join(info.transform_descriptors)[:200]
            raise UnsupportedValueError(f"{self.location}: {fqn[:120]} was written by extensions of DCP: {how}", fqn)

    def _check(self) -> None:
        """See that every tensor is covered, and every record within its file."""
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
        for path, size in self._in_threads(checks):
            if size is None or size < ends[path]:
                raise self._damaged(
                    f"is not whole: {path} {'is not there' if size is None else f'has {size} bytes'}, {ends[path]} are needed"
                )

    # Reading

    def _pieces_of(self, name: str) -> Iterable[ForeignPiece]:
        return self._pieces[name]

    def _carry_out(self, cells: Sequence[Cell[ForeignPiece]], reading: Reading[ForeignPiece]) -> None:
        by_piece: dict[int, list[Cell[ForeignPiece]]] = {}
        for cell in cells:
            by_piece.setdefault(id(cell.piece), []).append(cell)
        self._in_threads([self._unit(of_piece, reading) for of_piece in _in_file_order(by_piece.values())])

    def _unit(self, cells: list[Cell[ForeignPiece]], reading: Reading[ForeignPiece]) -> Callable[[], None]:
        def read() -> None:
            piece = cells[0].piece
            try:
                self._read_piece(piece, cells, reading)
            except ArchiveError as error:
                damage = CheckpointDamagedError(f"{piece} is damaged: {error}", piece.path)
                damage.__cause__ = error
                reading.fail(piece, cells, damage)
            except (CheckpointDamagedError, UnsupportedValueError, StorageError) as error:
                reading.fail(piece, cells, error)

        return read

    def _read_piece(
        self, piece: ForeignPiece, cells: Sequence[Cell[ForeignPiece]], reading: Reading[ForeignPiece]
    ) -> None:
        itemsize = piece.tensor.dtype.itemsize
        if piece.length <= SMALL_BYTES:
            record = self._fetch(piece, 0, piece.length)
            plain = plain_tensor(lambda start, stop: record[start:stop], len(record))
            if plain is not None:
                self._check_kind(piece, plain.dtype, plain.shape)
                data = memoryview(record)[plain.start : plain.start + piece.box.volume * itemsize]
                _check_crc(plain, zlib.crc32(data))
                _give(data, piece, cells, reading)
                return
        else:
            plain = plain_tensor(lambda start, stop: self._fetch(piece, start, stop), piece.length)
            if plain is not None:
                self._check_kind(piece, plain.dtype, plain.shape)
                self._read_plain(piece, plain, cells, reading)
                return
            record = self._fetch(piece, 0, piece.length)
        tensor = load_record(record, str(piece))
        if not isinstance(tensor, torch.Tensor) or not has_elements_here(tensor):
            raise UnsupportedValueError(f"{piece} holds a {type(tensor).__qualname__}, no dense tensor", str(piece))
        self._check_kind(piece, tensor.dtype, tuple(tensor.shape))
        held = tensor.untyped_storage().nbytes()
        if held < piece.box.volume * itemsize:  # DCP gives an expanded tensor memory of its own before it writes it
            raise CheckpointDamagedError(
                f"{piece} is damaged: it has {held} bytes for {piece.box.volume * itemsize}", piece.path
            )
        host = tensor.detach().resolve_conj().resolve_neg().contiguous()
        _give(as_bytes(host).numpy().data, piece, cells, reading)

    def _read_plain(
        self,
        piece: ForeignPiece,
        plain: PlainTensor,
        cells: Sequence[Cell[ForeignPiece]],
        reading: Reading[ForeignPiece],
    ) -> None:
        """Read what is needed of a large dense tensor, bit by bit."""
        itemsize, strides = piece.tensor.dtype.itemsize, c_strides(piece.box.sizes)
        for cell in cells:
            crc = 0
            for box in cut_by_span(cell.box, strides, itemsize, RUN_BYTES):
                region = region_of(0, strides, relative_to(box, piece.box), itemsize)
                memory = new_memory(region.stop - region.start)
                for low, high in spans_of(region, GAP_BYTES):
                    part = memory[low - region.start : high - region.start]
                    self._storage.read_into(piece.path, piece.offset + plain.start + low, part)
                    self._count(len(part))
                    crc = zlib.crc32(part, crc)
                reading.is_written = True
                copy_box(memory, region.start, piece.box, box, cell.target, itemsize)
            if cell.box == piece.box:
                _check_crc(plain, crc)

    def _check_kind(self, piece: ForeignPiece, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
        if (dtype, shape) != (piece.tensor.dtype, piece.box.sizes):
            raise CheckpointDamagedError(f"{piece} holds a {dtype}{[*shape]}", piece.path)

    def _fetch(self, piece: ForeignPiece, start: int, stop: int) -> bytes:
        self._count(stop - start)
        return self._storage.read(piece.path, piece.offset + start, piece.offset + stop)

    def _load_value(self, fqn: str, info: _StorageInfo) -> object:
        path = self._path(info.relative_path)
        record = self._storage.read(path, info.offset, info.offset + info.length)
        return load_record(record, f"the record in {path} of the value {fqn[:120]}")

    def _path(self, name: str) -> str:
        return f"{self._directory}/{name}" if self._directory else name

    def _damaged(self, what: str) -> CheckpointDamagedError:
        return CheckpointDamagedError(f"{self.location} {what}", self.location)


def has_elements_here(tensor: torch.Tensor) -> bool:
    """Whether a tensor that was read from a record is dense and has elements: records can hold meta and nested ones."""
    return tensor.layout is torch.strided and tensor.is_cpu and not tensor.is_nested


def _in_file_order(pieces: Iterable[list[Cell[ForeignPiece]]]) -> list[list[Cell[ForeignPiece]]]:
    return sorted(pieces, key=lambda cells: (cells[0].piece.path, cells[0].piece.offset))


def _check_crc(plain: PlainTensor, crc: int) -> None:
    if plain.crc is not None and plain.crc != crc:
        raise ArchiveError("its data do not have their checksum")


def _give(
    data: memoryview,
    piece: ForeignPiece,
    cells: Sequence[Cell[ForeignPiece]],
    reading: Reading[ForeignPiece],
) -> None:
    reading.is_written = True
    for cell in cells:
        copy_box(data, 0, piece.box, cell.box, cell.target, piece.tensor.dtype.itemsize)
