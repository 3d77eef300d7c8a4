"""This file decides what to say to groups that start without a state: who looks for one together, or that others have one.

- Where a living member holds a state that counts, there is nothing to look for: whoever gathers heals from it.
- Where others ask for a quorum already, with a state that they restored, it heals from them, too; where they have none, it has
  come too late to look together with them, and looks alone.
- Else those who gather do so as a quorum is formed (`quorum`): all who live, or those who came in time.

No state gets a name by this, so a state that is restored afterwards is not older than a fresh one that was named before.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from torchft_ckpt.core.coordination.lighthouse_records import Member
from torchft_ckpt.core.coordination.messages import Role, StateVersion
from torchft_ckpt.core.coordination.quorum import Asked, decide_quorum


@dataclass(frozen=True, slots=True, kw_only=True)
class ColdStartRole:
    """One group's place among those that look together."""

    role: Role
    """IDLE; LEARNER where others have a state."""
    replica_rank: int
    replica_world_size: int
    store_address: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ColdStartDecision:
    """What each is told, by replica id; nobody is told anything yet where that is empty."""

    reason: str
    parts: Mapping[str, ColdStartRole] = field(default_factory=dict)
    version: StateVersion = field(default_factory=StateVersion)
    """The state that others have."""
    is_new: bool = False
    """They meet under a new number."""
    deadline: float | None = None


def decide_cold_start(
    gathering: Sequence[Member],
    at_work: Sequence[Member],
    *,
    is_valid: Callable[[StateVersion], bool],
    min_replicas: int,
    join_timeout_s: float,
    now: float,
) -> ColdStartDecision:
    """Decide what to tell those who gather.

    Args:
        gathering: who does; at least one.
        at_work: all others who live.
        is_valid: whether a state has a name that counts.
        min_replicas: the fewest that train, and so look together.
        join_timeout_s: how long they wait for others that live and have asked for nothing.
        now: the time.
    """
    members = sorted(gathering, key=lambda member: member.replica_id)
    held = max((member.version for member in at_work if is_valid(member.version)), default=None)
    asking = [member for member in at_work if member.request is not None]
    restored = [member.asked.version for member in asking if member.asked.restored]
    if held is not None or restored:
        version = max(restored) if held is None else held
        parts = {member.replica_id: _alone(Role.LEARNER, member) for member in members}
        return ColdStartDecision(reason=f"others hold step {version.step}", parts=parts, version=version)
    if asking:
        parts = {member.replica_id: _alone(Role.IDLE, member) for member in members}
        return ColdStartDecision(reason="others have looked before, and found no state", parts=parts, is_new=True)
    verdict = decide_quorum(
        alive=[member.replica_id for member in (*members, *at_work) if not member.is_excused],
        asked={member.replica_id: Asked(at=member.asked_at) for member in members},
        last_quorum=(),
        min_replicas=min_replicas,
        join_timeout_s=join_timeout_s,
        now=now,
    )
    if not verdict.formed:
        return ColdStartDecision(reason=verdict.reason, deadline=verdict.deadline)
    parts = {
        member.replica_id: ColdStartRole(
            role=Role.IDLE,
            replica_rank=rank,
            replica_world_size=len(members),
            store_address=members[0].store_address,
        )
        for rank, member in enumerate(members)
    }
    return ColdStartDecision(reason=verdict.reason, parts=parts, is_new=True)


def _alone(role: Role, member: Member) -> ColdStartRole:
    return ColdStartRole(role=role, replica_rank=0, replica_world_size=1, store_address=member.store_address)
