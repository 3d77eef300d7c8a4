"""Counts how the steps of this process ended, and says so: lines of steps, and warnings of what repeats itself."""

from __future__ import annotations

import logging
import textwrap
import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from torchft_ckpt.core.coordination.messages import CommitVote, Outcome, Role
from torchft_ckpt.core.coordination.replica import ReplicaView
from torchft_ckpt.core.training.discards import DiscardRun
from torchft_ckpt.core.training.ledger import Account, decide_fate
from torchft_ckpt.errors import MaxRetriesExceededError

logger = logging.getLogger(__name__)

TOO_FEW_LOG_S = 10.0
SILENT_LOG_S = 10.0
"""A group that would speak for the job says so for the first time after this, and then again in each minute."""
SILENT_AGAIN_S = 60.0
_MAX_LINE_CHARS = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class ManagerStatistics:
    """Counts of the events in this process so far. Durations in seconds."""

    step: int
    quorum_id: int
    num_committed: int
    num_discarded: int
    num_left_behind: int
    num_healed: int
    last_heal_s: float
    num_corrected: int
    """Times that the others' state was loaded because what came out of a step differed from it."""


class StepOutcomes:
    """Counts how the steps ended, by the settings of `Manager`. Used by the training thread.

    A committed step has no line within `log_every` of the last one, if the same groups committed that one and nobody healed.
    A long reason is folded. `tells`: a file for what the votes show of the state at each step that counts.
    `is_spare`: a group that contributes nothing does so as a spare.
    """

    def __init__(
        self,
        party: str,
        *,
        min_replica_size: int,
        max_retries: int | None,
        log_every: timedelta = timedelta(0),
        tells: Path | None = None,
        is_spare: bool = False,
    ) -> None:
        self.counts = {outcome: 0 for outcome in Outcome}
        self._party = party
        self._min_replica_size = min_replica_size
        self._max_retries = max_retries
        self._is_spare = is_spare
        self._num_failed_in_a_row = 0
        self._discards = DiscardRun()
        self._too_few_since: float | None = None
        self._too_few_logged_at: float | None = None
        self._silent_since: float | None = None
        self._silent_says_at = 0.0
        self._has_warned_of_none = False
        self._tells = tells
        self._log_every_s = log_every.total_seconds()
        self._logged: tuple[Outcome, int, int, int] | None = None
        self._logged_at = 0.0

    def ended(self, vote: CommitVote, outcome: Outcome, reason: str, now: ReplicaView, took_s: float) -> None:
        """A step of this replica has ended, `took_s` after `start_quorum`; `now`: what the replica is after it.

        Raises:
            MaxRetriesExceededError: with `max_retries` set.
        """
        self.counts[outcome] += 1
        if outcome is Outcome.COMMIT:
            self._num_failed_in_a_row = 0
            self._warn_if_nothing_was_averaged(vote, now)
        elif not now.warms_up:
            self._num_failed_in_a_row += 1
        if self._tells is not None and outcome is Outcome.COMMIT:
            with self._tells.open("a") as file:
                file.write(f"{vote.step} {_shown(vote)}\n")
        self._log(vote, outcome, reason, now, took_s)
        self._warn_if_too_few(vote, now)
        self._warn_if_kept_silent(now)
        self._warn_of_discards(outcome, reason, now)
        if self._max_retries is not None and self._num_failed_in_a_row > self._max_retries:
            raise MaxRetriesExceededError(
                f"{self._num_failed_in_a_row} steps in a row were discarded, max_retries is {self._max_retries};"
                f" the last, step {vote.step}, because of: {reason}"
            )

    def fate(self, outcome: Outcome, now: ReplicaView) -> Account:
        """Return the account of a step of this replica that has ended so."""
        return decide_fate(
            outcome,
            is_learner=now.is_learner,
            contributes=now.participating_rank is not None,
            has_enough=now.num_participants >= self._min_replica_size,
            is_spare=self._is_spare,
        )

    def _log(self, vote: CommitVote, outcome: Outcome, reason: str, now: ReplicaView, took_s: float) -> None:
        formed = now.quorum
        if formed is None:
            return
        told = (outcome, vote.quorum_id, now.num_participants, formed.replica_world_size)
        heals = formed.role is Role.LEARNER and not formed.leaving
        at = time.monotonic()
        if outcome is Outcome.COMMIT and told == self._logged and at - self._logged_at < self._log_every_s:
            return
        self._logged, self._logged_at = told, at
        line = (
            f"step={vote.step} quorum={vote.quorum_id} participants={now.num_participants}/{formed.replica_world_size}"
            f" verdict={outcome.value} heal={'yes' if heals else 'no'} took={took_s:.3f}s"
        )
        if outcome is not Outcome.COMMIT:
            line = textwrap.fill(
                f"{line} reason={reason!r}",
                _MAX_LINE_CHARS,
                subsequent_indent="    ",
                break_long_words=False,
                break_on_hyphens=False,
            )
        elif vote.state_digests:
            line += f" state={_shown(vote)}"
        logger.info("%s", line)

    def _warn_if_nothing_was_averaged(self, vote: CommitVote, now: ReplicaView) -> None:
        if not any(vote.issued) and now.num_participants > 1 and not self._has_warned_of_none:
            self._has_warned_of_none = True
            logger.warning(
                "%s: step %d was committed by %d replica groups, and none of them averaged anything: their weights drift apart."
                " Wrap the model in DistributedDataParallel, call set_all_reduce_hook, or average gradients by allreduce",
                self._party,
                vote.step,
                now.num_participants,
            )

    def _warn_if_too_few(self, vote: CommitVote, now: ReplicaView) -> None:
        """Say now and then that steps are discarded for want of replica groups, and for how long already."""
        at = time.monotonic()
        if now.is_leaving or now.num_participants >= self._min_replica_size:
            self._too_few_since = self._too_few_logged_at = None
            return
        self._too_few_since = since = self._too_few_since or at
        if self._too_few_logged_at is None or at - self._too_few_logged_at >= TOO_FEW_LOG_S:
            self._too_few_logged_at = at
            logger.warning(
                "%s discards its steps, for %.1f s now: %s; waiting for more replica groups",
                self._party,
                at - since,
                vote.reason,
            )

    def _warn_if_kept_silent(self, now: ReplicaView) -> None:
        """Say now and then that nobody writes for the job, and on whose account."""
        at = time.monotonic()
        if not now.silent_for:
            self._silent_since = None
            return
        if self._silent_since is None:
            self._silent_since, self._silent_says_at = at, at + SILENT_LOG_S
        if at >= self._silent_says_at:
            self._silent_says_at = at + SILENT_AGAIN_S
            logger.warning(
                "%s has not spoken for the job for %.0f s: %s did so last, lives, and has not come to a step since, so it may"
                " still write. Checkpoints and logs of these steps are missing. If it hangs, end it",
                self._party,
                at - self._silent_since,
                now.silent_for,
            )

    def _warn_of_discards(self, outcome: Outcome, reason: str, now: ReplicaView) -> None:
        """Say once that steps are discarded again and again for one cause, and what would help."""
        if outcome is Outcome.COMMIT:
            self._discards.committed()
        elif self._too_few_since is None and not now.is_learner:
            warning = self._discards.discarded(reason)
            if warning is not None:
                logger.warning("%s: %s", self._party, warning)


def _shown(vote: CommitVote) -> str:
    """Return what a rank's vote has shown of the state with which its step began, as one word; empty: nothing."""
    return "".join(vote.state_digests).replace(" ", ".")
