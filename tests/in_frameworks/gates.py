"""Where a group's script stands still until a test has made a file, and how it goes on. Scripts beside this file import it.

The others wait for a group that comes in for half a second at most, from when it has the state. Steps take milliseconds here, so
that those who train are far away when a busy machine lets it begin its step. So they go on more slowly with each step.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from pathlib import Path

SLOWER_S = 0.3


class Gates:
    """The gates of one loop, which calls `go_on` after each of its steps.

    Args:
        meets: (step, file): from that step on the loop stands still until the file is there; and then it goes on slowly, until
            it has made a step with all groups.
        waits: the same, and it goes on as it would.
    """

    def __init__(self, meets: Iterable[tuple[str, str]], waits: Iterable[tuple[str, str]] = ()) -> None:
        self._meets = {Path(file): int(step) for step, file in meets}
        self._waits = {Path(file): int(step) for step, file in waits}
        self._num_all = int(os.environ.get("NUM_REPLICA_GROUPS", "2"))
        self._num_without: int | None = None
        """Steps made since the last gate behind which others are to be met; None: they were met."""

    def go_on(self, step: int, num_groups: int) -> None:
        """Stand still, or go slowly, after a step that so many groups made."""
        is_passed = self._stand(self._meets, step)
        if is_passed:
            self._num_without = 0
        elif num_groups >= self._num_all:
            self._num_without = None
        elif self._num_without is not None:
            self._num_without += 1
            time.sleep(SLOWER_S * self._num_without)
        self._stand(self._waits, step)

    def _stand(self, gates: dict[Path, int], step: int) -> bool:
        here = [path for path, at in gates.items() if step >= at]
        for path in here:
            while not path.exists():
                time.sleep(0.05)
            del gates[path]
        return bool(here)
