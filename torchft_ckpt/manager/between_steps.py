"""Getting the newest state, and giving it, outside of quorums: between two steps of the others, who do not notice.

It works where the state changes only at moments that its owner announces (`StateRegistry.is_kept_still`): then it can be
offered from one of them to the next, to nobody in particular, and whoever is behind takes it from there.

All ranks of a group come to one state: the group asks as one, each rank fetches what all of them were told, and it is the
lighthouse's answer to the next question that says whether all of them hold it. Until then none of them is done.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from torchft_ckpt.checkpointing import CheckpointTransport
from torchft_ckpt.core.messages import RankToGroup, StateLocated, StateVersion
from torchft_ckpt.errors import StateDictLoadError, StateMismatchError, TransferTimeoutError, UnsupportedValueError
from torchft_ckpt.manager.conversation import Conversation
from torchft_ckpt.manager.healing import Healing
from torchft_ckpt.manager.state_registry import StateRegistry

logger = logging.getLogger(__name__)

_PAUSE_S = 0.2
"""Between two attempts, unless something is heard."""
_OFFER_FOR = timedelta(days=30)
"""Longer than anybody's inner phase: an offer ends when the state changes."""


def catch_up(
    talk: Conversation,
    registry: StateRegistry,
    healing: Healing,
    *,
    send: Callable[[RankToGroup], None],
    take_state: Callable[[], None],
    limit: timedelta,
    may_receive_in_place: bool,
    moving: bool = False,
) -> bool:
    """Fetch and load the newest state that anybody is known to hold. On the training thread; no step is open.

    Args:
        talk: with the group and the lighthouse.
        registry: what is to be loaded, and what is here already.
        healing: fetches.
        send: takes a message to the group.
        take_state: waits for what is fetched and loads it; raises what `Manager.should_commit` does.
        limit: of all attempts together.
        may_receive_in_place: where there is no state of worth here.
        moving: also where steps of optimizers change the state: somebody stands still to hand it over.

    Returns:
        whether all ranks of this group hold it now. If not, there is none to be had.

    Raises:
        TransferTimeoutError: it could not be had in time.
        GroupBrokenError, RefusedError: this group cannot go on.
    """
    if not registry.is_kept_still and not moving:
        return False  # nor is it anywhere else: nobody offers it
    until = time.monotonic() + limit.total_seconds()
    why: object = "the lighthouse does not answer"
    while time.monotonic() < until:
        located = talk.locate(send, until)
        if located is None:
            break
        held = talk.replica.version
        if located.is_held or not located.version.proven:
            return located.is_held
        if talk.replica.restored and not located.version.step:
            return False  # what others began with does not outweigh a checkpoint that was restored on purpose
        if located.version == held:
            why = "another rank of this group does not come to hold it"
            continue
        if not located.sources:
            return False
        # An older state is one that the job could still go back to, until the newer one is here whole.
        in_place = may_receive_in_place and not held.proven
        failure = _fetch(healing, registry, take_state, located, in_place, until)
        if failure is None:
            talk.caught_up(located.version)
            logger.info("%s caught up with step %d", talk.replica_id, located.version.step)
            continue
        why = failure
        logger.warning("%s: catching up with step %d failed: %s", talk.replica_id, located.version.step, failure)
        talk.pause(_PAUSE_S)
    message = f"{talk.replica_id} could not catch up within {limit.total_seconds():g} s: {why}"
    failed = TransferTimeoutError(message, party=talk.replica_id)
    if talk.replica.torn:
        failed.mark_torn()
    raise failed


def _fetch(
    healing: Healing,
    registry: StateRegistry,
    take_state: Callable[[], None],
    located: StateLocated,
    in_place: bool,
    until: float,
) -> Exception | None:
    """One attempt; returns why it failed, if another one may help."""
    left = timedelta(seconds=max(0.0, until - time.monotonic()))
    healing.start(located, registry.capture_to_receive(), in_place, left)
    try:
        take_state()
    except (StateMismatchError, StateDictLoadError):
        raise
    except Exception as error:  # noqa: BLE001 - whatever a transport raises: asked again, until the time is up
        return error
    return None


def await_holder(talk: Conversation, *, send: Callable[[RankToGroup], None], limit: timedelta) -> bool:
    """Wait until a group comes to hold the newest state that did not at the beginning; whether one did.

    All ranks of this group, which holds it, wait together.

    Raises:
        GroupBrokenError, RefusedError: this group cannot go on.
    """
    until = time.monotonic() + limit.total_seconds()
    before: set[str] | None = None
    while time.monotonic() < until:
        located = talk.locate(send, until)
        if located is None:
            break
        holders = {source.replica_id for source in located.sources}
        if before is not None and holders - before:
            logger.info("%s handed step %d over to %s", talk.replica_id, located.version.step, min(holders - before))
            return True
        before = holders if before is None else before
        talk.pause(_PAUSE_S)
    return False


class StandingOffer:
    """The state of now, served until it changes.

    Args:
        transport: serves.
        registry: what is served.
    """

    def __init__(self, transport: CheckpointTransport[Any], registry: StateRegistry) -> None:
        self._transport = transport
        self._registry = registry
        self._version: StateVersion | None = None

    def open(self, version: StateVersion, own_state: dict[str, int | str], party: str, *, moving: bool = False) -> None:
        """Offer the state under its name. Nothing is copied or computed until somebody asks.

        `moving`: also where steps of optimizers change it, the first of which ends the offer.

        Raises:
            UnsupportedValueError: the state holds something that cannot be carried.
        """
        if (
            (not self._registry.is_kept_still and not moving)
            or self.is_of(version)
            or not isinstance(self._transport, CheckpointTransport)
            or self._transport.needs_process_group
        ):
            return  # torchft's own transports would copy all of it, and one over the process group reaches nobody now
        state = {"user": self._registry.capture_to_serve().state, "torchft": own_state}
        try:
            self._transport.send_checkpoint([], version.step, state, _OFFER_FOR)
        except UnsupportedValueError:
            raise
        except Exception:  # whatever a transport raises, it is the joiner's loss
            logger.exception("%s cannot offer step %d", party, version.step)
        else:
            self._version = version

    def is_of(self, version: StateVersion) -> bool:
        """Whether this state is offered now."""
        return version == self._version

    def end(self) -> bool:
        """The state is about to change: what is offered must not be trusted any more. Whether something was."""
        was_open, self._version = self._version is not None, None
        return was_open
