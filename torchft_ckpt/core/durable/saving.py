"""This file decides what one writer of a checkpoint does once its own share is written: wait, take over, close.

It is told what is to be seen in the checkpoint's directory, who is known to be lost, and when. It knows no files, and no clock.

The writers are the ranks of the N replica groups that contributed to the step. A replica group dies as a whole, so the same
rank of k - 1 other groups backs each share up: it holds the same boxes, and works the share out alone. The backups have an
order. Each takes over when the owner and the backups before it are lost: at once where the lighthouse says so, else when
nothing has grown of what they write for `fill_after` each. A writer that was only slow goes on: its bytes are there twice
then, which does no harm. No part has two writers, because its name carries the writer and the number that it has among the
holders of the share.

When every share has a manifest, writer (0, 0) reads them all and writes DCP's metadata. Where it is lost the task passes on to
(1, 0), (2, 0) and so on by the same rule, and after the first ranks of all groups to the next ones.

A rank that holds the state, and is none of its writers, looks on: it waits until they have closed the checkpoint.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

_FIRST_LOOK_S = 0.01
_LOOK_SHARE = 0.2
"""Of the time that nothing has changed so far."""
_LAST_LOOK_S = 1.0
_LOOKS_PER_S = 4000
"""Of all writers together, where they are many."""
_TURN_SHARE = 0.125
"""Of the time until its turn to close comes, a writer may be late to see that all shares are there."""
_STILL_SHARE = 0.5
"""Of `fill_after`: when nothing has changed for so long it is watched whether other shares grow than those that are backed up."""
_MAX_WATCHED = 64
"""Of so many of them."""
_ASK_AFTER_S = 0.25
_ASK_EVERY_S = 0.5
"""The lighthouse, who is lost."""
_ANSWERED_IN_S = 0.1
_ABSENT_AFTER_S = 5.0
"""All groups pass the place at which they save before any of them commits the next step: so soon each has begun to write."""


class Act(Enum):
    """The next act of a writer."""

    WAIT = "wait"
    TAKE_OVER = "take over"
    """Write a share that this writer backs up."""
    CLOSE = "close"
    """See whether it is whole; if so, write the metadata."""
    DONE = "done"
    LEAVE = "leave"
    """End, and leave open whether it becomes whole."""
    GIVE_UP = "give up"


class SavingRank(NamedTuple):
    """A rank of a replica group that saves. It stands for its share, too."""

    replica: int
    rank: int


PartKey = tuple[int, int, int]
"""Of a part: the group and the rank of its writer, and which of the holders of the share its writer is; 0 is the owner."""


class Writers(NamedTuple):
    """The writers of a save: so many replica groups of so many ranks, and how many groups can write each share."""

    num_replicas: int
    num_ranks: int
    replica_id: str = ""
    """Name of this writer's group."""
    redundancy: int = 1
    """A checkpoint survives the death of any `redundancy - 1` groups, as far as there are so many."""

    @property
    def num_members(self) -> int:
        return self.num_replicas * self.num_ranks

    @property
    def num_holders(self) -> int:
        """The number of groups that can write each share: the owner's, and the backups'."""
        return max(min(self.redundancy, self.num_replicas), 1)

    def holder_of(self, share: SavingRank, number: int) -> SavingRank:
        """Return the owner (0) of a share, or one of its backups."""
        return SavingRank((share.replica + number * self._stride) % self.num_replicas, share.rank)

    def share_of(self, holder: SavingRank, number: int) -> SavingRank:
        """Return the share of which a writer is the holder of that number."""
        return SavingRank((holder.replica - number * self._stride) % self.num_replicas, holder.rank)

    @property
    def _stride(self) -> int:
        return self.num_replicas // self.num_holders


class SaveView(NamedTuple):
    """The contents of the directory, and the lighthouse's word."""

    is_closed: bool
    """Its metadata are there."""
    parts: Collection[PartKey] | None = None
    """The parts whose manifests are there; None where the directory was not listed."""
    growth: Mapping[SavingRank, int] = {}
    """How much there is of what a writer writes, of those that are watched."""
    damaged: Collection[PartKey] = frozenset()
    """Parts that were found not to count."""
    lost: Collection[int] = frozenset()
    """Groups that the lighthouse knows to be lost."""
    present: Collection[int] = frozenset()
    """Groups of which there is any file."""


class Decision(NamedTuple):
    """An act, and why; `look_in_s`: when to look again; `number`: which of the holders of a share takes it over."""

    act: Act
    look_in_s: float = 0.0
    reason: str = ""
    number: int = 0


def look_on(
    *,
    is_closed: bool,
    has_begun: bool,
    are_gone: bool,
    leaves: bool,
    waited_s: float,
    fill_after_s: float,
    timeout_s: float,
) -> Decision:
    """Decide what an onlooker does next. Nobody waits for it, and it does nothing for the checkpoint.

    Args:
        has_begun: there is anything of the checkpoint.
        are_gone: the lighthouse knows all who write it to be lost: what there is of it stays as it is.
        leaves: this rank's next save begins.
        waited_s: how long it has looked on. Where there is nothing to be seen for long enough, the writers do not save this step:
            who was given a state may not know that they had restored it.
    """
    if is_closed:
        return Decision(Act.DONE)
    if leaves:
        return Decision(Act.LEAVE, reason="the next save began before it was whole")
    if are_gone:
        return Decision(Act.LEAVE, reason="all who write it are gone")
    if not has_begun and waited_s >= min(_ABSENT_AFTER_S, fill_after_s, timeout_s):
        return Decision(Act.LEAVE, reason="nobody has written anything of it")
    if waited_s >= timeout_s:
        return Decision(Act.GIVE_UP, reason="its writers have not closed it")
    return Decision(Act.WAIT, min(max(waited_s * _LOOK_SHARE, _FIRST_LOOK_S), _LAST_LOOK_S))


@dataclass(slots=True)
class SaveWatch:
    """One writer's view of a save, from the time its own share is written.

    Args:
        fill_after_s: how long nothing may grow of what a writer writes until it is taken for lost.
        took_s: how long this writer took for its own share. Others may take as long until there is anything to be seen of them.
    """

    me: SavingRank
    writers: Writers
    fill_after_s: float
    give_up_at_s: float
    has_lighthouse: bool = False
    took_s: float = 0.0
    backs_up: dict[int, SavingRank] = field(init=False)
    """Shares that are still missing and that this writer backs up, by the number that it has among their holders."""
    _num_in_vain: int = 0
    """How often what is there now was seen not to be whole."""
    _not_before_s: float = 0.0
    """When to see again whether it is."""
    _parts: frozenset[PartKey] | None = None
    _lost: dict[int, float] = field(default_factory=dict)
    """Groups that the lighthouse knows to be lost, and since when it is known here."""
    _damaged: dict[PartKey, float] = field(default_factory=dict)
    """Parts that do not count, and since when it is known."""
    _missing: list[SavingRank] | None = None
    """Shares of which no part counts; None until it matters."""
    _cut_off: frozenset[int] = frozenset()
    """Groups of which a share is missing, or was written by another; known when `_missing` is."""
    _growth: dict[SavingRank, int] = field(default_factory=dict)
    _grew_at_s: dict[SavingRank, float] = field(default_factory=dict)
    _present: frozenset[int] = frozenset()
    """Groups of which there is any file."""
    _began_at_s: float | None = None
    _changed_at_s: float = 0.0
    """When something was last seen to change."""
    _ask_at_s: float = 0.0
    """When the lighthouse is to be asked, where there is something to ask about."""
    _is_asking: bool = False
    """The lighthouse was asked at the last look."""
    _list_at_s: float = 0.0
    """When the directory is to be listed, where this writer backs nothing up any more."""

    def __post_init__(self) -> None:
        self.backs_up = {
            number: self.writers.share_of(self.me, number) for number in range(1, self.writers.num_holders)
        }

    def lists(self, now: float) -> bool:
        """Whether the next look is to list the directory; else it is enough to know whether the checkpoint is closed."""
        return bool(self.backs_up) or now >= min(self._list_at_s, self.give_up_at_s)

    def asks(self, now: float) -> bool:
        """Whether to ask the lighthouse now who is lost: a share that this writer backs up is missing.

        Or all shares are there, and others are to close the checkpoint before this writer.
        """
        if not self.has_lighthouse or self._parts is None or now < self._ask_at_s:
            return False
        return bool(self.backs_up) or len(self._parts) >= self.writers.num_members

    def look_failed(self, now: float) -> Decision:
        """Decide what to do after the storage did not answer: look again, as what this writer backs up is nowhere else."""
        if now >= self.give_up_at_s:
            return Decision(Act.GIVE_UP, reason="the storage does not answer")
        return Decision(Act.WAIT, _LAST_LOOK_S)

    def missing(self) -> list[SavingRank]:
        """Return the shares of which there was no manifest when the directory was last listed."""
        if self._missing is None:
            limits = (self.writers.num_replicas, self.writers.num_ranks, self.writers.num_holders)
            there = {
                part for part in self._parts or () if part not in self._damaged and all(map(operator.lt, part, limits))
            }
            everybody = itertools.starmap(SavingRank, itertools.product(range(limits[0]), range(limits[1])))
            not_by_owner = [share for share in everybody if (*share, 0) not in there]
            self._missing = [share for share in not_by_owner if there.isdisjoint(self.parts_of(share))]
            self._cut_off = frozenset(share.replica for share in not_by_owner)
        return self._missing

    def absent(self) -> list[int]:
        """Return the groups that have written nothing, and of which shares are missing."""
        missing = {share.replica for share in self.missing()} if self._parts is not None else set()
        return sorted(missing - self._present - {self.me.replica})

    def is_lost(self, replica: int) -> bool:
        """Whether the lighthouse knows a group to be lost."""
        return replica in self._lost

    def is_absence_told(self, now: float) -> bool:
        """Whether who has written nothing by now has not called save, as far as can be known."""
        waits_s = max(min(_ABSENT_AFTER_S, self.fill_after_s), self.took_s)
        return self._began_at_s is not None and now >= self._began_at_s + waits_s

    def watched(self, now: float) -> set[SavingRank]:
        """Return the writers of whom it matters whether what they write grows."""
        shares = [*self.backs_up.values()]
        if self._parts is not None and now >= self._changed_at_s + self.fill_after_s * _STILL_SHARE:
            shares += self.missing()[:_MAX_WATCHED]
        return {self.writers.holder_of(share, number) for share in shares for number in range(self.writers.num_holders)}

    def parts_of(self, share: SavingRank) -> list[PartKey]:
        """Return the parts of which one makes a share complete."""
        return [(*self.writers.holder_of(share, number), number) for number in range(self.writers.num_holders)]

    def observe(self, seen: SaveView, now: float) -> Decision:
        """Return what to do next, given what is to be seen now."""
        if seen.is_closed:
            return Decision(Act.DONE)
        if self._began_at_s is None:
            self._began_at_s = self._changed_at_s = now
            self._ask_at_s = now + _ASK_AFTER_S
        self._is_asking = False
        if seen.parts is not None:
            self._note(seen, now)
        if now >= self.give_up_at_s:
            return Decision(Act.GIVE_UP, reason=self._waited_for(self.missing(), now))
        next_s = self.give_up_at_s
        for number, share in self.backs_up.items():
            lost_at_s = self._lost_at_s(share, number)
            if now >= lost_at_s:
                return Decision(Act.TAKE_OVER, reason=self._waited_for([share], now), number=number)
            next_s = min(next_s, lost_at_s)
        turn_s = self._turn_s(now)
        if now >= turn_s:
            return Decision(Act.CLOSE)
        self._list_at_s = min(self._list_at_s, turn_s)
        last_look_s = max(_LAST_LOOK_S, self.writers.num_members / _LOOKS_PER_S)
        look_s = min(max((now - self._changed_at_s) * _LOOK_SHARE, _FIRST_LOOK_S), last_look_s)
        if self._is_asking:
            look_s = min(look_s, _ANSWERED_IN_S)
        return Decision(Act.WAIT, min(look_s, max(min(next_s, turn_s) - now, _FIRST_LOOK_S)))

    def not_whole(self, now: float) -> None:
        """Say that what is there does not make it whole. A manifest that could not be read may be readable later."""
        self._not_before_s = now + self.fill_after_s * 2**self._num_in_vain
        self._num_in_vain += 1

    def took_over(self, number: int) -> None:
        """Say that this writer has written the share that it backs up under that number."""
        self.backs_up.pop(number, None)
        self._list_at_s = 0.0

    def _note(self, seen: SaveView, now: float) -> None:
        """Note what a listing of the directory has shown."""
        self._is_asking = self.asks(now)
        if self._is_asking:
            self._ask_at_s = now + max(_ASK_EVERY_S, self.writers.num_members / _LOOKS_PER_S)
        for member, num_bytes in seen.growth.items():
            if self._growth.get(member) != num_bytes:
                if member in self._growth:
                    self._changed_at_s = now
                self._growth[member] = num_bytes
                self._grew_at_s[member] = now
        self._lost = {replica: self._lost.get(replica, now) for replica in seen.lost}
        self._present = frozenset(seen.present)
        parts = frozenset(seen.parts or ())
        if parts != self._parts:
            self._parts, self._missing = parts, None
            self._changed_at_s, self._num_in_vain, self._not_before_s = now, 0, 0.0
        if len(self._damaged) != len(seen.damaged):
            self._damaged, self._missing = {part: self._damaged.get(part, now) for part in seen.damaged}, None
        for number, share in [*self.backs_up.items()]:
            if any(part in parts and part not in self._damaged for part in self.parts_of(share)):
                del self.backs_up[number]
        soon_s = min(max((now - self._changed_at_s) * _LOOK_SHARE, _FIRST_LOOK_S), _LAST_LOOK_S)
        self._list_at_s = now + max(soon_s, (self._place() - 1) * self.fill_after_s * _TURN_SHARE)
        if self._is_asking:
            self._list_at_s = min(self._list_at_s, now + _ANSWERED_IN_S)

    def _lost_at_s(self, share: SavingRank, number: int) -> float:
        """Return when all holders of a share before the one of that number are lost, if nothing grows till then."""
        lost_at_s = began_at_s = self._began_at_s or 0.0
        never = float("inf")
        for earlier in range(number):
            holder = self.writers.holder_of(share, earlier)
            silent_at_s = max(lost_at_s, self._grew_at_s.get(holder, began_at_s)) + self.fill_after_s
            known_at_s = min(self._lost.get(holder.replica, never), self._damaged.get((*holder, earlier), never))
            lost_at_s = min(silent_at_s, max(lost_at_s, known_at_s))
        return lost_at_s

    def _turn_s(self, now: float) -> float:
        """Return when this writer is to close the checkpoint, as far as is known now."""
        never = float("inf")
        if self._parts is None:
            return never
        # When nothing has changed for so long nobody will write what is missing. Where each group writes all it may be whole.
        num_holders = self.writers.num_holders
        given_up_at_s = self._changed_at_s + num_holders * self.fill_after_s
        if len(self._parts) < self.writers.num_members and now < given_up_at_s and not self._lost:
            return never  # as is quick to tell
        holders = (self.writers.holder_of(share, number) for share in self.missing() for number in range(num_holders))
        ready_at_s = self._changed_at_s if all(holder.replica in self._lost for holder in holders) else given_up_at_s
        return never if now < ready_at_s else max(ready_at_s + self._place() * self.fill_after_s, self._not_before_s)

    def _place(self) -> int:
        """Return how many writers of groups that are not lost are to close the checkpoint before this one.

        A group is lost where the lighthouse says so. When no share is waited for any more, so is one of which a share is
        missing,
        or was written by another: groups die as a whole.
        """
        lost = self._cut_off.union(self._lost) if self._missing is not None else self._lost.keys()
        num_before = self.me.replica - sum(replica < self.me.replica for replica in lost)
        return self.me.rank * (self.writers.num_replicas - len(lost)) + num_before

    def _waited_for(self, shares: Sequence[SavingRank], now: float) -> str:
        if not shares:
            return "a hole in what was written"
        names = ", ".join(f"replica {replica} rank {rank}" for replica, rank in shares[:5])
        more = f" and {len(shares) - 5} more" if len(shares) > 5 else ""
        since_s = max([self._began_at_s or 0.0, *(self._grew_at_s.get(share, 0.0) for share in shares)])
        return f"nothing came of {names}{more} for {max(now - since_s, 0.0):.1f} s"
