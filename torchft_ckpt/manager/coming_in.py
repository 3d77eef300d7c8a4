"""What a rank has loaded at the end of an iteration that does not count stays as it is until its next step begins.

The loop is still in that iteration, and some change registered state whatever `should_commit` has returned: a scheduler that is
stepped unconditionally, an average of the weights. What they change goes back as the step begins. Plain values and small
tensors are copied. Of a large tensor it is seen whether the loop has written to it: it is copied from the next time on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch

from torchft_ckpt.checkpointing.state.containers import SEQUENCES, rebuilt
from torchft_ckpt.checkpointing.state.tree import is_flat, join_path
from torchft_ckpt.core.coordination.messages import StateVersion
from torchft_ckpt.manager.comparing import fixed, same_tensor, same_value
from torchft_ckpt.manager.state_registry import StateRegistry
from torchft_ckpt.manager.volatile import MAX_COPIED_BYTES


class _Mark(NamedTuple):
    """Of a tensor that is not copied: it has been written to, or is another one, if this is not the same."""

    version: int
    address: int


class CameIn:
    """The state that was loaded. On the training thread."""

    def __init__(self, registry: StateRegistry) -> None:
        self._registry = registry
        self._version: StateVersion | None = None
        self._state: dict[str, Any] = {}
        self._own: Mapping[str, Any] = {}
        self._found: dict[str, Any] = {}
        """By path: a copy, or the mark of a tensor that is not copied."""
        self._written: set[str] = set()
        """Large tensors that the loop was seen to write to."""
        self.moved: list[str] = []
        """The names of what the loop has changed, as `put_back` has found last."""
        self._seen: dict[str, Any] | None = None

    @property
    def is_held(self) -> bool:
        return self._version is not None

    def take(self, version: StateVersion) -> None:
        """Hold what was loaded just now."""
        before = self._leaves(self._registry.take_returned(), "")
        captured = self._registry.capture_to_serve()
        self._registry.layout(captured.returned)  # it knows the state of optimizers now
        self._version, self._own = version, captured.own
        here = dict(self._leaves(captured.returned, ""))
        self._written |= {
            path for path, leaf in before if isinstance(leaf, _Mark) and here.get(path) != leaf
        }  # fresh copies
        self._state = self._copied(fixed(captured.returned), "")
        self._found = dict(self._leaves(self._state, ""))

    def forget(self) -> None:
        """It does not matter any more what was loaded."""
        self._version, self._found, self._state, self._seen = None, {}, {}, None
        self._registry.forget_returned()

    def take_seen(self) -> dict[str, Any] | None:
        """Return what the state functions have returned in `put_back`, once, if nothing was put back since."""
        seen, self._seen = self._seen, None
        return seen

    def put_back(
        self, version: StateVersion, *, goes_on: bool = False, agree: Callable[[bool | None], bool] | None = None
    ) -> bool:
        """Load what the loop has changed since; return whether that is all it has changed (`moved`).

        Args:
            version: of the state that is here. If it is another one, what was held is forgotten.
            goes_on: hold it on.
            agree: says to the other ranks of this group whether this one has to load, or that it cannot (None), and returns
                whether all of them load. What loads may be a collective of theirs.

        Raises:
            What a state function raises. What is here is no state then.
        """
        held, found, state, self.moved, self._seen = self._version, self._found, self._state, [], None
        if held != version or not goes_on:
            self.forget()
        if held != version:
            if agree is not None:
                agree(None)
            return True
        try:
            self._seen = self._registry.capture()
            here = dict(self._leaves(self._seen, ""))
        except BaseException:
            if agree is not None:
                agree(None)
            raise
        moved = self.moved = [path for path in {**found, **here} if not _is_same(found.get(path), here.get(path))]
        lost = [path for path in moved if isinstance(found.get(path), _Mark)]
        self._written.update(lost)
        keys = [key for key in state if any(path == key or path.startswith(f"{key}.") for path in moved)]
        if agree is None:
            has_loaded = bool(keys) and not lost
        else:  # the other ranks may have moved something else
            has_loaded, keys = agree(bool(moved)), [*state]
        is_whole = not lost and (has_loaded or not moved)
        self._seen = None if moved or has_loaded else self._seen
        if has_loaded:  # the loop may keep what it is given; of what is not copied that is what is here
            is_whole &= self._registry.load(self._copied(fixed(state), ""), keys, in_place=True)
        self.moved = [*moved, *self._registry.take_settings(self._own)]
        return is_whole

    def _is_copied(self, tensor: torch.Tensor, path: str) -> bool:
        return tensor.nbytes <= MAX_COPIED_BYTES or path in self._written

    def _copied(self, value: Any, path: str) -> Any:
        """Return a state with copies of what is small, or was written to."""
        if isinstance(value, torch.Tensor):
            return value.detach().clone() if self._is_copied(value, path) else value
        if isinstance(value, np.ndarray):
            return value.copy()  # nobody can see whether the loop writes to it
        if isinstance(value, Mapping):
            return {key: self._copied(item, join_path(path, key)) for key, item in value.items()}
        if isinstance(value, SEQUENCES) and not is_flat(value):
            places = iter(range(len(value)))
            return rebuilt(value, lambda item: self._copied(item, join_path(path, next(places))))
        return value

    def _leaves(self, value: Any, path: str) -> Iterator[tuple[str, Any]]:
        if isinstance(value, torch.Tensor) and not self._is_copied(value, path):
            local = getattr(value, "_local_tensor", value)
            yield path, _Mark(local._version, local.data_ptr())
        elif isinstance(value, Mapping) and value:
            for key, item in value.items():
                yield from self._leaves(item, join_path(path, key))
        elif isinstance(value, SEQUENCES) and value and not is_flat(value):
            for place, item in enumerate(value):
                yield from self._leaves(item, join_path(path, place))
        else:
            yield path, value


def _is_same(held: Any, here: Any) -> bool:
    if isinstance(held, torch.Tensor) and isinstance(here, torch.Tensor):
        return same_tensor(held, here)
    if isinstance(held, (torch.Tensor, _Mark)) or isinstance(here, (torch.Tensor, _Mark)):
        return bool(type(held) is type(here) and held == here)
    return held is here or same_value(held, here)
