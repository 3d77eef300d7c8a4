"""Selects what of a checkpoint goes into one safetensors file, and reads its tensors one after the other. It writes no files.

State of one rank alone (random number generators, its position in the data) is left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch

from torchft_ckpt.checkpointing.durable.reading.checkpoint import differing_copies, drifted_replicas
from torchft_ckpt.checkpointing.durable.reading.reader import CheckpointReader
from torchft_ckpt.checkpointing.state.target import Want
from torchft_ckpt.cli.output import leaves
from torchft_ckpt.cli.safetensors_file import Content, PendingTensor, in_file_order
from torchft_ckpt.core.boxes.geometry import whole
from torchft_ckpt.errors import CheckpointError, UnsupportedValueError

_BATCH_BYTES = 64 * 1024 * 1024


def content_of(reader: CheckpointReader) -> tuple[Content, list[str]]:
    """Return what of a checkpoint goes into a file, and in sentences what does not, and why. Values are read for it, tensors are
    not.

    Raises:
        CheckpointError: a value is damaged or cannot be read.
    """
    left_out: list[str] = []
    if told := differing_copies(reader.checkpoint):
        left_out.append(f"all but the first copies: {told}")
    if told := drifted_replicas(reader.checkpoint):
        left_out.append(f"what one rank alone had: {told}")
    # Tensors and arrays that are inside of values are among the tensors, by the same name.
    content = Content(outlines_of(reader))
    for fqn, (_, value) in reader.values().items():
        for path, leaf in leaves(value, fqn):
            try:
                content.add(path, leaf)
            except UnsupportedValueError as error:
                left_out.append(str(error))
    return content, left_out


def outlines_of(reader: CheckpointReader) -> list[PendingTensor]:
    """Return its tensors, in the order of a file."""
    return in_file_order(PendingTensor(tensor.fqn, tensor.dtype, tensor.shape) for tensor in reader.tensors.values())


def read_in_order(
    reader: CheckpointReader,
    outlines: Sequence[PendingTensor],
    extra: Mapping[str, torch.Tensor] | None = None,
) -> Iterator[memoryview]:
    """Yield the elements of tensors, one after the other; what is yielded is there until the next is asked for.

    It takes memory for the largest tensor, or 64 MiB.

    Args:
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
