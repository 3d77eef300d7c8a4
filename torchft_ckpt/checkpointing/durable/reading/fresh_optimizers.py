"""Makes room for the state of optimizers in a state dict that a checkpoint is loaded into.

An optimizer's state dict names the state that is here, and no more. Loading what it names would leave out moments that were
saved, and training would go on from other ones. Here what was saved says which tensors there are. Where parameters are sharded
it cannot say on which layout: that is known of optimizers that are handed in themselves. What these hand out is wanted as
torch's own `load_state_dict` takes it: all of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch

from torchft_ckpt.checkpointing.durable.reading.pieces import StateReader
from torchft_ckpt.checkpointing.state.containers import Path, optimizer_states, walk
from torchft_ckpt.checkpointing.state.local_state import some_of
from torchft_ckpt.checkpointing.state.parameters import (
    Owned,
    StatePlaces,
    names_from,
    returned_by,
    tensor_to_fill,
    why_not_of,
)
from torchft_ckpt.checkpointing.state.shards import adapter_of
from torchft_ckpt.checkpointing.state.tree import in_words
from torchft_ckpt.errors import StateMismatchError


class Template(NamedTuple):
    """A state dict that a checkpoint is loaded into."""

    state_dict: dict[str, Any]
    owned: dict[str, Owned]
    """The state dicts of objects that have parameter groups, by key."""


def template_of(state_dict: Mapping[str, Any]) -> Template:
    """Return the state dict with the states of the objects in it, as `torch.distributed.checkpoint.save` takes them."""
    template = {key: state_of_value(value) for key, value in state_dict.items()}
    return Template(template, owned_by_objects(state_dict, template))


def owned_by_objects(
    state_dict: Mapping[str, Any], states: Mapping[str, Any], optimizers: Iterable[Any] = ()
) -> dict[str, Owned]:
    """Return the state dicts of optimizers in states, of objects that have parameter groups, or of these optimizers."""
    returned = [
        (states[key]["param_groups"], value)
        for key, value in state_dict.items()
        if hasattr(value, "param_groups") and isinstance(states[key], Mapping) and "param_groups" in states[key]
    ]
    return StatePlaces(states).owned([*returned, *returned_by(optimizers)])


def state_of_value(value: Any) -> Any:
    """Return the state of an object that has one, as `torch.distributed.checkpoint.save` does at the root."""
    get: Callable[[], Any] | None = getattr(value, "state_dict", None)
    return get() if callable(get) and hasattr(value, "load_state_dict") else value


@contextmanager
def room_for_optimizer_state(
    reader: StateReader[Any],
    state_dict: MutableMapping[str, Any],
    owned: Mapping[str, Owned],
) -> Iterator[None]:
    """Put into the state dicts of optimizers what the checkpoint has of them, for the block to load into: all of it where the
    optimizer is known, else what it has of an empty `state`.

    Tensors are those that are here, or new: on the CPU, or sharded as their parameters. If the block raises, all is as before.

    Args:
        owned: see `Template`.

    Raises:
        StateMismatchError: the state is of other parameters, or the layout of a tensor is not known here.
    """
    found = [(path, value) for path, value in optimizer_states(state_dict) if _is_of_torch(value)]
    saved = _saved_groups(reader, [path for path, _ in found])
    wrong = [why for path, value in found if path in saved for why in _why_not(reader, path, value, saved[path], owned)]
    if wrong:
        raise StateMismatchError(f"{reader.location}: {some_of(wrong)}; nothing was changed", reader.location)
    held = {path: value for path, value in walk(state_dict) if isinstance(value, torch.Tensor)}
    is_sharded = any(adapter_of(tensor) is not None for tensor in held.values())

    def place_of(fqn: str, path: Path) -> torch.Tensor:
        tensor, (key, *rest) = reader.tensors[fqn], reader.tensors[fqn].path[len(path) :]
        place = key == "state" and tensor_to_fill(
            fqn,
            tensor.shape,
            tensor.dtype,
            held=held.get(tensor.path),
            owned=owned.get(".".join(map(str, path))),
            rest=".".join(map(str, rest)),
            is_sharded=is_sharded,
        )
        return place if isinstance(place, torch.Tensor) else torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")

    before = {**state_dict}
    filled: list[dict[Any, Any]] = []
    try:
        for path, value in found:
            is_whole = ".".join(map(str, path)) in owned and path in saved
            if value["state"] and not is_whole:
                continue
            state = _with_places(reader.structure_at((*path, "state")) or {}, partial(place_of, path=path))
            ids = {str(key): key for group in value["param_groups"] for key in group.get("params") or ()}
            state = {ids.get(str(key), key): item for key, item in state.items()}
            if is_whole:
                groups = _with_places(_groups_at(reader, path), partial(place_of, path=path))
                key = next(key for key in state_dict if in_words(key) == path[0])
                state_dict[key] = {**value, "state": state, "param_groups": groups}
            else:
                value["state"].update(state)
                filled.append(value["state"])
        yield
    except BaseException:
        for emptied in filled:
            emptied.clear()
        state_dict.update(before)
        raise


def _is_of_torch(value: Mapping[Any, Any]) -> bool:
    groups = value["param_groups"]
    return (
        isinstance(value["state"], dict) and isinstance(groups, list) and all(isinstance(one, dict) for one in groups)
    )


def _groups_at(reader: StateReader[Any], path: Path) -> list[Any]:
    """Return the structures of an optimizer's parameter groups. DCP's paths do not say that they are a list."""
    groups = reader.structure_at((*path, "param_groups"))
    is_list = isinstance(groups, dict) and all(isinstance(number, int) for number in groups)
    return [groups[number] for number in sorted(groups)] if is_list else groups if isinstance(groups, list) else []


def _saved_groups(reader: StateReader[Any], paths: Iterable[Path]) -> dict[Path, list[dict[str, Any]]]:
    """Return of the optimizers that were saved which parameters their groups have, as they call them."""
    found = {path: _groups_at(reader, path) for path in paths}
    saved: dict[Path, list[dict[str, Any]]] = {path: [{} for _ in groups] for path, groups in found.items() if groups}
    wanted = {
        ".".join(map(str, (*path, "param_groups", number, key))): (group, key)
        for path, groups in saved.items()
        for number, group in enumerate(groups)
        for key in ("params", "param_names")
    }
    for name, (_, value) in reader.plan_values(wanted.keys()).make().items() if wanted else ():
        group, key = wanted[name]
        group[key] = value
    return saved


def _why_not(
    reader: StateReader[Any],
    path: Path,
    value: Mapping[Any, Any],
    saved: list[dict[str, Any]],
    owned: Mapping[str, Owned],
) -> list[str]:
    """Return in sentences why what was saved is not of the parameters that are here."""
    name = ".".join(map(str, path))
    here = owned.get(name, value["param_groups"])
    why: list[str] = []
    for owners in reader.owners():  # of a pipeline each stage may have another one under that name
        why = why_not_of(name, saved, names_from(owners, name), here=here)
        if not why:
            break
    return why


def _with_places(structure: Any, place_of: Callable[[str], torch.Tensor]) -> Any:
    if isinstance(structure, dict):
        return {key: _with_places(item, place_of) for key, item in structure.items()}
    if isinstance(structure, list):
        return [_with_places(item, place_of) for item in structure]
    return place_of(structure) if isinstance(structure, str) else None
