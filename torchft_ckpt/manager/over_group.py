"""Moves a state by a transport that needs the process group: torchft's `PGTransport`, or another one of somebody else's.

Such a transport sends to a rank, and waits for it to receive. Here a state has several sources, of which it wants one. So each
group that comes for a state first tells its sources by the process group which of them it takes; the others send nothing.
All of it is done before the quorum counts as found, so who trains waits meanwhile, as long as the process group lets him.
"""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING

import torch

from torchft_ckpt.core.messages import QuorumFormed

if TYPE_CHECKING:
    from torchft_ckpt.process_group import ProcessGroup

_TAG = 0x7F7


def agree_who_sends(pg: ProcessGroup, formed: QuorumFormed, timeout: timedelta, *, wants: bool) -> list[int]:
    """Tell the sources of this group, or hear from those that it is a source of, who sends to whom.

    Every member calls it once a quorum, when the process group is connected. Groups beyond the quorum take no part.

    Args:
        pg: connected for this quorum.
        formed: the quorum.
        timeout: for each of the messages.
        wants: whether this group, if it has sources, is about to receive from the first of them.

    Returns:
        the replica ranks that want the state from this group.

    Raises:
        ProcessGroupError: a member was lost, or did not come in time.
    """
    size, device = formed.replica_world_size, _device_of(pg)
    first = formed.sources[0].replica_rank if wants and formed.sources else None
    told = [source.replica_rank for source in formed.sources if formed.replica_rank < size]
    heard = {rank: torch.zeros(1, dtype=torch.int64, device=device) for rank in formed.destinations if rank < size}
    works = [pg.send([torch.tensor([rank == first], dtype=torch.int64, device=device)], rank, _TAG) for rank in told]
    works += [pg.recv([answer], rank, _TAG) for rank, answer in heard.items()]
    for work in works:
        work.wait(timeout)
    return [rank for rank, answer in heard.items() if answer.item()]


def _device_of(pg: ProcessGroup) -> torch.device:
    accelerator = torch.accelerator.current_accelerator() if "nccl" in pg.getBackendName().lower() else None
    return accelerator or torch.device("cpu")
