"""The work of a rank while no step is open: it gets the newest state outside of quorums, gives it, and asks for it.

The others, who train, do not notice. A state can be got so where it changes only at moments that its owner announces
(`StateRegistry.is_explicitly_locked`): then it can be offered from one of them to the next, to nobody in particular, and
whoever is behind takes it from there.

All ranks of a group come to one state: the group asks as one, each rank fetches what all of them were told, and it is the
lighthouse's answer to the next question that says whether all of them hold it. Until then none of them is done.
"""

from __future__ import annotations

import logging
import time
from datetime import timedelta

from torchft_ckpt.core.training.ledger import Waits
from torchft_ckpt.errors import TransferTimeoutError
from torchft_ckpt.manager.rank_config import RankConfig
from torchft_ckpt.manager.recovery import Recovery
from torchft_ckpt.manager.serving import StateServing
from torchft_ckpt.manager.state_registry import StateRegistry
from torchft_ckpt.manager.step import Steps
from torchft_ckpt.manager.step_client import StepClient
from torchft_ckpt.manager.timekeeping import Timekeeper

logger = logging.getLogger(__name__)

_PAUSE_S = 0.2
"""Between two attempts, unless something is heard."""
_LAST_ANSWER_S = 5.0
_NOBODY = "nobody hands a state over"


class BetweenSteps:
    """Carries out the methods of `Manager` of the same names, between two steps.

    On the training thread; each method but `offer_state` abandons an open step.
    """

    def __init__(
        self,
        client: StepClient,
        steps: Steps,
        *,
        registry: StateRegistry,
        serving: StateServing,
        recovery: Recovery,
        timekeeper: Timekeeper,
        rank_config: RankConfig,
    ) -> None:
        self._client = client
        self._steps = steps
        self._registry = registry
        self._serving = serving
        self._recovery = recovery
        self._timekeeper = timekeeper
        self.has_finished = False
        """This group has said that it has made its last step."""
        self._rank_config = rank_config

    def catch_up(self, limit: timedelta, *, moving: bool = False) -> bool:
        """Fetch and load the newest state that anybody is known to hold; return whether all ranks of this group hold it now.

        Args:
            limit: of all attempts together.
            moving: take the state over from somebody who stands still to hand it over, whatever changes it.
        """
        self._steps.leave()
        if not (self._registry.is_explicitly_locked or moving):
            return False  # in the second case nobody offers it
        with self._timekeeper.waiting(Waits.STATE_BESIDE):
            return self._catch_up(limit, moving)

    def _catch_up(self, limit: timedelta, moving: bool) -> bool:
        client = self._client
        until = time.monotonic() + limit.total_seconds()
        why: object = "the lighthouse does not answer"
        while time.monotonic() < until:
            located = client.locate(until, takes_over=moving)
            if located is None:
                break
            now = client.view()
            if moving and located.version.proven and not located.is_held and not located.sources:
                why = _NOBODY  # yet
                client.pause(_PAUSE_S)
                continue
            if located.is_held or not located.version.proven:
                return located.is_held
            if now.restored and not located.version.step:
                return False  # what others began with does not outweigh a checkpoint that was restored on purpose
            if not located.sources:
                return False
            if located.version == now.version:
                why = "another rank of this group does not come to hold it"
                continue
            # An older state is one that the job could still go back to, until the newer one is here whole.
            in_place = not now.version.proven
            left = timedelta(seconds=max(0.0, until - time.monotonic()))
            failure = self._recovery.receive(located, in_place, left)
            if failure is None:
                client.caught_up(located.version)
                self._recovery.note_healed(located)
                logger.info("%s caught up with step %d", client.replica_id, located.version.step)
                continue
            why = failure
            logger.warning("%s: catching up with step %d failed: %s", client.replica_id, located.version.step, failure)
            client.pause(_PAUSE_S)
        if why == _NOBODY and not client.view().torn:
            return False
        message = f"{client.replica_id} could not catch up within {limit.total_seconds():g} s: {why}"
        failed = TransferTimeoutError(message, party=client.replica_id)
        if client.view().torn:
            failed.mark_torn()
        raise failed

    def hand_over(self, limit: timedelta) -> bool:
        """Serve the state of now until another group has taken it over; return whether one has."""
        self._steps.leave()
        now = self._client.view()
        if not now.version.proven or now.is_behind or now.is_on_trial:
            return False
        self._serving.offer(now.version, moving=True)
        with self._timekeeper.waiting(Waits.NEWCOMER):
            return self._is_taken_over(limit)

    def _is_taken_over(self, limit: timedelta) -> bool:
        client, now = self._client, self._client.view()
        until = time.monotonic() + limit.total_seconds()
        is_over = False
        while not is_over:
            # A group that takes the state after the last question is told that nobody hands it over.
            is_over = time.monotonic() >= until
            located = client.locate(until + _LAST_ANSWER_S * is_over, hands_over=not is_over)
            if located is not None and located.taken_by:
                logger.info("%s handed step %d over to %s", client.replica_id, now.version.step, located.taken_by)
                return True
            if not is_over:
                client.pause(_PAUSE_S)
        return False

    def offer_state(self) -> None:
        """Serve the state of now to whoever catches up, until it changes, where it has a name."""
        now = self._client.view()
        if now.version.proven and not now.is_behind and not now.is_on_trial:
            self._serving.offer(now.version)

    def newest_step_of_peers(self, limit: timedelta) -> int | None:
        """Return the newest step that another living group is known to hold; None: none does, or nobody answered."""
        self._steps.leave()
        located = self._client.locate(time.monotonic() + limit.total_seconds())
        return located.version.step if located is not None and located.sources else None

    def finish(self, limit: timedelta) -> bool:
        """Say that this group has made its last step; return whether the job is finished."""
        self._steps.leave()
        client, limit_s = self._client, limit.total_seconds()
        located = client.locate(time.monotonic() + limit_s, has_finished=True)
        self.has_finished = True
        if located is None:
            logger.warning(
                "%s has finished, and the lighthouse did not answer within %g s (%s): a group that comes late waits",
                client.replica_id,
                limit_s,
                client.link.waiting_for(),
            )
            return False
        step = client.view().version.step
        ends = "the job is finished" if located.is_finished else "other groups train on, or have not said so yet"
        logger.info("%s of job %s has finished at step %d: %s", client.replica_id, self._rank_config.job, step, ends)
        return located.is_finished
