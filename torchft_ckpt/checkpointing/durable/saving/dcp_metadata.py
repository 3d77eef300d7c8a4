"""DCP's `.metadata` for our checkpoints, so that plain `torch.distributed.checkpoint` reads them.

It is a pickle. This is the one file of the package that writes one.
"""

from __future__ import annotations

import dataclasses
import pickle
from collections.abc import Iterable, Sequence
from typing import Any

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

from torchft_ckpt.checkpointing.durable.reading.checkpoint import Checkpoint, Piece, SavedTensor, minimal_cover
from torchft_ckpt.core.boxes.geometry import Box, subtract
from torchft_ckpt.errors import CheckpointDamagedError
from torchft_ckpt.memory import gc_paused

_PROTOCOL = 4
_VERSION = "1.0.0"


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
    with gc_paused():
        for tensor in checkpoint.tensors.values():
            if tensor.fqn in checkpoint.values:
                continue  # an array, which DCP takes for a value
            pieces = _pieces_by_offsets(tensor)
            paths[tensor.fqn] = tensor.path
            described[tensor.fqn] = described_as(tensor.dtype, tensor.shape, [piece.box for piece in pieces])
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
            **if_known(Metadata, version=_VERSION),
        )
        return pickle.dumps(metadata, protocol=_PROTOCOL)


def described_as(dtype: torch.dtype, shape: Sequence[int], boxes: Iterable[Box]) -> TensorStorageMetadata:
    """Return DCP's description of a tensor that is in these boxes."""
    return TensorStorageMetadata(
        properties=TensorProperties(dtype=dtype),
        size=torch.Size(shape),
        chunks=[ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes)) for box in boxes],
    )


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


def if_known(kind: type, **members: object) -> dict[str, Any]:
    """Return members as far as the class has them: `version` is newer than torch 2.7, `strides` than 2.13."""
    known = {member.name for member in dataclasses.fields(kind)}
    return {name: value for name, value in members.items() if name in known}
