"""Which address is advertised, and who knows the token."""

from __future__ import annotations

import os
import weakref

import pytest

from torchft_ckpt.network import advertised_host, bearer_matches, join_host_port, leave_to_parent, route_source


def test_the_advertised_address_follows_argument_environment_bind_and_route(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHFT_CKPT_HOSTNAME", "from-environment")
    assert [advertised_host("given"), advertised_host(None, bound="0.0.0.0")] == ["given", "from-environment"]
    monkeypatch.delenv("TORCHFT_CKPT_HOSTNAME")
    assert advertised_host(None, bound="127.0.0.9") == "127.0.0.9"
    assert advertised_host(None, towards="127.0.0.1:5") == "127.0.0.1"
    assert advertised_host(None, bound="::") == (route_source("192.0.2.1", 9) or "127.0.0.1")
    assert advertised_host(None, towards="no such host:5") == "127.0.0.1"


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
