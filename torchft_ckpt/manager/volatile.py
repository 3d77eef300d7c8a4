"""Copies the small tensors and arrays of a captured state that may change while it is served, without the write lock.

What an optimizer owns, its parameters and its state, changes only in its step, under the lock. Whatever else there is may be
written by a forward pass, as BatchNorm's running statistics are, and the forward pass runs while the state is served. Such
buffers are small. A large tensor or array that no optimizer owns is served as if it did not change outside of the lock, because
a state is captured for others at many steps; one that is saved is captured seldom, and says where these are
(`unguarded_addresses`), to be copied at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch

from torchft_ckpt.checkpointing.serving.unchanged import MARKED_WHOLE_BYTES
from torchft_ckpt.checkpointing.state.containers import SEQUENCES, rebuilt
from torchft_ckpt.checkpointing.state.parameters import Names
from torchft_ckpt.checkpointing.state.shards import adapter_of, is_dtensor, memory_of
from torchft_ckpt.checkpointing.state.tree import is_flat
from torchft_ckpt.checkpointing.state.versions import StateVersions
from torchft_ckpt.memory import gc_paused

MAX_COPIED_BYTES = MARKED_WHOLE_BYTES


class StateToSave(NamedTuple):
    """A state that is to be saved."""

    state: dict[str, Any]
    group_local_ids: frozenset[int]
    """`id` of the tensors that other replica groups may not hold alike."""
    unannounced_changes: bool
    """Any of it may change without the lock: it is to be copied at once."""
    unguarded_addresses: frozenset[int] = frozenset()
    """Addresses on the host of what else may change without the lock, which is to be copied at once by itself."""
    versions: StateVersions | None = None
    """Of its tensors, when it was captured."""
    owned_ids: frozenset[int] = frozenset()
    """`id` of the tensors that optimizers own, and that ranks are to hold alike if they all hold them."""
    owners: Mapping[str, Names] = MappingProxyType({})
    """Which parameters its optimizers have, see `parameters.names_of`."""


class StateToServe(NamedTuple):
    """A state that is to be served."""

    state: Any
    versions: StateVersions
    """Of its tensors, when it was captured."""
    own: Mapping[str, Any] = MappingProxyType({})
    """What the Manager's own part of the state says of its optimizers, see `healing`."""
    returned: Any = None
    """It without copies, as the registered functions returned it."""


class Unsteady:
    """The memory that was found to have changed without the lock while it was served, by address on the host.

    When that is found a second time everything is taken for it: a loop that puts its weights back by `p.data = kept` has them
    elsewhere in each step.
    """

    def __init__(self) -> None:
        self._addresses: set[int] = set()
        self._times = 0
        self._is_found = False

    def begin(self) -> None:
        """A state is captured: what is found in it from now on is found anew."""
        self._is_found = False

    def note(self, addresses: set[int]) -> None:
        """Memory was found to be changed. Any thread."""
        self._addresses = self._addresses | addresses
        self._times += not self._is_found
        self._is_found = True

    def __contains__(self, address: object) -> bool:
        return self._times > 1 or address in self._addresses

    def __bool__(self) -> bool:
        return self._times > 0


def copy_volatile(
    state: Any,
    optimizers: Iterable[torch.optim.Optimizer],
    unsteady: Unsteady,
    trained: Callable[[], set[int]] | None = None,
) -> StateToServe:
    """Return the state with copies of its small tensors that none of the optimizers owns, and of its small arrays.

    Containers are dicts, lists, tuples and deques; tensors that are one here are one in the result. Without optimizers nothing
    is known of who changes what, and nothing is copied but what is unsteady.

    Args:
        state: as the registered functions returned it.
        optimizers: that are guarded.
        unsteady: what changed without the lock before, which is copied whoever owns it. More is noted when it is found.
        trained: as of `StateVersions`.
    """
    owned = owned_by(optimizers)
    unsteady.begin()
    held = _copy(state, owned, {}, unsteady) if owned or unsteady else state
    return StateToServe(held, StateVersions(tensors_in(held), owned, unsteady.note, trained), returned=state)


@gc_paused()
def capture_for_save(state: dict[str, Any], optimizers: Sequence[torch.optim.Optimizer]) -> StateToSave:
    """Return the state as `copy_volatile` does, and what is to be known of the tensors that none of the optimizers owns.

    Other replica groups may hold these otherwise, as their forward passes see other data. Of classes whose adapter does not
    show
    their memory it is not known who owns them: they are copied when they are captured, and taken to be alike.
    """
    if not optimizers:
        return StateToSave(state, frozenset(), True)
    owned = owned_by(optimizers)
    copies: dict[tuple[object, ...], torch.Tensor] = {}
    held: dict[str, Any] = _copy(state, owned, copies)
    copied = {id(copy) for copy in copies.values()}
    foreign: set[int] = set()
    owned_ids: set[int] = set()
    of_shards = {
        part.data_ptr()
        for optimizer in optimizers
        for parameter, state in optimizer.state.items()
        if isinstance(parameter, torch.Tensor) and adapter_of(parameter) is not None
        for tensor in tensors_in(state)
        if adapter_of(tensor) is None  # Adam's step lags if a rank's experts had no tokens
        for part in memory_of(tensor)
    }
    unguarded_addresses: set[int] = set()
    unannounced_changes = False
    leaves = [*leaves_in(held, (torch.Tensor, np.ndarray))]
    for leaf in leaves:
        if isinstance(leaf, np.ndarray):
            if leaf.nbytes > MAX_COPIED_BYTES:
                unguarded_addresses.add(leaf.ctypes.data)
        elif data := _memory_not_in(owned, leaf):
            foreign.add(id(leaf))
            if id(leaf) not in copied:
                unguarded_addresses.update(part.data_ptr() for part in data)
                unannounced_changes = unannounced_changes or any(not part.is_cpu for part in data)
        elif not of_shards or all(part.data_ptr() not in of_shards for part in memory_of(leaf)):
            owned_ids.add(id(leaf))
    versions = StateVersions([leaf for leaf in leaves if isinstance(leaf, torch.Tensor)], owned)
    unguarded = frozenset(unguarded_addresses)
    return StateToSave(held, frozenset(foreign), unannounced_changes, unguarded, versions, frozenset(owned_ids))


def tensors_in(state: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors of a state, in dicts, lists, tuples and deques."""
    return leaves_in(state, (torch.Tensor,))


def leaves_in(state: Any, kinds: tuple[type, ...] = (torch.Tensor, np.ndarray, bytes)) -> Iterator[Any]:
    """Yield the tensors, arrays and bytes of a state, or what else is of these kinds."""
    if isinstance(state, kinds):
        yield state
    elif isinstance(state, _SEARCHED):
        items = state if isinstance(state, SEQUENCES) else state.values()
        for item in () if is_flat(items) else items:
            yield from leaves_in(item, kinds)


def _memory_not_in(owned: Mapping[int, torch.Tensor], tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return the memory of a tensor as far as it is not owned. Quick where it is, as nearly always."""
    if type(tensor) is torch.Tensor and tensor.is_cpu and tensor.layout is torch.strided and tensor.data_ptr() in owned:
        return []
    return [part for part in memory_of(tensor) if part.data_ptr() not in owned]


def owned_by(optimizers: Iterable[torch.optim.Optimizer]) -> dict[int, torch.Tensor]:
    """Return the plain tensors that optimizers change, by the address of their bytes."""
    owned: dict[int, torch.Tensor] = {}
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            owned.update((part.data_ptr(), part) for parameter in group["params"] for part in memory_of(parameter))
        # An entry is what its author likes: most often a dict of a parameter's.
        owned.update((part.data_ptr(), part) for tensor in tensors_in(optimizer.state) for part in memory_of(tensor))
    return owned


def _copy(
    value: Any,
    owned: Mapping[int, torch.Tensor],
    copies: dict[tuple[object, ...], torch.Tensor],
    unsteady: Unsteady | None = None,
) -> Any:
    kind = type(value)
    if isinstance(value, torch.Tensor) and (kind in _COPIED_WHEN_SMALL or unsteady):
        return _copied(value, owned, copies, unsteady)
    if kind is np.ndarray:
        return value if value.nbytes > MAX_COPIED_BYTES else value.copy()
    if isinstance(value, (dict, *SEQUENCES)):
        if is_flat(value.values() if isinstance(value, dict) else value):
            return value
        return rebuilt(value, lambda item: _copy(item, owned, copies, unsteady))
    return value


def _copied(
    tensor: torch.Tensor,
    owned: Mapping[int, torch.Tensor],
    copies: dict[tuple[object, ...], torch.Tensor],
    unsteady: Unsteady | None,
) -> torch.Tensor:
    """Return a copy of a tensor that is small and nobody's, or unsteady; else the tensor."""
    kind = type(tensor)
    is_plain = kind in _COPIED_WHEN_SMALL
    if tensor.is_meta or tensor.layout is not torch.strided or (tensor.nbytes > MAX_COPIED_BYTES and not unsteady):
        return tensor
    if is_plain or kind is torch.nn.Parameter:
        address = tensor.data_ptr()
    elif is_dtensor(tensor):
        address = next((part.data_ptr() for part in memory_of(tensor)), 0)
    else:
        return tensor  # what a copy of such a class shares with it is not known
    is_small = is_plain and tensor.nbytes <= MAX_COPIED_BYTES and address not in owned
    if not tensor.nbytes or not (is_small or (unsteady and address in unsteady)):
        return tensor
    key = (address, tensor.dtype, tensor.shape, tensor.stride())
    if key not in copies:
        copies[key] = tensor.detach().clone()
    return copies[key]


_SEARCHED = (dict, *SEQUENCES, Mapping)
_COPIED_WHEN_SMALL = frozenset({torch.Tensor, torch.nn.Buffer})
