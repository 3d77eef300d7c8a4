"""Connects one rank to its group: rank 0 runs the group's manager service, and any other rank connects to that."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import TypeAlias

from torchft_ckpt.coordination import GroupService, RankSession
from torchft_ckpt.core.meeting import Claim
from torchft_ckpt.core.messages import GroupToRank, Hello
from torchft_ckpt.errors import CoordinationError
from torchft_ckpt.manager.launch import Launch

Link: TypeAlias = "GroupService | RankSession"


def open_link(
    launch: Launch,
    rank_0: Claim | None,
    *,
    hello: Callable[[], Hello],
    on_message: Callable[[GroupToRank], None],
    on_refused: Callable[[CoordinationError], None],
    heartbeat_interval: timedelta,
    connect_timeout: timedelta,
) -> Link:
    """Connect, and begin to hear.

    Args:
        launch: this process.
        rank_0: what rank 0 of this group has announced; None: this is rank 0.
        hello: makes the first message of each connection to the lighthouse.
        on_message: called with each message, on the thread of the connection; it must not block.
        on_refused: called when the lighthouse refuses this group from now on.
        heartbeat_interval, connect_timeout: of the connection.

    Raises:
        LighthouseUnreachableError, AuthenticationError, ProtocolVersionError, RefusedError, AddressInUseError,
        GroupBrokenError: as their names say; nothing is left running.
    """
    if rank_0 is not None:
        return RankSession(
            address=rank_0.manager_address,
            group_rank=launch.group_rank,
            on_message=on_message,
            token=launch.token,
            replica_id=rank_0.replica_id,
            heartbeat_interval=heartbeat_interval,
            connect_timeout=connect_timeout,
        )
    service = GroupService(
        world_size=launch.group_world_size,
        lighthouse_addr=launch.lighthouse_addr,
        hello=hello,
        on_message=on_message,
        on_refused=on_refused,
        hostname=launch.host.address,
        port=launch.manager_port,
        job=launch.job,
        token=launch.token,
        replica_id=launch.replica_id,
        heartbeat_interval=heartbeat_interval,
        connect_timeout=connect_timeout,
    )
    if launch.group_store is not None:
        try:
            launch.group_store.announce(service.address)
        except BaseException:
            service.shutdown("the other ranks of its group cannot find it")
            raise
    return service
