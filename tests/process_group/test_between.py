"""Groups around another one: what is passed on, errors that the caller never sees, and errors that a test makes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import ReduceOp, Work
from torch.distributed import _functional_collectives as functional_collectives
from torch.distributed.distributed_c10d import (
    AllgatherOptions,
    AllreduceCoalescedOptions,
    AllreduceOptions,
    AllToAllOptions,
    BarrierOptions,
    BroadcastOptions,
    ReduceScatterOptions,
)

from torchft_ckpt.errors import ProcessGroupError
from torchft_ckpt.process_group import (
    CompletedWork,
    ProcessGroup,
    ProcessGroupDummy,
    ProcessGroupGloo,
    ProcessGroupNCCL,
    ProcessGroupWrapper,
)
from torchft_ckpt.process_group import ErrorSwallowingProcessGroupWrapper as Swallowing
from torchft_ckpt.process_group import FakeProcessGroupWrapper as Failing

TENSOR = torch.ones(2)
COLLECTIVES: dict[str, tuple[tuple[Any, ...], type | None]] = {
    "allreduce": (([TENSOR],), AllreduceOptions),
    "allreduce_coalesced": (([TENSOR],), AllreduceCoalescedOptions),
    "allgather": (([[TENSOR]], [TENSOR]), AllgatherOptions),
    "allgather_into_tensor_coalesced": (([TENSOR], [TENSOR]), AllgatherOptions),
    "alltoall_base": ((TENSOR, TENSOR, [], []), AllToAllOptions),
    "barrier": ((), BarrierOptions),
    "broadcast": (([TENSOR],), BroadcastOptions),
    "reduce_scatter": (([TENSOR], [[TENSOR]]), ReduceScatterOptions),
    "reduce_scatter_tensor_coalesced": (([TENSOR], [TENSOR]), ReduceScatterOptions),
    "send": (([TENSOR], 1, 7), None),
    "recv": (([TENSOR], 1, 7), None),
}


class Recorder(ProcessGroup):
    def __init__(self) -> None:
        super().__init__(0, 1)  # type: ignore[call-arg]  # rank and size; the stub lacks this constructor
        self.started: list[tuple[Any, ...]] = []

    def _start_collective(self, collective: str, *arguments: Any) -> Work:
        self.started.append((collective, *arguments))
        return CompletedWork(None)

    def size(self) -> int:
        return 1

    def getBackendName(self) -> str:
        return "recorder"


@pytest.mark.parametrize("collective", COLLECTIVES)
def test_a_wrapper_passes_every_collective_on_with_the_options_that_it_was_given(collective: str) -> None:
    inner, (operands, options) = Recorder(), COLLECTIVES[collective]
    arguments = operands if options is None else (*operands, options())
    getattr(ProcessGroupWrapper(pg=inner), collective)(*arguments)
    (started,) = inner.started
    assert started[0] == collective
    assert [id(argument) for argument in started[1:]] == [id(argument) for argument in arguments]


@pytest.mark.parametrize("collective", COLLECTIVES)
def test_where_no_options_were_given_the_inner_group_gets_torchs_defaults(collective: str) -> None:
    inner, (operands, options) = Recorder(), COLLECTIVES[collective]
    getattr(ProcessGroupWrapper(pg=inner), collective)(*(operands if options else operands[:-1]))
    (started,) = inner.started
    assert started[-1] == 0 if options is None else type(started[-1]) is options  # 0 is the tag of send and recv


@pytest.mark.parametrize("collective", COLLECTIVES)
def test_a_group_without_a_collective_names_it_when_it_is_asked_for(collective: str) -> None:
    class Bare(ProcessGroup):
        pass

    with pytest.raises(NotImplementedError, match=f"Bare does not implement {collective}$"):
        getattr(Bare(0, 1), collective)(*COLLECTIVES[collective][0])  # type: ignore[call-arg]


def test_gloo_and_nccl_are_wrappers_as_torchfts_are() -> None:
    assert issubclass(ProcessGroupGloo, ProcessGroupWrapper) and issubclass(ProcessGroupNCCL, ProcessGroupWrapper)
    with pytest.raises(ProcessGroupError, match="handed in"):
        _ = ProcessGroupGloo().parent


def test_an_error_that_a_test_orders_comes_once_and_with_its_own_words() -> None:
    group = Failing(ProcessGroupDummy(0, 1))
    group.report_future_error(ValueError("ordered"))
    work = group.allreduce([torch.ones(2)], ReduceOp.SUM)
    with pytest.raises(Exception, match="ordered"):
        work.wait()
    assert group.allreduce([torch.ones(2)], ReduceOp.SUM).wait()
    group.report_future_error(ValueError("ordered"))
    group.configure("host:1/prefix", "0", 0, 1)
    assert group.allreduce([torch.ones(2)], ReduceOp.SUM).wait()


def test_after_an_error_nothing_is_reduced_until_the_next_configure() -> None:
    inner = Failing(ProcessGroupDummy(0, 1))
    group = Swallowing(inner)
    tensors = [torch.ones(2)]
    inner.report_future_error(RuntimeError("ordered"))
    work = group.allreduce(tensors, ReduceOp.SUM)
    assert work.wait() and work.get_future().value() is tensors
    assert "ordered" in str(group.error())
    inner.report_future_error(RuntimeError("never asked"))
    assert group.allreduce(tensors, ReduceOp.SUM).wait()
    assert "ordered" in str(group.error())
    group.configure("host:1/prefix", "0", 0, 1)
    assert group.error() is None


def test_an_error_at_the_start_is_swallowed_too() -> None:
    group = Swallowing(ProcessGroupWrapper())  # was never configured
    assert group.allreduce([torch.ones(2)], ReduceOp.SUM).wait()
    assert isinstance(group.error(), ProcessGroupError)


def test_a_wrapper_names_its_parent_where_it_was_given_one() -> None:
    dummy = ProcessGroupDummy(0, 1)
    wrapper = ProcessGroupWrapper(pg=dummy)
    assert wrapper.parent is dummy
    assert repr(wrapper) == "ProcessGroupWrapper(pg=ProcessGroupDummy())"
    with pytest.raises(ProcessGroupError, match="handed in"):
        _ = ProcessGroupWrapper().parent


def test_torchs_functional_collectives_reach_a_registered_group(tmp_path: Path) -> None:
    recorder = Recorder()
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        group = ProcessGroupWrapper(pg=recorder).register("functional")
        functional_collectives.wait_tensor(functional_collectives.all_reduce(torch.ones(2), "sum", group))
        for tensor in functional_collectives.all_reduce_coalesced([torch.ones(2)], "sum", group):
            functional_collectives.wait_tensor(tensor)
    finally:
        dist.destroy_process_group()
    assert [collective for collective, *_ in recorder.started] == ["allreduce", "allreduce_coalesced"]
    _, tensors, options = recorder.started[0]
    assert tensors[0].tolist() == [1.0, 1.0] and isinstance(options, AllreduceOptions)
