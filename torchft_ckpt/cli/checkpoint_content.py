"""What of a checkpoint goes into one safetensors file, and its tensors one after the other. It reads; it writes no files.

What belongs to one rank alone (random number generators, its position in the data) is left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch

from torchft_ckpt.checkpointing.durable.reading.foreign import ForeignReader
from torchft_ckpt.checkpointing.durable.reading.reader import CheckpointReader
from torchft_ckpt.checkpointing.resharding.plan import Want
from torchft_ckpt.checkpointing.state.tree import TreeEncoder
from torchft_ckpt.cli.leaves import leaves
from torchft_ckpt.cli.safetensors_file import Content, Outline, in_file_order, unused_name
from torchft_ckpt.core.boxes import whole
from torchft_ckpt.errors import CheckpointError, UnsupportedValueError

_BATCH_BYTES = 64 * 1024 * 1024


class ExportedContent(NamedTuple):
    """What goes into a file."""

    outlines: list[Outline]
    """All tensors, in the order of the file."""
    extra: dict[str, torch.Tensor]
    """Those of them that are here already: they were inside of values."""
    content: Content
    """The rest."""
    left_out: list[str]
    """Values that cannot be in it, as sentences that say why."""


def content_of(reader: CheckpointReader | ForeignReader) -> ExportedContent:
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
    content = Content()
    extra: dict[str, torch.Tensor] = {}
    taken = set(reader.tensors)
    for fqn, value in values.items():
        for path, leaf in leaves(value, fqn):
            # What this library wrote has tensors and arrays that are inside of values among its tensors, by the same name.
            is_known = path in reader.tensors and isinstance(reader, CheckpointReader)
            name = path if is_known else unused_name(path, taken)
            encoder = TreeEncoder()
            try:
                node = encoder.encode(leaf, name)
                if not encoder.tensors:
                    content.values[name] = node
                    continue
                tensor = encoder.tensors[0][1]
                if not is_known and tensor.layout is not torch.strided:
                    raise UnsupportedValueError(f"{name}: safetensors holds no {tensor.layout} tensor", name)
                if not is_known:
                    extra[name] = tensor.detach()
                if isinstance(leaf, np.ndarray):
                    content.arrays.append(name)
            except UnsupportedValueError as error:
                left_out.append(str(error))
    more = [Outline(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in extra.items()]
    return ExportedContent(in_file_order([*outlines_of(reader), *more]), extra, content, left_out)


def values_of(
    reader: CheckpointReader | ForeignReader,
) -> tuple[Mapping[str, object], Mapping[str, CheckpointError]]:
    """Return the values that are no tensors, by name; and why others cannot be read."""
    if isinstance(reader, ForeignReader):
        return reader.readable_values()
    return {fqn: value for fqn, (_, value) in reader.values().items()}, {}


def outlines_of(reader: CheckpointReader | ForeignReader) -> list[Outline]:
    """Return its tensors, in the order of a file."""
    return in_file_order(Outline(tensor.fqn, tensor.dtype, tensor.shape) for tensor in reader.tensors.values())


def read_in_order(
    reader: CheckpointReader | ForeignReader,
    outlines: Sequence[Outline],
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
    memory = torch.empty(0, dtype=torch.uint8)
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
                wants.append(Want(outline.name, whole(outline.shape), target))
        reader.read(wants)
        yield memory[:num_bytes].numpy().data


def _allocate(num_bytes: int, name: str) -> torch.Tensor:
    try:
        return torch.empty(num_bytes, dtype=torch.uint8)
    except RuntimeError as error:  # what torch has for a MemoryError
        raise UnsupportedValueError(f"there is no memory for the {num_bytes} bytes of {name[:120]}", name) from error


def reason_of(error: CheckpointError) -> CheckpointError:
    """Return what a reader found to be wrong, rather than what it could not make up because of that."""
    return error.__cause__ if isinstance(error.__cause__, CheckpointError) else error


def _batches(outlines: Iterable[Outline]) -> Iterator[list[Outline]]:
    batch: list[Outline] = []
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
