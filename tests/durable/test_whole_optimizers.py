"""An optimizer gets all that a checkpoint has of it, on the layout of its parameters, or is refused by name."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from support.newest import newest_whole
from support.resharding import imagined_rank
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.optim.lr_scheduler import LambdaLR

from torchft_ckpt import Checkpointer, load_checkpoint
from torchft_ckpt.checkpointing import StateDictLock
from torchft_ckpt.checkpointing.durable.reading.fresh_optimizers import template_of
from torchft_ckpt.checkpointing.durable.reading.loading import give_back, load_into, load_state
from torchft_ckpt.checkpointing.durable.reading.reader import CheckpointReader
from torchft_ckpt.checkpointing.durable.storage.fsspec_storage import open_storage
from torchft_ckpt.checkpointing.state.local_state import LocalState
from torchft_ckpt.checkpointing.state.parameters import names_from, why_not_of
from torchft_ckpt.errors import StateMismatchError
from torchft_ckpt.manager.state_registry import StateRegistry

Make = Callable[[list[Any]], torch.optim.Optimizer]


def saved(directory: Path, state: dict[str, Any], step: int = 1) -> Path:
    checkpointer = Checkpointer(directory)
    checkpointer.save(state, step=step).result(60)
    checkpointer.shutdown()
    return directory


def loaded(directory: Path, state: dict[str, Any], step: int | None = None) -> None:
    checkpointer = Checkpointer(directory)
    try:
        checkpointer.load(state, step=step)
    finally:
        checkpointer.shutdown()


class Script:
    """Three layers, an optimizer over them, or over a part of them."""

    def __init__(self, make: Make = torch.optim.AdamW, *, tied: bool = False) -> None:
        self.model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
        if tied:
            self.model[2].weight = self.model[0].weight
        self.optimizer = make(list(self.model.parameters()))

    def step(self, layers: int = 3) -> Script:
        self.optimizer.zero_grad()
        self.model[:layers](torch.randn(2, 4)).square().sum().backward()
        self.optimizer.step()
        return self

    @property
    def state(self) -> dict[str, Any]:
        return {"model": self.model, "optim": self.optimizer}

    def held(self) -> tuple[dict[int, dict[str, list[float]]], list[dict[str, Any]]]:
        found = self.optimizer.state_dict()
        state = {
            n: {key: torch.as_tensor(v).tolist() for key, v in sorted(s.items())} for n, s in found["state"].items()
        }
        return dict(sorted(state.items())), found["param_groups"]


# All of it, as torch takes it


def with_own_keys(parameters: list[Any]) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD(parameters, lr=0.5, momentum=0.5)
    LambdaLR(optimizer, lambda epoch: 0.5**epoch)
    optimizer.param_groups[0]["own"] = {"layers": [1, 2]}
    return optimizer


SETTINGS: dict[str, tuple[Make, Make]] = {
    "amsgrad is on in the checkpoint": (lambda p: torch.optim.Adam(p, amsgrad=True), torch.optim.Adam),
    "amsgrad is on here": (torch.optim.Adam, lambda p: torch.optim.Adam(p, amsgrad=True)),
    "momentum": (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), lambda p: torch.optim.SGD(p, lr=0.1)),
    "centred": (lambda p: torch.optim.RMSprop(p, centered=True), torch.optim.RMSprop),
    "a rate that is a tensor in the checkpoint": (
        lambda p: torch.optim.Adam(p, lr=torch.tensor(0.25)),
        torch.optim.Adam,
    ),
    "a rate that is a tensor here": (torch.optim.Adam, lambda p: torch.optim.Adam(p, lr=torch.tensor(0.25))),
    "keys of one's own": (with_own_keys, lambda p: torch.optim.SGD(p, lr=0.1)),
}


@pytest.mark.parametrize("whose", ["ours", "DCP's"])
@pytest.mark.parametrize("has_stepped", [True, False])
@pytest.mark.parametrize("name", SETTINGS)
def test_an_optimizer_is_as_its_own_load_state_dict_would_make_it(
    tmp_path: Path, name: str, has_stepped: bool, whose: str
) -> None:
    there, here = SETTINGS[name]
    one, other, by_torch = Script(there).step().step(), Script(here), Script(here)
    if has_stepped:
        other.step(layers=1)
    by_torch.optimizer.load_state_dict(one.optimizer.state_dict())
    if whose == "ours":
        loaded(saved(tmp_path, one.state), other.state)
    else:
        dcp.save(one.state, checkpoint_id=tmp_path / "theirs", no_dist=True)
        load_checkpoint(tmp_path / "theirs", other.state)
    assert other.held() == by_torch.held()
    other.step()


@pytest.mark.parametrize("layers", [0, 1])
def test_going_back_to_before_the_first_step_of_parameters_empties_their_state(tmp_path: Path, layers: int) -> None:
    one, other = Script(), Script().step()
    if layers:
        one.step(layers)
    loaded(saved(tmp_path, one.state), other.state)
    assert other.held() == one.held() and len(other.held()[0]) == 2 * layers


def test_a_scheduler_begins_anew_from_the_rate_that_was_the_first(tmp_path: Path) -> None:
    one, other = Script(with_own_keys).step(), Script(lambda p: torch.optim.SGD(p, lr=0.1))
    one.optimizer.param_groups[0]["lr"] = 0.25
    loaded(saved(tmp_path, one.state), other.state)
    scheduler = LambdaLR(other.optimizer, lambda epoch: 0.5**epoch, last_epoch=1)
    assert scheduler.base_lrs == [0.5]


# What cannot be it


def two_groups(parameters: list[Any]) -> torch.optim.Optimizer:
    return torch.optim.AdamW([{"params": parameters[:2]}, {"params": parameters[2:]}])


def reversed_order(parameters: list[Any]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters[::-1])


@pytest.mark.parametrize(
    ("there", "here", "named"),
    [
        (Script(two_groups), Script(), "optim has 2 parameter groups there, 1 here"),
        (Script(), Script(two_groups), "optim has 1 parameter groups there, 2 here"),
        (Script(), Script(reversed_order), "optim has the state of model.0.weight there where model.2.bias is here"),
        (Script(tied=True), Script(), "param_groups.0 has 5 parameters there, 6 here"),
        (Script(), Script(tied=True), "param_groups.0 has 6 parameters there, 5 here"),
    ],
)
def test_other_groups_or_parameters_are_refused_before_a_byte_is_read(
    tmp_path: Path, there: Script, here: Script, named: str
) -> None:
    saved(tmp_path, there.step().state)
    before, weights = here.held(), [parameter.tolist() for parameter in here.model.parameters()]
    with pytest.raises(StateMismatchError, match=named) as raised:
        loaded(tmp_path, here.state)
    assert not raised.value.state_overwritten
    assert (here.held(), [parameter.tolist() for parameter in here.model.parameters()]) == (before, weights)


def test_names_that_optimizers_were_given_are_compared_where_nothing_else_is_known(tmp_path: Path) -> None:
    """A state dict that a script has made itself says nothing of the parameters but these."""

    def named(model: nn.Module, *, in_order: bool) -> torch.optim.Optimizer:
        return torch.optim.AdamW([*model.named_parameters()][:: 1 if in_order else -1])

    one = Script().step()
    saved(tmp_path, {"optim": named(one.model, in_order=True).state_dict()})
    for here in (named(one.model, in_order=False), named(one.model, in_order=False).state_dict()):
        with pytest.raises(StateMismatchError, match=r"optim has the state of 0\.weight there where 2\.bias is here"):
            loaded(tmp_path, {"optim": here})
    loaded(tmp_path, {"optim": named(one.model, in_order=True)})


def test_names_that_are_none_say_nothing(tmp_path: Path) -> None:
    """A checkpoint, or a source, says what it likes."""
    one = Script().step()
    optimizer = one.optimizer.state_dict()
    for names in (7, [torch.zeros(2)], [10**5000] * 6, [["a"]] * 6, {"a": 1}):
        optimizer["param_groups"][0]["param_names"] = names
        here = Script(lambda parameters: torch.optim.AdamW([(f"p{n}", p) for n, p in enumerate(parameters)]))
        groups, names_there = optimizer["param_groups"], names_from({"optim": names}, "optim")
        assert why_not_of("optim", groups, names_there, here=here.optimizer.param_groups) == []


def test_moments_that_cannot_be_those_of_their_parameters_are_refused_by_name(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Of a checkpoint that does not say whose they are, as older ones do not; it is also said of one that fits."""
    saved(tmp_path, {"optim": Script().step().optimizer.state_dict()})
    with pytest.raises(
        StateMismatchError, match=r"optim\.state\.0\.exp_avg is \[4, 4\] there, and its parameter has .* \[4\]"
    ):
        loaded(tmp_path, {"optim": Script(reversed_order).optimizer})
    caplog.clear()
    loaded(tmp_path, {"optim": Script().optimizer})
    assert "does not say which parameters the state of optim is of" in caplog.text


def test_a_rate_that_a_named_state_dict_has_as_a_number_and_the_checkpoint_as_a_tensor_is_said_so(
    tmp_path: Path,
) -> None:
    """And the other way round: it is there."""
    for number, (there, here) in enumerate([(torch.tensor(0.5), 0.5), (0.5, torch.tensor(0.5))]):
        saved(tmp_path / str(number), {"rate": there})
        what = "a tensor there, and none here" if number == 0 else "a tensor here, and none there"
        with pytest.raises(StateMismatchError, match=f"rate is {what}"):
            loaded(tmp_path / str(number), {"rate": here})


# On shards


class Late(torch.optim.Optimizer):
    """Makes state in its second step; raises where gradients are zero; `large`: state of another shape, too."""

    def __init__(self, parameters: list[Any], *, large: bool = False) -> None:
        super().__init__(parameters, {"lr": 0.1})
        self.large = large

    def step(self) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            local = parameter.grad.to_local() if isinstance(parameter.grad, DTensor) else parameter.grad
            if not local.any():
                raise ValueError("a gradient of zeros")
            state = self.state[parameter]
            state["count"] = torch.as_tensor(state.get("count", 0.0) + 1)
            if state["count"] >= 2:
                state["slow"] = (
                    state["slow"].lerp(parameter.detach(), 0.5) if "slow" in state else parameter.detach().clone()
                )
                if self.large:
                    state["precond"] = torch.eye(len(parameter))
            parameter.data.sub_(parameter.grad, alpha=0.1)


class Lookahead(torch.optim.Optimizer):
    """Steps another one, and keeps slow weights beside."""

    def __init__(self, parameters: list[Any]) -> None:
        super().__init__(parameters, {})
        self.inner = torch.optim.Adam(parameters)

    def step(self) -> None:  # type: ignore[override]
        self.inner.step()
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter].setdefault("slow", parameter.detach().clone()).lerp_(parameter.detach(), 0.5)


ON_SHARDS: dict[str, tuple[Make, Make]] = {
    **{name: makes for name, makes in SETTINGS.items() if name != "keys of one's own"},
    "state of a later step, and a step that raises on zeros": (Late, Late),
    "an optimizer that holds another one": (Lookahead, Lookahead),
}


def through_load(directory: Path, model: dict[str, Any], optimizer: torch.optim.Optimizer) -> None:
    here = {"model": model, "optim": optimizer}
    template = template_of(here)
    load_into(CheckpointReader(newest_whole([open_storage(directory)])), template.state_dict, owned=template.owned)
    give_back(here, template.state_dict)


def through_restore(directory: Path, model: dict[str, Any], optimizer: torch.optim.Optimizer) -> None:
    registry = StateRegistry(StateDictLock())
    registry.register(
        "default",
        lambda state: optimizer.load_state_dict(state["optim"]),
        lambda: {"model": model, "optim": optimizer.state_dict()},
    )
    registry.guard(optimizer)
    here = registry.capture_to_receive()
    checkpoint = newest_whole([open_storage(directory)])
    local = LocalState(here.laid_out(here["default"]))
    state = load_state(checkpoint, CheckpointReader(checkpoint).read, local, replica_id="", rank=0, in_place=True)
    registry.load({"default": state})


SHAPES = {"weight": (6, 4), "bias": (4,), "frozen": (6, 4)}


def save_plain(directory: Path, make: Make) -> dict[str, dict[str, torch.Tensor]]:
    """Save an optimizer that has stepped plain parameters, and return its state by their names."""
    plain = {name: nn.Parameter(torch.randn(shape)) for name, shape in SHAPES.items()}
    optimizer = make([*plain.values()])
    for _ in range(3):
        for parameter in plain.values():
            parameter.grad = torch.randn_like(parameter)
        optimizer.step()
    saved(directory, {"model": plain, "optim": optimizer})
    return {name: optimizer.state[parameter] for name, parameter in plain.items()}


def sharded_parameters() -> dict[str, nn.Parameter]:
    """Those of rank 1 of 2; one is frozen now. Within `imagined_rank`."""
    mesh = init_device_mesh("cpu", (2,))
    made = {n: nn.Parameter(distribute_tensor(torch.zeros(shape), mesh, [Shard(0)])) for n, shape in SHAPES.items()}
    for one in made.values():
        one.detach().to_local().zero_()  # nobody has scattered it: what was there may be NaN, which equals nothing
    made["frozen"].requires_grad_(False)
    return made


@pytest.mark.parametrize("way", [through_load, through_restore])
@pytest.mark.parametrize("name", ON_SHARDS)
def test_state_of_a_parameters_shape_lies_as_the_parameter_does(
    tmp_path: Path, name: str, way: Callable[[Path, dict[str, Any], torch.optim.Optimizer], None]
) -> None:
    there, here = ON_SHARDS[name]
    expected = save_plain(tmp_path, there)
    with imagined_rank(1, 2):
        parameters = sharded_parameters()
        optimizer = here([*parameters.values()])
        way(tmp_path, {**parameters}, optimizer)
        for parameter_name, parameter in parameters.items():
            state = optimizer.state[parameter]
            assert state.keys() == expected[parameter_name].keys()
            for key, value in expected[parameter_name].items():
                if torch.as_tensor(value).dim():
                    assert state[key].placements == parameter.placements
                    assert torch.equal(state[key].to_local(), value.chunk(2)[1]), (parameter_name, key)
                else:
                    assert not isinstance(state[key], DTensor) and state[key] == value


@pytest.mark.parametrize("way", [through_load, through_restore])
def test_state_of_another_shape_that_no_step_here_makes_is_refused_on_shards_before_a_byte_is_read(
    tmp_path: Path, way: Callable[[Path, dict[str, Any], torch.optim.Optimizer], None]
) -> None:
    save_plain(tmp_path, lambda parameters: Late(parameters, large=True))
    with imagined_rank(1, 2):
        parameters = sharded_parameters()
        optimizer = Late([*parameters.values()], large=True)
        before = [parameter.to_local().clone() for parameter in parameters.values()]
        with pytest.raises(StateMismatchError, match=r"optim\.state\.0\.precond is \[6, 6\] there") as raised:
            way(tmp_path, {**parameters}, optimizer)
        assert not raised.value.state_overwritten
        now = [parameter.to_local() for parameter in parameters.values()]
        assert not optimizer.state and all(map(torch.equal, before, now))


def test_nothing_is_said_of_a_checkpoint_that_says_whose_its_state_is(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        loaded(saved(tmp_path, Script().step().state), Script().state)
    assert "which parameters" not in caplog.text
