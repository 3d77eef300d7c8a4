"""The target of a state that arrives: memory for each box that is wanted, and the state made of it once all of it is there.

A source's manifest and a checkpoint describe a state alike (`description`). A `StateTarget` says which boxes of it are wanted,
and gives memory for each (`Want`). Ranks of a running job, files, or ranks that read together fill that memory; a fetch by
blocks brings memory of its own. Then the target makes the state. It knows tensors and trees, not who fills the wants.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
import torch

from torchft_ckpt.checkpointing.state.description import DescribedTensor, Description
from torchft_ckpt.checkpointing.state.device_memory import DeviceMemory
from torchft_ckpt.checkpointing.state.dtypes import parse_dtype
from torchft_ckpt.checkpointing.state.fit import check_tensors
from torchft_ckpt.checkpointing.state.local_state import (
    HeldTensor,
    LocalMemory,
    LocalState,
    copy_to,
    note_written,
    some_of,
    view_of,
)
from torchft_ckpt.checkpointing.state.regions import gather, region_of, scatter
from torchft_ckpt.checkpointing.state.space import (
    are_one_place,
    as_bytes,
    is_plain_memory,
    is_plain_on_device,
    memory_at,
    span_of,
)
from torchft_ckpt.checkpointing.state.tree import decode_tree, from_tensors
from torchft_ckpt.core.boxes.geometry import Box, relative_to, whole
from torchft_ckpt.errors import CheckpointError, StateMismatchError, TransferError
from torchft_ckpt.memory import gc_paused

logger = logging.getLogger(__name__)


class Want(NamedTuple):
    """A box of a tensor of a state, and the memory on the CPU that it is to be written to."""

    name: str
    box: Box
    target: torch.Tensor
    """Of `box.sizes` and the dtype that the tensor has there; any strides."""
    local: LocalMemory | None = None
    """The box as it is here, laid out as `target`, or `target` itself: what is equal in it need not travel. None: not known."""

    def part(self, box: Box) -> Want:
        """Return the want of a box that lies within this one; its target is a view of this one's."""
        return Want(self.name, box, view_of(self.target.detach(), relative_to(box, self.box)))

    def memory(self) -> memoryview:
        """Return the target's memory, from its first element to its last. The view does not keep it: `target` does."""
        target = self.target
        return memory_at(target.data_ptr(), span_of(target)) if target.numel() else memoryview(b"")


class StateTarget:
    """Makes a state of what arrives, on the layout of the tensors that are here. On one thread.

    Tensors are matched by their names. What is here of a tensor is wanted; a tensor that is not here is wanted whole. Values
    that are no tensors, and the tree itself, are those of the description.

    Args:
        local: the state that is here; None if nothing is: then all is wanted, whole.
        in_place: receive into the tensors of `local`. What is not in plain memory on the CPU is copied at the end.
        may_be_beside: what cannot be received into arrives in memory of its own, for who hands on what is returned; else it is
            refused. See `fit.check_tensors`.
        may_be_tied: see `check_shared`.
    """

    def __init__(
        self,
        local: LocalState | None,
        *,
        in_place: bool = False,
        may_be_beside: bool = False,
        may_be_tied: Callable[..., bool] = lambda names, *, in_one_place: False,
    ) -> None:
        self._may_be_tied = may_be_tied
        self._local = local
        self._in_place = in_place and local is not None
        self._may_be_beside = may_be_beside
        self._beside: set[str] = set()
        self._parts: dict[str, list[torch.Tensor]] = {}
        self._apart: set[str] = set()
        self._is_into_place = False
        self._filling = Filling()

    def is_overwritten(self, has_received: bool) -> bool:
        """Whether something of `local` was written to, where something was received or not."""
        return self._filling.has_copied or (has_received and self._is_into_place)

    def wants(self, description: Description) -> list[Want]:
        """Return what is wanted of a state. Of the last one that it was called with the state is made.

        Raises:
            StateMismatchError: the state does not fit this replica, see `fit.check_tensors`.
            TransferError: there is not enough memory.
        """
        self._parts, self._is_into_place = {}, False
        self._apart = self._local.apart() if self._local is not None and description.chunks is None else set()
        self._beside = check_tensors(
            self._local, description, in_place=self._in_place, may_be_beside=self._may_be_beside
        )
        with naming_lack_of_memory():
            return self._make_room(description)

    def finish(
        self, description: Description, received: Sequence[torch.Tensor | Sequence[torch.Tensor]] | None = None
    ) -> object:
        """Return the state, once all that is wanted is there. Tensors that were received in place are those of `local`.

        Args:
            description: what `wants` was called with, or one that has other values, of tensors of the same names.
            received: memory that the state was received into instead of that of the wants: for each tensor of the description
                one part for each of its boxes that are here, or the tensor as it is to be.

        Raises:
            StateMismatchError: there is no class here for a named tuple or an enum, or see `check_shared`.
            TransferError: a tensor could not be made.
        """
        try:
            with gc_paused(), torch.no_grad():
                if received is None:
                    received = [self._parts[entry.fqn] for entry in description.tensors]
                if self._local is not None and self._in_place and self._local.shared:
                    arrived = zip([entry.fqn for entry in description.tensors], received, strict=True)
                    parts = {
                        name: own
                        for name, own in arrived
                        if self._is_filled(name) and not isinstance(own, torch.Tensor)
                    }
                    check_shared(self._local, parts, self._may_be_tied)
                tensors = [self._made(entry, own) for entry, own in zip(description.tensors, received, strict=True)]
                self._filling.end()
                # With no state here somebody only looks: he gets what can be made without classes.
                classes = None if self._local is None else self._local.classes
                return decode_tree(description.tree, from_tensors(tensors), classes)
        except CheckpointError:
            raise
        except RuntimeError as error:  # of a device, say
            raise TransferError(f"what was received cannot be assembled: {error}", party="local_state") from error

    def _make_room(self, description: Description) -> list[Want]:
        wants: list[Want] = []
        first_of: dict[object, str] = {}
        for entry in description.tensors:
            held = self._get(entry.fqn)
            boxes = [whole(entry.shape)] if held is None else held.boxes
            tie = description.ties.get(entry.fqn)
            first = entry.fqn if tie is None else first_of.setdefault((tie, tuple(boxes)), entry.fqn)
            if first != entry.fqn:
                self._parts[entry.fqn] = self._parts[first]
                continue
            is_into = held is not None and self._is_filled(entry.fqn) and entry.fqn not in self._apart
            into = held.data if held is not None and is_into else []
            parts = self._parts[entry.fqn] = memory_for(into, boxes, parse_dtype(entry.dtype))
            self._is_into_place = self._is_into_place or any(map(is_same_memory, into, parts))
            wants += wants_of(entry.fqn, boxes, parts, () if self._local is None else self._local.memories(entry.fqn))
        return wants

    def _made(self, entry: DescribedTensor, parts: torch.Tensor | Sequence[torch.Tensor]) -> torch.Tensor:
        if isinstance(parts, torch.Tensor):
            return parts
        held = self._get(entry.fqn)
        if held is None:
            return parts[0]
        if self._is_filled(entry.fqn) and (held.adapter is None or held.adapter.shares_memory):
            self._filling.fill(held, parts)
            return held.given
        return parts[0] if held.adapter is None else held.adapter.rebuild(held.given, list(parts))

    def _is_filled(self, name: str) -> bool:
        return self._in_place and name not in self._beside

    def _get(self, name: str) -> HeldTensor | None:
        held = None if self._local is None else self._local.get(name)
        return None if held is not None and held.adapter is None and name in self._beside else held


class Filling:
    """Brings what was received to tensors that are here, where it was not received into them. On one thread."""

    def __init__(self) -> None:
        self.has_copied = False
        """Whether something was copied, or a copy has begun."""
        self._written: list[torch.Tensor] = []

    def fill(self, held: HeldTensor, parts: Sequence[torch.Tensor]) -> None:
        """Fill a tensor.

        Args:
            parts: one for each of its boxes; one that is its memory already is not copied.
        """
        if held.adapter is not None and not held.adapter.shares_memory:
            self.has_copied = True
            copy_to(held.given, held.adapter.rebuild(held.given, list(parts)))
            return
        for local, part in zip(held.data, parts, strict=True):
            if local is part or is_same_memory(local, part):
                self._written += [local] if held.given is local else [local, held.given]
            else:
                self.has_copied = True
                copy_to(local, part)

    def end(self) -> None:
        """Tell autograd of tensors that were received into."""
        note_written(self._written)
        self._written = []


def check_shared(
    local: LocalState, arrived: Mapping[str, Sequence[torch.Tensor]], may_be_tied: Callable[..., bool]
) -> None:
    """See that tensors which share memory here get the same where they share it: else one would overwrite another.

    Args:
        may_be_tied: called with names, and whether they lie in one place here; returns whether they may be tied on each rank
            there, and differ for the ranks do: of tied weights that drifted, one may be of another rank than the other. That
            was said, and the last one counts.

    Raises:
        StateMismatchError: they would get different things, as weights that are tied here and were not there.
    """
    for boxes in local.shared:
        there = [(name, mine, arrived[name][number]) for name, number, mine in boxes if name in arrived]
        if not _agree(
            [(mine, part) for _, mine, part in there if mine.shape == part.shape and mine.dtype == part.dtype]
        ):
            what = (
                f"{some_of((name[:120] for name, *_ in there), ', ')} share memory here, and do not hold the same there"
            )
            in_one_place = are_one_place([mine for _, mine, _ in there])
            if may_be_tied({name for name, *_ in there}, in_one_place=in_one_place):
                logger.warning("%s, as their ranks did not: the last one overwrites the others", what)
                continue
            raise StateMismatchError(
                f"{what}: each would overwrite another. Tie weights on both sides, or on none", party="local_state"
            )


def _agree(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> bool:
    """Whether parts hold the same where the tensors share memory that they are for."""
    if all(is_same_memory(*pair) for pair in pairs):
        return True  # received where they are, as they are tied alike there
    given = [as_bytes(part.detach().cpu().contiguous()) for _, part in pairs]
    if are_one_place([mine for mine, _ in pairs]):  # as nearly always
        return all(torch.equal(data, given[0]) for data in given[1:])
    low = min(mine.data_ptr() for mine, _ in pairs)
    memory = np.zeros(max(mine.data_ptr() + span_of(mine) for mine, _ in pairs) - low, np.uint8).data
    regions = [region_of(one.data_ptr() - low, one.stride(), whole(one.shape), one.element_size()) for one, _ in pairs]
    laid = [(region, data.numpy()) for region, data in zip(regions, given, strict=True)]
    for region, data in laid:
        scatter(data.data, memory[region.start : region.stop], region)
    for region, data in laid:
        again = np.empty_like(data)
        gather(memory[region.start : region.stop], region, again.data)
        if not np.array_equal(again, data):
            return False
    return True


@contextmanager
def naming_lack_of_memory() -> Iterator[None]:
    """Around code that makes memory of announced sizes.

    Raises:
        TransferError: there is not enough.
    """
    try:
        yield
    except CheckpointError:
        raise
    except (MemoryError, RuntimeError) as error:
        raise TransferError(f"no memory for the state that the source announces: {error}", party="memory") from error


def memory_for(into: Sequence[torch.Tensor], boxes: Sequence[Box], dtype: torch.dtype) -> list[torch.Tensor]:
    """Return memory on the CPU for boxes of a tensor.

    Args:
        into: the tensors that they are for, one for each box, or none. One in plain memory of that dtype is its own.
        dtype: of the tensor where it comes from.
    """
    if not into:
        return [torch.empty(box.sizes, dtype=dtype, device="cpu") for box in boxes]
    return [
        local.detach()
        if is_plain_memory(local) and local.dtype == dtype
        else torch.empty(box.sizes, dtype=dtype, device="cpu")
        for local, box in zip(into, boxes, strict=True)
    ]


def wants_of(
    name: str,
    boxes: Sequence[Box],
    parts: Sequence[torch.Tensor],
    here: Sequence[LocalMemory | DeviceMemory | None] = (),
) -> list[Want]:
    """Return the wants of a tensor, each for the box of its part; a box without elements is not wanted.

    Args:
        here: the memory of each as it is here; empty if that is not known. An accelerator's is not looked at.
    """
    return [
        Want(name, box, part, local if isinstance(local, LocalMemory) and _is_laid_out_as(local.tensor, part) else None)
        for box, part, local in zip(boxes, parts, here or [None] * len(boxes), strict=True)
        if box.volume
    ]


def _is_laid_out_as(local: torch.Tensor, part: torch.Tensor) -> bool:
    return part.is_contiguous() and (local.dtype, local.shape) == (part.dtype, part.shape)


def is_same_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether what is written to one tensor is written to the other as well, element by element."""
    if (one.data_ptr(), one.stride(), one.device) != (other.data_ptr(), other.stride(), other.device):
        return False
    return is_plain_memory(one) or is_plain_on_device(one)
