"""This file decides what one writer of a checkpoint does once its own share is written: wait, fill a hole, or close it.

It is told what is to be seen in the checkpoint's directory, and when. It knows no files, and no clock.

Nobody coordinates, so all writers watch the same directory. When every part is there, one of them reads the manifests and writes
DCP's metadata: the first, or, where that one does not do it in time, the next, and so on. Where a part does not come and
nothing of it grows any more, its writer is taken for lost: those that hold the same bytes write them instead. Where a writer
was only slow its bytes are there twice, which does no harm. If the hole is still there when nothing has changed for as long
again, the one that was to fill it is lost as well, and everybody who can fills it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

_CLOSE_DELAY_S = 1.0
_WRITERS_READ_PER_DELAY = 50
"""Who closes reads all manifests first: where they are many, the next in turn waits for that."""
_FIRST_LOOK_S = 0.01
_LOOK_SHARE = 0.2
"""Of the time that nothing has changed so far."""
_LAST_LOOK_S = 1.0
_LOOKS_PER_S = 200
"""Of all writers together, where they are many: a directory of thousands of files is not listed for nothing."""


class Act(Enum):
    """What to do."""

    WAIT = "wait"
    FILL = "fill"
    CLOSE = "close"
    """See whether it is whole; if so, write the metadata."""
    DONE = "done"
    GIVE_UP = "give up"


class Member(NamedTuple):
    """A rank of a replica group that saves."""

    replica: int
    rank: int


class Seen(NamedTuple):
    """What the directory shows."""

    is_closed: bool
    """Its metadata are there."""
    parts: frozenset[tuple[int, int, int]]
    """(replica, rank, fill) of each manifest."""
    growth: Mapping[Member, int]
    """Bytes of what else a member has written so far."""


class Decision(NamedTuple):
    """What to do, and why; `look_in_s`: when to look again."""

    act: Act
    look_in_s: float = 0.0
    reason: str = ""


@dataclass(slots=True)
class SaveWatch:
    """One writer's view of a save, from the time its own share is written.

    Args:
        place: of this writer among all, from 0.
        writers: whose shares there are to be.
        fill_after_s: how long nothing may change until who is missing is taken for lost.
        give_up_at_s: when to stop waiting.
    """

    place: int
    writers: frozenset[Member]
    fill_after_s: float
    give_up_at_s: float
    num_fills: int = 0
    """How often this writer has looked for holes that it can fill."""
    missing: tuple[Member, ...] = ()
    """Whose own shares are not there."""
    _last: tuple[object, ...] = ()
    _changed_at_s: float = 0.0
    """When something was last seen to change, or this writer last filled what it could."""
    _seen_at_s: float = 0.0
    """When something was last seen to change."""
    _last_of_writers: tuple[object, ...] = ()
    _writers_changed_at_s: float = 0.0
    """When something of a writer's own share was last seen to change, whatever others filled since."""
    _is_in_vain: bool = False
    """What is there now was seen not to be whole."""

    def observe(self, seen: Seen, now: float) -> Decision:
        """Return what to do next, given what is to be seen now."""
        if seen.is_closed:
            return Decision(Act.DONE)
        present = {Member(replica, rank) for replica, rank, fill in seen.parts if fill == 0}
        self.missing = tuple(sorted(self.writers - present))
        growth = tuple(sorted(seen.growth.items()))
        of_writers = (frozenset(present), growth)
        if of_writers != self._last_of_writers:
            self._last_of_writers, self._writers_changed_at_s = of_writers, now
        state = (seen.parts, growth)
        if state != self._last:
            self._last, self._changed_at_s, self._seen_at_s, self._is_in_vain = state, now, now, False
        if now >= self.give_up_at_s:
            return Decision(Act.GIVE_UP, reason=self._waited_for(now))
        has_ended = not self.missing or self.num_fills > 0
        turn_s = self.place * _CLOSE_DELAY_S * max(1.0, len(self.writers) / _WRITERS_READ_PER_DELAY)
        if has_ended and not self._is_in_vain and now - self._changed_at_s >= turn_s:
            return Decision(Act.CLOSE)
        is_nobodys = not self.missing and self._is_in_vain and not self.num_fills
        # The first time each fills what is its own to fill, and need not wait for those who look earlier.
        changed_at_s = self._changed_at_s if self.num_fills else self._writers_changed_at_s
        may_have_holes = bool(self.missing) or self._is_in_vain
        if is_nobodys or (may_have_holes and now - changed_at_s >= self.fill_after_s):
            return Decision(Act.FILL, reason=self._waited_for(now))
        longest_s = max(_LAST_LOOK_S, len(self.writers) / _LOOKS_PER_S)
        look_s = min(max((now - self._seen_at_s) * _LOOK_SHARE, _FIRST_LOOK_S), longest_s)
        return Decision(Act.WAIT, min(look_s, self.give_up_at_s - now))

    def not_whole(self) -> None:
        """Say that the manifests that are there do not make it whole."""
        self._is_in_vain = True

    def filled(self, now: float) -> None:
        """Say that this writer has filled what it can."""
        self.num_fills += 1
        self._changed_at_s, self._is_in_vain = now, False

    def _waited_for(self, now: float) -> str:
        if not self.missing:
            return "a hole"
        names = ", ".join(f"replica {replica} rank {rank}" for replica, rank in self.missing[:5])
        more = f" and {len(self.missing) - 5} more" if len(self.missing) > 5 else ""
        return f"nothing came of {names}{more} for {max(now - self._writers_changed_at_s, 0.0):.1f} s"
