"""The parts of the lighthouse share this record: who is here, who asks, for whom the next quorum waits, and which step is open.

It holds what is so at present, and answers what follows from that alone. What becomes of it is decided elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache

from torchft_ckpt.core.coordination.history import StateHistory
from torchft_ckpt.core.coordination.layouts import groups_apart
from torchft_ckpt.core.coordination.lighthouse_events import LighthouseSettings
from torchft_ckpt.core.coordination.lighthouse_records import Member, MemberPhase, Round
from torchft_ckpt.core.coordination.messages import QuorumRequest, StateVersion, group_name
from torchft_ckpt.core.coordination.quorum import QuorumIds
from torchft_ckpt.core.coordination.waiting import Waiting


@dataclass(slots=True, kw_only=True)
class JobRecord:
    """One job, as the lighthouse knows it at present. Not thread-safe."""

    settings: LighthouseSettings
    epoch: str
    members: Mapping[str, Member]
    """By replica id, those that are connected, the longest silent one first. Only the roster adds and removes them."""
    history: StateHistory
    quorum_ids: QuorumIds
    round: Round | None = None
    """The step of the last quorum. None before the first one."""
    waiting: dict[str, None] = field(default_factory=dict)
    """Exactly the members that have an open request for a quorum, in the order in which they asked."""
    quorum_members: dict[str, None] = field(default_factory=dict)
    """Members that the next quorum waits for, because they hold the state: those of the last quorum that were not lost or
    left behind, and those that caught up with them. Always connected."""
    first: StateVersion = field(default_factory=StateVersion)
    """A first state that has its name, while no quorum has begun with it."""
    beginners: dict[str, bool] = field(default_factory=dict)
    """The members that begin the job with that: its holders and those that were to receive it. True: its loop has read no step of
    another state, and has computed nothing; or it holds the state, and no such member does. Always connected; who computes
    something alone since is none of them any more."""
    late: dict[str, int] = field(default_factory=dict)
    """By group, the step of which it has the values of another attempt than those that the others go on with: it was given them,
    and has not begun the step with the others, or who gave them has asked anew. If such ones go on, as nobody else is there, it
    is those that are not there. Also if its connection is lost: it may come back with them."""
    finished_at_step: int | None = None
    """The latest step at which a group said that it has finished; None again once the job goes on. See `finished_step`."""
    finished_by: dict[str, int] = field(default_factory=dict)
    """Who said so, of which step. Such a group may ask for another one nevertheless."""
    allows_step_loss: bool = False
    """The operator's word, for the next quorum alone; `settings.allow_step_loss` holds for all."""
    named_checkpoint: str = ""
    """The newest that a group has said, as it started, that it can read, or has heard of; empty: none. An older one only if
    the operator allows the loss of steps."""
    waits: Waiting = field(default_factory=Waiting)
    quorum_since: float = 0.0
    """When the first step of the last quorum began."""
    now: float = 0.0
    """The time of the last event. Never falls."""

    # --------------------------------------------------------------------------------------------------------- states

    @property
    def quorum_id(self) -> int:
        """The id of the last quorum, or of `first`, or the highest that no quorum may have any more; 0: there was none."""
        return self.quorum_ids.latest

    @property
    def newest_step(self) -> int:
        """The highest committed step that anybody here knows of."""
        return self.history.newest_step

    @property
    def finished_step(self) -> int | None:
        """The step at which the job is over; None: it is not.

        It is over when a group that held the newest state said so, and others do not go on from it: two or more that hold it, one
        that said so itself and asks again, or one that was restored from it. One that has not said so does not train on alone.
        A group that was disconnected a moment ago may be on its way back.
        """
        step = self.finished_at_step
        if step is None or step != self.newest_step:
            return None
        # One without a name for its state that is at work, or late, is about to load what it differs in, and goes on too.
        at_work, is_valid = self.quorum_members, self.history.is_valid
        near = [m for m in self.staying() if m.version.step >= step]
        holders = [m for m in near if is_valid(m.version) or m.replica_id in at_work or self.is_late(m, step)]
        train = [m for m in holders if not m.hello.spare or m.replica_id in at_work or self._was_at_work(m)]
        goes_on = len(train) > 1 or any(self.finished_by.get(m.replica_id) == step for m in holders)
        goes_on = goes_on or any(self._is_restored(m, step) for m in self.staying())
        return None if goes_on or self.history.on_their_way(step, self.settings.join_timeout_s, self.now) else step

    @property
    def may_lose_steps(self) -> bool:
        """Whether the operator allows it, at present."""
        return self.allows_step_loss or self.settings.allow_step_loss

    def is_late(self, member: Member, step: int) -> bool:
        return self.late.get(group_name(member.replica_id)) == step

    def held(self, exclude: Collection[str] = ()) -> Iterator[tuple[str, StateVersion]]:
        """Yield the members that are not excluded, each with the state that it holds."""
        return ((m.replica_id, m.version) for m in self.members.values() if m.replica_id not in exclude)

    def holds_newest(self, version: StateVersion) -> bool:
        return version.step >= self.newest_step and self.history.is_valid(version)

    def goes_on_from(self) -> Callable[[StateVersion], bool]:
        """Return what says whether the job trains on from a member's state: the newest one, or the best that is left, if the
        loss of steps is allowed. It looks for that once, in a pass over the members."""
        if not self.may_lose_steps:
            return self.holds_newest
        best = cache(lambda: max((held for _, held in self.held() if self.history.is_valid(held)), default=None))
        return lambda version: self.holds_newest(version) or version == best()

    def _was_at_work(self, member: Member) -> bool:
        """Whether a member was in a quorum when this lighthouse was started again, which has formed none yet."""
        return self.round is None and member.hello.was_in_quorum

    def _is_restored(self, member: Member, step: int) -> bool:
        """Whether a group asks to train on from a checkpoint of the last step of a job that is over, or of a later one."""
        request = member.request
        return request is not None and request.restored and not request.torn and member.version.step >= step

    # --------------------------------------------------------------------------------------------------------- groups

    @property
    def last_quorum(self) -> Collection[str]:
        """The members that the next quorum waits for; of a job's first one, those who begin the job."""
        return self.beginners if self.first.proven else self.quorum_members

    def computes_alone(self, member: Member) -> None:
        """A member computes an iteration for itself alone, or has done so: no quorum waits for it, and no job begins with it."""
        member.has_computed = True
        self.quorum_members.pop(member.replica_id, None)
        self.beginners.pop(member.replica_id, None)

    def staying(self) -> list[Member]:
        return [member for member in self.members.values() if member.stays]

    def at_work(self) -> set[str]:
        """Return the members that hold the state and go on, and those that make the open step with them."""
        current = self.round
        joining = set() if current is None or current.tally.decided else {*current.living()} & self.members.keys()
        return {*self.quorum_members, *joining}

    def min_trainers(self, holders: Iterable[Member]) -> int:
        """Return how many groups that hold the state can train a step that counts."""
        return max(self.settings.min_replicas, 1, *(member.min_contributors for member in holders))

    def are_too_few(self, admitted: Collection[Member], holding: Collection[Member]) -> bool:
        """Whether no step can count of those who are admitted to a quorum, of whom some hold its state. One must not load it."""
        least = max([1, *(member.min_contributors for member in holding)])
        return len(holding) < least or len(admitted) < self.settings.min_replicas

    def next_quorum_id(self, members: Collection[Member]) -> int:
        last = self.round
        if (
            last is None
            or last.tally.broken
            or last.is_void
            or self.quorum_id != last.quorum_id
            or any(member.asked.needs_new_quorum for member in members)
            or last.tally.roles.keys() != {member.replica_id for member in members}
            # It goes back to an older state: the lost ones are told by the ids of the quorums that they came from.
            or (self.newest_step > 0 and not any(self.holds_newest(m.asked.version) for m in members))
        ):
            return self.quorum_id + 1
        return self.quorum_id

    def apart(self) -> dict[str, str]:
        """Return the groups that cannot train with the others, each with the reason for the operator."""
        return groups_apart(
            self.members,
            last_quorum=self.quorum_members,
            candidates=self.waiting,
            is_valid=self.history.is_valid,
        )

    # ------------------------------------------------------------------------------------------------------- requests

    def take_request(self, member: Member) -> QuorumRequest:
        """Return the open request of a member that is answered now."""
        request = member.asked
        self.stop_waiting(member)
        return request

    def stop_waiting(self, member: Member) -> None:
        """A member asks for no quorum any more."""
        member.request, member.notified_reason, member.is_told_of_hold = None, "", False
        self.waiting.pop(member.replica_id, None)

    # ------------------------------------------------------------------------------------------------------ invariants

    def validate(self) -> None:
        """Check the invariants, for tests; a `RuntimeError` says which one is broken. It costs a pass over the members."""
        self.history.validate(dict(self.held()))
        if self.waiting.keys() != {replica_id for replica_id, m in self.members.items() if m.request is not None}:
            raise RuntimeError(f"{list(self.waiting)} wait, and others have an open request")
        for those in (self.quorum_members, self.beginners):
            if not those.keys() <= self.members.keys():
                raise RuntimeError(f"the next quorum waits for some of {list(those)} that are not here")
        for member in self.members.values():
            if (member.request is not None) != (member.phase is MemberPhase.ASKS):
                raise RuntimeError(f"{member.replica_id} asks for a quorum, and its phase is another: {member.phase}")
            if member.request is None and member.notified_reason:
                raise RuntimeError(f"{member.replica_id} waits for nothing, and has a reason for it")
