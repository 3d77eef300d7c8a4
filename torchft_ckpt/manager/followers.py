"""Learning-rate schedulers and gradient scalers that move where a step counts: `Manager.scheduler`, `Manager.grad_scaler`.

The user's object stays what it is, and gets a class of its own, as torch's `fully_shard` does it with modules. In that class the
calls that move it ask `core.training.following` first. An attribute in place of a method would be in what `state_dict` returns,
which is all attributes. All of it belongs to the training thread.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from torchft_ckpt.core.training.following import Call, Follower
from torchft_ckpt.errors import ConfigError
from torchft_ckpt.manager.optimizer_settings import with_inner
from torchft_ckpt.manager.state_registry import StateRegistry

S = TypeVar("S", bound=LRScheduler)
G = TypeVar("G", bound=torch.amp.GradScaler)


class Followers:
    """All followers of a Manager.

    Args:
        registry: where their state is registered, each under its name.
    """

    def __init__(self, registry: StateRegistry) -> None:
        self._registry = registry
        self._wrapped: list[torch.optim.Optimizer] = []
        self._schedulers: dict[str, tuple[Follower, LRScheduler]] = {}
        self._outer: dict[str, tuple[Follower, LRScheduler]] = {}
        """Of outer optimizers: they move with the rounds of these, and a script calls them in vain."""
        self._scalers: list[Follower] = []
        self.scalers: list[torch.amp.GradScaler] = []
        self.is_scaler_stepping = False

    def wraps(self, optimizer: torch.optim.Optimizer) -> None:
        """An `Optimizer` wraps this one, and will say when it steps."""
        self._wrapped.append(optimizer)

    def scheduler(self, scheduler: S, name: str) -> S:
        """See `Manager.scheduler`."""
        if isinstance(getattr(scheduler, "scheduler", None), LRScheduler) and not isinstance(scheduler, LRScheduler):
            raise ConfigError(
                f"{type(scheduler).__name__} wraps a scheduler of torch, in its attribute `scheduler`: give that one, and"
                " call its step() once after each optimizer.step(), not the wrapper's (accelerate's calls it once for each"
                " process)",
                party="scheduler",
            )
        if not isinstance(scheduler, LRScheduler):
            raise ConfigError(
                f"{type(scheduler).__name__} is no LRScheduler of torch: register it by register_state_dict_fn, and step it where"
                " optimizer.step() has returned True",
                party="scheduler",
            )
        self._register(scheduler, name)
        follower = Follower(f"the scheduler {name!r}", "step", "optimizer.step()")
        plain = type(scheduler)

        def step(this: LRScheduler, *args: Any, **kwargs: Any) -> None:
            if follower.may_move():
                plain.step(this, *args, **kwargs)
                follower.moved()

        _give_class(scheduler, follower, step=step)
        self._schedulers[name] = follower, scheduler
        self.find_outer()
        return scheduler

    def find_outer(self) -> None:
        """An outer loop may be there now: find the schedulers of its optimizers. Raises `ConfigError` if one needs a metric."""
        for name, (follower, scheduler) in list(self._schedulers.items()):
            if not any(_is_of(scheduler, outer) for outer in self._registry.outer_optimizers):
                continue
            if isinstance(scheduler, ReduceLROnPlateau):
                raise ConfigError(
                    f"{follower.name} needs a metric, and a scheduler of an outer optimizer moves within the round: register it"
                    " by register_state_dict_fn, and step it where the loop's round_counted() is True",
                    party=follower.name,
                )
            self._outer[name] = self._schedulers.pop(name)
            self._registry.agree_on(name)
            follower.now = Call.IGNORED

    def grad_scaler(self, scaler: G, name: str) -> G:
        """See `Manager.grad_scaler`."""
        if not isinstance(scaler, torch.amp.GradScaler):
            raise ConfigError(f"{type(scaler).__name__} is no torch.amp.GradScaler", party="grad_scaler")
        self._register(scaler, name)
        if not scaler.is_enabled():
            return scaler
        follower = Follower(f"the gradient scaler {name!r}", "update", "scaler.step(optimizer)")
        plain = type(scaler)

        def refuse_inner(optimizer: Any) -> None:
            if any(optimizer is wrapped for wrapped in self._wrapped):
                raise ConfigError(
                    f"{follower.name} is given an optimizer that an Optimizer wraps: give unscale_ and step that Optimizer, or"
                    " the gradients are unscaled twice, or stepped without a vote",
                    party=follower.name,
                )

        def unscale(this: Any, optimizer: Any) -> None:
            refuse_inner(optimizer)
            plain.unscale_(this, optimizer)

        def step(this: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            refuse_inner(optimizer)
            self.is_scaler_stepping = True
            try:
                has_stepped = plain.step(this, optimizer, *args, **kwargs)
            finally:
                self.is_scaler_stepping = False
            counts = has_stepped
            if has_stepped is None and hasattr(optimizer, "skip_step"):
                # It has found an overflow, and did not call `optimizer.step`. Where a collective failed other groups may have
                # found none: the vote says whether all have.
                has_stepped, counts = False, optimizer.skip_step()
            if counts or not hasattr(optimizer, "skip_step"):  # of a loop that has voted itself
                follower.optimizer_ended(has_stepped=True)
            return has_stepped

        def update(this: Any, new_scale: Any = None) -> None:
            if follower.may_move():
                plain.update(this, new_scale)
                follower.moved()
            else:  # given the scale that it has, it forgets what it found in the gradients, and its count of steps stays
                plain.update(this, this.get_scale())

        _give_class(scaler, follower, unscale_=unscale, step=step, update=update)
        self._scalers.append(follower)
        self.scalers.append(scaler)
        return scaler

    def _register(self, follows: LRScheduler | torch.amp.GradScaler, name: str) -> None:
        if isinstance(follows, _Following):
            raise ConfigError(f"this {type(follows).__name__} follows a Manager already", party=type(follows).__name__)
        # Looked up when they are called: the object gets a class of its own below.
        self._registry.register(name, lambda state: follows.load_state_dict(state), lambda: follows.state_dict())

    def _all(self) -> list[Follower]:
        return [follower for follower, _ in self._schedulers.values()] + self._scalers

    def begins(self, *, is_torn: bool) -> None:
        """A step begins. Raises `ConfigError` where something is owed, or where groups train apart.

        `is_torn`: the state that is here, the followers' too, gives way to another one.
        """
        if self._all() and self._registry.trains_apart:
            raise ConfigError(
                "the steps of the Manager are rounds of DiLoCo or LocalSGD, which Manager.scheduler follows for outer optimizers"
                " alone: step the scheduler of an inner optimizer yourself, or set its learning rate from manager.current_step()",
                party=self._all()[0].name,
            )
        if is_torn:
            self.forget()
        for follower in self._all():
            follower.begins()

    def check(self, event: str) -> None:
        """Raise `ConfigError` where something is owed before an event, given as a clause."""
        for follower in self._all():
            follower.check(event)

    def decided(self, *, counts: bool) -> None:
        """The open step was decided."""
        for follower, scheduler in self._schedulers.values():
            follower.decided(counts=counts, is_wrapped=any(_is_of(scheduler, wrapped) for wrapped in self._wrapped))
        for follower in self._scalers:
            follower.decided(counts=counts, is_wrapped=True)

    def optimizer_ended(self, optimizer: torch.optim.Optimizer, *, has_stepped: bool) -> None:
        """A wrapped or outer optimizer has taken the step that counts, or skipped it."""
        for follower, scheduler in self._outer.values():
            if _is_of(scheduler, optimizer):
                follower.now = Call.OWED
                scheduler.step()
                follower.now = Call.IGNORED
        for follower, scheduler in self._schedulers.values():
            if _is_of(scheduler, optimizer):
                follower.optimizer_ended(has_stepped=has_stepped)

    def forget(self) -> None:
        """The state that is here is another one now, or will be."""
        for follower in self._all():
            follower.loaded()


def _is_of(scheduler: LRScheduler, wrapped: torch.optim.Optimizer) -> bool:
    """Whether a scheduler moves what an `Optimizer` wraps, or a part of it; it may have been made of the `Optimizer` itself."""
    its_own = scheduler.optimizer
    return any(its_own is inner for inner in with_inner([wrapped])) or any(
        wrapped is inner for inner in with_inner([its_own])
    )


class _Following:
    """Marks the classes that `_give_class` makes."""


def _give_class(follows: Any, follower: Follower, **methods: Callable[..., Any]) -> None:
    """Give an object a class of its own, under the name of its class, with these methods in place of its own.

    A copy, and what is unpickled, is of the plain class: it follows nothing.
    """
    plain: Any = type(follows)

    def load_state_dict(this: Any, *args: Any, **kwargs: Any) -> Any:
        loaded = plain.load_state_dict(this, *args, **kwargs)
        follower.loaded()
        return loaded

    def reduce(this: Any, _: Any) -> Any:
        # By protocol 1, as pickle refuses the later ones' `__newobj__` for another class than the object's.
        reduced = plain.__reduce_ex__(this, 1)
        if isinstance(reduced, str):  # the name of something global
            return reduced
        make, arguments, *rest = reduced
        return (make, tuple(plain if argument is type(this) else argument for argument in arguments), *rest)

    body = {
        **methods,
        "load_state_dict": load_state_dict,
        "__reduce_ex__": reduce,
        "__module__": plain.__module__,
        "__doc__": plain.__doc__,
        "__qualname__": plain.__qualname__,
    }
    follows.__class__ = type(plain.__name__, (plain, _Following), body)
