"""A running job, read by torch.distributed.checkpoint: one step, whole, of all ranks, onto whatever the reader has."""

from __future__ import annotations

import contextlib
import gc
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Placement, Replicate, Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from torchft_ckpt import HTTPTransport, PeerReader
from torchft_ckpt.__main__ import main
from torchft_ckpt.checkpointing.serving import snapshot_registry
from torchft_ckpt.checkpointing.serving.snapshot import SnapshotPhase
from torchft_ckpt.errors import ConfigError, StateMismatchError, TransferTimeoutError

LIMIT = timedelta(seconds=90)
NUM_RANKS = 2
BASE = torch.arange(7 * 6, dtype=torch.float32).view(7, 6)


def weights_at(step: int) -> torch.Tensor:
    return BASE + 1000 * step


def as_rank(rank: int, world_size: int, work: Callable[[], Any]) -> Any:
    """Do something as one rank of several, the others imagined."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        return work()
    finally:
        dist.destroy_process_group()


def sharded(full: torch.Tensor, mesh: tuple[int, ...], placements: list[Placement]) -> torch.Tensor:
    return distribute_tensor(full, init_device_mesh("cpu", mesh), placements, src_data_rank=None)


class RunningJob:
    """Two ranks that step together, each on a thread, and serve what somebody wishes for, as a Manager does."""

    def __init__(self, pause_s: float = 0.01) -> None:
        self.ranks = [HTTPTransport(hostname="127.0.0.1", bind="127.0.0.1", num_chunks=1) for _ in range(NUM_RANKS)]
        self.states = [as_rank(rank, NUM_RANKS, self._make) for rank in range(NUM_RANKS)]
        self._pause_s = pause_s
        self.steps = [0] * NUM_RANKS
        self._over = threading.Event()
        self._barrier = threading.Barrier(NUM_RANKS)
        self._threads = [threading.Thread(target=self._train, args=(rank,)) for rank in range(NUM_RANKS)]
        for thread in self._threads:
            thread.start()

    @property
    def urls(self) -> list[str]:
        return [rank.metadata() for rank in self.ranks]

    def _make(self) -> dict[str, Any]:
        default = {
            "model": {"w": sharded(weights_at(0), (NUM_RANKS,), [Shard(0)]), "count": torch.tensor(0)},
            "optimizer": {
                "state": {0: {"step": torch.tensor(0.0), "exp_avg": sharded(-weights_at(0), (NUM_RANKS,), [Shard(1)])}},
                "param_groups": [{"lr": 0.5, "betas": (0.9, 0.99), "params": [0]}],
            },
            "schedule": [1, {"name": "cosine"}],
        }
        return {
            "user": {"default": default},
            "torchft": {"step": 0, "batches_committed": 0, "quorum_id": 1, "epoch": "e"},
        }

    def _train(self, rank: int) -> None:
        transport, state = self.ranks[rank], self.states[rank]
        default = state["user"]["default"]
        local = default["model"]["w"].to_local()
        moment = default["optimizer"]["state"][0]["exp_avg"].to_local()
        for step in range(100_000):
            self.steps[rank] = step
            if self._over.is_set():
                self._barrier.abort()
                return
            transport.advance_to(step)
            if transport.has_pending_request(step):
                state["torchft"]["step"] = step
                transport.send_checkpoint([], step, state, LIMIT)
            time.sleep(self._pause_s * (1 + rank))
            transport.withdraw_checkpoint()
            with transport.lock.write():
                local += 1000
                moment -= 1000
                default["model"]["count"] += 1
            try:
                self._barrier.wait(20)
            except threading.BrokenBarrierError:
                return

    def end(self) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join(60)
        for rank in self.ranks:
            rank.shutdown()


@pytest.fixture
def job() -> Iterator[RunningJob]:
    running = RunningJob()
    yield running
    running.end()


def num_kept(job: RunningJob) -> int:
    """States that ranks keep for somebody though they trained on."""
    return sum(
        snapshot.phase is SnapshotPhase.DETACHED for rank in job.ranks for snapshot in rank._snapshots.open_snapshots()
    )


def nothing_is_kept(job: RunningJob) -> bool:
    """Whether that comes to be so, once the job has trained on."""
    present = min(job.steps)
    while min(job.steps) < present + 2:
        time.sleep(0.005)
    until = time.monotonic() + 20  # what a silent reader keeps is kept for longer
    while num_kept(job) and time.monotonic() < until:
        time.sleep(0.005)
    return not num_kept(job)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def test_a_program_without_ranks_reads_one_step_of_all_ranks_while_they_train(job: RunningJob) -> None:
    reader = PeerReader(job.urls, timeout=LIMIT)
    state = {
        "model": {"w": torch.zeros(7, 6), "count": torch.tensor(-1)},
        "optimizer": {
            "state": {0: {"step": torch.tensor(9.0), "exp_avg": torch.zeros(7, 6)}},
            "param_groups": [{"lr": 0.0, "betas": (0.0, 0.0), "params": [7]}],
        },
        "schedule": [0, {"name": ""}],
    }
    dcp.load(state, storage_reader=reader, no_dist=True)
    assert reader.step is not None and reader.step > 0
    assert same_bits(state["model"]["w"], weights_at(reader.step))
    assert same_bits(state["optimizer"]["state"][0]["exp_avg"], -weights_at(reader.step))
    assert state["model"]["count"] == reader.step
    assert state["optimizer"]["param_groups"] == [{"lr": 0.5, "betas": (0.9, 0.99), "params": [0]}]
    assert state["schedule"] == [1, {"name": "cosine"}]


@pytest.mark.parametrize("mesh", [(3,), (2, 2)], ids=str)
@pytest.mark.parametrize("placement", [Shard(0), Shard(1), Replicate()], ids=str)
def test_a_sharded_program_reads_its_own_boxes(job: RunningJob, mesh: tuple[int, ...], placement: Placement) -> None:
    world_size = torch.Size(mesh).numel()

    def load() -> bool:
        reader = PeerReader(job.urls, timeout=LIMIT)
        placements = [placement] + [Shard(0)] * (len(mesh) - 1)
        state = {"model": {"w": sharded(torch.zeros(7, 6), mesh, placements)}}
        dcp.load(state, storage_reader=reader, no_dist=True)
        expected = sharded(weights_at(reader.step or 0), mesh, placements)
        return same_bits(state["model"]["w"].to_local(), expected.to_local())

    assert [as_rank(rank, world_size, load) for rank in range(world_size)] == [True] * world_size


def test_another_dtype_is_converted_and_a_view_is_written_through(job: RunningJob) -> None:
    reader = PeerReader(job.urls, timeout=LIMIT)
    base = torch.zeros(6, 7, dtype=torch.bfloat16)
    dcp.load({"model": {"w": base.T}}, storage_reader=reader, no_dist=True)
    assert same_bits(base.T, weights_at(reader.step or 0).bfloat16())


def test_a_value_brings_the_tensors_and_arrays_in_it() -> None:
    """DCP looks into no tuple: what is in one comes with it."""
    source: HTTPTransport[Any] = HTTPTransport(hostname="127.0.0.1", bind="127.0.0.1")
    array = np.arange(6.0).reshape(2, 3)
    source.send_checkpoint([], 5, {"pair": (torch.arange(3), {"a": array}, "y"), "array": array}, LIMIT)
    state: dict[str, Any] = {"pair": None, "array": np.zeros((2, 3))}
    try:
        dcp.load(state, storage_reader=PeerReader([source.metadata()], step=5, timeout=LIMIT), no_dist=True)
    finally:
        source.shutdown()
    tensor, inner, text = state["pair"]
    assert type(tensor) is torch.Tensor and torch.equal(tensor, torch.arange(3)) and text == "y"
    assert np.array_equal(inner["a"], array) and np.array_equal(state["array"], array)


def test_a_negated_view_gets_the_values_and_not_their_bits(job: RunningJob) -> None:
    reader = PeerReader(job.urls, timeout=LIMIT)
    negated = torch._neg_view(torch.zeros(7, 6))
    dcp.load({"model": {"w": negated}}, storage_reader=reader, no_dist=True)
    assert same_bits(negated.resolve_neg(), weights_at(reader.step or 0))


def test_a_default_device_does_not_matter(job: RunningJob) -> None:
    reader = PeerReader(job.urls, timeout=LIMIT)
    base = torch.zeros(6, 7, dtype=torch.bfloat16)
    with torch.device("meta"):
        dcp.load({"model": {"w": base.T}}, storage_reader=reader, no_dist=True)
    assert same_bits(base.T, weights_at(reader.step or 0).bfloat16())


def test_all_of_it_is_read_by_who_knows_nothing_of_it(job: RunningJob) -> None:
    state: dict[str, Any] = {}
    reader = PeerReader(job.urls, timeout=LIMIT)
    _load_state_dict(state, storage_reader=reader, planner=_EmptyStateDictLoadPlanner(), no_dist=True)
    assert set(state) == {"model", "optimizer", "schedule"}
    assert same_bits(state["model"]["w"], weights_at(reader.step or 0))
    assert state["schedule"] == [1, {"name": "cosine"}]


def test_names_may_begin_elsewhere(job: RunningJob) -> None:
    state = {"w": torch.zeros(7, 6)}
    reader = PeerReader(job.urls, root="user.default.model", timeout=LIMIT)
    dcp.load(state, storage_reader=reader, no_dist=True)
    assert same_bits(state["w"], weights_at(reader.step or 0))
    with pytest.raises(CheckpointException, match=r"nothing is at root='user.mine'"):
        dcp.load(state, storage_reader=PeerReader(job.urls, root="user.mine", timeout=LIMIT), no_dist=True)


def test_a_rank_that_is_not_named_leaves_a_hole_and_nothing_is_written(job: RunningJob) -> None:
    state = {"model": {"w": torch.full((7, 6), 5.0)}}
    with pytest.raises(CheckpointException) as raised:
        dcp.load(state, storage_reader=PeerReader(job.urls[:1], timeout=LIMIT), no_dist=True)
    (error,) = (failure[0] for failure in raised.value.failures.values())
    assert isinstance(error, StateMismatchError)
    assert "model.w [4:7, 0:6]: name all ranks of the replica group" in str(error)
    assert torch.equal(state["model"]["w"], torch.full((7, 6), 5.0))


def test_holes_are_looked_for_until_the_deadline_alone(job: RunningJob) -> None:
    def is_over() -> None:
        raise TransferTimeoutError("it is over", "job")

    reader, planner = PeerReader(job.urls, timeout=LIMIT), DefaultLoadPlanner()
    planner.set_up_planner({"model": {"w": torch.zeros(7, 6)}}, reader.read_metadata(), is_coordinator=True)
    reader._content.go_on = is_over  # type: ignore[union-attr]
    with pytest.raises(TransferTimeoutError, match="it is over"):
        reader.read_data(planner.create_local_plan(), planner)


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"model": {"v": torch.zeros(1)}}, "Missing key.*model.v"),
        ({"model": {"w": torch.zeros(7, 5)}}, "Size mismatch"),
    ],
)
def test_what_does_not_fit_is_refused_by_dcps_planner(job: RunningJob, state: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointException, match=message):
        dcp.load(state, storage_reader=PeerReader(job.urls, timeout=LIMIT), no_dist=True)


def wanted() -> dict[str, Any]:
    return {"model": {"w": torch.zeros(7, 6)}}


def test_a_reader_that_takes_nothing_does_not_freeze_what_others_get(
    job: RunningJob, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It keeps one step at the ranks; neither another reader nor `pull` takes that for the newest one."""
    monkeypatch.setattr(snapshot_registry, "FRESH_S", 0.0)
    idle = PeerReader(job.urls, timeout=LIMIT)
    idle.read_metadata()
    assert idle.step is not None
    while min(job.steps) <= idle.step + 2:
        time.sleep(0.005)
    assert num_kept(job) == NUM_RANKS
    reader, state, present = PeerReader(job.urls, timeout=LIMIT), wanted(), min(job.steps)
    dcp.load(state, storage_reader=reader, no_dist=True)
    assert reader.step is not None and reader.step >= present
    assert same_bits(state["model"]["w"], weights_at(reader.step))
    present = min(job.steps)
    assert main(["pull", *job.urls, "-o", str(tmp_path / "state.safetensors"), "--quiet"]) == 0
    with safe_open(tmp_path / "state.safetensors", "pt") as saved:
        assert int(saved.metadata()["torchft_ckpt.step"]) >= present


@pytest.mark.slow
def test_a_reader_that_takes_nothing_gives_back_when_it_is_used_again_and_when_it_is_gone(job: RunningJob) -> None:
    reader = PeerReader(job.urls, timeout=LIMIT)
    reader.read_metadata()
    reader.reset()
    assert nothing_is_kept(job)
    first, present = reader.step, min(job.steps)
    dcp.load(wanted(), storage_reader=reader, no_dist=True)
    assert first is not None and reader.step is not None and reader.step >= present
    assert nothing_is_kept(job)
    reader.read_metadata()
    del reader
    gc.collect()  # an error on the way, of a step that was over before all ranks had heard of it, holds its frames
    assert nothing_is_kept(job)


@pytest.mark.slow
@pytest.mark.parametrize("state", [{"model": {"v": torch.zeros(1)}}, {"model": {"w": torch.zeros(7, 5)}}])
def test_a_load_that_dcps_planner_refuses_keeps_nothing_at_the_ranks(job: RunningJob, state: dict[str, Any]) -> None:
    with contextlib.suppress(CheckpointException):
        dcp.load(state, storage_reader=PeerReader(job.urls, timeout=LIMIT), no_dist=True)
        pytest.fail("it fits")
    gc.collect()  # DCP's exception refers to itself by its frames, and to the reader
    assert nothing_is_kept(job)


def test_a_load_that_we_refuse_keeps_nothing_at_the_ranks(job: RunningJob) -> None:
    reader = PeerReader(job.urls, root="user.mine", timeout=LIMIT)
    with pytest.raises(StateMismatchError):
        reader.read_metadata()
    assert nothing_is_kept(job)


def test_ranks_that_chose_different_steps_are_told_so() -> None:
    reader = PeerReader(["http://127.0.0.1:1"])
    plans = [dcp.planner.LoadPlan([], storage_data=step) for step in (4, 5)]
    with pytest.raises(StateMismatchError, match=r"chose the steps \['4', '5'\]: pass one to PeerReader\(step="):
        reader.prepare_global_plan(plans)


def test_a_job_that_stands_still_and_serves_nothing_is_waited_for_and_then_named() -> None:
    idle = HTTPTransport(hostname="127.0.0.1", bind="127.0.0.1")
    try:
        reader = PeerReader([idle.metadata()], timeout=timedelta(seconds=0.5))
        with pytest.raises(TransferTimeoutError, match=idle.metadata()):
            reader.read_metadata()
    finally:
        idle.shutdown()


@pytest.mark.parametrize("urls", [[], [[]], "http://127.0.0.1:1", ["nowhere"], ["http://h:1", "http://h:1"]])
def test_urls_that_cannot_be_used_are_refused(urls: Any) -> None:
    with pytest.raises(ConfigError):
        PeerReader(urls)


def test_pull_saves_all_ranks_as_one_file(job: RunningJob, tmp_path: Path) -> None:
    file = tmp_path / "state.safetensors"
    assert main(["pull", *job.urls, "-o", str(file), "--quiet"]) == 0
    with safe_open(file, "pt") as saved:
        step = int(saved.metadata()["torchft_ckpt.step"])
        assert same_bits(saved.get_tensor("model.w"), weights_at(step))
        assert same_bits(saved.get_tensor("optimizer.state.0.exp_avg"), -weights_at(step))


def test_pull_of_one_rank_of_several_saves_nothing(job: RunningJob, tmp_path: Path, capsys: Any) -> None:
    assert main(["pull", job.urls[0], "-o", str(tmp_path / "state.safetensors"), "--quiet"]) != 0
    assert "holds only parts of 2 tensors, such as user.default.model.w: name all ranks" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
