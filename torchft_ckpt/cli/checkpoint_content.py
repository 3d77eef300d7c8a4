"""Selects what of a checkpoint goes into one safetensors file, and reads its tensors one after the other. It writes no files.

State of one rank alone (random number generators, its position in the data) is left out.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch

from torchft_ckpt.checkpointing.durable.reading.checkpoint import differing_copies, drifted_replicas
from torchft_ckpt.checkpointing.durable.reading.reader import CheckpointReader
from torchft_ckpt.checkpointing.state.target import Want
from torchft_ckpt.checkpointing.state.tree import TreeEncoder
from torchft_ckpt.cli.output import leaves
from torchft_ckpt.cli.safetensors_file import (
    MAX_HEADER_BYTES,
    Content,
    PendingTensor,
    in_file_order,
    name_of_tensor,
    unused_name,
)
from torchft_ckpt.core.boxes.geometry import whole
from torchft_ckpt.errors import CheckpointError, UnsupportedValueError
from torchft_ckpt.integrations.dcp.reader import DCPReader, has_elements_here

_BATCH_BYTES = 64 * 1024 * 1024
_ENTRY_BYTES = 100
"""Of a tensor in the header, beside its name."""
_MAX_REPEATED_BYTES = 1024**3
"""Of tensors inside of values, as far as they are views of the same bytes: what is expanded is written out in full."""


class ExportedContent(NamedTuple):
    """The content of a file."""

    outlines: list[PendingTensor]
    """All tensors, in the order of the file."""
    extra: dict[str, torch.Tensor]
    """The tensors that are in memory already, as they were inside of values."""
    content: Content
    """The rest."""
    left_out: list[str]
    """Values that cannot be in it, as sentences that say why."""


def content_of(reader: CheckpointReader | DCPReader) -> ExportedContent:
    """Return what of a checkpoint goes into a file. Values are read for it, tensors are not.

    Raises:
        CheckpointError: a value is damaged or cannot be read.
    """
    values, unreadable = values_of(reader)
    left_out: list[str] = []
    for error in unreadable.values():
        if not isinstance(error, UnsupportedValueError):
            raise error
        left_out.append(str(error))
    if isinstance(reader, CheckpointReader):
        if told := differing_copies(reader.checkpoint):
            left_out.append(f"all but the first copies: {told}")
        if told := drifted_replicas(reader.checkpoint):
            left_out.append(f"what one rank alone had: {told}")
    content = Content()
    taken = dict.fromkeys(reader.tensors, 1)
    outlines = [
        outline._replace(name=name_of_tensor(outline.name, taken, content.renamed), path=outline.name)
        for outline in outlines_of(reader)
    ]
    # What this library wrote has tensors and arrays that are inside of values among its tensors, by the same name.
    known = {outline.path: outline.name for outline in outlines} if isinstance(reader, CheckpointReader) else {}
    room = _Room(taken, known, content.renamed)
    extra: dict[str, torch.Tensor] = {}
    for fqn, value in values.items():
        try:
            found = room.take(fqn, value)
        except UnsupportedValueError as error:
            left_out.append(f"{error}; all of {fqn[:120]} is left out")
            continue
        content.values.update(found.values)
        content.arrays.extend(found.arrays)
        extra.update(found.tensors)
        left_out += found.left_out
    more = [PendingTensor(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in extra.items()]
    return ExportedContent(in_file_order([*outlines, *more]), extra, content, left_out)


class _Found(NamedTuple):
    """The part of one value that goes into a file, by name."""

    values: dict[str, object]
    arrays: list[str]
    tensors: dict[str, torch.Tensor]
    """The tensors that are in memory already."""
    left_out: list[str]


class _Room:
    """The room that a file has left for values: a few bytes can stand for more leaves, or elements, than any machine holds.

    Args:
        taken: names that there are; see `unused_name`.
        known: paths of tensors that are read later, and their names in the file.
        renamed: notes tensors that cannot keep their name.
    """

    def __init__(self, taken: dict[str, int], known: Mapping[str | None, str], renamed: dict[str, str]) -> None:
        self._taken = taken
        self._known = known
        self._renamed = renamed
        self._header_bytes = MAX_HEADER_BYTES
        self._repeated_bytes = _MAX_REPEATED_BYTES

    def take(self, fqn: str, value: object) -> _Found:
        """Return all of a value, less those leaves that cannot be carried.

        Raises:
            UnsupportedValueError: there is no room for it, or it is nested too deep. Nothing of it counts.
        """
        found = _Found({}, [], {}, [])
        room = self._header_bytes
        storages: dict[int, int] = {}
        for path, leaf in leaves(value, fqn):
            try:
                room -= self._add(path, leaf, found, storages)
            except UnsupportedValueError as error:
                found.left_out.append(str(error))
                room -= len(path)
            if room < 0:
                raise UnsupportedValueError(
                    f"{fqn[:120]}: its leaves take more than the {MAX_HEADER_BYTES} bytes that a safetensors header holds",
                    fqn,
                )
        repeated = sum(tensor.nbytes for tensor in found.tensors.values()) - sum(storages.values())
        if repeated > self._repeated_bytes:
            raise UnsupportedValueError(
                f"{fqn[:120]}: its tensors repeat {repeated} bytes that are there once, more than {_MAX_REPEATED_BYTES}",
                fqn,
            )
        self._header_bytes = room
        self._repeated_bytes -= max(repeated, 0)
        return found

    def _add(self, path: str, leaf: object, found: _Found, storages: dict[int, int]) -> int:
        """Add a leaf; return how many bytes of the header it takes."""
        name = self._known.get(path) or unused_name(path, self._taken)
        encoder = TreeEncoder()
        node = encoder.encode(leaf, name)
        if not encoder.tensors:
            found.values[name] = node
            return len(json.dumps({name: node}, separators=(",", ":")))
        tensor = encoder.tensors[0][1]
        if path not in self._known:
            if not has_elements_here(tensor):
                kind = f"{tensor.device.type} {tensor.layout}" if not tensor.is_nested else "nested"
                raise UnsupportedValueError(f"{name}: safetensors holds no {kind} tensor", name)
            name = name_of_tensor(name, self._taken, self._renamed)
            found.tensors[name] = tensor.detach()
            storage = tensor.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
        if isinstance(leaf, np.ndarray):
            found.arrays.append(name)
        return len(json.dumps(name)) + _ENTRY_BYTES


def values_of(
    reader: CheckpointReader | DCPReader,
) -> tuple[Mapping[str, object], Mapping[str, CheckpointError]]:
    """Return the values that are no tensors, by name; and why others cannot be read."""
    if isinstance(reader, DCPReader):
        return reader.readable_values()
    return {fqn: value for fqn, (_, value) in reader.values().items()}, {}


def outlines_of(reader: CheckpointReader | DCPReader) -> list[PendingTensor]:
    """Return its tensors, in the order of a file."""
    return in_file_order(PendingTensor(tensor.fqn, tensor.dtype, tensor.shape) for tensor in reader.tensors.values())


def read_in_order(
    reader: CheckpointReader | DCPReader,
    outlines: Sequence[PendingTensor],
    extra: Mapping[str, torch.Tensor] | None = None,
) -> Iterator[memoryview]:
    """Yield the elements of tensors, one after the other; what is yielded is there until the next is asked for.

    It takes memory for the largest tensor, or 64 MiB. Tensors are read whole, because DCP's have a checksum of the whole alone.

    Args:
        reader: of the checkpoint.
        outlines: those that are wanted, `in_file_order`.
        extra: those of them that need not be read.

    Raises:
        CheckpointError: as the reader's `read`, or there is not enough memory.
    """
    extra = extra or {}
    memory = torch.empty(0, dtype=torch.uint8, device="cpu")
    for batch in _batches(outlines):
        num_bytes = sum(outline.num_bytes for outline in batch)
        if len(memory) < num_bytes:
            memory = _allocate(num_bytes, batch[0].name)
        wants: list[Want] = []
        end = 0
        for outline in batch:
            start, end = end, end + outline.num_bytes
            target = memory[start:end].view(outline.dtype).reshape(outline.shape)
            if outline.name in extra:
                target.copy_(extra[outline.name])
            else:
                wants.append(Want(outline.path or outline.name, whole(outline.shape), target))
        reader.read(wants)
        yield memory[:num_bytes].numpy().data


def _allocate(num_bytes: int, name: str) -> torch.Tensor:
    try:
        return torch.empty(num_bytes, dtype=torch.uint8, device="cpu")
    except RuntimeError as error:  # what torch has for a MemoryError
        raise UnsupportedValueError(f"there is no memory for the {num_bytes} bytes of {name[:120]}", name) from error


def reason_of(error: CheckpointError) -> CheckpointError:
    """Return what a reader found to be wrong, rather than what it could not make up because of that."""
    return error.__cause__ if isinstance(error.__cause__, CheckpointError) else error


def _batches(outlines: Iterable[PendingTensor]) -> Iterator[list[PendingTensor]]:
    batch: list[PendingTensor] = []
    num_bytes = 0
    for outline in outlines:
        if not outline.num_bytes:
            continue
        if batch and num_bytes + outline.num_bytes > _BATCH_BYTES:
            yield batch
            batch, num_bytes = [], 0
        batch.append(outline)
        num_bytes += outline.num_bytes
    if batch:
        yield batch
