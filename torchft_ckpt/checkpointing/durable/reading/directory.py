"""One checkpoint's directory and one state dict: who wrote the directory, Checkpointer or DCP, makes no difference."""

from __future__ import annotations

import os
from collections.abc import MutableMapping, Sequence
from typing import Any

import torch

from torchft_ckpt.checkpointing.durable.names import parse_checkpoint
from torchft_ckpt.checkpointing.durable.reading.checkpoint import (
    is_closed,
    list_checkpoints,
    read_checkpoint,
    tell_of,
    why_not_whole,
)
from torchft_ckpt.checkpointing.durable.reading.fresh_optimizers import template_of
from torchft_ckpt.checkpointing.durable.reading.loading import ReadWants, load_into
from torchft_ckpt.checkpointing.durable.reading.pieces import StateReader
from torchft_ckpt.checkpointing.durable.reading.reader import CheckpointReader
from torchft_ckpt.checkpointing.durable.storage.fsspec_storage import open_storage
from torchft_ckpt.errors import CheckpointDamagedError, StateDictLoadError


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
