"""This file decides what groups do that start without a state: one reads a checkpoint, the others receive it from that one.

A group that starts says again and again (`Starts`) which checkpoint is the newest that it can read whole, and how far it is. It
is told one thing at a time, the first of these that is so:

    what is so                                                           what it is told
    -------------------------------------------------------------------  ---------------------------------------------
    it reads or receives                                                 WAITS
    it has the newest state                                              BEGINS; WAITS while others still receive that
    others hold a state that counts, or ask for a step with a restored   HEALS
    another has found a checkpoint damaged in the storage that all see   MEETS, and leaves that out
    not all were here yet that may come, as for a quorum                 MEETS
    another has a newer state                                            RECEIVES
    another reads                                                        WAITS
    nobody can read anything                                             BEGINS
    of those who can read the newest checkpoint it is the first          READS
    it is not                                                            WAITS

One that reads or receives says how many bytes it has. Who is gone, says nothing for `STALLS_S`, or has no more bytes by then is
looked for no longer: the next one reads, the others begin. If it comes back it is told as any other.

No state gets a name by this, so a state that is restored is not older than a fresh one that was named before.
"""

from __future__ import annotations

from collections.abc import Mapping

from torchft_ckpt.core.coordination.job_record import JobRecord
from torchft_ckpt.core.coordination.lighthouse_records import Member, Starting
from torchft_ckpt.core.coordination.messages import Source, Start, Starts, StartTold, StateVersion, clip, name_some
from torchft_ckpt.core.coordination.quorum import Asked, decide_quorum
from torchft_ckpt.core.coordination.recovery import MAX_SOURCES

STALLS_S = 30.0
"""A storage may take so long to answer, or a state function to load, until another group reads instead."""


class StartingGroups:
    """The groups of one job that start. Not thread-safe. What is known of each is in its record."""

    def __init__(self, job: JobRecord) -> None:
        self._job = job
        self._why_not_met = ""

    def says(self, member: Member, version: StateVersion, said: Starts, now: float) -> None:
        """A group says how far it is. `version`: of the state that it has."""
        starting = member.starting = member.starting or Starting(since=now, moved_at=now)
        is_moved = not said.is_at_work or said.done_bytes != starting.said.done_bytes
        starting.moved_at = now if is_moved else starting.moved_at
        starting.is_at_work = said.is_at_work
        starting.said, starting.step = said, version.step if said.holds else -1

    def tell(self, member: Member, now: float) -> tuple[StartTold, StateVersion, list[Source]]:
        """Return what to tell it; with the state, and who has that, if it is to load one."""
        starting = member.starting
        if starting is None:
            raise RuntimeError(f"internal error: {member.replica_id} does not start")
        told, version, sources = self._tell(member, starting, now)
        starting.is_at_work = starting.is_at_work or told.does in (Start.READS, Start.RECEIVES)
        return told, version, sources

    def _tell(self, member: Member, mine: Starting, now: float) -> tuple[StartTold, StateVersion, list[Source]]:
        here = dict(sorted((m.replica_id, m) for m in self._job.members.values() if m.starting is not None))
        starts = {
            m: one
            for m, there in here.items()
            if (one := there.starting) is not None and (there is member or now < one.moved_at + STALLS_S)
        }
        others = {m: s for m, s in starts.items() if m != member.replica_id}
        at_work = [m for m, s in others.items() if s.is_at_work]
        newest = max(s.step for s in starts.values())

        def told(does: Start, reason: str, **more: object) -> tuple[StartTold, StateVersion, list[Source]]:
            answer = StartTold(does=does, reason=reason, num_groups=len(starts), **more)  # type: ignore[arg-type]
            return answer, StateVersion(), []

        if mine.is_at_work:
            return told(Start.WAITS, "it is at work")
        if mine.step >= 0 and mine.step == newest:
            lacking = [m for m, s in others.items() if s.step < newest]
            return told(
                Start.WAITS if lacking else Start.BEGINS, f"{name_some(lacking) or 'nobody'} has yet to receive it"
            )
        version = self._held_at_work()
        if version is not None:
            return StartTold(does=Start.HEALS, reason=f"others hold step {version.step}"), version, []
        damaged = {name: clip(why) for s in starts.values() for name, why in s.said.damaged.items()}
        if damaged.keys() - mine.said.damaged.keys():
            return told(Start.MEETS, "checkpoints are damaged", damaged=dict(sorted(damaged.items())[-64:]))
        if not mine.has_met:
            self._meet(mine, starts, now)
        if not mine.has_met:
            return told(Start.MEETS, self._why_not_met)
        if newest >= 0:
            holding = [(m, s) for m, s in others.items() if s.step == newest and not s.is_at_work]
            sources = [here[m].as_source(place) for place, (m, _) in enumerate(holding[:MAX_SOURCES])]
            if not sources:
                return told(Start.WAITS, f"those that have step {newest} are at work")
            said = holding[0][1].said
            answer, _, _ = told(
                Start.RECEIVES, name_some(m for m, _ in holding), checkpoint=said.readable, place=said.place
            )
            return answer, StateVersion(step=newest), sources
        if at_work:
            return told(Start.WAITS, f"{name_some(at_work)} reads a checkpoint, and gives it to the others")
        checkpoint = max(s.said.readable for s in starts.values())
        if not checkpoint:
            return told(Start.BEGINS, "no group can read a checkpoint")
        reader = next(m for m, s in starts.items() if s.said.readable == checkpoint)
        does = Start.READS if reader == member.replica_id else Start.WAITS
        return told(does, f"{reader} is to read {checkpoint}, and gives it to the others")

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

    def validate(self) -> None:
        """Check the invariants, for tests; a `RuntimeError` says which one is broken."""
        for member in self._job.members.values():
            if member.starting is not None and member.request is not None:
                raise RuntimeError(f"{member.replica_id} starts, and asks for a step")
