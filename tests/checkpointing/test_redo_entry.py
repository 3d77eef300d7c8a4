"""An entry of a redo log is read as what it is, or named an error: before it takes memory, whatever bit of it is wrong."""

from __future__ import annotations

import json
from datetime import timedelta
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.redo import bits, carried, received, snapshot_of, version
from support.thoroughness import by_default

from torchft_ckpt.checkpointing.state.format import decode_manifest
from torchft_ckpt.checkpointing.state.redo_entry import (
    OptimizerStep,
    RedoEntry,
    check_entry,
    format_version,
    max_manifest_bytes,
    parse_version,
)
from torchft_ckpt.core.coordination.messages import StateVersion
from torchft_ckpt.errors import CheckpointError, StateFormatError, StateMismatchError

FUZZ = settings(
    max_examples=by_default(300, thorough=5000),
    derandomize=True,
    deadline=timedelta(seconds=2),
    database=None,
    suppress_health_check=[HealthCheck.too_slow],
)


def parameters() -> list[list[torch.Tensor]]:
    return [[torch.ones(3, 5), torch.ones(7), torch.ones(2, dtype=torch.bfloat16)], [torch.ones(())]]


def settings_of_all_kinds() -> dict[str, Any]:
    return {
        "lr": 0.1,
        "betas": (0.9, 0.999),
        "foreach": None,
        "fused": True,
        "name": "weights",
        "nested": [1, (2.5, float("inf"), -0.0)],
        "step_size": 2**70,
        "tensor": torch.tensor(3e-4, dtype=torch.float64),
        "of one": torch.ones(1, 1, dtype=torch.bfloat16),
    }


def example() -> RedoEntry:
    generator = torch.Generator().manual_seed(0)
    steps = [
        OptimizerStep(
            optimizer=0,
            settings=[[settings_of_all_kinds(), {"lr": 0.2}], []],
            attributes={"grad_scale": torch.tensor(8.0)},
            gradients=[torch.randn(3, 5, generator=generator), None, torch.ones(2, dtype=torch.bfloat16)],
        ),
        OptimizerStep(optimizer=1, settings=[[{"lr": 1}]], attributes={}, gradients=[torch.tensor(float("nan"))]),
        OptimizerStep(optimizer=1, settings=[[{"lr": 2}]], attributes={}, gradients=[None]),
    ]
    return RedoEntry(after=version(7), version=version(8), batches_committed=16, steps=steps)


def manifest_and_content(entry: RedoEntry) -> tuple[bytes, bytes]:
    snapshot = snapshot_of(entry)
    return snapshot.manifest_bytes(), snapshot.read(0, snapshot.total_bytes)


def leaves(entry: RedoEntry) -> list[object]:
    found: list[object] = [entry.after, entry.version, entry.batches_committed]
    for step in entry.steps:
        found += [step.optimizer, [[sorted(group) for group in groups] for groups in step.settings]]
        found += [group[key] for groups in step.settings for group in groups for key in sorted(group)]
        found += [*step.attributes.items(), *step.gradients]
    return found


def test_it_arrives_with_every_bit_and_type() -> None:
    entry = example()
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.SGD([torch.nn.Parameter(parameter) for parameter in own]) for own in parameters()
    ]
    assert bits(leaves(carried(entry, optimizers))) == bits(leaves(entry))


def test_a_step_that_no_optimizer_took_is_an_entry_without_tensors() -> None:
    entry = RedoEntry(after=version(1), version=version(2), batches_committed=4, steps=[])
    assert carried(entry, []) == entry


def test_versions_are_written_as_they_are_read() -> None:
    for one in (version(3), StateVersion(step=2, quorum_id=9, epoch="a.b c/é"), StateVersion(step=0)):
        assert parse_version(format_version(one)) == one
    for text in ("", "1", "1.2", "1.-2.e", "x.1.e", "1.2." + "e" * 65, "1" * 19 + ".1.e"):
        with pytest.raises(ValueError, match="is no version"):
            parse_version(text)


def changed(change: Any) -> bytes:
    """Return the manifest of the example with a change in it."""
    manifest = json.loads(manifest_and_content(example())[0])
    tree = {key: node for key, node in manifest["tree"]["d"]}
    change(manifest, tree)
    manifest["tree"] = {"d": list(tree.items())}
    return json.dumps(manifest).encode()


def _step(tree: dict[str, Any], number: int = 0) -> list[list[Any]]:
    return tree["steps"][number]["d"]


def _set(pairs: list[list[Any]], key: str, node: object) -> None:
    next(pair for pair in pairs if pair[0] == key)[1] = node


def _gradients(tree: dict[str, Any], number: int = 0) -> list[Any]:
    return next(node for key, node in _step(tree, number) if key == "gradients")


WRONG: dict[str, tuple[Any, type[CheckpointError], str]] = {
    "another after": (lambda m, t: t.update(after=[6, 2, "e"]), StateFormatError, "what follows on"),
    "two steps at once": (lambda m, t: t.update(version=[9, 2, "e"]), StateFormatError, "is said to be of step"),
    "an unproven version": (lambda m, t: t.update(version=[8, 0, "e"]), StateFormatError, "leads from"),
    "a step of the manifest": (lambda m, t: m.update(step=9), StateFormatError, "is said to be of step 9"),
    "a negative step": (lambda m, t: t.update(after=[-1, 2, "e"]), StateFormatError, "no entry of a redo log"),
    "one name more": (lambda m, t: t.update(more=1), StateFormatError, "no entry of a redo log"),
    "no steps": (lambda m, t: t.pop("steps"), StateFormatError, "in no place|no entry"),
    "an optimizer more": (lambda m, t: _set(_step(t), "optimizer", 2), StateMismatchError, "2 are guarded here"),
    "a gradient less": (lambda m, t: _gradients(t, 1).clear(), StateFormatError, "in no place of the tree"),
    "a null more": (lambda m, t: _gradients(t).append(None), StateMismatchError, "has 4 parameters at the source"),
    "an attribute": (
        lambda m, t: _set(_step(t), "attributes", {"d": [["step", 1]]}),
        StateFormatError,
        "in no place|sets attributes",
    ),
    "a number for a gradient": (lambda m, t: _gradients(t).__setitem__(1, 5), StateFormatError, "no tensor"),
    "one gradient for two": (
        lambda m, t: _gradients(t).__setitem__(1, _gradients(t)[0]),
        StateFormatError,
        "that of two parameters",
    ),
    "gradients in another order": (
        lambda m, t: _gradients(t).reverse(),
        StateMismatchError,
        "the gradient of parameter",
    ),
    "a setting that is a set": (
        lambda m, t: _set(_step(t, 2), "settings", [[{"d": [["lr", {"set": [1]}]]}]]),
        StateFormatError,
        "a setting of set",
    ),
    "a setting that is a gradient": (
        lambda m, t: _set(_step(t, 2), "settings", [[{"d": [["lr", _gradients(t)[0]]]}]]),
        StateFormatError,
        "a tensor of several elements",
    ),
    "a tensor for a step": (
        lambda m, t: t["steps"].append(_gradients(t)[0]),
        StateFormatError,
        "no entry of a redo log",
    ),
    "a deep setting": (
        lambda m, t: _set(_step(t, 2), "settings", [[{"d": [["lr", [[[[[[1]]]]]]]]}]]),
        StateFormatError,
        "a setting of list",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_named(name: str) -> None:
    change, error, said = WRONG[name]
    with pytest.raises(error, match=said):
        check_entry(decode_manifest(changed(change)), parameters(), version(7))


def test_a_few_bytes_cannot_take_much_memory() -> None:
    """A gradient that begins a quarter of a terabyte into its segment, and one with strides, which could lead as far."""
    wide = 1 << 38

    def spread(manifest: dict[str, Any], tree: dict[str, Any], **place: Any) -> None:
        last = max(range(len(manifest["tensors"])), key=lambda at: manifest["tensors"][at]["chunks"][0]["segment"])
        chunk = manifest["tensors"][last]["chunks"][0]
        offset = manifest["segments"][-1][0]
        manifest["segments"][-1] = [offset, place.pop("length")]
        manifest["total_bytes"] = sum(manifest["segments"][-1])
        chunk.update(place)

    for place in ({"byte_offset": wide, "length": wide + 4}, {"strides": [], "length": 4}):
        with pytest.raises(StateFormatError, match=r"not in C order|several elements"):
            check_entry(
                decode_manifest(changed(lambda m, t, place=place: spread(m, t, **place))), parameters(), version(7)
            )


def test_a_manifest_has_room_for_each_parameter_and_not_for_any_number_of_names() -> None:
    many = [[torch.ones(1)] * 5000]
    entry = RedoEntry(
        after=version(1),
        version=version(2),
        batches_committed=1,
        steps=[
            OptimizerStep(
                optimizer=0,
                settings=[[settings_of_all_kinds()] * 5000],
                attributes={},
                gradients=[torch.ones(1) for _ in range(5000)],
            )
        ],
    )
    assert len(snapshot_of(entry).manifest_bytes()) < max_manifest_bytes(many)


MANIFEST, CONTENT = manifest_and_content(example())
NODES = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(-(2**70), 2**70),
        st.floats(allow_nan=False, allow_infinity=False),
        st.text(max_size=5),
        st.fixed_dictionaries({"x": st.integers(-1, 12)}),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(st.sampled_from(["t", "d", "x", "a", "f", "i", "named", "set"]), inner, max_size=2),
    ),
    max_leaves=6,
)


def _places(node: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    found = [path]
    for key, item in node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ():
        found += _places(item, (*path, key))
    return found


PLACES = _places(json.loads(MANIFEST))[1:]


def read_or_named(manifest: bytes, content: bytes) -> RedoEntry | None:
    try:
        return received(manifest, content, parameters(), version(7))
    except CheckpointError:
        return None


@pytest.mark.slow
@FUZZ
@given(st.sampled_from(PLACES), NODES)
def test_any_other_node_in_any_place_is_read_or_named(place: tuple[Any, ...], node: object) -> None:
    manifest = json.loads(MANIFEST)
    at = manifest
    for key in place[:-1]:
        at = at[key]
    at[place[-1]] = node
    entry = read_or_named(json.dumps(manifest).encode(), CONTENT + bytes(1 << 16))
    if entry is not None:  # what is read fits
        for step in entry.steps:
            for parameter, gradient in zip(parameters()[step.optimizer], step.gradients, strict=True):
                assert gradient is None or (gradient.shape, gradient.dtype) == (parameter.shape, parameter.dtype)


@pytest.mark.slow
@FUZZ
@given(st.integers(0, 8 * len(MANIFEST) - 1))
def test_any_flipped_bit_of_a_manifest_is_read_or_named(bit: int) -> None:
    """Over the wire it is named in any case: the manifest has a digest."""
    flipped = bytearray(MANIFEST)
    flipped[bit // 8] ^= 1 << bit % 8
    read_or_named(bytes(flipped), CONTENT + bytes(1 << 16))
