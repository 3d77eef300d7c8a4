"""The shells around `core` that groups and lighthouse talk through: aiohttp WebSockets, one event-loop thread each.

    loop_thread            an asyncio loop in a thread of its own, started and ended with its owner
    channel                one WebSocket: ordered bounded sending, decoded receiving, closing
    lighthouse_server      the lighthouse as a service
    lease_keeper           keeps the lease of a lighthouse that is one of several
    etcd_store             that lease, in etcd
    lighthouse_connection  a group's one connection to it, kept up
    group_service          group rank 0: this group's ranks on one side, the lighthouse on the other
    rank_session           group ranks above 0: the connection to their group's service
    asking                 who is in no group asks: what a lighthouse knows, where a job's state is

They receive, hand to the core, carry out what it says and arm one timer. No torch is imported here.
"""

from torchft_ckpt.compat.names import lookup
from torchft_ckpt.coordination.group_service import GroupService
from torchft_ckpt.coordination.lighthouse_server import LighthouseServer
from torchft_ckpt.coordination.rank_session import RankSession

__all__ = ["GroupService", "LighthouseServer", "RankSession"]

__getattr__ = lookup(__name__)
