"""Serves the state that is here: to the replicas that a quorum names, or between two steps to whoever comes for it.

The lock of the state tells the transport that the state is about to change. A transport of ours that brings the lock sees its
writers by itself; any other one is told by the same lock.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from torchft_ckpt.checkpointing import CheckpointTransport, StateDictLock
from torchft_ckpt.checkpointing.state.versions import Counted, is_changed
from torchft_ckpt.core.coordination.messages import StateVersion
from torchft_ckpt.errors import UnsupportedValueError
from torchft_ckpt.manager.state_registry import OwnState, StateRegistry
from torchft_ckpt.manager.volatile import StateToServe

logger = logging.getLogger(__name__)

_OFFER_FOR = timedelta(days=30)
"""Longer than anybody's inner phase: an offer ends when the state changes."""


class StateServing:
    """Serves this rank's state.

    Args:
        lock: under which the state is changed.
        lease: how long a state is served to those that a quorum names.
        party: this replica, for the log.
    """

    def __init__(
        self,
        transport: CheckpointTransport[Any],
        registry: StateRegistry,
        own: OwnState,
        lock: StateDictLock,
        *,
        lease: timedelta,
        party: str,
    ) -> None:
        self._transport = transport
        self._registry = registry
        self._own = own
        self._lease = lease
        self._party = party
        self._offered: StateVersion | None = None
        self._served: StateVersion | None = None
        """The state that is served for a quorum, or before it."""
        if transport.state_lock is not lock:
            lock.add_before_write(transport.disallow_checkpoint)

    def begin_step(self, version: StateVersion, *, is_open: bool) -> None:
        """A step begins from this state. Nobody who comes now gets the state that was served under its name for a step before.

        After a step that did not count what no optimizer owns may be another. A state that is offered changes at moments alone
        that its owner announces; one that groups start with gets another name before it is given for a step.

        Args:
            is_open: nothing has changed since in what is served, and the step before was not voted on, so those that its quorum
                told to come may still come. An outer loop asks for the quorum of its first round so, while others receive the
                state with which they begin.
        """
        if version == self._offered and not version.proven:
            self._served, self._offered = version, None
        if version == self._served and self._offered is None:
            self._transport.retire_checkpoint(keeps_awaited=is_open)

    def serve(
        self,
        version: StateVersion,
        captured: StateToServe | None,
        counted: Sequence[Counted],
        destinations: Sequence[int],
        *,
        for_learners: bool = False,
        is_first: bool = False,
    ) -> None:
        """Serve the state with which this rank has asked for a quorum. On the quorum thread.

        Whatever fails, this replica's step goes on: the loss is the receiver's.

        Args:
            version: its name.
            captured: None: it is captured now.
            counted: versions of parameters as the step began, where the state was not captured then.
            destinations: the replica ranks that come for it, or the places of those that the quorum is held for.
            for_learners: they receive it while the step goes on.
            is_first: it is the job's first one.

        Raises:
            UnsupportedValueError: the state holds something that cannot be carried. Only as a job starts.
        """
        if version == self._offered:
            return
        try:
            if captured is None:
                # In synchronous mode the training thread waits for us. Otherwise it may be in its forward pass; the lighthouse
                # asks for this only where nobody else could serve.
                captured = self._registry.capture_to_serve()
                if is_changed(counted):
                    logger.warning(
                        "%s cannot serve step %d: a parameter was written to in place since zero_grad, without the write side of"
                        " the state dict lock",
                        self._party,
                        version.step,
                    )
                    return
            self._send(version, captured, destinations, outlives_step=for_learners)
        except Exception as error:  # whatever a transport raises
            if isinstance(error, UnsupportedValueError) and is_first:
                raise  # a job whose state cannot be moved should say so when it starts
            logger.exception("%s cannot serve step %d", self._party, version.step)

    def serve_shown(self, version: StateVersion, captured: StateToServe, *, keeps_awaited: bool) -> bool:
        """Serve the state of now, which is shown, before its quorum, for replicas that turn out to hold another one.

        On the training thread, between two steps. Nothing is copied or staged before one comes, and nothing is kept for one that
        has not come when the state changes. What a quorum wants served is served anew.

        Args:
            keeps_awaited: do not serve it beside what is served under its name, if somebody receives that, or is to.

        Returns:
            whether it may be asked for.
        """
        if keeps_awaited and self._transport.retire_checkpoint(keeps_awaited=True):
            return False
        try:
            self._send(version, captured, [])
        except Exception:  # whatever a transport raises, it is the loss of those that come in
            logger.exception("%s cannot serve step %d before its quorum", self._party, version.step)
        return True

    def _send(
        self, version: StateVersion, captured: StateToServe, destinations: Sequence[int], *, outlives_step: bool = False
    ) -> None:
        own = {**self._own.served(version), **captured.own}
        self._served = version
        self._transport.send_captured(
            list(destinations),
            version.step,
            {"user": captured.state, "torchft": own},
            self._lease,
            versions=captured.versions,
            outlives_step=outlives_step,
        )

    def offer(self, version: StateVersion, *, moving: bool = False) -> None:
        """Offer the state under its name, until it changes, to whoever catches up. Nothing is copied until somebody asks.

        It does so where only the owner of the state changes it, between two steps.

        Args:
            moving: also where steps of optimizers change it, the first of which ends the offer.

        Raises:
            UnsupportedValueError: the state holds something that cannot be carried.
        """
        if (
            (not self._registry.is_explicitly_locked and not moving)
            or version == self._offered
            or not self._transport.uses_memory_of_state
        ):
            return
        captured = self._registry.capture_to_serve()
        state = {"user": captured.state, "torchft": {**self._own.served(version), **captured.own}}
        try:
            self._transport.send_checkpoint([], version.step, state, _OFFER_FOR)
        except UnsupportedValueError:
            raise
        except Exception:  # whatever a transport raises, it is the receiver's loss
            logger.exception("%s cannot offer step %d", self._party, version.step)
        else:
            self._offered = version

    def end_offer(self) -> None:
        """The state is about to change: it is not offered any more. The lock tells the transport."""
        self._offered = None

    def withdraw(self) -> None:
        """Stop serving: nobody can use what was served any more."""
        self._served = None
        self._transport.withdraw_checkpoint()
