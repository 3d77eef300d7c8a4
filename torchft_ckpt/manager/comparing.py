"""Compares the state that is here with that of the sources, bit by bit, and names what differs.

It knows tensors and plain values, and which tensors optimizers own. It does not know where the states come from: whatever a
transport knows to be equal already it need not have moved.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch

from torchft_ckpt.checkpointing.state.containers import SEQUENCES, rebuilt
from torchft_ckpt.checkpointing.state.shards import adapter_of
from torchft_ckpt.checkpointing.state.tree import MANY_LEAVES, TreeEncoder, is_flat, join_path
from torchft_ckpt.errors import UnsupportedValueError
from torchft_ckpt.manager.volatile import MAX_COPIED_BYTES

MAX_NAMED = 5
_EQUAL_BY_WORTH = (bool, int, str, type(None))
_NUM_PYTHON_WORDS = 625
_NUM_SAMPLED = 4096
_NUM_TORCH_BYTES = (16, 5056)
"""Of a generator's state on a CUDA device, and on the CPU."""


class Differences(NamedTuple):
    """The differences between two states."""

    paths: tuple[str, ...]

    def __str__(self) -> str:
        more = f" and {len(self.paths) - MAX_NAMED} more" if len(self.paths) > MAX_NAMED else ""
        return ", ".join(path[:120] for path in self.paths[:MAX_NAMED]) + more


def compare_states(here: object, there: object, are_digests_equal: bool = False) -> Differences:
    """Compare the state here, whose tensors are not written to meanwhile, with that of the sources.

    `are_digests_equal`: those of all tensors. Then of large ones some values are compared: on a device all would take seconds.
    """
    found = _Search(max_bytes=MAX_COPIED_BYTES if are_digests_equal else None)
    found.compare(here, there, "")
    return Differences(tuple(found.paths))


def fixed(state: Any) -> Any:
    """Return a state with containers of its own: what is put into those of the training loop meanwhile does not appear in it."""
    if isinstance(state, Mapping):
        return dict(state) if is_flat(state.values()) else {key: fixed(item) for key, item in state.items()}
    if isinstance(state, SEQUENCES):
        own = state if isinstance(state, tuple) else copy.copy(state)
        return own if is_flat(own) else rebuilt(own, fixed)
    return copy.copy(state) if isinstance(state, (set, bytearray)) else state


def not_returned(here: object, loaded: object, *, twice: bool = False) -> Differences:
    """Compare what the registered functions return with what they have just loaded, of large tensors some values.

    A state of a random number generator that a function leaves alone is the group's own. `twice`: of numbers those count that
    are twice what was loaded, as others may have moved by themselves: a rounded time.
    """
    found = _Search(max_bytes=MAX_COPIED_BYTES, skips_random=True, twice=twice)
    found.compare(here, loaded, "")
    return Differences(tuple(found.paths))


class _Search:
    """One comparison. Tensors larger than `max_bytes` are sampled."""

    def __init__(self, max_bytes: int | None, *, skips_random: bool = False, twice: bool = False) -> None:
        self._max_bytes = max_bytes
        self._twice = twice
        self._skips_random = skips_random
        self.paths: list[str] = []

    def compare(self, here: Any, there: Any, path: str) -> None:
        if self._skips_random and is_random_state(here):
            return
        if isinstance(here, Mapping) and isinstance(there, Mapping):
            for key in dict.fromkeys([*here, *there]):
                if key in here and key in there:
                    if type(one := here[key]) is type(there[key]) in _EQUAL_BY_WORTH and one == there[key]:
                        continue
                    self.compare(here[key], there[key], join_path(path, key))
                else:
                    self.paths.append(join_path(path, key))
        elif isinstance(here, SEQUENCES) and type(here) is type(there) and len(here) == len(there):
            if is_flat(here) and is_flat(there):
                is_same = same_value(here, there)
                if is_same or len(here) > MANY_LEAVES:
                    self.paths += [] if is_same else [path]
                    return
            for index, (one, other) in enumerate(zip(here, there, strict=True)):
                self.compare(one, other, join_path(path, index))
        elif isinstance(here, torch.Tensor) and isinstance(there, torch.Tensor):
            if not same_tensor(here, there, self._max_bytes):
                self.paths.append(path)
        elif self._twice and type(here) in (int, float) and type(there) in (int, float):
            self.paths += [path] if here == there + there != there else []
        elif not same_value(here, there):
            self.paths.append(path)


def is_random_state(value: object) -> bool:
    """Whether a value is what a generator of Python's, numpy's or torch's returns as its state."""
    if isinstance(value, torch.Tensor):
        return value.dtype is torch.uint8 and value.dim() == 1 and value.numel() in _NUM_TORCH_BYTES
    if isinstance(value, Mapping):
        return "bit_generator" in value
    if not isinstance(value, (list, tuple)) or len(value) < 3:
        return False
    words = value[1]
    is_pythons = isinstance(words, (list, tuple)) and len(words) == _NUM_PYTHON_WORDS
    return is_pythons or (isinstance(value[0], str) and isinstance(words, np.ndarray))


def same_tensor(here: torch.Tensor, there: torch.Tensor, max_bytes: int | None = None) -> bool:
    """Whether two tensors, or what is here of them, have the same bits; of larger ones some values from all over are compared."""
    if here.shape != there.shape or here.dtype != there.dtype:
        return False
    adapter, other = adapter_of(here), adapter_of(there)
    if adapter is None and other is None:
        return _same_bits(*(_sampled(one, max_bytes) for one in (here, there)))
    if adapter is None or other is None:
        return False
    boxes, data = adapter.boxes_and_data(here, "")
    other_boxes, other_data = other.boxes_and_data(there, "")
    pairs = zip(*([_sampled(part, max_bytes) for part in parts] for parts in (data, other_data)), strict=True)
    return boxes == other_boxes and all(_same_bits(*pair) for pair in pairs)


def _sampled(part: torch.Tensor, max_bytes: int | None) -> torch.Tensor:
    if max_bytes is None or part.nbytes <= max_bytes:
        return part
    return part.detach().reshape(-1)[:: max(1, part.numel() // _NUM_SAMPLED)]


def _same_bits(here: torch.Tensor, there: torch.Tensor) -> bool:
    if here.layout is not torch.strided or there.layout is not torch.strided or here.is_meta or there.is_meta:
        return False
    return torch.equal(bits_of(here), bits_of(there))


def bits_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the values as integers, on the host: a device may have no memory to spare."""
    flat = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
    # Integers of four bytes are compared several times as fast as bytes.
    return flat.view(torch.int32) if flat.nbytes % 4 == 0 and flat.data_ptr() % 4 == 0 else flat


def same_value(here: object, there: object) -> bool:
    """Whether two values, which are no tensors, are the same."""
    if isinstance(here, np.ndarray) and isinstance(there, np.ndarray):
        is_alike = (here.shape, here.dtype) == (there.shape, there.dtype)
        return is_alike and here.tobytes() == there.tobytes()
    ours, theirs = value_in_words(here), value_in_words(there)
    if ours is None or theirs is None:
        return type(here) is type(there) and repr(here) == repr(there)
    return ours == theirs


def value_in_words(value: object) -> str | None:
    """Return a text that is the same exactly for equal values, in all processes; None where a value cannot travel.

    As values would travel: a NaN is equal to the same NaN, sets have no order, numpy's numbers are Python's.
    """
    value = value.item() if isinstance(value, np.generic) else value
    if type(value) in (bool, int, str, type(None)) or (type(value) is float and value == value):  # as nearly all are
        return repr(value)
    try:
        return msgspec.json.encode(TreeEncoder().encode(value)).decode()  # five times as fast as `repr`
    except UnsupportedValueError:
        return None
