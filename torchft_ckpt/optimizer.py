"""The optimizer of a fault-tolerant loop: `zero_grad` begins a step, `step` ends it and steps only what counts."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from torchft_ckpt.errors import ConfigError

if TYPE_CHECKING:
    from torchft_ckpt.manager import Manager


class OptimizerWrapper(Optimizer):
    """Wraps any optimizer, under the name and with the methods of torchft's wrapper.

    Call `zero_grad` before the forward pass and `step` after the backward pass. While the wrapped optimizer steps, the
    write lock of the manager's state is held, and given back also if the step raises.

    A loop may wrap several with one manager. They share a step, and its one decision, where all backward passes come before the
    first `step`. One whose `zero_grad` comes after the others' `step` has a step of its own.

    Learning-rate schedulers and whatever else takes an optimizer takes this one. Hooks are the wrapped optimizer's: they get that
    one, and step hooks run where the step counts. It is not copied or pickled; its state dict is that of the wrapped one.

    Args:
        manager: of this rank.
        optim: the optimizer; hooks are attached to it, so stepping it directly is safe as well.
    """

    def __init__(self, manager: Manager, optim: Optimizer) -> None:
        self.optim = optim
        self.manager = manager
        self._calls_closure = _calls_closure(type(optim))
        manager.guard_optimizer(optim)
        manager.hooks.wraps_optimizer(optim)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        self.optim.add_param_group(param_group)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.optim.load_state_dict(state_dict)

    def state_dict(self) -> dict[str, Any]:
        return self.optim.state_dict()

    @torch.compiler.disable
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Begin a step, unless one is open in which nothing has happened (`Manager.start_quorum`); then clear the gradients.

        It joins a step that another wrapped optimizer has begun and nobody has decided. In a state dict function, clear them and
        no more.
        """
        if not self.manager.hooks.is_in_state_dict_fn and self.manager.hooks.begins_step(self.optim):
            self.manager.hooks.clears_gradients()
        self.optim.zero_grad(set_to_none)

    @torch.compiler.disable
    def step(self, closure: Callable[[], object] | None = None) -> bool:
        """End the step; step the wrapped optimizer if it counts. In a state dict function, step it and no more.

        A closure is called once, before the vote and outside of the write lock: it computes gradients as the lines before this
        call do, and may call `zero_grad` first. The wrapped optimizer gets none, and what it returns is lost.

        What belongs to a step that counts, an average of the weights say, is one line: `if optimizer.step(): ...`.

        Returns:
            whether the step counts, and the wrapped optimizer has taken it. False in a state dict function: torch steps there to
            make state, and nothing was trained.

        If the wrapped optimizer raises, the step is committed for the others and half done here: who catches the error
        and goes on loads theirs before it is in a quorum again.

        Raises:
            ConfigError: the wrapped optimizer calls the closure itself, as LBFGS does, which would be after the vote.
            Also as `Manager.should_commit`, and what the closure or the wrapped optimizer raises.
        """
        if self._calls_closure:
            name = type(self.optim).__name__
            raise ConfigError(f"{name} calls its closure itself, after the vote: it cannot be used", party=name)
        if closure is not None and self.manager.hooks.computes_by_microbatches:
            raise ConfigError("a closure computes gradients after StepLoader has summed them", party="closure")
        if closure is not None:
            with torch.enable_grad():
                closure()
        if self.manager.hooks.is_in_state_dict_fn:
            self.optim.step()  # as torch's get_optimizer_state_dict does, to make state
            return False
        self.manager.hooks.takes_step(self.optim)
        with self.manager.taking_step(self.optim):
            if not self.manager.should_commit():
                return False
            self.optim.step()
            self.manager.hooks.took_step(self.optim)
        return True

    @torch.compiler.disable
    def skip_step(self) -> bool:
        """End the step as `step` does, and leave the weights as they are: for averaged gradients that are of no use.

        All groups find that alike. A scaler of `Manager.grad_scaler` calls it where they have overflowed. Schedulers do not
        follow such a step.

        Returns:
            whether the step counts.

        Raises: as `Manager.should_commit`.
        """
        self.manager.hooks.takes_step(self.optim)
        counts = self.manager.should_commit()
        if counts:
            self.manager.hooks.took_step(self.optim, has_stepped=False)
        return counts

    def register_step_pre_hook(self, hook: Callable[..., Any]) -> RemovableHandle:
        return self.optim.register_step_pre_hook(hook)

    def register_step_post_hook(self, hook: Callable[..., None]) -> RemovableHandle:
        return self.optim.register_step_post_hook(hook)

    def register_state_dict_pre_hook(self, hook: Callable[..., None], prepend: bool = False) -> RemovableHandle:
        return self.optim.register_state_dict_pre_hook(hook, prepend)

    def register_state_dict_post_hook(self, hook: Callable[..., Any], prepend: bool = False) -> RemovableHandle:
        return self.optim.register_state_dict_post_hook(hook, prepend)

    def register_load_state_dict_pre_hook(self, hook: Callable[..., Any], prepend: bool = False) -> RemovableHandle:
        return self.optim.register_load_state_dict_pre_hook(hook, prepend)

    def register_load_state_dict_post_hook(self, hook: Callable[..., None], prepend: bool = False) -> RemovableHandle:
        return self.optim.register_load_state_dict_post_hook(hook, prepend)

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        return self.optim.defaults

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        return self.optim.param_groups

    @property
    def state(self) -> Mapping[torch.Tensor, Any]:  # type: ignore[override]
        return self.optim.state

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """A `GradScaler` asks for it as it steps: no."""
        self.manager.hooks.check_scaler()
        return False

    def __repr__(self) -> str:
        return f"OptimizerWrapper({self.optim!r})"

    def __getstate__(self) -> NoReturn:
        message = (
            "Optimizer is not copied or pickled: it begins and ends the steps of this process's Manager, and two of them"
            " would do so twice; copy or save its `state_dict()`, or the optimizer in it, `optim`"
        )
        raise ConfigError(message, party="Optimizer")


def _calls_closure(kind: type[Optimizer]) -> bool:
    """Whether optimizers cannot step without a closure: they evaluate it in `step`, perhaps several times."""
    parameter = inspect.signature(kind.step).parameters.get("closure")
    is_required = parameter is not None and parameter.default is parameter.empty
    return is_required or issubclass(kind, torch.optim.LBFGS)
