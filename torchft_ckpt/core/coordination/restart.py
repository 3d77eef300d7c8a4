"""A restarted lighthouse remembers nothing: here it learns from the members of the last quorum before it restarted.

This file knows no connections and no clock. From the first `Hello` with a state of that time on, the lighthouse is patient:
- It forms no quorum until it has heard all members of that quorum, or its patience is over. A member that is still on the
  way back may hold the newest state. Nor does it while it has heard only groups that were beside that quorum.
- It collects votes in doubt and decides them (`commit.decide_forgotten`), but for what earlier lives have written down of them.
- Members that are still in the step's collectives hear that these are broken as soon as a member that shares them is gone,
  says so itself, never began that step, or has not come back in time. Nobody else could tell them: the old lighthouse that knew
  the quorum is gone.

Once this lighthouse has formed a quorum of its own, or named the state of the first one, there is nothing left to learn. A vote
in doubt that comes later does not count, because the job has gone on without it.

Anybody may come, say something, and go: what is kept is bounded.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

import msgspec

from torchft_ckpt.core.coordination.commit import CommitDecision, decide_forgotten
from torchft_ckpt.core.coordination.messages import CommitVote, Hello, Outcome, StateVersion

StepKey: TypeAlias = tuple[int, str, int]
"""Quorum id, epoch and step: names one step of one quorum."""
QuorumKey: TypeAlias = tuple[int, str]
MAX_HEARD = 2048
"""Members, also those that are gone, of whom is kept what they said: a job of more groups may wait for them in vain."""
MAX_DOUBTS = 16
"""Steps in doubt at once. Honest members know of one, or of two."""


class Untold(msgspec.Struct, frozen=True):
    """What members tell a restarted lighthouse, and may not be there to tell. Nothing is said before this is written down."""

    quorum: tuple[int, str, int] = (0, "", 0)
    """Id, epoch and size of the latest quorum."""
    decided: tuple[tuple[StepKey, bool], ...] = ()
    """The last steps, and whether they count; but for those that count because every voter approved. Of the others no vote tells
    what became of them, if who heard it is gone."""


NOTHING_UNTOLD = Untold()


@dataclass(frozen=True, slots=True)
class Settled:
    """A forgotten step that is decided now."""

    key: StepKey
    verdict: CommitDecision
    voters: tuple[str, ...]
    """Who sent a vote and waits for the answer."""
    approvers: tuple[str, ...]
    others_may_know: bool
    """Not all members have been heard: others may hold what was committed."""


class RestartRecovery:
    """The reports of members of earlier lives' quorums.

    Args:
        patience_s: how long to wait for members that are not back.
        untold: what earlier lives have written down.
    """

    def __init__(self, patience_s: float, untold: Untold = NOTHING_UNTOLD) -> None:
        self.patience_s = patience_s
        self._decided = dict(untold.decided)
        self.is_over = False
        self._patient_until: float | None = None
        self._is_patience_spent = False
        self._hellos: dict[str, Hello] = {}
        """The latest `Hello` of each member that was in a quorum of an earlier life, also of those lost again."""
        self._beside: dict[str, StateVersion] = {}
        """The states that other members showed, which were in no quorum lately. They say as much of a step in doubt."""
        self._training: dict[str, StepKey] = {}
        """Connected members that are still in a step of an earlier life."""
        self._between: dict[str, StepKey] = {}
        """Connected members whose last step of an earlier life is over, and that have not asked for the next."""
        self._doubts: dict[StepKey, dict[str, CommitVote]] = {}
        """The votes on steps that are in doubt, by replica id."""
        self._committed: list[StepKey] = []
        """What was decided here so far: of two quorums that were in doubt about one step, one is enough."""
        self._last = untold.quorum
        """Id, epoch and size of the latest quorum that is known of."""

    @property
    def first_heard_at(self) -> float | None:
        """Since when members of an earlier life's quorum have been coming back; None: none has, or it is over."""
        return None if self._patient_until is None or self.is_over else self._patient_until - self.patience_s

    @property
    def _here(self) -> dict[str, StepKey]:
        """Connected members that may share collectives of an earlier life, each with its step."""
        return {**self._training, **self._between}

    def heard(self, hello: Hello, now: float) -> list[tuple[str, int]]:
        """A member connects. Returns who must be told that which quorum's collectives are broken."""
        if self.is_over or not (hello.was_in_quorum or hello.version.proven or self._last[0]):
            return []
        if self._patient_until is None:
            self._patient_until = now + self.patience_s
        if not hello.was_in_quorum:
            if hello.version.proven:
                _keep_latest(self._beside, hello.replica_id, hello.version, MAX_HEARD)
            return []
        _keep_latest(self._hellos, hello.replica_id, hello, MAX_HEARD)
        here = self._training if hello.last_outcome is None else self._between
        here[hello.replica_id] = (hello.last_quorum_id, hello.last_epoch, hello.last_step)
        if hello.last_quorum_id > self._last[0]:
            self._last = (hello.last_quorum_id, hello.last_epoch, hello.last_quorum_size)
        return self._break_off_beyond(hello)

    def voted(self, replica_id: str, vote: CommitVote, now: float) -> list[tuple[str, int]]:
        """A vote in doubt. Returns who must be told that which quorum's collectives are broken."""
        key = (vote.quorum_id, vote.epoch, vote.step)
        self._training.pop(replica_id, None)
        votes = self._doubts.get(key, {})
        slim = msgspec.structs.replace(vote, reason="", state_digests=[], collectives="", issued=[])
        _keep_latest(votes, replica_id, slim, MAX_HEARD)
        _keep_latest(self._doubts, key, votes, MAX_DOUBTS)
        if self._patient_until is None:
            self._patient_until = now + self.patience_s
        return self._break_off(key[:2]) if vote.broken else []

    def asked(self, replica_id: str) -> None:
        """A member has left its old step: it asks for the next."""
        self._training.pop(replica_id, None)
        self._between.pop(replica_id, None)

    def left(self, replica_id: str) -> list[tuple[str, int]]:
        """A member is gone, or takes no part in its old quorum's collectives any more.

        Returns who must be told that which quorum's collectives are broken.
        """
        key = self._training.pop(replica_id, None) or self._between.pop(replica_id, None)
        return self._break_off(key[:2]) if key is not None else []

    def settle(self, now: float) -> Iterator[Settled]:
        """Decide what can be decided by now; each step is yielded once."""
        for key, votes in list(self._doubts.items()):
            everyone = self._everyone_heard(key[:2])
            committed, refused = self._testimony(key)
            refused = refused or (everyone and self._is_not_begun_by_all(key))
            if (counts := self._decided.get(key)) is not None:
                verdict = CommitDecision.COMMIT if counts else CommitDecision.DISCARD
            else:
                verdict = decide_forgotten(
                    votes.values(),
                    committed_somewhere=committed,
                    refused_somewhere=refused,
                    someone_still_training=key in self._training.values() and not self._is_patience_spent_twice(now),
                    everyone_is_back=everyone,
                    grace_over=self._is_over_at(now),
                )
            if verdict is CommitDecision.PENDING:
                continue
            del self._doubts[key]
            if verdict is CommitDecision.COMMIT:
                self._committed.append(key)
            approvers = tuple(replica_id for replica_id, vote in votes.items() if vote.approve)
            yield Settled(key, verdict, tuple(votes), approvers, not everyone)

    def expire(self, now: float) -> list[tuple[str, int]]:
        """Time has passed. Returns who must be told that which quorum's collectives are broken, once."""
        if self._is_patience_spent or not self._is_over_at(now):
            return []
        self._is_patience_spent = True
        broken: list[tuple[str, int]] = []
        for quorum in dict.fromkeys(key[:2] for key in self._here.values()):
            if not self._everyone_heard(quorum):
                broken += self._break_off(quorum)
        return broken

    def hold(self, now: float) -> tuple[str, float | None] | None:
        """Say why no quorum may be formed yet, and until when at most; None: it may."""
        if self.is_over:
            return None
        if self._doubts:
            return "a step from before the lighthouse restarted is still being decided", self.deadline(now)
        if self._is_over_at(now) or self._everyone_heard(self._last[:2]):
            return None
        if self._last[0] == 0:  # who only followed may hold a state that the others are long past
            reason = "only groups that were in no quorum are back since the lighthouse restarted"
            return (reason, self._patient_until) if self._beside else None
        heard = self._num_heard(self._last[:2])
        reason = f"{heard} of {self._last[2]} replica groups are back since the lighthouse restarted"
        return reason, self._patient_until

    def deadline(self, now: float) -> float | None:
        """Return when something changes by time alone."""
        if self._patient_until is None or self.is_over:
            return None
        if not self._is_patience_spent:
            return self._patient_until
        return (
            self._patient_until + self.patience_s if self._doubts and not self._is_patience_spent_twice(now) else None
        )

    def end(self) -> list[tuple[str, int]]:
        """A quorum of this life is formed, or the state of its first one has its name.

        Returns who must be told that which quorum's collectives are broken.
        """
        self.is_over = True
        broken = [(replica_id, key[0]) for replica_id, key in self._here.items()]
        self._training.clear()
        self._between.clear()
        self._hellos.clear()
        self._beside.clear()
        self._doubts.clear()
        return broken

    def validate(self, connected: Collection[str]) -> None:
        """Check the invariants, for tests; a `RuntimeError` says which one is broken. `connected`: replica ids of the members."""
        if not self._training.keys().isdisjoint(self._between):
            raise RuntimeError(f"{self._training.keys() & self._between.keys()} are in a step, and between two")
        if not self._here.keys() <= set(connected):
            raise RuntimeError(f"some of {list(self._here)} are not connected")
        if max(len(self._hellos), len(self._beside), *map(len, self._doubts.values()), 0) > MAX_HEARD:
            raise RuntimeError("more members are remembered than may be")
        if len(self._doubts) > MAX_DOUBTS:
            raise RuntimeError(f"{len(self._doubts)} steps are in doubt, of {MAX_DOUBTS} at most")
        if self.is_over and (self._here or self._hellos or self._beside or self._doubts):
            raise RuntimeError("a quorum of this life was formed, and something of earlier ones is still open")

    def _break_off(self, quorum: QuorumKey) -> list[tuple[str, int]]:
        return [(replica_id, key[0]) for replica_id, key in self._here.items() if key[:2] == quorum]

    def _break_off_beyond(self, hello: Hello) -> list[tuple[str, int]]:
        """If this member never began a step that others of its quorum are in, or the other way round: who is to be told."""
        quorum, step = (hello.last_quorum_id, hello.last_epoch), hello.last_step
        others = [h for h in self._hellos.values() if h is not hello and (h.last_quorum_id, h.last_epoch) == quorum]
        least = min((h.last_step for h in others), default=step)
        # Those who were there when the first came that never began it, or that began it, were told then.
        those = [hello.replica_id] if step > least else [*self._training] if step < least else []
        return [(m, quorum[0]) for m in those if m in self._training and self._training[m][:2] == quorum]

    def _is_over_at(self, now: float) -> bool:
        return self._patient_until is not None and now >= self._patient_until

    def _is_patience_spent_twice(self, now: float) -> bool:
        return self._patient_until is not None and now >= self._patient_until + self.patience_s

    def _num_heard(self, quorum: QuorumKey) -> int:
        return sum((hello.last_quorum_id, hello.last_epoch) == quorum for hello in self._hellos.values())

    def _everyone_heard(self, quorum: QuorumKey) -> bool:
        sizes = [h.last_quorum_size for h in self._hellos.values() if (h.last_quorum_id, h.last_epoch) == quorum]
        return bool(sizes) and len(sizes) >= max(sizes)

    def _is_not_begun_by_all(self, key: StepKey) -> bool:
        """Whether a member of that quorum never began the step: the lighthouse was gone before it had told all of them."""
        others = (h for m, h in self._hellos.items() if m not in self._doubts.get(key, ()))
        return any((h.last_quorum_id, h.last_epoch) == key[:2] and h.last_step < key[2] for h in others)

    def _testimony(self, key: StepKey) -> tuple[bool, bool]:
        """Whether a member knows of a commit, and whether one knows that there was none, or has not approved."""
        quorum_id, epoch, step = key
        committed = False
        refused = any(other != key and other[2] >= step for other in self._committed)
        for version in (*(hello.version for hello in self._hellos.values()), *self._beside.values()):
            if (version.quorum_id, version.epoch) == (quorum_id, epoch) and version.step > step:
                committed = True
            elif version.proven and version.step > step:
                refused = True  # the job is past this step: who is in doubt about it has to heal in any case
        for hello in self._hellos.values():
            if (hello.last_quorum_id, hello.last_epoch, hello.last_step) == key and hello.last_outcome is not None:
                committed = committed or hello.last_outcome is not Outcome.DISCARD
                refused = refused or hello.last_outcome is Outcome.DISCARD
            if hello.last_quorum_id > quorum_id and hello.last_step >= step:
                refused = True  # a later quorum took this step up again
        return committed, refused


def _keep_latest(kept: dict[Any, Any], key: str | StepKey, value: object, most: int) -> None:
    """Put an entry last, and forget the first one where there are too many."""
    kept.pop(key, None)
    kept[key] = value
    if len(kept) > most:
        del kept[next(iter(kept))]
