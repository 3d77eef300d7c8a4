"""The state that is here, seen as memory for one that arrives: where its tensors lie, and whether they fit.

Tensors are matched by their path in the tree. It does not know blocks or the network.
"""

from __future__ import annotations

import ctypes
from itertools import pairwise
from typing import NamedTuple

import torch

from torchft_ckpt.checkpointing.boxes import is_dtensor, local_box
from torchft_ckpt.checkpointing.collector import collector_paused
from torchft_ckpt.checkpointing.dtypes import dtype_name
from torchft_ckpt.checkpointing.format import Manifest
from torchft_ckpt.checkpointing.tree import TreeEncoder
from torchft_ckpt.errors import StateMismatchError

_NAMED = 5


class LocalMemory(NamedTuple):
    """The memory of one contiguous local tensor on the CPU. `tensor` keeps it; `view` are its bytes."""

    tensor: torch.Tensor
    view: memoryview


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
        self._given = dict(encoder.tensors)
        self._local = {
            path: local_box(tensor, path)[0] if is_dtensor(tensor) else tensor for path, tensor in encoder.tensors
        }

    def memories_for(self, manifest: Manifest) -> dict[int, LocalMemory]:
        """Return, by segment, the memory of a local tensor that has exactly the segment's bytes.

        Segments without one are left out: no tensor of that name is here, or it is strided or on an accelerator.

        Raises:
            StateMismatchError: tensors of the same name have other shapes or dtypes, or tensors that are separate at the
                source share memory here. The message names the first few.
        """
        self._check(manifest)
        found: dict[int, LocalMemory] = {}
        spans: list[tuple[int, int, int]] = []
        lengths = [length for _, length in manifest.segments]
        for entry in manifest.tensors:
            chunk = entry.chunks[0]
            segment = chunk.segment
            length = lengths[segment]
            tensor = self._local.get(entry.fqn)
            if tensor is None or chunk.strides is not None or not length or segment in found:
                continue
            if tensor.is_cpu and tensor.nbytes == length and tensor.is_contiguous() and not _is_lazy(tensor):
                address = tensor.data_ptr()
                view = memoryview((ctypes.c_char * length).from_address(address)).cast("B")
                found[segment] = LocalMemory(tensor, view)
                spans.append((address, address + length, segment))
        self._check_apart(manifest, spans)
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
                if memory is None or (local is not memory.tensor and local.data_ptr() != memory.tensor.data_ptr()):
                    local.copy_(tensor)
                else:
                    written.append(local)
                adopted.append(self._given[entry.fqn])
            torch.autograd.graph.increment_version(written)  # they were written to behind autograd's back
        return adopted

    def _check(self, manifest: Manifest) -> None:
        wrong = []
        for entry in manifest.tensors:
            local = self._local.get(entry.fqn)
            if local is None:
                continue
            sizes = entry.chunks[0].sizes
            if [*local.shape] != sizes or dtype_name(local.dtype) != entry.dtype:
                wrong.append(
                    f"{entry.fqn[:120]} is {dtype_name(local.dtype)}{list(local.shape)} here, {entry.dtype}{sizes} there"
                )
        if wrong:
            more = f" and {len(wrong) - _NAMED} more" if len(wrong) > _NAMED else ""
            raise StateMismatchError(
                f"the source's state does not fit this replica: {'; '.join(wrong[:_NAMED])}{more}; nothing was received",
                party="local_state",
            )

    def _check_apart(self, manifest: Manifest, spans: list[tuple[int, int, int]]) -> None:
        spans.sort()
        for (_, end, index), (start, _, other) in pairwise(spans):
            if start < end:
                names = [e.fqn[:120] for e in manifest.tensors if e.chunks[0].segment in (index, other)][:_NAMED]
                raise StateMismatchError(
                    f"tensors share memory here that are separate at the source: {', '.join(names)}; nothing was received",
                    party="local_state",
                )


def _is_lazy(tensor: torch.Tensor) -> bool:
    """Whether the bytes are not the values (a lazily conjugated or negated view)."""
    return tensor.is_conj() or tensor.is_neg()
