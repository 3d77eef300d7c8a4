"""This file knows which forward passes of a loop still wait for their backward passes.

A loop of two networks may compute with one of them in a step of the other, and go back through that in the next step: DCGAN's
generator makes the critic's samples, then learns from them. Nothing may be loaded between the two: torch refuses to go back
through weights that have changed.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable

_OFTEN = 16
"""A module that computes two forward passes before a backward pass so often, once in so many steps, does so on purpose."""


class OpenGraphs:
    """The forward passes of this rank's modules without their backward passes. A module is any hashable that identifies it.

    `begins_again` is called if a module computes another one in the same step: the loop may have left the first one's batch out.
    Not if it does so often: a critic sees a real batch and a false one, but not in the generator's steps.
    """

    def __init__(self, begins_again: Callable[[], None]) -> None:
        self._begins_again = begins_again
        self._step = 0
        """How many steps have begun here."""
        self._opened: dict[Hashable, int] = {}
        """By module: in which of these its last forward pass was computed, if no backward pass has followed."""
        self._waited = self._has_closed = False
        """As gradients were cleared last, a backward pass was to come; and one has come since, of whatever module."""
        self._twice: dict[Hashable, int] = {}
        """By module: the last step in which it computed another one."""
        self._spans: dict[Hashable, bool] = {}
        """By module: whether a backward pass was seen to go back into the step before; False: it was only looked at there."""

    @property
    def is_open(self) -> bool:
        """Whether the loop may still go back through weights as they are here now. A module's stray look counts once at most,
        unless the loop goes back into the step before through other passes of that module."""
        return any(self._spans.get(module, True) for module in self._opened)

    def begins(self) -> None:
        """A step begins. What was computed before the last one is not gone back through any more."""
        for module, step in list(self._opened.items()):
            if step < self._step:
                self._was_look(module)
        self._step += 1

    def _was_look(self, module: Hashable) -> None:
        """No backward pass has followed a module's forward pass. Before the first step that says nothing about steps."""
        if self._opened.pop(module) > 0:
            self._spans.setdefault(module, False)

    def clears(self) -> None:
        """Gradients are cleared in the open step. A loop that does so before each backward pass has computed one since the last
        time; one that skips what overflows has not, and lets its forward passes go."""
        if self._waited and not self._has_closed:
            self._opened.clear()
        self._waited, self._has_closed = bool(self._opened), False

    def opens(self, module: Hashable) -> None:
        """A module computes a forward pass that a backward pass is to follow."""
        if self._opened.get(module) == self._step:
            if self._step - self._twice.get(module, -_OFTEN) >= _OFTEN:
                self._begins_again()
            self._twice[module] = self._step
        elif module in self._opened:
            self._was_look(module)
        self._opened[module] = self._step

    def closes(self, module: Hashable) -> None:
        """A backward pass goes through a module. On a thread of autograd's."""
        self._has_closed = True
        if self._opened.pop(module, self._step) < self._step:
            self._spans[module] = True
