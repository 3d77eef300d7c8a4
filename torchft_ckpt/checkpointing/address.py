"""Which address a server advertises, and how a peer's advertised address is read.

The bare hostname is never advertised: what it resolves to elsewhere is anyone's guess.
"""

from __future__ import annotations

import ipaddress
import re
import socket
from dataclasses import dataclass

from torchft_ckpt.config import HOSTNAME, resolve
from torchft_ckpt.errors import SourceLostError

_METADATA = re.compile(r"\A(https?)://(\[[0-9A-Fa-f:.%]{2,60}\]|[0-9A-Za-z._-]{1,253}):([0-9]{1,5})/?\Z")
# TEST-NET-1 (RFC 5737): connecting a UDP socket sends nothing, it only makes the kernel choose a route.
_SOMEWHERE_ELSE = "192.0.2.1"


@dataclass(frozen=True, slots=True)
class SourceAddress:
    """Where a source listens."""

    host: str
    port: int

    def __str__(self) -> str:
        return format_url(self.host, self.port)


def choose_advertised_host(hostname: str | None, bind: str) -> str:
    """Return the address that peers are told: argument, environment, the address bound to, else the outward interface."""
    default = bind if not _is_wildcard(bind) else address_towards(_SOMEWHERE_ELSE)
    return resolve(hostname, HOSTNAME, default, str)


def address_towards(host: str, port: int = 9) -> str:
    """Return the local address that packets to `host` leave from; 127.0.0.1 where there is no route."""
    try:
        candidates = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)
    except OSError:
        return "127.0.0.1"
    for family, kind, protocol, _, address in candidates:
        try:
            with socket.socket(family, kind, protocol) as probe:
                probe.connect(address)
                return str(probe.getsockname()[0])
        except OSError:
            continue
    return "127.0.0.1"


def format_url(host: str, port: int) -> str:
    """Return `http://host:port`, with brackets around an IPv6 address."""
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def parse_metadata(metadata: str) -> SourceAddress:
    """Read a peer's metadata: `http://host:port` and nothing else.

    Raises:
        SourceLostError: it is anything else; nobody was contacted.
    """
    match = _METADATA.match(metadata)
    if match is None or not 0 < int(match[3]) < 65536:
        raise SourceLostError(
            f"metadata {metadata[:120]!r} of the source is not http://HOST:PORT; nobody was contacted",
            party=metadata[:120],
        )
    if match[1] == "https":
        raise SourceLostError(f"source {metadata}: https is not available in this version", party=metadata)
    return SourceAddress(match[2].strip("[]"), int(match[3]))


def _is_wildcard(bind: str) -> bool:
    try:
        return bind == "" or ipaddress.ip_address(bind).is_unspecified
    except ValueError:
        return False
