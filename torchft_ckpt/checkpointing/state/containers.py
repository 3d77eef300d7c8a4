"""Walks through the containers of a state: mappings, lists and tuples. It knows no tensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

Path = tuple[str | int, ...]
"""The keys that lead to a tensor or a value: DCP's `planner_data`."""


def items_of(value: object) -> Iterator[tuple[str | int, Any]]:
    """Yield the items of a container, by the keys that DCP's paths have: of a mapping their text, of a list numbers."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield str(key), item
    elif isinstance(value, (list, tuple)):
        yield from enumerate(value)


def optimizer_states(
    value: object, path: tuple[str | int, ...] = ()
) -> Iterator[tuple[tuple[str | int, ...], Mapping[Any, Any]]]:
    """Yield the state dicts of optimizers in a state, with the paths that lead to them: what has `state` and `param_groups`."""
    if isinstance(value, Mapping) and "state" in value and "param_groups" in value:
        yield path, value
    for key, item in items_of(value):
        yield from optimizer_states(item, (*path, key))
