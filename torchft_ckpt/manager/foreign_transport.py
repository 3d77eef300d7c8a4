"""Wraps a transport that is no `CheckpointTransport`, as torchft's own are not, so that the Manager has one kind of them.

Such a transport has torchft's five methods and no more: it copies what it sends, receives from one rank of the source, and cannot
be cancelled. What it says of itself (`needs_process_group`) counts.
"""

from __future__ import annotations

import logging
from datetime import timedelta
from typing import Any

from torchft_ckpt.checkpointing import CheckpointTransport

logger = logging.getLogger(__name__)


class ForeignTransport(CheckpointTransport[Any]):
    """A transport of another library behind our contract.

    Args:
        inner: has torchft's methods.
    """

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    @property
    def needs_process_group(self) -> bool:
        """What the transport says; where it says nothing it may use the process group."""
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
