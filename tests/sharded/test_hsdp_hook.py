"""The replicate dimension of HSDP is the manager's: what it returns is what the optimizer sees, whatever became of the step."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from torchft_ckpt.ddp import GradientAverage
from torchft_ckpt.errors import ConfigError
from torchft_ckpt.fsdp import set_all_reduce_hook
from torchft_ckpt.manager.collectives import done_work


class Averages:
    """Stands for the manager: records what it is to average, and does with it what the test says."""

    computes_by_microbatches = False

    def __init__(self, average: Callable[[torch.Tensor], object]) -> None:
        self.average, self.hooks = average, self
        self.seen: list[tuple[torch.dtype, tuple[int, ...]]] = []

    def allreduce(self, tensor: torch.Tensor, reduce_op: object = None, of: object = None) -> Any:
        self.seen.append((tensor.dtype, tuple(tensor.shape)))
        self.average(tensor)
        return done_work(tensor, lambda: False)


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=timedelta(seconds=30))
    try:
        yield init_device_mesh("cpu", (1,))
    finally:
        dist.destroy_process_group()


def plain_model() -> nn.Sequential:
    torch.manual_seed(11)
    return nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))


def sharded_model(mesh: DeviceMesh, **options: Any) -> nn.Sequential:
    model = plain_model()
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)
    return model


BATCH = torch.linspace(-1, 1, 8).reshape(2, 4)


def gradients(model: nn.Module) -> list[torch.Tensor]:
    model(BATCH).square().sum().backward()
    found = gradients_of(model)
    model.zero_grad()
    return found


def gradients_of(model: nn.Module) -> list[torch.Tensor]:
    return [getattr(p.grad, "_local_tensor", p.grad) for p in model.parameters()]


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_the_gradients_are_what_the_manager_made_of_them(mesh: DeviceMesh) -> None:
    model, manager = sharded_model(mesh), Averages(lambda tensor: tensor.mul_(0.5))
    set_all_reduce_hook(manager, model)
    expected = [gradient * 0.5 for gradient in gradients(plain_model())]

    assert same(gradients(model), expected)
    assert manager.seen == [(torch.float32, (8,)), (torch.float32, (15,))]


def test_it_averages_in_the_dtype_that_the_policy_reduces_in(mesh: DeviceMesh) -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float64)
    model, manager = sharded_model(mesh, mp_policy=policy), Averages(lambda tensor: tensor.fill_(1 + 2**-40))
    set_all_reduce_hook(manager, model)

    assert [g.dtype for g in gradients(model)] == [torch.float32] * 4
    assert {dtype for dtype, _ in manager.seen} == {torch.float64}


def test_gradients_of_several_batches_are_averaged_once(mesh: DeviceMesh) -> None:
    model, manager = sharded_model(mesh), Averages(lambda tensor: tensor.mul_(0.5))
    set_all_reduce_hook(manager, model)
    model.set_requires_gradient_sync(False)
    model(BATCH).square().sum().backward()
    model.set_requires_gradient_sync(True)

    assert same(gradients(model), gradients(plain_model()))
    assert len(manager.seen) == 2


def test_averages_that_are_taken_after_the_backward_pass_are_dtensors_as_the_gradients_were(mesh: DeviceMesh) -> None:
    model, manager = sharded_model(mesh), Averages(lambda tensor: tensor.is_floating_point() and tensor.mul_(0.5))
    average = GradientAverage(manager, model.parameters)
    expected = [gradient * 0.5 for gradient in gradients(plain_model())]
    model(BATCH).square().sum().backward()
    average.take()
    first = [parameter.grad for parameter in model.parameters()]
    manager.average = lambda tensor: tensor
    average.again()

    assert same([gradient.to_local() for gradient in first], expected)
    assert [gradient.placements for gradient in first] == [parameter.placements for parameter in model.parameters()]
    assert same(gradients_of(model), gradients(plain_model()))


def test_a_failed_step_leaves_the_next_one_as_if_it_had_not_been(mesh: DeviceMesh) -> None:
    model, manager = sharded_model(mesh), Averages(lambda tensor: tensor.fill_(float("nan")))
    set_all_reduce_hook(manager, model)
    gradients(model)  # thrown away
    manager.average = lambda tensor: tensor

    assert same(gradients(model), gradients(plain_model()))


def test_after_an_error_in_the_backward_pass_reset_iter_state_is_enough(mesh: DeviceMesh) -> None:
    def broken(_: torch.Tensor) -> None:
        raise ConnectionError

    model, manager = sharded_model(mesh), Averages(broken)
    set_all_reduce_hook(manager, model)
    with pytest.raises(ConnectionError):
        gradients(model)
    model.reset_iter_state()
    model.zero_grad()
    manager.average = lambda tensor: tensor

    assert same(gradients(model), gradients(plain_model()))


def test_a_step_abandoned_after_its_forward_pass_trains_on_with_the_weights_that_are_loaded(mesh: DeviceMesh) -> None:
    """The root module is not resharded until the backward pass: stale weights would be used if loading did not see to it."""
    model, manager = sharded_model(mesh), Averages(lambda tensor: tensor)
    set_all_reduce_hook(manager, model)
    model(BATCH)
    state = model.state_dict()
    with torch.no_grad():
        for tensor in state.values():
            tensor.to_local().mul_(2)  # as a state that is received in place
    model.load_state_dict(state)
    expected = plain_model()
    expected.load_state_dict({name: tensor.full_tensor() for name, tensor in state.items()})

    assert same(gradients(model), gradients(expected))


def test_a_model_without_fsdp_is_refused() -> None:
    with pytest.raises(ConfigError, match="no module that fully_shard was applied to"):
        set_all_reduce_hook(Averages(lambda _: None), plain_model())


def test_a_module_that_has_no_such_hook_is_refused_by_name(mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch has none where the parameters of one module are on several meshes."""

    def refuse(*_: object) -> None:
        raise ValueError("not supported with multiple param groups")

    model = nn.Sequential(nn.Tanh(), sharded_model(mesh))
    monkeypatch.setattr(model[1], "set_all_reduce_hook", refuse)
    with pytest.raises(ConfigError, match="module '1' cannot be averaged: not supported with multiple"):
        set_all_reduce_hook(Averages(lambda _: None), model)


def test_parameters_that_are_left_out_are_named(mesh: DeviceMesh, caplog: pytest.LogCaptureFixture) -> None:
    model = plain_model()
    fully_shard(model[0], mesh=mesh)
    with caplog.at_level(logging.WARNING):
        set_all_reduce_hook(Averages(lambda _: None), model)
    assert [record.getMessage().rpartition(": ")[2] for record in caplog.records] == ["2.weight, 2.bias"]


def left_out(caplog: pytest.LogCaptureFixture, model: nn.Module) -> list[str]:
    with caplog.at_level(logging.WARNING):
        set_all_reduce_hook(Averages(lambda _: None), model)
    return [record.getMessage().rpartition(": ")[2] for record in caplog.records]


def test_parameters_of_tensor_parallelism_alone_are_named_too(
    mesh: DeviceMesh, caplog: pytest.LogCaptureFixture
) -> None:
    model = plain_model()
    parallelize_module(model[2], mesh, ColwiseParallel())
    fully_shard(model[0], mesh=mesh)
    assert left_out(caplog, model) == ["2.weight, 2.bias"]


def test_parameters_that_fsdp_was_told_to_ignore_are_named(mesh: DeviceMesh, caplog: pytest.LogCaptureFixture) -> None:
    model = plain_model()
    fully_shard(model, mesh=mesh, ignored_params={model[0].bias})
    assert left_out(caplog, model) == ["0.bias"]


@pytest.mark.parametrize("when", ["sharded", "unsharded", "assigned", "tied"])
def test_nothing_is_said_of_what_fsdp_manages(mesh: DeviceMesh, caplog: pytest.LogCaptureFixture, when: str) -> None:
    model = plain_model()
    if when == "tied":
        model[2] = nn.Linear(4, 3)
        model[2].weight = model[0].weight
        fully_shard(model, mesh=mesh)
    else:
        model = sharded_model(mesh, reshard_after_forward=False)
    if when == "unsharded":
        model(BATCH)
    if when == "assigned":
        model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()}, assign=True)
    assert left_out(caplog, model) == []
