"""A replica that learns late that it is behind has captured nothing: what needs that is no error of its script."""

from __future__ import annotations

import enum
from datetime import timedelta
from typing import Any

import pytest

from torchft_ckpt import HTTPTransport
from torchft_ckpt.core.coordination.messages import QuorumFormed, Role, Source, StateVersion
from torchft_ckpt.errors import CheckpointError, StateMismatchError
from torchft_ckpt.manager.healing import Healing
from torchft_ckpt.manager.state_registry import OwnState

SHORT = timedelta(seconds=20)


class Phase(enum.Enum):
    WARM_UP = 1
    DECAY = 2


def test_a_class_that_only_the_state_here_has_costs_the_step_and_is_there_for_the_next() -> None:
    source: HTTPTransport[Any] = HTTPTransport(SHORT)
    transport: HTTPTransport[Any] = HTTPTransport(SHORT)
    version = StateVersion(step=3, quorum_id=1, epoch="e")
    own = {"step": 3, "batches_committed": 3, "quorum_id": 1, "epoch": "e"}
    source.send_checkpoint([1], 3, {"user": {"default": {"phase": Phase.DECAY}}, "torchft": own}, SHORT)
    formed = QuorumFormed(
        request_id=1,
        quorum_id=1,
        epoch="e",
        version=version,
        role=Role.JOINER,
        replica_rank=1,
        replica_world_size=2,
        contributor_rank=None,
        num_contributors=1,
        num_voters=1,
        store_address="",
        sources=[Source(replica_id="a", replica_rank=0, checkpoint_addresses=[source.metadata()])],
    )
    healing = Healing(transport, SHORT, rank=0, world_size=1, own=OwnState())
    healing.start(formed, None, in_place=False)
    with pytest.raises(CheckpointError, match=r"heals in the next.*user\.default\.phase") as caught:
        healing.wait()
    assert not isinstance(caught.value, StateMismatchError)
    assert healing.needs_local
    healing.start(formed, {"default": {"phase": Phase.WARM_UP}}, in_place=False)
    assert healing.wait()["user"] == {"default": {"phase": Phase.DECAY}}
    healing.shutdown()
    for end in (source, transport):
        end.shutdown()
