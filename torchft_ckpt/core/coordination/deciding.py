"""This file runs the step of a quorum: votes, collectives that cannot finish, and the decision for all.

The lighthouse begins the step when a quorum has formed, and passes on what members say. What follows from the votes alone:
`commit`. What is known of the open step: `lighthouse_records.Round`.

A decision stands. Who votes later, also in a step that an earlier life began, is told what was decided.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import msgspec

from torchft_ckpt.core.coordination.commit import CommitDecision, Tally
from torchft_ckpt.core.coordination.connecting import REACH
from torchft_ckpt.core.coordination.equality import Equality
from torchft_ckpt.core.coordination.history import state_after
from torchft_ckpt.core.coordination.job_record import JobRecord
from torchft_ckpt.core.coordination.joining import Joining
from torchft_ckpt.core.coordination.leaving import Leaving
from torchft_ckpt.core.coordination.lighthouse_events import Instruction, Log, Send
from torchft_ckpt.core.coordination.lighthouse_records import Member, Round
from torchft_ckpt.core.coordination.messages import (
    CollectiveCleared,
    CollectiveWait,
    CommitDecided,
    CommitVote,
    Outcome,
    QuorumBroken,
    Role,
    clip,
)
from torchft_ckpt.core.coordination.recovery import Assignment
from torchft_ckpt.core.coordination.restart import Settled, StepKey
from torchft_ckpt.core.coordination.speaking import Speaking
from torchft_ckpt.core.coordination.trial import Trials
from torchft_ckpt.core.coordination.waiting import Timing


class Deciding:
    """The steps of one job: the open one, and what is said of those that were decided. Not thread-safe."""

    def __init__(
        self,
        job: JobRecord,
        joining: Joining,
        equality: Equality,
        trials: Trials,
        speaking: Speaking,
        leaving: Leaving,
    ) -> None:
        self._job = job
        self._joining = joining
        self._equality = equality
        self._trials = trials
        self._speaking = speaking
        self._leaving = leaving
        self._trained: frozenset[str] = frozenset()
        """Committed the last step that counted: they can connect to each other."""

    def begin(self, assignment: Assignment, members: list[Member], quorum_id: int, now: float) -> Round:
        """Return the step that these members begin."""
        roles = {part.replica_id: part.role for part in assignment.parts}
        holding = [member for member in members if roles[member.replica_id] is Role.HEALTHY]
        before = [m for m in holding if m.replica_id in self._trained and m.asked.contributes]
        self._joining.set_limit(holding, now)
        current = Round(
            quorum_id=quorum_id,
            step=assignment.version.step,
            assignment=assignment,
            tally=Tally(roles),
            formed_at=now,
            is_needed=len(before) < self._job.min_trainers(before),
        )
        if not current.is_needed and self._job.round is not None:
            self._joining.stood([m for m in holding if not m.asked.came_in], now - self._job.round.formed_at, now)
        if self._job.round is None or self._job.round.quorum_id != quorum_id:
            self._job.quorum_since = now
        self._job.round = current
        return current

    def replaced(self, now: float) -> Iterator[Instruction]:
        """A new quorum forms: where the step is open, it is discarded."""
        current = self._job.round
        if current is None:
            return
        if not current.tally.decided:
            current.tally.give_up("a new quorum was formed without the members that have not voted")
            yield from self._announce(current, now)
        current.tally.forget_ranks()

    # ------------------------------------------------------------------------------------------------ what members do

    def voted(self, member: Member, vote: CommitVote, now: float) -> Iterator[Instruction]:
        """A member votes on a step that is open, or was decided before."""
        current = self._job.round
        key = (vote.quorum_id, vote.epoch, vote.step)
        if current is not None and self._key(current) == key:
            if current.tally.decided or member.replica_id in current.tally.lost:
                yield from self._on_late_vote(member, vote, current, now)
                return
            if member.replica_id not in current.tally.roles or member.replica_id in current.tally.votes:
                return  # it has no part in this step, or has had it
            was_broken = current.tally.broken
            current.voted_at[member.replica_id] = now
            current.tally.cast(member.replica_id, vote)
            current.name_late(member.replica_id)
            if vote.broken and not current.tally.decided:
                # One that sits out has left the collectives: its vote decides nothing, but those who wait for it wait in vain.
                reason = f"{member.replica_id}: {clip(vote.reason) or 'its collectives failed'}"
                yield from self._break_collectives(
                    current, member.replica_id, lost=False, reason=reason, voted_too=not was_broken
                )
            yield from self._advance(current, now, current.ends(member.replica_id))
        else:
            yield Send(member.connection, self._answer_late(member, vote, now))

    def waits(self, member: Member, wait: CollectiveWait, now: float) -> Iterator[Instruction]:
        """A rank of a member waits in a collective, or asks whether it may start one."""
        current = self._job.round
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
            yield from self._end_late_waits(current, current.waits_late(member.replica_id, wait))
            return
        if current.tally.decided:
            return
        yield from self._advance(current, now, current.waits_in(member.replica_id, wait))
        if not current.tally.decided and wait.deviates and current.may_start(wait.group_rank):
            cleared = CollectiveCleared(
                quorum_id=wait.quorum_id, step=wait.step, group_rank=wait.group_rank, index=wait.index
            )
            for replica_id in current.living():
                yield Send(self._job.members[replica_id].connection, cleared)

    def left(self, member: Member) -> Iterator[Instruction]:
        """End the collectives of the last step in which others wait for this member, which has gone on."""
        current = self._job.round
        if current is not None and member.replica_id in current.tally.roles:
            yield from self._end_late_waits(current, current.goes_on(member))

    def abandoned(self, replica_id: str, now: float) -> Iterator[Instruction]:
        """A member asks for the next step, or for the newest state. Where it is in the open step, it gave that up."""
        current = self._job.round
        if current is None or current.tally.decided or replica_id not in current.tally.roles:
            return
        role = current.tally.roles[replica_id]
        if replica_id in current.tally.votes or replica_id in current.tally.lost:
            # It gave up waiting for the decision: its vote stands. Or it was cut off: the others know.
            return
        reason = f"{replica_id} gave step {current.step} up"
        if role is Role.HEALTHY:
            current.tally.give_up(reason)
            yield from self._announce(current, now, culprit=replica_id)
        else:
            yield from self._break_collectives(current, replica_id, lost=False, reason=reason)
            current.tally.lose(replica_id, reason)
            yield from self._advance(current, now)

    def lost(self, replica_id: str, reason: str, now: float) -> Iterator[Instruction]:
        """A member is gone: tell at once those that share a collective with it."""
        current = self._job.round
        if current is None or replica_id not in current.tally.roles or replica_id in current.tally.lost:
            return
        tally = current.tally
        was_decided, was_broken = tally.decided, tally.broken
        tally.lose(replica_id, reason)
        if not (was_decided and was_broken):  # else all know
            why = f"{replica_id}: {reason}"
            yield from self._break_collectives(current, replica_id, lost=True, reason=why, voted_too=not was_broken)
        if not was_decided:
            yield from self._advance(current, now)

    def give_up_overtaken(self, now: float) -> Iterator[Instruction]:
        """Discard the open step if a member holds a later state: then the step was committed before, elsewhere."""
        current = self._job.round
        if current is None or current.tally.decided:
            return
        history = self._job.history
        ahead = [m for m in self._job.members.values() if history.is_valid(m.version) and m.version.step > current.step]
        if ahead:
            current.tally.give_up(f"{ahead[0].replica_id} is here with step {ahead[0].version.step}")
            yield from self._announce(current, now)

    # ---------------------------------------------------------------------------------------------------- how it ends

    def _advance(self, current: Round, now: float, apart: tuple[str, str] | None = None) -> Iterator[Instruction]:
        """Announce a decision, or discard the step if a member waits for a collective that another will not issue (`apart`)."""
        if current.tally.decided:
            yield from self._announce(current, now)
        elif apart is not None:
            culprit, reason = apart
            current.tally.give_up(reason)
            yield from self._announce(current, now, culprit=culprit)

    def _announce(self, current: Round, now: float, culprit: str = "") -> Iterator[Instruction]:
        """Tell all connected members how the step ended, once. `culprit`: the member on whose account it is discarded."""
        tally = current.tally
        if tally.verdict is CommitDecision.COMMIT:
            yield from self._equality.judge(current, now)
        self._joining.ended(current, now)
        approvers = dict.fromkeys(m for m in tally.votes if tally.outcome(m) is Outcome.COMMIT)
        followers = dict.fromkeys(m for m in approvers if self._is_listening(m))
        if approvers and not followers:
            tally.discard_all("every member that approved gave up waiting for the decision")
        committed = tally.verdict is CommitDecision.COMMIT
        if not committed and any(self._is_listening(m) for m in tally.roles if m not in tally.votes):
            tally.broken = True  # who has not voted is told to leave its collectives
        refused = self._who_could_not_come_in(current)
        yield from self._charge(current, refused, now)
        key = self._key(current)
        outcome = Outcome.COMMIT if committed else Outcome.DISCARD
        self._job.history.remember(key, tally, outcome, tally.reason)
        if committed:
            self._job.history.committed(key, followers)
            self._note_held(followers, key)
            left_behind = [m for m in tally.roles if m not in approvers]
            self._trials.ended(current.step, approvers, left_behind, differs=self._equality.differed_at == current.step)
            self._trained = frozenset(m for m in tally.roles if tally.outcome(m) is Outcome.COMMIT)
            self._joining.trained(self._trained)
            for replica_id in self._trained & self._job.members.keys():
                self._job.members[replica_id].met = self._trained
            members, votes = self._job.members, tally.votes
            timings = {
                m: Timing(members[m].asked_at, votes[m].computed_s, votes[m].reduced_s, at)
                for m, at in current.voted_at.items()
                if m in followers and tally.roles[m] is Role.HEALTHY
            }
            if slow := self._job.waits.committed(current.step, timings, now):
                yield Log(slow, is_warning=True)
        else:
            self._job.waits.discarded(tally.reason, now)
            yield Log(f"step {current.step} of quorum {current.quorum_id} is discarded: {tally.reason}")
        for replica_id in refused if not current.assignment.is_first else ():
            self._job.quorum_members.pop(replica_id, None)
        contributors = [part.replica_id for part in current.assignment.parts if part.contributor_rank is not None]
        if committed:
            first = next((part.replica_id for part in current.assignment.parts if part.contributor_rank == 0), "")
            if kept_silent := self._speaking.committed(first, approvers, now, hears=first in followers):
                yield Log(kept_silent)
        all_leave = (
            committed
            and bool(contributors)
            and all(m in followers and self._leaving.may_go(self._job.members[m], now) for m in contributors)
        )
        for replica_id in tally.roles:
            member = self._job.members.get(replica_id)
            if member is None:
                continue
            is_back = tally.roles[replica_id] is Role.HEALTHY and self.is_still_in_quorum(member)
            if (replica_id in followers or is_back) and not member.is_let_go and replica_id not in refused:
                self._job.quorum_members[replica_id] = None  # also where it was lost on the way, and is back
            has_voted = replica_id in tally.votes
            if not committed and not has_voted and member.is_in_step:
                broken = QuorumBroken(
                    quorum_id=current.quorum_id, replica_id=culprit or replica_id, lost=False, reason=clip(tally.reason)
                )
                yield Send(member.connection, broken)
            if member.is_in_step and (has_voted or (committed and replica_id not in tally.lost)):
                decided = CommitDecided(
                    quorum_id=current.quorum_id,
                    epoch=self._job.epoch,
                    step=current.step,
                    outcome=tally.outcome(replica_id),
                    broken=tally.broken,
                    reason=clip(tally.reason),
                )
                decided = self.as_told(member, decided, now, all_leave=all_leave)
                yield Send(member.connection, decided)
                if decided.leaving:
                    yield self._leaving.say_who_stays(member)
        yield from self._end_late_waits(current, current.waits_in_vain(current.late, current.gone_on))

    def _who_could_not_come_in(self, current: Round) -> list[str]:
        """Return the members on whose account the step that has just ended is discarded.

        Where the members of a quorum cannot connect it is those that are new to the others, unless somebody has died. Who has
        trained with all of them is believed once; if the same ones fail again, all of them are new.
        """
        tally = current.tally
        if tally.lost or tally.verdict is CommitDecision.COMMIT:
            return []
        if all(vote.connects for vote in tally.votes.values()):
            return []
        new = [m for m in tally.roles if m not in self._trained]
        self._trained = self._trained if new else frozenset()
        return new

    def _charge(self, current: Round, refused: list[str], now: float) -> Iterator[Log]:
        """Charge members what it cost the others that they could not come in."""
        tally, since = current.tally, current.formed_at
        for replica_id in refused:
            vote = tally.votes.get(replica_id)
            why = clip(tally.reason if vote is None or vote.connects else vote.reason)
            why = f"the groups of quorum {current.quorum_id} cannot connect with it among them ({why}). {REACH}"
            cost_s = (now - since) / len(refused)
            said = self._joining.refused(current, replica_id, cost_s, why, now, is_sure=len(refused) == 1)
            yield Log(said, is_warning=True)

    def _is_listening(self, replica_id: str) -> bool:
        """Whether a member is connected and waits for the decision: it has not gone on from this step."""
        return replica_id in self._job.members and self._job.members[replica_id].is_in_step

    def _end_late_waits(self, current: Round, apart: tuple[str, str] | None) -> Iterator[Instruction]:
        """After the decision, end the collectives in which a member waits for one that has gone on. The step stands."""
        if not current.tally.decided or current.tally.broken:
            return  # where they are broken all have been told
        if apart is not None:
            current.tally.broken = True
            culprit, reason = apart
            if (member := self._job.members.get(culprit)) is not None and member.is_let_go:
                reason = f"{culprit} leaves its job, and issues no collective of step {current.step} any more"
            yield from self._break_collectives(current, culprit, lost=False, reason=reason)

    def _break_collectives(
        self, current: Round, culprit: str, *, lost: bool, reason: str, voted_too: bool = True
    ) -> Iterator[Instruction]:
        """Tell all that may be in a collective of this quorum that it cannot finish; members that voted need to hear it once."""
        broken = QuorumBroken(quorum_id=current.quorum_id, replica_id=culprit, lost=lost, reason=reason)
        for replica_id in current.tally.roles:
            is_concerned = voted_too or replica_id not in current.tally.votes
            if replica_id != culprit and is_concerned and self._is_listening(replica_id):
                yield Send(self._job.members[replica_id].connection, broken)

    # --------------------------------------------------------------------------------------- what is said of it later

    def _on_late_vote(self, member: Member, vote: CommitVote, current: Round, now: float) -> Iterator[Instruction]:
        """Take a vote that comes after the decision, or from a member that was lost in the step."""
        tally = current.tally
        if not tally.decided:
            # It was lost and came back. Its vote decides nothing, but if it approves it holds the same sum as the others.
            tally.votes.setdefault(member.replica_id, vote)
            return
        answer = self._answer_late(member, vote, now)
        if answer.outcome is Outcome.COMMIT and member.is_in_step and not member.is_let_go:
            self._job.quorum_members[member.replica_id] = None  # it holds the state after all, and is waited for
        yield Send(member.connection, answer)

    def _answer_late(self, member: Member, vote: CommitVote, now: float) -> CommitDecided:
        answer = self._job.history.answer_late(member.replica_id, vote)
        if answer.outcome is Outcome.COMMIT:
            self._note_held([member.replica_id], (vote.quorum_id, vote.epoch, vote.step))
        return self.as_told(member, answer, now)

    def _note_held(self, replica_ids: Iterable[str], key: StepKey) -> None:
        """Note that members that hear of a commit hold its state from now on, but for those that gave up waiting just now. Who is
        in a step that is open holds the state of that, whatever it says of an earlier one."""
        current = self._job.round
        in_step = [] if current is None or current.tally.decided else current.living()
        for replica_id in replica_ids:
            if self._is_listening(replica_id) and replica_id not in in_step:
                self._job.members[replica_id].version = state_after(key)

    def declined(self, replica_id: str) -> Iterator[Instruction]:
        """Free the last step if this member, which goes on to the next one, was the last that could hold its state."""
        key = self._job.history.declined(replica_id)
        if key is not None:
            yield self._nobody_followed(key)

    def _nobody_followed(self, key: StepKey) -> Log:
        self._job.history.nobody_followed(key)
        if self._job.round is not None and self._key(self._job.round) == key:
            self._job.round.is_void = True
        return Log(f"step {key[2]} of quorum {key[0]} is discarded after all: nobody waited for the decision")

    def settled(self, settled: Settled, now: float) -> Iterator[Instruction]:
        """A step of an earlier life was decided by what its members said: tell them."""
        outcome = Outcome.COMMIT if settled.verdict is CommitDecision.COMMIT else Outcome.DISCARD
        reason = "decided from the members' reports after the lighthouse restarted"
        self._job.history.remember(settled.key, None, outcome, reason)
        quorum_id, _, step = settled.key
        yield Log(f"step {step} of quorum {quorum_id}: {outcome.value}, {reason}")
        if outcome is Outcome.COMMIT:
            followers = [m for m in settled.approvers if self._is_listening(m)]
            self._job.history.committed(settled.key, followers, others_may_know=settled.others_may_know)
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
                member = self._job.members[replica_id]
                yield Send(member.connection, self.as_told(member, decided, now))

    def as_told(self, member: Member, decided: CommitDecided, now: float, *, all_leave: bool = False) -> CommitDecided:
        """Return the decision on a member's step as that member is told it: with it goes who is to leave, and who speaks."""
        if decided.outcome is Outcome.COMMIT:
            speaks, silent_for = self._speaking.told(member.replica_id)
            shows = self._trials.shows_after(decided.step)
            decided = msgspec.structs.replace(decided, speaks=speaks, silent_for=clip(silent_for), shows=shows)
        if not member.is_in_step or not self._leaving.may_go(member, now):
            return decided
        self._leaving.let_go(member)
        return msgspec.structs.replace(decided, leaving=True, all_leave=all_leave)

    def is_still_in_quorum(self, member: Member) -> bool:
        """Whether the next quorum waits for a member: it was cut off between two steps, and holds what the others hold.

        Or it will. One that votes early takes the commit at the end of its phase, and may have been told of it before it was cut
        off.
        """
        current = self._job.round
        if current is None or not current.tally.decided:
            return False
        hello, step = member.hello, member.version.step
        is_of_this_step = hello.last_step == current.step and hello.last_outcome is None
        if is_of_this_step and current.tally.outcome(member.replica_id) is Outcome.COMMIT:
            step = current.step + 1
        return (
            (hello.last_quorum_id, hello.last_epoch) == (current.quorum_id, self._job.epoch)
            and hello.was_in_quorum
            and self._job.history.is_valid(member.version)
            and step >= self._job.newest_step
            and member.is_in_step
        )

    def _key(self, current: Round) -> StepKey:
        return current.quorum_id, self._job.epoch, current.step

    # ----------------------------------------------------------------------------------------------------- invariants

    def validate(self) -> None:
        """Check the invariants, for tests; a `RuntimeError` says which one is broken. It costs a pass over the members."""
        current = self._job.round
        if current is None:
            return
        current.validate()
        if current.quorum_id > self._job.quorum_id:
            raise RuntimeError(f"the step is of quorum {current.quorum_id}, and the latest is {self._job.quorum_id}")
        living = current.living()
        if not self._job.members.keys() >= set(living):
            raise RuntimeError(f"{living} were not lost in the step, and are not all here")
        if current.tally.decided:
            return
        if current.step < self._job.newest_step:
            raise RuntimeError(f"step {current.step} is open, and step {self._job.newest_step} was committed before")
        version, roles = current.assignment.version, current.tally.roles
        without = [m for m in living if roles[m] is Role.HEALTHY and self._job.members[m].version != version]
        if without:
            raise RuntimeError(f"{without} are in a quorum of {version}, and do not hold that")
        gone = [m for m in living if m not in current.tally.votes and not self._job.members[m].is_in_step]
        if gone:
            raise RuntimeError(f"{gone} have gone on from the open step, which waits for their votes")
