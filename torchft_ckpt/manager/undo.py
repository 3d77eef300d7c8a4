"""A step that is discarded has not happened: what it wrote to the registered state goes back.

Parameters are held from the beginning of the step, all else from that of its first forward pass: the tail of a loop after
`zero_grad` belongs to the step before. (Where nobody says when a forward pass begins, all is held from the beginning.) What no
optimizer owns and is small is copied: running statistics, centres, codebooks. Parameters and large tensors are copied if the
loop was seen to write to them before a vote, as SAM does; and until the first step that counts, if there is no optimizer state
yet, in whose place a copy of them fits: of what is trained, and of as much besides. A loop may go back in its next step through
what it has computed in this one. So a tensor to which torch has counted no write is put back without one that counts: it is as it
was, or was written to as BatchNorm does.

The state functions are called as the first step begins, after the first one that counts, and after each discard. Each tensor or
plain value that they return is looked for where the loop has it: in an attribute, a dict, a variable. So what a loop binds anew
(`self.center = ...`, or the dict or the object that holds it) goes back, too, and what comes into being in a step that is
discarded is taken out. A tensor is known by its memory; a plain value by its name and what it is, if nothing else looks like it,
neither at first nor after a step. Other plain values stay, and so do random generators and the place in the data: that batch was
read.
"""

from __future__ import annotations

import gc
import logging
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any, TypeAlias

import torch

from torchft_ckpt.checkpointing.state.containers import walk
from torchft_ckpt.checkpointing.state.optimizer_state import with_optimizer_state
from torchft_ckpt.checkpointing.state.shards import memory_of
from torchft_ckpt.checkpointing.state.space import as_bytes
from torchft_ckpt.checkpointing.state.versions import Counted, count_writes, is_changed
from torchft_ckpt.core.coordination.messages import name_some
from torchft_ckpt.manager.state_registry import StateRegistry
from torchft_ckpt.manager.volatile import MAX_COPIED_BYTES, owned_by

logger = logging.getLogger(__name__)

_MAX_IN_A_ROW = 8
"""After so many discards plain values stay as the loop left them: one may be the cause, a loss scale that is too large say."""
_MAX_VISITED, _MAX_ITEMS = 20_000, 10_000
"""Objects that are looked into, and items of one: a longer container is data."""
_Reached: TypeAlias = "tuple[dict[Any, Any] | CellType, Any, str, Any]"
_NOTHING = object()
"""Stands for a value where the loop has bound none."""
_PLAIN = (bool, int, float, str, type(None))
_OF_TORCH = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
_COPIED = (list, deque, *_OF_TORCH)
_OF_MODULES = ("_buffers", "_parameters", "_modules")
_APART = (
    *("torch.utils.data.", "torchdata.", "threading.", "logging.", "asyncio.", "aiohttp."),
    *(f"torchft_ckpt.{part}" for part in ("manager.", "process_group.", "checkpoint", "coordination.", "core.")),
)
"""Modules, with what is in them: a script's own `logging_utils` is another."""


@dataclass(slots=True, eq=False)
class _Place:
    """Where a loop has a part of its state, and what is held of it. Without a holder it is what was found first."""

    holder: dict[Any, Any] | CellType | None
    key: Any
    name: str
    held: Any
    is_small: bool = True
    copy: Any = None
    counted: Sequence[Counted] = ()
    """The tensors that are held, with their versions then."""
    address: int = 0
    """Of a large tensor, when it was held: where its memory is."""

    @property
    def here(self) -> Any:
        if isinstance(self.holder, dict):
            return self.holder.get(self.key, _NOTHING)
        if self.holder is None:
            return self.held
        return self.holder.cell_contents if gc.get_referents(self.holder) else _NOTHING

    def take(self) -> None:
        """Hold what is here, and copy it."""
        self.held, self.copy = self.here, None
        if isinstance(self.held, list | deque):
            self.copy = [(item, item.detach().clone() if type(item) in _OF_TORCH else None) for item in self.held]
        elif type(self.held) in _OF_TORCH:
            self.copy = self.held.detach().clone()

    def count(self) -> None:
        """Note the versions of what is held."""
        tensors = self.held if isinstance(self.held, list | deque) else (self.held,)
        self.counted = [one for tensor in tensors if type(tensor) in _OF_TORCH for one in count_writes(tensor)]

    @property
    def is_written(self) -> bool:
        """Whether the loop has written to the large tensor that is held, be it what was there before, or bound another one."""
        return (
            self.here is not self.held
            or is_changed(self.counted)
            or self.address != self.held.data_ptr()
            or (
                self.copy is not None
                and not torch.equal(*(as_bytes(one.detach().contiguous()) for one in (self.held, self.copy)))
            )
        )

    def put_back(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Bind what was here; return the tensors that are to be written to, each with what: by `data` if torch has counted no
        write to it."""
        if isinstance(self.holder, dict):
            if self.held is _NOTHING:
                self.holder.pop(self.key, None)
            else:
                self.holder[self.key] = self.held
        elif self.holder is not None and self.held is not _NOTHING:
            self.holder.cell_contents = self.held
        if isinstance(self.held, list | deque):
            self.held.clear()
            self.held.extend(item for item, _ in self.copy)
            back = [(item, copy) for item, copy in self.copy if copy is not None and _can_be_held(item)]
        else:
            # What is bound anew in each step nobody may be able to write to: it is bound again, and has not changed.
            is_writable = self.copy is not None and self.copy.shape == self.held.shape and _can_be_held(self.held)
            back = [(self.held, self.copy)] if is_writable else []
        written = {id(tensor) for tensor, version in self.counted if tensor._version != version}
        return [(tensor if id(tensor) in written else tensor.data, copy) for tensor, copy in back]


class _Part:
    """Places that are held from one moment on: some are copied, the others watched for writes."""

    def __init__(self, places: list[_Place], *, copies_all: bool) -> None:
        self.copied = [place for place in places if place.is_small or copies_all]
        self.watched = [place for place in places if not (place.is_small or copies_all)]
        self.is_held = False
        self.learns = copies_all
        """What is large is copied until it is known whether the loop writes to it."""

    def hold(self) -> None:
        """Hold what is here, if nothing is held."""
        if self.is_held:
            return
        self.is_held = True
        for place in self.watched:
            place.held = place.here
        self.copied += [place for place in self.watched if type(place.held) not in _OF_TORCH]
        self.watched = [place for place in self.watched if type(place.held) in _OF_TORCH]
        again = []
        for place in self.copied:
            if type(place.copy) is torch.Tensor and place.here is place.held and place.copy.shape == place.held.shape:
                again.append(place)
            elif place.copy is not None or place.here is not place.held or isinstance(place.held, _COPIED):
                place.take()
        if again:
            with torch.no_grad():
                torch._foreach_copy_([place.copy for place in again], [place.held for place in again])
        for place in (*self.copied, *self.watched):
            place.count()
        for place in self._large():
            place.address = place.held.data_ptr()

    def _large(self) -> list[_Place]:
        copied = [place for place in self.copied if self.learns and not place.is_small]
        return [place for place in copied if type(place.held) in _OF_TORCH] + self.watched

    def end(self, *, counts: bool) -> list[_Place]:
        """Return what is large and was written to. It is copied from now on."""
        self.is_held = False
        if self.learns and not counts:
            return []  # all is copied, and goes back
        large = self._large()
        written = [place for place in large if place.is_written]
        if self.learns:
            self.learns = False
            self.watched = [place for place in large if place not in written]
            self.copied = [place for place in self.copied if place not in self.watched]
            for place in self.watched:
                place.copy = None
        elif written:
            self.copied += written
            self.watched = [place for place in self.watched if place not in written]
        return written


class Undo:
    """What the open step may have to put back. On the training thread.

    Args:
        registry: of the state.
        party: this replica, for the log.
    """

    def __init__(self, registry: StateRegistry, party: str) -> None:
        self._registry = registry
        self._party = party
        self._parameters = self._others = _Part([], copies_all=False)
        self._num_changes = -1
        """The registry's when the state was looked for."""
        self._num_in_a_row = 0
        self._sees_forward = self._is_early = self._is_begun = False
        self._looks_again = self._has_looked_again = False
        self._slots: set[tuple[int, Any]] = set()
        """Where the open step may have found something in what belongs to the loop, if it began with a look; else empty."""
        self._paths: set[str] = set()
        """In the state, at that look."""
        self._again: list[_Place] = []
        """Plain values that went back at a discard. A loop may count there and behind its vote, so they go back once more as the
        next try begins."""
        self._voted: list[tuple[_Place, Any]] = []
        """Plain values, each as it was at the last vote, if that counted."""
        self._stays: set[tuple[int, Any]] = set()
        """Where of these the loop has changed nothing from there to the next forward pass. What it changes there after a discard
        is its answer to that, such as a count of good steps that begins anew: it stays."""
        self._written: set[str] = set()
        """Of what is large, what the loop was seen to write to; it is copied, also if it was loaded since."""

    @property
    def sees_writes(self) -> bool:
        """Whether the loop was seen to write before a vote to parameters, or to something else that is large."""
        return bool(self._written)

    def tries_again(self) -> None:
        """A step begins in place of a discarded one, with what that began with: before anybody looks at it."""
        for place in self._again if self._num_changes == self._registry.num_changes else ():
            place.put_back()

    def begin(self, *, has_written: bool = False) -> None:
        """A step begins with a state that is whole. What is held already stays so.

        `has_written`: but for parameters, which the loop has written to since the last step: they do not go back.
        """
        self._is_begun = True
        if self._num_changes != self._registry.num_changes:
            self._num_changes = self._registry.num_changes
            self._parameters, self._others = _Part([], copies_all=False), _Part([], copies_all=False)
            self._again, self._voted, self._stays = [], [], set()
            self._try(self._look)
        if not has_written:
            self._parameters.hold()
        if not self._sees_forward:
            self._hold_others()

    def forward_begins(self, *, is_in_step: bool) -> None:
        """A forward pass begins, of the open step or perhaps of the next one: else it was a look at the model after a step."""
        self._sees_forward = True
        if is_in_step and self._is_early:
            self._others.is_held = False
        self._is_early = not is_in_step
        self._hold_others()

    def _hold_others(self) -> None:
        if not self._others.is_held:
            self.tries_again()
            if self._voted:  # perhaps more than once: a forward pass may be a look at the model
                self._stays = {(id(place.holder), place.key) for place, value in self._voted if place.here is value}
        if self._looks_again and not self._others.is_held:
            self._looks_again = False
            self._try(self._look_again)
        self._others.hold()

    def _try(self, look: Callable[[], None]) -> None:
        try:
            look()
        except Exception as error:  # noqa: BLE001 - whatever a state function raises, or an object that is looked into
            message = "%s: what a discarded step writes to the state does not go back: the state cannot be read now: %s"
            logger.warning(message, self._party, error)

    def end(self, *, counts: bool) -> None:
        """The step is decided or left. Its collectives have ended, and no optimizer has taken it yet."""
        parts, self._again = [part for part in (self._parameters, self._others) if part.is_held], []
        is_begun, self._is_begun = self._is_begun, False
        if not is_begun or self._num_changes != self._registry.num_changes:
            self._parameters.is_held = self._others.is_held = False
            return  # what was loaded meanwhile is of no step
        self._num_in_a_row = 0 if counts else self._num_in_a_row + 1
        self._looks_again = self._looks_again or not (counts and self._has_looked_again)
        self._has_looked_again = self._has_looked_again or counts
        places = [place for part in parts for place in part.copied + part.watched]
        self._voted = [(place, place.here) for place in places if counts and isinstance(place.held, _PLAIN)]
        written = [place for part in parts for place in part.end(counts=counts)]
        self._written |= {place.name for place in written}
        if not counts:
            try:
                self._take_out()
                self._put_back(places)
            except Exception as error:  # noqa: BLE001 - whatever a loop has bound there: a discard ends no job
                logger.warning(
                    "%s: a discarded step is not put back, or in part: %s. The groups are compared before the next one",
                    self._party,
                    error,
                )
        self._slots = set()
        if written:
            logger.log(
                logging.INFO if counts else logging.WARNING,
                "%s: the loop writes to %s before the vote: it is copied as each step begins from now on (%d bytes), and goes"
                " back if the step is discarded%s",
                self._party,
                name_some(place.name for place in written),
                sum(place.held.nbytes for place in written),
                "" if counts else ". This one is, and had no copy: each group may have another value now",
            )

    def _take_out(self) -> None:
        """Take out of the loop's dicts what has come into being in this step, as part of the state."""
        if not self._slots:
            return
        new = [
            (name, value) for name, value in self._leaves(self._registry.known_optimizers()) if name not in self._paths
        ]
        looks = {look for name, value in new for look in _looks(name.rpartition(".")[2], value)}
        dicts: set[int] = set()
        found: dict[object, list[tuple[dict[Any, Any], Any]]] = {}
        for holder, key, name, value in _reached(self._registry.state_functions()) if looks else ():
            if type(value) is dict and key not in _OF_MODULES:
                dicts.add(id(value))  # the loop's own, and not the attributes of an object
            for look in looks & {*_looks(name, value)}:
                if id(holder) in dicts and isinstance(holder, dict):
                    found.setdefault(look, []).append((holder, key))
        for look, places in found.items():
            for holder, key in places if isinstance(look, int) or len(places) == 1 else ():
                if (id(holder), key) not in self._slots:
                    holder.pop(key, None)

    def _put_back(self, places: list[_Place]) -> None:
        is_late = self._num_in_a_row > _MAX_IN_A_ROW
        with torch.no_grad():
            back = [place for place in places if not is_late or type(place.held) in _OF_TORCH]
            moved = [place for place in back if isinstance(place.held, _PLAIN) and place.here is not place.held]
            self._again = [place for place in moved if (id(place.holder), place.key) not in self._stays]
            pairs = [pair for place in back for pair in place.put_back()]
            if pairs:
                with self._registry.lock.write():
                    torch._foreach_copy_([tensor for tensor, _ in pairs], [copy for _, copy in pairs])

    def _leaves(self, optimizers: Sequence[torch.optim.Optimizer]) -> list[tuple[str, Any]]:
        """Return what the state functions return now, by path."""
        with with_optimizer_state(optimizers, creates=False):
            return [(".".join(map(str, path)), value) for path, value in walk(self._registry.capture())]

    def _look_again(self) -> None:
        """Find what has come into being since, and let the plain values go that were not those of the state after all."""
        before = self._others
        plain = {(id(place.holder), place.key) for place in before.copied if type(place.held) not in _OF_TORCH}
        _, others = self._find()
        others = [p for p in others if not _words(p.held) or (id(p.holder), p.key) in plain]
        self._others = _Part(others, copies_all=before.learns)

    def _look(self) -> None:
        """Find where the loop has its state."""
        self._looks_again = self._has_looked_again = False
        parameters, others = self._find()
        has_room = not any(optimizer.state for optimizer in self._registry.known_optimizers())
        fits = sum(p.held.nbytes for p in others if not p.is_small) <= sum(p.held.nbytes for p in parameters)
        self._parameters = _Part(parameters, copies_all=has_room)
        self._others = _Part(others, copies_all=has_room and fits)

    def _find(self) -> tuple[list[_Place], list[_Place]]:
        """Return where the loop has parameters, and where all else."""
        optimizers = self._registry.known_optimizers()
        leaves = self._leaves(optimizers)
        self._paths = {name for name, _ in leaves}
        parts = [(name, part) for name, value in leaves if isinstance(value, torch.Tensor) for part in memory_of(value)]
        tensors = {part.data_ptr(): (name, part) for name, part in parts if _can_be_held(part)}
        groups = [group for optimizer in optimizers for group in optimizer.param_groups]
        owned = {part.data_ptr(): (part, one) for group in groups for one in group["params"] for part in memory_of(one)}
        parameters, others = list[_Place](), list[_Place]()
        for address, (part, one) in owned.items():
            if _can_be_held(part):
                name = tensors.get(address, ("a parameter",))[0]
                (parameters if one.requires_grad else others).append(_Place(None, None, name, part, is_small=False))
        for address in owned_by(optimizers):
            tensors.pop(address, None)
        found = set()
        reached = list(_reached(self._registry.state_functions()))
        self._slots = {(id(holder), key) for holder, key, _, _ in reached}
        for holder, key, _, value in reached:
            if type(value) in _OF_TORCH and _can_be_held(value) and value.data_ptr() in tensors:
                found.add(value.data_ptr())
                path = tensors[value.data_ptr()][0]
                others.append(_Place(holder, key, path, value, is_small=value.nbytes <= MAX_COPIED_BYTES))
        others += _plain_places(leaves, reached)
        others += _holders_of(others, reached)
        for name, tensor in (tensors[address] for address in tensors.keys() - found):
            others.append(_Place(None, None, name, tensor, is_small=tensor.nbytes <= MAX_COPIED_BYTES))
        for place in (*parameters, *others):
            place.is_small = place.is_small or place.name in self._written
        return parameters, others


def _plain_places(leaves: list[tuple[str, Any]], reached: Iterable[_Reached]) -> list[_Place]:
    """Return where the loop has the plain values of its state: those that nothing else looks like."""
    values = Counter((name.rpartition(".")[2], words) for name, value in leaves if (words := _words(value)))
    alike: dict[tuple[str, str], list[_Place]] = {}
    names = {name for name, _ in values}
    for holder, key, name, value in reached:
        if name in names and (words := _words(value)) and (name, words) in values:
            alike.setdefault((name, words), []).append(_Place(holder, key, name, value))
    return [place for look, places in alike.items() if len(places) <= values[look] for place in places]


def _holders_of(places: Iterable[_Place], reached: Iterable[_Reached]) -> list[_Place]:
    """Return where the loop has the dicts and objects that hold these, which it may bind anew: `best = deepcopy(model)`."""
    bound: dict[int, list[_Place]] = {}
    for holder, key, name, value in reached:
        inner = value if isinstance(value, dict) else getattr(value, "__dict__", None)
        if inner is not None:
            bound.setdefault(id(inner), []).append(_Place(holder, key, name, value))
    found: list[_Place] = []
    waiting = deque(place.holder for place in places)
    while waiting:
        there = bound.pop(id(waiting.popleft()), [])
        found += [place for place in there if place.key not in _OF_MODULES]  # these nobody binds anew
        waiting += [place.holder for place in there]
    return found


def _reached(functions: Iterable[object]) -> Iterator[_Reached]:
    """Yield what can be reached from functions: the dict or the variable that has it, its key there, its name, and itself."""
    waiting, seen, kept = deque(functions), set[int](), list[object]()
    apart: dict[type, bool] = {}
    while waiting and len(seen) < _MAX_VISITED:
        value = waiting.popleft()
        kind = type(value)
        if kind not in apart:
            apart[kind] = _is_apart(kind)
        # `__module__` is another's where a script's function wraps one of theirs, or theirs one of the script's.
        home = f"{value.__globals__.get('__name__')}" if isinstance(value, FunctionType) else ""
        is_torchs = home.startswith("torch.") and str(value.__module__).startswith("torch.")
        is_data = isinstance(value, (dict, list, tuple, deque)) and len(value) > _MAX_ITEMS
        if id(value) in seen or apart[kind] or is_torchs or is_data:
            continue
        seen.add(id(value))
        kept.append(value)  # so that no other object gets its id
        found: list[_Reached] = []
        if isinstance(value, FunctionType):
            # What is global here is of all Managers, and what is noted there of optimizers looks like the state.
            variables = {} if home.startswith("torchft_ckpt.") else value.__globals__
            names = [name for name in _names_in(value.__code__) if name in variables]
            found = [(variables, name, name, variables[name]) for name in names]
            cells = zip(value.__code__.co_freevars, value.__closure__ or (), strict=True)
            found += [(cell, None, name, cell.cell_contents) for name, cell in cells if gc.get_referents(cell)]
        elif isinstance(attributes := value if isinstance(value, dict) else getattr(value, "__dict__", None), dict):
            found = [
                (attributes, key, str(key) if isinstance(key, (str, int)) else "", item)  # a tensor would be printed
                for key, item in list(attributes.items())
            ]
        yield from found
        waiting += [item for _, _, _, item in found if not apart.get(type(item))]
        if isinstance(value, FunctionType):
            waiting += [*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]
        elif not found or isinstance(value, MethodType):  # the attributes of a method are its function's
            waiting += [item for item in gc.get_referents(value) if not apart.get(type(item))]


def _names_in(code: CodeType) -> list[str]:
    """Return the names that a function uses, and the functions and comprehensions in it."""
    inner = (constant for constant in code.co_consts if isinstance(constant, CodeType))
    return [*code.co_names, *(name for one in inner for name in _names_in(one))]


def _is_apart(kind: type) -> bool:
    """Whether objects of a class hold no state of a loop, or stay: classes, data loaders, parts of this library."""
    is_plain = issubclass(kind, (type, ModuleType, torch.Tensor, *_PLAIN)) or hasattr(kind, "__next__")
    return is_plain or any(f"{base.__module__}.".startswith(_APART) for base in kind.__mro__)


def _can_be_held(tensor: torch.Tensor) -> bool:
    is_plain = (
        type(tensor) in _OF_TORCH and tensor.layout is torch.strided and not (tensor.is_meta or tensor.is_inference())
    )
    return is_plain and tensor.numel() > 0 and (tensor.numel() == 1 or 0 not in tensor.stride())


def _words(value: object) -> str:
    """Return a text for a plain value, or for a sequence of such and of small tensors; empty for all else."""
    if isinstance(value, _PLAIN):
        return repr(value)
    if not isinstance(value, list | tuple | deque) or len(value) > _MAX_ITEMS:
        return ""
    small = [
        isinstance(item, torch.Tensor) and _can_be_held(item) and item.nbytes <= MAX_COPIED_BYTES for item in value
    ]
    if not all(is_small or isinstance(item, _PLAIN) for item, is_small in zip(value, small, strict=True)):
        return ""
    return repr([item.data_ptr() if is_small else item for item, is_small in zip(value, small, strict=True)])


def _looks(name: str, value: object) -> list[object]:
    """Return by what a part of the state is known again where the loop has it."""
    if isinstance(value, torch.Tensor):
        return [part.data_ptr() for part in memory_of(value)] if _can_be_held(value) else []
    return [(name, words)] if (words := _words(value)) else []
