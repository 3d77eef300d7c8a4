"""Digests of whole blocks, asked for ahead: to find what is here already, and what two sources agree on.

A source computes a digest once, at the speed of memory. Before a transfer a sample of each block is compared, a few bytes
long; only of blocks whose samples are equal here and there the digests are asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import compress

from torchft_ckpt.checkpointing.fetching.receive import Destination
from torchft_ckpt.checkpointing.fetching.source import SourceClient
from torchft_ckpt.checkpointing.protocol import MAX_DIGESTS
from torchft_ckpt.checkpointing.state.format import Manifest
from torchft_ckpt.core.transfer.scheduler import blocks_of, mask_of_each
from torchft_ckpt.threads import NUM_COPY_THREADS, parallel_map

BATCH_BLOCKS = 64


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

    likely: list[int] = []
    for first in range(0, destination.num_blocks, MAX_DIGESTS):
        batch = range(first, min(first + MAX_DIGESTS, destination.num_blocks))
        samples = client.fetch_samples(manifest, batch)
        likely += [block for block in batch if samples[block] in destination.samples(block)]

    def take(block: int) -> bool:
        return not is_over() and destination.take_local(block, digests[block])

    for found in fetch_digests(client, manifest, mask_of_each(likely)):
        digests.update(found)
        is_held = parallel_map(take, list(found), NUM_COPY_THREADS, "torchft_ckpt-compare")
        held.update(compress(found.items(), is_held))
    return digests, held
