"""This file decides who trains together next, and under which id. It does not know the network, the model or the clock.

The rule is torchft's. A quorum is formed when
1. every member of the last quorum that still lives has asked again (the *fast quorum*: those who wait as well come in
   with it), or else
2. enough have asked: at least `min_replicas`, and more than half of those alive (so two halves of a split job cannot both
   go on), and either all alive have asked or `join_timeout_s` has passed since the first of them did.
With `shrink_only`, asked for by anyone, nobody comes in who was not in the last quorum, if there is one.

A *spectator* is one that did not train for this step (`contributes` is False): it comes in with the others, and by itself
forms no quorum while one of the last quorum, or one that holds the newest state, lives and is at work. It counts towards
`min_replicas`, not towards the half.

One difference: a member that is known dead does not stand in the way. Who is alive is the caller's knowledge: a closed
connection ends a life at once, so after a loss the survivors are the fast quorum, and nobody waits for a timeout.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from torchft_ckpt.core.coordination.messages import name_some

QUORUM_IDS_PER_LIFE = 1000
MAX_IDS_AHEAD = 10**9
"""A report may be so far beyond the first id that was known in this life."""
MAX_FIRST_ID = 1 << 52
"""A report may be so high where no id was known yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A member's wish to be in the next quorum."""

    at: float
    shrink_only: bool = False
    contributes: bool = True
    patience_s: float = 0.0
    """How long its own way to this step took: living members that have not asked are waited for as long, at least."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QuorumVerdict:
    """The answer, with its reason in a sentence.

    `members` is sorted by replica id; empty: no quorum yet. `deadline`: when the answer may change by time alone.
    """

    members: tuple[str, ...]
    reason: str
    deadline: float | None = None
    is_below_minimum: bool = False
    """Fewer live than may train: that is not for who is slow."""

    @property
    def formed(self) -> bool:
        return bool(self.members)


def decide_quorum(
    *,
    alive: Collection[str],
    asked: Mapping[str, Asked],
    last_quorum: Collection[str],
    min_replicas: int,
    join_timeout_s: float,
    now: float,
    holders: Collection[str] = (),
) -> QuorumVerdict:
    """Decide whether a quorum can be formed now.

    Args:
        alive: replica ids of all who live, whether they have asked or not.
        asked: who has asked, and since when. Who is not alive is ignored.
        last_quorum: members of the last quorum, in any order; empty before the first.
        min_replicas: the fewest that may train.
        join_timeout_s: how long those who asked wait for those who live and have not asked.
        now: seconds on the clock of `Asked.at`.
        holders: who is known to hold the newest state, whether they have asked or not.
    """
    living = set(alive)
    candidates = sorted(replica_id for replica_id in asked if replica_id in living)
    if last_quorum and any(asked[replica_id].shrink_only for replica_id in candidates):
        candidates = [replica_id for replica_id in candidates if replica_id in last_quorum]
        if not candidates:
            return QuorumVerdict(members=(), reason="shrink_only is set, and no member of the last quorum has asked")
    if not candidates:
        return QuorumVerdict(members=(), reason="no replica group has asked for a quorum")

    if len(candidates) < min_replicas:
        reason = f"{len(candidates)} of at least {min_replicas} replica groups are here ({name_some(candidates)})"
        coming = sorted(living.difference(asked))
        if coming and len(living) >= min_replicas:
            return QuorumVerdict(members=(), reason=f"{reason}; waiting for {name_some(coming)}")
        return QuorumVerdict(members=(), reason=reason, is_below_minimum=True)

    survivors = [replica_id for replica_id in last_quorum if replica_id in living]
    trained = [replica_id for replica_id in candidates if asked[replica_id].contributes]
    at_work = sorted({replica_id for replica_id in (*survivors, *holders) if replica_id in living}.difference(asked))
    if not trained and at_work:
        return QuorumVerdict(
            members=(), reason=f"{name_some(candidates)} did not train for this step; waiting for {name_some(at_work)}"
        )
    if survivors and all(replica_id in asked for replica_id in survivors):
        return QuorumVerdict(members=tuple(candidates), reason="all living members of the last quorum are back")

    absent = sorted(living.difference(asked))
    kept_out = [replica_id for replica_id in living.difference(candidates, absent) if asked[replica_id].contributes]
    num_asked = len(trained) or len(candidates)
    num_living = num_asked + len(absent) + len(kept_out)
    if 2 * num_asked <= num_living:
        return QuorumVerdict(
            members=(),
            reason=f"{num_asked} of {num_living} living replica groups have asked, more than half are needed;"
            f" waiting for {name_some(absent)}",
        )
    if absent:
        join_timeout_s = max(join_timeout_s, max(asked[replica_id].patience_s for replica_id in candidates))
        # Who asks with an older state was left behind, maybe long ago: those who are at work are not late on its account.
        first = [replica_id for replica_id in trained if replica_id in holders] or trained or candidates
        deadline = min(asked[replica_id].at for replica_id in first) + join_timeout_s
        if now < deadline:
            return QuorumVerdict(
                members=(),
                reason=f"{len(candidates)} replica groups have asked, waiting at most {join_timeout_s:g} s for"
                f" {name_some(absent)}",
                deadline=deadline,
            )
        return QuorumVerdict(
            members=tuple(candidates), reason=f"join timeout of {join_timeout_s:g} s passed without {name_some(absent)}"
        )
    return QuorumVerdict(members=tuple(candidates), reason="all living replica groups have asked")


class QuorumIds:
    """The quorum ids of one job in one life of the lighthouse: they only rise, also when it restarts and remembers nothing.

    A member reports the latest quorum that it saw. A lighthouse that hears of a quorum of an earlier life gives none of that
    life's ids again: it goes on at the next thousand. A member may report anything, and ids have to stay far below what a
    message carries. So all that a lighthouse hears in one life, which its epoch names, moves its ids a bounded way, however
    often somebody reports more. Not thread-safe.
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
