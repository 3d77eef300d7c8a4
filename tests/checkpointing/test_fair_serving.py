"""What one client asks for costs another one its fair share at most, and ends when the client leaves."""

from __future__ import annotations

import asyncio
import errno
import http.client
import json
import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from aiohttp import web
from support.waiting import wait_until

from torchft_ckpt.checkpointing import HTTPTransport
from torchft_ckpt.checkpointing.protocol import MAX_DIGESTED_BYTES, MAX_PARTS, parse_metadata
from torchft_ckpt.checkpointing.resharding import fetch
from torchft_ckpt.checkpointing.serving import handlers, http_server, receivers, sending
from torchft_ckpt.checkpointing.serving.sending import FairThreads, Pace, Turns
from torchft_ckpt.checkpointing.serving.snapshot import Snapshot

LONG = timedelta(seconds=90)
STEP = 3
NUM = 1 << 20
STATE = {"w": torch.arange(NUM, dtype=torch.float32)}
BLOCK = 4096
STRANGER = "127.0.0.2"
other_addresses = pytest.mark.skipif(
    sys.platform != "linux", reason="needs all of 127.0.0.0/8 on the loopback interface"
)


@pytest.fixture
def source() -> Iterator[HTTPTransport[Any]]:
    source: HTTPTransport[Any] = HTTPTransport(hostname="127.0.0.1", bind="127.0.0.1", block_bytes=BLOCK)
    source.send_checkpoint([1], STEP, STATE, LONG)
    yield source
    source.shutdown()


def connected(
    source: HTTPTransport[Any], from_host: str = "127.0.0.1", timeout_s: float = 20
) -> http.client.HTTPConnection:
    address = parse_metadata(source.metadata())
    return http.client.HTTPConnection(address.host, address.port, timeout=timeout_s, source_address=(from_host, 0))


def ask_for_digests(connection: http.client.HTTPConnection, num_times: int, num_elements: int = NUM) -> None:
    """Ask for the digest of the whole tensor, so many times in one request."""
    body = json.dumps({"parts": [[0, 0, seed, [0], [num_elements]] for seed in range(num_times)]})
    connection.request("POST", f"/v1/checkpoint/{STEP}/parts/digests", body=body)


def test_one_host_with_a_network_of_ipv6_addresses_is_one_client_and_has_one_share() -> None:
    asked_from = ["2001:db8::1", "2001:db8::ffff:2", "2001:db8:0:1::1", "::ffff:192.0.2.7", "192.0.2.7"]
    clients = [handlers._client(SimpleNamespace(remote=address)) for address in asked_from]  # type: ignore[arg-type]
    assert clients == ["2001:db8::/64", "2001:db8::/64", "2001:db8:0:1::/64", "192.0.2.7", "192.0.2.7"]


class Gate:
    """Holds up work for digests after each slice until it may go on, and counts the slices."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.permits = threading.Semaphore(0)
        self.num_slices = 0
        self._digests = handlers.digest_parts
        monkeypatch.setattr(sending, "SLICE_BYTES", BLOCK)
        monkeypatch.setattr(handlers, "digest_parts", self._digest_parts)

    def _digest_parts(self, *arguments: Any) -> Iterator[bytes | None]:
        for digest in self._digests(*arguments):
            self.num_slices += 1
            self.permits.acquire(timeout=60)
            yield digest


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    gate = Gate(monkeypatch)
    yield gate
    gate.permits.release(1 << 20)


@pytest.mark.parametrize(
    ("num_times", "status"), [(MAX_DIGESTED_BYTES // (4 * NUM), 200), (MAX_DIGESTED_BYTES // (4 * NUM) + 1, 416)]
)
def test_bytes_that_are_asked_for_again_and_again_count_each_time(source, num_times, status):
    connection = connected(source)
    ask_for_digests(connection, num_times)
    answer = connection.getresponse()
    told = json.loads(answer.read())
    connection.close()
    assert answer.status == status
    assert len(told) == num_times if status == 200 else told["error"] == "bad_range"


def test_a_receiver_asks_for_digests_of_no_more_bytes_than_a_source_gives_at_once():
    sizes = [60, 40, 1, 100, 7] + [0] * (MAX_PARTS + 1) + [99]
    box = SimpleNamespace(sizes=(1,))
    plan: Any = SimpleNamespace(
        parts=[SimpleNamespace(region=SimpleNamespace(num_bytes=size), box=box) for size in sizes]
    )
    batches = list(fetch._to_digest_at_once(plan, range(len(sizes)), 100))
    assert [part for batch in batches for part in batch] == list(range(len(sizes)))
    assert [sum(sizes[part] for part in batch) for batch in batches] == [100, 1, 100, 7, 99]
    assert max(map(len, batches)) == MAX_PARTS


def test_work_for_digests_ends_when_the_client_leaves(source, gate):
    num_in_all = 4 * NUM // BLOCK
    connection = connected(source)
    ask_for_digests(connection, 1)
    wait_until(lambda: gate.num_slices == 1)
    connection.close()
    clients = source._server._front._clients
    wait_until(lambda: not clients._connections)
    queue = source._server._handlers._threads._queue

    def is_idle_after_one_more_slice() -> bool:
        gate.permits.release()
        return not queue._begun

    wait_until(is_idle_after_one_more_slice)
    assert gate.num_slices < num_in_all


def test_a_state_that_is_received_for_longer_than_a_step_is_copied_before_the_step_ends(monkeypatch):
    monkeypatch.setattr(http_server, "_PREPARE_AFTER_S", 0.0)
    copied = threading.Event()
    copy_ahead = Snapshot.copy_ahead

    def copies(snapshot: Snapshot) -> bool:
        goes_on = copy_ahead(snapshot)
        if not goes_on:
            copied.set()
        return goes_on

    monkeypatch.setattr(Snapshot, "copy_ahead", copies)
    source: HTTPTransport[Any] = HTTPTransport(hostname="127.0.0.1", bind="127.0.0.1", block_bytes=BLOCK)
    source.send_captured([1], STEP, STATE, LONG, outlives_step=True)
    try:
        connection = connected(source)
        connection.request("GET", f"/v1/checkpoint/{STEP}/manifest", headers={"X-Ckpt-Receiver": "learner"})
        assert connection.getresponse().read()
        connection.close()
        assert copied.wait(120)
        (snapshot,) = source._snapshots.open_snapshots()
        num_before = snapshot.statistics().num_blocks_copied_aside
        with source.lock.write():
            assert num_before == snapshot.statistics().num_blocks_copied_aside > 0
    finally:
        source.shutdown()


@other_addresses
def test_others_are_served_while_a_client_has_all_the_digests_computed_that_it_may(source, gate):
    """Eight requests, of which each would occupy a thread: those who are sent blocks have others."""
    hostile = [connected(source, STRANGER) for _ in range(8)]
    for connection in hostile:
        ask_for_digests(connection, 1)
    wait_until(lambda: gate.num_slices == 2)
    honest = HTTPTransport(
        hostname="127.0.0.1", bind="127.0.0.1", block_bytes=BLOCK, stall_timeout=timedelta(seconds=10)
    )
    state = honest.recv_checkpoint(0, source.metadata(), STEP, LONG)
    honest.shutdown()
    for connection in hostile:
        connection.close()
    assert torch.equal(state["w"], STATE["w"])
    assert gate.num_slices == 2


def test_a_source_that_may_open_no_more_descriptors_sends_all_the_same(source, monkeypatch, caplog):
    def fails(descriptor: int) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(handlers.os, "dup", fails)
    receiver = HTTPTransport(hostname="127.0.0.1", bind="127.0.0.1", block_bytes=BLOCK, stall_timeout=LONG)
    with caplog.at_level(logging.WARNING):
        state = receiver.recv_checkpoint(0, source.metadata(), STEP, LONG)
    receiver.shutdown()
    assert torch.equal(state["w"], STATE["w"])
    assert [record.levelname for record in caplog.records if "no descriptor left" in record.message] == ["WARNING"]


def test_a_response_that_cannot_go_on_is_cut_whatever_the_system_says(source, monkeypatch):
    """Not only a receiver that closes its connection ends a response: it must not wait for the rest."""

    def fails(*arguments: Any) -> None:
        raise OSError(errno.ENOBUFS, os.strerror(errno.ENOBUFS))

    monkeypatch.setattr(handlers, "send_burst", fails)
    connection = connected(source, timeout_s=8)  # an idle connection is closed after 10 s
    connection.request("GET", f"/v1/checkpoint/{STEP}/blocks/0-{4 * NUM // BLOCK - 1}")
    answer = connection.getresponse()
    with pytest.raises((http.client.IncompleteRead, ConnectionResetError)):
        answer.read()
    connection.close()


def test_a_long_look_at_a_state_takes_a_tenth_of_the_servers_loop_however_often_it_is_asked_for(source, monkeypatch):
    """As at thousands of tensors; what was seen before is refused all the same, and what was not when it is sent."""
    snapshot = source._snapshots.open_snapshots()[0]
    looks = []
    look_at_all = snapshot._look_at_all

    def looks_long(*arguments: Any) -> None:
        looks.append(arguments)
        until = time.thread_time() + 0.02
        while time.thread_time() < until:
            pass
        look_at_all(*arguments)

    monkeypatch.setattr(snapshot, "_look_at_all", looks_long)
    monkeypatch.setattr(handlers, "_LOOK_PAUSES", 1e6)
    connection = connected(source)
    statuses = []

    def ask(path: str) -> None:
        connection.request("GET", f"/v1/checkpoint/{STEP}/{path}")
        answer = connection.getresponse()
        statuses.append(answer.status)
        answer.read()

    for _ in range(20):
        ask("manifest")
    assert (statuses, len(looks)) == ([200] * 20, 1)
    snapshot.raise_if_changed(0, 1)  # somebody else looks
    monkeypatch.setattr(snapshot, "_changed_in", lambda start, stop: "w")
    ask("manifest")
    assert (statuses[-1], len(looks)) == (410, 2)
    connection.close()


def test_one_thread_touches_buffers_for_a_snapshot_however_many_receivers_come(monkeypatch):
    touching = threading.Semaphore(0)
    goes_on = threading.Event()

    def touches(snapshot: Snapshot) -> bool:
        touching.release()
        goes_on.wait(20)
        return False

    monkeypatch.setattr(Snapshot, "touch_buffer_ahead", touches)
    monkeypatch.setattr(http_server, "_PREPARE_AFTER_S", 0.0)
    source: HTTPTransport[Any] = HTTPTransport(hostname="127.0.0.1", bind="127.0.0.1", block_bytes=BLOCK)
    source.send_checkpoint([1], STEP, STATE, LONG)
    try:
        connection = connected(source)
        for number in range(6):  # two more than there are threads
            connection.request("GET", f"/v1/checkpoint/{STEP}/manifest", headers={"X-Ckpt-Receiver": f"r{number}"})
            assert connection.getresponse().read()
        connection.close()
        assert touching.acquire(timeout=60)
        assert not touching.acquire(blocking=False)
    finally:
        goes_on.set()
        source.shutdown()


@other_addresses
def test_a_joiner_gets_the_state_however_many_names_were_made_up_before(monkeypatch):
    monkeypatch.setattr("torchft_ckpt.checkpointing.serving.receivers.MAX_RECEIVERS", 4)
    source: HTTPTransport[Any] = HTTPTransport(hostname="127.0.0.1", bind="127.0.0.1", block_bytes=BLOCK)
    joiner = HTTPTransport(hostname="127.0.0.1", bind="127.0.0.1", block_bytes=BLOCK)
    try:
        source.send_checkpoint([1], STEP, STATE, LONG)
        stranger = connected(source, STRANGER)
        for number in range(6):
            stranger.request("GET", f"/v1/checkpoint/{STEP}/manifest", headers={"X-Ckpt-Receiver": f"made-up-{number}"})
            assert stranger.getresponse().read()
        stranger.close()
        state = joiner.recv_checkpoint(0, source.metadata(), STEP, LONG)
        assert torch.equal(state["w"], STATE["w"])
    finally:
        joiner.shutdown()
        source.shutdown()


def test_a_manifest_that_nobody_reads_is_not_copied_for_each_who_asks_for_it():
    """Of a megabyte and more, which the system's buffers do not hold: a piece of it waits in this process."""
    source: HTTPTransport[Any] = HTTPTransport(hostname="127.0.0.1", bind="127.0.0.1", block_bytes=BLOCK)
    source.send_checkpoint([1], STEP, {"text": "x" * (32 << 20)}, LONG)
    try:
        connection = connected(source)
        connection.request("GET", f"/v1/checkpoint/{STEP}/manifest")
        guarded = source._server._front._clients._connections

        def num_waiting() -> int:
            return max((one._transport.get_write_buffer_size() for one in [*guarded] if one._transport), default=0)

        wait_until(num_waiting)
        time.sleep(0.1)
        assert num_waiting() < 1 << 20
        answer = connection.getresponse()
        assert len(answer.read()) > 32 << 20
        connection.close()
    finally:
        source.shutdown()


def test_a_burst_has_its_socket_until_it_ends_however_often_its_request_is_cancelled() -> None:
    """Where the server ends it is, twice: once for what is served, once for the connection."""
    began, may_end = threading.Event(), threading.Event()

    class SlowBody:
        length = 1
        done = False

        def advance(self, send: Callable[[list[memoryview]], int], max_bytes: int = 1) -> int:
            began.set()
            may_end.wait(20)
            self.done = True
            return 1

    async def cancelled_twice(executor: ThreadPoolExecutor) -> bool:
        serving = handlers.CheckpointHandlers.__new__(handlers.CheckpointHandlers)
        serving._threads = FairThreads(executor, 1)
        sock, other = socket.socketpair()
        with sock, other:
            sending = asyncio.create_task(
                serving._send_from_threads("client", sock, SlowBody(), Turns(Pace(), 1), lambda: None)
            )
            await asyncio.to_thread(began.wait, 20)
            for _ in range(2):
                sending.cancel()
                await asyncio.wait({sending}, timeout=0.05)
            is_waited_for = not sending.done()
            may_end.set()
            await asyncio.wait({sending}, timeout=20)
            return is_waited_for and sending.cancelled()

    with ThreadPoolExecutor(1) as executor:
        try:
            assert asyncio.run(cancelled_twice(executor))
        finally:
            may_end.set()


def test_names_from_all_addresses_that_one_host_may_have_keep_out_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """In IPv6 each of its names may come from another address, so each looked like the only one of a client."""
    monkeypatch.setattr(receivers, "MAX_RECEIVERS", 4)
    known = receivers.Receivers(1, 1)
    for number in range(8):
        made_up = cast(web.Request, SimpleNamespace(remote=f"2001:db8::{number:x}"))
        known.add(f"made-up-{number}", number, handlers._client(made_up))
    known.add("honest", 9.0, handlers._client(cast(web.Request, SimpleNamespace(remote="::ffff:10.0.0.7"))))
    assert known.acknowledge("honest", 1)
