"""A client over a plain socket that reads what it asked for at a rate of its own choice, and counts it.

It speaks as much HTTP/1.1 as that takes, and knows how each library is asked for a state. Of ours it behaves as a receiver
does: it asks for a few blocks at a time and says with each request which ones it has.
"""

from __future__ import annotations

import json
import socket
import threading
import time
from dataclasses import dataclass
from urllib.parse import urlsplit

import xxhash

RECEIVER = "slow-reader"
_RUN_BLOCKS = 2
_DIGEST_BYTES = 16
_PIECE_BYTES = 64 * 1024


@dataclass(frozen=True, slots=True)
class _Head:
    status: int
    fields: dict[str, str]


class SlowReader:
    """Reads one state from a source, on a thread of its own.

    Args:
        metadata: of the source.
        step: which state.
        is_ours: how to ask.
        bytes_per_s: how fast to read, until `hurry`.
    """

    def __init__(self, metadata: str, step: int, *, is_ours: bool, bytes_per_s: float) -> None:
        address = urlsplit(metadata)
        self._connection = socket.create_connection((address.hostname or "", address.port or 0), timeout=60)
        self._left_over = b""
        self._step = step
        self._bytes_per_s = bytes_per_s
        self._hurried = False
        self._changed = threading.Condition()
        self._num_bytes = 0
        self._over = False
        self._error: Exception | None = None
        self._hasher = xxhash.xxh3_128()
        self._thread = threading.Thread(target=self._run, args=(is_ours,), name="slow reader", daemon=True)
        self._thread.start()

    def wait_until(self, num_bytes: int) -> None:
        """Wait until it has read so many bytes of the state."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._num_bytes >= num_bytes or self._over, timeout=60):
                raise TimeoutError(f"the slow reader got {self._num_bytes} bytes in 60 s")
            if self._error is not None:
                raise ConnectionError(f"the slow reader failed: {self._error}") from self._error

    def num_bytes(self) -> int:
        """Return how many bytes of the state it has read."""
        with self._changed:
            return self._num_bytes

    def hurry(self) -> None:
        """Read on as fast as it goes."""
        self._hurried = True

    def finish(self) -> str:
        """Wait for the end; return the digest of the state's bytes as they came (of ours; the other has a frame around them)."""
        self._thread.join(timeout=120)
        self._connection.close()
        if self._error is not None:
            raise ConnectionError(f"the slow reader failed: {self._error}") from self._error
        return self._hasher.hexdigest()

    def _run(self, is_ours: bool) -> None:
        try:
            if is_ours:
                self._read_ours()
            else:
                self._read_reference()
        except (OSError, ValueError, KeyError) as error:
            self._error = error
        finally:
            with self._changed:
                self._over = True
                self._changed.notify_all()

    def _read_ours(self) -> None:
        path = f"/v1/checkpoint/{self._step}"
        head = self._ask("GET", f"{path}/manifest", {})
        manifest = json.loads(self._take(int(head.fields["content-length"])))
        block_bytes, total = manifest["block_bytes"], manifest["total_bytes"]
        num_blocks = -(-total // block_bytes)
        match = {"If-Match": head.fields["etag"]}
        started = time.monotonic()
        for first in range(0, num_blocks, _RUN_BLOCKS):
            last = min(first + _RUN_BLOCKS, num_blocks) - 1
            held = {"X-Ckpt-Received": f"0-{first - 1}"} if first else {}
            self._ask("GET", f"{path}/blocks/{first}-{last}", {**match, **held})
            for block in range(first, last + 1):
                self._drip(min(block_bytes, total - block * block_bytes), started)
                self._take(_DIGEST_BYTES)
        self._ask("POST", f"{path}/done", match)

    def _read_reference(self) -> None:
        self._ask("GET", f"/checkpoint/{self._step}/full", {})
        self._drip(1 << 62, time.monotonic())

    def _drip(self, num_bytes: int, started: float) -> None:
        """Read body bytes at the rate, until so many are there or the connection ends."""
        left = num_bytes
        while left:
            piece = self._some(min(left, _PIECE_BYTES))
            if not piece:
                return
            self._hasher.update(piece)
            left -= len(piece)
            with self._changed:
                self._num_bytes += len(piece)
                self._changed.notify_all()
            ahead_s = self._num_bytes / self._bytes_per_s - (time.monotonic() - started)
            if ahead_s > 0 and not self._hurried:
                time.sleep(ahead_s)

    def _ask(self, method: str, path: str, fields: dict[str, str]) -> _Head:
        lines = [f"{method} {path} HTTP/1.1", "Host: source", f"X-Ckpt-Receiver: {RECEIVER}"]
        lines += [f"{name}: {value}" for name, value in fields.items()]
        self._connection.sendall("\r\n".join([*lines, "", ""]).encode())
        raw = self._left_over
        while b"\r\n\r\n" not in raw:
            piece = self._connection.recv(4096)
            if not piece:
                raise ConnectionError(f"{path}: the source closed the connection")
            raw += piece
        text, _, self._left_over = raw.partition(b"\r\n\r\n")
        first, *rest = text.decode("latin-1").split("\r\n")
        pairs = (line.partition(":") for line in rest)
        head = _Head(int(first.split()[1]), {name.strip().lower(): value.strip() for name, _, value in pairs})
        if not 200 <= head.status < 300:
            raise ConnectionError(f"{path}: the source answered {first}")
        return head

    def _take(self, num_bytes: int) -> bytes:
        taken = b""
        while len(taken) < num_bytes:
            piece = self._some(num_bytes - len(taken))
            if not piece:
                raise ConnectionError("the source closed the connection")
            taken += piece
        return taken

    def _some(self, at_most: int) -> bytes:
        if self._left_over:
            piece, self._left_over = self._left_over[:at_most], self._left_over[at_most:]
            return piece
        return self._connection.recv(at_most)
