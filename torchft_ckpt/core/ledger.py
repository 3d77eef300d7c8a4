"""Which states the job has, how its last steps were decided, and who may still hold them.

It knows neither quorums nor connections. The lighthouse asks it whether a state counts, whether the job may go back to an
older one, and what to tell a member whose vote comes after the decision.

- The *newest step* is the highest committed one that anybody here knows of. Until this life of the lighthouse has formed a
  quorum that is what members say of earlier lives, be they here or gone. Then it is what came of that quorum: a later state of
  an earlier life that a member still comes with counts while that member is here to give it, and its mere word for nothing.
  The job has gone on without that state, and nobody can keep it from training by a claim that he leaves behind.
- The job may go back on purpose; later steps of earlier quorums are *void* from then on. So is a state of this life that the job
  has not reached in it.
- A commit that nobody followed is none: where all who approved gave up waiting before they heard of it, the step is free.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from torchft_ckpt.core.commit import Tally
from torchft_ckpt.core.lighthouse_records import Member
from torchft_ckpt.core.messages import CommitDecided, CommitVote, Hello, Outcome, Role, StateVersion, clip, name_some
from torchft_ckpt.core.restart import StepKey

MAX_DECIDED = 8
"""Steps whose decision is remembered for those who come late."""
MAX_AWAY = 4096


@dataclass(slots=True)
class Followers:
    """Who may hold the step that was committed last, until one of them has been seen with it."""

    key: StepKey
    replica_ids: set[str]

    @property
    def version(self) -> StateVersion:
        quorum_id, epoch, step = self.key
        return StateVersion(step=step + 1, quorum_id=quorum_id, epoch=epoch)


class Ledger:
    """The states of the job.

    Args:
        members: who is connected, by replica id; looked at, and told what they hold by `told_to_commit`.
        epoch: of this life of the lighthouse.
        finished_step: the job was over at this step, and all else was forgotten.
    """

    def __init__(self, members: Mapping[str, Member], epoch: str, finished_step: int | None = None) -> None:
        self._epoch = epoch
        self._own_step = finished_step or 0
        """The newest step but for what is in `_beyond`."""
        self._beyond: dict[str, int] = {}
        """By replica id: later steps of earlier lives that members showed when this life had formed a quorum."""
        self._has_begun = False
        """A quorum of this life was formed."""
        self._highest_step = 0
        """The highest that this life has given a name to."""
        self._reported_step = 0
        """The part of it that members have shown or reported, beyond what was only decided here."""
        self.rolled_back_to = StateVersion()
        """Where the job went back on purpose."""
        self._members = members
        self._followers: Followers | None = None
        self._away: OrderedDict[str, tuple[StateVersion, float]] = OrderedDict()
        """Groups that were cut off, with what they held and since when: they may come back."""
        self._decided: OrderedDict[StepKey, tuple[Tally | None, Outcome, str]] = OrderedDict()

    # --------------------------------------------------------------------------------------------------------- states

    @property
    def newest_step(self) -> int:
        """The highest committed step that anybody here knows of."""
        return max(self._own_step, *self._beyond.values()) if self._beyond else self._own_step

    def is_valid(self, version: StateVersion) -> bool:
        """Whether a state has a name, and one that the job has not gone back behind."""
        return version.proven and not self.is_void(version)

    def is_void(self, version: StateVersion) -> bool:
        """Whether the job went back behind a state, or never was at it."""
        back = self.rolled_back_to
        if version.epoch == self._epoch and version.step > self._highest_step:
            return True
        return version.quorum_id < back.quorum_id and version.step > back.step

    def note(self, replica_id: str, version: StateVersion) -> None:
        """A member was seen with a state."""
        self._beyond.pop(replica_id, None)
        if self.is_valid(version):
            if self._has_begun and version.epoch != self._epoch and version.step > self._own_step:
                self._beyond[replica_id] = version.step
            else:
                self._note_step(version.step)
            if self._followers is not None and version == self._followers.version:
                self._followers = None

    def learn(self, hello: Hello, *, open_step: int) -> None:
        """Take what a member remembers of earlier lives of the lighthouse. `open_step`: of the present quorum, or 0.

        Once this life has formed a quorum, nobody's mere word of them makes what its members hold too old, or void.
        """
        if hello.rolled_back_to.quorum_id > self.rolled_back_to.quorum_id and not self._has_begun:
            self.rolled_back_to = hello.rolled_back_to
            known = [member.version.step for member in self._members.values() if self.is_valid(member.version)]
            self._own_step = self._reported_step = max([*known, open_step])
            self._beyond.clear()
        is_new = hello.last_quorum_id >= self.rolled_back_to.quorum_id and hello.last_epoch != self._epoch
        if is_new and not self._has_begun:
            self._note_step(hello.newest_step)
        self.note(hello.replica_id, hello.version)

    def gone(self, replica_id: str) -> None:
        """A member is gone, and what only it said of earlier lives with it."""
        self._beyond.pop(replica_id, None)

    def goes_on_from(self, version: StateVersion, quorum_id: int, epoch: str) -> int:
        """A quorum trains from a state; returns the newest step before, which is beyond it if the job goes back."""
        before = self.newest_step
        if version.step < before:
            self.rolled_back_to = StateVersion(step=version.step, quorum_id=quorum_id, epoch=epoch)
        self._followers = None
        self._own_step = self._reported_step = version.step
        self._beyond.clear()
        self._has_begun = True
        self._highest_step = max(self._highest_step, version.step)
        return before

    def _note_step(self, step: int) -> None:
        self._own_step = max(self._own_step, step)
        self._reported_step = max(self._reported_step, step)

    # ------------------------------------------------------------------------------------------------ who holds what

    def cut_off(self, name: str, version: StateVersion, now: float) -> None:
        """A group was lost, and not on purpose: it may come back with what it holds."""
        if self.is_valid(version):
            self._away[name] = (version, now)
            while len(self._away) > MAX_AWAY:
                self._away.popitem(last=False)

    def is_back(self, name: str) -> None:
        """A group is connected again, in whichever incarnation."""
        self._away.pop(name, None)

    def ahead(self, replica_ids: Collection[str], step: int) -> list[str]:
        """Living members that hold a state of this step or a later one, and are not among these."""
        return [
            member.replica_id
            for member in self._members.values()
            if member.replica_id not in replica_ids and self.is_valid(member.version) and member.version.step >= step
        ]

    def why_not_back(
        self,
        step: int,
        replica_ids: Collection[str],
        *,
        is_first: bool,
        restarted_at: float | None,
        patience_s: float,
        now: float,
    ) -> tuple[str, float | None] | None:
        """Before the job goes back to a step, even on purpose: are those who hold more really gone?

        Args:
            step: that these members would train from.
            replica_ids: the members.
            is_first: their state has no name yet.
            restarted_at: when the first member of an earlier life was heard, if this lighthouse restarted.
            patience_s: how long one that was cut off is waited for.
            now: the time.

        Returns:
            why to wait, and until when at most (None: for a member that lives); None: go on.
        """
        if step >= self.newest_step and not is_first:
            return None
        ahead = self.ahead(replica_ids, step if is_first else step + 1)
        if ahead:
            return f"{name_some(ahead)} holds a state that the job need not go back from, and has not asked yet", None
        if restarted_at is not None and step < self.newest_step and now < restarted_at + patience_s:
            reason = (
                f"the lighthouse restarted, and step {self.newest_step} was committed before; waiting at most {patience_s:g} s"
                f" for who holds it before the job goes back to step {step}"
            )
            return reason, restarted_at + patience_s
        on_their_way = self.on_their_way(step + 1, patience_s, now)
        if on_their_way:
            reason = (
                f"{name_some(on_their_way)} held a later state than step {step} and was cut off; waiting at most"
                f" {patience_s:g} s for it before the job goes back"
            )
            return reason, max(on_their_way.values())
        return None

    def on_their_way(self, step: int, patience_s: float, now: float) -> dict[str, float]:
        """Groups that held this step or a later one and were cut off a moment ago; each with how long it is waited for."""
        return {
            name: since + patience_s
            for name, (version, since) in self._away.items()
            if self.is_valid(version) and version.step >= step and now < since + patience_s
        }

    # ------------------------------------------------------------------------------------------------------ decisions

    def remember(self, key: StepKey, tally: Tally | None, outcome: Outcome, reason: str) -> None:
        """Note how a step was decided."""
        self._decided[key] = (tally, outcome, clip(reason))
        while len(self._decided) > MAX_DECIDED:
            self._decided.popitem(last=False)

    def remembers(self, key: StepKey) -> bool:
        """Whether the decision on a step is still known."""
        return key in self._decided

    def committed(self, key: StepKey, followers: Iterable[str], *, others_may_know: bool = False) -> None:
        """A step is committed; these members are told, and wait to hear it."""
        self._own_step = max(self._own_step, key[2] + 1)
        self._highest_step = max(self._highest_step, key[2] + 1)
        self._followers = None if others_may_know else Followers(key, set())
        for replica_id in followers:
            self._told_to_commit(replica_id, key)

    def late_answer(self, replica_id: str, vote: CommitVote) -> CommitDecided:
        """What to tell a member that votes after the decision."""
        key = (vote.quorum_id, vote.epoch, vote.step)
        # What is not remembered was decided long ago, and the job went on without this member.
        unknown = (None, Outcome.DISCARD, "this step was decided without this replica group")
        tally, outcome, reason = self._decided.get(key, unknown)
        if tally is not None:
            outcome = tally.outcome(replica_id)
            voter = tally.roles.get(replica_id) in (Role.HEALTHY, Role.INLINE) and replica_id not in tally.apart
            if outcome is Outcome.LEFT_BEHIND and vote.approve and voter:
                outcome = Outcome.COMMIT  # lost before it voted, but it holds what was committed
        elif outcome is Outcome.COMMIT and not vote.approve:
            outcome = Outcome.LEFT_BEHIND
        if outcome is Outcome.COMMIT:
            self._told_to_commit(replica_id, key)
        return CommitDecided(
            quorum_id=vote.quorum_id,
            epoch=vote.epoch,
            step=vote.step,
            outcome=outcome,
            broken=tally is None or tally.broken,
            differs=tally is not None and replica_id in tally.apart,
            reason=reason,
        )

    def declined(self, replica_id: str) -> StepKey | None:
        """A member asks for the next step: if it was told to commit the last one it shows that state now, or never had it.

        Returns:
            the step that is free again, because this was the last who could have held it.
        """
        followers = self._followers
        if followers is None or replica_id not in followers.replica_ids:
            return None
        followers.replica_ids.discard(replica_id)
        return followers.key if not followers.replica_ids else None

    def nobody_followed(self, key: StepKey) -> None:
        """All who approved went on without waiting for the decision: the commit has no holder, so it is none."""
        self._followers = None
        step = key[2]
        if self._own_step == step + 1:
            self._own_step = max(step, self._reported_step)
        self.remember(key, None, Outcome.DISCARD, "nobody waited for the decision")

    def _told_to_commit(self, replica_id: str, key: StepKey) -> None:
        """Note that a living member holds the committed step from now on, unless it gave up waiting just now."""
        quorum_id, epoch, step = key
        member = self._members.get(replica_id)
        if member is not None and member.is_in_step:
            member.version = StateVersion(step=step + 1, quorum_id=quorum_id, epoch=epoch)
        if self._followers is not None and self._followers.key == key:
            self._followers.replica_ids.add(replica_id)
