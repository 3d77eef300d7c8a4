"""Several lighthouses and the store of their lease. Each party has a clock of its own, and any two may be parted.

What must hold after every event, judged by the store alone:
- When a lease is given, no other lighthouse could decide anything, and no member would take anything that another one says. Nor
  is anything decided or taken of an earlier lease from then on.
- A step of which a member heard how it ended is not decided otherwise by a later leader, however long who heard is away.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING, Any

import msgspec

from simulation.clock import Clock, Process
from simulation.lighthouse import Lighthouse
from simulation.oracle import Oracle, must_hold
from torchft_ckpt.core.coordination.leadership import (
    Answer,
    Call,
    Leadership,
    LeaseHeld,
    LeaseOf,
    StoreFailed,
)
from torchft_ckpt.core.coordination.lighthouse_events import (
    Event,
    Instruction,
    LighthouseSettings,
    Received,
    Send,
)
from torchft_ckpt.core.coordination.messages import (
    CommitDecided,
    Dropped,
    Heartbeat,
    Outcome,
    Refused,
    Welcome,
)
from torchft_ckpt.core.coordination.restart import NOTHING_UNTOLD, Untold

if TYPE_CHECKING:
    from simulation.group import ReplicaGroup

LONGEST_S = 4.0
"""A trouble lasts so long at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeasePlan:
    """Several lighthouses. Durations in seconds."""

    num_lighthouses: int = 3
    lease_s: float = 1.0
    drift: float = 0.02
    """Clocks run by so much faster or slower."""
    fault_rate: float = 0.01
    """Troubles of lighthouses and of their store, for each event."""


class Store:
    """The store: it carries calls out in the order in which they reach it, each at once."""

    def __init__(self, clock: Clock, rate: float) -> None:
        self.fence = 0
        """Of the last lease."""
        self.data = b""
        self._clock, self._rate = clock, rate
        self._holder, self._until = "", float("-inf")

    def carry_out(self, who: str, call: Call, lease_s: float, data: bytes) -> Answer:
        now = self._clock.now * self._rate
        holder = self._holder if now < self._until else ""
        if call is Call.ACQUIRE:
            if holder not in ("", who):
                return LeaseOf(holder)
            self.fence, self._holder, self._until = self.fence + 1, who, now + lease_s
            return LeaseHeld(self.fence, lease_s, self.data)
        if holder != who:
            return None
        if call is Call.WRITE:
            self.data = data
            return LeaseHeld(self.fence, lease_s)
        self._until = now + lease_s
        return LeaseHeld(self.fence, lease_s)


class Candidate(Lighthouse):
    """One of several lighthouses, over its lives."""

    def __init__(self, number: int, all_of_them: Lighthouses, plan: LeasePlan, **of_one: Any) -> None:
        self.number, self._all, self._plan = number, all_of_them, plan
        self._clock_rate = all_of_them.draw_rate()
        self.parted_until = 0.0
        """From the store."""
        self.pauses_before_sending = self.tells_one = False
        super().__init__(**of_one)

    @property
    def now(self) -> float:
        """By its own clock."""
        return self._clock.now * self._clock_rate

    def _start(self) -> None:
        self.untold = NOTHING_UNTOLD
        super()._start()
        self.process.name = f"lighthouse {self.number}.{self._life}"
        self.leadership = Leadership(self._plan.lease_s)
        self._pending = self._planned = 0
        self._is_asking = self._is_leading = False
        self._unsaid: list[Instruction] = []
        self.process.checks.append(must_hold(lambda: self.leadership.validate(self.now)))
        self._next()

    def _begin_life(self) -> None:
        self._life = self._all.num_lives = self._all.num_lives + 1
        super()._begin_life()

    # ------------------------------------------------------------------------------------------------------- its lease

    def _data(self) -> bytes:
        return msgspec.json.encode(self.state.untold)

    def _next(self) -> None:
        """Make the next call of the store in its time, if none is under way."""
        self._planned += 1
        if not self._is_asking:
            number, (_, at) = self._planned, self.leadership.next_call(self._data(), self.now)
            delay_s = max(0.0, at - self.now) / self._clock_rate
            self._clock.after(delay_s, self.process, lambda: self._ask() if number == self._planned else None)

    def _ask(self) -> None:
        data = self._data()
        call, at = self.leadership.next_call(data, self.now)
        if at > self.now + 1e-6:  # it was stopped meanwhile, and leads no more
            self._next()
            return
        self._is_asking = True
        self._pending += 1
        number, began, process = self._pending, self.now, self.process
        who = process.name

        def arrive() -> None:
            if self._all.is_cut_off(self):
                return
            answer = self._all.store.carry_out(who, call, self._plan.lease_s, data)
            if isinstance(answer, LeaseHeld) and call is Call.ACQUIRE:
                self._all.given(self, answer)
            if not self._all.is_cut_off(self) and self._rng.random() > 0.02:
                self._clock.after(self._delay(), process, lambda: self._answered(number, call, answer, began, data))

        self._clock.after(self._delay(), None, arrive)
        patience_s = self.leadership.patience_s(call) / self._clock_rate
        failed = StoreFailed("no answer")
        self._clock.after(patience_s, process, lambda: self._answered(number, call, failed, began, data))

    def _delay(self) -> float:
        return self._rng.uniform(0.001, 0.02)

    def _answered(self, number: int, call: Call, answer: Answer, began: float, data: bytes) -> None:
        if number == self._pending:
            self._pending += 1
            self._is_asking = False
            self.leadership.answered(call, answer, began, self.now, data)
            self._look()
            self._say()
            self._next()

    def _look(self) -> None:
        self.leadership.look(self.now)
        leads = self.leadership.is_leading
        if leads is not self._is_leading:
            self._is_leading = leads
            self._log(f"{self.process.name} {'leads' if leads else self.leadership.reason}")
            for connection in list(self.connections.values()):
                connection.send_to_client(Dropped(reason=self.leadership.reason))
                connection.close(by_server=True)
            self.connections.clear()
            self._unsaid.clear()
            self.untold = msgspec.json.decode(self.leadership.data or b"{}", type=Untold) if leads else NOTHING_UNTOLD
            self._begin_life()
        if leads and (over_at := self.leadership.over_at) is not None:
            self._clock.after(max(0.0, over_at - self.now) / self._clock_rate, self.process, self._look_once(over_at))

    def _look_once(self, over_at: float) -> Callable[[], None]:
        return lambda: self._look() if self.leadership.over_at == over_at else None

    # ------------------------------------------------------------------------------------------------------ as a leader

    def handle(self, event: Event) -> None:
        leadership = self.leadership
        if not leadership.leads(self.now):
            self._look()
            connection = self.connections.pop(event.connection, None) if isinstance(event, Received) else None
            if connection is not None:
                connection.send_to_client(Refused(code="standby", reason=leadership.reason))
                connection.close(by_server=True)
            return
        if (
            isinstance(event, Received)
            and isinstance(event.message, Heartbeat)
            and event.connection in self.connections
        ):
            self.connections[event.connection].send_to_client(leadership.answer(event.message, self.now))
        super().handle(event)

    def _carry_out(self, instructions: list[Instruction]) -> None:
        self._unsaid += instructions
        self._say()

    def _say(self) -> None:
        """Say what there is to say, if what must outlive this lighthouse is in the store; else that is written before."""
        if self._data() != self.leadership.data:
            self._next()
            return
        if not self.leadership.leads(self.now):
            return
        instructions, self._unsaid = self._unsaid, []
        left_s = self.leadership.left_s(self.now)
        told = [self._with_lease(i, left_s) for i in instructions]
        self._all.decides(self, told)
        decided = [i for i in told if isinstance(i, Send) and isinstance(i.message, CommitDecided)]
        if self.tells_one and decided and (_is_unlike_votes(decided) or self._rng.random() < 0.1):
            self.tells_one = False
            one = self._rng.choice(self._against(decided) or decided)
            super()._carry_out([one])
            self._all.dies_and_leaves_away(self, one)
            return
        if not self.pauses_before_sending:
            super()._carry_out(told)
            return
        self.pauses_before_sending = False
        process, send = self.process, super()._carry_out
        self._clock.after(0.0, process, lambda: send(told))
        self._all.stop(process)

    def _against(self, decided: list[Send]) -> list[Send]:
        """Return what those are told who have not approved: without them the others' votes may tell another thing."""
        votes = {} if self.state.round is None else self.state.round.tally.votes
        names = {member.connection: member.replica_id for member in self.state.members.values()}
        cast = ((told, votes.get(names.get(told.connection, ""))) for told in decided)
        return [told for told, vote in cast if vote is not None and not vote.approve]

    def _with_lease(self, instruction: Instruction, left_s: float) -> Instruction:
        if isinstance(instruction, Send) and isinstance(instruction.message, Welcome):
            welcome = msgspec.structs.replace(instruction.message, fence=self.leadership.fence, leads_for_s=left_s)
            return Send(instruction.connection, welcome)
        return instruction


class Lighthouses:
    """All of them, with what goes wrong between them, and what must hold."""

    def __init__(
        self,
        clock: Clock,
        rng: Random,
        settings: LighthouseSettings,
        oracle: Oracle,
        log: Callable[[str], None],
        max_delay_s: float,
        plan: LeasePlan,
    ) -> None:
        self._clock, self._rng, self._oracle, self._plan = clock, rng, oracle, plan
        self.log = log
        self.groups: Callable[[], list[ReplicaGroup]] = lambda: []
        self.store = Store(clock, self.draw_rate())
        self._store_gone_until = 0.0
        self._parted: dict[tuple[int, int], float] = {}
        """By group and lighthouse: until when the network swallows what they say to each other."""
        self._heard: dict[tuple[int, str, int], tuple[bool, int]] = {}
        """By step: whether it counts, as the first member heard, and by which fence."""
        self.num_lives = self.num_taken = 0
        of_one = {"clock": clock, "rng": rng, "settings": settings, "oracle": oracle, "log": log}
        self.each = [
            Candidate(number, self, plan, **of_one, max_delay_s=max_delay_s) for number in range(plan.num_lighthouses)
        ]

    @property
    def leader(self) -> Candidate:
        """The one that leads, else the first."""
        return next((one for one in self.each if one.process.is_alive and one.leadership.leads(one.now)), self.each[0])

    def draw_rate(self) -> float:
        return 1.0 + self._rng.choice((-1, 1)) * self._plan.drift

    # ---------------------------------------------------------------------------------------------------------- troubles

    def is_cut_off(self, one: Candidate) -> bool:
        return self._clock.now < max(self._store_gone_until, one.parted_until)

    def is_reachable(self, group: int, one: Lighthouse) -> bool:
        return isinstance(one, Candidate) and self._clock.now >= self._parted.get((group, one.number), 0.0)

    def stop(self, process: Process) -> None:
        self.log(f"--- {process.name} is stopped")
        self._clock.stop(process)
        self._clock.after(self._rng.uniform(0.1, LONGEST_S), None, lambda: self._clock.wake(process))

    def trouble(self) -> None:
        """Something goes wrong."""
        rng, now, groups = self._rng, self._clock.now, self.groups()
        one = rng.choice((self.leader, self.leader, rng.choice(self.each)))
        until = now + rng.choice((rng.uniform(0.05, 0.5), rng.uniform(0.5, LONGEST_S)))
        kind = rng.choice(("kill", "stop", "pause", "pause", "part", "part", "store", "group", "group", "group", "one"))
        self.log(f"--- {kind}: {one.process.name} until {until:.2f}")
        if kind == "kill" and one.process.is_alive:
            one.crash()
            self._clock.after(until - now, None, one.restart)
        elif kind == "stop":
            self.stop(one.process)
        elif kind == "pause":
            one.pauses_before_sending = True
        elif kind == "part":
            one.parted_until = until
        elif kind == "one":
            one.tells_one = True
        elif kind == "store":
            self._store_gone_until = until
        elif kind == "group":
            index = rng.randrange(len(groups))
            self._parted[index, one.number] = until
            connection = groups[index].connection
            if connection is not None and connection.server is one.process and not connection.is_silent:
                connection.fall_silent()
                self._clock.after(until - now, None, connection.speak_again)

    def dies_and_leaves_away(self, one: Candidate, told: Send) -> None:
        """A lighthouse dies that has just told one member alone how a step ended, and that one reaches no other for long."""
        connection, now = one.connections.get(told.connection), self._clock.now
        for index, group in enumerate(self.groups()):
            if connection is not None and group.connection is connection:
                self.log(f"--- only {group.replica_id} hears it")
                until = now + self._rng.uniform(1.0, 3 * LONGEST_S)
                self._parted.update(dict.fromkeys(((index, other.number) for other in self.each), until))
        one.crash()
        self._clock.after(self._rng.uniform(0.1, LONGEST_S), None, one.restart)

    # ------------------------------------------------------------------------------------------------- what must hold

    def given(self, one: Candidate, lease: LeaseHeld) -> None:
        """The store has given the lease to a lighthouse."""
        self.log(f"{one.process.name} is given fence {lease.fence}")
        for other in self.each:
            if other is not one and other.process.is_alive and other.leadership.leads(other.now):
                self._oracle.fail(f"{one.process.name} is given fence {lease.fence}, and {other.process.name} leads")
        for group in self.groups():
            if group.trusts_a_lease_before(lease.fence):
                self._oracle.fail(
                    f"{one.process.name} is given fence {lease.fence}; {group.replica_id} takes what is said by an older one"
                )

    def decides(self, one: Candidate, instructions: list[Instruction]) -> None:
        """A lighthouse is about to say something."""
        if instructions and one.leadership.fence != self.store.fence:
            what = next(iter(instructions))
            self._oracle.fail(f"fence {one.leadership.fence} decides {what}, and {self.store.fence} was given")

    def taken(self, group: ReplicaGroup, lighthouse: Lighthouse, message: Any) -> None:
        """A member takes what a lighthouse has said."""
        self.num_taken += 1
        if group.trust.fence != self.store.fence:
            self._oracle.fail(
                f"{group.replica_id} takes {message} of fence {group.trust.fence}; {self.store.fence} was given"
            )
        if isinstance(message, CommitDecided):
            key = (message.quorum_id, message.epoch, message.step)
            told = (message.outcome is not Outcome.DISCARD, group.trust.fence)
            before = self._heard.get(key, told)
            if before[1] == told[1]:
                self._heard[key] = told
            elif before[0] is not told[0]:
                self._oracle.fail(f"{group.replica_id} hears {told} of step {key}, and {before} was heard of it")


def _is_unlike_votes(decided: list[Send]) -> bool:
    """Whether not all votes were for what was decided, or some did not come."""
    return any(
        isinstance(i.message, CommitDecided) and (i.message.broken or i.message.outcome is not Outcome.COMMIT)
        for i in decided
    )
