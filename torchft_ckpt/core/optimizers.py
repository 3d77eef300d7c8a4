"""This file decides which optimizers of a loop share a step, from the order in which they clear gradients and step.

The first `zero_grad` begins a step, that of another optimizer joins it while it is open, that of the same one begins the next.
All that share a step are stepped by one decision. Where a loop steps and clears one optimizer after the other, the first of them
clears before the last has stepped: the next step begins when the last one clears. One that steps again before that is refused.
"""

from __future__ import annotations

from collections.abc import Hashable


class SharedStep:
    """The optimizers that take part in the step that was begun last. An optimizer is any hashable that identifies it."""

    def __init__(self) -> None:
        self._joined: set[Hashable] = set()
        self._stepped: set[Hashable] = set()
        self._ahead: set[Hashable] = set()
        """Have cleared their gradients for the next step, which cannot begin until the others have stepped."""
        self._known: set[Hashable] = set()
        self.is_first_of_kind = False
        """The step was begun by one that has begun none before."""

    @property
    def is_half_taken(self) -> bool:
        """Some have cleared their gradients for the next step, and others have yet to take this one."""
        return bool(self._ahead)

    def clears(self, optimizer: Hashable, *, is_decided: bool) -> bool:
        """An optimizer clears its gradients. Return whether a step begins with that.

        `is_decided`: no step is open: the last one was decided, or there was none.
        """
        if not is_decided and self._joined and optimizer not in self._joined:
            self._joined.add(optimizer)
            return False
        if is_decided and optimizer in self._stepped and self._joined - self._stepped:
            self._ahead.add(optimizer)
            return False
        self.is_first_of_kind = optimizer not in self._known
        self._known.add(optimizer)
        self._joined = self._ahead | {optimizer}
        self._stepped, self._ahead = set(), set()
        return True

    def steps(self, optimizer: Hashable) -> bool:
        """An optimizer is about to step. False: it must not, as its step cannot begin before the others have taken this one."""
        if optimizer in self._ahead:
            return False
        self._stepped.add(optimizer)
        return True
