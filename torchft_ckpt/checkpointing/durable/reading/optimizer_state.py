"""Makes room for the state of optimizers that have not stepped yet, in a state dict that a checkpoint is loaded into.

A fresh optimizer's state dict names no state, so loading what it names would leave out the moments that were saved, and training
would go on from other ones. Here what was saved says which tensors there are. Where parameters are sharded it cannot say on which
layout: then the caller has to.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from torchft_ckpt.checkpointing.durable.reading.checkpoint import Path
from torchft_ckpt.checkpointing.durable.reading.pieces import StateReader
from torchft_ckpt.checkpointing.state.shards import adapter_of

logger = logging.getLogger(__name__)


@contextmanager
def room_for_optimizer_state(
    reader: StateReader, state_dict: Mapping[str, Any], like: Mapping[str, Any] | None = None
) -> Iterator[None]:
    """Put into each empty `state` beside `param_groups` what the checkpoint has of it, for the block to load into.

    Tensors are new, on the CPU, or those of `like`. Where the block raises, all is as before.

    Args:
        reader: of the checkpoint.
        state_dict: nested dicts and lists.
        like: the same with state, for its layout: sharded tensors in it are taken.
    """
    added: list[dict[Any, Any]] = []
    empty = list(_without_state(state_dict, ()))
    if empty:
        values = reader.value_paths
        below = {path for path in values.values() if len(path) > 1}
        is_sharded = any(adapter_of(tensor) is not None for _, tensor in _tensors(state_dict, ()))
        layouts = {path: tensor for path, tensor in _tensors(like, ()) if adapter_of(tensor) is not None}
        for prefix, state, names in empty:
            leaves: dict[Path, Any] = {path: None for path in below if _is_in(path, prefix)}
            unknown = 0
            for saved in reader.tensors.values():
                if not _is_in(saved.path, prefix) or any(
                    saved.path[:end] in below for end in range(len(saved.path) + 1)
                ):
                    continue  # what is in a value comes with it
                held = layouts.get(saved.path)
                unknown += is_sharded and held is None and bool(saved.shape)
                leaves[saved.path] = torch.empty(saved.shape, dtype=saved.dtype, device="cpu") if held is None else held
            if unknown:
                logger.warning(
                    "%s has %d tensors of the state of an optimizer, which has none here, nor is its layout known: they are left"
                    " out. Hand in the optimizer itself, or a state dict that names its state",
                    reader.location,
                    unknown,
                )
            elif leaves:
                below_state = {path[len(prefix) :]: leaf for path, leaf in leaves.items()}
                state.update((names.get(key, key), item) for key, item in _nested(below_state).items())
                added.append(state)
    try:
        yield
    except BaseException:
        for state in added:
            state.clear()
        raise


def _without_state(value: object, path: Path) -> Iterator[tuple[Path, dict[Any, Any], dict[str, Any]]]:
    """Yield each empty `state`, with its path and its keys to come by their text: DCP's paths have keys as text."""
    if isinstance(value, Mapping):
        state, groups = value.get("state"), value.get("param_groups")
        if isinstance(groups, list) and isinstance(state, dict) and not state:
            lists = [group.get("params") for group in groups if isinstance(group, Mapping)]
            yield (*path, "state"), state, {str(key): key for keys in lists if isinstance(keys, list) for key in keys}
    for key, item in _items(value):
        yield from _without_state(item, (*path, key))


def _items(value: object) -> Iterable[tuple[str | int, Any]]:
    """The items of a container, by the keys that DCP's paths have."""
    if isinstance(value, Mapping):
        return ((str(key), item) for key, item in value.items())
    return enumerate(value) if isinstance(value, (list, tuple)) else ()


def _tensors(value: object, path: Path) -> Iterator[tuple[Path, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield path, value
    for key, item in _items(value):
        yield from _tensors(item, (*path, key))


def _is_in(path: Path, prefix: Path) -> bool:
    return len(path) > len(prefix) and path[: len(prefix)] == prefix


def _nested(leaves: Mapping[Path, Any]) -> dict[str, Any]:
    root: dict[Any, Any] = {}
    for path, leaf in leaves.items():
        at = root
        for key in path[:-1]:
            at = at.setdefault(key, {})
        at[path[-1]] = leaf
    return {str(key): _with_lists(item) for key, item in root.items()}


def _with_lists(value: Any) -> Any:
    """Make lists of dicts whose keys are numbers: of a list's items DCP's paths have the numbers."""
    if not isinstance(value, dict):
        return value
    items = {key: _with_lists(item) for key, item in value.items()}
    return [items[key] for key in sorted(items)] if items and all(isinstance(key, int) for key in items) else items
