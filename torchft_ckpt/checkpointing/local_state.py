"""The state that is here, seen as memory for one that arrives: where its tensors lie, and whether they fit.

Tensors are matched by their path in the tree. It does not know blocks or the network.
"""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

import torch

from torchft_ckpt.checkpointing.boxes import is_dtensor, local_box
from torchft_ckpt.checkpointing.collector import collector_paused
from torchft_ckpt.checkpointing.dtypes import dtype_name
from torchft_ckpt.checkpointing.format import Manifest, TensorEntry
from torchft_ckpt.checkpointing.space import memory_at, span_of
from torchft_ckpt.checkpointing.tree import TreeEncoder
from torchft_ckpt.errors import StateMismatchError

_NAMED = 5


class LocalMemory(NamedTuple):
    """The memory of one contiguous local tensor on the CPU. `tensor` keeps it; `view` are its bytes."""

    tensor: torch.Tensor
    view: memoryview
    address: int


class LocalState:
    """A state of this process. Nothing is copied; who uses it keeps it unchanged, or writes to it on purpose.

    Args:
        state: as it would be given to `send_checkpoint`.

    Raises:
        UnsupportedValueError: it holds something that the format does not carry.
    """

    def __init__(self, state: object) -> None:
        encoder = TreeEncoder()
        with collector_paused():
            encoder.encode(state)
            counts = Counter(path for path, _ in encoder.tensors)
            encoder.tensors = [item for item in encoder.tensors if counts[item[0]] == 1]  # {1: a, "1": b} have one path
            self._given = dict(encoder.tensors)
            self._local: dict[str, torch.Tensor] = {}
            self._boxes: dict[str, tuple[list[int], list[int]]] = {}
            for path, tensor in encoder.tensors:
                if is_dtensor(tensor):
                    tensor, global_shape, offsets = local_box(tensor, path)
                    self._boxes[path] = ([*global_shape], [*offsets])
                self._local[path] = tensor
            self._memories = {path: _memory_of(tensor) for path, tensor in self._local.items()}

    def memories_for(self, manifest: Manifest, *, is_strict: bool) -> dict[int, LocalMemory]:
        """Return, by segment, the memory of a local tensor that has exactly the segment's bytes.

        Segments without one are left out: no tensor of that name is here, or it does not fit, is strided or on an accelerator.

        Args:
            manifest: of the state that arrives.
            is_strict: refuse a state that does not fit, because it is to be received into this memory.

        Raises:
            StateMismatchError: tensors of the same name have other shapes or dtypes, or tensors that are separate at the
                source share memory here. The message names the first few.
        """
        found: dict[int, LocalMemory] = {}
        wrong: list[TensorEntry] = []
        lengths = [length for _, length in manifest.segments]
        for entry in manifest.tensors:
            tensor = self._local.get(entry.fqn)
            if tensor is None:
                continue
            chunk = entry.chunks[0]
            is_other_box = entry.fqn in self._boxes and self._boxes[entry.fqn] != (entry.shape, chunk.offsets)
            if [*tensor.shape] != chunk.sizes or dtype_name(tensor.dtype) != entry.dtype or is_other_box:
                wrong.append(entry)
                continue
            memory = self._memories[entry.fqn] if chunk.strides is None and chunk.segment not in found else None
            if memory is not None and len(memory.view) == lengths[chunk.segment]:
                found[chunk.segment] = memory
        if is_strict:
            self._check_fits(wrong)
            self._check_apart(manifest)
        return found

    def adopt(
        self, manifest: Manifest, received: list[torch.Tensor], direct: dict[int, LocalMemory]
    ) -> list[torch.Tensor]:
        """Return the tensors of a state that was received in place: local ones, filled, wherever there is one of that name."""
        adopted = []
        written = []
        with torch.no_grad():
            for entry, tensor in zip(manifest.tensors, received, strict=True):
                local = self._local.get(entry.fqn)
                if local is None:
                    adopted.append(tensor)
                    continue
                memory = direct.get(entry.chunks[0].segment)
                if memory is None or (local is not memory.tensor and local.data_ptr() != memory.address):
                    local.copy_(tensor)
                else:
                    written.append(local)
                adopted.append(self._given[entry.fqn])
            torch.autograd.graph.increment_version(written)  # they were written to behind autograd's back
        return adopted

    def _check_fits(self, wrong: list[TensorEntry]) -> None:
        if not wrong:
            return
        named = [
            f"{entry.fqn[:120]} is {self._describe(entry.fqn)} here, "
            f"{_text(entry.dtype, entry.chunks[0].sizes, entry.shape, entry.chunks[0].offsets)} there"
            for entry in wrong[:_NAMED]
        ]
        more = f" and {len(wrong) - _NAMED} more" if len(wrong) > _NAMED else ""
        raise StateMismatchError(
            f"the source's state does not fit this replica: {'; '.join(named)}{more}; nothing was received",
            party="local_state",
        )

    def _describe(self, path: str) -> str:
        local = self._local[path]
        sizes = [*local.shape]
        return _text(dtype_name(local.dtype), sizes, *self._boxes.get(path, (sizes, [])))

    def _check_apart(self, manifest: Manifest) -> None:
        """Refuse tensors that share memory here and are separate there, or share it otherwise: one would overwrite the other.

        Strided tensors are taken for all that lies between their first and their last byte.
        """
        spans = []
        for entry in manifest.tensors:
            local = self._local.get(entry.fqn)
            if local is not None and local.is_cpu and local.nbytes:
                chunk, low = entry.chunks[0], local.data_ptr()
                memory = self._memories[entry.fqn]
                high = low + (local.nbytes if memory is not None else span_of(local))
                is_alike = chunk.strides == [*local.stride()] if chunk.strides is not None else memory is not None
                spans.append((low, high, (chunk.segment, low - chunk.byte_offset, is_alike), entry.fqn))
        spans.sort()
        reach, place, name = 0, (-1, 0, False), ""
        for low, high, other_place, other_name in spans:
            if low < reach and (other_place != place or not place[-1]):
                names = ", ".join(sorted((name[:120], other_name[:120])))
                raise StateMismatchError(
                    f"tensors share memory here that do not at the source, or not so: {names}; nothing was received",
                    party="local_state",
                )
            if high > reach:
                reach, place, name = high, other_place, other_name


def _text(dtype: str, sizes: list[int], shape: list[int], offsets: list[int]) -> str:
    return f"{dtype}{sizes}" if sizes == shape else f"{dtype}{sizes} at {offsets} of {shape}"


def _memory_of(tensor: torch.Tensor) -> LocalMemory | None:
    """Return the memory of a tensor whose values are its bytes in C order, on the CPU; None of any other."""
    if not tensor.is_cpu or not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
        return None
    address, length = tensor.data_ptr(), tensor.nbytes
    if not length:
        return None
    return LocalMemory(tensor, memory_at(address, length), address)
