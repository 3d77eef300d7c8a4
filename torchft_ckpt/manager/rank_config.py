"""Makes this process one rank of one replica group: finds its addresses in arguments and environment, and its group.

There are two kinds of stores. Replica groups meet at one that rank 0 of a group hosts in its own process, at a port that the
system chooses: it is there for as long as that group lives, and no other group's end takes it away. The ranks of one group find
each other at `MASTER_ADDR` and `MASTER_PORT` (`group_store`): launched by `torchrun`, at its agent's store; launched by hand,
at one that rank 0 hosts there. A group of one rank needs nobody else's store, and asks for none, whatever its environment
names.

Rank 0 runs the group's manager service, and any other rank connects to that (`open_link`).
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeAlias

from torch.distributed import TCPStore

from torchft_ckpt import config
from torchft_ckpt.coordination import GroupService, RankSession
from torchft_ckpt.coordination.lighthouse_connection import resolve_job
from torchft_ckpt.core.coordination.meeting import Claim
from torchft_ckpt.core.coordination.messages import GroupToRank, Hello
from torchft_ckpt.errors import ConfigError, CoordinationError
from torchft_ckpt.manager.group_store import GroupStore
from torchft_ckpt.network import Host, choose_host, join_host_port, leave_to_parent, parse_addresses
from torchft_ckpt.tls import Tls, resolve_tls, say_what_stays_plain

logger = logging.getLogger(__name__)

Link: TypeAlias = GroupService | RankSession

_named: set[str] = set()
"""Variables that were named already: a process says it once, however many managers it makes."""
_PROCESS = uuid.uuid4().hex


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeouts:
    """Four waits that have nothing to do with each other."""

    collective: timedelta
    """Collectives and commit votes."""
    quorum: timedelta
    connect: timedelta
    transfer: timedelta


@dataclass(frozen=True, slots=True, kw_only=True)
class RankConfig:
    """The place of this process in the job, and the addresses of its partners."""

    name: str
    """Of the replica group, as it was given; empty: it has none."""
    replica_id: str
    group_rank: int
    group_world_size: int
    lighthouse_addr: str
    host: Host
    job: str
    token: str
    tls: Tls | None
    """None: plain HTTP is spoken."""
    manager_port: int
    store: TCPStore | None
    """Hosted here, at rank 0; it ends with the last reference."""
    store_address: str
    """`host:port` of it, as peers on other machines reach it; empty above rank 0."""
    group_store: GroupStore | None
    """Where the ranks of this group find each other; None: it has one rank."""

    def find_rank_0(self) -> Claim | None:
        """Wait until rank 0 of this group has announced its manager service; None: this is rank 0.

        Raises: as `GroupStore.find_rank_0`.
        """
        if self.group_rank == 0 or self.group_store is None:
            return None
        return self.group_store.find_rank_0(self.name)


def resolve_rank_config(
    *,
    rank: int | None,
    world_size: int | None,
    store_addr: str | None,
    store_port: int | None,
    lighthouse_addr: str | None,
    replica_id: str | None,
    port: int | None,
    hostname: str | None,
    job: str | None,
    token: str | None,
    connect_timeout: timedelta,
    beside_nccl: bool,
) -> RankConfig:
    """Resolve what was given and what the environment says.

    Raises:
        ConfigError: something is missing or cannot be used; the message names it. So it is of a store at which another
            living group of several ranks finds itself.
        GroupBrokenError: the group's store cannot be reached.
    """
    store_addr = config.resolve(store_addr, config.STORE_ADDR, "", str)
    store_port = config.resolve(store_port, config.STORE_PORT, 0, config.parse_port)
    group_world_size = config.resolve(world_size, config.WORLD_SIZE, 1, config.parse_count)
    group_rank = config.resolve(rank, config.RANK, 0, config.parse_count)
    if group_world_size < 1 or not 0 <= group_rank < group_world_size:
        raise ConfigError(
            f"rank={group_rank}, world_size={group_world_size}: expected 0 <= rank < world_size inside the replica group",
            party="rank",
        )
    job = resolve_job(job)
    if group_rank == 0:
        _name_what_is_not_read()
    lighthouse = config.resolve(lighthouse_addr, config.LIGHTHOUSE, "", str)
    if not lighthouse and group_rank == 0:
        raise ConfigError(
            "no lighthouse address: pass lighthouse_addr or set TORCHFT_LIGHTHOUSE (HOST:PORT);"
            " `python -m torchft_ckpt lighthouse` starts one",
            party="lighthouse_addr",
        )
    tls = resolve_tls()
    if lighthouse:
        lighthouse = ",".join(parse_addresses(lighthouse, what="lighthouse address", has_tls=tls is not None))
    host = choose_host(hostname, towards=lighthouse.partition(",")[0] or None, beside_nccl=beside_nccl)
    if tls is not None:
        tls.check_is_for(host.address)
        say_what_stays_plain()
    if store_addr and not store_port:
        raise ConfigError(f"the store at {store_addr!r} has no port: pass store_port or set MASTER_PORT", "store_port")
    if group_world_size > 1 and not store_addr:
        raise ConfigError(
            f"a replica group of {group_world_size} ranks needs a store: launch it with torchrun, or set MASTER_ADDR and"
            " MASTER_PORT (rank 0 will host it there)",
            party="store_addr",
        )
    name = replica_id or ""
    # Of one group's lives eight digits are enough to tell them apart, and lines of a log stay short.
    replica_id = f"{name}:{uuid.uuid4().hex[:8]}" if name else str(uuid.uuid4())
    token = config.resolve(token, config.TOKEN, "", str)
    group_store = None
    if group_world_size > 1:
        group_store = GroupStore(store_addr, store_port, group_rank, connect_timeout, job, token)
    store = _host_store() if group_rank == 0 else None
    store_address = join_host_port(host.address, store.port) if store is not None else ""
    if group_store is not None and group_rank == 0:
        group_store.claim(Claim(name=name, replica_id=replica_id, process=_PROCESS, store_address=store_address))
    return RankConfig(
        name=name,
        replica_id=replica_id,
        group_rank=group_rank,
        group_world_size=group_world_size,
        lighthouse_addr=lighthouse,
        host=host,
        job=job,
        token=token,
        tls=tls,
        manager_port=config.resolve(port, config.MANAGER_PORT, 0, config.parse_port),
        store=store,
        store_address=store_address,
        group_store=group_store,
    )


def _name_what_is_not_read() -> None:
    for variable, why in config.not_read().items():
        if variable not in _named:
            _named.add(variable)
            logger.warning("%s is set, but torchft_ckpt does not read it: %s", variable, why)


def _host_store() -> TCPStore:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    leave_to_parent(store)
    return store


def open_link(
    rank_config: RankConfig,
    rank_0: Claim | None,
    *,
    hello: Callable[[], Hello],
    on_message: Callable[[GroupToRank], None],
    on_refused: Callable[[CoordinationError], None],
    heartbeat_interval: timedelta,
    connect_timeout: timedelta,
) -> Link:
    """Connect to the group, and begin to hear. The callbacks are those of `GroupService`.

    Args:
        rank_config: this process.
        rank_0: what rank 0 of this group has announced; None: this is rank 0.

    Raises:
        LighthouseUnreachableError, TlsError, AuthenticationError, ProtocolVersionError, RefusedError, AddressInUseError,
        GroupBrokenError: as their names say; nothing is left running.
    """
    if rank_0 is not None:
        return RankSession(
            address=rank_0.manager_address,
            group_rank=rank_config.group_rank,
            on_message=on_message,
            token=rank_config.token,
            replica_id=rank_0.replica_id,
            tls=rank_config.tls,
            heartbeat_interval=heartbeat_interval,
            connect_timeout=connect_timeout,
        )
    service = GroupService(
        world_size=rank_config.group_world_size,
        lighthouse_addr=rank_config.lighthouse_addr,
        hello=hello,
        on_message=on_message,
        on_refused=on_refused,
        hostname=rank_config.host.address,
        port=rank_config.manager_port,
        job=rank_config.job,
        token=rank_config.token,
        replica_id=rank_config.replica_id,
        tls=rank_config.tls,
        heartbeat_interval=heartbeat_interval,
        connect_timeout=connect_timeout,
    )
    if rank_config.group_store is not None:
        try:
            rank_config.group_store.announce(service.address)
        except BaseException:
            service.shutdown("the other ranks of its group cannot find it")
            raise
    return service
