"""Who writes what of a state of which each replica group holds some tensors as its own."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from torchft_ckpt.checkpointing.durable.saving.capture import CapturedState
from torchft_ckpt.checkpointing.durable.saving.dividing import own_share
from torchft_ckpt.checkpointing.durable.saving.holdings import HoldingsIndex
from torchft_ckpt.checkpointing.durable.saving.part_writer import PartShare, Writers
from torchft_ckpt.checkpointing.lock import StateDictLock
from torchft_ckpt.checkpointing.serving.buffers import BufferPool
from torchft_ckpt.core.boxes import whole
from torchft_ckpt.core.coverage import subtract
from torchft_ckpt.core.saving import Member

NUM_RANKS = 2


def shares_of(num_replicas: int, of_group: set[str]) -> dict[Member, PartShare]:
    """What each member writes of a state that all of them hold whole, but for the tensors that are each group's own."""
    shares = {}
    for replica in range(num_replicas):
        for rank in range(NUM_RANKS):
            state: dict[str, Any] = {
                "weight": torch.zeros(3000, 128),
                "statistics": torch.zeros(512, 128),
                "count": torch.tensor(3),
            }
            state["array"] = np.zeros((512, 128))
            captured = CapturedState(
                state,
                step=1,
                own=None,
                lock=StateDictLock(),
                pool=BufferPool(64 * 1024),
                index=HoldingsIndex(rank, NUM_RANKS),
                of_group={id(state[name]) for name in of_group},
            )
            writers = Writers(num_replicas, NUM_RANKS, "")
            shares[Member(replica, rank)] = own_share(captured, writers, Member(replica, rank), range(num_replicas))
            captured.close()
    return shares


@pytest.mark.parametrize("num_replicas", [1, 2, 3])
@pytest.mark.parametrize("of_group", [set(), {"statistics", "count"}, {"weight", "statistics", "count"}])
def test_what_each_group_has_its_own_of_comes_from_the_first_and_all_is_written_once(
    num_replicas: int, of_group: set[str]
) -> None:
    shapes = {"weight": (3000, 128), "statistics": (512, 128), "count": (), "array": (512, 128)}
    shares = shares_of(num_replicas, of_group)
    for place, (name, shape) in enumerate(shapes.items()):
        boxes = [box for share in shares.values() for tensor, box in share.boxes if tensor == place]
        assert not subtract([whole(shape)], boxes)
        assert sum(box.volume for box in boxes) == whole(shape).volume
        writers = {member.replica for member, share in shares.items() if any(at == place for at, _ in share.boxes)}
        assert name not in {*of_group, "array"} or writers == {0}
    if num_replicas < 3 and "weight" not in of_group:  # there is enough of what others can write
        itemsizes = (4, 4, 8, 8)
        loads = [sum(box.volume * itemsizes[at] for at, box in share.boxes) for share in shares.values()]
        assert max(loads) <= 1.1 * sum(loads) / len(loads) + 64 * 1024, loads
