"""Reads a peer's advertised address: `http://host:port` or `https://host:port`, and nothing else.

`network` chooses the one to advertise. A source's manifest names further hosts. A server there proves that it is the source
before it is told anything: by an HMAC (RFC 2104) of a nonce of the receiver's and of the address that it was reached at, with
a key that the manifest told the receiver. So another machine that has the address in another network does not pass, nor does
one that asks the source for its proof, which then is of another address.
"""

from __future__ import annotations

import hmac
import re
from dataclasses import dataclass, replace
from typing import Literal

from torchft_ckpt.errors import SourceLostError
from torchft_ckpt.network import join_host_port

_METADATA = re.compile(r"\A(https?)://(\[[0-9A-Fa-f:.%]{2,60}\]|[0-9A-Za-z._-]{1,253}):([0-9]{1,5})/?\Z")
Scheme = Literal["http", "https"]


@dataclass(frozen=True, slots=True)
class SourceAddress:
    """The place where a source listens, and whether it speaks TLS there: its own address, or a further one."""

    host: str
    port: int
    scheme: Scheme = "http"
    known_by: str = ""
    """Of a further address: the host of the source's own, which has the same port."""
    key: str = ""
    """By it the source proves at a further address that it is the source."""

    @property
    def source(self) -> SourceAddress:
        """The source's own address."""
        return SourceAddress(self.known_by, self.port, self.scheme) if self.known_by else self

    def further(self, host: str, key: str) -> SourceAddress:
        """Return a further address of a source, given its own."""
        return replace(self, host=host, known_by=self.host, key=key)

    def __str__(self) -> str:
        return f"{self.scheme}://{join_host_port(self.host, self.port)}"


def proof_of(key: str, nonce: str, host: str, port: int) -> str:
    """Return in hex what a source that was reached at an address answers to a nonce."""
    return hmac.new(key.encode(), f"{nonce} {join_host_port(host, port)}".encode(), "sha256").hexdigest()


def parse_metadata(metadata: str) -> SourceAddress:
    """Read a peer's metadata: `http://host:port` or `https://host:port`, and nothing else.

    Raises:
        SourceLostError: it is anything else; nobody was contacted.
    """
    match = _METADATA.match(metadata)
    if match is None or not 0 < int(match[3]) < 65536:
        raise SourceLostError(
            f"metadata {metadata[:120]!r} of the source is neither http://HOST:PORT nor https://HOST:PORT; "
            "nobody was contacted",
            party=metadata[:120],
        )
    return SourceAddress(match[2].strip("[]"), int(match[3]), "https" if match[1] == "https" else "http")
