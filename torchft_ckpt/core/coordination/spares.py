"""This file decides when a spare steps in: a group that follows the others and does not train, to replace one that is lost.

A spare (`Manager(spare=True)`) is a learner that stays one when it has received a state. It is in no quorum and in no collective.
When fewer groups are at work than before, as many spares are *called*. A called spare is a group like any other: it comes in, and
receives what has changed since. It stays when the lost group comes back, and is one of those that train from then on.

    wanted     the most groups that were no spares and were at work at once, in this life of the lighthouse
    vacancies  wanted, less those at work, less the spares that were called a moment ago and are not at work yet

If one that was called is not at work after `COMES_WITHIN_S`, as it hangs or lies about its step, the next one is called, too.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from torchft_ckpt.core.coordination.lighthouse_records import Member, MemberPhase

ASKS_WITHIN_S = 0.1
"""So long at most a quorum waits for a spare that was called and is close: else it adds to a step only one step later."""

COMES_WITHIN_S = 10.0


class Spares:
    """Knows which spares were called. Not thread-safe."""

    def __init__(self) -> None:
        self.num_wanted = 0
        self._called: dict[str, tuple[bool, float]] = {}
        """With each, whether it was close when it was called, and until when no other one is called in its place."""
        self._late: set[str] = set()
        """Were called, and were not at work in time: all others are called before them."""
        self.await_until = float("-inf")
        """So long the next quorum waits for spares that were called last."""

    def note_at_work(self, members: Iterable[Member]) -> None:
        """A quorum has formed, in which these hold the state."""
        at_work = list(members)
        self.num_wanted = max(self.num_wanted, sum(not member.hello.spare for member in at_work))
        for member in at_work:
            self.lost(member.replica_id)

    def is_called(self, replica_id: str) -> bool:
        return replica_id in self._called

    def num_vacancies(self, at_work: Collection[str], now: float) -> int:
        """Return how many groups are missing that no called spare replaces."""
        self._late |= {name for name, (_, until) in self._called.items() if until <= now}
        return self.num_wanted - len({*at_work, *self._called.keys() - self._late})

    def call(self, idle: Iterable[Member], at_work: Collection[str], now: float, newest_step: int) -> list[Member]:
        """Call as many spares as groups are missing; return those called now, the closest first.

        Args:
            idle: spares that are here, were not called, and do not leave.
            at_work: those that hold the state and train, and those that come in now.
            now: the time.
            newest_step: nobody is closer than at this one.
        """
        vacancies = max(self.num_vacancies(at_work, now), 0)
        chosen = sorted(idle, key=lambda one: (one.replica_id in self._late, _distance(one, newest_step)))[:vacancies]
        self._called |= {member.replica_id: (_is_close(member), now + COMES_WITHIN_S) for member in chosen}
        self._late -= {member.replica_id for member in chosen}
        if chosen:
            self.await_until = now + ASKS_WITHIN_S
        return chosen

    def awaits(self, members: Mapping[str, Member], now: float) -> bool:
        """Whether the next quorum waits for a spare that was called a moment ago, and has not asked yet."""
        if now >= self.await_until:
            return False
        return any(is_close and members[replica_id].is_beside for replica_id, (is_close, _) in self._called.items())

    def release(self, at_work: Collection[str], now: float) -> None:
        """Take calls back, the latest first, where others came sooner."""
        if len(at_work) >= self.num_wanted:
            self._called = {name: call for name, call in self._called.items() if name not in self._late - set(at_work)}
        while self._called and self.num_vacancies(at_work, now) < 0:
            last = next((name for name in reversed(self._called) if name not in at_work), None)
            if last is None:
                return
            del self._called[last]

    def lost(self, replica_id: str) -> None:
        """A member is gone."""
        self._called.pop(replica_id, None)
        self._late.discard(replica_id)


def _is_close(member: Member) -> bool:
    return member.phase is MemberPhase.FOLLOWS and member.has_received


def _distance(member: Member, newest_step: int) -> tuple[int, int, str]:
    """Return how far a spare is from coming in, to be compared: one that has received a state is closer than one that does."""
    progress = member.progress
    if progress is None or not member.is_beside:
        return 2, 0, member.replica_id
    return (0 if _is_close(member) else 1), -min(progress.step, newest_step), member.replica_id
