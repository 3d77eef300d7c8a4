"""This file decides when a fragment of the model is exchanged, and what becomes of a round that was voted on.

The schedule is that of Streaming DiLoCo (arXiv 2501.18512, algorithm 2); with one fragment and no delay it is DiLoCo's
(2311.08105), and LocalSGD's (1805.09767). A *round* exchanges one fragment, is one step of the manager, and its fragment
follows from the number of committed rounds: so the place in the schedule travels with the state's name, and whoever holds
the state knows what comes next. A round that was discarded comes again.

    inner step of the round    1 ... period - delay        ...        period
                               train   PREPARE: take the     train      SYNC: the average is there; vote,
                                       values, begin to                 take it, or do as `after_vote` says
                                       average them
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from torchft_ckpt.errors import ConfigError

_MOST_GIVEN_UP = 1000
"""Rounds in a row: a group that has waited through more of them than this has no state that is worth following."""


class Action(Enum):
    """The work after an inner step."""

    PREPARE = "prepare"
    SYNC = "sync"


class RoundOutcome(Enum):
    """The fate of a round that was voted on."""

    APPLY = "apply"
    """It is committed."""
    RETRY = "retry"
    """It is discarded, nothing is lost: average the values of now among those who are left."""
    RESTORE = "restore"
    """It is discarded: the fragment goes back to where the round began."""
    REJOIN = "rejoin"
    """The others went on without this replica."""


@dataclass(frozen=True, slots=True)
class RoundPlace:
    """Where a script was in its round when its state was handed out; by default between two iterations.

    The loop hands it out in the hook of an inner step. After that the script still ends its iteration: it steps its
    learning-rate schedule, say. So a group that loads the state has to make these ends of iterations too.
    """

    num_ends_left: int = 0
    """Ends of iterations, from this place to the one in which the round is decided, and with that one."""
    retries_left: int = 0
    """How often this round is tried again at once, if the attempt that begins here is discarded."""


@dataclass(frozen=True, slots=True)
class OuterSchedule:
    """Says when which fragment is exchanged.

    Args:
        sync_every: inner steps in which every fragment is exchanged once.
        num_fragments: fragments of the model; one round each, in turn.
        sync_delay: inner steps between PREPARE and SYNC (tau in the paper).

    Raises:
        ConfigError: the fragments cannot be exchanged in turn within `sync_every` steps.
    """

    sync_every: int
    num_fragments: int = 1
    sync_delay: int = 0

    def __post_init__(self) -> None:
        if self.num_fragments < 1:
            raise ConfigError("there has to be a fragment of the model to exchange", party="model_fragments")
        if self.sync_every < 1 or self.sync_every % self.num_fragments:
            raise ConfigError(
                f"sync_every={self.sync_every} has to be a positive multiple of the number of fragments,"
                f" {self.num_fragments}: one is exchanged at a time",
                party="sync_every",
            )
        if not 0 <= self.sync_delay < self.period:
            raise ConfigError(
                f"fragment_sync_delay={self.sync_delay} has to be below {self.period}, the inner steps between two"
                " exchanges: one has to end before the next begins",
                party="fragment_sync_delay",
            )

    @property
    def period(self) -> int:
        return self.sync_every // self.num_fragments

    def num_ends_left(self, inner_step: int) -> int:
        """Return `RoundPlace.num_ends_left` in the hook of an inner step."""
        return 1 + self.period - inner_step

    def after_discard(self, place: RoundPlace, round_retries: int) -> RoundPlace:
        """Return the place of a state that was handed out for a round of which an attempt is discarded.

        The others try it again at once, or train as long as a round takes and try it then.
        """
        if place.retries_left:
            return RoundPlace(place.num_ends_left, place.retries_left - 1)
        return RoundPlace(place.num_ends_left + self.period, round_retries)

    def complaint_about(self, place: RoundPlace) -> str:
        """Say why no group with this schedule hands out its state at a place; empty where one does.

        It does so between two iterations, at PREPARE, and at SYNC where the round is tried again. A group that waits for the
        others' round adds a period each time that they give it up.
        """
        last = 1 + self.sync_delay
        rests = {ends % self.period for ends in (0, 1, last)}
        if place.num_ends_left % self.period in rests and place.num_ends_left <= last + _MOST_GIVEN_UP * self.period:
            return ""
        return (
            f"a place in its round that no group has with sync_every={self.sync_every}, {self.num_fragments} fragments and"
            f" fragment_sync_delay={self.sync_delay}: {place.num_ends_left} ends of iterations before the round is decided"
        )

    def fragment_of(self, num_committed: int) -> int:
        """Return the fragment that is exchanged after so many committed rounds."""
        return num_committed % self.num_fragments

    def patience_s(self, elapsed_s: float) -> float:
        """Return how long to wait for the others at PREPARE, `elapsed_s` after the round began here.

        As long as a round takes, and as long again as its averages are on their way: a slower one begins its round so much
        later, because it takes the decision at its own SYNC.
        """
        return elapsed_s * (self.period + self.sync_delay) / (self.period - self.sync_delay)

    def actions(self, inner_step: int) -> tuple[Action, ...]:
        """Return what follows on an inner step of a round; they are counted from 1."""
        prepares = (Action.PREPARE,) if inner_step == self.period - self.sync_delay else ()
        return (*prepares, Action.SYNC) if inner_step == self.period else prepares


def after_vote(*, committed: bool, is_behind: bool, retries_left: int) -> RoundOutcome:
    """Decide what becomes of a round that was voted on.

    Args:
        is_behind: this replica's state is not the newest, or not whole.
    """
    if committed:
        return RoundOutcome.APPLY
    if is_behind:
        return RoundOutcome.REJOIN
    return RoundOutcome.RETRY if retries_left > 0 else RoundOutcome.RESTORE


def whose_settings_count(num_rounds: Sequence[int]) -> int | None:
    """Return with whose settings of the outer optimizers a round is applied: of those longest in the job, the first.

    Args:
        num_rounds: of each contributor, one more than it has applied since it came into the job; 0: it has said nothing.
    """
    longest = max(num_rounds, default=0)
    return num_rounds.index(longest) if longest else None
