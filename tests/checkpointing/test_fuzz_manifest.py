"""Fuzzes what is decoded before anything is trusted: manifests, runs of blocks. Read, or named; never slow, never big.

Deterministic: hypothesis derives its examples from the tests themselves.
"""

from __future__ import annotations

import contextlib
import copy
import enum
import itertools
import json
import time
import warnings
from collections import Counter, OrderedDict, defaultdict, deque
from datetime import date, datetime, timedelta, timezone
from decimal import Decimal
from pathlib import Path, PureWindowsPath
from typing import NamedTuple

import numpy as np
import pytest
import torch
from fault_matrix import peak_memory
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.thoroughness import by_default

from torchft_ckpt.checkpointing.fetching.receive import BufferCache, Destination
from torchft_ckpt.checkpointing.protocol import Index
from torchft_ckpt.checkpointing.resharding.plan import SourceGroup, plan_parts
from torchft_ckpt.checkpointing.state.blocks import format_runs, parse_mask, parse_runs
from torchft_ckpt.checkpointing.state.classes import register_state_class
from torchft_ckpt.checkpointing.state.dtypes import DTYPES
from torchft_ckpt.checkpointing.state.format import (
    FORMAT_NAME,
    FORMAT_VERSION,
    Manifest,
    build_manifest,
    decode_manifest,
    encode_manifest,
)
from torchft_ckpt.checkpointing.state.local_state import LocalState
from torchft_ckpt.checkpointing.state.space import plan_space
from torchft_ckpt.checkpointing.state.target import StateTarget
from torchft_ckpt.checkpointing.state.tree import TreeEncoder
from torchft_ckpt.cli import summary
from torchft_ckpt.errors import StateFormatError, StateMismatchError

MAX_TOTAL_BYTES = 1 << 20
MEMORY_BYTES = 96 * 1024 * 1024
pytestmark = pytest.mark.slow
FUZZ = settings(
    derandomize=True,
    deadline=timedelta(seconds=60),
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


class Pair(NamedTuple):
    left: int
    right: torch.Tensor


class Kind(enum.Enum):
    A = "a"
    B = 2


class Flags(enum.Flag):
    X = 1
    Y = 2
    Z = 4


for _kind in (Pair, Kind, Flags):
    register_state_class(_kind)


def rich_state() -> dict[object, object]:
    """Return a state that uses every kind of node and of chunk."""
    base = torch.arange(600, dtype=torch.float32)
    return {
        "views": (base, base[10:20], base.view(20, 30).t(), base[::2]),
        "empty": [torch.empty(0, 4), torch.tensor(1.5, dtype=torch.bfloat16), torch.ones(3, dtype=torch.bool)],
        "array": np.arange(12, dtype=np.int16).reshape(3, 4),
        1: {(1, ("a", None)): b"bytes", 2.5: 2**80, float("inf"): float("nan"), True: complex(1, -0.0)},
        "sets": [{1, "a", (2, None), Decimal("0.5")}, frozenset([b"x", torch.float32, Kind.A]), set()],
        "others": [
            *(
                OrderedDict(b=1, a=torch.ones(1)),
                defaultdict(list, k=[1]),
                deque([1, torch.ones(2)], 3),
                Pair(1, torch.ones(1)),
            ),
            *(Kind.B, Flags.X | Flags.Z, np.float32(0.1), np.bool_(True), bytearray(b"ab"), range(3), slice(None, 2)),
            *(datetime(2026, 1, 2, tzinfo=timezone.utc), date(1, 1, 1), timedelta(-1), torch.device("cuda:1")),
            *(Path("a/b"), PureWindowsPath("c:/d")),
        ],
        "more": [Counter("aab"), torch.Size([2, 0]), torch.float8_e4m3fn, None, -1, 0.1, "\u00e9\0"],
    }


def manifest_of(state: object, block_bytes: int = 4096) -> Manifest:
    encoder = TreeEncoder()
    tree = encoder.encode(state)
    space = plan_space(encoder.tensors)
    return build_manifest(step=3, snapshot="abc", block_bytes=block_bytes, tree=tree, space=space)


RICH = json.loads(encode_manifest(manifest_of(rich_state())))
RICH["tensors"][0]["layout"] = {
    "device": "cpu",
    "mesh": [1, 2],
    "names": ["a", "b"],
    "placements": [[], [0]],
    "stride": [1],
}
SMALL = json.loads(encode_manifest(manifest_of({"w": torch.arange(10.0), "v": [torch.ones(2, 8).t(), 1.5, None]})))


def read(data: bytes, *, is_looked_at: bool = False) -> bool:
    """Decode and put together; whether it could be read. Everything but the errors of what is received comes out.

    `is_looked_at`: `inspect` looks at it as well, and somebody receives it onto another layout.
    """
    try:
        manifest = decode_manifest(data, max_total_bytes=MAX_TOTAL_BYTES)
    except StateFormatError:
        return False
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls ComplexHalf experimental
        Destination(manifest, BufferCache()).assemble()  # by who only looks
    try:
        destination = Destination(manifest, BufferCache(), local=LocalState({}))
    except StateMismatchError as error:
        assert "register_state_class" in str(error) or "here" in str(error)  # noqa: PT017 - of classes, and of nothing else
        return False
    for block in range(destination.num_blocks):
        stop = min((block + 1) * manifest.block_bytes, manifest.total_bytes)
        assert sum(len(piece) for piece in destination.views(block)) == stop - block * manifest.block_bytes
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls ComplexHalf experimental
        destination.assemble()
    if is_looked_at:
        look_at_and_reshard(manifest)
    return True


def look_at_and_reshard(manifest: Manifest) -> None:
    index = Index(format=FORMAT_NAME, version=FORMAT_VERSION, newest_step=3, snapshots=[])
    group = SourceGroup(["peer"], [manifest])
    with warnings.catch_warnings(), contextlib.suppress(StateFormatError, StateMismatchError):
        warnings.simplefilter("ignore")
        summary.as_text("http://peer:1", index, manifest, 5)
        json.dumps(summary.as_json("http://peer:1", index, manifest, None))
        target = StateTarget(None)
        plan_parts(target.wants(group.description(0)), [group])
        target.finish(group.description(0))


@pytest.fixture(autouse=True, scope="module")
def _memory_is_bounded():
    with peak_memory() as peak:
        yield
    assert peak[0] < MEMORY_BYTES


def test_the_examples_that_are_changed_can_be_read() -> None:
    assert [read(json.dumps(manifest).encode()) for manifest in (RICH, SMALL)] == [True, True]


# Whole manifests

numbers = st.integers(-(2**70), 2**70) | st.sampled_from(
    [
        *(-(2**63), -64, -1, 0, 1, 2, 3, 4, 7, 16, 40, 63, 64, 65, 128, 4095, 4096, 4097, 2**20, 2**31, 2**32, 2**53),
        *(2**61, 2**62 - 1, 2**62, 2**62 + 1, 2**63 - 1, 2**63, 2**64, 2**70, 10**400),
    ]
)
floats = st.floats(allow_nan=False, allow_infinity=False) | st.sampled_from([-0.0, 1e308, 5e-324, 1.0])
texts = st.text(max_size=8) | st.sampled_from(
    [
        *("", "abc", "torchft_ckpt.state", "float32", "bits8", "int4", "complex32", "torch.float32", "os.system"),
        *(
            "\0",
            "\u00e9",
            "x",
            "t",
            "d",
            "0" * 16,
            "7ff0000000000000",
            "list",
            "posix",
            "cuda:1",
            "1E9",
            "A",
            f"{__name__}.Kind",
            "f" * 32,
            "-0x1",
            "1_0",
            " 1",
        ),
        *("YWJj", "YWJj\n", "9" * 5000, "q" * 70000),
    ]
)
scalars = st.none() | st.booleans() | numbers | floats | texts
tags = st.sampled_from(
    [
        *("x", "a", "t", "d", "n", "b", "s", "y", "i", "f", "c", "zz", "", "o", "default", "deque", "set", "frozenset"),
        *("named", "enum", "scalar", "decimal", "bytearray", "date", "time", "datetime", "timedelta", "timezone"),
        *("device", "path", "purepath", "range", "slice"),
    ]
)
nodes = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(tags, inner, max_size=2)
        | st.fixed_dictionaries({"d": st.lists(st.lists(inner, min_size=2, max_size=2), max_size=2)})
    ),
    max_leaves=8,
)


def places_of(document: object) -> list[tuple[object, object]]:
    """Return (container, key or index) of every value in a document."""
    found: list[tuple[object, object]] = []
    todo = [document]
    while todo:
        container = todo.pop()
        items = container.items() if isinstance(container, dict) else enumerate(container)  # type: ignore[arg-type]
        for key, value in list(items):
            found.append((container, key))
            if isinstance(value, (dict, list)):
                todo.append(value)
    return found


def mutate(data: st.DataObject, document: object) -> None:
    """Change one place: another value, another number near it, one less, one more, or two in each other's place."""
    places = places_of(document)
    container, key = places[data.draw(st.integers(0, len(places) - 1))]
    operation = data.draw(st.sampled_from(["replace", "nudge", "nudge", "delete", "double", "insert", "swap"]))
    value = container[key]  # type: ignore[index]
    if operation == "replace":
        container[key] = data.draw(nodes)  # type: ignore[index]
    elif operation == "nudge" and type(value) is int:
        container[key] = value + data.draw(st.sampled_from([-64, -8, -4, -1, 1, 4, 8, 64, value]))  # type: ignore[index]
    elif operation == "delete":
        del container[key]  # type: ignore[attr-defined]
    elif operation == "swap":
        other, other_key = places[data.draw(st.integers(0, len(places) - 1))]
        replaced = copy.deepcopy(other[other_key])  # type: ignore[index]
        other[other_key] = copy.deepcopy(value)  # type: ignore[index]
        container[key] = replaced  # type: ignore[index]
    elif isinstance(container, list):
        assert isinstance(key, int)
        container.insert(key, copy.deepcopy(value) if operation == "double" else data.draw(nodes))
    else:
        container[data.draw(tags | texts)] = data.draw(nodes)  # type: ignore[index]


@settings(FUZZ, max_examples=by_default(300, thorough=1500))
@given(st.data())
def test_a_manifest_changed_in_its_structure_is_read_or_named(data: st.DataObject) -> None:
    document = copy.deepcopy(data.draw(st.sampled_from([SMALL, RICH])))
    for _ in range(data.draw(st.integers(1, 3))):
        mutate(data, document)
    read(json.dumps(document).encode(), is_looked_at=True)


@settings(FUZZ, max_examples=by_default(150, thorough=500))
@given(nodes)
def test_any_tree_is_read_or_named(tree: object) -> None:
    manifest = {**SMALL, "total_bytes": 0, "segments": [], "tensors": [], "tree": tree}
    read(json.dumps(manifest).encode())


@settings(FUZZ, max_examples=by_default(100, thorough=300))
@given(st.integers(0, 40), st.sampled_from([*sorted(SMALL), "fqn", "sizes", "d", "x"]), nodes)
def test_a_member_that_is_there_twice_or_too_much_is_read_or_named(where: int, name: str, value: object) -> None:
    text = json.dumps(SMALL)
    for opening in [index for index, letter in enumerate(text) if letter == "{"][where % text.count("{") :][:1]:
        read(f"{text[: opening + 1]}{json.dumps(name)}:{json.dumps(value)},{text[opening + 1 :]}".encode())


@settings(FUZZ, max_examples=by_default(100, thorough=300))
@given(st.binary(max_size=200) | nodes.map(lambda node: json.dumps(node).encode()))
def test_what_is_no_manifest_is_named(data: bytes) -> None:
    assert not read(data)


@settings(FUZZ, max_examples=by_default(150, thorough=500))
@given(st.data())
def test_a_manifest_with_damaged_bytes_is_read_or_named(data: st.DataObject) -> None:
    raw = bytearray(json.dumps(data.draw(st.sampled_from([SMALL, RICH]))).encode())
    for _ in range(data.draw(st.integers(1, 4))):
        start = data.draw(st.integers(0, len(raw)))
        stop = start + data.draw(st.integers(0, 40))
        raw[start:stop] = data.draw(
            st.binary(max_size=4) | st.sampled_from([b"", b"[", b'"', b"1e999", b"NaN", b"\\ud800", b"\xff", b"-"])
        )
    read(bytes(raw))


# Tensors

dims = st.lists(st.sampled_from([0, 1, 2, 3, 5, 64, 2**31, 2**62]), max_size=4)


@settings(FUZZ, max_examples=by_default(200, thorough=800))
@given(
    dtype=st.sampled_from(sorted(DTYPES)),
    sizes=dims,
    strides=st.none() | dims,
    byte_offset=st.sampled_from([0, 0, 0, 1, 2, 16, 32, 2**62]),
    length=st.sampled_from(["fits", "fits", 0, 1, 30, 64, 2**62]),
    node=st.sampled_from(["x", "x", "a"]),
)
def test_any_tensor_is_put_together_or_refused_before_memory_is_taken(
    dtype: str, sizes: list[int], strides: list[int] | None, byte_offset: int, length: object, node: str
) -> None:
    itemsize = DTYPES[dtype].itemsize
    if strides is not None:
        strides = (strides + [1] * len(sizes))[: len(sizes)]
    span = sum((size - 1) * stride for size, stride in zip(sizes, strides or [], strict=False) if size)
    num_items = int(np.prod([int(size) for size in sizes], dtype=object))
    fits = byte_offset + (itemsize * (num_items if strides is None else span + 1) if num_items else 0)
    total = fits if length == "fits" else length
    assert isinstance(total, int)
    chunk = {"offsets": [0] * len(sizes), "sizes": sizes, "segment": 0, "byte_offset": byte_offset, "strides": strides}
    manifest = {
        **SMALL,
        "total_bytes": total,
        "segments": [[0, total]],
        "tensors": [{"fqn": "w", "dtype": dtype, "shape": sizes, "chunks": [chunk]}],
        "tree": {node: 0},
    }
    read(json.dumps(manifest).encode())


def test_an_array_of_a_dtype_that_numpy_has_not_is_refused_by_the_decoder() -> None:
    """Not when it is put together: by then, a state that is received in place has been overwritten."""
    decoded, known = [], []
    for name, dtype in DTYPES.items():
        chunk = {"offsets": [0], "sizes": [2], "segment": 0, "byte_offset": 0, "strides": None}
        manifest = {
            **SMALL,
            "total_bytes": 2 * dtype.itemsize,
            "segments": [[0, 2 * dtype.itemsize]],
            "tensors": [{"fqn": "w", "dtype": name, "shape": [2], "chunks": [chunk]}],
            "tree": {"a": 0},
        }
        with contextlib.suppress(TypeError), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch calls ComplexHalf experimental
            torch.empty(1, dtype=dtype).numpy()
            known.append(name)
        with contextlib.suppress(StateFormatError):
            decode_manifest(json.dumps(manifest).encode())
            decoded.append(name)
    assert decoded == known


# Size and time


@pytest.mark.parametrize(
    "tree",
    [
        b"[" * 1_000_000,
        b'{"t":[' * 200_000,
        b'{"d":[[' * 200_000,
        b'{"d":[[{"t":[' * 200_000,
        b"9" * 1_000_000,
        b"-" + b"9" * 4300,
        b"0." + b"1" * 1_000_000,
        b"1e" + b"9" * 1_000_000,
        b"1e-" + b"9" * 100_000,
        b'"' + b"\\u0041" * 300_000 + b'"',
        b'"' + b"\\ud83d" * 1000 + b'"',
        b'{"i":"' + b"f" * 4097 + b'"}',
        b'{"i":"' + b"f" * 1_000_000 + b'"}',
        b'{"b":"' + b"QUJD" * 300_000 + b'"}',
        b'{"s":[' + b"1," * 300_000 + b"1]}",
        b"[" + b"[]," * 200_000 + b"[]]",
        b'{"set":[' + b",".join(b"%d" % number for number in range(200_000)) + b"]}",
        b'{"frozenset":[' * 100_000,
        b'{"set":[{"named":["a",["b"],[' * 50_000,
        b'{"deque":[null,' * 100_000,
        b'{"decimal":"' + b"9" * 1_000_000 + b'"}',
        b'{"scalar":["float64","' + b"00" * 500_000 + b'"]}',
        b'{"bytearray":"' + b"QUJD" * 300_000 + b'"}',
        b"[" + b'{"t":[]},' * 100_000 + b"[]]",
        b"[" + b'{"x":0},' * 100_000 + b'{"x":1}]',
    ],
    ids=lambda tree: f"{tree[:12].decode()}-{len(tree)}",
)
def test_a_big_tree_is_read_or_named_in_time_and_memory_of_its_own_size(tree: bytes) -> None:
    data = json.dumps({**SMALL, "tree": "TREE"}).encode().replace(b'"TREE"', tree)
    started = time.thread_time()
    with peak_memory() as peak:
        read(data)
    assert (time.thread_time() - started < 10, peak[0] < MEMORY_BYTES) == (True, True)


def keyed(keys: list[object], tag: str = "d") -> bytes:
    tree = {tag: [[key, 0] for key in keys] if tag == "d" else keys}
    return json.dumps({**SMALL, "total_bytes": 0, "segments": [], "tensors": [], "tree": tree}).encode()


@pytest.mark.parametrize("kind", ["big integers", "tuples", "elements of a set"])
def test_keys_that_all_hash_alike_cost_no_more_than_others(kind: str) -> None:
    """Python's hash of numbers and tuples has no secret: a source could make a dict cost the square of its size."""
    count = 8192
    if kind == "elements of a set":
        alike = keyed([{"decimal": f"{index * (2**61 - 1)}"} for index in range(1, count + 1)], "set")
        others = keyed([{"decimal": f"{index * (2**61 + 1)}"} for index in range(1, count + 1)], "set")
    elif kind == "big integers":
        alike = keyed([{"i": f"{index * (2**61 - 1):x}"} for index in range(1, count + 1)])
        others = keyed([{"i": f"{index * (2**61 + 1):x}"} for index in range(1, count + 1)])
    else:
        alike = keyed([{"t": list(key)} for key in itertools.product((-1, -2), repeat=13)])
        others = keyed([{"t": list(key)} for key in itertools.product((-1, 7), repeat=13)])

    def took_s(data: bytes) -> float:
        started = time.thread_time()  # whatever else has the cores
        read(data)
        return time.thread_time() - started

    assert min(took_s(alike) for _ in range(2)) < 8 * min(took_s(others) for _ in range(3))


# Runs of blocks


@settings(FUZZ, max_examples=by_default(150, thorough=500))
@given(
    st.text(max_size=20)
    | st.text(alphabet="0123456789-,", max_size=40)
    | st.sampled_from(
        ["0-" + "9" * 18, "9" * 19, "0,", ",", "-", "1-0", "0\n", "\u0663", "0" * 18 + "-1", "+1", " 1", "1_0"]
    ),
    st.sampled_from([0, 1, 5, 10**12, 10**18]),
)
def test_any_text_is_runs_of_blocks_that_exist_or_a_value_error(text: str, num_blocks: int) -> None:
    try:
        runs = parse_runs(text, num_blocks)
    except ValueError:
        return
    assert [run for run in runs if not 0 <= run.start < run.stop <= num_blocks] == []


@settings(FUZZ, max_examples=by_default(100, thorough=200))
@given(st.sets(st.integers(0, 300)))
def test_runs_are_read_as_they_were_written(blocks: set[int]) -> None:
    text = format_runs(blocks)
    assert [block for run in parse_runs(text, 301) for block in run] == sorted(blocks)
    assert parse_mask(f"{text},{text}" if text else text, 301) == sum(1 << block for block in blocks), (
        "once, said twice"
    )
