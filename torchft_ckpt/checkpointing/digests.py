"""Digests of whole blocks, asked for ahead: to find what is here already, and what two sources agree on.

A source computes a digest once, at the speed of memory. Before a transfer only a sample is asked for: the first block
of each large tensor and of each few small ones; where it is equal here and there, the rest is asked for as well.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

from torchft_ckpt.checkpointing.format import Manifest
from torchft_ckpt.checkpointing.receive import Destination
from torchft_ckpt.checkpointing.source import SourceClient
from torchft_ckpt.core.transfer import blocks_of, mask_of_each

BATCH_BLOCKS = 64
_MAX_GROUPS = 1024


def fetch_digests(client: SourceClient, manifest: Manifest, mask: int) -> Iterator[dict[int, bytes]]:
    """Yield the digests of a bit set of blocks, in batches."""
    blocks = [block for run in blocks_of(mask) for block in run]
    for first in range(0, len(blocks), BATCH_BLOCKS):
        batch = blocks[first : first + BATCH_BLOCKS]
        yield client.fetch_digests(manifest, batch)


def probe_local_blocks(
    client: SourceClient, manifest: Manifest, destination: Destination, is_over: Callable[[], bool]
) -> tuple[dict[int, bytes], dict[int, bytes]]:
    """Return the digests that were learnt, and those of the blocks that are here already."""
    digests: dict[int, bytes] = {}
    held: dict[int, bytes] = {}
    if not destination.may_hold_blocks:
        return digests, held

    def take(blocks: list[int]) -> None:
        mask = mask_of_each(block for block in blocks if block not in digests)
        for batch in fetch_digests(client, manifest, mask):
            digests.update(batch)
            for block, digest in batch.items():
                if not is_over() and destination.take_local(block, digest):
                    held[block] = digest

    if destination.has_old_contents:
        take(list(range(destination.num_blocks)))  # of a receive that failed: what had arrived may be anywhere
        return digests, held
    groups = destination.probe_groups()
    if len(groups) > _MAX_GROUPS:
        groups = random.Random(len(groups)).sample(groups, _MAX_GROUPS)
    take([group[0] for group in groups])
    take([block for group in groups if group[0] in held for block in group])
    return digests, held
