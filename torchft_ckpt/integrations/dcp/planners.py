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

import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

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

from torchft_ckpt.checkpointing.state.local_state import box_of, some_of
from torchft_ckpt.checkpointing.state.shards import DTensorAdapter, ShardAdapter, adapter_of
from torchft_ckpt.core.boxes.geometry import Box, subtract
from torchft_ckpt.errors import StateMismatchError, torn_where_it_raises

Offsets = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Sharded:
    """Stands for a tensor in the state dict that DCP plans for: it has the methods by which DCP asks for items."""

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

    def __create_write_items__(self, fqn: str, _: object) -> list[WriteItem]:
        """Return one item for each local box that holds something; an empty tensor is one item, so that its name is saved."""
        size = self.tensor.size()
        properties = TensorProperties(dtype=self.tensor.dtype, requires_grad=self.tensor.requires_grad)
        return [
            WriteItem(
                index=MetadataIndex(fqn, box.offsets, number),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=_chunk_of(box), properties=properties, size=size),
            )
            for number, box in enumerate(self.boxes)
            if box.volume or not self.tensor.numel()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [_chunk_of(box) for box in self.boxes if box.volume]


def _with_shards(state_dict: STATE_DICT_TYPE) -> STATE_DICT_TYPE:
    """Return a flat state dict in which each tensor stands as its local boxes that DCP's defaults do not know."""
    found: STATE_DICT_TYPE = {}
    for fqn, value in state_dict.items():
        adapter = adapter_of(value) if isinstance(value, torch.Tensor) else None
        if adapter is not None and not isinstance(adapter, DTensorAdapter):
            value = _Sharded(value, adapter, adapter.boxes(value, fqn))
        found[fqn] = value
    return found


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
        self._planned: set[tuple[str, Offsets]] = set()
        self._moved: dict[str, dict[Offsets, torch.Tensor]] = {}

    def set_up_planner(
        self,
        state_dict: STATE_DICT_TYPE,
        storage_meta: StorageMeta | None = None,
        is_coordinator: bool = False,
    ) -> None:
        super().set_up_planner(state_dict, storage_meta, is_coordinator)
        self.state_dict = _with_shards(self.state_dict)
        self._planned, self._moved = set(), {}

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        plan = super().finish_plan(new_plan)
        self._planned = {(item.index.fqn, _offsets_of(item.index)) for item in plan.items}
        return plan

    def lookup_object(self, index: MetadataIndex) -> Any:
        # Of a shard, its data on the host; no reference to that is kept.
        sharded, offsets = self.state_dict.get(index.fqn), _offsets_of(index)
        if not isinstance(sharded, _Sharded):
            return super().lookup_object(index)
        with self._lock:
            held = self._moved.setdefault(index.fqn, {})
            if offsets not in held:
                moved = sharded.by_offsets(sharded.adapter.data(sharded.tensor, index.fqn))
                held.update(
                    (at, part) for at, part in moved.items() if at == offsets or (index.fqn, at) in self._planned
                )
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
        self._num_awaited: Counter[str] = Counter()
        self._buffers: dict[str, list[torch.Tensor]] = {}

    def set_up_planner(
        self,
        state_dict: STATE_DICT_TYPE,
        metadata: Metadata | None = None,
        is_coordinator: bool = False,
    ) -> None:
        super().set_up_planner(state_dict, metadata, is_coordinator)
        self.state_dict = _with_shards(self.state_dict)
        self._num_awaited, self._buffers = Counter(), {}

    def create_local_plan(self) -> LoadPlan:
        if self.metadata is None:
            raise StateMismatchError("the checkpoint has no metadata; nothing was changed", party="checkpoint")
        known = self.metadata.state_dict_metadata
        _raise_for(
            {
                fqn: problem
                for fqn, sharded in self.state_dict.items()
                if isinstance(sharded, _Sharded)
                and not (self.allow_partial_load and fqn not in known)
                and (problem := _problem(known.get(fqn), sharded)) is not None
            }
        )
        # The base class may flatten the state dict anew, by the names of an older version, and then sees our tensors themselves.
        return create_default_local_load_plan(self.state_dict, self.metadata, not self.allow_partial_load)

    def finish_plan(self, new_plan: LoadPlan) -> LoadPlan:
        plan = super().finish_plan(new_plan)
        fqns = (item.dest_index.fqn for item in plan.items)
        self._num_awaited = Counter(fqn for fqn in fqns if isinstance(self.state_dict[fqn], _Sharded))
        return plan

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        sharded = self.state_dict.get(index.fqn)
        if not isinstance(sharded, _Sharded):
            return super().lookup_tensor(index)
        with self._lock:
            buffers = self._buffers.get(index.fqn)
            if buffers is None:
                buffers = [torch.empty(box.sizes, dtype=sharded.tensor.dtype, device="cpu") for box in sharded.boxes]
                self._buffers[index.fqn] = buffers
            return sharded.by_offsets(buffers)[_offsets_of(index)]

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        fqn = read_item.dest_index.fqn
        sharded = self.state_dict.get(fqn)
        if not isinstance(sharded, _Sharded):
            super().commit_tensor(read_item, tensor)
            return
        with self._lock:
            self._num_awaited[fqn] -= 1
            if self._num_awaited[fqn] > 0:
                return
            del self._num_awaited[fqn]
            buffers = self._buffers.pop(fqn)
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
        if missing := subtract([box], chunks):
            return f"not saved in {missing[0]}"
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
