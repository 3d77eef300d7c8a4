"""This file gathers what the ranks of one replica group call, and gives each of them its answer. No sockets, no clock.

It is the rule of `ManagerServer`, for trainers that go without a `Manager`: each group decides for itself whether a step
counts.

- The group calls for a quorum when all of its ranks have, of the same step; ranks that are at several steps are told so.
- It has decided on a step when all of its ranks have voted on that step: True where all said so.
- A call that nobody waits for any more never counts: the others wait until that rank calls again.
- Each rank recovers from one group that has the newest step, another rank from another group in turn.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeAlias

from torchft_ckpt.core.coordination.messages import (
    PROTOCOL_VERSION,
    FromManagerServer,
    GroupDecision,
    MetadataCall,
    Quorum,
    QuorumResult,
    RankMetadata,
    RankQuorumCall,
    RankVote,
    Refused,
    ToManagerServer,
    refuse_version,
)


@dataclass(frozen=True, slots=True)
class CallAnswer:
    """Answer the call of that number."""

    number: int
    message: FromManagerServer


@dataclass(frozen=True, slots=True)
class CallQuorum:
    """Call for a quorum for the group; instead of what it called before."""

    step: int
    shrink_only: bool
    commit_failures: int


@dataclass(frozen=True, slots=True)
class GiveUpQuorum:
    """Wait for the quorum no longer."""


CallInstruction: TypeAlias = CallAnswer | CallQuorum | GiveUpQuorum


class RankCalls:
    """The open calls of a group's ranks. Not thread-safe: one caller at a time."""

    def __init__(self, replica_id: str, world_size: int) -> None:
        self._replica_id = replica_id
        self._world_size = world_size
        self._asked: dict[int, tuple[int, RankQuorumCall]] = {}
        """By rank: number of its call, and the call."""
        self._votes: dict[int, dict[int, tuple[int, bool]]] = {}
        """By step and rank: number of its call, and its vote."""
        self._metadata: dict[int, str] = {}

    def called(self, number: int, message: ToManagerServer) -> Iterator[CallInstruction]:
        """A rank calls. `number` names the call; no other has it."""
        rank = message.group_rank
        if message.protocol != PROTOCOL_VERSION:
            yield CallAnswer(number, refuse_version("the manager server", f"group rank {rank}", message.protocol))
        elif rank >= self._world_size:
            reason = f"there is no group rank {rank}: {self._replica_id} has {self._world_size} ranks"
            yield CallAnswer(number, Refused(code="config", reason=reason))
        elif isinstance(message, MetadataCall):
            if rank in self._metadata:
                yield CallAnswer(number, RankMetadata(checkpoint_metadata=self._metadata[rank]))
            else:
                reason = f"group rank {rank} of {self._replica_id} has not called for a quorum yet"
                yield CallAnswer(number, Refused(code="metadata", reason=reason))
        elif isinstance(message, RankVote):
            yield from self._voted(number, message)
        else:
            yield from self._asks(number, message)

    def gave_up(self, number: int) -> Iterator[CallInstruction]:
        """Nobody waits for the answer to a call any more; one that was answered may be named too."""
        was_whole = len(self._asked) == self._world_size
        self._asked = {rank: asked for rank, asked in self._asked.items() if asked[0] != number}
        for step, votes in list(self._votes.items()):
            self._votes[step] = {rank: vote for rank, vote in votes.items() if vote[0] != number}
            if not self._votes[step]:
                del self._votes[step]
        if was_whole and len(self._asked) < self._world_size:
            yield GiveUpQuorum()

    def formed(self, quorum: Quorum) -> Iterator[CallInstruction]:
        asked, self._asked = self._asked, {}
        for rank, (number, call) in asked.items():
            yield CallAnswer(number, recovery_of(quorum, self._replica_id, rank, init_sync=call.init_sync))

    def refused(self, reason: str) -> Iterator[CallInstruction]:
        asked, self._asked = self._asked, {}
        for number, _ in asked.values():
            yield CallAnswer(number, Refused(code="lighthouse", reason=reason))

    def _asks(self, number: int, call: RankQuorumCall) -> Iterator[CallInstruction]:
        rank = call.group_rank
        if rank in self._asked:
            yield CallAnswer(self._asked[rank][0], _called_again(rank))
        self._asked[rank] = number, call
        self._metadata[rank] = call.checkpoint_metadata
        if len(self._asked) < self._world_size:
            return
        calls = [call for _, call in self._asked.values()]
        if len({call.step for call in calls}) > 1:
            in_order = sorted(calls, key=lambda call: call.group_rank)
            steps = ", ".join(f"rank {call.group_rank} step {call.step}" for call in in_order)
            yield from self.refused(f"the ranks of {self._replica_id} are not at one step: {steps}"[:4000])
            return
        yield CallQuorum(
            step=call.step,
            shrink_only=any(call.shrink_only for call in calls),
            commit_failures=max(call.commit_failures for call in calls),
        )

    def _voted(self, number: int, vote: RankVote) -> Iterator[CallInstruction]:
        votes = self._votes.setdefault(vote.step, {})
        if vote.group_rank in votes:
            yield CallAnswer(votes[vote.group_rank][0], _called_again(vote.group_rank))
        votes[vote.group_rank] = number, vote.should_commit
        if len(votes) == self._world_size:
            del self._votes[vote.step]
            decision = GroupDecision(should_commit=all(approves for _, approves in votes.values()))
            for voter, _ in votes.values():
                yield CallAnswer(voter, decision)


def recovery_of(quorum: Quorum, replica_id: str, group_rank: int, *, init_sync: bool) -> QuorumResult:
    """Return one rank's view of a quorum: who recovers, and from whom.

    Those recover who do not have the newest step. Where that is 0 and `init_sync` holds, all recover but one, so that all begin
    with its weights. The recovering take the others in turn, and each rank of a group begins with another one.
    """
    members = quorum.participants
    replica_ids = [member.replica_id for member in members]
    own = replica_ids.index(replica_id)
    max_step = max(member.step for member in members)
    newest = [place for place, member in enumerate(members) if member.step == max_step]
    primary = newest[group_rank % len(newest)]
    sources = [primary] if init_sync and max_step == 0 else newest
    recovering = sorted(set(range(len(members))).difference(sources))
    source_of = {place: sources[(turn + group_rank) % len(sources)] for turn, place in enumerate(recovering)}
    source = source_of.get(own)
    return QuorumResult(
        quorum_id=quorum.quorum_id,
        replica_rank=own,
        replica_world_size=len(members),
        recover_src_manager_address="" if source is None else members[source].address,
        recover_src_replica_rank=source,
        recover_dst_replica_ranks=[place for place, giver in source_of.items() if giver == own],
        store_address=members[primary].store_address,
        max_step=max_step,
        max_replica_rank=newest.index(own) if own in newest else None,
        max_world_size=len(newest),
        heal=source is not None,
        commit_failures=max(member.commit_failures for member in members),
        replica_ids=replica_ids,
    )


def _called_again(rank: int) -> Refused:
    return Refused(code="again", reason=f"group rank {rank} called again before this call was answered")
