"""Groups around another one: errors that the caller never sees, and errors that a test makes."""

from __future__ import annotations

import pytest
import torch
from torch.distributed import ReduceOp

from torchft_ckpt.errors import ProcessGroupError
from torchft_ckpt.process_group import ErrorSwallowingProcessGroupWrapper as Swallowing
from torchft_ckpt.process_group import FakeProcessGroupWrapper as Failing
from torchft_ckpt.process_group import ProcessGroupDummy, ProcessGroupWrapper


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
