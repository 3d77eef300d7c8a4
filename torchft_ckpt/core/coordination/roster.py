"""The members of a job: which replica groups are connected, over which connections, and who took whose place.

The roster knows no quorums and no states. The lighthouse tells it who comes, speaks and goes, and acts on what follows.

- A replica group has a name; each of its starts is an *incarnation* with a replica id of its own. The latest incarnation
  supersedes the ones before: they are never admitted again.
- A member is lost when its connection closes, when it leaves, or when it was silent for too long. In the last case the
  connection may still bring what the member said before it learned that the lighthouse gave it up: that counts for nothing.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from types import MappingProxyType

from torchft_ckpt.core.coordination.lighthouse_records import Member
from torchft_ckpt.core.coordination.messages import group_name

MAX_REMEMBERED = 4096
"""Groups and incarnations that the roster remembers after they are gone."""
MAX_LOST = 64


class Roster:
    """The members. Not thread-safe: one caller at a time."""

    def __init__(self) -> None:
        self._members: OrderedDict[str, Member] = OrderedDict()
        self.members: Mapping[str, Member] = MappingProxyType(self._members)
        """Read-only, by replica id. Ordered by `last_seen`: the longest silent member first."""
        self._by_connection: dict[str, str] = {}
        """Connection to replica id: exactly the members' connections."""
        self._given_up: set[str] = set()
        """Open connections of members that are lost. Never a member's connection; forgotten when it closes."""
        self._lost: OrderedDict[str, tuple[str, float]] = OrderedDict()
        self.lost: Mapping[str, tuple[str, float]] = MappingProxyType(self._lost)
        """Read-only: the latest `MAX_LOST` members that are gone: the reason, and when each was heard last. Never a member."""
        self._latest: OrderedDict[str, str] = OrderedDict()
        """Group name to its latest incarnation, also while it is away. A member is always its group's latest one."""
        self._superseded: OrderedDict[str, None] = OrderedDict()
        """Incarnations that a later one has replaced. Never a member, never the latest incarnation."""

    # ------------------------------------------------------------------------------------------------- who is a member

    def on(self, connection: str) -> Member | None:
        replica_id = self._by_connection.get(connection)
        return None if replica_id is None else self._members[replica_id]

    def has_given_up(self, connection: str) -> bool:
        """Return whether a connection is open whose member is lost."""
        return connection in self._given_up

    def is_superseded(self, replica_id: str) -> bool:
        """Return whether a later incarnation of the group has taken its place."""
        return replica_id in self._superseded

    def begin_incarnation(self, replica_id: str) -> Member | None:
        """Note the latest incarnation of a group.

        Returns:
            the member whose place it takes, if one is connected: the same incarnation on an older connection, or an older
            one. The caller removes it before it adds the new one.
        """
        name = group_name(replica_id)
        before = self._latest.get(name)
        if before is not None and before != replica_id:
            self._superseded[before] = None
            while len(self._superseded) > MAX_REMEMBERED:
                self._superseded.popitem(last=False)
        self._latest[name] = replica_id
        self._latest.move_to_end(name)
        while len(self._latest) > max(MAX_REMEMBERED, len(self._members)):
            self._latest.popitem(last=False)
        return None if before is None else self._members.get(before)

    def add(self, member: Member) -> None:
        """Add a member that is heard just now. Its incarnation has begun, and no member holds its connection."""
        self._members[member.replica_id] = member
        self._by_connection[member.connection] = member.replica_id
        self._given_up.discard(member.connection)
        self._lost.pop(member.replica_id, None)

    def remove(self, replica_id: str, reason: str, *, is_closed: bool) -> Member:
        """Remove a member; `reason` is for the operator. Unless its connection `is_closed`, that is given up until it closes."""
        member = self._members.pop(replica_id)
        del self._by_connection[member.connection]
        if not is_closed:
            self._given_up.add(member.connection)
        self._lost[replica_id] = reason, member.last_seen
        while len(self._lost) > MAX_LOST:
            self._lost.popitem(last=False)
        return member

    def close(self, connection: str) -> Member | None:
        """Note that a connection closed. Returns the member that spoke on it; the caller removes it."""
        self._given_up.discard(connection)
        return self.on(connection)

    # --------------------------------------------------------------------------------------------------------- silence

    def hear(self, member: Member, now: float) -> None:
        member.last_seen = now
        self._members.move_to_end(member.replica_id)

    def hear_all(self, now: float) -> None:
        """Excuse all silence until now: the lighthouse could not hear."""
        for member in self._members.values():
            member.last_seen = now

    def longest_silent(self) -> Member | None:
        return next(iter(self._members.values()), None)

    # ------------------------------------------------------------------------------------------------------ invariants

    def validate(self) -> None:
        """Check the invariants, for tests; a `RuntimeError` says which one is broken. It costs a pass over the members."""
        members = self._members
        if self._by_connection != {member.connection: replica_id for replica_id, member in members.items()}:
            raise RuntimeError(f"connections {self._by_connection} are not those of the members {members}")
        if not self._given_up.isdisjoint(self._by_connection):
            raise RuntimeError(f"a member speaks on a connection that was given up: {self._given_up}")
        last_seen = float("-inf")
        for replica_id, member in members.items():
            if member.replica_id != replica_id:
                raise RuntimeError(f"{member.replica_id} is filed as {replica_id}")
            if member.last_seen < last_seen:
                raise RuntimeError(f"{replica_id} was heard before a member that counts as silent for longer")
            last_seen = member.last_seen
            if replica_id in self._superseded or replica_id in self._lost:
                raise RuntimeError(f"{replica_id} is a member, and superseded or lost")
            if self._latest.get(group_name(replica_id), replica_id) != replica_id:
                raise RuntimeError(f"{replica_id} is a member, and not the latest incarnation of its group")
        if not self._superseded.keys().isdisjoint(self._latest.values()):
            raise RuntimeError("the latest incarnation of a group is superseded")
        if len(self._lost) > MAX_LOST or len(self._superseded) > MAX_REMEMBERED:
            raise RuntimeError("the roster remembers more of those who are gone than it may")
