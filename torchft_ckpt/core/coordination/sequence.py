"""This file decides which collectives may start without asking, and when those of a step are seen to be apart.

All groups have to issue the same collectives in a step: the same shapes, dtypes and reductions in the same order. Gloo ends the
whole process where two of them are of different sizes, and a collective that one group does not issue holds the others up. So a
collective starts only when it is known that every other group issues the same one. A group knows it in one of three ways:

- *Known.* In each committed step of this quorum that began with the same collectives, this one came next. All members of a
  quorum have committed the same steps, so they have the same memory (`KnownSequences`), and it needs no message.
- *Compare.* Nothing is known of what comes here, or it was not always the same. All members know that alike, so each of them
  compares with the others before it starts; the comparison is a collective of one fixed size.
- *Ask.* Something else than this one has always come here. The others may start that at once, or may deviate in the same way.
  The lighthouse is asked: it says go when all members ask for the same one, and ends the step as soon as one of them
  waits for another.

What a member waits for, or has asked for, reaches the lighthouse as a `CollectiveWait`, what it has issued with its vote.
`why_apart` compares them. A metric that is averaged between the decision and the next request is a collective of the decided
step. Such collectives are always compared, and what a member has issued of them comes with its next request.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping
from enum import Enum

from torchft_ckpt.core.coordination.messages import CollectiveWait

MAX_KNOWN = 65536
"""Collectives that are remembered. With more of them all memory is dropped, on all members in the same step."""


class Clearance(Enum):
    """The condition on which a collective starts."""

    KNOWN = "known"
    COMPARE = "compare"
    ASK = "ask"


class KnownSequences:
    """The collectives of this step so far, and what came after the same ones in committed steps of this quorum."""

    def __init__(self) -> None:
        self._next: dict[str, str | None] = {}
        """By digest of a sequence: the digest with what always came next; None where that was not always the same."""
        self._digests: list[str] = []
        self._num_voted: int | None = None

    def forget(self) -> None:
        """Another quorum: nobody knows what its members have in common."""
        self._next.clear()

    def begin_step(self) -> None:
        """No collective of the step has been issued."""
        self._digests = []
        self._num_voted = None

    def issue(self, signature: str) -> Clearance:
        """Note a collective by its shape, dtype and reduction, and return what has to happen before it starts."""
        before = self.digest
        after = hashlib.blake2b(f"{before};{signature}".encode(), digest_size=8).hexdigest()
        self._digests.append(after)
        known = self._next.get(before)
        if known is None or self._num_voted is not None:
            return Clearance.COMPARE
        return Clearance.KNOWN if known == after else Clearance.ASK

    @property
    def count(self) -> int:
        return len(self._digests)

    @property
    def digest(self) -> str:
        """A word for all of them in their order; empty where there was none."""
        return self._digests[-1] if self._digests else ""

    def voted(self) -> None:
        """The step was voted on. What is issued before the next one begins is compared, and not learned."""
        if self._num_voted is None:
            self._num_voted = len(self._digests)

    def decided(self, *, committed: bool) -> None:
        """The step was decided, alike for all members that are in the next step of this quorum."""
        self.voted()
        if not committed:
            return
        voted_on = self._digests[: self._num_voted]
        if len(self._next) + len(voted_on) > MAX_KNOWN:
            self._next.clear()
        before = ""
        for digest in voted_on:
            if self._next.setdefault(before, digest) != digest:
                self._next[before] = None
            before = digest


def why_apart(waits: Mapping[str, CollectiveWait], ended: Mapping[str, int]) -> tuple[str, str] | None:
    """Return whose collectives cannot meet those of the others, and why; None while all of them still may.

    Args:
        waits: the latest wait of each member that lives, of one rank, by replica id.
        ended: those that have ended the step, by replica id: after how many collectives.
    """
    earliest = sorted(ended, key=ended.__getitem__)[:2]
    first: dict[int, dict[str, str]] = {}  # who issues which collective there
    for replica_id, wait in waits.items():
        first.setdefault(wait.index, {}).setdefault(wait.digest, replica_id)
    for waiting, wait in waits.items():
        for other in earliest:
            if other != waiting and ended[other] <= wait.index:
                return other, (
                    f"{waiting} waits in collective {wait.index + 1} of the step ({wait.what}), and {other} has ended the step"
                    f" after {ended[other]}: the loops of the groups differ"
                )
        other = next((m for digest, m in first[wait.index].items() if digest != wait.digest), "")
        if wait.deviates and other:
            return waiting, (
                f"{waiting} issues another collective {wait.index + 1} of the step ({wait.what}) than {other}"
                f" ({waits[other].what}): the loops of the groups differ"
            )
    return None


def may_start(waits: Mapping[str, CollectiveWait], members: Collection[str]) -> bool:
    """Return whether all living members ask for the same collective."""
    asked = {(wait.index, wait.digest) for wait in waits.values() if wait.deviates}
    return len(asked) == 1 and all(member in waits and waits[member].deviates for member in members)
