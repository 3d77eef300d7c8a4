"""The store where a group's members meet: the address of a TCPStore, and connections to it that are used again.

torch's store does a reverse name lookup for each connection, in the client and, worse, on the server's only thread: where
name servers are slow or drop a packet, one new connection holds up every client by seconds. So a connection is kept
after use and lent out again, and nothing connects just to look.

torch's client has no way to give up: it retries a refused connection for up to five times its timeout, and waits for ever for a
store that accepts but does not answer. So connecting happens on a thread of its own, which its caller may leave; whoever wants
the same store next takes over what was left. If connecting is not quick, a plain socket finds out whether anybody listens.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta

from torch.distributed import DistNetworkError, DistStoreError, PrefixStore, Store, TCPStore

from torchft_ckpt.config import parse_host_port
from torchft_ckpt.errors import ProcessGroupConfigureError
from torchft_ckpt.network import join_host_port
from torchft_ckpt.threads import Thread

_NUM_IDLE_MAX = 8
_PROBE_AFTER_S = 0.2
# How long a thread that waits at the store may not notice that it need not. Nobody waits for that thread, and torch
# writes a line to stderr for each.
_WAIT_SLICE_S = 1.0
# Of the first attempt. The client's name lookup counts too, so it may fail where a store listens.
_QUICK_S = 0.1
# Of the probe after it: the first three packets that ask for a connection go out within three seconds (RFC 6298).
_LISTENS_S = 5.0


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
            ConfigError: there is no port.
        """
        address, _, prefix = text.partition("/")
        host, port = parse_host_port(address, what="store address", default_host="localhost")
        return cls(host=host, port=port, prefix=prefix)

    def __str__(self) -> str:
        return f"{join_host_port(self.host, self.port)}/{self.prefix}"


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreConnection:
    """A connection to a store, for one user at a time.

    Attributes:
        client: torch's client; broken for good once an operation on it raised a DistNetworkError.
        peers: the numeric addresses that the store's name stands for, with its port.
        local_host: the numeric address of ours that routes there.
    """

    client: TCPStore
    peers: frozenset[tuple[str, int]]
    local_host: str


class _Pending:
    """An attempt to connect, on a thread that ends within six seconds where nobody listens, and else with the attempt."""

    def __init__(self, host: str, port: int, timeout_s: float) -> None:
        self._host = host
        self._port = port
        self._timeout_s = timeout_s
        self.done = threading.Event()
        self.connection: StoreConnection | None = None
        self.error: Exception | None = None
        Thread(self._run, f"store-connect {host}:{port}").start()

    def _run(self) -> None:
        try:
            peers, local_host = _resolve(self._host, self._port)
            try:
                client = self._connect(_QUICK_S)
            except (OSError, RuntimeError):
                probe(self._host, self._port, min(self._timeout_s, _LISTENS_S))
                client = self._connect(self._timeout_s)
            client.set_timeout(timedelta(seconds=self._timeout_s))
            self.connection = StoreConnection(client=client, peers=peers, local_host=local_host)
        except (OSError, RuntimeError) as error:
            self.error = error.with_traceback(None)
        finally:
            self.done.set()

    def _connect(self, timeout_s: float) -> TCPStore:
        return TCPStore(
            host_name=self._host,
            port=self._port,
            is_master=False,
            wait_for_workers=False,
            timeout=timedelta(seconds=timeout_s),
        )


class StorePool:
    """Connections to stores: lent to one user at a time, kept when given back. Any thread may call it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._idle: list[tuple[tuple[str, int], StoreConnection]] = []
        self._left: dict[tuple[str, int], _Pending] = {}

    @contextlib.contextmanager
    def borrow(
        self, address: StoreAddress, timeout_s: float, *, fresh: bool = False, is_wanted: Callable[[], bool]
    ) -> Iterator[StoreConnection]:
        """Lend a connection; it is kept for the next borrower unless the body raises.

        Args:
            address: the store; its prefix is not used.
            fresh: do not lend one that was used before: the last one turned out to be broken.
            is_wanted: asked while connecting takes long; False gives up.

        Raises:
            ProcessGroupConfigureError: nobody listens there, or nobody answered in time, or it is no longer wanted.
        """
        key = (address.host, address.port)
        connection = None if fresh else self._take_idle(key)
        if connection is None:
            connection = self._connect(key, timeout_s, is_wanted)
        yield connection
        with self._lock:
            self._idle.append((key, connection))
            del self._idle[:-_NUM_IDLE_MAX]

    def prepare(self, address: StoreAddress, timeout_s: float) -> threading.Event:
        """Begin to connect, beside whatever goes on, unless there is a connection; the event tells when that is over."""
        key = (address.host, address.port)
        with self._lock:
            pending = self._left.get(key)
            if pending is None and any(other == key for other, _ in self._idle):
                done = threading.Event()
                done.set()
                return done
            if pending is None or pending.error is not None:
                pending = self._left[key] = _Pending(*key, timeout_s)
        return pending.done

    def forget(self, address: StoreAddress) -> None:
        """Close the kept connections to a store."""
        with self._lock:
            self._idle = [entry for entry in self._idle if entry[0] != (address.host, address.port)]

    def _take_idle(self, key: tuple[str, int]) -> StoreConnection | None:
        with self._lock:
            for index, (other, connection) in enumerate(self._idle):
                if other == key:
                    del self._idle[index]
                    return connection
        return None

    def _connect(self, key: tuple[str, int], timeout_s: float, is_wanted: Callable[[], bool]) -> StoreConnection:
        host, port = key
        with self._lock:
            pending = self._left.pop(key, None)
        if pending is None or pending.error is not None:
            pending = _Pending(host, port, timeout_s)
        waited_s = 0.0
        try:
            while not pending.done.wait(_PROBE_AFTER_S):
                waited_s += _PROBE_AFTER_S
                if not is_wanted():
                    raise ProcessGroupConfigureError(f"no longer connecting to the store at {host}:{port}")
                if waited_s == _PROBE_AFTER_S:
                    probe(host, port, timeout_s)
                if waited_s >= timeout_s:
                    raise ProcessGroupConfigureError(
                        f"the store at {host}:{port} accepted the connection but did not answer within {timeout_s:.1f} s: "
                        "its host hangs, or something else listens there",
                        party=f"{host}:{port}",
                    )
        except ProcessGroupConfigureError:
            with self._lock:
                self._left[key] = pending
            raise
        if isinstance(pending.error, ProcessGroupConfigureError):
            raise pending.error
        if pending.connection is None:
            reason = str(pending.error).partition("\n")[0][:300]
            raise ProcessGroupConfigureError(
                f"the store at {host}:{port} cannot be reached ({reason})", party=f"{host}:{port}"
            ) from pending.error
        return pending.connection


@contextlib.contextmanager
def enter_store(
    pool: StorePool, address: StoreAddress, key: str, value: str, timeout_s: float, is_wanted: Callable[[], bool]
) -> Iterator[tuple[StoreConnection, Store]]:
    """Lend a connection that works, and the store under the address's prefix with `key` set to `value`.

    Raises:
        ProcessGroupConfigureError: the store cannot be reached.
    """
    for fresh in (False, True):
        with pool.borrow(address, timeout_s, fresh=fresh, is_wanted=is_wanted) as connection:
            store = PrefixStore(address.prefix, connection.client)
            try:
                store.set(key, value)
                store.wait([key], timedelta(seconds=timeout_s))
            except DistNetworkError as error:
                pool.forget(address)
                if not fresh:
                    continue
                raise ProcessGroupConfigureError(
                    f"the store at {address.host}:{address.port} hung up: {str(error).partition(chr(10))[0][:300]}",
                    party=f"{address.host}:{address.port}",
                ) from error.with_traceback(None)
            yield connection, store
            return


def wait_for_keys(store: Store, keys: dict[str, str], deadline: float, is_wanted: Callable[[], bool]) -> None:
    """Wait until all keys are set.

    Args:
        store: where.
        keys: for each key, who is to set it.
        deadline: on `time.monotonic`'s clock.
        is_wanted: asked every second; False gives up.

    Raises:
        ProcessGroupConfigureError: the deadline passed, and who was absent; or it is no longer wanted.
    """
    while is_wanted():
        left_s = deadline - time.monotonic()
        try:
            store.wait(list(keys), timedelta(seconds=min(_WAIT_SLICE_S, max(left_s, 0.01))))
            return
        except DistStoreError:
            if left_s > 0:
                continue
        absent = ", ".join(who for key, who in keys.items() if not store.check([key]))
        raise ProcessGroupConfigureError(
            f"{absent or 'nobody'} never came to the store: died since the quorum was formed, or knows another quorum",
            party=absent,
        )
    raise ProcessGroupConfigureError("no longer waiting for the others")


def _resolve(host: str, port: int) -> tuple[frozenset[tuple[str, int]], str]:
    """Return the store's numeric addresses, and ours that routes to one of them (IPv4 first); sends it no packet."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)
    found.sort(key=lambda entry: entry[0] != socket.AF_INET)
    problem: OSError | None = None
    for family, kind, _, _, sockaddr in found:
        try:
            with socket.socket(family, kind) as sock:
                sock.connect(sockaddr)
                local_host = sock.getsockname()[0]
        except OSError as error:
            problem = error
            continue
        return frozenset((str(entry[4][0]), port) for entry in found), str(local_host)
    raise OSError(f"no route to {host}:{port}: {problem}")


def probe(host: str, port: int, timeout_s: float) -> None:
    """Find out whether anybody listens at an address, without a connection that a store's server would look up.

    Raises:
        ProcessGroupConfigureError: nobody does, or nobody answered in time.
    """
    try:
        with socket.create_connection((host, port), timeout=timeout_s) as sock:
            # Closed by a reset: a server that is held up finds nothing to look up when it comes to this connection.
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    except OSError as error:
        reason = "did not answer in time" if isinstance(error, TimeoutError) else f"cannot be reached ({error})"
        raise ProcessGroupConfigureError(
            f"the store at {host}:{port} {reason}: its host is gone or was never started; a new quorum names a new store",
            party=f"{host}:{port}",
        ) from error
