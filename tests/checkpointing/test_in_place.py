"""A state that is received in place lands in the memory that is here already; what does not fit is refused before a byte."""

from __future__ import annotations

import copy
import pickle
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import faulty_proxy
import numpy as np
import pytest
import torch
import torch.distributed as dist
from faulty_proxy import FaultyProxy
from support.sources import make_transport
from support.waiting import wait_until
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

from torchft_ckpt.checkpointing import HTTPTransport
from torchft_ckpt.checkpointing.fetching import engine
from torchft_ckpt.checkpointing.protocol import parse_metadata
from torchft_ckpt.errors import (
    CheckpointError,
    DigestMismatchError,
    SourceLostError,
    SourceRefusedError,
    StateMismatchError,
    TransferTimeoutError,
)
from torchft_ckpt.testing.transport_conformance import differences

LONG = timedelta(seconds=90)
STEP = 3


def running() -> Iterator[HTTPTransport[Any]]:
    transport = make_transport()
    yield transport
    transport.shutdown()


source, destination = pytest.fixture(running, name="source"), pytest.fixture(running, name="destination")


@pytest.fixture
def receive(source: HTTPTransport[Any], destination: HTTPTransport[Any]) -> Any:
    """Send a state, and receive it in place."""

    def receive(state: Any, local: Any) -> Any:
        source.send_checkpoint([1], STEP, state, LONG)
        return destination.fetch_checkpoint([source.metadata()], STEP, LONG, local_state=local, in_place=True)

    return receive


def noise(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def model_and_adam(seed: int, num_steps: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(40, 60), nn.Linear(60, 40))
    adam = torch.optim.Adam(model.parameters())
    for _ in range(num_steps):
        adam.zero_grad()
        model(torch.ones(2, 40)).square().mean().backward()
        adam.step()
    return model, adam


# ------------------------------------------------------------------------------------------------------- where it lands


def test_bytes_land_in_the_memory_that_was_there_and_the_result_is_made_of_the_local_tensors(receive):
    state = {"w": noise(50, 100), "deep": [{"half": noise(7, dtype=torch.bfloat16)}], "scalar": torch.tensor(5), "n": 1}
    local = {
        "w": torch.zeros(50, 100),
        "deep": [{"half": torch.zeros(7).bfloat16()}],
        "scalar": torch.tensor(0),
        "n": 9,
    }
    tensors = [local["w"], local["deep"][0]["half"], local["scalar"]]
    addresses = [tensor.data_ptr() for tensor in tensors]
    received = receive(state, local)
    assert differences(received, state) == []
    assert (
        received["w"] is tensors[0] and received["deep"][0]["half"] is tensors[1] and received["scalar"] is tensors[2]
    )
    assert [tensor.data_ptr() for tensor in tensors] == addresses


@pytest.mark.parametrize(
    "dtype", [torch.float8_e4m3fn, torch.bfloat16, torch.bool, torch.int64, torch.complex64, torch.uint16], ids=str
)
def test_every_kind_of_bits_lands_in_place(receive, dtype):
    values = torch.arange(2, 40_002)
    bits = values.remainder(2).bool() if dtype is torch.bool else values.to(torch.uint8).repeat(8).view(dtype)
    local = {"x": torch.zeros_like(bits, dtype=torch.uint8).to(dtype)}
    received = receive({"x": bits}, local)
    assert received["x"] is local["x"] and differences(received, {"x": bits}) == []


@pytest.mark.parametrize("is_tied_here", [True, False])
def test_weights_that_are_tied_there_are_filled_here_tied_or_not(receive, is_tied_here):
    shared, embed = noise(30, 30), torch.zeros(30, 30)
    local = {"embed": embed, "head": embed if is_tied_here else torch.zeros(30, 30)}
    received = receive({"embed": shared, "head": shared}, local)
    assert received["embed"] is local["embed"] and received["head"] is local["head"]
    assert differences(local, {"embed": shared, "head": shared}) == []


def test_views_of_one_storage_are_filled_where_they_are(receive):
    def views(base: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"all": base, "rows": base[3:9], "columns": base[:, 2:5], "t": base.t(), "other": torch.zeros(3)}

    theirs, ours = views(noise(20, 30)), views(torch.zeros(20, 30))
    received = receive(theirs, ours)
    assert all(received[name] is ours[name] for name in ours)
    assert differences(ours, theirs) == []
    assert len({tensor.untyped_storage().data_ptr() for tensor in ours.values()}) == 2


def test_a_view_in_the_middle_of_a_local_storage_leaves_its_neighbours_alone(receive):
    storage = torch.full((3000,), 7.0)
    state = {"w": noise(1000)}
    received = receive(state, {"w": storage[1000:2000]})
    assert differences(received, state) == []
    assert differences(storage, torch.cat([torch.full((1000,), 7.0), state["w"], torch.full((1000,), 7.0)])) == []


@pytest.mark.parametrize("in_place", [True, False])
def test_a_default_device_does_not_matter(source, destination, in_place):
    weight = noise(50, 100)
    state = {
        "w": weight,
        "turned": weight.t(),
        "row": weight[3],
        "array": np.arange(5.0),
        "pair": (torch.ones(3), 1),
        "empty": torch.empty(0, 4),
        "step": torch.tensor(5.0),
    }
    local = {"w": torch.zeros(50, 100), "turned": torch.zeros(100, 50), "row": torch.zeros(100), "array": np.zeros(5)}
    with torch.device("meta"):
        source.send_checkpoint([1], STEP, state, LONG)
        addresses, here = [source.metadata()], local if in_place else None
        received = destination.fetch_checkpoint(addresses, STEP, LONG, local_state=here, in_place=in_place)
    assert differences(received, state) == []


def test_a_strided_local_tensor_is_copied_to_at_the_end(receive):
    state = {"w": noise(50, 60), "x": noise(9)}
    local = {"w": torch.zeros(60, 50).t(), "x": torch.zeros(9)}
    strides, address = local["w"].stride(), local["w"].data_ptr()
    received = receive(state, local)
    assert received["w"] is local["w"] and (local["w"].stride(), local["w"].data_ptr()) == (strides, address)
    assert differences(local, state) == []


def test_a_local_state_of_strided_tensors_alone_is_filled_as_well(receive):
    state, local = {"w": noise(50, 60)}, {"w": torch.zeros(60, 50).t()}
    received = receive(state, local)
    assert received["w"] is local["w"]
    assert differences(local, state) == []


def test_numpy_arrays_are_filled_where_they_are(receive):
    state = {"a": np.arange(3000, dtype=np.int32), "x": noise(5)}
    local = {"a": np.zeros(3000, dtype=np.int32), "x": torch.zeros(5)}
    received = receive(state, local)
    assert received["a"].dtype == np.int32 and np.array_equal(local["a"], state["a"])
    assert np.shares_memory(received["a"], local["a"])


def test_an_empty_state_and_empty_tensors_are_received(receive):
    state, local = {"none": torch.empty(0, 4), "n": 3}, {"none": torch.empty(0, 4), "n": 0}
    assert differences(receive(state, local), state) == []
    state["x"], local["x"] = torch.ones(3), torch.zeros(3)
    received = receive(state, local)
    assert received["none"] is local["none"] and differences(received, state) == []


# ------------------------------------------------------------------------------------------------------------- autograd


def test_parameters_may_require_gradients_and_their_version_rises(receive):
    parameter = nn.Parameter(torch.zeros(40, 40))
    before = parameter._version
    received = receive({"w": noise(40, 40), "x": noise(3)}, {"w": parameter, "x": torch.zeros(3)})
    assert received["w"] is parameter and parameter.requires_grad and parameter.is_leaf
    assert parameter._version > before


@pytest.mark.parametrize("is_strided", [False, True])
def test_a_graph_over_a_parameter_that_was_received_into_is_refused_by_autograd(receive, is_strided):
    parameter = nn.Parameter(torch.zeros(30, 40).t() if is_strided else torch.zeros(40, 30))
    loss = parameter.square().sum()
    receive({"w": noise(40, 30), "x": noise(3)}, {"w": parameter, "x": torch.zeros(3)})
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_model_with_adam_goes_on_as_the_one_that_it_was_received_from(receive):
    theirs, their_adam = model_and_adam(0, 3)
    ours, our_adam = model_and_adam(1, 2)
    addresses = [parameter.data_ptr() for parameter in ours.parameters()]
    state = {"model": theirs.state_dict(), "adam": their_adam.state_dict()}
    local = {"model": ours.state_dict(), "adam": our_adam.state_dict()}
    received = receive(state, local)
    ours.load_state_dict(received["model"])
    our_adam.load_state_dict(received["adam"])
    for model, adam in ((theirs, their_adam), (ours, our_adam)):
        adam.zero_grad()
        model(torch.ones(2, 40)).square().mean().backward()
        adam.step()
    assert differences(dict(ours.state_dict()), dict(theirs.state_dict())) == []
    assert differences(our_adam.state_dict()["state"], their_adam.state_dict()["state"]) == []
    assert [parameter.data_ptr() for parameter in ours.parameters()] == addresses


def test_what_is_missing_here_arrives_in_memory_of_its_own(receive):
    """An optimizer that has not made a step has no moments."""
    theirs, their_adam = model_and_adam(0, 2)
    ours, our_adam = model_and_adam(1, 0)
    state = {"model": theirs.state_dict(), "adam": their_adam.state_dict()}
    local = {"model": ours.state_dict(), "adam": our_adam.state_dict()}
    received = receive(state, local)
    our_adam.load_state_dict(received["adam"])
    assert received["model"]["0.weight"] is local["model"]["0.weight"]
    assert differences(received["adam"], their_adam.state_dict()) == []
    assert differences(dict(ours.state_dict()), dict(theirs.state_dict())) == []


def test_what_is_here_and_not_there_is_left_alone(receive):
    local = {"w": torch.zeros(2000), "extra": torch.full((5,), 7.0)}
    received = receive({"w": noise(2000)}, local)
    assert list(received) == ["w"] and local["extra"].tolist() == [7.0] * 5


# ------------------------------------------------------------------------------------------------------ what is refused


def assert_refused(receive: Any, state: Any, local: Any, *parts: str) -> None:
    before = copy.deepcopy(local)
    with pytest.raises(StateMismatchError) as raised:
        receive(state, local)
    assert [part for part in parts if part not in str(raised.value)] == []
    assert raised.value.state_overwritten is False
    assert differences(local, before) == []


@pytest.mark.parametrize(
    ("theirs", "ours", "message"),
    [
        (noise(4, 3), torch.zeros(3, 4), "w is float32[3, 4] here, float32[4, 3] there"),
        (noise(3, 4), torch.zeros(3, 4).t(), "w is float32[4, 3] here, float32[3, 4] there"),
        (torch.ones(6).int(), torch.zeros(6), "w is float32[6] here, int32[6] there"),
        (torch.tensor(1.0), torch.zeros(1), "w is float32[1] here, float32[] there"),
    ],
)
def test_another_shape_or_dtype_is_refused_with_both(receive, theirs, ours, message):
    assert_refused(receive, {"ok": noise(5000), "w": theirs}, {"ok": torch.zeros(5000), "w": ours}, message)


def test_the_first_few_of_many_that_do_not_fit_are_named(receive):
    state = {f"w{index}": torch.zeros(index + 1) for index in range(9)}
    local = {f"w{index}": torch.zeros(index + 2) for index in range(9)}
    assert_refused(receive, state, local, "w0 is", "w4 is", "and 4 more", "nothing was received")


def shared_memory(kind: str) -> dict[str, torch.Tensor]:
    """Two tensors of the same shape that share memory, one way or another."""
    square, long = torch.zeros(32, 32), torch.zeros(3000)
    return {
        "tied": {"a": square, "b": square},
        "overlapping": {"a": long[:2000], "b": long[1000:]},
        "one_strided": {"a": square, "b": square.t()},
        "both_strided": {"a": square.t(), "b": square.t()},
        "part_of_it_strided": {"a": long[:2000], "b": long.view(1500, 2)[:, 0]},
    }[kind]


@pytest.mark.parametrize(
    "kind",
    [
        "tied",
        "overlapping",
        "one_strided",
        "both_strided",
        "part_of_it_strided",
    ],
)
def test_tensors_that_share_memory_here_and_are_separate_there_are_refused(receive, kind):
    local = {**shared_memory(kind), "x": torch.zeros(5)}
    state = {name: noise(*tensor.shape, seed=index) for index, (name, tensor) in enumerate(local.items())}
    assert_refused(receive, state, local, "a, b")


def test_a_tensor_whose_elements_share_memory_here_is_refused(receive):
    local = {"a": torch.zeros(1001).as_strided((1000, 2), (1, 1)), "x": torch.zeros(5)}
    assert_refused(receive, {"a": noise(1000, 2), "x": noise(5)}, local, "elements share memory here: a")


def test_tensors_that_are_tied_there_and_here_are_received_where_they_are_strided_here(receive):
    theirs, ours = noise(30, 20), torch.zeros(20, 30).t()
    local = {"a": ours, "b": ours}
    received = receive({"a": theirs, "b": theirs}, local)
    assert received["a"] is ours and torch.equal(ours, theirs)


def test_views_that_overlap_otherwise_there_than_here_are_refused(receive):
    theirs, ours = noise(3000), torch.zeros(2000)
    state = {"a": theirs[:2000], "b": theirs[1000:], "x": noise(5)}
    assert_refused(receive, state, {"a": ours, "b": ours, "x": torch.zeros(5)}, "a, b")


def test_two_tensors_whose_paths_read_the_same_are_not_taken_for_each_other(receive):
    state = {"a": {"b": noise(2000)}, "a.b": noise(2000, seed=1)}
    local = {"a": {"b": torch.zeros(2000)}, "a.b": torch.zeros(2000)}
    assert differences(receive(state, local), state) == []


@pytest.mark.parametrize("theirs", [{"a": {"w": 1}, "a.w": 2}, {"a": {0: 1, "0": 2}}])
def test_two_tensors_of_one_path_there_do_not_get_into_one_memory_here(receive, theirs):
    def filled(node: Any) -> Any:
        return (
            {key: filled(item) for key, item in node.items()}
            if isinstance(node, dict)
            else torch.full((9,), float(node))
        )

    ours = {"a": {next(iter(theirs["a"])): torch.zeros(9)}}
    with pytest.raises(StateMismatchError, match="share memory here"):
        receive(filled(theirs), ours)
    assert not next(iter(ours["a"].values())).any()


# ----------------------------------------------------------------------------------------------------------- a failure


def fails(destination: HTTPTransport[Any], url: str, local: Any, kind: type[CheckpointError], **how: Any) -> Any:
    timeout = how.pop("timeout", LONG)
    with pytest.raises(kind) as raised:
        destination.fetch_checkpoint([url], STEP, timeout, local_state=local, in_place=True)
    return raised.value


def test_a_failure_midway_owns_up_to_having_overwritten_the_state(source, destination):
    local = {"w": torch.zeros(100_000)}
    source.send_checkpoint([1], STEP, {"w": noise(100_000)}, LONG)
    with FaultyProxy(parse_metadata(source.metadata()).port, faulty_proxy.flip_bit_at(200_000)) as proxy:
        error = fails(destination, proxy.url, local, DigestMismatchError)
    copied = pickle.loads(pickle.dumps(error))  # noqa: S301 - our own
    assert (type(copied), str(copied), copied.state_overwritten) == (DigestMismatchError, str(error), True)
    assert "torn: it is partly overwritten and must not be used" in str(error)


def test_a_deadline_midway_owns_up_as_well(source, destination, monkeypatch):
    """The deadline is far away until some blocks are here; then all of it has passed."""
    late = [0.0]
    monkeypatch.setattr(engine, "time", SimpleNamespace(monotonic=lambda: time.monotonic() + late[0]))
    local = {"w": torch.zeros(100_000)}
    source.send_checkpoint([1], STEP, {"w": noise(100_000)}, LONG)

    def stall(connection: faulty_proxy.Connection, passed: int, data: bytes) -> bytes:
        if passed < 200_000:
            return data
        wait_until(lambda: local["w"].count_nonzero() > 0)
        late[0] = 3600.0
        return data if connection.ended.wait(60) else b""

    with FaultyProxy(parse_metadata(source.metadata()).port, stall) as proxy:
        error = fails(destination, proxy.url, local, TransferTimeoutError)
    assert error.state_overwritten is True and differences(local, {"w": torch.zeros(100_000)}) != []


def test_a_failure_before_the_first_byte_leaves_the_state_alone(source, destination):
    local, old = {"w": torch.zeros(100_000)}, {"w": torch.zeros(100_000)}
    source.send_checkpoint([1], STEP + 1, {"w": noise(100_000)}, LONG)
    refused = fails(destination, source.metadata(), local, SourceRefusedError)
    gone = make_transport()
    gone.shutdown()
    lost = fails(destination, gone.metadata(), local, SourceLostError)
    source.send_checkpoint([1], STEP, {"w": noise(100_000)}, LONG)
    with FaultyProxy(parse_metadata(source.metadata()).port, faulty_proxy.flip_bit_at(400)) as proxy:
        damaged = fails(destination, proxy.url, local, DigestMismatchError)
    assert [error.state_overwritten for error in (refused, lost, damaged)] == [False, False, False]
    assert differences(local, old) == []


def test_what_was_served_while_a_step_that_raised_kept_the_lock_is_not_torn(source, destination):
    weights = torch.zeros(300_000)
    source.lock.acquire_write()  # the step raises, and nobody gives it back
    with source.lock.read():
        source.send_checkpoint([1], 7, {"w": weights}, LONG)
    source.lock.acquire_write()  # the next step
    weights.fill_(-1.0)
    source.lock.release_write()
    assert not destination.recv_checkpoint(0, source.metadata(), 7, LONG)["w"].any()


def test_what_is_served_here_is_copied_aside_before_it_is_received_into(source, destination):
    """A reader of our own old state, half done when we receive over it, gets the old state or an error, never a mixture."""
    ours = {"w": noise(1_000_000, seed=1)}
    old, new = copy.deepcopy(ours), {"w": noise(1_000_000, seed=2)}
    destination.send_checkpoint([2], STEP, ours, LONG)
    source.send_checkpoint([1], STEP, new, LONG)
    reached, go_on = threading.Event(), threading.Event()

    def hold(connection: faulty_proxy.Connection, passed: int, data: bytes) -> bytes:
        if passed + len(data) > 100_000 and not go_on.is_set():
            reached.set()
            go_on.wait(20)
        return data

    reader = make_transport()
    got: list[Any] = []
    with FaultyProxy(parse_metadata(destination.metadata()).port, hold) as proxy:
        thread = threading.Thread(target=lambda: got.append(reader.recv_checkpoint(0, proxy.url, STEP, LONG)))
        thread.start()
        assert reached.wait(120)
        destination.fetch_checkpoint([source.metadata()], STEP, LONG, local_state=ours, in_place=True)
        go_on.set()
        thread.join(60)
    reader.shutdown()
    assert differences(ours, new) == []
    assert [differences(state, old) for state in got] in ([], [[]])


@pytest.fixture
def mesh() -> Iterator[Any]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


@pytest.mark.parametrize("requires_grad", [False, True])
def test_a_dtensor_is_filled_in_its_local_shard(receive, mesh, requires_grad):
    state = {"w": distribute_tensor(noise(40, 50), mesh, [Replicate()]), "x": noise(3)}
    ours = distribute_tensor(torch.zeros(40, 50), mesh, [Replicate()])
    local = {"w": nn.Parameter(ours) if requires_grad else ours, "x": torch.zeros(3)}
    address = local["w"].to_local().data_ptr()
    received = receive(state, local)
    assert isinstance(received["w"], DTensor) and received["w"] is local["w"]
    assert local["w"].to_local().data_ptr() == address
    assert differences(local["w"].to_local().detach(), noise(40, 50)) == []
