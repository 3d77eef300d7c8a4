"""The dummy and the managed group, and the watch over NCCL's operations."""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch.distributed import ReduceOp
from torch.distributed.distributed_c10d import AllreduceOptions

from torchft_ckpt.errors import ConfigError
from torchft_ckpt.process_group import (
    CompletedWork,
    ManagedProcessGroup,
    ProcessGroupDummy,
    ProcessGroupNCCL,
    ProcessGroupWrapper,
)
from torchft_ckpt.process_group.nccl import OperationWatch, _has_host_tensor


class StubManager:
    def __init__(self) -> None:
        self._pg = ProcessGroupDummy(0, 1)
        self.calls: list[tuple[list[float], dict[str, Any]]] = []

    def allreduce(self, tensor: torch.Tensor, **kwargs: Any) -> CompletedWork:
        self.calls.append((tensor.tolist(), kwargs))
        return CompletedWork(tensor)

    def num_participants(self) -> int:
        return 3


def test_a_dummy_returns_completed_work_with_its_tensors() -> None:
    tensors = [torch.ones(2)]
    work = ProcessGroupDummy(0, 1).allreduce(tensors, ReduceOp.SUM)
    assert (work.wait(), work.is_completed(), work.get_future().value() is tensors) == (True, True, True)


def test_a_dummy_copies_what_a_group_of_one_copies() -> None:
    output = torch.zeros(2)
    ProcessGroupDummy(0, 1).allgather([[output]], [torch.ones(2)]).wait()
    assert output.tolist() == [1.0, 1.0]


@pytest.mark.parametrize(
    ("collective", "is_nested"),
    [
        ("allgather_into_tensor_coalesced", False),
        ("reduce_scatter", True),
        ("reduce_scatter_tensor_coalesced", False),
    ],
)
def test_a_dummy_copies_each_input_to_its_output(collective: str, is_nested: bool) -> None:
    outputs = [torch.zeros(2), torch.zeros(3)]
    inputs = [torch.full((2,), 1.0), torch.full((3,), 2.0)]
    given = [[tensor] for tensor in inputs] if is_nested else inputs
    result = getattr(ProcessGroupDummy(0, 1), collective)(outputs, given).get_future().value()
    assert result is outputs
    assert [tensor.tolist() for tensor in outputs] == [tensor.tolist() for tensor in inputs]


def test_a_dummys_all_to_all_returns_its_buffer_in_a_list() -> None:
    output = torch.zeros(2)
    (result,) = ProcessGroupDummy(0, 1).alltoall_base(output, torch.ones(2), [], []).get_future().value()
    assert result is output and output.tolist() == [1.0, 1.0]


def test_a_dummy_of_two_is_refused() -> None:
    with pytest.raises(ConfigError, match="group of one"):
        ProcessGroupDummy(1, 2)


def test_torchs_ddp_accepts_a_dummy() -> None:
    module = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2), process_group=ProcessGroupDummy(0, 1))
    module(torch.ones(1, 2)).sum().backward()
    assert all(parameter.grad is not None for parameter in module.parameters())


@pytest.mark.parametrize("opts", [None, ReduceOp.SUM, AllreduceOptions()])
def test_a_managed_group_reduces_through_the_manager(opts: Any) -> None:
    manager: Any = StubManager()
    ManagedProcessGroup(manager).allreduce([torch.ones(1)], opts).wait()
    assert manager.calls == [([1.0], {} if opts is None else {"reduce_op": ReduceOp.SUM})]


def test_a_managed_group_is_as_large_as_the_quorum() -> None:
    manager: Any = StubManager()
    assert ManagedProcessGroup(manager).size() == 3


def test_a_managed_group_takes_one_tensor() -> None:
    manager: Any = StubManager()
    with pytest.raises(ValueError, match="one tensor"):
        ManagedProcessGroup(manager).allreduce([torch.ones(1), torch.ones(1)])


def test_a_wrapper_passes_everything_on() -> None:
    wrapper = ProcessGroupWrapper(pg=ProcessGroupDummy(0, 1))
    wrapper.configure("nowhere", "r0", 0, 1)
    assert (wrapper.size(), wrapper.errored(), wrapper.getBackendName()) == (1, None, "torchft-ckpt-dummy")
    assert wrapper.broadcast_one(torch.ones(1), 0).wait()


@pytest.mark.skipif(torch.distributed.is_nccl_available(), reason="this build has NCCL")
def test_a_build_without_nccl_says_so() -> None:
    with pytest.raises(ConfigError, match="no NCCL"):
        ProcessGroupNCCL()


class StubEvent:
    def __init__(self) -> None:
        self.done = threading.Event()

    def query(self) -> bool:
        return self.done.is_set()

    def synchronize(self) -> None:
        self.done.wait()


def test_an_operation_that_is_late_is_reported_with_its_timeout() -> None:
    reported: list[float] = []
    called = threading.Event()
    watch = OperationWatch(lambda timeout_s: (reported.append(timeout_s), called.set()))
    watch.add(StubEvent(), 60.0)
    watch.add(StubEvent(), 0.01)
    assert called.wait(120)
    watch.close()
    assert reported == [0.01]


def test_operations_that_are_done_in_time_are_not_reported() -> None:
    reported: list[float] = []
    watch = OperationWatch(reported.append)
    events = [StubEvent() for _ in range(3)]
    for event in events:
        event.done.set()
        watch.add(event, 0.001)
    watch.wait_until_idle()
    watch.close()
    assert reported == []


def test_a_tensor_on_the_cpu_is_found_wherever_it_is_in_what_a_collective_gets() -> None:
    there, here = torch.empty(2, device="meta"), torch.empty(2)
    assert not _has_host_tensor(([there], [[there]], torch.distributed.AllreduceOptions()))
    assert _has_host_tensor(([there], [[there, here]]))
    assert _has_host_tensor((here,))


@pytest.mark.gpu
@pytest.mark.skipif(
    not (torch.cuda.is_available() and torch.distributed.is_nccl_available()), reason="needs CUDA and NCCL"
)
def test_nccl_reduces_and_aborts_in_a_group_of_one() -> None:
    group = ProcessGroupNCCL(timedelta(seconds=30))
    group.configure("127.0.0.1:1/unused", "r0", 0, 1)
    tensor = torch.ones(4, device="cuda")
    group.allreduce([tensor], ReduceOp.SUM).wait()
    assert (tensor.tolist(), group.errored()) == ([1.0] * 4, None)
    group.abort()
    assert group.errored() is not None
    group.configure("127.0.0.1:1/unused", "r0", 0, 1)
    group.allreduce([tensor], ReduceOp.SUM).wait()
    assert group.errored() is None
    group.shutdown()
