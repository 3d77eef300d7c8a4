"""From arguments and environment to addresses, ranks and store: how this process came to be one rank of one replica group.

Launched by `torchrun`, the environment names the group's TCPStore (`MASTER_ADDR`, `MASTER_PORT`), the rank and the size.
Launched by hand it may name nothing: a group of one then hosts a store of its own, and rank 0 of a larger one hosts the
store where `MASTER_ADDR` points to this process and nobody answers there yet.
"""

from __future__ import annotations

import ipaddress
import logging
import os
import socket
import uuid
from dataclasses import dataclass
from datetime import timedelta

from torch.distributed import DistNetworkError, DistStoreError, TCPStore

from torchft_ckpt import config
from torchft_ckpt.coordination.lighthouse_connection import resolve_job
from torchft_ckpt.errors import ConfigError, GroupBrokenError
from torchft_ckpt.network import advertised_host, join_host_port, leave_to_parent

logger = logging.getLogger(__name__)

_named: set[str] = set()
"""Variables that were named already: a process says it once, however many managers it makes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeouts:
    """Four waits that have nothing to do with each other."""

    collective: timedelta
    """Collectives and commit votes."""
    quorum: timedelta
    connect: timedelta
    transfer: timedelta


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """What this process is, and where its partners are."""

    replica_id: str
    group_rank: int
    group_world_size: int
    lighthouse_addr: str
    hostname: str
    job: str
    token: str
    manager_port: int
    store: TCPStore
    store_address: str
    """`host:port` of the store, as peers on other machines reach it."""

    def key(self, name: str) -> str:
        """Return the store key under which rank 0 tells the others `name`, fresh in each restart of the group."""
        return f"torchft_ckpt/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}/{name}"


def resolve_launch(
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
) -> Launch:
    """Resolve what was given and what the environment says.

    Raises:
        ConfigError: something is missing or cannot be used; the message names it.
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
    name = resolve_job(job)
    if group_rank == 0:
        _name_what_is_not_read()
    lighthouse = config.resolve(lighthouse_addr, config.LIGHTHOUSE, "", str)
    if not lighthouse and group_rank == 0:
        raise ConfigError(
            "no lighthouse address: pass lighthouse_addr or set TORCHFT_CKPT_LIGHTHOUSE (HOST:PORT);"
            " `python -m torchft_ckpt lighthouse` starts one",
            party="lighthouse_addr",
        )
    if lighthouse:
        lighthouse = join_host_port(*config.parse_host_port(lighthouse, what="lighthouse address"))
    host = advertised_host(hostname, towards=lighthouse or None)
    if store_addr and not store_port:
        raise ConfigError(f"the store at {store_addr!r} has no port: pass store_port or set MASTER_PORT", "store_port")
    store = _open_store(store_addr, store_port, group_rank, group_world_size, connect_timeout)
    reachable = host if not store_addr or _is_loopback(store_addr) else store_addr
    incarnation = str(uuid.uuid4())
    return Launch(
        replica_id=f"{replica_id}:{incarnation}" if replica_id else incarnation,
        group_rank=group_rank,
        group_world_size=group_world_size,
        lighthouse_addr=lighthouse,
        hostname=host,
        job=name,
        token=config.resolve(token, config.TOKEN, "", str),
        manager_port=config.resolve(port, config.MANAGER_PORT, 0, config.parse_port),
        store=store,
        store_address=join_host_port(reachable, store.port),
    )


def _name_what_is_not_read() -> None:
    for variable, why in config.not_read().items():
        if variable not in _named:
            _named.add(variable)
            logger.warning("%s is set, but torchft_ckpt does not read it: %s", variable, why)


def _open_store(addr: str, port: int, rank: int, world_size: int, timeout: timedelta) -> TCPStore:
    if not addr:
        if world_size > 1:
            raise ConfigError(
                f"a replica group of {world_size} ranks needs a store: launch it with torchrun, or set MASTER_ADDR and"
                " MASTER_PORT (rank 0 will host it there)",
                party="store_addr",
            )
        return _host_store("127.0.0.1", 0, timeout)
    try:
        if rank == 0 and not _answers(addr, port):
            return _host_store(addr, port, timeout)
        return TCPStore(addr, port, is_master=False, wait_for_workers=False, timeout=timeout)
    except (DistNetworkError, DistStoreError, RuntimeError) as error:
        address = join_host_port(addr, port)
        message = f"group rank {rank} cannot reach its store at {address} within {timeout.total_seconds():g} s: {error}"
        raise GroupBrokenError(message, address) from error


def _host_store(addr: str, port: int, timeout: timedelta) -> TCPStore:
    store = TCPStore(addr, port, is_master=True, wait_for_workers=False, timeout=timeout)
    leave_to_parent(store)
    return store


def _answers(addr: str, port: int) -> bool:
    try:
        with socket.create_connection((addr, port), timeout=2.0):
            return True
    except OSError as error:
        logger.debug("nobody answers at %s:%d (%s)", addr, port, error)
        return False


def _is_loopback(addr: str) -> bool:
    if addr == "localhost":
        return True
    try:
        return ipaddress.ip_address(addr).is_loopback
    except ValueError:
        return False
