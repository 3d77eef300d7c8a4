"""The groups beside the quorum: those that compute their first step alone, that follow the others, and spares.

This file decides who of those who ask stays outside, and what such a group is told; which state it is taught; and when it is
called. Nobody waits for it, unless the quorum is held for it: `hold`. What a learner goes through: `learning`. How many spares
are needed: `spares`. How long the others stand still for one that comes in: `joining`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import cache
from heapq import nsmallest
from typing import NamedTuple

from torchft_ckpt.core.coordination.job_record import JobRecord
from torchft_ckpt.core.coordination.joining import Joining
from torchft_ckpt.core.coordination.layouts import is_part_of, pause_before_learning_again_s
from torchft_ckpt.core.coordination.learning import (
    SAY_EVERY_S,
    learner_in_words,
    should_follow,
)
from torchft_ckpt.core.coordination.lighthouse_events import Instruction, Log, Send
from torchft_ckpt.core.coordination.lighthouse_records import Member, MemberPhase, Round
from torchft_ckpt.core.coordination.messages import (
    Given,
    JoinerWaiting,
    JoinProgress,
    LeavesFound,
    Needed,
    Source,
    StateGiven,
    StateVersion,
    StepAlone,
    clip,
    name_some,
)
from torchft_ckpt.core.coordination.recovery import MAX_SOURCES, Assignment
from torchft_ckpt.core.coordination.spares import Spares
from torchft_ckpt.core.services.rate import TokenBucket

FOLLOWS_WITHIN_S = 10.0
"""So long, or as long as its own transfer takes, a group that would follow waits for another one to have received its state.
Then the quorum is held for it, as for one that cannot follow."""
OUT_OF_TURN_S = 1.0
OUT_OF_TURN_STEPS = 8
"""So long, and so many usual steps, a group stays outside until its loop is at the same optimizer as the others' loops."""
MAX_KINDS = 64
TOLD_PER_S, TOLD_AT_ONCE = 1000.0, 20_000.0
"""Messages in one job to those at work, that somebody is about to ask for their state."""
IS_SPARE = "it is a spare: it waits until a replica group is lost"
LOADS_AT_END = "it lacks the newest state, and gets it at the end of an iteration that does not count"
OUT_OF_TURN = (
    "its loop is about to train another optimizer than the loops of the others: it comes in when all train the same one"
)
TURN_UNKNOWN = (
    "its loop trains several optimizers in turn, and has made too few steps to tell at which place of that it is"
)


class Holders(NamedTuple):
    """Those that hold the state from which the job goes on. To find them costs a pass over the members."""

    goes_on_from: Callable[[StateVersion], bool]
    nearest: Callable[[], list[tuple[float, str]]]
    """Two of them at most: the seconds since each has asked for a step, 0.0 if it waits for one, and its replica id."""


class Beside:
    """The groups of one job that are beside its quorum, or are to be. Not thread-safe.

    What is known of each is in its record.
    """

    def __init__(self, job: JobRecord, joining: Joining, spares: Spares) -> None:
        self._job = job
        self._joining = joining
        self._spares = spares
        self._told = TokenBucket(TOLD_PER_S, TOLD_AT_ONCE, TOLD_AT_ONCE, job.now)
        self._takes_turns = False
        """The loops of those who are here have a step for each of several optimizers."""

    # ---------------------------------------------------------------------------------------------- who stays outside

    def should_warm_up(
        self, member: Member, holders: Holders | None = None, others: Collection[str] | None = None
    ) -> bool:
        """Whether a group computes alone: it lacks the newest state, which others hold, or is in the middle of an iteration."""
        request = member.asked
        # A spare that owes a backward pass can load nothing in this step, and does not wait in it until it is needed.
        may_load = request.can_load and (request.allow_heal or self._is_idle_spare(member))
        if not may_load or request.at_end or self._job.finished_step is not None:
            return False
        goes_on_from = self._job.goes_on_from() if holders is None else holders.goes_on_from
        if not request.warms_up and (goes_on_from(member.version) or not self.others_hold(member, holders)):
            return False
        return member.replica_id not in (self._job.apart() if others is None else others)

    def others_hold(self, member: Member, holders: Holders | None = None) -> bool:
        """Whether others hold the state from which the job goes on.

        If steps may be lost, one that does not come for as long as a quorum waits for it counts no more, be it alive.
        """
        patience_s = float("inf")
        if self._job.may_lose_steps:
            patience_s = max(self._job.settings.join_timeout_s, member.request.patience_s if member.request else 0.0)
        nearest = self._away(self._job.goes_on_from()) if holders is None else holders.nearest()
        return any(away_s < patience_s for away_s, replica_id in nearest if replica_id != member.replica_id)

    def holders(self) -> Holders:
        goes_on_from = self._job.goes_on_from()
        return Holders(goes_on_from, cache(lambda: nsmallest(2, self._away(goes_on_from))))

    def _away(self, goes_on_from: Callable[[StateVersion], bool]) -> Iterator[tuple[float, str]]:
        for m in self._job.members.values():
            is_there = not (m.is_excused or m.is_let_go or (m.request is not None and m.asked.at_end))
            if is_there and goes_on_from(m.version):
                yield (0.0 if m.request is not None else self._job.now - m.asked_at), m.replica_id

    def set_aside(self, candidates: list[Member], now: float) -> tuple[list[Member], dict[str, str]]:
        """Of those that ask for a step return who is admitted; and who stays outside, each with the reason.

        If the admitted members would be too few, all are admitted.
        """
        idle = {m.replica_id for m in candidates if self._is_idle_spare(m)}
        others = [m for m in candidates if m.replica_id not in idle]
        in_debt = self._joining.in_debt(others)
        reasons = dict.fromkeys(idle, IS_SPARE)
        reasons |= {m.replica_id: why for m in in_debt if (why := self._joining.why_owes(m, now))}
        tried = [m.replica_id for m in in_debt if m.replica_id not in reasons]
        reasons |= {m: f"it could not come in, and is tried again after {tried[0]}" for m in tried[1:]}
        admitted = [m for m in candidates if m.replica_id not in reasons]
        is_at_work = self._job.quorum_members.keys() - self._job.waiting.keys()
        if not admitted and is_at_work:
            return admitted, reasons
        # Of spares, and of those that could not come in before, no more than have to.
        more = [*(m for m in candidates if m.replica_id in idle), *(m for m in in_debt if m not in admitted)]
        while more and len(admitted) < self._job.min_trainers(admitted):
            admitted.append(more.pop(0))
        return admitted, {m.replica_id: reasons[m.replica_id] for m in more}

    def at_end(
        self,
        members: Collection[Member],
        holding: Collection[Member],
        why_not: Mapping[str, str],
        now: float,
        *,
        are_needed: bool,
    ) -> tuple[list[Member], dict[str, str]]:
        """Of those that ask at the end of an iteration return who follows; and who stays outside, each with the reason.

        `holding`: ask for the step with the newest state. `why_not`: why these do not wait for a member now; empty: they do.
        `are_needed`: no step can count without them.
        """
        idle = {m.replica_id for m in members if not are_needed and self._is_idle_spare(m)}
        following = [
            m
            for m in (() if are_needed else members)
            if should_follow(m.asked, self._joining.usual_s, stays=m.replica_id in idle)
            and (m.replica_id in idle or not self._waits_in_vain(m, now))
        ]
        late = self.out_of_turn([*holding, *(m for m in members if m.replica_id not in idle)], now)
        reasons = late | dict.fromkeys(idle, IS_SPARE)
        reasons |= {m.replica_id: self._why_follows(m, waits=self._is_teaching(now, beside=m)) for m in following}
        reasons = {m.replica_id: why for m in members if (why := reasons.get(m.replica_id) or why_not[m.replica_id])}
        tried = [m.replica_id for m in self._joining.in_debt(m for m in members if m.replica_id not in reasons)]
        # One at a time; or as many as have to come before a step can count.
        at_once = max(1, self._job.min_trainers(holding) - len(holding))
        reasons |= {m: f"it could not come in, and is tried again after {tried[0]}" for m in tried[at_once:]}
        return following, reasons

    def out_of_turn(self, candidates: Collection[Member], now: float) -> dict[str, str]:
        """Return whose loops are about to train another of their optimizers than those of most of those at work, and why not.

        Else a loop that trains two networks in turn, each in a step of its own, would average one's gradients with the other's
        for ever: all would discard each step, and go on to the next network. So such a group stays outside for a step, or
        computes one alone, whether it is at work or would come in. Who would come in does not stay out for long: loops may also
        take turns by the number of the step, and then differ in what they did last. A loop that comes in has counted its turns
        anew, so it comes in at a place that its last steps tell; it makes steps alone until they do.
        """
        asking = {m.replica_id: m for m in candidates}
        train = [asking[m] for m in self._job.quorum_members if m in asking]
        at_work = [member.asked.kinds for member in train]
        for member in train:
            member.kinds.update(member.asked.kinds if len(member.kinds) < MAX_KINDS else ())
        self._takes_turns = len({kind for member in self._job.members.values() for kind in member.kinds}) > 1
        if not at_work or not self._takes_turns:
            return {}
        counts = Counter(tuple(kinds[-1:]) for kinds in at_work)
        usual = max(at_work, key=lambda kinds: counts[tuple(kinds[-1:])])  # of as many, that of the first
        late: dict[str, str] = {}
        patience_s = OUT_OF_TURN_S + OUT_OF_TURN_STEPS * self._joining.usual_s
        for member in candidates:
            is_at_work = member.replica_id in self._job.quorum_members
            may_begin = self._job.holds_newest(member.version) and not member.asked.at_end
            came_in = may_begin and not is_at_work and member.out_of_turn_since is None  # in its turn, at its end
            kinds = member.asked.kinds
            fits = kinds[-1:] == usual[-1:] if is_at_work else is_at_same_place(kinds, usual)
            if fits or came_in or not member.asked.can_load:
                member.out_of_turn_since = None
                continue
            if is_at_work or member.out_of_turn_since is None:
                member.out_of_turn_since = now
            if now < member.out_of_turn_since + patience_s:
                late[member.replica_id] = TURN_UNKNOWN if fits is None else OUT_OF_TURN
        return late

    def may_hold_more(self, member: Member) -> bool:
        """Whether a group that comes in may use in this step what its loop has computed in the one before, with an older state.

        A loop that trains two networks in turn does so: the critic learns from what the generator has made.
        """
        return self._takes_turns and member.replica_id not in self._job.quorum_members

    def _waits_in_vain(self, member: Member, now: float) -> bool:
        """Whether a group that would follow has waited so long for another one to have its state that it comes in otherwise."""
        patience_s = max(FOLLOWS_WITHIN_S, member.asked.need.reach_s or 0.0)
        return now - member.asked_at >= patience_s and self._is_teaching(now, beside=member)

    def _why_follows(self, member: Member, *, waits: bool = False) -> str:
        if self._is_idle_spare(member):
            return "it is a spare: it follows the others until one of them is lost"
        needs = f"it needs {member.asked.need.reach_s or 0.0:.1f} s to receive the state"
        if waits:
            return f"{needs}, and waits until another group has received its: the others serve one at a time"
        return (
            f"{needs}, longer than a step ({self._joining.usual_s:.1f} s), so it receives it outside of the quorum first, while"
            " the others train on"
        )

    # ------------------------------------------------------------------------------- spares, and those who are called

    def _is_idle_spare(self, member: Member) -> bool:
        """Whether a member is a spare that does not step in now, and does not hold a newer state than those that train."""
        replica_id = member.replica_id
        if not member.hello.spare or replica_id in self._job.at_work() or self._spares.is_called(replica_id):
            return False
        if self._job.quorum_members:
            at_work = (self._job.members[other].version for other in self._job.quorum_members)
            return not self._job.holds_newest(member.version) or any(map(self._job.holds_newest, at_work))
        others = (m.version.step for m in self._job.members.values() if not m.hello.spare)
        return not member.version.proven and member.version.step <= max(others, default=-1)

    def is_absent_spare(self, member: Member) -> bool:
        """Whether a member is a spare that neither trains nor asks: nobody waits for it, also where it was called."""
        return member.hello.spare and member.request is None and member.replica_id not in self._job.at_work()

    def call_spares(self) -> Iterator[Instruction]:
        """Have spares step in for groups that are gone; where the job is over, have them ask, to hear that."""
        at_work = self._job.at_work()
        is_over = self._job.finished_step is not None
        self._spares.release(at_work, self._job.now)
        idle = [m for m in self._job.staying() if not m.wishes_to_leave and self._is_idle_spare(m)]
        called = idle if is_over else self._spares.call(idle, at_work, self._job.now, self._job.newest_step)
        for member in called:
            here = f"{len(at_work)} of {self._spares.num_wanted} replica groups train ({name_some(sorted(at_work))})"
            reason = "the job is over" if is_over else f"{here}, and it is a spare"
            if member.phase is MemberPhase.FOLLOWS and not member.is_called:
                member.is_called = is_over
                yield Send(member.connection, Needed(reason=clip(reason)))
            if not is_over:
                yield Log(f"{member.replica_id} is called: {reason}")

    # ----------------------------------------------------------------------------- who is taught, and what it is told

    def let_warm_up(self, member: Member, now: float, why: str = LOADS_AT_END) -> Send:
        """Let a member compute a step for itself alone."""
        request, current = self._job.take_request(member), self._job.round
        self._job.computes_alone(member)
        member.phase, member.follows_until = MemberPhase.WARMS_UP, now
        if current is not None and self._job.history.is_void(current.assignment.version):
            current = None  # the job has gone back since, and begun no step
        assignment = None if current is None else current.assignment
        alone = StepAlone(
            request_id=request.request_id,
            quorum_id=self._job.quorum_id,
            epoch=self._job.epoch,
            # No step of the job may be open, or the last one may be older.
            version=max(self._newest_version(), StateVersion() if assignment is None else assignment.version),
            replica_world_size=0 if assignment is None else len(assignment.parts),
            num_contributors=0 if assignment is None else assignment.num_contributors,
            newest_step=self._job.history.lasting_step,
            rolled_back_to=self._job.history.rolled_back_to,
            reason=why,
        )
        return Send(member.connection, alone)

    @staticmethod
    def giving(holding: Sequence[Member]) -> Sequence[Member]:
        """Return who gives the state to newcomers, of those that have it."""
        return ([m for m in holding if m.asked.can_serve] or holding)[:MAX_SOURCES]

    def give_held(
        self,
        newcomers: Collection[Member],
        giving: Collection[Member],
        assignment: Assignment,
    ) -> Iterator[Instruction]:
        """Have newcomers receive the state with which the next quorum begins, which is held meanwhile, from these."""
        ranks = {part.replica_id: rank for rank, part in enumerate(assignment.parts)}
        sources = [member.as_source(ranks[member.replica_id]) for member in giving]
        for member in giving:
            yield Send(member.connection, JoinerWaiting(num_held=len(newcomers)))
        sizes = len(assignment.parts), assignment.num_contributors
        for member in newcomers:
            why = "the others have asked for the step, and wait until this group has its state"
            yield self._gives(member, Given.TO_COME_IN, why, assignment.version, sizes, sources)
            member.is_called = True  # it comes as soon as it can

    def have_state_captured(self) -> Iterator[Instruction]:
        """Have those at work capture their state when they begin their next step. Beyond the rate a quorum tells them."""
        if self._told.level(self._job.now) > 0.0:
            self._told.reserve(len(self._job.quorum_members), self._job.now)
            for replica_id in self._job.quorum_members:
                yield Send(self._job.members[replica_id].connection, JoinerWaiting())

    def progressed(self, member: Member, progress: JoinProgress, now: float) -> Iterator[Instruction]:
        """A learner says how far it is."""
        member.progress, member.follows_until = progress, now + SAY_EVERY_S
        if now - member.progress_logged_at >= SAY_EVERY_S:
            member.progress_logged_at = now
            yield Log(f"{member.replica_id} {learner_in_words(member, self._job.newest_step)}")

    def to_teach(self, following: Collection[Member], others: Collection[str], now: float) -> list[Member]:
        """Return who may get the state with which the next step begins.

        Args:
            following: who asks, and follows the others.
            others: are of another layout than they.
            now: the time.
        """
        following = [m for m in following if now >= m.learns_from]
        return [*self._learners(others, now), *(m for m in following if not self._is_teaching(now, beside=m))]

    def _learners(self, others: Collection[str], now: float) -> list[Member]:
        """Return the groups that may train with the others once they know the step: they are behind, and train only a part."""
        asking = [self._job.members[replica_id] for replica_id in self._job.waiting]
        # Else who freezes its networks in turn may learn for ever.
        late = self.out_of_turn([m for m in asking if m.asked.kinds], now)
        layouts = {m.layout: m.layout_text for m in asking if m.replica_id not in others}
        return [
            member
            for member in (m for m in asking if m.replica_id in others)
            if (member.layout in layouts or any(is_part_of(member.layout_text, text) for text in layouts.values()))
            and member.asked.allow_heal
            and member.asked.can_load
            and member.replica_id not in late
            and now >= member.learns_from
            and not self._job.holds_newest(member.version)
        ]

    def _is_teaching(self, now: float, beside: Member) -> bool:
        """Whether somebody receives a state, and says so: the sources keep one state at a time for those who do.

        `beside`: who would get the next one. For a group that is to train a spare begins again.
        """
        taught = [m for m in self._job.members.values() if m.is_beside and m.follows_until > now and not m.has_received]
        return any(not self._is_idle_spare(m) for m in taught) or (bool(taught) and self._is_idle_spare(beside))

    def teach(
        self,
        learners: Collection[Member],
        current: Round,
        sources: list[Source],
        others: Collection[str],
        now: float,
    ) -> Iterator[Instruction]:
        """Give learners the state with which a step begins, outside of its quorum.

        `others`: are of another layout; a learner that is none of them follows.
        """
        for member in learners:
            follows = member.replica_id not in others
            member.num_learned += 1
            member.learns_from = now + pause_before_learning_again_s(member.num_learned)
            why = "it does not train the same parameters yet, and first has to learn at which step the others are"
            why = self._why_follows(member) if follows else why
            yield Log(f"{member.replica_id} gets step {current.step} outside of the quorum: {why}")
            given = Given.TO_FOLLOW if follows else Given.TO_LEARN
            sizes = len(current.assignment.parts), current.assignment.num_contributors
            yield self._gives(member, given, why, current.assignment.version, sizes, sources)

    def _gives(
        self,
        member: Member,
        why: Given,
        reason: str,
        version: StateVersion,
        sizes: tuple[int, int],
        sources: list[Source],
    ) -> Send:
        """Have a member receive a state, and take part in no quorum before. `sizes`: all members, and those that contribute."""
        request, current, now = self._job.take_request(member), self._job.round, self._job.now
        newest_step, is_held = self._job.history.lasting_step, why is Given.TO_COME_IN
        if why is Given.TO_CORRECT:
            member.phase, member.version, current = MemberPhase.BETWEEN, StateVersion(step=version.step), None
        else:  # it may have been in the quorum, and have given its step up
            self._job.quorum_members.pop(member.replica_id, None)
            why = Given.TO_STAY if why is Given.TO_FOLLOW and self._is_idle_spare(member) else why
            member.phase = MemberPhase.AWAY if why is Given.TO_LEARN else MemberPhase.FOLLOWS
            member.follows_until = now + SAY_EVERY_S if member.is_beside else now
        given = StateGiven(
            request_id=request.request_id,
            quorum_id=self._job.quorum_id,
            epoch=self._job.epoch,
            version=version,
            replica_world_size=sizes[0],
            num_contributors=sizes[1],
            why=why,
            sources=sources,
            names_state=is_held and self._job.beginners.get(member.replica_id, False),
            newest_step=min(newest_step, version.step) if is_held else newest_step,
            # In a hold the sources know it, or they are of another life.
            leaves=LeavesFound() if current is None or is_held else current.leaves,
            rolled_back_to=self._job.history.rolled_back_to,
            reason=reason,
        )
        return Send(member.connection, given)

    def corrects(self, member: Member, sources: list[Source], num_members: int) -> Send:
        """Have a member that differs from these load their state before its step."""
        version, names = member.asked.version, name_some(source.replica_id for source in sources)
        reason = clip(f"it came to another state of step {version.step} than {names}")
        return self._gives(member, Given.TO_CORRECT, reason, version, (num_members, num_members), sources)

    def _newest_version(self) -> StateVersion:
        valid = (version for _, version in self._job.held() if self._job.history.is_valid(version))
        return max(valid, default=StateVersion())

    # ----------------------------------------------------------------------------------------------------- invariants

    def validate(self) -> None:
        """Check the invariants, for tests; a `RuntimeError` says which one is broken."""
        for member in self._job.members.values():
            if member.is_beside and member.replica_id in self._job.quorum_members:
                raise RuntimeError(f"the next quorum waits for {member.replica_id}, which is beside it")


def is_at_same_place(mine: Sequence[str], theirs: Sequence[str]) -> bool | None:
    """Whether two loops that take turns are at the same place of them, by the kinds of their last steps, the newest one last.

    None: that cannot be told yet. The other has gone on in several ways after what this one has done last, or has done that
    again for the first time, and it is one step alone.
    """
    # The longest part that the other has done too: this one may have left a turn out before.
    for length in range(len(mine), 0, -1):
        ends = [end for end in range(length, len(theirs) + 1) if theirs[end - length : end] == mine[-length:]]
        if ends:
            then = theirs[ends[0] :]
            is_first = length == 1 and len(ends) > 1 and theirs[max(ends[-2] - 2, 0) : ends[-2]] != theirs[-2:]
            is_known = all(theirs[end:] == then[: len(theirs) - end] for end in ends)
            is_here = ends[-1] == len(theirs)
            return None if not is_known or (is_here and is_first) else is_here
    return False
