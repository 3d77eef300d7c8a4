"""This file decides which names keep a place, where names cost nothing to make and places do. It knows no network and no clock.

Who comes gets a place. Where none is free, the client with the most names, the newcomer among them, loses the name that it was
heard under least recently. So who makes up names pushes out his own: a client that has no more than an equal share of the places
loses none by what others do, and among the names of one client those stay that something is heard of.
"""

from __future__ import annotations

from collections import OrderedDict


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
