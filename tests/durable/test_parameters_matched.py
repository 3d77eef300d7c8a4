"""The state and the settings of optimizers come back to the parameters that they are of, or are refused by name; never mixed.

A dumb oracle remembers for each parameter, by name, what its optimizer held of it. Scripts hand the same parameters over in
random orders; what one has saved, or serves, another one takes.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from support.newest import newest_whole
from support.thoroughness import by_default
from torch import nn

from torchft_ckpt import Checkpointer
from torchft_ckpt.checkpointing import StateDictLock
from torchft_ckpt.checkpointing.durable.reading.loading import load_state
from torchft_ckpt.checkpointing.durable.reading.reader import CheckpointReader
from torchft_ckpt.checkpointing.durable.storage.fsspec_storage import open_storage
from torchft_ckpt.checkpointing.state.description import Description
from torchft_ckpt.checkpointing.state.dtypes import dtype_name
from torchft_ckpt.checkpointing.state.local_state import LocalState
from torchft_ckpt.checkpointing.state.parameters import group_keys, match, why_not_of
from torchft_ckpt.checkpointing.state.target import StateTarget
from torchft_ckpt.checkpointing.state.tree import TreeEncoder
from torchft_ckpt.errors import StateMismatchError
from torchft_ckpt.manager.state_registry import StateRegistry

Arrangement = list[list[list[str]]]
"""Of each optimizer, of each group, the names of its parameters."""


@dataclass
class Script:
    """One script: parameters by name, and optimizers over them."""

    parameters: dict[str, nn.Parameter]
    arrangement: Arrangement
    optimizers: list[torch.optim.Optimizer]
    keys: list[str]
    guarded: list[int]
    """The optimizers in the order in which they are guarded."""

    @classmethod
    def made(
        cls, shapes: Mapping[str, tuple[int, ...]], arrangement: Arrangement, keys: list[str], **options: Any
    ) -> Script:
        parameters = {name: nn.Parameter(torch.randn(shape)) for name, shape in shapes.items()}
        optimizers = [
            torch.optim.AdamW([{"params": [parameters[name] for name in group]} for group in groups], **options)
            for groups in arrangement
        ]
        return cls(parameters, arrangement, optimizers, keys, list(range(len(optimizers))))

    def train(self, chance: random.Random, share: float) -> None:
        """Step a part of the parameters, and set each group as no other is."""
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"], group["own"] = chance.random() / 100, chance.random()
        for _ in range(chance.randint(1, 2)):
            for parameter in self.parameters.values():
                parameter.grad = torch.randn_like(parameter) if chance.random() < share else None
            for optimizer in self.optimizers:
                optimizer.step()

    def held(self) -> dict[tuple[str, str], object]:
        """What there is of each parameter, by its name, and by the key of the optimizer, which may be one of two that own it."""
        found: dict[tuple[str, str], object] = {}
        for key, groups, optimizer in zip(self.keys, self.arrangement, self.optimizers, strict=True):
            for names, group in zip(groups, optimizer.param_groups, strict=True):
                for name in names:
                    state = optimizer.state.get(self.parameters[name], {})
                    values = {what: value.tolist() for what, value in sorted(state.items())}
                    found[name, key] = (group["lr"], group.get("own"), values, self.parameters[name].tolist())
        return found

    def root(self) -> dict[str, Any]:
        return {"model": self.parameters, **dict(zip(self.keys, self.optimizers, strict=True))}

    def state(self) -> dict[str, Any]:
        return {
            "model": self.parameters,
            **{key: o.state_dict() for key, o in zip(self.keys, self.optimizers, strict=True)},
        }

    def load(self, state: dict[str, Any]) -> None:
        with torch.no_grad():
            for name, parameter in self.parameters.items():
                parameter.copy_(state["model"][name])
        for key, optimizer in zip(self.keys, self.optimizers, strict=True):
            optimizer.load_state_dict(state[key])

    def registry(self) -> StateRegistry:
        registry = StateRegistry(StateDictLock())
        registry.register("default", self.load, self.state)
        for number in self.guarded:
            registry.guard(self.optimizers[number])
        registry.layout()
        return registry


def random_scripts(chance: random.Random) -> tuple[Script, Script, bool]:
    """Two scripts, and whether the second one is arranged as the first."""
    shapes = {f"p{n}": chance.choice([(3, 3), (3, 3), (3,), (2, 3)]) for n in range(chance.randint(2, 6))}
    names = list(shapes)
    chance.shuffle(names)
    num = chance.randint(1, min(3, len(names)))
    cuts = sorted(chance.sample(range(1, len(names)), num - 1))
    parts = [names[low:high] for low, high in zip([0, *cuts], [*cuts, len(names)], strict=True)]
    arrangement = [[part[:1], part[1:]] if len(part) > 1 and chance.random() < 0.5 else [part] for part in parts]
    if num > 1 and chance.random() < 0.15:
        arrangement[0][0] = [*arrangement[0][0], arrangement[1][0][0]]  # two own it
    keys = [f"o{n}" for n in range(num)]
    options = {"amsgrad": chance.random() < 0.3}
    saved = Script.made(shapes, arrangement, keys, **options)
    other = [[[*group] for group in groups] for groups in arrangement]
    change = chance.choice(["none", "none", "parameters", "groups", "optimizers", "moved", "renamed"])
    if change == "parameters":
        chance.shuffle(chance.choice(chance.choice(other)))
    elif change == "groups":
        chance.shuffle(chance.choice(other))
    elif change == "optimizers":
        chance.shuffle(other)
    elif change == "moved" and num > 1 and len(other[0][0]) > 1:
        other[1][0].append(other[0][0].pop())
    elif change == "renamed":
        old = chance.choice(names)
        shapes = {("new" if name == old else name): shape for name, shape in shapes.items()}
        other = [[["new" if name == old else name for name in group] for group in groups] for groups in other]
    here = Script.made(shapes, other, keys, **({"amsgrad": True} if chance.random() < 0.3 else {}))
    chance.shuffle(here.guarded)
    return saved, here, change != "renamed" and other == arrangement


def through_objects(saved: Script, here: Script, directory: Path) -> None:
    for script, act in ((saved, Checkpointer.save), (here, Checkpointer.load)):
        checkpointer = Checkpointer(directory)
        if act is Checkpointer.save:
            checkpointer.save(script.root(), step=1).result(60)
        else:
            checkpointer.load(script.root())
        checkpointer.shutdown()


def through_storage(saved: Script, here: Script, directory: Path) -> None:
    """As `restore` does, without a job around it."""
    checkpointer = Checkpointer(directory)
    checkpointer.save(saved.root(), step=1).result(60)
    checkpointer.shutdown()
    checkpoint = newest_whole([open_storage(directory)])
    registry = here.registry()
    received = registry.capture_to_receive()
    local = LocalState(received.laid_out(received["default"]))
    state = load_state(checkpoint, CheckpointReader(checkpoint).read, local, replica_id="", rank=0, in_place=True)
    registry.load({"default": state})


class Described(NamedTuple):
    fqn: str
    dtype: str
    shape: tuple[int, ...]


def through_a_join(saved: Script, here: Script, directory: Path) -> None:
    """As a peer gives it, by boxes, without a wire between."""
    served = saved.registry().capture_to_serve()
    encoder = TreeEncoder()
    tree = encoder.encode({"user": served.state, "torchft": {**served.own}})
    tensors = [Described(path, dtype_name(tensor.dtype), tuple(tensor.shape)) for path, tensor in encoder.tensors]
    description = Description(tree=tree, tensors=tensors)
    registry = here.registry()
    received = registry.capture_to_receive()
    target = StateTarget(LocalState(received.laid_out({"user": {**received}})))
    given = dict(encoder.tensors)
    for want in target.wants(description):
        want.target.copy_(given[want.name].detach())
    state: Any = target.finish(description)
    registry.load(state["user"])
    registry.take_settings(state["torchft"])


def refusal(way: Callable[[Script, Script, Path], None], saved: Script, here: Script, directory: Path) -> str | None:
    """Return why it was refused; None where it came."""
    try:
        way(saved, here, directory)
    except StateMismatchError as error:
        return f"{error}{' (torn)' if error.state_overwritten else ''}"
    return None


def check(way: Callable[[Script, Script, Path], None], seeds: range, directory: Path) -> None:
    for seed in seeds:
        chance = random.Random(seed)
        torch.manual_seed(seed)
        saved, here, is_alike = random_scripts(chance)
        saved.train(chance, share=0.7)
        if chance.random() < 0.5:
            here.train(chance, share=0.5)
        expected, before = saved.held(), here.held()
        why = refusal(way, saved, here, directory / str(seed))
        if why is None:
            assert here.held() == expected, f"seed {seed}"
            continue
        assert not is_alike and "torn" not in why, f"seed {seed}: {why}"
        assert here.held() == before, f"seed {seed}: {why}"
        assert any(name in why for name in (*saved.keys, "new")), f"seed {seed}: {why}"


@pytest.mark.parametrize("first", range(0, by_default(80, thorough=700), 20))
def test_what_a_peer_gives_comes_to_its_parameters_or_is_refused_by_name(first: int, tmp_path: Path) -> None:
    check(through_a_join, range(first, first + 20), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("way", [through_objects, through_storage], ids=["load", "restore"])
@pytest.mark.parametrize("first", range(0, by_default(10, thorough=700), 10))
def test_what_was_saved_comes_back_to_its_parameters_or_is_refused_by_name(
    way: Callable[[Script, Script, Path], None], first: int, tmp_path: Path
) -> None:
    check(way, range(first, first + 10), tmp_path)


def of_two_weights(*, tied: bool, trains: list[str]) -> Script:
    script = Script.made({"embed": (3, 3), "head": (3, 3), "bias": (3,)}, [[["bias"]]], ["o"])
    if tied:
        script.parameters["head"] = script.parameters["embed"]
    script.arrangement[0][0] = names = [name for name in trains if not (tied and name == "head")]
    script.optimizers[0] = torch.optim.AdamW([script.parameters[name] for name in names])
    return script


@pytest.mark.parametrize("way", [through_objects, through_storage, through_a_join], ids=["load", "restore", "join"])
@pytest.mark.parametrize("is_tied_there", [True, False])
def test_a_tied_model_and_one_that_is_not_are_refused_by_name_unless_the_weights_are_equal_and_not_trained(
    way: Callable[[Script, Script, Path], None], is_tied_there: bool, tmp_path: Path
) -> None:
    """A head that came into a weight that is tied here was once the embedding as well, without a word."""
    there, here = (
        of_two_weights(tied=is_tied, trains=["embed", "head", "bias"]) for is_tied in (is_tied_there, not is_tied_there)
    )
    there.train(random.Random(1), share=1.0)
    before = here.held()
    why = refusal(way, there, here, tmp_path)
    assert why is not None and "torn" not in why and here.held() == before
    assert f"o.param_groups.0 has {2 + (not is_tied_there)} parameters there, {2 + is_tied_there} here" in why
    there, here = (of_two_weights(tied=is_tied, trains=["bias"]) for is_tied in (is_tied_there, not is_tied_there))
    why = refusal(way, there, here, tmp_path / "frozen")
    if is_tied_there:
        assert why is None and all(torch.equal(here.parameters[name], one) for name, one in there.parameters.items())
    elif way is not through_a_join:  # there the load function gets both, and what it did not set is named
        assert why is not None and "embed" in why and "head share memory here, and do not hold the same there" in why


@pytest.mark.parametrize(("here", "there"), [("w", "module.w"), ("_orig_mod.w", "w"), ("a._orig_mod.w", "module.a.w")])
def test_what_wrappers_put_into_a_name_makes_no_other_parameter_of_it(here: str, there: str) -> None:
    """A load function may take it out. A name that is another one is refused."""

    def group(name: str) -> list[dict[str, object]]:
        return [{"params": [0], "param_names": [name]}]

    assert why_not_of("optim", group(there), [], here=group(here)) == []
    assert why_not_of("optim", group(there), [], here=group("v"))


def owner(*groups: list[torch.Tensor]) -> Any:
    return torch.optim.SGD([{"params": group} for group in groups], lr=0.1)


def keys_of(optimizer: Any, *named: list[str], path: str = "") -> list[str]:
    ((*keys,),) = group_keys([(optimizer, path, [*named])])
    return keys


def test_a_group_is_known_by_names_then_by_its_place_then_by_shapes_that_no_other_has() -> None:
    small, large, other = torch.zeros(2), torch.zeros(3), torch.zeros(3)
    named = keys_of(owner([small], [large, other]), ["a"], ["b", ""])
    assert match(keys_of(owner([large, other], [small]), ["b", ""], ["a"]), named) == [1, 0]
    assert match(keys_of(owner([small], [large, other]), ["a"], ["", "b"]), named) == [0, None]
    by_shape = keys_of(owner([small], [large]), [""], [""])
    assert match(keys_of(owner([other], [small]), [""], [""]), by_shape) == [1, 0]
    assert keys_of(owner([large], [other]), [""], [""]) == ["", ""], "either may be the other"
    assert match(["", "b"], ["b", ""]) == [None, 0]
    assert keys_of(owner([large], [other]), [""], [""], path="optim") == [
        "optim.param_groups.0",
        "optim.param_groups.1",
    ]


def test_one_that_two_optimizers_hold_is_known_in_both() -> None:
    parameter = torch.zeros(2)
    outer, inner = owner([parameter]), owner([parameter])
    keys = [key for some in group_keys([(outer, "", [[""]]), (inner, "", [[""]])]) for key in some]
    assert match(keys, keys) == [0, 1]
