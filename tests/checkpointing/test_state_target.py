"""A target says what is wanted of a state, and makes the state, whoever fills the wants."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch

from torchft_ckpt.checkpointing.state.description import Description
from torchft_ckpt.checkpointing.state.dtypes import dtype_name
from torchft_ckpt.checkpointing.state.local_state import LocalState, view_of
from torchft_ckpt.checkpointing.state.outline import Outline
from torchft_ckpt.checkpointing.state.target import StateTarget, Want
from torchft_ckpt.checkpointing.state.tree import TreeEncoder
from torchft_ckpt.core.boxes.geometry import Box, whole
from torchft_ckpt.errors import StateMismatchError


@dataclass
class Entry:
    fqn: str
    dtype: str
    shape: list[int]


@dataclass
class Saved:
    """A state that is somewhere, with somebody who fills wants of it."""

    state: Any
    fulls: dict[str, torch.Tensor] = field(default_factory=dict)

    def description(self, **ties: str) -> Description:
        encoder = TreeEncoder()
        tree = encoder.encode(self.state)
        self.fulls.update(encoder.tensors)
        entries = [Entry(name, dtype_name(full.dtype), [*full.shape]) for name, full in encoder.tensors]
        return Description(tree=tree, tensors=entries, ties=ties)

    def fill(self, wants: Sequence[Want]) -> None:
        for want in wants:
            assert not (want.target.is_conj() or want.target.is_neg())
            want.target.copy_(view_of(self.fulls[want.name], want.box))


def ramp(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.arange(torch.Size(shape).numel(), dtype=dtype).reshape(shape) + 1


def test_all_is_wanted_whole_where_nothing_is_here() -> None:
    saved = Saved({"w": ramp(3, 4), "empty": torch.empty(0, 4), "lr": 0.1})
    target = StateTarget(None)
    wants = target.wants(saved.description())
    assert [(want.name, want.box) for want in wants] == [("w", whole((3, 4)))]
    saved.fill(wants)
    state: Any = target.finish(saved.description())
    assert torch.equal(state["w"], ramp(3, 4)) and state["empty"].shape == (0, 4) and state["lr"] == 0.1


def test_tensors_that_are_here_are_received_into_whatever_their_strides() -> None:
    local = {"w": torch.zeros(4, 3).t(), "b": torch.zeros(5, requires_grad=True)}
    saved = Saved({"w": ramp(3, 4), "b": ramp(5)})
    target = StateTarget(LocalState(local), in_place=True)
    wants = target.wants(saved.description())
    assert [want.target.data_ptr() for want in wants] == [local["w"].data_ptr(), local["b"].data_ptr()]
    versions = [tensor._version for tensor in local.values()]
    assert not target.is_overwritten(False) and target.is_overwritten(True)
    with torch.no_grad():
        saved.fill(wants)
    state: Any = target.finish(saved.description())
    assert state["w"] is local["w"] and state["b"] is local["b"]
    assert torch.equal(local["w"], ramp(3, 4)) and torch.equal(local["b"], ramp(5))
    assert all(tensor._version > before for tensor, before in zip(local.values(), versions, strict=True))


@pytest.mark.parametrize("kind", ["conj", "neg"])
def test_what_is_not_plain_memory_is_copied_to_at_the_end(kind: str) -> None:
    plain = torch.zeros(2, 3, dtype=torch.complex64)
    local = {"w": plain.conj() if kind == "conj" else torch._neg_view(plain)}
    saved = Saved({"w": torch.complex(ramp(2, 3), ramp(2, 3))})
    target = StateTarget(LocalState(local), in_place=True)
    wants = target.wants(saved.description())
    assert not target.is_overwritten(True)
    saved.fill(wants)
    state: Any = target.finish(saved.description())
    assert state["w"] is local["w"] and torch.equal(state["w"].resolve_conj().resolve_neg(), saved.fulls["w"])
    assert target.is_overwritten(False)


def test_tensors_that_are_tied_there_are_wanted_once_and_arrive_tied() -> None:
    weight = ramp(3, 4)
    saved = Saved({"a": weight, "b": weight, "c": weight.clone()})
    target = StateTarget(None)
    wants = target.wants(saved.description(a="one", b="one"))
    assert [want.name for want in wants] == ["a", "c"]
    saved.fill(wants)
    state: Any = target.finish(saved.description())
    assert state["a"] is state["b"] and state["a"].data_ptr() != state["c"].data_ptr()


def test_the_values_are_those_of_the_state_that_it_is_finished_as() -> None:
    first, heir = Saved({"a": ramp(2), "b": ramp(3), "lr": 0.1}), Saved({"lr": 0.2, "b": ramp(3), "a": ramp(2)})
    target = StateTarget(LocalState({"a": torch.zeros(2), "b": torch.zeros(3)}))
    first.fill(target.wants(first.description()))
    state: Any = target.finish(heir.description())
    assert torch.equal(state["a"], ramp(2)) and torch.equal(state["b"], ramp(3)) and state["lr"] == 0.2


def test_what_cannot_be_received_into_arrives_beside_or_is_refused() -> None:
    local = LocalState({"w": torch.zeros(1).expand(3), "b": torch.zeros(2)})
    saved = Saved({"w": ramp(3), "b": ramp(2)})
    with pytest.raises(StateMismatchError, match="w has several elements in one place here"):
        StateTarget(local, in_place=True).wants(saved.description())
    target = StateTarget(local, in_place=True, may_be_beside=True)
    saved.fill(target.wants(saved.description()))
    state: Any = target.finish(saved.description())
    assert torch.equal(state["w"], ramp(3)) and torch.equal(state["b"], ramp(2))


def test_a_part_of_a_want_goes_to_its_place() -> None:
    want = Want("w", Box((2, 1), (3, 4)), torch.zeros(4, 3).t())
    part = want.part(Box((3, 2), (2, 2)))
    part.target.fill_(7)
    assert want.target.tolist() == [[0, 0, 0, 0], [0, 7, 7, 0], [0, 7, 7, 0]]
    assert len(want.memory()) == 12 * 4 and len(part.memory()) == 5 * 4


def test_an_outline_says_where_tensors_stand_and_wants_those_inside_of_values() -> None:
    inner, array = ramp(3), np.arange(4.0)
    saved = Saved({"w": ramp(2), "pair": (inner, {"deep": (array,)}, "x"), "array": array, "lr": 0.5})
    description = saved.description()
    outline = Outline(description.tree, description.tensors, None, lambda state: dict(state))  # type: ignore[call-overload]
    assert outline.tensors == {"w": 0} and set(outline.values) == {"pair", "array", "lr"}
    assert outline.paths["pair"] == ("pair",)
    assert outline.wants_in(["lr"]) == [] and outline.made(["lr"]) == {"lr": 0.5}
    wants = outline.wants_in(["pair", "array"])
    assert [want.name for want in wants] == ["pair.0", "pair.1.deep.0", "array"]
    assert [want.target.data_ptr() for want in outline.wants_in(["pair", "array"])] == [
        want.target.data_ptr() for want in wants
    ]
    saved.fill(wants)
    made: Any = outline.made(["pair", "array"])
    assert torch.equal(made["pair"][0], inner) and np.array_equal(made["pair"][1]["deep"][0], array)
    assert np.array_equal(made["array"], array) and made["pair"][2] == "x"
