"""Which of several lighthouses decides, and how long its word is taken. This file knows no store, no network and no clock.

One of them holds a lease in a store that all reach; the others stand by. Each lease has a number, its fence, which is higher than
those of all leases before. What is so at a time is counted from before a question was sent, never from when the answer came:
- A leader decides only while its lease holds by its own clock, less a margin for clocks that run apart (`Leadership`). When that
  is over it forgets all, as one that has started again, and asks for a lease anew.
- A member takes what a leader says until the lease would be over that the leader had when it answered the member's last
  heartbeat, and leaves it soon after (`Trust`). A leader may have been stopped between looking at its clock and sending.
- A member that has met a fence goes to no leader with a lower one, and the store takes no write of one that holds no lease: that
  is so even if a clock was wrong, or stood still, as that of a virtual machine that was paused. Such a leader may believe until
  its next renewal that it leads. It can only tell then what needs no write: that a step counts which all have approved, say.

So what a member takes was decided, and is taken, before the next lease begins. For members another leader is what a lighthouse is
that has started again: they give back what they know (`restart`). What they may not be there to give back is small and in the
store, and is there before anything that follows from it is said: how steps ended that not all voters approved, and at which step
jobs have finished.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Protocol, TypeAlias

from torchft_ckpt.core.coordination.messages import Heartbeat, Welcome

MARGIN = 0.1
"""The part of a lease that its holder does not use: two clocks may run apart by so much."""
ANSWER_S = 0.5
"""A leader whose lease would be over is asked once more, and has so long to answer."""
MAX_HELD = 4096
"""Messages that wait for that answer."""


@dataclass(frozen=True, slots=True)
class LeaseHeld:
    """The lease is ours, for so long from when we asked."""

    fence: int
    lease_s: float
    data: bytes = b""
    """Of a new lease: what was written last, whoever did; empty: nothing was."""


@dataclass(frozen=True, slots=True)
class LeaseOf:
    """Somebody holds the lease: the lighthouse at this address."""

    leader: str


@dataclass(frozen=True, slots=True)
class StoreFailed:
    """There was no answer, so the call may have been carried out or not."""

    reason: str


Answer: TypeAlias = LeaseHeld | LeaseOf | StoreFailed | None
"""None: the lease is not ours, and nothing was written."""


class LeaseStore(Protocol):
    """Where the lease is. One call at a time; what goes wrong is raised as an OSError or a `CoordinationError`.

    Each is atomic, for all who use the store together: two never hold the lease at once, by the store's clock.
    """

    lease_s: float
    """For how long a lease is asked."""

    async def acquire(self) -> LeaseHeld | LeaseOf | None:
        """Take the lease unless another one holds it; give up one of our own before. None: somebody was faster."""

    async def renew(self) -> LeaseHeld | None:
        """Hold it for longer; None: it is ours no more."""

    async def write(self, data: bytes) -> LeaseHeld | None:
        """Write if the lease is ours; None: it is not, and nothing was written.

        A write of which no answer came is carried out before the next one that is answered, or never.
        """

    async def release(self) -> None:
        """Give the lease up, if it is ours, and the connections."""


class Call(Enum):
    """What the store is asked."""

    ACQUIRE = "acquire"
    RENEW = "renew"
    WRITE = "write"


class Leadership:
    """One lighthouse of several. The caller makes one call of the store at a time, the one that `next_call` names.

    Args:
        lease_s: for how long leases are asked.
    """

    def __init__(self, lease_s: float) -> None:
        self.is_leading = False
        """It has the lease, as of the last `look`."""
        self.fence = 0
        """Of our lease; of one that is over, the last."""
        self.leader = ""
        """Who holds the lease, as far as is known; empty: nobody, or we do."""
        self.reason = "it has only just started"
        """Why this one does not lead."""
        self.data = b""
        """What is in the store, as it was read or written last."""
        self._lease_s = lease_s
        self._until = self._ends_at = self._call_at = float("-inf")
        """When it stops to decide; when the lease itself ends; when to make the next call."""
        self._why_failed = ""
        """What was heard of the last renewal; empty: it went well."""
        self._is_write_due = True
        """None has failed since the last renewal."""

    def leads(self, now: float) -> bool:
        """Whether this lighthouse may decide now."""
        return self.is_leading and now < self._until

    @property
    def over_at(self) -> float | None:
        """When `look` is due."""
        return self._until if self.is_leading else None

    def left_s(self, now: float) -> float:
        """Return for how long it leads at least."""
        return max(0.0, self._until - now) if self.is_leading else 0.0

    def answer(self, heartbeat: Heartbeat, now: float) -> Heartbeat:
        """Return what to answer to a member."""
        return Heartbeat(heartbeat.number, self.left_s(now))

    def patience_s(self, call: Call) -> float:
        """Return for how long to wait for an answer. To take the lease takes several messages."""
        return self._lease_s / (2 if call is Call.ACQUIRE else 4)

    def next_call(self, data: bytes, now: float) -> tuple[Call, float]:
        """Return what to ask the store next, and when. `data`: what is to be in it, if this lighthouse leads."""
        if not self.is_leading:  # our last lease could be given up before it ends, and groups may take our word so long
            return Call.ACQUIRE, max(self._call_at, self._ends_at)
        is_news = data != self.data and self._is_write_due and now < self._call_at
        return (Call.WRITE, now) if is_news else (Call.RENEW, self._call_at)

    def answered(self, call: Call, answer: Answer, began: float, now: float, written: bytes = b"") -> None:
        """Take the answer to a call. `began`: before it was sent. `written`: what was to be written."""
        self.look(now)
        if not self.is_leading and call is not Call.ACQUIRE:
            return  # the lease was over before the answer came
        pause_s = self._lease_s / 10
        if isinstance(answer, StoreFailed):
            self.reason = self._why_failed = f"the store of the lease does not answer: {answer.reason}"
            pause_s = self._lease_s / 20
        elif isinstance(answer, LeaseHeld) and call is Call.WRITE:
            self.data = written
        elif isinstance(answer, LeaseHeld):
            self.fence, self.leader, self._why_failed = answer.fence, "", ""
            self._until, self._ends_at = began + answer.lease_s * (1.0 - MARGIN), began + answer.lease_s
            pause_s = began + self._lease_s / 4 - now
            if call is Call.ACQUIRE:
                self.is_leading, self.data = True, answer.data
        else:
            self.is_leading, self.leader = False, "" if answer is None else answer.leader
            self.reason = f"the one at {self.leader} leads" if self.leader else "the lease is not its own"
        self._is_write_due = call is not Call.WRITE or not isinstance(answer, StoreFailed)
        if call is not Call.WRITE or not self.is_leading:
            self._call_at = now + max(0.0, pause_s)
        self.look(now)

    def look(self, now: float) -> None:
        """Note that time has passed."""
        if self.is_leading and now >= self._until:
            self.reason = self._why_failed or "it was stopped for longer than its lease"
            self.is_leading, self._call_at = False, now

    def validate(self, now: float) -> None:
        """Check the invariants, for tests; a `RuntimeError` says which one is broken."""
        if self.is_leading and (self.fence <= 0 or self.leader):
            raise RuntimeError(f"it leads with fence {self.fence}, and {self.leader!r} leads")
        if self.leads(now) and not 0.0 < self.left_s(now) < float("inf"):
            raise RuntimeError(f"it leads for {self.left_s(now)} s yet")


class Trust:
    """Whose word a member takes, and how long. What a leader says of its lease is believed: who it is, TLS shows.

    Args:
        fence: no lower one is taken: 1 where there are several lighthouses, as one without a lease knows nothing of the others.
    """

    def __init__(self, fence: int = 0) -> None:
        self.fence = fence
        """The highest that it has met."""
        self.is_for_a_time = False
        """There are several lighthouses: only an answer to a heartbeat says for how long this one leads."""
        self._until = float("-inf")
        self._sent: dict[int, float] = {}
        self._number = 0
        self._doubted_at: float | None = None
        """When it was asked first after the lease that is known of was over."""

    def begins(self, welcome: Welcome, asked_at: float) -> bool:
        """Take a leader's welcome on a new connection; False: it has a lower fence than was met, and is left.

        `asked_at`: when the member had not sent yet what the welcome answers.
        """
        if welcome.fence < self.fence:
            return False
        for_s, self.fence = welcome.leads_for_s, welcome.fence
        self.is_for_a_time = for_s is not None
        self._until = float("inf") if for_s is None else asked_at + for_s
        self._sent.clear()
        self._doubted_at = None
        return True

    @property
    def ask_at(self) -> float:
        """When to ask at the latest, for the leader to have its time to answer."""
        return self._until if self._doubted_at is None else self._doubted_at + ANSWER_S

    def asks(self, now: float) -> Heartbeat:
        """Return the heartbeat to send."""
        if not self.is_for_a_time:
            return Heartbeat()
        self._number += 1
        self._sent[self._number] = now
        if len(self._sent) > 64:
            del self._sent[next(iter(self._sent))]
        if self._doubted_at is None and now >= self._until:
            self._doubted_at = now
        return Heartbeat(self._number)

    def heard(self, answer: Heartbeat) -> None:
        """Take the answer to a heartbeat."""
        sent_at = self._sent.get(answer.number)
        until = self._until if sent_at is None else sent_at + (answer.leads_for_s or 0.0)
        if until > self._until:
            self._until, self._doubted_at = until, None

    def takes(self, now: float) -> bool:
        """Whether what has come so far is taken; else it waits until this is so again, or is never taken."""
        return now < self._until

    def is_over(self, now: float) -> bool:
        """Whether to leave the leader, which has not answered."""
        return self._doubted_at is not None and now >= self._doubted_at + ANSWER_S
