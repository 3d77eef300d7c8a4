"""What the lighthouse writes down about each member and about the step that is open."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from torchft_ckpt.core.commit import Tally, Verdict, num_issued
from torchft_ckpt.core.messages import CollectiveWait, Hello, QuorumRequest, Receives, StateVersion, name_some
from torchft_ckpt.core.recovery import Assignment


@dataclass(slots=True)
class Member:
    """One incarnation that is connected."""

    connection: str
    hello: Hello
    last_seen: float
    version: StateVersion
    """What it holds, as far as is known."""
    checkpoint_addresses: list[str] = field(default_factory=list)
    store_address: str = ""
    layout: str = ""
    layout_text: str = ""
    frozen: str = ""
    """As in its last request."""
    join_stall_limit_s: float = float("inf")
    """As in its last request."""
    min_contributors: int = 0
    """As in its last request: with fewer that contribute it would vote against."""
    num_learned: int = 0
    """How often it got the state outside of a quorum."""
    learns_from: float = float("-inf")
    """When it may get it again."""
    has_warmed_up: bool = False
    """It computes, or has computed, a step outside of the quorum, and has not asked since."""
    request: QuorumRequest | None = None
    has_left_step: bool = False
    """It asked where the newest state is, and takes no decision on an earlier step any more."""
    has_finished: bool = False
    """It has made its last step, and has not asked for another since."""
    is_excused: bool = False
    """It is about to fetch the newest state: nobody waits for it before it asks for a quorum."""
    asked_at: float = 0.0
    notified_reason: str = ""
    notified_at: float = float("-inf")

    @property
    def replica_id(self) -> str:
        return self.hello.replica_id

    @property
    def is_in_step(self) -> bool:
        """Whether it waits for the decision on its step: it has not gone on from it."""
        return self.request is None and not self.has_left_step

    def num_issued(self, group_rank: int) -> int:
        """In how many collectives of its step the others can meet one of its ranks, now that it has gone on from it.

        0 where its process group cannot be used, or it looks for a state.
        """
        request = self.request
        return 0 if request is None or request.needs_new_quorum else num_issued(request, group_rank)

    @property
    def asked(self) -> QuorumRequest:
        """Its open request, where it is known to have one."""
        if self.request is None:
            raise RuntimeError(f"internal error: {self.replica_id} is waiting without a request")
        return self.request


class Reach(NamedTuple):
    """How long a member that joins needs until it holds the state."""

    seconds: float
    at: float
    """When it said so."""
    is_measured: bool
    """By what it has received in this step; else by what it expected when it asked."""
    does: Receives = Receives.TRANSFER


@dataclass(slots=True)
class Round:
    """One step of one quorum."""

    quorum_id: int
    step: int
    assignment: Assignment
    tally: Tally
    join_budget_s: float | None
    formed_at: float
    all_approved_at: float | None = None
    """Since when nothing but joiners is waited for."""
    stalled: set[str] = field(default_factory=set)
    """Voters that wait in a collective for longer than the budget."""
    waits: dict[int, dict[str, CollectiveWait]] = field(default_factory=dict)
    """By group rank: the collective that a member's rank waits in, or asks to start, as it said last."""
    late: dict[int, dict[str, CollectiveWait]] = field(default_factory=dict)
    """By group rank: the collective after its vote that a member's rank waits in, while the member has not gone on."""
    fewest: dict[int, tuple[int, str]] = field(default_factory=dict)
    """By group rank: of those that have gone on, who issued the fewest collectives, and how many."""
    reach: dict[str, Reach] = field(default_factory=dict)
    """Of those who join, where their transports tell."""
    join_wait_s: float = 0.0
    """The longest that the others were to stand still for those who join."""
    is_needed: bool = False
    """Those who hold the state are too few to train without those who join."""
    look_again_at: float | None = None
    """When to ask again whether joiners are waited for."""
    gave_up: str = ""
    underestimated: set[str] = field(default_factory=set)
    """Joiners that need longer than they expected, and than the others wait."""
    """Why they are not waited for any longer."""
    failed: set[str] = field(default_factory=set)
    """Joiners whose attempt has been counted as failed already."""

    def name_late(self, replica_id: str) -> None:
        """A member has voted. If that ended the step because its collective failed while it waited, name who had not come."""
        vote = self.tally.votes.get(replica_id)
        if self.tally.verdict is not Verdict.DISCARD or self.tally.lost or vote is None or not vote.broken:
            return
        waiting = {member for waits in self.waits.values() for member in waits}
        late = [m for m in self.tally.roles if m not in waiting and m not in self.tally.votes]
        if replica_id in waiting and late:
            self.tally.reason += f"; {name_some(late)} had not come to a collective that the others wait in"
