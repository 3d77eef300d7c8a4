"""A TCP proxy that damages what the source sends, at a byte of our choice."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable

Fault = Callable[["Connection", int, bytes], bytes]
"""Called with the connection, how many bytes were passed on before, and the next bytes; returns what to pass on."""


class Connection:
    """One connection through the proxy."""

    def __init__(self, client: socket.socket, source: socket.socket) -> None:
        self._client = client
        self._source = source
        self.ended = threading.Event()

    def cut(self) -> None:
        """Close both sides at once."""
        self.ended.set()
        for side in (self._client, self._source):
            with contextlib.suppress(OSError):
                side.shutdown(socket.SHUT_RDWR)


class FaultyProxy:
    """Forwards connections to a port on this machine, with a fault on the way back."""

    def __init__(self, port: int, fault: Fault = lambda connection, passed, data: data) -> None:
        self.fault = fault
        self._port = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._connections: list[Connection] = []
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def __enter__(self) -> FaultyProxy:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._threads[0].join(20)
        self._listener.close()
        for connection in self._connections:
            connection.cut()
        for thread in self._threads:
            thread.join(20)
        for connection in self._connections:
            connection._client.close()
            connection._source.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            source = socket.create_connection(("127.0.0.1", self._port))
            connection = Connection(client, source)
            self._connections.append(connection)
            for work in (self._forward, self._back):
                self._threads.append(threading.Thread(target=work, args=(connection, client, source)))
                self._threads[-1].start()

    def _forward(self, connection: Connection, client: socket.socket, source: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := client.recv(65536):
                source.sendall(data)
        connection.cut()

    def _back(self, connection: Connection, client: socket.socket, source: socket.socket) -> None:
        passed = 0
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                client.sendall(self.fault(connection, passed, data))
                passed += len(data)
        connection.cut()


def cut_after(num_bytes: int) -> Fault:
    """Pass on so many bytes, then close the connection."""

    def fault(connection: Connection, passed: int, data: bytes) -> bytes:
        if passed + len(data) <= num_bytes:
            return data
        connection._client.sendall(data[: max(num_bytes - passed, 0)])
        connection.cut()
        return b""

    return fault


def stall_after(num_bytes: int) -> Fault:
    """Pass on so many bytes, then nothing, with the connection open."""

    def fault(connection: Connection, passed: int, data: bytes) -> bytes:
        if passed + len(data) <= num_bytes:
            return data
        connection._client.sendall(data[: max(num_bytes - passed, 0)])
        connection.ended.wait(60)
        return b""

    return fault


def drip_after(num_bytes: int, pause_s: float) -> Fault:
    """Pass on so many bytes, then one at a time."""

    def fault(connection: Connection, passed: int, data: bytes) -> bytes:
        whole = max(min(num_bytes - passed, len(data)), 0)
        connection._client.sendall(data[:whole])
        for index in range(whole, len(data)):
            connection._client.sendall(data[index : index + 1])
            if connection.ended.wait(pause_s):
                break
        return b""

    return fault


def flip_bit_at(byte: int, bit: int = 0) -> Fault:
    """Flip one bit of one byte."""

    def fault(connection: Connection, passed: int, data: bytes) -> bytes:
        if not passed <= byte < passed + len(data):
            return data
        damaged = bytearray(data)
        damaged[byte - passed] ^= 1 << bit
        return bytes(damaged)

    return fault


def replace_from(byte: int, other: bytes) -> Fault:
    """Put other bytes in the place of what is sent from one byte on."""

    def fault(connection: Connection, passed: int, data: bytes) -> bytes:
        if passed + len(data) <= byte:
            return data
        kept = data[: max(byte - passed, 0)]
        start = max(passed - byte, 0)
        return kept + other[start : start + len(data) - len(kept)].ljust(len(data) - len(kept), b"\0")

    return fault
