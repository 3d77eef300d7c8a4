"""Training process groups whose members change: Gloo and NCCL with an abort, and the small ones that DDP needs."""

from __future__ import annotations

from datetime import timedelta

from torch.distributed import PrefixStore, Store, TCPStore

from torchft_ckpt.compat.names import lookup
from torchft_ckpt.process_group.base import ProcessGroup
from torchft_ckpt.process_group.gloo import ProcessGroupGloo
from torchft_ckpt.process_group.nccl import ProcessGroupNCCL
from torchft_ckpt.process_group.store import StoreAddress
from torchft_ckpt.process_group.wrapper import (
    CompletedWork,
    ManagedProcessGroup,
    ProcessGroupDummy,
    ProcessGroupWrapper,
)

__all__ = [
    "CompletedWork",
    "ManagedProcessGroup",
    "ProcessGroup",
    "ProcessGroupDummy",
    "ProcessGroupGloo",
    "ProcessGroupNCCL",
    "ProcessGroupWrapper",
    "create_store_client",
]


def create_store_client(store_addr: str, timeout: timedelta) -> Store:
    """Return a client of the store at `host:port/prefix` (`[v6]:port/prefix`), below that prefix, as `configure` takes it.

    For loops that run their process groups themselves; each call is a connection of its own.

    Args:
        timeout: of the connection, and of each operation.

    Raises:
        ConfigError: there is no port.
        torch.distributed.DistNetworkError: nobody answered in time.
    """
    address = StoreAddress.parse(store_addr)
    store = TCPStore(
        host_name=address.host, port=address.port, is_master=False, wait_for_workers=False, timeout=timeout
    )
    return PrefixStore(address.prefix, store)


__getattr__ = lookup(__name__)
