"""The ids of a job's quorums: they only rise, also when the lighthouse restarts and remembers nothing.

A member reports the latest quorum that it saw. A lighthouse that hears of a quorum of an earlier life gives none of that life's
ids again: it goes on at the next thousand. A member may report anything, and ids have to stay far below what a message
carries. So all that a lighthouse hears in one life moves its ids a bounded way, however often somebody reports more.
"""

from __future__ import annotations

QUORUM_IDS_PER_LIFE = 1000
MAX_IDS_AHEAD = 10**9
"""A report may be so far beyond the first id that was known in this life."""
MAX_FIRST_ID = 1 << 52
"""A report may be so high where no id was known yet."""


class QuorumIds:
    """The quorum ids of one job in one life of the lighthouse. Not thread-safe.

    Args:
        epoch: names this life.
    """

    def __init__(self, epoch: str) -> None:
        self._epoch = epoch
        self._first = 0
        """The first id that was known in this life; 0: none yet."""
        self._latest = 0
        """Never falls, and is never below `_first`."""

    @property
    def latest(self) -> int:
        """The latest id that a quorum of this life has, or that none may have any more; 0: there was none."""
        return self._latest

    def give(self, quorum_id: int) -> None:
        """Note that a quorum is formed under an id: the latest one where its members and collectives are the same, or the next.

        Raises:
            RuntimeError: the id is neither.
        """
        if not 0 <= quorum_id - self._latest <= 1:
            raise RuntimeError(f"internal error: quorum {quorum_id} cannot follow quorum {self._latest}")
        self._note(quorum_id)

    def why_never_given(self, quorum_id: int, epoch: str) -> str:
        """Say why there cannot have been a quorum of this id and epoch; empty: there can. Of this life all are known."""
        if epoch == self._epoch:
            if quorum_id <= self._latest:
                return ""
            return f"it names quorum {quorum_id} of this lighthouse, but the latest one is {self._latest}"
        if quorum_id <= (self._first + MAX_IDS_AHEAD if self._first else MAX_FIRST_ID):
            return ""
        return f"it names quorum {quorum_id}, but the first one known here is {self._first}: no job has formed so many since"

    def begin_after(self, quorum_id: int, epoch: str) -> bool:
        """Take a report of a quorum that `why_never_given` has nothing against.

        Half a thousand ids at least lie between it and the next one: quorums of that life that nobody reports any more.

        Returns:
            whether it moved the latest id.
        """
        if quorum_id < max(1, self._latest) or epoch == self._epoch:
            return False
        lives = (quorum_id + QUORUM_IDS_PER_LIFE // 2) // QUORUM_IDS_PER_LIFE + 1
        self._note(lives * QUORUM_IDS_PER_LIFE - 1)
        return True

    def _note(self, quorum_id: int) -> None:
        self._latest = quorum_id
        self._first = self._first or quorum_id
