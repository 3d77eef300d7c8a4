"""A step that is discarded has not happened: what its forward pass and its loss wrote to the registered state goes back.

Two parts of the state are held:

- parameters of the optimizers, from the beginning of the step. Those are copied that were seen to be written to before a vote,
  as SAM does. The first steps find out which these are; before there is optimizer state there is room for a copy of all;
- all else that is registered, from the beginning of the first forward pass, because the tail of a loop after `zero_grad` belongs
  to the step before; from the beginning of the step where nobody says when a forward pass begins. What is small is copied, as
  running statistics, centres and codebooks are; what is large if it was seen to be written to.

The state functions are called once, not in each step. Each tensor or plain value that they return is looked for where the loop
has it: in an attribute, a dict, a variable. So what a loop binds anew (`self.center = ...`) goes back as well as what it writes
to. A tensor that is not found is held as it was returned. A plain value that is not found, a random generator and the place in
the data stay: that batch was read.
"""

from __future__ import annotations

import functools
import logging
import types
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from torchft_ckpt.checkpointing.state.containers import walk
from torchft_ckpt.checkpointing.state.optimizer_state import with_optimizer_state
from torchft_ckpt.checkpointing.state.shards import memory_of
from torchft_ckpt.core.coordination.messages import name_some
from torchft_ckpt.manager.state_registry import StateRegistry
from torchft_ckpt.manager.volatile import MAX_COPIED_BYTES, owned_by

logger = logging.getLogger(__name__)

_LEARNING_STEPS = 3
"""In so many, bits are compared too: `x.data.add_` and `x.data = y` are not counted as writes to x."""
_SAMPLE_BYTES = 256
_MAX_IN_A_ROW = 8
"""After so many discards a plain value stays as the loop left it: it may be what each of them comes from, a loss scale say."""
_MAX_VISITED, _MAX_ITEMS = 50_000, 10_000
"""Objects that are looked into, and items of one: a longer container is data."""
_PLAIN = (bool, int, float, str, type(None))
_OF_TORCH = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
_APART = ("torch.utils.data", "torchdata", "torchft_ckpt.manager", "torchft_ckpt.process_group", "threading", "logging")


class _Variable:
    """A variable of a closure, as a dict of one item."""

    def __init__(self, cell: types.CellType) -> None:
        self._cell = cell

    def get(self, _: object) -> Any:
        try:
            return self._cell.cell_contents
        except ValueError:  # it has no value yet
            return None

    def __setitem__(self, _: object, value: object) -> None:
        self._cell.cell_contents = value


@dataclass(slots=True, eq=False)
class _Place:
    """Where a loop has a part of its state, and what is held of it."""

    holder: Any
    key: Any
    name: str
    is_copied: bool = True
    held: Any = None
    copy: Any = None
    version: int = 0

    def hold(self, is_whole: bool | None) -> bool:
        """Hold what is here; return whether it is to be copied into `copy` still.

        `is_whole`: keep bits of what is only watched, all of them or some.
        """
        before, self.held = self.held, self.holder.get(self.key)
        held = self.held
        if type(held) in _OF_TORCH:
            if self.is_copied and held is before and self.copy is not None:
                return True
            self.copy, self.version = None, held._version
            if self.is_copied or is_whole is not None:
                self.copy = held.detach().clone() if self.is_copied or is_whole else _bits(held)[:_SAMPLE_BYTES].clone()
        elif isinstance(held, list | deque):
            self.copy = [(item, item.detach().clone() if type(item) in _OF_TORCH else None) for item in held]
        return False

    @property
    def is_written(self) -> bool:
        """Whether what is only watched was written to since."""
        if type(self.held) not in _OF_TORCH or self.is_copied:
            return False
        if self.held._version != self.version or self.copy is None:
            return self.held._version != self.version
        bits = _bits(self.copy)
        return not torch.equal(_bits(self.held)[: bits.numel()], bits)

    def put_back(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Bind what was here, and return which tensors are to be written to, with what."""
        held, copy = self.held, self.copy
        if self.holder.get(self.key) is not held:
            self.holder[self.key] = held
        if isinstance(held, list | deque):
            held.clear()
            held.extend(item for item, _ in copy)
            return [pair for pair in copy if pair[1] is not None]
        return [(held, copy)] if copy is not None and copy.shape == held.shape else []


class Undo:
    """What the open step may have to put back. On the training thread.

    Args:
        registry: of the state.
        party: this replica, for the log.
    """

    def __init__(self, registry: StateRegistry, party: str) -> None:
        self._registry = registry
        self._party = party
        self._of_optimizers: list[_Place] = []
        self._others: list[_Place] = []
        self._num_changes = -1
        """The registry's when the state was looked for."""
        self._num_learned = self._num_in_a_row = 0
        self._is_held = self._are_others_held = self._sees_forward = False

    def begin(self) -> None:
        """A step begins with a state that is whole. Without effect where one is held already."""
        if self._num_changes != self._registry.num_changes:
            self._look()
        if not self._is_held:
            self._is_held = True
            self._hold(self._of_optimizers)
        if not self._sees_forward:
            self._hold_others()

    def forward_begins(self) -> None:
        """A forward pass begins, of the open step or of the next one."""
        self._sees_forward = True
        self._hold_others()

    def end(self, *, counts: bool) -> None:
        """The step is decided or left. Its collectives have ended, and no optimizer has taken it yet."""
        is_held, self._is_held, self._are_others_held = self._is_held, False, False
        if not is_held or self._num_changes != self._registry.num_changes:
            return  # what was loaded meanwhile is of no step
        self._num_learned += 1
        self._num_in_a_row = 0 if counts else self._num_in_a_row + 1
        places = self._of_optimizers + self._others
        written = [place for place in places if place.is_written]
        if not counts:
            self._put_back(places, written)
        if written:
            what, size = name_some(place.name for place in written), sum(place.held.nbytes for place in written)
            message = (
                "%s: the loop writes to %s before the vote (%d bytes): it is copied as each step begins from now on"
            )
            logger.info(message, self._party, what, size)
        for place in places:
            place.is_copied = place.is_copied or place in written
            place.held, place.copy = (place.held, place.copy) if place.is_copied else (None, None)

    def _put_back(self, places: list[_Place], written: list[_Place]) -> None:
        lost = [place.name for place in written if place.copy is None or place.copy.shape != place.held.shape]
        with torch.no_grad():
            is_late = self._num_in_a_row > _MAX_IN_A_ROW
            back = [place for place in places if not is_late or type(place.held) in _OF_TORCH]
            pairs = [pair for place in back for pair in place.put_back()]
            if pairs:
                with self._registry.lock.write():
                    torch._foreach_copy_([to for to, _ in pairs], [copy for _, copy in pairs])
        if lost:
            logger.warning(
                "%s: this step was discarded after the loop had written to %s, for the first time as far as is known. It stays"
                " as the loop left it, in each group otherwise perhaps; from the next step on it goes back at a discard",
                self._party,
                name_some(lost),
            )

    def _hold_others(self) -> None:
        if not self._are_others_held:
            self._are_others_held = True
            self._hold(self._others)

    def _hold(self, places: list[_Place]) -> None:
        is_whole: bool | None = None
        if self._num_learned < _LEARNING_STEPS:
            is_whole = not any(optimizer.state for optimizer in self._registry.known_optimizers())
        again = [place for place in places if place.hold(is_whole)]
        if again:
            with torch.no_grad():
                torch._foreach_copy_([place.copy for place in again], [place.held for place in again])

    def _look(self) -> None:
        """Find where the loop has its state."""
        registry, self._num_changes = self._registry, self._registry.num_changes
        self._num_learned, self._is_held, self._are_others_held = 0, False, False
        optimizers = registry.known_optimizers()
        with with_optimizer_state(optimizers, creates=False):
            leaves = [(".".join(map(str, path)), value) for path, value in walk(registry.capture())]
        owned = owned_by(optimizers)
        tensors = {
            part.data_ptr(): (name, part)
            for name, value in leaves
            if isinstance(value, torch.Tensor)
            for part in memory_of(value)
            if _can_be_held(part)
        }
        groups = [group for optimizer in optimizers for group in optimizer.param_groups]
        trained = {id(parameter): parameter for group in groups for parameter in group["params"]}
        parameters = [part for parameter in trained.values() for part in memory_of(parameter)]
        self._of_optimizers = [
            _Place({0: part}, 0, tensors.get(part.data_ptr(), (f"parameter {number}",))[0], False)
            for number, part in enumerate(parameters)
            if _can_be_held(part)
        ]
        others = {address: found for address, found in tensors.items() if address not in owned}
        values = Counter(
            (name.rpartition(".")[2], words) for name, value in leaves if (words := _words(value)) is not None
        )
        self._others = list(_places_of(others, values, registry.state_functions()))


def _places_of(
    tensors: Mapping[int, tuple[str, torch.Tensor]], values: Counter[tuple[str, str]], functions: Iterable[object]
) -> Iterator[_Place]:
    """Yield where these tensors, by address, and plain values, by name and words, are. The nearest to the functions is taken."""
    found = set()
    for holder, key, value in _reached(functions):
        if type(value) in _OF_TORCH:
            address = value.data_ptr() if _can_be_held(value) else 0
            if address in tensors:
                found.add(address)
                yield _Place(holder, key, tensors[address][0], value.nbytes <= MAX_COPIED_BYTES)
        elif (words := _words(value)) is not None and values[str(key), words] > 0:
            values[str(key), words] -= 1
            yield _Place(holder, key, str(key))
    for address, (name, tensor) in tensors.items():
        if address not in found:
            yield _Place({0: tensor}, 0, name, tensor.nbytes <= MAX_COPIED_BYTES)


def _reached(functions: Iterable[object]) -> Iterator[tuple[Any, Any, Any]]:
    """Yield what can be reached from functions, with the dict, or what answers like one, that has it, and its key there."""
    waiting = deque(functions)
    seen = set(map(id, waiting))
    while waiting and len(seen) < _MAX_VISITED:
        for holder, key, item in _inside(waiting.popleft()):
            if holder is not None:
                yield holder, key, item
            if not isinstance(item, (torch.Tensor, *_PLAIN)) and id(item) not in seen:
                seen.add(id(item))
                waiting.append(item)


def _inside(value: Any) -> Iterator[tuple[Any, Any, Any]]:
    kind: Any = type(value)
    if _is_apart(kind):
        return
    if isinstance(value, types.FunctionType):
        if not str(value.__module__).startswith("torch."):
            for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
                yield (variable := _Variable(cell)), name, variable.get(name)
            names = [name for name in value.__code__.co_names if name in value.__globals__]
            yield from ((value.__globals__, name, value.__globals__[name]) for name in names)
            yield from ((None, None, item) for item in value.__defaults__ or ())
    elif isinstance(value, types.MethodType):
        yield from ((None, None, item) for item in (value.__self__, value.__func__))
    elif isinstance(value, functools.partial):
        yield from ((None, None, item) for item in (value.func, *value.args, *value.keywords.values()))
    elif isinstance(value, list | tuple | deque):
        yield from ((None, None, item) for item in value if len(value) <= _MAX_ITEMS)
    else:
        holder = value if isinstance(value, dict) else getattr(value, "__dict__", None)
        if isinstance(holder, dict) and len(holder) <= _MAX_ITEMS:
            yield from ((holder, key, item) for key, item in list(holder.items()))


@functools.cache
def _is_apart(kind: type) -> bool:
    """Whether what is in an object of this class is no state of the loop's, or stays: classes, data loaders, this library."""
    if issubclass(kind, type | types.ModuleType) or hasattr(kind, "__next__"):
        return True
    return any(base.__module__.startswith(_APART) for base in kind.__mro__)


def _can_be_held(tensor: torch.Tensor) -> bool:
    is_plain = (
        type(tensor) in _OF_TORCH and tensor.layout is torch.strided and not (tensor.is_meta or tensor.is_inference())
    )
    return is_plain and tensor.numel() > 0 and (tensor.numel() == 1 or 0 not in tensor.stride())


def _words(value: object) -> str | None:
    """Return a text for a plain value, or for a sequence of such and of small tensors; None for all else."""
    if isinstance(value, _PLAIN):
        return repr(value)
    if not isinstance(value, list | tuple | deque) or len(value) > _MAX_ITEMS:
        return None
    if not all(isinstance(item, _PLAIN) or _is_small(item) for item in value):
        return None
    return repr([item.data_ptr() if isinstance(item, torch.Tensor) else item for item in value])


def _is_small(value: object) -> bool:
    return isinstance(value, torch.Tensor) and _can_be_held(value) and value.nbytes <= MAX_COPIED_BYTES


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().reshape(-1).view(torch.uint8)
