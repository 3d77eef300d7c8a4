"""What the lighthouse compares before groups train together: the parameters of each rank, in words and as a digest."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
import xxhash

from torchft_ckpt.checkpointing.state.shards import adapter_of
from torchft_ckpt.core.layouts import SEPARATOR

_MAX_TEXT_CHARS = 3000
_MAX_FROZEN_CHARS = 150


@dataclass(frozen=True, slots=True)
class ParameterLayout:
    """Shapes, dtypes and boxes of the parameters that one rank trains."""

    digest: str = ""
    """Equal exactly where the parameters are alike; empty where nothing is known of them."""
    text: str = ""
    """The same in words, one item a parameter, as far as there is room."""
    is_sharded: bool = False


def layout_of(parameters: Iterable[tuple[str, torch.Tensor]], *, only_sharded: bool) -> ParameterLayout:
    """Describe parameters.

    Args:
        parameters: with what each is called.
        only_sharded: look at those that are sharded alone: which of the others have to be alike is not known.

    Raises:
        UnsupportedValueError: what is here of a parameter is no box.
    """
    hasher = xxhash.xxh3_64()
    items: list[str] = []
    num_chars = 0
    is_sharded = False
    for name, parameter in parameters:
        adapter = adapter_of(parameter)
        if adapter is None and only_sharded:
            continue
        shape = "x".join(map(str, parameter.shape)) or "scalar"
        item = f"{name}: {shape} {str(parameter.dtype).removeprefix('torch.')}"
        if adapter is not None:
            is_sharded = True
            item += f" [{' '.join(map(str, adapter.boxes(parameter, name)))}]"
        hasher.update(f"{item};".encode())
        num_chars += len(item) + len(SEPARATOR)
        if num_chars <= _MAX_TEXT_CHARS:
            items.append(item)
    return ParameterLayout(hasher.hexdigest() if num_chars else "", SEPARATOR.join(items), is_sharded)


def frozen_in_words(flags: Sequence[bool]) -> str:
    """Say which parameters need no gradient: equal texts exactly for equal flags. Empty where there is no parameter.

    Args:
        flags: whether each parameter needs a gradient.
    """
    if not flags:
        return ""
    runs: list[list[int]] = []
    for number, trains in enumerate(flags):
        if trains:
            continue
        if runs and runs[-1][1] == number - 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    text = ", ".join(str(first) if first == last else f"{first} to {last}" for first, last in runs)
    if len(text) > _MAX_FROZEN_CHARS:
        text = f"{text[:_MAX_FROZEN_CHARS]}... ({xxhash.xxh3_64_hexdigest(bytes(flags))})"
    return f"frozen parameters: {text or 'none'}"
