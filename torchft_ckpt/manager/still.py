"""Copies the small tensors and arrays of a captured state that may change while it is served, without the write lock.

What an optimizer owns, its parameters and its state, changes only in its step, under the lock. Whatever else there is may be
written by a forward pass, as BatchNorm's running statistics are, and the forward pass runs while the state is served. Such
buffers are small; a large tensor or array that no optimizer owns is taken for one that does not change outside of the lock.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch

MAX_COPIED_BYTES = 1024 * 1024


class StateHeld(NamedTuple):
    """A state that is to be saved."""

    state: dict[str, Any]
    of_group: frozenset[int]
    """`id` of the tensors that other replica groups do not hold alike."""
    changes_untold: bool
    """Optimizers change it without the lock: it is to be copied at once."""


def hold_still(state: Any, optimizers: Iterable[torch.optim.Optimizer]) -> Any:
    """Return the state with copies of its small tensors that none of the optimizers owns, and of its small arrays.

    Containers are dicts, lists and tuples; tensors that are one here are one in the result. Without optimizers nothing is
    known of who changes what, and the state itself is returned.
    """
    owned = _addresses(optimizers)
    return _copy(state, owned, {}) if owned else state


def tensors_in(state: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors of a state, in dicts, lists and tuples."""
    if isinstance(state, torch.Tensor):
        yield state
    elif isinstance(state, Mapping):
        for item in state.values():
            yield from tensors_in(item)
    elif isinstance(state, (list, tuple)):
        for item in state:
            yield from tensors_in(item)


def _addresses(optimizers: Iterable[torch.optim.Optimizer]) -> set[int]:
    owned: set[int] = set()
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            owned.update(parameter.data_ptr() for parameter in group["params"])
        for values in optimizer.state.values():
            owned.update(value.data_ptr() for value in values.values() if isinstance(value, torch.Tensor))
    return owned


def _copy(value: Any, owned: set[int], copies: dict[tuple[object, ...], torch.Tensor]) -> Any:
    kind = type(value)
    if kind is torch.Tensor or kind is torch.nn.Buffer:
        if value.is_meta or value.layout is not torch.strided or value.nbytes > MAX_COPIED_BYTES:
            return value
        address = value.data_ptr()
        if address in owned or not value.nbytes:
            return value
        key = (address, value.dtype, value.shape, value.stride())
        if key not in copies:
            copies[key] = value.detach().clone()
        return copies[key]
    if kind is np.ndarray:
        return value if value.nbytes > MAX_COPIED_BYTES else value.copy()
    if isinstance(value, dict):
        copied = {key: _copy(item, owned, copies) for key, item in value.items()}
        same = all(copied[key] is item for key, item in value.items())
        return value if same else copied
    if kind is list or kind is tuple:
        items = [_copy(item, owned, copies) for item in value]
        return value if all(a is b for a, b in zip(items, value, strict=True)) else kind(items)
    return value
