"""How a fetch is to be done: what the caller of a transport has chosen, in plain numbers."""

from __future__ import annotations

import os
import ssl
from dataclasses import dataclass

MAX_STREAMS = 64


def default_num_streams() -> int:
    """Connections to one source: a stream keeps a core busy at both ends, and more of them than cores only take turns."""
    return max(1, min(4, (os.cpu_count() or 1) // 2))


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchOptions:
    """Durations in seconds, lengths in bytes.

    `num_streams` are connections to each source of blocks, or to all sources of boxes together. `receiver` names this receiver
    over all its connections; for one without a name nothing is kept. `address` is where it serves what it holds to other
    receivers, or None. Where that is https, it takes nothing from sources that do not speak it.
    """

    connect_timeout_s: float
    stall_timeout_s: float
    num_streams: int
    max_manifest_bytes: int
    max_total_bytes: int | None
    token: str | None
    receiver: str
    address: str | None = None
    server_identity: str = ""
    """Of the one server that is asked, where its address was found in a place that anybody may write to: the token is proved
    to it and never sent, and its answers are proved. Of tensors, only parts can be had so."""
    ssl_context: ssl.SSLContext | None = None
    group_size: int = 1
    """How many ranks of the receiver's group come to the same source."""
    deflated_manifests: bool = False
    """Ask for compressed manifests: where every receiver asks every source for one they add up."""
