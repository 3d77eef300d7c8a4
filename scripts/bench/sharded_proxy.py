"""A relay in front of one source that counts every byte that its receivers get and send. It trusts no library's own count."""

from __future__ import annotations

import contextlib
import re
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import TracebackType
from urllib.parse import urlsplit

_PIECE_BYTES = 1 << 20
_END_OF_HEAD = b"\r\n\r\n"
_LENGTH = re.compile(rb"\r\ncontent-length: *([0-9]+)\r\n", re.IGNORECASE)
_MANIFEST = re.compile(rb"\AGET [^ ]*/manifest[ ?]")


@dataclass(slots=True)
class Counted:
    """What crossed, in bytes of TCP payload."""

    received: int = 0
    """From the source to the receivers: heads, manifests, elements, digests."""
    manifests: int = 0
    """The part of `received` that is answers with manifests, heads included."""
    sent: int = 0
    """From the receivers to the source."""

    def add(self, other: Counted) -> None:
        """Add what another relay has counted."""
        self.received += other.received
        self.manifests += other.manifests
        self.sent += other.sent


class CountingProxy:
    """Listens on a port of its own and relays to one source. Leaving the `with` block ends it.

    Args:
        address: `http://HOST:PORT` of the source.
    """

    def __init__(self, address: str) -> None:
        parts = urlsplit(address)
        self._target = (parts.hostname or "", parts.port or 0)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._lock = threading.Lock()
        self._counted = Counted()
        self._sockets: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self._spawn(self._accept)

    def __enter__(self) -> CountingProxy:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        with self._lock:
            sockets = [self._listener, *self._sockets]
        for sock in sockets:
            with contextlib.suppress(OSError):  # not connected any more
                sock.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()
        for sock in sockets:
            sock.close()

    def counted(self) -> Counted:
        """Return what crossed once every connection of the receivers has ended.

        Raises:
            TimeoutError: one has not.
        """
        for thread in self._threads.copy()[1:]:
            thread.join(timeout=10)
            if thread.is_alive():
                raise TimeoutError(f"a receiver keeps its connection to {self.address}")
        return self._counted

    def _spawn(self, work: Callable[..., None], *arguments: object) -> None:
        thread = threading.Thread(target=work, args=arguments, name="counting proxy", daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while True:
            try:
                receiver, _ = self._listener.accept()
            except OSError:
                return
            source = socket.create_connection(self._target)
            for sock in (receiver, source):
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with self._lock:
                self._sockets += [receiver, source]
            asked = threading.Event()
            first: list[bytes] = []
            self._spawn(self._relay_requests, receiver, source, asked, first)
            self._spawn(self._relay_answers, source, receiver, asked, first)

    def _relay_requests(
        self, receiver: socket.socket, source: socket.socket, asked: threading.Event, first: list[bytes]
    ) -> None:
        for data in _pieces(receiver):
            if not first:
                first.append(data)
            asked.set()
            with self._lock:
                self._counted.sent += len(data)
            if not _forward(source, data):
                break
        asked.set()
        _end(source)

    def _relay_answers(
        self, source: socket.socket, receiver: socket.socket, asked: threading.Event, first: list[bytes]
    ) -> None:
        num_bytes, head, manifest_bytes = 0, b"", None
        for data in _pieces(source):
            if manifest_bytes is None:
                asked.wait()
                head += data
                manifest_bytes = _answer_bytes(head) if first and _MANIFEST.match(first[0]) else 0
            num_bytes += len(data)
            if not _forward(receiver, data):
                break
        with self._lock:
            self._counted.received += num_bytes
            self._counted.manifests += manifest_bytes or 0
        _end(receiver)


def _answer_bytes(head: bytes) -> int | None:
    """Return the length of an answer, head included; None where its head is not all there."""
    end = head.find(_END_OF_HEAD)
    if end < 0:
        return None
    length = _LENGTH.search(head[: end + 2])
    return end + len(_END_OF_HEAD) + (int(length[1]) if length else 0)


def _pieces(sock: socket.socket) -> Iterator[bytes]:
    while True:
        try:
            data = sock.recv(_PIECE_BYTES)
        except OSError:
            return
        if not data:
            return
        yield data


def _forward(sock: socket.socket, data: bytes) -> bool:
    try:
        sock.sendall(data)
    except OSError:
        return False
    return True


def _end(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):  # not connected any more
        sock.shutdown(socket.SHUT_WR)
