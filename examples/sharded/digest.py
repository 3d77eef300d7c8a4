"""One fingerprint of a model and optimizer that lie in parts on several ranks, whatever the layout."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import xxhash
from torch.distributed.tensor import DTensor


def digest_of(**states: Any) -> str:
    """Return the digest of the names, dtypes, shapes and bits of all tensors in state dicts.

    Every rank of the group has to call it at the same time: DTensors are gathered.
    """
    hasher = xxhash.xxh3_128()
    for name, tensor in sorted(_tensors("", states), key=lambda pair: pair[0]):
        whole = tensor.detach().full_tensor() if isinstance(tensor, DTensor) else tensor.detach()
        hasher.update(f"{name} {whole.dtype} {tuple(whole.shape)}\n".encode())
        hasher.update(whole.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return hasher.hexdigest()


def _tensors(name: str, node: Any) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(node, torch.Tensor):
        yield name, node
    elif isinstance(node, dict):
        for key, child in node.items():
            yield from _tensors(f"{name}/{key}", child)
    elif isinstance(node, list | tuple):
        for index, child in enumerate(node):
            yield from _tensors(f"{name}/{index}", child)
