"""The lighthouse over time: events in, instructions out. This file knows no sockets and no clock.

    state = LighthouseState(settings, epoch="5f0c")
    for instruction in state.handle(Received("conn-1", Hello(...)), now=12.0): ...
    state.next_deadline()  # call handle(Tick(), now) then

The life of a step: members ask (`QuorumRequest`), the lighthouse forms a quorum (`quorum`) and tells each member its role
(`recovery`), each member votes, the lighthouse decides the step for all of them (`commit`), they ask again. This file takes the
events in and forms the quorums; the rest is in parts, which share `job_record`.

What must hold, whatever happens (the simulation in `tests/simulation` checks it):
- A `quorum_id` names one set of members. It only rises, also when the lighthouse restarts: members report the last one that
  they saw, and a lighthouse that hears of an earlier life goes on at the next thousand (`quorum.QuorumIds`).
- A step is decided once.
- A member that is not in the quorum, or did not approve in time, is never told to commit.
- No quorum forms below the newest committed step that any member reports, unless the operator allows step loss; and not even
  then while a holder of a newer state is alive or was disconnected a moment ago.
`LighthouseState.validate` says what holds between two events.

Who is a member: `roster`. Which states there are, and who may hold them: `history`. How a step goes once its quorum has formed:
`deciding`. Who stays outside of the quorum, and what such a group is told: `beside`. When a group that is to leave may go:
`leaving`. What a restarted lighthouse learns from its members: `restart`.

Work per event is constant, but for the event that forms a quorum or decides a step: it costs one pass over the members.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

import msgspec

from torchft_ckpt.core.coordination.beside import OUT_OF_TURN, TURN_UNKNOWN, Beside
from torchft_ckpt.core.coordination.connecting import Connecting
from torchft_ckpt.core.coordination.deciding import Deciding
from torchft_ckpt.core.coordination.equality import Equality
from torchft_ckpt.core.coordination.history import RecentContributors, StateHistory
from torchft_ckpt.core.coordination.hold import LOOK_AGAIN_S, Holds
from torchft_ckpt.core.coordination.job_record import JobRecord
from torchft_ckpt.core.coordination.joining import Joining
from torchft_ckpt.core.coordination.leaving import Leaving
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
from torchft_ckpt.core.coordination.lighthouse_records import Member, MemberPhase, Round
from torchft_ckpt.core.coordination.messages import (
    MAX_GROUPS,
    MAX_NODES_TOLD,
    MAX_TEXT_CHARS,
    PROTOCOL_VERSION,
    AllowStepLoss,
    CollectiveWait,
    CommitVote,
    ConnectedBeside,
    Drain,
    Dropped,
    Heartbeat,
    Hello,
    JoinerWaiting,
    JoinProgress,
    LeafDigests,
    Leave,
    LeavesFound,
    LeaveWish,
    LocateState,
    LostAsked,
    Meeting,
    Nodes,
    QuorumBroken,
    QuorumFormed,
    QuorumPending,
    QuorumRequest,
    Refused,
    ReplicasDiffer,
    Role,
    Source,
    Start,
    Starts,
    StartTold,
    StateLocated,
    StateVersion,
    ToLighthouse,
    Welcome,
    clip,
    group_name,
    name_some,
    refuse_version,
)
from torchft_ckpt.core.coordination.patience import NOTICE_AGAIN_S, PENDING_NOTICE_S, restart_patience_s
from torchft_ckpt.core.coordination.quorum import Asked, QuorumIds, decide_quorum
from torchft_ckpt.core.coordination.recovery import MAX_SOURCES, Assignment, Holder, StepLost, assign_recovery
from torchft_ckpt.core.coordination.restart import NOTHING_UNTOLD, RestartRecovery, Untold
from torchft_ckpt.core.coordination.roster import Roster
from torchft_ckpt.core.coordination.spares import Spares
from torchft_ckpt.core.coordination.speaking import Speaking
from torchft_ckpt.core.coordination.starting import StartingGroups
from torchft_ckpt.core.coordination.trial import Trials, Verdict

OWN_ID = (
    "If that is another replica group, and not this one started again: each group needs a replica id of its own"
    " (Manager(replica_id=...), which the examples make from REPLICA_GROUP_ID)"
)
"""Two groups of one id, each started again when it ends, end each other in turn."""
SHRINKS = "only groups that were in the last quorum may be in this one (shrink_only)"


class LighthouseState:
    """All that the lighthouse knows. Not thread-safe: one caller at a time.

    Args:
        settings: what the operator chose.
        epoch: a text that no other life of this lighthouse has.
        finished_step: the job was over at this step, when its groups were gone and all else was forgotten.
        untold: what earlier lives have left (`untold`).
    """

    def __init__(
        self,
        settings: LighthouseSettings,
        epoch: str,
        *,
        finished_step: int | None = None,
        untold: Untold = NOTHING_UNTOLD,
    ) -> None:
        self.settings = settings
        self.epoch = epoch
        self._roster = Roster()
        self._job = JobRecord(
            settings=settings,
            epoch=epoch,
            members=self._roster.members,
            history=StateHistory(epoch, finished_step, untold),
            quorum_ids=QuorumIds(epoch),
            finished_at_step=finished_step,
        )
        self._job.quorum_ids.begin_after(*untold.quorum[:2])
        self.members = self._roster.members
        """Read-only, by replica id, the longest silent member first."""
        self.lost_members = self._roster.lost
        """Read-only: the latest members that are gone, for the operator: the reason, and when each was heard last."""
        self._joining = Joining()
        self._spares = Spares()
        self._beside = Beside(self._job, self._joining, self._spares)
        self._holds = Holds(self._job, self._joining)
        self._connecting = Connecting(self._job, self._joining, self._beside)
        self._leaving = Leaving(self._job)
        self._starting = StartingGroups(self._job)
        self._equality = Equality(self.members)
        self._trials = Trials()
        patience_s = restart_patience_s(settings.join_timeout_s, settings.heartbeat_timeout_s)
        self._restart = RestartRecovery(patience_s, untold)
        self._contributors = RecentContributors()
        self._speaking = Speaking()
        self._deciding = Deciding(self._job, self._joining, self._equality, self._trials, self._speaking, self._leaving)
        self._evaluate_at: float | None = None
        """When to look again whether a quorum can be formed. Set while anybody waits for one."""
        self.reason = ""
        """Why there is no quorum at the moment, or why the last was formed."""

    # -------------------------------------------------------------------------------------------------- the interface

    def handle(self, event: Event, now: float) -> list[Instruction]:
        """Take an event, return what to do, in order. `now` in seconds, never falling."""
        self._job.now = now
        return [*self._excuse_silence_while_paused(now), *self._on_event(event, now)]

    def _on_event(self, event: Event, now: float) -> Iterator[Instruction]:
        if isinstance(event, Received):
            return self._on_message(event.connection, event.message, now)
        if isinstance(event, ConnectionClosed):
            return self._on_connection_closed(event, now)
        return self._on_tick(now)

    def next_deadline(self) -> float | None:
        """Return when `Tick` is due, if nothing else happens before. It never needs to be early."""
        silent = self._roster.longest_silent()
        silent_at = None if silent is None else silent.last_seen + self.settings.heartbeat_timeout_s
        look_at = self._evaluate_at if self._job.waiting or self._holds.is_on else None
        deadlines = [silent_at, look_at, self._restart.deadline(self._job.now), self._connecting.deadline]
        return min((at for at in (*deadlines, *self._leaving.deadlines()) if at is not None), default=None)

    @property
    def round(self) -> Round | None:
        """The step of the last quorum. None before the first one."""
        return self._job.round

    @property
    def quorum_id(self) -> int:
        return self._job.quorum_id

    @property
    def newest_step(self) -> int:
        return self._job.newest_step

    @property
    def finished_step(self) -> int | None:
        return self._job.finished_step

    @property
    def untold(self) -> Untold:
        """What is to be written down, for the next life, before anything is said."""
        return self._job.history.untold

    def why_failed(self, member: Member) -> str:
        return self._joining.why_failed(member)

    @property
    def job(self) -> JobRecord:
        """What is so at present, to be read."""
        return self._job

    @property
    def last_said_to_differ(self) -> str:
        return self._equality.last_said

    @property
    def allow_step_loss(self) -> bool:
        """See `JobRecord.allows_step_loss`."""
        return self._job.allows_step_loss

    @property
    def has_lost_nothing(self) -> bool:
        """Whether the groups that are here all hold the newest state whole, and train on from it: no step could be lost."""
        members = self.members.values()
        held = [self._job.holds_newest(m.version) and not (m.request is not None and m.request.torn) for m in members]
        return bool(held) and all(held) and self.finished_step is None

    @property
    def is_deserted(self) -> bool:
        return not self.members

    @property
    def has_begun(self) -> bool:
        """Whether a quorum was formed in this life, or the state was named with which the first one begins."""
        return self.round is not None or self._job.first.proven

    def _excuse_silence_while_paused(self, now: float) -> Iterator[Instruction]:
        """If the lighthouse itself was paused, it could not hear: what the members said meanwhile is yet to be read."""
        silent = self._roster.longest_silent()
        timeout = self.settings.heartbeat_timeout_s
        late = now - (silent.last_seen + timeout) if silent is not None else 0.0
        if late > timeout / 2:
            self._roster.hear_all(now)
            line = f"the lighthouse was paused for at least {late:.1f} s; it drops no replica group for being silent meanwhile"
            yield Log(line, is_warning=True)

    def validate(self) -> None:
        """Check the invariants of this class and its parts, for tests; a `RuntimeError` says which one is broken."""
        self._roster.validate()
        self._job.validate()
        self._leaving.validate()
        self._beside.validate()
        self._starting.validate()
        self._trials.validate()
        self._restart.validate(self.members.keys())
        self._holds.validate()
        self._connecting.validate()
        if (self._job.waiting or self._holds.is_on) and self._evaluate_at is None:
            raise RuntimeError(f"{list(self._job.waiting)} wait, and nothing looks at them again")
        self._deciding.validate()

    # ------------------------------------------------------------------------------------------------------- messages

    def _on_message(self, connection: str, message: ToLighthouse, now: float) -> Iterator[Instruction]:
        if isinstance(message, AllowStepLoss):
            yield from self._on_allow_step_loss(now)
        elif isinstance(message, Drain):
            yield from self._on_drain(message, now)
        elif isinstance(message, Hello):
            yield from self._on_hello(connection, message, now)
        elif (member := self._roster.on(connection)) is not None:
            self._roster.hear(member, now)
            yield from self._on_member_message(member, message, now)
        elif not self._roster.has_given_up(connection):
            yield Send(connection, Refused(code="hello", reason="the first message has to be Hello"))
            yield Close(connection)

    def _on_member_message(self, member: Member, message: ToLighthouse, now: float) -> Iterator[Instruction]:
        if isinstance(message, Heartbeat):
            return
        if (impossible := self._why_impossible(member.replica_id, message)) is not None:
            yield from self._send_away(member, impossible, "it named a quorum or a step that cannot have existed", now)
        elif isinstance(message, QuorumRequest):
            yield from self._on_quorum_request(member, message, now)
        elif isinstance(message, LocateState):
            yield from self._on_locate_state(member, message, now)
        elif isinstance(message, CommitVote):
            yield from self._on_commit_vote(member, message, now)
        elif isinstance(message, JoinProgress):
            yield from self._on_join_progress(member, message, now)
        elif isinstance(message, ConnectedBeside):
            yield from self._connecting.answered(member, message, now)
            yield from self._connecting.begin(now)
        elif isinstance(message, CollectiveWait):
            yield from self._deciding.waits(member, message, now)
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
        self._job.allows_step_loss = True
        self._job.finished_at_step = None
        yield Log("the operator allows the loss of steps", is_warning=True)
        yield from self._evaluate(now)

    def _on_connection_closed(self, event: ConnectionClosed, now: float) -> Iterator[Instruction]:
        if (member := self._roster.close(event.connection)) is not None:
            yield from self._on_member_lost(member.replica_id, event.reason, now, is_closed=True)

    def _on_hello(self, connection: str, hello: Hello, now: float) -> Iterator[Instruction]:
        if (refusal := self._why_refused(connection, hello)) is not None:
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
        self._job.history.is_back(name)

        addresses = hello.checkpoint_addresses
        hello = msgspec.structs.replace(hello, checkpoint_addresses=[])  # it is kept in several places, for long
        member = Member(
            connection=connection,
            hello=hello,
            last_seen=now,
            version=hello.version,
            checkpoint_addresses=addresses,
            phase=MemberPhase.FOLLOWS if hello.is_beside else MemberPhase.IN_STEP,
            has_computed=hello.is_beside or hello.was_in_quorum,
        )
        self._roster.add(member)
        self._leaving.joined(member, now)
        welcome = Welcome(
            protocol=PROTOCOL_VERSION,
            epoch=self.epoch,
            heartbeat_timeout_s=self.settings.heartbeat_timeout_s,
            store_address=self._connecting.store_addresses()[0],
        )
        yield Send(connection, welcome)
        yield Log(f"{replica_id} is here at step {hello.version.step}, {len(self.members)} replica groups live")
        yield from self._equality.joined(hello)
        yield from self._break_forgotten_collectives(self._learn_from(hello, now))
        member.version = self._as_it_counts(member, hello.version)
        self._speaking.said(replica_id, hello.speaks)
        if self._deciding.is_still_in_quorum(member):
            self._job.quorum_members[replica_id] = None
        yield from self._deciding.give_up_overtaken(now)
        yield from self._break_cut_off_collectives(hello, connection)
        yield from self._beside.have_state_captured()
        yield from self._settle_forgotten_steps(now)
        yield from self._reconsider(now)

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
        if self._roster.on(connection) is not None:
            return Refused(code="hello", reason="a connection says Hello once")
        if self._roster.is_superseded(hello.replica_id):
            return _refuse_superseded(group_name(hello.replica_id))
        if (impossible := self._why_impossible(hello.replica_id, hello)) is not None:
            return impossible
        if len(self.members) >= MAX_GROUPS and hello.replica_id not in self.members:
            reason = f"{clip(hello.replica_id, 200)} would exceed the {MAX_GROUPS} groups that a job may have"
            return Refused(code="groups", reason=reason)
        return None

    def _why_impossible(self, replica_id: str, message: ToLighthouse) -> Refused | None:
        """Refuse a message that names a quorum or a step that this job cannot have had."""
        if isinstance(message, Hello):
            last = StateVersion(step=message.newest_step, quorum_id=message.last_quorum_id, epoch=message.last_epoch)
            versions = [last, message.version, message.rolled_back_to]
        elif isinstance(message, CommitVote):
            versions = [StateVersion(step=message.step, quorum_id=message.quorum_id, epoch=message.epoch)]
        else:
            versions = [message.version] if isinstance(message, QuorumRequest | LocateState) else []
        for version in versions:
            no_id = self._job.quorum_ids.why_never_given(version.quorum_id, version.epoch)
            if why := no_id or self._job.history.why_never_made(version.step):
                reason = f"{clip(replica_id, 200)} is refused: {why}"
                return Refused(code="quorum id" if no_id else "step", reason=reason)
        return None

    def _learn_from(self, hello: Hello, now: float) -> list[tuple[str, int]]:
        """Take what a member remembers, and this lighthouse may not remember. Returns as `RestartRecovery.heard`."""
        open_step = self.round.step if self.round is not None else 0
        self._job.history.learn(hello, (version for _, version in self._job.held()), open_step=open_step)
        broken = self._restart.heard(hello, now) if hello.last_epoch != self.epoch else []
        is_last = self._job.quorum_ids.begin_after(hello.last_quorum_id, hello.last_epoch)
        # A job that went back in a quorum forms none below it: its states would be void.
        self._job.quorum_ids.begin_after(hello.rolled_back_to.quorum_id, hello.rolled_back_to.epoch)
        # It may hold the state of a quorum that it was not in.
        if self._job.quorum_ids.begin_after(hello.version.quorum_id, hello.version.epoch) or is_last:
            self._job.quorum_members.clear()
        return broken

    def _holder(self, member: Member, trial: Verdict) -> Holder:
        """`trial`: who was found to hold the state that it names, or another one."""
        request, version = member.asked, member.version
        is_own = self._trials.is_to_load(member) and version.step >= self.newest_step
        return Holder(
            replica_id=member.replica_id,
            version=StateVersion(step=version.step) if member.replica_id in trial.idle else version,
            restored=request.restored or is_own,
            torn=request.torn,
            init_sync=member.hello.init_sync,
            allow_heal=request.allow_heal,
            contributes=request.contributes,
            is_corrected=self._trials.is_corrected(member.replica_id) or self._beside.may_hold_more(member),
            came_in=request.came_in,
            min_contributors=member.hello.min_contributors,
        )

    # ------------------------------------------------------------------------------------------------------- requests

    def _on_quorum_request(self, member: Member, request: QuorumRequest, now: float) -> Iterator[Instruction]:
        replica_id = member.replica_id
        yield from self._deciding.abandoned(replica_id, now)
        yield from self._holds.asks(member, request, now)
        layout, member.hands_over = request.layout, False
        member.connects_beside = member.hello.connects_beside
        member.min_contributors = member.hello.min_contributors if request.contributes else 0
        member.layout, member.frozen = layout.digest, layout.frozen
        if layout.text is not None:
            member.layout_text = layout.text
        if request.checkpoint_addresses is not None:
            member.checkpoint_addresses = request.checkpoint_addresses
        if member.request is None:
            member.asked_at = now
        was_beside = member.is_beside
        member.request, member.phase, member.is_called, member.progress = request, MemberPhase.ASKS, False, None
        member.starting = None
        member.notified_reason, member.is_told_of_hold = "", False
        if request.needs_new_quorum:
            yield from self._break_forgotten_collectives(self._restart.left(replica_id))
        self._speaking.said(replica_id, request.speaks)
        yield from self._deciding.left(member)
        yield from self._on_state_shown(member, request.version, now)
        self._job.waiting[replica_id] = None
        if request.at_end:
            self._job.computes_alone(member)
        yield from self._leaving.answer(now)
        if member.request is not None and self._beside.should_warm_up(member):
            yield self._beside.let_warm_up(member, now)  # others may have waited for it
        elif member.request is not None and was_beside:
            yield from self._beside.have_state_captured()
        if replica_id not in self._job.quorum_members:
            yield from self._connecting.begin(now)
        yield from self._reconsider(now)

    # --------------------------------------------------------------------------------------------------------- leaving

    def _on_drain(self, drain: Drain, now: float) -> Iterator[Instruction]:
        for member in self.named(drain.replica_id):
            wish = self._leaving.drain(member)
            yield Send(member.connection, wish)
            yield from self._on_leave_wish(member, wish, now)

    def named(self, group: str) -> list[Member]:
        """Return the members of a replica id, or of the group of that name."""
        return [m for m in self.members.values() if group in (m.replica_id, group_name(m.replica_id))]

    def _on_leave_wish(self, member: Member, wish: LeaveWish, now: float) -> Iterator[Instruction]:
        yield from self._leaving.wished(member, wish, now)
        if wish.is_told and member.request is None:
            self._leaving.let_go(member)
            if wish.issued:
                member.farewell = wish
                yield from self._deciding.left(member)
        yield from self._leaving.answer(now)
        yield from self._reconsider(now)

    # ---------------------------------------------------------------------------------------------- between two steps

    def _on_locate_state(self, member: Member, message: LocateState, now: float) -> Iterator[Instruction]:
        """Tell a member, between two steps, where the newest state is. Unless it holds that, nobody waits for it from now on."""
        replica_id = member.replica_id
        yield from self._deciding.abandoned(replica_id, now)
        self._job.stop_waiting(member)
        member.phase = MemberPhase.FINISHED if message.has_finished else MemberPhase.BETWEEN
        member.progress, member.connects_beside = None, member.hello.connects_beside
        yield from self._deciding.left(member)
        yield from self._on_state_shown(member, message.version, now)
        if message.starts is not None:
            yield from self._on_start(member, message.request_id, message.starts, now)
            return
        member.starting = None
        living = sorted(self.members.values(), key=lambda other: other.replica_id)
        sources = ((other.as_source(rank), other.version) for rank, other in enumerate(living))
        located = self._handed_over(member, message, self._job.history.locate(replica_id, message, sources))
        has_begun = self.round is not None or any(m.hello.was_in_quorum for m in self.members.values())
        if self._job.first.proven or not has_begun:  # nobody offers a first state: it is given in a hold
            located = msgspec.structs.replace(located, sources=[])
        may_say = not self._job.history.has_begun or (self.round is not None and replica_id in self.round.tally.roles)
        if message.has_finished and may_say and self.newest_step > 0 and self._job.holds_newest(message.version):
            said = {m: step for m, step in self._job.finished_by.items() if step == self.newest_step}
            self._job.finished_by = {**said, replica_id: self.newest_step}
            self._job.finished_at_step = self.newest_step
            yield Log(f"{replica_id} has finished, at step {self.newest_step}")
            yield from self._beside.call_spares()
        if not (message.has_finished or located.is_held):
            member.phase = MemberPhase.AWAY
        if member.is_excused:
            self._job.quorum_members.pop(replica_id, None)
        if not located.is_held:
            self._trials.lost(replica_id)  # it comes in anew
        yield Send(member.connection, msgspec.structs.replace(located, is_finished=self.finished_step is not None))
        if replica_id not in self._job.quorum_members:
            yield from self._connecting.begin(now)
        yield from self._reconsider(now)

    def _on_start(self, member: Member, request_id: int, starts: Starts, now: float) -> Iterator[Instruction]:
        """Tell a group that starts what to do; while it is not known yet who holds what, it is to ask again."""
        if (finished_step := self.finished_step) is not None:
            yield from self._refuse_late(member, finished_step, now)
            return
        member.checkpoint_addresses = starts.checkpoint_addresses
        self._starting.says(member, member.version, starts, now)
        if (hold := self._restart.hold(now)) is not None:
            told, version, sources = StartTold(does=Start.WAITS, reason=clip(hold[0])), StateVersion(), list[Source]()
        else:
            told, version, sources = self._starting.tell(member, now)
        located = StateLocated(request_id=request_id, version=version, sources=sources, starts=told)
        yield Send(member.connection, located)
        yield from self._reconsider(now)

    def _handed_over(self, member: Member, message: LocateState, located: StateLocated) -> StateLocated:
        """Return the answer where a state may be handed over: one decision for both sides.

        Who takes it holds it exactly if another one stands still for it, or nobody else holds it. Whoever asks later is told.
        """
        member.hands_over = message.hands_over
        others = [m for m in self.members.values() if m is not member and m.version == located.version]
        if message.takes_over and others:
            giving = {m.replica_id for m in others if m.hands_over}
            sources = [source for source in located.sources if source.replica_id in giving]
            located = msgspec.structs.replace(located, is_held=located.is_held and bool(giving), sources=sources)
        if message.takes_over and located.is_held:
            member.took = located.version
        taken_by = next((m.replica_id for m in others if m.took == located.version), "")
        return msgspec.structs.replace(located, taken_by=taken_by)

    def _on_state_shown(self, member: Member, version: StateVersion, now: float) -> Iterator[Instruction]:
        """Note the state that a member holds between two steps."""
        member.version = self._as_it_counts(member, version)
        self._job.quorum_ids.begin_after(version.quorum_id, version.epoch)
        self._restart.asked(member.replica_id)
        self._job.history.note(member.replica_id, member.version)
        yield from self._deciding.declined(member.replica_id)
        yield from self._deciding.give_up_overtaken(now)

    def _as_it_counts(self, member: Member, version: StateVersion) -> StateVersion:
        """Return a member's state, without its name if that is void, or is that of another attempt at the step of others."""
        if self._job.is_late(member, version.step) and self._beside.others_hold(member):
            version = StateVersion(step=version.step)
        return self._job.history.as_it_counts(version)

    # --------------------------------------------------------------------------------------------------------- quorum

    def _reconsider(self, now: float) -> Iterator[Instruction]:
        """Look whether a quorum can be formed, if this event can have changed that. Else leave it to the deadline."""
        if not self._job.waiting:
            return
        survivors_back = bool(self._job.last_quorum) and self._job.waiting.keys() >= {*self._job.last_quorum}
        everyone = survivors_back or all(
            m.is_beside or m.replica_id in self._job.waiting or self._beside.is_absent_spare(m)
            for m in self.members.values()
        )
        if everyone or self.finished_step is not None:
            yield from self._evaluate(now)
        elif self._evaluate_at is None:
            self._evaluate_at = now + PENDING_NOTICE_S

    def _evaluate(self, now: float) -> Iterator[Instruction]:
        yield from self._holds.look(now)
        yield from self._try_to_form(now)
        if self._holds.is_on:
            at = now + LOOK_AGAIN_S
            self._evaluate_at = at if self._evaluate_at is None else min(self._evaluate_at, at)

    def _try_to_form(self, now: float) -> Iterator[Instruction]:
        self._evaluate_at = now + PENDING_NOTICE_S
        yield from self._leaving.answer(now)
        if not self._job.waiting:
            return
        hold = self._restart.hold(now) or self._starting.why_not_fresh(now)
        if hold is not None:
            yield from self._notify_pending(hold[0], now, hold[1])
            return
        yield from self._refuse_late_groups(now)
        if not self._job.waiting:
            return
        others = self._job.apart()
        candidates = [self.members[m] for m in self._job.waiting if m not in others]
        yield from self._beside.call_spares()
        for member in candidates:  # who was the only one with its name may be so no more, and who was not may be so now
            member.version = self._as_it_counts(member, member.asked.version)
        holders, staying = self._beside.holders(), []
        for member in candidates:
            # It lacks the newest state: that of another who holds it by now, or, at the end of its iteration, of nobody.
            if self._beside.should_warm_up(member, holders, others) or (
                member.asked.at_end and not self._beside.others_hold(member, holders)
            ):
                yield self._beside.let_warm_up(member, now)
                if holders.goes_on_from(member.version):
                    holders = self._beside.holders()
            else:
                staying.append(member)
        ending = [m for m in staying if m.asked.at_end]
        candidates = [m for m in staying if not m.asked.at_end]
        admitted, outside = self._beside.set_aside(candidates, now)
        holding = [m for m in admitted if holders.goes_on_from(m.version)]
        if unmet := self._connecting.unmet(holding):
            outside |= unmet
            admitted, holding = ([m for m in those if m.replica_id not in unmet] for those in (admitted, holding))
        # Too few without them: the others wait until they have come.
        are_few = self._job.are_too_few(admitted, holding)
        awaited = self._holds.awaited
        is_needed = are_few or any(m.replica_id in self._job.beginners for m in awaited)
        self._holds.needs(is_needed, now, are_few=are_few)
        why_not = {m.replica_id: self._why_not_held_for(m, admitted, holding, now) for m in ending}
        following, why_outside = self._beside.at_end(ending, holding, why_not, now, are_needed=are_few)
        if not is_needed:
            why_outside |= self._connecting.why_not(
                [m for m in ending if m.replica_id not in why_outside], [*holding, *awaited]
            )
        may_come = [m for m in ending if holding and m.replica_id not in why_outside]
        turns_come = any(why in (OUT_OF_TURN, TURN_UNKNOWN) and not why_not[m] for m, why in why_outside.items())
        # Where all who hold the state look on, so do those that come in.
        trains = any(m.asked.contributes for m in admitted)
        coming = {m.replica_id: Asked(at=m.asked_at, contributes=trains) for m in (*may_come, *awaited) if is_needed}
        outside |= why_outside
        yield from self._notify_left_out(outside | others, others, now)
        if self._spares.awaits(self.members, now):
            self._evaluate_at = min(self._evaluate_at, self._spares.await_until)
            return
        for member, why in ((self.members[m], why) for m, why in outside.items()):
            if why == TURN_UNKNOWN or (why == OUT_OF_TURN and self.round is not None and are_few):
                yield self._beside.let_warm_up(member, now, why)
        if not admitted:
            who = name_some(m for m in self._job.quorum_members if m not in self._job.waiting) or "the others"
            step = "goes on" if self.round is None else f"began {now - self.round.formed_at:.0f} s ago"
            reason = f"it waits for {who}: their step {step}, and they have not asked for the next one yet"
            due = (m for m in ending if not m.notified_reason or now - m.notified_at >= NOTICE_AGAIN_S)
            yield from (_notify(member, reason, now) for member in due if member.replica_id not in outside)
            return
        out = outside.keys() | others.keys()
        if (hold := self._joining.hold(admitted, now)) is not None:
            yield from self._notify_pending(hold[0], now, hold[1], is_warning=True, exclude=out)
            return
        asked = {
            m.replica_id: Asked(
                at=m.asked_at,
                shrink_only=m.asked.shrink_only,
                contributes=m.asked.contributes,
                patience_s=m.asked.patience_s,
            )
            for m in admitted
        }
        asked |= coming
        absent = out | {m.replica_id for m in self.members.values() if m.is_excused or self._beside.is_absent_spare(m)}
        absent |= {m.replica_id for m in ending if m.replica_id not in asked}
        alive = [m for m in self.members if m in asked or m not in absent]
        newest = self._job.history.holders(self._job.held(), self.newest_step)
        verdict = decide_quorum(
            alive=alive,
            asked=asked,
            last_quorum=self._job.last_quorum,
            holders=newest,
            min_replicas=self.settings.min_replicas,
            join_timeout_s=self.settings.join_timeout_s,
            now=now,
        )
        if not verdict.formed:
            reason = f"{verdict.reason}; of another layout: {name_some(sorted(others))}" if others else verdict.reason
            if left := self._leaving.hint_if_over():
                reason = f"{reason}.{left}"
            elif self.newest_step and not newest:
                gone = name_some(list(self.lost_members)[-5:])
                reason += f". No group here holds step {self.newest_step}, which was committed; gone are: {gone or 'not known'}"
            told, is_few = (reason, now, verdict.deadline), verdict.is_below_minimum
            yield from self._notify_pending(*told, is_warning=bool(others), exclude=out, is_below_minimum=is_few)
            return
        members = [self.members[m] for m in verdict.members if m not in coming]
        if late := self._beside.out_of_turn(members, now):
            for replica_id, why in late.items():
                yield Log(f"{replica_id} computes a step alone: {why}")
                yield self._beside.let_warm_up(self.members[replica_id], now, why)
            yield from self._try_to_form(now)
            return
        trial = self._trial_of(members)
        yield from self._answer_differing(trial, members)
        if trial.stops or trial.loads:
            return
        assignment = assign_recovery(
            [self._holder(member, trial) for member in members],
            newest_step=self.newest_step,
            allow_step_loss=self.allow_step_loss or self.settings.allow_step_loss,
            quorum_id=self.quorum_id + 1,
            epoch=self.epoch,
            first=self._job.first,
        )
        if isinstance(assignment, StepLost):
            yield from self._notify_pending(self._why_lost(assignment, verdict.members), now, None, is_warning=True)
            return
        hold = self._job.history.why_not_back(
            assignment.version.step,
            self._job.held(exclude=verdict.members),
            is_first=assignment.is_first and assignment.version != self._job.first,
            restarted_at=self._restart.first_heard_at,
            patience_s=self.settings.join_timeout_s,
            now=now,
        )
        if hold is not None and not self.allow_step_loss:
            yield from self._notify_pending(hold[0], now, hold[1], is_warning=True)
            return
        lacking = [self.members[replica_id] for replica_id in assignment.lacking]
        if helpless := [member.replica_id for member in lacking if not member.asked.can_load]:
            yield from self._refuse_to_heal(helpless, assignment, now)
            return
        if lacking and assignment.is_first and assignment.version != self._job.first:
            yield from self._give_first(assignment, [m for m in lacking if m.asked.waits_for_quorum], now)
            lacking = [m for m in lacking if m.request is not None]
        if lacking:
            for member in lacking:
                yield self._beside.let_warm_up(member, now)
            yield from self._try_to_form(now)
            return
        if may_come:
            yield from self._begin_hold(assignment, may_come, now, is_needed=are_few)
        was_held = self._holds.is_on
        yield from self._holds.look(now)  # those who waited in it may have been sent to warm up since
        if self._holds.is_on:
            why = self._holds.reason(now)
            yield from self._notify_pending(why, now, now + LOOK_AGAIN_S, exclude=absent, is_held=True)
            return
        if was_held:  # and others may come for the state of now
            yield from self._try_to_form(now)
            return
        learners = self._beside.to_teach(following, others, now)
        # If it expected all who ask, those who train would capture their state at each step for one that does not come in.
        expects = bool(may_come) or turns_come
        yield from self._form_quorum(assignment, learners, verdict.reason, now, others, trial, is_expecting=expects)

    def _why_not_held_for(self, member: Member, admitted: list[Member], holding: list[Member], now: float) -> str:
        """Say why the quorum of those who are admitted is not held for a member that asks `at_end`; empty: it is."""
        if self._job.quorum_members and any(m.asked.shrink_only for m in (*admitted, member)):
            return SHRINKS
        return self._holds.why_not(member, holding, now)

    def _begin_hold(
        self, assignment: Assignment, newcomers: list[Member], now: float, *, is_needed: bool
    ) -> Iterator[Instruction]:
        """Hold the quorum for newcomers, if anybody has captured the state for them, or it cannot train without them."""
        holding = [self.members[part.replica_id] for part in assignment.parts if part.role is Role.HEALTHY]
        proved = [member for member in holding if not member.asked.came_in] or holding
        if not is_needed and not any(member.asked.can_serve for member in proved):
            return  # they capture it before the next step: who forms this quorum is told so
        giving = self._beside.giving(proved)
        self._holds.begin(newcomers, holding, giving, assignment, now)
        for member in newcomers:
            self._trials.lost(member.replica_id)  # it is compared anew after its first step
        names = name_some(member.replica_id for member in newcomers)
        yield Log(f"{names} receives the state of step {assignment.version.step}, and the others wait for that")
        yield from self._beside.give_held(newcomers, giving, assignment)

    def _give_first(self, assignment: Assignment, newcomers: list[Member], now: float) -> Iterator[Instruction]:
        """Give the job's first state to those who begin the job with its holders: it gets its name, and the quorum is held."""
        version = assignment.version
        holding = [self.members[part.replica_id] for part in assignment.parts if part.role is Role.HEALTHY]
        yield from self._go_on_from(assignment, version.quorum_id)
        for member in holding:
            yield Send(member.connection, JoinerWaiting(request_id=member.asked.request_id, names=version))
            member.request = msgspec.structs.replace(member.asked, version=version, restored=False)
            member.version = version
        self._holds.needs(True, now, are_few=False)
        giving = self._beside.giving(holding)
        self._holds.begin(newcomers, holding, giving, assignment, now)
        names = name_some(member.replica_id for member in newcomers) or "nobody"
        yield Log(f"{assignment.reason}: {names} receives it, and the job begins when that is done")
        yield from self._beside.give_held(newcomers, giving, assignment)

    def _trial_of(self, members: Collection[Member]) -> Verdict:
        """Compare what members show of the state they go on from. One without a name is given out when the quorum forms."""
        counts = self._job.history.is_valid if self._job.may_lose_steps else self._job.holds_newest
        held = [m for m in members if not m.asked.torn and counts(m.asked.version)]
        if not held:
            return Verdict()
        version = max(m.asked.version for m in held)
        goes_back = not self._job.holds_newest(version)
        return self._trials.judge([m for m in held if m.asked.version == version], version.step, goes_back=goes_back)

    def _answer_differing(self, trial: Verdict, members: list[Member]) -> Iterator[Instruction]:
        """Have members that showed another state load that of the others, which wait; or stop all of them."""
        for noted in trial.noted:
            yield Log(noted)
        for said in trial.said:
            yield Log(said, is_warning=True)
        if trial.stops:
            stop = ReplicasDiffer(version=members[0].asked.version, stops=True, reason=clip(" ".join(trial.said), 4000))
            for replica_id in trial.stops:
                yield Send(self.members[replica_id].connection, stop)
            return
        places = {member.replica_id: place for place, member in enumerate(members)}
        for replica_id, names in trial.loads.items():
            giving = [self.members[name] for name in names]
            self._holds.gives([self.members[replica_id]], giving)
            sources = [member.as_source(places[member.replica_id]) for member in giving]
            yield self._beside.corrects(self.members[replica_id], sources, len(members))

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
        """If the job is over, refuse the members that came too late for its last step, and who would train on from it alone."""
        step = self.finished_step
        while self._job.waiting and step is not None:
            yield from self._refuse_late(self.members[next(iter(self._job.waiting))], step, now)

    def _refuse_late(self, member: Member, step: int, now: float) -> Iterator[Instruction]:
        replica_id = member.replica_id
        came = f"{replica_id} came with step {member.version.step}"
        if self._job.holds_newest(member.version):
            came = (
                f"{replica_id}, which holds that step too, asks for another: each loop ends at the same step of the job"
            )
        reason = (
            f"the job is finished at step {step}, and {came}. To train on or to start over, name another job"
            " (Manager(job=...), TORCHFT_CKPT_JOB), or let the lighthouse forget this one: python -m torchft_ckpt forget-job"
        )
        refusal = Refused(code="finished", reason=clip(reason), step=step)
        yield from self._send_away(member, refusal, "it came after the job had finished", now)

    def _why_lost(self, lost: StepLost, replica_ids: tuple[str, ...]) -> str:
        hint = self._leaving.hint_if_over()
        if lost.is_torn:
            return (
                f"no replica group here has a whole state ({name_some(replica_ids)}: an interrupt or an error has broken off a"
                " step or a load half-way, or its ranks hold different states). Start one of them again, from a checkpoint"
                " (Manager.load_state_dict) if there is one"
            )
        ahead = self._job.history.holders(self._job.held(exclude=replica_ids), lost.newest_step)
        if ahead:
            return f"waiting for {name_some(ahead)}: alive, and holding step {lost.newest_step}, which was committed"
        gone = name_some(list(self.lost_members)[-5:])
        torn = name_some(
            [one for one in replica_ids if (asked := self.members[one].request) is not None and asked.torn]
        )
        there = [f"{gone} is gone"] * bool(gone)
        there += [f"the state of {torn} is torn, by an interrupt or an error"] * bool(torn)
        return (
            f"step {lost.newest_step} was committed, but the newest whole state here is of step {lost.best_step}: no group that"
            f" held a newer one has it any more ({'; '.join(there) or 'who held it is not known here'}).{hint} Bring one of them"
            " back, or start a group from a checkpoint (Manager.load_state_dict), or accept the loss: python -m torchft_ckpt"
            " allow-step-loss. A new run of the same script is another job: set another TORCHFT_CKPT_JOB"
        )

    def _notify_left_out(
        self, reasons: Mapping[str, str], others: Collection[str], now: float
    ) -> Iterator[Instruction]:
        """Tell the members that stay outside why. The operator hears that once; for `others`, of another layout, each reason."""
        for replica_id in self._job.waiting:
            member = self.members[replica_id]
            has_waited = replica_id in others or now - member.asked_at >= PENDING_NOTICE_S / 2
            if replica_id in reasons and has_waited and now - member.notified_at >= PENDING_NOTICE_S:
                reason = reasons[replica_id]
                if not member.notified_reason or (replica_id in others and member.notified_reason != reason):
                    said = reason if replica_id in others else f"{replica_id} is not admitted: {reason}"
                    yield Log(said, is_warning=True)
                yield _notify(member, reason, now)

    def _notify_pending(
        self,
        reason: str,
        now: float,
        deadline: float | None,
        is_warning: bool = False,
        exclude: Collection[str] = (),
        is_held: bool = False,
        is_below_minimum: bool = False,
    ) -> Iterator[Instruction]:
        """Tell the members that wait why, now and then; the operator hears each new reason.

        `is_held`: the quorum is held for others. That this begins, or is over, the members are told at once.
        """
        if deadline is not None:
            self._evaluate_at = min(now + PENDING_NOTICE_S, deadline)
        if reason != self.reason:
            self.reason = reason
            yield Log(f"no quorum: {reason}", is_warning=is_warning)
        for replica_id in self._job.waiting:
            if replica_id in exclude:
                continue
            member = self.members[replica_id]
            is_due = reason != member.notified_reason or now - member.notified_at >= NOTICE_AGAIN_S
            has_waited = now - member.asked_at >= PENDING_NOTICE_S / 2
            if (has_waited and is_due) or is_held is not member.is_told_of_hold:
                yield _notify(member, reason, now, is_held=is_held, is_below_minimum=is_below_minimum)

    def _form_quorum(
        self,
        assignment: Assignment,
        learners: list[Member],
        reason: str,
        now: float,
        others: Collection[str],
        trial: Verdict,
        *,
        is_expecting: bool,
    ) -> Iterator[Instruction]:
        """Begin a step with these members, and give learners its state outside of the quorum if anybody can serve it.

        `others`: are of another layout; a learner that is none of them follows. `trial`: what was found before.
        `is_expecting`: the next quorum is to be held for somebody, if anybody has captured the state by then.
        """
        yield from self._deciding.replaced(now)
        members = [self.members[part.replica_id] for part in assignment.parts]
        quorum_id = self._job.next_quorum_id(members)
        if assignment.is_first and assignment.version.quorum_id >= self.quorum_id:
            quorum_id = assignment.version.quorum_id  # it names their state, and no quorum yet
        last = self.round
        is_new = last is None or quorum_id != last.quorum_id
        if is_new:
            self._job.history.formed(quorum_id, len(members))
        place = self._connecting.take([member.replica_id for member in members], now) if is_new else ""
        if assignment.version != self._job.first or assignment.version.step < self.newest_step:
            yield from self._go_on_from(assignment, quorum_id)
        elif quorum_id > self.quorum_id:  # a member has told of an earlier life since that state got its name
            self._job.quorum_ids.give(quorum_id)
        self._trials.begins(assignment, members, self._job.beginners)
        self._job.first, self._job.beginners = StateVersion(), {}
        self._speaking.begins([member.replica_id for member in members], now)
        current = self._deciding.begin(assignment, members, quorum_id, now)
        current.leaves = LeavesFound(common=trial.common, own=trial.own)
        roles = current.tally.roles
        numbers = {part.contributor_rank: part.replica_id for part in assignment.parts}
        num_writers = assignment.num_proved or assignment.num_contributors
        writers = {rank: who for rank, who in numbers.items() if rank is not None and rank < num_writers}
        self._contributors.note(quorum_id, current.step, writers)
        self.reason = reason
        self._job.quorum_members = dict.fromkeys(m for m, role in roles.items() if role is Role.HEALTHY)
        self._holds.quorum_forms(current.step)
        self._spares.note_at_work(self.members[replica_id] for replica_id in self._job.quorum_members)
        self._evaluate_at = None
        self._connecting.choose_stores(roles)
        if is_new:
            who = ", ".join(f"{part.replica_id} ({part.role.value})" for part in assignment.parts[:8])
            more = f" and {len(members) - 8} more" if len(members) > 8 else ""
            yield Log(f"quorum {quorum_id} at step {current.step}: {who}{more}; {reason}; {assignment.reason}")
        teachers = [
            rank
            for rank, member in enumerate(members)
            if roles[member.replica_id] is Role.HEALTHY
            and member.asked.can_serve
            and not (member.asked.came_in and assignment.num_proved)
        ][:MAX_SOURCES]
        taught = learners if teachers else []
        self._holds.teaches((m for m in taught if m.replica_id not in others), assignment.version.step)
        asking = [self.members[replica_id] for replica_id in self._job.waiting]
        awaits_turn = any(m.out_of_turn_since is not None and not m.asked.at_end for m in asking)
        places = range(len(members), len(members) + len(taught))
        store, standby = self._connecting.store_addresses()
        meets = Meeting(store_address=store, place=place, standby_store_address=standby)
        patience_s = max(member.asked.patience_s for member in members)
        num_contributors, num_voters = assignment.num_contributors, assignment.num_voters  # each counts all members
        # After a step that counts in this very quorum each has begun with a part of what it is dealt.
        goes_on = last is not None and last.quorum_id == quorum_id and last.step < current.step
        nodes = _nodes_to_tell([[] if goes_on else m.asked.nodes for m in members], assignment)
        for rank, (member, part) in enumerate(zip(members, assignment.parts, strict=True)):
            request = self._job.take_request(member)
            member.phase, member.has_computed = MemberPhase.IN_STEP, True
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
                num_proved=assignment.num_proved,
                num_voters=num_voters,
                meets=meets,
                destinations=[*places] if rank in teachers else [],
                newest_step=self._job.history.lasting_step,
                patience_s=patience_s,
                leaves=current.leaves,
                names_state=assignment.is_first and request.version != assignment.version,
                rolled_back_to=self._job.history.rolled_back_to,
                nodes=nodes,
                reason=clip(reason),
            )
            yield Send(member.connection, formed)
            if is_expecting or awaits_turn or len(taught) < len(learners):
                yield Send(member.connection, JoinerWaiting())
        sources = [members[rank].as_source(rank) for rank in teachers]
        yield from self._beside.teach(taught, current, sources, others, now)
        yield from self._connecting.begin(now)
        if self._job.waiting:
            self._evaluate_at = now + PENDING_NOTICE_S  # to notify them of the reason

    def _go_on_from(self, assignment: Assignment, quorum_id: int) -> Iterator[Instruction]:
        """Note from which state the job trains on, in which quorum. What was open of earlier lives is over with that."""
        step = assignment.version.step
        members = [self.members[part.replica_id] for part in assignment.parts]
        holders = [part.replica_id for part in assignment.parts if part.role is Role.HEALTHY]
        if own := [member.replica_id for member in members if assignment.is_first and self._trials.is_to_load(member)]:
            gone = f"nobody is left who holds the state of step {step} that {name_some(own)} was to load"
            yield Log(f"{gone}: the job goes on from its own", is_warning=True)
        if assignment.is_first and assignment.version != self._job.first:
            fresh = {m.replica_id for m in members if m.asked.version.step == step and not m.has_computed}
            begin = fresh if fresh.intersection(holders) else {*holders}
            for replica_id in {m.replica_id for m in members} - begin:
                self._trials.lost(replica_id)  # it begins anew
            self._job.first = assignment.version
            self._job.beginners = {m.replica_id: m.replica_id in begin for m in members}
        newest_step = self._job.history.goes_on_from(assignment.version, quorum_id, self.epoch, holders)
        if assignment.is_first or step < newest_step:
            self._job.finished_at_step = None  # the job goes on from a checkpoint, or from an older step
        ended = {m for m, at in self._job.finished_by.items() if at == step == self._job.finished_at_step} - {*holders}
        if ended and (self.round is None or self.round.step != step):
            line = f"{name_some(holders)} train on from step {step}, at which {name_some(sorted(ended))} finished"
            yield Log(line, is_warning=True)
        if step < newest_step:
            yield Log(f"steps {step + 1} to {newest_step} are lost, the job goes on from {step}", is_warning=True)
        self._job.quorum_ids.give(quorum_id)
        if self._job.may_lose_steps:
            self._starting.forget_named()
        self._job.allows_step_loss = False
        in_quorum = {part.replica_id for part in assignment.parts}
        for replica_id, old_quorum_id in self._restart.end():
            if replica_id in self.members and replica_id not in in_quorum:
                reason = "the others went on after the lighthouse restarted"
                broken = QuorumBroken(quorum_id=old_quorum_id, replica_id=replica_id, lost=True, reason=reason)
                yield Send(self.members[replica_id].connection, broken)

    # ------------------------------------------------------------------------------------------------------- the step

    def _on_commit_vote(self, member: Member, vote: CommitVote, now: float) -> Iterator[Instruction]:
        if member.is_beside:
            return  # it has no vote
        key = (vote.quorum_id, vote.epoch, vote.step)
        if vote.epoch == self.epoch or self._job.history.remembers(key) or self._restart.is_over:
            yield from self._deciding.voted(member, vote, now)
        elif member.hello.was_in_quorum and key[:2] == (member.hello.last_quorum_id, member.hello.last_epoch):
            yield from self._break_forgotten_collectives(self._restart.voted(member.replica_id, vote, now))
            yield from self._settle_forgotten_steps(now)

    def _on_join_progress(self, member: Member, progress: JoinProgress, now: float) -> Iterator[Instruction]:
        if member.is_beside:
            yield from self._beside.progressed(member, progress, now)
            self._holds.progressed(member, progress, now)

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
        self._job.history.gone(replica_id)
        self._speaking.gone(replica_id)
        if not self._job.history.has_begun:
            self._job.finished_at_step = None  # it may have been the word of this member alone
        if not is_back:  # the same process, with the state that it had
            self._trials.lost(replica_id)
            self._job.beginners.pop(replica_id, None)
        if not is_on_purpose and member.phase is not MemberPhase.FINISHED:
            self._job.history.cut_off(group_name(replica_id), member.version, now)
        self._job.stop_waiting(member)
        self._job.quorum_members.pop(replica_id, None)
        self._connecting.lost(replica_id)
        self._leaving.lost(member, is_on_purpose=is_on_purpose)
        yield Log(f"{replica_id} is gone: {reason}; {len(self.members)} replica groups live")
        yield from self._equality.lost(replica_id)
        self._spares.lost(replica_id)
        yield from self._deciding.lost(replica_id, reason, now)
        if not self.members:
            yield from self._holds.look(now)
            self._evaluate_at = None
        yield from self._break_forgotten_collectives(self._restart.left(replica_id))
        yield from self._settle_forgotten_steps(now)
        if not is_back:
            yield from self._connecting.begin(now)
            yield from self._beside.call_spares()
            yield from self._reconsider(now)

    # ------------------------------------------------------------------------------------------- after our own restart

    def _settle_forgotten_steps(self, now: float) -> Iterator[Instruction]:
        was_held = self._restart.hold(now) is not None
        for settled in self._restart.settle(now):
            yield from self._deciding.settled(settled, now)
        if was_held and self._job.waiting and self._restart.hold(now) is None:
            yield from self._evaluate(now)

    def _break_forgotten_collectives(self, broken: list[tuple[str, int]]) -> Iterator[Instruction]:
        for replica_id, quorum_id in broken:
            member = self.members.get(replica_id)
            if member is not None:
                reason = "a member of this quorum is gone, or not in this step, and the lighthouse restarted"
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
        for let_go in self._leaving.let_go_between_steps(now):
            yield from let_go
            yield from self._reconsider(now)
        yield from self._connecting.expire(now)
        yield from self._connecting.begin(now)
        yield from self._break_forgotten_collectives(self._restart.expire(now))
        yield from self._settle_forgotten_steps(now)
        if (self._job.waiting or self._holds.is_on) and self._evaluate_at is not None and now >= self._evaluate_at:
            yield from self._evaluate(now)


def _notify(member: Member, reason: str, now: float, *, is_held: bool = False, is_below_minimum: bool = False) -> Send:
    """Tell a member why it waits."""
    member.notified_reason, member.notified_at, member.is_told_of_hold = reason, now, is_held
    held_s = 2 * NOTICE_AGAIN_S if is_held else 0.0  # it is told again before that is over
    said = clip(reason, MAX_TEXT_CHARS)
    pending = QuorumPending(
        reason=said, waited_s=now - member.asked_at, held_s=held_s, is_below_minimum=is_below_minimum
    )
    return Send(member.connection, pending)


def _refuse_superseded(name: str) -> Refused:
    return Refused(code="superseded", reason=f"another process runs as replica group {clip(name)!r} now. {OWN_ID}")


def _nodes_to_tell(said: list[Nodes], assignment: Assignment) -> list[Nodes | None]:
    """Return what members are told that they have computed of their step: see `QuorumFormed.nodes`."""
    if sum(map(len, said)) > MAX_NODES_TOLD:
        said = [[] for _ in said]
    contributes = [part.contributor_rank is not None for part in assignment.parts]
    if all(contributes) and not any(said):
        return []
    return [nodes if adds else None for nodes, adds in zip(said, contributes, strict=True)]
