"""Serves snapshots over HTTP, on a thread and event loop of its own.

A shell: which snapshot answers is the registry's decision, what a snapshot still holds is the snapshot's. The loop never waits
for a writer or a device; bytes are copied in slices so small that the training process does not notice.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import secrets
import socket
import ssl
import threading
import time
from collections.abc import Callable
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass

from torchft_ckpt.checkpointing.protocol import MAX_BODY_BYTES
from torchft_ckpt.checkpointing.serving.handlers import CheckpointHandlers
from torchft_ckpt.checkpointing.serving.snapshot import Snapshot
from torchft_ckpt.checkpointing.serving.snapshot_registry import SnapshotRegistry
from torchft_ckpt.errors import AddressInUseError, CheckpointError, ConfigError, LockTimeoutError
from torchft_ckpt.front.limits import FrontLimits
from torchft_ckpt.front.serving import Front
from torchft_ckpt.network import listen
from torchft_ckpt.threads import Thread, Threads, end_at_exit
from torchft_ckpt.tls import Tls, check_serves

logger = logging.getLogger(__name__)
_START_TIMEOUT_S = 30.0
_STOP_TIMEOUT_S = 10.0
_BACKLOG = 1024  # one more than fits waits a second for its next attempt
_PREPARE_AFTER_S = 0.25
_PREPARE_PAUSE_S = 0.001
_SILENT_S = 30.0
_NUM_THREADS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerLimits(FrontLimits):
    """Limits of what clients may take of a checkpoint server.

    The rate is generous because an honest receiver is fast: it asks for at most 16 MiB at a time, so a machine that pulls at
    200 Gbit/s over all its ranks makes 1,500 requests a second, and many receivers may sit behind one address. What is left
    for a hostile one is a bounded part of one thread. One receiver uses at most 64 connections.

    Args:
        max_serve_bytes_per_s: bytes of states that all clients together are sent; None: no bound.
    """

    max_body_bytes: int = MAX_BODY_BYTES
    max_serve_bytes_per_s: float | None = None


class CheckpointServer:
    """An HTTP server over a registry of snapshots. Listening when the constructor returns.

    Args:
        bind: address to listen on; `::` is that of both families.
        port: port to listen on; 0 lets the system choose.
        token: what clients must present as `Authorization: Bearer`, or prove; None lets everybody in.
        ssl_context: for a server; https is spoken with it, and nothing else. It decides about client certificates. Or what the
            configuration says, by which all need one where an authority is named.

    Attributes:
        proof_key: by which this server, and no other, proves itself to who has one of its manifests.

    Raises:
        AddressInUseError: the port is taken.
        ConfigError: the address cannot be listened on; the context is for clients.
    """

    def __init__(
        self,
        registry: SnapshotRegistry,
        *,
        bind: str,
        port: int,
        token: str | None,
        ssl_context: ssl.SSLContext | Tls | None = None,
        limits: ServerLimits = ServerLimits(),
    ) -> None:
        check_serves(ssl_context)
        self._snapshots = registry
        self._ssl_context = ssl_context
        self._limits = limits
        self.proof_key = secrets.token_hex(16)
        self._listeners = _listen(bind, port)
        self.port: int = self._listeners[0].getsockname()[1]
        self._loop = asyncio.new_event_loop()
        # A few threads: they send in turns, compute digests, touch buffers and copy ahead; more would only crowd the trainer.
        self._executor = Threads("torchft_ckpt-serve", _NUM_THREADS)
        self._handlers = CheckpointHandlers(
            registry,
            self._executor,
            num_threads=_NUM_THREADS,
            token=token,
            proof_key=self.proof_key,
            on_registered=self._prepare_copies,
            patience_s=limits.head_timeout_s,
            max_bytes_per_s=limits.max_serve_bytes_per_s,
        )
        self._preparing: set[Snapshot] = set()
        """A thread touches their buffers or copies their blocks ahead, or is about to: one for each, whoever comes."""
        self._token = token or ""
        self._front: Front | None = None
        self._stop_lock = threading.Lock()
        self._stopping = threading.Event()
        self._thread = Thread(self._run, "torchft_ckpt-serve")
        self._thread.start()
        end_at_exit(self.stop)
        started = asyncio.run_coroutine_threadsafe(self._start(), self._loop)
        try:
            started.result(_START_TIMEOUT_S)
        except (OSError, FutureTimeoutError) as error:
            self.stop()
            raise ConfigError(
                f"the checkpoint server could not start on port {self.port}: {error}", party="bind"
            ) from error

    def publish(self, snapshot: Snapshot, *, lease_s: float) -> None:
        """Serve a snapshot for at most `lease_s` seconds. From any thread.

        Raises:
            CheckpointError: the server was stopped; the snapshot is closed.
        """
        with self._stop_lock:
            if self._stopping.is_set():
                snapshot.close()
                raise CheckpointError(
                    "the checkpoint server was stopped, it serves nothing any more", party="transport"
                )
            now = time.monotonic()
            revoked = self._snapshots.put(snapshot, lease_ends=now + lease_s, now=now)
            self._loop.call_soon_threadsafe(self._published, snapshot, lease_s)
        for closed in revoked:
            logger.warning("%r was closed before its receivers were done: too many snapshots are open", closed)

    def wake(self) -> None:
        """Let those who wait for a step look again. From any thread."""
        self._call_soon(self._handlers.wake_waiting)

    def expire_at(self, ends: float) -> None:
        """Look after what has ended a little after a moment on the monotonic clock. From any thread."""
        self._call_soon(self._loop.call_at, ends + 0.01, self._expire)

    def _call_soon(self, function: Callable[..., object], *args: object) -> None:
        with self._stop_lock:
            if not self._stopping.is_set():
                self._loop.call_soon_threadsafe(function, *args)

    def stop(self, *, wait: bool = True) -> None:
        """Stop listening and cut every connection. May be called again."""
        with self._stop_lock:
            if not self._stopping.is_set():
                self._stopping.set()
                self._loop.call_soon_threadsafe(lambda: self._loop.create_task(self._finish()))
        if wait and threading.current_thread() is not self._thread:
            self._thread.join(_STOP_TIMEOUT_S)
            if self._thread.is_alive():
                logger.warning("the checkpoint server did not stop within %g s", _STOP_TIMEOUT_S)
            self._executor.shutdown(wait=True)

    # On the loop

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
        finally:
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
            self._loop.close()
            self._executor.shutdown(wait=False, cancel_futures=True)

    async def _start(self) -> None:
        self._front = Front(
            self._handlers.application(),
            self._listeners,
            name="the checkpoint server",
            token=self._token,
            limits=self._limits,
            ssl_context=tls.server if isinstance(tls := self._ssl_context, Tls) else tls,
            without_certificate=() if isinstance(tls, Tls) else None,
            handler_cancellation=True,
            shutdown_timeout_s=0.1,
        )
        self._loop.call_later(_SILENT_S / 4, self._lapse)
        await self._front.start()

    async def _finish(self) -> None:
        try:
            if self._front is not None:
                self._front.stop_accepting()
            self._handlers.cancel_all()
            if self._front is not None:
                await self._front.close()
        finally:
            for listener in self._listeners:
                listener.close()
            self._loop.stop()

    def _published(self, snapshot: Snapshot, lease_s: float) -> None:
        if self._stopping.is_set():
            return
        self._executor.submit(snapshot.manifest_bytes)  # its receivers ask for it any moment now
        self._handlers.wake_waiting()
        # A little later than the lease, so that the clock has certainly passed it.
        self._loop.call_later(lease_s + 0.01, self._expire)

    def _expire(self) -> None:
        for snapshot in self._snapshots.expire(time.monotonic()):
            logger.info("the lease of %r has ended", snapshot)
        self._handlers.cancel_closed()

    def _lapse(self) -> None:
        """Keep nothing for receivers that are gone without a word."""
        self._snapshots.lapse(time.monotonic() - _SILENT_S)
        self._expire()
        if not self._stopping.is_set():
            self._loop.call_later(_SILENT_S / 4, self._lapse)

    def _prepare_copies(self, snapshot: Snapshot) -> None:
        """A receiver has come: if the trainer mutates before it is done, buffers should be at hand.

        Touching memory costs the transfer as much as the bytes cost, so one that is over soon is left alone. A state that is
        received for longer than a step is copied now, and not while the trainer waits.
        """
        if not self._stopping.is_set() and snapshot not in self._preparing:
            self._preparing.add(snapshot)
            self._loop.call_later(_PREPARE_AFTER_S, self._start_preparing, snapshot)

    def _start_preparing(self, snapshot: Snapshot) -> None:
        if not self._stopping.is_set():
            self._executor.submit(self._prepare, snapshot)

    def _prepare(self, snapshot: Snapshot) -> None:
        prepare_one = snapshot.copy_ahead if snapshot.outlives_step else snapshot.touch_buffer_ahead
        try:
            while not self._stopping.wait(_PREPARE_PAUSE_S) and prepare_one():
                pass
        except LockTimeoutError:
            logger.info("%r: the state is changed for long, no more of it is copied before", snapshot)
        finally:
            self._preparing.discard(snapshot)


def _listen(bind: str, port: int) -> list[socket.socket]:
    try:
        return listen(bind, port, _BACKLOG)
    except socket.gaierror as error:
        raise ConfigError(f"bind={bind!r}: not an address of this machine: {error}", party="bind") from error
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise AddressInUseError(
                f"port {port} on {bind or 'all addresses'} is taken by another process; port=0 lets the system choose",
                party=f"{bind}:{port}",
            ) from error
        raise ConfigError(f"cannot listen on {bind}:{port}: {error}", party="bind") from error
