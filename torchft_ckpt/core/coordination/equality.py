"""This file finds, by digests in the votes on a step, which replica groups hold different states under one name, and names them.

The votes of those that contribute have a digest of what each rank began the step with: of settings and plain values, and of
samples that follow from the step alone; at steps that groups ask for (`is_checked`), of all of it. They are compared when all
voters have approved; the lost have no part in it. What follows is the strictest that one of the compared groups wishes for:
- warn: the groups are named;
- heal: they are compared before the next quorum forms, and one of them loads what is right: see `trial`;
- stop: the step is discarded, and none of the compared groups trains on.

So it is if a vote says that groups have computed one microbatch and have found other bits (`CommitVote.reason`): their states are
compared then, which tells a group whose state has changed from one that computes wrongly.

Which of the tensors differ is asked of two to four groups, and of one rank of each whose digests differ. What they answer is
bounded (`runs_of`). Nothing waits for it but the message that names the tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from torchft_ckpt.core.coordination.commit import CommitDecision
from torchft_ckpt.core.coordination.layouts import without_places
from torchft_ckpt.core.coordination.lighthouse_events import Instruction, Log, Send
from torchft_ckpt.core.coordination.lighthouse_records import Member, Round
from torchft_ckpt.core.coordination.messages import (
    MAX_LEAF_CHARS,
    MAX_LEAVES,
    CommitVote,
    Hello,
    Leaf,
    LeafDigests,
    LeavesWanted,
    OnReplicasDiffer,
    ReplicasDiffer,
    Role,
    StateVersion,
    clip,
    group_name,
    name_some,
)

SAY_AGAIN_S, MAX_QUIET_S = 60.0, 3600.0
"""So long a difference that stays the same is not named again; at most, of what groups find of how they compute."""
GLANCE_CHARS = 16
"""So long is what each vote shows; what comes after it is of all of the state, whose leaves are known then."""
MAX_ASKED = 4
MAX_REMEMBERED = 4096

T = TypeVar("T")


def is_checked(step: int, every: int) -> bool:
    """Return whether the state after so many committed steps is compared."""
    return every > 0 and step > 0 and step % every == 0


def alike(digests: Mapping[str, Sequence[str]]) -> list[list[str]]:
    """Return the groups that hold equal states, by the digests of each group's ranks.

    Those that are the most come first, of equally many those of the first name.
    """
    by_state: dict[tuple[str, ...], list[str]] = {}
    for replica_id in sorted(digests):
        by_state.setdefault(tuple(digests[replica_id]), []).append(replica_id)
    return sorted(by_state.values(), key=lambda groups: (-len(groups), groups))


def strictest(members: Iterable[Member]) -> OnReplicasDiffer:
    """Return the strictest policy that one of the members wishes for: each lists them from the mildest on."""
    wishes = {member.hello.on_replicas_differ for member in members}
    return max(wishes, key=list(OnReplicasDiffer).index, default=OnReplicasDiffer.WARN)


def runs_of(
    leaves: Sequence[tuple[str, T]], digest: Callable[[Sequence[T]], str], most: int = MAX_LEAVES
) -> list[Leaf]:
    """Return what a rank answers: one entry a leaf, or, where these are too many, one for each run of them.

    Args:
        leaves: names and digests, in an order that is the same in all groups.
        digest: makes one of those of a run.
        most: entries.
    """
    length = max(1, -(-len(leaves) // most))
    runs = [leaves[first : first + length] for first in range(0, len(leaves), length)]
    return [Leaf(name=_name_of(run), digest=digest([one for _, one in run])) for run in runs]


def _name_of(run: Sequence[tuple[str, object]]) -> str:
    if len(run) == 1:
        return clip(run[0][0], MAX_LEAF_CHARS)
    half = (MAX_LEAF_CHARS - len(" to ")) // 2
    return f"{clip(run[0][0], half)} to {clip(run[-1][0], half)}"


def differing(one: Sequence[Leaf], other: Sequence[Leaf]) -> list[str]:
    """Return the names of the leaves that differ, in their order; one that only one of them has differs."""
    ours, theirs = ({leaf.name: leaf.digest for leaf in leaves} for leaves in (one, other))
    return [name for name in dict.fromkeys([*ours, *theirs]) if ours.get(name) != theirs.get(name)]


@dataclass(slots=True)
class _Question:
    """Which leaves of a state differ is asked of one rank of some groups, the first of which the others are compared with."""

    version: StateVersion
    rank: int
    asked: tuple[str, ...]
    compared: frozenset[str]
    stops: bool
    said: str
    answers: dict[str, Sequence[Leaf]] = field(default_factory=dict)


class Equality:
    """Compares the votes of one job. It only reads the members."""

    def __init__(self, members: Mapping[str, Member]) -> None:
        self._members = members
        self._question: _Question | None = None
        self._last_logged: tuple[list[list[str]], float] | None = None
        """The last difference that was named, and when."""
        self._pass_on_from, self._quiet_s = 0.0, SAY_AGAIN_S
        """When what groups have found is passed on again, and for how long it is not after that."""
        self._wishes: dict[str, tuple[int, OnReplicasDiffer]] = {}
        self.differed_at = -1
        """The step in which votes differed last, and of which the boundary after it has to make out who is right."""
        self.last_said = ""
        """What was said last of groups that differ, for people."""

    # ----------------------------------------------------------------------------------------------------- comparison

    def joined(self, hello: Hello) -> Iterator[Instruction]:
        """A group is here. It is named, once, if its wishes are not those of the others."""
        mine = hello.check_equal_every, hello.on_replicas_differ
        name = group_name(hello.replica_id)
        if self._wishes.get(name) == mine:
            return
        if len(self._wishes) < MAX_REMEMBERED:
            self._wishes[name] = mine
        others = [member.hello for member in self._members.values() if group_name(member.replica_id) != name]
        other = next((h for h in others if (h.check_equal_every, h.on_replicas_differ) != mine), None)
        if other is not None:
            yield Log(
                f"{_policy_of(hello)}, and {_policy_of(other)}: give all replica groups the same settings; until then, states are"
                " compared at the steps that several groups ask for, and the strictest setting holds",
                is_warning=True,
            )

    def judge(self, current: Round, now: float) -> Iterator[Instruction]:
        """Compare the states that voters began a step with, which all of them approve. It may discard the step."""
        tally = current.tally
        found = next((v.reason for v in tally.votes.values() if v.approve and v.counts and v.reason), "")
        if found:
            yield from self._pass_on(current, clip(found), now)
            if tally.verdict is not CommitDecision.COMMIT:
                return
        votes: dict[str, CommitVote] = {
            replica_id: vote
            for replica_id, vote in tally.votes.items()
            if vote.approve
            and vote.state_digests
            and tally.roles[replica_id] is Role.HEALTHY
            and replica_id not in tally.lost
            and replica_id in self._members
        }
        layouts = {(without_places(self._members[m].layout), len(vote.state_digests)) for m, vote in votes.items()}
        if len(votes) < 2 or len(layouts) > 1:  # of groups whose ranks hold other parts nothing can be said
            return
        length = min(
            len(digest) for vote in votes.values() for digest in vote.state_digests
        )  # some show no more at this step
        groups = alike({m: [digest[:length] for digest in vote.state_digests] for m, vote in votes.items()})
        if len(groups) == 1:
            self._last_logged = None
            return
        version = current.assignment.version
        policy = strictest(self._members[replica_id] for replica_id in votes)
        what = f"replica groups hold different states of step {version.step}: {_in_words(groups)}"
        if policy is OnReplicasDiffer.HEAL:
            self.differed_at = version.step
        if policy is OnReplicasDiffer.STOP:
            said = f"{what}. None of them trains on (on_replicas_differ is 'stop')"
            tally.discard_all(clip(said))
        elif (
            self._last_logged is not None
            and self._last_logged[0] == groups
            and now < self._last_logged[1] + SAY_AGAIN_S
        ):
            return
        elif policy is OnReplicasDiffer.HEAL:
            said = f"{what}. They are compared before the next step"
        else:
            said = f"{what}. They train on (on_replicas_differ is 'warn')"
        self._last_logged, self.last_said = (groups, now), said
        yield Log(said, is_warning=True)
        if policy is not OnReplicasDiffer.HEAL or length > GLANCE_CHARS:  # else who loads says what differed
            yield from self._ask(groups, votes, version, said, stops=policy is OnReplicasDiffer.STOP)

    def _pass_on(self, current: Round, found: str, now: float) -> Iterator[Instruction]:
        """Groups have found that they compute differently: tell all of them, and do what the strictest wishes for.

        What does not end the job is not done again for a while, which doubles: kernels that do not repeat their bits are found in
        each step, and whole states are compared.
        """
        tally, version = current.tally, current.assignment.version
        voters = [self._members[m] for m in tally.votes if m in self._members and m not in tally.lost]
        policy = strictest(voters)
        after = {
            OnReplicasDiffer.WARN: "They train on (on_replicas_differ is 'warn')",
            OnReplicasDiffer.HEAL: "Their states are compared before the next step",
            OnReplicasDiffer.STOP: "None of them trains on (on_replicas_differ is 'stop')",
        }[policy]
        self.last_said = found
        if policy is OnReplicasDiffer.STOP:
            tally.discard_all(found)
        elif now < self._pass_on_from:
            return
        if now > self._pass_on_from + MAX_QUIET_S:
            self._quiet_s = SAY_AGAIN_S
        self.last_said, self._pass_on_from = f"{found}. {after}", now + self._quiet_s
        self._quiet_s = min(2 * self._quiet_s, MAX_QUIET_S)
        if policy is OnReplicasDiffer.HEAL:
            self.differed_at = version.step
        yield Log(self.last_said, is_warning=True)
        message = ReplicasDiffer(version=version, stops=policy is OnReplicasDiffer.STOP, reason=self.last_said)
        for member in voters:
            yield Send(member.connection, message)

    # ------------------------------------------------------------------------------------------------- what differs

    def _ask(
        self,
        groups: Sequence[Sequence[str]],
        votes: Mapping[str, CommitVote],
        version: StateVersion,
        said: str,
        *,
        stops: bool,
    ) -> Iterator[Instruction]:
        yield from self._tell()  # the question before has had its time
        first = groups[0][0]
        by_rank = [votes[those[0]].state_digests for those in groups]
        length = min(map(len, by_rank))
        rank = next((rank for rank in range(length) if len({digests[rank] for digests in by_rank}) > 1), 0)
        asked = {by_rank[0][rank]: first}
        for those, digests in zip(groups, by_rank, strict=True):
            if len(asked) < MAX_ASKED:
                asked.setdefault(digests[rank], those[0])
        self._question = _Question(version, rank, tuple(asked.values()), frozenset(votes), stops, said)
        for replica_id in self._question.asked:
            wanted = LeavesWanted(version=version, group_rank=rank)
            yield Send(self._members[replica_id].connection, wanted)

    def answered(self, replica_id: str, message: LeafDigests) -> Iterator[Instruction]:
        question = self._question
        if (
            question is None
            or (message.version, message.group_rank) != (question.version, question.rank)
            or replica_id not in question.asked
        ):
            return
        question.answers[replica_id] = message.leaves
        if len(question.answers) == len(question.asked):
            yield from self._tell()

    def lost(self, replica_id: str) -> Iterator[Instruction]:
        """A member is gone: it answers no question any more."""
        if self._question is not None and replica_id in self._question.asked:
            yield from self._tell()

    def _tell(self) -> Iterator[Instruction]:
        """Name what differs, as far as that is known."""
        question, self._question = self._question, None
        if question is None:
            return
        first, *others = question.asked
        ours = question.answers.get(first)
        found: list[str] = []
        for other in others:
            theirs = question.answers.get(other)
            names = differing(ours, theirs) if ours and theirs else []
            if names:
                found.append(f"{clip(other, 100)} and {clip(first, 100)} differ in {name_some(names)}")
        where = f"; seen at group rank {question.rank}" if found and question.rank else ""
        tensors = (
            "; ".join(found) + where
            if found
            else "which tensors differ is not known, because not all groups have answered"
        )
        if found:
            yield Log(f"step {question.version.step}: {tensors}", is_warning=True)
        message = ReplicasDiffer(
            version=question.version, stops=question.stops, reason=clip(f"{question.said}. {tensors}", 4000)
        )
        for replica_id, member in self._members.items():
            if replica_id in question.compared:
                yield Send(member.connection, message)


def _policy_of(hello: Hello) -> str:
    policy = f", on_replicas_differ={hello.on_replicas_differ.value!r}" if hello.check_equal_every else ""
    return f"{clip(hello.replica_id, 100)} has check_equal_every={hello.check_equal_every}{policy}"


def _in_words(groups: Sequence[Sequence[str]]) -> str:
    first, *others = (name_some(those, 4) for those in groups[:4])
    more = f", and {len(groups) - 4} others" if len(groups) > 4 else ""
    return f"{first} one, {', '.join(f'{other} another' for other in others)}{more}"
