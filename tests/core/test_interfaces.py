"""Which of its machine's addresses a process is known by, and which others it names."""

from __future__ import annotations

import pytest

from torchft_ckpt.core.services.interfaces import (
    MAX_FURTHER,
    Interface,
    NoSuchInterfaceError,
    address_by_gloo_names,
    address_by_nccl_names,
    further_addresses,
    may_be_tried,
)

LO = Interface(name="lo", addresses=("127.0.0.1", "::1"), is_loopback=True)
ETH0 = Interface(name="eth0", addresses=("fe80::1", "fd00::5", "10.0.0.5"))
ETH1 = Interface(name="eth1", addresses=("10.9.0.5",), is_up=False)
IB0 = Interface(name="ib0", addresses=("10.1.0.5",))
IB10 = Interface(name="ib10", addresses=("fd01::5",))
DOCKER0 = Interface(name="docker0", addresses=("172.17.0.1",), is_bridge=True)
HALF = Interface(name="usb0", addresses=("169.254.3.4", "fe80::2"))
MACHINE = [LO, ETH0, ETH1, IB0, IB10, DOCKER0, HALF]
THERE = (
    "there are: lo (127.0.0.1, ::1), eth0 (fe80::1, fd00::5, 10.0.0.5), eth1 (10.9.0.5, down), ib0 (10.1.0.5), ib10 (fd01::5),"
    " docker0 (172.17.0.1), usb0 (169.254.3.4, fe80::2)"
)


@pytest.mark.parametrize(
    ("text", "routed", "address"),
    [
        ("ib", None, "10.1.0.5"),
        ("ib", "10.1.0.5", "10.1.0.5"),
        ("ib1", None, "fd01::5"),
        ("=ib1,ib0", None, "10.1.0.5"),
        ("=ib0", "10.0.0.5", "10.1.0.5"),
        ("eth,ib", "10.1.0.5", "10.1.0.5"),
        ("eth,ib", "10.9.0.5", "10.0.0.5"),  # the routed address is of an interface that is down
        (" ib , eth", None, "10.0.0.5"),
        ("lo", None, "127.0.0.1"),
        ("docker0", None, "172.17.0.1"),
        ("^eth", None, "10.1.0.5"),
        ("^eth,ib0", None, "fd01::5"),
        ("^=ib,eth0", "172.17.0.1", "10.1.0.5"),
        ("^lo", "10.0.0.5", "10.0.0.5"),
        ("^", None, "10.0.0.5"),
    ],
)
def test_nccls_variable_means_what_it_means_to_nccl(text: str, routed: str | None, address: str) -> None:
    assert address_by_nccl_names(text, MACHINE, routed) == address


@pytest.mark.parametrize("text", ["ib2", "=ib", "=eth", "eth1", "usb0", "^eth,ib,usb", ""])
def test_an_interface_that_nccl_could_not_use_is_refused_with_those_that_there_are(text: str) -> None:
    with pytest.raises(NoSuchInterfaceError) as refused:
        address_by_nccl_names(text, MACHINE, None)
    assert str(refused.value) == f"it names no interface that is up and has an address; {THERE}"


@pytest.mark.parametrize(
    ("text", "routed", "address"),
    [("ib0", "10.0.0.5", "10.1.0.5"), ("ib0,eth0", "10.1.0.5", "10.1.0.5"), ("ib0, eth0", None, "10.0.0.5")],
)
def test_gloos_variable_names_whole_interfaces(text: str, routed: str | None, address: str) -> None:
    assert address_by_gloo_names(text, MACHINE, routed) == address


@pytest.mark.parametrize("text", ["ib", "ib0,ib7", "eth1", "^ib0", ","])
def test_an_interface_that_gloo_could_not_use_is_refused(text: str) -> None:
    with pytest.raises(NoSuchInterfaceError, match="there are: lo"):
        address_by_gloo_names(text, MACHINE, None)


def test_further_addresses_are_those_that_other_machines_may_reach_one_for_each_interface() -> None:
    assert further_addresses(MACHINE, "10.0.0.5", has_ipv6=True) == ["10.1.0.5", "fd01::5"]
    assert further_addresses(MACHINE, "fd00::5", has_ipv6=True) == ["10.1.0.5", "fd01::5"]
    assert further_addresses(MACHINE, "10.1.0.5", has_ipv6=False) == ["10.0.0.5"]
    assert further_addresses([LO, ETH0], "10.0.0.5", has_ipv6=True) == []
    many = [Interface(name=f"eth{number}", addresses=(f"10.0.{number}.1",)) for number in range(20)]
    assert (
        further_addresses(many, "10.0.1.1", has_ipv6=False)
        == [f"10.0.{number}.1" for number in range(MAX_FURTHER + 2) if number != 1][:MAX_FURTHER]
    )


@pytest.mark.parametrize(
    ("address", "may_be"),
    [
        ("10.1.0.5", True),
        ("203.0.113.9", True),
        ("fd01::5", True),
        ("127.0.0.1", False),
        ("::1", False),
        ("169.254.169.254", False),
        ("fe80::1", False),
        ("fe80::1%eth0", False),
        ("fd00::1%\r\n", False),
        ("224.0.0.1", False),
        ("0.0.0.0", False),
        ("255.255.255.255", False),
        ("::ffff:127.0.0.1", False),
        ("localhost", False),
        ("10.1", False),
        ("", False),
    ],
)
def test_a_peers_word_leads_to_no_name_and_to_nothing_of_this_machine_or_link(address: str, may_be: bool) -> None:
    assert may_be_tried(address) is may_be
