"""This file decides whose work is done next where clients want more than there are threads. It knows no threads and no clock.

Work is done in turns, each of which ends by itself. Of the clients that wait, the one for which least is being done comes
first; of equals, the one whose last turn began longest ago. So a client waits for about one turn of each of the others, however
much they ask for, and whether they ask for it at once or for one thing after another: a turn is remembered while somebody is
here whose own is longer ago. A client's own turns come in the order in which it asked for them.

Long work reads memory as fast as it can and sends nothing. It never has all threads: who is sent something goes past it.

Of names, which cost nothing to make, only so many keep a place (`Places`). Who comes gets one. Where none is free, the client
with the most names, the newcomer among them, loses the name that it was heard under least recently. So who makes up names
pushes out his own: a client that has no more than an equal share of the places loses none by what others do, and among the
names of one client those stay that something is heard of.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from typing import Generic, TypeVar


class Places:
    """Places for names, each of a client."""

    def __init__(self, num_places: int) -> None:
        self._num_places = num_places
        self._client_of: dict[str, str] = {}
        self._names_of: dict[str, OrderedDict[str, None]] = {}
        """By client, the one that was heard least recently first."""

    def __len__(self) -> int:
        return len(self._client_of)

    def __contains__(self, name: str) -> bool:
        return name in self._client_of

    def admit(self, name: str, client: str) -> str | None:
        """Give a name a place; return the one that loses its own for that. One that has a place is heard, whoever it is of."""
        if name in self._client_of:
            self.hear(name)
            return None
        self._client_of[name] = client
        self._names_of.setdefault(client, OrderedDict())[name] = None
        if len(self._client_of) <= self._num_places:
            return None
        names = self._names_of[client]
        most = max(map(len, self._names_of.values()))
        if len(names) < most:
            names = next(others for others in self._names_of.values() if len(others) == most)
        lost = next(iter(names))
        self.drop(lost)
        return lost

    def hear(self, name: str) -> None:
        """Note that something was heard of a name, where it has a place."""
        client = self._client_of.get(name)
        if client is not None:
            self._names_of[client].move_to_end(name)

    def drop(self, name: str) -> None:
        """Free the place of a name, where it has one."""
        client = self._client_of.pop(name, None)
        if client is not None:
            names = self._names_of[client]
            del names[name]
            if not names:
                del self._names_of[client]


T = TypeVar("T")


class FairQueue(Generic[T]):
    """Turns that wait, and how many are being done."""

    def __init__(self, num_at_once: int, num_long_at_once: int) -> None:
        self._num_at_once = num_at_once
        self._num_long_at_once = num_long_at_once
        self._waiting: dict[str, tuple[deque[tuple[int, T]], deque[tuple[int, T]]]] = {}
        """By client: short turns and long ones, each with its number."""
        self._begun: Counter[str] = Counter()
        self._num_long_begun = 0
        self._last_begun: dict[str, int] = {}
        """When the last turn of a client began, as a number, ascending; the first one waits, or something is done for it."""
        self._next_number = 0

    def put(self, client: str, turn: T, *, is_long: bool) -> None:
        kinds = self._waiting.setdefault(client, (deque(), deque()))
        kinds[is_long].append((self._number(), turn))

    def begin(self) -> tuple[str, T, bool] | None:
        """Return the turn that begins now, as (client, turn, is_long), or None. It is being done until `end`."""
        if self._begun.total() >= self._num_at_once:
            return None
        may_be_long = self._num_long_begun < self._num_long_at_once
        able = [client for client, (short, long) in self._waiting.items() if short or (long and may_be_long)]
        if not able:
            return None
        client = min(able, key=lambda one: (self._begun[one], self._last_begun.get(one, -1)))
        short, long = self._waiting[client]
        is_long = bool(long) and may_be_long and (not short or long[0][0] < short[0][0])
        _, turn = (long if is_long else short).popleft()
        if not short and not long:
            del self._waiting[client]
        self._begun[client] += 1
        self._num_long_begun += is_long
        self._last_begun.pop(client, None)
        self._last_begun[client] = self._number()
        self._forget()
        return client, turn, is_long

    def end(self, client: str, *, is_long: bool) -> None:
        self._begun[client] -= 1
        self._num_long_begun -= is_long
        if not self._begun[client]:
            del self._begun[client]
            self._forget()

    def _forget(self) -> None:
        while (
            self._last_begun and (first := next(iter(self._last_begun))) not in self._waiting and not self._begun[first]
        ):
            del self._last_begun[first]

    def _number(self) -> int:
        self._next_number += 1
        return self._next_number
