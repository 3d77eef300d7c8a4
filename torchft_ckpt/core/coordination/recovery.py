"""This file decides, for the members of a quorum, from which state they train, who must load it, and from whom.

The rules, in this order:
1. Proven states (committed or healed in a quorum) win over restored ones, restored ones over fresh ones, unless the newest
   committed step that anybody knows of is beyond every proven state here. Among proven states the highest version wins;
   all who hold another version heal, also from the same step: equal versions are equal bits, nothing else is. A state of step 0
   is fresh, whoever named it: where one was restored it counts for nothing.
2. If the newest committed step is beyond every proven state, its holders are gone. Then only a state that was restored on
   purpose may be trained from, or any if the operator allowed the loss of steps (then the highest step). Else there is no
   quorum.
3. Where no state is proven and `init_sync` is asked for, the first member with the highest step is the source and all others
   load from it before their forward pass. Without `init_sync` all states of that step are taken for equal.
4. All ranks of a group heal from the same sources. The first of these is the primary, the same for all who heal in a quorum,
   because they find each other through it; the others serve evenly many. Who has captured its state comes first.
5. A torn state (a load failed half-way, or the ranks of one group hold different states) is never trained from, under any
   rule: it has no name, gets none, and its holder heals.
6. A spectator (it did not train for this step) joins; if it holds the state it has nothing to load. Where those who trained
   are too few for a step that counts, it is one of them: this step will not count, but the next that they train for may.
7. A joiner that no member could serve without disturbing its training thread is deferred to the next quorum, if those who
   remain are enough.
8. An *unverified* member made the step to its state while it healed, and its loop may have used what it held before. It is
   no holder while a verified one is here: it compares its state with the holders' as a joiner, or, where those who may
   contribute are too few without it, before its forward pass. If nobody could serve it goes along, and compares later. Where
   all holders are unverified the first of them stands in, so that the job goes on, and the others compare with that one.

A group with as many ranks as a source group most likely has the same layout. Then each rank has everything from the rank of its
own number, and asks nobody else (`same_rank_peers`). It turns to all ranks of the sources only where their group is of another
size, or where its peer turns out to hold other parts of the tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torchft_ckpt.core.coordination.messages import Role, StateVersion

MAX_SOURCES = 4
"""Sources named to one healing member, the first of which is the primary. Each of them opens a snapshot for it, which costs
it nothing while it is not mutated, and is withdrawn when the step is committed, unless a learner comes for it, too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """A member of a quorum, with what it holds and wants."""

    replica_id: str
    version: StateVersion
    restored: bool = False
    torn: bool = False
    init_sync: bool = True
    allow_heal: bool = True
    heal_inline: bool = False
    waits_for_quorum: bool = False
    can_serve: bool = True
    unverified: bool = False
    contributes: bool = True
    is_corrected: bool = False
    """It loads before this step, and its loop may have computed something with its own state before that."""
    min_contributors: int = 1
    stands_in: bool = False
    """It is unverified, and nobody who is not was there: it has the state that others have received from it, or it from them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberRole:
    """The part of one member in the step. Ranks are positions in `Assignment.parts`."""

    replica_id: str
    role: Role
    contributor_rank: int | None
    sources: tuple[int, ...] = ()
    destinations: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """The parts of all members of a quorum, in the order of their replica ranks."""

    version: StateVersion
    parts: tuple[MemberRole, ...]
    deferred: tuple[str, ...]
    is_first: bool
    """No state was proven before: there are no survivors yet who could be kept waiting."""
    reason: str
    unverified: bool = False
    """The source only stands in: see rule 8."""

    @property
    def num_contributors(self) -> int:
        return sum(part.contributor_rank is not None for part in self.parts)

    @property
    def num_voters(self) -> int:
        return sum(part.role in (Role.HEALTHY, Role.INLINE) for part in self.parts)


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
    min_replicas: int,
    quorum_id: int,
    epoch: str,
) -> Assignment | StepLost:
    """Assign every member of a quorum its part.

    Args:
        members: in the order of replica ranks; at least one.
        newest_step: the highest committed step that anybody is known to have reached.
        allow_step_loss: the operator allows to go on from an older state.
        min_replicas: joiners are deferred only while this many remain.
        quorum_id: id of the quorum that is being formed, for the name of a first state.
        epoch: the lighthouse's epoch, likewise.
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
            return _heal_towards(members, best_proven, min_replicas)
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
    roles = [
        Role.HEALTHY if member.replica_id in holders else (Role.INLINE if member.allow_heal else Role.IDLE)
        for member in members
    ]
    what = "restored from a checkpoint" if equals[0].restored else "fresh"
    return _assignment(
        members,
        roles,
        version=version,
        deferred=(),
        is_first=True,
        reason=f"first state of this job is step {step} of {equals[0].replica_id} ({what})",
    )


def _heal_towards(members: Sequence[Holder], version: StateVersion, min_replicas: int) -> Assignment:
    named = [member for member in members if member.version == version and not member.torn]
    verified = [member for member in named if not member.unverified]
    holders = verified or [member for member in named if member.stands_in] or named[:1]
    deferred: tuple[str, ...] = ()
    if not any(member.can_serve for member in holders) and len(holders) >= min_replicas:
        holding = {member.replica_id for member in named}
        deferred = tuple(m.replica_id for m in members if m.replica_id not in holding and m.allow_heal)
        members = [member for member in members if member.replica_id not in deferred]
    short = len(holders) < min_replicas
    trained = [member for member in holders if member.contributes]
    needed = max((member.min_contributors for member in trained), default=1)
    counts = len(trained) >= max(1, needed)
    sources = {member.replica_id for member in holders}
    roles = [
        _role(member, member.replica_id in sources, short or (member.unverified and not counts))
        if member.contributes
        else _role_of_spectator(member, member.replica_id in sources, counts)
        for member in members
    ]
    reason = f"{len(holders)} of {len(members)} hold step {version.step}"
    if not verified:
        reason = (
            f"{reason}; every group that is known to hold its exact bits is gone, so {holders[0].replica_id} stands in"
        )
    return _assignment(
        members, roles, version=version, deferred=deferred, is_first=False, reason=reason, unverified=not verified
    )


def _role(member: Holder, is_holder: bool, short: bool) -> Role:
    """`short`: those who hold the state are too few for a step that counts; who can load first helps them most."""
    if is_holder:
        return Role.HEALTHY
    if not member.allow_heal:
        return Role.IDLE
    return Role.INLINE if member.heal_inline or (short and member.waits_for_quorum) else Role.JOINER


def _role_of_spectator(member: Holder, is_holder: bool, counts: bool) -> Role:
    """`counts`: those who trained are enough for a step that counts."""
    role = _role(member, is_holder, short=not counts)
    return Role.JOINER if counts and role is not Role.IDLE else role


def _assignment(
    members: Sequence[Holder],
    roles: Sequence[Role],
    *,
    version: StateVersion,
    deferred: tuple[str, ...],
    is_first: bool,
    reason: str,
    unverified: bool = False,
) -> Assignment:
    able = [rank for rank, role in enumerate(roles) if role is Role.HEALTHY and members[rank].can_serve]
    servers = able or [rank for rank, role in enumerate(roles) if role is Role.HEALTHY]
    sources: dict[int, tuple[int, ...]] = {}
    destinations: dict[int, list[int]] = {}
    healing = [
        rank
        for rank, (member, role) in enumerate(zip(members, roles, strict=True))
        if (role in (Role.INLINE, Role.JOINER) and (member.version != version or member.torn))
        or (member.unverified and (role is Role.INLINE or (role is Role.JOINER and able)))
    ]
    primary, others = servers[0], servers[1:]
    num_others = min(MAX_SOURCES - 1, len(others))
    for turn, rank in enumerate(healing):
        # Joiners find each other through their primary, so it is the same for all; the others serve evenly many in turn.
        mine = (primary, *(others[(turn * num_others + place) % len(others)] for place in range(num_others)))
        sources[rank] = mine
        for server in mine:
            destinations.setdefault(server, []).append(rank)
    parts: list[MemberRole] = []
    num_contributors = 0
    computed = [role in (Role.HEALTHY, Role.INLINE) for role in roles]
    rest = [has and not member.is_corrected for member, has in zip(members, computed, strict=True)]
    if sum(rest) >= max([1, *(member.min_contributors for member in members)]):
        computed = rest
    for rank, (member, role, contributes) in enumerate(zip(members, roles, computed, strict=True)):
        parts.append(
            MemberRole(
                replica_id=member.replica_id,
                role=role,
                contributor_rank=num_contributors if contributes else None,
                sources=sources.get(rank, ()),
                destinations=tuple(destinations.get(rank, ())),
            )
        )
        num_contributors += contributes
    return Assignment(
        version=version,
        parts=tuple(parts),
        deferred=deferred,
        is_first=is_first,
        reason=reason,
        unverified=unverified,
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
