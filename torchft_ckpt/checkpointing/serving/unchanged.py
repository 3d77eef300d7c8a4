"""Finds the blocks of a state that are as they were in the one that was served before.

A group that has received a state beside the job is held for what was written since. To find that by digests would take as long as
to send all of it. So a block counts as unchanged if none of its tensors is in memory that an optimizer trains, and each has its
mark of before: its place, its versions, and the digest of a sample; of a small tensor, of all its bytes. Who compares is told the
digest of before then; what is sent is digested anew. If a block has not changed since an earlier step, training leaves it alone,
and nobody need copy it aside for a learner.

A write of a few values to a large tensor that torch does not count (through `x.data`, by a replayed graph) may be missed here.
Who has come in shows its state before it trains, and in the votes after that: there it is found, and what it loads then is
compared by digests of now.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from torchft_ckpt.checkpointing.state.blocks import blocks_in, count_blocks
from torchft_ckpt.checkpointing.state.samples import marks
from torchft_ckpt.checkpointing.state.shards import memory_of
from torchft_ckpt.checkpointing.state.space import Space
from torchft_ckpt.checkpointing.state.versions import StateVersions
from torchft_ckpt.core.transfer.scheduler import mask_of, units_of

MARKED_WHOLE_BYTES = 1024 * 1024
"""As large as the tensors that are copied when a state is captured, and so have another place in each."""

Mark = tuple[object, ...]


class Marked(NamedTuple):
    """A state as it was captured."""

    step: int
    layout: tuple[int, Sequence[int], Sequence[int]]
    """Bytes of a block; the first byte of each segment, and how many it has."""
    marks: Sequence[Mark | None]
    """By segment; None: it may be written to, and have the same mark."""
    known: dict[int, bytes]
    """Digests of blocks that have not changed since they were computed, for an earlier state."""
    digests: dict[int, bytes]
    """Those that were computed of this state by now."""
    still: int
    """The blocks that have not changed since an earlier step, as a bit set."""
    moved: set[int]
    """Segments that were written to though an earlier step had left them alone."""


def mark(
    step: int,
    block_bytes: int,
    space: Space,
    segments: Sequence[Sequence[torch.Tensor]],
    versions: StateVersions | None,
    before: Marked | None,
) -> Marked:
    """Mark a state that is to be served.

    Args:
        step, space: of the state; its blocks have `block_bytes`.
        segments: for each segment, the tensors that have bytes in it.
    """
    layout = block_bytes, space.starts, space.lengths
    found = _marks_of(segments, versions)
    if before is None or before.layout != layout:
        return Marked(step, layout, found, {}, {}, 0, set())
    changed = moved = 0
    for index, (start, length) in enumerate(zip(space.starts, space.lengths, strict=True)):
        blocks = mask_of(blocks_in(start, start + length, block_bytes))
        if found[index] is None or found[index] != before.marks[index]:
            changed |= blocks
        if index in before.moved:
            moved |= blocks
    unchanged = mask_of(range(count_blocks(space.total_bytes, block_bytes))) & ~changed
    digests = {**before.known, **before.digests}
    known = {block: digests[block] for block in units_of(unchanged) if block in digests}
    still = (unchanged if before.step < step else unchanged & before.still) & ~moved
    return Marked(step, layout, found, known, {}, still, before.moved)


def storages_of(tensor: torch.Tensor) -> set[int]:
    """Return where the memory begins in which a tensor lies, maybe with others."""
    return {part.untyped_storage().data_ptr() for part in memory_of(tensor)}


def _marks_of(segments: Sequence[Sequence[torch.Tensor]], versions: StateVersions | None) -> list[Mark | None]:
    if versions is None or versions.trained is None:
        return [None] * len(segments)
    trained = versions.trained()
    known: dict[int, torch.Tensor] = {}
    for tensor in {id(tensor): tensor for segment in segments for tensor in segment}.values():
        storages = storages_of(tensor)
        if storages and versions.of(tensor) and not storages & trained:
            known[id(tensor)] = tensor
    samples = marks(known.values(), whole_bytes=MARKED_WHOLE_BYTES)
    found = {key: _mark(known[key], sample, versions) for key, sample in zip(known, samples, strict=True)}
    return [
        tuple(found[id(tensor)] for tensor in those) if those and all(id(tensor) in found for tensor in those) else None
        for those in segments
    ]


def _mark(tensor: torch.Tensor, sample: bytes, versions: StateVersions) -> Mark:
    parts = memory_of(tensor)
    if all(part.nbytes <= MARKED_WHOLE_BYTES for part in parts):
        return (sample,)
    places = [(StorageWeakRef(part.untyped_storage()), part.data_ptr(), part.nbytes) for part in parts]
    return (sample, *places, *(version for _, version in versions.of(tensor)))
