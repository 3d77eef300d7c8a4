"""What an inner loop leaves as it is, or is refused by name: it would depend on which microbatches this group computes."""

from __future__ import annotations

import sys
from collections.abc import Container, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_pre_hook

from torchft_ckpt.checkpointing.state.containers import walk
from torchft_ckpt.errors import ConfigError
from torchft_ckpt.exact.captured import local

_NORMED = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def kinds_of(modules: Iterable[torch.nn.Module]) -> dict[tuple[int, str], tuple[object, ...]]:
    """Return which buffers modules have."""
    return {
        (id(module), key): (type(module).__name__, one.shape, one.dtype)
        for module in modules
        for key, one in module._buffers.items()
        if one is not None
    }


def check_kinds(before: dict[tuple[int, str], tuple[object, ...]], modules: Iterable[torch.nn.Module]) -> None:
    """Raise `ConfigError` if a buffer has come or gone, or has another shape or dtype."""
    now = kinds_of(modules)
    for place in before.keys() | now.keys() if before != now else ():
        if before.get(place) != now.get(place):
            name, *_ = before.get(place) or now[place]
            raise ConfigError(
                f"the inner loop of StepLoader makes the buffer {place[1]!r} of a {name} anew, or with another shape or dtype:"
                " make it before the loop, as large as it will be, by a forward pass say",
                party=str(name),
            )


class Still:
    """The floating point tensors of the registered state that are no buffers, by their norms: nothing is copied."""

    def __init__(self, state: Any, buffers: Iterable[torch.Tensor]) -> None:
        self._addresses = {one.data_ptr() for one in buffers}
        self._norms = self._of(state)

    def _of(self, state: Any) -> dict[str, str]:
        found = {
            ".".join(map(str, path)): torch.linalg.vector_norm(local(one.detach()), dtype=torch.float64)
            for path, one in walk(state)
            if isinstance(one, torch.Tensor) and one.layout is torch.strided and one.dtype in _NORMED
            if local(one).data_ptr() not in self._addresses
        }
        return {name: norm.item().hex() for name, norm in found.items()}  # as text, in which NaN is NaN

    def check(self, state: Any) -> None:
        """Raise `ConfigError` if one has moved."""
        for name, norm in self._of(state).items():
            if self._norms.get(name, norm) != norm:
                raise ConfigError(
                    f"the inner loop of StepLoader moves {name}, which is no buffer: an average of weights, or what limits them,"
                    " belongs after the vote (if optimizer.step(): ...), or between the steps",
                    party=name,
                )


@contextmanager
def strangers_stay(known: Container[int]) -> Iterator[None]:
    """Raise `ConfigError` in the end if a buffer has moved of a module that was called, and whose `id` is not known.

    Where torch has compiled anything nothing is looked for: it would compile that again, with a hook and without.
    """
    dynamo = sys.modules.get("torch._dynamo")
    if dynamo is not None and dynamo.utils.counters["frames"]:
        yield
        return
    seen: list[tuple[torch.nn.Module, str, torch.Tensor, int]] = []

    def note(module: torch.nn.Module, _: object) -> None:
        if id(module) not in known:
            seen.extend((module, key, one, one._version) for key, one in module._buffers.items() if one is not None)

    handle = register_module_forward_pre_hook(note)
    try:
        yield
    finally:
        handle.remove()
    for module, key, buffer, version in seen:
        if module._buffers[key] is not buffer or buffer._version != version:
            name = type(module).__name__
            raise ConfigError(
                f"the inner loop of StepLoader moves the buffer {key!r} of a {name}, whose state_dict() no registered function"
                " returns: return it in one, or a replica group that comes back has another buffer",
                party=name,
            )
