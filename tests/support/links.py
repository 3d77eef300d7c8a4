"""A checkpoint server alone, a connection to one, and somebody else who listens: for what is said between the two."""

from __future__ import annotations

import contextlib
import datetime
import socket
import ssl
import threading
from collections.abc import Callable, Iterator

from torchft_ckpt.checkpointing.fetching.connection import SourceConnection
from torchft_ckpt.checkpointing.lock import StateDictLock
from torchft_ckpt.checkpointing.protocol import SourceAddress
from torchft_ckpt.checkpointing.serving.buffers import BufferPool
from torchft_ckpt.checkpointing.serving.http_server import CheckpointServer, ServerLimits
from torchft_ckpt.checkpointing.serving.snapshot import Snapshot
from torchft_ckpt.checkpointing.serving.snapshot_registry import SnapshotRegistry


@contextlib.contextmanager
def serving(
    state: object = None,
    *,
    token: str | None = None,
    context: ssl.SSLContext | None = None,
    bind: str = "127.0.0.1",
    block_bytes: int = 4096,
    **limits: float,
) -> Iterator[SourceAddress]:
    """A server that serves `state` as step 3, and its address."""
    server = CheckpointServer(
        SnapshotRegistry(), bind=bind, port=0, token=token, ssl_context=context, limits=ServerLimits(**limits)
    )
    try:
        if state is not None:
            lock = StateDictLock(datetime.timedelta(seconds=20))
            snapshot = Snapshot(state, step=3, lock=lock, pool=BufferPool(block_bytes), num_expected=1)
            server.publish(snapshot, lease_s=60)
        yield SourceAddress(bind, server.port, "http" if context is None else "https")
    finally:
        server.stop()


@contextlib.contextmanager
def connecting(
    source: SourceAddress,
    context: ssl.SSLContext | None = None,
    *,
    connect_timeout_s: float = 20,
    headers: dict[str, str] | None = None,
) -> Iterator[SourceConnection]:
    """A receiver's connection."""
    connection = SourceConnection(
        source, headers=headers or {}, connect_timeout_s=connect_timeout_s, stall_timeout_s=60, ssl_context=context
    )
    try:
        yield connection
    finally:
        connection.release()


@contextlib.contextmanager
def listening(talk: Callable[[socket.socket], None], scheme: str = "http") -> Iterator[SourceAddress]:
    """Something else than a checkpoint server: `talk` is called with each connection, on a thread."""
    listener = socket.create_server(("127.0.0.1", 0))

    def accept() -> None:
        while True:
            try:
                client, _ = listener.accept()
            except OSError:
                return
            with client, contextlib.suppress(OSError):
                client.settimeout(60)
                talk(client)

    thread = threading.Thread(target=accept)
    thread.start()
    try:
        yield SourceAddress("127.0.0.1", listener.getsockname()[1], scheme)
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join(60)
