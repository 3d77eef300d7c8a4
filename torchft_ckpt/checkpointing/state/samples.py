"""Reads samples of tensors, by which states are compared that should be equal, and digests them.

Where a sample lies follows from the step and its number alone, so all who hold a tensor take the same. A tensor that is not
larger than a sample is read whole.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable

import torch
import xxhash

from torchft_ckpt.checkpointing.state.shards import memory_of

SAMPLE_BYTES = 4096
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Samples:
    """One sample of each of some tensors, as they are now. From a CUDA device it is copied without a wait.

    Args:
        tensors: what is here of them is looked at.
        step: says where a sample lies.
    """

    def __init__(self, tensors: Iterable[torch.Tensor], step: int) -> None:
        self._hashers: list[xxhash.xxh3_64] = []
        on_devices: dict[torch.device, list[tuple[xxhash.xxh3_64, torch.Tensor]]] = {}
        for tensor in tensors:
            hasher = xxhash.xxh3_64()
            self._hashers.append(hasher)
            for part in memory_of(tensor):
                if part.is_cuda:
                    on_devices.setdefault(part.device, []).append((hasher, sample_of(part, step, 0)))
                else:
                    add_sample(hasher, part, step, 0)
        self._coming: list[tuple[torch.cuda.Event, torch.Tensor, list[tuple[xxhash.xxh3_64, int]]]] = []
        for device, samples in on_devices.items():
            with torch.cuda.device(device):
                host = torch.cat([sample for _, sample in samples]).to("cpu", non_blocking=True)
                is_copied = torch.cuda.Event()
                is_copied.record()
            self._coming.append((is_copied, host, [(hasher, sample.numel()) for hasher, sample in samples]))

    def digests(self) -> list[bytes]:
        """Return 8 bytes for each tensor. For one thread."""
        coming, self._coming = self._coming, []
        for is_copied, host, samples in coming:
            is_copied.synchronize()
            for (hasher, _), sample in zip(samples, host.split([size for _, size in samples]), strict=True):
                hasher.update(sample.numpy().data)
        return [hasher.digest() for hasher in self._hashers]


def marks(tensors: Iterable[torch.Tensor]) -> list[bytes]:
    """Return a digest of one sample of each tensor, by which it is seen that somebody has written to it."""
    return Samples(tensors, 0).digests()


def _place(part: torch.Tensor, step: int, number: int) -> tuple[int, int]:
    """Return which of a tensor's values are a sample: the first, and how many."""
    size = part.numel()
    num = min(size, SAMPLE_BYTES // part.element_size())
    return xxhash.xxh3_64_intdigest(f"{step} {number}".encode()) % (size - num + 1), num


def _is_in_order(part: torch.Tensor) -> bool:
    """Whether a tensor's memory is that of its values, in their order."""
    return part.is_contiguous() and not part.is_conj() and not part.is_neg()


def sample_of(part: torch.Tensor, step: int, number: int) -> torch.Tensor:
    """Return some bytes of a tensor, where it lies: a view, if its memory is in the order of its values."""
    first, num = _place(part, step, number)
    part = part.detach()
    if _is_in_order(part):
        return part.view(-1)[first : first + num].view(torch.uint8)
    part = part.resolve_conj().resolve_neg()
    word = _WORDS.get(part.element_size())  # torch takes no single values of a tensor of fp8
    places = torch.arange(first, first + num, device=part.device)
    return torch.take(part if word is None else part.view(word), places).view(torch.uint8)


def add_sample(hasher: xxhash.xxh3_64, part: torch.Tensor, step: int, number: int) -> None:
    """Add a sample of a tensor to a digest; of one on the host without an operation of torch, as votes do it in each step."""
    if part.is_cpu and _is_in_order(part):
        first, num = _place(part, step, number)
        size = part.element_size()
        hasher.update((ctypes.c_char * (num * size)).from_address(part.data_ptr() + first * size))
    else:
        hasher.update(sample_of(part, step, number).cpu().numpy().data)
