"""One hostile manifest for each MUST of the state format; none is more than a `StateFormatError`."""

from __future__ import annotations

import copy
import json
import math
import tracemalloc

import pytest

from torchft_ckpt.checkpointing.fetching.receive import BufferCache, Destination
from torchft_ckpt.checkpointing.state.format import decode_manifest
from torchft_ckpt.errors import StateFormatError

GOOD = {
    "format": "torchft_ckpt.state",
    "version": 4,
    "step": 3,
    "snapshot": "abc",
    "block_bytes": 4096,
    "total_bytes": 128,
    "segments": [[0, 40], [64, 64]],
    "tensors": [
        {
            "fqn": "w",
            "dtype": "float32",
            "shape": [2, 5],
            "chunks": [{"offsets": [0, 0], "sizes": [2, 5], "segment": 0, "byte_offset": 0, "strides": None}],
        },
        {
            "fqn": "v",
            "dtype": "int64",
            "shape": [16],
            "chunks": [{"offsets": [8], "sizes": [8], "segment": 1, "byte_offset": 0, "strides": [1]}],
        },
    ],
    "elsewhere": {"hosts": ["10.1.0.5", "fd00::5"], "key": "0" * 32},
    "tree": {"d": [["w", {"x": 0}], ["v", [{"x": 1}, 1.5, None]]]},
}


LAYOUT = {"device": "cpu", "mesh": [2], "names": None, "placements": [[0]], "stride": [5, 1]}


def changed(path: str, value: object) -> bytes:
    """Return the good manifest with one place changed."""
    manifest = copy.deepcopy(GOOD)
    *parents, last = path.split("/")
    place = manifest
    for name in parents:
        place = place[int(name) if isinstance(place, list) else name]
    place[int(last) if isinstance(place, list) else last] = value
    return json.dumps(manifest).encode()


CHUNK = "tensors/0/chunks/0"


def sharded(num_tensors: int, boxes: list[tuple[list[int], list[int]]], shape: list[int], itemsize: int) -> bytes:
    """Tensors of several boxes each, all of them in the same segment."""
    length = max(itemsize * math.prod(sizes) for _, sizes in boxes)
    chunks = [
        {"offsets": offsets, "sizes": sizes, "segment": 0, "byte_offset": 0, "strides": None}
        for offsets, sizes in boxes
    ]
    tensors = [
        {"fqn": f"w{number}", "dtype": "uint8", "shape": shape, "chunks": chunks} for number in range(num_tensors)
    ]
    tree = {"d": [[f"w{number}", {"x": number}] for number in range(num_tensors)]}
    changes = {"total_bytes": length, "segments": [[0, length]], "tensors": tensors, "tree": tree}
    return json.dumps({**GOOD, **changes}).encode()


def test_boxes_that_share_their_bytes_do_not_make_up_more_memory_than_there_are_bytes():
    columns = [([number * 1024], [1024]) for number in range(64)]
    with pytest.raises(StateFormatError, match="in a byte space of 1024"):
        decode_manifest(sharded(300, columns, [64 * 1024], 1))
    decode_manifest(sharded(2, columns[:2], [2048], 1))  # tied, and sharded over two devices


@pytest.mark.slow
def test_boxes_take_no_longer_to_compare_than_a_second_or_two():
    """No dimension tells all of them apart, so each is compared with each."""
    places = [(row, column) for row in range(8) for column in range(8)]
    grid = [([row, column, *[0] * 40], [1, 1, *[1] * 40]) for row, column in places]
    with pytest.raises(StateFormatError, match="too many boxes to compare"):
        decode_manifest(sharded(500, grid, [8, 8, *[1] * 40], 1))
    rows = [([number, *[0] * 40], [1, *[1] * 40]) for number in range(4)]
    decode_manifest(sharded(1, rows, [4, *[1] * 40], 1))


def test_the_good_manifest_is_read():
    destination = Destination(decode_manifest(json.dumps(GOOD).encode()), BufferCache())
    state = destination.assemble()
    assert (state["w"].shape, state["v"][0].shape) == ((2, 5), (8,))


@pytest.mark.parametrize(
    ("path", "value", "complaint"),
    [
        ("format", "pickle", "not a state manifest"),
        ("version", 1, "run one version on both"),
        ("version", 3, "run one version on both"),
        ("elsewhere", ["10.1.0.5"], "cannot be read"),
        ("elsewhere/hosts", [f"10.1.0.{number}" for number in range(9)], "cannot be read"),
        ("elsewhere/hosts", ["1" * 46], "cannot be read"),
        ("elsewhere/hosts", ["10.1.0.5", "10.1.0.5"], "hosts that are none of a server"),
        ("elsewhere/hosts/0", "metadata.internal", "hosts that are none of a server"),
        ("elsewhere/hosts/0", "127.0.0.1", "hosts that are none of a server"),
        ("elsewhere/hosts/0", "169.254.169.254", "hosts that are none of a server"),
        ("elsewhere/hosts/0", "10.1.0.5:80", "hosts that are none of a server"),
        ("elsewhere/key", "0" * 31, "cannot be read"),
        ("elsewhere/key", "0" * 31 + "\n", "cannot be read"),
        ("elsewhere/port", 80, "cannot be read"),
        ("step", -1, "cannot be read"),
        ("step", 2**70, "cannot be read"),
        ("snapshot", "a/../b", "cannot be read"),
        ("snapshot", "", "cannot be read"),
        ("snapshot", 'x"\r\nHeader: 1', "cannot be read"),
        ("block_bytes", 0, "cannot be read"),
        ("block_bytes", 1, "cannot be read"),
        ("block_bytes", 2**40, "cannot be read"),
        ("total_bytes", 129, "segments end at"),
        ("total_bytes", -1, "cannot be read"),
        ("segments", [[0, 40], [40, 64]], "overlap or hole"),
        ("segments", [[0, 40], [128, 64]], "overlap or hole"),
        ("segments", [[64, 40], [128, 64]], "overlap or hole"),
        ("segments", [[0, -40], [64, 64]], "cannot be read"),
        ("segments", [[0, 40], [64, 64], [128, 0]], "no tensor reaches"),
        ("segments", [[0, 10**15], [10**15, 64]], "segments end at"),
        ("segments/0", [0, 41], "no tensor reaches"),
        ("segments/0", [0, 39], "its segment 39"),
        ("segments", 5, "cannot be read"),
        ("tensors/0/dtype", "float33", "unknown dtype"),
        ("tensors/0/dtype", "os.system", "unknown dtype"),
        ("tensors/0/dtype", "qint8", "unknown dtype"),
        ("tensors/0/dtype", "float64", "has 80 bytes"),
        ("tensors/0/shape", [2], "differ in length"),
        ("tensors/0/shape", [2, 4], "not within its shape"),
        ("tensors/0/shape", [-2, 5], "cannot be read"),
        ("tensors/0/shape", [1] * 65, "cannot be read"),
        ("tensors/0/chunks", [], "no tensor reaches"),
        ("tensors/0/layout", {"mesh": [2]}, "cannot be read"),
        ("tensors/0/layout", {**LAYOUT, "mesh": [1] * 9}, "cannot be read"),
        ("tensors/0/layout", {**LAYOUT, "mesh": []}, "cannot be read"),
        ("tensors/0/layout", {**LAYOUT, "placements": [[-1]]}, "cannot be read"),
        ("tensors/0/layout", {**LAYOUT, "names": ["x" * 65]}, "cannot be read"),
        ("tensors/0/layout", {**LAYOUT, "group": "default"}, "cannot be read"),
        ("tensors/0/chunks", [GOOD["tensors"][0]["chunks"][0]] * 2, "two of its boxes overlap"),
        (f"{CHUNK}/sizes", [2, -5], "cannot be read"),
        (f"{CHUNK}/sizes", [2, 4], "no tensor reaches"),
        (f"{CHUNK}/sizes", [2**61, 2**61], "not within its shape"),
        (f"{CHUNK}/offsets", [1, 0], "not within its shape"),
        (f"{CHUNK}/offsets", [-1, 0], "cannot be read"),
        (f"{CHUNK}/segment", 2, "does not exist"),
        (f"{CHUNK}/segment", -1, "cannot be read"),
        (f"{CHUNK}/byte_offset", 4, "beyond its segment"),
        (f"{CHUNK}/byte_offset", 2, "not aligned"),
        (f"{CHUNK}/byte_offset", -4, "cannot be read"),
        (f"{CHUNK}/strides", [5], "differ in length"),
        (f"{CHUNK}/strides", [6, 1], "beyond its segment"),
        (f"{CHUNK}/strides", [-5, 1], "cannot be read"),
        (f"{CHUNK}/strides", [2**62, 1], "beyond its segment"),
        (f"{CHUNK}/strides", [0, 0], "no tensor reaches"),
        (f"{CHUNK}/surprise", 1, "cannot be read"),
        ("surprise", 1, "cannot be read"),
        ("tree", {"x": 0}, "in no place of the tree"),
        ("tree", [{"x": 0}, {"x": 2}], "there are 2"),
        ("tree", [{"x": 0}, {"x": -1}], "there are 2"),
        ("tree", [{"x": 0}, {"x": True}], "there are 2"),
        ("tree", [{"x": 0}, {"x": "1"}], "there are 2"),
        ("tree", [{"x": 0}, {"x": 1}, {"pickle": "gASVA"}], "unknown node"),
        ("tree", [{"x": 0}, {"x": 1}, {}], "one tag"),
        ("tree", [{"x": 0}, {"x": 1}, {"t": [], "d": []}], "one tag"),
        ("tree", [{"x": 0}, {"x": 1}, {"t": 5}], "not a list"),
        ("tree", [{"x": 0}, {"x": 1}, {"d": [["a"]]}], "not a pair"),
        ("tree", [{"x": 0}, {"x": 1}, {"d": [["a", 1], ["a", 2]]}], "twice"),
        ("tree", [{"x": 0}, {"x": 1}, {"d": [[{"x": 0}, 1]]}], "a key has the tag"),
        ("tree", [{"x": 0}, {"x": 1}, {"d": [[[1], 1]]}], "one tag"),
        ("tree", [{"x": 0}, {"x": 1}, {"b": "not base64!"}], "cannot be read"),
        ("tree", [{"x": 0}, {"x": 1}, {"f": "zz"}], "unknown node"),
        ("tree", [{"x": 0}, {"x": 1}, {"o": [[]]}], "not of that length"),
        ("tree", [{"x": 0}, {"x": 1}, {"o": [[], 5]}], "metadata"),
        ("tree", [{"x": 0}, {"x": 1}, {"default": ["eval", []]}], "unknown factory"),
        ("tree", [{"x": 0}, {"x": 1}, {"default": [["list"], []]}], "unknown factory"),
        ("tree", [{"x": 0}, {"x": 1}, {"deque": [1, [1, 2]]}], "more items than it takes"),
        ("tree", [{"x": 0}, {"x": 1}, {"deque": [2**63, []]}], "more items than it takes"),
        ("tree", [{"x": 0}, {"x": 1}, {"set": [{"x": 0}]}], "element of a set"),
        ("tree", [{"x": 0}, {"x": 1}, {"set": [[]]}], "element of a set"),
        ("tree", [{"x": 0}, {"x": 1}, {"set": [{"t": [{"d": []}]}]}], "element of a set"),
        ("tree", [{"x": 0}, {"x": 1}, {"frozenset": [{"decimal": "sNaN"}]}], "cannot be one"),
        ("tree", [{"x": 0}, {"x": 1}, {"decimal": "1e"}], "cannot be read"),
        ("tree", [{"x": 0}, {"x": 1}, {"decimal": "1E+99999999999999999999"}], "cannot be read"),
        ("tree", [{"x": 0}, {"x": 1}, {"decimal": "1" * 5000}], "cannot be read"),
        ("tree", [{"x": 0}, {"x": 1}, {"datetime": [2026, 13, 1, 0, 0, 0, 0, 0, None]}], "cannot be read"),
        ("tree", [{"x": 0}, {"x": 1}, {"datetime": [2026, 1, 1]}], "cannot be read"),
        ("tree", [{"x": 0}, {"x": 1}, {"timezone": [10**15, None]}], "cannot be read"),
        ("tree", [{"x": 0}, {"x": 1}, {"timezone": "Europe/Berlin"}], "cannot be read"),
        ("tree", [{"x": 0}, {"x": 1}, {"timedelta": [10**18, 0, 0]}], "cannot be read"),
        ("tree", [{"x": 0}, {"x": 1}, {"device": "cuda:0; import os"}], "cannot be read"),
        ("tree", [{"x": 0}, {"x": 1}, {"device": "toaster"}], "cannot be read"),
        ("tree", [{"x": 0}, {"x": 1}, {"device": "cuda:999"}], "cannot be read"),
        ("tree", [{"x": 0}, {"x": 1}, {"scalar": ["float64", "00"]}], "cannot be read"),
        ("tree", [{"x": 0}, {"x": 1}, {"scalar": ["object", "00" * 8]}], "cannot be read"),
        ("tree", [{"x": 0}, {"x": 1}, {"scalar": ["bool", "02"]}], "cannot be read"),
        ("tree", [{"x": 0}, {"x": 1}, {"range": [0, 1, 0]}], "cannot be read"),
        ("tree", [{"x": 0}, {"x": 1}, {"slice": [0, "1", None]}], "cannot be read"),
        ("tree", [{"x": 0}, {"x": 1}, {"purepath": ["amiga", "x"]}], "cannot be read"),
        ("tree", [{"x": 0}, {"x": 1}, {"path": 5}], "cannot be read"),
        ("tree", [{"x": 0}, {"x": 1}, {"named": ["os.stat_result", ["a"], []]}], "another number of fields"),
        ("tree", [{"x": 0}, {"x": 1}, {"named": ["a" * 600, [], []]}], "name"),
        ("tree", [{"x": 0}, {"x": 1}, {"enum": ["os", [5], []]}], "name"),
        ("tree", [{"x": 0}, {"x": 1}, {"enum": ["os", ["A"], [1, 2]]}], "several values"),
        ("tree", [{"x": 0}, {"x": 1}, {"enum": ["os", ["A"], [{"x": 0}]]}], "a tensor is where none can be"),
        ("tree", [{"x": 0}, {"x": 1}, {"f": "zzzzzzzzzzzzzzzz"}], "cannot be read"),
        ("tree", [{"x": 0}, {"x": 1}, {"i": "0" * 5000}], "unknown node"),
        ("tree", [{"x": 0}, {"x": 1}, {"y": "eval"}], "unknown dtype"),
        ("tree", [{"x": 0}, {"x": 1}, {"s": [-1]}], "cannot be read"),
        ("tree", [{"x": 0}, {"x": 1}, {"s": [1.5]}], "cannot be read"),
    ],
)
def test_each_broken_rule_is_a_state_format_error(path, value, complaint):
    with pytest.raises(StateFormatError, match=complaint):
        decode_manifest(changed(path, value))


@pytest.mark.parametrize("name", sorted(set(GOOD) - {"format", "version", "elsewhere"}))
def test_a_missing_member_is_a_state_format_error(name):
    manifest = {key: value for key, value in GOOD.items() if key != name}
    with pytest.raises(StateFormatError):
        decode_manifest(json.dumps(manifest).encode())


@pytest.mark.parametrize(
    "data", [b"", b"\x80\x04K\x01.", b"null", b"[]", b"{", b"\xff\xfe", b"[" * 200_000, b'{"format":1}']
)
def test_what_is_no_manifest_is_a_state_format_error(data):
    with pytest.raises(StateFormatError):
        decode_manifest(data)


@pytest.mark.parametrize("opening", ["[", '{"t":[', '{"d":[["k",'])
def test_a_tree_nested_too_deeply_is_a_state_format_error(opening):
    closing = {"[": "]", '{"t":[': "]}", '{"d":[["k",': "]]}"}[opening]
    for depth in (70, 300, 100_000):
        tree = opening * depth + "1" + closing * depth
        data = json.dumps({**GOOD, "tree": "TREE"}).replace('"TREE"', tree).encode()
        with pytest.raises(StateFormatError, match=r"nested too deeply|nested deeper"):
            decode_manifest(data)


def test_an_announced_size_beyond_the_limit_is_refused():
    with pytest.raises(StateFormatError, match="the limit here is 127"):
        decode_manifest(json.dumps(GOOD).encode(), max_total_bytes=127)


def test_a_manifest_of_a_petabyte_is_read_without_allocating_any_of_it():
    manifest = {
        **GOOD,
        "total_bytes": 2**50,
        "segments": [[0, 2**50]],
        "tree": {"x": 0},
        "tensors": [
            {
                "fqn": "w",
                "dtype": "uint8",
                "shape": [2**50],
                "chunks": [{"offsets": [0], "sizes": [2**50], "segment": 0, "byte_offset": 0, "strides": None}],
            }
        ],
    }
    tracemalloc.start()
    try:
        decode_manifest(json.dumps(manifest).encode())
        assert tracemalloc.get_traced_memory()[1] < 1_000_000
    finally:
        tracemalloc.stop()


def test_a_huge_empty_tensor_is_refused_where_torch_could_not_make_it():
    data = json.loads(changed("segments", [[0, 0], [0, 64]]))
    data["total_bytes"] = 64
    data["tensors"][0]["shape"] = data["tensors"][0]["chunks"][0]["sizes"] = [0, 2**62, 2**62]
    data["tensors"][0]["chunks"][0]["offsets"] = [0, 0, 0]
    with pytest.raises(StateFormatError, match="out of range"):
        decode_manifest(json.dumps(data).encode())
