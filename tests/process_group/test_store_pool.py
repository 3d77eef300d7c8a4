"""Connections to stores: used again, replaced when broken, never shared by two users at once."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest
from support.ports import reserved_port
from support.stores import hosted_store
from support.waiting import wait_until

from torchft_ckpt.errors import ConfigError, ProcessGroupConfigureError
from torchft_ckpt.process_group.store import StoreAddress, StorePool, enter_store

LIMIT_S = 60.0


@pytest.fixture
def port() -> Iterator[int]:
    with reserved_port() as port:
        yield port


def always() -> bool:
    return True


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("host:12/a/b", StoreAddress(host="host", port=12, prefix="a/b")),
        ("[fe80::1]:12/a", StoreAddress(host="fe80::1", port=12, prefix="a")),
        ("10.0.0.1:12", StoreAddress(host="10.0.0.1", port=12, prefix="")),
    ],
)
def test_an_address_is_host_port_and_prefix(text: str, expected: StoreAddress) -> None:
    assert StoreAddress.parse(text) == expected


@pytest.mark.parametrize("text", ["", "host", "host/a", "host:port/a", "host:99999/a"])
def test_other_addresses_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="store address"):
        StoreAddress.parse(text)


def test_a_connection_is_used_again(new_address: Callable[[], str]) -> None:
    pool = StorePool()
    address = StoreAddress.parse(new_address())
    with pool.borrow(address, LIMIT_S, is_wanted=always) as first:
        pass
    with pool.borrow(address, LIMIT_S, is_wanted=always) as second:
        assert second is first


def test_two_users_get_two_connections(new_address: Callable[[], str]) -> None:
    pool = StorePool()
    address = StoreAddress.parse(new_address())
    with (
        pool.borrow(address, LIMIT_S, is_wanted=always) as first,
        pool.borrow(address, LIMIT_S, is_wanted=always) as second,
    ):
        assert second is not first


def test_a_connection_whose_user_failed_is_not_lent_again(new_address: Callable[[], str]) -> None:
    pool = StorePool()
    address = StoreAddress.parse(new_address())
    with pytest.raises(KeyError):
        with pool.borrow(address, LIMIT_S, is_wanted=always) as first:
            raise KeyError
    with pool.borrow(address, LIMIT_S, is_wanted=always) as second:
        assert second is not first


def test_a_store_on_loopback_is_reached_from_loopback(new_address: Callable[[], str]) -> None:
    with StorePool().borrow(StoreAddress.parse(new_address()), LIMIT_S, is_wanted=always) as connection:
        assert connection.local_host == "127.0.0.1"


def test_a_connection_to_a_store_that_is_gone_is_replaced_or_refused(port: int) -> None:
    pool = StorePool()
    server = hosted_store(port)
    address = StoreAddress.parse(f"127.0.0.1:{port}/x")
    with enter_store(pool, address, "key", "1", LIMIT_S, always):
        pass
    del server
    with pytest.raises(ProcessGroupConfigureError, match=f"store at 127.0.0.1:{port}.*refused"):
        with enter_store(pool, address, "key", "1", LIMIT_S, always):
            pass
    again = hosted_store(port)
    with enter_store(pool, address, "key", "2", LIMIT_S, always) as (_, store):
        assert store.get("key") == b"2"
    assert again.port == port


def test_a_store_that_was_started_again_is_connected_again(port: int) -> None:
    pool = StorePool()
    server = hosted_store(port)
    address = StoreAddress.parse(f"127.0.0.1:{port}/x")
    with enter_store(pool, address, "key", "1", LIMIT_S, always) as (first, _):
        pass
    del server
    again = hosted_store(port)
    with enter_store(pool, address, "key", "2", LIMIT_S, always) as (second, store):
        assert second is not first
        assert store.get("key") == b"2"
    assert again.port == port


def test_nobody_is_left_waiting_at_a_store_that_is_gone(port: int) -> None:
    """A thread inside of torch holds up the end of its process."""
    address = StoreAddress.parse(f"127.0.0.1:{port}/x")
    with pytest.raises(ProcessGroupConfigureError, match=f"store at 127.0.0.1:{port}.*refused"):
        with StorePool().borrow(address, LIMIT_S, is_wanted=always):
            pass
    wait_until(lambda: f"store-connect 127.0.0.1:{port}" not in [thread.name for thread in threading.enumerate()])
