"""Replica groups of Lightning's Trainer, in real processes: one is killed, is started again, and ends with the bits of the other.

Accumulation, clipping, a schedule, validation, checkpoints and a logger are on, for all groups in one directory.
"""

from __future__ import annotations

import ast
import copy
import csv
import itertools
import os
import re
import signal
import sys
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from framework_jobs import FrameworkJob, Group, assert_equal_states

pytest.importorskip("lightning")

from fingerprints import leaves
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import (
    BackboneFinetuning,
    BatchSizeFinder,
    LearningRateFinder,
    ModelCheckpoint,
    ModelPruning,
)
from lightning.pytorch.callbacks.spike import SpikeDetection
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from lightning_job import ACCUMULATE, BATCH_SIZE, NUM_SAMPLES, Net, make_data, make_trainer, sampler_of
from support.launched import REPO
from torch.utils.data import DataLoader

sys.path.insert(0, str(REPO / "examples"))
import plain_steps

from torchft_ckpt import LighthouseServer, Manager, ProcessGroupGloo
from torchft_ckpt.errors import ConfigError
from torchft_ckpt.integrations.lightning import (
    FaultToleranceStrategy,
    _ContinuedMetrics,
    _is_of_numbers,
    _name_below,
    _path_below,
    _renamed,
)

SCRIPT = Path(__file__).with_name("lightning_job.py")
NUM_STEPS = 60

# ------------------------------------------------------------------------------------------------------- in one process


@pytest.fixture
def manager() -> Iterator[Manager]:
    lighthouse = LighthouseServer(bind="127.0.0.1:0", min_replicas=1)
    made = Manager(
        pg=ProcessGroupGloo(),
        load_state_dict=None,
        state_dict=None,
        min_replica_size=1,
        replica_id="group_0",
        lighthouse_addr=lighthouse.address(),
    )
    yield made
    made.shutdown()
    lighthouse.shutdown()
    rank_zero_only.rank = 0  # as it was: Lightning's loggers ask it, for the whole process


class Alone:
    """The Manager of a group of one rank that finds no other one, or one that holds a state."""

    group_world_size = 1

    def __init__(self, step_of_others: int | None = None) -> None:
        self.step_of_others = step_of_others

    def newest_step_of_peers(self) -> int | None:
        return self.step_of_others


def write(path: Path, at: int, *, cut: int = 0) -> Path:
    """Write a checkpoint as of a time in seconds, without its last bytes."""
    with path.open("wb") as file:
        torch.save({"step": at}, file)
    os.truncate(path, path.stat().st_size - cut)
    os.utime(path, (at, at))
    return path


def test_a_job_resumes_from_the_checkpoint_that_was_written_last(tmp_path: Path) -> None:
    strategy = FaultToleranceStrategy(Alone(), "cpu")
    assert strategy.resume_from(tmp_path / "none") is None
    older, last = write(tmp_path / "epoch=0-step=100.ckpt", 100), write(tmp_path / "last.ckpt", 200)
    write(tmp_path / "model.pt", 300)
    assert strategy.resume_from(tmp_path) == str(last)
    write(last, 200, cut=40)
    assert strategy.resume_from(str(tmp_path)) == str(older)
    assert FaultToleranceStrategy(Alone(7), "cpu").resume_from(tmp_path) is None
    with pytest.raises(ConfigError, match="name the checkpoint"):
        strategy.resume_from("s3://bucket/out")


def test_what_lightning_did_not_end_keeps_nobody_from_an_older_checkpoint(tmp_path: Path) -> None:
    strategy = FaultToleranceStrategy(Alone(), "cpu")
    (tmp_path / "last.ckpt").symlink_to("gone.ckpt")
    os.mkfifo(tmp_path / "pipe.ckpt")
    (tmp_path / "empty.ckpt").touch()
    (tmp_path / "begun.ckpt").mkdir()
    assert strategy.resume_from(tmp_path) is None
    folder = tmp_path / "step=100.ckpt"
    folder.mkdir()
    for name in ("__0_0.distcp", ".metadata", "meta.pt"):
        write(folder / name, 100)
    assert strategy.resume_from(tmp_path) == str(folder)
    os.utime(folder / "__0_0.distcp", (150, 150))  # a later save overwrites it, and died
    assert strategy.resume_from(tmp_path) is None


class SpoilSteps(Callback):
    """Lets some steps of the job be discarded, each once."""

    def __init__(self, manager: Manager, steps: set[int]) -> None:
        self.manager = manager
        self.left = steps

    def on_after_backward(self, trainer: Trainer, *_: Any) -> None:
        if trainer.global_step in self.left:
            self.left.remove(trainer.global_step)
            self.manager.report_error(RuntimeError("the test says so"))


def train_here(folder: Path, num_steps: int, **options: Any) -> tuple[Trainer, dict[str, str]]:
    """Train the job's model in this process; return the trainer and what is to be equal, by name."""
    data = make_data()
    callbacks = options.pop("more_callbacks", [])
    trainer = make_trainer(folder, num_steps, enable_progress_bar=False, **options)
    trainer.callbacks[:0] = callbacks
    model = Net(7, num_steps)
    loader = DataLoader(data, batch_size=BATCH_SIZE, sampler=sampler_of(0, data), drop_last=True)
    trainer.fit(model, loader, DataLoader(data, batch_size=42))
    states = {
        "model": model.state_dict(),
        "optimizer": trainer.optimizers[0].state_dict(),
        "scheduler": trainer.lr_scheduler_configs[0].scheduler.state_dict(),
        "counts": {"step": trainer.global_step, "epoch": trainer.current_epoch},
    }
    return trainer, dict(leaves("", states))


def rows_of(folder: Path) -> list[dict[str, str]]:
    with (folder / "logs" / "version_0" / "metrics.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def files_in(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*.ckpt"))


@pytest.mark.slow
def test_discarded_steps_leave_no_trace(tmp_path: Path, manager: Manager) -> None:
    """One group, of whose 25 steps some are discarded, ends as Lightning does without the strategy: weights, optimizer, schedule,
    epochs, the rows of the log from its second step on and the checkpoints."""
    _, plain = train_here(tmp_path / "plain", 25)
    spoil = SpoilSteps(manager, {3, 10, 11})
    strategy = FaultToleranceStrategy(manager, "cpu")
    _, tolerant = train_here(tmp_path / "tolerant", 25, strategy=strategy, more_callbacks=[spoil])

    assert tolerant == plain
    assert manager.current_step() == 25
    assert manager.statistics().num_discarded == 3
    assert files_in(tmp_path / "tolerant") == files_in(tmp_path / "plain") != []
    assert rows_of(tmp_path / "tolerant") == rows_of(tmp_path / "plain")


class LoadLate(SpoilSteps):
    """Lets a state arrive when the gradients of some steps are there, which are of another state; these steps are discarded."""

    def on_after_backward(self, trainer: Trainer, module: Net) -> None:
        strategy = trainer.strategy
        is_last = not trainer.fit_loop._should_accumulate()
        if trainer.global_step in self.left and is_last:
            for parameter in module.parameters():
                parameter.grad.fill_(7.0)
            state = copy.deepcopy(strategy._state())
            for callback in trainer.checkpoint_callbacks:
                callback._last_global_step_saved = 0  # as in a process that has saved nothing
            strategy._load(state)
            super().on_after_backward(trainer, module)


@pytest.mark.slow
def test_gradients_of_a_state_before_the_one_that_arrived_are_computed_again(
    tmp_path: Path, manager: Manager, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is loaded here is what was there, so training ends as without it: within an epoch, and with its last batch.

    What was saved of the step that it arrived in is not saved once more: that asks the other groups.
    """
    saves: dict[Path, list[str]] = {tmp_path / "plain": [], tmp_path / "tolerant": []}
    save = Trainer.save_checkpoint

    def count_and_save(trainer: Trainer, path: str, *args: Any, **options: Any) -> None:
        saves[Path(path).parents[1]].append(Path(path).name)
        save(trainer, path, *args, **options)

    monkeypatch.setattr(Trainer, "save_checkpoint", count_and_save)
    _, plain = train_here(tmp_path / "plain", 25)
    late = LoadLate(manager, {5, 10, 13})
    strategy = FaultToleranceStrategy(manager, "cpu")
    _, tolerant = train_here(tmp_path / "tolerant", 25, strategy=strategy, more_callbacks=[late])

    assert tolerant == plain
    assert manager.statistics().num_discarded == 3
    assert saves[tmp_path / "tolerant"] == saves[tmp_path / "plain"] != []
    assert files_in(tmp_path / "tolerant") == files_in(tmp_path / "plain")
    assert rows_of(tmp_path / "tolerant") == rows_of(tmp_path / "plain")


class Hears(Callback):
    """Keeps what it is told, in order: what, at which step, and of which batch."""

    def __init__(self) -> None:
        self.heard: list[tuple[str, int, int]] = []

    def on_train_batch_start(self, trainer: Trainer, module: Net, batch: Any, number: int) -> None:
        self.heard.append(("batch begins", trainer.global_step, number))

    def on_before_zero_grad(self, trainer: Trainer, *_: Any) -> None:
        self.heard.append(("zero_grad", trainer.global_step, 0))

    def on_before_backward(self, trainer: Trainer, *_: Any) -> None:
        self.heard.append(("backward", trainer.global_step, 0))

    def on_before_optimizer_step(self, trainer: Trainer, *_: Any) -> None:
        self.heard.append(("optimizer steps", trainer.global_step, 0))

    def on_train_batch_end(self, trainer: Trainer, module: Net, outputs: Any, batch: Any, number: int) -> None:
        self.heard.append(("batch ends", trainer.global_step, number))


@pytest.mark.slow
def test_callbacks_hear_of_a_step_once_however_often_it_is_tried(tmp_path: Path, manager: Manager) -> None:
    plain, told = Hears(), Hears()
    train_here(tmp_path / "plain", 15, more_callbacks=[plain])
    spoil = SpoilSteps(manager, {3, 10, 11})
    train_here(tmp_path / "job", 15, strategy=FaultToleranceStrategy(manager, "cpu"), more_callbacks=[spoil, told])
    assert manager.statistics().num_discarded == 3
    assert told.heard == plain.heard


@pytest.mark.slow
def test_exact_steps_are_those_of_plain_torch_and_callbacks_hear_of_each_once(tmp_path: Path, manager: Manager) -> None:
    """Of three steps an attempt is discarded, and nothing is computed in the next one."""
    told, spoil, data = Hears(), SpoilSteps(manager, {3, 10, 11}), make_data()
    strategy = FaultToleranceStrategy(manager, "cpu", global_batch_size=4 * BATCH_SIZE)
    trainer = make_trainer(tmp_path, 15, strategy=strategy, accumulate=1, enable_progress_bar=False)
    trainer.callbacks[:0] = [spoil, told]
    model, plain = Net(7, 15), Net(7, 15)
    trainer.fit(model, DataLoader(data, batch_size=BATCH_SIZE, sampler=sampler_of(0, data)))
    made = plain.configure_optimizers()
    losses = plain_steps.train(
        plain,
        lambda net, batch: torch.nn.functional.mse_loss(net.layers(batch[1]), batch[2]),
        data,
        made["optimizer"],
        made["lr_scheduler"]["scheduler"],
        steps=15,
        global_batch_size=4 * BATCH_SIZE,
        microbatch_size=BATCH_SIZE,
        seed=5,
        clip=0.05,
    )

    assert dict(leaves("", model.state_dict())) == dict(leaves("", plain.state_dict()))
    optimizers = [one.state_dict()["state"] for one in (trainer.optimizers[0], made["optimizer"])]
    assert dict(leaves("", optimizers[0])) == dict(leaves("", optimizers[1]))
    rows = {int(row["step"]): float(row["loss"]) for row in rows_of(tmp_path) if row["loss"]}
    assert rows == {step: torch.tensor(loss).item() for step, loss in enumerate(losses) if step in rows}
    assert len(rows) >= 14 and manager.statistics().num_discarded == 3
    heard = [(what, step) for what, step, _ in told.heard if what != "backward"]
    of_a_step = ("batch begins", 0), ("zero_grad", 0), ("optimizer steps", 0), ("batch ends", 1)
    assert heard == [(what, step + later) for step in range(15) for what, later in of_a_step]


class StepsAtTwo(Net):
    """Has gradients accumulated by an `optimizer_step` of its own."""

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any) -> None:
        super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure) if batch_idx % 2 else optimizer_closure()


@pytest.mark.parametrize(
    ("kind", "wrap", "why"),
    [
        (Net, lambda loader: [loader], "goes with one data loader"),
        (Net, lambda loader: {"a": loader, "b": loader}, "goes with one data loader"),
        (StepsAtTwo, lambda loader: loader, "for the microbatches of a step alone"),
    ],
    ids=["in a list", "two", "gradients accumulated by the module"],
)
def test_what_training_step_would_compute_beside_a_step_is_refused(
    tmp_path: Path, manager: Manager, kind: type[Net], wrap: Any, why: str
) -> None:
    strategy = FaultToleranceStrategy(manager, "cpu", global_batch_size=4 * BATCH_SIZE)
    trainer = make_trainer(tmp_path, 5, strategy=strategy, accumulate=1, enable_progress_bar=False)
    with pytest.raises(ConfigError, match=why):
        trainer.fit(kind(7, 5), wrap(DataLoader(make_data(), batch_size=BATCH_SIZE)))


@pytest.mark.parametrize("per_step", [4 * BATCH_SIZE, NUM_SAMPLES], ids=["several steps an epoch", "one step an epoch"])
def test_an_accumulation_of_batches_is_refused_with_exact_steps(
    tmp_path: Path, manager: Manager, per_step: int
) -> None:
    """The only batch of an epoch makes a step, and its loss would be divided all the same."""
    strategy = FaultToleranceStrategy(manager, "cpu", global_batch_size=per_step)
    trainer = make_trainer(tmp_path, 5, strategy=strategy, accumulate=2, enable_progress_bar=False)
    with pytest.raises(ConfigError, match="leave the accumulation of gradients out"):
        trainer.fit(Net(7, 5), DataLoader(make_data(), batch_size=BATCH_SIZE))


@pytest.mark.slow
def test_callbacks_hear_again_of_the_batches_of_a_step_that_another_state_arrived_in(
    tmp_path: Path, manager: Manager
) -> None:
    """They hear once that the optimizer steps."""
    plain, told = Hears(), Hears()
    train_here(tmp_path / "plain", 15, more_callbacks=[plain])
    late = LoadLate(manager, {3, 10})
    train_here(tmp_path / "job", 15, strategy=FaultToleranceStrategy(manager, "cpu"), more_callbacks=[late, told])
    again = Counter(told.heard) - Counter(plain.heard)
    assert {step for _, step, _ in again} == {3, 10}
    assert "optimizer steps" not in {what for what, _, _ in again}
    assert not Counter(plain.heard) - Counter(told.heard)


class LoadLies(Callback):
    """Has a state arrive whose ModelCheckpoint names what it does not own, before each step that another one removes in."""

    def __init__(self, lie: str) -> None:
        self.lie = lie
        self.was_handed_on: list[str] = []

    def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
        strategy = trainer.strategy
        state = copy.deepcopy(strategy._state())
        for values in state["callbacks"].values():
            if "best_k_models" in values:
                self.was_handed_on += [path for path in (values["best_model_path"], *values["best_k_models"]) if path]
                values["best_k_models"] = dict.fromkeys([self.lie], torch.tensor(0.0))
                for key in ("best_model_path", "kth_best_model_path", "last_model_path"):
                    values[key] = self.lie
        strategy._load(state)
        strategy._has_moved = False  # it is the place that it is at


@pytest.mark.slow
@pytest.mark.parametrize(
    "lie", ["{checkpoints}/../../precious.ckpt", "local://{precious}", "{precious}", "link.ckpt", "runs"]
)
def test_no_path_that_comes_with_a_state_is_removed(tmp_path: Path, manager: Manager, lie: str) -> None:
    """The group that speaks removed any directory that a source had named, with all that was in it."""
    precious, checkpoints = tmp_path / "precious.ckpt", tmp_path / "job" / "checkpoints"
    precious.mkdir()
    (precious / "file").write_text("precious")
    (checkpoints / "runs").mkdir(parents=True)
    (checkpoints / "runs" / "file").write_text("precious")
    (checkpoints / "link.ckpt").symlink_to(precious)
    lies = LoadLies(lie.format(checkpoints=checkpoints, precious=precious))
    trainer, _ = train_here(
        tmp_path / "job", 25, strategy=FaultToleranceStrategy(manager, "cpu"), more_callbacks=[lies]
    )
    assert trainer.global_step == 25
    assert (precious / "file").exists() and (checkpoints / "runs" / "file").exists()
    assert (checkpoints / "link.ckpt").is_symlink()
    assert lies.was_handed_on and all(os.sep not in path for path in lies.was_handed_on), "names below the directory"


def test_of_the_names_that_come_with_a_state_those_of_own_checkpoints_are_taken(tmp_path: Path) -> None:
    callback = ModelCheckpoint(tmp_path / "own", monitor="loss", save_top_k=2)
    other = ModelCheckpoint(tmp_path / "other", monitor="loss", save_top_k=2)
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "link").symlink_to(tmp_path)
    scores = {"a.ckpt": 2.0, "sub/b.ckpt": 1.0, "../other/c.ckpt": 9.0, "data.txt": 8.0, "link/d.ckpt": 7.0}
    other.best_k_models = {f"{other.dirpath}/{name}": torch.tensor(score) for name, score in scores.items()}
    other.best_model_path = f"{other.dirpath}/sub/b.ckpt"
    other.kth_best_model_path = f"{other.dirpath}/../other/c.ckpt"
    other.last_model_path = "/elsewhere/last.ckpt"
    travels = {**_renamed(other.state_dict(), partial(_name_below, other), other), "dirpath": ""}
    assert str(tmp_path) not in repr(travels)
    taken = _renamed(travels, partial(_path_below, callback), callback)
    callback.load_state_dict({**taken, "dirpath": callback.dirpath})
    assert list(callback.best_k_models) == [f"{callback.dirpath}/{name}" for name in ("a.ckpt", "sub/b.ckpt")]
    assert callback.best_model_path == f"{callback.dirpath}/sub/b.ckpt"
    assert (callback.kth_best_model_path, callback.last_model_path) == (f"{callback.dirpath}/a.ckpt", "")


@pytest.mark.parametrize("place", [{"progress": {"epoch": {"completed": "/../../x"}}}, {"accumulate": 1.5}, {"a": [1]}])
def test_a_place_that_is_not_of_numbers_is_refused_as_it_is_in_the_names_of_checkpoints(place: dict[str, Any]) -> None:
    assert not _is_of_numbers(place)
    assert _is_of_numbers({"progress": {"epoch": {"completed": 3, "is_last": True}}})


@pytest.mark.slow
def test_a_job_resumes_from_a_checkpoint_of_its_own_and_of_plain_lightning(tmp_path: Path, manager: Manager) -> None:
    """The step of the job is that of the checkpoint."""
    train_here(tmp_path / "plain", 10)
    data, model = make_data(), Net(8, 25)
    strategy = FaultToleranceStrategy(manager, "cpu")
    trainer = make_trainer(tmp_path / "again", 12, strategy=strategy, enable_progress_bar=False)
    loader = DataLoader(data, batch_size=BATCH_SIZE, sampler=sampler_of(0, data), drop_last=True)
    checkpoint = strategy.resume_from(tmp_path / "plain" / "checkpoints")
    assert checkpoint == str(tmp_path / "plain" / "checkpoints" / "step=10.ckpt")
    trainer.fit(model, loader, ckpt_path=checkpoint, weights_only=False)

    assert (trainer.global_step, manager.current_step()) == (12, 12)
    assert manager.statistics().num_committed == 2


@pytest.mark.parametrize("before", ["", 'a,"b,c",step\r\n1.0,2.0,0\r\n'], ids=["no line", "a comma in a name"])
def test_a_log_goes_on_in_the_file_of_a_group_that_died(tmp_path: Path, before: str) -> None:
    (tmp_path / "metrics.csv").write_text(before, newline="")
    writer = _ContinuedMetrics(str(tmp_path))
    writer.log_metrics({"a": 3.0, "b,c": 4.0}, step=1)
    writer.save()
    with (tmp_path / "metrics.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert rows[-1] == {"a": "3.0", "b,c": "4.0", "step": "1"}
    assert [row["step"] for row in rows] == (["0", "1"] if before else ["1"])


@pytest.mark.parametrize(
    ("callback", "name"),
    [
        (BackboneFinetuning(), "BackboneFinetuning"),
        (BatchSizeFinder(), "BatchSizeFinder"),
        (LearningRateFinder(), "LearningRateFinder"),
        (ModelPruning("l1_unstructured"), "ModelPruning"),
        (SpikeDetection(), "SpikeDetection"),
    ],
)
def test_callbacks_that_leave_groups_apart_are_refused_by_name(
    tmp_path: Path, manager: Manager, callback: Callback, name: str
) -> None:
    trainer = make_trainer(tmp_path, 5, strategy=FaultToleranceStrategy(manager, "cpu"), enable_progress_bar=False)
    trainer.callbacks.append(callback)
    with pytest.raises(ConfigError, match=f"the callback {name}: "):
        trainer.fit(Net(7, 5), DataLoader(make_data(), batch_size=4))


@pytest.mark.slow
def test_manual_optimization_is_refused_by_name(tmp_path: Path, manager: Manager) -> None:
    model = Net(7, 5)
    model.automatic_optimization = False
    trainer = make_trainer(tmp_path, 5, strategy=FaultToleranceStrategy(manager, "cpu"), enable_progress_bar=False)
    trainer.gradient_clip_val, trainer.accumulate_grad_batches = None, 1
    with pytest.raises(ConfigError, match="automatic optimization"):
        trainer.fit(model, DataLoader(make_data(), batch_size=4))


# ------------------------------------------------------------------------------------------------------ in real processes


def expected_reads(group: int) -> dict[tuple[int, int], list[int]]:
    """Which samples a group reads for (step, batch within it), whatever happened before."""
    sampler, expected, step = sampler_of(group, make_data()), {}, 0
    for epoch in range(NUM_STEPS):
        sampler.set_epoch(epoch)
        order = list(sampler)
        batches = [order[i : i + BATCH_SIZE] for i in range(0, len(order), BATCH_SIZE)]
        for first in range(0, len(batches), ACCUMULATE):
            for number, batch in enumerate(batches[first : first + ACCUMULATE]):
                expected[step, number] = batch
            step += 1
    return expected


def assert_read_as_expected(run: Group, group: int, *, until: int, first: int | None = None) -> None:
    """What a group has read for each step is what belongs to it, and it has trained all steps from `first` on, or from that at
    which it joined."""
    expected, seen = expected_reads(group), set()
    for step, number, samples in re.findall(r"READ (\d+) (\d+) (\[.*?\])", run.log()):
        assert ast.literal_eval(samples) == expected[int(step), int(number)], (step, number)
        seen.add(int(step))
    first = first if first is not None else min(step for step in seen if step > 0)
    assert set(range(first, until)) <= seen


def kill_in_a_step(killed: Group, kept: Group, folder: Path) -> None:
    """Both have begun a step, and nobody is about to save: a checkpoint that is due when its writer dies is not there."""
    killed.wait_for("^HELD")
    kept.wait_for("^HELD")
    killed.kill()
    (folder / "go_on").touch()


def written(run: Group) -> list[str]:
    return re.findall(r"WROTE (step=\d+\.ckpt) ", run.log())


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.parametrize("killed_speaks", [True, False], ids=["the-one-that-speaks", "another-one"])
def test_a_killed_group_comes_back_and_ends_bit_equal(tmp_path: Path, killed_speaks: bool) -> None:
    """Group 0 speaks for the job, as the first by name. Whoever is killed: each checkpoint is written once, each step is logged
    once, and the group that comes back goes on with its data, and with averages that callbacks keep, where the job is."""
    folder = tmp_path / "out"
    killed, kept = (0, 1) if killed_speaks else (1, 0)
    with FrameworkJob(tmp_path, SCRIPT, f"--steps={NUM_STEPS}", f"--folder={folder}", "--averages") as job:
        runs = {group: job.start(group) for group in (0, 1)}
        kill_in_a_step(runs[killed], runs[kept], tmp_path)
        if killed_speaks:
            runs[kept].wait_for("WROTE step=")
        again = job.start(killed)
        job.wait_until_asks(again)
        (tmp_path / "is_back").touch()
        again.wait_for(r"goes on with batch \d+ of epoch")
        states = [runs[kept].end(), again.end()]

    assert_equal_states(*states)
    assert states[0]["step"] == NUM_STEPS
    assert states[0]["values"]["/trainer/global_step"] == str(NUM_STEPS)
    assert_read_as_expected(runs[kept], kept, until=NUM_STEPS)
    assert_read_as_expected(again, killed, until=NUM_STEPS)

    everything = [*runs.values(), again]
    assert not any("the loops of the groups differ" in run.log() for run in everything)
    names = [name for run in everything for name in written(run)]
    assert sorted(names) == sorted(f"step={step}.ckpt" for step in range(5, NUM_STEPS + 1, 5))
    for name in names:
        checkpoint = torch.load(folder / "checkpoints" / name, weights_only=False)
        assert f"step={checkpoint['global_step']}.ckpt" == name
        assert checkpoint["lightning"]["step"] == checkpoint["global_step"]
    logged = [int(row["step"]) for row in rows_of(folder) if row["loss"]]
    assert logged == list(range(NUM_STEPS))
    assert sorted(path.name for path in (folder / "best").iterdir()) == sorted(
        ast.literal_eval(states[0]["values"][f"/best/paths/{i}"]) for i in range(2)
    )


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.parametrize("nproc", [None, 2], ids=["a-process-each", "two-ranks-each-with-fsdp2"])
def test_exact_steps_leave_no_trace_of_a_group_that_was_killed(tmp_path: Path, nproc: int | None) -> None:
    """Weights, moments, buffers, schedule, epochs and logged losses, also those of epochs, have the bits of a job of one group in
    which nobody dies. The group that is killed is in a microbatch, and comes back in the middle of an epoch."""
    options = ["--steps=30", "--exact", *(["--sharded"] if nproc else [])]
    plain, folder = tmp_path / "plain" / "out", tmp_path / "out"
    plain.parent.mkdir()
    with FrameworkJob(plain.parent, SCRIPT, *options, f"--folder={plain}", num_groups=1, nproc=nproc) as job:
        alone = job.start(0)
        alone.end()
    with FrameworkJob(tmp_path, SCRIPT, *options, f"--folder={folder}", "--stands-after=5", nproc=nproc) as job:
        kept, killed = job.start(1), job.start(0)
        kill_in_a_step(killed, kept, tmp_path)
        again = job.start(0)
        job.wait_until_asks(again)
        (tmp_path / "is_back").touch()
        kept.end()
        again.end()

    for rank in range(nproc or 1):
        runs = (alone, kept, again)
        assert_equal_states(*(next(s for s in run.states() if s["values"]["/rank/rank"] == str(rank)) for run in runs))
    assert any(participants == 2 for _, participants in again.steps())
    assert rows_of(folder) == rows_of(plain)


@pytest.mark.processes
@pytest.mark.slow
def test_the_example_ends_equal_although_a_group_is_killed(tmp_path: Path) -> None:
    arguments = ["--steps=30", "--pause=0.2", "--min-replica-size=2", f"--output={tmp_path / 'out'}"]
    with FrameworkJob(tmp_path, REPO / "examples" / "train_lightning.py", *arguments) as job:
        survivor, killed = job.start(0), job.start(1)
        killed.wait_for_step(5)
        killed.kill()
        groups = [survivor, job.start(1)]
        assert [group.process.wait(timeout=240) for group in groups] == [0, 0]

    (digest,) = {re.findall(r"finished at step 30 with state (\w+)", group.log())[0] for group in groups}
    assert len(digest) == 64
    arguments = ["--steps=35", "--resume", *arguments[1:]]
    with FrameworkJob(tmp_path, REPO / "examples" / "train_lightning.py", *arguments) as job:
        groups = [job.start(0), job.start(1)]
        assert [group.process.wait(timeout=240) for group in groups] == [0, 0]
    (digest,) = {re.findall(r"finished at step 35 with state (\w+)", group.log())[0] for group in groups}
    assert any(f"resumes from {tmp_path / 'out' / 'checkpoints' / 'last.ckpt'}" in group.log() for group in groups)
    assert not any("step=29 " in group.log() for group in groups)


@pytest.mark.processes
@pytest.mark.slow
def test_where_no_step_counts_without_the_killed_group_the_other_waits(tmp_path: Path) -> None:
    """A group that comes back gets the state within an iteration, and is counted in that step: it computes again with the step's
    own batches."""
    folder = tmp_path / "out"
    arguments = f"--steps={NUM_STEPS}", f"--folder={folder}", "--min-replica-size=2"
    with FrameworkJob(tmp_path, SCRIPT, *arguments) as job:
        kept, killed = job.start(0), job.start(1)
        kill_in_a_step(killed, kept, tmp_path)
        again = job.start(1)
        states = [kept.end(), again.end()]

    assert_equal_states(*states)
    assert states[0]["step"] == NUM_STEPS
    assert {num for _, num in kept.steps()} == {2}
    assert "the loops of the groups differ" not in kept.log() + again.log()
    assert_read_as_expected(again, 1, until=NUM_STEPS, first=again.steps()[0][0])
    assert [int(row["step"]) for row in rows_of(folder) if row["loss"]] == list(range(NUM_STEPS))


@pytest.mark.processes
@pytest.mark.slow
def test_a_killed_group_of_two_ranks_with_fsdp2_comes_back_and_ends_bit_equal(tmp_path: Path) -> None:
    """As `ModelParallelStrategy` has it: both ranks of a group hold a shard, and write theirs of a checkpoint."""
    folder = tmp_path / "out"
    with FrameworkJob(tmp_path, SCRIPT, f"--steps={NUM_STEPS}", f"--folder={folder}", "--sharded", nproc=2) as job:
        kept, killed = job.start(0), job.start(1)
        kill_in_a_step(killed, kept, tmp_path)
        again = job.start(1)
        job.wait_until_asks(again)
        (tmp_path / "is_back").touch()
        again.wait_for(r"goes on with batch \d+ of epoch")
        kept.end()
        again.end()

    for rank in range(2):
        states = [next(s for s in run.states() if s["values"]["/rank/rank"] == str(rank)) for run in (kept, again)]
        assert_equal_states(*states)
        assert states[0]["step"] == NUM_STEPS
    assert {path.name for path in (folder / "checkpoints").iterdir()} == {
        f"step={step}.ckpt" for step in range(5, NUM_STEPS + 1, 5)
    }
    assert [int(row["step"]) for row in rows_of(folder) if row["loss"]] == list(range(NUM_STEPS))


def sigterm(run: Group, *, rank: int = 0) -> None:
    """Send SIGTERM to one rank of a group."""
    run.wait_for(f"PID {rank} ")
    os.kill(int(re.findall(rf"PID {rank} (\d+)", run.log())[0]), signal.SIGTERM)


def leave_in_a_step(leaving: Group, kept: Group, folder: Path, *, rank: int = 0) -> None:
    """SIGTERM comes when both have begun a step, before the last of the batches that are accumulated.

    The one that is kept stands still, alone in its first step, until the other has ended.
    """
    leaving.wait_for("^HELD")
    kept.wait_for("^HELD")
    sigterm(leaving, rank=rank)
    leaving.wait_for("this replica group leaves its job after its step")
    (folder / "go_on").touch()
    assert leaving.process.wait(timeout=240) == 0
    (folder / "is_back").touch()


def assert_pays_nothing(kept: Group) -> None:
    """From the step on in which the other group leaves, all steps of this one count."""
    (held_at,) = {int(step) for step in re.findall(r"HELD (\d+)", kept.log())}
    assert [at for verdict in ("discard", "left_behind") for at in kept.steps(verdict) if at[0] >= held_at] == []


@pytest.mark.processes
@pytest.mark.slow
def test_a_group_that_gets_sigterm_makes_its_step_saves_and_leaves(tmp_path: Path) -> None:
    """It is the one that speaks. The other one discards nothing, and speaks as soon as it is gone."""
    folder = tmp_path / "out"
    arguments = ["--steps=20", f"--folder={folder}", "--leaves", "--stands-after=0"]
    with FrameworkJob(tmp_path, SCRIPT, *arguments) as job:
        leaving, kept = job.start(0), job.start(1)
        leave_in_a_step(leaving, kept, tmp_path)
        assert kept.end()["step"] == 20

    (left_at,) = {int(step) for step in re.findall(r"has left its job at step (\d+)", leaving.log())}
    assert left_at == leaving.steps()[-1][0] + 1
    checkpoint = torch.load(folder / "left.ckpt", weights_only=False)
    assert checkpoint["global_step"] == checkpoint["lightning"]["step"] == left_at
    assert_pays_nothing(kept)
    logged = [int(row["step"]) for row in rows_of(folder) if row["loss"]]
    assert logged == sorted(set(logged))
    assert set(range(20)) - set(logged) <= {left_at, left_at + 1}, "nobody wrote while it saved, if that took long"


@pytest.mark.processes
@pytest.mark.slow
def test_sigterm_at_one_rank_of_a_sharded_group_makes_all_of_its_ranks_leave(tmp_path: Path) -> None:
    folder = tmp_path / "out"
    arguments = ["--steps=20", f"--folder={folder}", "--sharded", "--leaves", "--stands-after=0"]
    with FrameworkJob(tmp_path, SCRIPT, *arguments, nproc=2) as job:
        kept, leaving = job.start(0), job.start(1)
        leave_in_a_step(leaving, kept, tmp_path, rank=1)
        kept.end()

    left_at = re.findall(r"has left its job at step (\d+)", leaving.log())
    assert len(left_at) == 2 and len(set(left_at)) == 1
    assert_pays_nothing(kept)


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.parametrize("nproc", [None, 2], ids=["one-process", "one-of-two-ranks"])
def test_a_group_that_does_not_leave_on_sigterm_ends_with_a_status_that_says_so(
    tmp_path: Path, nproc: int | None
) -> None:
    arguments = ["--steps=200", f"--folder={tmp_path / 'out'}", *(["--sharded"] if nproc else [])]
    with FrameworkJob(tmp_path, SCRIPT, *arguments, num_groups=1, nproc=nproc) as job:
        group = job.start(0)
        group.wait_for_step(3)
        sigterm(group, rank=1 if nproc else 0)
        status = group.process.wait(timeout=240)

    assert status == (1 if nproc else 143)  # torchrun has a status of its own
    assert nproc is None or re.search(r"exitcode\s*: 143", group.log())


@pytest.mark.processes
@pytest.mark.slow
def test_while_one_group_writes_for_longer_than_the_others_wait_no_other_one_writes(tmp_path: Path) -> None:
    """A save takes 6 s, and the others go on after 1 s. They save and log nothing meanwhile; afterwards somebody does."""
    folder = tmp_path / "out"
    arguments = ["--steps=60", f"--folder={folder}", "--pause=0.1", "--slow-save=6"]
    with FrameworkJob(tmp_path, SCRIPT, *arguments, num_groups=3, join_timeout_ms=1000) as job:
        groups = [job.start(group) for group in range(3)]
        states = [group.end() for group in groups]

    assert_equal_states(*states)
    saves = sorted(
        (float(began), float(ended), name, group)
        for group, run in enumerate(groups)
        for began, ended, name in re.findall(r"BETWEEN (\S+) (\S+) (step=\S+)", run.log())
    )
    assert all(first[1] <= second[0] for first, second in itertools.pairwise(saves)), saves
    assert saves[-1][2] == "step=60.ckpt"
    (writer,) = {group for _, _, name, group in saves if name == "step=10.ckpt"}
    seen_by_writer = [int(step) for step in re.findall(r" step=(\d+) quorum", groups[writer].log())]
    is_back_at = min(
        step for step in seen_by_writer if step > 10
    )  # it computes that one alone, and writes nothing any more
    silent = {step for step, _ in groups[(writer + 1) % 3].steps() if 10 < step < is_back_at}
    logged = [int(row["step"]) for row in rows_of(folder) if row["loss"]]
    assert silent and not silent.intersection(logged)
    assert logged == sorted(set(logged)) and logged[-1] == 59
