"""An optimizer that never stepped has, for as long as a template is captured, the state that it will have after a step."""

from __future__ import annotations

import copy
import logging
import random
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.testing._internal.distributed.fake_pg import FakeStore

from torchft_ckpt.checkpointing.state.optimizer_state import with_optimizer_state

Make = Callable[[list[nn.Parameter]], torch.optim.Optimizer]

OPTIMIZERS: dict[str, Make] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "sgd_momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "sgd_tensor_lr": lambda p: torch.optim.SGD(p, lr=torch.tensor(0.1), momentum=0.9, nesterov=True),
    "adam": torch.optim.Adam,
    "adam_amsgrad": lambda p: torch.optim.Adam(p, amsgrad=True, weight_decay=0.1),
    "adamw": torch.optim.AdamW,
    "adamw_foreach": lambda p: torch.optim.AdamW(p, foreach=True),
    "adamw_fused": lambda p: torch.optim.AdamW(p, fused=True),
    "adagrad": torch.optim.Adagrad,
    "adadelta": torch.optim.Adadelta,
    "rmsprop": lambda p: torch.optim.RMSprop(p, momentum=0.9, centered=True),
    "nadam": torch.optim.NAdam,
    "radam": torch.optim.RAdam,
    "adamax": torch.optim.Adamax,
    "asgd": torch.optim.ASGD,
    "rprop": torch.optim.Rprop,
    "adafactor": torch.optim.Adafactor,
}
if hasattr(torch.optim, "Muon"):
    OPTIMIZERS["muon"] = torch.optim.Muon

NOT_SHARDED = {"rprop", "adafactor"}
"""PyTorch's own, which cannot step a sharded DTensor themselves."""


class Home(torch.optim.Optimizer):
    """An optimizer of the user's: noise, a buffer on the CPU, a counter in the group and one in the state."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1, "seen": torch.zeros(()), "history": []})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["seen"] += 1
            group["history"].append(1)
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                state.setdefault("count", 0)
                state["count"] += 1
                state["noise"] = torch.randn_like(parameter, dtype=torch.float64)
                parameter.sub_(state["noise"] * group["lr"])


OPTIMIZERS["home"] = Home


def described(value: Any) -> object:
    if isinstance(value, DTensor):
        local = value.to_local()
        where = (value.device_mesh, value.placements, value.stride(), tuple(local.shape), local.device)
        return ("DTensor", tuple(value.shape), value.dtype, *where, local.stride() if local.numel() else None)
    if isinstance(value, torch.Tensor):
        return (type(value), tuple(value.shape), value.stride(), value.dtype, value.device)
    if isinstance(value, dict):
        return {key: described(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [described(item) for item in value]
    return type(value)


def structure(state_dict: dict[str, Any]) -> object:
    return described(state_dict["state"])


def after_a_step(make: Make, parameters: list[nn.Parameter]) -> dict[str, Any]:
    """The state dict of another optimizer of that kind that has stepped, on copies of the parameters of which none is frozen."""
    copies = [nn.Parameter(p.detach().clone()) for p in parameters]
    optimizer = make(copies)
    for parameter in copies:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    return optimizer.state_dict()


def captured(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    with with_optimizer_state([optimizer], also_frozen=True):
        return optimizer.state_dict()


def plain_parameters() -> list[nn.Parameter]:
    torch.manual_seed(3)
    return [
        nn.Parameter(torch.randn(4, 3)),
        nn.Parameter(torch.randn(3, 4).t()),
        nn.Parameter(torch.randn(2, 2), requires_grad=False),
    ]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_template_has_the_structure_that_a_step_makes(name: str) -> None:
    make = OPTIMIZERS[name]
    parameters = plain_parameters()

    assert structure(captured(make(parameters))) == structure(after_a_step(make, parameters))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, torch.complex64])
def test_the_template_has_the_dtype_that_a_step_makes(dtype: torch.dtype) -> None:
    parameters = [nn.Parameter(torch.randn(3, 2, dtype=dtype)), nn.Parameter(torch.randn((), dtype=dtype))]

    assert structure(captured(torch.optim.Adam(parameters))) == structure(after_a_step(torch.optim.Adam, parameters))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_nothing_else_has_changed_meanwhile_or_afterwards(name: str) -> None:
    parameters = plain_parameters()
    optimizer = OPTIMIZERS[name](parameters)
    torch.optim.lr_scheduler.StepLR(optimizer, step_size=1)  # it puts a step of its own into the instance
    state, groups, attributes = optimizer.state, optimizer.param_groups, dict(vars(optimizer))
    before = copy.deepcopy((dict(state), [{**group, "params": []} for group in groups]))
    values = [parameter.detach().clone() for parameter in parameters]
    versions = [parameter._version for parameter in parameters]
    random_states = torch.get_rng_state(), random.getstate()
    fired: list[str] = []
    handles = [
        register_optimizer_step_pre_hook(lambda *_: fired.append("global pre")),
        register_optimizer_step_post_hook(lambda *_: fired.append("global post")),
        optimizer.register_step_pre_hook(lambda *_: fired.append("pre")),
        optimizer.register_step_post_hook(lambda *_: fired.append("post")),
    ]
    try:
        captured(optimizer)
    finally:
        for handle in handles:
            handle.remove()

    assert fired == []
    assert optimizer.state is state
    assert optimizer.param_groups is groups
    assert vars(optimizer) == attributes
    assert str(before) == str((dict(state), [{**group, "params": []} for group in groups]))
    assert all(torch.equal(parameter, value) for parameter, value in zip(parameters, values, strict=True))
    assert [parameter._version for parameter in parameters] == versions
    assert [parameter.grad for parameter in parameters] == [None] * len(parameters)
    assert torch.equal(torch.get_rng_state(), random_states[0])
    assert random.getstate() == random_states[1]


def test_state_that_is_there_stays_and_the_rest_is_added() -> None:
    first, second = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(2))
    optimizer = torch.optim.Adam([{"params": [first]}, {"params": [second], "amsgrad": True}])
    first.grad = torch.ones(3)
    optimizer.step()
    own = optimizer.state[first]

    with with_optimizer_state([optimizer]):
        assert optimizer.state[first] is own
        assert sorted(optimizer.state[second]) == ["exp_avg", "exp_avg_sq", "max_exp_avg_sq", "step"]
    assert list(optimizer.state) == [first]
    assert optimizer.state[first] is own


def test_an_error_inside_leaves_the_optimizer_as_before() -> None:
    optimizer = torch.optim.Adam(plain_parameters())
    state = optimizer.state
    with pytest.raises(KeyError), with_optimizer_state([optimizer]):
        raise KeyError
    assert optimizer.state is state
    assert not state


def test_a_state_that_is_loaded_meanwhile_stays() -> None:
    parameters = plain_parameters()
    optimizer = torch.optim.Adam(parameters)
    loaded = after_a_step(torch.optim.Adam, parameters)
    with with_optimizer_state([optimizer]):
        optimizer.load_state_dict(loaded)
    assert set(optimizer.state) == set(parameters)


def test_what_is_frozen_takes_no_memory_unless_it_is_asked_for() -> None:
    parameters = plain_parameters()
    optimizer = torch.optim.Adam(parameters)
    with with_optimizer_state([optimizer]):
        assert set(optimizer.state) == set(parameters[:2])


def test_it_may_be_nested_and_an_optimizer_may_be_there_twice() -> None:
    optimizer = torch.optim.Adam(plain_parameters())
    with with_optimizer_state([optimizer, optimizer]):
        outer = optimizer.state
        with with_optimizer_state([optimizer]):
            assert optimizer.state is outer
        assert optimizer.state is outer
    assert not optimizer.state


def test_a_large_parameter_costs_no_memory_that_is_touched() -> None:
    """Steps a gigabyte; with real tensors it would take seconds."""
    big = nn.Parameter(torch.empty(256, 1024, 1024))
    before = resident_bytes()
    with with_optimizer_state([torch.optim.AdamW([big])]):
        assert resident_bytes() - before < 2**28


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


class Outer(torch.optim.Optimizer):
    """Holds an optimizer that steps the real parameters."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__(inner.param_groups, {})
        self.inner = {"it": [inner]}

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.inner["it"][0].step()


class Derived(torch.optim.Adam):
    """Its step calls the base class's."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (torch.optim.LBFGS, "attribute '_params' holds"),
        (torch.optim.SparseAdam, "does not support dense gradients"),
        (lambda p: torch.optim.AdamW(p, capturable=True), "capturable=True"),
        (lambda p: Outer(torch.optim.SGD(p, lr=1.0, weight_decay=1.0)), "attribute 'inner' holds another optimizer"),
    ],
)
def test_who_cannot_is_left_alone_and_said(make: Make, why: str, caplog: pytest.LogCaptureFixture) -> None:
    parameter = nn.Parameter(torch.ones(3))
    parameter.grad = torch.ones(3)
    optimizer, other = make([parameter]), torch.optim.Adam([parameter])
    with caplog.at_level(logging.INFO), with_optimizer_state([optimizer, other]):
        assert not dict(optimizer.state)
        assert len(other.state) == 1
    (line,) = [record.getMessage() for record in caplog.records if "left without state" in record.getMessage()]
    assert why in line
    assert torch.equal(parameter, torch.ones(3))


def test_a_step_that_calls_its_base_class_runs_no_hooks() -> None:
    optimizer = Derived([nn.Parameter(torch.ones(2))])
    torch.optim.Adam([nn.Parameter(torch.ones(2))])  # from now on Adam.step runs hooks, too
    fired: list[int] = []
    optimizer.register_step_pre_hook(lambda *_: fired.append(1))
    assert len(captured(optimizer)["state"]) == 1
    handle = register_optimizer_step_pre_hook(lambda *_: fired.append(2))
    try:
        assert not captured(optimizer)["state"]
    finally:
        handle.remove()
    assert fired == []


@pytest.mark.parametrize("name", ["sgd", "adamw", "adamw_fused"])
def test_pytorchs_getter_steps_nothing(name: str) -> None:
    model = nn.Linear(3, 2)
    optimizer = OPTIMIZERS[name](list(model.parameters()))
    fired: list[int] = []
    optimizer.register_step_pre_hook(lambda *_: fired.append(1))
    with with_optimizer_state([optimizer]):
        state = get_optimizer_state_dict(model, optimizer)
    assert fired == []
    assert set(state["state"]) == (set() if name == "sgd" else {"weight", "bias"})


# ------------------------------------------------------------------------------------------------------------ shards


@pytest.fixture
def last_of_four() -> Iterator[DeviceMesh]:
    """This process is the last rank of four; the others and all that travels are pretended."""
    dist.init_process_group("fake", store=FakeStore(), rank=3, world_size=4)
    try:
        yield init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    finally:
        dist.destroy_process_group()


@pytest.fixture
def alone() -> Iterator[DeviceMesh]:
    """A mesh of one, on a real group."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=timedelta(seconds=30))
    try:
        yield init_device_mesh("cpu", (1,))
    finally:
        dist.destroy_process_group()


LAYOUTS = [(Shard(0), Replicate()), (Shard(1), Shard(0)), (Shard(0), Shard(0)), (Replicate(), Replicate())]


def sharded(mesh: DeviceMesh, layout: tuple[Any, ...]) -> list[nn.Parameter]:
    """Even, uneven, and empty on this rank."""
    torch.manual_seed(5)
    shapes = [(8, 4), (7, 5), (1, 1)]
    return [nn.Parameter(distribute_tensor(torch.randn(shape), mesh, layout)) for shape in shapes]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("name", [name for name in OPTIMIZERS if name not in NOT_SHARDED])
def test_state_of_sharded_parameters_is_sharded_alike_and_nothing_travels(
    name: str, layout: tuple[Any, ...], last_of_four: DeviceMesh
) -> None:
    parameters = sharded(last_of_four, layout)
    if name == "muon":
        del parameters[2:]  # PyTorch's cannot step a sharded one of one element
    optimizer = OPTIMIZERS[name](parameters)
    with CommDebugMode() as travelled:
        template = captured(optimizer)

    assert travelled.get_total_counts() == 0
    assert structure(template) == structure(after_a_step(OPTIMIZERS[name], parameters))


@pytest.mark.parametrize("name", sorted(NOT_SHARDED))
def test_who_cannot_step_shards_is_left_alone(name: str, last_of_four: DeviceMesh) -> None:
    optimizer = OPTIMIZERS[name](sharded(last_of_four, (Shard(0), Replicate())))
    assert not captured(optimizer)["state"]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_mesh_of_one(name: str, alone: DeviceMesh) -> None:
    parameters = [nn.Parameter(distribute_tensor(torch.randn(5, 3), alone, [Shard(0)]))]
    optimizer = OPTIMIZERS[name](parameters)
    try:
        expected = after_a_step(OPTIMIZERS[name], parameters)
    except RuntimeError:
        assert name in NOT_SHARDED
        return
    assert structure(captured(optimizer)) == structure(expected)


def test_plain_parameters_beside_sharded_ones(alone: DeviceMesh) -> None:
    groups = [[nn.Parameter(distribute_tensor(torch.randn(5, 3), alone, [Shard(0)]))], [nn.Parameter(torch.ones(3))]]
    together = captured(torch.optim.AdamW([{"params": group} for group in groups]))
    assert [structure({"state": {0: state}}) for state in together["state"].values()] == [
        structure(captured(torch.optim.AdamW(group))) for group in groups
    ]


def test_a_sharded_templates_local_tensors_can_be_written_to(alone: DeviceMesh) -> None:
    parameter = nn.Parameter(distribute_tensor(torch.randn(5, 3), alone, [Shard(0)]))
    template = captured(torch.optim.AdamW([parameter]))["state"][0]
    with torch.no_grad():
        template["exp_avg"].to_local().copy_(torch.full((5, 3), 2.0))
    assert torch.equal(template["exp_avg"].full_tensor(), torch.full((5, 3), 2.0))
