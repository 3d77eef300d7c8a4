"""Finds durable checkpoints in a place, and says what one holds: in a row of a list, to verify all of it, or to put it into a
file.

Of each 64 KiB there is a digest to verify. State of one rank alone (random number generators, its position in the data) is left
out of a file. It prints nothing, writes no files and changes nothing.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from enum import Enum
from typing import NamedTuple, NoReturn

import msgspec
import torch
from torch.distributed.checkpoint.metadata import Metadata

from torchft_ckpt.checkpointing.durable.format.manifest import MAX_MANIFEST_BYTES, digest_table_bytes
from torchft_ckpt.checkpointing.durable.names import (
    METADATA,
    TEMPORARY,
    CheckpointName,
    PartName,
    parse_checkpoint,
    parts_in,
)
from torchft_ckpt.checkpointing.durable.reading.checkpoint import (
    Checkpoint,
    differing_copies,
    drifted_replicas,
    is_closed,
    notes_on,
    read_checkpoint,
    why_not_whole,
)
from torchft_ckpt.checkpointing.durable.reading.reader import CheckpointReader
from torchft_ckpt.checkpointing.durable.saving.dcp_metadata import build_metadata
from torchft_ckpt.checkpointing.durable.storage.contract import Storage
from torchft_ckpt.checkpointing.durable.storage.fsspec_storage import open_storage
from torchft_ckpt.checkpointing.state.local_state import some_of
from torchft_ckpt.checkpointing.state.target import Want
from torchft_ckpt.cli.output import aligned, format_bytes, leaves
from torchft_ckpt.cli.safetensors_file import Content, PendingTensor, in_file_order
from torchft_ckpt.core.boxes.geometry import whole
from torchft_ckpt.core.text import one_line
from torchft_ckpt.errors import (
    CheckpointDamagedError,
    CheckpointError,
    ConfigError,
    StorageError,
    UnsupportedValueError,
)
from torchft_ckpt.integrations.dcp.reader import DCPReader, load_metadata
from torchft_ckpt.threads import parallel_map

_NUM_THREADS = 8


class CheckpointPlace(NamedTuple):
    """The place of a checkpoint, of which nothing was read yet."""

    storage: Storage
    name: CheckpointName
    """Also its directory in the storage."""
    shown: str
    """The name that its directory really has: whoever copied it may have given it another."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenedCheckpoint:
    """A checkpoint whose manifests were read."""

    place: CheckpointPlace
    reader: CheckpointReader
    why_not_whole: str | None

    @property
    def checkpoint(self) -> Checkpoint:
        """What the manifests say."""
        return self.reader.checkpoint

    @property
    def num_bytes(self) -> int:
        """Of its tensors, each counted once."""
        return sum(math.prod(tensor.shape) * tensor.dtype.itemsize for tensor in self.reader.tensors.values())


def find_checkpoints(location: str, step: int | None = None) -> list[CheckpointPlace]:
    """Return the checkpoints of a place, the newest first.

    Args:
        location: a directory with checkpoints, or of one checkpoint; a path, or a URL of fsspec.
        step: only those of this step.

    Raises:
        ConfigError: there is none, or the location cannot be used.
        StorageError: the storage failed.
    """
    places = _places_of(location)
    if not places:
        raise ConfigError(f"{location}: there is no checkpoint", location)
    found = [place for place in places if step is None or place.name.step == step]
    if not found:
        steps = sorted({place.name.step for place in places}, reverse=True)
        known = f"{', '.join(map(str, steps[:20]))}{', ...' if len(steps) > 20 else ''}"
        raise ConfigError(f"{location}: there is no checkpoint of step {step}; its steps are {known}", location)
    return sorted(found, key=lambda place: (place.name, place.shown), reverse=True)


def open_checkpoint(place: CheckpointPlace) -> OpenedCheckpoint:
    """Read what a checkpoint says of itself, and whether it is whole."""
    checkpoint = read_checkpoint([place.storage], place.name)
    why_not = why_not_whole(checkpoint)
    return OpenedCheckpoint(place=place, reader=CheckpointReader(checkpoint), why_not_whole=why_not)


def _places_of(location: str) -> list[CheckpointPlace]:
    if not location:
        raise ConfigError("DIR is empty: a path or a URL was expected", "DIR")
    is_url = "://" in location or "::" in location
    path = location.rstrip("/") if is_url else os.path.realpath(location)
    above, _, last = path.rpartition("/")
    name = parse_checkpoint(last)
    if name is not None:
        storage = open_storage(above or "/")
        return [CheckpointPlace(storage, name, last)] if storage.names(last) else []
    storage = open_storage(path)
    entries = storage.names()
    if parts := parts_in(entries):
        return [_renamed(storage, "", last, parts)]
    if METADATA in entries:
        raise ConfigError(f"{location}: torch.distributed.checkpoint wrote it; its format_utils read it", location)
    places = [CheckpointPlace(storage, name, entry) for entry in entries if (name := parse_checkpoint(entry))]
    others = [entry for entry in entries if parse_checkpoint(entry) is None and TEMPORARY not in entry]
    inside = parallel_map(lambda entry: _names_in(storage, entry), others, _NUM_THREADS)
    contents = dict(zip(others, inside, strict=True))
    places += [_renamed(storage, at, at, parts) for at, names in contents.items() if (parts := parts_in(names))]
    dcps = [entry for entry, names in contents.items() if METADATA in names]
    if dcps and not places:
        raise ConfigError(
            f"{location}: torch.distributed.checkpoint wrote {some_of(dcps, ', ')}; its format_utils read it", location
        )
    return places


def _names_in(storage: Storage, entry: str) -> list[str]:
    try:
        return storage.names(entry)
    except StorageError:
        return []  # no checkpoint that could be read


def _renamed(storage: Storage, directory: str, shown: str, parts: list[PartName]) -> CheckpointPlace:
    """Return the place of a checkpoint of ours whose directory has another name than it was saved under."""
    for part in parts:
        try:
            path = f"{directory}/{part.manifest}".lstrip("/")
            _, _, body = storage.read(path, 0, min(storage.size(path) or 0, MAX_MANIFEST_BYTES)).partition(b"\n")
            name = parse_checkpoint(_DECODER.decode(body).checkpoint)
        except (StorageError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            continue
        if name is not None:
            return CheckpointPlace(_Renamed(storage, name, directory), name, shown)
    name = CheckpointName(0, "unknown")  # no manifest can be read: whoever reads them says why
    return CheckpointPlace(_Renamed(storage, name, directory), name, shown)


class _SaysItsName(msgspec.Struct):
    checkpoint: str


_DECODER = msgspec.json.Decoder(_SaysItsName)


class _Renamed(Storage):
    """A storage in which the directory of one checkpoint has the name that it was saved under. For reading alone."""

    def __init__(self, storage: Storage, name: CheckpointName, directory: str) -> None:
        self.location = storage.location
        self._storage = storage
        self._name = str(name)
        self._directory = directory

    def _at(self, path: str) -> str:
        head, _, file = path.partition("/")
        return f"{self._directory}/{file}".strip("/") if head == self._name else path

    def names(self, directory: str = "") -> list[str]:
        return self._storage.names(self._at(directory))

    def size(self, path: str) -> int | None:
        return self._storage.size(self._at(path))

    def read_into(self, path: str, start: int, memory: memoryview) -> None:
        self._storage.read_into(self._at(path), start, memory)

    def _refuse(self, *_: object, **__: object) -> NoReturn:
        raise StorageError(f"{self.location}: it is only read here", self.location)

    make_directory = create = remove_checkpoint = _refuse


# What people and programs are told


@dataclass(frozen=True, slots=True, kw_only=True)
class Described:
    """The row of a checkpoint in `ls`. If it is not whole, the tensors are those that are known."""

    step: int
    name: str
    is_whole: bool
    why_not_whole: str | None
    num_tensors: int | None
    """None if nothing is known."""
    bytes: int | None
    """Of the tensors, each counted once."""
    bytes_on_disk: int
    num_replicas: int | None
    num_ranks: int | None
    """Of each replica."""
    num_parts: int
    """Ranks whose own part is there."""
    num_filled: int
    """Parts that were written in place of others."""
    num_files: int
    """Of data."""
    has_metadata: bool
    """Plain DCP can read it."""
    written_at_s: float | None = None
    """Unix time, by the clock of who wrote the last part."""
    left_aside: list[str] = field(default_factory=list)
    """Parts that are there and do not count."""
    divergent: list[str] = field(default_factory=list)
    """Tensors of which replicas did not hold the same bytes."""


def describe(opened: OpenedCheckpoint) -> Described:
    """Return what there is to say.

    Raises:
        StorageError: the storage failed.
    """
    storage, name, checkpoint = opened.place.storage, opened.place.name, opened.checkpoint
    names = storage.names(str(name))
    sizes = parallel_map(storage.size, [f"{name}/{one}" for one in names], _NUM_THREADS)
    manifests = [part.manifest for part in checkpoint.parts]
    return Described(
        step=name.step,
        name=opened.place.shown,
        is_whole=opened.why_not_whole is None,
        why_not_whole=opened.why_not_whole,
        num_tensors=len(opened.reader.tensors) if manifests else None,
        bytes=opened.num_bytes if manifests else None,
        bytes_on_disk=sum(size or 0 for size in sizes),
        num_replicas=max((manifest.num_replicas for manifest in manifests), default=None),
        num_ranks=max((manifest.num_ranks for manifest in manifests), default=None),
        num_parts=sum(manifest.fill == 0 for manifest in manifests),
        num_filled=sum(manifest.fill > 0 for manifest in manifests),
        num_files=sum(one.endswith(".distcp") for one in names),
        has_metadata=METADATA in names,
        written_at_s=max((manifest.written_at_s for manifest in manifests), default=None),
        left_aside=checkpoint.left_aside,
        divergent=checkpoint.divergent,
    )


def table(rows: list[Described]) -> str:
    """Return a line for each checkpoint, and one below those of which something is to be said."""
    heads = ("step", "whole", "tensors", "bytes", "on disk", "parts", "written", "name")
    cells = [heads, *(_cells(row) for row in rows)]
    first, *lines = aligned(cells, right=(0, 2, 3, 4))
    indent = " " * (max(len(line[0]) for line in cells) + 4)
    for row, line in zip(rows, lines, strict=True):
        first = "\n".join([first, line, *(f"{indent}{remark}" for remark in _remarks(row))])
    return first


def _cells(row: Described) -> tuple[str, ...]:
    return (
        str(row.step),
        "yes" if row.is_whole else "no",
        "-" if row.num_tensors is None else str(row.num_tensors),
        "-" if row.bytes is None else format_bytes(row.bytes),
        format_bytes(row.bytes_on_disk),
        _parts(row),
        "-" if row.written_at_s is None else _when(row.written_at_s),
        one_line(row.name),
    )


def _when(unix_time_s: float) -> str:
    try:
        return f"{datetime.fromtimestamp(unix_time_s):%Y-%m-%d %H:%M:%S}"
    except (OverflowError, ValueError, OSError):
        return "?"  # a clock of its writer's that was wrong, or a number that is no time: nothing depends on it


def _parts(row: Described) -> str:
    if row.num_replicas is None or row.num_ranks is None:
        return "-"
    all_of_them = f"{row.num_replicas}x{row.num_ranks}"
    some = all_of_them if row.num_parts == row.num_replicas * row.num_ranks else f"{row.num_parts} of {all_of_them}"
    return f"{some}, {row.num_filled} filled" if row.num_filled else some


def _remarks(row: Described) -> list[str]:
    remarks = [] if row.why_not_whole is None else [one_line(row.why_not_whole)]
    if row.is_whole:
        remarks += [f"left aside: {one_line(reason)}" for reason in row.left_aside]
        if not row.has_metadata:
            remarks.append("plain DCP cannot read it: its .metadata was not written")
    if row.divergent:
        remarks.append(
            f"replicas did not hold the same bytes of {len(row.divergent)} tensors, "
            f"such as {one_line(row.divergent[0])[:120]}"
        )
    return remarks


# Its content

_BATCH_BYTES = 64 * 1024 * 1024


def content_of(reader: CheckpointReader) -> tuple[Content, list[str]]:
    """Return what of a checkpoint goes into a file, and in sentences what does not, and why. Values are read for it, tensors are
    not.

    Raises:
        CheckpointError: a value is damaged or cannot be read.
    """
    left_out: list[str] = []
    if told := differing_copies(reader.checkpoint):
        left_out.append(f"all but the first copies: {told}")
    if told := drifted_replicas(reader.checkpoint):
        left_out.append(f"what one rank alone had: {told}")
    # Tensors and arrays that are inside of values are among the tensors, by the same name.
    content = Content(outlines_of(reader))
    for fqn, (_, value) in reader.values().items():
        for path, leaf in leaves(value, fqn):
            try:
                content.add(path, leaf)
            except UnsupportedValueError as error:
                left_out.append(str(error))
    return content, left_out


def outlines_of(reader: CheckpointReader) -> list[PendingTensor]:
    """Return its tensors, in the order of a file."""
    return in_file_order(PendingTensor(tensor.fqn, tensor.dtype, tensor.shape) for tensor in reader.tensors.values())


def read_in_order(
    reader: CheckpointReader,
    outlines: Sequence[PendingTensor],
    extra: Mapping[str, torch.Tensor] | None = None,
) -> Iterator[memoryview]:
    """Yield the elements of tensors, one after the other; what is yielded is there until the next is asked for.

    It takes memory for the largest tensor, or 64 MiB.

    Args:
        outlines: those that are wanted, `in_file_order`.
        extra: those of them that need not be read.

    Raises:
        CheckpointError: as the reader's `read`, or there is not enough memory.
    """
    extra = extra or {}
    memory = torch.empty(0, dtype=torch.uint8, device="cpu")
    for batch in _batches(outlines):
        num_bytes = sum(outline.num_bytes for outline in batch)
        if len(memory) < num_bytes:
            memory = _allocate(num_bytes, batch[0].name)
        wants: list[Want] = []
        end = 0
        for outline in batch:
            start, end = end, end + outline.num_bytes
            target = memory[start:end].view(outline.dtype).reshape(outline.shape)
            if outline.name in extra:
                target.copy_(extra[outline.name])
            else:
                wants.append(Want(outline.path or outline.name, whole(outline.shape), target))
        reader.read(wants)
        yield memory[:num_bytes].numpy().data


def _allocate(num_bytes: int, name: str) -> torch.Tensor:
    try:
        return torch.empty(num_bytes, dtype=torch.uint8, device="cpu")
    except RuntimeError as error:  # what torch has for a MemoryError
        raise UnsupportedValueError(f"there is no memory for the {num_bytes} bytes of {name[:120]}", name) from error


def reason_of(error: CheckpointError) -> CheckpointError:
    """Return what a reader found to be wrong, rather than what it could not make up because of that."""
    return error.__cause__ if isinstance(error.__cause__, CheckpointError) else error


def _batches(outlines: Iterable[PendingTensor]) -> Iterator[list[PendingTensor]]:
    batch: list[PendingTensor] = []
    num_bytes = 0
    for outline in outlines:
        if not outline.num_bytes:
            continue
        if batch and num_bytes + outline.num_bytes > _BATCH_BYTES:
            yield batch
            batch, num_bytes = [], 0
        batch.append(outline)
        num_bytes += outline.num_bytes
    if batch:
        yield batch


# To verify it


class Condition(Enum):
    """The condition of a checkpoint."""

    RIGHT = "right"
    DAMAGED = "damaged"
    """Some of its bytes are not those that were written."""
    NOT_WHOLE = "not whole"
    """Nobody has seen it whole: it is still being written, or its writers died."""


class VerifyResult(NamedTuple):
    """The findings about one checkpoint."""

    condition: Condition
    problems: list[str]
    notes: list[str]
    """Remarks: no problems, and worth knowing."""


def bytes_to_verify(opened: OpenedCheckpoint) -> int:
    """Return about how many bytes `verify` reads."""
    total = 0
    for tensor in opened.checkpoint.tensors.values():
        for piece in tensor.pieces:
            num_bytes = piece.box.volume * tensor.dtype.itemsize
            total += num_bytes + digest_table_bytes(num_bytes)
    return total


def verify(opened: OpenedCheckpoint) -> VerifyResult:
    """Read everything and compare it with what is known of it."""
    reader, checkpoint = opened.reader, opened.checkpoint
    notes: list[str] = []
    found = reader.verify()
    has_metadata = is_closed(opened.place.storage, checkpoint.name)
    if has_metadata and opened.why_not_whole is None:
        found += _metadata_problems(checkpoint, opened.place.storage, notes)
    elif opened.why_not_whole is None:
        notes.append(f"plain DCP cannot read it: its {METADATA} was not written")
    notes += notes_on(checkpoint)
    if opened.why_not_whole is not None:
        condition = Condition.DAMAGED if has_metadata else Condition.NOT_WHOLE  # it was whole, or never was
        return VerifyResult(condition, [opened.why_not_whole, *found], notes)
    problems = [*checkpoint.left_aside, *found]
    if not problems:
        return VerifyResult(Condition.RIGHT, [], notes)
    try:
        for _ in read_in_order(reader, outlines_of(reader)):
            continue
        reader.values()
    except CheckpointError:
        notes.append("it cannot be loaded as a whole")
    else:
        notes.append("it can be loaded all the same: what is damaged is also elsewhere, or is read by DCP alone")
    return VerifyResult(Condition.DAMAGED, problems, notes)


def _metadata_problems(checkpoint: Checkpoint, storage: Storage, notes: list[str]) -> list[str]:
    """Compare what DCP would read with what manifests say: it has no digest, and other versions may write other bytes."""
    path = f"{checkpoint.name}/{METADATA}"
    try:
        data, expected = storage.read(path), build_metadata(checkpoint)
        if data == expected:
            return []
        there, made = load_metadata(data, path), load_metadata(expected, path)
        DCPReader(storage, str(checkpoint.name))  # sees whether all is covered
    except (CheckpointDamagedError, StorageError, UnsupportedValueError) as error:
        return [str(error)]
    if (there.state_dict_metadata, there.storage_data) == (made.state_dict_metadata, made.storage_data):
        if there.planner_data != made.planner_data:
            return [f"{path} has other keys than the manifests"]
        notes.append(f"{path} says what the manifests say, but in other bytes than this version writes")
        return []
    return _differences(checkpoint, path, there, made)


def _differences(checkpoint: Checkpoint, path: str, there: Metadata, made: Metadata) -> list[str]:
    """Return what is wrong with metadata that is there and says something else than what would be made now."""
    # Who wrote it may have seen fewer parts, and then took others.
    records: dict[tuple[str, tuple[int, ...] | None, tuple[int, ...] | None], set[tuple[str, int, int]]] = {}
    for tensor in checkpoint.tensors.values():
        for piece in tensor.pieces:
            file = piece.part.manifest.files[piece.entry.file].name
            place = (file, piece.entry.offset, piece.entry.length)
            records.setdefault((tensor.fqn, piece.box.offsets, piece.box.sizes), set()).add(place)
    for part in checkpoint.parts:
        for value in part.manifest.values:
            place = (part.manifest.files[value.file].name, value.offset, value.length)
            records.setdefault((value.fqn, None, None), set()).add(place)
    problems: list[str] = []
    sizes = {
        (fqn, tuple(chunk.offsets)): tuple(chunk.sizes)
        for fqn, described in there.state_dict_metadata.items()
        for chunk in getattr(described, "chunks", ())
    }
    for index, info in there.storage_data.items():
        offsets = None if index.offset is None else tuple(index.offset)
        key = (index.fqn, offsets, None if offsets is None else sizes.get((index.fqn, offsets)))
        if (info.relative_path, info.offset, info.length) not in records.get(key, ()):
            problems.append(f"{path} refers to a record of {index.fqn[:120]} that no manifest has")
    for fqn, described in made.state_dict_metadata.items():
        other = there.state_dict_metadata.get(fqn)
        if type(other) is not type(described) or any(
            getattr(other, member, None) != getattr(described, member, None) for member in ("size", "properties")
        ):
            problems.append(f"{path} has {fqn[:120]} as another than the manifests")
    return problems
