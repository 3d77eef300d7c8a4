"""This file decides when a group that is to leave its job may go.

A group wishes to leave, or the operator has it leave. It goes at the end of its step, or between two steps: when it is told so,
nobody waits for it from then on. Where it alone holds the newest state it stays for a while, for others to get that.
"""

from __future__ import annotations

from collections.abc import Iterator

from torchft_ckpt.core.coordination.job_record import JobRecord
from torchft_ckpt.core.coordination.lighthouse_events import Instruction, Log, Send
from torchft_ckpt.core.coordination.lighthouse_records import Member, MemberPhase
from torchft_ckpt.core.coordination.messages import LeaveWish, LetGo, clip, last_answer
from torchft_ckpt.core.coordination.patience import PENDING_NOTICE_S

LEAVES_BETWEEN_STEPS_AFTER_S = 2.0
"""A group that is to leave, and then has no step open, leaves between two steps: in an outer loop they are far apart."""
LAST_HOLDER_STAYS_S = 10.0
"""A group that is to leave and alone holds the newest state stays so long for others to get it. Then the time is for its save."""


class Leaving:
    """The groups of one job that are to leave, or have left. Not thread-safe."""

    def __init__(self, job: JobRecord) -> None:
        self._job = job
        self._look_at: dict[str, float | None] = {}
        """Exactly the members that are to leave: when to look whether one can do so between two steps. None: it was let go."""
        self._drained: dict[str, str] = {}
        """Members that the operator had leave, with the reason: their groups do not know of it before they are told."""
        self._left_at_step = -1
        """The latest step that a group held which left on purpose. Never falls."""

    def deadlines(self) -> list[float]:
        return [at for at in self._look_at.values() if at is not None]

    def drain(self, member: Member) -> LeaveWish:
        """The operator has a member leave. Returns what the member is told, which is its wish from now on."""
        self._drained[member.replica_id] = "the operator asked for it"
        return LeaveWish(reason=self._drained[member.replica_id])

    def joined(self, member: Member, now: float) -> None:
        """A member is here, or is back."""
        member.wishes_to_leave = self._drained.get(member.replica_id, "")
        if member.wishes_to_leave:
            self._look_at[member.replica_id] = now + LEAVES_BETWEEN_STEPS_AFTER_S

    def lost(self, member: Member, *, is_on_purpose: bool) -> None:
        """A member is gone. `is_on_purpose`: it has left, or was refused."""
        self._look_at.pop(member.replica_id, None)
        if is_on_purpose:
            self._drained.pop(member.replica_id, None)
            if self._job.history.is_valid(member.version):
                self._left_at_step = max(self._left_at_step, member.version.step)

    def wished(self, member: Member, wish: LeaveWish, now: float) -> Iterator[Instruction]:
        if not member.wishes_to_leave:
            member.wishes_to_leave, member.wished_at = clip(wish.reason) or "it was asked to leave", now
            self._look_at[member.replica_id] = now + LEAVES_BETWEEN_STEPS_AFTER_S
            yield Log(f"{member.replica_id} is to leave at the end of its step: {member.wishes_to_leave}")

    def answer(self, now: float) -> Iterator[Instruction]:
        """Answer the members that wait for a quorum and are to leave, if the others do not count on them, or do not come."""
        job = self._job
        for member in [job.members[replica_id] for replica_id in self._look_at if replica_id in job.waiting]:
            waits_briefly = member.replica_id in job.quorum_members and now - member.asked_at < PENDING_NOTICE_S
            if not (member.is_let_go or (self.may_go(member, now) and not waits_briefly)):
                continue
            request = job.take_request(member)
            self.let_go(member)
            member.phase = MemberPhase.AWAY
            formed = last_answer(
                request,
                quorum_id=job.quorum_id,
                epoch=job.epoch,
                reason=f"this replica group leaves: {member.wishes_to_leave}",
                newest_step=job.history.lasting_step,
                rolled_back_to=job.history.rolled_back_to,
            )
            yield Send(member.connection, formed)
            yield self.say_who_stays(member)

    def let_go_between_steps(self, now: float) -> Iterator[tuple[Instruction, ...]]:
        """Let members go that are to leave, and are between two steps since a while. Yields what follows from each."""
        for replica_id in [m for m, at in self._look_at.items() if at is not None and now >= at]:
            if self._look_at.get(replica_id) is None:
                continue  # it has gone, or was let go, on account of the one before
            self._look_at[replica_id] = now + LEAVES_BETWEEN_STEPS_AFTER_S
            member, current = self._job.members[replica_id], self._job.round
            tally = None if current is None or current.tally.decided else current.tally
            is_in_open_step = tally is not None and replica_id in tally.roles and replica_id not in tally.lost
            if member.request is None and not is_in_open_step and self.may_go(member, now):
                self.let_go(member)
                let_go = LetGo(reason=clip(member.wishes_to_leave))
                yield Send(member.connection, let_go), self.say_who_stays(member)

    def may_go(self, member: Member, now: float) -> bool:
        """Whether a member is to leave now: it wishes to, and others have its state, or do not come to have it."""
        if not member.wishes_to_leave:
            return False
        job = self._job
        staying = [other for other in job.staying() if not other.wishes_to_leave]
        is_last = job.holds_newest(member.version) and not any(job.holds_newest(m.version) for m in staying)
        return not is_last or not staying or now - member.wished_at >= LAST_HOLDER_STAYS_S

    def let_go(self, member: Member) -> None:
        """A member has been told to leave, or is told now: nobody waits for it."""
        member.is_let_go = True
        self._job.quorum_members.pop(member.replica_id, None)
        self._look_at[member.replica_id] = None

    def say_who_stays(self, member: Member) -> Log:
        staying = self._job.staying()
        step = member.version.step
        line = (
            f"{member.replica_id} leaves at step {step}: {member.wishes_to_leave}; {len(staying)} replica groups stay"
        )
        least = self._job.min_trainers(staying)
        is_short = 0 < len(staying) < least
        more = f", at least {least} have to train: they wait until another one comes" if is_short else ""
        return Log(line + more, is_warning=is_short)

    def hint_if_over(self) -> str:
        """Say that the job may be over, if no member holds its newest state and a group that held it left on purpose."""
        newest_step = self._job.newest_step
        if not 0 < self._left_at_step == newest_step or self._job.history.holders(self._job.held(), newest_step):
            return ""
        return (
            f" A group that held step {newest_step} left on purpose (Manager.shutdown). If the job was over, end this group;"
            " where its script calls Manager.finish() after the last step, a late group ends by itself."
        )

    def validate(self) -> None:
        """Check the invariants, for tests; a `RuntimeError` says which one is broken."""
        if self._look_at.keys() != {replica_id for replica_id, m in self._job.members.items() if m.wishes_to_leave}:
            raise RuntimeError(f"{list(self._look_at)} are to leave, and others wish to")
        for member in self._job.members.values():
            is_awaited = member.replica_id in self._job.quorum_members
            if member.is_let_go and (is_awaited or not member.wishes_to_leave):
                raise RuntimeError(f"{member.replica_id} was told to leave, and is waited for: {member}")
