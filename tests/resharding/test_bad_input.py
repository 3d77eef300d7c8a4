"""What does not fit is a named error that lists the first few tensors, before a byte of the state that is here is written."""

from __future__ import annotations

import http.client
import json
import warnings
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any

import pytest
import torch
from support.resharding import (
    LONG,
    PLAIN,
    Group,
    Layout,
    Model,
    State,
    imagined_rank,
    make_transport,
    nothing_leaks,
    snapshot_of,
    untouched,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from torchft_ckpt.checkpointing.protocol import MAX_BODY_BYTES, MAX_PARTS
from torchft_ckpt.errors import (
    ConfigError,
    SourceLostError,
    SourceRefusedError,
    StateMismatchError,
    TransferError,
    UnsupportedValueError,
)

STEP = 7
SOON = timedelta(seconds=90)


@pytest.fixture(autouse=True)
def no_leaks() -> Iterator[None]:
    with nothing_leaks():
        yield


def refused(groups: Sequence[Group | list[str]], local: State, error_type: type[Exception]) -> str:
    """Receive in place, which must fail without having touched anything; return the message."""
    before = snapshot_of(local)
    receiver = make_transport()
    urls = [group.urls if isinstance(group, Group) else group for group in groups]
    try:
        with pytest.raises(error_type) as caught:
            receiver.fetch_sharded(urls, 0, 1, STEP, SOON, local_state=local, in_place=True)
    finally:
        receiver.shutdown()
    assert not getattr(caught.value, "state_overwritten", False)
    assert untouched(before, local)
    return str(caught.value)


def full_state() -> State:
    return {"a": torch.ones(4), "b": torch.ones(2, 3), "n": 1}


@pytest.mark.parametrize(
    ("local", "words"),
    [
        ({"a": torch.zeros(4)}, ["b is not here"]),
        ({"a": torch.zeros(4), "b": torch.zeros(2, 3), "c": torch.zeros(1)}, ["c is not there"]),
        ({"a": torch.zeros(5), "b": torch.zeros(2, 3)}, ["a is float32[5] here, float32[4] there"]),
        ({"a": torch.zeros(4), "b": torch.zeros(3, 2)}, ["b is float32[3, 2] here, float32[2, 3] there"]),
        ({"a": torch.zeros(4).double(), "b": torch.zeros(2, 3)}, ["a is float64[4] here, float32[4] there"]),
        ({"a": torch.zeros(4, 1), "b": torch.zeros(2, 3)}, ["a is float32[4, 1] here, float32[4] there"]),
        ({}, ["a is not here", "b is not here"]),
        ({"other": torch.zeros(4), "b": torch.zeros(2, 3)}, ["a is not here", "other is not there"]),
    ],
    ids=["one less", "one more", "shape", "transposed shape", "dtype", "dimensions", "nothing here", "renamed"],
)
def test_names_shapes_and_dtypes_must_be_those_of_the_source(local, words):
    with Group([full_state()], STEP) as source:
        message = refused([source], local, StateMismatchError)
    assert [word for word in words if word not in message] == []
    assert "nothing was received" in message


def test_of_many_mismatches_the_first_few_are_named():
    source_state = {f"w{number:02}": torch.ones(3) for number in range(20)}
    local = {f"w{number:02}": torch.zeros(4) for number in range(20)}
    with Group([source_state], STEP) as source:
        message = refused([source], local, StateMismatchError)
    assert [name for name in source_state if name in message] == ["w00", "w01", "w02", "w03", "w04"]
    assert "15 more" in message


def test_ranks_of_a_source_that_disagree_are_not_one_state():
    states = [{"a": torch.ones(4), "b": torch.ones(3)}, {"a": torch.ones(5), "b": torch.ones(3)}]
    with Group(states, STEP) as source:
        message = refused([source], {"a": torch.zeros(4), "b": torch.zeros(3)}, StateMismatchError)
    assert "a is float32[4] on rank 0, float32[5] on rank 1" in message


def test_ranks_of_a_source_that_hold_other_names_are_not_taken_for_one_state():
    """Else what the one rank has not would silently stay as it was."""
    with Group([{"a": torch.ones(4)}, {"b": torch.ones(3)}], STEP) as source:
        message = refused([source], {"a": torch.zeros(4), "b": torch.zeros(3)}, StateMismatchError)
    assert "b is not" in message


ROWS = {f"w{number}": Layout((2,), ((0, 0),)) for number in range(7)}


def sharded_model() -> Model:
    return Model({name: torch.arange(40.0).view(8, 5) for name in ROWS}, {})


CLOSED = "http://127.0.0.1:1"


@pytest.mark.parametrize("absent", ["", "closed", "not an address"])
def test_a_source_rank_whose_part_nobody_else_holds_must_be_there(absent):
    model = sharded_model()
    with imagined_rank(0, 1):
        local = model.state(dict.fromkeys(ROWS, PLAIN), 0)
    for tensor in local.values():
        if isinstance(tensor, torch.Tensor):
            tensor.zero_()
    with Group(model.states(ROWS, 2), STEP) as source:
        url = CLOSED if absent == "closed" else absent
        message = refused([[source.urls[0], url]], local, SourceLostError)
    assert "w0 [4:8, 0:5]; w1 [4:8, 0:5]" in message and "and 2 more" in message
    assert (url if absent == "closed" else "rank 1 (no address)") in message


def test_a_source_rank_that_has_gone_on_makes_no_mismatch_of_what_the_others_hold():
    """Who joins asks again then; a state that does not fit would end it."""
    model = sharded_model()
    with imagined_rank(0, 1):
        local = model.state(dict.fromkeys(ROWS, PLAIN), 0)
    with Group(model.states(ROWS, 2), STEP, num_receivers=0) as source:
        source.transports[1].disallow_checkpoint()
        source.transports[1].advance_to(STEP + 1)
        message = refused([source.urls], local, SourceRefusedError)
    assert "w0 [4:8, 0:5]" in message and "has gone on" in message


def test_a_source_rank_whose_part_another_rank_holds_may_be_absent():
    model = sharded_model()
    replicated = dict.fromkeys(ROWS, Layout((2, 2), ((1, 0),)))  # ranks 0 and 2 hold the same
    receiver = make_transport()
    with Group(model.states(replicated, 4), STEP) as source, imagined_rank(0, 1):
        local = model.state(dict.fromkeys(ROWS, PLAIN), 0)
        urls = [source.urls[0], CLOSED, "", source.urls[3]]
        received = receiver.fetch_sharded([urls], 0, 1, STEP, SOON, local_state=local)
    receiver.shutdown()
    assert model.wrong(received, dict.fromkeys(ROWS, PLAIN), 0) == []


@pytest.mark.parametrize("groups", [[[]], [["", ""]], [[""], []]])
def test_sources_of_which_no_address_is_known_are_an_error(groups):
    refused(groups, full_state(), TransferError)


def test_sources_that_nobody_listens_at_are_an_error_that_names_them():
    urls = [[CLOSED], [CLOSED]]
    message = refused(urls, full_state(), SourceLostError)
    assert [url for group in urls for url in group if url not in message] == []


def test_a_mesh_that_leaves_a_hole_is_named():
    """The group says that it is two ranks of a mesh of three."""
    model = sharded_model()
    with Group(model.states(dict.fromkeys(ROWS, Layout((3,), ((0, 0),))), 3), STEP) as source:
        message = refused([source.urls[:2]], model.fulls | {"optim": optimizer(), "step": 0}, StateMismatchError)
    assert "w0 [6:8, 0:5]" in message
    assert "did not answer" not in message


def optimizer() -> State:
    return {"state": {}, "param_groups": [{"lr": 0.0}]}


def test_a_hole_in_the_primary_is_not_filled_with_another_groups_bits():
    model, other_model = sharded_model(), sharded_model()
    for tensor in other_model.fulls.values():
        tensor += 1
    receiver = make_transport()
    local = {name: torch.zeros(8, 5) for name in ROWS} | {"optim": optimizer(), "step": 0}
    with Group(model.states(ROWS, 2), STEP) as source, Group(other_model.states(ROWS, 2), STEP) as other:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            received = receiver.fetch_sharded(
                [[source.urls[0], ""], other.urls], 0, 1, STEP, SOON, local_state=local, in_place=True
            )
    receiver.shutdown()
    assert other_model.wrong(received, dict.fromkeys(ROWS, PLAIN), 0) == []


def no_box(rank: int) -> DTensor:
    mesh = DeviceMesh("cpu", torch.arange(4).reshape(2, 2))
    placements = [Shard(0), _StridedShard(0, split_factor=2)]
    return DTensor.from_local(torch.zeros(2), mesh, placements, run_check=False, shape=torch.Size([8]), stride=(1,))


def partial(rank: int) -> DTensor:
    mesh = DeviceMesh("cpu", torch.arange(4))
    return DTensor.from_local(torch.zeros(8), mesh, [Partial()], run_check=False)


@pytest.mark.parametrize(("make", "why"), [(no_box, "not one box"), (partial, "unreduced")])
def test_a_placement_that_is_no_box_is_refused_on_either_side(make, why):
    source = make_transport()
    with imagined_rank(0, 4):
        wrong = {"model": {"w": make(0)}}
        with pytest.raises(UnsupportedValueError, match=rf"'model\.w'.*{why}"):
            source.send_checkpoint([0], STEP, wrong, LONG)
        with Group([{"model": {"w": torch.ones(8)}}], STEP) as plain:
            message = refused([plain], wrong, UnsupportedValueError)
    source.shutdown()
    assert "'model.w'" in message and why in message


# Memory that is shared


def test_tensors_that_are_tied_here_and_not_at_the_source_are_refused_in_place():
    shared = torch.zeros(6)
    with Group([{"a": torch.ones(6), "b": torch.full((6,), 2.0)}], STEP) as source:
        message = refused([source], {"a": shared, "b": shared}, StateMismatchError)
        assert "a, b" in message
        receiver = make_transport()
        received = receiver.fetch_sharded(
            [source.urls], 0, 1, STEP, SOON, local_state={"a": shared, "b": shared}, in_place=False
        )
        receiver.shutdown()
    assert (received["a"].tolist(), received["b"].tolist()) == ([1.0] * 6, [2.0] * 6)


def test_overlapping_views_are_refused_in_place_unless_they_are_the_same_at_the_source():
    def fused() -> State:
        whole = torch.arange(8.0)
        return {"qkv": whole, "q": whole[:4], "k": whole[4:]}

    def apart() -> State:
        return {name: tensor.clone() for name, tensor in fused().items()}

    def zeros(state: State) -> State:
        state["qkv"].zero_()
        return state

    receiver = make_transport()
    with Group([fused()], STEP) as source:
        local = zeros(fused())
        receiver.fetch_sharded([source.urls], 0, 1, STEP, SOON, local_state=local, in_place=True)
        assert [tensor.tolist() for tensor in local.values()] == [tensor.tolist() for tensor in fused().values()]
    receiver.shutdown()
    with Group([apart()], STEP) as source:
        assert "share memory" in refused([source], zeros(fused()), StateMismatchError)


# Arguments


@pytest.mark.parametrize(
    ("arguments", "party"),
    [
        ({"groups": []}, "groups"),
        ({"local_state": None, "in_place": True}, "local_state"),
        ({"step": -1}, "step"),
        ({"rank": 3}, "rank"),
        ({"rank": -1}, "rank"),
    ],
)
def test_arguments_that_cannot_be_used_are_named(arguments, party):
    receiver = make_transport()
    given: dict[str, Any] = {"groups": [["http://127.0.0.1:1"]], "rank": 0, "step": STEP, "local_state": {}}
    given |= arguments
    with pytest.raises(ConfigError) as caught:
        receiver.fetch_sharded(given.pop("groups"), given.pop("rank"), 3, given.pop("step"), SOON, **given)
    receiver.shutdown()
    assert caught.value.party == party


# Requests for parts that no receiver of ours makes


def hostile_bodies() -> dict[str, bytes]:
    def parts(*asked: object) -> bytes:
        return json.dumps({"parts": asked}).encode()

    good = [0, 0, 0, [0, 0], [2, 3]]
    return {
        "nothing": b"",
        "no JSON": b"\x80\x04K\x01.",
        "no text": b"\xff\xfe" * 100,
        "null": b"null",
        "a list": b"[]",
        "no parts": parts(),
        "nested without end": b"[" * 10_000,
        "a part that is no list": parts(3),
        "too few members": parts(good[:4]),
        "too many members": parts([*good, 0]),
        "a member more beside them": b'{"parts": [[0,0,0,[0,0],[2,3]]], "more": 1}',
        "text for numbers": parts(["0", "0", "0", ["0"], ["2"]]),
        "fractions": parts([0, 0, 0, [0.5, 0], [1, 1]]),
        "true": parts([0, 0, True, [0, 0], [2, 3]]),
        "null for sizes": parts([0, 0, 0, [0, 0], None]),
        "a tensor that is not there": parts([99, 0, 0, [0, 0], [2, 3]]),
        "a chunk that is not there": parts([0, 1, 0, [0, 0], [2, 3]]),
        "a negative tensor": parts([-1, 0, 0, [0, 0], [2, 3]]),
        "a negative offset": parts([0, 0, 0, [-1, 0], [2, 3]]),
        "a negative size": parts([0, 0, 0, [0, 0], [-2, 3]]),
        "two negative sizes": parts([0, 0, 0, [0, 0], [-2, -3]]),
        "no elements": parts([0, 0, 0, [0, 0], [0, 3]]),
        "beyond the end": parts([0, 0, 0, [1, 0], [2, 3]]),
        "huge": parts([0, 0, 0, [0, 0], [2**61, 2**61]]),
        "beyond 64 bits": parts([0, 0, 0, [2**64, 0], [2, 3]]),
        "10**400": parts([0, 0, 10**400, [0, 0], [2, 3]]),
        "a dimension less": parts([0, 0, 0, [0], [2]]),
        "a dimension more": parts([0, 0, 0, [0, 0, 0], [2, 3, 1]]),
        "no dimensions": parts([0, 0, 0, [], []]),
        "more offsets than sizes": parts([0, 0, 0, [0, 0], [2]]),
        "more sizes than offsets": parts([0, 0, 0, [0], [2, 3]]),
        "a million dimensions": parts([0, 0, 0, [0] * 10_000, [1] * 10_000]),
        "a good one and a bad one": parts(good, [0, 0, 0, [0, 0], [9, 9]]),
        "too many parts": parts(*[good] * (MAX_PARTS + 1)),
        "a million parts": parts(*[good] * 1_000_000),
        "a megabyte of spaces": b" " * 2**20,
        "a body a byte too long": b" " * (MAX_BODY_BYTES + 1),
    }


@pytest.mark.slow
@pytest.mark.parametrize("path", ["parts", "parts/digests"])
def test_hostile_requests_for_parts_are_refused_and_the_server_lives(path):
    state = {"a": torch.arange(6.0).view(2, 3)}
    with Group([state], STEP) as source:
        address = source.urls[0].removeprefix("http://")
        statuses = {}
        for name, body in hostile_bodies().items():
            connection = http.client.HTTPConnection(address, timeout=60)
            try:
                connection.request("POST", f"/v1/checkpoint/{STEP}/{path}", body=body)
                answer = connection.getresponse()
                statuses[name] = answer.status
                answer.read()
            except ConnectionError:  # a body that is much too long is not read to its end
                statuses[name] = 413
            finally:
                connection.close()
        assert {name: status for name, status in statuses.items() if status not in (413, 416)} == {}
        receiver = make_transport()
        received = receiver.fetch_sharded(
            [source.urls], 0, 1, STEP, SOON, local_state={"a": torch.zeros(2, 3)}, in_place=True
        )
        receiver.shutdown()
    assert torch.equal(received["a"], state["a"])


def test_parts_may_overlap_and_each_is_sent():
    """What is refused is what does not exist; asking twice is only a waste."""
    body = json.dumps({"parts": [[0, 0, 5, [0, 0], [2, 3]], [0, 0, 6, [1, 1], [1, 2]]] * 2}).encode()
    with Group([{"a": torch.arange(6.0).view(2, 3)}], STEP) as source:
        connection = http.client.HTTPConnection(source.urls[0].removeprefix("http://"), timeout=60)
        connection.request("POST", f"/v1/checkpoint/{STEP}/parts", body=body)
        data = connection.getresponse().read()
        connection.close()
    assert len(data) == 2 * (24 + 16 + 8 + 16)
    assert torch.frombuffer(bytearray(data[40:48]), dtype=torch.float32).tolist() == [4.0, 5.0]


def test_a_request_for_tensors_of_very_many_dimensions_is_within_the_limit_of_a_body():
    """128 parts of 64 dimensions each would be a longer body than a source reads."""
    shape = [1] * 63 + [2]
    state = {f"w{number}": torch.full(shape, float(number)) for number in range(300)}
    local = {name: torch.zeros(shape) for name in state}
    receiver = make_transport()
    with Group([state], STEP) as source:
        received = receiver.fetch_sharded([source.urls], 0, 1, STEP, SOON, local_state=local)
    receiver.shutdown()
    assert [name for name in state if not torch.equal(received[name], state[name])] == []
