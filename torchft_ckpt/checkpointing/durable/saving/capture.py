"""The state of one step on its way to storage: fixed while it is written, and captured without a copy.

It is the transport's copy-on-write snapshot with one receiver, the save; beside it, what the trainer's thread alone can say:
who holds what, DCP's names, and plain values, which are captured at once because they are small. It knows no files.
"""

from __future__ import annotations

import base64
import functools
import logging
import random
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import xxhash

from torchft_ckpt.checkpointing.durable.format.manifest import (
    HELD_ALONE,
    OWNED,
    WRITTEN_BY_EACH,
    WRITTEN_BY_ONE,
    PlainValue,
    decode_value,
    encode_value,
)
from torchft_ckpt.checkpointing.durable.format.records import value_record
from torchft_ckpt.checkpointing.durable.saving.holdings import HoldingsIndex, Layout, TensorHoldings, layout_of
from torchft_ckpt.checkpointing.lock import StateDictLock
from torchft_ckpt.checkpointing.serving.buffers import BufferPool
from torchft_ckpt.checkpointing.serving.sending import read_region, slices_of
from torchft_ckpt.checkpointing.serving.snapshot import BlockGoneError, Snapshot
from torchft_ckpt.checkpointing.state.blocks import count_blocks
from torchft_ckpt.checkpointing.state.containers import flattened
from torchft_ckpt.checkpointing.state.format import Manifest
from torchft_ckpt.checkpointing.state.local_state import box_of
from torchft_ckpt.checkpointing.state.regions import Region, region_in_chunk, slices
from torchft_ckpt.checkpointing.state.samples import windows
from torchft_ckpt.checkpointing.state.tree import FLAT
from torchft_ckpt.checkpointing.state.versions import StateVersions
from torchft_ckpt.core.boxes.geometry import Box, contains
from torchft_ckpt.errors import CheckpointError, StateChangedError, StateFormatError, UnsupportedValueError
from torchft_ckpt.memory import gc_paused
from torchft_ckpt.threads import Event

logger = logging.getLogger(__name__)


def get_random_state() -> dict[str, Any]:
    """Return the state of this process's random number generators, as plain values and tensors."""
    state: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state_all()
    return state


def set_random_state(state: dict[str, Any]) -> None:
    """Set what `get_random_state` returned. Devices that this process does not have are left out, with a line in the log.

    Raises:
        TypeError, ValueError, KeyError: it is none.
    """
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    saved = state.get("cuda", [])
    devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    for device, of_device in enumerate(saved[:devices]):
        torch.cuda.set_rng_state(of_device, device)
    if len(saved) != devices:
        logger.info("random states of %d CUDA devices were saved, here are %d", len(saved), devices)


RECEIVER = "save"


class CapturedValue(NamedTuple):
    """A leaf of the state, as DCP sees it, that is no tensor."""

    fqn: str
    path: tuple[str | int, ...]
    value: object
    """A plain value as it is; its node of what may change."""

    def record(self) -> bytes:
        """Return the record that DCP reads."""
        return value_record(decode_value(self.value) if isinstance(self.value, PlainValue) else self.value)


class CapturedState:
    """A state that is being saved.

    Args:
        state: a dict; tensors are referred to until they are copied aside, everything else is captured now.
        lock: the lock that the trainer mutates the state under; held for reading, or by the caller between two steps.
        pool: where copies go.
        group_local_ids: `id` of the tensors that other replica groups do not hold alike.
        owned_ids: `id` of those that optimizers own, as far as that is known.
        turn: goes up by one with each save, in all ranks: which part of large replicas is compared.
        versions: of the tensors; default: now.

    Nothing is kept for the save before `stage` was called; that is to be before the trainer's next step.

    Raises:
        UnsupportedValueError: something in it cannot be carried; the message has its path.
    """

    @gc_paused()
    def __init__(
        self,
        state: dict[str, Any],
        *,
        step: int,
        own: dict[str, Any],
        lock: StateDictLock,
        pool: BufferPool,
        index: HoldingsIndex,
        group_local_ids: Collection[int] = (),
        owned_ids: Collection[int] = (),
        turn: int = 0,
        versions: StateVersions | None = None,
    ) -> None:
        self.step = step
        self._index = index
        self._layouts: list[Layout] = []
        self._staged = 0
        """The blocks that are kept for the save, a bit for each."""
        self.owned_replicas: set[int] = set()
        """Places of the tensors that optimizers own and other ranks may hold, too."""
        self._trainer_is_free = Event()
        self._trainer_is_free.set()

        def see(tensors: Sequence[tuple[str, torch.Tensor]]) -> None:
            self._layouts = [
                layout_of(path, tensor, num_ranks=index.num_ranks, is_same_in_groups=id(tensor) not in group_local_ids)
                for path, tensor in tensors
            ]
            replicas = {
                place: ((layout.mesh, layout.placements, repr(layout.declared)), tensors[place][1])
                for place, layout in enumerate(self._layouts)
                if index.num_ranks > 1 and layout.may_have_replicas and (index.is_replicated or not layout.is_whole)
            }
            self._marks = dict(zip(replicas, windows(replicas.values(), turn), strict=True))
            self.owned_replicas = {place for place, (_, one) in replicas.items() if id(one) in owned_ids}

        try:
            flat, self.paths = flattened(state)
        except StateFormatError as error:
            raise UnsupportedValueError(f"state dict: {error}", "state_dict") from error
        self.own = encode_value(own, "own")
        self.values = [
            CapturedValue(fqn, self.paths[fqn], value if type(value) in FLAT else encode_value(value, fqn))
            for fqn, value in flat.items()
            if not isinstance(value, torch.Tensor)
        ]
        self.snapshot = Snapshot(
            state, step=step, lock=lock, pool=pool, num_expected=0, see_tensors=see, versions=versions
        )
        for place in self.snapshot.arrays:  # no optimizer keeps them alike
            self._layouts[place] = self._layouts[place]._replace(is_same_in_groups=False)
        names = [layout.fqn for layout in self._layouts]
        if len(set(names)) != len(names):
            twice = next(name for name in names if names.count(name) > 1)
            self.snapshot.close()
            raise UnsupportedValueError(f"state dict: two tensors are named {twice!r}", twice)

    @property
    def outline(self) -> object:
        """All that says who holds what, and where it lies: states of equal ones have equal shares, in the same blocks."""
        return self._layouts, self.snapshot.space, len(self.values)

    @property
    def is_replicated(self) -> bool:
        """Whether all ranks of the group have the same values, and the same plain tensors."""
        return self._index.is_replicated

    @functools.cached_property
    def holdings(self) -> list[TensorHoldings]:
        """The holders of each tensor, in the order of the manifest; worked out when it is first asked for."""
        return [
            self._index.holdings_of(layout, (box_of(chunk) for chunk in entry.chunks))
            for layout, entry in zip(self._layouts, self.manifest.tensors, strict=True)
        ]

    @functools.cached_property
    def replicas(self) -> str:
        """What shows of each tensor whether other ranks hold the same of it, as in a manifest; empty if they hold none."""
        shared: dict[int, list[tuple[int, ...]]] = {}
        orders: dict[tuple[int, ...], xxhash.xxh3_64] = {}
        for place in self._marks:
            tensor = self.holdings[place]
            if tensor.is_derivable and (of_ranks := [held.ranks for held in tensor.local if len(held.ranks) > 1]):
                shared[place] = of_ranks
                for ranks in of_ranks:
                    name = f"{tensor.fqn};".encode(errors="surrogatepass")
                    orders.setdefault(ranks, xxhash.xxh3_64()).update(name)
        # Ranks that have what they share in another order divide it otherwise: then a twin may fill what nobody writes.
        table = [HELD_ALONE] * len(self.holdings)
        for place, of_ranks in shared.items():
            order = xxhash.xxh3_64_digest(b"".join(orders[ranks].digest() for ranks in of_ranks))[:4]
            by_one = OWNED if place in self.owned_replicas else WRITTEN_BY_ONE
            by_whom = WRITTEN_BY_EACH if self.holdings[place].is_ranks_own else by_one
            table[place] = self._marks[place] + order + by_whom
        is_divided = any(digest.endswith((WRITTEN_BY_ONE, OWNED)) for digest in table)
        return base64.b64encode(b"".join(table)).decode() if is_divided else ""

    def extent_of(self, boxes: Sequence[tuple[int, Box]]) -> tuple[int, int]:
        """Return how many bytes boxes of tensors have, and in which blocks they lie, a bit for each."""
        num_bytes = blocks = 0
        block_bytes = self.snapshot.block_bytes
        for tensor, box in boxes:
            region = self._region_of(tensor, box)
            num_bytes += region.num_bytes
            for run in [region] if not region.steps else slices(region, block_bytes, block_bytes):
                first, after = run.start // block_bytes, count_blocks(run.stop, block_bytes)
                blocks |= ((1 << (after - first)) - 1) << first
        return num_bytes, blocks

    @property
    def manifest(self) -> Manifest:
        """The tensors that this rank holds, and the tree of the state."""
        return self.snapshot.manifest

    def stage(self, blocks: int | None = None) -> None:
        """Keep these blocks as they are now, a bit for each, until they are released; default: all. Any thread, once."""
        everything = (1 << self.snapshot.num_blocks) - 1
        self._staged = everything if blocks is None else blocks
        self.snapshot.register(RECEIVER, received=everything & ~self._staged)

    def set_apart(self, addresses: Collection[int]) -> bool:
        """Copy at once what of the staged blocks has these addresses; see `Snapshot.set_apart`."""
        return self.snapshot.set_apart(addresses, among=self._staged)

    def release(self, blocks: int) -> None:
        """Free these blocks, which are not read any more."""
        self.snapshot.contact(RECEIVER, 0.0, received=blocks)

    def detach(self) -> None:
        """Copy aside what has not been copied yet, on the trainer's thread; see `Snapshot.detach`. Reading waits meanwhile.

        Else what the save does in Python would take turns with it, of milliseconds for each block.
        """
        self._trainer_is_free.clear()
        try:
            self.snapshot.detach()
        finally:
            self._trainer_is_free.set()

    def read(self, tensor: int, box: Box, memory: memoryview) -> None:
        """Copy the elements of a box to memory of its length, in C order.

        Raises:
            CheckpointError: it is not held here, or not any more.
            StateChangedError: it was written to without the lock before it was read or copied aside.
        """
        region = self._region_of(tensor, box)
        if len(memory) != region.num_bytes:
            raise CheckpointError(f"{box} has {region.num_bytes} bytes, not {len(memory)}", party="save")
        at = 0
        try:
            # No longer than a block: then each block that a slice touches has an element of the box, and is staged.
            for piece in slices_of(region, self.snapshot.block_bytes):
                self._trainer_is_free.wait()
                at += len(read_region(self.snapshot, piece, memory[at:]))
        except StateChangedError as error:
            raise StateChangedError(
                f"{error}, before it was saved. Hold state_dict_lock.write(), of the Manager or the Checkpointer, while you "
                "change weights outside of optimizer.step, or wait for the save's future before",
                error.party,
            ) from error
        except BlockGoneError as error:
            if not self.snapshot.is_revoked(RECEIVER):
                raise
            raise CheckpointError(
                f"step {self.step}: the copies of what was not written yet would have exceeded staging_budget_bytes",
                party="staging_budget_bytes",
            ) from error

    def _region_of(self, tensor: int, box: Box) -> Region:
        """Return where a box of a tensor lies in the snapshot.

        Raises:
            CheckpointError: it is not held here.
        """
        entry = self.manifest.tensors[tensor]
        for chunk in entry.chunks:
            if contains(box_of(chunk), box):
                return region_in_chunk(self.manifest, entry, chunk, box)
        raise CheckpointError(f"{box} of {entry.fqn[:120]!r} is not held by this rank", party="save")

    def close(self) -> None:
        """Free everything; the trainer never waits for it again."""
        self.snapshot.finish(RECEIVER)
        self.snapshot.close()
