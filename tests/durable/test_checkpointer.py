"""A training loop saves while it trains, and finds exactly what it saved: one step, every bit, every kind of value."""

from __future__ import annotations

import enum
import gc
import os
import random
import re
import shutil
import subprocess
import threading
from collections import Counter, OrderedDict
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed as dist
from support.newest import newest_whole
from support.nursery import Forked
from support.replicas import ends
from support.savers import no_threads_left
from support.spmd_double import random_bits
from support.thoroughness import by_default
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from torchft_ckpt import Checkpointer, HTTPTransport, Tier, checkpoints_in, load_checkpoint
from torchft_ckpt.checkpointing.durable.cooperative_read import ranks
from torchft_ckpt.checkpointing.durable.reading.reader import CheckpointReader
from torchft_ckpt.checkpointing.durable.storage.local_storage import LocalStorage
from torchft_ckpt.checkpointing.progress import TransferProgress
from torchft_ckpt.checkpointing.state.target import Want
from torchft_ckpt.core.boxes.geometry import whole
from torchft_ckpt.core.durable.restore_source import RestoreSource
from torchft_ckpt.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    ConfigError,
    SaveInFlightError,
    SourceRefusedError,
    StateMismatchError,
    StorageError,
    UnsupportedValueError,
)

LONG_S = 60.0


class Counting(torch.optim.Optimizer):
    """Each step writes its number into every element of everything, slowly enough to be caught at it."""

    def __init__(self, sizes: list[int]) -> None:
        parameters = [torch.nn.Parameter(torch.zeros(size, dtype=torch.float64)) for size in sizes]
        super().__init__(parameters, {})
        self.number = 0
        for parameter in parameters:
            self.state[parameter] = {"moment": torch.zeros_like(parameter), "step": torch.tensor(0.0)}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.number += 1
        for parameter in self.param_groups[0]["params"]:
            parameter.fill_(self.number)
            self.state[parameter]["moment"].fill_(self.number)
            self.state[parameter]["step"].fill_(self.number)

    def tensors(self) -> dict[str, Any]:
        parameters = self.param_groups[0]["params"]
        return {
            "weights": {str(number): parameter for number, parameter in enumerate(parameters)},
            "state": [dict(self.state[parameter]) for parameter in parameters],
        }


def all_of(directory: Path, step: int | None = None) -> tuple[int, dict[str, torch.Tensor], dict[str, object]]:
    """The newest checkpoint: its step, its tensors, its values."""
    checkpoint = newest_whole([LocalStorage(directory)], step=step)
    reader = CheckpointReader(checkpoint)
    wants = [
        Want(fqn, whole(tensor.shape), torch.empty(tensor.shape, dtype=tensor.dtype))
        for fqn, tensor in reader.tensors.items()
    ]
    reader.read(wants)
    values = {fqn: value for fqn, (_, value) in reader.values().items()}
    return checkpoint.name.step, {want.name: want.target for want in wants}, values


def assert_of_one_step(tensors: dict[str, torch.Tensor], step: int) -> None:
    for name, tensor in tensors.items():
        same = bits_of(tensor) == bits_of(torch.full_like(tensor, step))
        assert same.all(), f"{name} of step {step} has {tensor.unique()[:5]}"


def bits_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def run_ranks(directory: Path, num_ranks: int, script: str, *arguments: str | Path) -> list[tuple[int, str, str]]:
    """Run a script in so many processes, with its rank as the last argument; return their statuses, output and errors."""
    path = directory / "script.py"
    path.write_text(script)
    logs = [directory / f"errors of rank {rank}" for rank in range(num_ranks)]
    ranks: list[Forked] = []
    try:
        for rank, log in enumerate(logs):
            with log.open("wb") as errors:
                given = [*map(str, arguments), str(rank)]
                ranks.append(Forked(path, given, dict(os.environ), errors.fileno(), ends_whole=True))
        statuses = [rank.wait(120) for rank in ranks]
    except subprocess.TimeoutExpired as error:
        raise AssertionError([log.read_text()[-2000:] for log in logs]) from error
    finally:
        for rank in ranks:
            rank.kill()
    return [
        (status, rank.stdout.read(), log.read_text()) for status, rank, log in zip(statuses, ranks, logs, strict=True)
    ]


def num_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


# While it trains


@pytest.mark.parametrize("reuse_buffers", [True, False])
def test_what_is_saved_is_of_one_step_however_fast_the_optimizer_steps(tmp_path: Path, reuse_buffers: bool) -> None:
    """A few MiB, so that a save takes many steps; some tensors end within a block of the copies."""
    optimizer = Counting([1, 3, 1000, 300_000, 70_001])
    checkpointer = ends(Checkpointer(tmp_path, keep_last=1, reuse_buffers=reuse_buffers))
    checkpointer.guard_optimizer(optimizer)
    num_steps_meanwhile = 0
    for _ in range(by_default(8, thorough=25)):
        optimizer.step()
        step = optimizer.number
        future = checkpointer.save(optimizer.tensors(), step=step)
        while not future.done():
            optimizer.step()
            num_steps_meanwhile += 1
        assert future.result(LONG_S).step == step
        saved, tensors, _ = all_of(tmp_path)
        assert saved == step
        assert_of_one_step(tensors, step)
    checkpointer.shutdown()
    assert num_steps_meanwhile > by_default(3, thorough=10)
    assert checkpointer._pool.held_bytes() == 0


def test_a_save_leaves_no_thread_descriptor_or_memory(tmp_path: Path) -> None:
    optimizer = Counting([100_000])
    checkpointer = ends(Checkpointer(tmp_path, reuse_buffers=False, keep_last=2))
    checkpointer.guard_optimizer(optimizer)
    checkpointer.save(optimizer.tensors(), step=0).result(LONG_S)
    checkpointer.wait()
    before = num_descriptors()
    with no_threads_left():
        for _ in range(10):
            optimizer.step()
            future = checkpointer.save(optimizer.tensors(), step=optimizer.number)
            optimizer.step()
            future.result(LONG_S)
            checkpointer.wait()
            assert checkpointer._pool.held_bytes() == 0
    gc.collect()
    assert num_descriptors() <= before
    assert not [path for path in tmp_path.rglob("*") if ".tmp-" in path.name]


def test_without_guard_optimizer_the_state_is_copied_before_save_returns(tmp_path: Path) -> None:
    optimizer = Counting([1000, 50_000])
    checkpointer = ends(Checkpointer(tmp_path))
    for _ in range(5):
        optimizer.step()
        step = optimizer.number
        future = checkpointer.save(optimizer.tensors(), step=step)
        optimizer.step()
        future.result(LONG_S)
        _, tensors, _ = all_of(tmp_path)
        assert_of_one_step(tensors, step)


def test_arrays_and_containers_that_change_after_save_are_those_of_the_save(tmp_path: Path) -> None:
    optimizer = Counting([200_000])
    checkpointer = ends(Checkpointer(tmp_path))
    checkpointer.guard_optimizer(optimizer)
    array, seen = np.zeros(1000), {"order": [1, 2, 3]}
    for step in range(10):
        array[:] = step
        seen["order"][0] = step
        future = checkpointer.save({**optimizer.tensors(), "array": array, "seen": seen}, step=step)
        array[:] = -1
        seen["order"][0] = -1
        future.result(LONG_S)
        _, _, values = all_of(tmp_path)
        assert values["seen.order"] == [step, 2, 3]
        assert np.array_equal(values["array"], np.full(1000, float(step)))


def test_after_a_step_that_raised_a_save_is_of_the_state_it_was_given(tmp_path: Path) -> None:
    """The hook that lets the lock go does not run then."""
    optimizer = Counting([200_000])
    checkpointer = ends(Checkpointer(tmp_path))
    checkpointer.guard_optimizer(optimizer)
    optimizer.step()
    parameters = optimizer.param_groups[0].pop("params")
    with pytest.raises(KeyError):
        optimizer.step()
    optimizer.param_groups[0]["params"] = parameters
    optimizer.number = 1
    future = checkpointer.save(optimizer.tensors(), step=1)
    optimizer.step()
    assert future.result(LONG_S).is_closed
    _, tensors, _ = all_of(tmp_path)
    assert_of_one_step(tensors, 1)


def test_where_copies_have_no_room_the_save_fails_by_name_and_training_goes_on(tmp_path: Path) -> None:
    optimizer = Counting([2_000_000])
    checkpointer = ends(Checkpointer(tmp_path, staging_budget_bytes=1))
    checkpointer.guard_optimizer(optimizer)
    future = checkpointer.save(optimizer.tensors(), step=1)
    optimizer.step()
    with pytest.raises(CheckpointError, match="step 1"):
        future.result(LONG_S)
    assert optimizer.number == 1
    assert checkpoints_in(tmp_path) == []
    checkpointer.wait()
    second = checkpointer.save(optimizer.tensors(), step=2)  # nobody steps: no copies are needed
    assert second.result(LONG_S).is_closed
    assert checkpoints_in(tmp_path) == [2]


def test_one_save_is_in_flight_and_the_next_begins_as_soon_as_it_has_ended(tmp_path: Path) -> None:
    optimizer = Counting([10])
    goes_on = threading.Event()

    def hold(progress: TransferProgress) -> None:
        assert goes_on.wait(LONG_S)

    checkpointer = ends(Checkpointer(tmp_path, on_progress=hold))
    first = checkpointer.save(optimizer.tensors(), step=1)
    second = checkpointer.save(optimizer.tensors(), step=2)
    assert isinstance(second.exception(0), SaveInFlightError)
    assert "saving" in repr(checkpointer)
    assert not checkpointer.wait(timedelta(seconds=0.01))
    goes_on.set()
    assert first.result(LONG_S).step == 1
    for step in range(3, 12):
        assert checkpointer.save(optimizer.tensors(), step=step).result(LONG_S).step == step
    assert checkpointer.wait()
    assert "idle" in repr(checkpointer)
    checkpointer.shutdown()
    assert 2 not in checkpoints_in(tmp_path)


def test_shutdown_waits_for_the_save_or_gives_it_up(tmp_path: Path) -> None:
    optimizer = Counting([10, 10])
    with no_threads_left():
        checkpointer = ends(Checkpointer(tmp_path))
        future = checkpointer.save(optimizer.tensors(), step=1)
        checkpointer.shutdown()
        checkpointer.shutdown()
        assert future.result(0).is_closed
        begun, goes_on = threading.Event(), threading.Event()

        def hold(progress: TransferProgress) -> None:
            begun.set()
            assert goes_on.wait(LONG_S)

        checkpointer = ends(Checkpointer(tmp_path, on_progress=hold))
        future = checkpointer.save(optimizer.tensors(), step=2)
        assert begun.wait(LONG_S)
        ending = threading.Thread(target=checkpointer.shutdown, kwargs={"wait": False})
        ending.start()
        while not checkpointer._worker._woken.is_set():  # type: ignore[union-attr]
            pass
        goes_on.set()
        ending.join(LONG_S)
        with pytest.raises(CheckpointError, match="given up"):
            future.result(0)
    assert checkpoints_in(tmp_path) == [1]


def test_progress_is_told_until_all_is_written(tmp_path: Path) -> None:
    told: list[TransferProgress] = []
    checkpointer = ends(Checkpointer(tmp_path, on_progress=told.append))
    state = {"a": torch.zeros(1000), "b": torch.zeros(3, dtype=torch.int64)}
    saved = checkpointer.save(state, step=5).result(LONG_S)
    assert told[-1].received_bytes == told[-1].total_bytes == 4000 + 24
    assert [one.received_bytes for one in told] == sorted(one.received_bytes for one in told)
    on_disk = sum(path.stat().st_size for path in (tmp_path / saved.name).iterdir() if path.name != ".metadata")
    assert saved.written_bytes == on_disk
    assert (saved.step, saved.num_fills) == (5, 0)


def test_a_callback_that_raises_costs_nothing_but_itself(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    told: list[TransferProgress] = []

    def raises(progress: TransferProgress) -> None:
        told.append(progress)
        raise BrokenPipeError("whoever watched has gone")

    checkpointer = ends(Checkpointer(tmp_path, on_progress=raises))
    state = {"a": torch.ones(1000), "b": torch.arange(3)}
    for step in (1, 2):
        assert checkpointer.save(state, step=step).result(LONG_S).is_closed
        assert [one.step for one in told] == list(range(1, step + 1))  # of each save once
    assert all_of(tmp_path)[1]["a"].tolist() == [1.0] * 1000
    assert [record.getMessage() for record in caplog.records if record.levelname == "ERROR"] == [
        "on_progress raised at step 1; it is not called again",
        "on_progress raised at step 2; it is not called again",
    ]


# Names and retention


def test_a_step_that_is_saved_again_gets_a_directory_of_its_own(tmp_path: Path) -> None:
    checkpointer = ends(Checkpointer(tmp_path))
    names = []
    for number in range(12):
        names.append(checkpointer.save({"w": torch.full((4,), float(number))}, step=7).result(LONG_S).name)
        assert all_of(tmp_path)[1]["w"].tolist() == [number] * 4
    assert len(set(names)) == 12


def test_another_run_does_not_write_into_what_a_dead_one_left(tmp_path: Path) -> None:
    Checkpointer(tmp_path).save({"w": torch.zeros(4)}, step=7).result(LONG_S)
    (left,) = tmp_path.iterdir()
    for path in left.iterdir():
        if path.name.endswith(".json") or path.name == ".metadata":
            path.unlink()
    before = {path: path.read_bytes() for path in left.iterdir()}
    Checkpointer(tmp_path).save({"w": torch.ones(4)}, step=7).result(LONG_S)
    assert {path: path.read_bytes() for path in left.iterdir()} == before
    assert all_of(tmp_path)[1]["w"].tolist() == [1.0] * 4


def test_old_checkpoints_are_removed_but_for_those_that_are_to_stay(tmp_path: Path) -> None:
    checkpointer = ends(Checkpointer(tmp_path, keep_last=2, keep_every=5))
    state = {"w": torch.zeros(1000), "lr": 0.5}
    for step in range(1, 18):
        checkpointer.save(state, step=step).result(LONG_S)
        checkpointer.wait()
        expected = [kept for kept in range(step, 0, -1) if kept > step - 2 or kept % 5 == 0]
        assert checkpoints_in(tmp_path) == expected
    assert len(list(tmp_path.iterdir())) == 5


def test_a_save_that_failed_removes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(storage: LocalStorage, path: str) -> None:
        raise StorageError("of the test", path)

    Checkpointer(tmp_path, keep_last=1).save({"w": torch.zeros(4)}, step=1).result(LONG_S)
    monkeypatch.setattr(LocalStorage, "create", fail)
    failing = Checkpointer(tmp_path, keep_last=1)
    with pytest.raises(StorageError, match="of the test"):
        failing.save({"w": torch.ones(4)}, step=2).result(LONG_S)
    failing.wait()
    assert all_of(tmp_path)[0] == 1


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"keep_last": 0}, "keep_last=0"),
        ({"keep_every": -1}, "keep_every=-1"),
        ({"redundancy": 0}, "redundancy=0"),
        ({"fill_after": timedelta(0)}, "fill_after"),
        ({"timeout": timedelta(seconds=-1)}, "timeout"),
        ({"storage_options": {"a": 1}}, "takes no options"),
    ],
)
def test_an_argument_that_cannot_be_used_is_named(tmp_path: Path, arguments: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(named)):
        Checkpointer(tmp_path, **arguments)


def test_calls_that_lack_something_are_refused_and_leave_nothing(tmp_path: Path) -> None:
    checkpointer = ends(Checkpointer(tmp_path))
    with pytest.raises(ConfigError, match="step"):
        checkpointer.save({})
    with pytest.raises(ConfigError, match="state_dict"):
        checkpointer.save(step=1)
    with pytest.raises(ConfigError, match="step=-1"):
        checkpointer.save({}, step=-1)
    with pytest.raises(ConfigError, match="local_location"):
        checkpointer.save({}, step=1, tier=Tier.LOCAL)
    with pytest.raises(ConfigError, match="Manager"):
        checkpointer.restore()
    with pytest.raises(CheckpointNotFoundError, match="no whole checkpoint"):
        checkpointer.load({"w": torch.zeros(1)})
    assert list(tmp_path.iterdir()) == []
    assert checkpointer.save({}, step=1).result(LONG_S).is_closed  # an empty state is a state


@pytest.mark.parametrize(
    "step", [np.int64(4), np.uint8(4), torch.tensor(4), np.array(4)], ids=lambda step: type(step).__name__
)
def test_a_step_is_a_whole_number_of_any_kind(tmp_path: Path, step: Any) -> None:
    checkpointer = ends(Checkpointer(tmp_path))
    saved = checkpointer.save({"w": torch.ones(3)}, step=step).result(LONG_S)
    read = {"w": torch.zeros(3)}
    restored = checkpointer.load(read, step=step)
    assert (type(saved.step), type(restored.step), restored.step, read["w"].tolist()) == (int, int, 4, [1.0] * 3)


@pytest.mark.parametrize("step", [4.0, "4", np.float32(4), torch.tensor([4, 5]), np.int64(-1), -1], ids=repr)
def test_a_step_that_is_none_is_refused_at_the_call(tmp_path: Path, step: Any) -> None:
    checkpointer = ends(Checkpointer(tmp_path))
    for call in (checkpointer.save, checkpointer.load):
        with pytest.raises(ConfigError, match="step=") as caught:
            call({"w": torch.ones(3)}, step=step)
        assert caught.value.party == "step"
    assert list(tmp_path.iterdir()) == []


def test_a_place_in_the_users_home_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    checkpointer = ends(Checkpointer("~/shared", local_location=Path("~/own")))
    saved = checkpointer.save({"w": torch.ones(2)}, step=1).result(LONG_S)
    checkpointer.save({"w": torch.ones(2)}, step=2, tier=Tier.LOCAL).result(LONG_S)
    checkpointer.shutdown()
    read = {"w": torch.zeros(2)}
    load_checkpoint(f"~/shared/{saved.name}", read)
    assert read["w"].tolist() == [1.0, 1.0]
    assert sorted(place.name for place in tmp_path.iterdir()) == ["own", "shared"]


def test_a_place_that_cannot_be_written_to_fails_the_save_and_not_the_training(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    checkpointer = ends(Checkpointer(tmp_path / "file" / "below"))
    with pytest.raises(StorageError, match="below"):
        checkpointer.save({"w": torch.zeros(3)}, step=1).result(LONG_S)


def test_very_many_plain_values_are_said_once_with_where_most_of_them_are(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torchft_ckpt.checkpointer._MANY_VALUES", 50)
    checkpointer = ends(Checkpointer(tmp_path))
    state = {"lr": 0.1, "user": {"replay": [{"reward": 1.0, "done": False} for _ in range(30)], "name": "n"}}
    for step in (1, 2):
        checkpointer.save(state, step=step).result(LONG_S)
    (said,) = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert "62 plain values, most of them in 'user.replay'" in said


@pytest.mark.parametrize(
    ("state", "path"),
    [
        ({"a": {"b": [1, object()]}}, "a.b.1"),
        ({"model": {"w": torch.ones(2, dtype=torch.complex32)}, "s": {1, object}}, "s"),
        ({"a": {"f": lambda: None}}, "a.f"),
        ({"a": {"b": torch.ones(1)}, "a.b": torch.ones(1)}, "a.b"),
        ({"w": torch.ones(3, 3).to_sparse()}, "w"),
        ({"m": torch.ones(2, device="meta")}, "m"),
        ({"t": ({"x": np.array(["text"])},)}, "t.0.x"),
    ],
)
def test_what_cannot_be_carried_is_refused_by_path_and_the_next_save_works(
    tmp_path: Path, state: dict[str, Any], path: str
) -> None:
    checkpointer = ends(Checkpointer(tmp_path))
    with pytest.raises(UnsupportedValueError, match=re.escape(path)):
        checkpointer.save(state, step=1)
    assert checkpoints_in(tmp_path) == []
    assert checkpointer.save({"w": torch.ones(2)}, step=2).result(LONG_S).is_closed
    checkpointer.shutdown()
    assert checkpointer._pool.held_bytes() == 0


# Every kind of value

KINDS: list[torch.dtype] = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.complex64,
    torch.complex128,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
]


def every_kind() -> dict[str, Any]:
    tensors: dict[str, Any] = {}
    for seed, dtype in enumerate(KINDS):
        if dtype is torch.bool:
            tensors[str(dtype)] = torch.arange(77) % 3 == 0
        else:
            tensors[str(dtype)] = random_bits((7, 11), dtype, seed)
    shared = torch.arange(60.0)
    nan = np.array([np.nan, -0.0, 1.0])
    return {
        "tensors": tensors,
        "empty": torch.empty(0, 3),
        "scalar": torch.tensor(2.5, dtype=torch.bfloat16),
        "transposed": torch.arange(12.0).view(3, 4).t(),
        "every_other": torch.arange(40, dtype=torch.int16)[::2],
        "expanded": torch.tensor([1.0, 2.0]).expand(3, 2),
        "conjugate": torch.tensor([1 + 2j, 3 - 1j]).conj(),
        "tied": {"a": shared, "b": shared, "part": shared[10:20]},
        "parameter": torch.nn.Parameter(torch.ones(3)),
        "tuple": (1, "two", (3.0, None), torch.ones(2)),
        "list": [torch.zeros(2), {"x": 1}, []],
        "int keys": {0: torch.ones(1), 7: "seven", "7s": None},
        "nothing": {},
        "none": None,
        "nan": float("nan"),
        "inf": [float("inf"), -float("inf"), -0.0],
        "big": 2**100,
        "complex": 1 - 2j,
        "bytes": b"\x00\xff",
        "text": "\u00fc\n\u4e2d",
        "size": torch.Size([2, 3]),
        "dtype": torch.bfloat16,
        "counter": Counter(a=2),
        "ordered": OrderedDict(z=1, a=2),
        "array": nan,
        "array0": np.array(3, dtype=np.int32),
        "bool array": np.array([True, False]),
        "number": np.float32(1.5),
    }


def test_every_kind_of_value_is_read_by_plain_dcp_as_it_was_saved(tmp_path: Path) -> None:
    checkpointer = ends(Checkpointer(tmp_path))
    name = checkpointer.save(every_kind(), step=1).result(LONG_S).name
    checkpointer.shutdown()
    dcp_to_torch_save(tmp_path / name, tmp_path / "all.pt")
    read = torch.load(tmp_path / "all.pt", weights_only=False)
    expected = every_kind()
    for key, tensor in expected["tensors"].items():
        assert torch.equal(bits_of(read["tensors"][key]), bits_of(tensor)), key
        assert read["tensors"][key].dtype == tensor.dtype
    for key in ("empty", "scalar", "transposed", "every_other", "expanded", "parameter"):
        assert read[key].shape == expected[key].shape
        assert torch.equal(bits_of(read[key]), bits_of(expected[key])), key
    assert torch.equal(read["conjugate"], expected["conjugate"].resolve_conj())
    assert all(torch.equal(read["tied"][key], expected["tied"][key]) for key in expected["tied"])
    assert read["tuple"][:3] == expected["tuple"][:3]
    assert read["list"][1:] == [{"x": 1}, []]
    assert read["int keys"]["7"] == "seven"  # DCP has no other keys than strings
    assert read["int keys"]["7s"] is None
    assert "nothing" not in read  # DCP has no name for an empty dict
    for key in ("none", "inf", "big", "complex", "bytes", "text", "size", "dtype", "counter", "ordered"):
        assert read[key] == expected[key], key
    assert np.isnan(read["nan"])
    assert np.array_equal(read["array"], expected["array"], equal_nan=True)
    assert read["array0"] == 3
    assert read["number"] == 1.5


class Phase(enum.Enum):
    WARM_UP = 1
    DECAY = 2


class Progress(NamedTuple):
    phase: Phase
    weights: torch.Tensor


def test_named_tuples_and_enums_become_the_classes_of_the_state_dict_or_are_refused(tmp_path: Path) -> None:
    checkpointer = ends(Checkpointer(tmp_path))
    name = checkpointer.save({"a": {"progress": Progress(Phase.DECAY, torch.ones(2))}}, step=1).result(LONG_S).name
    target = {"a": {"progress": Progress(Phase.WARM_UP, torch.zeros(2))}}
    checkpointer.load(target)
    assert (type(target["a"]["progress"]), target["a"]["progress"].phase) == (Progress, Phase.DECAY)
    assert torch.equal(target["a"]["progress"].weights, torch.ones(2))
    with pytest.raises(StateMismatchError, match=r"a\.progress is a named tuple .*register_state_class"):
        checkpointer.load({"a": {"progress": None}})
    checkpointer.shutdown()
    dcp_to_torch_save(tmp_path / name, tmp_path / "all.pt")  # which imports nothing of ours
    assert torch.load(tmp_path / "all.pt", weights_only=False)["a"]["progress"][0] == Phase.DECAY.value


# What belongs to this rank


def test_a_default_device_does_not_matter(tmp_path: Path) -> None:
    """Nothing here is on the meta device; what the library made there would be empty."""
    state: dict[str, Any] = {
        "array": np.arange(3.0),
        "turned": torch.arange(6.0).reshape(2, 3),
        "conjugate": torch.tensor([1j, 2 + 1j]),
        "pair": (torch.arange(3.0), 1),
        "empty": torch.empty(0, 4),
        "adam": {"state": {0: {"step": torch.tensor(3.0)}}},
    }
    here: dict[str, Any] = {
        "array": None,
        "turned": torch.zeros(3, 2).t(),
        "conjugate": torch.zeros(2, dtype=torch.complex64).conj(),
        "pair": None,
        "empty": torch.empty(0, 4),
        "adam": {"state": {0: {"step": torch.tensor(0.0)}}},
    }
    with torch.device("meta"):
        checkpointer = ends(Checkpointer(tmp_path))
        checkpointer.save(state, step=1, rank_state={"position": 7, "seen": torch.empty(0, 3, device="cpu")}).result(
            LONG_S
        )
        expected = torch.get_rng_state()
        torch.rand(3, device="cpu")
        restored = checkpointer.load(here)
        checkpointer.shutdown()
    assert isinstance(restored.rank_state, dict)
    assert (restored.rank_state["position"], restored.rank_state["seen"].device.type) == (7, "cpu")
    assert torch.equal(torch.get_rng_state(), expected)
    for name in ("turned", "conjugate", "empty"):
        assert torch.equal(here[name], state[name])
    assert (here["array"].tolist(), here["pair"][0].tolist(), here["pair"][1]) == ([0, 1, 2], [0, 1, 2], 1)
    assert here["adam"]["state"][0]["step"].item() == 3.0
    load_checkpoint(next(tmp_path.iterdir()), here)  # and it was saved as ever
    assert torch.equal(here["turned"], state["turned"])


def test_own_values_and_random_numbers_go_on_where_they_were(tmp_path: Path) -> None:
    checkpointer = ends(Checkpointer(tmp_path))
    own = {"position": 17, "loader": {"rng": torch.arange(5), "epoch": np.int64(3)}, "seen": (1, None)}
    random.seed(1), np.random.seed(2), torch.manual_seed(3)
    checkpointer.save({"w": torch.zeros(2)}, step=4, rank_state=own).result(LONG_S)
    drawn = (random.random(), np.random.rand(3).tolist(), torch.rand(3).tolist(), torch.randn(3).tolist())
    random.seed(9), np.random.seed(9), torch.manual_seed(9)
    restored = checkpointer.load({"w": torch.ones(2)})
    assert drawn == (random.random(), np.random.rand(3).tolist(), torch.rand(3).tolist(), torch.randn(3).tolist())
    assert isinstance(restored.rank_state, dict)
    assert restored.rank_state["position"] == 17
    assert restored.rank_state["seen"] == (1, None)
    assert restored.rank_state["loader"]["rng"].tolist() == [0, 1, 2, 3, 4]


def test_a_run_is_not_named_by_a_stranger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHFT_CKPT_TOKEN", "a secret")
    store = dist.HashStore()
    monkeypatch.setattr(ranks, "_default_store", lambda: store)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        store.set(f"torchft_ckpt/run/{ranks._num_runs + 1}", "../elsewhere")
        with pytest.raises(SourceRefusedError, match="not put into the store by who knows our token"):
            Checkpointer(tmp_path)
        Checkpointer(tmp_path).shutdown()
    finally:
        dist.destroy_process_group()


@pytest.mark.processes
def test_arrays_and_tensors_in_tuples_are_read_from_the_disks_of_other_hosts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHFT_CKPT_TOKEN", "a secret")
    script = (
        "import sys, numpy, torch, torch.distributed as dist; from torchft_ckpt import Checkpointer, Tier; "
        "place, meeting, rank = sys.argv[1:]; "
        "dist.init_process_group('gloo', init_method=meeting, rank=int(rank), world_size=2); "
        "checkpointer = Checkpointer(place + '/shared', local_location=place + '/disk' + rank); "
        "state = {'w': torch.arange(100_000.), 'array': numpy.arange(5.), 'pair': (torch.arange(70_000.), 7)}; "
        "checkpointer.save(state, step=5, tier=Tier.LOCAL).result(); dist.barrier(); "
        "here = {'w': torch.zeros(100_000), 'array': None, 'pair': None}; "
        "restored = checkpointer.load(here); "
        "assert torch.equal(here['w'], state['w']) and (here['array'] == state['array']).all(), here; "
        "assert torch.equal(here['pair'][0], state['pair'][0]) and here['pair'][1] == 7, here; "
        "print(restored.source.value, restored.bytes_from_storage < 450_000); "
        "dist.barrier(); checkpointer.shutdown(); dist.destroy_process_group()"
    )
    meeting = f"file://{tmp_path / 'meeting'}"
    outcomes = run_ranks(tmp_path, 2, script, tmp_path, meeting)
    assert [out for _, out, _ in outcomes] == ["local disk True\n"] * 2, outcomes


@pytest.mark.processes
def test_load_and_load_checkpoint_give_each_rank_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHFT_CKPT_TOKEN", "a secret")
    script = (
        "import sys, torch, torch.distributed as dist; from torchft_ckpt import Checkpointer; "
        "from torchft_ckpt.checkpointing.durable.reading.loading import load_checkpoint; "
        "place, meeting, rank = sys.argv[1], sys.argv[2], int(sys.argv[3]); "
        "dist.init_process_group('gloo', init_method=meeting, rank=rank, world_size=2); "
        "weight = torch.nn.Parameter(torch.ones(9)); optimizer = torch.optim.SGD([weight], lr=0.1); "
        "checkpointer = Checkpointer(place); checkpointer.guard_optimizer(optimizer); "
        "saved = checkpointer.save({'weight': weight, 'mean': torch.full((5,), 1.0 + rank), 'at': rank}, step=5); "
        "name = saved.result().name; dist.barrier(); "
        "here = {'weight': torch.zeros(9), 'mean': torch.zeros(5), 'at': None}; checkpointer.load(here); "
        "there = {'mean': torch.zeros(5), 'at': None}; load_checkpoint(place + '/' + name, there); "
        "print(here['weight'][0].item(), here['mean'][0].item(), here['at'], there['mean'][0].item(), there['at']); "
        "dist.barrier(); checkpointer.shutdown(); dist.destroy_process_group()"
    )
    place, meeting = tmp_path / "saved", f"file://{tmp_path / 'meeting'}"
    outcomes = run_ranks(tmp_path, 2, script, place, meeting)
    assert [out for _, out, _ in outcomes] == ["1.0 1.0 0 1.0 0\n", "1.0 2.0 1 2.0 1\n"], outcomes
    assert all(log.count("did not hold the same bytes of mean") == 2 for _, _, log in outcomes), "of each load one"


@pytest.mark.processes
def test_ranks_without_a_manager_load_one_step_or_none_of_them_does(tmp_path: Path) -> None:
    """Each has a disk of its own. Rank 0 reads what is damaged; rank 1's disk lacks the newest, or rank 1 cannot load it."""
    saved = tmp_path / "saved"
    checkpointer = ends(Checkpointer(saved))
    for step in (1, 2):
        state = {"weight": torch.full((9,), float(step)), "x": {"weight": torch.ones(9)}}
        checkpointer.save(state, step=step).result(30)
    checkpointer.shutdown()
    for place in ("damaged0", "damaged1", "gone0", "gone1", "raises0", "raises1"):
        shutil.copytree(saved, tmp_path / place)
    (path,) = (tmp_path / "damaged0").glob("step-000000000002.*/*.distcp")
    path.write_bytes(bytes(len(path.read_bytes())))
    (newest,) = (tmp_path / "gone1").glob("step-000000000002.*")
    shutil.rmtree(newest)
    script = (
        "import sys, torch, torch.distributed as dist; from torchft_ckpt import Checkpointer\n"
        "place, meeting, rank = sys.argv[1], sys.argv[2], int(sys.argv[3])\n"
        "dist.init_process_group('gloo', init_method=meeting, rank=rank, world_size=2)\n"
        "class Counter:\n"
        "    def state_dict(self):\n"
        "        return {'weight': torch.zeros(9)}\n"
        "    def load_state_dict(self, state):\n"
        "        if rank: raise ValueError('it does not load')\n"
        "for case in ('damaged', 'gone', 'raises'):\n"
        "    here = {'weight': torch.zeros(9)}\n"
        "    checkpointer = Checkpointer(f'{place}/{case}{rank}')\n"
        "    try:\n"
        "        if case == 'raises': here = {'x': Counter(), **here}\n"
        "        found = checkpointer.load(here)\n"
        "        print(case, found.step, here['weight'][0].item())\n"
        "    except Exception as error:\n"
        "        print(case, type(error).__name__)\n"
        "dist.barrier(); dist.destroy_process_group()"
    )
    outcomes = run_ranks(tmp_path, 2, script, tmp_path, f"file://{tmp_path / 'meeting'}")
    told = "damaged 1 1.0\ngone 2 2.0\n"
    assert [out for _, out, _ in outcomes] == [
        f"{told}raises SourceLostError\n",
        f"{told}raises StateDictLoadError\n",
    ], outcomes


@pytest.mark.processes
def test_ranks_that_differ_are_told_at_the_save_and_old_checkpoints_go_as_always(tmp_path: Path) -> None:
    """A replicated parameter drifts at step 2, and is copied from rank 0 before step 4."""
    script = (
        "import sys, torch, torch.distributed as dist; from torchft_ckpt import Checkpointer, checkpoints_in; "
        "place, meeting, rank = sys.argv[1], sys.argv[2], int(sys.argv[3]); "
        "dist.init_process_group('gloo', init_method=meeting, rank=rank, world_size=2); "
        "weight = torch.nn.Parameter(torch.ones(9)); optimizer = torch.optim.SGD([weight], lr=0.1); "
        "checkpointer = Checkpointer(place, keep_last=2); checkpointer.guard_optimizer(optimizer)\n"
        "for step in range(1, 5):\n"
        "    with checkpointer.state_dict_lock.write(), torch.no_grad():\n"
        "        weight[3] = 1.0 + (rank if step in (2, 3) else 0)\n"
        "    print(type(checkpointer.save({'weight': weight}, step=step).exception()).__name__)\n"
        "    checkpointer.wait(); dist.barrier()\n"
        "print(*sorted(checkpoints_in(place))); checkpointer.shutdown(); dist.destroy_process_group()"
    )
    outcomes = run_ranks(tmp_path, 2, script, tmp_path / "saved", f"file://{tmp_path / 'meeting'}")
    expected = "NoneType\nRanksDifferError\nRanksDifferError\nNoneType\n3 4\n"
    assert [out for _, out, _ in outcomes] == [expected] * 2, outcomes


def test_random_numbers_are_left_alone_where_that_was_asked_for(tmp_path: Path) -> None:
    checkpointer = ends(Checkpointer(tmp_path, save_random_state=False))
    checkpointer.save({"w": torch.zeros(2)}, step=4).result(LONG_S)
    torch.manual_seed(9)
    expected = torch.rand(2).tolist()
    torch.manual_seed(9)
    assert checkpointer.load({"w": torch.ones(2)}).rank_state is None
    assert torch.rand(2).tolist() == expected


def test_what_does_not_fit_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    checkpointer = ends(Checkpointer(tmp_path))
    checkpointer.save({"w": torch.zeros(2), "lr": 0.1}, step=4).result(LONG_S)
    for wanted in ({"w": torch.ones(3)}, {"w": torch.ones(2, dtype=torch.int32)}, {"v": torch.ones(2)}, {"x": 1}):
        before = {key: getattr(value, "tolist", lambda value=value: value)() for key, value in wanted.items()}
        torch.manual_seed(9)
        drawn = torch.get_rng_state()
        with pytest.raises(StateMismatchError):
            checkpointer.load(wanted)
        assert {key: getattr(value, "tolist", lambda value=value: value)() for key, value in wanted.items()} == before
        assert torch.equal(torch.get_rng_state(), drawn)


# The disk of this host


def test_the_newest_of_local_disk_and_storage_is_loaded(tmp_path: Path) -> None:
    checkpointer = ends(Checkpointer(tmp_path / "shared", local_location=tmp_path / "local", keep_last=2))
    w = torch.zeros(3)
    for step in range(1, 9):
        w.fill_(step)
        tier = Tier.STORAGE if step % 4 == 0 else Tier.LOCAL
        saved = checkpointer.save({"w": w}, step=step, tier=tier).result(LONG_S)
        checkpointer.wait()
        assert saved.is_closed == (tier is Tier.STORAGE)
        target = {"w": torch.zeros(3)}
        restored = checkpointer.load(target)
        assert (restored.step, restored.source) == (
            step,
            RestoreSource.STORAGE if step % 4 == 0 else RestoreSource.LOCAL_DISK,
        )
        assert target["w"].tolist() == [step] * 3
    assert [path.name.split(".")[0][-2:] for path in sorted((tmp_path / "local").iterdir())] == ["05", "06", "07"], (
        "of what is newer than the whole one of step 4 nothing goes, as nobody knows whether others have their parts"
    )
    assert checkpointer.load({"w": w}, step=6).source is RestoreSource.LOCAL_DISK
    assert checkpointer.load({"w": w}, step=4).source is RestoreSource.STORAGE


def test_a_save_cannot_be_cancelled_by_its_future(tmp_path: Path) -> None:
    """It reads live memory until it has ended; only that tells the next one that it may begin."""
    checkpointer = ends(Checkpointer(tmp_path))
    future = checkpointer.save({"w": torch.ones(1000)}, step=1)
    assert not future.cancel()
    assert future.result(LONG_S).is_closed


@pytest.mark.processes
def test_the_last_save_is_not_lost_with_the_end_of_the_script(tmp_path: Path) -> None:
    script = (
        "import sys, torch; from torchft_ckpt import Checkpointer; "
        "Checkpointer(sys.argv[1]).save({'w': torch.ones(20_000_000)}, step=3)"
    )
    [(status, _, errors)] = run_ranks(tmp_path, 1, script, tmp_path / "saved")
    assert status == 0, errors[-2000:]
    assert checkpoints_in(tmp_path / "saved") == [3]


@pytest.mark.processes
def test_the_last_save_of_several_ranks_is_whole_at_the_end_of_the_script(tmp_path: Path) -> None:
    """The interpreter gives no more threads by then, and several manifests are read in threads."""
    script = (
        "import sys, torch, torch.distributed as dist; from torchft_ckpt import Checkpointer; "
        "dist.init_process_group('gloo', init_method=sys.argv[2], rank=int(sys.argv[3]), world_size=3); "
        "Checkpointer(sys.argv[1]).save({'w': torch.ones(4_000_000)}, step=3)"
    )
    place, meeting = tmp_path / "saved", f"file://{tmp_path / 'meeting'}"
    outcomes = run_ranks(tmp_path, 3, script, place, meeting)
    assert [status for status, _, _ in outcomes] == [0, 0, 0], outcomes
    assert checkpoints_in(place) == [3]


def test_a_place_that_does_not_answer_does_not_hold_the_end_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("torchft_ckpt.checkpointer._TO_GIVE_UP", timedelta(seconds=0.05))
    begun, goes_on = threading.Event(), threading.Event()

    def hold(progress: TransferProgress) -> None:
        begun.set()
        assert goes_on.wait(LONG_S)

    optimizer = Counting([1000, 1000])
    checkpointer = ends(Checkpointer(tmp_path, on_progress=hold))
    checkpointer.guard_optimizer(optimizer)
    future = checkpointer.save(optimizer.tensors(), step=2)
    assert begun.wait(LONG_S)
    checkpointer.shutdown(wait=False)
    assert "its thread is left" in caplog.text
    with pytest.raises(CheckpointError, match="shutdown was called"):
        checkpointer.save(optimizer.tensors(), step=3)
    optimizer.step()
    goes_on.set()
    with pytest.raises(CheckpointError, match="given up"):
        future.result(LONG_S)
    assert checkpoints_in(tmp_path) == []


def test_a_load_while_a_save_is_in_flight_does_not_change_what_is_saved(tmp_path: Path) -> None:
    begun, goes_on = threading.Event(), threading.Event()

    def hold(progress: TransferProgress) -> None:
        begun.set()
        assert progress.step == 100 or goes_on.wait(LONG_S)

    optimizer = Counting([300_000, 300_000])
    checkpointer = ends(Checkpointer(tmp_path, on_progress=hold))
    checkpointer.guard_optimizer(optimizer)
    checkpointer.save(optimizer.tensors(), step=100).result(LONG_S)
    optimizer.number = 199
    optimizer.step()
    begun.clear()
    future = checkpointer.save(optimizer.tensors(), step=200)
    assert begun.wait(LONG_S), "some of it is written, the rest is not"
    checkpointer.load(optimizer.tensors(), step=100)
    assert_of_one_step({"w": optimizer.param_groups[0]["params"][1]}, 0)
    goes_on.set()
    assert future.result(LONG_S).is_closed
    assert_of_one_step(all_of(tmp_path, 200)[1], 200)


def test_a_state_that_is_received_in_place_does_not_get_into_a_save_in_flight(tmp_path: Path) -> None:
    """As a replica that heals while it saves: nobody takes the lock, because the trainer waits."""
    begun, goes_on = threading.Event(), threading.Event()

    def hold(progress: TransferProgress) -> None:
        begun.set()
        assert goes_on.wait(LONG_S)

    optimizer = Counting([300_000, 300_000])
    checkpointer = ends(Checkpointer(tmp_path, on_progress=hold))
    checkpointer.guard_optimizer(optimizer)
    others = {name: torch.full_like(weight, 7.0) for name, weight in optimizer.tensors()["weights"].items()}
    limit = timedelta(seconds=20)
    peer: HTTPTransport[Any] = HTTPTransport(hostname="127.0.0.1")
    own: HTTPTransport[Any] = HTTPTransport(hostname="127.0.0.1", lock=checkpointer._lock)
    peer.send_checkpoint([0], 7, {"weights": others}, limit)
    future = checkpointer.save(optimizer.tensors(), step=1)
    assert begun.wait(LONG_S)
    local = {"weights": optimizer.tensors()["weights"]}
    own.fetch_checkpoint([peer.metadata()], 7, limit, local_state=local, in_place=True)
    assert_of_one_step(local["weights"], 7)
    goes_on.set()
    assert future.result(LONG_S).is_closed
    assert_of_one_step(all_of(tmp_path, 1)[1], 0)
    for each in (own, peer, checkpointer):
        each.shutdown()


def test_a_step_that_raised_and_kept_the_lock_is_not_saved_and_the_next_one_is(tmp_path: Path) -> None:
    checkpointer = ends(Checkpointer(tmp_path))
    parameter = torch.nn.Parameter(torch.zeros(300_000))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    checkpointer.guard_optimizer(optimizer)
    checkpointer._lock.acquire_write()  # as a pre-step hook does, and a step that raises never gives it back
    with pytest.raises(CheckpointError, match="in the middle of a step"):
        checkpointer.save({"w": parameter}, step=1).result(LONG_S)
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    checkpointer.save({"w": parameter}, step=2).result(LONG_S)
    target = {"w": torch.full((300_000,), 7.0)}
    checkpointer.load(target)
    assert torch.equal(target["w"], parameter)
