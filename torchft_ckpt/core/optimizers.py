"""This file decides which optimizers of a loop share a step, from the order in which they clear gradients and step.

The first `zero_grad` begins a step, that of another optimizer joins it while it is open, that of the same one begins the next.
All that share a step are stepped by one decision. Where a loop steps and clears one optimizer after the other, the first of them
clears before the last has stepped: the next step then begins when the last one clears, or when something is averaged.
"""

from __future__ import annotations

from collections.abc import Hashable


class SharedStep:
    """Who takes part in the step that was begun last. Optimizers are known by what is equal for the same one only."""

    def __init__(self) -> None:
        self._joined: set[Hashable] = set()
        self._stepped: set[Hashable] = set()
        self._ahead: set[Hashable] = set()
        """Have cleared their gradients for the next step, which others keep from beginning: they have yet to take this one."""

    @property
    def is_due(self) -> bool:
        """The next step has to begin before anything is averaged, or one of those that are ahead steps."""
        return bool(self._ahead)

    def clears(self, optimizer: Hashable, *, is_decided: bool) -> bool:
        """An optimizer clears its gradients. Return whether a step begins with that.

        Args:
            optimizer: who.
            is_decided: no step is open: the last one was decided, or there was none.
        """
        if not is_decided and self._joined and optimizer not in self._joined:
            self._joined.add(optimizer)
            return False
        if is_decided and optimizer in self._stepped and self._joined - self._stepped:
            self._ahead.add(optimizer)
            return False
        self._joined = self._ahead | {optimizer}
        self._stepped, self._ahead = set(), set()
        return True

    def begins(self) -> None:
        """The step that is due begins."""
        self._joined, self._stepped, self._ahead = self._ahead, set(), set()

    def steps(self, optimizer: Hashable) -> bool:
        """An optimizer is about to step. Return whether the step that it takes has yet to begin (`begins`)."""
        is_early = optimizer in self._ahead
        if is_early:
            self.begins()
        self._stepped.add(optimizer)
        return is_early
