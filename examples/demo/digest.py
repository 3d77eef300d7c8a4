"""One fingerprint for a whole training state: equal only if all of it is equal bit for bit."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping

import torch
import xxhash
from torch import Tensor


def digest_state(state: Mapping[str, object]) -> str:
    """Return the xxh3-128 digest, in hex, of a tree of dicts, lists, tensors and plain values.

    Tensors enter as name, dtype, shape and their raw bytes (an integer view, so -0.0 differs from 0.0 and every NaN
    from every other); plain values enter as JSON.

    Raises:
        TypeError: the tree holds something else.
    """
    hasher = xxhash.xxh3_128()
    for name, value in _leaves("", state):
        if isinstance(value, Tensor):
            local = value.detach().cpu().contiguous()
            hasher.update(f"{name} {local.dtype} {tuple(local.shape)}\n".encode())
            hasher.update(local.reshape(-1).view(torch.uint8).numpy().data)
        else:
            hasher.update(f"{name} {json.dumps(value)}\n".encode())
    return hasher.hexdigest()


def _leaves(name: str, node: object) -> Iterator[tuple[str, object]]:
    if isinstance(node, Mapping):
        for key in sorted(node, key=str):
            yield from _leaves(f"{name}/{key}", node[key])
    elif isinstance(node, list | tuple):
        for index, child in enumerate(node):
            yield from _leaves(f"{name}/{index}", child)
    else:
        yield name, node
