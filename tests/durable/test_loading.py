"""A checkpoint becomes a state again: into what is here, or as it was saved, on any layout."""

from __future__ import annotations

import copy
from collections import Counter, OrderedDict, deque
from datetime import datetime, timedelta, timezone
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint
from support.newest import newest_whole
from support.resharding import imagined_rank
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from torchft_ckpt import Checkpointer, load_checkpoint
from torchft_ckpt.checkpointing.durable.reading.checkpoint import Checkpoint, SavedPart
from torchft_ckpt.checkpointing.durable.reading.fresh_optimizers import template_of
from torchft_ckpt.checkpointing.durable.reading.loading import load_into, load_state
from torchft_ckpt.checkpointing.durable.reading.reader import CheckpointReader
from torchft_ckpt.checkpointing.durable.storage.fsspec_storage import open_storage
from torchft_ckpt.checkpointing.state.local_state import LocalState
from torchft_ckpt.errors import CheckpointDamagedError, StateMismatchError

LONG = timedelta(seconds=60)


def save(directory: Path, state: dict[str, Any], step: int = 1) -> Checkpoint:
    checkpointer = Checkpointer(directory)
    checkpointer.save(state, step=step).result(60)
    checkpointer.shutdown()
    return newest_whole([open_storage(directory)])


def loaded(checkpoint: Checkpoint, local: object = None, *, in_place: bool = False) -> dict[str, Any]:
    reader = CheckpointReader(checkpoint)
    here = None if local is None else LocalState(local)
    return load_state(checkpoint, reader.read, here, replica_id="", rank=0, in_place=in_place)


def bits(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy())


def everything() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(3)
    weight = torch.randn(64, 48, generator=generator)
    return {
        "weight": weight,
        "tied": weight,
        "transposed": weight.t(),
        "half": weight.to(torch.bfloat16),
        "tiny": weight.to(torch.float8_e4m3fn),
        "complex": torch.complex(weight, weight),
        "flags": weight > 0,
        "scalar": torch.tensor(5),
        "empty": torch.empty(0, 7),
        "optim": {"state": {0: {"step": torch.tensor(3.0)}, 1: {}}, "param_groups": [{"lr": 0.1, "params": [0, 1]}]},
        "numbers": [1, 2.5, None, float("nan"), 2**70, -0.0, 1j],
        "nested": {"list": [{"a": torch.ones(3)}, [torch.zeros(2), "x"]], "none": {}, ("a", 1): "tuple key", 4: "int"},
        "pair": (torch.arange(3), "y"),
        "array": np.arange(6.0).reshape(2, 3),
        "schedule": Counter({3: 1, 10: 2}),
        "ordered": OrderedDict(a=1),
        "dtype": torch.float16,
        "size": torch.Size([2, 3]),
        "bytes": b"\x00\xff",
        "sets": [{1, "a"}, frozenset([b"x"])],
        "times": [datetime(2026, 1, 2, tzinfo=timezone.utc), timedelta(1)],
        "others": [deque([1, 2], 3), Path("a"), Decimal("0.1"), torch.device("cpu"), np.float32(0.1), range(2)],
    }


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return (one.dtype, one.shape) == (other.dtype, other.shape) and bits(one) == bits(other)
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return type(one) is type(other) and len(one) == len(other) and all(map(same, one, other))
    return type(one) is type(other) and (one == other or repr(one) == repr(other))


def test_every_kind_of_value_comes_back_as_it_was(tmp_path: Path) -> None:
    state = everything()
    again = loaded(save(tmp_path, state))
    assert same(state, again)


def test_tensors_that_are_here_keep_their_memory(tmp_path: Path) -> None:
    state = {"a": torch.randn(300, 7), "b": torch.randn(7, 300).t(), "step": 4}
    checkpoint = save(tmp_path, state)
    here = {"a": torch.zeros(300, 7), "b": torch.zeros(7, 300).t(), "step": 0}
    again = loaded(checkpoint, here, in_place=True)
    assert (again["a"] is here["a"], again["b"] is here["b"]) == (True, True)
    assert same({**state}, again)


def test_a_state_dict_is_loaded_in_place_as_dcp_does(tmp_path: Path) -> None:
    state = everything()
    checkpoint = save(tmp_path, state)
    template = copy.deepcopy(state)
    for value in template.values():
        if isinstance(value, torch.Tensor):
            value.zero_()
    template["numbers"], template["optim"]["param_groups"][0]["lr"] = [], 9.0
    template["nested"]["list"][1][1] = "other"
    kept = template["weight"]
    load_into(CheckpointReader(checkpoint), template)
    state["ordered"] = dict(state["ordered"])
    assert template["weight"] is kept
    assert same(state, template)


def test_a_part_of_what_was_saved_can_be_asked_for(tmp_path: Path) -> None:
    state = everything()
    checkpoint = save(tmp_path, state)
    template = {"scalar": torch.tensor(0), "nested": {"list": [{"a": torch.zeros(3)}]}}
    load_into(CheckpointReader(checkpoint), template)
    assert same(template, {"scalar": torch.tensor(5), "nested": {"list": [{"a": torch.ones(3)}]}})


@pytest.mark.parametrize(
    ("wanted", "named"),
    [
        ({"unknown": torch.zeros(3)}, "unknown"),
        ({"scalar": torch.tensor(0), "unknown value": 3}, "unknown value"),
        ({"weight": torch.zeros(64, 47)}, "weight"),
        ({"weight": torch.zeros(64, 48, dtype=torch.float64)}, "weight"),
        ({"weight": torch.zeros(1, 48).expand(64, 48)}, "expanded"),
        ({"nested.list": [{"a": torch.zeros(3)}], "nested": {"list": [{"a": torch.zeros(3)}]}}, "two tensors"),
    ],
)
def test_what_is_not_in_it_is_named_and_nothing_is_changed(tmp_path: Path, wanted: dict[str, Any], named: str) -> None:
    checkpoint = save(tmp_path, everything())
    before = copy.deepcopy(wanted)
    with pytest.raises(StateMismatchError, match=named):
        load_into(CheckpointReader(checkpoint), wanted)
    assert same(before, wanted)


def test_a_tensor_without_memory_is_not_taken_for_one_that_was_loaded(tmp_path: Path) -> None:
    checkpoint = save(tmp_path, everything())
    here = {"weight": torch.zeros(64, 48), "half": torch.zeros(64, 48, dtype=torch.bfloat16, device="meta")}
    with pytest.raises(StateMismatchError, match="half has no memory here"):
        load_into(CheckpointReader(checkpoint), here)
    assert not here["weight"].any()


def test_a_tensor_whose_name_begins_like_a_values_is_loaded(tmp_path: Path) -> None:
    checkpoint = save(tmp_path, {"ema": 0.99, "ema.weight": torch.arange(3.0), "pair": (torch.ones(2), 1)})
    here = {"ema": 0, "ema.weight": torch.zeros(3), "pair": (torch.zeros(2), 0)}
    load_into(CheckpointReader(checkpoint), here)
    assert same(here, {"ema": 0.99, "ema.weight": torch.arange(3.0), "pair": (torch.ones(2), 1)})


@pytest.mark.parametrize(
    "make",
    [
        torch.optim.AdamW,
        lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
        lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        lambda parameters: torch.optim.LBFGS(parameters, max_iter=3),
    ],
    ids=["AdamW", "SGD with momentum", "SGD", "LBFGS"],
)
@pytest.mark.parametrize("whose", ["ours", "DCP's"])
def test_a_fresh_optimizers_state_dict_gets_the_state_that_was_saved(tmp_path: Path, make: Any, whose: str) -> None:
    """It names no state; loaded by its names alone, training would go on without moments."""
    model = torch.nn.Linear(4, 3)
    optimizer = make(model.parameters())

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(torch.ones(1, 4)).square().sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    trained = {"optim": [optimizer.state_dict()]}
    here = {"optim": [make(torch.nn.Linear(4, 3).parameters()).state_dict()]}
    if whose == "ours":
        load_into(CheckpointReader(save(tmp_path, trained)), here)
    else:
        torch.distributed.checkpoint.save(trained, checkpoint_id=tmp_path / "theirs", no_dist=True)
        load_checkpoint(tmp_path / "theirs", here)
    fresh = make(torch.nn.Linear(4, 3).parameters())
    fresh.load_state_dict(here["optim"][0])
    states = fresh.state_dict()["state"], optimizer.state_dict()["state"]
    assert states[0].keys() == states[1].keys()
    for number, of_parameter in states[1].items():
        assert same(dict(sorted(states[0][number].items())), dict(sorted(of_parameter.items())))


def test_where_loading_fails_a_fresh_optimizer_stays_fresh(tmp_path: Path) -> None:
    parameter = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.AdamW([parameter])
    parameter.grad = torch.ones(3)
    optimizer.step()
    checkpoint = save(tmp_path, {"optim": optimizer.state_dict()})
    here = {"optim": torch.optim.AdamW([parameter]).state_dict(), "unknown": torch.ones(3)}
    with pytest.raises(StateMismatchError, match="unknown"):
        load_into(CheckpointReader(checkpoint), here)
    assert here["optim"]["state"] == {}


@pytest.mark.parametrize("is_known", [True, False])
def test_a_fresh_sharded_optimizer_gets_its_shards_or_is_refused(tmp_path: Path, is_known: bool) -> None:
    """One plain parameter among sharded ones (FSDP2's `ignored_params`) costs none of the others its moments."""
    generator = torch.Generator().manual_seed(8)
    weight, moment, plain = (torch.randn(8, 3, generator=generator) for _ in range(3))
    groups = [{"params": [0, 1]}]
    saved = {
        "weight": weight,
        "optim": {"state": {0: {"exp_avg": moment}, 1: {"exp_avg": plain}}, "param_groups": groups},
    }
    checkpoint = save(tmp_path, saved)
    with imagined_rank(1, 2):
        mesh = init_device_mesh("cpu", (2,))

        def shards() -> torch.Tensor:
            return distribute_tensor(torch.zeros(8, 3), mesh, [Shard(0)])

        weights, other = torch.nn.Parameter(shards()), torch.nn.Parameter(torch.zeros(8, 3))
        optimizer = torch.optim.AdamW([weights, other])
        here: dict[str, Any] = {"weight": weights, "optim": optimizer}
        template = template_of(here)
        if not is_known:
            with pytest.raises(StateMismatchError, match="its layout is not known"):
                load_into(CheckpointReader(checkpoint), template.state_dict)
            assert template.state_dict["optim"]["state"] == {}
            return
        load_into(CheckpointReader(checkpoint), template.state_dict, owned=template.owned)
        state = template.state_dict["optim"]["state"]
        assert bits(weights.to_local()) == bits(weight[4:])
        assert bits(state[0]["exp_avg"].to_local()) == bits(moment[4:])
        assert bits(state[1]["exp_avg"]) == bits(plain)


@pytest.mark.parametrize("whose", ["ours", "DCP's"])
def test_nested_state_of_a_fresh_optimizer_has_the_keys_that_were_saved_or_is_refused(
    tmp_path: Path, whose: str
) -> None:
    """DCP saves a dict's keys as text, so whether one was a number is not known of what it wrote."""
    nested = {0: {"precond": {0: torch.ones(2), 1: torch.zeros(2)}, "seen": {}, "list": [torch.ones(1), {"n": 3}]}}
    trained = {"optim": {"state": nested, "param_groups": [{"params": [0]}]}}
    here: dict[str, Any] = {"optim": {"state": {}, "param_groups": [{"params": [0]}]}}
    if whose == "ours":
        load_into(CheckpointReader(save(tmp_path, trained)), here)
        assert same(here["optim"]["state"], nested)
        return
    torch.distributed.checkpoint.save(trained, checkpoint_id=tmp_path / "theirs", no_dist=True)
    with pytest.raises(StateMismatchError, match=r"optim\.state\.0\.precond\.0"):
        load_checkpoint(tmp_path / "theirs", here)
    assert here["optim"]["state"] == {}


def test_state_of_a_fresh_optimizer_is_put_together_of_all_ranks_plain_values_too(tmp_path: Path) -> None:
    """Each rank's optimizer owns other parameters, and some of them have no tensors for state."""
    groups = [{"params": ["a", "b"]}]
    state = {"optim": {"state": {"a": {"m": torch.ones(4)}}, "param_groups": groups}}
    other = {"optim": {"state": {"b": {"calls": 7}}, "param_groups": groups}}
    checkpoint = save(tmp_path, state)
    (part,) = checkpoint.parts
    second = save(tmp_path / "second", other).parts[0]
    both = Checkpoint(checkpoint.name, [part, SavedPart(second.manifest, second.storage)])
    assert CheckpointReader(both).structure_at(("optim", "state")) == {
        "a": {"m": "optim.state.a.m"},
        "b": {"calls": None},
    }


def test_a_directory_is_loaded_whoever_wrote_it(tmp_path: Path) -> None:
    state = {"model": {"weight": torch.randn(30, 20)}, "optim": {"lr": 0.25}}
    ours = tmp_path / str(save(tmp_path, state).name)
    theirs = tmp_path / "dcp"
    torch.distributed.checkpoint.save(dict(state), checkpoint_id=theirs, no_dist=True)
    for directory in (ours, theirs):
        template: dict[str, Any] = {"model": {"weight": torch.zeros(30, 20)}, "optim": {"lr": 0.0}}
        load_checkpoint(directory, template)
        assert same(template, state)


def test_a_directory_that_is_not_whole_is_refused(tmp_path: Path) -> None:
    directory = tmp_path / str(save(tmp_path, {"weight": torch.ones(3)}).name)
    next(directory.glob("part-*")).unlink()
    with pytest.raises(CheckpointDamagedError, match="no manifest"):
        load_checkpoint(directory, {"weight": torch.zeros(3)})
