"""Tells whether the tensors of a captured state were written to in place since, by autograd's counter of such writes.

Each operation of torch that writes to a tensor counts it up when it has written, also under `no_grad`; views and `detach` share
the counter. Not seen are writes that torch does not count: through `x.data`, which has a counter of its own, through numpy and
other views of the bytes, to inference tensors, to DTensors by `torch._foreach_*`, and by optimizers with `fused=True` (a guarded
one takes the lock). Nor is one that still runs when it is looked for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType

import torch

from torchft_ckpt.checkpointing.state.shards import memory_of

Counted = tuple[torch.Tensor, int]
"""A tensor, and its version at some moment."""


class StateVersions:
    """The versions that the tensors of a state have now.

    Args:
        tensors: of the state, as they are given to who serves or saves it.
        owners: tensors on the same memory that are changed in their place, by the address of their bytes: of a sharded parameter
            this is its local tensor, whose counter a state dict does not share.
        on_changed: told of the addresses of memory that was found to be changed.
        trained: returns where the storages begin that an optimizer may change now, counted or not; None: that is not known.
    """

    def __init__(
        self,
        tensors: Iterable[torch.Tensor],
        owners: Mapping[int, torch.Tensor] = MappingProxyType({}),
        on_changed: Callable[[set[int]], None] | None = None,
        trained: Callable[[], set[int]] | None = None,
    ) -> None:
        self.trained = trained
        self._kept = list(tensors)  # so that no other tensor gets the id of one of them
        self._counted = {id(tensor): count_writes(tensor, owners) for tensor in self._kept}
        self._on_changed = on_changed

    def of(self, tensor: torch.Tensor) -> Sequence[Counted]:
        """Return what shows whether a tensor was changed since then; since now, where it was not among them."""
        known = self._counted.get(id(tensor))
        return count_writes(tensor) if known is None else known

    def note_changed(self, tensor: torch.Tensor) -> None:
        """Say that this tensor was found to be changed, and with it all others that are by now: they change together."""
        if self._on_changed is None:
            return
        changed = (tensor, *(one for one in self._kept if is_changed(self._counted[id(one)])))
        self._on_changed({part.data_ptr() for one in changed for part in memory_of(one)})


def count_writes(
    tensor: torch.Tensor, owners: Mapping[int, torch.Tensor] = MappingProxyType({})
) -> tuple[Counted, ...]:
    """Return the tensors whose counters show a write to this one, with their versions of now; none of an inference tensor."""
    kind = type(tensor)
    try:
        if kind is torch.Tensor or kind is torch.nn.Parameter:  # as nearly all are, and there may be thousands
            owner = owners.get(tensor.data_ptr()) if owners and tensor.layout is torch.strided else None
            if owner is None or owner is tensor:
                return ((tensor, tensor._version),)
            return (tensor, tensor._version), (owner, owner._version)
        counted = [tensor]
        for part in memory_of(tensor):
            counted += [one for one in (part, owners.get(part.data_ptr())) if one is not None]
        return tuple((one, one._version) for one in counted)
    except RuntimeError:  # an inference tensor has none
        return ()


def is_changed(counted: Sequence[Counted]) -> bool:
    """Whether an operation that counts has written to any of them since."""
    for tensor, version in counted:  # noqa: SIM110 - twice as fast, and there may be thousands in a block
        if tensor._version != version:
            return True
    return False
