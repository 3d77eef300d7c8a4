"""A replica that does not contribute takes part in each collective, and changes nothing in it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.distributed import ReduceOp

from torchft_ckpt.manager.collectives import fill_with_nothing


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
@pytest.mark.parametrize(
    ("op", "reduce"),
    [
        (ReduceOp.SUM, torch.add),
        (ReduceOp.PRODUCT, torch.mul),
        (ReduceOp.MAX, torch.maximum),
        (ReduceOp.MIN, torch.minimum),
    ],
)
def test_what_a_silent_member_brings_changes_nothing(
    op: ReduceOp.RedOpType, reduce: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], dtype: torch.dtype
) -> None:
    contributed = torch.tensor([-3, 0, 5], dtype=dtype)
    silent = torch.full((3,), 7, dtype=dtype)
    fill_with_nothing(silent, op)
    assert torch.equal(reduce(contributed, silent), contributed)
