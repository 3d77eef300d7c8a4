"""Transports of other libraries, wrapped so that the Manager has one kind of them.

Such a transport has torchft's methods and no more: it copies what it sends, receives from one rank of the source, and cannot be
cancelled. One that sends over the process group is refused: a group receives its state before it is in one.
"""

from __future__ import annotations

import logging
from datetime import timedelta
from typing import Any

from torchft_ckpt.checkpointing import CheckpointTransport
from torchft_ckpt.errors import ConfigError

logger = logging.getLogger(__name__)


class ForeignTransport(CheckpointTransport[Any]):
    """A transport of another library behind our contract.

    Args:
        inner: has torchft's methods.
    """

    def __init__(self, inner: Any) -> None:
        self._inner = inner

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

    Raises:
        ConfigError: it sends over the process group.
    """
    kind = type(transport)
    is_ours = isinstance(transport, CheckpointTransport)
    is_torchfts = not is_ours and any(base.__name__ == "PGTransport" for base in kind.__mro__)
    if getattr(transport, "needs_process_group", is_torchfts):
        raise ConfigError(
            f"{kind.__module__}.{kind.__qualname__} sends over the process group, and a group has its state before it is in one:"
            " use HTTPTransport, the default, or torchft_ckpt.checkpointing.PGTransport, which is made with the same arguments",
            party="checkpoint_transport",
        )
    if is_ours:
        return transport
    logger.warning(
        "%s moves its state by %s.%s, which is not of this library: where it is torchft's it unpickles what it receives, which"
        " executes what a peer sends. HTTPTransport does not",
        party,
        kind.__module__,
        kind.__qualname__,
    )
    return ForeignTransport(transport)
