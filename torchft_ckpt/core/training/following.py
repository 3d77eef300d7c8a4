"""This file decides what follows a step that counts: which call a learning-rate scheduler, or a gradient scaler, waits for.

Such a *follower* moves once for each step of its optimizer that counts, and its state travels with the optimizer's. So it must
have moved before that state is handed out, at the next `start_quorum`, or saved. Else a newcomer gets the weights of one
step with the learning rate of another, and an exception between two lines leaves one group's schedule behind for good.

    event                           its call is
    a step begins                   nothing to do: ignored
    the step is discarded           ignored
    the step counts                 refused until its optimizer has stepped; owed where no `Optimizer` wraps that one
    its optimizer has stepped       owed
    its optimizer skipped the step  ignored
    the call                        refused: a step that counts moves it once
    its state is loaded             ignored: optimizer and follower are those of one checkpoint
"""

from __future__ import annotations

from enum import Enum

from torchft_ckpt.errors import ConfigError

_OTHERWISE = (
    "What moves otherwise (once an epoch, in turns with another one) the Manager cannot follow: register it by"
    " register_state_dict_fn, and move it where optimizer.step() has returned True"
)


class Call(Enum):
    """What becomes of a follower's call now."""

    UNBEGUN = "no step has begun"
    IGNORED = "there is no step to follow"
    EARLY = "the step counts, and its optimizer has not taken it"
    OWED = "its optimizer has taken a step that counts"
    MADE = "it has followed this step"


class Follower:
    """One follower, from step to step."""

    def __init__(self, name: str, call: str, optimizer_call: str) -> None:
        self.name = name
        self._call = call
        self._optimizer_call = optimizer_call
        self.now = Call.UNBEGUN

    def begins(self) -> None:
        """A step begins. Raises `ConfigError` as `check`; then it has not begun."""
        self.check("the next step begins")
        self.now = Call.IGNORED

    def check(self, event: str) -> None:
        """See that nothing is owed.

        Raises:
            ConfigError: the call is owed.
        """
        if self.now is Call.OWED:
            raise ConfigError(
                f"{event}, and {self.name} has not followed the last step, which counts: call its {self._call}() after"
                f" {self._optimizer_call}, before the next zero_grad, start_quorum or save. {_OTHERWISE}",
                party=self.name,
            )

    def decided(self, *, counts: bool, is_wrapped: bool) -> None:
        """The step was decided. `is_wrapped`: an `Optimizer` steps its optimizer, and says so."""
        if not counts:
            self.now = Call.IGNORED
        else:
            self.now = Call.EARLY if is_wrapped else Call.OWED

    def optimizer_ended(self, *, has_stepped: bool) -> None:
        """Its optimizer has taken the step that counts, or has skipped it. Said again, it changes nothing."""
        if self.now is Call.EARLY:
            self.now = Call.OWED if has_stepped else Call.IGNORED

    def may_move(self) -> bool:
        """It is called: return whether it is to move. `moved` follows where it did, so one that raises on its way still owes it.

        Raises:
            ConfigError: a plain loop would move it, and here that would be wrong.
        """
        if self.now is Call.IGNORED:
            return False
        if self.now is Call.OWED:
            return True
        why = {
            Call.UNBEGUN: "before the first step: move it before it is given to the Manager, or load its state; call it after"
            f" {self._optimizer_call}",
            Call.EARLY: "in a step that counts and that its optimizer has not taken: call it after"
            f" {self._optimizer_call}, only where this optimizer steps, and step the Optimizer that wraps it, not the one in it",
            Call.MADE: f"a second time after one step that counts: it moves once for each. {_OTHERWISE}",
        }[self.now]
        raise ConfigError(f"{self._call}() of {self.name} is called {why}", party=self.name)

    def moved(self) -> None:
        """It has followed the step."""
        self.now = Call.MADE

    def loaded(self) -> None:
        """Its state is that of a checkpoint, or of another group, as its optimizer's is."""
        if self.now is not Call.UNBEGUN:
            self.now = Call.IGNORED
