"""Planners for torch.distributed.checkpoint that see SPMD tensors as their local shards; all else they leave to its defaults.

DCP knows DTensor, which is one box a rank. A tensor of another class for which there is a `ShardAdapter`, such as torch_xla's
`XLAShardedTensor`, is several: it gets one item for each local box. Saving moves a tensor's shards to the host once, when
the first of them is asked for. Loading receives shards into host memory, and the tensor is changed when all of its shards
are there.

    dcp.save(state, storage_writer=FileSystemWriter(path), planner=ShardSavePlanner())
    dcp.load(state, storage_reader=FileSystemReader(path), planner=ShardLoadPlanner(), no_dist=True)

This file knows nothing of a class of tensors, of storage, or of who else saves.
"""

from __future__ import annotations

import io
import threading
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.default_planner import create_default_local_load_plan
from torch.distributed.checkpoint.metadata import (
    STATE_DICT_TYPE,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from torchft_ckpt.checkpointing.state.local_state import box_of, some_of
from torchft_ckpt.checkpointing.state.shards import DTensorAdapter, ShardAdapter, adapter_of
from torchft_ckpt.core.boxes.geometry import Box, contains, refine
from torchft_ckpt.errors import StateMismatchError, torn_where_it_raises

Offsets = tuple[int, ...]


class _Sharded(NamedTuple):
    """A tensor of the state dict that is saved and loaded as its local boxes."""

    tensor: torch.Tensor
    adapter: ShardAdapter
    boxes: list[Box]

    def by_offsets(self, data: Sequence[torch.Tensor]) -> dict[Offsets, torch.Tensor]:
        """Name the data of `boxes` as DCP does, by its offsets. An empty box may begin where another does: that one counts."""
        named: dict[Offsets, torch.Tensor] = {}
        for box, part in zip(self.boxes, data, strict=True):
            if box.volume or box.offsets not in named:
                named[box.offsets] = part
        return named


def _take_sharded(state_dict: STATE_DICT_TYPE) -> tuple[dict[str, _Sharded], STATE_DICT_TYPE]:
    """Divide a flat state dict into what is saved as local boxes, and what DCP's defaults know."""
    sharded: dict[str, _Sharded] = {}
    rest: STATE_DICT_TYPE = {}
    for fqn, value in state_dict.items():
        adapter = adapter_of(value) if isinstance(value, torch.Tensor) else None
        if adapter is None or isinstance(adapter, DTensorAdapter):
            rest[fqn] = value
        else:
            sharded[fqn] = _Sharded(value, adapter, adapter.boxes(value, fqn))
    return sharded, rest


class ShardSavePlanner(DefaultSavePlanner):
    """Saves SPMD tensors shard by shard: each is moved from device to host once. For one `dcp.save` after another.

    Args are those of `DefaultSavePlanner`, less plan caching: a cached plan does not survive a change of the group. Shards
    that several processes hold are saved by one of them, as DCP decides for all tensors.

    Raises (out of `dcp.save`):
        UnsupportedValueError: a tensor has a shard that is no box.
    """

    def __init__(
        self,
        flatten_state_dict: bool = True,
        flatten_sharded_tensors: bool = True,
        dedup_save_to_lowest_rank: bool = False,
    ) -> None:
        super().__init__(
            flatten_state_dict=flatten_state_dict,
            flatten_sharded_tensors=flatten_sharded_tensors,
            dedup_save_to_lowest_rank=dedup_save_to_lowest_rank,
        )
        self._lock = threading.Lock()  # a storage writer may resolve items on several threads
        self._sharded: dict[str, _Sharded] = {}
        self._planned: dict[str, set[Offsets]] = {}
        self._moved: dict[str, dict[Offsets, torch.Tensor]] = {}

    def set_up_planner(
        self,
        state_dict: STATE_DICT_TYPE,
        storage_meta: StorageMeta | None = None,
        is_coordinator: bool = False,
    ) -> None:
        super().set_up_planner(state_dict, storage_meta, is_coordinator)
        self._sharded, self.state_dict = _take_sharded(self.state_dict)
        self._planned, self._moved = {}, {}

    def create_local_plan(self) -> SavePlan:
        plan = super().create_local_plan()
        items = [item for fqn, sharded in self._sharded.items() for item in _write_items(fqn, sharded)]
        self.plan = replace(plan, items=[*plan.items, *items])
        return self.plan

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        plan = super().finish_plan(new_plan)
        self._planned = {}
        for item in plan.items:
            if item.index.fqn in self._sharded:
                self._planned.setdefault(item.index.fqn, set()).add(_offsets_of(item.index))
        return plan

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        if write_item.index.fqn not in self._sharded:
            return super().resolve_data(write_item)
        return self._take_shard(write_item.index)

    def lookup_object(self, index: MetadataIndex) -> Any:
        if index.fqn not in self._sharded:
            return super().lookup_object(index)
        return self._take_shard(index)

    def _take_shard(self, index: MetadataIndex) -> torch.Tensor:
        """Return a shard's data on the host, and keep no reference to it."""
        offsets = _offsets_of(index)
        with self._lock:
            held = self._moved.setdefault(index.fqn, {})
            if offsets not in held:
                sharded, planned = self._sharded[index.fqn], self._planned.get(index.fqn, {offsets})
                moved = sharded.by_offsets(sharded.adapter.data(sharded.tensor, index.fqn))
                held.update((at, part) for at, part in moved.items() if at in planned)
            return held.pop(offsets)


class ShardLoadPlanner(DefaultLoadPlanner):
    """Loads SPMD tensors shard by shard, from a checkpoint of any layout; each is changed when all of its shards arrived.

    Args are those of `DefaultLoadPlanner`; with `allow_partial_load` tensors that the checkpoint lacks keep their values.
    Tensors are changed in place. Checkpoints from before torch 2.4 are not read.

    Before anything is read, everything that SPMD tensors need is seen to be in the checkpoint. DCP says nothing to a planner
    when a load ends, so who uses a storage reader that may leave something out calls `check_complete` after it.

    Raises (out of `dcp.load`, before anything is read or changed):
        StateMismatchError: SPMD tensors that the checkpoint lacks, in whole or in part, or has with another shape or dtype.
        UnsupportedValueError: a tensor has a shard that is no box.
    """

    def __init__(
        self,
        flatten_state_dict: bool = True,
        flatten_sharded_tensors: bool = True,
        allow_partial_load: bool = False,
    ) -> None:
        super().__init__(
            flatten_state_dict=flatten_state_dict,
            flatten_sharded_tensors=flatten_sharded_tensors,
            allow_partial_load=allow_partial_load,
        )
        self._lock = threading.Lock()  # a storage reader may commit items on several threads
        self._sharded: dict[str, _Sharded] = {}
        self._num_awaited: Counter[str] = Counter()
        self._buffers: dict[str, list[torch.Tensor]] = {}

    def set_up_planner(
        self,
        state_dict: STATE_DICT_TYPE,
        metadata: Metadata | None = None,
        is_coordinator: bool = False,
    ) -> None:
        super().set_up_planner(state_dict, metadata, is_coordinator)
        self._sharded, self.state_dict = _take_sharded(self.state_dict)
        self._num_awaited, self._buffers = Counter(), {}

    def create_local_plan(self) -> LoadPlan:
        if self.metadata is None:
            raise StateMismatchError("the checkpoint has no metadata; nothing was changed", party="checkpoint")
        known = self.metadata.state_dict_metadata
        if self.allow_partial_load:
            self._sharded = {fqn: sharded for fqn, sharded in self._sharded.items() if fqn in known}
        problems = {fqn: _problem(known.get(fqn), sharded) for fqn, sharded in self._sharded.items()}
        _raise_for({fqn: problem for fqn, problem in problems.items() if problem is not None})
        # The base class would take our tensors, which it does not see, for names of an older version.
        plan = create_default_local_load_plan(self.state_dict, self.metadata, not self.allow_partial_load)
        items = [item for fqn, sharded in self._sharded.items() for item in _read_items(fqn, known[fqn], sharded)]
        return replace(plan, items=[*plan.items, *items])

    def finish_plan(self, new_plan: LoadPlan) -> LoadPlan:
        plan = super().finish_plan(new_plan)
        fqns = (item.dest_index.fqn for item in plan.items)
        self._num_awaited = Counter(fqn for fqn in fqns if fqn in self._sharded)
        return plan

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        if index.fqn not in self._sharded:
            return super().lookup_tensor(index)
        sharded = self._sharded[index.fqn]
        with self._lock:
            buffers = self._buffers.get(index.fqn)
            if buffers is None:
                buffers = [torch.empty(box.sizes, dtype=sharded.tensor.dtype, device="cpu") for box in sharded.boxes]
                self._buffers[index.fqn] = buffers
            return sharded.by_offsets(buffers)[_offsets_of(index)]

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        fqn = read_item.dest_index.fqn
        if fqn not in self._sharded:
            super().commit_tensor(read_item, tensor)
            return
        with self._lock:
            self._num_awaited[fqn] -= 1
            if self._num_awaited[fqn] > 0:
                return
            del self._num_awaited[fqn]
            buffers = self._buffers.pop(fqn)
        sharded = self._sharded[fqn]
        with torn_where_it_raises(f"putting together {fqn[:120]}", fqn[:120]), torch.no_grad():
            sharded.tensor.copy_(sharded.adapter.rebuild(sharded.tensor, buffers))

    def check_complete(self) -> None:
        """See that every planned shard arrived. To be called after the load.

        Raises:
            StateMismatchError: tensors whose shards did not all arrive; these still have the values of before, and others may
                not: `state_overwritten` is true.
        """
        with self._lock:
            late = {fqn: f"{num} of its parts did not arrive" for fqn, num in self._num_awaited.items()}
        with torn_where_it_raises("the load", "checkpoint"):
            _raise_for(late)


def _write_items(fqn: str, sharded: _Sharded) -> Iterable[WriteItem]:
    """Yield one item for each local box that holds something; an empty tensor is one item, so that its name is saved."""
    tensor = sharded.tensor
    properties = TensorProperties(dtype=tensor.dtype, requires_grad=tensor.requires_grad)
    for number, box in enumerate(sharded.boxes):
        if box.volume or not tensor.numel():
            data = TensorWriteData(chunk=_chunk_of(box), properties=properties, size=tensor.size())
            index = MetadataIndex(fqn, box.offsets, number)
            yield WriteItem(index=index, type=WriteItemType.SHARD, tensor_data=data)


def _read_items(fqn: str, saved: Any, sharded: _Sharded) -> list[ReadItem]:
    return create_read_items_for_chunk_list(fqn, saved, [_chunk_of(box) for box in sharded.boxes if box.volume])


def _problem(saved: Any, sharded: _Sharded) -> str | None:
    """Return why a tensor cannot be loaded from what was saved under its name; None where it can."""
    tensor = sharded.tensor
    if saved is None:
        return "not in the checkpoint"
    if not isinstance(saved, TensorStorageMetadata):
        return "no tensor in the checkpoint"
    if tuple(saved.size) != tuple(tensor.shape):
        return f"of shape {tuple(saved.size)} in the checkpoint, {tuple(tensor.shape)} here"
    if saved.properties.dtype != tensor.dtype:
        return f"of {saved.properties.dtype} in the checkpoint, {tensor.dtype} here"
    chunks = [box_of(chunk) for chunk in saved.chunks]
    for box in sharded.boxes:
        for piece in refine(box, chunks):
            if not any(contains(chunk, piece) for chunk in chunks):
                return f"not saved in {piece}"
    return None


def _raise_for(problems: dict[str, str]) -> None:
    if not problems:
        return
    named = some_of(f"{fqn!r} ({problem})" for fqn, problem in problems.items())
    raise StateMismatchError(
        f"the checkpoint does not fit {len(problems)} tensors, which were not changed: {named}",
        party="checkpoint",
    )


def _chunk_of(box: Box) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(offsets=torch.Size(box.offsets), sizes=torch.Size(box.sizes))


def _offsets_of(index: MetadataIndex) -> Offsets:
    return tuple(index.offset or ())
