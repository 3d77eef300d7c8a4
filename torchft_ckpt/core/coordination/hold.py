"""This file decides for whom a quorum that could form is held until they have its state, and for how long.

Who is in a quorum holds its state. A group that lacks it asks at the end of an iteration that did not count (`at_end`). When all
who train have asked for their next step, the state stands still: the quorum is *held*, such groups receive that very state, load
it, and ask for the same step with its name. Then the quorum forms, with them as holders. A job's first state gets its name for
that before there is a quorum: those who begin the job with its holder receive it before they compute anything.

    hold   event                                                 next   what follows
    -----  ----------------------------------------------------  -----  ----------------------------------------------------------
    none   all who train have asked, a group asks `at_end`,      held   StateGiven(TO_COME_IN) to it,
           and its need fits the allowance                              JoinerWaiting(num_held) to those that serve it, and
                                                                        QuorumPending(held_s) to all that wait
    none   the same, and nobody has captured the state           none   the quorum forms; they do so before their next step
    none   it does not fit, or was held for at this boundary,    none   it waits outside, and is told why; the quorum forms
           or has failed a short while ago, or the quorum
           would leave it out (`shrink_only`)
    held   another group asks `at_end`, and fits                 held   as the first
    held   it asks for the step with the name of that state      none   the quorum forms with it
    held   it is gone, or asks otherwise: it has no such state   none   the quorum forms without it
    held   it is silent, does not begin its next step, or        none   the quorum forms without it; what it receives is of use in
           measures that it needs longer than the allowance             the next hold
    held   those who train are too few without it                held   no limit of time: no step could count
    held   one who begins the job has not come yet               held   no limit of time, unless it has said nothing for a minute:
                                                                        then the job begins without it
    held   nobody waits any more who holds that state            none   nothing
    held   one that gives the state asks anew: it has left that  none   the quorum forms without it: it may have the values of
           attempt at the step, in which its loop may have              another attempt, and comes in as all do
           changed something

A hold that fails costs its own time, out of `JoinAllowance`, and nothing else: no step, no quorum id. Who fails owes, as all who
fail to come in (`patience.Debt`), and is held for once at a boundary.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass

from torchft_ckpt.core.coordination.job_record import JobRecord
from torchft_ckpt.core.coordination.joining import SILENT_S, Joining
from torchft_ckpt.core.coordination.lighthouse_events import Instruction, Log
from torchft_ckpt.core.coordination.lighthouse_records import Member, MemberPhase
from torchft_ckpt.core.coordination.messages import (
    JoinProgress,
    QuorumRequest,
    Receives,
    StateVersion,
    group_name,
    name_some,
)
from torchft_ckpt.core.coordination.recovery import Assignment

LOOK_AGAIN_S = 0.25
FIRST_WITHIN_S = 60.0
"""One that is to begin the job, and says nothing for so long, comes in later."""
BEGINS_WITHIN_S = 0.5
"""So long, or half as long again as it says that its loop takes, a group that has the state may take to ask for the step."""


@dataclass(slots=True)
class _Awaited:
    """One group that the quorum is held for."""

    since: float
    stood_s: float
    """So long the others had stood still before: `Holds._stood`."""
    top_s: float
    """The longest `QuorumRequest.top_s` of it and of those that wait: they run the same loop."""
    holding: frozenset[str]
    """Those that held the state then."""
    said: JoinProgress | None = None
    said_at: float = 0.0
    """When it said so; that it has all counts from the first time, unless it does something more."""

    @property
    def begins_within_s(self) -> float:
        """It may take so long from the state to its step."""
        return max(BEGINS_WITHIN_S, 1.5 * self.top_s)

    @property
    def has_loaded(self) -> bool:
        return self.said is not None and self.said.does is Receives.LOADS and self.said.reach_s == 0.0


class Holds:
    """The hold of one job's next quorum, if there is one. Not thread-safe."""

    def __init__(self, job: JobRecord, joining: Joining) -> None:
        self._job = job
        self._joining = joining
        self._version = StateVersion()
        self._began = self._stood_before_s = 0.0
        """Since when the others stand still, or no step can count; and how long they had stood still in this hold before that."""
        self._is_needed = False
        """Without those that are held for no step could count, or they are to begin the job."""
        self._are_few = False
        """The former."""
        self._awaited: dict[str, _Awaited] = {}
        self._tried: dict[str, str] = {}
        """Groups that the quorum was held for since the last one formed, with the member that was given the state of now."""
        self._giving: dict[str, int] = {}
        """Who gave it to them, or to those that are corrected, by replica id, and with which request it had asked for the step.
        Empty in outer loops: what they give is the same in each attempt."""
        self._given: dict[str, int] = {}
        """Who was given it, or corrected, since the last quorum formed, and the state of which step. Likewise."""

    @property
    def is_on(self) -> bool:
        return bool(self._awaited)

    @property
    def awaited(self) -> list[Member]:
        """Those that the quorum is held for, and that are connected."""
        return [self._job.members[replica_id] for replica_id in self._awaited if replica_id in self._job.members]

    def reason(self, now: float) -> str:
        """Say for whom the others wait, and of whom nothing was heard for long. The latter may have to be ended by hand."""
        said_at = {
            m: awaited.since if awaited.said is None else awaited.said_at for m, awaited in self._awaited.items()
        }
        silent = [m for m, at in said_at.items() if self._is_needed and now >= at + SILENT_S]
        more = (
            f"; {name_some(silent)} has said nothing for {SILENT_S:g} s and more: look into its log" if silent else ""
        )
        waits = f"wait until {name_some(self._awaited)} has the state of step {self._version.step}"
        return f"all others have asked, and {waits}{more}"

    # ------------------------------------------------------------------------------------------------ before, and begin

    def needs(self, is_needed: bool, now: float, *, are_few: bool) -> None:
        """Note whether no step could count without those that the quorum is held for, as the others are too few (`are_few`) or
        they are to begin the job: the others lose no time meanwhile."""
        self._are_few = are_few
        if is_needed != self._is_needed:
            self._stood_before_s, self._began = self._stood(now), now
            self._is_needed = is_needed

    def _stood(self, now: float) -> float:
        """For how long the others could have trained in this hold without those that it is for."""
        return self._stood_before_s + (0.0 if self._is_needed else now - self._began)

    def why_not(self, member: Member, holding: Collection[Member], now: float) -> str:
        """Say why those that hold the state do not wait for a member that asks `at_end`; empty: they do."""
        if self.is_on and any(other.asked.version != self._version for other in holding):
            return "the others wait with another state"
        if group_name(member.replica_id) in self._tried and not self._is_needed:
            return "the others have waited for it before this step already"
        if self._is_needed:
            return self._joining.why_paused(member, now)
        if self.is_on:
            need_s = self._stood(now) + (member.asked.need.reach_s or 0.0)
            if why := self._joining.why_not(need_s + member.asked.need.load_s, now):
                return why
        return self._joining.why_out(member, now)

    def begin(
        self,
        newcomers: Collection[Member],
        holding: Collection[Member],
        giving: Collection[Member],
        assignment: Assignment,
        now: float,
    ) -> None:
        """The quorum that these hold the state for is held for newcomers, or for more of them than before. Some `giving` it."""
        if not self.is_on or self._version != assignment.version:
            self._awaited.clear()
            self._joining.set_limit(holding, now)
            self._version, self._began, self._stood_before_s = assignment.version, now, 0.0
        self.gives(newcomers, giving)
        usual_top_s = max(other.asked.top_s for other in holding)
        self._go_on([other.replica_id for other in holding], assignment.version.step)
        for member in newcomers:
            top_s = max(usual_top_s, member.asked.top_s)
            those = frozenset(other.replica_id for other in holding)
            self._awaited[member.replica_id] = _Awaited(now, self._stood(now), top_s, those)
            self._tried[group_name(member.replica_id)] = member.replica_id

    def quorum_forms(self, step: int) -> None:
        """A quorum forms for a step: what comes now is another boundary."""
        self._are_late(self._job.quorum_members)
        self._go_on(self._job.quorum_members, step)
        self._job.late = {name: of_step for name, of_step in self._job.late.items() if of_step >= step}
        self._tried.clear()

    def _go_on(self, holding: Collection[str], step: int) -> None:
        """The job goes on from the state of a step as these have it. If that is of an attempt that was over, as nobody else was
        there, then what others have of that step is of another one."""
        names = {group_name(replica_id) for replica_id in holding}
        if step in map(self._job.late.get, names):
            here = [group_name(m) for m, version in self._job.held() if version.step == step]
            away = self._job.history.on_their_way(step, float("inf"), self._job.now)
            self._job.late |= dict.fromkeys([*here, *away], step)
        self._job.late = {name: of_step for name, of_step in self._job.late.items() if name not in names}

    def gives(self, members: Collection[Member], giving: Collection[Member]) -> None:
        """These, which the quorum is held for or whose own differs, are given the state with which the others have asked."""
        step = max(other.asked.version.step for other in giving)
        self._given |= {m.replica_id: step for m in members if _moves_between_attempts(m.asked)}
        self._giving |= {m.replica_id: m.asked.request_id for m in giving if _moves_between_attempts(m.asked)}

    def teaches(self, learners: Iterable[Member], step: int) -> None:
        """These receive the state of a step beside the quorum that begins it: whoever asks for that step again is at another
        attempt at it."""
        self._job.late |= {group_name(m.replica_id): step for m in learners if _moves_between_attempts(m.asked)}

    def _are_late(self, others: Collection[str]) -> None:
        """What was given, but to the others, may be of an attempt that is over; who waits with it has no name for it."""
        given = {m: step for m, step in self._given.items() if m not in others}
        self._job.late |= {group_name(m): step for m, step in given.items()}
        for replica_id in self._job.waiting.keys() & given.keys():
            member = self._job.members[replica_id]
            if member.version.step == given[replica_id]:
                member.version = StateVersion(step=member.version.step)
        self._given.clear()
        self._giving.clear()

    def asks(self, member: Member, request: QuorumRequest, now: float) -> Iterator[Instruction]:
        """A member asks for a step. If it has given its state for that to others, they have the values of the attempt before."""
        awaited = self._awaited.get(member.replica_id)
        if awaited is not None and awaited.has_loaded and not request.at_end:
            self._job.late.pop(group_name(member.replica_id), None)  # it has the state of now
        if request.request_id == self._giving.get(member.replica_id, request.request_id):
            return
        self._are_late([member.replica_id])
        if self._awaited:
            yield Log(f"the others wait no longer for {name_some(self._awaited)}: {member.replica_id} has asked anew")
            for replica_id in self._awaited:
                self._job.beginners.pop(replica_id, None)
            self._awaited.clear()
            self._joining.stood_for_hold(self._stood(now), now)

    # ------------------------------------------------------------------------------------------------------ in a hold

    def progressed(self, member: Member, progress: JoinProgress, now: float) -> None:
        """A member says how far it is."""
        awaited = self._awaited.get(member.replica_id)
        if awaited is None or progress.step != self._version.step:
            return
        if not awaited.has_loaded or progress.reach_s > 0.0:  # it may take long before it can ask, and says so
            awaited.said, awaited.said_at = progress, now

    def look(self, now: float) -> Iterator[Instruction]:
        """Wait no longer for those that have come, or will not come in time."""
        if not self._awaited:
            return
        stood_s = self._stood(now)
        for replica_id, awaited in list(self._awaited.items()):
            if self._has_come(replica_id):
                del self._awaited[replica_id]
                yield Log(f"{replica_id} has the state of step {self._version.step} after {now - awaited.since:.2f} s")
                continue
            could_not, why = self._end(replica_id, awaited, stood_s, now)
            if why:
                del self._awaited[replica_id]
                self._job.beginners.pop(replica_id, None)
                self._note_failed(replica_id, awaited, could_not, why, stood_s - awaited.stood_s, now)
                yield Log(f"the others wait no longer for {replica_id}: {why}")
        if not any(self._is_held_up(self._job.members[replica_id]) for replica_id in self._job.waiting):
            self._awaited.clear()
        if not self._awaited:
            self._joining.stood_for_hold(stood_s, now)

    def _is_held_up(self, member: Member) -> bool:
        return member.asked.version == self._version and not member.asked.at_end

    def _has_come(self, replica_id: str) -> bool:
        member = self._job.members.get(replica_id)
        if member is None or member.request is None:  # one that computes by itself once more has come, too
            return member is not None and member.phase is MemberPhase.WARMS_UP and member.version == self._version
        return self._is_held_up(member)

    def _end(self, replica_id: str, awaited: _Awaited, stood_s: float, now: float) -> tuple[bool, str]:
        """Say why the others wait no longer for a group; empty: they do. Also whether it could not load, and is not just late."""
        member = self._job.members.get(replica_id)
        if member is None:
            return False, "it is gone"
        if member.phase is not MemberPhase.FOLLOWS:
            return True, "it could not receive or load the state"
        if self._is_needed:
            said_at = awaited.since if awaited.said is None else awaited.said_at
            hangs = not self._are_few and now >= said_at + max(FIRST_WITHIN_S, awaited.begins_within_s)
            return False, f"it has said nothing for {now - said_at:.0f} s, and comes in later" if hangs else ""
        return False, self._why_late(awaited, stood_s, now)

    def _why_late(self, awaited: _Awaited, stood_s: float, now: float) -> str:
        said, since_s = awaited.said, now - awaited.said_at
        if said is None:
            if stood_s >= awaited.stood_s + SILENT_S:
                return f"it has not begun to receive the state within {SILENT_S:g} s"
            return self._joining.why_not(stood_s, now)
        if awaited.has_loaded:
            if since_s >= awaited.begins_within_s:
                return f"it has the state, and has not begun its next step within {awaited.begins_within_s:.1f} s"
            return self._joining.why_not(stood_s, now)
        if since_s >= SILENT_S:
            return f"it has not said for {since_s:.1f} s how far it is"
        need_s = stood_s + max(0.0, said.reach_s - since_s)
        return self._joining.why_not(need_s, now)

    def _note_failed(
        self, replica_id: str, awaited: _Awaited, could_not: bool, why: str, cost_s: float, now: float
    ) -> None:
        is_slow = awaited.has_loaded and awaited.begins_within_s == BEGINS_WITHIN_S and replica_id in self._job.members
        if is_slow and self._joining.excuses(replica_id, now):
            return  # nobody could know how long its loop takes this time; it tells that the next time
        if could_not and awaited.holding <= self._job.members.keys():  # else it may have been one of those
            self._joining.could_not(replica_id, cost_s, now, why)
            return
        is_far = awaited.said is not None and awaited.said.reach_s > 0.0 and not could_not
        self._joining.failed([replica_id], cost_s, now, why, {replica_id} if is_far else frozenset())

    # ----------------------------------------------------------------------------------------------------- invariants

    def validate(self) -> None:
        """Check the invariants, for tests; a `RuntimeError` says which one is broken."""
        if not self._awaited.keys() <= set(self._tried.values()):
            raise RuntimeError(f"{list(self._awaited)} are waited for, and may be waited for again: {self._tried}")
        if self._awaited and not self._version.proven:
            raise RuntimeError(f"{list(self._awaited)} are waited for, and there is no state for them")
        for replica_id in self._awaited:
            member = self._job.members.get(replica_id)
            if member is not None and replica_id in self._job.quorum_members:
                raise RuntimeError(f"{replica_id} is waited for to have the state, and counts as a holder")


def _moves_between_attempts(request: QuorumRequest) -> bool:
    """Whether what no step changes may be another value in the next attempt at a step: not in an outer loop."""
    return request.contributes and request.patience_s == 0.0
