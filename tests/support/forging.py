"""Blocks that are forged: they have the xxh3_128 digest that the honest source announced.

xxh3 with a known seed has second preimages that cost nothing: of the 16 stripes of each KiB twelve can be chosen, the rest is
solved for.
"""

from __future__ import annotations

import struct

import numpy as np

KIB = 1024
SECRET = bytes.fromhex(  # kSecret of the public XXH3 specification
    "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671fcb79e64eccc0e578825ad07dccff7221b8084674f743248ee03590e6813a264c"
    "3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8a8fa763fe39c343ff9dcbbc7c70b4f1d8a51e04bcdb45931c89f7ec9d9787364"
    "eac5ac8334d3ebc3c581a0fffa1363eb170ddd51b7f0da49d316552629d4689e2b16be587d47a1fc8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e"
)
MASK_32, MASK_64 = (1 << 32) - 1, (1 << 64) - 1


def forge(block: bytes, seed: int, wanted: bytes) -> bytes:
    """Return bytes with the xxh3_128 of `block` and this seed, equal to `wanted` in 12 of each 16 stripes of 64 bytes.

    The last, partial KiB stays that of `block`.
    """
    words = struct.unpack("<24Q", SECRET)
    keys = [(word + seed if n % 2 == 0 else word - seed) & MASK_64 for n, word in enumerate(words)]
    honest, forged = np.frombuffer(block, "<u8"), np.frombuffer(wanted, "<u8").copy()
    num_full = (len(block) - 1) // KIB
    forged[num_full * 128 :] = honest[num_full * 128 :]
    for at in range(0, num_full * 128, 128):
        true = honest[at : at + 128].reshape(16, 8).tolist()
        false = forged[at : at + 128].reshape(16, 8).tolist()
        for lane in range(8):
            _solve(true, false, lane, keys)
        forged[at : at + 128] = np.array(false, dtype=np.uint64).reshape(-1)
    return forged.tobytes()


def _solve(true: list[list[int]], false: list[list[int]], lane: int, keys: list[int]) -> None:
    """Choose the last four stripes of a lane so that the accumulator gets the same two sums."""
    words, products = 0, 0
    for n in range(16):
        words += true[n][lane]
        products += _product(true[n][lane] ^ keys[n + lane])
    for n in range(12):
        words -= false[n][lane]
        products -= _product(false[n][lane] ^ keys[n + lane])
    target = products & MASK_64
    low_a, high_a = MASK_32, min(target // MASK_32, MASK_32)
    rest = target - low_a * high_a
    low_b, high_b = rest, 1
    if rest > MASK_32:  # at most 2**33
        low_b, high_b = rest // 2, 2
        if rest % 2:
            low_a, high_a = MASK_32 - 1, min(target // (MASK_32 - 1), MASK_32)
            rest = target - low_a * high_a
            low_b, high_b = (rest, 1) if rest <= MASK_32 else (rest // 3, 3)
    a = (low_a | high_a << 32) ^ keys[12 + lane]
    b = (low_b | high_b << 32) ^ keys[13 + lane]
    key_c, key_d = keys[14 + lane], keys[15 + lane]
    left = (words - a - b) & MASK_64
    low = (left - key_d) & MASK_32
    high = ((left - ((key_c >> 32) << 32) - low - (key_d & MASK_32)) >> 32) & MASK_32
    c, d = ((key_c >> 32) << 32) | low, (high << 32) | (key_d & MASK_32)
    false[12][lane], false[13][lane], false[14][lane], false[15][lane] = a, b, c, d


def _product(x: int) -> int:
    return (x & MASK_32) * (x >> 32)
