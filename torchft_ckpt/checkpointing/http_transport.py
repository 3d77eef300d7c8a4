"""The transport over HTTP: live weights, served from memory to peers that are behind.

It puts the parts together: a registry of snapshots behind a server, and a fetch. It decides nothing itself.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import ssl
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch

from torchft_ckpt.checkpointing.fetching.connection import (
    MAX_STREAMS,
    FetchOptions,
    default_num_streams,
)
from torchft_ckpt.checkpointing.fetching.fetch import Fetch
from torchft_ckpt.checkpointing.fetching.receive import BufferCache, Destination
from torchft_ckpt.checkpointing.lock import StateDictLock
from torchft_ckpt.checkpointing.progress import ProgressCallback, together
from torchft_ckpt.checkpointing.protocol import SourceAddress, parse_metadata
from torchft_ckpt.checkpointing.resharding.fetch import ShardedFetch
from torchft_ckpt.checkpointing.serving.buffers import BufferPool
from torchft_ckpt.checkpointing.serving.http_server import CheckpointServer, ServerLimits
from torchft_ckpt.checkpointing.serving.relay import Relay
from torchft_ckpt.checkpointing.serving.snapshot import Snapshot
from torchft_ckpt.checkpointing.serving.snapshot_registry import SnapshotRegistry
from torchft_ckpt.checkpointing.serving.unchanged import Marked
from torchft_ckpt.checkpointing.state.blocks import DEFAULT_BLOCK_BYTES, MAX_BLOCK_BYTES, MIN_BLOCK_BYTES
from torchft_ckpt.checkpointing.state.format import MAX_MANIFEST_BYTES, Elsewhere, Manifest
from torchft_ckpt.checkpointing.state.local_state import LocalState
from torchft_ckpt.checkpointing.state.target import StateTarget, Want
from torchft_ckpt.checkpointing.state.tree import MANY_LEAVES, largest_value
from torchft_ckpt.checkpointing.state.versions import StateVersions
from torchft_ckpt.checkpointing.transport import CheckpointTransport
from torchft_ckpt.config import (
    CONNECT_TIMEOUT,
    TOKEN,
    not_negative,
    parse_seconds,
    resolve,
    warns_of_removed,
)
from torchft_ckpt.errors import (
    CheckpointError,
    ConfigError,
    SourceLostError,
    TransferCancelledError,
    TransferError,
    UnsupportedValueError,
    torn_where_it_raises,
)
from torchft_ckpt.memory import memory_bytes
from torchft_ckpt.network import Host, choose_host, other_hosts, warn_if_open, wildcard_for
from torchft_ckpt.threads import end_at_exit
from torchft_ckpt.tls import resolve_tls

logger = logging.getLogger(__name__)
T = TypeVar("T")
_STAGING_SHARE = 4
_REQUEST_S = 15.0


class HTTPTransport(CheckpointTransport[T]):
    """Serves the live state to peers and fetches theirs.

    Nothing is copied while it is served, until the trainer is about to mutate it: `disallow_checkpoint`, and every writer
    of `lock`, first copies aside what receivers still need. Received tensors are on the CPU and in fresh memory, unless
    they are received in place; DTensors are on a mesh of this process, or the state is refused.

    Args:
        timeout: limit for the lock, and default of what has no limit of its own.
        num_chunks: connections that a receive uses to each source; 0 leaves the choice to the transport. The ranks that a state
            is put together from share as many, and each has one at least.
        hostname: address that peers are told, and the only one where it is given; default: `TORCHFT_CKPT_HOSTNAME`, else that
            of the interface which `NCCL_SOCKET_IFNAME` (on a machine with CUDA) or `GLOO_SOCKET_IFNAME` names, else that of the
            outward interface. A `Manager` hands in what it has chosen.
        bind: address to listen on, `::` for both families; default: all of IPv4, or both where the address that peers are told
            is one of IPv6 or a name.
        port: port to listen on; 0 lets the system choose.
        token: shared secret; default: `TORCHFT_CKPT_TOKEN`, else everybody who can connect is served.
        lock: the lock under which the trainer mutates the state; default: one of its own.
        stall_timeout: a receive drops a source when a connection gets no byte for so long.
        connect_timeout: limit for a connection to be accepted.
        block_bytes: unit of digests and of copying aside.
        max_manifest_bytes: refuse a longer manifest.
        max_total_bytes: refuse a longer state; default: the memory, this machine's or the container's.
        staging_budget_bytes: at most so much is copied aside for receivers that are not done when the trainer goes on; beyond
            it the slowest of them lose their lease and are told so. Default: a quarter of the memory, this
            machine's or the container's.
        ssl_context: serve https with it (`ssl.PROTOCOL_TLS_SERVER`), and refuse sources that do not; default: of
            `TORCHFT_CKPT_TLS_CERT`, `_KEY` and `_CA`, else plain http.
        client_ssl_context: whom to believe, and who we are; sources that speak plain http are refused. Default: of the same
            variables, else the certificate authorities of this machine, where a source speaks https.
        max_connections: connections at a time. If there are more, those are closed first that have not shown the token.
        max_connections_per_client: those of one address that have not shown the token; without a token, all of one address.
        max_requests_per_s: requests that one address may make in the long run; beyond it answers are 429.
        max_serve_bytes_per_s: bytes of states that this transport sends to all receivers together, for links that training
            shares; default: no bound. Each rank's transport has its own.
        on_progress: called now and then with the progress of each receive, as is one that a call brings.
        state_dict: returns the state that is here, as it would be sent, for receives that are given none: `recv_checkpoint`,
            which is all that torchft's Manager calls. What arrives takes the layout and the classes of what is in it.

    Raises:
        ConfigError: an argument cannot be used.
        AddressInUseError: the port is taken.
    """

    @warns_of_removed
    def __init__(
        self,
        timeout: timedelta = timedelta(seconds=60),
        num_chunks: int = 0,
        *,
        hostname: str | Host | None = None,
        bind: str | None = None,
        port: int = 0,
        token: str | None = None,
        lock: StateDictLock | None = None,
        stall_timeout: timedelta = timedelta(seconds=15),
        connect_timeout: timedelta | None = None,
        block_bytes: int = DEFAULT_BLOCK_BYTES,
        max_manifest_bytes: int = MAX_MANIFEST_BYTES,
        max_total_bytes: int | None = None,
        staging_budget_bytes: int | None = None,
        ssl_context: ssl.SSLContext | None = None,
        client_ssl_context: ssl.SSLContext | None = None,
        max_connections: int | None = None,
        max_connections_per_client: int | None = None,
        max_requests_per_s: float | None = None,
        max_serve_bytes_per_s: float | None = None,
        on_progress: ProgressCallback | None = None,
        state_dict: Callable[[], T] | None = None,
    ) -> None:
        _check(num_chunks in range(MAX_STREAMS + 1), "num_chunks", num_chunks, f"0 to {MAX_STREAMS}")
        _check(timeout > timedelta(0), "timeout", timeout, "a positive duration")
        _check(stall_timeout > timedelta(0), "stall_timeout", stall_timeout, "a positive duration")
        _check(
            block_bytes in range(MIN_BLOCK_BYTES, MAX_BLOCK_BYTES + 1), "block_bytes", block_bytes, "4 KiB to 64 MiB"
        )
        _check(port in range(65536), "port", port, "0 to 65535")
        budget = staging_budget_bytes
        _check(budget is None or budget >= 0, "staging_budget_bytes", budget, "a number of bytes")
        connect = resolve(connect_timeout, CONNECT_TIMEOUT, timedelta(seconds=10), parse_seconds)
        _check(connect > timedelta(0), "connect_timeout", connect, "a positive duration")
        token = resolve(token, TOKEN, "", str) or None
        memory = memory_bytes()
        self._has_own_limit = max_total_bytes is not None
        self._lock = lock or StateDictLock(timeout)
        self._has_said_many = False
        self._pool = BufferPool(block_bytes, memory // _STAGING_SHARE if budget is None and memory else budget)
        self._snapshots = SnapshotRegistry()
        self._served_before: Marked | None = None
        self._buffer_cache = BufferCache()
        self._on_progress = on_progress
        self._state_dict = state_dict
        self._receives_in_place = False
        self._fetches: set[Fetch | ShardedFetch] = set()
        self._fetches_lock = threading.Lock()
        self._shut_down = threading.Event()
        self._owner = os.getpid()
        if isinstance(hostname, Host):
            host = hostname
        else:
            host = choose_host(hostname, bound=bind or "", beside_nccl=torch.cuda.is_available())
        limits = {
            "max_connections": max_connections,
            "max_connections_per_client": max_connections_per_client,
            "max_requests_per_s": max_requests_per_s,
            "max_serve_bytes_per_s": max_serve_bytes_per_s,
        }
        tls = None if ssl_context is not None and client_ssl_context is not None else resolve_tls()
        if tls is not None and ssl_context is None:
            tls.check_is_for(host.address)
        served = ssl_context or tls
        self._host = host
        self._bind = bind or wildcard_for(host.address)
        self._server = CheckpointServer(
            self._snapshots,
            bind=self._bind,
            port=port,
            token=token,
            ssl_context=served,
            limits=ServerLimits(**{name: value for name, value in limits.items() if value is not None}),  # type: ignore[arg-type]
        )
        warn_if_open("the checkpoint transport", self._bind, token)
        end_at_exit(self.shutdown)
        self._metadata = str(SourceAddress(host.address, self._server.port, "http" if served is None else "https"))
        self._options = FetchOptions(
            connect_timeout_s=connect.total_seconds(),
            stall_timeout_s=stall_timeout.total_seconds(),
            num_streams=num_chunks or default_num_streams(),
            max_manifest_bytes=max_manifest_bytes,
            max_total_bytes=memory if max_total_bytes is None else max_total_bytes,
            token=token,
            receiver=uuid.uuid4().hex,
            address=self._metadata,
            ssl_context=client_ssl_context or tls,
        )
        self._lock.add_before_write(self._snapshots.detach_all)
        if type(self).disallow_checkpoint is not HTTPTransport.disallow_checkpoint:
            self._lock.add_before_write(
                self.disallow_checkpoint
            )  # whatever a subclass does there, the state was detached

    def __repr__(self) -> str:
        return f"HTTPTransport({self._metadata}, serving={self._snapshots.open_snapshots()})"

    @property
    def lock(self) -> StateDictLock:
        """The lock whose writers may mutate the state that is served."""
        return self._lock

    @property
    def uses_memory_of_state(self) -> bool:
        return True

    @property
    def state_lock(self) -> StateDictLock:
        """The same lock, under the name that a `Manager` asks each transport for."""
        return self._lock

    @property
    def num_streams(self) -> int:
        """Connections that a receive uses to each source."""
        return self._options.num_streams

    @property
    def token(self) -> str | None:
        """The shared secret of the job, which this side wants of receivers and shows to sources; None: none is wanted."""
        return self._options.token

    def has_pending_request(self, step: int) -> bool:
        """Whether somebody waits for the state of this step, or for whatever is newest, and it is not served: serve it."""
        return self._snapshots.has_pending_request(step, time.monotonic(), _REQUEST_S)

    def advance_to(self, step: int) -> None:
        """Say which step the live state is of: who waits for an earlier one learns that it is over."""
        if self._snapshots.is_at(step, time.monotonic()):
            self._server.wake()

    def metadata(self) -> str:
        """Return `http://HOST:PORT`, or `https://HOST:PORT`."""
        return self._metadata

    def address(self) -> str:
        """Return the same as `metadata`, under torchft's other name for it."""
        return self._metadata

    def send_checkpoint(self, dst_ranks: list[int], step: int, state_dict: T, timeout: timedelta) -> None:
        """Serve the state to the destinations for at most `timeout`; returns at once and copies no tensor.

        It is `send_captured`, which a `Manager` calls. A subclass that is to see each state that is served overrides that.

        The state must not change between its reading by the caller and the return of this call: hold `lock.read()` around
        both where the trainer may be stepping. With no destinations the state is served until it is about to change.

        A tensor that torch writes to in place without the lock is not served any more, and receivers are told so by its name.

        Args:
            dst_ranks, step, state_dict, timeout: as in `CheckpointTransport.send_checkpoint`.

        Raises:
            UnsupportedValueError: the state holds something that cannot be carried; who comes for the step is told so.
            CheckpointError: the transport was shut down.
        """
        self.send_captured(dst_ranks, step, state_dict, timeout)

    def send_captured(
        self,
        dst_ranks: list[int],
        step: int,
        state_dict: T,
        timeout: timedelta,
        *,
        versions: StateVersions | None = None,
        outlives_step: bool = False,
    ) -> None:
        """As `send_checkpoint`, of a state that was captured before. See `CheckpointTransport.send_captured`."""
        if self._shut_down.is_set():
            raise CheckpointError("send_checkpoint after shutdown of the transport", party="transport")
        _check(step >= 0, "step", step, "a step that is not negative")
        not_negative(timeout)
        try:
            snapshot = Snapshot(
                state_dict,
                step=step,
                lock=self._lock,
                pool=self._pool,
                num_expected=len(set(dst_ranks)),
                versions=versions,
                elsewhere=self._elsewhere(),
                outlives_step=outlives_step,
                before=self._served_before,
            )
        except UnsupportedValueError as error:
            self._snapshots.cannot(step, str(error))
            self._server.wake()
            raise
        self._served_before = snapshot.marked
        if not dst_ranks:  # who turns out to hold another state compares by digests of now
            snapshot.known_digests = {}
        if snapshot.num_values > MANY_LEAVES and not self._has_said_many:
            self._has_said_many = True
            logger.warning(
                "the state has about %d plain values, most of them in %r: those who train stand still for them whenever a group"
                " comes in. Put them into a tensor, or into lists of nothing but numbers",
                snapshot.num_values,
                largest_value(snapshot.manifest.tree),
            )
        level = logging.INFO if dst_ranks else logging.DEBUG  # an offer to nobody in particular is made every round
        logger.log(level, "serving %r to ranks %s for at most %s", snapshot, dst_ranks, timeout)
        self._server.publish(snapshot, lease_s=timeout.total_seconds())

    def _elsewhere(self) -> Elsewhere | None:
        hosts = [] if self._host.is_chosen else other_hosts(self._host.address, self._bind)
        return Elsewhere(hosts=hosts, key=self._server.proof_key) if hosts else None

    def disallow_checkpoint(self) -> None:
        """Return once the state may be mutated: after one memory copy of what receivers still need, at most.

        Every writer of `lock` calls it, and so a subclass's, before it changes the state.
        """
        self._snapshots.detach_all()

    def retire_checkpoint(self, *, keeps_awaited: bool = False) -> bool:
        """Give nothing that is served now to receivers that come from now on. See `CheckpointTransport.retire_checkpoint`."""
        return self._snapshots.retire_all(keeps_awaited=keeps_awaited)

    def withdraw_checkpoint(self) -> None:
        """Return once the state may be mutated; nothing is copied for the receivers that it was sent to, who get an error."""
        self._snapshots.withdraw_all()

    def recv_checkpoint(self, src_rank: int, metadata: str, step: int, timeout: timedelta) -> T:
        """Fetch a state whole. See `CheckpointTransport.recv_checkpoint`."""
        local = None if self._state_dict is None else self._state_dict()
        in_place = self._receives_in_place
        return HTTPTransport.fetch_checkpoint(self, [metadata], step, timeout, local_state=local, in_place=in_place)

    def fetch_checkpoint(
        self,
        sources: Sequence[str],
        step: int,
        timeout: timedelta,
        *,
        local_state: T | None = None,
        in_place: bool = False,
        on_progress: ProgressCallback | None = None,
    ) -> T:
        """Fetch a state whole from several sources at once. See `CheckpointTransport.fetch_checkpoint`.

        Blocks come from every source whose digests agree with the primary's, and from other receivers of the same
        snapshot; what others than the primary send counts with the BLAKE3 digest that it announces. A source that is
        lost, stalls or lies is dropped, what has arrived stays. With `in_place`, contiguous tensors of `local_state`
        are received into; others are copied to at the end.

        Warns:
            ReplicaDivergenceWarning: a source of the same step holds other bits than the primary.
        """
        _check(bool(sources), "sources", sources, "at least one")
        what = sources[0] if len(sources) == 1 else f"{sources[0]} and {len(sources) - 1} more"
        started = time.monotonic()
        _check(step >= 0, "step", step, "a step that is not negative")
        not_negative(timeout)
        fetch = Fetch(
            _readable(sources),
            step=step,
            deadline=started + timeout.total_seconds(),
            options=self._options,
            cache=self._buffer_cache,
            local_state={} if local_state is None else local_state,  # not even a shard may pass for what it is not
            in_place=in_place and local_state is not None,
            on_progress=together(self._on_progress, on_progress),
            serve_on=functools.partial(self._serve_on, ends=started + 2 * timeout.total_seconds()),
        )
        with self._fetching(fetch):
            if in_place:
                self._lock.announce_write()  # what is served or saved here may be what is written to
            try:
                state = fetch.run()
            except TransferError as error:
                level = logging.INFO if isinstance(error, TransferCancelledError) else logging.WARNING
                logger.log(level, "step %d was not received from %s: %s", step, what, error)
                raise
        self._buffer_cache.clear()
        came = fetch.received_in_words()
        logger.info(
            "received step %d from %s in %.3f s%s", step, what, time.monotonic() - started, came and f": {came}"
        )
        return cast(T, state)

    def fetch_sharded(
        self,
        groups: Sequence[Sequence[str]],
        rank: int,
        world_size: int,
        step: int,
        timeout: timedelta,
        *,
        local_state: T | None = None,
        in_place: bool = False,
        on_progress: ProgressCallback | None = None,
    ) -> T:
        """Fetch a state onto the layout of `local_state`. See `CheckpointTransport.fetch_sharded`.

        Only what `local_state` holds travels, as boxes, from all ranks of all groups, each giving about as many bytes; a rank
        that is lost is made up for by others that hold the same. What another group than the primary sends is taken where the
        primary announces the BLAKE3 digest that it has. `local_state` says what is wanted, so it is needed.

        Warns:
            ReplicaDivergenceWarning: another group of the same step holds other bits than the primary.
        """
        _check(bool(groups), "groups", groups, "at least one")
        _check(local_state is not None, "local_state", local_state, "the state that is here: it says what is wanted")
        _check(step >= 0, "step", step, "a step that is not negative")
        _check(0 <= rank < world_size, "rank", rank, f"a rank of {world_size}")
        not_negative(timeout)
        started = time.monotonic()
        target = StateTarget(LocalState(local_state), in_place=in_place)
        limit = self._options.max_total_bytes
        if limit is not None and not self._has_own_limit:
            limit *= world_size  # of a source's state, of which each rank here receives a part
        fetch = ShardedFetch(
            [_group(addresses) for addresses in groups],
            step=step,
            deadline=started + timeout.total_seconds(),
            options=replace(
                self._options,
                receiver=uuid.uuid4().hex,
                group_size=world_size,
                deflated_manifests=True,
                max_total_bytes=limit,
            ),
            want=lambda group: target.wants(group.description(rank)),
            rank=rank,
            on_progress=together(self._on_progress, on_progress),
        )
        with self._fetching(fetch):
            if in_place:
                self._lock.announce_write()  # what is served or saved here may be what is written to
            try:
                with torn_where_it_raises(
                    f"receiving step {step}", "local_state", lambda: target.is_overwritten(fetch.has_written)
                ):
                    state = target.finish(fetch.run().description(rank))
            except CheckpointError as error:
                logger.warning("step %d was not received from %d ranks: %s", step, sum(map(len, groups)), error)
                raise
        logger.info("received step %d onto another layout in %.3f s", step, time.monotonic() - started)
        return cast(T, state)

    def fetch_boxes(
        self,
        address: str,
        wants: Sequence[Want],
        step: int,
        timeout: timedelta,
        on_progress: ProgressCallback | None = None,
    ) -> None:
        """Fill targets with boxes that one source serves under a step.

        Raises:
            CheckpointError: as `fetch_checkpoint`; targets may have been written to.
        """
        fetch = ShardedFetch(
            [_group([address])],
            step=step,
            deadline=time.monotonic() + timeout.total_seconds(),
            options=replace(self._options, receiver=uuid.uuid4().hex),
            want=lambda group: wants,
            on_progress=on_progress,
        )
        with self._fetching(fetch):
            fetch.run()

    @contextlib.contextmanager
    def _fetching(self, fetch: Fetch | ShardedFetch) -> Iterator[None]:
        with self._fetches_lock:
            if self._shut_down.is_set():
                raise CheckpointError("a receive after shutdown of the transport", party="transport")
            self._fetches.add(fetch)
        try:
            yield
        finally:
            with self._fetches_lock:
                self._fetches.discard(fetch)

    def _serve_on(self, manifest: Manifest, destination: Destination, ends: float) -> Relay:
        relay = Relay(manifest, destination.views, self._lock)
        self._snapshots.add_relay(relay, ends=ends)
        self._server.expire_at(ends)
        return relay

    def cancel_recv(self) -> None:
        """Give up the receives in progress; each raises `TransferCancelledError`. From any thread."""
        with self._fetches_lock:
            fetches = list(self._fetches)
        for fetch in fetches:
            fetch.cancel()

    def shutdown(self, wait: bool = True) -> None:
        """Stop serving and receiving, free what is held. May be called more than once. Does nothing in a forked child."""
        if os.getpid() != self._owner:
            return
        with self._fetches_lock:
            self._shut_down.set()
        self._lock.remove_before_write(self._snapshots.detach_all)
        self._lock.remove_before_write(self.disallow_checkpoint)
        self.cancel_recv()
        self._server.stop(wait=wait)
        self._snapshots.close_all()
        self._buffer_cache.clear()


class PGTransport(HTTPTransport[T]):
    """An `HTTPTransport` for scripts that construct torchft's `PGTransport`: our format over HTTP.

    torchft's sends pickles over the process group, so the process group has to be connected first, and both sides wait until
    all of it is through. Here live weights are served beside the training step, by several sources at once, with digests, and
    none are unpickled. The bytes go over TCP, whatever the process group uses.

    Args:
        pg: not used: no state travels over it.
        timeout: as for `HTTPTransport`.
        device: not used: what is received is on the CPU, or in the tensors that `state_dict` returns, wherever these are.
        state_dict: returns the state that is here, as it would be sent: a receive for which no other is given fills its
            tensors. A Manager of this library gives its own.
    """

    def __init__(
        self,
        pg: Any,
        timeout: timedelta,
        device: torch.device | str,
        state_dict: Callable[[], T] | None = None,
    ) -> None:
        super().__init__(timeout, state_dict=state_dict)
        self._receives_in_place = state_dict is not None


def _check(holds: bool, argument: str, value: object, expected: str) -> None:
    if not holds:
        raise ConfigError(f"{argument}={value!r} cannot be used; expected {expected}", party=argument)


def _group(addresses: Sequence[str]) -> list[SourceAddress | None]:
    """Return the addresses of a group's ranks; None of one that is not known or cannot be read."""
    parsed: list[SourceAddress | None] = []
    for metadata in addresses:
        try:
            parsed.append(parse_metadata(metadata) if metadata else None)
        except SourceLostError as error:
            logger.warning("%s", error)
            parsed.append(None)
    return parsed


def _readable(sources: Sequence[str]) -> list[SourceAddress]:
    """Return the addresses that can be read, in order; one that cannot does not keep others from being asked."""
    readable = [address for address in _group(sources) if address is not None]
    return readable or [parse_metadata(sources[0])]
