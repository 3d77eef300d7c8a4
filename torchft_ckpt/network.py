"""Listening sockets, the address that a process advertises, and the check of a peer's token. Plain sockets, no torch, no
aiohttp.

The address that a server advertises is the one that the user chose: by an argument, `TORCHFT_CKPT_HOSTNAME`, or the interface
that he named for NCCL or Gloo (`core.services.interfaces`). Else it is the address of the interface that routes to a peer that
is known already (the lighthouse, say). Never the bare host name, which may resolve to the slowest network card, or on other
machines to nothing.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import hmac
import ipaddress
import logging
import os
import socket
import sys
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torchft_ckpt import config
from torchft_ckpt.core.services.interfaces import (
    Interface,
    NoSuchInterfaceError,
    address_by_gloo_names,
    address_by_nccl_names,
    further_addresses,
)
from torchft_ckpt.errors import AddressInUseError, ConfigError

try:
    import resource
except ImportError:  # not a Unix
    resource = None  # type: ignore[assignment]

logger = logging.getLogger(__name__)

# Routed like any outside address; nothing is ever sent to them (RFC 5737 and RFC 3849, documentation addresses).
_OUTSIDE = ("192.0.2.1", 9)
_OUTSIDE_IPV6 = ("2001:db8::1", 9)
_NOT_HERE = (errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL)
_PORTS_TRIED = 8


@dataclass(frozen=True, slots=True)
class Host:
    """The address that peers are told, and whether the user chose it: then no other one is used."""

    address: str
    is_chosen: bool


def choose_host(
    argument: str | None = None, *, bound: str = "", towards: str | None = None, beside_nccl: bool = False
) -> Host:
    """Return the address of a process of a job.

    In this order: the argument, `TORCHFT_CKPT_HOSTNAME`, the address that is listened on, the interface of `NCCL_SOCKET_IFNAME`
    where that counts, that of `GLOO_SOCKET_IFNAME`, the address that routes to a peer. On systems other than Linux the
    interfaces of a machine cannot be read, and these two variables are ignored.

    Args:
        argument, bound, towards: as of `advertised_host`.

    Raises:
        ConfigError: a variable names no interface that can be used; the message lists those that there are. Or the address is
            one of IPv6, where only IPv4 is listened on.
    """
    chosen = config.resolve(argument or None, config.HOSTNAME, "" if is_wildcard(bound) else bound, str)
    routed = "" if chosen else _routed(bound, towards)
    named = chosen or (beside_nccl and _host_of_nccl(routed)) or host_of_gloo(routed)
    return Host(_listened_on(named or routed, bound), is_chosen=bool(named))


def advertised_host(argument: str | None = None, *, bound: str = "", towards: str | None = None) -> str:
    """Return the address to advertise, whatever interfaces NCCL and Gloo are told to use: that of a lighthouse.

    Args:
        argument: what the user asked for; an empty string counts as nothing.
        bound: the address that is listened on; taken where it is one, and not all of them.
        towards: `host:port` of a peer; without one, the interface that routes to the outside, by IPv4 where it can.

    Raises:
        ConfigError: it is one of IPv6, where only IPv4 is listened on.
    """
    host = config.resolve(argument or None, config.HOSTNAME, "" if is_wildcard(bound) else bound, str)
    return _listened_on(host or _routed(bound, towards), bound)


def host_of_gloo(routed: str | None = None) -> str:
    """Return the address that `GLOO_SOCKET_IFNAME` chooses; empty where it is not set, or interfaces cannot be read.

    Raises:
        ConfigError: it names no interface that can be used.
    """
    names = config.resolve(None, config.GLOO_INTERFACE, "", str)
    return host_of_interface(names, config.GLOO_INTERFACE[0], routed) if names else ""


def host_of_interface(names: str, what: str, routed: str | None = None) -> str:
    """Return the address of an interface, named as `GLOO_SOCKET_IFNAME` does; empty where interfaces cannot be read.

    Args:
        routed: taken where one of them has it.

    Raises:
        ConfigError: they name no interface that can be used.
    """
    return _by_interface(address_by_gloo_names, names, what, routed)


def _host_of_nccl(routed: str | None) -> str:
    names = config.resolve(None, config.NCCL_INTERFACE, "", str)
    return _by_interface(address_by_nccl_names, names, config.NCCL_INTERFACE[0], routed) if names else ""


def _by_interface(
    choose: Callable[[str, Sequence[Interface], str | None], str], names: str, what: str, routed: str | None
) -> str:
    there = interfaces()
    try:
        return choose(names, there, routed) if there else ""
    except NoSuchInterfaceError as error:
        raise ConfigError(f"{what}={names!r} cannot be used: {error}", party=what) from error


def _routed(bound: str, towards: str | None) -> str:
    if towards is not None:
        target = config.parse_host_port(towards, what="peer address")
        return route_source(target[0], target[1] or 9) or "127.0.0.1"
    outside = [_OUTSIDE, _OUTSIDE_IPV6] if ":" in bound else [_OUTSIDE]
    return next(filter(None, (route_source(*target) for target in outside)), "127.0.0.1")


def _listened_on(host: str, bound: str) -> str:
    if ":" in host and bound == "0.0.0.0":
        message = f"peers are told {host}, but {bound} listens on IPv4 alone; bind to :: or to {host}"
        raise ConfigError(message, party="hostname")
    return host


def other_hosts(known_by: str, bound: str) -> list[str]:
    """Return where else a server that listens on all interfaces can be reached: see
    `core.services.interfaces.further_addresses`.
    """
    return further_addresses(interfaces(), known_by, has_ipv6=":" in bound) if is_wildcard(bound) else []


class _SocketAddress(ctypes.Structure):
    """Linux's `sockaddr_in` and `sockaddr_in6`, as far as they are read."""

    _fields_ = (
        ("family", ctypes.c_ushort),
        ("port", ctypes.c_ushort),
        ("ipv4", ctypes.c_ubyte * 4),  # in IPv6: flow information
        ("ipv6", ctypes.c_ubyte * 16),
    )


class _InterfaceAddress(ctypes.Structure):
    """Linux's `ifaddrs` (getifaddrs(3)), as far as it is read."""


_InterfaceAddress._fields_ = (
    ("next", ctypes.POINTER(_InterfaceAddress)),
    ("name", ctypes.c_char_p),
    ("flags", ctypes.c_uint),
    ("address", ctypes.POINTER(_SocketAddress)),
)
_UP, _LOOPBACK, _RUNNING = 0x1, 0x8, 0x40


def interfaces() -> list[Interface]:
    """Return the network interfaces of this machine, in its order. Linux only; elsewhere none.

    Bridges are told by `/sys`, which is that of the network namespace that it was mounted in.
    """
    if not sys.platform.startswith("linux"):
        return []
    libc = ctypes.CDLL(None, use_errno=True)
    first = ctypes.POINTER(_InterfaceAddress)()
    if libc.getifaddrs(ctypes.byref(first)) != 0:
        return []
    flags: dict[str, int] = {}
    addresses: dict[str, list[str]] = {}
    try:
        link = first
        while link:
            entry = link.contents
            name = os.fsdecode(entry.name)
            flags[name] = entry.flags
            address = entry.address.contents if entry.address else None
            if address is not None and address.family == socket.AF_INET:
                addresses.setdefault(name, []).append(socket.inet_ntop(socket.AF_INET, bytes(address.ipv4)))
            elif address is not None and address.family == socket.AF_INET6:
                addresses.setdefault(name, []).append(socket.inet_ntop(socket.AF_INET6, bytes(address.ipv6)))
            link = entry.next
    finally:
        libc.freeifaddrs(first)
    return [
        Interface(
            name=name,
            addresses=tuple(addresses.get(name, ())),
            is_up=flag & (_UP | _RUNNING) == _UP | _RUNNING,
            is_loopback=bool(flag & _LOOPBACK),
            is_bridge=os.path.isdir(f"/sys/class/net/{name}/bridge"),
        )
        for name, flag in flags.items()
    ]


def listen(host: str, port: int, backlog: int) -> list[socket.socket]:
    """Listen at every address of a host, on one port; return the sockets, which do not block. Forked children do not listen.

    Args:
        host: an address or a name; `::` is all of IPv6 and of IPv4, by one socket, and `0.0.0.0` where that cannot be.
        port: 0 for any free one.

    Raises:
        OSError: it is no address of this machine, or the port is taken; nothing is listened on.
    """
    is_dual = ":" in host and is_wildcard(host) and socket.has_dualstack_ipv6()
    if ":" in host and is_wildcard(host) and not is_dual:
        host = "0.0.0.0"
    found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    for _ in range(0 if port else _PORTS_TRIED - 1):  # a port that is free at one address may be taken at the next
        try:
            return _listen_at_all(found, 0, backlog, is_dual)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
    return _listen_at_all(found, port, backlog, is_dual)


def _listen_at_all(found: list[tuple[Any, ...]], port: int, backlog: int, is_dual: bool) -> list[socket.socket]:
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


_has_logged_open = False


def warn_if_open(what: str, host: str, token: str | None) -> None:
    """Say once for this process, where a service listens beyond this machine without a token, what follows from that.

    Args:
        token: what it wants to be shown; empty or None: nothing.
    """
    global _has_logged_open
    if token or is_loopback(host) or _has_logged_open:
        return
    _has_logged_open = True
    logger.warning(
        "%s listens on %s without a token: whoever can connect to it may join the job, read its weights and end it. Set"
        " TORCHFT_CKPT_TOKEN, or TORCHFT_CKPT_TOKEN_FILE, to one secret for the lighthouse and all ranks",
        what,
        host or "all addresses",
    )


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches what listens on `host`."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def is_wildcard(host: str) -> bool:
    """Whether listening on `host` is listening on every interface."""
    try:
        return host == "" or ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return False


def bind_for(host: str) -> str:
    """Return the address to listen on so that peers reach this process at `host`, and at no other address where that can be.

    An address of this machine is listened on alone; a name, or an address that is translated on the way, by all of its family.
    """
    try:
        with socket.socket(socket.AF_INET6 if ipaddress.ip_address(host).version == 6 else socket.AF_INET) as probe:
            probe.bind((host, 0))
    except (OSError, ValueError):
        return wildcard_for(host)
    return host


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


def parse_addresses(text: str, *, what: str, has_tls: bool | None = None) -> list[str]:
    """Return the addresses of a list with commas between them, each as `host:port`: see `config.parse_host_port`."""
    places = (config.parse_host_port(one, what=what, has_tls=has_tls) for one in text.rstrip(", ").split(","))
    return [join_host_port(*place) for place in places]


def bearer_matches(header: str | None, token: str) -> bool:
    """Whether an `Authorization` header carries the token, or another that is accepted for it, compared in constant time.

    An empty token lets all in.
    """
    if not token:
        return True
    presented = (header or "").encode(errors="surrogateescape")  # a header may hold any bytes
    return any([hmac.compare_digest(presented, f"Bearer {secret}".encode()) for secret in config.secrets(token)])


def set_dead_peer_timeout(sock: socket.socket, timeout_s: float) -> None:
    """Make the kernel give a connection up when what was sent is not acknowledged for `timeout_s` (RFC 5482).

    Without it a peer whose machine lost its power is noticed after a quarter of an hour. Linux only; elsewhere a no-op.
    """
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, max(1, int(timeout_s * 1000)))


_not_for_children: dict[int, tuple[int, int]] = {}
"""Descriptors that a forked child must not keep open, with what they were then: another one's number may be used again. So
there is at most one entry for each number, however many connections there have been."""


def keep_from_forked_children(sock: socket.socket) -> None:
    """See to it that a child that this process forks (a data loader's worker, say) does not keep a connection open.

    While any process has it open the kernel does not close a connection, so the peer of a process that was killed would
    hear nothing as long as a child of it lives. In the child the descriptor is replaced, not closed: its number may not
    come to mean something else to the objects that still refer to it.
    """
    _not_for_children[sock.fileno()] = _identity(sock.fileno())


def _identity(fd: int) -> tuple[int, int]:
    """Return what tells an open file or connection from all others that are open."""
    status = os.fstat(fd)
    return status.st_dev, status.st_ino


def max_descriptors(wanted: int = 0) -> int:
    """Return how many files and connections this process may have open, after making it as many as wanted, if it may."""
    if resource is None:
        return sys.maxsize
    soft, hard = (
        sys.maxsize if each == resource.RLIM_INFINITY else each for each in resource.getrlimit(resource.RLIMIT_NOFILE)
    )
    if soft < min(wanted, hard):
        soft = min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    return soft


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
    for fd, identity in _not_for_children.items():
        try:
            if _identity(fd) == identity:
                os.dup2(null, fd, inheritable=False)
        except OSError:
            continue  # closed meanwhile
    _not_for_children.clear()
    os.close(null)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_let_go_in_child)


def listen_as(what: str, host: str, port: int, backlog: int, token: str) -> list[socket.socket]:
    """Listen for a service of ours; see `listen`, and `warn_if_open` for `what` and `token`.

    Raises:
        AddressInUseError: it is no address of this machine, or the port is taken; nothing is listened on.
    """
    try:
        listeners = listen(host, port, backlog)
    except OSError as error:
        address = join_host_port(host, port)
        raise AddressInUseError(f"{what} cannot listen on {address}: {in_use_hint(error)}", address) from error
    for listener in listeners:
        warn_if_open(what, listener.getsockname()[0], token)
    return listeners


def in_use_hint(error: OSError) -> str:
    """Say what to do about a bind that failed."""
    if isinstance(error, socket.gaierror):
        return f"{error.strerror}; choose an address of this machine"
    return f"{os.strerror(error.errno) if error.errno else error}; choose another port, or 0 for any free one"
