"""What tests can tell the fake to do; that it behaves as the real one is tested by the conformance tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import timedelta

import pytest
import torch
from support.fake_process_group import FakeFabric, FakeProcessGroup
from support.rings import Ring
from torch.distributed import ReduceOp

from torchft_ckpt.errors import CollectiveFailedError, ProcessGroupAbortedError, ProcessGroupConfigureError


@pytest.fixture
def ring(new_address: Callable[[], str]) -> Iterator[Ring]:
    fabric = FakeFabric()
    ring = Ring([FakeProcessGroup(fabric, timedelta(seconds=10)) for _ in range(2)], new_address)
    yield ring
    ring.close()


def reduce(rank: int, group: FakeProcessGroup) -> list[float]:
    tensor = torch.full((1,), rank + 1.0)
    group.allreduce([tensor], ReduceOp.SUM).wait()
    return tensor.tolist()


def test_an_operation_told_to_fail_fails_on_all_members(ring: Ring) -> None:
    ring.configure()
    ring.members[1].fail_next()
    assert [type(outcome) for outcome in ring.each(reduce)] == [CollectiveFailedError] * 2
    ring.configure()
    assert ring.each(reduce) == [[3.0]] * 2


def test_an_operation_told_to_hang_ends_by_an_abort(ring: Ring) -> None:
    ring.configure()
    ring.members[1].hang_next()
    works = [member.allreduce([torch.ones(1)], ReduceOp.SUM) for member in ring.members]
    assert [work.is_completed() for work in works] == [False, False]
    ring.members[0].abort()
    with pytest.raises(ProcessGroupAbortedError):
        works[0].wait()
    with pytest.raises(CollectiveFailedError):
        works[1].wait()


def test_a_prefix_serves_one_group_only(ring: Ring) -> None:
    address = ring.new_address()
    assert ring.each(lambda rank, group: group.configure(address, "r", rank, 2)) == [None, None]
    with pytest.raises(ProcessGroupConfigureError, match="one group only"):
        ring.members[0].configure(address, "r", 0, 2)


def test_the_sum_is_added_up_in_rank_order(ring: Ring) -> None:
    ring.configure()
    parts = [torch.tensor([1e8]), torch.tensor([-1.5])]

    def add(rank: int, group: FakeProcessGroup) -> int:
        tensor = parts[rank].clone()
        group.allreduce([tensor], ReduceOp.SUM).wait()
        return int(tensor.view(torch.int32))

    assert ring.each(add) == [int((parts[0] + parts[1]).view(torch.int32))] * 2
