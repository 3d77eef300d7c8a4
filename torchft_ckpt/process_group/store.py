"""Where a group's members meet: the address of a TCPStore and a client to it whose connecting can be bounded.

torch's client retries a refused connection until its timeout and waits without one for a store that accepts but does
not answer. So the address is tried with a plain socket first: a refusal is an error at once, and the same socket tells
which of our addresses routes to the store.
"""

from __future__ import annotations

import socket
from dataclasses import dataclass
from datetime import timedelta

from torch.distributed import PrefixStore, Store, TCPStore

from torchft_ckpt.config import parse_host_port
from torchft_ckpt.errors import ProcessGroupConfigureError


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreAddress:
    """The address of a store, and the prefix under which a group meets there."""

    host: str
    port: int
    prefix: str

    @classmethod
    def parse(cls, text: str) -> StoreAddress:
        """Split `host:port/some/prefix` or `[v6]:port/some/prefix`.

        Raises:
            ConfigError: there is no host or port.
        """
        address, _, prefix = text.partition("/")
        host, port = parse_host_port(address, what="store address", default_host="localhost")
        return cls(host=host, port=port, prefix=prefix)

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}/{self.prefix}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """A way to a store that worked: numeric addresses of both ends."""

    local_host: str
    peer: tuple[str, int]


def find_route(address: StoreAddress, timeout_s: float) -> Route:
    """Connect to the store once, and hang up.

    Raises:
        ProcessGroupConfigureError: nobody listens there, or nobody answered within the timeout.
    """
    try:
        with socket.create_connection((address.host, address.port), timeout=timeout_s) as probe:
            peer = probe.getpeername()
            return Route(local_host=probe.getsockname()[0], peer=(peer[0], peer[1]))
    except OSError as error:
        reason = "did not answer in time" if isinstance(error, TimeoutError) else f"cannot be reached ({error})"
        raise ProcessGroupConfigureError(
            f"the store at {address.host}:{address.port} {reason}: its host is gone or was never started; "
            "a new quorum names a new store",
            party=f"{address.host}:{address.port}",
        ) from error


def connect_store(address: StoreAddress, timeout_s: float) -> Store:
    """Return a client to the store, under the address's prefix; call `find_route` first.

    Raises:
        RuntimeError: torch's, if the store went away meanwhile.
    """
    client = TCPStore(
        host_name=address.host,
        port=address.port,
        is_master=False,
        wait_for_workers=False,
        timeout=timedelta(seconds=timeout_s),
    )
    return PrefixStore(address.prefix, client)
