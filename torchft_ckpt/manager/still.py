"""Copies the small tensors and arrays of a captured state that may change while it is served, without the write lock.

What an optimizer owns, its parameters and its state, changes only in its step, under the lock. Whatever else there is may be
written by a forward pass, as BatchNorm's running statistics are, and the forward pass runs while the state is served. Such
buffers are small. A large tensor or array that no optimizer owns is served as if it did not change outside of the lock, because
a state is captured for others at many steps; one that is saved is captured seldom, and says where these are (`loose`), to be
copied at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch

from torchft_ckpt.checkpointing.state.shards import DTensorAdapter, adapter_of

MAX_COPIED_BYTES = 1024 * 1024
_L = TypeVar("_L")


class StateHeld(NamedTuple):
    """A state that is to be saved."""

    state: dict[str, Any]
    of_group: frozenset[int]
    """`id` of the tensors that other replica groups may not hold alike."""
    changes_untold: bool
    """Any of it may change without the lock: it is to be copied at once."""
    loose: frozenset[int] = frozenset()
    """Addresses on the host of what else may change without the lock, which is to be copied at once by itself."""


def hold_still(state: Any, optimizers: Iterable[torch.optim.Optimizer]) -> Any:
    """Return the state with copies of its small tensors that none of the optimizers owns, and of its small arrays.

    Containers are dicts, lists and tuples; tensors that are one here are one in the result. Without optimizers nothing is
    known of who changes what, and the state itself is returned.
    """
    owned = _addresses(optimizers)
    return _copy(state, owned, {}) if owned else state


def hold_to_save(state: dict[str, Any], optimizers: Sequence[torch.optim.Optimizer]) -> StateHeld:
    """Return the state as `hold_still` does, and what is to be known of the tensors that none of the optimizers owns.

    Other replica groups may hold these otherwise, as their forward passes see other data. Of classes that an adapter carries
    it is not known who owns them: they are taken to be guarded.
    """
    if not optimizers:
        return StateHeld(state, frozenset(), True)
    owned = _addresses(optimizers)
    held: dict[str, Any] = _copy(state, owned, {})
    foreign = {id(tensor): at for tensor in tensors_in(held) if (at := _address(tensor)) and at not in owned}
    live = [tensor for tensor in tensors_in(state) if id(tensor) in foreign]  # the others are copies by now
    large = (array.ctypes.data for array in _leaves(state, np.ndarray) if array.nbytes > MAX_COPIED_BYTES)
    return StateHeld(
        held,
        frozenset(foreign),
        changes_untold=any(tensor.device.type != "cpu" for tensor in live),
        loose=frozenset([*large, *(foreign[id(tensor)] for tensor in live)]),
    )


def tensors_in(state: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors of a state, in dicts, lists and tuples."""
    return _leaves(state, torch.Tensor)


def _leaves(state: Any, kind: type[_L]) -> Iterator[_L]:
    if isinstance(state, kind):
        yield state
    elif isinstance(state, Mapping):
        for item in state.values():
            yield from _leaves(item, kind)
    elif isinstance(state, (list, tuple)):
        for item in state:
            yield from _leaves(item, kind)


def _address(tensor: torch.Tensor) -> int:
    """Where its bytes are here: those of a DTensor are its shard's. 0 where there are none, or that is not known."""
    adapter = adapter_of(tensor)
    if isinstance(adapter, DTensorAdapter):
        tensor = tensor._local_tensor  # type: ignore[attr-defined]
    elif adapter is not None:
        return 0
    return tensor.data_ptr() if tensor.layout is torch.strided and tensor.numel() else 0


def _addresses(optimizers: Iterable[torch.optim.Optimizer]) -> set[int]:
    owned: set[int] = set()
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            owned.update(_address(parameter) for parameter in group["params"])
        for values in optimizer.state.values():
            owned.update(_address(value) for value in values.values() if isinstance(value, torch.Tensor))
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
