"""The optimizers of the user: guards their steps, and carries their settings to a replica that heals, learning rates above all.

A user's `state_dict` may return them stale: torchtitan 0.3.0 returns what they were when it cached them, a step before the
scheduler set the learning rate (https://github.com/pytorch/torchtitan/issues/4598). A replica that steps with that rate ends
unequal to its source, with equal gradients and equal moments. So they also travel as they are, and win.
"""

from __future__ import annotations

import functools
import logging
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch

from torchft_ckpt.checkpointing.state.optimizer_state import attributes_of, nested
from torchft_ckpt.checkpointing.state.parameters import match
from torchft_ckpt.core.coordination.messages import name_some
from torchft_ckpt.manager.comparing import same_tensor, value_in_words

logger = logging.getLogger(__name__)

Settings: TypeAlias = "list[list[dict[str, Any]]]"
"""Of each optimizer each parameter group's: plain values, and tensors of one element."""
NO_SETTINGS = ("params", "param_names")


def with_inner(optimizers: Iterable[torch.optim.Optimizer]) -> list[torch.optim.Optimizer]:
    """Return optimizers and those that they hold in an attribute, or in a container there; each once.

    torchtitan's and others step several optimizers as one, whose own groups hold the parameters and no more.
    """
    found: dict[int, torch.optim.Optimizer] = {}
    waiting = list(optimizers)[::-1]
    while waiting:
        optimizer = waiting.pop()
        if id(optimizer) not in found:
            found[id(optimizer)] = optimizer
            attributes = attributes_of(optimizer).values()
            held = [value for value in attributes if not isinstance(value, set | frozenset)]  # those have no order
            inner = [item for value in held for item in nested(value, 1) if isinstance(item, torch.optim.Optimizer)]
            waiting += inner[::-1]
    return list(found.values())


def settings_of(optimizers: Iterable[torch.optim.Optimizer]) -> Settings:
    """Return the settings of now; what a scheduler changes later does not appear in them."""
    return [
        [
            {key: _kept(value) for key, value in group.items() if key not in NO_SETTINGS and _travels(value)}
            for group in optimizer.param_groups
        ]
        for optimizer in optimizers
    ]


def _travels(value: object) -> bool:
    return value.numel() == 1 if isinstance(value, torch.Tensor) else value_in_words(value) is not None


def _kept(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    return value.item() if isinstance(value, np.generic) else value


def take_settings(
    optimizers: Sequence[torch.optim.Optimizer],
    settings: object,
    *,
    here: Sequence[Sequence[str]],
    there: object,
) -> list[str]:
    """Give optimizers the settings of others. On the training thread.

    Args:
        optimizers: of this replica.
        settings: as `settings_of` returned them there; what does not fit the optimizers is left alone.
        here, there: of each optimizer's groups, which parameters they have (`parameters.group_keys`); a group is set as the one
            there that has the same, and if there is none that is said.

    Returns:
        What differed, for people.
    """
    names = [[f"optimizer {n}.param_groups.{m}" for m in range(len(o.param_groups))] for n, o in enumerate(optimizers)]
    theirs = [groups if isinstance(groups, list) else [] for groups in settings] if isinstance(settings, list) else []
    found = [group for groups in theirs for group in groups]
    mine = [group for optimizer in optimizers for group in optimizer.param_groups]
    said: list[str] = []
    unmatched: list[str] = []
    flat = [name for some in names for name in some]
    for name, group, number in zip(flat, mine, match(_flat(here, len(mine)), _flat(there, len(found))), strict=True):
        if number is None:
            unmatched.append(name)
            continue
        for key, value in found[number].items() if isinstance(found[number], Mapping) else ():
            if key in group and key not in NO_SETTINGS and not _is_same(group[key], value):
                said.append(f"{name}.{key}: {group[key]!r}, at the source {value!r}")
                set_value(group, key, value)
    if unmatched and found:
        logger.warning(
            "the source has no settings for the parameters of %s, or which ones it has them for is not known: they are set as"
            " load_state_dict has set them",
            name_some(unmatched),
        )
    return said


def _flat(keys: object, count: int) -> list[str]:
    """Return keys of so many groups; if these are others, of none it is known which parameters it has."""
    flat = [key for some in keys if isinstance(some, list) for key in some] if isinstance(keys, list) else []
    return flat if len(flat) == count and all(isinstance(key, str) for key in flat) else [""] * count


def _is_same(here: object, there: object) -> bool:
    if isinstance(here, torch.Tensor) and isinstance(there, torch.Tensor):
        return same_tensor(here, there)
    return value_in_words(here) == value_in_words(there)


def set_value(group: dict[str, Any], key: str, value: Any) -> None:
    """Set a setting of a parameter group; one that is a tensor stays that tensor."""
    here = group[key]
    if isinstance(here, torch.Tensor):
        with torch.no_grad():  # a captured graph reads this memory
            here.fill_(value.item() if isinstance(value, torch.Tensor) else value)
    else:
        group[key] = value.item() if isinstance(value, torch.Tensor) else value


def guard_steps(
    optimizer: torch.optim.Optimizer,
    before: Callable[[], None],
    after: Callable[[], None],
    *,
    ended: Callable[[], None] = lambda: None,
) -> None:
    """Have `before` and `after` called around each step; `after` may be called when nothing was begun, `ended` is called at last
    where the step has not raised.

    By hooks, which everybody who steps the optimizer passes. Post-step hooks do not run where a step raises, and those that are
    registered later run after ours and may change parameters too. So `step` is wrapped besides, as torch's learning-rate
    schedulers do it, and `after` is called when all of them have run; wrapped again by schedulers it stays what it is.
    """

    def leave() -> None:
        after()
        ended()

    is_wrapped = False
    optimizer.register_step_pre_hook(lambda *_: before())
    optimizer.register_step_post_hook(lambda *_: None if is_wrapped else leave())
    step = optimizer.step

    @functools.wraps(step)
    def guarded(_: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        nonlocal is_wrapped
        is_wrapped = True
        try:
            result = step(*args, **kwargs)
        finally:
            is_wrapped = False
            after()
        ended()
        return result

    optimizer.step = types.MethodType(guarded, optimizer)  # type: ignore[method-assign]
