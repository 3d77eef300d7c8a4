"""This file decides, for the members of a quorum, from which state they train, and who lacks it.

The rules, in this order:
1. Proven states (committed or healed in a quorum) win over restored ones, restored ones over fresh ones, unless the newest
   committed step that anybody knows of is beyond every proven state here. Among proven states the highest version wins; all
   who hold another version lack it, also of the same step: equal versions are equal bits, nothing else is. They are in no
   quorum before they have it (`hold`), but for one that wishes to load nothing, which sits out. A state of step 0 is fresh,
   whoever named it: where one was restored it counts for nothing.
2. If the newest committed step is beyond every proven state, its holders are gone. Then only a state that was restored on
   purpose may be trained from, or one of that step that was found to differ and was to be replaced by theirs; or any if the
   operator allowed the loss of steps (then the highest step). Else there is no quorum.
3. Where no state is proven and `init_sync` is asked for, the first member with the highest step holds the job's first state, and
   all others lack it. Without `init_sync` all states of that step are taken for equal.
4. A torn state (a load failed half-way, or the ranks of one group hold different states) is never trained from, under any
   rule: it has no name and gets none.
5. A spectator (it did not train for this step) contributes nothing, and takes the outcome. If those who trained are too few for
   a step that counts, it is one of them: this step will not count, but the next that they train for may.

A group with as many ranks as a source group most likely has the same layout. Then each rank has everything from the rank of its
own number, and asks nobody else (`same_rank_peers`). It turns to all ranks of the sources only where their group is of another
size, or where its peer turns out to hold other parts of the tensors.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from torchft_ckpt.core.coordination.messages import Role, StateVersion

MAX_SOURCES = 4
"""Sources named to one member that loads, the first of which is the primary. Each of them opens a snapshot for it, which costs
it nothing while it is not mutated."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """A member of a quorum, with what it holds and wants."""

    replica_id: str
    version: StateVersion
    restored: bool = False
    """Its state has no name, and counts if nobody holds the job's: it was restored, or differs and was to be replaced."""
    torn: bool = False
    init_sync: bool = True
    allow_heal: bool = True
    contributes: bool = True
    is_corrected: bool = False
    """It loads before this step, and its loop may have computed something with its own state before that."""
    came_in: bool = False
    """It was given its state for this step: nobody has seen yet what its loop makes of it."""
    min_contributors: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberRole:
    """The part of one member in the step."""

    replica_id: str
    role: Role
    contributor_rank: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """The parts of all members of a quorum, in the order of their replica ranks."""

    version: StateVersion
    parts: tuple[MemberRole, ...]
    lacking: tuple[str, ...]
    """These lack the state, and would load it: they are in no quorum. Their parts mean nothing."""
    is_first: bool
    """No quorum has begun with this state: there are no survivors yet who could be kept waiting."""
    num_proved: int
    """See `QuorumFormed`."""
    reason: str

    @property
    def num_contributors(self) -> int:
        return sum(part.contributor_rank is not None for part in self.parts)

    @property
    def num_voters(self) -> int:
        return sum(part.role is Role.HEALTHY for part in self.parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLost:
    """No state here may be trained from: the holders of the newest step are gone, or there is none that is whole."""

    newest_step: int
    best_step: int
    is_torn: bool = False
    """There is no whole state at all: not even the operator's word helps."""


def assign_recovery(
    members: Sequence[Holder],
    *,
    newest_step: int,
    allow_step_loss: bool,
    quorum_id: int,
    epoch: str,
    first: StateVersion | None = None,
) -> Assignment | StepLost:
    """Assign every member of a quorum its part.

    Args:
        members: in the order of replica ranks; at least one.
        newest_step: the highest committed step that anybody is known to have reached.
        allow_step_loss: the operator allows to go on from an older state.
        quorum_id: the next one, for the name of a first state.
        epoch: the lighthouse's epoch, likewise.
        first: a first state that was named already, and that no quorum has begun with.
    """
    whole = [member for member in members if not member.torn]
    if not whole:
        return StepLost(newest_step=newest_step, best_step=0, is_torn=True)
    restored = [member for member in whole if member.restored and not member.version.proven]
    best_restored = max((member.version.step for member in restored), default=None)
    proven = [member.version for member in whole if member.version.proven]
    best_proven = max((version for version in proven if version.step or not best_restored), default=None)
    if best_proven is not None:
        is_newest = best_proven.step >= newest_step
        is_best_left = allow_step_loss and (best_restored is None or best_proven.step >= best_restored)
        if is_newest or is_best_left:
            return _go_on_from(members, best_proven, is_first=best_proven == first)
    if best_restored is not None:
        equals = [member for member in restored if member.version.step == best_restored]
        return _first_state(members, equals, best_restored, quorum_id, epoch)
    if newest_step > 0 and not allow_step_loss:
        return StepLost(newest_step=newest_step, best_step=best_proven.step if best_proven else 0)
    step = max(member.version.step for member in whole)
    equals = [member for member in whole if member.version.step == step]
    return _first_state(members, equals, step, quorum_id, epoch)


def _first_state(
    members: Sequence[Holder], equals: Sequence[Holder], step: int, quorum_id: int, epoch: str
) -> Assignment:
    version = StateVersion(step=step, quorum_id=quorum_id, epoch=epoch)
    sync = any(member.init_sync for member in members)
    holders = {equals[0].replica_id} if sync else {member.replica_id for member in equals}
    what = "restored from a checkpoint" if equals[0].restored else "fresh"
    return _assignment(
        members,
        holders,
        version=version,
        is_first=True,
        reason=f"first state of this job is step {step} of {equals[0].replica_id} ({what})",
    )


def _go_on_from(members: Sequence[Holder], version: StateVersion, *, is_first: bool) -> Assignment:
    holders = [member for member in members if member.version == version and not member.torn]
    trained = [member for member in holders if member.contributes]
    counts = len(trained) >= max([1, *(member.min_contributors for member in trained)])
    return _assignment(
        members,
        {member.replica_id for member in holders},
        version=version,
        is_first=is_first,
        reason=f"{len(holders)} of {len(members)} hold step {version.step}",
        spectators={member.replica_id for member in members if counts and not member.contributes},
    )


def _assignment(
    members: Sequence[Holder],
    holding: Collection[str],
    *,
    version: StateVersion,
    is_first: bool,
    reason: str,
    spectators: Collection[str] = (),
) -> Assignment:
    computed = [m.replica_id in holding and m.replica_id not in spectators for m in members]
    rest = [has and not member.is_corrected for member, has in zip(members, computed, strict=True)]
    if sum(rest) >= max([1, *(member.min_contributors for member in members)]):
        computed = rest
    numbered = sorted((rank for rank, has in enumerate(computed) if has), key=lambda rank: members[rank].came_in)
    numbers = {rank: number for number, rank in enumerate(numbered)}
    return Assignment(
        version=version,
        parts=tuple(
            MemberRole(
                replica_id=member.replica_id,
                role=Role.HEALTHY if member.replica_id in holding else Role.IDLE,
                contributor_rank=numbers.get(rank),
            )
            for rank, member in enumerate(members)
        ),
        lacking=tuple(m.replica_id for m in members if m.replica_id not in holding and m.allow_heal),
        is_first=is_first,
        num_proved=sum(not members[rank].came_in for rank in numbered),
        reason=reason,
    )


def same_rank_peers(groups: Sequence[Sequence[str]], rank: int, world_size: int) -> list[str]:
    """Return the addresses of the ranks of this number in source groups of the same size, the primary's first.

    Args:
        groups: for each source group, the primary first, the addresses of its ranks; an empty one is not known.
        rank: this rank, in its group.
        world_size: how many ranks its group has.

    Returns:
        none where the primary group is of another size.
    """
    able = [group for group in groups if any(group)]
    if not able or len(able[0]) != world_size:
        return []
    return [group[rank] for group in able if len(group) == world_size and group[rank]]
