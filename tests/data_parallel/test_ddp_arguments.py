"""What PyTorch's DDP can do and groups that come and go cannot is refused by name; the rest works."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.averaging import connect_alone
from torch import nn
from torch.utils.checkpoint import checkpoint

from torchft_ckpt import DistributedDataParallel
from torchft_ckpt.errors import ConfigError


def wrapped(module: nn.Module | None = None, **options: Any) -> DistributedDataParallel:
    return DistributedDataParallel(connect_alone(), module or nn.Linear(4, 2), **options)


REFUSED = {
    "static_graph": True,
    "skip_all_reduce_unused_params": True,
    "delay_all_reduce_named_params": [("weight", torch.ones(2, 4))],
    "param_to_hook_all_reduce": torch.ones(2, 4),
    "mixed_precision": object(),
    "process_group": object(),
    "device_mesh": object(),
    "forward_sync_buffers": True,
    "broadcast_buffers": True,
}


@pytest.mark.parametrize("name", REFUSED)
def test_an_argument_that_would_leave_groups_apart_is_refused_by_name(name: str) -> None:
    with pytest.raises(ConfigError, match=f"takes no {name}: ") as raised:
        wrapped(**{name: REFUSED[name]})
    assert raised.value.party == name


@pytest.mark.parametrize("name", REFUSED)
def test_an_argument_that_is_not_used_may_be_named(name: str) -> None:
    wrapped(**{name: None if name != "static_graph" else False})


USES: dict[str, Callable[[DistributedDataParallel], object]] = {
    "join": lambda ddp: ddp.join(),
    "register_comm_hook": lambda ddp: ddp.register_comm_hook(None, print),
    "static_graph": lambda ddp: ddp._set_static_graph(),
}


@pytest.mark.parametrize("name", USES)
def test_a_method_that_would_leave_groups_apart_is_refused_by_name(name: str) -> None:
    with pytest.raises(ConfigError, match=name):
        USES[name](wrapped())


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_copy_is_refused_and_the_module_in_it_is_named(copied: Callable[[object], object]) -> None:
    with pytest.raises(ConfigError, match="take its `module`"):
        copied(wrapped())


class Checkpointed(nn.Module):
    def __init__(self, *, use_reentrant: bool) -> None:
        super().__init__()
        self.before, self.inside, self.after = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 1)
        self.use_reentrant = use_reentrant

    def forward(self, batch: torch.Tensor) -> dict[str, torch.Tensor]:
        inside = checkpoint(self.inside, self.before(batch), use_reentrant=self.use_reentrant)
        return {"logits": self.after(inside)}


def test_a_reentrant_checkpoint_is_refused_and_the_error_says_what_to_do() -> None:
    with pytest.raises(ConfigError, match="pass use_reentrant=False, or use PureDistributedDataParallel"):
        wrapped(Checkpointed(use_reentrant=True))(torch.ones(1, 4))


@pytest.mark.parametrize("is_last", [False, True])
def test_where_nobody_sees_a_reentrant_checkpoint_its_backward_pass_is_refused(is_last: bool) -> None:
    module = Checkpointed(use_reentrant=True)
    module.after = nn.Identity() if is_last else module.after
    module.register_forward_hook(lambda *call: SimpleNamespace(**call[-1]))
    ddp = wrapped(module)
    with pytest.raises(ConfigError, match="use PureDistributedDataParallel"):
        ddp(torch.ones(1, 4)).logits.sum().backward()


def test_another_checkpoint_is_averaged() -> None:
    ddp = wrapped(Checkpointed(use_reentrant=False))
    ddp(torch.ones(1, 4))["logits"].sum().backward()
    assert all(parameter.grad is not None for parameter in ddp.parameters())


def test_buffers_are_not_sent_through_a_group_of_one() -> None:
    assert not wrapped(nn.BatchNorm1d(4)).will_sync_module_buffers()
