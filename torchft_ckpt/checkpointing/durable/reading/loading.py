"""Makes a state of a checkpoint: into the tensors of a state dict that is here, or a whole one as it was saved.

Two ways. `load_into` is DCP's: the state dict that is here says what is wanted, and is changed in place. `load_state` is that of
healing: the tree that was saved says what there is, and tensors that are here lend their layout and memory. Which bytes are
read is the reader's business; this file says which boxes go where.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from types import MappingProxyType
from typing import Any, cast

import numpy as np
import torch

from torchft_ckpt.checkpointing.durable.format.manifest import PartManifest
from torchft_ckpt.checkpointing.durable.names import parse_checkpoint
from torchft_ckpt.checkpointing.durable.reading.checkpoint import (
    Checkpoint,
    is_closed,
    list_checkpoints,
    read_checkpoint,
    tell_of,
    why_not_whole,
)
from torchft_ckpt.checkpointing.durable.reading.fresh_optimizers import room_for_optimizer_state, template_of
from torchft_ckpt.checkpointing.durable.reading.pieces import StateReader, leaves_of
from torchft_ckpt.checkpointing.durable.reading.reader import CheckpointReader, owners_in
from torchft_ckpt.checkpointing.durable.storage.fsspec_storage import open_storage
from torchft_ckpt.checkpointing.state.containers import walk
from torchft_ckpt.checkpointing.state.description import Description
from torchft_ckpt.checkpointing.state.local_state import HeldTensor, LocalState, some_of
from torchft_ckpt.checkpointing.state.parameters import Owned
from torchft_ckpt.checkpointing.state.target import Filling, StateTarget, Want, check_shared, memory_for, wants_of
from torchft_ckpt.checkpointing.state.tree import items_of_node
from torchft_ckpt.core.boxes.geometry import whole
from torchft_ckpt.errors import CheckpointDamagedError, StateDictLoadError, StateMismatchError, torn_where_it_raises


def load_checkpoint(
    directory: str | os.PathLike[str], state_dict: MutableMapping[str, Any], **storage_options: Any
) -> None:
    """Load one checkpoint into a state dict, in place: a directory that a `Checkpointer` wrote, or that DCP itself did.

    Each process reads what it wants by itself, and only that. Nothing in the directory is executed. What ranks of a group had
    saved otherwise under one name, a rank of torch.distributed's default group gets as that rank had it, if there are as many.

    Args:
        directory: of the checkpoint; a path, or a URL of fsspec.
        state_dict: as for `Checkpointer.load`.
        storage_options: of fsspec's file system.

    Raises:
        CheckpointDamagedError: it is not whole, or has other bytes than were written.
        StateMismatchError: what is wanted is not in it, or of another shape or dtype.
        UnsupportedValueError: a plain value that is wanted, and that DCP wrote, needs more than `weights_only=True`.
        StorageError: the storage failed.
        StateDictLoadError: the `load_state_dict` of an object in it raised.
        In each, `state_overwritten` says whether the state dict is torn.
    """
    location, _, last = os.fspath(directory).rstrip("/").rpartition("/")
    name = parse_checkpoint(last)
    reader: StateReader[Any]
    read: ReadWants | None = None
    if name is None:
        from torchft_ckpt.integrations.dcp.reader import DCPReader

        reader = DCPReader(open_storage(directory, **storage_options))
    else:
        checkpoint = read_checkpoint([open_storage(location or ".", **storage_options)], name)
        why_not = why_not_whole(checkpoint)
        if why_not is not None:
            raise CheckpointDamagedError(f"checkpoint {directory} is not whole: {why_not}", str(directory))
        tell_of(checkpoint)
        reader = CheckpointReader(checkpoint)
        read = reader.read_own
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            reader.read_as(torch.distributed.get_rank(), torch.distributed.get_world_size())
    template = template_of(state_dict)
    load_into(reader, template.state_dict, read, owned=template.owned)
    give_back(state_dict, template.state_dict)


def checkpoints_in(location: str | os.PathLike[str], **storage_options: Any) -> Sequence[int]:
    """Return the steps of the whole checkpoints of a place, the newest first."""
    storage = open_storage(location, **storage_options)
    return [name.step for name in list_checkpoints(storage) if is_closed(storage, name)]


def give_back(state_dict: MutableMapping[str, Any], template: dict[str, Any]) -> None:
    """Put what was loaded into a template back into the state dict that it was made of, objects by their `load_state_dict`.

    Raises:
        StateDictLoadError: one of those raised; `state_overwritten` is true.
    """
    for key, value in state_dict.items():
        if hasattr(value, "load_state_dict"):
            try:
                value.load_state_dict(template[key])
            except Exception as error:
                raise StateDictLoadError.of(key, error) from error
        else:
            state_dict[key] = template[key]


logger = logging.getLogger(__name__)

ReadWants = Callable[[Sequence[Want]], None]
"""Fills the targets, from wherever."""


def load_state(
    checkpoint: Checkpoint, read: ReadWants, local: LocalState | None, *, replica_id: str, rank: int, in_place: bool
) -> dict[str, Any]:
    """Return the state that was saved, on the layout of the tensors that are here.

    Args:
        checkpoint: whole.
        local: the state that is here; None: all is wanted whole, and plain.
        replica_id, rank: of this process: where the ranks' trees differ, the same rank's is taken.
        in_place: read into the tensors that are here, as far as they are on the CPU and can be written to.

    Raises:
        StateMismatchError: a sharded tensor is not here, or of another shape or dtype, so nothing says which part of it is
            wanted; nothing was read.
        CheckpointError: as `read` raises it.
    """
    manifest = _principal(checkpoint, replica_id, rank)
    sharded = {
        entry.fqn
        for entry in manifest.tensors
        if sum(one.box.volume for one in entry.boxes) < whole(tuple(entry.shape)).volume
    }
    names = {entry.fqn for entry in manifest.tensors}
    here = LocalState({}) if local is None else local
    missing = checkpoint.tensors.keys() & here.paths() - names
    lost = [path[:120] for path in sorted(missing) if not here.is_optional(path)]
    if lost:
        logger.warning(
            "checkpoint %s: rank %d of the %d ranks that saved it, whose state this rank is given, did not have %s, which is here"
            " and which other ranks saved: it is not restored. load_checkpoint reads by name, from all of them",
            checkpoint.name,
            manifest.rank,
            manifest.num_ranks,
            some_of(lost, ", "),
        )
    description = Description(tree=manifest.tree, tensors=manifest.tensors, sharded=sharded, owners=owners_in(manifest))
    target = StateTarget(local, in_place=in_place, may_be_beside=True, may_be_tied=checkpoint.may_be_tied)
    read(target.wants(description))
    with torn_where_it_raises(f"loading {checkpoint.name}", str(checkpoint.name), lambda: target.is_overwritten(True)):
        state = target.finish(description)
    if not isinstance(state, dict):
        raise CheckpointDamagedError(f"{checkpoint.name} is of a state that is no dict", str(checkpoint.name))
    return state


def keys_of(checkpoint: Checkpoint, *, replica_id: str, rank: int) -> list[object]:
    """Return the keys at the root of the state that `load_state` loads."""
    return [key for key, _ in items_of_node(_principal(checkpoint, replica_id, rank).tree)]


def _principal(checkpoint: Checkpoint, replica_id: str, rank: int) -> PartManifest:
    own = checkpoint.own_part(replica_id, rank)
    if own is not None:
        return own.manifest
    return next(
        (part.manifest for part in checkpoint.parts if part.manifest.rank == rank), checkpoint.parts[0].manifest
    )


def load_into(
    reader: StateReader[Any],
    state_dict: MutableMapping[str, Any],
    read: ReadWants | None = None,
    *,
    owned: Mapping[str, Owned] = MappingProxyType({}),
) -> None:
    """Load what a state dict names, in place: tensors keep their memory and layout, other leaves are replaced.

    As `torch.distributed.checkpoint.load` does, so more may be in the checkpoint than is wanted. But all that was saved of an
    optimizer is wanted, or else the state of one that has none here yet, see `room_for_optimizer_state`.

    Args:
        read: fills targets, if not `reader` does.
        owned: the state dicts at the root that optimizers have returned.

    Raises:
        StateMismatchError: something is not in the checkpoint, or of another shape or dtype, or cannot be loaded into; nothing
            was changed. Or tensors share memory here, and are other ones there; `state_overwritten` says so.
        CheckpointError: as the reader raises it; `state_overwritten` says whether tensors were written to.
    """
    with room_for_optimizer_state(reader, state_dict, owned):
        _load_named(reader, state_dict, read or reader.read)


def _load_named(reader: StateReader[Any], state_dict: MutableMapping[str, Any], read: ReadWants) -> None:
    local = LocalState(state_dict)
    places = list(leaves_of(state_dict))
    values = reader.plan_values({fqn for fqn, _, _ in places}, local.classes)
    # The tensors and arrays in a leaf come with it: DCP looks into no tuple.
    in_leaves = {
        ".".join(map(str, (fqn, *path)))
        for fqn, container, key in places
        for path, value in walk(container[key])
        if isinstance(value, (torch.Tensor, np.ndarray))
    }
    paths = [path for path in local.paths() if path not in in_leaves]
    wrong = _misfits(reader, local, paths)
    wrong += [
        f"{fqn[:120]} is {'a tensor there, and none here' if fqn in reader.tensors else 'not there'}"
        for fqn, _, _ in places
        if fqn not in values.names
    ]
    if wrong:
        raise StateMismatchError(
            f"{reader.location} is not of this state: {some_of(wrong)}; nothing was changed", reader.location
        )
    wants = [*values.wants]
    into: dict[str, tuple[HeldTensor, list[torch.Tensor]]] = {}
    apart = local.apart()
    for path in paths:
        held = cast("HeldTensor", local.get(path))
        parts = memory_for([] if path in apart else held.data, held.boxes, held.given.dtype)
        into[path] = held, parts
        wants += wants_of(path, held.boxes, parts)
    with torch.no_grad():
        read(wants)
        with torn_where_it_raises(f"loading {reader.location}", reader.location):
            check_shared(local, {path: parts for path, (_, parts) in into.items()}, reader.may_be_tied)
            filling = Filling()
            for held, parts in into.values():
                filling.fill(held, parts)
            filling.end()
            made = values.make()
            for fqn, container, key in places:
                container[key] = made[fqn][1]
    more = len(set(reader.tensors) - set(paths) - {want.name for want in values.wants})
    if more:
        logger.info("%s has %d tensors that were not asked for", reader.location, more)


def _misfits(reader: StateReader[Any], local: LocalState, paths: Sequence[str]) -> list[str]:
    wrong = [f"{path[:120]} is the name of two tensors here" for path in local.doubled]
    for path in paths:
        held, saved = local.get(path), reader.tensors.get(path)
        if saved is None:
            is_value = bool(reader.plan_values([path]).names)
            wrong.append(f"{path[:120]} is {'a tensor here, and none there' if is_value else 'not there'}")
        elif held is not None:
            given = held.given
            here = (tuple(given.shape), given.dtype)
            if here != (saved.shape, saved.dtype):
                wrong.append(f"{path[:120]} is {saved.dtype}{[*saved.shape]} there, {here[1]}{[*here[0]]} here")
            elif why := local.why_unfillable(path):
                wrong.append(f"{path[:120]} {why}")
    return wrong
