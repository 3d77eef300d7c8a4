"""This file decides for whom a quorum that could form is held until they have its state, and for how long.

Who is in a quorum holds its state. A group that lacks it asks at the end of an iteration that did not count (`at_end`). When all
who train have asked for their next step, the state stands still: the quorum is *held*, such groups receive that very state, load
it, and ask for the same step with its name. Then the quorum forms, with them as holders.

    hold   event                                                 next   what follows
    -----  ----------------------------------------------------  -----  ----------------------------------------------------------
    none   all who train have asked, a group asks `at_end`,      held   QuorumFormed(LEARNER, follows, held) to it, and
           and its need fits the allowance                              JoinerWaiting(held) to those that serve it
    none   it does not fit, or was held for at this boundary,    none   it waits outside, and is told why; the quorum forms
           or has failed a short while ago
    held   another group asks `at_end`, and fits                 held   as the first
    held   it asks for the step with the name of that state      none   the quorum forms with it
    held   it is gone, or asks otherwise: it has no such state   none   the quorum forms without it
    held   it is silent, does not begin its next step, or        none   the quorum forms without it; what it receives is of use in
           measures that it needs longer than the allowance             the next hold
    held   those who train are too few without it                held   no limit of time: no step could count
    held   nobody waits any more who holds that state            none   nothing

A hold that fails costs its own time, out of `JoinAllowance`, and nothing else: no step, no quorum id. Who fails owes, as all who
fail to join (`patience.Debt`), and is held for once at a boundary.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

from torchft_ckpt.core.coordination.job_record import JobRecord
from torchft_ckpt.core.coordination.joining import SILENT_S, Joining
from torchft_ckpt.core.coordination.lighthouse_events import Instruction, Log
from torchft_ckpt.core.coordination.lighthouse_records import Member
from torchft_ckpt.core.coordination.messages import JoinProgress, Receives, StateVersion, name_some
from torchft_ckpt.core.coordination.recovery import Assignment

LOOK_AGAIN_S = 0.25
BEGINS_WITHIN_S = 0.5
"""So long, or half as long again as it says that its loop takes, a group that has the state may take to ask for the step."""


@dataclass(slots=True)
class _Awaited:
    """One group that the quorum is held for."""

    since: float
    top_s: float
    """See `QuorumRequest.top_s`."""
    said: JoinProgress | None = None
    said_at: float = 0.0
    """When it said so; that it has all counts from the first time."""

    @property
    def has_loaded(self) -> bool:
        return self.said is not None and self.said.does is Receives.LOAD_FIRST and self.said.reach_s == 0.0


class Holds:
    """The hold of one job's next quorum, if there is one. Not thread-safe."""

    def __init__(self, job: JobRecord, joining: Joining) -> None:
        self._job = job
        self._joining = joining
        self._version = StateVersion()
        self._began = 0.0
        self._budget_s = 0.0
        self._is_needed = False
        """Without those that are held for no step could count."""
        self._awaited: dict[str, _Awaited] = {}
        self._tried: set[str] = set()
        """Were held for since the last quorum formed."""
        self._stand_in: set[str] = set()
        """Where nobody is known to hold the exact state: who stood in, and who came in with the state of those."""

    @property
    def is_on(self) -> bool:
        return bool(self._awaited)

    @property
    def reason(self) -> str:
        return f"all others have asked, and wait until {name_some(self._awaited)} has the state of step {self._version.step}"

    # ------------------------------------------------------------------------------------------------ before, and begin

    def why_not(self, member: Member, holding: Collection[Member], now: float) -> str:
        """Say why those that hold the state do not wait for a member that asks `at_end`; empty: they do."""
        is_needed = self._needs(holding)
        if self.is_on and any(other.asked.version != self._version for other in holding):
            return "the others wait with another state"
        if member.replica_id in self._tried and not is_needed:
            return "the others have waited for it before this step already"
        if is_needed:
            held = self._joining.hold([member], now)
            return "" if held is None else held[0]
        budget_s = self._budget_of(holding)
        if self.is_on and not self._is_needed:
            need_s = now - self._began + (budget_s if member.asked.reach_s is None else member.asked.reach_s)
            if why := self._joining.why_not(need_s + member.asked.load_s, budget_s, now):
                return why
        return self._joining.why_out(member, budget_s, now)

    def _needs(self, holding: Collection[Member]) -> bool:
        """Whether no step can count without others. Who is in a quorum and must not load is one of it, too."""
        num_here = sum(not (member.asked.at_end or member.asked.gathers) for member in self._waiting())
        least = max([1, *(member.min_contributors for member in holding)])
        return len(holding) < least or num_here < self._job.settings.min_replicas

    @staticmethod
    def _budget_of(holding: Collection[Member]) -> float:
        return min((member.asked.join_budget_s for member in holding), default=0.0)

    def begin(
        self, newcomers: Collection[Member], holding: Collection[Member], assignment: Assignment, now: float
    ) -> None:
        """The quorum that these hold the state for is held for newcomers; or for more of them than before."""
        if not self.is_on:
            self._joining.set_limit(holding, now)
            self._version, self._began = assignment.version, now
        giving = {member.replica_id for member in holding} if assignment.unverified else set()
        if not giving or not giving <= self._stand_in:
            self._stand_in = giving
        self._budget_s, self._is_needed = self._budget_of(holding), self._needs(holding)
        for member in newcomers:
            self._awaited[member.replica_id] = _Awaited(now, member.asked.top_s)
            self._tried.add(member.replica_id)

    def quorum_forms(self) -> None:
        """A quorum forms: what comes now is another boundary."""
        self._tried.clear()
        self._stand_in.clear()

    def stands_in(self, member: Member) -> bool:
        """Whether a member has the state that was given out in a hold since the last quorum, as no exact one was there."""
        return member.replica_id in self._stand_in and self._is_held_up(member)

    # ------------------------------------------------------------------------------------------------------ in a hold

    def progressed(self, member: Member, progress: JoinProgress, now: float) -> None:
        """A member says how far it is."""
        awaited = self._awaited.get(member.replica_id)
        if awaited is not None and progress.step == self._version.step and not awaited.has_loaded:
            awaited.said, awaited.said_at = progress, now

    def look(self, now: float) -> Iterator[Instruction]:
        """Wait no longer for those that have come, or will not come in time."""
        if not self._awaited:
            return
        held_up = [member for member in self._waiting() if self._is_held_up(member)]
        if self._needs(held_up) != self._is_needed:  # others have come, or are gone: the time begins anew
            self._spend(now)
            self._is_needed, self._began = not self._is_needed, now
        stood_s = now - self._began
        for replica_id, awaited in list(self._awaited.items()):
            if self._has_come(replica_id):
                del self._awaited[replica_id]
                if self._stand_in:
                    self._stand_in.add(replica_id)
                yield Log(f"{replica_id} has the state of step {self._version.step} after {now - awaited.since:.2f} s")
            elif why := self._why_over(replica_id, awaited, stood_s, now):
                del self._awaited[replica_id]
                self._note_failed(replica_id, awaited, why, stood_s, now)
                yield Log(f"the others wait no longer for {replica_id}: {why}")
        if not held_up:
            self._awaited.clear()
        if not self._awaited:
            self._spend(now)

    def _spend(self, now: float) -> None:
        if not self._is_needed:
            self._joining.stood_for_hold(now - self._began, now)

    def _waiting(self) -> list[Member]:
        return [self._job.members[replica_id] for replica_id in self._job.waiting]

    def _is_held_up(self, member: Member) -> bool:
        return member.asked.version == self._version and not member.asked.at_end

    def _has_come(self, replica_id: str) -> bool:
        member = self._job.members.get(replica_id)
        return member is not None and member.request is not None and self._is_held_up(member)

    def _why_over(self, replica_id: str, awaited: _Awaited, stood_s: float, now: float) -> str:
        """Say why the others wait no longer for a group; empty: they do."""
        member = self._job.members.get(replica_id)
        if member is None:
            return "it is gone"
        if member.request is not None or not member.is_beside or member.warms_up:
            return "it could not receive or load the state"
        if self._is_needed:
            return ""
        said, since_s = awaited.said, now - awaited.said_at
        if said is None:
            if now >= max(awaited.since, self._began) + self._budget_s:
                return f"it has not begun to receive the state within join_budget ({self._budget_s:g} s)"
            return self._joining.why_not(stood_s, self._budget_s, now)
        if awaited.has_loaded:
            within_s = max(BEGINS_WITHIN_S, 1.5 * awaited.top_s)
            if since_s >= within_s:
                return f"it has the state, and has not begun its next step within {within_s:.1f} s"
            return self._joining.why_not(stood_s, self._budget_s, now)
        if since_s >= max(SILENT_S, self._budget_s):
            return f"it has not said for {since_s:.1f} s how far it is"
        need_s = stood_s + max(0.0, said.reach_s - since_s)
        return self._joining.why_not(need_s, self._budget_s, now)

    def _note_failed(self, replica_id: str, awaited: _Awaited, why: str, stood_s: float, now: float) -> None:
        if awaited.has_loaded and not awaited.top_s:
            return  # nobody could know how long its loop takes; it tells that the next time
        is_far = awaited.said is not None and not awaited.has_loaded and awaited.said.reach_s > 0.0
        self._joining.failed(
            [replica_id], 0.0 if self._is_needed else stood_s, now, why, {replica_id} if is_far else frozenset()
        )

    # ----------------------------------------------------------------------------------------------------- invariants

    def validate(self) -> None:
        """Check the invariants, for tests; a `RuntimeError` says which one is broken."""
        if not self._awaited.keys() <= self._tried:
            raise RuntimeError(f"{self._awaited.keys() - self._tried} are waited for, and may be waited for again")
        if self._awaited and not self._version.proven:
            raise RuntimeError(f"{list(self._awaited)} are waited for, and there is no state for them")
        for replica_id in self._awaited:
            member = self._job.members.get(replica_id)
            if member is not None and replica_id in self._job.quorum_members:
                raise RuntimeError(f"{replica_id} is waited for to have the state, and counts as a holder")
