"""The byte space cut into blocks, and the digests of a block.

Every block is `block_bytes` long but the last. A block's digest is xxh3_128 of its bytes with the block's index as the
seed, so a block that arrives in another's place does not verify, while equal blocks of two sources or two steps do
have equal digests.

That digest finds accidents, no forgery: who knows its seed finds other bytes with the same one in no time. Whatever is
brought by another party than the one that announced its digest is checked by BLAKE3 (O'Connor, Aumasson, Neves,
Wilcox-O'Hearn, 2020), all 32 bytes of it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

import xxhash
from blake3 import blake3

from torchft_ckpt.core.transfer.scheduler import mask_of

DIGEST_BYTES = 16
BLAKE3_BYTES = 32
SAMPLE_BYTES = 256
DEFAULT_BLOCK_BYTES = 4 * 1024 * 1024
MIN_BLOCK_BYTES = 4 * 1024
MAX_BLOCK_BYTES = 64 * 1024 * 1024
_RUN = re.compile(r"\A([0-9]{1,18})(?:-([0-9]{1,18}))?\Z")


def start_digest(block: int) -> xxhash.xxh3_128:
    """Return the hasher of one block; feed it the block's bytes in order."""
    return xxhash.xxh3_128(seed=block)


def start_blake3() -> blake3:
    """Return the hasher of what is not brought by whoever announces its digest; feed it the bytes in order."""
    return blake3()


def digest_of(block: int, data: bytes | bytearray | memoryview) -> bytes:
    """Return the 16-byte digest of a whole block."""
    return xxhash.xxh3_128_digest(data, seed=block)


def count_blocks(total_bytes: int, block_bytes: int) -> int:
    """Return how many blocks a byte space has."""
    return -(-total_bytes // block_bytes)


def blocks_in(start: int, stop: int, block_bytes: int) -> range:
    """Return the blocks that have bytes of [start, stop)."""
    return range(start // block_bytes, count_blocks(stop, block_bytes))


def block_range(block: int, total_bytes: int, block_bytes: int) -> tuple[int, int]:
    """Return the first byte of a block and the byte after its last."""
    return block * block_bytes, min((block + 1) * block_bytes, total_bytes)


def sample_range(block: int, total_bytes: int, block_bytes: int) -> tuple[int, int]:
    """Return the bytes of a block that its sample is made of: some in its middle, which training changes if it changes any."""
    start, stop = block_range(block, total_bytes, block_bytes)
    low = start + max(stop - start - SAMPLE_BYTES, 0) // 2
    return low, min(low + SAMPLE_BYTES, stop)


def format_runs(blocks: Iterable[int]) -> str:
    """Write block numbers as `0-3,7`."""
    runs: list[list[int]] = []
    for block in sorted(blocks):
        if runs and runs[-1][1] == block - 1:
            runs[-1][1] = block
        else:
            runs.append([block, block])
    return format_ranges(range(first, last + 1) for first, last in runs)


def format_ranges(runs: Iterable[range]) -> str:
    """Write runs of blocks, in order and apart from each other, as `0-3,7`."""
    return ",".join(str(run.start) if len(run) == 1 else f"{run.start}-{run.stop - 1}" for run in runs)


def parse_runs(text: str, num_blocks: int) -> list[range]:
    """Read what `format_runs` wrote.

    Raises:
        ValueError: not runs of blocks in `range(num_blocks)`.
    """
    runs = []
    for part in text.split(",") if text else ():
        match = _RUN.match(part)
        if match is None:
            raise ValueError(f"{part[:32]!r} is not a run of blocks")
        first, last = int(match[1]), int(match[2] or match[1])
        if not first <= last < num_blocks:
            raise ValueError(f"run {first}-{last} is not within {num_blocks} blocks")
        runs.append(range(first, last + 1))
    return runs


def parse_mask(text: str, num_blocks: int) -> int:
    """Read what `format_runs` wrote, as a bit set. Raises as `parse_runs`."""
    mask = 0
    for run in parse_runs(text, num_blocks):
        mask |= mask_of(run)
    return mask
