"""Named tuples and enums travel as names and values; what they become is the receiver's own class, or a clear refusal."""

from __future__ import annotations

import enum
import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch
from test_state_format import round_trip, snapshot_of

from torchft_ckpt import register_state_class
from torchft_ckpt.checkpointing.state.classes import unregister_state_class
from torchft_ckpt.checkpointing.state.format import decode_manifest
from torchft_ckpt.checkpointing.state.tree import decode_tree, from_tensors
from torchft_ckpt.errors import ConfigError, StateMismatchError


class Carry(NamedTuple):
    hidden: torch.Tensor
    age: int = 0


class Phase(enum.Enum):
    WARM_UP = "warm-up"
    DECAY = ("decay", 2)


class Parts(enum.Flag):
    HEAD = 1
    BODY = 2
    ALL = 3


class Act(enum.Enum):
    RELU = torch.nn.ReLU
    NONE = None


def state(age: int = 3) -> dict[str, Any]:
    return {
        "carry": Carry(torch.full((2,), float(age)), age),
        "phase": Phase.DECAY,
        "parts": [Parts.HEAD | Parts.BODY, Parts(0), Parts.HEAD],
        "act": Act.RELU,
        "seen": {Phase.WARM_UP, Phase.DECAY},
    }


@pytest.fixture
def registered() -> Iterator[None]:
    kinds = (Carry, Phase, Parts, Act)
    for kind in kinds:
        assert register_state_class(kind) is kind
    yield
    for kind in kinds:
        unregister_state_class(kind)


def check(received: dict[str, Any], sent: dict[str, Any]) -> None:
    assert (type(received["carry"]), received["carry"].age) == (Carry, sent["carry"].age)
    assert torch.equal(received["carry"].hidden, sent["carry"].hidden)
    for name in ("phase", "parts", "act", "seen"):
        assert (name, received[name]) == (name, sent[name])


def test_they_become_what_the_receivers_state_has_at_their_place() -> None:
    check(round_trip(state(3), here=state(0)), state(3))


@pytest.mark.usefixtures("registered")
def test_they_become_what_was_registered_where_there_is_no_state() -> None:
    check(round_trip(state()), state())


def test_a_list_that_grew_needs_a_registered_class() -> None:
    sent, here = {"history": [Carry(torch.ones(1), 1)] * 2}, {"history": [Carry(torch.zeros(1))]}
    with pytest.raises(StateMismatchError, match=r"history\.1 is a named tuple .*Carry.*register_state_class"):
        round_trip(sent, here)
    register_state_class(Carry)
    try:
        assert [type(item) for item in round_trip(sent, here)["history"]] == [Carry, Carry]
    finally:
        unregister_state_class(Carry)


def test_without_a_class_each_is_named_by_its_path_and_nothing_is_received() -> None:
    with pytest.raises(StateMismatchError) as caught:
        round_trip({"a": {"b": [Phase.DECAY]}, "c": Carry(torch.ones(1))})
    assert all(text in str(caught.value) for text in ("a.b.0 is a member of the enum", "Phase", "c is a named tuple"))


def test_a_class_that_the_name_would_lead_to_is_not_used() -> None:
    """`Phase` could be imported here by its very name; a name of the standard library could be everywhere."""
    assert Phase.__module__ in sys.modules
    with pytest.raises(StateMismatchError, match="not registered"):
        round_trip({"signal": enum.Enum("Colour", "RED", module="signal")["RED"]})


@pytest.mark.parametrize(
    ("sent", "here", "complaint"),
    [
        (
            Carry(torch.ones(1)),
            NamedTuple("Carry", [("hidden", object), ("steps", int)])(1, 2),
            "hidden, age.* has hidden, steps",
        ),
        (Phase.DECAY, enum.Enum("Phase", "WARM_UP").WARM_UP, "DECAY of the enum .* has WARM_UP"),
        (Phase.WARM_UP, enum.Enum("Phase", {"WARM_UP": "warm"}).WARM_UP, "of another value than here: 'warm-up'"),
        (Parts.HEAD, Phase.DECAY, "HEAD of the enum"),
        (Carry(torch.ones(1)), Phase.DECAY, "named tuple"),
    ],
)
def test_a_class_here_that_has_something_else_is_refused(sent: object, here: object, complaint: str) -> None:
    with pytest.raises(StateMismatchError, match=f"place is .*{complaint}"):
        round_trip({"place": sent}, {"place": here})


def test_no_constructor_of_the_receiver_runs() -> None:
    class Watchful(NamedTuple("Watchful", [("path", str)])):
        def __new__(cls, path: str) -> Watchful:
            raise AssertionError("called")

    sent = {"w": tuple.__new__(Watchful, ["/etc"])}
    assert type(round_trip(sent, sent)["w"]) is Watchful


def test_who_only_looks_sees_tuples_and_plain_values() -> None:
    manifest = decode_manifest(snapshot_of(state()).manifest_bytes())
    seen: Any = decode_tree(manifest.tree, from_tensors([torch.zeros(2)]))
    assert (type(seen["carry"]), seen["carry"][1], seen["phase"]) == (tuple, 3, ("decay", 2))
    assert (seen["parts"], seen["act"]) == ([3, 0, 1], ("RELU",))
    assert seen["seen"] == {(f"{__name__}.Phase", "WARM_UP"), (f"{__name__}.Phase", "DECAY")}


def test_only_such_classes_are_registered() -> None:
    with pytest.raises(ConfigError, match="no class of named tuples and no enum"):
        register_state_class(dict)
