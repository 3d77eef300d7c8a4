"""Finds the durable checkpoints of a place, this library's and DCP's, and opens them. It reads no tensors and changes nothing.

Of a directory that DCP wrote the step is what its name ends with (`step-100`, `iter_0000100`, `100`), where it does.
"""

from __future__ import annotations

import math
import os
import re
from dataclasses import dataclass, field
from datetime import datetime
from typing import NamedTuple

from torchft_ckpt.checkpointing.durable.names import METADATA, TEMPORARY, CheckpointName, parse_checkpoint
from torchft_ckpt.checkpointing.durable.reading.checkpoint import (
    Checkpoint,
    list_checkpoints,
    read_checkpoint,
    why_not_whole,
)
from torchft_ckpt.checkpointing.durable.reading.reader import CheckpointReader
from torchft_ckpt.checkpointing.durable.storage.contract import Storage
from torchft_ckpt.checkpointing.durable.storage.fsspec_storage import open_storage
from torchft_ckpt.cli.output import format_bytes, format_count
from torchft_ckpt.core.text import one_line
from torchft_ckpt.errors import CheckpointError, ConfigError, StorageError
from torchft_ckpt.integrations.dcp.reader import DCPReader
from torchft_ckpt.threads import parallel_map

_NUM_THREADS = 8
_STEP = re.compile(r"(?:\A|(?:step|iter)[-_=.]?)0*([0-9]{1,18})\Z", re.IGNORECASE)


class CheckpointPlace(NamedTuple):
    """The place of a checkpoint, of which nothing was read yet."""

    storage: Storage
    directory: str
    """Its path in the storage; "" for the storage itself."""
    name: str
    step: int | None
    own: CheckpointName | None
    """None where DCP wrote it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenedCheckpoint:
    """A checkpoint whose manifests, or metadata, were read."""

    place: CheckpointPlace
    checkpoint: Checkpoint | None
    """None where DCP wrote it."""
    reader: CheckpointReader | DCPReader | None
    """None where DCP wrote it and it cannot be read."""
    why_not_whole: str | None

    @property
    def num_bytes(self) -> int:
        """Of its tensors, each counted once."""
        tensors = [] if self.reader is None else self.reader.tensors.values()
        return sum(math.prod(tensor.shape) * tensor.dtype.itemsize for tensor in tensors)


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
    found = [place for place in places if step is None or place.step == step]
    if not found:
        steps = sorted({place.step for place in places if place.step is not None}, reverse=True)
        known = (
            f"; its steps are {', '.join(map(str, steps[:20]))}{', ...' if len(steps) > 20 else ''}" if steps else ""
        )
        raise ConfigError(f"{location}: there is no checkpoint of step {step}{known}", location)
    return sorted(found, key=_age, reverse=True)


def open_checkpoint(place: CheckpointPlace) -> OpenedCheckpoint:
    """Read what a checkpoint says of itself, and whether it is whole."""
    if place.own is not None:
        checkpoint = read_checkpoint([place.storage], place.own)
        why_not = why_not_whole(checkpoint)
        return OpenedCheckpoint(
            place=place, checkpoint=checkpoint, reader=CheckpointReader(checkpoint), why_not_whole=why_not
        )
    try:
        reader = DCPReader(place.storage, place.directory)
    except CheckpointError as error:
        return OpenedCheckpoint(place=place, checkpoint=None, reader=None, why_not_whole=str(error))
    return OpenedCheckpoint(place=place, checkpoint=None, reader=reader, why_not_whole=None)


def _places_of(location: str) -> list[CheckpointPlace]:
    if not location:
        raise ConfigError("DIR is empty: a path or a URL was expected", "DIR")
    is_url = "://" in location or "::" in location
    path = location.rstrip("/") if is_url else os.path.realpath(location)
    above, _, name = path.rpartition("/")
    own = parse_checkpoint(name)
    if own is not None:
        storage = open_storage(above or "/")
        return [CheckpointPlace(storage, name, name, own.step, own)] if storage.names(name) else []
    storage = open_storage(path)
    names = storage.names()
    if _is_dcps(names):
        return [CheckpointPlace(storage, "", name, _step_of(name), None)]
    places = [CheckpointPlace(storage, str(own), str(own), own.step, own) for own in list_checkpoints(storage)]
    others = [entry for entry in names if parse_checkpoint(entry) is None and TEMPORARY not in entry]
    are_dcps = parallel_map(lambda entry: _holds_dcps(storage, entry), others, _NUM_THREADS)
    for entry, is_dcps in zip(others, are_dcps, strict=True):
        if is_dcps:
            places.append(CheckpointPlace(storage, entry, entry, _step_of(entry), None))
    return places


def _holds_dcps(storage: Storage, directory: str) -> bool:
    try:
        return _is_dcps(storage.names(directory))
    except StorageError:
        return False  # no checkpoint that could be read


def _is_dcps(names: list[str]) -> bool:
    return any(name == METADATA or (name.startswith("__") and name.endswith(METADATA)) for name in names)


def _step_of(name: str) -> int | None:
    match = _STEP.search(name)
    return None if match is None else int(match[1])


def _age(place: CheckpointPlace) -> tuple[int, str]:
    return -1 if place.step is None else place.step, place.name


# What people and programs are told


@dataclass(frozen=True, slots=True, kw_only=True)
class Described:
    """The row of a checkpoint in `ls`. If it is not whole, the tensors are those that are known."""

    step: int | None
    name: str
    format: str
    """`torchft_ckpt`, or `dcp`."""
    is_whole: bool
    why_not_whole: str | None
    num_tensors: int | None
    """None where nothing is known."""
    bytes: int | None
    """Of the tensors, each counted once."""
    bytes_on_disk: int
    num_replicas: int | None = None
    num_ranks: int | None = None
    """Of each replica."""
    num_parts: int | None = None
    """Ranks whose own part is there."""
    num_filled: int | None = None
    """Parts that were written in place of others."""
    num_files: int = 0
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
    place, checkpoint, reader = opened.place, opened.checkpoint, opened.reader
    names = place.storage.names(place.directory)
    paths = [f"{place.directory}/{name}" if place.directory else name for name in names]
    on_disk = sum(size or 0 for size in parallel_map(place.storage.size, paths, _NUM_THREADS))
    manifests = [] if checkpoint is None else [part.manifest for part in checkpoint.parts]
    is_known = bool(manifests) if checkpoint is not None else reader is not None
    return Described(
        step=place.step,
        name=place.name,
        format="dcp" if checkpoint is None else "torchft_ckpt",
        is_whole=opened.why_not_whole is None,
        why_not_whole=opened.why_not_whole,
        num_tensors=len(reader.tensors) if is_known and reader is not None else None,
        bytes=opened.num_bytes if is_known else None,
        bytes_on_disk=on_disk,
        num_replicas=max((manifest.num_replicas for manifest in manifests), default=None),
        num_ranks=max((manifest.num_ranks for manifest in manifests), default=None),
        num_parts=None if checkpoint is None else sum(manifest.fill == 0 for manifest in manifests),
        num_filled=None if checkpoint is None else sum(manifest.fill > 0 for manifest in manifests),
        num_files=sum(name.endswith(".distcp") for name in names),
        has_metadata=_is_dcps(names),
        written_at_s=max((manifest.written_at_s for manifest in manifests), default=None),
        left_aside=[] if checkpoint is None else checkpoint.left_aside,
        divergent=[] if checkpoint is None else checkpoint.divergent,
    )


def table(rows: list[Described]) -> str:
    """Return a line for each checkpoint, and one below those of which something is to be said."""
    heads = ("step", "whole", "tensors", "bytes", "on disk", "parts", "written", "name")
    cells = [heads, *(_cells(row) for row in rows)]
    widths = [max(len(line[column]) for line in cells) for column in range(len(heads))]
    is_number = (True, False, True, True, True, False, False, False)
    lines: list[str] = []
    for line, row in zip(cells, [None, *rows], strict=True):
        padded = (
            f"{text:>{width}}" if right else f"{text:<{width}}"
            for text, width, right in zip(line, widths, is_number, strict=True)
        )
        lines.append("  ".join(padded).rstrip())
        lines += [] if row is None else [f"{'':{widths[0]}}    {remark}" for remark in _remarks(row)]
    return "\n".join(lines)


def _cells(row: Described) -> tuple[str, ...]:
    return (
        "-" if row.step is None else str(row.step),
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
    if row.format == "dcp":
        return f"DCP, {format_count(row.num_files, 'file')}"
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
