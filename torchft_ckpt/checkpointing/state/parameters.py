"""Says which parameters the state of each optimizer in a state belongs to, and sees that it arrives at the same ones.

An optimizer's state dict calls parameters by their number. Two scripts that hand the same parameters over in another order mean
others by it. What a parameter *is* says the path of the tensor in the state that has its memory, and, if there is none, the
name that the optimizer was given (`param_names`).
"""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
import xxhash

from torchft_ckpt.checkpointing.state.containers import SEQUENCES, Path
from torchft_ckpt.checkpointing.state.optimizer_state import foreseen_state
from torchft_ckpt.checkpointing.state.shards import adapter_of, memory_of
from torchft_ckpt.checkpointing.state.tree import in_words, is_flat
from torchft_ckpt.errors import StateMismatchError
from torchft_ckpt.memory import gc_paused

logger = logging.getLogger(__name__)

Names: TypeAlias = "list[list[str]]"
"""Of each parameter group, the path of each parameter in the state; empty if no tensor of the state has its memory."""
Returned: TypeAlias = "Sequence[tuple[list[Any], Any]]"
"""The `param_groups` of state dicts, as they were returned, each with the optimizer that returned it."""
_OF_WRAPPERS = ("module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
_MAX_NAME_CHARS = 120


class Owned(NamedTuple):
    """The state dict of an optimizer that is known, in a state."""

    path: Path
    owner: Any
    """It has `param_groups`."""
    names: Names
    parameters: Mapping[str, tuple[torch.Tensor, dict[str, Any]]]
    """By what the state dict calls them, each with its group."""
    foreseen: dict[str, dict[str, Any]]
    """The state that a step makes for each, as far as somebody has asked."""

    def foresee(self, name: str) -> dict[str, Any]:
        """Return the state that a step makes for a parameter, as far as it can be foreseen."""
        if name not in self.foreseen:
            parameter, group = self.parameters[name]
            self.foreseen[name] = foreseen_state(self.owner, group, parameter)
        return self.foreseen[name]

    def split(self, rest: str) -> tuple[str, str]:
        """Return what a path below `state` calls its parameter, or nothing, and what follows in the path."""
        end = rest.find(".")
        while end > 0 and rest[:end] not in self.parameters:
            end = rest.find(".", end + 1)
        return (rest[:end], rest[end + 1 :]) if end > 0 else ("", rest)


class StateHere(dict[str, Any]):
    """A state, and the optimizers that may be in it."""

    def __init__(self, state: Mapping[str, Any], optimizers: Sequence[Any]) -> None:
        super().__init__(state)
        self.optimizers = optimizers

    def laid_out(self, state: Mapping[str, Any]) -> StateHere:
        """Return the same, of a state that has the same containers in other places."""
        return StateHere(state, self.optimizers)


class StatePlaces:
    """Where the parameters and the optimizers of a state are in it."""

    @gc_paused()
    def __init__(self, state: object) -> None:
        self._paths: dict[object, str] = {}
        self._of_optimizers: list[tuple[Path, Mapping[Any, Any]]] = []
        self._search(state, ())

    def _search(self, value: Any, path: Path) -> None:
        if isinstance(value, torch.Tensor):
            if (memory := _memory_key(value)) is not None:
                name = ".".join(map(str, path))
                self._paths[memory] = min(name, self._paths.get(memory, name))
        elif isinstance(value, Mapping):
            is_of_optimizer = "state" in value and "param_groups" in value
            self._of_optimizers += [(path, value)] if is_of_optimizer else []
            for key, item in () if is_of_optimizer or is_flat(value.values()) else value.items():
                if isinstance(item, _SEARCHED):
                    self._search(item, (*path, in_words(key)))
        elif isinstance(value, SEQUENCES):
            for number, item in () if is_flat(value) else enumerate(value):
                if isinstance(item, _SEARCHED):
                    self._search(item, (*path, number))

    def names(self, owner: Any) -> Names:
        """Return the paths of an optimizer's parameters."""
        return [[self._paths.get(_memory_key(p), "") for p in group["params"]] for group in owner.param_groups]

    def owned(self, returned: Returned) -> dict[str, Owned]:
        """Return the state dicts in it that optimizers have returned, by their path."""
        found: dict[str, Owned] = {}
        for path, of_optimizer in self._of_optimizers:
            groups = of_optimizer["param_groups"]
            if not isinstance(groups, list) or not all(isinstance(group, Mapping) for group in groups):
                continue
            owner = next((owner for given, owner in returned if _is_same(given, groups)), None)
            ids = _ids(groups)
            if owner is not None and [*map(len, ids)] == [len(group["params"]) for group in owner.param_groups]:
                owns = [(parameter, group) for group in owner.param_groups for parameter in group["params"]]
                parameters = dict(zip(map(str, _flat(ids)), owns, strict=True))
                found[".".join(map(str, path))] = Owned(path, owner, self.names(owner), parameters, {})
        return found


_SEARCHED = (torch.Tensor, Mapping, *SEQUENCES)
_PLAIN = (torch.Tensor, torch.nn.Parameter)


def _memory_key(tensor: torch.Tensor) -> object:
    is_plain = type(tensor) in _PLAIN and tensor.is_cpu and tensor.layout is torch.strided
    part = tensor if is_plain else next(iter(memory_of(tensor)), None)
    return (part.data_ptr(), part.shape) if part is not None and part.numel() and not part.is_meta else None


def _is_same(given: list[Any], groups: list[Any]) -> bool:
    return given is groups or bool(given and groups and given[0] is groups[0])


def _ids(groups: Iterable[Mapping[str, Any]]) -> list[list[Any]]:
    lists = [group.get("params") for group in groups]
    return [ids if isinstance(ids, list) else [] for ids in lists]


def note_returned(optimizers: Iterable[torch.optim.Optimizer]) -> None:
    """From now on, note what these optimizers return as their state dicts."""
    for optimizer in optimizers:
        if optimizer not in _returned:
            _returned[optimizer] = deque(maxlen=_NUM_NOTED)
            with contextlib.suppress(AttributeError):  # of a class that does not call torch's constructor
                optimizer.register_state_dict_post_hook(_note)


def _note(optimizer: torch.optim.Optimizer, given: dict[str, Any]) -> None:
    if optimizer in _returned and isinstance(given.get("param_groups"), list):
        _returned[optimizer].append(given["param_groups"])


def returned_by(optimizers: Iterable[Any]) -> Returned:
    """Return what `note_returned` has noted of these optimizers."""
    return [(groups, optimizer) for optimizer in optimizers for groups in tuple(_returned.get(optimizer, ()))]


_returned: weakref.WeakKeyDictionary[Any, deque[list[Any]]] = weakref.WeakKeyDictionary()
"""The parameter groups of the last state dicts of an optimizer: more than one, as another thread may ask for one."""
_NUM_NOTED = 4


def names_of(owned: Mapping[str, Owned]) -> dict[str, Names]:
    """Return the names of parameters as they travel with a state: by the path of each state dict."""
    return {path: one.names for path, one in owned.items()}


def names_from(owners: object, path: str) -> Names:
    """Return what `names_of` has said of a path; nothing if it has not."""
    names = owners.get(path) if isinstance(owners, Mapping) else None
    return [_texts(group) for group in names] if isinstance(names, list) else []


def _texts(names: object) -> list[str]:
    """Return a list that somebody else has made, with nothing in it where he has put something else than a text."""
    return [name if isinstance(name, str) else "" for name in names] if isinstance(names, list) else []


# Whether it arrives at the same parameters


def why_not_of(
    path: str,
    groups: Sequence[Mapping[str, Any]],
    names_there: Names,
    *,
    here: Owned | Sequence[Mapping[str, Any]],
    is_checkpoint: bool = True,
    may_grow: bool = False,
    may_lengthen: bool = False,
) -> list[str]:
    """Return in sentences why the state of an optimizer is not one of the parameters that are here.

    If a checkpoint does not say whether it is, that is logged.

    Args:
        names_there: the paths of their parameters, as far as they are known.
        here: the same here; or, of a state dict of which it is not known whose it is, its groups: then there may be fewer.
        is_checkpoint: it comes from one, and not from a replica.
        may_grow: more groups may be there than here: whoever loads the state may add them before.
        may_lengthen: so may more parameters be in a group. Which of them are here is not known then.
    """
    own = here.owner.param_groups if isinstance(here, Owned) else here
    ids = _ids(groups)
    if any(isinstance(one, str) for group in ids for one in group):
        return []  # who loads it goes by these names
    if isinstance(here, Owned) and (len(own) > len(groups) if may_grow else len(own) != len(groups)):
        return [f"{path} has {len(groups)} parameter groups there, {len(own)} here"]
    for number, (group, mine) in enumerate(zip(ids, own, strict=False)):
        if len(group) != (num_here := len(mine.get("params", group))):
            if may_lengthen and len(group) > num_here:
                return []
            return [f"{path}.param_groups.{number} has {len(group)} parameters there, {num_here} here"]
    # A path in the state says more than the name that the optimizer was given.
    given, given_there = ([_texts(group.get("param_names")) for group in some] for some in (own, groups))
    for one, other in ((here.names if isinstance(here, Owned) else [], names_there), (given, given_there)):
        pairs = [pair for pair in zip(_flat(one), _flat(other), strict=False) if all(pair)]
        wrong = [pair for pair in pairs if _bare(pair[0]) != _bare(pair[1])]
        if pairs and [*map(len, one)] == [*map(len, other)]:
            break
    else:
        shapes = [parameter.shape for parameter, _ in here.parameters.values()] if isinstance(here, Owned) else []
        if is_checkpoint and len(set(shapes)) < len(shapes):
            logger.warning(
                "the checkpoint does not say which parameters the state of %s is of (it is older, or they were not in the"
                " state that was saved, or whose it is was not known): it is taken to be of those that are here, in their order",
                path[:_MAX_NAME_CHARS],
            )
        return []
    return [
        f"{path} has the state of {theirs:.120} there where {mine:.120} is here ({len(wrong)} of {len(pairs)} parameters"
        " differ): hand the same parameters to the optimizers in the same order, and register each optimizer under a key of its"
        " own. If parameters have other names now, load_checkpoint loads a state dict that has those of there"
        for mine, theirs in wrong[:1]
    ]


def _bare(name: str) -> str:
    """Return a name without what wrappers put into it: a load function may take that out."""
    return ".".join(part for part in name.split(".") if part not in _OF_WRAPPERS)


def _flat(groups: Iterable[Iterable[Any]]) -> list[Any]:
    return [item for group in groups for item in group]


def tensor_to_fill(
    name: str,
    shape: Sequence[int],
    dtype: torch.dtype,
    *,
    held: torch.Tensor | None,
    owned: Owned | None,
    rest: str,
    is_sharded: bool,
) -> torch.Tensor | None:
    """Return a tensor of the layout that a tensor of an optimizer's state is to have here: `held`, if it has it.

    What is here, or is made by the next step, lends its layout; what has the shape of its parameter is laid out as that.

    Args:
        name: of the tensor.
        shape, dtype: as it arrives.
        held: what is here.
        owned: the state dict that it is in, if that is known.
        rest: its path below `state`.
        is_sharded: whether tensors of the state are.

    Returns:
        None: it arrives whole, as a plain tensor.

    Raises:
        StateMismatchError: its layout is not known, or it is not of this parameter.
    """
    size = torch.Size(shape)
    parameter, (called, key) = None, owned.split(rest) if owned is not None else ("", rest)
    if owned is not None and called:
        parameter = owned.parameters[called][0]
        is_sharded = adapter_of(parameter) is not None
        if held is None and size and (is_sharded or size != parameter.shape):
            held = owned.foresee(called).get(key)
    moment = held if isinstance(held, torch.Tensor) else None
    for like in (moment, parameter if size else None):
        if like is not None and like.shape == size:
            return like if like.dtype == dtype and like is not parameter else _laid_out_as(like, dtype, name)
    if not size:
        return None
    if parameter is not None and moment is not None and moment.shape == parameter.shape:
        raise StateMismatchError(
            f"{name[:_MAX_NAME_CHARS]} is {[*size]} there, and its parameter has the shape {[*parameter.shape]} here",
            name,
        )
    if is_sharded:
        raise StateMismatchError(
            f"{name[:_MAX_NAME_CHARS]} is {[*size]} there, of an optimizer that has no such state here, and others here are"
            " sharded: its layout is not known, as it has not the shape of its parameter, or the optimizer is not known (hand in"
            " the optimizer itself, or a state dict that names its state)",
            name,
        )
    return None


def _laid_out_as(like: torch.Tensor, dtype: torch.dtype, name: str) -> torch.Tensor | None:
    adapter = adapter_of(like)
    if adapter is None:
        return None
    if adapter.shares_memory:
        return torch.empty_like(like.detach(), dtype=dtype, requires_grad=False)
    return adapter.rebuild(
        like, [torch.empty(box.sizes, dtype=dtype, device="cpu") for box in adapter.boxes(like, name)]
    )


def group_keys(optimizers: Iterable[tuple[Any, str, Names]]) -> list[list[str]]:
    """Return what the parameter groups of optimizers are known by, in all replicas: the paths of their parameters in the state.

    A parameter that the state has otherwise, as torchtitan's fused projections are split in it, is known by its shape. If all
    are, the place in the state dict of the optimizer says more, and without one the group is known if no other has such shapes.

    Args:
        optimizers: each with the path of its state dict, or nothing, and the paths of its parameters.
    """
    keys: list[list[str]] = []
    alike: dict[str, set[tuple[int, ...]]] = {}
    for owner, path, names in optimizers:
        keys.append([])
        for number, (group, some) in enumerate(zip(owner.param_groups, names, strict=True)):
            parameters = group["params"]
            known_by = [name or f"? {[*parameter.shape]}" for name, parameter in zip(some, parameters, strict=True)]
            key = xxhash.xxh3_64_hexdigest("\n".join(known_by).encode(errors="surrogatepass"))
            if not any(some) and path:
                key = f"{path}.param_groups.{number}"
            elif not any(some):
                alike.setdefault(key, set()).add(tuple(map(id, parameters)))
            keys[-1].append(key)
    return [["" if len(alike.get(key, ())) > 1 else key for key in some] for some in keys]


def match(here: Sequence[str], there: Sequence[str]) -> list[int | None]:
    """Return for each key of what is here the number of the one there that it is equal to; of what has no key, none.

    Of as many that are equal on both sides the first is matched with the first.
    """
    numbers: dict[str, list[int]] = {}
    for number, key in enumerate(there):
        numbers.setdefault(key, []).append(number)
    counts = Counter(here)
    is_known = {key: key and len(found) == counts[key] for key, found in numbers.items()}
    return [numbers[key].pop(0) if is_known.get(key) else None for key in here]
