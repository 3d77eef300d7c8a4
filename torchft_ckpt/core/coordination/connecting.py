"""This file decides with whom a newcomer is connected before it may be in a quorum, and who is to blame if that cannot be done.

Whoever is in a quorum has met all others in it: else a group behind a firewall would cost them the time that it takes to find
out, and a step. So the process groups of those who train and of a newcomer are made *beside* the one in use, while they train on.
A quorum of these very members takes what was made.

    event                                                  what follows
    -----------------------------------------------------  ----------------------------------------------------------------
    a group says something for the first time that has     ConnectBeside to it, and to these, once they have committed a
    not met all who train                                  step together; no quorum is held for it, and it is in none
    all of them have said that they are connected          the newcomer has met them
    one of them could not be connected                     those who train have met before: it is the newcomer, which stays
                                                           outside for a while. Several newcomers: each is tried alone next
    one of them is gone, or one who trains does not        nobody is to blame, and the next meeting begins
    answer

Nobody waits for a meeting: it begins long before the newcomer could be in a quorum, and what is late is for the next step.
Process groups that cannot be connected so (NCCL, those of users) are connected when the quorum has formed: see `Deciding`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field

from torchft_ckpt.core.coordination.beside import Beside
from torchft_ckpt.core.coordination.job_record import JobRecord
from torchft_ckpt.core.coordination.joining import Joining
from torchft_ckpt.core.coordination.lighthouse_events import Instruction, Log, Send
from torchft_ckpt.core.coordination.lighthouse_records import Member
from torchft_ckpt.core.coordination.messages import ConnectBeside, ConnectedBeside, clip, name_some

ANSWERS_WITHIN_S = 30.0
"""A group that has not said by then whether it is connected does not count as connected."""
TAKEN_WITHIN_S = 60.0
"""What was made longer ago no quorum takes: what is between two hosts may have forgotten a connection that is not in use."""
PAUSE_S = 0.25
"""A meeting begins so long after the last one began: one that comes again and again does not keep the others busy."""
REACH = "Each has to reach the others at every port: look for a firewall, or set TORCHFT_CKPT_HOSTNAME or GLOO_SOCKET_IFNAME"


@dataclass(slots=True)
class _Meeting:
    """One attempt to connect newcomers with those who train."""

    place: str
    parties: tuple[str, ...]
    newcomers: tuple[str, ...]
    began_at: float
    connected: set[str] = field(default_factory=set)

    @property
    def is_over(self) -> bool:
        return len(self.connected) == len(self.parties)


class Connecting:
    """The meetings of one job, of which one at most is open. Not thread-safe."""

    def __init__(self, job: JobRecord, joining: Joining, beside: Beside) -> None:
        self._job = job
        self._joining = joining
        self._beside = beside
        self._num_meetings = 0
        self._meeting: _Meeting | None = None
        """The last one, if it may still go well, or a quorum may take it."""
        self._pauses_until = float("-inf")
        self._store_hosts: tuple[str, ...] = ()
        """At most two: the member at whose store the last quorum met, and the one that stands by for it."""
        self._tried_alone: set[str] = set()
        """Newcomers that could not be connected, alone or together with others."""
        self.deadline: float | None = None
        """When an open meeting is given up, or the next one may begin, if anybody waits for that."""

    def why_not(self, newcomers: Collection[Member], others: Collection[Member]) -> dict[str, str]:
        """Return which newcomers may not come into the quorum of others yet, nor one with each other, and why not."""
        reasons: dict[str, str] = {}
        coming = [*others]
        for member in newcomers:
            if unmet := self._unmet(member, coming):
                why = f"it is connected with {name_some(unmet)} first, while they train on"
                reasons[member.replica_id] = self._joining.why_failed(member) or why
            else:
                coming.append(member)
        return reasons

    def unmet(self, holding: Collection[Member]) -> dict[str, str]:
        """Return which of those that ask for a step with its state are new, and may not be in its quorum yet, and why not.

        Nobody, if the others are too few for a step that counts.
        """
        new = {m.replica_id: m for m in holding if self._is_new(m)} if self._job.quorum_members else {}
        rest = [m for m in holding if m.replica_id not in new]
        return {} if not new or self._job.are_too_few(rest, rest) else self.why_not(new.values(), rest)

    def _unmet(self, member: Member, others: Collection[Member]) -> list[str]:
        ranks = member.hello.group_world_size
        if not all(m.connects_beside and m.hello.group_world_size == ranks for m in (member, *others)):
            return []  # they connect as the quorum begins: rank by rank
        unmet = {other.replica_id: other for other in others if other.replica_id not in member.met}
        return [m for m, other in unmet.items() if other is not member and member.replica_id not in other.met]

    def choose_stores(self, members: Collection[str]) -> None:
        """A quorum of these forms. Stay with the stores that members are connected to: a new connection may take seconds (name
        lookups)."""
        hosts = [m for m in members if self._job.members[m].hello.store_address]
        able = [m for m in hosts if m in self._job.quorum_members] or hosts
        kept = [replica_id for replica_id in self._store_hosts if replica_id in able]
        self._store_hosts = tuple([*kept, *(m for m in able if m not in kept)][:2])

    def store_addresses(self) -> tuple[str, str]:
        """Addresses of the present store and of the one that stands by; empty where there is none."""
        members = self._job.members
        addresses = [members[host].hello.store_address for host in self._store_hosts if host in members]
        present, standby, *_ = [*addresses, "", ""]
        return present, standby

    def begin(self, now: float) -> Iterator[Instruction]:
        """Connect those who train with the newcomers that have not met them, unless that is on the way.

        Those who train have to have met each other: else it could be one of them that cannot be connected.
        """
        if self._meeting is not None and not self._meeting.is_over:
            return
        self.deadline = None
        at_work, (store_address, _) = [self._job.members[m] for m in self._job.quorum_members], self.store_addresses()
        if not store_address or not at_work or not self._have_met(at_work):
            return
        new = [m for m in self._job.members.values() if self._is_newcomer(m, at_work, now)]
        fresh = [m for m in new if m.replica_id not in self._tried_alone]
        new = fresh or sorted(new, key=lambda m: bool(self._joining.why_failed(m)))[:1]  # the likely good ones first
        if not new:
            return
        if now < self._pauses_until:
            self.deadline = self._pauses_until
            return
        self._num_meetings += 1
        place = f"{self._job.epoch}/beside-{self._num_meetings}"
        parties = tuple(sorted(m.replica_id for m in (*at_work, *new)))
        self._meeting = _Meeting(place, parties, tuple(m.replica_id for m in new), now)
        self.deadline, self._pauses_until = now + ANSWERS_WITHIN_S, now + PAUSE_S
        for rank, replica_id in enumerate(parties):
            connect = ConnectBeside(
                place=place, replica_rank=rank, replica_world_size=len(parties), store_address=store_address
            )
            yield Send(self._job.members[replica_id].connection, connect)

    def _have_met(self, members: Collection[Member]) -> bool:
        """Whether each of these has met all of them; those that have trained together hold one and the same set."""
        names = {m.replica_id for m in members}
        return all(names <= met for met in {m.met for m in members})

    def _is_newcomer(self, member: Member, at_work: Sequence[Member], now: float) -> bool:
        is_outside = member.stays and member.replica_id not in self._job.quorum_members
        return is_outside and bool(self._unmet(member, at_work)) and not self._joining.why_owes(member, now)

    def _is_new(self, member: Member) -> bool:
        """Whether a member was in no quorum: if it holds the newest state, it has caught up with the others between two rounds.

        One that was in another quorum may only have lost its connection to the lighthouse.
        """
        return member.replica_id not in self._job.quorum_members and not member.hello.was_in_quorum

    def answered(self, member: Member, message: ConnectedBeside, now: float) -> Iterator[Instruction]:
        """A member says whether it is connected."""
        meeting, replica_id = self._meeting, member.replica_id
        if meeting is None or meeting.is_over or meeting.place != message.place or replica_id not in meeting.parties:
            return
        if message.failure:
            yield from self._fails(meeting, f"{replica_id}: {clip(message.failure)}", now)
            return
        meeting.connected.add(replica_id)
        if meeting.is_over:
            self._tried_alone.difference_update(meeting.newcomers)
            newcomers = [self._job.members[newcomer] for newcomer in meeting.newcomers]
            for newcomer in newcomers:
                newcomer.met = frozenset(meeting.parties)
            if any(newcomer.request is not None for newcomer in newcomers):
                yield from self._beside.have_state_captured()

    def _fails(self, meeting: _Meeting, why: str, now: float) -> Iterator[Instruction]:
        """Those who train have been connected before. So it is on account of the newcomers, or of one of them."""
        self._meeting = None
        self._tried_alone.update(meeting.newcomers)
        if len(meeting.newcomers) > 1:
            return
        (newcomer,) = meeting.newcomers
        reason = f"it cannot be connected with those who train ({why}). {REACH}"
        yield Log(self._joining.cannot_be_connected(newcomer, reason, now), is_warning=True)

    def lost(self, replica_id: str) -> None:
        """A member is gone: who was to meet it is to meet those who are left."""
        self._tried_alone.discard(replica_id)
        if self._meeting is not None and replica_id in self._meeting.parties:
            self._meeting = None

    def expire(self, now: float) -> Iterator[Instruction]:
        """Give up a meeting that takes too long."""
        meeting = self._meeting
        if meeting is None or meeting.is_over or now < meeting.began_at + ANSWERS_WITHIN_S:
            return
        silent = [m for m in meeting.parties if m not in meeting.connected]
        why = f"{name_some(silent)} has not said within {ANSWERS_WITHIN_S:g} s whether it is connected"
        if {*meeting.newcomers}.intersection(silent):  # those who train have met each other, and may only wait for it
            yield from self._fails(meeting, why, now)
        else:
            yield Log(f"{name_some(meeting.newcomers)} stays outside, and is tried again: {why}", is_warning=True)
        self._meeting = None

    def take(self, members: Sequence[str], now: float) -> str:
        """A new quorum of these forms. Return the place where they have been connected; empty: they connect as it begins."""
        meeting = self._meeting
        if meeting is None or not meeting.is_over or meeting.parties != tuple(members):
            return ""
        self._meeting = None
        return meeting.place if now < meeting.began_at + TAKEN_WITHIN_S else ""

    def validate(self) -> None:
        """Check the invariants, for tests; a `RuntimeError` says which one is broken."""
        meeting = self._meeting
        if not self._tried_alone <= self._job.members.keys():
            raise RuntimeError(f"{self._tried_alone} are to be connected, and are not here")
        if meeting is not None and not {*meeting.parties} <= self._job.members.keys():
            raise RuntimeError(f"{meeting} goes on without one of its parties")
        if meeting is not None and not {*meeting.newcomers, *meeting.connected} <= {*meeting.parties}:
            raise RuntimeError(f"{meeting} is of others than its parties")
