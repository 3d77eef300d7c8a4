"""Plain sockets as the yardstick: `sendall` of each buffer on one side, `recv_into` loops on the other, nothing between.

One thread and one connection a stream, kept open between transfers, TCP_NODELAY, memory that both sides have used before.
"""

from __future__ import annotations

import socket
import threading
import time

from bench.transport_figures import deal

_GO = b"g"


class RawSource:
    """Sends its buffers whenever the other side asks; ends with its process.

    Args:
        buffers: dealt round robin over the streams; each is sent by one `sendall`.
        num_streams: how many connections to wait for.
    """

    def __init__(self, buffers: list[memoryview], num_streams: int) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._hands = [[buffers[index] for index in hand] for hand in deal(range(len(buffers)), num_streams)]
        for _ in range(num_streams):
            threading.Thread(target=self._serve, name="raw source", daemon=True).start()

    def _serve(self) -> None:
        connection, _ = self._listener.accept()
        with connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            hand = self._hands[connection.recv(1)[0]]
            while connection.recv(1) == _GO:
                for buffer in hand:
                    connection.sendall(buffer)


class RawReceiver:
    """Receives into its buffers, which are as long as the source's.

    Args:
        port: of the source.
        buffers: what to receive into.
        num_streams: as the source's.
    """

    def __init__(self, port: int, buffers: list[memoryview], num_streams: int) -> None:
        self._hands = [[buffers[index] for index in hand] for hand in deal(range(len(buffers)), num_streams)]
        self._connections: list[socket.socket] = []
        for number in range(num_streams):
            connection = socket.create_connection(("127.0.0.1", port), timeout=60)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.sendall(bytes([number]))
            self._connections.append(connection)

    def receive(self) -> float:
        """Receive everything once; return how many seconds it took from asking to the last byte.

        Raises:
            ConnectionError: the source closed a connection.
        """
        failed: list[int] = []

        def work(number: int) -> None:
            connection = self._connections[number]
            connection.sendall(_GO)
            for buffer in self._hands[number]:
                at = 0
                while at < len(buffer):
                    count = connection.recv_into(buffer[at:])
                    if not count:
                        failed.append(number)
                        return
                    at += count

        started = time.monotonic()
        threads = [
            threading.Thread(target=work, args=(number,), name="raw receiver")
            for number in range(1, len(self._connections))
        ]
        for thread in threads:
            thread.start()
        work(0)
        for thread in threads:
            thread.join()
        took_s = time.monotonic() - started
        if failed:
            raise ConnectionError(f"raw source closed connections {failed}")
        return took_s
