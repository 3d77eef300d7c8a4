"""SPMD tensors that are not DTensor: found by their adapter, saved and loaded by DCP's planners, shard by shard."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.spmd_double import Layout, SpmdAdapter, SpmdTensor, bits_of, random_bits
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from torchft_ckpt import HTTPTransport
from torchft_ckpt.checkpointing.state.shards import adapter_of, register_shard_adapter, unregister_shard_adapter
from torchft_ckpt.core.boxes.geometry import Box
from torchft_ckpt.errors import StateMismatchError
from torchft_ckpt.integrations.dcp.planners import ShardLoadPlanner, ShardSavePlanner
from torchft_ckpt.integrations.xla import LocalShard, local_shards_of

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is")
ONE, TWO, FOUR = Layout((1,)), Layout((2,)), Layout((4,))


@pytest.fixture(autouse=True)
def _adapter() -> Iterator[None]:
    """The double is known while a test runs."""
    adapter = SpmdAdapter()
    register_shard_adapter(adapter)
    yield
    unregister_shard_adapter(adapter)


def save(path: Path, state: dict[str, Any], num_threads: int = 1) -> None:
    writer = FileSystemWriter(path, thread_count=num_threads, sync_files=False)
    dcp.save(state, storage_writer=writer, planner=ShardSavePlanner(), no_dist=True)


def load(path: Path, state: dict[str, Any], **options: Any) -> None:
    dcp.load(state, storage_reader=FileSystemReader(path), planner=ShardLoadPlanner(**options), no_dist=True)


def empty_as(value: Any) -> Any:
    if isinstance(value, SpmdTensor):
        return SpmdTensor(value.shape, value.dtype, value.layout_)
    return torch.zeros_like(value)


def sharded(full: torch.Tensor, layout: Layout | None) -> torch.Tensor:
    """A whole tensor in a layout; None is the plain tensor."""
    return full.clone() if layout is None else SpmdTensor.of(full, layout)


def full_of(value: torch.Tensor) -> torch.Tensor:
    return value.full() if isinstance(value, SpmdTensor) else value


# --- which boxes a process holds -------------------------------------------------------------------------------------


def test_replicas_of_a_box_are_one_box_and_the_first_replica_comes_first():
    rows = [slice(0, 2, 1), slice(0, 4, 1)], [slice(2, 3, 1), slice(0, 4, 1)]
    shards = local_shards_of([(1, rows[0]), (0, rows[0]), (0, rows[1]), (1, rows[1])], (3, 4))
    assert shards == [LocalShard(Box((0, 0), (2, 4)), (1, 0)), LocalShard(Box((2, 0), (1, 4)), (2, 3))]


@pytest.mark.parametrize(
    ("indices", "box"),
    [
        (Ellipsis, Box((0, 0, 0), (4, 5, 6))),
        ([Ellipsis], Box((0, 0, 0), (4, 5, 6))),
        ([slice(1, 3), Ellipsis], Box((1, 0, 0), (2, 5, 6))),
        ([Ellipsis, slice(2, None)], Box((0, 0, 2), (4, 5, 4))),
        ([slice(None), slice(None, 2), slice(3, 9)], Box((0, 0, 3), (4, 2, 3))),
    ],
)
def test_indices_that_leave_something_out_mean_all_of_it(indices, box):
    assert [shard.box for shard in local_shards_of([(0, indices)], (4, 5, 6))] == [box]


def test_a_shard_of_padding_alone_is_left_out_and_an_empty_tensor_is_one_box():
    assert [shard.box for shard in local_shards_of(FOUR.shards((5,)), (5,))] == [
        Box((0,), (2,)),
        Box((2,), (2,)),
        Box((4,), (1,)),
    ]
    assert local_shards_of(FOUR.shards((0,)), (0,)) == [LocalShard(Box((0,), (0,)), (0, 1, 2, 3))]


@pytest.mark.parametrize("indices", [[slice(0, 2)], [slice(0, 4, 2), slice(0, 4)], [0, slice(0, 4)]])
def test_indices_that_are_no_box_are_refused(indices):
    with pytest.raises(ValueError, match="no box"):
        local_shards_of([(0, indices)], (4, 4))


def test_an_adapter_is_asked_while_it_is_registered():
    adapter, tensor = SpmdAdapter(), SpmdTensor((4,), torch.float32, TWO)
    register_shard_adapter(adapter)
    assert adapter_of(tensor) is adapter
    unregister_shard_adapter(adapter)
    assert adapter_of(tensor) is not adapter


def test_seeing_the_boxes_moves_nothing():
    tensor = SpmdTensor((5, 4), torch.float32, Layout((2, 2), 2))
    assert len(SpmdAdapter().boxes(tensor, "w")) == 4
    assert tensor.num_moved == 0


# --- through DCP's files, onto the same and onto other layouts -------------------------------------------------------

PAIRS = [
    ((8, 3), Layout((4, 1)), Layout((4, 1))),
    ((8, 3), Layout((4, 1)), Layout((2, 1))),
    ((8, 3), Layout((2, 1)), Layout((4, 1))),
    ((7, 5), Layout((4, 1)), Layout((1, 2))),
    ((7, 5), Layout((2, 2)), Layout((3, 1), 2)),
    ((5, 4), Layout((2, 1), 2), Layout((1, 1), 4)),
    ((5, 4), Layout((4, 1)), None),
    ((5, 4), None, Layout((2, 3), 2)),
    ((2, 3, 4), Layout((1, 3, 2)), Layout((2, 1, 1), 3)),
    ((), Layout((), 4), Layout((), 2)),
    ((0, 4), Layout((4, 1)), Layout((2, 1))),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
@pytest.mark.parametrize(("shape", "saved", "loaded"), PAIRS)
def test_a_tensor_is_bit_equal_after_it_was_saved_and_loaded(tmp_path, shape, saved, loaded, dtype):
    full = random_bits(shape, dtype, seed=3)
    save(tmp_path, {"w": sharded(full, saved)})
    target = empty_as(sharded(full, loaded))
    load(tmp_path, {"w": target})
    assert torch.equal(bits_of(full_of(target)), bits_of(full))


@pytest.mark.slow
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], print_blob=True)
@given(data=st.data())
def test_any_layout_is_bit_equal_after_any_other(tmp_path_factory, data):
    shape = data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=3))
    layouts = st.builds(Layout, st.tuples(*[st.integers(1, 4) for _ in shape]), st.integers(1, 2))
    full = random_bits(shape, torch.float32, seed=data.draw(st.integers(0, 99)))
    path = tmp_path_factory.mktemp("checkpoint")
    save(path, {"w": sharded(full, data.draw(layouts))})
    target = empty_as(sharded(full, data.draw(layouts)))
    load(path, {"w": target})
    assert torch.equal(bits_of(full_of(target)), bits_of(full))


def test_a_default_device_does_not_matter(tmp_path):
    full = random_bits((7, 6), torch.float32, 0)
    save(tmp_path, {"w": SpmdTensor.of(full, Layout((2, 1)))})
    state = {"w": SpmdTensor((7, 6), torch.float32, Layout((4, 1)))}
    with torch.device("meta"):
        load(tmp_path, state)
    assert torch.equal(bits_of(state["w"].full()), bits_of(full))


def test_a_nested_state_keeps_its_form_and_other_values(tmp_path):
    full = random_bits((6, 2), torch.float32, seed=1)
    state = {
        "model": {"w": SpmdTensor.of(full, Layout((4, 1))), "b": torch.arange(3.0)},
        "rows": [{"m": 1}, 2],
        "step": 7,
    }
    save(tmp_path, state)
    target = {
        "model": {"w": SpmdTensor(full.shape, full.dtype, Layout((2, 1))), "b": torch.zeros(3)},
        "rows": [{"m": 0}, 0],
        "step": 0,
    }
    weight = target["model"]["w"]
    load(tmp_path, target)
    assert target["model"]["w"] is weight  # changed in place
    assert torch.equal(bits_of(weight.full()), bits_of(full))
    assert torch.equal(target["model"]["b"], torch.arange(3.0))
    assert (target["rows"], target["step"]) == ([{"m": 1}, 2], 7)


def test_a_dtensor_beside_them_goes_the_way_of_the_defaults(tmp_path):
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        full = torch.arange(6.0)
        state = {"d": distribute_tensor(full, mesh, [Shard(0)], src_data_rank=None), "w": SpmdTensor.of(full, FOUR)}
        planner = ShardSavePlanner()
        planner.set_up_planner(state)
        assert planner.state_dict["d"] is state["d"]  # which is what the base class plans for
        save(tmp_path, state)
        target = {
            "d": distribute_tensor(torch.zeros(6), mesh, [Shard(0)], src_data_rank=None),
            "w": SpmdTensor((6,), torch.float32, TWO),
        }
        load(tmp_path, target)
        assert isinstance(target["d"], DTensor)
        assert torch.equal(target["d"].to_local(), full)
        assert torch.equal(target["w"].full(), full)
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("num_threads", [1, 3])
def test_each_shard_is_moved_to_the_host_once(tmp_path, num_threads):
    tensors = {name: SpmdTensor.of(torch.arange(12.0), Layout((4,), 2)) for name in "abc"}
    save(tmp_path, dict(tensors), num_threads)
    assert [tensor.num_moved for tensor in tensors.values()] == [8, 8, 8]


def test_a_planner_saves_twice(tmp_path):
    planner = ShardSavePlanner()
    for step in range(2):
        state = {"w": SpmdTensor.of(torch.full((4,), float(step)), TWO)}
        dcp.save(state, storage_writer=FileSystemWriter(tmp_path / str(step)), planner=planner, no_dist=True)
    target = SpmdTensor((4,), torch.float32, FOUR)
    load(tmp_path / "1", {"w": target})
    assert torch.equal(target.full(), torch.ones(4))


# --- several processes -----------------------------------------------------------------------------------------------


def plan_on_two_processes(
    *held: tuple[int, ...],
) -> tuple[list[ShardSavePlanner], list[SavePlan], Metadata, list[SpmdTensor]]:
    """Two processes hold some places of two tiles of two replicas, at 0, 1 and at 2, 3."""
    tensors = [SpmdTensor.of(torch.arange(6.0), Layout((2,), 2, places)) for places in held]
    planners = [ShardSavePlanner() for _ in held]
    for rank, (planner, tensor) in enumerate(zip(planners, tensors, strict=True)):
        planner.set_up_planner({"w": tensor}, is_coordinator=rank == 0)
    plans, metadata = planners[0].create_global_plan([planner.create_local_plan() for planner in planners])
    return planners, [p.finish_plan(plan) for p, plan in zip(planners, plans, strict=True)], metadata, tensors


def test_processes_save_their_own_shards():
    planners, plans, metadata, _ = plan_on_two_processes((0, 1), (2, 3))
    saved = [
        [planner.resolve_data(item).tolist() for item in plan.items]
        for planner, plan in zip(planners, plans, strict=True)
    ]
    assert saved == [[[0.0, 1.0, 2.0]], [[3.0, 4.0, 5.0]]]
    assert [tuple(chunk.offsets) for chunk in metadata.state_dict_metadata["w"].chunks] == [(0,), (3,)]


def test_a_shard_that_two_processes_hold_is_saved_by_one_and_moved_by_that_alone():
    planners, plans, _, tensors = plan_on_two_processes((0, 2), (1, 3))
    for planner, plan in zip(planners, plans, strict=True):
        for item in plan.items:
            planner.resolve_data(item)
    assert sorted(item.index.offset for plan in plans for item in plan.items) == [(0,), (3,)]
    assert [tensor.num_moved for tensor in tensors] == [2 * bool(plan.items) for plan in plans]


def test_what_another_process_saves_is_not_kept(monkeypatch):
    moved: list[weakref.ref[torch.Tensor]] = []
    move = SpmdAdapter.data

    def move_watched(self: SpmdAdapter, tensor: torch.Tensor, path: str) -> list[torch.Tensor]:
        parts = move(self, tensor, path)
        moved.extend(weakref.ref(part) for part in parts)
        return parts

    monkeypatch.setattr(SpmdAdapter, "data", move_watched)
    planners, plans, _, _ = plan_on_two_processes((0, 2), (1, 3))
    for planner, plan in zip(planners, plans, strict=True):
        for item in plan.items:
            planner.resolve_data(item)
    gc.collect()
    assert moved
    assert [part() for part in moved] == [None] * len(moved)


# --- applied when all of it is there ---------------------------------------------------------------------------------


def test_a_tensor_is_changed_when_its_last_shard_arrived(tmp_path):
    full = torch.arange(1.0, 9.0)
    save(tmp_path, {"w": SpmdTensor.of(full, FOUR)})
    target, planner = SpmdTensor.of(torch.zeros(8), TWO), ShardLoadPlanner()
    planner.set_up_planner({"w": target}, FileSystemReader(tmp_path).read_metadata(), True)
    plan = planner.finish_plan(planner.create_local_plan())
    seen = []
    for item in plan.items:
        received = planner.resolve_tensor(item)
        at = item.dest_index.offset[0] + item.dest_offsets[0]
        received.copy_(full[at : at + item.lengths[0]])
        with pytest.raises(
            StateMismatchError, match=f"'w' \\({len(plan.items) - len(seen)} of its parts did not arrive.* is torn"
        ) as caught:
            planner.check_complete()
        assert caught.value.state_overwritten
        planner.commit_tensor(item, received)
        seen.append(target.full().tolist())
    assert seen == [[0.0] * 8] * 3 + [full.tolist()]
    assert target.num_moved == 0
    planner.check_complete()


# --- what does not fit -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wanted", "reason"),
    [
        ({"v": SpmdTensor((4,), torch.float32, TWO)}, r"'v' \(not in the checkpoint\)"),
        ({"w": SpmdTensor((5,), torch.float32, TWO)}, r"'w' \(of shape \(4,\) in the checkpoint, \(5,\) here\)"),
        (
            {"w": SpmdTensor((4,), torch.bfloat16, TWO)},
            r"'w' \(of torch.float32 in the checkpoint, torch.bfloat16 here\)",
        ),
        ({"step": SpmdTensor((4,), torch.float32, TWO)}, r"'step' \(no tensor in the checkpoint\)"),
    ],
)
def test_what_does_not_fit_is_named_and_nothing_is_changed(tmp_path, wanted, reason):
    save(tmp_path, {"w": SpmdTensor.of(torch.ones(4), FOUR), "fits": torch.ones(2), "step": 3})
    beside = torch.zeros(2)
    with pytest.raises(dcp.CheckpointException) as caught:
        load(tmp_path, {**wanted, "fits": beside})
    error = caught.value.failures[0][0]
    assert isinstance(error, StateMismatchError)
    assert error.party == "checkpoint"
    with pytest.raises(StateMismatchError, match=reason):
        raise error
    assert torch.equal(beside, torch.zeros(2))


def test_a_hole_is_found_before_anything_is_read(tmp_path):
    save(tmp_path, {"w": SpmdTensor.of(torch.ones(6, 4), Layout((2, 2), held=(0, 1, 3)))})
    planner = ShardLoadPlanner()
    target = {"w": SpmdTensor((6, 4), torch.float32, Layout((1, 4)))}
    planner.set_up_planner(target, FileSystemReader(tmp_path).read_metadata(), True)
    with pytest.raises(StateMismatchError, match=r"'w' \(not saved in \[3:6, 0:1\]\)"):
        planner.create_local_plan()


def test_a_process_that_wants_only_what_was_saved_does_not_mind_the_hole(tmp_path):
    save(tmp_path, {"w": SpmdTensor.of(torch.ones(6, 4), Layout((2, 2), held=(0, 1, 3)))})
    target = SpmdTensor((6, 4), torch.float32, Layout((4, 1), held=(0,)))
    load(tmp_path, {"w": target})
    assert torch.equal(target.full()[:2], torch.ones(2, 4))


def test_the_first_few_of_many_are_named(tmp_path):
    save(tmp_path, {"w": torch.ones(1)})
    planner = ShardLoadPlanner()
    wanted = {f"w{number}": SpmdTensor((4,), torch.float32, TWO) for number in range(7)}
    planner.set_up_planner(wanted, FileSystemReader(tmp_path).read_metadata(), True)
    with pytest.raises(StateMismatchError, match=r"7 tensors.*'w0'.*'w4'.* and 2 more$"):
        planner.create_local_plan()


def test_a_partial_load_leaves_what_is_not_in_the_checkpoint(tmp_path):
    save(tmp_path, {"w": SpmdTensor.of(torch.ones(4), FOUR)})
    present, absent = SpmdTensor.of(torch.zeros(4), TWO), SpmdTensor.of(torch.zeros(4), TWO)
    load(tmp_path, {"w": present, "v": absent}, allow_partial_load=True)
    assert torch.equal(present.full(), torch.ones(4))
    assert torch.equal(absent.full(), torch.zeros(4))


# --- over HTTP -------------------------------------------------------------------------------------------------------


def test_a_joiner_receives_the_shards_into_its_own_tensors_class_and_each_is_moved_once():
    timeout = timedelta(seconds=20)
    full = random_bits((7, 5), torch.bfloat16, seed=9)
    layouts = {"rows": Layout((4, 1)), "grid": Layout((2, 2)), "partly": Layout((2, 1), 2), "all": Layout((1, 1), 4)}
    state = {name: SpmdTensor.of(full, layout) for name, layout in layouts.items()}
    source, joiner = HTTPTransport(timeout=timeout), HTTPTransport(timeout=timeout)
    try:
        source.send_checkpoint([1], step=5, state_dict=state, timeout=timeout)
        local = {name: empty_as(tensor) for name, tensor in state.items()}
        received = joiner.fetch_checkpoint([source.metadata()], 5, timeout, local_state=local)
    finally:
        source.shutdown()
        joiner.shutdown()
    assert {name: type(tensor) for name, tensor in received.items()} == dict.fromkeys(layouts, SpmdTensor)
    for name, tensor in received.items():
        assert torch.equal(bits_of(tensor.full()), bits_of(full)), name
    assert [tensor.num_moved for tensor in state.values()] == [len(tensor.shards_) for tensor in state.values()]


def test_who_has_no_such_tensor_gets_it_whole_whatever_the_default_device_is():
    timeout = timedelta(seconds=20)
    full = random_bits((7, 5), torch.bfloat16, seed=9)
    source, joiner = HTTPTransport(timeout=timeout), HTTPTransport(timeout=timeout)
    try:
        source.send_checkpoint([1], step=5, state_dict={"w": SpmdTensor.of(full, Layout((4, 1)))}, timeout=timeout)
        with torch.device("meta"):
            received = joiner.fetch_checkpoint([source.metadata()], 5, timeout)
    finally:
        source.shutdown()
        joiner.shutdown()
    assert torch.equal(bits_of(received["w"]), bits_of(full))
