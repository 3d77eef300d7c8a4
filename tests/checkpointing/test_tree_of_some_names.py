"""A checkpoint's tree is decoded without what nobody asked for: what was asked for is the same as in all of it."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torchft_ckpt.checkpointing.state.containers import flattened
from torchft_ckpt.checkpointing.state.tree import TreeEncoder, as_places, decode_tree, only_with

keys = st.sampled_from(["a", "b", "a.b", "0"]) | st.integers(1, 3)
leaves = st.none() | st.integers() | st.just(torch.ones(2)) | st.tuples(st.integers(), st.just(torch.ones(3)))
states = st.dictionaries(
    keys,
    st.recursive(
        leaves,
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(keys, inner, max_size=4)
            | st.dictionaries(keys, inner, max_size=3).map(OrderedDict)
        ),
        max_leaves=12,
    ),
    max_size=4,
)


def leaves_in(tree: object) -> dict[str, str]:
    state: Any = decode_tree(tree, as_places(100))
    names = list(_names(state))
    if len(names) != len(set(names)):
        return {}  # {"a.b": 1, "a": {"b": 2}}: DCP has one name for both
    return {name: repr(leaf) for name, leaf in flattened(state)[0].items()}


def _names(value: Any, prefix: str = "") -> Any:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield f"{prefix}{key}"
        yield from _names(item, f"{prefix}{key}.")


@settings(max_examples=100, deadline=None, print_blob=True)
@given(states, st.data())
def test_what_is_asked_for_by_name_is_as_in_the_whole_tree(state: dict[Any, Any], data: st.DataObject) -> None:
    tree = TreeEncoder().encode(state)
    there = leaves_in(tree)
    asked = data.draw(st.sets(st.sampled_from(sorted(there)))) if there else set()

    few = leaves_in(only_with(tree, asked | {"not.there"}))

    assert {name: few.get(name) for name in asked} == {name: there[name] for name in asked}


def test_what_leads_to_no_name_is_left_out() -> None:
    model = {f"layer{number}": torch.ones(1) for number in range(100)}
    tree = TreeEncoder().encode({"model": model, "optimizer": {"state": model, "param_groups": [{"lr": 0.1}]}})

    few = decode_tree(only_with(tree, {"optimizer.param_groups.0.lr"}), as_places(100))

    assert few == {"optimizer": {"param_groups": [{"lr": 0.1}]}}
