"""DiLoCo and LocalSGD as their papers write them, for the plain loop (`plain.py`).

A group that did not contribute to a round takes its outcome and begins the next one as a new process would: from the global
parameters, with an inner optimizer that remembers nothing. If the script has registered state of its own, the group first makes
the rest of the iteration in which the others handed that out: the inner step in that changes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from idioms.plain import PlainManager
from torch import nn


class PlainOuterLoop:
    """A context manager, as the library's loops are.

    Args:
        manager: of this group.
        fragments: exchanged in turn.
        inner: each of its steps is an inner step.
        outers: one for each fragment, or none: then the parameters themselves are averaged.
        sync_every: inner steps in which each fragment is exchanged once.
        delay: inner steps from the beginning of an exchange to its end.
        alpha: how much of the local parameters stays.
        has_own_state: the script has registered some.
        key: under which the state is registered.
    """

    def __init__(
        self,
        manager: PlainManager,
        fragments: Sequence[nn.Module],
        inner: torch.optim.Optimizer,
        outers: Sequence[torch.optim.Optimizer],
        sync_every: int,
        *,
        delay: int = 0,
        alpha: float = 0.0,
        has_own_state: bool = False,
        key: str,
    ) -> None:
        self._manager = manager
        self._inner = inner
        self._outers = list(outers)
        self._period = sync_every // len(fragments)
        self._delay, self._alpha = delay, alpha
        self._has_own_state, self._num_to_follow = has_own_state, 0
        self._has_applied = False
        self._params = [dict(fragment.named_parameters()) for fragment in fragments]
        self._globals = [{name: param.detach().clone() for name, param in params.items()} for params in self._params]
        self._place = 0
        self._taken: list[torch.Tensor] = []
        manager.register_state_dict_fn(key, lambda _: None, self.state_dict)

    def state_dict(self) -> dict[str, Any]:
        return {
            "original_parameters": self._globals,
            "outer_optimizers": [optimizer.state_dict() for optimizer in dict.fromkeys(self._outers)],
        }

    def __enter__(self) -> PlainOuterLoop:
        self._hooks = [
            self._inner.register_step_pre_hook(lambda *_: self._before_inner_step()),
            self._inner.register_step_post_hook(lambda *_: self._after_inner_step()),
        ]
        return self

    def __exit__(self, *_: object) -> None:
        for hook in self._hooks:
            hook.remove()

    def round_counted(self) -> bool:
        counted, self._has_applied = self._has_applied, False
        return counted

    def restore_parameters(self) -> None:
        for fragment in range(len(self._params)):
            self._go_back(fragment)

    @property
    def _fragment(self) -> int:
        return self._manager.current_step() % len(self._params)

    def _trained(self, fragment: int) -> list[tuple[nn.Parameter, torch.Tensor]]:
        return [
            (param, self._globals[fragment][name])
            for name, param in self._params[fragment].items()
            if param.requires_grad
        ]

    @torch.no_grad()
    def _go_back(self, fragment: int) -> None:
        for name, param in self._params[fragment].items():
            param.copy_(self._globals[fragment][name])

    @torch.no_grad()
    def _take(self) -> None:
        trained = self._trained(self._fragment)
        self._taken = [whole - param if self._outers else param.clone() for param, whole in trained]

    def _before_inner_step(self) -> None:
        if self._num_to_follow:
            for group in self._inner.param_groups:
                for param in group["params"]:
                    param.grad = None

    def _after_inner_step(self) -> None:
        if self._num_to_follow:
            self._num_to_follow -= 1
            return
        self._place += 1
        if self._place == self._period - self._delay:
            self._take()
        if self._place < self._period:
            return
        self._place = 0
        while not self._manager.is_over:
            self._manager.start_quorum()
            contributes = self._manager.is_participating()
            for value in self._taken:
                self._manager.allreduce(value)
            fragment = self._fragment
            if self._manager.should_commit():
                self._apply(fragment)
                self._has_applied = True
                for scheduler in self._manager.outer_schedulers:
                    scheduler.step()
                if not contributes:
                    self.restore_parameters()
                    self._inner.state.clear()
                    self._num_to_follow = 1 + self._delay if self._has_own_state else 0
                return
            self._take()

    @torch.no_grad()
    def _apply(self, fragment: int) -> None:
        trained = self._trained(fragment)
        kept = [param.clone() for param, _ in trained]
        if not self._outers:
            for (param, whole), average in zip(trained, self._taken, strict=True):
                param.copy_(average)
                whole.copy_(average)
            return
        outer = self._outers[fragment]
        owned = [param for group in outer.param_groups for param in group["params"]]
        before = [param.grad for param in owned]
        for param in owned:
            param.grad = None
        self._go_back(fragment)
        for (param, _), average in zip(trained, self._taken, strict=True):
            param.grad = average
        outer.step()
        for param, gradient in zip(owned, before, strict=True):
            param.grad = gradient
        for (param, whole), local in zip(trained, kept, strict=True):
            whole.copy_(param)
            param.lerp_(local, self._alpha)
