"""Checks of the promises of a reconfigurable `ProcessGroup`, for any implementation.

    from torchft_ckpt.testing.process_group_conformance import CHECKS

    @pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
    def test_my_process_group_conforms(check):
        check(lambda: MyProcessGroup(...))

Each check takes a function that makes a new member, makes three of them, connects them by a store of its own, drives each from
a thread, and shuts them down. Their timeout has to be at least ten seconds. It raises `ConformanceError` with a sentence about
the promise that was broken.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import ReduceOp, TCPStore, Work
from torch.distributed.distributed_c10d import AllgatherOptions, AllreduceOptions, AllToAllOptions

from torchft_ckpt.errors import CollectiveFailedError, ProcessGroupAbortedError, ProcessGroupError
from torchft_ckpt.process_group.base import ProcessGroup
from torchft_ckpt.testing.conformance import ConformanceError, require, require_raises

MakeGroup = Callable[[], ProcessGroup]
Check = Callable[[MakeGroup], None]
NUM_MEMBERS = 3
SHORT = timedelta(seconds=0.3)
PATIENCE_S = 60.0
_PARTY = "process group"


class Members:
    """Three members that meet at a store, each driven by a thread of its own."""

    def __init__(self, make: MakeGroup) -> None:
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._prefixes = itertools.count()
        self._pool = ThreadPoolExecutor(NUM_MEMBERS)
        self.groups: list[ProcessGroup] = []
        try:
            for _ in range(NUM_MEMBERS):
                self.groups.append(make())
        except BaseException:
            self.close()
            raise

    def new_address(self) -> str:
        """Return a place to meet that was not used before."""
        return f"127.0.0.1:{self._store.port}/conformance/{next(self._prefixes)}"

    def each(
        self, action: Callable[[int, ProcessGroup], object], members: Sequence[int] = range(NUM_MEMBERS)
    ) -> list[Any]:
        """Do it on these members at once; return what each returned or raised."""
        futures = [self._pool.submit(action, index, self.groups[index]) for index in members]
        return [future.exception(PATIENCE_S) or future.result() for future in futures]

    def connect(self, members: Sequence[int] = range(NUM_MEMBERS)) -> None:
        """Configure these members as one group, with ranks in this order."""
        order, address = list(members), self.new_address()

        def configure(index: int, group: ProcessGroup) -> None:
            group.configure(address, f"group_{index}", order.index(index), len(order), 7)

        outcomes = self.each(configure, order)
        require(
            _PARTY, outcomes == [None] * len(order), f"configure of members that are all there ended with {outcomes}"
        )

    def close(self) -> None:
        for group in self.groups:
            group.shutdown()
        self._pool.shutdown()


@contextmanager
def members(make: MakeGroup, *, connected: Sequence[int] = range(NUM_MEMBERS)) -> Iterator[Members]:
    """Make three members, connect these of them, and shut all down at the end."""
    three = Members(make)
    try:
        if connected:
            three.connect(connected)
        yield three
    finally:
        three.close()


def _reduced(group: ProcessGroup, value: float, op: ReduceOp.RedOpType = ReduceOp.SUM) -> list[float]:
    tensor = torch.full((2,), value, device="cpu")
    group.allreduce([tensor], ReduceOp(op)).wait()
    return tensor.tolist()


def _begin(group: ProcessGroup) -> Work:
    return group.allreduce([torch.ones(5, device="cpu")], AllreduceOptions())


def _require_on_all(
    three: Members, action: Callable[[int, ProcessGroup], object], wanted: list[Any], what: str
) -> None:
    found = three.each(action)
    require(_PARTY, found == wanted, f"{what}: {found} instead of {wanted}")


def check_an_allreduce_reduces_over_all_members(make: MakeGroup) -> None:
    with members(make) as three:
        for op, wanted in ((ReduceOp.SUM, 6.0), (ReduceOp.MAX, 3.0), (ReduceOp.AVG, 2.0)):

            def reduce(index: int, group: ProcessGroup, op: ReduceOp.RedOpType = op) -> list[float]:
                return _reduced(group, index + 1.0, op)

            _require_on_all(three, reduce, [[wanted] * 2] * 3, f"allreduce by {op}")


def check_the_future_of_an_allreduce_carries_the_tensors(make: MakeGroup) -> None:
    def value(index: int, group: ProcessGroup) -> list[float]:
        work = group.allreduce([torch.ones(1, device="cpu")], AllreduceOptions())
        return work.get_future().wait()[0].tolist()

    with members(make) as three:
        _require_on_all(three, value, [[3.0]] * 3, "the future of an allreduce")


def check_a_broadcast_copies_the_roots_tensor(make: MakeGroup) -> None:
    def receive(index: int, group: ProcessGroup) -> list[float]:
        tensor = torch.full((2,), float(index), device="cpu")
        group.broadcast_one(tensor, root=2).wait()
        return tensor.tolist()

    with members(make) as three:
        _require_on_all(three, receive, [[2.0, 2.0]] * 3, "broadcast from rank 2")


def check_an_allgather_gives_every_members_tensor_to_all(make: MakeGroup) -> None:
    def gather(index: int, group: ProcessGroup) -> list[list[int]]:
        rows = torch.zeros((3, 2), dtype=torch.uint8, device="cpu")
        given = torch.full((2,), index + 1, dtype=torch.uint8, device="cpu")
        group.allgather([list(rows)], [given], AllgatherOptions()).wait()
        return rows.tolist()

    with members(make) as three:
        _require_on_all(three, gather, [[[1, 1], [2, 2], [3, 3]]] * 3, "allgather")


def check_an_allgather_into_a_tensor_concatenates(make: MakeGroup) -> None:
    def gather(index: int, group: ProcessGroup) -> list[float]:
        gathered = torch.zeros(6, device="cpu")
        given = torch.full((2,), index + 1.0, device="cpu")
        group.allgather_into_tensor_coalesced([gathered], [given], AllgatherOptions()).wait()
        return gathered.tolist()

    with members(make) as three:
        _require_on_all(three, gather, [[1.0, 1.0, 2.0, 2.0, 3.0, 3.0]] * 3, "allgather_into_tensor_coalesced")


def check_an_alltoall_gives_each_member_its_slice_of_every_other(make: MakeGroup) -> None:
    def exchange(index: int, group: ProcessGroup) -> list[int]:
        received = torch.zeros(6, dtype=torch.uint8, device="cpu")
        given = torch.arange(6, dtype=torch.uint8, device="cpu") + 10 * index
        group.alltoall_base(received, given, [], [], AllToAllOptions()).get_future().wait()
        return received.tolist()

    wanted = [[10 * other + 2 * index + i for other in range(3) for i in range(2)] for index in range(3)]
    with members(make) as three:
        _require_on_all(three, exchange, wanted, "alltoall_base")


def check_rank_and_size_are_those_of_the_last_configure(make: MakeGroup) -> None:
    with members(make) as three:
        three.connect([2, 0])
        found = [(three.groups[index].rank(), three.groups[index].size()) for index in (2, 0)]
        require(_PARTY, found == [(0, 2), (1, 2)], f"rank and size of members 2 and 0 are {found}")


def check_an_operation_before_configure_is_refused(make: MakeGroup) -> None:
    with members(make, connected=()) as three:
        require_raises(
            _PARTY, ProcessGroupError, lambda: _reduced(three.groups[0], 1.0), "an allreduce before configure"
        )
        require(_PARTY, three.groups[0].errored() is None, "a group that was never used has an error")


def check_abort_ends_an_operation_in_flight(make: MakeGroup) -> None:
    with members(make, connected=(0, 1)) as three:
        group = three.groups[0]
        work = _begin(group)
        group.abort()
        error = group.errored()
        require(_PARTY, isinstance(error, ProcessGroupAbortedError), f"after an abort errored() is {error!r}")
        require_raises(_PARTY, ProcessGroupAbortedError, work.wait, "the wait for an operation that was aborted")


def check_the_future_of_an_aborted_operation_fails(make: MakeGroup) -> None:
    with members(make, connected=(0, 1)) as three:
        future = _begin(three.groups[0]).get_future()
        is_over = threading.Event()
        future.add_done_callback(lambda done: is_over.set())
        three.groups[0].abort()
        require(_PARTY, is_over.wait(PATIENCE_S), "the future of an operation that was aborted does not end")
        require_raises(_PARTY, ProcessGroupAbortedError, future.value, "the future of an operation that was aborted")


def check_a_member_whose_neighbour_aborted_fails_too(make: MakeGroup) -> None:
    with members(make, connected=(0, 1)) as three:
        work = _begin(three.groups[0])
        three.groups[1].abort()
        require_raises(_PARTY, CollectiveFailedError, work.wait, "the wait for an operation whose peer aborted")
        error = three.groups[0].errored()
        require(_PARTY, isinstance(error, CollectiveFailedError), f"after a peer aborted errored() is {error!r}")


def check_an_aborted_group_is_refused_until_it_is_configured(make: MakeGroup) -> None:
    with members(make) as three:
        three.groups[1].abort()
        three.groups[1].abort()
        require_raises(
            _PARTY, ProcessGroupAbortedError, lambda: _reduced(three.groups[1], 1.0), "an allreduce after an abort"
        )
        three.connect()
        errors = [group.errored() for group in three.groups]
        require(_PARTY, errors == [None] * 3, f"after a new configure errored() is {errors}")
        _require_on_all(three, lambda i, pg: _reduced(pg, 1.0), [[3.0] * 2] * 3, "allreduce after a new configure")


def check_survivors_go_on_in_a_smaller_group(make: MakeGroup) -> None:
    with members(make) as three:
        three.groups[1].abort()
        three.connect([0, 2])
        found = three.each(lambda i, pg: _reduced(pg, i + 1.0), [0, 2])
        require(_PARTY, found == [[4.0] * 2] * 2, f"allreduce of the two that are left: {found}")


def check_abort_ends_a_configure_that_waits_for_an_absent_member(make: MakeGroup) -> None:
    with members(make, connected=()) as three:
        address, group = three.new_address(), three.groups[0]
        outcomes: list[Any] = []
        thread = threading.Thread(
            target=lambda: outcomes.extend(three.each(lambda i, pg: pg.configure(address, "group_0", 0, 2, 6), [0]))
        )
        thread.start()
        while thread.is_alive():  # it may not have begun to connect
            group.abort()
            thread.join(0.005)
        require(
            _PARTY,
            [type(outcome) for outcome in outcomes] == [ProcessGroupAbortedError],
            f"a configure that was aborted ended with {outcomes}",
        )
        three.connect()
        _require_on_all(three, lambda i, pg: _reduced(pg, 1.0), [[3.0] * 2] * 3, "allreduce after a new configure")


def check_an_operation_that_times_out_fails_and_the_group_says_so(make: MakeGroup) -> None:
    with members(make) as three:
        opts = AllreduceOptions()
        opts.timeout = SHORT
        work = three.groups[0].allreduce([torch.ones(3, device="cpu")], opts)
        require_raises(_PARTY, CollectiveFailedError, work.wait, "the wait for an operation that timed out")
        error = three.groups[0].errored()
        require(_PARTY, isinstance(error, CollectiveFailedError), f"after a timeout errored() is {error!r}")


def check_set_timeout_bounds_later_operations(make: MakeGroup) -> None:
    with members(make) as three:
        three.groups[0].set_timeout(SHORT)
        require_raises(
            _PARTY, CollectiveFailedError, lambda: _reduced(three.groups[0], 1.0), "an allreduce beyond set_timeout"
        )


def check_shutdown_may_be_called_again_and_before_a_configure(make: MakeGroup) -> None:
    with members(make) as three:
        for _ in range(2):
            three.groups[2].shutdown()
        three.connect()
        _require_on_all(
            three, lambda i, pg: _reduced(pg, 1.0), [[3.0] * 2] * 3, "allreduce after shutdown and configure"
        )


__all__ = ["CHECKS", "Check", "ConformanceError", "Members", "check_process_group"]

CHECKS: list[Check] = [check for name, check in list(globals().items()) if name.startswith("check_")]
"""Every check, for a parametrized test."""


def check_process_group(make: MakeGroup) -> None:
    """Run every check.

    Raises:
        ConformanceError: a promise was broken.
    """
    for check in CHECKS:
        check(make)
