"""This file decides the quorums of a job of callers: who calls `LighthouseClient.quorum`, and trains in its own way.

It knows no sockets and no clock. What callers do in a quorum is their own affair: no state is named, nothing is voted on,
nobody is told of a loss. Who is in a quorum learns of all who are.

- The rule is `quorum`'s. Whoever lives and has not called is waited for, as there.
- A caller lives for the heartbeat timeout after the last message that names it, or until the connection closes that it
  called on. Any connection may say that it lives; the one that called last for it gets the answer.
- A `quorum_id` names one set of callers. It only rises: where another set is formed, where one of them was gone in
  between, or reports a commit that failed. A restarted lighthouse goes on above what its callers have seen.
- What all of them say of themselves fits into one message: who would make it too long is refused.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from typing import TypeAlias

from torchft_ckpt.core.coordination.lighthouse_events import Close, Instruction, LighthouseSettings, Log, Send
from torchft_ckpt.core.coordination.messages import (
    MAX_MESSAGE_BYTES,
    PROTOCOL_VERSION,
    CallerHeard,
    CallerHeartbeat,
    CallerHello,
    CallGivenUp,
    Dropped,
    Quorum,
    QuorumCall,
    QuorumCalled,
    QuorumPending,
    Refused,
    Timestamp,
    Welcome,
    clip,
    name_some,
    refuse_version,
    size_of,
)
from torchft_ckpt.core.coordination.patience import PENDING_NOTICE_S
from torchft_ckpt.core.coordination.quorum import Asked, QuorumIds, decide_quorum

MAX_CALLERS = 65536
MAX_MEMBERS_BYTES = MAX_MESSAGE_BYTES - 4096 - MAX_CALLERS
"""For the members of a quorum in its message: the rest is for what stands between and around them."""

CallerMessage: TypeAlias = CallerHello | QuorumCall | CallerHeartbeat | CallGivenUp


@dataclass(slots=True)
class Caller:
    """A member of a job that has called, or said that it lives."""

    connection: str
    """The one that it called on last, or was first named on. It is open."""
    last_seen: float
    call: QuorumCall | None = None
    """Set exactly while it waits for a quorum."""
    called_at: float = 0.0
    step: int = 0
    num_bytes: int = 0
    """The size of what it says of itself in its open call; 0 where there is none."""
    notified_reason: str = ""
    """Why it waits, as it was last notified."""


class Callers:
    """All that the lighthouse knows of the callers, with the arguments of `LighthouseState`. Not thread-safe: one at a time."""

    def __init__(self, settings: LighthouseSettings, epoch: str, unix_time_of_zero: float) -> None:
        self.quorum: Quorum | None = None
        """The last that was formed in this life."""
        self.members: OrderedDict[str, Caller] = OrderedDict()
        """By replica id, the one heard from longest ago first."""
        self.reason = ""
        """Why there is no quorum at the moment, or why the last was formed."""
        self._settings = settings
        self._epoch = epoch
        self._unix_time_of_zero = unix_time_of_zero
        self._quorum_ids = QuorumIds(epoch)
        self._connections: set[str] = set()
        """Open connections on which a caller said hello."""
        self._waiting: dict[str, None] = {}
        """Exactly the callers that have an open call, in the order in which they called."""
        self._last: dict[str, None] = {}
        """The callers of the last quorum that have not been gone since."""
        self._num_bytes = 0
        """The sum over the open calls."""
        self._evaluate_at: float | None = None
        """When to look again whether a quorum can be formed. Set while anybody waits for one."""

    @property
    def who(self) -> str:
        """Name the job's callers: those who live, else those of the last quorum; empty where there was none of them yet."""
        last = [member.replica_id for member in self.quorum.participants] if self.quorum is not None else []
        return name_some(sorted(self.members) or last)

    def speaks_on(self, connection: str) -> bool:
        return connection in self._connections

    def longest_silent(self) -> Caller | None:
        return next(iter(self.members.values()), None)

    def hear_all(self, now: float) -> None:
        """Excuse all silence until now: the lighthouse could not hear."""
        for caller in self.members.values():
            caller.last_seen = now

    def next_deadline(self) -> float | None:
        """Return when `tick` is due, if nothing else happens before. It never needs to be early."""
        deadlines = [] if self._evaluate_at is None else [self._evaluate_at]
        if (silent := self.longest_silent()) is not None:
            deadlines.append(silent.last_seen + self._settings.heartbeat_timeout_s)
        return min(deadlines, default=None)

    def validate(self) -> None:
        """Check the invariants, for tests; a `RuntimeError` says which one is broken. It costs a pass over the callers."""
        if self._waiting.keys() != {name for name, caller in self.members.items() if caller.call is not None}:
            raise RuntimeError(f"{list(self._waiting)} wait, and others have an open call")
        if not self._last.keys() <= self.members.keys():
            raise RuntimeError(f"some of {list(self._last)}, of the last quorum, are gone")
        if self._num_bytes != sum(caller.num_bytes for caller in self.members.values()):
            raise RuntimeError(f"{self._num_bytes} bytes are counted, and the callers said others of themselves")
        if not {caller.connection for caller in self.members.values()} <= self._connections:
            raise RuntimeError("a caller lives on a connection that is gone")
        seen = [caller.last_seen for caller in self.members.values()]
        if seen != sorted(seen):
            raise RuntimeError("the first caller is not the one that has been silent for longest")
        if self._waiting and self._evaluate_at is None:
            raise RuntimeError(f"{list(self._waiting)} wait, and nothing looks at them again")

    # ------------------------------------------------------------------------------------------------------- messages

    def received(self, connection: str, message: CallerMessage, now: float) -> Iterator[Instruction]:
        if isinstance(message, CallerHello):
            yield from self._hello(connection, message)
        elif isinstance(message, CallGivenUp):
            caller = self.members.get(message.replica_id)
            call = caller.call if caller is not None else None
            if caller and call and (caller.connection, call.request_id) == (connection, message.request_id):
                self._withdraw(message.replica_id, caller)
                yield from self._reconsider(now)
        elif isinstance(message, CallerHeartbeat):
            if (yield from self._names(message.replica_id, connection, now)) is not None:
                yield Send(connection, CallerHeard(request_id=message.request_id))
        else:
            yield from self._called(connection, message, now)

    def closed(self, connection: str, now: float, reason: str) -> Iterator[Instruction]:
        """A connection is gone, and so are those who called on it last."""
        self._connections.discard(connection)
        for replica_id in [name for name, caller in self.members.items() if caller.connection == connection]:
            yield from self._lose(replica_id, reason)
        yield from self._reconsider(now)

    def tick(self, now: float) -> Iterator[Instruction]:
        timeout_s = self._settings.heartbeat_timeout_s
        was_lost = False
        while self.members:
            replica_id, oldest = next(iter(self.members.items()))
            if now < oldest.last_seen + timeout_s:
                break
            was_lost = True
            reason = f"nothing heard from it for {now - oldest.last_seen:.1f} s"
            if oldest.call is not None:  # it may wake up and wait on: it is to connect, and call, again
                yield Send(oldest.connection, Dropped(reason=reason))
                yield Close(oldest.connection)
            yield from self._lose(replica_id, reason)
        if was_lost:
            yield from self._reconsider(now)
        if self._evaluate_at is not None and now >= self._evaluate_at:
            yield from self._evaluate(now)

    def _hello(self, connection: str, hello: CallerHello) -> Iterator[Instruction]:
        if hello.protocol != PROTOCOL_VERSION:
            yield from _refuse(connection, refuse_version("the lighthouse", "a LighthouseClient", hello.protocol))
            return
        self._connections.add(connection)
        timeout_s = self._settings.heartbeat_timeout_s
        yield Send(connection, Welcome(protocol=PROTOCOL_VERSION, epoch=self._epoch, heartbeat_timeout_s=timeout_s))

    def _called(self, connection: str, call: QuorumCall, now: float) -> Iterator[Instruction]:
        replica_id = call.member.replica_id
        is_ours = call.last_epoch == self._epoch  # then nothing follows from it
        no_id = "" if is_ours else self._quorum_ids.why_never_given(call.last_quorum_id, call.last_epoch)
        if no_id:
            reason = f"{clip(replica_id, 200)} is refused: {no_id}"
            yield from _refuse(connection, Refused(code="quorum id", reason=reason))
            return
        num_bytes = size_of(call.member)
        before = self.members.get(replica_id)
        total = self._num_bytes - (before.num_bytes if before is not None else 0) + num_bytes
        if total > MAX_MEMBERS_BYTES:
            reason = (
                f"{clip(replica_id, 200)} brings {num_bytes} bytes, {total} with the others that wait for a quorum; a quorum"
                f" carries at most {MAX_MEMBERS_BYTES}: give less `data` in all callers"
            )
            yield from _refuse(connection, Refused(code="data", reason=reason))
            return
        if before is not None and before.connection != connection:
            if before.call is not None:
                reason = f"another connection calls as {clip(replica_id, 200)} now"
                yield Send(before.connection, QuorumPending(reason=reason, waited_s=now - before.called_at))
            yield from self._lose(replica_id, "it calls on another connection")
        caller = yield from self._names(replica_id, connection, now)
        if caller is None:
            return
        self._quorum_ids.begin_after(call.last_quorum_id, call.last_epoch)
        self._withdraw(replica_id, caller)
        caller.call, caller.called_at, caller.step, caller.num_bytes = call, now, call.member.step, num_bytes
        self._num_bytes += num_bytes
        self._waiting[replica_id] = None
        yield from self._reconsider(now)

    def _names(self, replica_id: str, connection: str, now: float) -> Generator[Instruction, None, Caller | None]:
        """A caller lives. Returns it, None where there is no room for it."""
        caller = self.members.get(replica_id)
        if caller is None:
            if len(self.members) >= MAX_CALLERS:
                reason = f"{clip(replica_id, 200)} would exceed the {MAX_CALLERS} callers that a job may have"
                yield from _refuse(connection, Refused(code="callers", reason=reason))
                return None
            caller = self.members[replica_id] = Caller(connection=connection, last_seen=now)
            yield Log(f"{replica_id} calls for quorums, {len(self.members)} callers live")
        caller.last_seen = now
        self.members.move_to_end(replica_id)
        return caller

    def _withdraw(self, replica_id: str, caller: Caller) -> None:
        self._waiting.pop(replica_id, None)
        self._num_bytes -= caller.num_bytes
        caller.call, caller.num_bytes, caller.notified_reason = None, 0, ""

    def _lose(self, replica_id: str, reason: str) -> Iterator[Instruction]:
        self._withdraw(replica_id, self.members.pop(replica_id))
        self._last.pop(replica_id, None)
        yield Log(f"{replica_id} is gone: {reason}; {len(self.members)} callers live")

    # --------------------------------------------------------------------------------------------------------- quorum

    def _reconsider(self, now: float) -> Iterator[Instruction]:
        """Evaluate the rule if this event can have changed its answer; else leave it to the deadline."""
        if not self._waiting:
            self._evaluate_at = None
            return
        is_fast = 0 < len(self._last) <= len(self._waiting) and self._last.keys() <= self._waiting.keys()
        if is_fast or len(self._waiting) == len(self.members):
            yield from self._evaluate(now)
        elif self._evaluate_at is None:
            self._evaluate_at = now + min(PENDING_NOTICE_S, self._settings.join_timeout_s)

    def _evaluate(self, now: float) -> Iterator[Instruction]:
        calls = {name: caller.call for name in self._waiting if (caller := self.members[name]).call is not None}
        verdict = decide_quorum(
            alive=self.members,
            asked={
                name: Asked(at=self.members[name].called_at, shrink_only=call.member.shrink_only)
                for name, call in calls.items()
            },
            last_quorum=self._last,
            min_replicas=self._settings.min_replicas,
            join_timeout_s=self._settings.join_timeout_s,
            now=now,
        )
        reason, self.reason = self.reason, verdict.reason
        if not verdict.formed:
            self._evaluate_at = min(now + PENDING_NOTICE_S, verdict.deadline or now + PENDING_NOTICE_S)
            if reason != self.reason:
                yield Log(f"no quorum of callers: {self.reason}")
            for name in self._waiting:
                caller = self.members[name]
                if caller.notified_reason != self.reason:
                    caller.notified_reason = self.reason
                    pending = QuorumPending(reason=clip(self.reason), waited_s=now - caller.called_at)
                    yield Send(caller.connection, pending)
            return
        members = [calls[name].member for name in verdict.members]
        last = [member.replica_id for member in self.quorum.participants] if self.quorum is not None else []
        was_lost = len(self._last) < len(last)
        if list(verdict.members) != last or was_lost or any(member.commit_failures for member in members):
            self._quorum_ids.give(self._quorum_ids.latest + 1)
            yield Log(f"quorum {self._quorum_ids.latest} of callers: {name_some(verdict.members, 8)}; {self.reason}")
        seconds, nanos = divmod(int((self._unix_time_of_zero + now) * 1e9), 10**9)
        self.quorum = Quorum(
            quorum_id=self._quorum_ids.latest, participants=members, created=Timestamp(seconds=seconds, nanos=nanos)
        )
        self._last = dict.fromkeys(verdict.members)
        for name in verdict.members:
            called = QuorumCalled(request_id=calls[name].request_id, epoch=self._epoch, quorum=self.quorum)
            yield Send(self.members[name].connection, called)
            self._withdraw(name, self.members[name])
        self._evaluate_at = None
        yield from self._reconsider(now)


def _refuse(connection: str, refused: Refused) -> Iterator[Instruction]:
    yield Send(connection, refused)
    yield Close(connection)
