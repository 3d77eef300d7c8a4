"""A flat list of plain values is one leaf to whoever goes through a state, and arrives with every type and bit nevertheless."""

from __future__ import annotations

import io
import logging
import math
import struct
from collections import deque
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint._nested_dict import flatten_state_dict

from torchft_ckpt.checkpointing import HTTPTransport, StateDictLock
from torchft_ckpt.checkpointing.durable.saving.capture import CapturedState
from torchft_ckpt.checkpointing.durable.saving.holdings import HoldingsIndex
from torchft_ckpt.checkpointing.serving.buffers import BufferPool
from torchft_ckpt.checkpointing.state.containers import flattened, optimizer_states, walk
from torchft_ckpt.checkpointing.state.tree import (
    MANY_LEAVES,
    MAX_DEPTH,
    TreeEncoder,
    check_tree,
    decode_tree,
    from_tensors,
)
from torchft_ckpt.errors import StateFormatError, UnsupportedValueError
from torchft_ckpt.manager.checking import leaves_to_compare
from torchft_ckpt.manager.comparing import compare_states, fixed, value_in_words
from torchft_ckpt.manager.showing import KnownLeaves, keeping, shown
from torchft_ckpt.manager.volatile import Unsteady, capture_for_save, copy_volatile, tensors_in

PLAIN = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(-(2**70), 2**70),
    st.sampled_from([2**63 - 1, -(2**63), 2**63, -(2**63) - 1, 0, 1, -0.0, 0.0, math.inf, -math.inf]),
    st.integers(0, 2**64 - 1).map(lambda bits: struct.unpack(">d", bits.to_bytes(8, "big"))[0]),  # NaNs of all kinds
    st.text(max_size=5),
)
FLAT = st.one_of(
    *(st.lists(kind, max_size=12) for kind in (st.integers(), st.floats(), st.booleans(), st.text(max_size=3), PLAIN))
)
KEYS = st.one_of(st.text(max_size=4), st.integers(), st.booleans(), st.none(), st.floats(allow_nan=False))
STATES = st.recursive(
    st.one_of(PLAIN, FLAT, FLAT.map(tuple), FLAT.map(deque), st.sets(st.integers()), st.dictionaries(KEYS, PLAIN)),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(KEYS, inner, max_size=4)),
    max_leaves=12,
)
WITH_TENSORS = st.recursive(
    st.one_of(PLAIN, FLAT, FLAT.map(tuple), st.just(torch.zeros(1))),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4), st.dictionaries(st.text("ab.", max_size=2), inner, max_size=3)
    ),
    max_leaves=10,
)


def dumb_node(value: Any) -> Any:
    """The node that the format says, one value at a time."""
    if value is None or type(value) in (bool, str):
        return value
    if type(value) is int:
        return value if -(2**63) <= value < 2**63 else {"i": f"{value:x}"}
    if type(value) is float:
        return value if math.isfinite(value) else {"f": struct.pack(">d", value).hex()}
    if type(value) is dict:
        return {"d": [[dumb_node(key), dumb_node(item)] for key, item in value.items()]}
    nodes = [dumb_node(item) for item in value]
    return nodes if type(value) is list else {"t": nodes} if type(value) is tuple else {"deque": [value.maxlen, nodes]}


def same(one: Any, other: Any) -> bool:
    """Whether two values have the same types and bits."""
    if type(one) is not type(other):
        return False
    if type(one) is float:
        return struct.pack(">d", one) == struct.pack(">d", other)
    if type(one) is dict:
        return len(one) == len(other) and all(
            same(a, b) and same(one[a], other[b]) for a, b in zip(one, other, strict=True)
        )
    if isinstance(one, (list, tuple, deque)):
        return len(one) == len(other) and all(same(a, b) for a, b in zip(one, other, strict=True))
    return bool(one == other)


def has_set(value: Any) -> bool:
    return any(isinstance(item, set) for _, item in walk(value))


@pytest.mark.slow
@given(STATES)
@settings(max_examples=300, deadline=None)
def test_what_travels_is_what_the_format_says_and_arrives_with_every_type_and_bit(state: Any) -> None:
    encoder = TreeEncoder()
    sent = msgspec.json.encode(encoder.encode(state))
    if not has_set(state):
        assert sent == msgspec.json.encode(dumb_node(state))
    node = msgspec.json.decode(sent)
    check_tree(node, [])
    assert same(decode_tree(node, from_tensors([])), state)


@given(PLAIN, PLAIN, st.integers(0, 3))
@settings(max_examples=300, deadline=None)
def test_two_lists_have_the_same_words_exactly_if_they_have_the_same_types_and_bits(one, other, num_more) -> None:
    more = [1] * num_more
    assert (value_in_words([one, *more]) == value_in_words([other, *more])) == same(one, other)
    here, there = {"x": [one, *more]}, {"x": [other, *more]}
    assert (compare_states(here, there).paths == ()) == same(one, other)


@pytest.mark.slow
@given(WITH_TENSORS)
@settings(max_examples=300, deadline=None)
def test_names_and_leaves_are_dcps(value: Any) -> None:
    state = {"root": value}
    try:
        expected, paths = flatten_state_dict(state)
    except ValueError:
        with pytest.raises(StateFormatError):
            flattened(state)
        return
    leaves, found = flattened(state)
    assert found == paths
    assert all(leaves[name] is leaf for name, leaf in expected.items())


@pytest.mark.parametrize(
    "bad", [[1, 2, "\ud800"], [1, 16**5000], ["a", object()]], ids=["no Unicode", "a huge integer", "an object"]
)
def test_what_cannot_be_carried_is_named_by_its_place_in_the_list(bad: list[object]) -> None:
    with pytest.raises(UnsupportedValueError, match=f"'cursor.{len(bad) - 1}'"):
        TreeEncoder().encode({"cursor": bad})


@pytest.mark.parametrize("value", [[1], (1,), {"a": 1}, {1}], ids=str)
def test_a_flat_container_may_not_be_deeper_than_any_other_value(value: object) -> None:
    state, node = value, msgspec.json.decode(msgspec.json.encode(TreeEncoder().encode(value)))
    for _ in range(MAX_DEPTH):
        state, node = [state], [node]
    with pytest.raises(UnsupportedValueError, match=r"nested deeper|too deep"):
        TreeEncoder().encode(state)
    with pytest.raises(StateFormatError, match="nested deeper"):
        decode_tree(node, from_tensors([]))


# ------------------------------------------------------------------------------------------------------------ one leaf


@pytest.fixture
def num_encoded(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[object]]:
    """The values that are encoded one by one."""
    seen: list[object] = []
    encode = TreeEncoder.encode
    monkeypatch.setattr(
        TreeEncoder, "encode", lambda self, value, *rest: (seen.append(value), encode(self, value, *rest))[1]
    )
    return seen


PLENTY = 2 * MANY_LEAVES


@pytest.mark.parametrize(
    "values",
    [
        list(range(PLENTY)),
        tuple(n * 0.5 for n in range(PLENTY)),
        deque([True, False] * PLENTY),
        [*map(str, range(PLENTY)), None, 1, 0.5],
    ],
    ids=["ints", "floats", "bools", "mixed"],
)
def test_nobody_looks_at_the_values_of_a_flat_sequence_one_by_one(values: Any, num_encoded: list[object]) -> None:
    state = {"default": {"model": {"w": torch.ones(2)}, "cursor": values}}
    node = TreeEncoder().encode(state)
    assert len(num_encoded) < 10
    assert same(decode_tree(node, from_tensors([torch.ones(2)]))["default"]["cursor"], values)  # type: ignore[index]
    leaves = leaves_to_compare(state, [])
    assert [leaf.place for leaf in leaves] == ["default.cursor", "default.model.w"]
    assert len(list(walk(state))) == 5
    assert list(optimizer_states(state)) == []
    assert len(list(tensors_in(state))) == 1
    assert copy_volatile(state, [], Unsteady()).state["default"]["cursor"] is values
    assert flattened(state["default"])[0]["cursor"] is values
    assert len(num_encoded) < 20


@pytest.mark.parametrize("num_dicts", [1, 300])
def test_a_save_encodes_each_dict_once_and_its_values_are_those_of_the_moment(
    num_encoded: list[object], num_dicts: int
) -> None:
    """20,000 small dicts once held a save for a second, as each of their values was made a node by itself."""
    seen = [{"file": f"{n}", "at": n, "ok": None} for n in range(num_dicts)]
    few: dict[str, Any] = {
        "list": [1, 2],
        "pair": (1, "a"),
        "deque": deque([1], 3),
        "set": {4},
        "nan": -math.nan,
        "big": 2**70,
    }
    was = fixed({"seen": seen, "few": few})
    num_encoded.clear()
    held = capture_for_save({"seen": seen, "few": few, "w": torch.ones(2)}, [])
    captured = CapturedState(
        held.state, step=1, own={}, lock=StateDictLock(), pool=BufferPool(65536), index=HoldingsIndex(0, 1)
    )
    assert len(num_encoded) < num_dicts + 30
    seen[0].update(file="", at=-1)
    few["list"].append(3)
    few["deque"].append(3)
    few["set"].add(5)
    expected, _ = flattened(was)  # type: ignore[arg-type]
    for value in captured.values:
        loaded = torch.load(io.BytesIO(value.record()), weights_only=False)
        assert same(loaded, expected[value.fqn]), value.fqn
    assert len(captured.values) == len(expected)
    captured.close()


def test_what_is_put_into_a_flat_container_meanwhile_does_not_appear_in_what_was_fixed() -> None:
    state = {"list": [1, 2], "dict": {"a": 1}, "tuple": (1, 2), "deque": deque([1])}
    held = fixed(state)
    state["list"].append(3)  # type: ignore[attr-defined]
    state["dict"]["b"] = 2  # type: ignore[index]
    state["deque"].append(2)  # type: ignore[attr-defined]
    assert held == {"list": [1, 2], "dict": {"a": 1}, "tuple": (1, 2), "deque": deque([1])}


def digest(state: dict[str, Any]) -> list[tuple[str, str]]:
    leaves = leaves_to_compare({"default": state}, [])
    return [(leaf.name, leaf.digest) for leaf in shown(leaves, KnownLeaves(), 1, None, group_world_size=1).open]  # type: ignore[arg-type]


def test_a_small_dict_is_a_leaf_for_each_value_and_a_large_one_is_one_however_it_was_filled() -> None:
    assert [name for name, _ in digest({"few": {"epoch": 1, "best": 0.5}})] == ["default.few.best", "default.few.epoch"]
    many = {f"k{n}": n for n in range(PLENTY)}
    ((name, known),) = digest({"many": many})
    assert name == "default.many"
    assert digest({"many": dict(reversed(many.items()))}) == [("default.many", known)]
    assert digest({"many": many | {"k7": True}}) != [("default.many", known)]


def test_small_dicts_among_very_many_are_a_leaf_each() -> None:
    leaves = leaves_to_compare({"default": {"seen": [{"a": n, "b": 0.5} for n in range(PLENTY)]}}, [])
    assert len(leaves) == PLENTY


@pytest.mark.parametrize(("one", "other"), [(1, True), (1, 1.0), (0.0, -0.0), (None, "None")])
def test_lists_that_differ_in_a_type_or_a_bit_alone_are_told_apart(one: object, other: object) -> None:
    assert digest({"cursor": [7, one]}) != digest({"cursor": [7, other]})


def test_the_leaves_of_each_group_are_kept_and_flat_lists_come_whole() -> None:
    here, received = {"x": [1, 2], "own": {"a": 1, "b": 2}}, {"x": [3, 4], "own": {"a": 5, "b": 6}}
    assert keeping(received, here, {"default.own.a"}, "default") == {"x": [3, 4], "own": {"a": 1, "b": 6}}
    assert keeping(received, here, {"default.x"}, "default") == {"x": [1, 2], "own": {"a": 5, "b": 6}}


def test_a_long_list_that_differs_is_named_once_and_a_short_one_by_the_places_in_it() -> None:
    assert compare_states({"x": [1, 2, 3]}, {"x": [1, 5, 6]}).paths == ("x.1", "x.2")
    assert compare_states({"x": [0] * PLENTY}, {"x": [1] * PLENTY}).paths == ("x",)


def test_very_many_values_that_are_no_flat_list_are_said_once_by_who_serves_them(
    caplog: pytest.LogCaptureFixture,
) -> None:
    transport = HTTPTransport(timeout=timedelta(seconds=5))
    try:
        with caplog.at_level(logging.WARNING):
            transport.send_checkpoint([], 1, {"cursor": list(range(PLENTY))}, timedelta(seconds=5))
            said = [record for record in caplog.records if "plain values" in record.message]
            assert not said
            for step in (2, 3):
                seen = {"seen": [{"a": 1} for _ in range(PLENTY)], "n": 1}
                transport.send_checkpoint([], step, seen, timedelta(seconds=5))
        (message,) = [record.message for record in caplog.records if "plain values" in record.message]
        assert "most of them in 'seen'" in message
    finally:
        transport.shutdown()
