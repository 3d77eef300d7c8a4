"""One HTTP connection from a receiver to its source, with TLS or without, and what its failures mean.

It turns what sockets, TLS and HTTP do into the named transfer errors; it does not know blocks or deadlines. `close` may be
called from any thread and ends whatever the connection is waiting for.

Where the token is to be proved and not sent (`core/services/proofs.py`), nothing of an answer is handed out that is not proved.
"""

from __future__ import annotations

import contextlib
import functools
import hmac
import http.client
import os
import secrets
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import msgspec

from torchft_ckpt.checkpointing.protocol import (
    MAX_REFUSAL_BYTES,
    NONCE_DIGITS,
    PROOF_DIGITS,
    PROOF_PATH,
    Refusal,
    SourceAddress,
    decode_refusal,
    proof_of,
)
from torchft_ckpt.errors import ConfigError, SourceLostError, SourceRefusedError, StateFormatError, TransferStalledError
from torchft_ckpt.network import keep_from_forked_children
from torchft_ckpt.tls import Tls, why_not

MAX_STREAMS = 64


def default_num_streams() -> int:
    """Connections to one source: a stream keeps a core busy at both ends, and more of them than cores only take turns."""
    return max(1, min(4, (os.cpu_count() or 1) // 2))


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchOptions:
    """Durations in seconds, lengths in bytes.

    `num_streams` are connections to each source of blocks, or to all sources of boxes together. `receiver` names this receiver
    over all its connections; for one without a name nothing is kept. `address` is where it serves what it holds to other
    receivers, or None. If that is https, or `ssl_context` is given, it takes nothing from sources that do not speak it.
    """

    connect_timeout_s: float
    stall_timeout_s: float
    num_streams: int
    max_manifest_bytes: int
    max_total_bytes: int | None
    token: str | None
    receiver: str
    address: str | None = None
    ssl_context: ssl.SSLContext | Tls | None = None
    group_size: int = 1
    """How many ranks of the receiver's group come to the same source."""
    deflated_manifests: bool = False
    """Ask for compressed manifests: where every receiver asks every source for one they add up."""


_CLOSED_BY_PEER = (ConnectionError, ssl.SSLEOFError, ssl.SSLZeroReturnError)


_PIECE_S = 0.05
_SMALLEST_PIECE_BYTES = 16 * 1024
_LARGEST_PIECE_BYTES = 1024 * 1024


class UnansweredError(ConnectionError):
    """The source closed a connection that it had accepted before it answered anything: perhaps it had no place for it."""


class _OpenSocketConnection(http.client.HTTPConnection):
    """An `HTTPConnection` over a socket that was connected before."""

    def connect(self) -> None:
        raise http.client.NotConnected("this connection is not opened again")


class SourceConnection:
    """A kept-alive connection to one source.

    Args:
        source: where to connect; at a further address of a source it has to prove first, over each connection, that it is it.
        connect_timeout_s: limit for the connection to be accepted, TLS handshake included; for each address of the host.
        stall_timeout_s: limit for each wait for a byte.
        ssl_context: for clients; whom to believe, and who we are, where the source speaks https. Default: the certificate
            authorities of this machine.
        needs_tls: a source that does not speak https is refused.

    Raises:
        ConfigError: the context is for servers.
    """

    def __init__(
        self,
        source: SourceAddress,
        *,
        headers: Mapping[str, str],
        connect_timeout_s: float,
        stall_timeout_s: float,
        ssl_context: ssl.SSLContext | Tls | None = None,
        needs_tls: bool = False,
    ) -> None:
        if isinstance(ssl_context, ssl.SSLContext) and ssl_context.protocol == ssl.PROTOCOL_TLS_SERVER:
            raise ConfigError("ssl_context is one for servers; fetching needs PROTOCOL_TLS_CLIENT", party="ssl_context")
        self.party = str(source)
        self._source = source
        self._name = source.source.host
        """That its certificate has."""
        self._headers = dict(headers)
        self._connect_timeout_s = connect_timeout_s
        self._stall_timeout_s = stall_timeout_s
        self._ssl_context = ssl_context
        self._needs_tls = needs_tls
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None
        self._closed = False
        self._http: _OpenSocketConnection | None = None
        self._answered = False
        self.piece_bytes = _SMALLEST_PIECE_BYTES
        """So much is read before it is counted."""

    def took(self, num_bytes: int, seconds: float) -> None:
        """So much was read in one piece in so long: choose the next piece so that it is counted several times a second."""
        if seconds > _PIECE_S:
            self.piece_bytes = max(_SMALLEST_PIECE_BYTES, self.piece_bytes // 2)
        elif num_bytes == self.piece_bytes:
            self.piece_bytes = min(2 * self.piece_bytes, _LARGEST_PIECE_BYTES)

    def open(self) -> None:
        """Connect, and shake hands where the source speaks https. Nothing is sent to one that is not who it should be.

        Raises:
            SourceLostError: nobody accepts connections there.
            SourceRefusedError: no TLS session was agreed on; above all, its certificate does not verify, or it speaks plain http
                where it must not. Or it did not prove that it is the source.
            TransferStalledError: no proof came.
        """
        if self._needs_tls and self._source.scheme != "https":
            raise SourceRefusedError(
                f"source {self.party} speaks plain http, and TLS is set up here; nothing was asked of it",
                self.party,
            )
        failure: OSError | None = None
        try:
            candidates = socket.getaddrinfo(self._source.host, self._source.port, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as error:
            raise SourceLostError(
                f"source {self.party}: its address cannot be resolved: {error}", self.party
            ) from error
        for family, kind, protocol, _, address in candidates:
            deadline = time.monotonic() + self._connect_timeout_s
            sock: socket.socket = socket.socket(family, kind, protocol)
            keep_from_forked_children(sock)
            with self._lock:
                if self._closed:
                    sock.close()
                    break
                self._socket = sock
            try:
                sock.settimeout(self._connect_timeout_s)
                sock.connect(address)
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                if self._source.scheme == "https":
                    sock = self._shake_hands(sock, deadline)
                sock.settimeout(self._stall_timeout_s)
            except (OSError, SourceRefusedError) as error:
                with self._lock:
                    if self._socket is not None:
                        self._socket.close()
                    self._socket = None
                if isinstance(error, SourceRefusedError):
                    raise
                failure = error
                continue
            http_connection = _OpenSocketConnection(self._source.host, self._source.port)
            http_connection.sock = sock
            if self._source.known_by:
                self._have_it_proved(http_connection)
            self._http = http_connection
            self._answered = False
            return
        if self._closed:
            raise SourceLostError(f"the connection to source {self.party} was closed by this side", self.party)
        raise SourceLostError(f"source {self.party} does not accept connections: {failure}", self.party) from failure

    def _have_it_proved(self, http_connection: _OpenSocketConnection) -> None:
        there, nonce = self._source, secrets.token_hex(NONCE_DIGITS // 2)
        with self._named_failures("waiting for its proof"), self._unanswered():
            http_connection.request("GET", f"{PROOF_PATH}?nonce={nonce}", headers={"Accept-Encoding": "identity"})
            response = http_connection.getresponse()
            proof = response.read(PROOF_DIGITS + 1)
            if response.status == 429:
                raise SourceLostError(
                    f"{self.party} is asked too often to prove that it is source {there.source}", self.party
                )
            if response.status != 200 or not hmac.compare_digest(
                proof, proof_of(there.key, nonce, there.host, there.port).encode()
            ):
                raise SourceRefusedError(
                    f"{self.party} does not prove that it is source {there.source}; nothing was asked of it", self.party
                )
            response.close()

    def close(self) -> None:
        """Wake and fail whatever is waiting on this connection. From any thread; the owner still calls `release`."""
        with self._lock:
            self._closed = True
            if self._socket is not None:
                with contextlib.suppress(OSError):  # not connected any more
                    # Not SSLSocket's own: it forgets its session, and a read that goes on takes ciphertext for the body.
                    socket.socket.shutdown(self._socket, socket.SHUT_RDWR)

    def release(self) -> None:
        """Close the socket. By the thread that uses the connection."""
        with self._lock:
            self._closed = True
        self._drop()

    def get(
        self,
        path: str,
        headers: Mapping[str, str] | None = None,
        *,
        method: str = "GET",
        body: bytes | None = None,
    ) -> Answer:
        """Send a request and read the head of its answer.

        A source closes a connection on which nothing was asked for a while. Where that shows before a byte of the answer has
        come, on a connection that has answered before, the request is sent once more over a new one: every request of this
        protocol may be repeated.

        Raises:
            SourceLostError: the connection ended, or cannot be opened.
            SourceRefusedError: no TLS session was agreed on.
            TransferStalledError: no byte came for the stall timeout.
        """
        doing = f"waiting for an answer to {path}"
        if self._http is not None and self._answered:
            if self._http.sock is not None:
                with self._named_failures(doing):
                    try:
                        return self._ask(self._http, method, path, headers, body)
                    except _CLOSED_BY_PEER:
                        if self._closed:
                            raise
            self._drop()
        if self._http is None:
            self.open()
        with self._named_failures(doing), self._unanswered():
            if self._http is None:
                raise ConnectionError("not connected")
            return self._ask(self._http, method, path, headers, body)

    @contextlib.contextmanager
    def _unanswered(self) -> Iterator[None]:
        try:
            yield
        except _CLOSED_BY_PEER as error:
            if self._closed:
                raise
            self._drop()
            doubt = ", or accepts no certificate of ours" if self._source.scheme == "https" else ""
            why = f"it closed a new connection unanswered ({error}); perhaps it has too many connections{doubt}"
            if isinstance(given := self._ssl_context, Tls):
                why = given.why_not(error, was_closed=True) or why
            raise UnansweredError(why) from error

    def _ask(
        self,
        http_connection: _OpenSocketConnection,
        method: str,
        path: str,
        headers: Mapping[str, str] | None,
        body: bytes | None,
    ) -> Answer:
        sent = {"Accept-Encoding": "identity", **self._headers, **(headers or {})}  # as `http.client` would send it
        http_connection.request(method, path, body=body, headers=sent)
        response = http_connection.getresponse()
        self._answered = True
        return Answer(self, response, path)

    def _drop(self) -> None:
        """Close the socket and forget it. By the thread that uses the connection."""
        with self._lock:
            if self._socket is not None:
                self._socket.close()
                self._socket = None
        if self._http is not None:
            self._http.close()
            self._http = None

    def _shake_hands(self, sock: socket.socket, deadline: float) -> ssl.SSLSocket:
        """Return the socket that speaks TLS over a connected one; the certificate has been verified, and its name.

        Raises:
            SourceRefusedError: the source answered, but there will be no session: trying again unchanged cannot help.
            OSError: the connection ended, or the deadline passed.
        """
        given = self._ssl_context
        context = given.client() if isinstance(given, Tls) else given or _default_context()
        try:
            with self._lock:
                # From here on the new object owns the descriptor; `close` has to find it.
                secured = context.wrap_socket(
                    sock, server_hostname=self._name.partition("%")[0], do_handshake_on_connect=False
                )
                self._socket = secured
            secured.settimeout(max(deadline - time.monotonic(), 0.001))
            secured.do_handshake()
        except _CLOSED_BY_PEER as error:
            raise UnansweredError(
                f"it closed the connection during the TLS handshake ({error}); perhaps it accepts no certificate of ours"
            ) from error
        except ssl.SSLError as error:
            raise SourceRefusedError(
                f"source {self.party}: {self._why_not(error) or error}; nothing was asked of it", self.party
            ) from error
        except ValueError as error:  # a host that cannot be the name in a certificate
            raise SourceRefusedError(f"source {self.party}: no TLS name: {error}", self.party) from error
        return secured

    def _why_not(self, error: ssl.SSLError) -> str:
        given = self._ssl_context
        return given.why_not(error) if isinstance(given, Tls) else why_not(error, "" if given is None else None)

    def set_stall_timeout(self, stall_timeout_s: float) -> None:
        """Change the limit for each wait for a byte."""
        self._stall_timeout_s = stall_timeout_s
        with self._lock:
            if self._socket is not None and not self._closed:
                self._socket.settimeout(stall_timeout_s)

    @contextlib.contextmanager
    def _named_failures(self, doing: str) -> Iterator[None]:
        try:
            yield
        except TimeoutError as error:
            raise TransferStalledError(
                f"source {self.party} sent no byte for {self._stall_timeout_s:g} s while {doing}; it may hang",
                self.party,
            ) from error
        except ssl.SSLError as error:
            kind = SourceRefusedError if error.reason and "ALERT" in error.reason else SourceLostError
            what = f"source {self.party} ended the TLS session while {doing}: {self._why_not(error) or error}"
            raise kind(what, self.party) from error
        except (OSError, http.client.HTTPException, ValueError) as error:
            # What http.client says of a header that cannot be sent quotes its value, the token for one.
            is_quoting = isinstance(error, ValueError) and not isinstance(error, http.client.HTTPException)
            what = ("" if is_quoting else str(error)) or type(error).__name__
            raise SourceLostError(f"source {self.party} was lost while {doing}: {what}", self.party) from error


@functools.cache
def _default_context() -> ssl.SSLContext:
    """Believes the certificate authorities of this machine; made once, because reading them takes long."""
    return ssl.create_default_context()


class Answer:
    """The answer to one request. Must be read to its end before the next request."""

    def __init__(self, connection: SourceConnection, response: http.client.HTTPResponse, path: str) -> None:
        self._connection = connection
        self._response = response
        self._path = path
        self.status = response.status

    @property
    def length(self) -> int | None:
        """Bytes of the body that are still to come, where the source announced a length."""
        return self._response.length

    def header(self, name: str) -> str:
        """Return a header, or an empty string."""
        return self._response.getheader(name) or ""

    def read(self, max_bytes: int) -> bytes:
        """Return the whole body.

        Raises:
            StateFormatError: it is longer than `max_bytes`.
            SourceLostError: it ended early, or before its length was announced.
            TransferStalledError: no byte came for the stall timeout.
        """
        length = self.length
        party = self._connection.party
        if length is None:
            raise SourceLostError(
                f"source {party} was lost while answering {self._path}, or is none: no length was announced", party
            )
        if length > max_bytes:
            raise StateFormatError(
                f"source {party}: the answer to {self._path} has {length} bytes, the limit is {max_bytes}", party
            )
        body = bytearray(length)
        self._fill(memoryview(body), None)
        return bytes(body)

    def read_into(self, target: memoryview, on_bytes: Callable[[int], None] | None = None) -> None:
        """Fill `target` from the body.

        Args:
            on_bytes: told how many bytes have come, several times a second where they come slowly.

        Raises:
            SourceLostError: the body ended early.
            TransferStalledError: no byte came for the stall timeout.
        """
        self._fill(target, on_bytes)

    def _fill(self, target: memoryview, on_bytes: Callable[[int], None] | None) -> None:
        filled = 0
        with self._connection._named_failures(f"reading {self._path}"):
            while filled < len(target):
                asked_at = time.monotonic()
                piece = target[filled:] if on_bytes is None else target[filled : filled + self._connection.piece_bytes]
                count = self._response.readinto(piece)
                if count == 0:
                    raise http.client.IncompleteRead(b"", len(target) - filled)
                filled += count
                if on_bytes is not None:
                    on_bytes(count)
                    self._connection.took(len(piece), time.monotonic() - asked_at)
            if self._response.length == 0:
                self._response.close()

    def refusal(self) -> Refusal:
        """Read the body of an answer that is a refusal; a body that is none gives one that says so."""
        try:
            return decode_refusal(self.read(MAX_REFUSAL_BYTES))
        except (msgspec.MsgspecError, UnicodeDecodeError, StateFormatError):
            return Refusal(error="unknown", message=f"HTTP status {self.status} without an explanation")

    def refused(self, refusal: Refusal) -> SourceRefusedError:
        """Return the error for a refusal."""
        serving = "nothing" if refusal.serving_step is None else f"step {refusal.serving_step}"
        party = self._connection.party
        return SourceRefusedError(
            f"source {party} refused {self._path} ({self.status} {refusal.error}): {refusal.message[:400]}; it serves {serving}",
            party,
        )
