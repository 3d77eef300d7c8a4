"""Transports on loopback, and manifests that a test writes by hand for sources of its own."""

from __future__ import annotations

import json
from typing import Any

from support.http_servers import HOST
from torchft_ckpt.checkpointing.http_transport import HTTPTransport
from torchft_ckpt.checkpointing.state.format import FORMAT_NAME, FORMAT_VERSION

BLOCK = 4096
STEP = 3


def make_transport(**options: Any) -> HTTPTransport[Any]:
    """Return a transport on loopback with small blocks that fetches over one connection, unless the options say otherwise."""
    return HTTPTransport(**{"hostname": HOST, "bind": HOST, "num_chunks": 1, "block_bytes": BLOCK, **options})


def manifest_of(tree: object, **changes: object) -> bytes:
    """Return the manifest of a state without tensors, or what it is with other members."""
    content = {
        "format": FORMAT_NAME,
        "version": FORMAT_VERSION,
        "step": STEP,
        "snapshot": "s",
        "block_bytes": BLOCK,
        "total_bytes": 0,
        "segments": [],
        "tensors": [],
        "tree": tree,
    }
    return json.dumps({**content, **changes}, separators=(",", ":")).encode()


def strips(snapshot: str, *, rows: int, columns: int, num_tensors: int, **changes: object) -> bytes:
    """Return a manifest of tensors whose boxes one dimension tells apart, and that cut each other into thousands of cells."""
    # Strips of dimension 0, so that none has to be compared with another, each cut elsewhere in dimension 1.
    chunks = [
        {"offsets": [row, row], "sizes": [1, columns - 2 * row], "segment": 0, "byte_offset": 0, "strides": None}
        for row in range(rows)
    ]
    tensors: list[dict[str, Any]] = [
        {"fqn": f"t{number}", "dtype": "uint8", "shape": [rows, columns], "chunks": chunks}
        for number in range(num_tensors)
    ]
    # All boxes together may have 4 times the bytes of the byte space: one more tensor, that nobody comes to fetch.
    start, large = -(-columns // 128) * 128, rows * columns * num_tensors
    whole = {"offsets": [0], "sizes": [large], "segment": 1, "byte_offset": 0, "strides": None}
    tensors.append({"fqn": "large", "dtype": "uint8", "shape": [large], "chunks": [whole]})
    tree = {"d": [[tensor["fqn"], {"x": number}] for number, tensor in enumerate(tensors)]}
    segments = [[0, columns], [start, large]]
    members = {"snapshot": snapshot, "total_bytes": start + large, "segments": segments, "tensors": tensors, **changes}
    return manifest_of(tree, **members)
