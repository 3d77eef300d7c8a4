"""Names each leaf of a state by its path in the tree, as the state format names tensors: keys and positions, joined by dots."""

from __future__ import annotations

from collections.abc import Iterator

import torch


def leaves(value: object, path: str = "") -> Iterator[tuple[str, object]]:
    """Yield (path, leaf) in the order of the tree. Empty containers are leaves, so that none is lost."""
    if isinstance(value, dict) and value:
        for key, item in value.items():
            yield from leaves(item, _join(path, key))
    elif isinstance(value, (list, tuple)) and value and not isinstance(value, torch.Size):
        for position, item in enumerate(value):
            yield from leaves(item, _join(path, position))
    else:
        yield path or "state", value


def _join(path: str, key: object) -> str:
    text = str(key).encode(errors="backslashreplace").decode()
    return f"{path}.{text}" if path else text
