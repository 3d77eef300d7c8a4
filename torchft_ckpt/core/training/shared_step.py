"""Which optimizers of a loop take part in one step, and when another one begins."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Hashable

from torchft_ckpt.core.coordination.messages import MAX_TURNS


class SharedStep:
    """The optimizers of a loop that take part in the step that was begun last; each is any hashable that identifies it.

    The first `zero_grad` begins a step, that of another optimizer joins it while it is open, that of the same one begins the
    next. All that share a step are stepped by one decision. Where a loop steps and clears one optimizer after the other, the
    first of them clears before the last has stepped: the next step begins when the last one clears. One that steps again before
    that is refused.
    """

    def __init__(self) -> None:
        self._joined: set[Hashable] = set()
        self._stepped: set[Hashable] = set()
        self.last: deque[Collection[Hashable]] = deque(maxlen=MAX_TURNS)
        """Those that ended each of the last steps in which one did, whether it counted or not."""
        self._ahead: set[Hashable] = set()
        """Have cleared their gradients for the next step, which cannot begin until the others have stepped."""
        self._is_by_forward = self.joins_open = False
        """A forward pass has begun the step; and the one that cleared its gradients last was the first to do so in it."""
        self.clears_first = False
        """The loop clears gradients before its forward pass: its last step was begun so."""

    @property
    def joined(self) -> Collection[Hashable]:
        """Those that take part in the step."""
        return self._joined

    @property
    def ending(self) -> Collection[Hashable]:
        """Those that end the step, before the next one begins."""
        return self._stepped or self._joined

    @property
    def is_half_taken(self) -> bool:
        """Some have cleared their gradients for the next step, and others have yet to take this one."""
        return bool(self._ahead)

    def clears(self, optimizer: Hashable, *, is_decided: bool) -> bool:
        """An optimizer clears its gradients. Return whether a step begins with that.

        `is_decided`: no step is open: the last one was decided, or there was none.
        """
        self.joins_open, self._is_by_forward = self._is_by_forward and not is_decided, False
        self.clears_first = self.clears_first or not self.joins_open
        if not is_decided and self._joined and optimizer not in self._joined:
            self._joined.add(optimizer)
            return False
        if is_decided and optimizer in self._stepped and self._joined - self._stepped:
            self._ahead.add(optimizer)
            return False
        joined = self._ahead | {optimizer}
        self._leaves()
        self._joined = joined
        return True

    def begins(self) -> None:
        """A step begins by a forward pass: nobody takes part in it yet."""
        self._leaves()
        self._is_by_forward, self.clears_first = True, False

    def again(self) -> set[Hashable]:
        """A step begins in place of a discarded one: those that took part in that take part in this. They are returned."""
        joined = self._joined | self._ahead | self._stepped
        self._leaves()
        self._joined, self._is_by_forward = joined, True
        return joined

    def keep(self, known: Collection[Hashable]) -> None:
        """The others take part in no step any more: the loop has made new ones in their place."""
        for those in (self._joined, self._stepped, self._ahead):
            those.intersection_update(known)

    def has_stepped(self, optimizer: Hashable) -> bool:
        """Whether an optimizer has stepped since the last step began."""
        return optimizer in self._stepped

    def steps(self, optimizer: Hashable) -> bool:
        """An optimizer is about to step. False: it must not, as its step cannot begin before the others have taken this one."""
        if optimizer in self._ahead:
            return False
        self._stepped.add(optimizer)
        return True

    def _leaves(self) -> None:
        """The last step is over, and another one begins."""
        if self._stepped:
            self.last.append(self._stepped)
        self._joined, self._stepped, self._ahead = set(), set(), set()
