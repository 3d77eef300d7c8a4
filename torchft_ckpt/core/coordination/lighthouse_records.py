"""The lighthouse's records of each member and of the step that is open, and what follows from these alone."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum

from torchft_ckpt.core.coordination.commit import CommitDecision, Tally, most_issued, num_issued
from torchft_ckpt.core.coordination.messages import (
    CollectiveWait,
    Hello,
    JoinProgress,
    LeavesFound,
    LeaveWish,
    QuorumRequest,
    Receives,
    Source,
    Starts,
    StateVersion,
    name_some,
)
from torchft_ckpt.core.coordination.recovery import Assignment
from torchft_ckpt.core.coordination.sequence import may_start, why_apart


@dataclass(slots=True, kw_only=True)
class Starting:
    """How far a group is that starts without a state."""

    since: float
    said: Starts = field(default_factory=Starts)
    step: int = 0
    """Of the state that it holds."""
    has_met: bool = False
    """All were here that might come: it waits for nobody who comes later, nor for who is gone since."""
    is_at_work: bool = False
    """It reads, or receives, as it was told."""
    done_bytes: int = -1
    """The most that it has said it has of that; -1: it is not at work."""
    moved_at: float
    """When it last had more of that than before; where it is not at work, when it last said something."""
    num_told: int = 0
    """How often it was told to read or to receive something."""

    @property
    def state(self) -> tuple[str, int]:
        """The checkpoint and the step of the state that it holds; of an empty name: none. The newest is the greatest."""
        return self.said.holds, self.step


class MemberPhase(Enum):
    """Where a member is. Any may have been told to leave, besides: see `Member.is_let_go`."""

    IN_STEP = "in a step"
    """It makes the step of its last quorum, or has said nothing yet."""
    ASKS = "asks"
    """It waits for a quorum."""
    BETWEEN = "between"
    """It is in no step, and is waited for: it holds the newest state, or is told what to load for the step that it asked for."""
    AWAY = "away"
    """It is in no step, and nobody waits for it: it fetches the newest state, or learns at which step the others are."""
    WARMS_UP = "warms up"
    """The same: it computes a step for itself alone."""
    FOLLOWS = "follows"
    """The same: it receives a state beside the quorum."""
    FINISHED = "finished"
    """It has made its last step."""


@dataclass(slots=True)
class Member:
    """One incarnation that is connected."""

    connection: str
    hello: Hello
    last_seen: float
    """When it last said something. Never falls."""
    version: StateVersion
    """The state that it holds, as far as is known; unproven where it is known to hold another than this name says."""
    checkpoint_addresses: list[str] = field(default_factory=list)
    """Of its ranks, in their order; empty: not known."""
    layout: str = ""
    """In its last request: a digest of its parameters; empty: not known."""
    layout_text: str = ""
    """The layout in words."""
    frozen: str = ""
    """In its last request: which parameters do not train, in words."""
    min_contributors: int = 0
    """In its last request: with fewer that contribute it would vote against. 0 where it does not contribute itself."""
    connects_beside: bool = False
    """Its process group can be connected beside the quorum, and all of its ranks are there: it has asked for something."""
    met: frozenset[str] = frozenset()
    """Members that it has been connected with: those of the last step that it committed, or of a meeting beside the quorum."""
    num_learned: int = 0
    """How often it got the state outside of a quorum."""
    learns_from: float = float("-inf")
    """When it may get the state outside of a quorum again."""
    phase: MemberPhase = MemberPhase.IN_STEP
    is_called: bool = False
    """It was told that the others need it, since it follows."""
    follows_until: float = float("-inf")
    """Until then it is taken to receive a state beside the quorum, unless it says so again."""
    progress: JoinProgress | None = None
    """What it said last of what it receives beside the quorum."""
    progress_logged_at: float = float("-inf")
    """When the operator was told of that."""
    request: QuorumRequest | None = None
    """Set exactly while it asks."""
    starting: Starting | None = None
    """Set while it starts: from its first word of that until it asks for a step, or has finished."""
    has_computed: bool = False
    """Its loop has computed something, alone or with others: it may have read what it likes."""
    hands_over: bool = False
    """It stands still until somebody has taken its state over."""
    took: StateVersion | None = None
    """The state that it was told it has taken over."""
    wishes_to_leave: str = ""
    """Why it is to leave at the end of its step, or before the next one; empty: it stays."""
    wished_at: float = 0.0
    """Since when it is to leave."""
    is_let_go: bool = False
    """It was told to leave: it begins no step with the others any more."""
    farewell: LeaveWish | None = None
    """Set once it issues no collective of its last step any more."""
    kinds: set[str] = field(default_factory=set)
    """Of the steps that its loop was seen to make: see `QuorumRequest`."""
    out_of_turn_since: float | None = None
    """Since when it has stayed outside because its loop is at another of its optimizers than the others' loops."""
    asked_at: float = 0.0
    """Since when it waits for a quorum; where it does not, since when it waited for the last one."""
    notified_reason: str = ""
    """Why it waits, as it was last notified. Empty while it does not wait."""
    notified_at: float = float("-inf")
    """When it was last notified."""
    is_told_of_hold: bool = False
    """It was last notified, since it asked, that its quorum is held for others."""

    @property
    def replica_id(self) -> str:
        return self.hello.replica_id

    @property
    def join_stall_limit_s(self) -> float:
        """For how long it stands still for those that come in."""
        return float("inf") if self.hello.join_stall_limit_s is None else self.hello.join_stall_limit_s

    @property
    def has_received(self) -> bool:
        """Whether it needs no state any more that sources keep: it has received one outside of the quorum."""
        return self.progress is not None and self.progress.does is Receives.NOTHING

    @property
    def is_in_step(self) -> bool:
        """Whether it takes the decision on its step, because it has not gone on from it."""
        return self.phase is MemberPhase.IN_STEP

    @property
    def is_beside(self) -> bool:
        """Whether it is a learner that warms up or follows, and has not asked for a quorum since it was told so."""
        return self.phase in (MemberPhase.WARMS_UP, MemberPhase.FOLLOWS)

    @property
    def is_excused(self) -> bool:
        """Whether nobody waits for it before it asks for a quorum."""
        is_away = self.is_beside or self.phase in (MemberPhase.AWAY, MemberPhase.FINISHED)
        return is_away or (self.is_let_go and self.phase is not MemberPhase.ASKS)

    @property
    def stays(self) -> bool:
        """Whether it goes on to further steps: it has not made its last one, and was not told to leave."""
        return not self.is_let_go and self.phase is not MemberPhase.FINISHED

    @property
    def says_issued(self) -> QuorumRequest | LeaveWish | None:
        """What says in how many collectives of its step the others can meet its ranks, now that it has gone on from it.

        None: in none, as its process group cannot be used, or it looks for a state.
        """
        if self.farewell is not None or self.request is None or self.request.needs_new_quorum:
            return self.farewell
        return self.request

    def as_source(self, rank: int) -> Source:
        """Return what one that loads a state from it is told. `rank`: its place among those that serve."""
        return Source(replica_id=self.replica_id, replica_rank=rank, checkpoint_addresses=self.checkpoint_addresses)

    @property
    def asked(self) -> QuorumRequest:
        """Its open request, where it is known to have one."""
        if self.request is None:
            raise RuntimeError(f"internal error: {self.replica_id} is waiting without a request")
        return self.request


@dataclass(slots=True)
class Round:
    """One step of one quorum."""

    quorum_id: int
    step: int
    """The step of `assignment.version`, which comes before the one that a commit leads to."""
    assignment: Assignment
    tally: Tally
    """Its roles are those of the assignment. A member that is not in `tally.lost` is connected."""
    formed_at: float
    voted_at: dict[str, float] = field(default_factory=dict)
    """When members voted, before the decision."""
    leaves: LeavesFound = field(default_factory=LeavesFound)
    """What was found before it: see `Verdict`."""
    waits: dict[int, dict[str, CollectiveWait]] = field(default_factory=dict)
    """By group rank: the collective that a member's rank waits in, or asks to start, as it said last."""
    asks: dict[int, dict[str, CollectiveWait]] = field(default_factory=dict)
    """By group rank: the collective that a member's rank asks to start, as it asked last. It may wait in an earlier one yet."""
    earliest: dict[str, int] = field(default_factory=dict)
    """Of those that have approved, the two that did so after the fewest collectives."""
    late: dict[str, dict[int, CollectiveWait]] = field(default_factory=dict)
    """By member that has not gone on, and by its rank: the collective after its vote that it waits in."""
    furthest: int = -1
    """No wait is in a later collective."""
    gone_on: dict[str, tuple[int, QuorumRequest | LeaveWish | None]] = field(default_factory=dict)
    """Members that have gone on from the step: how many collectives each rank issued at least, and what says how many."""
    is_void: bool = False
    """It was committed, and nobody followed: another quorum makes the step, as what came of it has a name."""
    is_needed: bool = False
    """Those who have trained together before are too few to train without the others."""

    def living(self) -> list[str]:
        """Return the members that have not been lost."""
        return [replica_id for replica_id in self.tally.roles if replica_id not in self.tally.lost]

    def may_start(self, group_rank: int) -> bool:
        """Return whether all living members ask to start the same collective."""
        return may_start(self._of_living(self.asks, group_rank), self.living())

    def waits_in(self, replica_id: str, wait: CollectiveWait) -> tuple[str, str] | None:
        """A member waits in a collective. Return why another will not issue that, and on whose account; None: it may come."""
        self.furthest = max(self.furthest, wait.index)
        self.waits.setdefault(wait.group_rank, {})[replica_id] = wait
        if wait.deviates:
            self.asks.setdefault(wait.group_rank, {})[replica_id] = wait
        asks = self._of_living(self.asks, wait.group_rank)
        # Who asks may meet another one.
        waits = self._of_living(self.waits, wait.group_rank) if asks else {replica_id: wait}
        if replica_id in self.tally.lost:
            return None
        ahead = {m: ask for m, ask in asks.items() if ask.index > waits[m].index}
        return why_apart(waits, self.earliest) or (why_apart({**waits, **ahead}, self.earliest) if ahead else None)

    def ends(self, replica_id: str) -> tuple[str, str] | None:
        """A member has voted. Return why another one waits for it in vain, as `waits_in` does."""
        vote = self.tally.votes[replica_id]
        if not vote.approve:
            return None
        num = most_issued(vote)
        ended = {**self.earliest, replica_id: num}
        self.earliest = dict(sorted(ended.items(), key=lambda one: one[1])[:2])
        ranks = self.waits if num <= self.furthest else ()
        found = (why_apart(self._of_living(self.waits, rank), {replica_id: num}) for rank in ranks)
        return next((apart for apart in found if apart is not None), None)

    def waits_late(self, replica_id: str, wait: CollectiveWait) -> tuple[str, str] | None:
        """A member waits in a collective after its vote. Return for which that has gone on, and why, as `waits_in` does."""
        self.furthest = max(self.furthest, wait.index)
        self.late.setdefault(replica_id, {})[wait.group_rank] = wait
        return self.waits_in_vain({replica_id: {wait.group_rank: wait}}, self.gone_on)

    def goes_on(self, member: Member) -> tuple[str, str] | None:
        """A member has gone on from the step: it issues no further collective of it. Return why one waits for it in vain."""
        self.late.pop(member.replica_id, None)
        said = member.says_issued
        if said is None or member.replica_id not in self.gone_on:
            self.gone_on[member.replica_id] = min(said.issued, default=0) if said is not None else 0, said
        return self.waits_in_vain(self.late, [member.replica_id])

    def waits_in_vain(
        self, late: Mapping[str, Mapping[int, CollectiveWait]], gone_on: Iterable[str]
    ) -> tuple[str, str] | None:
        said = {m: self.gone_on[m][1] for m in gone_on if self.gone_on[m][0] <= self.furthest}
        for waiting, waits in late.items() if said else ():
            for rank, wait in waits.items():
                if apart := why_apart({waiting: wait}, {m: num_issued(said[m], rank) for m in said}):
                    return apart
        return None

    def name_late(self, replica_id: str) -> None:
        """A member has voted. If that ended the step because its collective failed while it waited, name who had not come."""
        vote = self.tally.votes.get(replica_id)
        if self.tally.verdict is not CommitDecision.DISCARD or self.tally.lost or vote is None or not vote.broken:
            return
        waiting = {member for waits in self.waits.values() for member in waits}
        late = [m for m in self.tally.roles if m not in waiting and m not in self.tally.votes]
        if replica_id in waiting and late:
            self.tally.reason += f"; {name_some(late)} had not come to a collective that the others wait in"

    def validate(self) -> None:
        """Check the invariants, for tests; a `RuntimeError` says which one is broken. It costs a pass over the members."""
        if dict(self.tally.roles) != {part.replica_id: part.role for part in self.assignment.parts}:
            raise RuntimeError(f"{self.tally.roles} are not the roles of {self.assignment}")
        if self.step != self.assignment.version.step:
            raise RuntimeError(f"step {self.step} is not that of {self.assignment.version}")
        named: set[str] = set()
        for waits in self.waits.values():
            named |= waits.keys()
        if not named | self.late.keys() | self.gone_on.keys() <= self.tally.roles.keys():
            raise RuntimeError(f"{named} are not all members: {self.tally.roles}")
        self.tally.validate()

    def _of_living(self, waits: Mapping[int, Mapping[str, CollectiveWait]], rank: int) -> dict[str, CollectiveWait]:
        return {m: wait for m, wait in waits.get(rank, {}).items() if m not in self.tally.lost}
