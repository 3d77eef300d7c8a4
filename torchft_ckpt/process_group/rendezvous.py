"""Lets the members of a group meet at a store before their backend connects them.

Backends wait for each other too, but cannot be interrupted in it, and do not say who was absent.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator

from torch.distributed import Store

from torchft_ckpt.process_group.session import Session
from torchft_ckpt.process_group.sockets import shutdown_awaited_connection
from torchft_ckpt.process_group.store import StoreAddress, StoreConnection, StorePool, enter_store, wait_for_keys

PREPARE_TIMEOUT_S = 30.0

# One for the process: a connection serves one configure after the other.
_stores = StorePool()


def prepare_store(store_addr: str) -> threading.Event:
    """Begin to connect to a store where members may have to meet soon; the event tells when that is over, well or not."""
    return _stores.prepare(StoreAddress.parse(store_addr), PREPARE_TIMEOUT_S)


@contextlib.contextmanager
def rendezvous(
    session: Session, address: StoreAddress, rank: int, world_size: int, timeout_s: float
) -> Iterator[tuple[StoreConnection, Store]]:
    """Announce this rank, wait for all others, and lend the store to the backend.

    Args:
        session: on whose connecting thread this runs; its end gives up the waiting.
        address: where to meet; the prefix must never have been used before.
        rank: this member.
        world_size: how many are to come.
        timeout_s: for all of it.

    Raises:
        ProcessGroupConfigureError: the store cannot be reached, or somebody did not come; the message says who.
        ProcessGroupAbortedError: the session ended.
    """
    deadline = time.monotonic() + timeout_s
    thread = threading.current_thread()

    def is_wanted() -> bool:
        return session.error is None

    def key(member: int) -> str:
        return f"torchft_ckpt/came/{member}"

    with enter_store(_stores, address, key(rank), "", timeout_s, is_wanted) as (connection, store):

        def interrupt() -> None:
            # Afterwards its id may be another thread's.
            if thread.is_alive() and thread.native_id is not None:
                shutdown_awaited_connection(thread.native_id, connection.peers)

        session.on_end(interrupt)
        others = {key(member): f"rank {member}" for member in range(world_size) if member != rank}
        wait_for_keys(store, others, deadline, is_wanted)
        yield connection, store
