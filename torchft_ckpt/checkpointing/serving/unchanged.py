"""Finds the blocks of a state that are as they were in the one that was served before.

A group that has received a state beside the job is held for what was written since. To find that by digests would take as long as
to send all of it. So a block counts as unchanged if none of its tensors is what an optimizer trains, and each has its mark of
before: its place, its versions, and the digest of a sample; of a small tensor, of all its bytes. Its digest is known then. If it
has not changed since an earlier step, training leaves it alone, and nobody need copy it aside for a learner.

A write of a few values to a large tensor that torch does not count (through `x.data`, by a replayed graph) may be missed here.
Who has come in shows its state before it trains, and in the votes after that: there it is found.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from torchft_ckpt.checkpointing.state.blocks import count_blocks
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
    digests: dict[int, bytes]
    """By block, as far as they are known by now."""
    still: int
    """The blocks that have not changed since an earlier step, as a bit set."""


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
        versions: of the tensors when they were captured.
        before: the state that was served before it.
    """
    layout = block_bytes, space.starts, space.lengths
    found = _marks_of(segments, versions)
    if before is None or before.layout != layout:
        return Marked(step, layout, found, {}, 0)
    changed = 0
    for start, length, now, old in zip(space.starts, space.lengths, found, before.marks, strict=True):
        if now is None or now != old:
            changed |= mask_of(range(start // block_bytes, count_blocks(start + length, block_bytes)))
    unchanged = mask_of(range(count_blocks(space.total_bytes, block_bytes))) & ~changed
    digests = {block: before.digests[block] for block in units_of(unchanged) if block in before.digests}
    return Marked(step, layout, found, digests, unchanged if before.step < step else unchanged & before.still)


def _marks_of(segments: Sequence[Sequence[torch.Tensor]], versions: StateVersions | None) -> list[Mark | None]:
    trained = None if versions is None else versions.trained
    if versions is None or trained is None:
        return [None] * len(segments)
    known: dict[int, torch.Tensor] = {}
    for tensor in {id(tensor): tensor for segment in segments for tensor in segment}.values():
        parts = memory_of(tensor)
        if parts and versions.of(tensor) and not any(part.data_ptr() in trained for part in parts):
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
