"""This file decides at which of its machine's addresses a process is reached. It reads no interface and no environment.

What the user chose is the only address that is used: one that he gave, or that of the interface that he named for NCCL or for
Gloo. Where he chose nothing it is the address that routes to a peer that is known already; further ones, one for each interface
that peers may be able to reach, are for whoever can try which of them is fast.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass

MAX_FURTHER = 8
"""Addresses that a source names beside the one that it is known by."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Interface:
    """One network interface of this machine. `is_up` is: switched on, and with a link."""

    name: str
    addresses: tuple[str, ...] = ()
    """As text, of IPv4 and of IPv6."""
    is_up: bool = True
    is_loopback: bool = False
    is_bridge: bool = False

    def __str__(self) -> str:
        return f"{self.name} ({', '.join(self.addresses) or 'no address'}{'' if self.is_up else ', down'})"


class NoSuchInterfaceError(ValueError):
    """The user named interfaces, and none of this machine is meant that could be used."""


def address_by_nccl_names(text: str, interfaces: Sequence[Interface], routed: str | None) -> str:
    """Return the address of an interface that `NCCL_SOCKET_IFNAME` names.

    Prefixes of names, separated by commas; after `=` whole names; after `^`, or `^=`, those that are not to be used: then
    loopback and bridges are not taken either. Where several are meant, the one with `routed` is taken, else the first.

    Raises:
        NoSuchInterfaceError: none is up and has an address.
    """
    names = text.strip()
    is_excluding, names = names.startswith("^"), names.removeprefix("^")
    is_exact, names = names.startswith("="), names.removeprefix("=")
    wanted = [name.strip() for name in names.split(",") if name.strip()]

    def is_named(interface: Interface) -> bool:
        return interface.name in wanted if is_exact else interface.name.startswith(tuple(wanted))

    if is_excluding:
        return _one_of([each for each in interfaces if not is_named(each) and _is_outward(each)], interfaces, routed)
    return _one_of([each for each in interfaces if is_named(each)], interfaces, routed)


def address_by_gloo_names(text: str, interfaces: Sequence[Interface], routed: str | None) -> str:
    """Return the address of an interface that `GLOO_SOCKET_IFNAME` names: whole names, separated by commas.

    Where there are several, the one with `routed` is taken, else the first of the machine.

    Raises:
        NoSuchInterfaceError: one is unknown, or none is up and has an address.
    """
    wanted = [name.strip() for name in text.split(",") if name.strip()]
    known = {interface.name for interface in interfaces}
    return _one_of(
        [each for each in interfaces if each.name in wanted] if known.issuperset(wanted) else [], interfaces, routed
    )


def further_addresses(interfaces: Sequence[Interface], known_by: str, *, has_ipv6: bool) -> list[str]:
    """Return where else a process can be reached: one address for each interface that is up, at most `MAX_FURTHER`.

    None of loopback, link-local, or of a bridge, behind which machines of other networks may have the same address; none of the
    interface with the address that the process is known by.

    Args:
        interfaces: of this machine, in its order.
        has_ipv6: whether IPv6 is listened on; IPv4 always is, and goes first.
    """
    found = []
    for interface in interfaces:
        usable = [each for each in _usable(interface) if may_be_tried(each) and (has_ipv6 or ":" not in each)]
        if usable and _is_outward(interface) and known_by not in interface.addresses:
            found.append(usable[0])
    return found[:MAX_FURTHER]


def may_be_tried(address: str) -> bool:
    """Whether an address that a peer names is one that an honest one may name: numeric, and of no special kind."""
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:
        return False
    is_special = parsed.is_loopback or parsed.is_link_local or parsed.is_multicast or parsed.is_unspecified
    is_mapped = getattr(parsed, "ipv4_mapped", None) is not None
    return not is_special and not is_mapped and "%" not in address and address != "255.255.255.255"


def _one_of(named: Sequence[Interface], interfaces: Sequence[Interface], routed: str | None) -> str:
    usable = [address for interface in named if interface.is_up for address in _usable(interface)[:1]]
    if any(routed in interface.addresses for interface in named if interface.is_up) and routed is not None:
        return routed
    if not usable:
        there = ", ".join(map(str, interfaces)) or "none"
        raise NoSuchInterfaceError(f"it names no interface that is up and has an address; there are: {there}")
    return usable[0]


def _usable(interface: Interface) -> list[str]:
    """Return the addresses that another machine can connect to without being told the interface, those of IPv4 first."""
    parsed = [ipaddress.ip_address(address) for address in interface.addresses]
    return [str(address) for address in sorted(parsed, key=lambda each: each.version) if not address.is_link_local]


def _is_outward(interface: Interface) -> bool:
    return interface.is_up and not interface.is_loopback and not interface.is_bridge
