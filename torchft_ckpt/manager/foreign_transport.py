"""Transports of other libraries: wrapped so that the Manager has one kind of them, and used over the process group.

Such a transport has torchft's five methods and no more: it copies what it sends, receives from one rank of the source, and
cannot be cancelled. What it says of itself (`needs_process_group`) counts.

One that needs the process group sends to a rank, and waits for it to receive. Here a state has several sources, of which a
group wants one. So each group that comes for a state first tells its sources by the process group which of them it takes; the
others send nothing. All of it is done before the quorum counts as found, so those that train wait meanwhile, as long as the
process group lets them.
"""

from __future__ import annotations

import logging
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch

from torchft_ckpt.checkpointing import CheckpointTransport
from torchft_ckpt.core.coordination.messages import QuorumFormed

if TYPE_CHECKING:
    from torchft_ckpt.process_group import ProcessGroup

logger = logging.getLogger(__name__)

_TAG = 0x7F7


class ForeignTransport(CheckpointTransport[Any]):
    """A transport of another library behind our contract.

    Args:
        inner: has torchft's methods.
    """

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    @property
    def needs_process_group(self) -> bool:
        """Whether the transport says so; where it says nothing it may use the process group."""
        return bool(getattr(self._inner, "needs_process_group", True))

    @property
    def uses_memory_of_state(self) -> bool:
        return False

    def metadata(self) -> str:
        return str(self._inner.metadata())

    def send_checkpoint(self, dst_ranks: list[int], step: int, state_dict: Any, timeout: timedelta) -> None:
        self._inner.send_checkpoint(dst_ranks=dst_ranks, step=step, state_dict=state_dict, timeout=timeout)

    def disallow_checkpoint(self) -> None:
        self._inner.disallow_checkpoint()

    def recv_checkpoint(self, src_rank: int, metadata: str, step: int, timeout: timedelta) -> Any:
        return self._inner.recv_checkpoint(src_rank=src_rank, metadata=metadata, step=step, timeout=timeout)

    def shutdown(self, wait: bool = True) -> None:
        self._inner.shutdown(wait=wait)


def as_ours(transport: Any, party: str) -> CheckpointTransport[Any]:
    """Return a transport as one of ours. One of another library is wrapped, and a warning says what that costs.

    Args:
        transport: with torchft's methods.
        party: this replica, for the warning.
    """
    if isinstance(transport, CheckpointTransport):
        return transport
    logger.warning(
        "%s moves its state by %s.%s, which is not of this library: where it is torchft's it unpickles what it receives,"
        " which executes what a peer sends; and all groups wait until a state is through. HTTPTransport does neither",
        party,
        type(transport).__module__,
        type(transport).__qualname__,
    )
    return ForeignTransport(transport)


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
