"""Reads samples of tensors, by which states are compared that should be equal, and digests them.

Where a sample lies follows from the step and its number alone, so all who hold a tensor take the same. A tensor that is not
larger than a sample is read whole.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterable

import torch
import xxhash

from torchft_ckpt.checkpointing.state.shards import memory_of

SAMPLE_BYTES = 4096
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def marks(tensors: Iterable[torch.Tensor], step: int = 0, whole_bytes: int = SAMPLE_BYTES) -> list[bytes]:
    """Return 8 bytes for each tensor: a digest of a sample of what is here of it. From a device all samples come at once.

    `whole_bytes`: parts that are not larger are read whole.
    """
    hashers: list[xxhash.xxh3_64] = []
    on_devices: dict[torch.device, list[tuple[xxhash.xxh3_64, torch.Tensor]]] = {}
    for tensor in tensors:
        hashers.append(hasher := xxhash.xxh3_64())
        for part in memory_of(tensor):
            if part.is_cpu:
                add_sample(hasher, part, step, 0, whole_bytes)
            else:
                on_devices.setdefault(part.device, []).append((hasher, sample_of(part, step, 0, whole_bytes)))
    for samples in on_devices.values():
        host = torch.cat([sample for _, sample in samples]).cpu()
        for (hasher, _), data in zip(samples, host.split([sample.numel() for _, sample in samples]), strict=True):
            hasher.update(data.numpy().data)
    return [hasher.digest() for hasher in hashers]


def _place(part: torch.Tensor, step: int, number: int, whole_bytes: int) -> tuple[int, int]:
    """Return which of a tensor's values are a sample: the first, and how many."""
    size = part.numel()
    num = size if part.nbytes <= whole_bytes else min(size, SAMPLE_BYTES // part.element_size())
    return _chance(step, number) % (size - num + 1), num


@functools.lru_cache(maxsize=16)
def _chance(step: int, number: int) -> int:
    return xxhash.xxh3_64_intdigest(f"{step} {number}".encode())


def _is_in_order(part: torch.Tensor) -> bool:
    """Whether a tensor's memory is that of its values, in their order."""
    return part.is_contiguous() and not part.is_conj() and not part.is_neg()


def sample_of(part: torch.Tensor, step: int, number: int, whole_bytes: int = SAMPLE_BYTES) -> torch.Tensor:
    """Return some bytes of a tensor, where it lies: a view, if its memory is in the order of its values."""
    first, num = _place(part, step, number, whole_bytes)
    part = part.detach()
    if _is_in_order(part):
        return part.view(-1)[first : first + num].view(torch.uint8)
    part = part.resolve_conj().resolve_neg()
    word = _WORDS.get(part.element_size())  # torch takes no single values of a tensor of fp8
    places = torch.arange(first, first + num, device=part.device)
    return torch.take(part if word is None else part.view(word), places).view(torch.uint8)


def add_sample(
    hasher: xxhash.xxh3_64, part: torch.Tensor, step: int, number: int, whole_bytes: int = SAMPLE_BYTES
) -> None:
    """Add a sample of a tensor to a digest; of one on the host without an operation of torch, as votes do it in each step."""
    if part.is_cpu and _is_in_order(part):
        first, num = _place(part, step, number, whole_bytes)
        size = part.element_size()
        hasher.update((ctypes.c_char * (num * size)).from_address(part.data_ptr() + first * size))
    else:
        hasher.update(sample_of(part, step, number, whole_bytes).cpu().numpy().data)
