"""What must hold of the quorums of outer loops, judged from outside when one is formed.

- Who did not train for a step is not counted in it, unless those who trained are too few for one that counts.
- Spectators alone form no quorum while a member that is known to hold their state, or a later one, is connected and at work.
- A member that is merely slow, and was not let go on purpose, is not left out: its phase is at most `SLOWEST` times as long as
  anybody's who is counted, it was in the last quorum, began no later, and nothing happened to it since but that its connection
  broke and came up again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from simulation.outer_rank import OuterRank
from torchft_ckpt.core.coordination.lighthouse import LighthouseState
from torchft_ckpt.core.coordination.messages import QuorumRequest, Role
from torchft_ckpt.core.coordination.replica import StepPhase

if TYPE_CHECKING:
    from simulation.group import ReplicaGroup

SLOWEST = 1.8
LATE = 0.1
"""How much later than others a member may begin a phase, as a part of theirs: messages take their time."""


class OuterWatch:
    """Watches one simulation.

    Args:
        groups: returns those that run.
        troubled_until: by the group's place among them: when the last thing that happened to it was over.
        cuts: likewise, when its connections were cut, and up again.
        fail: raises.
    """

    def __init__(
        self,
        groups: Callable[[], list[ReplicaGroup]],
        troubled_until: list[float],
        cuts: list[list[tuple[float, float]]],
        fail: Callable[[str], None],
    ) -> None:
        self._groups, self._fail = groups, fail
        self._troubled_until, self._cuts = troubled_until, cuts
        self._last_at = 0.0
        self._members: set[str] = set()
        self._last_members: set[str] = set()

    def formed(self, state: LighthouseState, asked: dict[str, QuorumRequest]) -> None:
        """A quorum was formed. `asked`: by replica id, what its members had asked for."""
        if state.round is None:
            return
        last_at, self._last_at = self._last_at, state.round.formed_at
        self._last_members, self._members = self._members, set(state.round.tally.roles)
        self._check_divisor(state, asked)
        at_work = list(self._at_work(state))
        if not any(asked[replica_id].contributes for replica_id in state.round.tally.roles):
            version = state.round.assignment.version
            held = [(g, state.members[g.replica_id].version) for g, _ in at_work]
            self._check_spectators(state, [g for g, known in held if known.proven and known.step >= version.step])
        else:
            self._check_left_out(state, asked, at_work, last_at)

    def _check_divisor(self, state: LighthouseState, asked: dict[str, QuorumRequest]) -> None:
        if state.round is None:
            return
        parts = state.round.assignment.parts
        counted = [part for part in parts if part.contributor_rank is not None]
        if sorted(part.contributor_rank or 0 for part in counted) != list(range(len(counted))) or any(
            part.role is not Role.HEALTHY for part in counted
        ):
            self._fail(f"in {parts} others are counted than those who contribute")
        trained = [
            part.replica_id for part in parts if part.role is Role.HEALTHY and asked[part.replica_id].contributes
        ]
        is_enough = trained and len(trained) >= max(state.members[m].hello.min_contributors for m in trained)
        lookers = [part.replica_id for part in counted if not asked[part.replica_id].contributes]
        if is_enough and lookers and not state.round.assignment.is_first:
            self._fail(f"{lookers} did not train, and are counted in {parts}")

    def _at_work(self, state: LighthouseState) -> Iterator[tuple[ReplicaGroup, list[OuterRank]]]:
        """Groups that are connected, not in the quorum, and hold its state or a later one as full members."""
        if state.round is None:
            return
        version = state.round.assignment.version
        for group in self._groups():
            ranks = [trainer for trainer in group.trainers if isinstance(trainer, OuterRank)]
            if group.replica_id not in state.members or group.replica_id in state.round.tally.roles:
                continue
            if state.members[group.replica_id].is_let_go:
                continue
            if all(rank.process.is_alive and rank.is_at_work and not rank.replica.is_behind for rank in ranks) and all(
                rank.replica.version == version or rank.replica.version.step > version.step for rank in ranks
            ):
                yield group, ranks

    def _check_spectators(self, state: LighthouseState, at_work: list[ReplicaGroup]) -> None:
        if at_work and state.round is not None:
            names = [group.replica_id for group in at_work]
            self._fail(f"{list(state.round.tally.roles)} did not train and form a quorum; {names} are at work")

    def _check_left_out(
        self,
        state: LighthouseState,
        asked: dict[str, QuorumRequest],
        at_work: list[tuple[ReplicaGroup, list[OuterRank]]],
        last_at: float,
    ) -> None:
        if state.round is None:
            return
        counted = {
            part.replica_id
            for part in state.round.assignment.parts
            if part.role is Role.HEALTHY and asked[part.replica_id].contributes
        }
        others = [t for g in self._groups() if g.replica_id in counted for t in g.trainers if isinstance(t, OuterRank)]
        others = [rank for rank in others if rank.is_at_work]
        if not others:
            return
        fastest_s = min(rank.phase_s for rank in others)
        began_at = min(rank.began_at for rank in others)
        first_asked_at = min((state.members[r].asked_at for r in counted if r in state.members), default=0.0)
        for group, ranks in at_work:
            index = self._groups().index(group)
            if group.replica_id not in self._last_members:
                continue
            if any(
                cut_at < last_at < cut_until or cut_until > first_asked_at for cut_at, cut_until in self._cuts[index]
            ):
                continue  # it was away when a quorum was formed, or somebody asked
            is_slow = all(
                rank.phase_s <= SLOWEST * fastest_s
                and rank.began_at <= began_at + LATE * fastest_s + rank.pace.delay * rank.phase_s
                and rank.began_at > self._troubled_until[index]
                and rank.replica.phase is StepPhase.IDLE
                for rank in ranks
            )
            if is_slow:
                phases = [(rank.address, rank.began_at, rank.phase_s) for rank in [*ranks, *others]]
                self._fail(
                    f"{group.replica_id} is merely slow, and left out of {list(state.round.tally.roles)}: {phases}"
                )
