"""Manager services of replica groups, for tests of what they take and say."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from torchft_ckpt.coordination.group_service import GroupService
from torchft_ckpt.core.coordination.messages import PROTOCOL_VERSION, Hello


def make_group_service(lighthouse_addr: str, *, world_size: int = 2, **changes: Any) -> GroupService:
    """Return the service of the group `group:1`, at 127.0.0.1 and a free port, without a token; `changes` as it takes them."""
    usual: dict[str, Any] = {
        "hello": lambda: Hello(protocol=PROTOCOL_VERSION, replica_id="group:1", group_world_size=world_size),
        "on_message": lambda message: None,
        "on_refused": lambda error: None,
        "hostname": "127.0.0.1",
        "port": 0,
        "job": "default",
        "token": "",
        "heartbeat_interval": timedelta(seconds=1),
        "connect_timeout": timedelta(seconds=30),
        "replica_id": "group:1",
    }
    return GroupService(world_size=world_size, lighthouse_addr=lighthouse_addr, **usual | changes)
