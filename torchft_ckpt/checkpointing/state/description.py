"""Describes a state before its bytes are here: names, dtypes, shapes and the tree, as a source or a checkpoint gives them.

It knows neither who holds the bytes nor what is here.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from torchft_ckpt.checkpointing.state.format import Chunk, Manifest, WireTensor
from torchft_ckpt.checkpointing.state.tree import Node


class DescribedTensor(Protocol):
    """One tensor of a state: what the manifest of a source and that of a checkpoint both say of it."""

    @property
    def fqn(self) -> str:
        """Its path in the tree, or its name where paths are DCP's."""

    @property
    def dtype(self) -> str:
        """The wire name of its dtype."""

    @property
    def shape(self) -> Sequence[int]:
        """Its global shape."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Description:
    """A state that can be had from somewhere."""

    tree: Node
    """Of a checked manifest."""
    tensors: Sequence[DescribedTensor]
    """In the order in which the tree refers to them."""
    chunks: Sequence[Sequence[Chunk]] | None = None
    """For each tensor, which boxes of it the described rank holds, and where in its memory. None of a checkpoint: what shared
    memory was saved under each of its names, so whether these hold the same is seen when they are here."""
    ties: Mapping[str, object] = field(default_factory=dict)
    """By name. Tensors of equal ties are one tensor there, and arrive as one; a tensor without a tie is one by itself."""
    others: Collection[str] = ()
    """Names of further tensors, which only other ranks list."""
    owners: object = None
    """Of a checkpoint: which parameters its optimizers have, see `parameters.names_of`. A source's tree has it."""
    sharded: Collection[str] = ()
    """Of a checkpoint: the names of tensors of which the described rank holds parts."""


HeldEntry = tuple[int, int, WireTensor]
"""The word of one rank of a source about a tensor: the rank, the tensor's place in its manifest, and the entry there. There may
be millions, so they are plain tuples."""


def entries_of(manifests: Iterable[Manifest | None]) -> dict[str, list[HeldEntry]]:
    """Return, by name, what each rank's manifest says of each tensor; None of a rank that did not answer."""
    found: dict[str, list[HeldEntry]] = {}
    for rank, manifest in enumerate(manifests):
        for place, entry in enumerate(manifest.tensors if manifest is not None else ()):
            found.setdefault(entry.fqn, []).append((rank, place, entry))
    return found


def ties_of(entries: Mapping[str, Sequence[HeldEntry]]) -> dict[str, object]:
    """Return the tie of each tensor: one object for all that lie in one place on every rank, with one dtype and one shape."""
    known: dict[object, object] = {}
    ties: dict[str, object] = {}
    for name, held in entries.items():
        lies = tuple(
            (rank, chunk.segment, chunk.byte_offset, *chunk.offsets, *chunk.sizes, str(chunk.strides))
            for rank, _, entry in held
            for chunk in entry.chunks
            if 0 not in chunk.sizes
        )
        first = held[0][2]
        tie = (first.dtype, *first.shape, *lies) if lies else name
        ties[name] = known.setdefault(tie, tie)
    return ties
