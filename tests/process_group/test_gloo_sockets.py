"""Which sockets an abort may touch."""

from __future__ import annotations

import os
import select
import socket
import threading
from collections.abc import Iterator

import pytest
from support.waiting import wait_until

from torchft_ckpt.process_group.sockets import GlooSockets, create_gloo_device, shutdown_awaited_connection

pytestmark = pytest.mark.skipif(not os.path.isdir("/proc/self/fdinfo"), reason="needs Linux's /proc")


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        client = socket.create_connection(listener.getsockname())
        server = listener.accept()[0]
    with client, server:
        server.settimeout(60)
        client.settimeout(60)
        yield client, server


def is_open(pair: tuple[socket.socket, socket.socket]) -> bool:
    pair[0].sendall(b"x")
    return pair[1].recv(1) == b"x"


def test_only_watched_connections_are_shut_down(pair: tuple[socket.socket, socket.socket]) -> None:
    client, server = pair
    with socket.create_server(("127.0.0.1", 0)) as listener, select.epoll() as loop:
        ours = socket.create_connection(listener.getsockname())
        loop.register(listener)
        loop.register(ours)
        sockets = GlooSockets(loop.fileno())
        assert sockets.shutdown_connections() == 1
        assert ours.recv(1) == b""
        assert is_open((client, server))
        # The listener still accepts.
        socket.create_connection(listener.getsockname()).close()
        ours.close()
        sockets.close()


def test_a_loop_that_is_left_hears_once_more_of_connections_that_ended_and_goes_on_with_all_else(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    """Gloo's loop turned round one that nobody handled, for as long as the process lived."""
    near, far = socket.socketpair()
    with near, far, socket.create_server(("127.0.0.1", 0)) as listener, select.epoll() as loop:
        for watched in (listener, pair[0], near):
            loop.register(watched, select.EPOLLIN)
        sockets = GlooSockets(loop.fileno())
        sockets.shutdown_connections()
        ended = (pair[0].fileno(), select.EPOLLIN | select.EPOLLHUP)
        assert [loop.poll(5) for _ in range(3)] == [[ended]] * 3
        sockets.leave()
        assert loop.poll(5) == [(ended[0], select.EPOLLHUP)]  # by what Gloo has noted with it
        assert loop.poll(0) == []
        far.send(b"x")
        assert loop.poll(5) == [(near.fileno(), select.EPOLLIN)]
        with socket.create_connection(listener.getsockname()):
            wait_until(lambda: len(loop.poll(0)) == 2, "it accepts")


def test_a_number_that_another_socket_took_over_is_left_alone(pair: tuple[socket.socket, socket.socket]) -> None:
    # What epoll lists by number is another socket by the time we look: a duplicate keeps the old one in the list.
    with socket.create_server(("127.0.0.1", 0)) as listener, select.epoll() as loop:
        ours = socket.create_connection(listener.getsockname())
        loop.register(ours)
        keeps_it_listed = ours.dup()
        os.dup2(pair[0].fileno(), ours.fileno())
        sockets = GlooSockets(loop.fileno())
        assert sockets.shutdown_connections() == 0
        assert is_open(pair)
        for sock in (keeps_it_listed, ours, sockets):
            sock.close()


def test_a_device_is_told_apart_from_event_loops_that_start_meanwhile() -> None:
    stop = threading.Event()

    def open_loops() -> None:
        while not stop.is_set():
            with select.epoll() as loop, socket.socketpair()[0] as sock:
                loop.register(sock)

    other = threading.Thread(target=open_loops)
    other.start()
    found = [create_gloo_device("127.0.0.1", "") for _ in range(20)]
    stop.set()
    other.join()
    addresses = {sockets.listener_address() for _, sockets in found if sockets is not None}
    for _, sockets in found:
        assert sockets is not None
        sockets.close()
    assert len(addresses) == 20
    assert {address[0] for address in addresses if address is not None} == {"127.0.0.1"}


def test_a_closed_handle_finds_nothing() -> None:
    _, sockets = create_gloo_device("127.0.0.1", "")
    assert sockets is not None
    sockets.close()
    sockets.close()
    assert (sockets.shutdown_connections(), sockets.listener_address()) == (0, None)


@pytest.mark.parametrize("is_peer", [True, False])
def test_a_thread_is_freed_only_from_a_connection_to_the_given_peer(
    pair: tuple[socket.socket, socket.socket], is_peer: bool
) -> None:
    client, server = pair
    client.settimeout(None)
    received: list[bytes] = []
    thread = threading.Thread(target=lambda: received.append(client.recv(1)))
    thread.start()
    assert thread.native_id is not None
    host, port = server.getsockname()
    peers = {(host, port if is_peer else port + 1)}
    if is_peer:
        wait_until(lambda: shutdown_awaited_connection(thread.native_id or 0, peers), "the thread waits in recv")
    else:
        assert not shutdown_awaited_connection(thread.native_id, peers)
        server.sendall(b"x")
    thread.join()
    assert received == [b"" if is_peer else b"x"]
