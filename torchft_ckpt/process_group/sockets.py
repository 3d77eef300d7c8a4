"""Finds the sockets of a Gloo group, and ends their traffic.

Gloo has no abort: an operation in flight returns when its peers answer, when its timeout passes, or when its sockets fail.
So abort makes the sockets fail, with shutdown(2). This file finds exactly those sockets, and no other of the process:

- Each Gloo device runs one event loop on an epoll instance of its own, and Linux lists what an epoll instance watches in
  `/proc/self/fdinfo`, with the inode of each descriptor. The instance is recognised once, when the device is created, and
  a duplicate of its descriptor is kept, so that its number cannot come to mean something else. A socket is shut down
  through a duplicate too, after its inode was compared: a number that was closed and reused meanwhile is left alone.
- The socket of a store client is the one that a given thread is blocked on, as `/proc/self/task/*/syscall` tells, if its
  peer is the store.

The listener is never shut down: Gloo ends the process if its listener fails.

Elsewhere than on Linux nothing can be found; `create_gloo_device` returns no sockets and operations end by their timeouts.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import platform
import re
import select
import socket
import struct
import sys
import threading
from collections.abc import Collection, Iterator
from pathlib import Path

from torch.distributed import ProcessGroupGloo as TorchProcessGroupGloo

logger = logging.getLogger(__name__)

_EPOLL_LINK = "anon_inode:[eventpoll]"
_WATCHED = re.compile(r"^tfd:\s*(\d+) .*\bdata:\s*([0-9a-f]+) .*\bino:\s*([0-9a-f]+)\b", re.MULTILINE)
_EPOLL_CTL_MOD = 3
_EPOLL_EVENT = "=IQ" if platform.machine() == "x86_64" else "@IQ"  # without padding there alone
_NUM_DEVICE_ATTEMPTS = 5
_MAX_DESCRIPTOR = 0x7FFFFFFF
_KNOWS_LAZY_INIT = "lazy_init" in (TorchProcessGroupGloo.create_device.__doc__ or "")
"""An older torch has no such argument: its Gloo always connects at once."""

# Two devices that are created at once could not be told apart.
_device_lock = threading.Lock()


class GlooSockets:
    """The sockets of one Gloo device. Any thread may call its methods; `close` is idempotent.

    Args:
        epoll_fd: the device's epoll instance; it is duplicated, the original stays Gloo's.
    """

    def __init__(self, epoll_fd: int) -> None:
        self._lock = threading.Lock()
        self._epoll_fd: int | None = os.dup(epoll_fd)

    def shutdown_connections(self) -> int:
        """End the traffic on every connection of the device, in both directions; return how many there were."""
        num_ended = 0
        for _, _, sock in self._open():
            with sock:
                if _listens(sock):
                    continue
                # The peer may have closed it already.
                with contextlib.suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)
                num_ended += 1
        return num_ended

    def leave(self) -> None:
        """Give back the duplicate descriptor once Gloo's calls have returned. Its loop hears no more of those that are left.

        Gloo keeps some devices for ever that were ended as they connected (1 of 100), with a connection that nobody handles
        any more: the loop would turn round that, on a whole core. Each is reported once more, to whom Gloo has named for it.
        """
        for fd, data, sock in self._open():
            with sock, self._lock:
                if self._epoll_fd is not None and not _listens(sock):
                    event = struct.pack(_EPOLL_EVENT, select.EPOLLONESHOT, data)
                    ctypes.CDLL(None).epoll_ctl(self._epoll_fd, _EPOLL_CTL_MOD, fd, event)
        self.close()

    def listener_address(self) -> tuple[str, int] | None:
        """Return host and port where the device listens, or None if this is not the epoll instance of a Gloo device."""
        listeners = []
        for _, _, sock in self._open():
            with sock:
                if _listens(sock):
                    listeners.append(sock.getsockname()[:2])
        return listeners[0] if len(listeners) == 1 else None

    def close(self) -> None:
        """Give back the duplicate descriptor; the device itself is not touched."""
        with self._lock:
            if self._epoll_fd is not None:
                os.close(self._epoll_fd)
                self._epoll_fd = None

    def _open(self) -> Iterator[tuple[int, int, socket.socket]]:
        """Yield the TCP sockets that the epoll instance watches: descriptor, what Gloo has noted with it, and a duplicate, which
        the caller closes."""
        with self._lock:
            if self._epoll_fd is None:
                return
            watched = _WATCHED.findall(Path(f"/proc/self/fdinfo/{self._epoll_fd}").read_text())
        for fd, data, inode in watched:
            if (sock := _duplicate_tcp_socket(int(fd), inode=int(inode, 16))) is not None:
                yield int(fd), int(data, 16), sock


def create_gloo_device(hostname: str, interface: str) -> tuple[object, GlooSockets | None]:
    """Create a Gloo device and find its sockets.

    Args:
        hostname: the address to listen on; empty to choose by interface.
        interface: the network interface to listen on; empty to choose by address.

    Returns:
        The device for `ProcessGroupGloo._Options._devices`, and its sockets; None if they cannot be told apart from
        others with certainty (not Linux; somebody else kept creating Gloo devices at the same moments).

    Raises:
        RuntimeError: Gloo cannot listen there.
    """

    def create() -> object:
        connect_at_once = {"lazy_init": False} if _KNOWS_LAZY_INIT else {}
        return TorchProcessGroupGloo.create_device(hostname=hostname, interface=interface, **connect_at_once)

    if not sys.platform.startswith("linux"):
        return create(), None
    with _device_lock:
        for _ in range(_NUM_DEVICE_ATTEMPTS):
            before = _epoll_descriptors()
            device = create()
            candidates = []
            for fd in _epoll_descriptors() - before:
                with contextlib.suppress(OSError):  # another thread's, closed meanwhile
                    candidates.append(GlooSockets(fd))
            ours = [sockets for sockets in candidates if sockets.listener_address() is not None]
            for sockets in candidates:
                if len(ours) != 1 or sockets is not ours[0]:
                    sockets.close()
            if len(ours) == 1:
                return device, ours[0]
            del device
        logger.warning(
            "the sockets of the Gloo device at %s could not be told apart from others of this process; "
            "an abort will take until the operation in flight times out",
            hostname or interface,
        )
        return create(), None


def shutdown_awaited_connection(native_thread_id: int, peers: Collection[tuple[str, int]]) -> bool:
    """End the traffic on the connection to one of `peers` that a thread of this process is blocked on in a system call.

    Args:
        native_thread_id: `threading.Thread.native_id` of that thread.
        peers: numeric addresses and ports; the connection is left alone if it leads elsewhere.

    Returns:
        Whether such a connection was found and shut down.
    """
    if not sys.platform.startswith("linux"):
        return False
    fd = _awaited_descriptor(native_thread_id)
    sock = _duplicate_tcp_socket(fd, inode=None) if fd is not None else None
    if sock is None:
        return False
    with sock:
        try:
            host, port = sock.getpeername()[:2]
            if (host.removeprefix("::ffff:"), port) not in peers:  # an IPv4 address may come in IPv6's clothes
                return False
            sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            return False
    return True


def _awaited_descriptor(native_thread_id: int) -> int | None:
    """Return the descriptor that a thread is blocked on in recv, or in a poll of one descriptor; None if in neither."""
    try:
        # "NUMBER ARG0 ARG1 ...", or "running"
        words = Path(f"/proc/self/task/{native_thread_id}/syscall").read_text().split()
        if len(words) < 3:
            return None
        first, second = int(words[1], 16), int(words[2], 16)
        if first <= _MAX_DESCRIPTOR:  # recv(fd, ...)
            return first
        if second != 1:
            return None
        # poll({fd, events, revents}, 1, ...): read by way of a file, because the stack that it lies on may be gone by now
        with open("/proc/self/mem", "rb", buffering=0) as memory:
            polled = os.pread(memory.fileno(), 4, first)
    except (OSError, OverflowError):
        return None
    fd = int.from_bytes(polled, sys.byteorder, signed=True)
    return fd if 0 <= fd <= _MAX_DESCRIPTOR else None


def _epoll_descriptors() -> set[int]:
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # closed since it was listed
            if os.readlink(f"/proc/self/fd/{name}") == _EPOLL_LINK:
                found.add(int(name))
    return found


def _listens(sock: socket.socket) -> bool:
    return bool(sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))


def _duplicate_tcp_socket(fd: int, inode: int | None) -> socket.socket | None:
    """Return a duplicate of a descriptor if it is a TCP socket (and has that inode), else None."""
    try:
        duplicate = os.dup(fd)
    except OSError:
        return None
    try:
        if inode is not None and os.fstat(duplicate).st_ino != inode:
            raise OSError("this number belongs to another descriptor by now")
        sock = socket.socket(fileno=duplicate)
    except OSError:  # reused, or a pipe
        os.close(duplicate)
        return None
    if sock.family in (socket.AF_INET, socket.AF_INET6) and sock.type == socket.SOCK_STREAM:
        return sock
    sock.close()
    return None
