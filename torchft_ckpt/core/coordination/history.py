"""The states that the job has had: the newest step, how the last steps were decided, who made them, and who may still hold
them.

This file knows no quorums, connections or members' records. The lighthouse tells it what members show and how steps end. It
asks whether a state counts, whether the job may go back to an older one, and what to tell a member that votes too late.

- The *newest step* is the highest committed one that anybody here knows of. Until this life of the lighthouse has formed a
  quorum, it is what members say of earlier lives, whether they are still here or not. Then it is what came of that quorum, or
  what members show until a step is committed: the first who came back may have known of no job, and begun a new one. A
  later state that was not committed here counts while a member is here that holds it and can give it, also if a quorum trains
  from it, until a step is committed from it. The mere word for such a state counts for nothing. The job has gone on without
  that state, and nobody can stop its training by a claim.
- The job may go back on purpose. Later steps of earlier quorums are *void* from then on. A state of this life is void too
  where the job has not reached its step in this life.
- A commit that nobody followed is none: where all who approved gave up waiting before they heard of it, the step is free.
"""

from __future__ import annotations

import zlib
from collections import OrderedDict, deque
from collections.abc import Collection, Container, Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from torchft_ckpt.core.coordination.commit import Tally
from torchft_ckpt.core.coordination.messages import (
    MAX_NAMED,
    CommitDecided,
    CommitVote,
    Hello,
    LocateState,
    LostAsked,
    LostTold,
    Outcome,
    Role,
    Source,
    StateLocated,
    StateVersion,
    clip,
    group_name,
    name_some,
)
from torchft_ckpt.core.coordination.recovery import MAX_SOURCES
from torchft_ckpt.core.coordination.restart import NOTHING_UNTOLD, StepKey, Untold

NUM_REMEMBERED = 8
"""Quorums, each with the same contributors under the same numbers."""
MAX_DECIDED = 8
"""Steps whose decision is remembered for members that vote too late."""
MAX_AWAY = 4096
MAX_WENT_BACK = 64
"""Times that the job went back, each to a later step than before."""
MAX_STEPS_AHEAD = 10**9
"""A member may be so far beyond the newest step."""
MAX_FIRST_STEP = 1 << 40
"""A member may be so far where no quorum was formed yet."""


def state_after(key: StepKey) -> StateVersion:
    quorum_id, epoch, step = key
    return StateVersion(step=step + 1, quorum_id=quorum_id, epoch=epoch)


@dataclass(slots=True)
class _FirstHolders:
    """Members that may hold the step that was committed last, until one of them has been seen with it."""

    key: StepKey
    replica_ids: set[str]
    step_before: int
    """`StateHistory.lasting_step` before."""

    @property
    def version(self) -> StateVersion:
        return state_after(self.key)


class StateHistory:
    """The states of the job. Not thread-safe: one caller at a time.

    Args:
        epoch: names this life of the lighthouse.
        finished_step: the job was over at this step, and all else was forgotten.
        untold: of earlier lives.
    """

    def __init__(self, epoch: str, finished_step: int | None = None, untold: Untold = NOTHING_UNTOLD) -> None:
        self._epoch = epoch
        self.untold = untold
        """Of this life and of earlier ones; the last `MAX_DECIDED` steps."""
        self._own_step = finished_step or 0
        """The newest step apart from `_beyond`. Falls only where the job goes back, or where nobody followed a commit."""
        self._beyond: dict[str, int] = {}
        """By the replica id of a connected member: the later step that it shows, which was not committed in this life. Empty
        before `_has_committed`."""
        self.has_begun = finished_step is not None
        """Whether this life has formed a quorum, or named the state of the first one, or the job was over. Never false again."""
        self._has_committed = self.has_begun
        """Whether this life has committed a step, too. Before that a later state counts for what the job has come to: who began
        may be groups that knew no better, as the first ones back after the lighthouse was started again."""
        self._highest_step = 0
        """No state of this life has a higher step than this. Never falls."""
        self._reported_step = 0
        """The highest step that members have shown or reported. Never above `_own_step`, which may only be decided here."""
        self._went_back = [StateVersion()]
        """The states that the job went back to on purpose, but for those that it went back behind later. Ids and steps rise."""
        self._first_holders: _FirstHolders | None = None
        """Set while nobody has been seen with the state of the step that was committed last."""
        self._away: OrderedDict[str, tuple[StateVersion, float]] = OrderedDict()
        """Groups that were cut off and are not back: the state that each held, and since when it is away."""
        self._decided: OrderedDict[StepKey, tuple[Tally | None, Outcome, str]] = OrderedDict()
        """The last `MAX_DECIDED` decisions. No tally where the step was decided from reports, or its commit had no follower."""

    # --------------------------------------------------------------------------------------------------------- states

    @property
    def rolled_back_to(self) -> StateVersion:
        """The state that the job last went back to on purpose. Its quorum id never falls."""
        return self._went_back[-1]

    @property
    def newest_step(self) -> int:
        """The highest committed step that anybody here knows of."""
        return max(self._own_step, *self._beyond.values()) if self._beyond else self._own_step

    @property
    def lasting_step(self) -> int:
        """The newest step that stays when those are gone who hold a later state: members may carry it on."""
        return self._own_step

    def why_never_made(self, step: int) -> str:
        """Say why nobody can be at a step; empty: somebody can."""
        if step <= (self._own_step + MAX_STEPS_AHEAD if self.has_begun else MAX_FIRST_STEP):
            return ""
        return f"it names step {step}, but the newest one known here is {self._own_step}: no job has made so many since"

    def is_valid(self, version: StateVersion) -> bool:
        """Whether a state has a name, and the job has not gone back behind it."""
        return version.proven and not self.is_void(version)

    def is_void(self, version: StateVersion) -> bool:
        """Whether the job went back behind a state, or never was at it."""
        if version.epoch == self._epoch and version.step > self._highest_step:
            return True
        return any(version.quorum_id < back.quorum_id and version.step > back.step for back in self._went_back)

    def as_it_counts(self, version: StateVersion) -> StateVersion:
        """Return a state without its name if that is void: whatever becomes of the job, it is none of its states any more."""
        return StateVersion(step=version.step) if self.is_void(version) else version

    def note(self, replica_id: str, version: StateVersion) -> None:
        """Note that a connected member was seen with a state."""
        self._beyond.pop(replica_id, None)
        if self.is_valid(version):
            if self._has_committed and version.step > self._own_step:
                self._beyond[replica_id] = version.step
            else:
                self._note_step(version.step)
            if self._first_holders is not None and version == self._first_holders.version:
                self._first_holders = None

    def learn(self, hello: Hello, held: Iterable[StateVersion], *, open_step: int) -> None:
        """Take what a member remembers of earlier lives of the lighthouse.

        Once this life has formed a quorum, the mere word of a member makes no state of another member too old, or void.

        Args:
            hello: of a member that is connected now.
            held: what the connected members hold.
            open_step: of the present quorum, or 0.
        """
        if hello.rolled_back_to.quorum_id > self.rolled_back_to.quorum_id and not self.has_begun:
            self._go_back(hello.rolled_back_to)
            made = (state_after(key) for key, (_, outcome, _) in self._decided.items() if outcome is Outcome.COMMIT)
            known = [version.step for version in (*held, *made) if self.is_valid(version)]
            self._own_step = self._reported_step = max([*known, open_step])
            self._beyond.clear()
        is_new = hello.last_quorum_id >= self.rolled_back_to.quorum_id and hello.last_epoch != self._epoch
        if is_new and not self.has_begun:
            self._note_step(hello.newest_step)
        self.note(hello.replica_id, hello.version)

    def gone(self, replica_id: str) -> None:
        """Forget what only this member, which is gone, has shown of earlier lives."""
        self._beyond.pop(replica_id, None)

    def goes_on_from(self, version: StateVersion, quorum_id: int, epoch: str, holders: Iterable[str]) -> int:
        """Note that a quorum trains from what these hold. Returns the newest step until now: beyond that if the job goes back."""
        before = self.newest_step
        if version.step < before:
            self._go_back(StateVersion(step=version.step, quorum_id=quorum_id, epoch=epoch))
        self._first_holders = None
        if self._has_committed and version.step > self._own_step:  # it counts for as long as somebody holds it
            nearer = {replica_id: step for replica_id, step in self._beyond.items() if step <= version.step}
            self._beyond = nearer | dict.fromkeys(holders, version.step)
        else:
            self._own_step = self._reported_step = version.step
            self._beyond.clear()
        self.has_begun = True
        if version.epoch == self._epoch:
            self._highest_step = max(self._highest_step, version.step)
        return before

    def _go_back(self, to: StateVersion) -> None:
        self._went_back = [*(back for back in self._went_back if back.step < to.step), to][-MAX_WENT_BACK:]

    def _note_step(self, step: int) -> None:
        self._own_step = max(self._own_step, step)
        self._reported_step = max(self._reported_step, step)

    # ------------------------------------------------------------------------------------------------ who holds what

    def cut_off(self, name: str, version: StateVersion, now: float) -> None:
        """Note that a group was lost, and did not leave on purpose: it may come back with the state that it holds."""
        if self.is_valid(version):
            self._away[name] = (version, now)
            while len(self._away) > MAX_AWAY:
                self._away.popitem(last=False)

    def is_back(self, name: str) -> None:
        """Note that a group is connected again, in whichever incarnation."""
        self._away.pop(name, None)

    def holders(self, held: Iterable[tuple[str, StateVersion]], step: int) -> list[str]:
        """Return which members hold a state that counts, of this step or a later one."""
        return [replica_id for replica_id, version in held if version.step >= step and self.is_valid(version)]

    def why_not_back(
        self,
        step: int,
        others: Iterable[tuple[str, StateVersion]],
        *,
        is_first: bool,
        restarted_at: float | None,
        patience_s: float,
        now: float,
    ) -> tuple[str, float | None] | None:
        """Say why the job may not go back to a step yet, even on purpose: a holder of a newer state may not be gone.

        Args:
            step: the step that the next quorum would train from.
            others: the connected members outside of that quorum, each with the state that it holds.
            is_first: whether the quorum's state has no name yet.
            restarted_at: when the first member of an earlier life was heard, if this lighthouse restarted.
            patience_s: how long the lighthouse waits for a group that was cut off.
            now: the time.

        Returns:
            why to wait, and until when at most (None: for a member that lives); None: go on.
        """
        if step >= self.newest_step and not is_first:
            return None
        ahead = self.holders(others, step if is_first else step + 1)
        if ahead:
            return f"waiting for {name_some(ahead)}: alive, and holding a newer state than the groups that asked", None
        if restarted_at is not None and step < self.newest_step and now < restarted_at + patience_s:
            reason = (
                f"step {self.newest_step} was committed before the lighthouse restarted; waiting at most {patience_s:g} s for a"
                f" group that holds it, before the job goes back to step {step}"
            )
            return reason, restarted_at + patience_s
        on_their_way = self.on_their_way(step + 1, patience_s, now)
        if on_their_way:
            reason = (
                f"waiting at most {patience_s:g} s for {name_some(on_their_way)}, which held a newer state and was disconnected a"
                f" moment ago, before the job goes back to step {step}"
            )
            return reason, max(on_their_way.values())
        return None

    def on_their_way(self, step: int, patience_s: float, now: float) -> dict[str, float]:
        """Return the groups that held this step or a later one and were cut off a moment ago, each with the end of the wait."""
        return {
            name: since + patience_s
            for name, (version, since) in self._away.items()
            if self.is_valid(version) and version.step >= step and now < since + patience_s
        }

    def locate(self, asker: str, question: LocateState, members: Iterable[tuple[Source, StateVersion]]) -> StateLocated:
        """Answer a member that asks, between steps, where the newest state is.

        The answer names the newest state that a connected member holds, unless a newer one is known to have been committed.
        Then the holders of that one are gone, or have not been heard of since, and the next quorum has to find out.
        All who ask are sent to the same primary, because they find each other through it. The other sources are spread over
        them.

        Args:
            asker: the replica id of the member that asks.
            question: what it asked.
            members: all connected members as sources, in the order of their ranks, each with the state that it holds.
        """
        living = list(members)
        newest = max((version for _, version in living if self.is_valid(version)), default=StateVersion())
        if not newest.proven or newest.step < self.newest_step:
            return StateLocated(request_id=question.request_id, rolled_back_to=self.rolled_back_to)
        holders = [
            source
            for source, version in living
            if source.replica_id != asker and version == newest and source.checkpoint_addresses
        ]
        primary, others = holders[:1], holders[1:]
        first = zlib.crc32(asker.encode()) % max(1, len(others))
        return StateLocated(
            request_id=question.request_id,
            version=newest,
            is_held=question.version == newest,
            sources=[*primary, *others[first:], *others[:first]][:MAX_SOURCES],
            rolled_back_to=self.rolled_back_to,
        )

    # ------------------------------------------------------------------------------------------------------ decisions

    def remember(self, key: StepKey, tally: Tally | None, outcome: Outcome, reason: str) -> None:
        self._decided[key] = (tally, outcome, clip(reason))
        while len(self._decided) > MAX_DECIDED:
            self._decided.popitem(last=False)
        told = (key, outcome is Outcome.COMMIT)
        if not (tally is not None and tally.is_unanimous) and told not in self.untold.decided:
            before = (one for one in self.untold.decided if one[0] != key)
            self.untold = msgspec.structs.replace(self.untold, decided=(*before, told)[-MAX_DECIDED:])

    def formed(self, quorum_id: int, size: int) -> None:
        """A quorum has formed."""
        self.untold = msgspec.structs.replace(self.untold, quorum=(quorum_id, self._epoch, size))

    def remembers(self, key: StepKey) -> bool:
        return key in self._decided

    def committed(self, key: StepKey, followers: Collection[str], *, others_may_know: bool = False) -> None:
        """Note that a step is committed. The followers wait to hear it; others may have heard it in an earlier life."""
        self._has_committed = True
        self._first_holders = None if others_may_know else _FirstHolders(key, set(followers), self._own_step)
        self._own_step = max(self._own_step, key[2] + 1)
        self._highest_step = max(self._highest_step, key[2] + 1)

    def answer_late(self, replica_id: str, vote: CommitVote) -> CommitDecided:
        """Return what to tell a member that votes after the decision. If that is to commit, the member may hold that state."""
        key = (vote.quorum_id, vote.epoch, vote.step)
        # What is not remembered was decided long ago, perhaps by an earlier life, and the job went on without this member.
        ended = Outcome.COMMIT if (key, True) in self.untold.decided else Outcome.DISCARD
        unknown = (None, ended, "this step was decided without this replica group")
        tally, outcome, reason = self._decided.get(key, unknown)
        if tally is not None:
            outcome = tally.outcome(replica_id)
            voter = tally.roles.get(replica_id) is Role.HEALTHY
            if outcome is Outcome.LEFT_BEHIND and vote.approve and voter:
                outcome = Outcome.COMMIT  # lost before it voted, but it holds what was committed
        elif outcome is Outcome.COMMIT and not vote.approve:
            outcome = Outcome.LEFT_BEHIND
        if outcome is Outcome.COMMIT and self._first_holders is not None and self._first_holders.key == key:
            self._first_holders.replica_ids.add(replica_id)
        return CommitDecided(
            quorum_id=vote.quorum_id,
            epoch=vote.epoch,
            step=vote.step,
            outcome=outcome,
            broken=tally is None or tally.broken,
            reason=reason,
        )

    def declined(self, replica_id: str) -> StepKey | None:
        """Note that a member asks for the next step without the state of the last one: it will not hold that any more.

        Returns:
            the step that is free again, because no other member could hold its state.
        """
        holders = self._first_holders
        if holders is None or replica_id not in holders.replica_ids:
            return None
        holders.replica_ids.discard(replica_id)
        return holders.key if not holders.replica_ids else None

    def nobody_followed(self, key: StepKey) -> None:
        """Take a commit back that has no holder: all who approved went on without waiting for the decision."""
        before = self._first_holders.step_before if self._first_holders is not None else key[2]
        self._first_holders = None
        if self._own_step == key[2] + 1:
            self._own_step = max(before, self._reported_step)
        self.remember(key, None, Outcome.DISCARD, "nobody waited for the decision")

    # ------------------------------------------------------------------------------------------------------ invariants

    def validate(self, held: Mapping[str, StateVersion]) -> None:
        """Check the invariants, for tests; a `RuntimeError` says which one is broken. `held`: the members' states."""
        if not 0 <= self._reported_step <= self._own_step:
            raise RuntimeError(f"step {self._reported_step} was reported, and {self._own_step} is the newest")
        if self._beyond and not self._has_committed:
            raise RuntimeError(f"{self._beyond} are beyond this life, and it has committed no step")
        if not self._beyond.keys() <= held.keys():
            raise RuntimeError(f"{self._beyond} counts, and not all of them are here")
        if back := self._away.keys() & {group_name(replica_id) for replica_id in held}:
            raise RuntimeError(f"{back} are here, and count as cut off")
        for replica_id, version in held.items():
            if version.step > self.newest_step and self.is_valid(version):
                raise RuntimeError(f"{replica_id} holds {version}, and step {self.newest_step} is the newest")
        if len(self._decided) > MAX_DECIDED or len(self._away) > MAX_AWAY:
            raise RuntimeError("more is remembered than may be")


class _Contributors(NamedTuple):
    quorum_id: int
    from_step: int
    """The first step that they began with."""
    replica_ids: Mapping[int, str]


class RecentContributors:
    """The contributors to the last quorums, by number. Not thread-safe: one caller at a time.

    The writers of a checkpoint are those who contributed to its step, each by its number among them. A writer that backs up
    another's share asks whether that one is gone; it knows numbers, and no names, and the quorum may be another one by then.
    """

    def __init__(self) -> None:
        self._latest: deque[_Contributors] = deque(maxlen=NUM_REMEMBERED)

    def note(self, quorum_id: int, step: int, replica_ids: Mapping[int, str]) -> None:
        """Note who contributes to a step of a quorum, from the state `step` on, by their numbers among those who contribute."""
        if not self._latest or self._latest[-1][::2] != (quorum_id, replica_ids):
            self._latest.append(_Contributors(quorum_id, step, dict(replica_ids)))

    def answer(self, asked: LostAsked, epoch: str, alive: Container[str]) -> LostTold | None:
        """Return which contributors to the step that led to a state are gone; None where it is not known who they were.

        `epoch`: of this lighthouse, which knows no other quorums. `alive`: replica ids of the connected members.
        """
        version = asked.version
        if version.epoch != epoch:
            return None
        for known in reversed(self._latest):
            if known.quorum_id == version.quorum_id and known.from_step < version.step:
                contributors = sorted(known.replica_ids.items())
                gone = [number for number, replica_id in contributors if replica_id not in alive]
                names = [replica_id.rpartition(":")[0] or replica_id for _, replica_id in contributors[:MAX_NAMED]]
                return LostTold(version=version, contributors=gone, group_names=names)
        return None
