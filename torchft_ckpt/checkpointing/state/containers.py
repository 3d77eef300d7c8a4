"""Walks through the containers of a state: mappings, lists, tuples and deques. A flat one may be a leaf (`is_one_leaf`)."""

from __future__ import annotations

from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch

from torchft_ckpt.checkpointing.state.classes import is_named_tuple
from torchft_ckpt.checkpointing.state.tree import FLAT, MANY_LEAVES, in_words, is_flat, join_path
from torchft_ckpt.errors import StateFormatError, StateMismatchError

_MANAGERS_KEYS = {"user", "torchft"}
SEQUENCES = (list, tuple, deque)
Path = tuple[str | int, ...]
"""The keys that lead to a tensor or a value: DCP's `planner_data`."""


def items_of(value: object) -> Iterator[tuple[str | int, Any]]:
    """Yield the items of a container, by the keys that DCP's paths have: of a mapping their text, of a list numbers."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield in_words(key), item
    elif isinstance(value, SEQUENCES):
        yield from enumerate(value)


def is_one_leaf(container: object, num_beside: int = 0) -> bool:
    """Whether a container is taken for one leaf: a sequence of plain values alone is, and such a mapping if it, or the container
    that it is in, of `num_beside` items, has many.
    """
    if isinstance(container, Mapping):
        return max(len(container), num_beside) > MANY_LEAVES and is_flat(container.values())
    return isinstance(container, SEQUENCES) and is_flat(container)


def rebuilt(container: Any, change: Callable[[Any], Any]) -> Any:
    """Return a container of the same class whose items are what a function made of each; the same where it changed none.

    Mappings of classes that a state does not carry become dicts; sequences of such classes stay as they are.
    """
    kind = type(container)
    if isinstance(container, Mapping):
        items = {key: change(item) for key, item in container.items()}
        if all(items[key] is item for key, item in container.items()):
            return container
        if kind is OrderedDict:
            ordered = OrderedDict(items)
            vars(ordered).update(vars(container))  # `_metadata` of a module's state
            return ordered
        return defaultdict(container.default_factory, items) if isinstance(container, defaultdict) else items
    changed = [change(item) for item in container]
    if all(new is old for new, old in zip(changed, container, strict=True)):
        return container
    if isinstance(container, deque):
        return deque(changed, container.maxlen)
    if kind is list:
        return changed
    return tuple.__new__(kind, changed) if kind is tuple or is_named_tuple(kind) else container


def walk(value: object, path: Path = (), num_beside: int = 0) -> Iterator[tuple[Path, Any]]:
    """Yield a value and all that is in it, each with the keys that lead to it; a container comes before its items.

    `is_one_leaf` says what is not looked into.
    """
    yield path, value
    for key, item in () if is_one_leaf(value, num_beside) else items_of(value):
        yield from walk(item, (*path, key), len(value))  # type: ignore[arg-type]  # a container


def optimizer_states(state: object, path: Path = (), num_beside: int = 0) -> Iterator[tuple[Path, Mapping[Any, Any]]]:
    """Yield the state dicts of optimizers in a state, with the paths that lead to them: what has `state` and `param_groups`.

    As `walk`, and past tensors, of which there are most.
    """
    if isinstance(state, Mapping) and "state" in state and "param_groups" in state:
        yield path, state
    for key, item in () if is_one_leaf(state, num_beside) else items_of(state):
        if not isinstance(item, torch.Tensor):
            yield from optimizer_states(item, (*path, key), len(state))  # type: ignore[arg-type]  # a container


def not_here(here: object, there: object, path: str = "") -> Iterator[str]:
    """Yield the paths of what a state from there has and that which is here has not, but of what optimizers make as they step.

    Of what is longer there the first item is named.
    """
    mine = dict(items_of(here))
    for key, item in items_of(there):
        if key not in mine:
            yield join_path(path, key)
            if isinstance(there, SEQUENCES):
                return
        elif key != "state" or "param_groups" not in mine:
            yield from not_here(mine[key], item, join_path(path, key))


def flattened(state: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the leaves of a state by DCP's names, and the keys that lead to each.

    Raises:
        StateFormatError: DCP has no name for one.
    """
    leaves: dict[str, Any] = {}
    paths: dict[str, Any] = {}

    def add(items: Iterable[tuple[Any, Any]], path: Path, prefix: str) -> None:
        for key, item in items:
            name = f"{prefix}{key}"
            if type(item) not in FLAT and not is_dcps_leaf(item):
                is_mapping = isinstance(item, Mapping)
                items_in = ((str(k), v) for k, v in item.items()) if is_mapping else enumerate(item)
                add(items_in, (*path, key), f"{name}.")
            elif name in leaves:
                raise ValueError(f"duplicated flatten key {name}")
            else:
                leaves[name], paths[name] = item, (*path, key)

    try:
        add(((str(key), item) for key, item in state.items()), (), "")
    except ValueError as error:  # or a key that is an integer of more than 4300 digits
        raise StateFormatError(f"the state has a key of which DCP makes no name: {error}", party="source") from error
    return leaves, paths


def is_dcps_leaf(value: object) -> bool:
    """Whether DCP sees a value as one: a mapping is none, and a list that holds tensors or mappings is none."""
    if isinstance(value, Mapping):
        return False
    if not isinstance(value, list) or is_flat(value):
        return True
    return not any(
        isinstance(item, torch.Tensor) or (isinstance(item, (Mapping, list)) and not is_dcps_leaf(item))
        for item in value
    )


def below_root(state: Any, root: str | None) -> dict[str, Any]:
    """Return the part of a state where names begin, for readers from outside.

    Args:
        root: dotted path; None: what the Manager's `state_dict` returned (`user.default`, or all of `user` where that has no such
            key), or all of the state where no Manager made it.

    Raises:
        StateMismatchError: nothing is there, or no dict.
    """
    if root is None:
        is_managers = isinstance(state, dict) and set(state) == _MANAGERS_KEYS
        user = state["user"] if is_managers else {}
        path: tuple[str, ...] = (
            ("user", "default") if is_managers and isinstance(user, dict) and "default" in user else ()
        )
        path = path or (("user",) if is_managers else ())
    else:
        path = tuple(key for key in root.split(".") if key)
    for position, key in enumerate(path):
        if not isinstance(state, dict) or key not in state:
            have = ", ".join(sorted(map(in_words, state))[:10]) if isinstance(state, dict) else type(state).__name__
            raise StateMismatchError(
                f"nothing is at root={'.'.join(path)!r}: below {'.'.join(path[:position]) or 'the top'} there is {have}",
                party="root",
            )
        state = state[key]
    if not isinstance(state, dict):
        raise StateMismatchError(f"root={'.'.join(path)!r} is a {type(state).__name__}, not a dict", party="root")
    return state
