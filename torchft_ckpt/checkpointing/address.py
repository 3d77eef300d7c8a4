"""How a peer's advertised address is read: `http://host:port` or `https://host:port`, and nothing else.

Which one to advertise: `network`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from torchft_ckpt.errors import SourceLostError
from torchft_ckpt.network import join_host_port

_METADATA = re.compile(r"\A(https?)://(\[[0-9A-Fa-f:.%]{2,60}\]|[0-9A-Za-z._-]{1,253}):([0-9]{1,5})/?\Z")
Scheme = Literal["http", "https"]


@dataclass(frozen=True, slots=True)
class SourceAddress:
    """Where a source listens, and whether it speaks TLS there."""

    host: str
    port: int
    scheme: Scheme = "http"

    def __str__(self) -> str:
        return f"{self.scheme}://{join_host_port(self.host, self.port)}"


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
