"""Hugging Face's Trainer in two replica groups: one is killed and comes back, and everything ends equal, bit by bit.

`scripts/test-integrations transformers` runs this in an environment that has transformers; elsewhere it is skipped.
"""

from __future__ import annotations

import importlib.util
import itertools
import json
import os
import re
import shutil
import signal
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fingerprints import leaves
from framework_jobs import FrameworkJob, Group, assert_equal_states
from support.launched import REPO
from support.waiting import wait_until

if importlib.util.find_spec("transformers") is None or importlib.util.find_spec("accelerate") is None:
    pytest.skip("transformers is not installed; scripts/test-integrations runs this", allow_module_level=True)

from accelerate.data_loader import SeedableRandomSampler
from torch.utils.data import SequentialSampler
from transformers import Trainer, TrainerControl, TrainerState, TrainingArguments

sys.path.insert(0, str(REPO / "examples"))
import plain_steps

from torchft_ckpt import LighthouseServer, Manager, ProcessGroupGloo
from torchft_ckpt.errors import ConfigError
from torchft_ckpt.integrations.transformers import ContinuedSampler, FaultToleranceCallback

SCRIPT = Path(__file__).with_name("trainer_group.py")
STEPS, SAMPLES, BATCH, ACCUMULATED = 40, 34, 4, 2
PER_EPOCH = 5  # 9 batches, of which the last is smaller, and the last update has but one
FOUND_THE_JOB = r"samples further in the data, at step (\d+)$"


def read(group: Group) -> list[list[int]]:
    """Return the numbers of what a group trained on, batch by batch; of its first rank where it has several."""
    return batches_in(group.log())


def batches_in(log: str) -> list[list[int]]:
    return [json.loads(line) for line in re.findall(r"READ (\[.*?\])", log)]


def read_until(update: int) -> int:
    """Return how many samples a group has read after so many updates, if nothing happened to it."""
    epochs, updates = divmod(update, PER_EPOCH)
    return epochs * SAMPLES + min(updates * ACCUMULATED * BATCH, SAMPLES)


def kept(folder: Path) -> set[str]:
    """Return the checkpoints that are there."""
    return {path.name for path in (folder / "checkpoints").iterdir()}


def evaluated(group: Group) -> list[int]:
    return [int(step) for step in re.findall(r"EVALUATED (\d+)", group.log())]


def order_of(group: int, num_samples: int) -> list[int]:
    """Return the numbers that a group reads if nothing happens to it, in order."""
    sampler = SeedableRandomSampler(range(SAMPLES), data_seed=7)
    found: list[int] = []
    while len(found) < num_samples:
        found += [100 * group + number for number in sampler]
    return found[:num_samples]


def logged(folder: Path, event: str) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    return [line for line in lines if line["event"] == event]


@pytest.mark.parametrize("nproc", [None, 2], ids=["a process each", "two ranks each, by torchrun"])
def test_the_group_that_speaks_is_killed_and_comes_back(tmp_path: Path, nproc: int | None) -> None:
    """The other one waits for it at step 2. It trains on alone later, speaks meanwhile, and waits again at step 24.

    A callback of the user's keeps averages by the step that it reads, before ours in the list, or after it. A reference model of
    another one, as TRL's, is state, and what a group that comes back has generated with the weights before is dropped.
    """
    is_there, is_back = tmp_path / "is there", tmp_path / "is back"
    options = [f"--folder={tmp_path}", f"--steps={STEPS}", f"--averages={'before' if nproc is None else 'after'}"]
    with FrameworkJob(tmp_path, SCRIPT, *options, "--as-trl", nproc=nproc) as job:
        survivor = job.start(1, "--meet", "2", str(is_there), "--meet", "24", str(is_back))
        survivor.wait_for_step(2)
        first = job.start(0, "--hold=13")
        first.wait_for(FOUND_THE_JOB)
        job.wait_until_asks(first)
        is_there.touch()
        first.wait_for_step(13, participants=2)  # it has logged step 12, and no log, evaluation or save is due
        first.kill()
        survivor.wait_for_step(24, participants=1)
        again = job.start(0)
        again.wait_for(FOUND_THE_JOB)
        job.wait_until_asks(again)
        is_back.touch()
        ends = [survivor.end(), again.end()]

    assert_equal_states(*survivor.states(), *again.states())
    assert ends[0]["step"] == STEPS
    assert "ROLLOUTS None" in again.log() and "ROLLOUTS ['rollouts" in survivor.log()
    assert any(participants == 2 for _, participants in again.steps())
    # Nobody paid more than one step, and that one was tried again with the same batches.
    num_ranks = nproc or 1
    assert len(survivor.steps("discard")) <= num_ranks
    if nproc is None:
        assert [number for batch in read(survivor) for number in batch] == order_of(1, 8 * SAMPLES)
        assert len(survivor.steps()) == STEPS
        # What came back reads on from where the job was when it came.
        passed = 4 * SAMPLES + 4 * ACCUMULATED * BATCH  # step 24 is 4 epochs and 4 updates
        assert read(again)[0] == order_of(0, passed + BATCH)[passed:]
    # Each evaluation, log and checkpoint once, at the same steps in all groups, by one of them.
    per_epoch = PER_EPOCH if nproc is None else 3
    assert evaluated(survivor)[::num_ranks] == [*range(per_epoch, STEPS + 1, per_epoch)]
    assert set(evaluated(again)) <= set(evaluated(survivor)) and evaluated(again)[-1] == STEPS // per_epoch * per_epoch
    saved = [line["step"] for line in logged(tmp_path, "save")]
    assert saved == [10, 20, 30, 40]
    assert {path.name for path in (tmp_path / "checkpoints").iterdir()} == {f"checkpoint-{step}" for step in saved}
    assert [path.name for path in tmp_path.glob("saved by *")] == ["saved by 0"]
    assert [line["step"] for line in logged(tmp_path, "log")] == list(range(4, STEPS + 1, 4))
    assert {line["group"] for line in logged(tmp_path, "log")} == {0, 1}
    assert all(line["loss"] < 6 for line in logged(tmp_path, "log"))


def test_exact_steps_leave_no_trace_of_a_group_that_was_killed(tmp_path: Path) -> None:
    """Weights, moments, schedule, averages of a callback's and all logged losses have the bits of a job of one group in which
    nobody dies. The group that is killed speaks for the job, in a microbatch, and comes back in the middle between two logs."""
    plain, is_there, is_back = (tmp_path / name for name in ("plain", "is there", "is back"))
    plain.mkdir()
    options = ["--exact", "--averages=after", "--steps=40"]
    with FrameworkJob(plain, SCRIPT, f"--folder={plain}", *options, num_groups=1) as job:
        wanted = job.start(0).end()
    with FrameworkJob(tmp_path, SCRIPT, f"--folder={tmp_path}", *options) as job:
        survivor = job.start(1, "--meet", "2", str(is_there), "--meet", "21", str(is_back))
        survivor.wait_for_step(2)
        first = job.start(0, "--hold=9")
        job.wait_until_asks(first)
        is_there.touch()
        first.wait_for("HELD")
        first.kill()
        survivor.wait_for_step(21, participants=1)
        again = job.start(0)
        job.wait_until_asks(again)
        is_back.touch()
        assert_equal_states(wanted, survivor.end(), again.end())

    assert any(participants == 2 for _, participants in again.steps())
    assert [(line["step"], line["loss"]) for line in logged(tmp_path, "log")] == [
        (line["step"], line["loss"]) for line in logged(plain, "log")
    ]
    assert {line["group"] for line in logged(tmp_path, "log")} == {0, 1}


def test_too_few_groups_wait_and_lose_no_step(tmp_path: Path) -> None:
    """The one that is left tries its step again and again, with the same batches, until the other is back.

    That one loads an older checkpoint first, as scripts do that always resume: the state of the one that lives wins.
    """
    options = [f"--folder={tmp_path}", "--steps=20", "--min-replicas=2", "--schedule=reduce_lr_on_plateau"]
    options += ["--averages=before"]
    with FrameworkJob(tmp_path, SCRIPT, *options) as job:
        survivor, killed = job.start(0), job.start(1, "--hold=13")
        killed.wait_for_step(13)
        killed.kill()
        again = job.start(1, f"--resume={tmp_path / 'checkpoints' / 'checkpoint-10'}")
        assert_equal_states(survivor.end(), again.end())

    assert len(survivor.steps()) == 20
    assert all(participants == 2 for _, participants in [*survivor.steps(), *again.steps()])
    assert [number for batch in read(survivor) for number in batch] == order_of(0, 4 * SAMPLES)
    assert [line["step"] for line in logged(tmp_path, "save")] == [10, 20]


def test_a_job_that_is_resumed_ends_as_one_that_was_not(tmp_path: Path) -> None:
    """All groups go on from a checkpoint of the Trainer's: weights, optimizer, schedule and data are those of before."""
    folder = tmp_path / "again"
    folder.mkdir()
    options = ["--steps=20", "--min-replicas=2"]
    with FrameworkJob(tmp_path, SCRIPT, f"--folder={tmp_path}", *options, min_replicas=2) as job:
        whole = [job.start(group) for group in range(2)]
        ends = [group.end() for group in whole]
    resume = f"--resume={tmp_path / 'checkpoints' / 'checkpoint-10'}"
    with FrameworkJob(folder, SCRIPT, f"--folder={folder}", *options, resume, min_replicas=2) as job:
        resumed = [job.start(group) for group in range(2)]
        ends += [group.end() for group in resumed]

    assert_equal_states(*ends)
    for before, after in zip(whole, resumed, strict=True):
        assert read(before)[-len(read(after)) :] == read(after)
        assert [step for step, _ in after.steps()] == list(range(10, 20))


def test_a_group_reads_on_where_the_job_is_when_it_joins(tmp_path: Path) -> None:
    """The job makes 20 steps while it computes its first iteration, and some more later, while its process is stopped."""
    is_there, is_warm, is_in = (tmp_path / name for name in ("there", "warm", "in"))
    is_stopped, is_back = (tmp_path / name for name in ("stopped", "back"))
    pauses = [("wait", 4, is_there), ("meet", 24, is_in), ("wait", 36, is_stopped), ("meet", 42, is_back)]
    waits = [text for how, step, file in pauses for text in (f"--{how}", str(step), str(file))]
    with FrameworkJob(tmp_path, SCRIPT, f"--folder={tmp_path}", "--steps=60") as job:
        first = job.start(0, *waits)
        first.wait_for_step(4)
        joiner = job.start(1, f"--warm-up={is_warm}")
        joiner.wait_for(FOUND_THE_JOB)
        is_there.touch()
        first.wait_for_step(24, participants=1)
        is_warm.touch()
        job.wait_until_asks(joiner)
        is_in.touch()
        joiner.wait_for_step(36, participants=2)
        joiner.process.send_signal(signal.SIGSTOP)
        is_stopped.touch()
        first.wait_for_step(42, participants=1)
        joiner.process.send_signal(signal.SIGCONT)
        wait_until(lambda: job.asks(joiner), "it asks for a quorum again", 240)
        is_back.touch()
        assert_equal_states(first.end(), joiner.end())

    order = order_of(1, 120 * SAMPLES)
    _, *moves = re.split(FOUND_THE_JOB, joiner.log(), flags=re.MULTILINE)
    at, logs = [int(step) for step in moves[::2]], moves[1::2]
    assert at[0] == 4 and 24 <= at[1] < 36 < 42 <= at[-1]
    for step, log in zip(at, logs, strict=True):
        stale, *batches = batches_in(log)  # one that was fetched before
        if step == 4 or [*stale] == order[read_until(step) :][: len(stale)]:
            batches, stale = [stale, *batches], []
        found = [number for batch in batches for number in batch]
        assert found == order[read_until(step) + len(stale) :][: len(found)]


def test_the_best_checkpoint_is_kept_although_the_group_that_speaks_was_killed(tmp_path: Path) -> None:
    """The first evaluation is the best. The group that saved then has come back, and saves again, with a limit of one."""
    options = ["--steps=20", "--min-replicas=2", "--save-steps=5", "--limit=1", "--greater-is-better"]
    goes_on = tmp_path / "goes on"
    with FrameworkJob(tmp_path, SCRIPT, f"--folder={tmp_path}", *options, min_replicas=2) as job:
        speaker, other = job.start(0), job.start(1, "--wait", "7", str(goes_on))
        other.wait_for_step(7)
        speaker.kill()
        assert kept(tmp_path) == {"checkpoint-5"}
        again = job.start(0)
        goes_on.touch()
        ends = [other.end(), again.end()]

    assert_equal_states(*ends)
    assert ends[0]["values"]["/trainer/best_global_step"] == "5"
    assert [line["step"] for line in logged(tmp_path, "save")] == [5, 10, 15, 20]
    assert kept(tmp_path) == {"checkpoint-5"}


@pytest.mark.parametrize("nproc", [None, 2], ids=["a process each", "two ranks each, by torchrun"])
def test_one_command_line_starts_a_job_a_job_again_and_a_group_of_it(tmp_path: Path, nproc: int | None) -> None:
    """All groups are killed, in a save. Later the one that speaks is, while the other one stands still.

    That one resumed with a best checkpoint that is not kept.
    """
    never, goes_on = tmp_path / "never", tmp_path / "goes on"
    options = [f"--folder={tmp_path}", "--steps=20", "--min-replicas=2", "--limit=1", "--resumes"]
    with FrameworkJob(tmp_path, SCRIPT, *options, "--wait", "13", str(never), min_replicas=2, nproc=nproc) as job:
        groups = [job.start(group) for group in range(2)]
        for group in groups:
            group.wait_for_step(13)
            group.wait_for("RESUMES None")
    checkpoints = tmp_path / "checkpoints"
    assert kept(tmp_path) == {"checkpoint-10"}
    for name, end in [
        ("checkpoint-12", 100),
        ("checkpoint-13", 0),
    ]:  # the Trainer was killed there, as it wrote its own state
        shutil.copytree(checkpoints / "checkpoint-10", checkpoints / name)
        state = checkpoints / name / "trainer_state.json"
        state.write_bytes(state.read_bytes()[:end])
    (checkpoints / "checkpoint-14").mkdir()
    again_folder = tmp_path / "again"
    again_folder.mkdir()
    with FrameworkJob(again_folder, SCRIPT, *options, min_replicas=2, nproc=nproc) as job:
        speaker, other = job.start(0), job.start(1, "--wait", "16", str(goes_on))
        other.wait_for_step(16)
        speaker.kill()
        again = job.start(0)
        again.wait_for("RESUMES None")
        goes_on.touch()
        assert_equal_states(other.end(), again.end())

    for group in (speaker, other):
        assert group.log().count(f"RESUMES {checkpoints / 'checkpoint-10'}\n") == (nproc or 1)
    assert sorted(step for step, _ in other.steps()) == [step for step in range(10, 20) for _ in range(nproc or 1)]
    assert kept(tmp_path) == {"checkpoint-20"}


def test_a_group_with_a_data_set_of_another_size_is_told_so(tmp_path: Path) -> None:
    """Its epochs would end at other steps, or its training."""
    with FrameworkJob(tmp_path, SCRIPT, f"--folder={tmp_path}", "--min-replicas=2") as job:
        job.start(0).wait_for("verdict=discard")  # it is there first, so it is the other one that loads
        other = job.start(1, "--samples=50")
        ended = other.process.wait(timeout=240)

    assert (ended, "the groups train for different lengths" in other.log()) == (1, True)


def test_the_example_ends_equal_although_a_group_is_killed(tmp_path: Path) -> None:
    arguments = ["--steps=30", "--pause=0.2", "--min-replica-size=2", "--resume", f"--output={tmp_path / 'out'}"]
    with FrameworkJob(tmp_path, REPO / "examples" / "train_transformers.py", *arguments) as job:
        survivor, killed = job.start(0), job.start(1)
        killed.wait_for_step(5)
        killed.kill()
        groups = [survivor, job.start(1)]
        assert [group.process.wait(timeout=240) for group in groups] == [0, 0]

    (digest,) = {re.findall(r"finished at step 30 with state (\w+)", group.log())[0] for group in groups}
    assert len(digest) == 64
    assert (tmp_path / "out" / "checkpoint-30" / "model.safetensors").exists()


@pytest.mark.parametrize("num_passed", [0, 1, 33, 34, 35, 100])
@pytest.mark.parametrize("sampler", [SeedableRandomSampler, SequentialSampler], ids=["shuffled", "in order"])
def test_a_continued_sampler_reads_on_over_the_ends_of_epochs(num_passed: int, sampler: type[Any]) -> None:
    def make() -> Any:
        return sampler(range(SAMPLES), data_seed=7) if sampler is SeedableRandomSampler else sampler(range(SAMPLES))

    def epochs(of: Any, count: int) -> list[int]:
        found: list[int] = []
        for epoch in range(count):
            if hasattr(of, "set_epoch"):
                of.set_epoch(epoch)
            found += list(of)
        return found

    continued = ContinuedSampler(make(), num_passed)
    assert len(continued) == SAMPLES
    assert epochs(continued, 3) == epochs(make(), 7)[num_passed : num_passed + 3 * SAMPLES]


@pytest.mark.parametrize("moved_by", [-8, -1, 1, 40, 100])
@pytest.mark.parametrize("num_read", [0, 8, 33, 34])
def test_a_sampler_goes_on_elsewhere_in_the_middle_of_an_epoch(num_read: int, moved_by: int) -> None:
    order = order_of(0, 8 * SAMPLES)
    continued = ContinuedSampler(SeedableRandomSampler(range(SAMPLES), data_seed=7), SAMPLES + 3)
    samples = iter(continued)
    found = list(itertools.islice(samples, num_read))
    continued.num_passed += moved_by
    found += samples
    continued.set_epoch(1)
    found += continued
    begin = SAMPLES + 3
    assert found[:num_read] == order[begin : begin + num_read]
    assert found[num_read:] == order[begin + num_read + moved_by : begin + 2 * SAMPLES + moved_by]


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"load_best_model_at_end": True, "eval_strategy": "steps", "save_steps": 500}, "load_best_model_at_end"),
        ({"auto_find_batch_size": True}, "auto_find_batch_size"),
        ({"save_strategy": "best", "metric_for_best_model": "loss"}, "save_strategy"),
        ({"report_to": "tensorboard"}, "loggers="),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_arguments_that_would_leave_groups_apart_are_refused(
    tmp_path: Path, changes: dict[str, Any], named: str
) -> None:
    args = TrainingArguments(output_dir=str(tmp_path), **changes)
    with pytest.raises(ConfigError, match=named):
        FaultToleranceCallback(manager=None).on_init_end(args, TrainerState(), TrainerControl())


class Rows(torch.utils.data.Dataset):
    def __init__(self) -> None:
        self.rows = torch.randn(20, 4, generator=torch.Generator().manual_seed(3))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"x": self.rows[index], "labels": self.rows[index].sum()}


class Plain(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.layers = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.2), torch.nn.Linear(8, 1))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": torch.nn.functional.mse_loss(self.layers(x)[:, 0], labels)}


def optimizer_of(model: torch.nn.Module) -> tuple[Any, Any]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)


def train_exactly(folder: Path, model: torch.nn.Module, resume: str | None, size: int = 8) -> tuple[list[float], int]:
    """Train by the Trainer, in one group; return the logged losses, and how many attempts were discarded."""
    lighthouse = LighthouseServer(bind="127.0.0.1:0", min_replicas=1)
    manager = Manager(ProcessGroupGloo(), None, None, 1, replica_id="g", lighthouse_addr=lighthouse.address())
    spoils = [] if resume else [4]

    def spoil(*_: object) -> None:
        if spoils and manager.current_step() == spoils[0]:
            spoils.clear()
            manager.report_error(RuntimeError("the test says so"))

    model.register_forward_hook(spoil)
    args = TrainingArguments(
        str(folder),
        max_steps=9,
        per_device_train_batch_size=2,
        max_grad_norm=0.5,
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
        save_steps=5,
        logging_steps=1,
        seed=11,
    )
    callback = FaultToleranceCallback(manager, global_batch_size=size)
    try:
        trainer = Trainer(model, args, train_dataset=Rows(), callbacks=[callback], optimizers=optimizer_of(model))
        trainer.train(resume_from_checkpoint=resume)
        assert manager.current_step() == 9
    finally:
        manager.shutdown()
        lighthouse.shutdown()
    losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    return losses, manager.statistics().num_discarded


def test_exact_steps_are_those_of_plain_torch_also_from_a_checkpoint_on(tmp_path: Path) -> None:
    """The Trainer's loss is not divided, and of one step an attempt is discarded."""
    model, resumed, plain = Plain(), Plain(), Plain()
    found, num_discarded = train_exactly(tmp_path, model, None)
    found_again, _ = train_exactly(tmp_path, resumed, str(tmp_path / "checkpoint-5"))
    losses = plain_steps.train(
        plain,
        lambda net, batch: net(**batch)["loss"],
        Rows(),
        *optimizer_of(plain),
        steps=9,
        global_batch_size=8,
        microbatch_size=2,
        seed=11,
        clip=0.5,
    )
    wanted = dict(leaves("", plain.state_dict()))
    assert dict(leaves("", model.state_dict())) == wanted == dict(leaves("", resumed.state_dict()))
    assert found == found_again == [torch.tensor(one).item() for one in losses]
    assert num_discarded == 1
    with pytest.raises(ConfigError, match="global_batch_size=8, here 4"):
        train_exactly(tmp_path, Plain(), str(tmp_path / "checkpoint-5"), size=4)


def test_the_trainer_is_made_with_a_callback_that_feeds_it(tmp_path: Path) -> None:
    args = TrainingArguments(str(tmp_path), use_cpu=True, report_to="none")
    trainer = Trainer(Plain(), args, train_dataset=Rows())
    trainer.add_callback(FaultToleranceCallback(Alone(), global_batch_size=8))
    with pytest.raises(ConfigError, match="is made with the callback"):
        trainer.train()


class Alone:
    """The Manager of a group that finds no other one."""

    is_behind = True

    def newest_step_of_peers(self) -> None:
        return None


def test_an_iteration_without_a_step_is_in_no_log(tmp_path: Path) -> None:
    callback = FaultToleranceCallback(Alone())
    callback._trainer = trainer = SimpleNamespace(_tr_loss=torch.tensor(9.0))
    callback._loss_before = torch.tensor(2.0)
    control = TrainerControl(should_log=True, should_save=True)
    callback.on_step_end(TrainingArguments(str(tmp_path)), TrainerState(), control)
    assert trainer._tr_loss.item() == 2.0
    assert not control.should_log and not control.should_save


@pytest.mark.parametrize(
    "worst", [None, "checkpoint-000102", "checkpoint-" + "9" * 20, "checkpoint-\u0663\u0664", "-1"]
)
def test_a_folder_that_the_trainer_did_not_write_keeps_nobody_from_a_good_one(
    tmp_path: Path, worst: str | None
) -> None:
    def write(name: str, text: str) -> None:
        (tmp_path / name).mkdir()
        (tmp_path / name / "trainer_state.json").write_text(text)

    write("checkpoint-20", "{}")
    write("checkpoint-30", "[" * 100_000 + "]" * 100_000)
    (tmp_path / "checkpoint-40").mkdir()
    os.mkfifo(tmp_path / "checkpoint-40" / "trainer_state.json")
    if worst is not None:
        write(worst, "{}")
    assert FaultToleranceCallback(Alone()).resume_from(tmp_path) == str(tmp_path / "checkpoint-20")


def test_while_one_group_saves_for_longer_than_the_others_wait_no_other_one_writes(tmp_path: Path) -> None:
    """The others train on after 1 s, of 6 s."""
    options = [f"--folder={tmp_path}", "--steps=80", "--meet", "1", str(tmp_path / "go")]
    script = SCRIPT.with_name("slow_save_group.py")
    with FrameworkJob(tmp_path, script, *options, num_groups=3, join_timeout_ms=1000) as job:
        groups = [job.start(group) for group in range(3)]
        job.wait_until_met(*groups)
        (tmp_path / "go").touch()
        assert_equal_states(*(group.end() for group in groups))

    lines = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    (began,) = [number for number, line in enumerate(lines) if (line["event"], line["step"]) == ("save", 10)]
    assert lines[began + 1] == {**lines[began], "event": "saved"}
    writer = lines[began]["group"]
    seen_by_writer = {int(step) for step in re.findall(r" step=(\d+) quorum", groups[writer].log())}
    assert {step for step, _ in groups[(writer + 1) % 3].steps() if step > 10} - seen_by_writer, "they did train on"
    assert (lines[-1]["event"], lines[-1]["step"]) == ("save", 80)
