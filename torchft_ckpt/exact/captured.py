"""What microbatches leave behind, in flat memory: gradients, buffers, logged values. It is kept as nodes of the step's tree.

One flat tensor for each dtype holds, in this order:

- the gradients of the parameters, zeros where a microbatch has none, times its weight if it has one;
- the buffers as the microbatch has left them, where they are floating point or complex (those of less than 32 bits as float32);
- in the one of float64: how integer buffers have moved; which parameters have a gradient; the weight; the logged values.

After the sum a gradient is its sum over the total weight, in the memory format that autograd gives it. A buffer is its mean over
the microbatches, rounded if it is an integer. One that no microbatch has moved stays as it is, to the bit.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch.distributed.tensor import DTensor

from torchft_ckpt.core.training.microbatches import Node, family
from torchft_ckpt.errors import ConfigError
from torchft_ckpt.manager.volatile import MAX_COPIED_BYTES

MAX_LOGGED, MAX_NAME_BYTES = 32, 384
"""Values that a microbatch may log, and bytes of their names together."""
_ALIGNED = 16
"""Each parameter begins at a multiple of so many elements, as memory of its own would."""
_PER_SLOT = 6
"""Bytes of a name that a float64 holds exactly."""
_WIDE = torch.float64
_HEAD = 3 + MAX_NAME_BYTES // _PER_SLOT
"""Numbers that are said of a microbatch before those of each parameter: its weight, whether it has one, and names."""
_PIECE = 1 << 22
"""Elements that are divided at once in a wider dtype."""
_MAX_TOLD_CHARS = 300
_Region: TypeAlias = "tuple[torch.dtype, int, Sequence[int], Sequence[int]]"
"""Where a tensor lies in the flat one of its dtype: where it begins, its shape and its strides."""


class Place(NamedTuple):
    """Where a buffer is: a forward pass may bind another tensor there."""

    name: str
    module: torch.nn.Module
    key: str

    def tensor(self) -> torch.Tensor:
        """Return what is bound here, as far as it is in this process."""
        return local(self.module._buffers[self.key])  # type: ignore[arg-type]


class Layout:
    """Where everything lies in the flat tensors.

    Args:
        parameters: that need a gradient; `names`: of each of them.
        places: of the buffers that a forward pass may write to.
    """

    def __init__(self, parameters: Sequence[torch.Tensor], places: Sequence[Place], names: Sequence[str]) -> None:
        self.parameters = parameters
        self.places = sorted(places, key=lambda place: place.tensor().dtype == torch.bool)
        self.num_averaged = sum(place.tensor().dtype != torch.bool for place in places)
        """They come first in `places`; the others have no mean."""
        self.names = [*names, *(place.name for place in self.places[: self.num_averaged])]
        self.device = local(parameters[0]).device
        self._sizes: dict[torch.dtype, int] = {}
        self._parameters = [self._reserve(local(p).shape, local(p).dtype, _strides(local(p))) for p in parameters]
        self.num_gradients = dict(self._sizes)
        """By dtype, how many elements at the beginning of the flat tensor are gradients'."""
        self._buffers = [self._reserve(one.shape, _dtype_of(one)) for one in self.buffers()]
        self._said = self._reserve((_HEAD + len(parameters),), _WIDE)
        self._values = self._reserve((MAX_LOGGED,), _WIDE)
        self.sizes = list(self._sizes.items())
        names = " ".join(f"{place.name}{[*place.tensor().shape]}" for place in places)
        strides = [strides for *_, strides in self._parameters]
        digest = hashlib.blake2b(f"{names} {self.sizes} {strides}".encode(), digest_size=4).hexdigest()
        self.in_words = f"buffers {names[:_MAX_TOLD_CHARS] or 'none'}, memory {digest}"
        """Equal in all groups whose flat tensors mean the same."""

    def buffers(self) -> list[torch.Tensor]:
        """Return what is bound in the places of averaged buffers now, complex numbers as pairs of real ones."""
        return [_real(place.tensor()) for place in self.places[: self.num_averaged]]

    def _reserve(self, shape: Sequence[int], dtype: torch.dtype, strides: Sequence[int] = ()) -> _Region:
        at = self._sizes.get(dtype, 0)
        self._sizes[dtype] = -(-(at + math.prod(shape)) // _ALIGNED) * _ALIGNED
        return dtype, at, shape, strides or torch.empty(shape, device="meta").stride()

    def new(self) -> Captured:
        """Return memory for a node, or for the sum."""
        return Captured(self, [torch.empty(size, dtype=dtype, device=self.device) for dtype, size in self.sizes])


class Left:
    """What one microbatch leaves behind.

    Args:
        number: of the microbatch in its step.
        weight: of it; None: it has none.
        logged: scalars by name.

    Raises:
        ConfigError: a gradient is sparse; or there is none at all.
    """

    def __init__(self, layout: Layout, number: int, weight: float | None, logged: Mapping[str, Any]) -> None:
        self.layout, self.number, self.weight = layout, number, weight
        self.gradients = [None if p.grad is None else local(p.grad) for p in layout.parameters]
        found = [gradient for gradient in self.gradients if gradient is not None]
        if not found:
            raise ConfigError(
                f"microbatch {number} of the step has no gradient: call backward() in the inner loop", party="backward"
            )
        if any(gradient.layout is not torch.strided for gradient in found):
            raise ConfigError(
                "a gradient is sparse, and StepLoader adds dense ones: leave sparse=True out", party="sparse"
            )
        has = [float(gradient is not None) for gradient in self.gradients]
        weighs = [1.0, 0.0] if weight is None else [weight, 1.0]
        self.said = torch.tensor([*weighs, *_in_numbers(logged, number), *has], dtype=_WIDE, device="cpu")
        self.values = torch.zeros(MAX_LOGGED, dtype=_WIDE, device=layout.device)
        for place, name in enumerate(sorted(logged)):
            self.values[place] = logged[name]
        if weight is not None:
            self.values.mul_(weight)


class Captured:
    """The flat tensors of one node, and what lies in them."""

    def __init__(self, layout: Layout, flats: list[torch.Tensor]) -> None:
        self.layout, self.flats = layout, flats
        by_dtype = {one.dtype: one for one in flats}

        def view(region: _Region) -> torch.Tensor:
            dtype, at, shape, strides = region
            return by_dtype[dtype].as_strided(shape, strides, at)

        self.gradients = [view(place) for place in layout._parameters]
        self.buffers = [view(place) for place in layout._buffers]
        self.said, self.values = view(layout._said), view(layout._values)
        """What is said of the microbatch: its weight, names that it logs, which parameters have a gradient."""

    @torch.no_grad()
    def take(self, left: Left, first: Sequence[torch.Tensor], *, is_new: bool) -> None:
        """Take what a microbatch has left behind, or add it to what is here.

        Args:
            first: the buffers as the step began.
        """
        gradients = [gradient for gradient in left.gradients if gradient is not None]
        views, absent = list[torch.Tensor](), list[torch.Tensor]()
        for view, gradient in zip(self.gradients, left.gradients, strict=True):
            (absent if gradient is None else views).append(view)
        if left.weight is not None:
            for gradient in gradients:
                gradient.copy_(gradient.to(_wide(gradient.dtype)).mul_(left.weight))
        moved = [
            (view, now if now.is_floating_point() else now.long() - before.long())
            for view, now, before in zip(self.buffers, self.layout.buffers(), map(_real, first), strict=True)
        ]
        if is_new:
            torch._foreach_copy_(views, gradients)
            if absent:
                torch._foreach_zero_(absent)
            for view, buffer in moved:
                view.copy_(buffer)
            self.said.copy_(left.said)
            self.values.copy_(left.values)
        else:
            torch._foreach_add_(views, gradients)
            if absent:
                torch._foreach_add_(absent, 0.0)  # it makes 0.0 of -0.0, as adding zeros does
            for view, buffer in moved:
                view.add_(buffer.to(view.dtype))
            self.said.add_(left.said.to(self.said.device))
            self.values.add_(left.values)

    def add_(self, other: Captured) -> Captured:
        for mine, theirs in zip(self.flats, other.flats, strict=True):
            mine.add_(theirs)
        return self


class Nodes:
    """The nodes of one step's tree that this rank has computed."""

    def __init__(self) -> None:
        self.by_node: dict[Node, Captured] = {}
        self._layout: Layout | None = None
        self._spare: list[Captured] = []

    def of(self, layout: Layout) -> None:
        """What is computed from now on has this layout. What is here of another one is let go."""
        if self._layout is not layout:
            self.by_node, self._spare, self._layout = {}, [], layout

    def take(self, left: Left, first: Sequence[torch.Tensor], num_microbatches: int) -> None:
        """Take what a microbatch has left behind: it is added to its sibling if that is here, and so on towards the root."""
        node = (left.number, left.number + 1)
        kin = family(node, num_microbatches)
        if kin is not None and kin[1] in self.by_node:
            captured, node = self.by_node.pop(kin[1]), kin[0]
            captured.take(left, first, is_new=False)
        else:
            captured = self._spare.pop() if self._spare else left.layout.new()
            captured.take(left, first, is_new=True)
        while (kin := family(node, num_microbatches)) is not None and kin[1] in self.by_node:
            self._spare.append(captured)
            node, captured = kin[0], self.by_node.pop(kin[1]).add_(captured)
        self.by_node[node] = captured

    def keep(self, nodes: Sequence[Node]) -> None:
        """Let go of all others."""
        for node in [node for node in self.by_node if node not in nodes]:
            self._spare.append(self.by_node.pop(node))


class Summed:
    """What the sum of a step says, once it is there.

    Raises:
        ConfigError: some of the microbatches were weighed; all together weigh nothing; they have logged other names.
    """

    def __init__(self, total: Captured, num_microbatches: int) -> None:
        self._total, self._num_microbatches = total, num_microbatches
        weight, num_weighed, *said = total.said.tolist()
        if num_weighed not in (0, num_microbatches):
            raise ConfigError(
                f"{num_weighed:.0f} of {num_microbatches} microbatches of the step were weighed: call step.weigh in each, or in"
                " none",
                party="weigh",
            )
        if not weight > 0:
            raise ConfigError(f"the microbatches of the step weigh {weight:g} together", party="weigh")
        self._weight = weight
        names = _in_words(said[: _HEAD - 2], num_microbatches)
        self._counts = said[_HEAD - 2 :]
        self.means = {name: value / weight for name, value in zip(names, total.values.tolist(), strict=False)}

    @torch.no_grad()
    def give(self, first: Buffers) -> None:
        """Set gradients and buffers. `first`: the buffers as the step began."""
        layout = self._total.layout
        for flat in self._total.flats:
            weight = torch.tensor(self._weight, dtype=_wide(flat.dtype), device=flat.device)
            for piece in flat[: layout.num_gradients.get(flat.dtype, 0)].split(_PIECE):
                piece.copy_(piece.to(weight.dtype).div_(weight))
        for parameter, view, count in zip(layout.parameters, self._total.gradients, self._counts, strict=True):
            parameter.grad = _like(parameter, view) if count else None
        first.put_back()
        buffers = zip(layout.buffers(), self._total.buffers, map(_real, first.values), strict=True)
        for buffer, view, before in buffers:
            mean = view / torch.tensor(float(self._num_microbatches), dtype=view.dtype, device=view.device)
            if buffer.is_floating_point():
                unmoved = _times(before.to(view.dtype), self._num_microbatches)
                is_same = (view == unmoved) | (view.isnan() & unmoved.isnan())
                _write(buffer, torch.where(is_same, before, mean.to(before.dtype)))
            else:
                _write(buffer, (before.long() + mean.round().long()).to(before.dtype))


class Buffers:
    """The buffers as a step began."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._bound = [place.module._buffers[place.key] for place in layout.places]
        self._here = [place.tensor() for place in layout.places]
        self._all_values = [one.detach().clone() for one in self._here]
        self.values = self._all_values[: layout.num_averaged]
        """Of those that are averaged."""
        self._moved: list[torch.Tensor] = []
        """For each microbatch, which of the others it has moved."""

    def put_back(self) -> None:
        """Make them so again."""
        for place, bound, here, value in zip(
            self._layout.places, self._bound, self._here, self._all_values, strict=True
        ):
            place.module._buffers[place.key] = bound
            _write(here, value)

    def note_moved(self) -> None:
        """A microbatch was computed: note which buffers it has moved that have no mean. It does not wait for the device."""
        rest = self._layout.places[self._layout.num_averaged :]
        if rest:
            pairs = zip(rest, self._all_values[self._layout.num_averaged :], strict=True)
            self._moved.append(torch.stack([(place.tensor() != value).any() for place, value in pairs]))

    def check_moved(self) -> None:
        """Raise `ConfigError` if a buffer that has no mean was moved."""
        flags = torch.stack(self._moved).any(0).tolist() if self._moved else []
        for place, is_moved in zip(self._layout.places[self._layout.num_averaged :], flags, strict=False):
            if is_moved:
                raise ConfigError(
                    f"the inner loop of StepLoader moves the buffer {place.name}, and there is no mean of"
                    f" {str(place.tensor().dtype).removeprefix('torch.')}: set it before the loop",
                    party=place.name,
                )


def _write(buffer: torch.Tensor, value: torch.Tensor) -> None:
    """Write a value, unless a large buffer has it: of that a state is served without a copy as long as nobody writes to it."""
    if buffer.nbytes <= MAX_COPIED_BYTES or not torch.equal(buffer, value):
        buffer.copy_(value)


def give_zeros(layout: Layout) -> None:
    """Set gradients of zeros, in a step that does not count: what a loop does with them then does no harm."""
    for parameter in layout.parameters:
        parameter.grad = torch.zeros_like(parameter)


def places_of_buffers(modules: Iterable[tuple[str, torch.nn.Module]]) -> list[Place]:
    """Return where the buffers of named modules and of those in them are."""
    found: dict[int, Place] = {}
    seen: set[int] = set()
    for name, root in modules:
        inner = [(path, module) for path, module in root.named_modules() if id(module) not in seen]
        seen.update(id(module) for _, module in inner)
        for path, module in inner:
            for key, buffer in module._buffers.items():
                if buffer is not None and buffer.layout is torch.strided:
                    found.setdefault(id(buffer), Place(".".join(filter(None, (name, path, key))), module, key))
    return [*found.values()]


def _dtype_of(real: torch.Tensor) -> torch.dtype:
    """Return the dtype in which a buffer is summed."""
    return _wide(real.dtype) if real.is_floating_point() else _WIDE


def _wide(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which is calculated with values of a floating point one: each result is rounded once."""
    return dtype if dtype.itemsize >= 4 else torch.float32


def _real(tensor: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def _strides(tensor: torch.Tensor) -> Sequence[int]:
    """Return the strides that autograd gives a gradient: the parameter's own where they leave no gaps."""
    dense = torch.empty_like(tensor, device="meta").stride()
    return dense if dense == tensor.stride() else torch.empty(tensor.shape, device="meta").stride()


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return the part of a tensor that is in this process."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def _like(parameter: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    if not isinstance(parameter, DTensor):
        return local
    return DTensor.from_local(
        local, parameter.device_mesh, parameter.placements, shape=parameter.shape, stride=parameter.stride()
    )


def _times(tensor: torch.Tensor, num: int) -> torch.Tensor:
    """Return the sum of so many equal leaves of the tree."""
    sizes: dict[int, torch.Tensor] = {1: tensor}

    def value(size: int) -> torch.Tensor:
        if size not in sizes:
            left = 1 << ((size - 1).bit_length() - 1)
            sizes[size] = value(left) + value(size - left)
        return sizes[size]

    return value(num)


def _in_numbers(logged: Mapping[str, Any], number: int) -> list[float]:
    """Return the names that a microbatch has logged: a digest; and the first one gives them all, six bytes a number."""
    text = "\n".join(sorted(logged)).encode()
    digest = int.from_bytes(hashlib.blake2b(text, digest_size=4).digest(), "little")
    slots = [0.0] * (MAX_NAME_BYTES // _PER_SLOT)
    if number == 0:
        for place in range(0, len(text), _PER_SLOT):
            slots[place // _PER_SLOT] = float(int.from_bytes(text[place : place + _PER_SLOT], "little"))
    return [float(digest), *slots]


def _in_words(slots: Sequence[float], num_microbatches: int) -> list[str]:
    text = b"".join(int(one).to_bytes(_PER_SLOT, "little") for one in slots[1:]).rstrip(b"\0").decode()
    names = text.split("\n") if text else []
    if slots[0] != _in_numbers(dict.fromkeys(names), 1)[0] * num_microbatches:
        raise ConfigError(
            f"not all microbatches of the step have logged the same names: the first one has {names}", party="log"
        )
    return names
