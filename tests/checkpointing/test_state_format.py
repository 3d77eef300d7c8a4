"""Any ordinary state survives the format in type and in every bit, and is sent once where memory is shared."""

from __future__ import annotations

import enum
import math
import struct
from collections import Counter, OrderedDict, UserDict, defaultdict, deque
from datetime import date, datetime, time, timedelta, timezone
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torchft_ckpt.checkpointing.fetching.receive import BufferCache, Destination
from torchft_ckpt.checkpointing.lock import StateDictLock
from torchft_ckpt.checkpointing.serving.buffers import BufferPool
from torchft_ckpt.checkpointing.serving.snapshot import Snapshot
from torchft_ckpt.checkpointing.state.blocks import block_range, digest_of, start_digest
from torchft_ckpt.checkpointing.state.dtypes import DTYPES
from torchft_ckpt.checkpointing.state.format import decode_manifest
from torchft_ckpt.checkpointing.state.local_state import LocalState
from torchft_ckpt.checkpointing.state.memory import SLICE_BYTES
from torchft_ckpt.checkpointing.state.tree import MAX_DEPTH
from torchft_ckpt.errors import UnsupportedValueError
from torchft_ckpt.testing.transport_conformance import differences

BLOCK_BYTES = 4096


def snapshot_of(state: object) -> Snapshot:
    return Snapshot(
        state, step=1, lock=StateDictLock(timedelta(seconds=60)), pool=BufferPool(BLOCK_BYTES), num_expected=1
    )


def round_trip(state: object, here: object = None) -> Any:
    """Send a state through manifest and blocks, without a network. `here`: what the receiver has, if it has something."""
    snapshot = snapshot_of(state)
    local = LocalState({} if here is None else here)
    destination = Destination(decode_manifest(snapshot.manifest_bytes()), BufferCache(), local=local)
    for block in range(snapshot.num_blocks):
        data = memoryview(snapshot.read(*block_range(block, snapshot.total_bytes, BLOCK_BYTES)))
        taken = 0

        def read_into(target: memoryview) -> None:
            nonlocal taken
            target[:] = data[taken : taken + len(target)]  # noqa: B023 - called in this turn of the loop
            taken += len(target)

        hasher = start_digest(block)
        destination.receive(block, read_into, memoryview(bytearray(SLICE_BYTES)), hasher.update)
        assert (taken, hasher.digest()) == (len(data), digest_of(block, data))
    return destination.assemble()


def bits(value: float) -> bytes:
    return struct.pack(">d", value)


keys = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5) | st.floats(allow_nan=False),
    lambda inner: st.lists(inner, max_size=2).map(tuple),
    max_leaves=3,
)
tensors = st.builds(
    lambda dtype, shape, seed: (
        torch.randint(
            0,
            256,
            (math.prod(shape) * dtype.itemsize,),
            dtype=torch.uint8,
            generator=torch.Generator().manual_seed(seed),
        )
        .view(dtype)
        .reshape(shape)
    ),
    st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.float8_e4m3fn, torch.complex64]),
    st.lists(st.integers(0, 40), max_size=3).map(lambda shape: shape if math.prod(shape) else [0]),
    st.integers(0, 2**32),
)
leaves = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.complex_numbers()
    | st.text()
    | st.binary(max_size=50)
    | tensors
    | st.sampled_from(list(DTYPES.values()))
    | st.lists(st.integers(0, 2**40), max_size=4).map(torch.Size)
)
zones = st.none() | st.builds(
    timezone, st.timedeltas(timedelta(hours=-23), timedelta(hours=23)), st.text(max_size=3).filter(str.isprintable)
)
scalars = (
    st.datetimes(timezones=zones)
    | st.times(timezones=zones)
    | st.dates()
    | st.timedeltas()
    | st.decimals(allow_nan=False)
    | st.sampled_from([torch.device("cpu"), torch.device("cuda", 3), torch.device("meta"), timezone.utc])
    | st.builds(range, st.integers(-5, 5), st.integers(-(2**40), 2**40), st.integers(1, 3))
    | st.sampled_from([Path("a/../b"), PurePosixPath("/x"), PureWindowsPath("c:\\y"), np.float32(0.1), np.int8(-3)])
    | st.builds(np.float64, st.floats())
    | st.builds(np.complex64, st.complex_numbers(max_magnitude=1e6))
)
elements = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.text(max_size=5)
    | st.binary(max_size=5)
    | scalars.filter(lambda value: value == value),
    lambda inner: st.lists(inner, max_size=2).map(tuple) | st.frozensets(inner, max_size=2),
    max_leaves=4,
)
trees = st.recursive(
    leaves | scalars | st.binary(max_size=5).map(bytearray),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(keys, inner, max_size=4)
        | st.dictionaries(keys, inner, max_size=4).map(OrderedDict)
        | st.dictionaries(keys, inner, max_size=4).map(lambda items: defaultdict(list, items))
        | st.lists(inner, max_size=4).map(deque)
    ),
    max_leaves=20,
)


@pytest.mark.slow
@settings(max_examples=150, deadline=None, print_blob=True)
@given(trees)
def test_any_tree_arrives_equal_in_type_and_in_every_bit(tree):
    assert differences(round_trip(tree), tree) == []


@pytest.mark.parametrize("value", [math.nan, -math.nan, math.inf, -math.inf, -0.0, 5e-324, 0.1, 1e300, 1e22, 1.0])
def test_floats_arrive_with_all_their_bits(value):
    assert bits(round_trip(value)) == bits(value)


@pytest.mark.parametrize("value", [2**63 - 1, -(2**63), 2**63, 2**64, -(2**200), True, 0])
def test_integers_of_any_size_arrive(value):
    received = round_trip(value)
    assert (type(received), received) == (type(value), value)


@pytest.mark.parametrize("name", sorted(DTYPES))
def test_every_dtype_arrives_in_every_shape(name):
    dtype = DTYPES[name]
    raw = torch.arange(96 * dtype.itemsize).to(torch.uint8) & 1
    whole = torch.empty(0, dtype=dtype).set_(raw.untyped_storage(), 0, (4, 4, 6), (24, 6, 1))
    state = [whole.clone() if dtype.itemsize > 8 else whole, torch.empty((0, 3), dtype=dtype)]
    for sent, received in zip(state, round_trip(state), strict=True):
        assert (received.dtype, received.shape) == (sent.dtype, sent.shape)
        assert storage_bytes(received) == storage_bytes(sent)


def storage_bytes(tensor: torch.Tensor) -> bytes:
    start = tensor.storage_offset() * tensor.element_size()
    return bytes(tensor.untyped_storage())[start : start + tensor.numel() * tensor.element_size()]


@pytest.mark.parametrize(
    "make",
    [
        lambda base: base.t(),
        lambda base: base[:, ::3],
        lambda base: base[5:60:7, 3],
        lambda base: base.view(20, 5, 10, 3).permute(3, 1, 0, 2),
        lambda base: base[0, 0],
        lambda base: base[:0],
        lambda base: base[:1].expand(40, -1),
        lambda base: base.unflatten(0, (10, 10)).transpose(0, 1)[2:7],
    ],
)
def test_strided_views_arrive_by_value(make):
    view = make(torch.randn(100, 30))
    received = round_trip({"v": view})["v"]
    assert torch.equal(received, view)


def test_conjugate_and_negative_views_arrive_by_value():
    value = torch.randn(30, dtype=torch.complex64).conj()
    received = round_trip([value, value.imag])
    assert torch.equal(received[0], value.resolve_conj()) and torch.equal(received[1], value.imag)


def test_tied_weights_are_sent_once_and_tied_again():
    weight = torch.nn.Parameter(torch.randn(64, 64))
    snapshot = snapshot_of({"embed": weight, "head": weight})
    received = round_trip({"embed": weight, "head": weight})
    received["embed"][0, 0] = 7
    assert (snapshot.total_bytes, received["head"][0, 0].item()) == (64 * 64 * 4, 7)


def test_overlapping_views_are_sent_once_and_still_overlap():
    base = torch.arange(1000, dtype=torch.float32)
    state = {
        "all": base,
        "tail": base[900:],
        "square": base[:400].view(20, 20).t(),
        "bits": base[10:20].view(torch.int32),
    }
    received = round_trip(state)
    assert differences(received, state) == []
    received["all"].zero_()
    assert all(not tensor.any() for tensor in received.values())
    assert snapshot_of(state).total_bytes == 4000


def test_disjoint_views_of_one_storage_do_not_send_what_lies_between_them():
    base = torch.randn(100_000)
    assert snapshot_of([base[:10], base[-10:]]).total_bytes == 64 + 40


def test_views_of_different_item_sizes_that_overlap_at_odd_places_arrive():
    base = torch.arange(64, dtype=torch.uint8)
    state = [base[3:40], base[8:24].view(torch.float64), base[20:60]]
    assert differences(round_trip(state), state) == []


@settings(max_examples=100, deadline=None, print_blob=True)
@given(st.sets(elements, max_size=6) | st.frozensets(elements, max_size=6))
def test_any_set_arrives_as_the_set_it_was(values):
    received = round_trip({"set": values})["set"]
    assert (type(received), received) == (type(values), values)


def test_containers_arrive_as_the_classes_that_they_were():
    state = {
        "o": OrderedDict(b=1, a=2),
        "d": defaultdict(list, b=[2]),
        "e": defaultdict(None, b=[2]),
        "c": Counter({30: 2}),
        "q": deque([torch.ones(2), {"x": 1}], maxlen=3),
        "s": torch.Size([2, 3]),
        "r": [slice(1, None, -1), range(4), bytearray(b"\0x"), timedelta(-3), date(2026, 1, 1), time(3, fold=1)],
        "n": [np.float64(0.5), np.int16(-4), np.bool_(True)],
    }
    received = round_trip(state)
    assert differences(list(received["q"]), list(state["q"])) == []
    assert (received["q"].maxlen, received["d"].default_factory, received["e"].default_factory) == (3, list, None)
    for name in ("o", "d", "e", "c", "s", "r", "n"):
        assert (type(received[name]), repr(received[name])) == (type(state[name]), repr(state[name]))
    assert [type(value) for value in received["n"]] == [np.float64, np.int16, np.bool_]


def test_a_defaultdict_with_a_function_of_ones_own_arrives_as_a_dict():
    received = round_trip(defaultdict(lambda: 5, a=1))
    assert (type(received), received) == (dict, {"a": 1})


def test_the_versions_of_a_models_modules_arrive_with_its_state():
    """Modules that load an old version of their state convert it: without the version they would convert that of today."""

    class Versioned(torch.nn.Linear):
        _version = 7

        def _load_from_state_dict(self, state_dict, prefix, local_metadata, *rest):
            self.loaded_version = local_metadata.get("version")
            super()._load_from_state_dict(state_dict, prefix, local_metadata, *rest)

    model = torch.nn.Sequential(Versioned(2, 2))
    model.load_state_dict(round_trip(model.state_dict()))
    assert model[0].loaded_version == 7


def test_a_zone_whose_rules_are_in_a_file_is_refused_by_its_path():
    zone = pytest.importorskip("zoneinfo").ZoneInfo
    try:
        berlin = zone("Europe/Berlin")
    except LookupError:
        pytest.skip("this machine has no time zones")
    with pytest.raises(UnsupportedValueError, match="no fixed offset") as caught:
        snapshot_of({"t": [datetime(2026, 1, 1, tzinfo=berlin)]})
    assert caught.value.party == "t.0"


def test_numpy_arrays_arrive_as_arrays():
    name, state, *rest = np.random.RandomState(3).get_state()
    received = round_trip({"rng": (name, state, *rest), "f": np.asfortranarray(np.arange(6.0).reshape(2, 3))})
    assert type(received["rng"][1]) is np.ndarray and np.array_equal(received["rng"][1], state)
    assert received["rng"][1].dtype == state.dtype and np.array_equal(received["f"], np.arange(6.0).reshape(2, 3))


def test_a_trained_model_with_optimizer_scheduler_and_rng_arrives_and_loads():
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(9, 5), torch.nn.BatchNorm1d(5), torch.nn.Linear(5, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    schedulers = [
        torch.optim.lr_scheduler.MultiStepLR(optimizer, [3, 3, 8]),
        torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 5),
    ]
    for _ in range(4):
        model(torch.randn(6, 9)).sum().backward()
        optimizer.step()
        for scheduler in schedulers:
            scheduler.step()
    state = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "schedulers": [scheduler.state_dict() for scheduler in schedulers],
        "rng": torch.get_rng_state(),
    }
    received = round_trip(state)
    assert differences(received, {**state, "model": dict(state["model"])}) == []
    model.load_state_dict(received["model"])
    optimizer.load_state_dict(received["optimizer"])
    schedulers[0].load_state_dict(received["schedulers"][0])
    torch.set_rng_state(received["rng"])


class Colour(enum.IntEnum):
    RED = 1


class Mode(enum.IntFlag):
    FAST = 1
    EXACT = 2


@pytest.mark.parametrize(
    ("value", "path"),
    [
        ({"a": [1, {"b": object()}]}, "a.1.b"),
        ({"a": lambda: None}, "a"),
        ({"a": {1, object}}, "a"),
        ({"a": {torch.ones(1)}}, "a"),
        ({"a": UserDict(b=1)}, "a"),
        ({"a": Mode(4)}, "a"),
        ({"k": {Colour.RED: 1}}, "k"),
        ({"a": "\ud800"}, "a"),
        ({"k": {b"bytes": 1}}, "k"),
        ({"s": torch.eye(3).to_sparse()}, "s"),
        ({"m": torch.empty(3, device="meta")}, "m"),
        ({"q": np.array([object()])}, "q"),
        ({"u": np.array(["text"])}, "u"),
        ({"big": 1 << 20_000}, "big"),
    ],
)
def test_what_cannot_be_carried_is_refused_by_its_path(value, path):
    with pytest.raises(
        UnsupportedValueError, match=r"cannot be carried|keys can be|not valid Unicode|without a name"
    ) as caught:
        snapshot_of(value)
    assert caught.value.party == path


def test_a_container_that_holds_itself_is_refused():
    loop: list[object] = []
    loop.append(loop)
    with pytest.raises(UnsupportedValueError, match="nested deeper"):
        snapshot_of({"x": loop})


def test_the_deepest_tree_that_is_sent_is_also_read():
    state: object = torch.ones(2)
    for _ in range(MAX_DEPTH):
        state = {"k": state}
    assert differences(round_trip(state), state) == []


def test_opening_a_snapshot_leaves_the_storages_resizable():
    tensor = torch.randn(1000)
    snapshot_of([tensor]).read(0, 4000)
    tensor.untyped_storage().resize_(0)
    assert tensor.untyped_storage().nbytes() == 0
