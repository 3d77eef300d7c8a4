"""Reads what a checkpoint holds: to verify all of it, for there is a digest for every 64 KiB, or to put it into one safetensors
file. It prints nothing and writes no files.

State of one rank alone (random number generators, its position in the data) is left out of a file.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import Enum
from typing import NamedTuple

import torch
from torch.distributed.checkpoint.metadata import Metadata

from torchft_ckpt.checkpointing.durable.format.manifest import digest_table_bytes
from torchft_ckpt.checkpointing.durable.names import METADATA
from torchft_ckpt.checkpointing.durable.reading.checkpoint import (
    Checkpoint,
    differing_copies,
    drifted_replicas,
    is_closed,
    notes_on,
)
from torchft_ckpt.checkpointing.durable.reading.reader import CheckpointReader
from torchft_ckpt.checkpointing.durable.saving.dcp_metadata import build_metadata
from torchft_ckpt.checkpointing.durable.storage.contract import Storage
from torchft_ckpt.checkpointing.state.target import Want
from torchft_ckpt.cli.checkpoint_places import OpenedCheckpoint
from torchft_ckpt.cli.output import leaves
from torchft_ckpt.cli.safetensors_file import Content, PendingTensor, in_file_order
from torchft_ckpt.core.boxes.geometry import whole
from torchft_ckpt.errors import CheckpointDamagedError, CheckpointError, StorageError, UnsupportedValueError
from torchft_ckpt.integrations.dcp.reader import DCPReader, load_metadata

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
