"""Members in network namespaces of their own, joined by a switch, or two by several links; what a member sends can be limited.

The switch is in a namespace too, so the machine's own network is not touched, and taking the namespaces away takes
everything away. That happens on leaving the `with` block, by whatever exception. Needs root, `ip` and `tc`.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

LINK_RATE = "200mbit"
LINK_BYTES_PER_S = 200e6 / 8
_PREFIX = "tftb"
_NEW_NETWORK = 0x40000000
_FOLDER = Path("/var/run/netns")
_ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class LinksUnavailableError(RuntimeError):
    """Namespaces or rate limits cannot be had here."""


class Links:
    """One switch and some members.

    Args:
        limits: for each member, whether what it sends is limited to `rate`.
        rate: as `tc` writes it.
        both_ways: limit what such a member receives, too.

    Raises:
        LinksUnavailableError: not root, no `ip` or `tc`, or the system refuses.
    """

    def __init__(self, limits: Sequence[bool], *, rate: str = LINK_RATE, both_ways: bool = False) -> None:
        self._limits = list(limits)
        self._rate = rate
        self._both_ways = both_ways
        self._made: list[str] = []
        self.namespaces = [_name(str(member)) for member in range(len(self._limits))]
        self.hosts = [f"10.99.0.{member + 1}" for member in range(len(self._limits))]

    def __enter__(self) -> Links:
        if os.geteuid() != 0:
            raise LinksUnavailableError("needs root, for network namespaces and tc")
        for tool in ("ip", "tc"):
            if shutil.which(tool) is None:
                raise LinksUnavailableError(f"there is no `{tool}` (package iproute2)")
        _remove_left_behind()
        try:
            self._make()
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._remove()

    def _make(self) -> None:
        switch = _name("switch")
        self._add(switch)
        _call("ip", "-n", switch, "link", "add", "switch", "type", "bridge")
        _call("ip", "-n", switch, "link", "set", "switch", "up")
        for member, namespace in enumerate(self.namespaces):
            port = f"port{member}"
            self._add(namespace)
            _call("ip", "-n", namespace, "link", "add", "eth0", "type", "veth", "peer", "name", port, "netns", switch)
            _call("ip", "-n", switch, "link", "set", port, "master", "switch", "up")
            _call("ip", "-n", namespace, "address", "add", f"{self.hosts[member]}/24", "dev", "eth0")
            _call("ip", "-n", namespace, "link", "set", "lo", "up")
            _call("ip", "-n", namespace, "link", "set", "eth0", "up")
            if self._limits[member]:
                limit = ("rate", self._rate, "burst", "256kb", "latency", "50ms")
                _call("tc", "-n", namespace, "qdisc", "add", "dev", "eth0", "root", "tbf", *limit)
                if self._both_ways:
                    _call("tc", "-n", switch, "qdisc", "add", "dev", port, "root", "tbf", *limit)

    def _add(self, namespace: str) -> None:
        self._made.append(namespace)
        _call("ip", "netns", "add", namespace)

    def _remove(self) -> None:
        # A second Ctrl-C must not keep what the first one was to take away.
        handlers = {number: signal.signal(number, signal.SIG_IGN) for number in _ENDING_SIGNALS}
        try:
            for namespace in reversed(self._made):
                subprocess.run(["ip", "netns", "delete", namespace], check=False, capture_output=True)
            self._made.clear()
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)


class ParallelLinks(Links):
    """A source and a receiver with several links between them, and no switch.

    Args:
        rates: for each link, how many MB/s the source can send over it. What is sent anywhere else goes to the first.

    Attributes:
        hosts: the source's addresses, one for each link.
    """

    def __init__(self, rates: Sequence[int]) -> None:
        super().__init__([False, False])
        self._rates = list(rates)
        self.hosts = [f"10.98.{number}.1" for number in range(len(rates))]

    def _make(self) -> None:
        source, receiver = self.namespaces
        for namespace in self.namespaces:
            self._add(namespace)
            _call("ip", "-n", namespace, "link", "set", "lo", "up")
        for number, rate in enumerate(self._rates):
            link = f"eth{number}"
            _call("ip", "-n", source, "link", "add", link, "type", "veth", "peer", "name", link, "netns", receiver)
            for end, namespace in enumerate(self.namespaces, 1):
                _call("ip", "-n", namespace, "address", "add", f"10.98.{number}.{end}/24", "dev", link)
                _call("ip", "-n", namespace, "link", "set", link, "up")
            limit = ("rate", f"{8 * rate}mbit", "burst", "1mb", "latency", "50ms")
            _call("tc", "-n", source, "qdisc", "add", "dev", link, "root", "tbf", *limit)
        _call("ip", "-n", source, "route", "add", "default", "via", "10.98.0.2")

    def cut(self, number: int) -> None:
        """Have a link carry nothing any more."""
        _call("ip", "-n", self.namespaces[0], "link", "set", f"eth{number}", "down")


def enter(namespace: str) -> None:
    """Move this thread, and all threads that it starts later, into a network namespace.

    Raises:
        OSError: there is none of that name, or this is not root.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    with (_FOLDER / namespace).open("rb") as file:
        if libc.setns(file.fileno(), _NEW_NETWORK) != 0:
            number = ctypes.get_errno()
            raise OSError(number, f"setns {namespace}: {os.strerror(number)}")


def received() -> tuple[int, int]:
    """Return the bytes and the packets that the member in whose namespace this runs has received over its link."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, _, counters = line.partition(":")
        if name.strip() == "eth0":
            fields = counters.split()
            return int(fields[0]), int(fields[1])
    raise LinksUnavailableError("there is no eth0 in this namespace")


def _name(what: str) -> str:
    return f"{_PREFIX}-{os.getpid()}-{what}"


def _remove_left_behind() -> None:
    """Remove the namespaces of earlier runs that were killed: their process is gone."""
    if not _FOLDER.is_dir():
        return
    for path in _FOLDER.iterdir():
        prefix, _, rest = path.name.partition("-")
        pid = rest.partition("-")[0]
        if prefix == _PREFIX and pid.isdigit() and not Path(f"/proc/{pid}").exists():
            subprocess.run(["ip", "netns", "delete", path.name], check=False, capture_output=True)


def _call(*command: str) -> None:
    result = subprocess.run(command, check=False, capture_output=True, text=True)
    if result.returncode != 0:
        said = (result.stderr or result.stdout).strip().splitlines()
        raise LinksUnavailableError(f"`{' '.join(command)}` failed: {said[-1] if said else result.returncode}")
