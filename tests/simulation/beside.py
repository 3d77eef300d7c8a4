"""Compares what a lighthouse does beside learners with what it would do without them: nobody waits for one that follows.

Learners are known from messages: who was told to follow, or to compute a step for itself, and has not asked since.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from types import MappingProxyType

from torchft_ckpt.core.coordination.leaving import LAST_HOLDER_STAYS_S
from torchft_ckpt.core.coordination.lighthouse import LighthouseState
from torchft_ckpt.core.coordination.lighthouse_events import (
    Close,
    ConnectionClosed,
    Event,
    Instruction,
    Received,
    Send,
    Tick,
)
from torchft_ckpt.core.coordination.messages import Answer, Hello, Leave, LocateState, QuorumRequest, Role

HORIZON_S = 4.0
"""So far what follows is looked at, if nothing else happens."""
MAX_COMPARISONS = 40
"""In one simulation; each copies the lighthouse twice."""


class Beside:
    """The learners of one life of the lighthouse."""

    def __init__(self) -> None:
        self.connections: set[str] = set()
        self._names: dict[str, str] = {}
        """By connection: who said Hello there."""
        self._held: set[str] = set()
        """Were told that others wait until they have the state, and have not asked since, be it on another connection."""
        self._num_members: dict[tuple[int, int], int] = {}
        """How many waited at the last comparison, by quorum id and step."""
        self.num_compared = 0

    def note(self, event: Event, instructions: Iterable[Instruction]) -> None:
        """Take what came in and went out."""
        if isinstance(event, ConnectionClosed):
            self.connections.discard(event.connection)
        elif isinstance(event, Received):
            if isinstance(event.message, Hello):
                self._names[event.connection] = event.message.replica_id
                if event.message.is_beside and event.message.replica_id not in self._held:
                    self.connections.add(event.connection)
            elif isinstance(event.message, QuorumRequest | LocateState | Leave):
                self.connections.discard(event.connection)
                self._held.discard(self._names.get(event.connection, ""))
        for instruction in instructions:
            if isinstance(instruction, Close):
                self.connections.discard(instruction.connection)
            elif isinstance(instruction, Send) and _is_beside(instruction.message):
                self.connections.add(instruction.connection)
            elif isinstance(instruction, Send) and isinstance(instruction.message, Answer) and instruction.message.held:
                self._held.add(self._names.get(instruction.connection, ""))

    def who_waits_for_them(self, state: LighthouseState, now: float) -> str:
        """Say how much longer those who ask wait, if nothing else happens, than they would without learners; empty: no longer.

        The state is the same after it. It is looked at once for each number of members that wait.
        """
        waiting = [m.connection for m in state.members.values() if m.request is not None]
        members = state.members.values()  # one that leaves is none any more
        apart = [m for m in members if m.connection in self.connections and not m.wishes_to_leave]
        # One that lost its connection in a hold is waited for yet: see `Oracle._check_holds`.
        apart = [
            m for m in apart if not (state._spares.is_called(m.replica_id) or m.replica_id in state._holds._awaited)
        ]
        best_step = max((m.version.step for m in members if m.connection not in self.connections), default=0)
        if any(m.version.proven and m.version.step >= min(state.newest_step, best_step) for m in apart):
            return ""  # what it holds is the newest state that is left: the others need it
        learners = [m.connection for m in apart]
        key = (state.quorum_id, state.newest_step)
        if not waiting or not learners or self.num_compared >= MAX_COMPARISONS or _they_stay_for_others(state, now):
            return ""
        if self._num_members.get(key) == len(waiting):
            return ""
        self._num_members[key] = len(waiting)
        self.num_compared += 1
        without = _answered_after_s(state, now, learners)
        if without is None:
            return ""
        beside = _answered_after_s(state, now, [])
        if beside is None or beside > without + 1e-6:
            took = "none" if beside is None else f"one after {beside:.3f} s"
            return f"beside {len(learners)} learners there is {took}, without them a quorum forms after {without:.3f} s"
        return ""


def _they_stay_for_others(state: LighthouseState, now: float) -> bool:
    """Whether all who hold the newest state are to leave, and stay for a while on purpose: others have yet to get it."""
    holding = [m for m in state.members.values() if m.version.proven and m.version.step >= state.newest_step]
    return bool(holding) and all(m.wishes_to_leave and now < m.wished_at + LAST_HOLDER_STAYS_S for m in holding)


def _is_beside(message: object) -> bool:
    return (
        isinstance(message, Answer) and (message.follows or message.warms_up) and not (message.differs or message.held)
    )


def _copy_of(state: LighthouseState) -> LighthouseState:
    roster, memo = state._roster, dict[int, object]()
    for view, behind in ((roster.members, roster._members), (roster.lost, roster._lost)):
        memo[id(view)] = MappingProxyType(copy.deepcopy(behind, memo))  # a view cannot be copied
    return copy.deepcopy(state, memo)


def _answered_after_s(state: LighthouseState, now: float, closed: list[str]) -> float | None:
    """Return after how long somebody is told of a quorum when these connections close and nothing else happens; None: not."""
    state = _copy_of(state)
    began, events = now, [ConnectionClosed(connection) for connection in closed]
    for event in events:
        if _has_formed(state.handle(event, now)):
            return 0.0
    while (deadline := state.next_deadline()) is not None and deadline <= began + HORIZON_S:
        now = max(now, deadline)
        state._roster.hear_all(now)  # all of them live
        deadline_then = state.next_deadline()
        if deadline_then is not None and deadline_then <= now and _has_formed(state.handle(Tick(), now)):
            return now - began
    return None


def _has_formed(instructions: Iterable[Instruction]) -> bool:
    return any(
        isinstance(i, Send)
        and isinstance(i.message, Answer)
        and not i.message.leaving
        and i.message.role is not Role.LEARNER
        for i in instructions
    )
