"""This file decides for whom the others waited in a step, and who is slow. It knows what members said and when, not why.

| phase                | a group is late in it by                                                                       |
|----------------------|------------------------------------------------------------------------------------------------|
| quorum               | asking for the quorum later than the others                                                    |
| forward and backward | computing longer than the others while none of its collectives was open, as its ranks measured |
| allreduce            | being in collectives for less time, beyond what the two above explain: it came to them later   |
| vote                 | voting later, beyond what they explain if there was no collective: its way here is slow, say   |

Late is who is behind the median, of an even number the quicker one. Of all groups and phases the one that is behind by most is
the one that the others waited for. The times in votes are members' words, so no more is believed than the step took, and nothing
else is decided by them. On a device that computes while its host goes on, a rank measures its host.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import NamedTuple

from torchft_ckpt.core.coordination.causes import CAUSES, cause_of
from torchft_ckpt.core.coordination.messages import clip, group_label

LEAST_S = 0.001
"""Who is late by less is not waited for."""
SLOW_PART = 1 / 3
"""A group is slow if the others wait for it for such a part of the step: with it the step takes 1.5 times as long, or longer."""
NUM_SLOW = 20
"""It is named after so many steps in a row."""
MAX_GROUPS_COUNTED = 1024
_CLEARLY = 1.25


class Phase(Enum):
    """Of a step, as the table above says. The value is its name in the status and in metrics."""

    COMPUTE = "forward and backward"
    QUORUM = "quorum"
    ALLREDUCE = "allreduce"
    VOTE = "vote"


class Timing(NamedTuple):
    """When a member asked and voted, on the lighthouse's clock, and what its vote says, in seconds."""

    asked_at: float
    computed_s: float
    reduced_s: float
    voted_at: float


class Waited(NamedTuple):
    """The others, half of them or more, waited for this member so long, in a step that took so long from the end of the last."""

    replica_id: str
    phase: Phase
    waited_s: float
    step: int
    took_s: float


def find_late(timings: Mapping[str, Timing]) -> tuple[str, Phase, float] | None:
    """Return for which member of a step the others waited, in which phase and for how long; None: for nobody."""
    if len(timings) < 2:
        return None
    names, (asked, computed, reduced, voted) = list(timings), zip(*timings.values(), strict=True)
    middle, of_two = (len(names) - 1) // 2, len(names) // 2
    usual = Timing(sorted(asked)[middle], sorted(computed)[middle], sorted(reduced)[of_two], sorted(voted)[middle])
    found, most_s = None, LEAST_S
    for phase, values, last in (
        (Phase.COMPUTE, computed, max(computed)),
        (Phase.QUORUM, asked, max(asked)),
        (Phase.ALLREDUCE, reduced, min(reduced)),
        (Phase.VOTE, voted, max(voted)),
    ):
        name = names[values.index(last)]
        its = timings[name]
        computes_s, asks_s = its.computed_s - usual.computed_s, its.asked_at - usual.asked_at
        explained_s = max(computes_s, 0.0) + max(asks_s, 0.0)
        late_s = {
            Phase.COMPUTE: computes_s,
            Phase.QUORUM: asks_s,
            Phase.ALLREDUCE: usual.reduced_s - its.reduced_s - explained_s,
            Phase.VOTE: its.voted_at - usual.voted_at - (0.0 if usual.reduced_s else explained_s),
        }[phase]
        # A round of an outer loop is computed before its quorum is asked for: who computes longer asks later.
        if late_s > most_s * (_CLEARLY if found else 1.0):
            found, most_s = (name, phase), late_s
    return None if found is None else (*found, most_s)


class Waiting:
    """The steps of one job: how many, and for whom its groups waited. Not thread-safe. `now`: seconds that never fall."""

    def __init__(self) -> None:
        self.num_committed, self.num_discarded = 0, dict.fromkeys(CAUSES, 0)
        self.last: Waited | None = None
        """In the last step that was committed."""
        self.seconds: dict[str, dict[Phase, float]] = {}
        """How long the others have waited for each group, of at most `MAX_GROUPS_COUNTED`. None of it falls."""
        self.of_all = dict.fromkeys(Phase, 0.0)
        """The same of all together."""
        self.num_slow = 0
        """For so many steps in a row the one of `last` has been slow."""
        self._slow: str | None = None
        self._named: set[str] = set()
        """Those lives of groups that were named, and are there."""
        self._ended_at: float | None = None

    def discarded(self, reason: str, now: float) -> None:
        """A step has ended, and does not count."""
        self._ended_at = now
        self.num_discarded[cause_of(reason)] += 1

    def committed(self, step: int, timings: Mapping[str, Timing], now: float) -> str:
        """A step counts. Returns a warning that names who is slow, once for each life of a group; else nothing."""
        took_s, self._ended_at = now - (now if self._ended_at is None else self._ended_at), now
        self.num_committed += 1
        late, before = find_late(timings) if took_s else None, self._slow
        self.last = self._slow = None
        if late is not None:
            replica_id, phase, late_s = late
            self.last = last = Waited(replica_id, phase, min(late_s, took_s), step, took_s)
            self.of_all[phase] += last.waited_s
            if (group := group_label(replica_id)) in self.seconds or len(self.seconds) < MAX_GROUPS_COUNTED:
                self.seconds.setdefault(group, dict.fromkeys(Phase, 0.0))[phase] += last.waited_s
            self._slow = replica_id if last.waited_s >= SLOW_PART * took_s else None
        self.num_slow = 0 if self._slow is None else self.num_slow + 1 if self._slow == before else 1
        if self.last is None or self.num_slow < NUM_SLOW or self.last.replica_id in self._named:
            return ""
        self._named = {self.last.replica_id, *self._named.intersection(timings)}
        return (
            f"{clip(self.last.replica_id)} has been slower than the other groups for {self.num_slow} steps: in step {step} they"
            f" waited for it {self.last.waited_s:.3f} of {took_s:.3f} s ({self.last.phase.value}). Its machine may be slow or"
            " shared; `status --stacks GROUP` shows what it does"
        )
