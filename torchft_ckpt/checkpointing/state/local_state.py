"""The state that is here, seen as memory for one that arrives: which boxes of which tensors, and where they lie.

Tensors are matched by their path in the tree. A sharded tensor is its boxes, each with memory of its own; what arrives for it
becomes a tensor of the same class and layout. Whether a state fits this one is in `fit`, what becomes of it in `target`.
"""

from __future__ import annotations

import functools
import logging
from collections import Counter
from collections.abc import Iterable, KeysView, Mapping, Sequence
from typing import NamedTuple

import torch

from torchft_ckpt.checkpointing.state import device_memory
from torchft_ckpt.checkpointing.state.classes import KnownClasses
from torchft_ckpt.checkpointing.state.containers import optimizer_states
from torchft_ckpt.checkpointing.state.description import DescribedTensor
from torchft_ckpt.checkpointing.state.device_memory import DeviceMemory
from torchft_ckpt.checkpointing.state.dtypes import DTYPES, dtype_name, parse_dtype
from torchft_ckpt.checkpointing.state.format import WireTensor
from torchft_ckpt.checkpointing.state.parameters import Owned, StateHere, StatePlaces, returned_by, tensor_to_fill
from torchft_ckpt.checkpointing.state.shards import KnownMeshes, ShardAdapter, adapter_of
from torchft_ckpt.checkpointing.state.space import (
    are_one_place,
    as_bytes,
    is_plain_memory,
    is_plain_on_device,
    lies_apart,
    memory_at,
    span_of,
)
from torchft_ckpt.checkpointing.state.tree import Node, TreeEncoder, values_of
from torchft_ckpt.core.boxes.geometry import Box, HasPlace, whole
from torchft_ckpt.errors import StateMismatchError, UnsupportedValueError
from torchft_ckpt.memory import gc_paused

logger = logging.getLogger(__name__)

_NAMED = 5


class LocalMemory(NamedTuple):
    """The memory of one contiguous local tensor on the CPU. `tensor` keeps it; `view` are its bytes."""

    tensor: torch.Tensor
    view: memoryview

    @property
    def num_bytes(self) -> int:
        """How long it is."""
        return len(self.view)


class HeldTensor(NamedTuple):
    """A tensor of the state that is here, and the boxes of it that this process holds."""

    given: torch.Tensor
    adapter: ShardAdapter | None
    boxes: list[Box]
    data: list[torch.Tensor]
    """The memory of each box; empty if an adapter's data are copies."""


SharedBox = tuple[str, int, torch.Tensor]
"""A box of a tensor that is here, by name and number, and its memory."""


class LocalState:
    """A state of this process. Nothing is copied; who uses it keeps it unchanged, or writes to it on purpose.

    Raises:
        UnsupportedValueError: it holds something that the format does not carry.
    """

    def __init__(self, state: object) -> None:
        encoder = TreeEncoder()
        with gc_paused():
            self.owned: dict[str, Owned] = {}
            """The state dicts of optimizers that are known, by path."""
            if isinstance(state, StateHere):
                self.owned = StatePlaces(state).owned(returned_by(state.optimizers))
                state = {**state}
            encoder.encode(state)
            counts = Counter(path for path, _ in encoder.tensors)
            self._copied_arrays = {encoder.tensors[place][0] for place in encoder.copied_arrays}
            self.doubled = [path for path, count in counts.items() if count > 1]
            """Paths of several tensors, of which none is known here: {1: a, "1": b} have one."""
            self._held = {path: _hold(path, tensor) for path, tensor in encoder.tensors if counts[path] == 1}
            self.shared = _sharing(self._held)
            """Boxes that share memory here, those together that do, or whose elements do: mostly none. By name and number."""
            self._now = functools.cache(device_memory.accelerator.now)
            self._memories = {path: [self._memory_of(data) for data in held.data] for path, held in self._held.items()}
            self._optional = _optional_paths(state)
            self._is_sharded = any(held.adapter is not None for held in self._held.values())
            self._meshes = KnownMeshes(tensor for _, tensor in encoder.tensors)
            self.classes = KnownClasses(encoder.classes)
            """The classes for named tuples and enum members of a state that arrives."""

    def _memory_of(self, tensor: torch.Tensor) -> LocalMemory | DeviceMemory | None:
        """Return the memory of a tensor whose values are its bytes in C order; None of any other.

        A tensor whose storage was freed has none, nor has one that only says what is wanted (a fake tensor).
        """
        is_on_device = is_plain_on_device(tensor)
        if not (is_on_device or is_plain_memory(tensor)) or not tensor.is_contiguous():
            return None
        length = tensor.nbytes
        end = int(tensor.storage_offset()) * tensor.element_size() + length
        if length == 0 or tensor.untyped_storage().nbytes() < end or tensor.data_ptr() == 0:
            return None
        if is_on_device:
            return DeviceMemory(tensor, as_bytes(tensor.detach()), self._now(tensor.device))
        return LocalMemory(tensor, memory_at(tensor.data_ptr(), length))

    def paths(self) -> KeysView[str]:
        """Return the paths of the tensors that are here."""
        return self._held.keys()

    def apart(self) -> set[str]:
        """Return the names of what shares memory here and is to be received beside it, to be compared: all but the first of what
        lies in one place.
        """
        found: set[str] = set()
        for boxes in self.shared:
            found.update(name for name, *_ in boxes[are_one_place([data for *_, data in boxes]) :])
        return found

    def is_optional(self, path: str) -> bool:
        """Whether it is in the state of an optimizer, which comes into being with the first step."""
        return path.startswith(self._optional) if self._optional else False

    def expect(self, tensors: Iterable[DescribedTensor]) -> list[str]:
        """Have a tensor here for what arrives of optimizers' state, if it is to be sharded as its parameter is.

        Returns:
            in sentences, what cannot be placed.
        """
        wrong: list[str] = []
        if not self._optional:
            return wrong
        for entry in tensors:
            prefix = next((prefix for prefix in self._optional if entry.fqn.startswith(prefix)), None)
            if prefix is None or not (self._is_sharded or self.owned):
                continue
            held = self._held.get(entry.fqn)
            if held is not None and has_shape_of(held, entry):
                continue
            try:
                tensor = tensor_to_fill(
                    entry.fqn,
                    entry.shape,
                    parse_dtype(entry.dtype),
                    held=None if held is None else held.given,
                    owned=self.owned.get(prefix.removesuffix("state.").removesuffix(".")),
                    rest=entry.fqn.removeprefix(prefix),
                    is_sharded=self._is_sharded,
                )
            except StateMismatchError as error:
                wrong.append(str(error))
                continue
            if tensor is not None:
                held = self._held[entry.fqn] = _hold(entry.fqn, tensor)
                self._memories[entry.fqn] = [self._memory_of(data) for data in held.data]
        return wrong

    def get(self, path: str) -> HeldTensor | None:
        """Return what is here under a path."""
        return self._held.get(path)

    def why_unfillable(self, path: str) -> str | None:
        """Return why a tensor or an array that is here cannot be received into, to be said after its name; None if it can."""
        held = self._held.get(path)
        if held is None:
            return None
        if path in self._copied_arrays:
            return "is a numpy array here that is not contiguous, or read-only"
        return self.why_no_like(path) or next((why for part in held.data if (why := why_unfillable(part))), None)

    def why_no_like(self, path: str) -> str | None:
        """Return why nothing can be made that has the layout of a sharded tensor that is here; None if it can."""
        held = self._held.get(path)
        is_lost = held is not None and held.adapter is not None and _has_no_memory(held.given)
        return _ON_META if is_lost else None

    def memories(self, path: str) -> list[LocalMemory | DeviceMemory | None]:
        """Return the memory of each box of a tensor; None of one that is strided or empty."""
        return self._memories.get(path, [])

    def why_not_made(self, entry: WireTensor) -> str | None:
        """Return why a tensor of which none is here cannot be made, to be said of it; None if it can, or arrives whole."""
        why: str | None = "of no mesh that is known in this process"
        if entry.layout is not None:
            why = self._meshes.why_not(entry.layout, entry.shape, [box_of(chunk) for chunk in entry.chunks])
        return None if why is None or is_whole(entry) else why

    def made(self, entry: WireTensor, shards: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return a tensor of which none is here: sharded where it is so there and this process has such a mesh, else whole."""
        boxes = [box_of(chunk) for chunk in entry.chunks]
        if entry.layout is None or len(shards) != 1:
            return whole_tensor(entry, shards)
        if why := self._meshes.why_not(entry.layout, entry.shape, boxes):
            logger.warning(
                "%s is a DTensor there, %s; it arrives as a plain tensor, which is all of it", entry.fqn[:120], why
            )
            return whole_tensor(entry, shards)
        return self._meshes.make(entry.layout, entry.shape, shards[0])


def why_unfillable(tensor: torch.Tensor) -> str | None:
    """Return why nothing can be received into a plain tensor, to be said after its name; None if it can."""
    if tensor.layout is not torch.strided:
        return f"is of layout {tensor.layout} here"
    if _has_no_memory(tensor):
        return _ON_META
    if tensor.numel() and any(
        stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True)
    ):
        return "has several elements in one place here, it is expanded"
    return None


_ON_META = "has no memory here, it is on the meta device"


def _has_no_memory(tensor: torch.Tensor) -> bool:
    return tensor.is_meta and tensor.numel() > 0


def copy_to(tensor: torch.Tensor, value: torch.Tensor) -> None:
    """Copy a value to a tensor; also to an inference tensor, which takes it in inference mode alone."""
    with torch.inference_mode() if tensor.is_inference() else torch.no_grad():
        tensor.copy_(value)


def note_written(tensors: Iterable[torch.Tensor]) -> None:
    """Tell autograd of tensors that were written to behind its back."""
    torch.autograd.graph.increment_version([tensor for tensor in tensors if not tensor.is_inference()])


def tensors_but_optimizer_state(state: object) -> list[tuple[str, torch.Tensor]]:
    """Return the tensors of a state with their paths, but those in the state of an optimizer; none if it cannot be carried."""
    encoder = TreeEncoder()
    try:
        encoder.encode(state)
    except UnsupportedValueError:
        return []  # another transport may carry it
    optional = _optional_paths(state)
    return [(path, tensor) for path, tensor in encoder.tensors if not optional or not path.startswith(optional)]


def is_whole(entry: WireTensor) -> bool:
    """Whether a source holds all of a tensor."""
    return sum(box_of(chunk).volume for chunk in entry.chunks) == whole(entry.shape).volume


def whole_tensor(entry: WireTensor, shards: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return what a tensor arrives as where nothing is known of it here: its only box, or all of its boxes put together.

    Raises:
        StateMismatchError: the source holds several boxes, which are not the whole tensor.
    """
    if len(shards) == 1:
        return shards[0]
    if not shards:
        return torch.empty(0, dtype=parse_dtype(entry.dtype), device="cpu")
    boxes = [box_of(chunk) for chunk in entry.chunks]
    everything = whole(entry.shape)
    if sum(box.volume for box in boxes) != everything.volume:
        raise StateMismatchError(
            f"the source holds {', '.join(map(str, boxes[:_NAMED])) or 'nothing'} of {entry.fqn[:120]}, of shape {entry.shape}, "
            "and no tensor of that name is here to say which part is wanted",
            party="local_state",
        )
    assembled = torch.empty(entry.shape, dtype=parse_dtype(entry.dtype), device="cpu")
    for box, shard in zip(boxes, shards, strict=True):
        view_of(assembled, box).copy_(shard)
    return assembled


def view_of(tensor: torch.Tensor, box: Box) -> torch.Tensor:
    """Return a box of a tensor, as a view."""
    return tensor[tuple(slice(low, low + size) for low, size in zip(box.offsets, box.sizes, strict=True))]


def box_of(place: HasPlace) -> Box:
    """Return the box of a chunk, whoever describes it."""
    return Box(tuple(place.offsets), tuple(place.sizes))


def some_of(what: Iterable[str], separator: str = "; ") -> str:
    """Return the first few of a list, and how many more there are, for a message."""
    listed = list(what)
    more = f" and {len(listed) - _NAMED} more" if len(listed) > _NAMED else ""
    return separator.join(listed[:_NAMED]) + more


def warn_of_values(party: str, trees: Sequence[Node]) -> None:
    """Name to a group of another number of ranks what values, no tensors, a party's ranks have otherwise in their trees."""
    known: dict[str, object] = {}
    found: dict[str, None] = {}
    for number, tree in enumerate(trees):
        for path, value in values_of(tree) if tree not in trees[:number] else ():
            if known.setdefault(path, value) != value:
                found[path] = None
    if found:
        what = "ranks of %s hold other values as %s; a group of another number of ranks gets one of them"
        logger.warning(what, party, some_of((path[:120] for path in found), ", "))


def describe(held: HeldTensor) -> str:
    """Say what is here of a tensor, for people."""
    return _text(dtype_name(held.given.dtype), [*held.given.shape], held.boxes)


def describe_entry(entry: WireTensor) -> str:
    """Say what a source holds of a tensor, for people."""
    return _text(entry.dtype, entry.shape, [box_of(chunk) for chunk in entry.chunks])


def _text(dtype: str, shape: list[int], boxes: list[Box]) -> str:
    if boxes == [whole(shape)]:
        return f"{dtype}{shape}"
    held = ", ".join(map(str, boxes[:_NAMED])) or "nothing"
    return f"{held} of {dtype}{shape}"


def _optional_paths(state: object) -> tuple[str, ...]:
    return tuple(".".join(map(str, (*path, "state", ""))) for path, _ in optimizer_states(state))


def _hold(path: str, tensor: torch.Tensor) -> HeldTensor:
    adapter = adapter_of(tensor)
    if adapter is None:
        if tensor.layout is not torch.strided or tensor.is_nested:
            raise UnsupportedValueError(
                f"state dict at {path!r}: a tensor of layout {tensor.layout} cannot be carried", path
            )
        return HeldTensor(tensor, None, [whole(tuple(tensor.shape))], [tensor])
    if not adapter.shares_memory:
        return HeldTensor(tensor, adapter, adapter.boxes(tensor, path), [])
    return HeldTensor(tensor, adapter, *adapter.boxes_and_data(tensor, path))


def _sharing(tensors: Mapping[str, HeldTensor]) -> list[list[SharedBox]]:
    spans: list[tuple[int, int, SharedBox]] = []
    crowded: set[str] = set()
    for name, held in tensors.items():
        for number, data in enumerate(held.data):
            if (num_bytes := data.nbytes) and not data.is_meta and data.data_ptr():
                if not lies_apart(data):
                    crowded.add(name)
                span = num_bytes if data.is_contiguous() else span_of(data)
                low = device_memory.accelerator.place_of(data)
                spans.append((low, low + span, (name, number, data)))
    spans.sort()
    found: list[list[SharedBox]] = []
    reach = 0
    for low, high, box in spans:
        if low < reach:
            found[-1].append(box)
        else:
            found.append([box])
        reach = high if high > reach else reach
    return [boxes for boxes in found if len(boxes) > 1 or boxes[0][0] in crowded]


def has_shape_of(held: HeldTensor, entry: DescribedTensor) -> bool:
    """Whether a tensor that is here has the global shape and the dtype of one that arrives."""
    return held.given.shape == tuple(entry.shape) and held.given.dtype is DTYPES.get(entry.dtype)
