"""This file decides which replica group speaks for a job: what all groups would write to one place, checkpoints say, it writes.

That is the first of the groups that contributed to the last step that counts. One that was late for a step, because a save took
long, may still write when the others go on without it. So the first one speaks only when nobody else may write. A group that was
told to speak, or says that it was, may write until it

- approves a step that counts, and is not the first in it: all of its ranks have voted then, and knew that; or
- asks for a step and says that it does not speak any more; or
- is not connected any more.

Whoever says so keeps the others silent. So after the first quorum the word of one that was not told counts for `BELIEVED_S` more
when a quorum forms without it. Before, an earlier life of the lighthouse may have told it.

A member that is cut off from the lighthouse, or whose process stands still for longer than the lighthouse waits for a sign of
life, is taken for dead, and may write all the same. Where it comes back and says so, the other one is silent from its next step
on.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection

BELIEVED_S = 30.0
MAX_TOLD = 64


class Speaking:
    """Knows which groups may write for the job. Not thread-safe."""

    def __init__(self) -> None:
        self._may_write: dict[str, float] = {}
        """With each, until when."""
        self._told: deque[str] = deque(maxlen=MAX_TOLD)
        """Members that were told to speak last, as far as is known, also those that are gone."""
        self._has_begun = False
        self._kept_silent = ""
        """The group that would speak, as of the last step that counts, but for others; empty: there is none."""

    def said(self, replica_id: str, speaks: bool) -> None:
        """A member connects, or asks for a step, and says whether it was told to speak."""
        if not speaks:
            self._may_write.pop(replica_id, None)
            return
        self._may_write.setdefault(replica_id, float("inf"))
        if not self._has_begun:
            self._told.extend({replica_id}.difference(self._told))

    def begins(self, members: Collection[str], now: float) -> None:
        """A quorum forms, of these members: what one of them said of itself holds until the next one forms, or it votes."""
        for replica_id, until in self._may_write.items():
            holds = replica_id in members or replica_id in self._told
            self._may_write[replica_id] = float("inf") if holds else min(until, now + BELIEVED_S)
        self._has_begun = True

    def gone(self, replica_id: str) -> None:
        """A member is not connected any more."""
        self._may_write.pop(replica_id, None)

    def committed(self, first: str, approvers: Collection[str], now: float, *, hears: bool) -> str:
        """A step counts.

        Args:
            first: the first of those that contributed to it.
            approvers: who has approved it.
            hears: the first waits for the decision, and is told.

        Returns:
            a line for the operator where a group is kept silent from now on; else empty.
        """
        silent = set(approvers) - {first}
        self._may_write = {m: until for m, until in self._may_write.items() if m not in silent and now < until}
        others = self._may_write.keys() - {first}
        before, self._kept_silent = self._kept_silent, first if others and hears else ""
        if hears and others:
            self._may_write.pop(first, None)
        elif hears:
            self._may_write = {first: float("inf")}
            self._told.extend({first}.difference(self._told))
        if self._kept_silent in ("", before):
            return ""
        return f"{first} does not speak for the job yet: {min(others)} did so last, and may still write"

    def told(self, replica_id: str) -> tuple[bool, str]:
        """Return whether a member speaks from the last step that counts on; and, where it is kept silent, for whom."""
        others = self._may_write.keys() - {replica_id} if replica_id == self._kept_silent else ()
        return self._may_write.keys() == {replica_id}, min(others, default="")  # they may be gone since
