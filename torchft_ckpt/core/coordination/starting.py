"""This file decides what groups do that start without a state: one reads a checkpoint, the others receive it from that one.

A group that starts says again and again (`Starts`) which checkpoint is the newest that it can read whole, of which it holds the
state, and how far it is. It is told one thing at a time, the first of these that is so:

    what is so                                                           what it is told
    -------------------------------------------------------------------  ---------------------------------------------
    it reads or receives                                                 WAITS
    it holds the newest state                                            BEGINS; WAITS while others still lack that
    others hold a state that counts, or ask for a step with a restored   HEALS
    two have found a checkpoint damaged in the storage that all see      MEETS, and leaves that out
    not all were here yet that may come, as for a quorum                 MEETS
    another holds the newest state, of which it can read no later one    RECEIVES
    another is at work                                                   WAITS
    nobody can read anything                                             BEGINS
    of those who can read the newest checkpoint it is the first          READS
    it is not                                                            WAITS

What another one says is believed only as far as it goes:
- Who has not given its state to one that was to receive it (`Starts.failed`) holds none, for that one.
- Who was told `MAX_TOLD` times to read or to receive a state, and holds none that is new enough, is waited for no longer.
- One that reads or receives says how many bytes it has. Who is gone, says nothing for `STALLS_S`, or has no more bytes than ever
  before by then, is looked for no longer: the next one reads, the others begin. If it comes back it is told as any other.
- Damage that one has found makes no other one go back: another one reads as well.

The newest checkpoint that anybody has named stays known if who can read it is gone (`JobRecord.named_checkpoint`). Nobody begins
at step 0 beside it, unless the operator allows the loss of steps; a job that has begun so forgets it. No quorum begins with fresh
weights while one here reads a checkpoint or has read it (`why_not_fresh`). No state gets a name by this, so a state that is
restored is not older than a fresh one that was named before.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from torchft_ckpt.core.coordination.job_record import JobRecord
from torchft_ckpt.core.coordination.lighthouse_records import Member, Starting
from torchft_ckpt.core.coordination.messages import Source, Start, Starts, StartTold, StateVersion, clip, name_some
from torchft_ckpt.core.coordination.quorum import Asked, decide_quorum
from torchft_ckpt.core.coordination.recovery import MAX_SOURCES

STALLS_S = 30.0
"""A storage may take so long to answer, or a state function that computes nothing, until another group reads instead."""
MAX_TOLD = 8
_MIN_FOUND = 2
"""So many have to find a checkpoint damaged until the others leave it out unread."""


class StartingGroups:
    """The groups of one job that start. Not thread-safe. What is known of each is in its record."""

    def __init__(self, job: JobRecord) -> None:
        self._job = job
        self._why_not_met = ""

    def says(self, member: Member, version: StateVersion, said: Starts, now: float) -> None:
        """A group says how far it is. `version`: of the state that it has."""
        if (starting := member.starting) is None:  # this lighthouse may have started while it was at work
            starting = member.starting = Starting(since=now, moved_at=now, is_at_work=said.is_at_work)
        if not said.is_at_work or said.done_bytes > starting.done_bytes:
            starting.moved_at = now
        starting.done_bytes = max(starting.done_bytes, said.done_bytes) if said.is_at_work else -1
        starting.is_at_work = starting.is_at_work and said.is_at_work
        starting.said, starting.step = said, version.step if said.holds else 0
        self._job.named_checkpoint = max(self._job.named_checkpoint, said.readable, said.holds, said.named)

    def tell(self, member: Member, now: float) -> tuple[StartTold, StateVersion, list[Source]]:
        """Return what to tell it; with the state, and who has that, if it is to load one."""
        starting = member.starting
        if starting is None:
            raise RuntimeError(f"internal error: {member.replica_id} does not start")
        told, version, sources = self._tell(member, starting, now)
        if told.does in (Start.READS, Start.RECEIVES):
            starting.is_at_work, starting.num_told = True, min(starting.num_told + 1, MAX_TOLD)
        return told, version, sources

    def _tell(self, member: Member, mine: Starting, now: float) -> tuple[StartTold, StateVersion, list[Source]]:
        me, here, starts = member.replica_id, self._job.members, self._here(now, member)
        others = {m: s for m, s in starts.items() if m != me}
        giving = {m: s for m, s in others.items() if s.said.holds and m not in mine.said.failed}
        newest = max([mine.state, *(s.state for s in giving.values())])
        found = Counter(name for s in starts.values() for name in s.said.damaged)
        damaged = {
            name: clip(why)
            for s in starts.values()
            for name, why in s.said.damaged.items()
            if found[name] >= _MIN_FOUND
        }
        named = self._job.named_checkpoint
        if self._job.may_lose_steps or named in damaged or named in mine.said.damaged:
            named = ""

        def told(does: Start, reason: str, **more: object) -> tuple[StartTold, StateVersion, list[Source]]:
            answer = StartTold(does=does, reason=reason, num_groups=len(starts), named=named, **more)  # type: ignore[arg-type]
            return answer, StateVersion(), []

        if mine.said.is_at_work:
            return told(Start.WAITS, "it is at work")
        if mine.said.holds and mine.state == newest:
            lacking = [
                m
                for m, s in others.items()
                if s.state < newest and me not in s.said.failed and (s.num_told < MAX_TOLD or s.is_at_work)
            ]
            does = Start.WAITS if lacking else Start.BEGINS
            return told(does, f"{name_some(lacking) or 'nobody'} has yet to receive it")
        if (version := self._held_at_work()) is not None:
            return StartTold(does=Start.HEALS, reason=f"others hold step {version.step}"), version, []
        if damaged.keys() - mine.said.damaged.keys():
            return told(Start.MEETS, "checkpoints are damaged", damaged=dict(sorted(damaged.items())[-64:]))
        if not mine.has_met:
            self._meet(mine, starts, now)
        if not mine.has_met:
            return told(Start.MEETS, self._why_not_met)
        readable = {
            m: s.said.readable for m, s in starts.items() if s.num_told < MAX_TOLD and m not in mine.said.failed
        }
        if newest[0] and readable.get(me, "") <= newest[0]:
            holding = [m for m, s in giving.items() if s.state == newest and not s.is_at_work]
            sources = [here[m].as_source(place) for place, m in enumerate(holding[:MAX_SOURCES])]
            if not sources:
                return told(Start.WAITS, f"those that have step {newest[1]} are at work")
            place = giving[holding[0]].said.place
            answer, _, _ = told(Start.RECEIVES, name_some(holding), checkpoint=newest[0], place=place)
            return answer, StateVersion(step=newest[1]), sources
        if at_work := [m for m, s in others.items() if s.is_at_work]:
            return told(Start.WAITS, f"{name_some(at_work)} reads a checkpoint, and gives it to the others")
        checkpoint = max(readable.values(), default="")
        if not checkpoint:
            return told(Start.BEGINS, "no group can read a checkpoint")
        reader = next(m for m, name in readable.items() if name == checkpoint)
        does = Start.READS if reader == me else Start.WAITS
        return told(does, f"{reader} is to read {checkpoint}, and gives it to the others")

    def _here(self, now: float, member: Member | None = None) -> dict[str, Starting]:
        """Return those who start, in the order of their names, but for those who stand still; `member`: never left out."""
        here = sorted((m.replica_id, m, m.starting) for m in self._job.members.values() if m.starting is not None)
        return {name: one for name, m, one in here if m is member or now < one.moved_at + STALLS_S}

    def _meet(self, mine: Starting, starts: Mapping[str, Starting], now: float) -> None:
        """See whether all are here that may come."""
        asked = {m: Asked(at=s.since) for m, s in starts.items()}
        members = self._job.members.values()
        verdict = decide_quorum(
            alive=[m.replica_id for m in members if m.replica_id in asked or not m.is_excused],
            asked=asked,
            last_quorum=(),
            min_replicas=self._job.settings.min_replicas,
            join_timeout_s=self._job.settings.join_timeout_s,
            now=now,
        )
        self._why_not_met = verdict.reason
        # Those who ask for a step already have looked before, and have found nothing.
        is_late = any(m.request is not None for m in members)
        for met in starts.values() if verdict.formed else [mine] if is_late else ():
            met.has_met = True

    def _held_at_work(self) -> StateVersion | None:
        """Return the newest state that a member holds which does not start, and that counts; a fresh one counts for nothing."""
        members = [m for m in self._job.members.values() if m.starting is None]
        held = [m.version for m in members if self._job.history.is_valid(m.version)]
        restored = [m.asked.version for m in members if m.request is not None and m.asked.restored]
        newest = max(held, default=None) or max(restored, default=None)
        return newest if newest is not None and newest.step else None

    def why_not_fresh(self, now: float) -> tuple[str, float | None] | None:
        """Say why no quorum may begin the job with fresh weights yet, and until when at most; None: it may."""
        if self._job.history.has_begun or self._job.may_lose_steps or self._held_at_work() is not None:
            return None
        starts = {m: s for m, s in self._here(now).items() if s.is_at_work or s.said.holds}
        until = max((s.moved_at + STALLS_S for s in starts.values()), default=now)
        return (f"{name_some(starts)} reads a checkpoint, and comes with it", until) if starts else None

    def forget_named(self) -> None:
        """The job trains without what was named before, as the operator allowed; those who start still may know some."""
        said = [m.starting.said for m in self._job.members.values() if m.starting is not None]
        self._job.named_checkpoint = max((max(s.readable, s.holds, s.named) for s in said), default="")

    def validate(self) -> None:
        """Check the invariants, for tests; a `RuntimeError` says which one is broken."""
        for member in self._job.members.values():
            if (mine := member.starting) is None:
                continue
            if member.request is not None:
                raise RuntimeError(f"{member.replica_id} starts, and asks for a step")
            if not mine.since <= mine.moved_at <= self._job.now:
                raise RuntimeError(f"{member.replica_id} has moved before it started, or in the future")
            if (mine.done_bytes >= 0) != mine.said.is_at_work:
                raise RuntimeError(f"{member.replica_id} is at work, and has no bytes of that, or the other way around")
            if mine.step and not mine.said.holds:
                raise RuntimeError(f"{member.replica_id} holds step {mine.step} of no checkpoint")
            if mine.num_told > MAX_TOLD:
                raise RuntimeError(f"{member.replica_id} was told something {mine.num_told} times")
            if max(mine.said.readable, mine.said.holds, mine.said.named) > self._job.named_checkpoint:
                raise RuntimeError(f"a newer checkpoint was named than {self._job.named_checkpoint!r}")
