"""This file decides which connections a server keeps where it may not keep all. It knows no socket, no token and no clock.

A connection is a stranger's until it has shown the token; then it is known. Strangers have places of their own, and a known
connection is never cut. Where a stranger finds no place, the one that has been a stranger for longest loses its own: who has
the token shows it within a round trip, so whoever is still a stranger after many others have come has none, or is too slow.
One client has so many known connections at most; what it opens beyond stays a stranger's.
"""

from __future__ import annotations

import ipaddress
from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionLimits:
    """Limits of the connections that a server keeps.

    Args:
        per_client: of the strangers of one client; of all connections of one client where `binds_known`.
        binds_known: there is no token, so that to be known means little.
    """

    total: int
    strangers: int
    per_client: int
    binds_known: bool
    known_per_client: int


@dataclass(frozen=True, slots=True)
class ConnectionVerdict:
    """The fate of a new connection.

    Args:
        cut: the connection that loses its place to it; it is counted out already.
        reason: where there was no place, which of the limits was reached.
    """

    is_admitted: bool
    cut: Hashable | None = None
    reason: str = ""


class Admission:
    """Keeps count of the connections of one server. A connection is whatever can be a key."""

    def __init__(self, places: ConnectionLimits) -> None:
        self._places = places
        self._strangers: OrderedDict[Hashable, str] = OrderedDict()
        self._strangers_of: dict[str, OrderedDict[Hashable, None]] = {}
        """By client; oldest first, as `_strangers`."""
        self._known: dict[Hashable, str] = {}
        self._num_known_of: dict[str, int] = {}

    def admit(self, connection: Hashable, client: str) -> ConnectionVerdict:
        """Count a new connection in as a stranger's, or refuse it."""
        places = self._places
        own = self._strangers_of.get(client, OrderedDict())
        num_own = len(own) + (self._num_known_of.get(client, 0) if places.binds_known else 0)
        cut, reason = None, ""
        if num_own >= places.per_client:
            reason = f"{client} has {num_own} connections already"
            cut = next(iter(own), None)
        elif len(self._strangers) >= places.strangers or len(self._strangers) + len(self._known) >= places.total:
            reason = f"{len(self._strangers) + len(self._known)} connections are open"
            cut = next(iter(self._strangers), None)
        if reason and cut is None:
            return ConnectionVerdict(False, reason=reason)
        if cut is not None:
            self.leave(cut)
        self._strangers[connection] = client
        self._strangers_of.setdefault(client, OrderedDict())[connection] = None
        return ConnectionVerdict(True, cut, reason)

    def show(self, connection: Hashable) -> None:
        """It has shown the token. May be called again, also of one that was cut, or has found no place."""
        client = self._strangers.get(connection)
        if client is not None and self._num_known_of.get(client, 0) < self._places.known_per_client:
            self.leave(connection)
            self._known[connection] = client
            self._num_known_of[client] = self._num_known_of.get(client, 0) + 1

    def knows(self, connection: Hashable) -> bool:
        """Whether it has shown the token, and is there."""
        return connection in self._known

    def leave(self, connection: Hashable) -> None:
        client = self._strangers.pop(connection, None)
        if client is not None:
            del self._strangers_of[client][connection]
            if not self._strangers_of[client]:
                del self._strangers_of[client]
            return
        client = self._known.pop(connection, None)
        if client is not None:
            self._num_known_of[client] -= 1
            if not self._num_known_of[client]:
                del self._num_known_of[client]


def client_of_address(address: str) -> str:
    """Return who an address counts as: itself, or its network of 64 bits in IPv6, all of which one host may have.

    Link-local addresses of IPv6 count as themselves: all hosts of a link are in one such network.
    """
    if ":" not in address:
        return address
    try:
        parsed = ipaddress.IPv6Address(address.partition("%")[0])
    except ValueError:
        return address
    if parsed.ipv4_mapped is not None:
        return str(parsed.ipv4_mapped)
    if parsed.is_link_local or parsed.is_loopback:
        return str(parsed)
    return str(ipaddress.IPv6Network((int(parsed) >> 64 << 64, 64)))
