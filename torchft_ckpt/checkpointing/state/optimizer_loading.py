"""Has optimizers load their state in the dtypes that it comes in.

PyTorch's `Optimizer.load_state_dict` casts every tensor of a parameter's state, but `step`, to the parameter's dtype. Most
state has it already. But NAdam's `mu_product` and ASGD's `eta` and `mu` are float32 whatever the parameter is, and so is the
state of optimizers that keep theirs more exactly than bfloat16 weights: loaded, it is not what was sent.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from itertools import chain
from typing import Any

import torch
from torch.optim import Optimizer


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
