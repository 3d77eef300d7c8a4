"""This file notices that steps are discarded again and again for one cause, and says what would help. It knows no clock.
It also says how long a loop that tries a discarded step again pauses before it.

One discarded step is what the death of a group costs. Several in a row for one cause do not end by themselves: a timeout is
shorter than a step of the slowest group, say, or the groups cannot reach each other.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from torchft_ckpt.core.coordination.causes import cause_of

NUM_BEFORE_WARNING = 3
_FIRST_PAUSE_S = 0.05
_LONGEST_PAUSE_S = 0.5

_TIMEOUT = (
    "Where that group is slow, give all groups a longer timeout (Manager(timeout=...), TORCHFT_TIMEOUT_SEC); where it hangs, its"
    " own log says in what"
)
_HOSTNAME = (
    "The groups have to reach each other: set TORCHFT_CKPT_HOSTNAME (Manager(hostname=...)) to an address of that group's machine"
    " that the others reach, or GLOO_SOCKET_IFNAME to its interface"
)
_LOOP = "No setting helps: docs/what-your-loop-may-do.md says what the loops of all groups have to do alike"
_HEARTBEAT = (
    "Where that group lives and is only held up, give the lighthouse a longer --heartbeat-timeout-ms; where it dies, its own log"
    " says of what"
)
_ADVICE = {
    "loops differ": _LOOP,
    "group lost": _HEARTBEAT,
    "not connected": _HOSTNAME,
    "collective failed": _TIMEOUT,
}

_OF_ONE_LIFE = re.compile(r":[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}|(?<!\w)\d[\d.]*")
"""The parts in which two alike reasons differ: the process of a group, and counts, times, addresses."""


@dataclass(slots=True)
class DiscardRun:
    """The steps that did not count for one rank since it last committed one: discarded, or committed without its group."""

    _cause: str = ""
    _count: int = 0
    _has_warned: bool = False

    def committed(self) -> None:
        """A step counts: the run is over."""
        self._cause, self._count, self._has_warned = "", 0, False

    def discarded(self, reason: str) -> str | None:
        """Note a step that does not count, for a reason in the lighthouse's or this rank's words.

        Returns:
            a warning, once in a run.
        """
        advice = _ADVICE.get(cause_of(reason), "")
        cause = advice or _OF_ONE_LIFE.sub("", reason)
        self._count = self._count + 1 if cause == self._cause else 1
        self._cause = cause
        if self._has_warned or self._count < NUM_BEFORE_WARNING:
            return None
        self._has_warned = True
        return f"{self._count} steps in a row did not count here for one cause: {reason}" + (
            f". {advice}" if advice else ""
        )


def pauses_s() -> Iterator[float]:
    """Say, without end, how long a loop pauses before it tries a discarded step again; in seconds.

    At first not at all: those who are left go on at once when a group is lost. Longer and longer where groups are missing.
    """
    yield 0.0
    pause_s = _FIRST_PAUSE_S
    while True:
        yield pause_s
        pause_s = min(_LONGEST_PAUSE_S, 2 * pause_s)
