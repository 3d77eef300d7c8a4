"""This file decides whether the step of a quorum counts. It knows the votes, not the clock and not the network.

One decision is taken for all members together, so that no survivor is ever a step ahead of another:
- one vote against by a member whose vote counts: the step is discarded, for all;
- every living member whose vote counts approved: the step is committed. The dead have no vote: what they contributed is
  already in the sum that the living hold;
- voters that issued different collectives in the step have different sums, whatever they approve: it is discarded, for all;
- a member that sits out never decides, and nobody waits for it.

The same file holds the tally of a quorum that the lighthouse has no memory of, because it was restarted in between.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from enum import Enum

import msgspec

from torchft_ckpt.core.coordination.messages import (
    CollectiveWait,
    CommitVote,
    LeaveWish,
    Outcome,
    QuorumRequest,
    Role,
    clip,
)


class CommitDecision(Enum):
    """State of a vote: pending, or decided one way."""

    PENDING = "pending"
    COMMIT = "commit"
    DISCARD = "discard"


@dataclass(slots=True)
class Tally:
    """The votes of one step of one quorum."""

    roles: Mapping[str, Role]
    verdict: CommitDecision = CommitDecision.PENDING
    """Decided once; only a commit that nobody may follow turns into a discard."""
    reason: str = ""
    broken: bool = False
    """The quorum's collectives cannot be used again. Never becomes false again."""
    votes: dict[str, CommitVote] = field(default_factory=dict)
    """Of members, each one's first vote. That of a member which had been lost before decides nothing."""
    lost: set[str] = field(default_factory=set)
    """Members that were lost in this step, also those that are back. Only grows."""
    undecided_voters: int = 0
    """Members whose vote counts and that neither voted nor were lost before the decision."""
    first_approval: str | None = None
    """The voter whose collectives are those of the step; it has approved."""

    def __post_init__(self) -> None:
        self.undecided_voters = sum(role is Role.HEALTHY for role in self.roles.values())

    @property
    def decided(self) -> bool:
        return self.verdict is not CommitDecision.PENDING

    def cast(self, replica_id: str, vote: CommitVote) -> None:
        """Count a vote. A second vote of one member, and a vote of the lost, change nothing."""
        if self.decided or replica_id in self.votes or replica_id in self.lost or replica_id not in self.roles:
            return
        self.votes[replica_id] = vote
        self._settle(replica_id)
        is_voter = self.roles[replica_id] is Role.HEALTHY
        if is_voter and not vote.approve:
            self._decide(
                CommitDecision.DISCARD, f"{replica_id}: {clip(vote.reason or 'voted against')}", broken=vote.broken
            )
        elif is_voter and self._has_other_collectives(vote):
            reason = (
                f"{self.first_approval} and {replica_id} issued different collectives in this step: the loops of the"
                " groups differ"
            )
            self._decide(CommitDecision.DISCARD, reason, broken=True)
        else:
            if is_voter and self.first_approval is None:
                self.first_approval = replica_id
            self.broken = self.broken or (vote.broken and not vote.approve)
            self._close_if_complete()

    def lose(self, replica_id: str, reason: str) -> None:
        """A member is gone: its collectives are broken, its vote is no longer waited for."""
        if replica_id not in self.roles or replica_id in self.lost:
            return
        self.lost.add(replica_id)
        self.broken = True
        if self.decided:
            return
        if replica_id not in self.votes:
            self._settle(replica_id)
        if not any(role is Role.HEALTHY and member not in self.lost for member, role in self.roles.items()):
            self._decide(
                CommitDecision.DISCARD,
                f"no living voter is left, the last was {replica_id}: {clip(reason)}",
                broken=True,
            )
        else:
            self._close_if_complete()

    def give_up(self, reason: str) -> None:
        """Discard the step because its collectives cannot finish."""
        if not self.decided:
            self._decide(CommitDecision.DISCARD, reason, broken=True)

    @property
    def is_unanimous(self) -> bool:
        """Whether the step counts, and every voter approved it: whoever of them is asked later, its vote tells the same."""
        silent = any(self.roles[m] is Role.HEALTHY for m in self.lost if m not in self.votes)
        return self.verdict is CommitDecision.COMMIT and not silent

    def forget_ranks(self) -> None:
        """Another step begins: of those who vote late nobody asks any more what each of their ranks said."""
        said = self.votes.items()
        self.votes = {m: msgspec.structs.replace(v, state_digests=[], issued=[most_issued(v)]) for m, v in said}

    def discard_all(self, reason: str) -> None:
        """A step that all approved does not count after all; its collectives are over."""
        self.verdict, self.reason = CommitDecision.DISCARD, reason

    def outcome(self, replica_id: str) -> Outcome:
        """Return how the decided step ends for one member; a commit leaves all behind that are no members."""
        if self.verdict is not CommitDecision.COMMIT:
            return Outcome.DISCARD
        vote = self.votes.get(replica_id)
        approved = vote is not None and vote.approve and not self._has_other_collectives(vote)
        return Outcome.COMMIT if approved else Outcome.LEFT_BEHIND

    def is_after_vote(self, replica_id: str, wait: CollectiveWait) -> bool:
        """Whether a member waits in a collective that it issued after its vote, so the vote is not about it."""
        vote = self.votes.get(replica_id)
        return vote is not None and wait.index >= num_issued(vote, wait.group_rank)

    def validate(self) -> None:
        """Check the invariants, for tests; a `RuntimeError` says which one is broken. It costs a pass over the members."""
        if not (self.votes.keys() | self.lost) <= self.roles.keys():
            raise RuntimeError(f"others than the members {self.roles} voted or were lost: {self}")
        if self.first_approval is not None and not self.votes[self.first_approval].approve:
            raise RuntimeError(f"{self.first_approval} did not approve")
        if self.lost and not self.broken:
            raise RuntimeError(f"{self.lost} are lost, and the collectives with them count as whole")
        if self.decided:
            return
        open_roles = [role for m, role in self.roles.items() if m not in self.votes and m not in self.lost]
        voters = sum(role is Role.HEALTHY for role in open_roles)
        if self.undecided_voters != voters:
            raise RuntimeError(f"{voters} voters are undecided, and counted is another number: {self}")
        if voters == 0:
            raise RuntimeError(f"nobody is undecided, and the step is: {self}")
        for replica_id, role in self.roles.items():
            vote = self.votes.get(replica_id) if role is Role.HEALTHY else None
            if vote is not None and not vote.approve and replica_id not in self.lost:
                raise RuntimeError(f"{replica_id} is against the step, and it is not discarded: {self}")

    def _has_other_collectives(self, vote: CommitVote) -> bool:
        return self.first_approval is not None and vote.collectives != self.votes[self.first_approval].collectives

    def _settle(self, replica_id: str) -> None:
        self.undecided_voters -= self.roles[replica_id] is Role.HEALTHY

    def _close_if_complete(self) -> None:
        if self.undecided_voters == 0:
            self._decide(CommitDecision.COMMIT, "all approved")

    def _decide(self, verdict: CommitDecision, reason: str, broken: bool = False) -> None:
        self.verdict = verdict
        self.reason = reason
        self.broken = self.broken or broken


def num_issued(said: CommitVote | QuorumRequest | LeaveWish | None, group_rank: int) -> int:
    """Return how many collectives a rank of a group had issued when the group said this; None: it issued none."""
    return said.issued[group_rank] if said is not None and group_rank < len(said.issued) else most_issued(said)


def most_issued(said: CommitVote | QuorumRequest | LeaveWish | None) -> int:
    """Return how many collectives one rank of a group had issued, the one that issued most."""
    return 0 if said is None else max(said.issued, default=0)


def decide_forgotten(
    votes: Collection[CommitVote],
    *,
    committed_somewhere: bool,
    refused_somewhere: bool,
    someone_still_training: bool,
    everyone_is_back: bool,
    grace_over: bool,
) -> CommitDecision:
    """Decide a step whose quorum this lighthouse does not remember, from what its members report.

    A member that approved holds the averaged gradients of all; two that approved and commit are equal, whenever each of
    them learns of it. So a commit is never wrong for those who approved: it is only a pity where others must heal from
    them. A discard is wrong where somebody has committed already. Hence:
    - somebody knows of a commit: that is it;
    - all whose vote counted approved: a commit is what the old lighthouse decided or could still have decided;
    - somebody knows of a discard or did not approve: a discard, but only once all are back or the grace is over, because a
      member that was taken for dead is against without having had a vote, and those who know of the commit may be on
      their way;
    - else those who are missing may know of a commit: after the grace, those who approved commit.

    Where the guarantee ends: if all who heard of the old decision are away for longer than the grace, the others may
    decide otherwise. Who comes back then holds an older quorum's state, and heals. One of several lighthouses knows from
    their store what votes do not tell (`restart.Untold`), and does not ask here.

    Args:
        votes: the votes in doubt, sent again by members that connected again.
        committed_somewhere: a member says that the step was committed.
        refused_somewhere: a member says that it was discarded, or that it abandoned it without a vote.
        someone_still_training: a member of that quorum is connected and has yet to vote.
        everyone_is_back: all members of that quorum are connected.
        grace_over: those who are not back are not waited for any longer.
    """
    if committed_somewhere:
        return CommitDecision.COMMIT
    approvals = [vote for vote in votes if vote.approve]
    counting = [vote for vote in votes if vote.counts]
    if refused_somewhere or any(not vote.approve for vote in counting):
        return CommitDecision.DISCARD if everyone_is_back or grace_over else CommitDecision.PENDING
    if counting and len(counting) >= max(vote.num_voters for vote in counting):
        return CommitDecision.COMMIT
    if not grace_over or someone_still_training:
        return CommitDecision.PENDING
    return CommitDecision.COMMIT if approvals else CommitDecision.DISCARD
