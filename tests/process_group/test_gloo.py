"""ProcessGroupGloo beyond the contract: exact abort, exact sockets, bounded configure, nothing left behind."""

from __future__ import annotations

import itertools
import os
import random
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch
from support.ports import reserved_port
from support.rings import FREED_WITHIN, PATIENCE, Ring, is_connecting
from support.waiting import wait_until
from torch.distributed import ReduceOp

from torchft_ckpt.errors import (
    CollectiveFailedError,
    ConfigError,
    ProcessGroupAbortedError,
    ProcessGroupConfigureError,
    ProcessGroupError,
)
from torchft_ckpt.process_group import ProcessGroup, ProcessGroupGloo

linux_only = pytest.mark.skipif(not os.path.isdir("/proc/self/fdinfo"), reason="needs Linux's /proc")
SIZES = [1, 2, 3, 7, 64, 1000, 4097, 65536, 300_001]


def bits(tensor: torch.Tensor) -> list[int]:
    return tensor.view(torch.int32).tolist()


@pytest.mark.parametrize("world_size", [2, 3, 4, 5])
def test_all_ranks_get_the_same_bits(gloo_ring: Callable[[int], Ring], world_size: int) -> None:
    ring = gloo_ring(world_size)
    ring.configure()
    seed = random.randrange(2**31)
    print(f"seed {seed}")
    sizes = [*SIZES, *(random.Random(seed).randrange(1, 200_000) for _ in range(10))]

    def reduce(rank: int, group: ProcessGroup) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(seed + rank)
        tensors = [torch.randn(size, generator=generator) * 10.0 ** (rank % 3) for size in sizes]
        works = [group.allreduce([tensor], ReduceOp.SUM) for tensor in tensors]
        for work in works:
            work.wait()
        return tensors

    results = ring.each(reduce)
    differing = [
        (size, rank)
        for rank in range(1, world_size)
        for size, mine, first in zip(sizes, results[rank], results[0], strict=True)
        if not torch.equal(mine.view(torch.int32), first.view(torch.int32))
    ]
    assert differing == []


def test_many_operations_in_flight_are_all_freed_by_an_abort(gloo_ring: Callable[[int], Ring]) -> None:
    ring = gloo_ring(2)
    ring.configure()
    works = [ring.members[0].allreduce([torch.ones(100_000)], ReduceOp.SUM) for _ in range(20)]
    ring.members[0].abort()
    outcomes = []
    for work in works:
        with pytest.raises(ProcessGroupAbortedError) as caught:
            work.wait(FREED_WITHIN)
        outcomes.append(caught.type)
    assert outcomes == [ProcessGroupAbortedError] * 20


def test_one_abort_frees_all_that_wait_for_it(gloo_ring: Callable[[int], Ring]) -> None:
    # In a ring only neighbours notice a loss; they pass it on, because each that fails closes its connections.
    ring = gloo_ring(5)
    ring.configure()
    works = [ring.members[rank].allreduce([torch.ones(10)], ReduceOp.SUM) for rank in range(4)]
    time.sleep(1.0)  # Gloo forgets an operation that begins just as the connection ends, see `process_group/gloo.py`
    ring.members[4].abort()
    for work in works:
        with pytest.raises(CollectiveFailedError):
            work.wait(FREED_WITHIN)


@linux_only
def test_abort_leaves_other_connections_of_the_process_alone(gloo_ring: Callable[[int], Ring]) -> None:
    ring = gloo_ring(2)
    stop = threading.Event()
    pairs: list[tuple[socket.socket, socket.socket]] = []
    listener = socket.create_server(("127.0.0.1", 0), backlog=500)

    def connect_all_the_time() -> None:
        while not stop.is_set() and len(pairs) < 300:
            client = socket.create_connection(listener.getsockname())
            pairs.append((client, listener.accept()[0]))

    other = threading.Thread(target=connect_all_the_time)
    other.start()
    for _ in range(5):
        ring.configure()
        work = ring.members[0].allreduce([torch.ones(1000)], ReduceOp.SUM)
        ring.members[0].abort()
        with pytest.raises(ProcessGroupAbortedError):
            work.wait()
    stop.set()
    other.join()
    for index, (client, server) in enumerate(pairs):
        client.sendall(b"%03d" % index)
        server.settimeout(60)
    received = [server.recv(3) for _, server in pairs]
    for sock in [listener, *itertools.chain.from_iterable(pairs)]:
        sock.close()
    assert received == [b"%03d" % index for index in range(len(received))]
    assert len(received) > 0


@pytest.mark.slow
@linux_only
def test_fifty_configures_leave_no_thread_and_no_descriptor(gloo_ring: Callable[[int], Ring]) -> None:
    ring = gloo_ring(2)

    def counts() -> tuple[int, int]:
        return len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))

    ring.configure()
    for _ in range(3):
        ring.configure()
    wait_until(lambda: not [t for t in threading.enumerate() if t.name.startswith("pg-")], "reapers ended")
    before = counts()
    for attempt in range(50):
        ring.configure()
        if attempt % 3 == 0:
            ring.members[0].abort()
    ring.configure()
    wait_until(lambda: counts() <= before and counts()[1] <= before[1], f"back to {before} threads, descriptors")


def test_a_dropped_group_lets_go_of_its_threads(new_address: Callable[[], str]) -> None:
    group = ProcessGroupGloo()
    group.configure(new_address(), "r0", 0, 1)
    session = group._session
    assert session is not None
    del group
    assert isinstance(session.error, ProcessGroupAbortedError)
    assert session.join(60)


def test_a_group_of_one_needs_no_store() -> None:
    group = ProcessGroupGloo()
    group.configure("127.0.0.1:1/nobody/listens", "r0", 0, 1)
    tensor = torch.arange(3.0)
    group.allreduce([tensor], ReduceOp.SUM).wait()
    group.shutdown()
    assert tensor.tolist() == [0.0, 1.0, 2.0]


def test_a_store_that_refuses_is_an_error_at_once(gloo_ring: Callable[[int], Ring]) -> None:
    group = ProcessGroupGloo(PATIENCE, connect_timeout=PATIENCE)
    with reserved_port() as port, ThreadPoolExecutor(1) as pool:
        configured = pool.submit(group.configure, f"127.0.0.1:{port}/x", "r1", 1, 2, 7)
        with pytest.raises(ProcessGroupConfigureError, match=f"rank 1 of 2.*127.0.0.1:{port}.*refused"):
            configured.result(FREED_WITHIN.total_seconds())
    assert isinstance(group.errored(), ProcessGroupConfigureError)
    assert gloo_ring(2).configure() is None
    group.shutdown()


def test_a_store_that_accepts_but_never_answers_is_an_error_after_the_connect_timeout() -> None:
    group = ProcessGroupGloo(connect_timeout=timedelta(seconds=3))
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        with pytest.raises(ProcessGroupConfigureError, match=f"{port} accepted the connection but did not answer"):
            group.configure(f"127.0.0.1:{port}/x", "r0", 0, 2, 7)


def test_abort_frees_a_configure_whose_store_never_answers() -> None:
    group = ProcessGroupGloo(connect_timeout=PATIENCE)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}/x"
        outcomes: list[BaseException] = []

        def configure() -> None:
            try:
                group.configure(address, "r0", 0, 2, 7)
            except ProcessGroupError as error:
                outcomes.append(error)

        thread = threading.Thread(target=configure)
        thread.start()
        wait_until(lambda: is_connecting(group), "configure waits for the store")
        group.abort()
        thread.join(FREED_WITHIN.total_seconds())
        assert [type(error) for error in outcomes] == [ProcessGroupAbortedError]


def test_an_absent_rank_is_named(new_address: Callable[[], str]) -> None:
    group = ProcessGroupGloo(connect_timeout=timedelta(seconds=4))
    with pytest.raises(ProcessGroupConfigureError, match="rank 0, rank 2 never came to the store"):
        group.configure(new_address(), "r1", 1, 3, 7)
    group.shutdown()


def test_a_store_address_without_a_port_is_refused() -> None:
    with pytest.raises(ConfigError, match="no port"):
        ProcessGroupGloo().configure("localhost", "r0", 0, 2)


def test_a_rank_outside_the_world_is_refused(new_address: Callable[[], str]) -> None:
    with pytest.raises(ConfigError, match="rank 2 is not in a group of 2"):
        ProcessGroupGloo().configure(new_address(), "r0", 2, 2)


@pytest.mark.parametrize(
    "operate",
    [
        lambda pg: pg.barrier(),
        lambda pg: pg.allgather([[torch.zeros(2), torch.zeros(2)]], [torch.ones(2)]),
        lambda pg: pg.allgather_into_tensor_coalesced([torch.zeros(4)], [torch.ones(2)]),
        lambda pg: pg.alltoall_base(torch.zeros(4), torch.ones(4), [], []),
        lambda pg: pg.allreduce_coalesced([torch.ones(2), torch.ones(3)]),
        lambda pg: pg.reduce_scatter([torch.zeros(2)], [[torch.ones(2), torch.ones(2)]]),
        lambda pg: pg.send([torch.ones(2)], 1) if pg.rank() == 0 else pg.recv([torch.zeros(2)], 0),
    ],
    ids=["barrier", "allgather", "allgather_into", "alltoall", "allreduce_coalesced", "reduce_scatter", "send_recv"],
)
def test_other_operations_reach_all_members(
    gloo_ring: Callable[[int], Ring], operate: Callable[[ProcessGroup], torch.distributed.Work]
) -> None:
    ring = gloo_ring(2)
    ring.configure()
    outcomes = ring.each(lambda rank, pg: bool(operate(pg).wait()))
    if any("ProcessGroupGloo does not support" in str(outcome) for outcome in outcomes):
        pytest.skip("the Gloo of this torch does not have it")
    assert outcomes == [True, True]


def test_a_wrong_argument_is_the_callers_error_and_does_not_end_the_group(gloo_ring: Callable[[int], Ring]) -> None:
    ring = gloo_ring(2)
    ring.configure()
    with pytest.raises(RuntimeError) as caught:
        ring.members[0].allreduce([torch.ones(2).to_sparse()], ReduceOp.PRODUCT)
    assert not isinstance(caught.value, ProcessGroupError)
    assert ring.members[0].errored() is None


def test_giving_up_a_wait_does_not_end_the_operation(gloo_ring: Callable[[int], Ring]) -> None:
    ring = gloo_ring(2)
    ring.configure()
    tensor = torch.ones(2)
    work = ring.members[0].allreduce([tensor], ReduceOp.SUM)
    with pytest.raises(TimeoutError, match="not over"):
        work.wait(timedelta(seconds=0.05))
    assert ring.members[0].errored() is None
    ring.members[1].allreduce([torch.ones(2)], ReduceOp.SUM).wait()
    work.wait()
    assert tensor.tolist() == [2.0, 2.0]
