"""Reads samples of tensors, by which states are compared that should be equal, and digests them.

Where a sample lies follows from the step and its number alone, so all who hold a tensor take the same. A tensor that is not
larger than a sample is read whole. Windows take turns: after so many of them all of a tensor was read.
"""

from __future__ import annotations

import ctypes
import functools
from collections import Counter
from collections.abc import Iterable, Sequence

import torch
import xxhash

from torchft_ckpt.checkpointing.state.shards import memory_of

SAMPLE_BYTES = 4096
WHOLE_BYTES = 16 << 20
"""Of no more than that all is a window: it takes 1.5 ms."""
WINDOW_BYTES = 4 << 20
_Place = tuple[int, int]
"""Which of a tensor's values are read: the first, and how many."""
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def marks(tensors: Iterable[torch.Tensor], whole_bytes: int = SAMPLE_BYTES) -> list[bytes]:
    """Return 8 bytes for each tensor: a digest of a sample of what is here of it.

    `whole_bytes`: parts that are not larger are read whole.
    """
    memory = map(memory_of, tensors)
    return _digests([[(part, place_of(part, 0, 0, whole_bytes)) for part in parts] for parts in memory])


def windows(tensors: Iterable[tuple[object, torch.Tensor]], turn: int) -> list[bytes]:
    """Return 11 bytes for each tensor: a digest of a window of what is here of it, and 3 that say which; 0: all of it.

    Args:
        tensors: with a key each. Windows are parts of equal size of all that has one key, of which this rank has as much as those
            who compare.
        turn: the same for them, and one more each time.
    """
    memory = [(key, memory_of(tensor)) for key, tensor in tensors]
    totals: Counter[object] = Counter()
    for key, parts in memory:
        for part in parts:
            totals[key] += part.nbytes
    cuts = {key: -(-total // WINDOW_BYTES) if total > WHOLE_BYTES else 1 for key, total in totals.items()}
    which = {key: xxhash.xxh3_64_digest(f"{turn % num} {num}".encode())[:3] for key, num in cuts.items() if num > 1}
    digests = _digests([[(part, _window(part, turn, cuts[key])) for part in parts] for key, parts in memory])
    return [digest + which.get(key, bytes(3)) for digest, (key, _) in zip(digests, memory, strict=True)]


def _window(part: torch.Tensor, turn: int, num_windows: int) -> _Place:
    size, num = part.numel(), min(num_windows, part.nbytes // SAMPLE_BYTES)
    if num <= 1:
        return 0, size
    first, stop = (size * (turn % num_windows % num + more) // num for more in (0, 1))
    return first, stop - first


def _digests(read: Iterable[Sequence[tuple[torch.Tensor, _Place]]]) -> list[bytes]:
    """Return a digest for each tensor of what is to be read of its parts. From a device all of that comes at once."""
    hashers: list[xxhash.xxh3_64] = []
    on_devices: dict[torch.device, list[tuple[xxhash.xxh3_64, torch.Tensor]]] = {}
    for parts in read:
        hashers.append(hasher := xxhash.xxh3_64())
        for part, place in parts:
            if part.is_cpu:
                add_sample(hasher, part, place)
            else:
                on_devices.setdefault(part.device, []).append((hasher, sample_of(part, place)))
    for samples in on_devices.values():
        host = torch.cat([sample for _, sample in samples]).cpu()
        for (hasher, _), data in zip(samples, host.split([sample.numel() for _, sample in samples]), strict=True):
            hasher.update(data.numpy().data)
    return [hasher.digest() for hasher in hashers]


def place_of(part: torch.Tensor, step: int, number: int, whole_bytes: int = SAMPLE_BYTES) -> _Place:
    """Return where a sample of a tensor lies."""
    size = part.numel()
    num = size if part.nbytes <= whole_bytes else min(size, SAMPLE_BYTES // part.element_size())
    return _chance(step, number) % (size - num + 1), num


@functools.lru_cache(maxsize=16)
def _chance(step: int, number: int) -> int:
    return xxhash.xxh3_64_intdigest(f"{step} {number}".encode())


def sample_of(part: torch.Tensor, place: _Place) -> torch.Tensor:
    """Return some bytes of a tensor, where it lies: a view, if its memory is in the order of its values."""
    first, num = place
    part = part.detach().resolve_conj().resolve_neg()
    if num == part.numel() or part.is_contiguous():
        return part.reshape(-1)[first : first + num].view(torch.uint8)
    word = _WORDS.get(part.element_size())  # torch takes no single values of a tensor of fp8
    places = torch.arange(first, first + num, device=part.device)
    return torch.take(part if word is None else part.view(word), places).view(torch.uint8)


def add_sample(hasher: xxhash.xxh3_64, part: torch.Tensor, place: _Place) -> None:
    """Add a sample of a tensor to a digest; of one on the host without an operation of torch, as votes do it in each step."""
    if part.is_cpu and part.is_contiguous() and not part.is_conj() and not part.is_neg():
        first, num = place
        size = part.element_size()
        hasher.update((ctypes.c_char * (num * size)).from_address(part.data_ptr() + first * size))
    else:
        hasher.update(sample_of(part, place).cpu().numpy().data)
