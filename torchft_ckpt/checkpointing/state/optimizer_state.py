"""The state of optimizers: one that has not stepped yet is given the state that it will have, for as long as a template of it is
captured; and what is loaded keeps the dtypes that it comes in.

Most optimizers make their state in their first step. A replica that comes in has none yet, so nothing here says which tensors,
of which dtype, on which mesh, the received ones are to become. PyTorch's `get_optimizer_state_dict` finds out by running
`optim.step()`: hooks fire, counters move, and with a manager's hooks a lock is taken.

Here a *twin* steps: a copy of the optimizer without hooks, that owns one stand-in for a parameter, of zeros. What state it made
for the stand-in has the structure that the parameter's will have. One parameter at a time, so at most a few times the memory
of the largest is there beside the state itself. PyTorch's own optimizers step a stand-in on the meta device where they can,
and memory is only reserved: touching a gigabyte of fresh memory takes longer than receiving it.

Nothing travels: collectives that a step of a sharded tensor would do (norms, the matrix products of Muon) return zeros of the
right shape, because the other ranks need not be here at this moment.

PyTorch's `Optimizer.load_state_dict` casts every tensor of a parameter's state, but `step`, to the parameter's dtype. Most
state has it already. But NAdam's `mu_product` and ASGD's `eta` and `mu` are float32 whatever the parameter is, and so is the
state of optimizers that keep theirs more exactly than bfloat16 weights: loaded, it is not what was sent.
"""

from __future__ import annotations

import copy
import logging
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from itertools import chain
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim import optimizer as torch_optimizer
from torch.utils._python_dispatch import TorchDispatchMode

logger = logging.getLogger(__name__)

State = dict[str, Any]

_SCAN_DEPTH = 3


@contextmanager
def with_optimizer_state(
    optimizers: Iterable[Optimizer], *, also_frozen: bool = False, creates: bool = True
) -> Iterator[None]:
    """While open, parameters that require grad and have no state in their optimizer have one of the right structure.

    A `state_dict()` captured meanwhile has the keys, types, shapes, strides, dtypes, devices and placements that it has after
    a step; the values of what was created mean nothing, memory may be as it was found. State that is there already stays.
    Afterwards each optimizer is as before: the created tensors live on only in what was captured.

    No step of the optimizers runs, so none of their hooks and no global ones; no parameter, gradient, group or learning rate
    changes; no random numbers are consumed; no collective is issued. PyTorch's `get_optimizer_state_dict` does not step them
    either, in spite of a state that is empty. An optimizer for which that cannot be done (its step needs a closure or sparse
    gradients, or it wraps another optimizer) keeps the state that it has, with a line in the log.

    Call it on the thread that steps the optimizers. It may be nested.

    Args:
        optimizers: of any class; one that is there twice is taken once.
        also_frozen: also parameters that are frozen now: the state that arrives is of a step at which others train them. It takes
            memory for each of them.
        creates: False: nothing is made; `get_optimizer_state_dict` only does not step what has no state.
    """
    opened: list[tuple[Optimizer, Any, _Filled]] = []
    try:
        for optimizer in optimizers:
            state = optimizer.state
            if isinstance(state, _Filled):
                continue
            filled = _Filled(state, _state_to_come(optimizer, also_frozen) if creates else {})
            try:
                optimizer.state = filled
            except AttributeError as error:  # a property
                logger.info("%s is left without state: %s", type(optimizer).__name__, error)
                continue
            opened.append((optimizer, state, filled))
        yield
    finally:
        for optimizer, state, filled in reversed(opened):
            if optimizer.state is filled:  # else something was loaded meanwhile
                optimizer.state = state


class _Filled(defaultdict[Any, Any]):
    """Stands in for `Optimizer.state`. It is true even if it is empty: PyTorch steps an optimizer whose state is false."""

    def __init__(self, state: dict[Any, Any], created: dict[Any, Any]) -> None:
        super().__init__(dict, {**state, **created})

    def __bool__(self) -> bool:
        return True


def _state_to_come(optimizer: Optimizer, also_frozen: bool) -> dict[torch.Tensor, State]:
    name = type(optimizer).__name__
    wanting = [
        (group, parameter)
        for group in optimizer.param_groups
        for parameter in group["params"]
        if (parameter.requires_grad or (also_frozen and (parameter.is_floating_point() or parameter.is_complex())))
        and parameter not in optimizer.state
    ]
    if not wanting:
        return {}
    obstacle = _obstacle(optimizer)
    if obstacle:
        logger.info("%s is left without state: %s", name, obstacle)
        return {}
    created: dict[torch.Tensor, State] = {}
    try:
        with torch.no_grad(), _random_numbers_kept(parameter for _, parameter in wanting):
            for group, parameter in wanting:
                state = _state_of_one(optimizer, group, parameter)
                if state is not None:
                    created[parameter] = state
    except Exception as error:  # noqa: BLE001 - whatever a step raises: this optimizer's state cannot be foreseen
        reason = next(iter(str(error).splitlines()), "")
        logger.info("%s is left without state: %s: %s", name, type(error).__name__, reason)
        return {}
    return created


def foreseen_state(optimizer: object, group: dict[str, Any], parameter: torch.Tensor) -> State:
    """Return the state that a step makes for a parameter, as far as it can be foreseen; its values mean nothing."""
    if not isinstance(optimizer, Optimizer) or _obstacle(optimizer):
        return {}
    try:
        with torch.no_grad(), _random_numbers_kept([parameter]):
            return _state_of_one(optimizer, group, parameter) or {}
    except Exception as error:  # noqa: BLE001 - whatever a step raises: its state cannot be foreseen
        logger.debug("the state of %s is not foreseen: %s", type(optimizer).__name__, error)
        return {}


def _obstacle(optimizer: Optimizer) -> str:
    """Return why a twin would not be on its own, or an empty string."""
    parameters = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    for name, value in attributes_of(optimizer).items():
        if any(isinstance(item, Optimizer) or id(item) in parameters for item in nested(value, _SCAN_DEPTH)):
            return f"its attribute {name!r} holds another optimizer or parameters, which a copy would share"
    hooks = torch_optimizer._global_optimizer_pre_hooks or torch_optimizer._global_optimizer_post_hooks
    if hooks and sum("step" in vars(kind) for kind in type(optimizer).__mro__ if kind is not Optimizer) > 1:
        return "its step may call that of a base class, where the global hooks would run"
    return ""


def attributes_of(optimizer: Optimizer) -> dict[str, Any]:
    """Return what an optimizer holds besides its state and its groups, by name."""
    return {name: value for name, value in vars(optimizer).items() if name not in ("state", "param_groups")}


def nested(value: object, depth: int) -> Iterator[object]:
    """Yield a value and what is in it and its containers, so many levels deep: mappings with their keys, lists, tuples, sets."""
    yield value
    if depth and isinstance(value, Mapping):
        value = [item for pair in value.items() for item in pair]
    if depth and isinstance(value, list | tuple | set | frozenset):
        for item in value:
            yield from nested(item, depth - 1)


def _unhooked_step(optimizer: Optimizer) -> Callable[[Optimizer], Any]:
    step: Any = type(optimizer).step
    while getattr(step, "hooked", False):
        step = step.__wrapped__
    return step


def _state_of_one(optimizer: Optimizer, group: dict[str, Any], parameter: torch.Tensor) -> State | None:
    if type(optimizer).__module__.startswith("torch.optim."):
        try:
            state = _after_first_step(optimizer, group, torch.zeros_like(parameter, requires_grad=False, device="meta"))
        except (RuntimeError, AssertionError, NotImplementedError, IndexError, ValueError) as error:
            logger.debug("%s wants real tensors: %s", type(optimizer).__name__, error)
        else:
            return state and {name: _made_real(value, parameter.device) for name, value in state.items()}
    return _after_first_step(optimizer, group, torch.zeros_like(parameter, requires_grad=False))


def _after_first_step(optimizer: Optimizer, group: dict[str, Any], stand_in: torch.Tensor) -> State | None:
    """Return the state that a twin of the optimizer has for its only parameter after one step; None if there is none."""
    stand_in.grad = torch.zeros_like(stand_in)
    attributes = vars(optimizer)
    hooks: dict[str, Any] = {name: OrderedDict() for name in attributes if name.endswith("_hooks")}
    settings = copy.deepcopy({key: value for key, value in group.items() if key not in ("params", "param_names")})
    twin = object.__new__(type(optimizer))
    twin.__dict__.update({name: value for name, value in attributes.items() if name != "step"})  # that is a scheduler's
    twin.__dict__.update(hooks, state=defaultdict(dict), param_groups=[{"params": [stand_in], **settings}])
    with _NothingTravels() if isinstance(stand_in, DTensor) else nullcontext():
        _unhooked_step(optimizer)(twin)
    return twin.state.get(stand_in)


def _made_real(value: Any, device: torch.device) -> Any:
    return torch.empty_like(value, device=device) if isinstance(value, torch.Tensor) and value.is_meta else value


@contextmanager
def _random_numbers_kept(parameters: Iterable[torch.Tensor]) -> Iterator[None]:
    devices = {parameter.device for parameter in parameters if parameter.device.type != "cpu"}
    kinds = {device.type for device in devices}
    if len(kinds) > 1:
        raise ValueError(f"parameters on several kinds of accelerator: {sorted(kinds)}")
    with torch.random.fork_rng(
        [device.index for device in devices if device.index is not None], device_type=next(iter(kinds), "cuda")
    ):
        yield


class _NothingTravels(TorchDispatchMode):
    """Collectives of DTensors return at once, with zeros of the shape that they have."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # it becomes operations on local tensors first, which come here
        if func.namespace == "_c10d_functional":
            return _result_of(func.overloadpacket.__name__, args)
        if func.namespace == "c10d":
            raise NotImplementedError(f"its step communicates ({func})")
        return func(*args, **(kwargs or {}))


def _result_of(collective: str, args: tuple[Any, ...]) -> torch.Tensor:
    """Return zeros of the shape that a functional collective returns on this rank."""
    tensor: torch.Tensor = args[0]
    shape = list(tensor.shape)
    if collective == "all_gather_into_tensor":
        shape[0] *= args[1]
    elif collective == "reduce_scatter_tensor":
        shape[0] //= args[2]
    elif collective == "all_to_all_single":
        shape[0] = sum(args[1])
    elif collective in ("wait_tensor", "_wrap_tensor_autograd"):
        return tensor
    elif collective not in ("all_reduce", "broadcast"):
        raise NotImplementedError(f"its step communicates ({collective})")
    return tensor.new_zeros(shape)


# Loading


@contextmanager
def dtypes_kept(optimizers: Iterable[Optimizer]) -> Iterator[None]:
    """While open, what these optimizers load has the dtypes that it is loaded with.

    It holds for every `load_state_dict` that calls torch's; hooks of others run before. What is changed is replaced by what was
    handed in, on the device that torch chose; nothing else is touched.

    Args:
        optimizers: of any class; what is no torch optimizer is left alone.
    """
    with ExitStack() as hooks:
        for optimizer in {
            id(optimizer): optimizer for optimizer in optimizers if isinstance(optimizer, Optimizer)
        }.values():
            given: list[Mapping[str, Any]] = []

            def note(_: Optimizer, state_dict: dict[str, Any], given: list[Mapping[str, Any]] = given) -> None:
                given[:] = [state_dict]

            def undo(loaded: Optimizer, given: list[Mapping[str, Any]] = given) -> None:
                _take_dtypes(loaded, given.pop())

            hooks.callback(optimizer.register_load_state_dict_pre_hook(note).remove)
            hooks.callback(optimizer.register_load_state_dict_post_hook(undo).remove)
        yield


def _take_dtypes(optimizer: Optimizer, given: Mapping[str, Any]) -> None:
    saved = chain.from_iterable(group["params"] for group in given["param_groups"])
    parameters = chain.from_iterable(group["params"] for group in optimizer.param_groups)
    for key, parameter in zip(saved, parameters, strict=True):
        if key in given["state"] and parameter in optimizer.state:
            optimizer.state[parameter] = _as_given(given["state"][key], optimizer.state[parameter])


def _as_given(given: Any, loaded: Any) -> Any:
    """Return what was loaded, with what was given wherever that has another dtype."""
    if isinstance(given, torch.Tensor) and isinstance(loaded, torch.Tensor):
        return given.detach().to(loaded.device) if given.dtype != loaded.dtype else loaded
    if isinstance(given, dict) and isinstance(loaded, dict):
        for key in given.keys() & loaded.keys():
            loaded[key] = _as_given(given[key], loaded[key])
    elif type(given) is type(loaded) and type(loaded) in (list, tuple) and len(given) == len(loaded):
        return type(loaded)(_as_given(one, other) for one, other in zip(given, loaded, strict=True))
    return loaded
