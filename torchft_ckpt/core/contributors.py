"""This file remembers who contributed to the last quorums, and says which of them are gone. It knows no time.

The writers of a checkpoint are those who contributed to its step, each by its number among them. A writer that backs up another's
share asks whether that one is gone; it knows numbers, and no names, and the quorum may be another one by then.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Container, Mapping
from typing import NamedTuple

from torchft_ckpt.core.messages import LostAsked, LostTold

NUM_REMEMBERED = 8
"""Quorums, each with the same contributors under the same numbers."""


class _Contributors(NamedTuple):
    quorum_id: int
    from_step: int
    """The first step that they began with."""
    replica_ids: Mapping[int, str]


class RecentContributors:
    """Who contributed to the last quorums, by number. Not thread-safe: one caller at a time."""

    def __init__(self) -> None:
        self._latest: deque[_Contributors] = deque(maxlen=NUM_REMEMBERED)

    def note(self, quorum_id: int, step: int, replica_ids: Mapping[int, str]) -> None:
        """Note who contributes to a step of a quorum, from the state `step` on.

        Args:
            quorum_id: of the quorum.
            step: of the state that the step begins with.
            replica_ids: of those who contribute, by their number among them.
        """
        if not self._latest or self._latest[-1][::2] != (quorum_id, replica_ids):
            self._latest.append(_Contributors(quorum_id, step, dict(replica_ids)))

    def answer(self, asked: LostAsked, epoch: str, alive: Container[str]) -> LostTold | None:
        """Return which contributors to the step that led to a state are gone; None where it is not known who they were.

        Args:
            asked: the question.
            epoch: of this lighthouse: other quorums are not known here.
            alive: replica ids of the members that are connected.
        """
        version = asked.version
        if version.epoch != epoch:
            return None
        for known in reversed(self._latest):
            if known.quorum_id == version.quorum_id and known.from_step < version.step:
                gone = [number for number, replica_id in sorted(known.replica_ids.items()) if replica_id not in alive]
                return LostTold(version=version, contributors=gone)
        return None
