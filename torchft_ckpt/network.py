"""Where a process listens, which address it advertises, whether a peer knows the token. Plain sockets, no torch, no aiohttp.

The address that a server advertises is the one that its peers can reach fastest: an argument, else the environment
(`TORCHFT_CKPT_HOSTNAME`), else the address of the interface that routes to a peer that is known already (the lighthouse,
say). Never the bare host name, which may resolve to the slowest network card, or on other machines to nothing.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import hmac
import ipaddress
import os
import socket
import weakref

from torchft_ckpt import config
from torchft_ckpt.errors import ConfigError

# Routed like any outside address; nothing is ever sent to them (RFC 5737 and RFC 3849, documentation addresses).
_OUTSIDE = ("192.0.2.1", 9)
_OUTSIDE_IPV6 = ("2001:db8::1", 9)
_NOT_HERE = (errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL)


def advertised_host(argument: str | None = None, *, bound: str = "", towards: str | None = None) -> str:
    """Return the address to advertise.

    Args:
        argument: what the user asked for; an empty string counts as nothing.
        bound: the address that is listened on; taken where it is one, and not all of them.
        towards: `host:port` of a peer; without one, the interface that routes to the outside, by IPv4 where it can.

    Raises:
        ConfigError: it is one of IPv6, where only IPv4 is listened on.
    """
    host = config.resolve(argument or None, config.HOSTNAME, "" if is_wildcard(bound) else bound, str)
    if host:
        if ":" in host and bound == "0.0.0.0":
            message = f"peers are told {host}, but {bound} listens on IPv4 alone; bind to :: or to {host}"
            raise ConfigError(message, party="hostname")
        return host
    if towards is not None:
        target = config.parse_host_port(towards, what="peer address")
        return route_source(target[0], target[1] or 9) or "127.0.0.1"
    outside = [_OUTSIDE, _OUTSIDE_IPV6] if ":" in bound else [_OUTSIDE]
    return next(filter(None, (route_source(*target) for target in outside)), "127.0.0.1")


def listen(host: str, port: int, backlog: int) -> list[socket.socket]:
    """Listen at every address of a host, on one port; return the sockets, which do not block. Forked children do not listen.

    Args:
        host: an address or a name; `::` is all of IPv6 and of IPv4, by one socket, and `0.0.0.0` where that cannot be.
        port: 0 for any free one.
        backlog: connections that may wait to be accepted.

    Raises:
        OSError: it is no address of this machine, or the port is taken; nothing is listened on.
    """
    is_dual = ":" in host and is_wildcard(host) and socket.has_dualstack_ipv6()
    if ":" in host and is_wildcard(host) and not is_dual:
        host = "0.0.0.0"
    found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    listeners: list[socket.socket] = []
    with contextlib.ExitStack() as opened:
        for number, (family, _, _, _, address) in enumerate(found, 1):
            place = (address[0], listeners[0].getsockname()[1] if listeners else port, *address[2:])
            try:
                listener = socket.create_server(place, family=family, backlog=backlog, dualstack_ipv6=is_dual)
            except OSError as error:  # a name may have an address of a family that this machine lacks
                if error.errno in _NOT_HERE and (listeners or number < len(found)):
                    continue
                raise
            opened.enter_context(listener).setblocking(False)
            keep_from_forked_children(listener)
            listeners.append(listener)
        opened.pop_all()
    return listeners


def route_source(host: str, port: int) -> str | None:
    """Return the local address that packets to `host` leave from, None where there is no route. Sends nothing."""
    try:
        candidates = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)
    except OSError:
        return None
    candidates.sort(key=lambda candidate: candidate[0] != socket.AF_INET)
    for family, kind, protocol, _, address in candidates:
        try:
            with socket.socket(family, kind, protocol) as probe:
                probe.connect(address)
                return str(probe.getsockname()[0])
        except OSError:
            continue
    return None


def is_wildcard(host: str) -> bool:
    """Whether listening on `host` is listening on every interface."""
    try:
        return host == "" or ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return False


def wildcard_for(host: str) -> str:
    """Return the address to listen on so that peers reach this process at `host`: a name may be of either family."""
    try:
        return "::" if ipaddress.ip_address(host).version == 6 else "0.0.0.0"
    except ValueError:
        return "::"


def without_mapping(address: str) -> str:
    """Return a peer's address as it is written in its own family: a socket of both shows those of IPv4 in IPv6's clothes."""
    return address.removeprefix("::ffff:")


def join_host_port(host: str, port: int) -> str:
    """Return `host:port`, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def bearer_matches(header: str | None, token: str) -> bool:
    """Whether an `Authorization` header carries the token, compared in constant time. An empty token lets all in."""
    if not token:
        return True
    presented = (header or "").encode(errors="surrogateescape")  # a header may hold any bytes
    return hmac.compare_digest(presented, f"Bearer {token}".encode())


def set_dead_peer_timeout(sock: socket.socket, timeout_s: float) -> None:
    """Make the kernel give a connection up when what was sent is not acknowledged for `timeout_s` (RFC 5482).

    Without it a peer whose machine lost its power is noticed after a quarter of an hour. Linux only; elsewhere a no-op.
    """
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, max(1, int(timeout_s * 1000)))


_not_for_children: dict[int, int] = {}
"""Descriptors, with their inodes, that a forked child must not keep open."""


def keep_from_forked_children(sock: socket.socket) -> None:
    """See to it that a child that this process forks (a data loader's worker, say) does not keep a connection open.

    While any process has it open the kernel does not close a connection, so the peer of a process that was killed would
    hear nothing as long as a child of it lives. In the child the descriptor is replaced, not closed: its number may not
    come to mean something else to the objects that still refer to it.
    """
    _not_for_children[sock.fileno()] = os.fstat(sock.fileno()).st_ino


_for_the_parent: weakref.WeakSet[object] = weakref.WeakSet()


def leave_to_parent(resource: object) -> None:
    """See to it that a forked child does not destroy an object of torch's that has threads: they are not there.

    Its destructor would wait for them: it hangs, or crashes the child, when its garbage is collected or its interpreter ends.
    """
    _for_the_parent.add(resource)


def keep_for_ever(resource: object) -> None:
    """Have Python never destroy an object, at the end of the process neither; the operating system frees what it has."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(resource))


def _let_go_in_child() -> None:
    for resource in list(_for_the_parent):
        keep_for_ever(resource)
    null = os.open(os.devnull, os.O_RDWR)
    for fd, inode in _not_for_children.items():
        try:
            if os.fstat(fd).st_ino == inode:
                os.dup2(null, fd, inheritable=False)
        except OSError:
            continue  # closed meanwhile
    _not_for_children.clear()
    os.close(null)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_let_go_in_child)


def in_use_hint(error: OSError) -> str:
    """Say what to do about a bind that failed."""
    if isinstance(error, socket.gaierror):
        return f"{error.strerror}; choose an address of this machine"
    return f"{os.strerror(error.errno) if error.errno else error}; choose another port, or 0 for any free one"
