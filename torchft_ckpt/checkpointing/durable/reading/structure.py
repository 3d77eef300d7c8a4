"""The containers of a state dict, and what DCP takes for a leaf in them: its names are those of `flatten_state_dict`.

A structure is nested dicts and lists, of which a leaf is the name of a tensor, or None for what is no tensor to DCP.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from torchft_ckpt.checkpointing.state.containers import Path, is_dcps_leaf
from torchft_ckpt.checkpointing.state.local_state import some_of
from torchft_ckpt.checkpointing.state.tree import Node, TensorPlace, in_words, items_of_node
from torchft_ckpt.errors import StateMismatchError


def leaves_of(container: Any, fqn: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Yield the leaves that are no tensors: the name of each, what it is in, and its key there."""
    for key, item in container.items() if isinstance(container, Mapping) else enumerate(container):
        name = f"{fqn}.{key}" if fqn else str(key)
        if isinstance(item, torch.Tensor):
            continue
        if is_dcps_leaf(item):
            yield name, container, key
        else:
            yield from leaves_of(item, name)


def structure_of(state: Any, names: Sequence[str]) -> Any:
    """Return the structure of a state in which a `TensorPlace` stands for each tensor; `names` are those of the tensors."""
    if isinstance(state, TensorPlace):
        return names[state.number]
    if isinstance(state, Mapping):
        return {key: structure_of(item, names) for key, item in state.items()}
    return None if is_dcps_leaf(state) else [structure_of(item, names) for item in state]


def merged(one: Any, other: Any) -> Any:
    """Return what is in either structure; the first one's where both have something else than dicts."""
    if isinstance(one, dict) and isinstance(other, dict):
        return {**other, **{key: merged(item, other[key]) if key in other else item for key, item in one.items()}}
    return other if one is None else one


def node_at(tree: Node, path: Path) -> Node:
    """Return the node at DCP's path in a checked tree; None if nothing is there."""
    for key in path:
        tree = next((item for other, item in items_of_node(tree) if in_words(other) == str(key)), None)
    return tree


def structure_of_paths(tensors: Mapping[str, Path], values: Iterable[Path], prefix: Path) -> Any:
    """Return the structure that DCP's paths show below one of them; None where nothing is.

    Args:
        tensors: the paths of tensors, by their names.
        values: the paths of the rest.
        prefix: the path. What is directly below it has keys as text.

    Raises:
        StateMismatchError: a key may have been a number or its text.
    """
    at_values = set(values)
    leaves: dict[Path, str | None] = {path: None for path in at_values if _is_in(path, prefix)}
    for fqn, path in tensors.items():
        if _is_in(path, prefix) and not any(path[:end] in at_values for end in range(1, len(path) + 1)):
            leaves[path] = fqn  # what is in a value comes with it
    doubtful = [
        ".".join(map(str, path))
        for path in leaves
        for key in path[len(prefix) + 1 :]
        if isinstance(key, str) and key.isdigit()
    ]
    if doubtful:
        raise StateMismatchError(
            f"whether keys of {some_of(doubtful)} are numbers or texts was not saved: hand in a state dict that names them",
            ".".join(map(str, prefix)),
        )
    root: dict[Any, Any] = {}
    for path, leaf in leaves.items():
        at = root
        for key in path[len(prefix) : -1]:
            at = at.setdefault(key, {})
        at[path[-1]] = leaf
    return {key: _with_lists(item) for key, item in root.items()} or None


def _is_in(path: Path, prefix: Path) -> bool:
    return len(path) > len(prefix) and path[: len(prefix)] == prefix


def _with_lists(value: Any) -> Any:
    """Make lists of dicts whose keys are numbers: of a list's items DCP's paths have the numbers."""
    if not isinstance(value, dict):
        return value
    items = {key: _with_lists(item) for key, item in value.items()}
    return [items[key] for key in sorted(items)] if items and all(isinstance(key, int) for key in items) else items
