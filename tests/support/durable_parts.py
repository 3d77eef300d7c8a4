"""Makes parts of a durable checkpoint in a storage, piece by piece, as a test wants them: also such as no saver would write.

It writes what `part_writer` writes, but decides nothing: which boxes are where, and what the manifest says, is the test's.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import torch
import xxhash
from torch.distributed.checkpoint._nested_dict import flatten_state_dict

from torchft_ckpt.checkpointing.durable.format.manifest import (
    BoxEntry,
    FileEntry,
    FileTensor,
    PartManifest,
    PieceEntry,
    ValueEntry,
    encode_part,
    encode_value,
)
from torchft_ckpt.checkpointing.durable.format.records import value_record, write_tensor
from torchft_ckpt.checkpointing.durable.names import CheckpointName, PartName
from torchft_ckpt.checkpointing.durable.storage.contract import Storage
from torchft_ckpt.checkpointing.durable.storage.local_storage import LocalStorage
from torchft_ckpt.checkpointing.state.dtypes import dtype_name
from torchft_ckpt.checkpointing.state.local_state import view_of
from torchft_ckpt.checkpointing.state.tree import TreeEncoder
from torchft_ckpt.core.boxes.geometry import Box, whole

NAME = CheckpointName(120, "q3-1a2b3c4d")


@dataclass
class PartsDouble:
    """A checkpoint in the making.

    Args:
        state: the whole state, tensors not sharded: what the job holds together.
        storage: where parts go by default.
        name: of the checkpoint.
        num_replicas: as manifests say.
        num_ranks: as manifests say.
    """

    state: dict[str, Any]
    storage: Storage
    name: CheckpointName = NAME
    num_replicas: int = 1
    num_ranks: int = 1
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        flat, self.paths = flatten_state_dict(self.state)
        encoder = TreeEncoder()
        self.tree = encoder.encode(self.state)
        self.tensors = dict(encoder.tensors)
        self.values = {fqn: value for fqn, value in flat.items() if not isinstance(value, torch.Tensor)}

    def write(
        self,
        replica: int = 0,
        rank: int = 0,
        fill: int = 0,
        *,
        pieces: Mapping[str, Iterable[Box]] | None = None,
        values: Iterable[str] | None = None,
        storage: Storage | None = None,
        own: object = None,
        **changes: object,
    ) -> PartManifest:
        """Write a part; return its manifest.

        Args:
            replica: see `PartName`.
            rank: see `PartName`.
            fill: see `PartName`.
            pieces: boxes of each tensor; everything, whole, by default.
            values: which values it has; all by default.
            storage: where to.
            own: what belongs to the rank.
            changes: members of the manifest that are not to be as they should.
        """
        storage = storage or self.storage
        storage.make_directory(str(self.name))
        part = PartName(replica, rank, fill)
        if pieces is None:
            pieces = {fqn: [whole(tuple(tensor.shape))] for fqn, tensor in self.tensors.items() if tensor.numel()}
        fqns = [*self.tensors]
        entries: list[PieceEntry] = []
        records: list[ValueEntry] = []
        with storage.create(f"{self.name}/{part.data}") as file:
            for fqn, boxes in pieces.items():
                for box in boxes:
                    record = write_tensor(file, view_of(self.tensors[fqn], box).contiguous().clone())
                    place = {"offsets": list(box.offsets), "sizes": list(box.sizes)}
                    entries.append(PieceEntry(tensor=fqns.index(fqn), file=0, **place, **record._asdict()))
            for fqn in self.values if values is None else values:
                data = value_record(self.values[fqn])
                records.append(
                    ValueEntry(
                        fqn=fqn,
                        path=list(self.paths[fqn]),
                        file=0,
                        offset=file.position,
                        length=len(data),
                        digest=xxhash.xxh3_128_hexdigest(data),
                    )
                )
                file.write(data)
            num_bytes = file.position
            file.commit()
        manifest = PartManifest(
            checkpoint=str(self.name),
            step=self.name.step,
            replica=replica,
            rank=rank,
            fill=fill,
            num_replicas=self.num_replicas,
            num_ranks=self.num_ranks,
            replica_id=f"group_{replica}",
            written_at_s=0.0,
            tensors=[self._entry(fqn) for fqn in fqns],
            holds_values=[*self.values],
            tree=self.tree,
            pieces=entries,
            values=records,
            files=[FileEntry(name=part.data, num_bytes=num_bytes)],
            own=encode_value(own, "own"),
        )
        manifest = msgspec.structs.replace(manifest, **changes)
        self.write_manifest(manifest, storage)
        return manifest

    def write_manifest(self, manifest: PartManifest, storage: Storage | None = None) -> None:
        """Write a manifest under its name."""
        with (storage or self.storage).create(f"{self.name}/{manifest.name.manifest}") as file:
            file.write(encode_part(manifest))
            file.commit()

    def _entry(self, fqn: str) -> FileTensor:
        tensor = self.tensors[fqn]
        shape = list(tensor.shape)
        return FileTensor(
            fqn=fqn,
            path=list(self.paths.get(fqn, (fqn,))),
            dtype=dtype_name(tensor.dtype),
            shape=shape,
            boxes=[BoxEntry(offsets=[0] * len(shape), sizes=shape)],
        )


def storage_in(path: Path) -> LocalStorage:
    """Return a storage in a directory that is there now."""
    path.mkdir(exist_ok=True)
    return LocalStorage(path)


def rows(shape: Sequence[int], cuts: Sequence[int], dim: int = 0) -> list[Box]:
    """Return the boxes that begin at these rows of a dimension, up to the next one."""
    ends = [*cuts[1:], shape[dim]]
    return [
        Box(
            tuple(low if at == dim else 0 for at in range(len(shape))),
            tuple(high - low if at == dim else size for at, size in enumerate(shape)),
        )
        for low, high in zip(cuts, ends, strict=True)
    ]


def flip_bit(path: Path, at: int, bit: int = 0) -> None:
    """Change one bit of a file."""
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ (1 << bit)]))
