"""Where servers listen, which address is advertised, and who knows the token."""

from __future__ import annotations

import os
import socket
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from torchft_ckpt import HTTPTransport, LighthouseServer, Manager, ProcessGroupGloo, network
from torchft_ckpt.__main__ import main
from torchft_ckpt.config import parse_host_port
from torchft_ckpt.core.services.interfaces import Interface
from torchft_ckpt.errors import AddressInUseError, ConfigError
from torchft_ckpt.network import (
    Host,
    advertised_host,
    bearer_matches,
    choose_host,
    interfaces,
    join_host_port,
    keep_from_forked_children,
    leave_to_parent,
    listen,
    max_descriptors,
    other_hosts,
    route_source,
    wildcard_for,
    without_mapping,
)

needs_ipv6 = pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="no IPv6 on this machine")


def lighthouse_everywhere() -> tuple[str, Callable[[], None]]:
    server = LighthouseServer(bind="[::]:0", min_replicas=1)
    return server.address(), server.shutdown


def transport_everywhere() -> tuple[str, Callable[[], None]]:
    transport: HTTPTransport[object] = HTTPTransport(bind="::")
    return transport.metadata(), transport.shutdown


servers = pytest.mark.parametrize("start", [lighthouse_everywhere, transport_everywhere])


def is_served(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), timeout=60).close()
    except OSError:
        return False
    return True


@needs_ipv6
@servers
def test_a_server_bound_to_all_of_ipv6_serves_ipv4_too_and_the_address_that_it_names(
    start: Callable[[], tuple[str, Callable[[], None]]],
) -> None:
    named, shutdown = start()
    host, port = parse_host_port(named, what="address")
    assert {place: is_served(place, port) for place in ("127.0.0.1", "::1", host)} == {
        "127.0.0.1": True,
        "::1": True,
        host: True,
    }
    shutdown()


@servers
def test_where_there_is_no_ipv6_it_serves_ipv4(
    start: Callable[[], tuple[str, Callable[[], None]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(socket, "has_dualstack_ipv6", lambda: False)
    named, shutdown = start()
    host, port = parse_host_port(named, what="address")
    assert [is_served(place, port) for place in ("127.0.0.1", host, "::1")] == [True, True, False]
    shutdown()


@needs_ipv6
def test_a_name_is_listened_on_at_all_its_addresses_that_are_here_and_on_one_port(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    of_a_name = [(socket.AF_INET6, 1, 6, "", ("::1", 0, 0, 0)), (socket.AF_INET, 1, 6, "", ("127.0.0.1", 0))]
    elsewhere = [(socket.AF_INET, 1, 6, "", ("192.0.2.7", 0))]
    with monkeypatch.context() as patched:
        patched.setattr(socket, "getaddrinfo", lambda *_, **__: [*elsewhere, *of_a_name])
        listeners = listen("a name", 0, 8)
        patched.setattr(socket, "getaddrinfo", lambda *_, **__: elsewhere)
        with pytest.raises(AddressInUseError, match="cannot listen on elsewhere:0: Cannot assign requested address"):
            LighthouseServer("elsewhere:0", min_replicas=1)
    ports = [listener.getsockname()[1] for listener in listeners]
    assert ports == [ports[0]] * 2 and is_served("::1", ports[0]) and is_served("127.0.0.1", ports[0])
    with pytest.raises(OSError):
        listen("127.0.0.1", ports[0], 8)
    for listener in listeners:
        listener.close()


def test_a_port_that_is_taken_at_the_second_address_of_a_name_is_given_up_for_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    of_a_name = [(socket.AF_INET, 1, 6, "", ("127.0.0.1", 0)), (socket.AF_INET, 1, 6, "", ("127.0.0.2", 0))]
    held: list[socket.socket] = []
    create = socket.create_server

    def create_beside_another(place: tuple[str, int], **options: Any) -> socket.socket:
        if place[0] == "127.0.0.2" and not held:
            held.append(create(place))
        return create(place, **options)

    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: of_a_name)
    monkeypatch.setattr(socket, "create_server", create_beside_another)
    listeners = listen("a name", 0, 8)
    taken, *ports = (listener.getsockname()[1] for listener in (*held, *listeners))
    assert ports == [ports[0]] * 2 and taken != ports[0]
    for listener in (*held, *listeners):
        listener.close()


def test_an_address_of_ipv6_is_not_named_where_only_ipv4_is_listened_on() -> None:
    with pytest.raises(ConfigError, match=r"peers are told ::1, but 0.0.0.0 listens on IPv4 alone"):
        LighthouseServer("0.0.0.0:0", min_replicas=1, hostname="::1")


def test_who_is_reached_by_a_name_listens_on_both_families() -> None:
    assert [wildcard_for(host) for host in ("10.0.0.1", "fd00::2", "localhost")] == ["0.0.0.0", "::", "::"]


def test_who_comes_by_ipv4_to_a_socket_of_both_families_is_named_as_usual() -> None:
    assert [without_mapping("::ffff:127.0.0.1"), without_mapping("fd00::2")] == ["127.0.0.1", "fd00::2"]


def test_the_advertised_address_follows_argument_environment_bind_and_route(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHFT_CKPT_HOSTNAME", "from-environment")
    assert [advertised_host("given"), advertised_host(None, bound="0.0.0.0")] == ["given", "from-environment"]
    monkeypatch.delenv("TORCHFT_CKPT_HOSTNAME")
    assert advertised_host(None, bound="127.0.0.9") == "127.0.0.9"
    assert advertised_host(None, towards="127.0.0.1:5") == "127.0.0.1"
    assert advertised_host(None, bound="::") == (route_source("192.0.2.1", 9) or "127.0.0.1")
    assert advertised_host(None, towards="no such host:5") == "127.0.0.1"


MACHINE = [
    Interface(name="lo", addresses=("127.0.0.1", "::1"), is_loopback=True),
    Interface(name="eth0", addresses=("10.0.0.5",)),
    Interface(name="ib0", addresses=("10.1.0.5",)),
]


def test_a_process_is_known_by_the_first_choice_of_its_user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network, "interfaces", lambda: MACHINE)
    monkeypatch.setattr(network, "route_source", lambda *_: "10.0.0.5")
    monkeypatch.delenv("TORCHFT_CKPT_HOSTNAME", raising=False)
    there: list[Host] = [choose_host(towards="lighthouse:1", beside_nccl=True)]
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth0")
    there.append(choose_host(towards="lighthouse:1", beside_nccl=True))
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "ib")
    there += [choose_host(towards="lighthouse:1", beside_nccl=is_beside) for is_beside in (False, True)]
    there.append(choose_host(bound="10.0.0.9", beside_nccl=True))
    monkeypatch.setenv("TORCHFT_CKPT_HOSTNAME", "from-environment")
    there += [choose_host(beside_nccl=True), choose_host("given", beside_nccl=True)]
    assert there == [
        Host("10.0.0.5", is_chosen=False),
        Host("10.0.0.5", is_chosen=True),
        Host("10.0.0.5", is_chosen=True),
        Host("10.1.0.5", is_chosen=True),
        Host("10.0.0.9", is_chosen=True),
        Host("from-environment", is_chosen=True),
        Host("given", is_chosen=True),
    ]
    assert choose_host("given", bound="0.0.0.0").address == advertised_host("given", bound="0.0.0.0")


@pytest.mark.parametrize("start", [HTTPTransport, ProcessGroupGloo, lambda: ProcessGroupGloo(interface="eth7")])
def test_an_unknown_interface_is_named_with_those_that_there_are(
    start: Callable[[], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(network, "interfaces", lambda: MACHINE)
    monkeypatch.delenv("TORCHFT_CKPT_HOSTNAME", raising=False)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")
    with pytest.raises(
        ConfigError, match=r"='eth7' cannot be used.*there are: lo .*eth0 \(10.0.0.5\), ib0 \(10.1.0.5\)"
    ):
        start()


def test_what_a_managers_user_chose_is_used_by_all_that_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHFT_CKPT_HOSTNAME", raising=False)
    lighthouse = LighthouseServer("127.0.0.1:0", min_replicas=1)
    group = ProcessGroupGloo()
    manager = Manager(group, None, None, 1, lighthouse_addr=lighthouse.address(), hostname="127.0.0.3")
    hosts = [group._hostname, manager._rank_config.store_address, manager.hooks.transport.metadata()]
    manager.shutdown()
    lighthouse.shutdown()
    assert [host.removeprefix("http://").partition(":")[0] for host in hosts] == ["127.0.0.3"] * 3


def test_a_group_that_was_given_an_address_keeps_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHFT_CKPT_HOSTNAME", raising=False)
    group = ProcessGroupGloo(hostname="127.0.0.2")
    group.use_hostname("127.0.0.3")
    assert group._hostname == "127.0.0.2"


@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="needs Linux")
def test_the_interfaces_of_this_machine_are_those_that_the_system_names() -> None:
    found = {interface.name: interface for interface in interfaces()}
    assert found.keys() == {name for _, name in socket.if_nameindex()}
    assert found["lo"].is_loopback and "127.0.0.1" in found["lo"].addresses
    routed = route_source("192.0.2.1", 9)
    assert routed is None or any(routed in interface.addresses for interface in found.values())


def test_who_listens_at_one_address_names_no_others() -> None:
    assert other_hosts("127.0.0.1", "127.0.0.1") == []


def test_a_token_has_to_be_the_whole_header() -> None:
    headers = ["Bearer secret", "Bearer secre", "secret", "", None]
    assert [bearer_matches(header, "secret") for header in headers] == [True, False, False, False, False]
    assert bearer_matches(None, "")


def test_ipv6_addresses_get_brackets() -> None:
    assert [join_host_port("::1", 5), join_host_port("h", 5)] == ["[::1]:5", "h:5"]


def test_a_header_of_any_bytes_is_compared_and_refused() -> None:
    assert not bearer_matches(b"Bearer \xff\xfe".decode(errors="surrogateescape"), "secret")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_destroys_nothing_that_is_left_to_its_parent() -> None:
    class Resource:
        pass

    held = [Resource()]
    leave_to_parent(held[0])
    lives = weakref.ref(held[0])
    pid = os.fork()
    if pid == 0:
        held.clear()
        os._exit(lives() is None)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    held.clear()
    assert lives() is None, "it is not kept where it is used"


# ---------------------------------------------------------------------------------------- the address of a lighthouse


@pytest.mark.parametrize("address", ["host:29510", "http://host:29510", "HTTP://host:29510/", "ws://host:29510"])
def test_a_scheme_that_is_spoken_may_be_written_in_any_case(address: str) -> None:
    assert parse_host_port(address, what="lighthouse address") == ("host", 29510)


NOT_SPOKEN = {
    "https://127.0.0.1:1": "no TLS is set up here; set TORCHFT_CKPT_TLS_CA",
    "HTTPS://127.0.0.1:1": "no TLS is set up here; set TORCHFT_CKPT_TLS_CA",
    "wss://127.0.0.1:1": "no TLS is set up here; set TORCHFT_CKPT_TLS_CA",
    "tcp://127.0.0.1:1": "tcp:// is not spoken there",
    "http:/127.0.0.1:1": "is no host",
}


@pytest.mark.parametrize("address", NOT_SPOKEN)
def test_an_address_that_cannot_be_spoken_to_is_refused_before_anybody_connects(address: str) -> None:
    for rank, world_size in ((1, 2), (0, 2), (0, 1)):
        with pytest.raises(ConfigError, match=NOT_SPOKEN[address]):
            Manager(ProcessGroupGloo(), None, None, 1, lighthouse_addr=address, rank=rank, world_size=world_size)


@pytest.mark.parametrize("command", ["status", "allow-step-loss"])
def test_the_commands_refuse_it_too_and_name_the_variable_where_there_is_none(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable in ("TORCHFT_CKPT_LIGHTHOUSE", "TORCHFT_LIGHTHOUSE"):
        monkeypatch.delenv(variable, raising=False)
    assert main([command, "--lighthouse", "https://127.0.0.1:1", "--token", "secret"]) == 2
    assert "no TLS is set up here; set TORCHFT_CKPT_TLS_CA" in capsys.readouterr().err
    assert main([command]) == 2
    assert "pass --lighthouse or set TORCHFT_LIGHTHOUSE" in capsys.readouterr().err


@pytest.mark.skipif(network.resource is None, reason="no limits of descriptors here")
@pytest.mark.parametrize(
    ("limits", "wanted", "allowed"),
    [
        ((64, 300), 0, 64),
        ((64, 300), 200, 200),
        ((64, 300), 8192, 300),
        ((64, network.resource.RLIM_INFINITY), 8192, 8192),
    ],
)
def test_a_process_may_open_as_many_files_as_it_wants_and_is_allowed(
    limits: tuple[int, int], wanted: int, allowed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [limits]
    monkeypatch.setattr(network.resource, "getrlimit", lambda what: now[0])
    monkeypatch.setattr(network.resource, "setrlimit", lambda what, limits: now.__setitem__(0, limits))
    assert (max_descriptors(wanted), max_descriptors(), now[0]) == (allowed, allowed, (allowed, limits[1]))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_keeps_what_has_the_number_of_a_connection_that_was_closed(tmp_path: Path) -> None:
    (tmp_path / "data").write_text("kept")
    sock = socket.socket()
    keep_from_forked_children(sock)
    number = sock.detach()
    fd = os.open(tmp_path / "data", os.O_RDONLY)
    os.dup2(fd, number)
    # As if the file had by chance the connection's inode, in another file system.
    network._not_for_children[number] = (network._not_for_children[number][0], os.fstat(number).st_ino)
    pid = os.fork()
    if pid == 0:
        os._exit(os.read(number, 4) != b"kept")
    assert os.waitpid(pid, 0)[1] == 0
    for each in {fd, number}:
        os.close(each)
