"""Calls something before and after each step of an optimizer, after it also where the step raises."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

import torch


def guard_steps(optimizer: torch.optim.Optimizer, before: Callable[[], None], after: Callable[[], None]) -> None:
    """Have `before` and `after` called around each step; `after` may be called when nothing was begun.

    By hooks, which everybody who steps the optimizer passes. Post-step hooks do not run where a step raises, and those that are
    registered later run after ours and may change parameters too. So `step` is wrapped besides, as torch's learning-rate
    schedulers do it, and `after` is called when all of them have run; wrapped again by schedulers it stays what it is.
    """
    is_wrapped = False
    optimizer.register_step_pre_hook(lambda *_: before())
    optimizer.register_step_post_hook(lambda *_: None if is_wrapped else after())
    step = optimizer.step

    @functools.wraps(step)
    def guarded(_: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        nonlocal is_wrapped
        is_wrapped = True
        try:
            return step(*args, **kwargs)
        finally:
            is_wrapped = False
            after()

    optimizer.step = types.MethodType(guarded, optimizer)  # type: ignore[method-assign]
