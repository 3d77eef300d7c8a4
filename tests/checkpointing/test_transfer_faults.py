"""Whatever happens on the way, a receive gives the state of its step, equal in every bit, or an error that says why not."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial

import faulty_proxy
import pytest
import torch
from faulty_proxy import FaultyProxy
from support import sources
from support.thoroughness import by_default

from torchft_ckpt.checkpointing import HTTPTransport
from torchft_ckpt.checkpointing.fetching.block_transfer import BlockTransfer
from torchft_ckpt.checkpointing.protocol import parse_metadata
from torchft_ckpt.errors import (
    CheckpointError,
    DigestMismatchError,
    StateFormatError,
    TransferCancelledError,
    TransferTimeoutError,
)
from torchft_ckpt.testing.transport_conformance import differences, example_state

LONG = timedelta(seconds=90)
LONG_S = 90.0
STATE = example_state(3)
IN_THE_DATA = 400_000
"""A byte of the answers of one connection that is certainly in the blocks: the state has about 1.2 MB."""


make_transport = partial(sources.make_transport, block_bytes=65536)


@pytest.fixture
def source() -> Iterator[HTTPTransport]:
    transport = make_transport()
    transport.send_checkpoint([1], 3, STATE, LONG)
    yield transport
    transport.shutdown()


@pytest.fixture
def destination() -> Iterator[HTTPTransport]:
    transport = make_transport(stall_timeout=timedelta(seconds=10))
    yield transport
    transport.shutdown()


@pytest.fixture
def proxy(source: HTTPTransport) -> Iterator[FaultyProxy]:
    with FaultyProxy(parse_metadata(source.metadata()).port) as proxy:
        yield proxy


def fetch_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "torchft_ckpt-fetch"]


def receive(destination: HTTPTransport, url: str, timeout: timedelta = LONG) -> dict:
    return destination.recv_checkpoint(0, url, 3, timeout)


def test_after_a_cut_in_the_data_it_goes_on_over_another_connection(destination, proxy):
    """As long as each connection brings something: what has arrived is not fetched again."""
    passed = []

    def fault(connection: faulty_proxy.Connection, before: int, data: bytes) -> bytes:
        passed.append(len(data))
        return faulty_proxy.cut_after(IN_THE_DATA)(connection, before, data)

    proxy.fault = fault
    assert differences(receive(destination, proxy.url), STATE) == []
    assert sum(passed) < 2 * 1_200_000


def test_after_a_fault_the_next_receive_succeeds_into_the_memory_of_the_failed_one(destination, source, proxy):
    proxy.fault = faulty_proxy.flip_bit_at(IN_THE_DATA)
    with pytest.raises(DigestMismatchError):
        receive(destination, proxy.url)
    kept = {
        buffer.__array_interface__["data"][0]
        for buffers in destination._buffer_cache._kept.values()
        for buffer in buffers
    }
    state = receive(destination, source.metadata())
    assert differences(state, STATE) == []
    assert state["user"]["model"]["weight"].untyped_storage().data_ptr() in kept


def test_cancel_ends_a_receive_that_stalls(proxy):
    destination = make_transport()
    stalled = threading.Event()

    def fault(connection: faulty_proxy.Connection, passed: int, data: bytes) -> bytes:
        if passed + len(data) > IN_THE_DATA:
            stalled.set()
            connection.ended.wait(LONG_S)
        return data

    proxy.fault = fault
    with ThreadPoolExecutor(1) as executor:
        future = executor.submit(receive, destination, proxy.url)
        assert stalled.wait(LONG_S)
        destination.cancel_recv()
        with pytest.raises(TransferCancelledError):
            future.result(LONG_S)
    assert fetch_threads() == []
    destination.shutdown()


def test_shutdown_ends_a_receive_in_progress():
    source, destination = make_transport(), make_transport()
    with ThreadPoolExecutor(1) as executor:
        future = executor.submit(receive, destination, source.metadata())
        while not destination._fetches:
            pass
        destination.shutdown()
        with pytest.raises(CheckpointError):
            future.result(LONG_S)
    source.shutdown()


def test_a_lease_that_ends_frees_the_state_and_later_receivers_are_told(destination):
    source = make_transport()
    source.send_checkpoint([1], 3, STATE, timedelta(seconds=0.05))
    source.disallow_checkpoint()
    until = time.monotonic() + LONG_S
    while source._snapshots.open_snapshots() and time.monotonic() < until:
        threading.Event().wait(0.01)
    with pytest.raises(TransferTimeoutError, match="not served yet"):
        receive(destination, source.metadata(), timedelta(seconds=3))
    assert (source._snapshots.open_snapshots(), source._pool.held_bytes()) == ([], 0)
    source.shutdown()


def test_a_manifest_beyond_the_limit_is_refused(source):
    destination = make_transport(max_manifest_bytes=100)
    with pytest.raises(StateFormatError, match="the limit is 100"):
        receive(destination, source.metadata())
    destination.shutdown()


def test_a_reader_that_reads_nothing_never_holds_the_trainer(source, proxy):
    """The client stops reading in the middle, and the trainer goes on before it reads again."""
    destination = make_transport(stall_timeout=LONG)
    stopped, go_on = threading.Event(), threading.Event()
    weight = torch.arange(8 * 1024 * 1024, dtype=torch.float32)
    expected = weight.clone()

    def fault(connection: faulty_proxy.Connection, passed: int, data: bytes) -> bytes:
        if passed + len(data) > IN_THE_DATA:
            stopped.set()
            go_on.wait(LONG_S)
        return data

    proxy.fault = fault
    source.send_checkpoint([1], 4, {"w": weight}, LONG)
    with ThreadPoolExecutor(1) as executor:
        future = executor.submit(destination.recv_checkpoint, 0, proxy.url, 4, LONG)
        assert stopped.wait(LONG_S)
        source.disallow_checkpoint()
        weight.zero_()
        assert not future.done()
        go_on.set()
        received = future.result(LONG_S)
    assert torch.equal(received["w"], expected)
    destination.shutdown()


@pytest.mark.slow
def test_recoveries_under_a_stepping_optimizer_are_never_torn(monkeypatch):
    """The trainer writes one number into all of its tensors, again and again, under the write side of the lock."""
    source, destination = make_transport(), make_transport(num_chunks=2)
    tensors = [torch.zeros(size) for size in (3_000_000, 7, 1_000_000, 1000)]
    stepped, wanted, served = threading.Condition(), threading.Semaphore(0), threading.Semaphore(0)
    step, over = 0, threading.Event()

    def train() -> None:
        nonlocal step
        while not over.is_set():
            source.lock.acquire_write()
            for tensor in tensors:
                tensor.fill_(step + 1)
            source.lock.release_write()
            with stepped:
                step += 1
                stepped.notify_all()
            if wanted.acquire(blocking=False):
                with source.lock.read():
                    source.send_checkpoint([1], step, {"tensors": tensors, "step": step}, LONG)
                served.release()

    def arrived_after_a_step(*arguments) -> bool:
        """Slow the receiver down: after every block it waits until the trainer has stepped."""
        with stepped:
            seen = step
            assert stepped.wait_for(lambda: step > seen or over.is_set(), LONG_S)
        return arrived(*arguments)

    arrived = BlockTransfer.arrived
    monkeypatch.setattr(BlockTransfer, "arrived", arrived_after_a_step)
    trainer = threading.Thread(target=train)
    trainer.start()
    torn = []
    try:
        for _ in range(by_default(3, thorough=10)):
            wanted.release()
            assert served.acquire(timeout=LONG_S)
            serving = source._snapshots.serving_step()
            received = destination.recv_checkpoint(0, source.metadata(), serving, LONG)
            values = {value for tensor in received["tensors"] for value in tensor.unique().tolist()}
            if values != {float(serving)} or received["step"] != serving:
                torn.append((serving, values))
        assert step > serving
    finally:
        over.set()
        trainer.join(LONG_S)
        source.shutdown()
        destination.shutdown()
    assert torn == []
