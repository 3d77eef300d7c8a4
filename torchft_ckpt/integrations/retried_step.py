"""A step of the job that is tried again with the same gradients until it counts, for trainers that make as many iterations as
they were set to: one that was let go by would be missing at the end.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from torchft_ckpt.core.training.discards import pauses_s

if TYPE_CHECKING:
    from torchft_ckpt.manager import Manager


class RetriedStep:
    """The step that an iteration is for. On the training thread.

    Args:
        manager: of this rank.
    """

    def __init__(self, manager: Manager) -> None:
        self._manager = manager
        self.is_open = False
        """Gradients are computed for it, or will be."""
        self._num_loaded = 0
        """States that were loaded before the iteration, or as it began."""

    def begins(self) -> None:
        """The manager has begun it, and what is computed from now on is for it."""
        self.is_open = True
        self._num_loaded = self._count_loads()

    def vote(self, again: Callable[[], None], may_try: Callable[[], bool] = lambda: True) -> bool:
        """Return whether the iteration's gradients count, in this step of the job or in one after it.

        False: they are not of the state that is here, or not of the newest one. A step that is open then goes on in the next
        iteration.

        Args:
            again: averages the group's own gradients once more, in a step that has begun in place of a discarded one.
            may_try: whether `again` brings back all that was done to them.

        Raises: as `Manager.should_commit` and `Manager.start_quorum`.
        """
        self.is_open = False
        pauses = pauses_s()
        while not self._manager.should_commit():
            if self._manager.is_behind or self._has_loaded() or not may_try():
                return False
            time.sleep(next(pauses))  # where groups are missing
            self._manager.start_quorum()
            if self._has_loaded():
                return False
            again()
        return True

    def _has_loaded(self) -> bool:
        """Whether a state was loaded since the step was begun, and so since its gradients were computed."""
        return self._count_loads() != self._num_loaded

    def _count_loads(self) -> int:
        counts = self._manager.statistics()
        return counts.num_healed + counts.num_corrected
