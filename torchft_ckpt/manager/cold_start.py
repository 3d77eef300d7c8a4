"""Lets replica groups that start without a state meet, to look for one together: each learns its place, and the store.

The lighthouse decides who gathers (`core/coordination/cold_start.py`). No quorum is formed, no state is named, nothing is
fetched or served and no process group connected: the step that follows knows nothing of it.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from datetime import timedelta

import msgspec
from torch.distributed import PrefixStore, Store

from torchft_ckpt.core.coordination.messages import QuorumFormed, Role
from torchft_ckpt.core.coordination.replica import StepFacts, StepWishes
from torchft_ckpt.errors import ProcessGroupConfigureError, QuorumTimeoutError
from torchft_ckpt.manager.rank_config import RankConfig
from torchft_ckpt.manager.step_client import StepClient
from torchft_ckpt.process_group.store import StoreAddress, StorePool

logger = logging.getLogger(__name__)
_MIN_CONNECT_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ColdStartGroup:
    """The groups that look for a state together, and this rank's place among them."""

    replica_rank: int
    num_replicas: int
    group_rank: int
    group_world_size: int
    store: Store | None
    """Fresh, and the same for all ranks of all groups that gather; None where this rank is alone."""
    run: str
    """Names this time that they gather, over all jobs and lighthouses."""
    step_of_others: int | None
    """Others hold a state of this step, or are about to train from one: ask for a quorum, and heal. None: nobody does."""

    @property
    def member(self) -> int:
        """This rank's number among all ranks of all groups."""
        return self.replica_rank * self.group_world_size + self.group_rank

    @property
    def num_members(self) -> int:
        return self.num_replicas * self.group_world_size


def find_cold_start_group(
    client: StepClient, rank_config: RankConfig, *, address: str, limit: timedelta
) -> ColdStartGroup | None:
    """Ask who gathers, and connect to where they meet. On the training thread; no step is open. None: not learnt in time.

    Args:
        address: of this rank's transport.
        limit: of all of it.
    """
    until = time.monotonic() + limit.total_seconds()
    facts = StepFacts(store_address=rank_config.store_address, gathers=True)
    request = client.begin(StepWishes(allow_heal=False, waits=True), facts)
    client.send(msgspec.structs.replace(request, checkpoint_addresses=[address]))
    try:
        formed = client.await_plan(limit, 0).formed
        if not formed.gathers:
            logger.warning(
                "%s: other ranks of this group ask for a quorum; this one does not gather", client.replica_id
            )
            return None
        has_others = formed.replica_world_size * rank_config.group_world_size > 1 and formed.role is Role.IDLE
        store = _open_store(formed, until) if has_others else None
    except (QuorumTimeoutError, ProcessGroupConfigureError) as error:
        logger.warning("%s gathers with nobody: %s", client.replica_id, error)
        return None
    return ColdStartGroup(
        replica_rank=formed.replica_rank,
        num_replicas=formed.replica_world_size,
        group_rank=rank_config.group_rank,
        group_world_size=rank_config.group_world_size,
        store=store,
        run=f"{rank_config.job}/{formed.epoch}/gathering/{formed.quorum_id}",
        step_of_others=formed.version.step if formed.role is Role.LEARNER else None,
    )


def _open_store(formed: QuorumFormed, until: float) -> Store:
    """Connect to the store of the first who gathers. Nobody else uses the connection, so it ends with who holds it."""
    prefix = f"torchft_ckpt/{formed.epoch}/gathering/{formed.quorum_id}"
    address = StoreAddress.parse(f"{formed.store_address}/{prefix}")
    timeout_s = max(until - time.monotonic(), _MIN_CONNECT_S)
    with StorePool().borrow(address, timeout_s, is_wanted=lambda: True) as connection:
        return PrefixStore(address.prefix, connection.client)
