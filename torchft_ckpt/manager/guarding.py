"""Calls something before and after each step of an optimizer, after it also where the step raises."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

import torch


def guard_steps(optimizer: torch.optim.Optimizer, before: Callable[[], None], after: Callable[[], None]) -> None:
    """Have `before` and `after` called around each step; `after` may be called when nothing was begun.

    By hooks, which everybody who steps the optimizer passes. Post-step hooks do not run where a step raises, so `step` is wrapped
    besides, as torch's learning-rate schedulers do it; wrapped again by these it stays what it is.
    """
    optimizer.register_step_pre_hook(lambda *_: before())
    optimizer.register_step_post_hook(lambda *_: after())
    step = optimizer.step

    @functools.wraps(step)
    def guarded(_: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        try:
            return step(*args, **kwargs)
        except BaseException:
            after()
            raise

    optimizer.step = types.MethodType(guarded, optimizer)  # type: ignore[method-assign]
