"""Answers to a request for a step, as a lighthouse gives them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torchft_ckpt.core.coordination.messages import (
    Answer,
    Given,
    Meeting,
    QuorumFormed,
    Role,
    Source,
    StateGiven,
    StateVersion,
    StepAlone,
)


def formed(request_id: int, version: StateVersion, *, role: Role = Role.HEALTHY, **more: Any) -> QuorumFormed:
    """A quorum of two."""
    fields = {
        "quorum_id": 5,
        "epoch": "e",
        "replica_rank": 0,
        "replica_world_size": 2,
        "contributor_rank": 0 if role is Role.HEALTHY else None,
        "num_contributors": 2,
        "num_voters": 2,
        "meets": Meeting(store_address="s:1"),
    }
    return QuorumFormed(request_id=request_id, version=version, role=role, **(fields | more))


def given(
    request_id: int, version: StateVersion, why: Given = Given.TO_LEARN, sources: Sequence[Source] = (), **more: Any
) -> StateGiven:
    """Load a state that others hold."""
    source = Source(replica_id="x", replica_rank=1, checkpoint_addresses=["http://x"])
    fields = {"quorum_id": 5, "epoch": "e", "replica_world_size": 2, "num_contributors": 2}
    return StateGiven(
        request_id=request_id, version=version, why=why, sources=list(sources) or [source], **(fields | more)
    )


def alone(request_id: int, version: StateVersion, **more: Any) -> Answer:
    """Compute a step alone."""
    fields = {"quorum_id": 5, "epoch": "e", "replica_world_size": 2, "num_contributors": 2}
    return StepAlone(request_id=request_id, version=version, **(fields | more))
