"""The models whose state is carried, what they are filled with, and how two of them are compared: bit by bit."""

from __future__ import annotations

from typing import Any

import torch
import xxhash
from torch import Tensor, nn

from bench.transport_figures import MIB

FLOAT_BYTES = 4
_ODD = 2_654_435_761 % (1 << 31)


class Model(nn.Module):
    """A live model of float32 parameters, all of one length.

    Args:
        num_tensors: how many.
        tensor_bytes: length of each, a multiple of 4.
    """

    def __init__(self, num_tensors: int, tensor_bytes: int) -> None:
        super().__init__()
        self.weights = nn.ParameterList(
            nn.Parameter(torch.empty(tensor_bytes // FLOAT_BYTES)) for _ in range(num_tensors)
        )

    def tensors(self) -> list[Tensor]:
        """Return the parameters' own memory."""
        return [weight.detach() for weight in self.weights]


SHAPES = {
    "large": (16, 64 * MIB),
    "small": (6400, 10 * 1024),
    "held": (16, 4 * MIB),
    "torn": (32, MIB),
}
"""Number and length in bytes of the tensors of each state that has no size of its own."""


def fill(tensors: list[Tensor], seed: int) -> None:
    """Give every element another bit pattern; with another seed no element keeps its own."""
    for index, tensor in enumerate(tensors):
        integers = tensor.view(torch.int32).view(-1)
        torch.arange(integers.numel(), out=integers)
        integers.mul_(_ODD).add_((seed * 7919 + index * 104_729) % (1 << 31))


def fill_uniform(tensors: list[Tensor], number: int) -> None:
    """Give every element the same value, as one training step does that writes all parameters."""
    for tensor in tensors:
        tensor.fill_(float(number))


def digest(tensors: list[Tensor]) -> str:
    """Return a digest of the bits of all tensors in order."""
    hasher = xxhash.xxh3_128()
    for tensor in tensors:
        hasher.update(byte_view(tensor))
    return hasher.hexdigest()


def byte_view(tensor: Tensor) -> memoryview:
    """Return the memory of a contiguous tensor as bytes, without a copy."""
    array: Any = tensor.detach().view(-1).view(torch.uint8).numpy()
    return memoryview(array)


def values_in(tensors: list[Tensor]) -> list[int]:
    """Return the distinct values that a state of `fill_uniform` has; more than one means that it is torn."""
    found: set[float] = set()
    for tensor in tensors:
        low, high = torch.aminmax(tensor)
        found.update((low.item(), high.item()))
    return sorted(int(value) for value in found)
