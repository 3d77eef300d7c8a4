"""A network of its own for each replica group: a namespace whose one link has a limited rate, in both directions.

    with Links(4, rate_mbit=50.0) as links:
        subprocess.Popen([*links.inside(0), sys.executable, "train.py"])    # its address is links.address(0)

The namespaces hang on a switch that is in a namespace too, so the machine's own network is not touched. Leaving the `with`
block takes everything away; what a killed run left behind, the next one does. Linux, root, `ip` and `tc` (iproute2).
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Protocol

_PREFIX = "tftd"
_FOLDER = Path("/var/run/netns")
_SUBNET = "10.98.0"


class LinksUnavailableError(RuntimeError):
    """Namespaces or limited rates cannot be had here; the message says why."""


class Network(Protocol):
    """Where the processes of a job run."""

    interface: str
    """Of a group, by which it reaches the others."""
    hub: int
    """A member for whoever is no group."""
    is_shared: bool
    """Whether all groups have one interface together."""

    def inside(self, member: int) -> list[str]:
        """Return what to put before a command so that it runs at a member's place."""

    def address(self, member: int) -> str:
        """Return a member's address."""


class Loopback:
    """No network at all: everybody on this machine's loopback interface, which counts all groups together."""

    interface = "lo"
    hub = 0
    is_shared = True

    def inside(self, member: int) -> list[str]:
        """See `Network`."""
        return []

    def address(self, member: int) -> str:
        """See `Network`."""
        return "127.0.0.1"


class Links:
    """Members with a link each: those from 0 on are limited, and one more, `hub`, is not.

    Args:
        num_members: how many have a limited link.
        rate_mbit: of each, in each direction, in 10^6 bits a second; None: no limit.

    Raises:
        LinksUnavailableError: on entering the block; nothing is left then.
    """

    interface = "eth0"
    is_shared = False

    def __init__(self, num_members: int, *, rate_mbit: float | None) -> None:
        self.hub = num_members
        self._rate_mbit = rate_mbit
        self._switch = _name("switch")
        self.namespaces = [_name(str(member)) for member in range(num_members + 1)]

    def address(self, member: int) -> str:
        """Return a member's address."""
        return f"{_SUBNET}.{member + 1}"

    def inside(self, member: int) -> list[str]:
        """Return what to put before a command so that it runs in a member's namespace (the process keeps its id)."""
        return ["ip", "netns", "exec", self.namespaces[member]]

    def __enter__(self) -> Links:
        if os.geteuid() != 0:
            raise LinksUnavailableError("network namespaces need root")
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
        _call(["ip", "netns", "add", self._switch])
        _ip(self._switch, "link add switch type bridge")
        _ip(self._switch, "link set switch up")
        for member, namespace in enumerate(self.namespaces):
            _call(["ip", "netns", "add", namespace])
            _ip(namespace, f"link add eth0 type veth peer name port{member} netns {self._switch}")
            _ip(self._switch, f"link set port{member} master switch up")
            _ip(namespace, f"address add {self.address(member)}/24 dev eth0")
            _ip(namespace, "link set lo up")
            _ip(namespace, "link set eth0 up")
            if self._rate_mbit is not None and member != self.hub:
                self._limit(namespace, "eth0")
                self._limit(self._switch, f"port{member}")

    def _limit(self, namespace: str, device: str) -> None:
        rate = ["rate", f"{self._rate_mbit}mbit", "burst", "128kb", "latency", "400ms"]
        _call(["tc", "-n", namespace, "qdisc", "add", "dev", device, "root", "tbf", *rate])

    def _remove(self) -> None:
        for namespace in [*self.namespaces, self._switch]:
            subprocess.run(["ip", "netns", "delete", namespace], check=False, capture_output=True)


def _name(what: str) -> str:
    return f"{_PREFIX}-{os.getpid()}-{what}"


def _remove_left_behind() -> None:
    """Remove the namespaces of earlier runs that were killed: their process is gone."""
    for path in _FOLDER.iterdir() if _FOLDER.is_dir() else ():
        prefix, _, rest = path.name.partition("-")
        pid = rest.partition("-")[0]
        if prefix == _PREFIX and pid.isdigit() and not Path(f"/proc/{pid}").exists():
            subprocess.run(["ip", "netns", "delete", path.name], check=False, capture_output=True)


def _ip(namespace: str, command: str) -> None:
    _call(["ip", "-n", namespace, *command.split()])


def _call(command: Sequence[str]) -> None:
    result = subprocess.run(command, check=False, capture_output=True, text=True)
    if result.returncode != 0:
        said = (result.stderr or result.stdout).strip().splitlines()
        raise LinksUnavailableError(f"`{' '.join(command)}` failed: {said[-1] if said else result.returncode}")
