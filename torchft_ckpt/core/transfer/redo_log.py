"""This file decides which entries of a source's log of committed steps are kept, for which follower, and why one is given up.

A *learner* that is outside of the quorum fetches a snapshot of some version, and then follows by this log: an entry leads from
one version of the state to the next. The entries are a chain without a gap. An entry is kept as long as a follower may still ask
for it. Memory is bounded: where an entry would not fit, the followers that are furthest behind are given up, never the newest
entry of those that keep up. A follower that is silent is given up after a while.

A follower that is given up hears a sentence that says why. It begins again with a newer snapshot, or joins otherwise: that is
its own decision. The log ends when nobody follows, or when a step cannot be noted; nothing is noted before it is begun anew.

It knows names, numbers of bytes and times that are handed in. It does not know what is in an entry, nor where entries are.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from torchft_ckpt.core.services.places import Places


class _Ordered(Protocol):
    """A name of a state, hashable; a later state's is greater."""

    def __gt__(self, other: Any, /) -> bool: ...


V = TypeVar("V", bound=_Ordered)

MAX_FOLLOWERS = 64
"""Of one log at once. Names cost nothing to make, see `places`."""
_MAX_REMEMBERED = 64


@dataclass(frozen=True, slots=True)
class Next(Generic[V]):
    """The follower is to have the entry that leads to this version."""

    version: V


@dataclass(frozen=True, slots=True)
class Wait:
    """The next entry is still to come: the follower holds the newest version, or one that this source is about to reach."""


@dataclass(frozen=True, slots=True)
class Gone:
    """The follower cannot go on by this log.

    Args:
        reason: a sentence for its log.
        is_revoked: it was too slow for the memory that is allowed here.
    """

    reason: str
    is_revoked: bool = False


@dataclass(slots=True)
class _Follower:
    needs: int
    """The number of the first entry that it may still ask for."""
    until: float
    """Its lease ends then, if nothing is heard of it."""


class RedoLog(Generic[V]):
    """The log of one source. Not for several threads at once.

    Args:
        budget_bytes: at most so much is kept.
        lease_s: a follower of which nothing is heard for so long is given up. So is one that was announced and has not come.

    `versions` are those that kept entries lead to, oldest first: the caller keeps these entries and no others.
    """

    def __init__(self, *, budget_bytes: int, lease_s: float) -> None:
        self.budget_bytes = budget_bytes
        self.lease_s = lease_s
        self._base = 0
        """The number of the oldest kept entry; entry i leads from the version before to `_entries[i - _base]`."""
        self._entries: deque[tuple[V, int]] = deque()
        self._start: V | None = None
        """The version that the oldest kept entry leads from; None: there is no log."""
        self._numbers: dict[V, int] = {}
        """By version, the number of the entry that leads on from it, or will."""
        self._followers: dict[str, _Follower] = {}
        self._places = Places(MAX_FOLLOWERS)
        self._announced: list[_Follower] = []
        """Those that were announced and have not come."""
        self._given_up: OrderedDict[str, Gone] = OrderedDict()
        self._end: Gone | None = None
        """Why there is no log, where it has failed; None: there may be one any moment."""

    def __repr__(self) -> str:
        return f"RedoLog({len(self._entries)} entries, {self.kept_bytes} bytes, {self.num_followers} followers)"

    @property
    def is_kept(self) -> bool:
        """Whether steps are to be noted."""
        return self._start is not None

    @property
    def head(self) -> V | None:
        """The newest version that the log leads to; None where there is no log."""
        return self._entries[-1][0] if self._entries else self._start

    @property
    def versions(self) -> tuple[V, ...]:
        return tuple(version for version, _ in self._entries)

    @property
    def kept_bytes(self) -> int:
        return sum(num_bytes for _, num_bytes in self._entries)

    @property
    def num_followers(self) -> int:
        """Those that follow or were announced."""
        return len(self._followers) + len(self._announced)

    def begin(self, version: V, num_followers: int, now: float) -> None:
        """Keep what follows on a version, which is the newest here, for so many followers that are to come.

        Where a log is kept that has come to this version it goes on, for these as well. Else it begins anew.
        """
        if self.is_kept and version != self.head:
            self.end(f"the log came to {self.head} and begins anew at {version}")
        if not self.is_kept:
            self._start, self._numbers = version, {version: self._base}
            self._end = None
            self._given_up.clear()
        self._announced += [_Follower(self._top, now + self.lease_s) for _ in range(num_followers)]
        self._drop()

    def append(self, after: V, version: V, num_bytes: int) -> None:
        """A step was committed that led from one version to the next. Without effect where no log is kept."""
        if not self.is_kept:
            return
        if after != self.head:
            self.end(f"the state went from {self.head} to {after} otherwise than by a committed step")
            return
        if version in self._numbers:
            self.end(f"the state came to {version} a second time")
            return
        self._numbers[version] = self._top + 1
        self._entries.append((version, num_bytes))
        self._fit_into_budget(num_bytes)
        self._drop()

    def ask(self, name: str, client: str, after: V, now: float) -> Next[V] | Wait | Gone:
        """A follower holds a version and asks for what follows; it needs nothing before it any more.

        Args:
            name: of the follower.
            client: whose it is.
            after: that it holds.
            now: in seconds.
        """
        head = self.head
        if head is None:
            return self._given_up.get(name) or self._end or Wait()
        number = self._top if after > head else self._numbers.get(after)
        if number is None:
            return self._given_up.get(name) or Gone(
                f"the log of this source leads from {self._start} to {self.head}; {after} is not on its way"
            )
        self._given_up.pop(name, None)
        if name not in self._followers:
            self._admit(name, client, number)
        follower = self._followers[name]
        follower.needs = number
        follower.until = now + self.lease_s
        self._places.hear(name)
        self._drop()
        return Wait() if number == self._top else Next(self._entries[number - self._base][0])

    def hear(self, name: str, now: float) -> None:
        """Something is heard of a follower, as while it takes an entry. One that was announced receives a state first."""
        follower = self._followers.get(name)
        if follower is None:
            for announced in self._announced:
                announced.until = now + self.lease_s
        else:
            follower.until = now + self.lease_s
            self._places.hear(name)

    def leave(self, name: str) -> None:
        """A follower needs nothing more."""
        if self._followers.pop(name, None) is not None:
            self._places.drop(name)
            self._drop()

    def lapse(self, now: float) -> None:
        """Give up those of which nothing was heard for the time of a lease."""
        for name in [name for name, follower in self._followers.items() if follower.until <= now]:
            self._give_up(
                name, Gone(f"nothing was heard of follower {name} for {self.lease_s:g} s: its lease has ended")
            )
        self._announced = [follower for follower in self._announced if follower.until > now]
        self._drop()

    def next_deadline(self) -> float | None:
        """The moment at which `lapse` may have something to do; None: never."""
        leases = (*self._followers.values(), *self._announced)
        return min((follower.until for follower in leases), default=None)

    def end(self, reason: str) -> None:
        """End the log: nothing is kept, all followers hear the reason. Without effect where there is none."""
        if self.is_kept:
            self._forget(Gone(f"the log of this source has ended: {reason}"))

    def validate(self) -> None:
        """Check the invariants, for tests; a `RuntimeError` says which one is broken."""
        if self.kept_bytes > self.budget_bytes:
            raise RuntimeError(f"{self.kept_bytes} bytes are kept, and the budget is {self.budget_bytes}")
        if not len(self._followers) == len(self._places) <= MAX_FOLLOWERS:
            raise RuntimeError(f"{len(self._followers)} followers have {len(self._places)} places")
        if self.is_kept != bool(self.num_followers):
            raise RuntimeError("entries are kept for nobody, or not kept for somebody")
        if not self.is_kept and (self._entries or self._followers or self._announced):
            raise RuntimeError("nothing is kept, and there are entries or followers")
        if self._followers.keys() & self._given_up.keys():
            raise RuntimeError("a follower was given up, and follows")
        if self.is_kept:
            needs = [follower.needs for follower in (*self._followers.values(), *self._announced)]
            if not self._base == min(needs) <= max(needs) <= self._top:
                raise RuntimeError(f"entries {self._base} to {self._top} are kept, and followers need {sorted(needs)}")
            chain = [self._start, *self.versions]
            if self._numbers != {version: self._base + place for place, version in enumerate(chain)}:
                raise RuntimeError(f"the numbers of the versions do not follow {chain}")

    # Between events

    @property
    def _top(self) -> int:
        """The number of the entry that comes next."""
        return self._base + len(self._entries)

    def _admit(self, name: str, client: str, number: int) -> None:
        """A follower comes: one of those that were announced for this version or an earlier one has come."""
        waiting = [follower for follower in self._announced if follower.needs <= number]
        if waiting:
            self._announced.remove(max(waiting, key=lambda follower: follower.needs))
        self._followers[name] = _Follower(number, 0.0)
        lost = self._places.admit(name, client)
        if lost is not None:
            self._give_up(lost, Gone(f"more than {MAX_FOLLOWERS} follow this source, and {lost} lost its place"))

    def _give_up(self, name: str, gone: Gone) -> None:
        if self._followers.pop(name, None) is not None:
            self._places.drop(name)
            self._given_up[name] = gone
            while len(self._given_up) > _MAX_REMEMBERED:
                self._given_up.popitem(last=False)

    def _fit_into_budget(self, newest_bytes: int) -> None:
        """Give up those that are furthest behind until what the others need fits."""
        if newest_bytes > self.budget_bytes:
            self._forget(
                Gone(
                    f"an entry of one step has {newest_bytes} bytes, and this source may keep {self.budget_bytes} for"
                    " followers: nobody can follow",
                    is_revoked=True,
                )
            )
            return
        while (over := self.kept_bytes) > self.budget_bytes:
            oldest = self._base
            num_behind = len(self._entries)
            gone = Gone(
                f"it was {num_behind} steps behind, of {over} bytes, and this source may keep {self.budget_bytes} for followers:"
                " what it still needed was freed",
                is_revoked=True,
            )
            for name in [name for name, follower in self._followers.items() if follower.needs == oldest]:
                self._give_up(name, gone)
            if any(follower.needs == oldest for follower in self._announced):
                self._announced = [follower for follower in self._announced if follower.needs != oldest]
            self._drop(gone)

    def _drop(self, gone: Gone | None = None) -> None:
        """Free what nobody needs; where nobody is left, the log ends, for this reason."""
        if not self.is_kept:
            return
        needs = [follower.needs for follower in (*self._followers.values(), *self._announced)]
        if not needs:
            self._forget(gone)
            return
        while self._base < min(needs):
            version, _ = self._entries.popleft()
            if self._start is not None:
                del self._numbers[self._start]
            self._start = version
            self._base += 1

    def _forget(self, gone: Gone | None) -> None:
        """There is no log any more; where it has failed, all who ask hear why."""
        for name in list(self._followers):
            self._give_up(name, gone or Gone("the log of this source has ended: nobody follows any more"))
        self._announced = []
        self._base = self._top
        self._entries.clear()
        self._numbers = {}
        self._start = None
        self._end = gone or Gone("the log of this source has ended: nobody follows any more")
