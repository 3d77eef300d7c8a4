"""What any reconfigurable process group does; runs on Gloo and on the fake."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from datetime import timedelta

import pytest
import torch
from support.rings import Ring, is_connecting
from support.waiting import wait_until
from torch.distributed import ReduceOp, Work
from torch.distributed.distributed_c10d import AllgatherOptions, AllreduceOptions, AllToAllOptions

from torchft_ckpt.errors import (
    CollectiveFailedError,
    ProcessGroupAbortedError,
    ProcessGroupError,
)
from torchft_ckpt.process_group import ProcessGroup, ProcessGroupGloo
from torchft_ckpt.testing.fake_process_group import FakeFabric, FakeProcessGroup


@pytest.fixture(params=["gloo", "fake"])
def ring(request: pytest.FixtureRequest, new_address: Callable[[], str]) -> Iterator[Ring]:
    fabric = FakeFabric()
    timeout = timedelta(seconds=30)
    members: list[ProcessGroup] = [
        ProcessGroupGloo(timeout) if request.param == "gloo" else FakeProcessGroup(fabric, timeout) for _ in range(3)
    ]
    ring = Ring(members, new_address)
    yield ring
    ring.close()


def start(group: ProcessGroup, value: float) -> Work:
    return group.allreduce([torch.full((5,), value)], ReduceOp.SUM)


def reduce(group: ProcessGroup, value: float, op: ReduceOp.RedOpType = ReduceOp.SUM) -> list[float]:
    tensor = torch.full((2,), value)
    group.allreduce([tensor], op).wait()
    return tensor.tolist()


@pytest.mark.parametrize(("op", "expected"), [(ReduceOp.SUM, 6.0), (ReduceOp.MAX, 3.0), (ReduceOp.AVG, 2.0)])
def test_allreduce_reduces_over_all_members(ring: Ring, op: ReduceOp.RedOpType, expected: float) -> None:
    ring.configure()
    assert ring.each(lambda rank, pg: reduce(pg, rank + 1.0, op)) == [[expected] * 2] * 3


def test_the_future_carries_the_reduced_tensors(ring: Ring) -> None:
    ring.configure()

    def value(rank: int, pg: ProcessGroup) -> list[float]:
        return pg.allreduce([torch.ones(1)], AllreduceOptions()).get_future().wait()[0].tolist()

    assert ring.each(value) == [[3.0]] * 3


def test_broadcast_copies_the_roots_tensor(ring: Ring) -> None:
    ring.configure()

    def receive(rank: int, pg: ProcessGroup) -> list[float]:
        tensor = torch.full((2,), float(rank))
        pg.broadcast_one(tensor, root=2).wait()
        return tensor.tolist()

    assert ring.each(receive) == [[2.0, 2.0]] * 3


def test_alltoall_gives_each_member_its_slice_of_every_other(ring: Ring) -> None:
    ring.configure()

    def exchange(rank: int, pg: ProcessGroup) -> list[int]:
        received = torch.zeros(6, dtype=torch.uint8)
        given = torch.arange(6, dtype=torch.uint8) + 10 * rank
        result = pg.alltoall_base(received, given, [], [], AllToAllOptions()).get_future().wait()
        assert result[0] is received or torch.equal(result[0], received)
        return received.tolist()

    expected = [[10 * other + 2 * rank + i for other in range(3) for i in range(2)] for rank in range(3)]
    assert ring.each(exchange) == expected


def test_allgather_gives_every_members_tensor_to_all(ring: Ring) -> None:
    ring.configure()

    def gather(rank: int, pg: ProcessGroup) -> list[list[int]]:
        rows = torch.zeros((3, 2), dtype=torch.uint8)
        given = torch.full((2,), rank + 1, dtype=torch.uint8)
        pg.allgather([list(rows)], [given], AllgatherOptions()).wait()
        return rows.tolist()

    assert ring.each(gather) == [[[1, 1], [2, 2], [3, 3]]] * 3


def test_allgather_into_a_tensor_concatenates(ring: Ring) -> None:
    ring.configure()

    def gather(rank: int, pg: ProcessGroup) -> list[float]:
        gathered = torch.zeros(6)
        given = torch.full((2,), rank + 1.0)
        pg.allgather_into_tensor_coalesced([gathered], [given], AllgatherOptions()).wait()
        return gathered.tolist()

    assert ring.each(gather) == [[1.0, 1.0, 2.0, 2.0, 3.0, 3.0]] * 3


def test_rank_and_size_are_those_of_the_last_configure(ring: Ring) -> None:
    ring.configure()
    ring.configure([2, 0])
    assert [(ring.members[index].rank(), ring.members[index].size()) for index in (2, 0)] == [(0, 2), (1, 2)]


def test_an_operation_before_configure_is_refused(ring: Ring) -> None:
    with pytest.raises(ProcessGroupError, match="not configured"):
        reduce(ring.members[0], 1.0)
    assert ring.members[0].errored() is None


def test_abort_ends_an_operation_in_flight(ring: Ring) -> None:
    ring.configure([0, 1])
    work = start(ring.members[0], 1.0)
    ring.members[0].abort()
    assert isinstance(ring.members[0].errored(), ProcessGroupAbortedError)
    with pytest.raises(ProcessGroupAbortedError):
        work.wait()


def test_a_member_whose_neighbour_aborted_fails_too(ring: Ring) -> None:
    ring.configure([0, 1])
    work = start(ring.members[0], 1.0)
    ring.members[1].abort()
    with pytest.raises(CollectiveFailedError):
        work.wait()
    assert isinstance(ring.members[0].errored(), CollectiveFailedError)


def test_the_future_of_an_aborted_operation_fails(ring: Ring) -> None:
    ring.configure()
    future = start(ring.members[0], 1.0).get_future()
    failed = threading.Event()
    future.add_done_callback(lambda done: failed.set())
    ring.members[0].abort()
    assert failed.wait(10)
    with pytest.raises(ProcessGroupAbortedError):
        future.value()


def test_after_an_abort_operations_are_refused_until_the_next_configure(ring: Ring) -> None:
    ring.configure()
    ring.members[1].abort()
    with pytest.raises(ProcessGroupAbortedError):
        reduce(ring.members[1], 1.0)
    assert isinstance(ring.members[1].errored(), ProcessGroupAbortedError)
    ring.configure()
    assert [member.errored() for member in ring.members] == [None] * 3
    assert ring.each(lambda rank, pg: reduce(pg, 1.0)) == [[3.0] * 2] * 3


def test_survivors_go_on_in_a_smaller_group(ring: Ring) -> None:
    ring.configure()
    ring.members[1].abort()
    ring.configure([0, 2])
    assert ring.each(lambda rank, pg: reduce(pg, rank + 1.0), [0, 2]) == [[4.0] * 2] * 2


def configure_in_vain(ring: Ring) -> tuple[threading.Thread, list[object]]:
    """Member 0 waits for a member that never comes."""
    address = ring.new_address()
    outcomes: list[object] = []
    thread = threading.Thread(
        target=lambda: outcomes.extend(ring.each(lambda rank, pg: pg.configure(address, "r0", 0, 2, 6), [0]))
    )
    thread.start()
    wait_until(lambda: is_connecting(ring.members[0]), "member 0 waits for the others")
    return thread, outcomes


def test_abort_ends_a_configure_that_waits_for_an_absent_member(ring: Ring) -> None:
    thread, outcomes = configure_in_vain(ring)
    ring.members[0].abort()
    thread.join()
    assert [type(outcome) for outcome in outcomes] == [ProcessGroupAbortedError]
    assert isinstance(ring.members[0].errored(), ProcessGroupAbortedError)
    ring.configure()
    assert ring.each(lambda rank, pg: reduce(pg, 1.0)) == [[3.0] * 2] * 3


def test_a_second_configure_ends_the_first(ring: Ring) -> None:
    thread, outcomes = configure_in_vain(ring)
    address = ring.new_address()
    pool = [threading.Thread(target=ring.members[r].configure, args=(address, f"r{r}", r, 3, 7)) for r in range(3)]
    for member in pool:
        member.start()
    for member in [*pool, thread]:
        member.join()
    assert [type(outcome) for outcome in outcomes] == [ProcessGroupAbortedError]
    assert ring.each(lambda rank, pg: reduce(pg, 1.0)) == [[3.0] * 2] * 3


def test_an_operation_that_times_out_fails_and_the_group_says_so(ring: Ring) -> None:
    ring.configure()
    opts = AllreduceOptions()
    opts.timeout = timedelta(seconds=0.3)
    work = ring.members[0].allreduce([torch.ones(3)], opts)
    with pytest.raises(CollectiveFailedError):
        work.wait()
    assert isinstance(ring.members[0].errored(), CollectiveFailedError)


def test_set_timeout_bounds_later_operations(ring: Ring) -> None:
    ring.configure()
    ring.members[0].set_timeout(timedelta(seconds=0.3))
    with pytest.raises(CollectiveFailedError):
        reduce(ring.members[0], 1.0)
