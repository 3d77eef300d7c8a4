"""Names each leaf of a state by its path in the tree, as the state format names tensors: keys and positions, joined by dots.

It goes as deep as the state format does. How many leaves there are is the caller's to bound: lists that share each other have
more of them than they have bytes.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from torchft_ckpt.checkpointing.state.tree import MAX_DEPTH, join_path
from torchft_ckpt.errors import UnsupportedValueError


def leaves(value: object, path: str = "", depth: int = 0) -> Iterator[tuple[str, object]]:
    """Yield (path, leaf) in the order of the tree. Empty containers are leaves, so that none is lost.

    Raises:
        UnsupportedValueError: it is nested too deep, as a container that holds itself is.
    """
    if depth > MAX_DEPTH:
        raise UnsupportedValueError(
            f"{path[:120]}: nested deeper than {MAX_DEPTH} levels (a container that holds itself?)", path[:120]
        )
    if isinstance(value, dict) and value:
        for key, item in value.items():
            yield from leaves(item, join_path(path, key), depth + 1)
    elif isinstance(value, (list, tuple)) and value and not isinstance(value, torch.Size):
        for position, item in enumerate(value):
            yield from leaves(item, join_path(path, position), depth + 1)
    else:
        yield path or "state", value
