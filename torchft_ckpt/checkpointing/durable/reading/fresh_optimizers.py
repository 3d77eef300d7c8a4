"""Makes room for the state of optimizers that have not stepped yet, in a state dict that a checkpoint is loaded into.

A fresh optimizer's state dict names no state, so loading what it names would leave out the moments that were saved, and training
would go on from other ones. Here what was saved says which tensors there are. Where parameters are sharded it cannot say on which
layout: that is known of optimizers that are handed in themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from torchft_ckpt.checkpointing.durable.reading.pieces import StateReader
from torchft_ckpt.checkpointing.state.containers import Path, optimizer_states, walk
from torchft_ckpt.checkpointing.state.optimizer_state import with_optimizer_state
from torchft_ckpt.checkpointing.state.shards import adapter_of
from torchft_ckpt.errors import StateMismatchError


class Template(NamedTuple):
    """A state dict that a checkpoint is loaded into."""

    state_dict: dict[str, Any]
    like: dict[str, Any]
    """The same of fresh optimizers, with the state that they will have; empty where nothing is sharded."""


def template_of(state_dict: Mapping[str, Any]) -> Template:
    """Return the state dict with the states of the objects in it, as `torch.distributed.checkpoint.save` takes them."""
    template = {key: state_of_value(value) for key, value in state_dict.items()}
    fresh = {
        key: value for key, value in state_dict.items() if isinstance(value, torch.optim.Optimizer) and not value.state
    }
    owned = (p for value in fresh.values() for group in value.param_groups for p in group["params"])
    if not fresh or not any(adapter_of(tensor) is not None for tensor in (*owned, *_tensors(template).values())):
        return Template(template, {})
    with with_optimizer_state(fresh.values()):
        return Template(template, {key: state_of_value(value) for key, value in fresh.items()})


def state_of_value(value: Any) -> Any:
    """Return the state of an object that has one, as `torch.distributed.checkpoint.save` does at the root."""
    get: Callable[[], Any] | None = getattr(value, "state_dict", None)
    return get() if callable(get) and hasattr(value, "load_state_dict") else value


@contextmanager
def room_for_optimizer_state(
    reader: StateReader[Any], state_dict: Mapping[str, Any], like: Mapping[str, Any]
) -> Iterator[None]:
    """Put into each empty `state` beside `param_groups` what the checkpoint has of it, for the block to load into.

    Tensors are new, on the CPU, or sharded ones of `like`. Where the block raises, all is as before.

    Args:
        reader: of the checkpoint.
        state_dict: nested dicts and lists.
        like: see `Template`.

    Raises:
        StateMismatchError: the layout of a tensor is not known here.
    """
    added: list[dict[Any, Any]] = []
    empty = list(_without_state(state_dict))
    if empty:
        is_sharded = any(adapter_of(tensor) is not None for tensor in _tensors(state_dict).values())
        place_of = _places(reader, is_sharded, _tensors(like))
        for path, state, keys in empty:
            saved = _with_places(reader.structure_at(path), place_of)
            if isinstance(saved, dict):
                state.update((keys.get(str(key), key), item) for key, item in saved.items())
                added.append(state)
    try:
        yield
    except BaseException:
        for state in added:
            state.clear()
        raise


def _without_state(value: object) -> Iterator[tuple[Path, dict[Any, Any], dict[str, Any]]]:
    """Yield each empty `state`, with its path, and the keys that it will have by their text, which is all that DCP knows."""
    for path, of_optimizer in optimizer_states(value):
        state, groups = of_optimizer["state"], of_optimizer["param_groups"]
        if isinstance(groups, list) and isinstance(state, dict) and not state:
            lists = [group.get("params") for group in groups if isinstance(group, Mapping)]
            yield (*path, "state"), state, {str(key): key for keys in lists if isinstance(keys, list) for key in keys}


def _tensors(state: object) -> dict[Path, torch.Tensor]:
    return {path: value for path, value in walk(state) if isinstance(value, torch.Tensor)}


def _places(
    reader: StateReader[Any], is_sharded: bool, layouts: Mapping[Path, torch.Tensor]
) -> Callable[[str], torch.Tensor]:
    def place_of(fqn: str) -> torch.Tensor:
        saved = reader.tensors[fqn]
        held = layouts.get(saved.path)
        if held is not None and adapter_of(held) is not None:
            return held
        if held is None and is_sharded and saved.shape:
            raise StateMismatchError(
                f"{reader.location} has {fqn[:120]} for an optimizer that has no state here, and others here are sharded, so its "
                "layout is not known: hand in the optimizer itself, or a state dict that names its state; nothing was changed",
                reader.location,
            )
        return torch.empty(saved.shape, dtype=saved.dtype, device="cpu")

    return place_of


def _with_places(structure: Any, place_of: Callable[[str], torch.Tensor]) -> Any:
    if isinstance(structure, dict):
        return {key: _with_places(item, place_of) for key, item in structure.items()}
    if isinstance(structure, list):
        return [_with_places(item, place_of) for item in structure]
    return place_of(structure) if isinstance(structure, str) else None
