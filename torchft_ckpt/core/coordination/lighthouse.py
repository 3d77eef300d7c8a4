"""The lighthouse over time: events in, instructions out. This file knows no sockets and no clock.

    state = LighthouseState(settings, epoch="5f0c")
    for instruction in state.handle(Received("conn-1", Hello(...)), now=12.0): ...
    state.next_deadline()  # call handle(Tick(), now) then

The life of a step: members ask (`QuorumRequest`), the lighthouse forms a quorum (`quorum`) and tells each member its role
(`recovery`), each member votes, the lighthouse decides the step for all of them (`commit`), they ask again.

What must hold, whatever happens (the simulation in `tests/simulation` checks it):
- A `quorum_id` names one set of members. It only rises, also when the lighthouse restarts: members report the last one that
  they saw, and a lighthouse that hears of an earlier life goes on at the next thousand (`quorum.QuorumIds`).
- A step is decided once.
- A member that is not in the quorum, or did not approve in time, is never told to commit.
- No quorum forms below the newest committed step that any member reports, unless the operator allows step loss; and not even
  then while a holder of a newer state is alive or was disconnected a moment ago.
`LighthouseState.validate` says what holds between two events.

A job is run by Managers, as described here, or by callers of `LighthouseClient.quorum` (`callers`). The first one to
connect settles which; the lighthouse refuses the other kind.

Who is a member: `roster`. Which states there are, and who may hold them: `history`. What a restarted lighthouse learns
from its members: `restart`.

Work per event is constant, but for the event that forms a quorum or decides a step: it costs one pass over the members.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping

import msgspec

from torchft_ckpt.core.coordination.callers import CallerMessage, Callers
from torchft_ckpt.core.coordination.cold_start import decide_cold_start
from torchft_ckpt.core.coordination.commit import CommitDecision, Tally
from torchft_ckpt.core.coordination.equality import Equality
from torchft_ckpt.core.coordination.history import RecentContributors, StateHistory, state_after
from torchft_ckpt.core.coordination.joining import Joining
from torchft_ckpt.core.coordination.layouts import groups_apart, is_part_of, pause_before_learning_again_s
from torchft_ckpt.core.coordination.learning import (
    SAY_EVERY_S,
    learner_in_words,
    should_follow,
    should_receive_early,
)
from torchft_ckpt.core.coordination.lighthouse_events import (
    Close,
    ConnectionClosed,
    Event,
    Instruction,
    LighthouseSettings,
    Log,
    Received,
    Send,
)
from torchft_ckpt.core.coordination.lighthouse_records import Member, Reach, Round
from torchft_ckpt.core.coordination.messages import (
    MAX_GROUPS,
    PROTOCOL_VERSION,
    AllowStepLoss,
    CallerHello,
    CollectiveCleared,
    CollectiveWait,
    CommitDecided,
    CommitVote,
    Drain,
    Dropped,
    FollowWish,
    Heartbeat,
    Hello,
    JoinerWaiting,
    JoinProgress,
    LeafDigests,
    Leave,
    LeaveWish,
    LetGo,
    LocateState,
    LostAsked,
    Needed,
    Outcome,
    QuorumBroken,
    QuorumCall,
    QuorumFormed,
    QuorumPending,
    QuorumRequest,
    Refused,
    Role,
    Source,
    StallReport,
    StateKept,
    StateVersion,
    ToLighthouse,
    Welcome,
    clip,
    group_name,
    name_some,
    refuse_version,
)
from torchft_ckpt.core.coordination.patience import restart_patience_s
from torchft_ckpt.core.coordination.quorum import Asked, QuorumIds, decide_quorum
from torchft_ckpt.core.coordination.recovery import MAX_SOURCES, Assignment, Holder, StepLost, assign_recovery
from torchft_ckpt.core.coordination.restart import RestartRecovery, StepKey
from torchft_ckpt.core.coordination.roster import Roster
from torchft_ckpt.core.coordination.spares import Spares
from torchft_ckpt.core.coordination.speaking import Speaking

PENDING_NOTICE_S = 1.0
LEAVES_BETWEEN_STEPS_AFTER_S = 2.0
"""A group that is to leave, and then has no step open, leaves between two steps: in an outer loop they are far apart."""
FOLLOWS_WITHIN_S = 10.0
"""So long, or as long as its own transfer takes, a group that would follow waits for another one to have received its state.
Then it joins as one that cannot follow."""
LAST_HOLDER_STAYS_S = 10.0
"""A group that is to leave and alone holds the newest state stays so long for others to get it. Then the time is for its save."""
OWN_ID = (
    "If that is another replica group, and not this one started again: each group needs a replica id of its own"
    " (Manager(replica_id=...), which the examples make from REPLICA_GROUP_ID)"
)
"""Two groups of one id, each started again when it ends, end each other in turn."""


class LighthouseState:
    """All that the lighthouse knows. Not thread-safe: one caller at a time.

    Args:
        settings: what the operator chose.
        epoch: a text that no other life of this lighthouse has.
        unix_time_of_zero: what the wall clock shows when `now` is 0, for the time that callers' quorums carry.
        finished_step: the job was over at this step, when its groups were gone and all else was forgotten.
    """

    def __init__(
        self,
        settings: LighthouseSettings,
        epoch: str,
        unix_time_of_zero: float = 0.0,
        *,
        finished_step: int | None = None,
    ) -> None:
        self.settings = settings
        self.epoch = epoch
        self.callers = Callers(settings, epoch, unix_time_of_zero)
        self._quorum_ids = QuorumIds(epoch)
        self.allow_step_loss = False
        """The operator's word, for the next quorum alone; `settings.allow_step_loss` holds for all."""
        self.round: Round | None = None
        """The step of the last quorum. None before the first one."""
        self._roster = Roster()
        self.members = self._roster.members
        """Read-only, by replica id, the longest silent member first."""
        self.lost_members = self._roster.lost
        """Read-only: the latest members that are gone, with the reason, for the operator."""
        self._waiting: dict[str, None] = {}
        """Exactly the members that have an open request for a quorum, in the order in which they asked."""
        self._quorum_members: dict[str, None] = {}
        """Members that the next quorum waits for, because they hold the state: those of the last quorum that were not lost or
        left behind, and those that caught up with them. Always connected."""
        self._joining = Joining()
        self._spares = Spares()
        self._history = StateHistory(epoch, finished_step)
        self._finished_at_step = finished_step
        """The latest step at which a group said that it has finished; None again once the job goes on. See `finished_step`."""
        self._left_at_step = -1
        """The latest step that a group held which left on purpose. Never falls."""
        self._drained: dict[str, str] = {}
        """Members that the operator had leave, with the reason: their groups do not know of it before they are told."""
        self._leaving: dict[str, float | None] = {}
        """Exactly the members that are to leave: when to look whether one can do so between two steps. None: it was let go."""
        self._equality = Equality(self.members)
        self._restart = RestartRecovery(restart_patience_s(settings.join_timeout_s, settings.heartbeat_timeout_s))
        self._contributors = RecentContributors()
        self._speaking = Speaking()
        self._store_hosts: tuple[str, ...] = ()
        """At most two: the member at whose store the last quorum met, and the one that stands by for it."""
        self._evaluate_at: float | None = None
        """When to look again whether a quorum can be formed. Set while anybody waits for one."""
        self.reason = ""
        """Why there is no quorum at the moment, or why the last was formed."""
        self._now = 0.0
        """The time of the last event. Never falls."""

    # -------------------------------------------------------------------------------------------------- the interface

    def handle(self, event: Event, now: float) -> list[Instruction]:
        """Take an event, return what to do, in order. `now` in seconds, never falling."""
        self._now = now
        return [*self._excuse_silence_while_paused(now), *self._on_event(event, now)]

    def _on_event(self, event: Event, now: float) -> Iterator[Instruction]:
        if isinstance(event, Received):
            return self._on_message(event.connection, event.message, now)
        if isinstance(event, ConnectionClosed):
            return self._on_connection_closed(event, now)
        return self._on_tick(now)

    def next_deadline(self) -> float | None:
        """Return when `Tick` is due, if nothing else happens before. It never needs to be early."""
        deadlines = []
        if (silent := self._roster.longest_silent()) is not None:
            deadlines.append(silent.last_seen + self.settings.heartbeat_timeout_s)
        if self.round is not None and self.round.look_again_at is not None and not self.round.tally.decided:
            deadlines.append(self.round.look_again_at)
        if self._waiting and self._evaluate_at is not None:
            deadlines.append(self._evaluate_at)
        deadlines += [at for at in self._leaving.values() if at is not None]
        for deadline in (self._restart.deadline(self._now), self.callers.next_deadline()):
            if deadline is not None:
                deadlines.append(deadline)
        return min(deadlines, default=None)

    @property
    def quorum_id(self) -> int:
        """The id of the last quorum, or the highest that no quorum may have any more; 0: there was none."""
        return self._quorum_ids.latest

    @property
    def newest_step(self) -> int:
        """The highest committed step that anybody here knows of."""
        return self._history.newest_step

    @property
    def finished_step(self) -> int | None:
        """The step at which the job is over; None: it is not.

        It is over when a group that held the newest state said so, and no group goes on that holds it or was restored from it.
        A group that was disconnected a moment ago may be on its way back.
        """
        step = self._finished_at_step
        if step is None or step != self.newest_step:
            return None
        goes_on = any(self._may_go_on(m, step) for m in self._staying())
        return None if goes_on or self._history.on_their_way(step, self.settings.join_timeout_s, self._now) else step

    @property
    def is_deserted(self) -> bool:
        return not self.members and not self.callers.members

    @property
    def had_quorum(self) -> bool:
        return self.quorum_id > 0 or self.newest_step > 0 or bool(self.callers.who)

    def _held(self, exclude: Collection[str] = ()) -> Iterator[tuple[str, StateVersion]]:
        """Yield the members that are not excluded, each with the state that it holds."""
        return ((m.replica_id, m.version) for m in self.members.values() if m.replica_id not in exclude)

    def _may_go_on(self, member: Member, step: int) -> bool:
        """Whether a group can train on from the last step of a job that is over."""
        is_restored = member.request is not None and member.request.restored and not member.request.torn
        return member.version.step >= step and (is_restored or self._history.is_valid(member.version))

    def _holds_newest(self, version: StateVersion) -> bool:
        return self._history.is_valid(version) and version.step >= self.newest_step

    def _excuse_silence_while_paused(self, now: float) -> Iterator[Instruction]:
        """If the lighthouse itself was paused, it could not hear: what the members said meanwhile is yet to be read."""
        silent = self._roster.longest_silent() or self.callers.longest_silent()  # a job is of one kind
        timeout = self.settings.heartbeat_timeout_s
        late = now - (silent.last_seen + timeout) if silent is not None else 0.0
        if late > timeout / 2:
            self._roster.hear_all(now)
            self.callers.hear_all(now)
            line = f"the lighthouse was paused for at least {late:.1f} s; it drops no replica group for being silent meanwhile"
            yield Log(line, is_warning=True)

    def validate(self) -> None:
        """Check the invariants of this class and its parts, for tests; a `RuntimeError` says which one is broken."""
        self._roster.validate()
        self.callers.validate()
        self._history.validate(dict(self._held()))
        self._equality.validate()
        self._restart.validate(self.members.keys())
        if self.members and self.callers.members:
            raise RuntimeError("a job is of Managers or of callers, and both are here")
        if self._waiting.keys() != {replica_id for replica_id, m in self.members.items() if m.request is not None}:
            raise RuntimeError(f"{list(self._waiting)} wait, and others have an open request")
        if not self._quorum_members.keys() <= self.members.keys():
            raise RuntimeError(f"the next quorum waits for some of {list(self._quorum_members)} that are not here")
        if self._waiting and self._evaluate_at is None:
            raise RuntimeError(f"{list(self._waiting)} wait, and nothing looks at them again")
        if self._leaving.keys() != {replica_id for replica_id, m in self.members.items() if m.wishes_to_leave}:
            raise RuntimeError(f"{list(self._leaving)} are to leave, and others wish to")
        for member in self.members.values():
            if (member.wish or member.kept) and not (member.is_beside and member.warms_up):
                raise RuntimeError(f"{member.replica_id} does not warm up, and a state is to be kept for it")
            if member.is_beside and not (member.is_excused and member.has_left_step):
                raise RuntimeError(f"{member.replica_id} is beside the quorum, and is waited for")
            if member.is_beside and member.replica_id in self._quorum_members:
                raise RuntimeError(f"the next quorum waits for {member.replica_id}, which is beside it")
            if member.request is not None and member.is_excused:
                raise RuntimeError(f"{member.replica_id} asks for a quorum, and nobody waits for it")
            if member.is_let_go and (member.replica_id in self._quorum_members or not member.wishes_to_leave):
                raise RuntimeError(f"{member.replica_id} was told to leave, and is waited for: {member}")
            if member.request is None and member.notified_reason:
                raise RuntimeError(f"{member.replica_id} waits for nothing, and has a reason for it")
        if self.round is not None:
            self._validate_round(self.round)

    def _validate_round(self, current: Round) -> None:
        current.validate()
        if current.quorum_id > self.quorum_id:
            raise RuntimeError(f"the step is of quorum {current.quorum_id}, and the latest is {self.quorum_id}")
        living = current.living()
        if not self.members.keys() >= set(living):
            raise RuntimeError(f"{living} were not lost in the step, and are not all here")
        if current.tally.decided:
            return
        if current.step < self.newest_step:
            raise RuntimeError(f"step {current.step} is open, and step {self.newest_step} was committed before")
        gone = [m for m in living if m not in current.tally.votes and not self.members[m].is_in_step]
        if gone:
            raise RuntimeError(f"{gone} have gone on from the open step, which waits for their votes")

    # ------------------------------------------------------------------------------------------------------- messages

    def _on_message(self, connection: str, message: ToLighthouse, now: float) -> Iterator[Instruction]:
        if isinstance(message, AllowStepLoss):
            yield from self._on_allow_step_loss(now)
        elif isinstance(message, Drain):
            yield from self._on_drain(message, now)
        elif isinstance(message, Hello):
            yield from self._on_hello(connection, message, now)
        elif isinstance(message, CallerHello) or self.callers.speaks_on(connection):
            yield from self._on_caller_message(connection, message, now)
        elif (member := self._roster.on(connection)) is not None:
            self._roster.hear(member, now)
            yield from self._on_member_message(member, message, now)
        elif not self._roster.has_given_up(connection):
            yield Send(connection, Refused(code="hello", reason="the first message has to be Hello"))
            yield Close(connection)

    def _on_member_message(self, member: Member, message: ToLighthouse, now: float) -> Iterator[Instruction]:
        if isinstance(message, Heartbeat):
            return
        if isinstance(message, QuorumRequest | LocateState) and (no_quorum := self._why_no_quorum(message.version)):
            refusal = Refused(code="quorum id", reason=f"{clip(member.replica_id, 200)} is refused: {no_quorum}")
            yield from self._send_away(member, refusal, "it named a quorum that cannot have existed", now)
        elif isinstance(message, QuorumRequest):
            yield from self._on_quorum_request(member, message, now)
        elif isinstance(message, LocateState):
            yield from self._on_locate_state(member, message, now)
        elif isinstance(message, CommitVote):
            yield from self._on_commit_vote(member, message, now)
        elif isinstance(message, StallReport):
            yield from self._on_stall_report(member, message, now)
        elif isinstance(message, JoinProgress):
            yield from self._on_join_progress(member, message, now)
        elif isinstance(message, FollowWish):
            yield from self._on_follow_wish(member, message)
        elif isinstance(message, CollectiveWait):
            yield from self._on_collective_wait(member, message, now)
        elif isinstance(message, LeafDigests):
            yield from self._equality.answered(member.replica_id, message)
        elif isinstance(message, LostAsked):
            if (lost := self._contributors.answer(message, self.epoch, self.members)) is not None:
                yield Send(member.connection, lost)
        elif isinstance(message, LeaveWish):
            yield from self._on_leave_wish(member, message, now)
        elif isinstance(message, Leave):
            reason = clip(message.reason) or "it left"
            yield from self._on_member_lost(member.replica_id, reason, now, is_on_purpose=True)
            yield Close(member.connection)

    def _on_allow_step_loss(self, now: float) -> Iterator[Instruction]:
        self.allow_step_loss = True
        self._finished_at_step = None
        yield Log("the operator allows the loss of steps", is_warning=True)
        yield from self._evaluate(now)

    def _on_connection_closed(self, event: ConnectionClosed, now: float) -> Iterator[Instruction]:
        if self.callers.speaks_on(event.connection):
            yield from self.callers.closed(event.connection, now, event.reason)
        elif (member := self._roster.close(event.connection)) is not None:
            yield from self._on_member_lost(member.replica_id, event.reason, now, is_closed=True)

    def _on_caller_message(self, connection: str, message: ToLighthouse, now: float) -> Iterator[Instruction]:
        if isinstance(message, Leave):
            yield from self.callers.closed(connection, now, clip(message.reason) or "it left")
            yield Close(connection)
        elif not isinstance(message, CallerMessage) or self._roster.on(connection) is not None:
            yield Send(connection, Refused(code="hello", reason="one connection cannot serve a Manager and callers"))
            yield Close(connection)
        elif (self.members or self.round is not None) and not isinstance(message, CallerHello):
            name = message.member.replica_id if isinstance(message, QuorumCall) else message.replica_id
            here = name_some(sorted(self.members)) or "none of them is here now"
            reason = (
                f"{clip(name, 200)} is a caller of LighthouseClient, but Managers run this job ({here}); name another job"
                " (TORCHFT_CKPT_JOB)"
            )
            yield Send(connection, Refused(code="job", reason=reason))
            yield Close(connection)
        else:
            yield from self.callers.received(connection, message, now)

    def _on_hello(self, connection: str, hello: Hello, now: float) -> Iterator[Instruction]:
        refusal = self._why_refused(connection, hello)
        if refusal is not None:
            yield Send(connection, refusal)
            yield Close(connection)
            return
        replica_id = hello.replica_id
        name = group_name(replica_id)
        before = self._roster.begin_incarnation(replica_id)
        if before is not None:
            if before.replica_id == replica_id:
                yield from self._on_member_lost(replica_id, "it connected again", now, is_back=True)
            else:
                yield Log(
                    f"{replica_id} takes the place of {before.replica_id}, which was connected. {OWN_ID}",
                    is_warning=True,
                )
                yield from self._on_member_lost(before.replica_id, f"replaced by a newer process of {name}", now)
                yield Send(before.connection, _refuse_superseded(name))
            yield Close(before.connection)
        self._history.is_back(name)

        member = Member(
            connection=connection,
            hello=hello,
            last_seen=now,
            version=self._equality.proven_of(replica_id, hello.version),
            checkpoint_addresses=hello.checkpoint_addresses,
            is_beside=hello.is_beside,
            has_left_step=hello.is_beside,
            is_excused=hello.is_beside,
            wishes_to_leave=self._drained.get(replica_id, ""),
        )
        self._roster.add(member)
        if member.wishes_to_leave:
            self._leaving[replica_id] = now + LEAVES_BETWEEN_STEPS_AFTER_S
        welcome = Welcome(
            protocol=PROTOCOL_VERSION,
            epoch=self.epoch,
            heartbeat_timeout_s=self.settings.heartbeat_timeout_s,
            store_address=self._store_addresses()[0],
        )
        yield Send(connection, welcome)
        yield Log(f"{replica_id} is here at step {hello.version.step}, {len(self.members)} replica groups live")
        yield from self._equality.joined(hello)
        self._learn_from(hello, now)
        self._speaking.said(replica_id, hello.speaks)
        if self._is_still_in_quorum(member):
            self._quorum_members[replica_id] = None
        yield from self._give_up_overtaken_step(now)
        yield from self._break_cut_off_collectives(hello, connection)
        for other in self._quorum_members:
            yield Send(self.members[other].connection, JoinerWaiting())
        yield from self._settle_forgotten_steps(now)
        yield from self._reconsider(now)

    def _is_still_in_quorum(self, member: Member) -> bool:
        """Whether the next quorum waits for a member: it was cut off between two steps, and holds what the others hold."""
        current = self.round
        return (
            current is not None
            and current.tally.decided
            and (member.hello.last_quorum_id, member.hello.last_epoch) == (current.quorum_id, self.epoch)
            and member.hello.was_in_quorum
            and self._history.is_valid(member.version)
            and member.version.step >= self.newest_step
            and member.is_in_step
        )

    def _break_cut_off_collectives(self, hello: Hello, connection: str) -> Iterator[Instruction]:
        """Tell a member that comes back to leave the collectives of its quorum, and a step that it has open.

        Where the quorum is of an earlier life, its members may go on in it, or decide its step.
        """
        if not hello.was_in_quorum or (hello.last_epoch != self.epoch and not self._restart.is_over):
            return
        reason = "this replica group was cut off from the lighthouse in this step"
        broken = QuorumBroken(quorum_id=hello.last_quorum_id, replica_id=hello.replica_id, lost=True, reason=reason)
        yield Send(connection, broken)

    def _why_refused(self, connection: str, hello: Hello) -> Refused | None:
        if hello.protocol != PROTOCOL_VERSION:
            return refuse_version("the lighthouse", hello.replica_id, hello.protocol)
        if self._roster.on(connection) is not None or self.callers.speaks_on(connection):
            return Refused(code="hello", reason="a connection says Hello once")
        if self.callers.who:
            reason = (
                f"{clip(hello.replica_id, 200)} is a Manager's, but callers of LighthouseClient.quorum run this job"
                f" ({self.callers.who}); name another job (Manager(job=...), TORCHFT_CKPT_JOB)"
            )
            return Refused(code="job", reason=reason)
        if self._roster.is_superseded(hello.replica_id):
            return _refuse_superseded(group_name(hello.replica_id))
        last = StateVersion(quorum_id=hello.last_quorum_id, epoch=hello.last_epoch)
        if no_id := self._why_no_quorum(last, hello.version, hello.rolled_back_to):
            return Refused(code="quorum id", reason=f"{clip(hello.replica_id, 200)} is refused: {no_id}")
        if len(self.members) >= MAX_GROUPS and hello.replica_id not in self.members:
            reason = f"{clip(hello.replica_id, 200)} would exceed the {MAX_GROUPS} groups that a job may have"
            return Refused(code="groups", reason=reason)
        return None

    def _why_no_quorum(self, *versions: StateVersion) -> str:
        """Say why one of these states cannot come from a quorum of this job; empty: all can."""
        reasons = (self._quorum_ids.why_never_given(version.quorum_id, version.epoch) for version in versions)
        return next(filter(None, reasons), "")

    def _learn_from(self, hello: Hello, now: float) -> None:
        """Take what a member remembers, and this lighthouse may not remember."""
        open_step = self.round.step if self.round is not None else 0
        self._history.learn(hello, (version for _, version in self._held()), open_step=open_step)
        if hello.last_epoch != self.epoch:
            self._restart.heard(hello, now)
        is_last = self._quorum_ids.begin_after(hello.last_quorum_id, hello.last_epoch)
        # It may hold the state of a quorum that it was not in.
        if self._quorum_ids.begin_after(hello.version.quorum_id, hello.version.epoch) or is_last:
            self._quorum_members.clear()

    def _give_up_overtaken_step(self, now: float) -> Iterator[Instruction]:
        """Discard the open step if a member holds a later state: then the step was committed before, elsewhere."""
        current = self.round
        if current is None or current.tally.decided:
            return
        ahead = [
            m for m in self.members.values() if self._history.is_valid(m.version) and m.version.step > current.step
        ]
        if ahead:
            current.tally.give_up(f"{ahead[0].replica_id} is here with step {ahead[0].version.step}")
            yield from self._announce_decision(current, now)

    def _holder(self, member: Member) -> Holder:
        request = member.asked
        version = self._equality.proven_of(member.replica_id, request.version)
        return Holder(
            replica_id=member.replica_id,
            version=StateVersion(step=version.step) if self._history.is_void(version) else version,
            restored=request.restored,
            torn=request.torn,
            init_sync=request.init_sync,
            allow_heal=request.allow_heal,
            heal_inline=request.heal_inline,
            waits_for_quorum=request.waits_for_quorum,
            can_serve=request.can_serve,
            unverified=request.unverified,
            contributes=request.contributes,
            min_contributors=request.min_contributors,
        )

    # --------------------------------------------------------------------------------------------------------- quorum

    def _on_quorum_request(self, member: Member, request: QuorumRequest, now: float) -> Iterator[Instruction]:
        replica_id = member.replica_id
        current = self.round
        if current is not None and not current.tally.decided and replica_id in current.tally.roles:
            yield from self._on_step_abandoned(current, replica_id, now)
        member.layout, member.frozen = request.layout, request.frozen
        member.min_contributors = request.min_contributors if request.contributes else 0
        member.join_stall_limit_s = float("inf") if request.join_stall_limit_s is None else request.join_stall_limit_s
        if request.layout_text is not None:
            member.layout_text = request.layout_text
        if request.checkpoint_addresses is not None:
            member.checkpoint_addresses = request.checkpoint_addresses
        if request.store_address:
            member.store_address = request.store_address
        if member.request is None:
            member.asked_at = now
        was_beside, kept = member.is_beside, member.kept
        member.is_beside, member.is_called, member.progress, member.wish, member.kept = False, False, None, None, None
        member.request, member.is_excused, member.has_finished = request, False, False
        member.notified_reason = ""
        if request.needs_new_quorum:
            yield from self._break_forgotten_collectives(self._restart.left(replica_id))
        self._speaking.said(replica_id, request.speaks)
        yield from self._on_step_left(member)
        yield from self._on_state_shown(member, request.version, now)
        self._waiting[replica_id] = None
        yield from self._answer_leaving(now)
        if member.request is None:
            yield from self._reconsider(now)
            return
        if self.round is not None and self._should_warm_up(member):
            member.kept = kept  # it computes once more
            yield self._let_warm_up(member, self.round, now)
            yield from self._reconsider(now)  # others may have waited for it
            return
        is_kept = kept is not None and member.follows_until > now  # sources free what nobody speaks of
        if kept is not None and is_kept and request.can_follow and self._may_learn_alone(member):
            yield self._send_beside(member, kept, now)
            return
        if was_beside:
            yield from self._have_state_captured()
        yield from self._reconsider(now)

    def _let_warm_up(self, member: Member, current: Round, now: float) -> Send:
        why = "it warms up: it computes its first step outside of the quorum, so that nobody waits for it"
        holding = [other for other in self._others_at_work(member) if self._holds_newest(other.version)]
        sources = [_source(other, rank) for rank, other in enumerate(holding[:MAX_SOURCES])]
        return self._answer_outside_quorum(member, current, 0, why, now, sources=sources, warms_up=True)

    def _have_state_captured(self) -> Iterator[Instruction]:
        """Have those at work capture their state when they begin their next step."""
        for replica_id in self._quorum_members:
            yield Send(self.members[replica_id].connection, JoinerWaiting())

    def _on_follow_wish(self, member: Member, wish: FollowWish) -> Iterator[Instruction]:
        """A learner wants to receive a state while it warms up; it gets one when the others begin a step."""
        is_warming = member.is_beside and member.warms_up and member.kept is None
        if is_warming and should_receive_early(wish, self._joining.usual_s):
            member.wish = wish
            yield from self._have_state_captured()

    def _should_warm_up(self, member: Member) -> bool:
        """Whether a group that has computed nothing yet does so alone first: others are at work who can do without it."""
        return member.asked.warms_up and self._may_learn_alone(member)

    def _may_learn_alone(self, member: Member) -> bool:
        """Whether a group that asks can be a learner: it is behind, and others are at work who can do without it."""
        request = member.asked
        if not request.allow_heal or not request.can_load:
            return False
        if self.finished_step is not None or self._holds_newest(member.version):
            return False
        at_work = self._others_at_work(member)
        return len(at_work) >= self._min_trainers(at_work) and member.replica_id not in self._apart()

    def _others_at_work(self, member: Member) -> list[Member]:
        return [self.members[replica_id] for replica_id in self._quorum_members if replica_id != member.replica_id]

    def _min_trainers(self, holders: Iterable[Member]) -> int:
        """Return how many groups that hold the state can train a step that counts."""
        return max(self.settings.min_replicas, 1, *(member.min_contributors for member in holders))

    # --------------------------------------------------------------------------------------------------------- leaving

    def _on_drain(self, drain: Drain, now: float) -> Iterator[Instruction]:
        for member in self.named(drain.replica_id):
            self._drained[member.replica_id] = "the operator asked for it"
            wish = LeaveWish(reason=self._drained[member.replica_id])
            yield Send(member.connection, wish)
            yield from self._on_leave_wish(member, wish, now)

    def named(self, group: str) -> list[Member]:
        """Return the members of a replica id, or of the group of that name."""
        return [m for m in self.members.values() if group in (m.replica_id, group_name(m.replica_id))]

    def _on_leave_wish(self, member: Member, wish: LeaveWish, now: float) -> Iterator[Instruction]:
        if not member.wishes_to_leave:
            member.wishes_to_leave, member.wished_at = clip(wish.reason) or "it was asked to leave", now
            self._leaving[member.replica_id] = now + LEAVES_BETWEEN_STEPS_AFTER_S
            yield Log(f"{member.replica_id} is to leave at the end of its step: {member.wishes_to_leave}")
        if wish.is_told and member.request is None:
            self._let_go(member)
            if wish.collectives_by_rank:
                member.farewell = wish
                yield from self._on_step_left(member)
        yield from self._answer_leaving(now)
        yield from self._reconsider(now)

    def _answer_leaving(self, now: float) -> Iterator[Instruction]:
        """Answer the members that wait for a quorum and are to leave, if the others do not count on them, or do not come."""
        for member in [self.members[replica_id] for replica_id in self._leaving if replica_id in self._waiting]:
            waits_briefly = member.replica_id in self._quorum_members and now - member.asked_at < PENDING_NOTICE_S
            if member.asked.gathers or not (member.is_let_go or (self._may_go(member, now) and not waits_briefly)):
                continue
            request = self._take_request(member)
            self._let_go(member)
            member.has_left_step = True
            formed = QuorumFormed(
                request_id=request.request_id,
                quorum_id=self.quorum_id,
                epoch=self.epoch,
                version=request.version,
                role=Role.LEARNER,
                replica_rank=0,
                replica_world_size=0,
                contributor_rank=None,
                num_contributors=0,
                num_voters=0,
                store_address="",
                warms_up=True,
                newest_step=self.newest_step,
                rolled_back_to=self._history.rolled_back_to,
                leaving=True,
                reason=f"this replica group leaves: {member.wishes_to_leave}",
            )
            yield Send(member.connection, formed)
            yield self._say_who_stays(member)

    def _let_go_between_steps(self, now: float) -> Iterator[Instruction]:
        """Let members go that are to leave, and are between two steps since a while."""
        for replica_id in [m for m, at in self._leaving.items() if at is not None and now >= at]:
            if self._leaving.get(replica_id) is None:
                continue  # it has gone, or was let go, on account of the one before
            self._leaving[replica_id] = now + LEAVES_BETWEEN_STEPS_AFTER_S
            member, current = self.members[replica_id], self.round
            tally = None if current is None or current.tally.decided else current.tally
            is_in_open_step = tally is not None and replica_id in tally.roles and replica_id not in tally.lost
            if member.request is None and not is_in_open_step and self._may_go(member, now):
                self._let_go(member)
                yield Send(member.connection, LetGo(reason=clip(member.wishes_to_leave)))
                yield self._say_who_stays(member)
                yield from self._reconsider(now)

    def _may_go(self, member: Member, now: float) -> bool:
        """Whether a member is to leave now: it wishes to, and others have its state, or do not come to have it."""
        if not member.wishes_to_leave:
            return False
        staying = [other for other in self._staying() if not other.wishes_to_leave]
        is_last = self._holds_newest(member.version) and not any(self._holds_newest(m.version) for m in staying)
        return not is_last or not staying or now - member.wished_at >= LAST_HOLDER_STAYS_S

    def _staying(self) -> list[Member]:
        return [member for member in self.members.values() if not (member.is_let_go or member.has_finished)]

    def _let_go(self, member: Member) -> None:
        """A member has been told to leave, or is told now: nobody waits for it."""
        member.is_excused = member.is_let_go = True
        self._quorum_members.pop(member.replica_id, None)
        self._leaving[member.replica_id] = None

    def _say_who_stays(self, member: Member) -> Log:
        staying = self._staying()
        step = member.version.step
        line = (
            f"{member.replica_id} leaves at step {step}: {member.wishes_to_leave}; {len(staying)} replica groups stay"
        )
        least = self._min_trainers(staying)
        is_short = 0 < len(staying) < least
        more = f", at least {least} have to train: they wait until another one comes" if is_short else ""
        return Log(line + more, is_warning=is_short)

    def _as_told(self, member: Member, decided: CommitDecided, now: float, *, all_leave: bool = False) -> CommitDecided:
        """Return the decision on a member's step as that member is told it: with it goes who is to leave, and who speaks."""
        if decided.outcome is Outcome.COMMIT:
            speaks, silent_for = self._speaking.told(member.replica_id)
            decided = msgspec.structs.replace(decided, speaks=speaks, silent_for=clip(silent_for))
        if not member.is_in_step or not self._may_go(member, now):
            return decided
        self._let_go(member)
        return msgspec.structs.replace(decided, leaving=True, all_leave=all_leave)

    def _on_locate_state(self, member: Member, message: LocateState, now: float) -> Iterator[Instruction]:
        """Tell a member, between two steps, where the newest state is. Unless it holds that, nobody waits for it from now on."""
        replica_id = member.replica_id
        current = self.round
        if current is not None and not current.tally.decided and replica_id in current.tally.roles:
            yield from self._on_step_abandoned(current, replica_id, now)
        self._stop_waiting(member)
        member.has_left_step, member.has_finished = True, message.has_finished
        member.is_beside, member.progress, member.wish, member.kept = False, None, None, None
        yield from self._on_step_left(member)
        yield from self._on_state_shown(member, message.version, now)
        living = sorted(self.members.values(), key=lambda other: other.replica_id)
        sources = ((_source(other, rank), other.version) for rank, other in enumerate(living))
        located = self._history.locate(replica_id, message, sources)
        if message.has_finished and self.newest_step > 0 and self._holds_newest(message.version):
            self._finished_at_step = self.newest_step
            yield Log(f"{replica_id} has finished, at step {self.newest_step}")
            yield from self._call_spares()
        member.is_excused = message.has_finished or not located.is_held or member.is_let_go
        if member.is_excused:
            self._quorum_members.pop(replica_id, None)
        yield Send(member.connection, msgspec.structs.replace(located, is_finished=self.finished_step is not None))
        yield from self._reconsider(now)

    def _on_state_shown(self, member: Member, version: StateVersion, now: float) -> Iterator[Instruction]:
        """Note the state that a member holds between two steps."""
        member.version = version = self._equality.proven_of(member.replica_id, version)
        self._quorum_ids.begin_after(version.quorum_id, version.epoch)
        self._restart.asked(member.replica_id)
        self._history.note(member.replica_id, version)
        yield from self._on_commit_declined(member.replica_id)
        yield from self._give_up_overtaken_step(now)

    def _on_step_abandoned(self, current: Round, replica_id: str, now: float) -> Iterator[Instruction]:
        role = current.tally.roles[replica_id]
        if replica_id in current.tally.votes or replica_id in current.tally.lost:
            # It gave up waiting for the decision: its vote stands. Or it was cut off: the others know.
            return
        reason = f"{replica_id} gave step {current.step} up"
        if role in (Role.HEALTHY, Role.INLINE):
            current.tally.give_up(reason)
            yield from self._announce_decision(current, now, culprit=replica_id)
        else:
            self._note_failed_join([replica_id], now - current.formed_at, now)
            yield from self._break_collectives(current, replica_id, lost=False, reason=reason)
            current.tally.lose(replica_id, reason)
            yield from self._advance_step(current, now)

    def _reconsider(self, now: float) -> Iterator[Instruction]:
        """Look whether a quorum can be formed, if this event can have changed that. Else leave it to the deadline."""
        if not self._waiting:
            return
        survivors_back = bool(self._quorum_members) and self._quorum_members.keys() <= self._waiting.keys()
        everyone = survivors_back or all(
            m.is_beside or m.replica_id in self._waiting or self._is_absent_spare(m) for m in self.members.values()
        )
        if everyone or self.finished_step is not None:
            yield from self._evaluate(now)
        elif self._evaluate_at is None:
            self._evaluate_at = now + PENDING_NOTICE_S

    def _evaluate(self, now: float) -> Iterator[Instruction]:
        self._evaluate_at = now + PENDING_NOTICE_S
        yield from self._answer_leaving(now)
        if not self._waiting:
            return
        hold = self._restart.hold(now)
        if hold is not None:
            yield from self._notify_pending(hold[0], now, hold[1])
            return
        yield from self._refuse_late_groups(now)
        if not self._waiting:
            return
        yield from self._answer_gathering(now)
        gathering = self._who_gathers()
        if len(gathering) == len(self._waiting):
            return
        others = self._apart()
        candidates = [self.members[m] for m in self._waiting if m not in others and m not in gathering]
        yield from self._call_spares()
        admitted, outside, following = self._set_joiners_aside(candidates, now)
        yield from self._notify_left_out(outside | others, others, now)
        yield from self._call_learners()
        if self._spares.awaits(self.members, now):
            self._evaluate_at = min(self._evaluate_at, self._spares.await_until)
            return
        if not admitted:
            return
        out = outside.keys() | others.keys() | gathering
        asked = {
            m.replica_id: Asked(
                at=m.asked_at,
                shrink_only=m.asked.shrink_only,
                contributes=m.asked.contributes,
                patience_s=m.asked.patience_s,
            )
            for m in admitted
        }
        out |= {m.replica_id for m in self.members.values() if self._is_absent_spare(m)}
        alive = [m.replica_id for m in self.members.values() if m.replica_id not in out and not m.is_excused]
        verdict = decide_quorum(
            alive=alive,
            asked=asked,
            last_quorum=self._quorum_members,
            holders=self._history.holders(self._held(), self.newest_step),
            min_replicas=self.settings.min_replicas,
            join_timeout_s=self.settings.join_timeout_s,
            now=now,
        )
        if not verdict.formed:
            reason = f"{verdict.reason}; of another layout: {name_some(sorted(others))}" if others else verdict.reason
            if left := self._hint_if_over():
                reason = f"{reason}.{left}"
            yield from self._notify_pending(reason, now, verdict.deadline, is_warning=bool(others), exclude=out)
            return
        members = [self.members[replica_id] for replica_id in verdict.members]
        assignment = assign_recovery(
            [self._holder(member) for member in members],
            newest_step=self.newest_step,
            allow_step_loss=self.allow_step_loss or self.settings.allow_step_loss,
            min_replicas=self.settings.min_replicas,
            quorum_id=self._next_quorum_id(members),
            epoch=self.epoch,
        )
        if isinstance(assignment, StepLost):
            yield from self._notify_pending(self._why_lost(assignment, verdict.members), now, None, is_warning=True)
            return
        hold = None
        if not self.allow_step_loss:
            hold = self._history.why_not_back(
                assignment.version.step,
                self._held(exclude=verdict.members),
                is_first=assignment.is_first,
                restarted_at=self._restart.first_heard_at,
                patience_s=self.settings.join_timeout_s,
                now=now,
            )
        if hold is not None:
            yield from self._notify_pending(hold[0], now, hold[1], is_warning=True)
            return
        helpless = [p.replica_id for p in assignment.parts if p.role in (Role.INLINE, Role.JOINER) and p.sources]
        helpless = [replica_id for replica_id in helpless if not self.members[replica_id].asked.can_load]
        if helpless:
            yield from self._refuse_to_heal(helpless, assignment, now)
            return
        cold = [
            m for m in candidates if m.replica_id in outside and m.asked.warms_up
        ]  # there was no job yet when it asked
        warming = [m for m in self.members.values() if m.wish is not None]
        following = [m for m in (*following, *warming) if m not in cold and now >= m.learns_from]
        learners = [*self._learners(others, now), *(m for m in following if not self._is_teaching(now, beside=m))]
        yield from self._form_quorum(assignment, learners, verdict.reason, now, others)
        for member in cold:
            if self.round is not None and self._may_learn_alone(member):
                yield self._let_warm_up(member, self.round, now)

    def _refuse_to_heal(self, helpless: list[str], assignment: Assignment, now: float) -> Iterator[Instruction]:
        """Send the members away that would have to load a state and cannot. The others form their quorum without them."""
        holders = name_some(part.replica_id for part in assignment.parts if part.role is Role.HEALTHY)
        for replica_id in helpless:
            member = self.members.get(replica_id)
            if member is None:
                continue  # the quorum was looked for again without the one before, and refused this one
            reason = (
                f"{replica_id} has to load the state of step {assignment.version.step} from {holders}, but has no state dict"
                " functions: pass load_state_dict and state_dict to Manager, or call register_state_dict_fn. Groups that start"
                " with equal weights need them only when one comes back: Manager(init_sync=False)"
            )
            refusal = Refused(code="no state", reason=clip(reason))
            why = "it has no state dict functions and would have to heal"
            yield from self._send_away(member, refusal, why, now)

    def _send_away(self, member: Member, refusal: Refused, reason: str, now: float) -> Iterator[Instruction]:
        """Refuse a member, which counts as leaving on purpose."""
        yield Send(member.connection, refusal)
        yield from self._on_member_lost(member.replica_id, reason, now, is_on_purpose=True)
        yield Close(member.connection)

    def _refuse_late_groups(self, now: float) -> Iterator[Instruction]:
        """If the job is over, refuse the members that came too late for its last step."""
        step = self.finished_step
        if step is None:
            return
        while self._waiting:
            replica_id = next(iter(self._waiting))
            member = self.members[replica_id]
            reason = (
                f"the job is finished at step {step}, and {replica_id} came with step {member.version.step}. To train on or"
                " to start over, name another job (Manager(job=...), TORCHFT_CKPT_JOB), or let the lighthouse forget this one:"
                " python -m torchft_ckpt forget-job"
            )
            refusal = Refused(code="finished", reason=clip(reason), step=step)
            yield from self._send_away(member, refusal, "it came after the job had finished", now)

    def _who_gathers(self) -> set[str]:
        return {replica_id for replica_id in self._waiting if self.members[replica_id].asked.gathers}

    def _answer_gathering(self, now: float) -> Iterator[Instruction]:
        """Answer the members that are about to look for a state, once all that may come are here. They begin no step."""
        gathering = self._who_gathers()
        if not gathering:
            return
        at_work = [member for replica_id, member in self.members.items() if replica_id not in gathering]
        verdict = decide_cold_start(
            [self.members[replica_id] for replica_id in gathering],
            at_work,
            is_valid=self._history.is_valid,
            min_replicas=self.settings.min_replicas,
            join_timeout_s=self.settings.join_timeout_s,
            now=now,
        )
        if not verdict.parts:
            yield from self._notify_pending(
                verdict.reason, now, verdict.deadline, exclude=self._waiting.keys() - gathering
            )
            return
        if verdict.is_new:
            self._quorum_ids.give(self.quorum_id + 1)
            yield Log(f"{name_some(sorted(gathering))} meet to look for a state to start from: {verdict.reason}")
        for replica_id, part in verdict.parts.items():
            member = self.members[replica_id]
            request = self._take_request(member)
            formed = QuorumFormed(
                request_id=request.request_id,
                quorum_id=self.quorum_id,
                epoch=self.epoch,
                version=verdict.version,
                role=part.role,
                replica_rank=part.replica_rank,
                replica_world_size=part.replica_world_size,
                contributor_rank=None,
                num_contributors=0,
                num_voters=0,
                store_address=part.store_address,
                newest_step=self.newest_step,
                gathers=True,
                reason=clip(verdict.reason),
            )
            yield Send(member.connection, formed)

    def _why_lost(self, lost: StepLost, replica_ids: tuple[str, ...]) -> str:
        replaying = [m.replica_id for m in map(self.members.__getitem__, replica_ids) if m.num_learned]
        if lost.is_torn and replaying and self.newest_step > 0:
            return (
                f"every group that held step {self.newest_step} is gone. {name_some(replaying)} made the same steps beside them,"
                f" and without them nobody can say whether they are right to the last bit.{self._hint_if_over()} Bring one of"
                " them back, or start a group from a checkpoint (Manager.load_state_dict)"
            )
        if lost.is_torn:
            return (
                f"no replica group here has a whole state ({name_some(replica_ids)}: a load failed half-way, or its ranks"
                " hold different states). Restart one of them"
            )
        ahead = self._history.holders(self._held(exclude=replica_ids), lost.newest_step)
        if ahead:
            return f"waiting for {name_some(ahead)}: alive, and holding step {lost.newest_step}, which was committed"
        gone = name_some(list(self.lost_members)[-5:]) or "not known here"
        return (
            f"step {lost.newest_step} was committed, but the newest state here is of step {lost.best_step}: every group that"
            f" held a newer one is gone ({gone}).{self._hint_if_over()} Bring one of them back, or start a group from a"
            " checkpoint (Manager.load_state_dict), or accept the loss: python -m torchft_ckpt allow-step-loss. A new run of the"
            " same script is another job: set another TORCHFT_CKPT_JOB"
        )

    def _hint_if_over(self) -> str:
        """Say that the job may be over, if no member holds its newest state and a group that held it left on purpose."""
        if not 0 < self._left_at_step == self.newest_step or self._history.holders(self._held(), self.newest_step):
            return ""
        return (
            f" A group that held step {self.newest_step} left on purpose (Manager.shutdown). If the job was over, end this group;"
            " where its script calls Manager.finish() after the last step, a late group ends by itself."
        )

    def _apart(self) -> dict[str, str]:
        """Return the groups that cannot train with the others, each with the reason for the operator."""
        return groups_apart(
            self.members,
            last_quorum=self._quorum_members,
            candidates=self._waiting,
            is_valid=self._history.is_valid,
        )

    def _notify_left_out(
        self, reasons: Mapping[str, str], others: Collection[str], now: float
    ) -> Iterator[Instruction]:
        """Tell the members that stay outside why. The operator hears that once; for `others`, of another layout, each reason."""
        for replica_id in self._waiting:
            member = self.members[replica_id]
            has_waited = replica_id in others or now - member.asked_at >= PENDING_NOTICE_S / 2
            if replica_id in reasons and has_waited and now - member.notified_at >= PENDING_NOTICE_S:
                reason = reasons[replica_id]
                if not member.notified_reason or (replica_id in others and member.notified_reason != reason):
                    said = reason if replica_id in others else f"{replica_id} is not admitted: {reason}"
                    yield Log(said, is_warning=True)
                member.notified_reason, member.notified_at = reason, now
                yield Send(member.connection, QuorumPending(reason=clip(reason), waited_s=now - member.asked_at))

    def _learners(self, others: Collection[str], now: float) -> list[Member]:
        """Return the groups that may train with the others once they know the step: they are behind, and train only a part."""
        layouts = {self.members[m].layout: self.members[m].layout_text for m in self._waiting if m not in others}
        return [
            member
            for member in (self.members[m] for m in self._waiting if m in others)
            if (member.layout in layouts or any(is_part_of(member.layout_text, text) for text in layouts.values()))
            and member.asked.allow_heal
            and member.asked.can_load
            and now >= member.learns_from
            and not self._holds_newest(member.version)
        ]

    def _is_teaching(self, now: float, beside: Member) -> bool:
        """Whether somebody receives a state, and says so: the sources keep one state at a time for those who do.

        `beside`: who would get the next one. For a group that is to train a spare begins again.
        """
        taught = [m for m in self.members.values() if m.is_beside and m.follows_until > now and not m.only_replays]
        return any(not self._is_idle_spare(m) for m in taught) or (bool(taught) and self._is_idle_spare(beside))

    def _call_learners(self) -> Iterator[Instruction]:
        """Tell those that follow to ask, if the others have become too few to train."""
        staying = [m for m in self._staying() if not m.is_excused and not self._is_absent_spare(m)]
        least = self._min_trainers(staying)
        if not 0 < len(staying) < least:
            return
        for member in self.members.values():
            if member.is_beside and not member.is_called:
                member.is_called = True
                here = name_some(m.replica_id for m in staying)
                reason = f"{len(staying)} of at least {least} replica groups are here ({here})"
                yield Log(f"{member.replica_id} is needed: {reason}")
                yield Send(member.connection, Needed(reason=clip(reason)))

    def _at_work(self) -> set[str]:
        """Return the members that hold the state and go on, and those that join them in the open step."""
        current = self.round
        joining = set() if current is None or current.tally.decided else {*current.living()} & self.members.keys()
        return {*self._quorum_members, *joining}

    def _is_idle_spare(self, member: Member) -> bool:
        """Whether a member is a spare that does not step in now, and does not hold a newer state than those that train."""
        replica_id = member.replica_id
        if not member.hello.spare or replica_id in self._at_work() or self._spares.is_called(replica_id):
            return False
        if self._quorum_members:
            is_ahead = self._holds_newest(member.version)
            return not is_ahead or any(self._holds_newest(self.members[m].version) for m in self._quorum_members)
        others = (m.version.step for m in self.members.values() if not m.hello.spare)
        return not member.version.proven and member.version.step <= max(others, default=-1)

    def _is_absent_spare(self, member: Member) -> bool:
        """Whether a member is a spare that neither trains nor asks: nobody waits for it, also where it was called."""
        return member.hello.spare and member.request is None and member.replica_id not in self._at_work()

    def _call_spares(self) -> Iterator[Instruction]:
        """Have spares step in for groups that are gone; where the job is over, have them ask, to hear that."""
        at_work = self._at_work()
        is_over = self.finished_step is not None
        self._spares.release(at_work)
        idle = [m for m in self._staying() if not m.wishes_to_leave and self._is_idle_spare(m)]
        called = idle if is_over else self._spares.call(idle, at_work, self._now)
        for member in called:
            here = f"{len(at_work)} of {self._spares.num_wanted} replica groups train ({name_some(sorted(at_work))})"
            reason = "the job is over" if is_over else f"{here}, and it is a spare"
            if member.is_beside and not member.warms_up and not member.is_called:
                member.is_called = is_over
                yield Send(member.connection, Needed(reason=clip(reason), when_close=True))
            if not is_over:
                yield Log(f"{member.replica_id} is called: {reason}")

    def _set_joiners_aside(
        self, candidates: list[Member], now: float
    ) -> tuple[list[Member], dict[str, str], list[Member]]:
        """Return the members that are admitted; those that stay outside, each with the reason; and which of these follow.

        The others cannot wait for them now. If the admitted members would be too few, all are admitted.
        """
        best = max((m.version for m in candidates if self._history.is_valid(m.version)), default=None)
        is_known_here = any(m.version == best and not m.asked.unverified for m in candidates)
        joining = {
            member.replica_id
            for member in candidates
            if member.replica_id not in self._quorum_members
            and (member.version != best or (member.asked.unverified and is_known_here))
        }
        idle = {m.replica_id for m in candidates if self._is_idle_spare(m)}
        joining |= idle
        budget_s = min((m.asked.join_budget_s for m in candidates if m.replica_id not in joining), default=0.0)
        following = [
            m
            for m in candidates
            if m.replica_id in joining
            and should_follow(m.asked, self._joining.usual_s, stays=m.replica_id in idle)
            and (m.replica_id in idle or not self._waits_in_vain(m, now))
            and (self._has_counterparts(m) or not m.asked.replays)
        ]
        reasons = {m.replica_id: self._joining.why_out(m, budget_s, now) for m in candidates if m.replica_id in joining}
        reasons |= dict.fromkeys(idle, "it is a spare: it waits until a replica group is lost")
        reasons |= {m.replica_id: self._why_follows(m, waits=self._is_teaching(now, beside=m)) for m in following}
        out = {replica_id: reason for replica_id, reason in reasons.items() if reason}
        admitted = [member for member in candidates if member.replica_id not in out]
        is_at_work = self._quorum_members.keys() - self._waiting.keys()
        holding = [member for member in candidates if member.replica_id not in joining]
        if is_at_work and not admitted:
            return admitted, out, following
        if len(admitted) < self.settings.min_replicas or len(holding) < self._min_trainers(holding):
            others = [member for member in candidates if member.replica_id not in idle]
            if idle and best is None and len(others) >= self._min_trainers(others):
                return (
                    others,
                    {replica_id: out[replica_id] for replica_id in idle},
                    [m for m in following if m not in others],
                )
            return candidates, {}, []
        return admitted, out, following

    def _has_counterparts(self, member: Member) -> bool:
        """Whether those at work have as many ranks as a group: each of its ranks could replay the steps of its counterparts."""
        num_ranks = member.hello.group_world_size
        return all(other.hello.group_world_size == num_ranks for other in self._others_at_work(member))

    def _waits_in_vain(self, member: Member, now: float) -> bool:
        """Whether a group that would follow has waited so long for another one to have its state that it joins otherwise."""
        patience_s = max(FOLLOWS_WITHIN_S, member.asked.reach_s or 0.0)
        return now - member.asked_at >= patience_s and self._is_teaching(now, beside=member)

    def _why_follows(self, member: Member, *, waits: bool = False) -> str:
        if self._is_idle_spare(member):
            return "it is a spare: it follows the others until one of them is lost"
        if waits:
            return (
                f"it needs {member.asked.reach_s or 0.0:.1f} s to receive the state, and waits until another group has received"
                " its: the others serve one at a time"
            )
        return (
            f"it needs {member.asked.reach_s or 0.0:.1f} s to receive the state, longer than a step"
            f" ({self._joining.usual_s:.1f} s), so it receives it outside of the quorum first, while the others train on"
        )

    def _next_quorum_id(self, members: list[Member]) -> int:
        last = self.round
        if (
            last is None
            or last.tally.broken
            or self.quorum_id != last.quorum_id
            or any(member.asked.needs_new_quorum for member in members)
            or last.tally.roles.keys() != {member.replica_id for member in members}
        ):
            return self.quorum_id + 1
        return self.quorum_id

    def _notify_pending(
        self,
        reason: str,
        now: float,
        deadline: float | None,
        is_warning: bool = False,
        exclude: Collection[str] = (),
    ) -> Iterator[Instruction]:
        """Tell the members that wait why, now and then; the operator hears each new reason."""
        if deadline is not None:
            self._evaluate_at = min(now + PENDING_NOTICE_S, deadline)
        if reason != self.reason:
            self.reason = reason
            yield Log(f"no quorum: {reason}", is_warning=is_warning)
        for replica_id in self._waiting:
            if replica_id in exclude:
                continue
            member = self.members[replica_id]
            waited = now - member.asked_at
            if waited >= PENDING_NOTICE_S / 2 and (
                reason != member.notified_reason or now - member.notified_at >= 5 * PENDING_NOTICE_S
            ):
                member.notified_reason, member.notified_at = reason, now
                yield Send(member.connection, QuorumPending(reason=reason, waited_s=waited))

    def _form_quorum(
        self, assignment: Assignment, learners: list[Member], reason: str, now: float, others: Collection[str]
    ) -> Iterator[Instruction]:
        """Begin a step with these members, and give learners its state outside of the quorum if anybody can serve it.

        `others`: are of another layout; a learner that is none of them follows.
        """
        if self.round is not None and not self.round.tally.decided:
            self.round.tally.give_up("a new quorum was formed without the members that have not voted")
            yield from self._announce_decision(self.round, now)
        members = [self.members[part.replica_id] for part in assignment.parts]
        quorum_id = self._next_quorum_id(members)
        is_new = quorum_id != self.quorum_id or self.round is None
        yield from self._go_on_from(assignment, quorum_id)
        self.round = current = self._begin_round(assignment, members, quorum_id, now)
        roles = current.tally.roles
        numbers = {part.contributor_rank: part.replica_id for part in assignment.parts}
        self._contributors.note(
            quorum_id, current.step, {rank: who for rank, who in numbers.items() if rank is not None}
        )
        self.reason = reason
        self._quorum_members = dict.fromkeys(m for m, role in roles.items() if role in (Role.HEALTHY, Role.INLINE))
        self._spares.note_at_work(self.members[replica_id] for replica_id in self._quorum_members)
        self._evaluate_at = None
        self._choose_store_hosts(roles)
        if is_new:
            who = ", ".join(f"{part.replica_id} ({part.role.value})" for part in assignment.parts[:8])
            more = f" and {len(members) - 8} more" if len(members) > 8 else ""
            yield Log(f"quorum {quorum_id} at step {current.step}: {who}{more}; {reason}; {assignment.reason}")
        teachers = [
            rank
            for rank, member in enumerate(members)
            if roles[member.replica_id] is Role.HEALTHY and member.asked.can_serve
        ][:MAX_SOURCES]
        taught = learners if teachers else []
        places = range(len(members), len(members) + len(taught))
        num_replaying = sum(_replays(member) for member in taught if member.replica_id not in others)
        store, standby = self._store_addresses()
        patience_s = max(member.asked.patience_s for member in members)
        num_contributors, num_voters = assignment.num_contributors, assignment.num_voters  # each counts all members
        for rank, (member, part) in enumerate(zip(members, assignment.parts, strict=True)):
            request = self._take_request(member)
            member.has_left_step = False
            if part.role is Role.HEALTHY:
                member.version = assignment.version
            formed = QuorumFormed(
                request_id=request.request_id,
                quorum_id=quorum_id,
                epoch=self.epoch,
                version=assignment.version,
                role=part.role,
                replica_rank=rank,
                replica_world_size=len(members),
                contributor_rank=part.contributor_rank,
                num_contributors=num_contributors,
                num_voters=num_voters,
                store_address=store,
                standby_store_address=standby,
                sources=[_source(members[source], source) for source in part.sources],
                destinations=[*part.destinations, *(places if rank in teachers else ())],
                num_replaying=num_replaying if rank in teachers else 0,
                join_budget_s=current.join_budget_s,
                join_wait_s=current.join_wait_s,
                joiner_waiting=bool(assignment.deferred)
                or len(taught) < len(learners)
                or Role.JOINER in roles.values(),
                unverified=assignment.unverified,
                newest_step=self.newest_step,
                patience_s=patience_s,
                differs=self._equality.differs(member.replica_id, request.version),
                names_state=assignment.is_first,
                rolled_back_to=self._history.rolled_back_to,
                reason=clip(reason),
            )
            yield Send(member.connection, formed)
        sources = [_source(members[rank], rank) for rank in teachers]
        for member in self.members.values() if taught else ():
            member.kept = None  # the sources keep one state at a time
        for place, member in enumerate(taught):
            follows = member.replica_id not in others
            member.num_learned += 1
            member.learns_from = now + pause_before_learning_again_s(member.num_learned)
            if member.wish is not None:
                yield Log(f"{member.replica_id} may receive step {current.step} while it warms up")
                yield self._keep_state_for(member, member.wish, current, place, sources, now)
                continue
            why = "it does not train the same parameters yet, and first has to learn at which step the others are"
            why = self._why_follows(member) if follows else why
            yield Log(f"{member.replica_id} gets step {current.step} outside of the quorum: {why}")
            yield self._answer_outside_quorum(member, current, place, why, now, sources=sources, follows=follows)
        if self._waiting:
            self._evaluate_at = now + PENDING_NOTICE_S  # to notify them of the reason

    def _go_on_from(self, assignment: Assignment, quorum_id: int) -> Iterator[Instruction]:
        """Note from which state the job trains on, in which quorum. What was open of earlier lives is over with that."""
        step = assignment.version.step
        newest_step = self._history.goes_on_from(assignment.version, quorum_id, self.epoch)
        if assignment.is_first or step < newest_step:
            self._finished_at_step = None  # the job goes on from a checkpoint, or from an older step
        if step < newest_step:
            yield Log(f"steps {step + 1} to {newest_step} are lost, the job goes on from {step}", is_warning=True)
        self._quorum_ids.give(quorum_id)
        self.allow_step_loss = False
        in_quorum = {part.replica_id for part in assignment.parts}
        for replica_id, old_quorum_id in self._restart.end():
            if replica_id in self.members and replica_id not in in_quorum:
                reason = "the others went on after the lighthouse restarted"
                broken = QuorumBroken(quorum_id=old_quorum_id, replica_id=replica_id, lost=True, reason=reason)
                yield Send(self.members[replica_id].connection, broken)

    def _begin_round(self, assignment: Assignment, members: list[Member], quorum_id: int, now: float) -> Round:
        """Return the step that these members begin, with what the others may spend on those who join."""
        roles = {part.replica_id: part.role for part in assignment.parts}
        holding = [member for member in members if roles[member.replica_id] is Role.HEALTHY]
        healing = [member for member in members if roles[member.replica_id] in (Role.INLINE, Role.JOINER)]
        self._joining.set_limit(holding, now)
        current = Round(
            quorum_id=quorum_id,
            step=assignment.version.step,
            assignment=assignment,
            tally=Tally(roles),
            join_budget_s=None,
            formed_at=now,
        )
        if healing and not assignment.is_first:
            current.join_budget_s = min((member.asked.join_budget_s for member in holding), default=0.0)
            contributing = [member for member in holding if member.asked.contributes]
            current.is_needed = len(contributing) < self._min_trainers(contributing)
            current.join_wait_s = self._joining.most_s(current.join_budget_s, now)
            current.may_follow = frozenset(m.replica_id for m in healing if m.asked.can_follow and m.asked.guesses)
            current.reach = {
                member.replica_id: Reach(member.asked.reach_s + member.asked.load_s, now, is_measured=False)
                for member in healing
                if member.asked.reach_s is not None
            }
        return current

    def _answer_outside_quorum(
        self,
        member: Member,
        current: Round,
        place: int,
        reason: str,
        now: float,
        *,
        sources: list[Source],
        warms_up: bool = False,
        follows: bool = False,
    ) -> Send:
        """Let a member compute a step beside a quorum, which does not wait for it.

        `warms_up`: it receives nothing, and may measure the way to the sources. `follows`: it computes no step, but receives the
        state and asks again.
        """
        formed = self._beside(member, current, place, reason, sources=sources, warms_up=warms_up, follows=follows)
        return self._send_beside(member, formed, now)

    def _keep_state_for(
        self, member: Member, wish: FollowWish, current: Round, place: int, sources: list[Source], now: float
    ) -> Send:
        """Tell a learner that warms up which state is kept for it."""
        why = "it has computed its first step, and receives the state that was kept for it meanwhile"
        member.kept = self._beside(member, current, place, why, sources=sources, follows=True)
        member.wish, member.follows_until = None, now + SAY_EVERY_S
        kept = StateKept(
            quorum_id=wish.quorum_id, step=wish.step, version=member.kept.version, sources=member.kept.sources
        )
        return Send(member.connection, kept)

    def _beside(
        self,
        member: Member,
        current: Round,
        place: int,
        reason: str,
        *,
        sources: list[Source],
        warms_up: bool = False,
        follows: bool = False,
    ) -> QuorumFormed:
        """Return the answer to a learner's request, but for whose number it has. Arguments as in `_answer_outside_quorum`."""
        assignment = current.assignment
        return QuorumFormed(
            request_id=0,
            quorum_id=self.quorum_id,
            epoch=self.epoch,
            version=assignment.version,
            role=Role.LEARNER,
            replica_rank=len(assignment.parts) + place,
            replica_world_size=len(assignment.parts),
            contributor_rank=None,
            num_contributors=assignment.num_contributors,
            num_voters=assignment.num_voters,
            store_address="",
            sources=sources,
            warms_up=warms_up,
            follows=follows,
            step_s=self._joining.usual_s if follows else 0.0,
            stays=follows and self._is_idle_spare(member),
            unverified=assignment.unverified,
            newest_step=self.newest_step,
            rolled_back_to=self._history.rolled_back_to,
            reason=reason,
        )

    def _send_beside(self, member: Member, formed: QuorumFormed, now: float) -> Send:
        """Answer the open request of a member, which is a learner from now on."""
        request = self._take_request(member)
        self._quorum_members.pop(member.replica_id, None)  # it may have been in the quorum, and have given its step up
        member.is_excused = member.has_left_step = True
        member.is_beside, member.warms_up = formed.follows or formed.warms_up, formed.warms_up
        member.follows_until = now + SAY_EVERY_S if formed.follows else now
        if not formed.warms_up:
            member.taught = formed
        stays = formed.stays and self._is_idle_spare(member)  # it may have been called since
        return Send(member.connection, msgspec.structs.replace(formed, request_id=request.request_id, stays=stays))

    def _take_request(self, member: Member) -> QuorumRequest:
        """Return the open request of a member that is answered now."""
        request = member.asked
        self._stop_waiting(member)
        return request

    def _stop_waiting(self, member: Member) -> None:
        """A member asks for no quorum any more."""
        member.request, member.notified_reason = None, ""
        self._waiting.pop(member.replica_id, None)

    def _choose_store_hosts(self, roles: Mapping[str, Role]) -> None:
        """Stay with the stores that members are connected to: a new connection may take seconds (name lookups)."""
        able = [m for role in (Role.HEALTHY, Role.INLINE) for m in roles if roles[m] is role]
        kept = [replica_id for replica_id in self._store_hosts if replica_id in able]
        self._store_hosts = tuple([*kept, *(m for m in able if m not in kept)][:2])

    def _store_addresses(self) -> tuple[str, str]:
        """Addresses of the present store and of the one that stands by; empty where there is none."""
        addresses = [
            self.members[replica_id].store_address for replica_id in self._store_hosts if replica_id in self.members
        ]
        present, standby, *_ = [*addresses, "", ""]
        return present, standby

    # --------------------------------------------------------------------------------------------------------- commit

    def _on_commit_vote(self, member: Member, vote: CommitVote, now: float) -> Iterator[Instruction]:
        if member.is_beside:
            return  # it has no vote
        current = self.round
        key = (vote.quorum_id, vote.epoch, vote.step)
        if current is not None and self._key(current) == key:
            if current.tally.decided or member.replica_id in current.tally.lost:
                yield from self._on_late_vote(member, vote, current, now)
                return
            was_broken = current.tally.broken
            current.tally.cast(member.replica_id, vote)
            current.name_late(member.replica_id)
            if vote.broken and not current.tally.decided:
                # A joiner that left the collectives: its vote decides nothing, but those who wait for it wait in vain.
                if member.replica_id not in current.failed:
                    current.failed.add(member.replica_id)
                    self._note_failed_join([member.replica_id], now - current.formed_at, now)
                reason = f"{member.replica_id}: {clip(vote.reason) or 'its collectives failed'}"
                yield from self._break_collectives(
                    current, member.replica_id, lost=False, reason=reason, voted_too=not was_broken
                )
            yield from self._advance_step(current, now)
        elif self._history.remembers(key) or vote.epoch == self.epoch or self._restart.is_over:
            yield Send(member.connection, self._answer_late(member, vote, now))
        else:
            yield from self._break_forgotten_collectives(self._restart.voted(member.replica_id, vote, now))
            yield from self._settle_forgotten_steps(now)

    def _key(self, current: Round) -> StepKey:
        return current.quorum_id, self.epoch, current.step

    def _on_late_vote(self, member: Member, vote: CommitVote, current: Round, now: float) -> Iterator[Instruction]:
        """Take a vote that comes after the decision, or from a member that was lost in the step."""
        tally = current.tally
        if not tally.decided:
            # It was lost and came back. Its vote decides nothing, but if it approves it holds the same sum as the others.
            tally.votes.setdefault(member.replica_id, vote)
            return
        answer = self._answer_late(member, vote, now)
        if answer.outcome is Outcome.COMMIT and member.is_in_step and not member.is_let_go:
            self._quorum_members[member.replica_id] = None  # it holds the state after all, and is waited for
        yield Send(member.connection, answer)

    def _answer_late(self, member: Member, vote: CommitVote, now: float) -> CommitDecided:
        answer = self._history.answer_late(member.replica_id, vote)
        if answer.outcome is Outcome.COMMIT:
            self._note_held([member.replica_id], (vote.quorum_id, vote.epoch, vote.step))
        return self._as_told(member, answer, now)

    def _note_held(self, replica_ids: Iterable[str], key: StepKey) -> None:
        """Note that members that hear of a commit hold its state from now on, but for those that gave up waiting just now."""
        for replica_id in replica_ids:
            if self._is_listening(replica_id):
                self.members[replica_id].version = state_after(key)

    def _on_commit_declined(self, replica_id: str) -> Iterator[Instruction]:
        """Free the last step if this member, which goes on to the next one, was the last that could hold its state."""
        key = self._history.declined(replica_id)
        if key is not None:
            yield self._nobody_followed(key)

    def _nobody_followed(self, key: StepKey) -> Log:
        self._history.nobody_followed(key)
        return Log(f"step {key[2]} of quorum {key[0]} is discarded after all: nobody waited for the decision")

    def _advance_step(self, current: Round, now: float) -> Iterator[Instruction]:
        tally = current.tally
        if tally.all_voters_approved:
            current.all_approved_at = now if current.all_approved_at is None else current.all_approved_at
            self._close_without_joiners(current, now)
        if tally.decided:
            yield from self._announce_decision(current, now)
            return
        yield from self._check_waits(current, now)
        if current.stalled and not tally.decided and not tally.all_voters_approved:
            yield from self._check_stall(current, now)

    def _close_without_joiners(self, current: Round, now: float) -> None:
        """Commit without the joiners if the others wait for them no longer."""
        if current.join_budget_s is None or not self._joining.keeps_waiting(current, now):
            current.tally.close(current.gave_up)

    def _on_join_progress(self, member: Member, progress: JoinProgress, now: float) -> Iterator[Instruction]:
        current = self.round
        if member.is_beside:
            member.progress, member.follows_until = progress, now + SAY_EVERY_S
            if now - member.progress_logged_at >= SAY_EVERY_S:
                member.progress_logged_at = now
                yield Log(f"{member.replica_id} {learner_in_words(member, self.newest_step)}")
            return
        if (
            current is None
            or not current.is_open_at(progress.quorum_id, progress.step)
            or current.tally.roles.get(member.replica_id) not in (Role.JOINER, Role.INLINE)
        ):
            return
        before = current.reach.get(member.replica_id)
        if before is None or before.seconds or progress.reach_s:  # since when it has all counts
            current.reach[member.replica_id] = Reach(progress.reach_s, now, is_measured=True, does=progress.does)
        if current.tally.all_voters_approved or current.stalled:
            yield from self._advance_step(current, now)
        elif current.tally.roles[member.replica_id] is Role.INLINE and progress.reach_s:
            yield from self._give_up_on(current, [member.replica_id], now)

    def _announce_decision(self, current: Round, now: float, culprit: str = "") -> Iterator[Instruction]:
        """Tell all connected members how the step ended, once. `culprit`: the member on whose account it is discarded."""
        tally = current.tally
        if tally.verdict is CommitDecision.COMMIT:
            yield from self._equality.judge(current, now)
            for replica_id in tally.apart & self.members.keys():
                self.members[replica_id].version = StateVersion(step=current.assignment.version.step)
            self._take_back_what_was_taught(tally.apart, current.assignment.version)
        self._joining.ended(current, now)
        approvers = [m for m in tally.votes if tally.outcome(m) is Outcome.COMMIT]
        followers = [m for m in approvers if self._is_listening(m)]
        if approvers and not followers:
            tally.discard_all("every member that approved gave up waiting for the decision")
        committed = tally.verdict is CommitDecision.COMMIT
        if not committed and any(self._is_listening(m) for m in tally.roles if m not in tally.votes):
            tally.broken = True  # who has not voted is told to leave its collectives
        key = self._key(current)
        outcome = Outcome.COMMIT if committed else Outcome.DISCARD
        self._history.remember(key, tally, outcome, tally.reason)
        if committed:
            self._history.committed(key, followers)
            self._note_held(followers, key)
            behind = [
                m
                for m in self._joiners(tally)
                if tally.outcome(m) is not Outcome.COMMIT and m not in current.failed | tally.apart | current.to_follow
            ]
            for replica_id in current.to_follow:
                self._quorum_members.pop(replica_id, None)
            cost_s = now - current.all_approved_at if current.all_approved_at is not None else 0.0
            self._note_failed_join(behind, cost_s, now, current.gave_up, current.underestimated)
        else:
            yield Log(f"step {current.step} of quorum {current.quorum_id} is discarded: {tally.reason}")
        for replica_id in self._joiners(tally):
            vote = tally.votes.get(replica_id)
            if vote is not None and vote.approve and not self.members[replica_id].is_let_go:
                self._quorum_members[replica_id] = None  # it holds the state now: the next quorum waits for it too
        for replica_id, role in tally.roles.items():
            vote = tally.votes.get(replica_id) if role in (Role.JOINER, Role.INLINE) else None
            if vote is not None and vote.approve:
                self._joining.joined(replica_id)
        contributors = [part.replica_id for part in current.assignment.parts if part.contributor_rank is not None]
        if committed:
            first = next((part.replica_id for part in current.assignment.parts if part.contributor_rank == 0), "")
            if kept_silent := self._speaking.committed(first, approvers, hears=first in followers):
                yield Log(kept_silent)
        all_leave = (
            committed
            and bool(contributors)
            and all(m in followers and self._may_go(self.members[m], now) for m in contributors)
        )
        for replica_id in tally.roles:
            member = self.members.get(replica_id)
            if member is None:
                continue
            if replica_id in followers or (
                tally.roles[replica_id] is Role.HEALTHY and self._is_still_in_quorum(member)
            ):
                self._quorum_members[replica_id] = None  # also where it was lost on the way, and is back
            has_voted = replica_id in tally.votes
            if not committed and not has_voted and member.is_in_step:
                broken = QuorumBroken(
                    quorum_id=current.quorum_id, replica_id=culprit or replica_id, lost=False, reason=clip(tally.reason)
                )
                yield Send(member.connection, broken)
            if member.is_in_step and (has_voted or (committed and replica_id not in tally.lost)):
                decided = CommitDecided(
                    quorum_id=current.quorum_id,
                    epoch=self.epoch,
                    step=current.step,
                    outcome=tally.outcome(replica_id),
                    broken=tally.broken,
                    differs=replica_id in tally.apart,
                    reason=clip(tally.reason),
                )
                decided = self._as_told(member, decided, now, all_leave=all_leave)
                yield Send(member.connection, decided)
                if decided.leaving:
                    yield self._say_who_stays(member)
        yield from self._end_late_waits(current)

    def _take_back_what_was_taught(self, apart: Collection[str], version: StateVersion) -> None:
        """Let no learner receive this state from groups that turned out to hold another, or count as a holder if it has it from
        them. Learners are in no step, so its assignment does not name them.
        """
        for member in self.members.values() if apart else ():
            taught, kept = member.taught, member.kept
            if kept is not None and kept.version == version:
                sources = [source for source in kept.sources if source.replica_id not in apart]
                member.kept = msgspec.structs.replace(kept, sources=sources) if sources else None
            if (
                taught is not None
                and taught.version == version
                and any(source.replica_id in apart for source in taught.sources)
            ):
                self._equality.set_apart(member.replica_id, version)
                if member.version == version:
                    member.version = StateVersion(step=version.step)

    def _is_listening(self, replica_id: str) -> bool:
        """Whether a member is connected and waits for the decision: it has not gone on from this step."""
        return replica_id in self.members and self.members[replica_id].is_in_step

    def _joiners(self, tally: Tally) -> list[str]:
        return [m for m, role in tally.roles.items() if role is Role.JOINER and m not in tally.lost]

    def _note_failed_join(
        self, joiners: list[str], cost_s: float, now: float, reason: str = "", underestimated: Collection[str] = ()
    ) -> None:
        """Note that an attempt to join cost the others `cost_s`."""
        for replica_id in joiners:
            self._quorum_members.pop(replica_id, None)
        self._joining.failed(joiners, cost_s, now, reason, underestimated)

    def _on_collective_wait(self, member: Member, wait: CollectiveWait, now: float) -> Iterator[Instruction]:
        current = self.round
        if current is None or wait.group_rank >= member.hello.group_world_size:
            return
        if wait.quorum_id != current.quorum_id and member.is_in_step:
            reason = "the others have formed another quorum"
            broken = QuorumBroken(quorum_id=wait.quorum_id, replica_id=member.replica_id, lost=True, reason=reason)
            yield Send(member.connection, broken)
            return
        is_of_round = wait.quorum_id == current.quorum_id and wait.step == current.step
        if not is_of_round or member.replica_id not in current.tally.roles:
            return
        if current.tally.is_after_vote(member.replica_id, wait):
            current.late.setdefault(wait.group_rank, {})[member.replica_id] = wait
            yield from self._end_late_waits(current)
            return
        if current.tally.decided:
            return
        current.waits.setdefault(wait.group_rank, {})[member.replica_id] = wait
        yield from self._check_waits(current, now)
        if not current.tally.decided and wait.deviates and current.may_start(wait.group_rank):
            cleared = CollectiveCleared(
                quorum_id=wait.quorum_id, step=wait.step, group_rank=wait.group_rank, index=wait.index
            )
            for replica_id in current.living():
                yield Send(self.members[replica_id].connection, cleared)

    def _check_waits(self, current: Round, now: float) -> Iterator[Instruction]:
        """Discard the step as soon as it is certain that a member waits for a collective that another will not issue."""
        apart = current.why_collectives_never_complete()
        if apart is not None:
            culprit, reason = apart
            if current.tally.roles.get(culprit) is Role.JOINER:
                self._note_failed_join([culprit], now - current.formed_at, now)
            current.tally.give_up(reason)
            yield from self._announce_decision(current, now, culprit=culprit)

    def _on_step_left(self, member: Member) -> Iterator[Instruction]:
        """End the collectives of the last step in which others wait for this member, which has gone on."""
        current = self.round
        if current is not None and member.replica_id in current.tally.roles:
            current.note_left(member)
            yield from self._end_late_waits(current)

    def _end_late_waits(self, current: Round) -> Iterator[Instruction]:
        """After the decision, end the collectives in which a member waits for one that has gone on. The step stands."""
        if not current.tally.decided or current.tally.broken:
            return  # where they are broken all have been told
        apart = current.why_late_collectives_never_complete()
        if apart is not None:
            current.tally.broken = True
            culprit, reason = apart
            if (member := self.members.get(culprit)) is not None and member.is_let_go:
                reason = f"{culprit} leaves its job, and issues no collective of step {current.step} any more"
            yield from self._break_collectives(current, culprit, lost=False, reason=reason)

    def _on_stall_report(self, member: Member, report: StallReport, now: float) -> Iterator[Instruction]:
        current = self.round
        if (
            current is not None
            and current.is_open_at(report.quorum_id, report.step)
            and member.replica_id in current.tally.roles
        ):
            current.stalled.add(member.replica_id)
            yield from self._check_stall(current, now)

    def _check_stall(self, current: Round, now: float) -> Iterator[Instruction]:
        if joiners := current.stalled_behind():
            yield from self._give_up_on(current, joiners, now)

    def _give_up_on(self, current: Round, joiners: list[str], now: float) -> Iterator[Instruction]:
        """Discard the step if the holders of the state may not wait any longer, in a collective, for these members."""
        tally = current.tally
        if self._joining.keeps_waiting_in_collective(current, joiners, now):
            return
        why = current.gave_up or f"the others waited longer than join_budget for {name_some(joiners)} in a collective"
        self._note_failed_join(joiners, now - current.formed_at, now, why, current.underestimated)
        tally.give_up(why)
        yield from self._announce_decision(current, now, culprit=joiners[0])

    # --------------------------------------------------------------------------------------------------------- losses

    def _on_member_lost(
        self,
        replica_id: str,
        reason: str,
        now: float,
        *,
        is_on_purpose: bool = False,
        is_closed: bool = False,
        is_back: bool = False,
    ) -> Iterator[Instruction]:
        """Remove a member, and tell at once those that share a collective with it.

        Args:
            is_on_purpose: whether it leaves, or is refused; else it may come back with its state.
            is_closed: whether its connection is closed.
            is_back: whether it is here again in an instant, so that nothing needs to be looked at before.
        """
        member = self._roster.remove(replica_id, reason, is_closed=is_closed)
        self._history.gone(replica_id)
        self._speaking.gone(replica_id)
        if not is_on_purpose and not member.has_finished:
            self._history.cut_off(group_name(replica_id), member.version, now)
        elif is_on_purpose and self._history.is_valid(member.version):
            self._left_at_step = max(self._left_at_step, member.version.step)
        self._stop_waiting(member)
        self._quorum_members.pop(replica_id, None)
        self._leaving.pop(replica_id, None)
        if is_on_purpose:
            self._drained.pop(replica_id, None)
        yield Log(f"{replica_id} is gone: {reason}; {len(self.members)} replica groups live")
        yield from self._equality.lost(replica_id)
        self._spares.lost(replica_id)
        current = self.round
        if current is not None and replica_id in current.tally.roles and replica_id not in current.tally.lost:
            tally = current.tally
            was_decided, was_broken = tally.decided, tally.broken
            tally.lose(replica_id, reason)
            if not was_decided and tally.roles[replica_id] is Role.JOINER:
                self._note_failed_join([replica_id], now - current.formed_at, now)
            if not (was_decided and was_broken):  # else all know
                why = f"{replica_id}: {reason}"
                yield from self._break_collectives(current, replica_id, lost=True, reason=why, voted_too=not was_broken)
            if not was_decided:
                yield from self._advance_step(current, now)
        if not self.members:
            self._evaluate_at = None
        yield from self._break_forgotten_collectives(self._restart.left(replica_id))
        yield from self._settle_forgotten_steps(now)
        if not is_back:
            yield from self._call_spares()
            yield from self._reconsider(now)

    def _break_collectives(
        self, current: Round, culprit: str, *, lost: bool, reason: str, voted_too: bool = True
    ) -> Iterator[Instruction]:
        """Tell all that may be in a collective of this quorum that it cannot finish; members that voted need to hear it once."""
        broken = QuorumBroken(quorum_id=current.quorum_id, replica_id=culprit, lost=lost, reason=reason)
        for replica_id in current.tally.roles:
            is_concerned = voted_too or replica_id not in current.tally.votes
            if replica_id != culprit and is_concerned and self._is_listening(replica_id):
                yield Send(self.members[replica_id].connection, broken)

    # ------------------------------------------------------------------------------------------- after our own restart

    def _settle_forgotten_steps(self, now: float) -> Iterator[Instruction]:
        was_held = self._restart.hold(now) is not None
        for settled in self._restart.settle(now):
            outcome = Outcome.COMMIT if settled.verdict is CommitDecision.COMMIT else Outcome.DISCARD
            reason = "decided from the members' reports after the lighthouse restarted"
            self._history.remember(settled.key, None, outcome, reason)
            quorum_id, _, step = settled.key
            yield Log(f"step {step} of quorum {quorum_id}: {outcome.value}, {reason}")
            if outcome is Outcome.COMMIT:
                followers = [m for m in settled.approvers if self._is_listening(m)]
                self._history.committed(settled.key, followers, others_may_know=settled.others_may_know)
                self._note_held(followers, settled.key)
                if not followers and not settled.others_may_know:
                    yield self._nobody_followed(settled.key)
            for replica_id in settled.voters:
                if self._is_listening(replica_id):
                    approve = replica_id in settled.approvers
                    mine = Outcome.LEFT_BEHIND if outcome is Outcome.COMMIT and not approve else outcome
                    decided = CommitDecided(
                        quorum_id=quorum_id, epoch=settled.key[1], step=step, outcome=mine, broken=True, reason=reason
                    )
                    member = self.members[replica_id]
                    yield Send(member.connection, self._as_told(member, decided, now))
        if was_held and self._waiting and self._restart.hold(now) is None:
            yield from self._evaluate(now)

    def _break_forgotten_collectives(self, broken: list[tuple[str, int]]) -> Iterator[Instruction]:
        for replica_id, quorum_id in broken:
            member = self.members.get(replica_id)
            if member is not None:
                reason = "a member of this quorum is gone, and the lighthouse restarted"
                message = QuorumBroken(quorum_id=quorum_id, replica_id=replica_id, lost=True, reason=reason)
                yield Send(member.connection, message)

    # ----------------------------------------------------------------------------------------------------------- time

    def _on_tick(self, now: float) -> Iterator[Instruction]:
        timeout = self.settings.heartbeat_timeout_s
        while (silent := self._roster.longest_silent()) is not None and now >= silent.last_seen + timeout:
            reason = f"nothing heard from it for {now - silent.last_seen:.1f} s"
            yield from self._on_member_lost(silent.replica_id, reason, now)
            yield Send(silent.connection, Dropped(reason=reason))
            yield Close(silent.connection)
        current = self.round
        if current is not None and current.look_again_at is not None and now >= current.look_again_at:
            current.look_again_at = None
            if not current.tally.decided:
                yield from self._advance_step(current, now)
        yield from self._let_go_between_steps(now)
        yield from self.callers.tick(now)
        yield from self._break_forgotten_collectives(self._restart.expire(now))
        yield from self._settle_forgotten_steps(now)
        if self._waiting and self._evaluate_at is not None and now >= self._evaluate_at:
            yield from self._evaluate(now)


def _refuse_superseded(name: str) -> Refused:
    return Refused(code="superseded", reason=f"another process runs as replica group {clip(name)!r} now. {OWN_ID}")


def _replays(learner: Member) -> bool:
    """Whether a learner that is taught now wants redo entries."""
    return learner.asked.replays if learner.wish is None else learner.wish.replays


def _source(member: Member, rank: int) -> Source:
    return Source(replica_id=member.replica_id, replica_rank=rank, checkpoint_addresses=member.checkpoint_addresses)
