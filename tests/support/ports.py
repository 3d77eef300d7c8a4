"""Ports that no other process takes between the moment a test learns their number and the moment somebody listens there."""

from __future__ import annotations

import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def reserved_port() -> Iterator[int]:
    """Yield a port at which nobody listens, unless somebody is told its number.

    A socket is bound to it at every address, so the kernel gives it to nobody else, and nobody has it for a connection from
    another address, beside which a store could not listen everywhere. Whoever asks for it by number, as servers do (with
    SO_REUSEADDR), may listen, stop and listen again beside that socket.
    """
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("0.0.0.0", 0))
        port = int(holder.getsockname()[1])
        if not sys.platform.startswith("linux"):
            holder.close()  # elsewhere nobody could listen beside it
        yield port


def is_open(sock: socket.socket) -> bool:
    """Whether the other end has not closed the connection. Drops what it has sent, and makes the socket non-blocking."""
    sock.setblocking(False)
    try:
        while sock.recv(65536):
            pass
        return False
    except BlockingIOError:
        return True
    except OSError:
        return False
