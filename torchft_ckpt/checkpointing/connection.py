"""One HTTP connection from a receiver to its source, and what its failures mean.

It turns what sockets and HTTP do into the named transfer errors; it does not know blocks or deadlines. `close` may be called
from any thread and ends whatever the connection is waiting for.
"""

from __future__ import annotations

import contextlib
import http.client
import socket
import threading
from collections.abc import Iterator, Mapping

import msgspec

from torchft_ckpt.checkpointing.address import SourceAddress
from torchft_ckpt.checkpointing.protocol import MAX_REFUSAL_BYTES, Refusal
from torchft_ckpt.errors import SourceLostError, SourceRefusedError, StateFormatError, TransferStalledError


class _OpenSocketConnection(http.client.HTTPConnection):
    """An `HTTPConnection` over a socket that was connected before."""

    def connect(self) -> None:
        raise http.client.NotConnected("this connection is not opened again")


class SourceConnection:
    """A kept-alive connection to one source.

    Args:
        source: where to connect.
        headers: sent with every request.
        connect_timeout_s: limit for the connection to be accepted.
        stall_timeout_s: limit for each wait for a byte.
    """

    def __init__(
        self, source: SourceAddress, *, headers: Mapping[str, str], connect_timeout_s: float, stall_timeout_s: float
    ) -> None:
        self.party = str(source)
        self._source = source
        self._headers = dict(headers)
        self._connect_timeout_s = connect_timeout_s
        self._stall_timeout_s = stall_timeout_s
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None
        self._closed = False
        self._http: _OpenSocketConnection | None = None

    def open(self) -> None:
        """Connect.

        Raises:
            SourceLostError: nobody accepts connections there.
        """
        failure: OSError | None = None
        try:
            candidates = socket.getaddrinfo(self._source.host, self._source.port, type=socket.SOCK_STREAM)
        except OSError as error:
            raise SourceLostError(
                f"source {self.party}: its address cannot be resolved: {error}", self.party
            ) from error
        for family, kind, protocol, _, address in candidates:
            sock = socket.socket(family, kind, protocol)
            with self._lock:
                if self._closed:
                    sock.close()
                    break
                self._socket = sock
            try:
                sock.settimeout(self._connect_timeout_s)
                sock.connect(address)
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                sock.settimeout(self._stall_timeout_s)
            except OSError as error:
                failure = error
                with self._lock:
                    self._socket = None
                    sock.close()
                continue
            self._http = _OpenSocketConnection(self._source.host, self._source.port)
            self._http.sock = sock
            return
        raise SourceLostError(f"source {self.party} does not accept connections: {failure}", self.party) from failure

    def close(self) -> None:
        """Wake and fail whatever is waiting on this connection. From any thread; the owner still calls `release`."""
        with self._lock:
            self._closed = True
            if self._socket is not None:
                with contextlib.suppress(OSError):  # not connected any more
                    self._socket.shutdown(socket.SHUT_RDWR)

    def release(self) -> None:
        """Close the socket. By the thread that uses the connection."""
        with self._lock:
            self._closed = True
            if self._socket is not None:
                self._socket.close()
                self._socket = None
        if self._http is not None:
            self._http.close()

    def get(self, path: str, headers: Mapping[str, str] | None = None, *, method: str = "GET") -> Answer:
        """Send a request and read the head of its answer.

        Raises:
            SourceLostError: the connection ended.
            TransferStalledError: no byte came for the stall timeout.
        """
        if self._http is None:
            self.open()
        with self._named_failures(f"waiting for an answer to {path}"):
            if self._http is None:
                raise ConnectionError("not connected")
            self._http.request(method, path, headers={**self._headers, **(headers or {})})
            return Answer(self, self._http.getresponse(), path)

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
        except (OSError, http.client.HTTPException, ValueError) as error:
            what = str(error) or type(error).__name__
            raise SourceLostError(f"source {self.party} was lost while {doing}: {what}", self.party) from error


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
        self.read_into(memoryview(body))
        return bytes(body)

    def read_into(self, target: memoryview) -> None:
        """Fill `target` from the body.

        Raises:
            SourceLostError: the body ended early.
            TransferStalledError: no byte came for the stall timeout.
        """
        filled = 0
        with self._connection._named_failures(f"reading {self._path}"):
            while filled < len(target):
                count = self._response.readinto(target[filled:])
                if count == 0:
                    raise http.client.IncompleteRead(b"", len(target) - filled)
                filled += count
            if self._response.length == 0:
                self._response.close()

    def refusal(self) -> Refusal:
        """Read the body of an answer that is a refusal; a body that is none gives one that says so."""
        try:
            return msgspec.json.decode(self.read(MAX_REFUSAL_BYTES), type=Refusal)
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
