"""Writes one part of a checkpoint: a file of records, then its manifest. What is in it was decided elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import xxhash

from torchft_ckpt.checkpointing.durable.format.manifest import (
    BoxEntry,
    FileEntry,
    FileTensor,
    PartManifest,
    PieceEntry,
    PlainValue,
    ValueEntry,
    encode_part,
    with_replicas,
)
from torchft_ckpt.checkpointing.durable.format.records import write_tensor
from torchft_ckpt.checkpointing.durable.names import CheckpointName, PartName
from torchft_ckpt.checkpointing.durable.saving.capture import CapturedState
from torchft_ckpt.checkpointing.durable.storage.contract import OutputFile, Storage
from torchft_ckpt.checkpointing.state.dtypes import parse_dtype
from torchft_ckpt.core.boxes.geometry import Box
from torchft_ckpt.core.durable.assignment import split_for_files
from torchft_ckpt.core.durable.saving import Writers


class PartShare(NamedTuple):
    """The content of a part: boxes of tensors by their place in the state, and places of values."""

    boxes: Sequence[tuple[int, Box]]
    values: Sequence[int]


def write_part(
    storage: Storage,
    checkpoint: CheckpointName,
    part: PartName,
    writers: Writers,
    state: CapturedState,
    share: PartShare,
    on_written: Callable[[int], None],
) -> int:
    """Write a part, whole or not at all; return the bytes of its files.

    Args:
        storage: where to; the checkpoint's directory is there.
        on_written: told of the bytes of tensors that are written, piece by piece.

    Raises:
        StorageError: it could not be written; nothing of it counts.
        CheckpointError: the state could not be kept for us (a budget, say).
    """
    pieces: list[PieceEntry] = []
    values: list[ValueEntry] = []
    files: list[FileEntry] = []
    if share.boxes or share.values:
        with storage.create(f"{checkpoint}/{part.data}") as file:
            pieces = _write_pieces(file, state, share.boxes, on_written)
            values = [_write_value(file, state, place) for place in share.values]
            files = [FileEntry(name=part.data, num_bytes=file.position)]
            file.commit(sync_directory=False)  # without the manifest, which comes next, it counts for nothing
    manifest = PartManifest(
        checkpoint=str(checkpoint),
        step=checkpoint.step,
        replica=part.replica,
        rank=part.rank,
        fill=part.fill,
        num_replicas=writers.num_replicas,
        num_ranks=writers.num_ranks,
        replica_id=writers.replica_id,
        written_at_s=time.time(),
        tensors=_tensors(state),
        holds_values=[value.fqn for value in state.values],
        tree=state.manifest.tree,
        pieces=pieces,
        values=values,
        files=files,
        own=PlainValue() if part.fill else with_replicas(state.own, state.replicas),
    )
    data = encode_part(manifest)
    with storage.create(f"{checkpoint}/{part.manifest}") as file:
        file.write(data)
        file.commit()
    return len(data) + sum(entry.num_bytes for entry in files)


def _write_pieces(
    file: OutputFile, state: CapturedState, boxes: Sequence[tuple[int, Box]], on_written: Callable[[int], None]
) -> list[PieceEntry]:
    entries: list[PieceEntry] = []
    longest = 0
    cut: list[tuple[int, Box, torch.dtype]] = []
    for tensor, box in boxes:
        entry = state.manifest.tensors[tensor]
        dtype = parse_dtype(entry.dtype)
        for piece in split_for_files(box, entry.shape, dtype.itemsize):
            cut.append((tensor, piece, dtype))
            longest = max(longest, piece.volume * dtype.itemsize)
    buffer = bytearray(max(longest, 1))
    for tensor, piece, dtype in cut:
        num_bytes = piece.volume * dtype.itemsize
        # A view of its own length: torch saves all of a storage.
        flat = torch.frombuffer(buffer, dtype=torch.uint8, count=num_bytes)
        state.read(tensor, piece, flat.numpy().data)
        record = write_tensor(file, flat.view(dtype).reshape(piece.sizes))
        entries.append(
            PieceEntry(
                tensor=tensor,
                offsets=list(piece.offsets),
                sizes=list(piece.sizes),
                file=0,
                offset=record.offset,
                length=record.length,
                data_offset=record.data_offset,
                digests_offset=record.digests_offset,
                digest=record.digest,
            )
        )
        on_written(num_bytes)
    return entries


def _write_value(file: OutputFile, state: CapturedState, place: int) -> ValueEntry:
    value = state.values[place]
    record = value.record()
    offset = file.position
    file.write(record)
    return ValueEntry(
        fqn=value.fqn,
        path=list(value.path),
        file=0,
        offset=offset,
        length=len(record),
        digest=xxhash.xxh3_128_hexdigest(record),
    )


def _tensors(state: CapturedState) -> list[FileTensor]:
    return [
        FileTensor(
            fqn=entry.fqn,
            path=list(state.paths.get(entry.fqn, (entry.fqn,))),
            dtype=entry.dtype,
            shape=entry.shape,
            boxes=[BoxEntry(offsets=chunk.offsets, sizes=chunk.sizes) for chunk in entry.chunks],
        )
        for entry in state.manifest.tensors
    ]
