"""A script for accelerate in two replica groups: one is killed and comes back, and each step has the bits of a plain loop.

`scripts/test-integrations accelerate` runs this in an environment that has accelerate; elsewhere it is skipped.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import signal
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from framework_jobs import FrameworkJob, Group
from torch.utils.data import default_collate

if importlib.util.find_spec("accelerate") is None:
    pytest.skip("accelerate is not installed; scripts/test-integrations runs this", allow_module_level=True)

import accelerate_plain as plain
from accelerate import skip_first_batches
from accelerate.commands import launch
from accelerate.tracking import GeneralTracker
from accelerate.utils import DataLoaderConfiguration, DistributedType
from accelerate_changes import SCRIPTS, group_script, lines_added
from torch.utils.data import DataLoader

from torchft_ckpt.ddp import PureDistributedDataParallel
from torchft_ckpt.errors import ConfigError
from torchft_ckpt.integrations.accelerate import FaultTolerantAccelerator

STEP = r"step=(\d+) quorum=\d+ participants=(\d+)/\d+ verdict=(\w+)"
Batches = list[list[int]]


class Lives:
    """What the lives of a replica group have trained on, by committed step, and the digests of its state after it."""

    def __init__(self, *groups: Group) -> None:
        self.read: dict[int, Batches] = {}
        self.digests: dict[int, str] = {}
        self.num_groups: dict[int, int] = {}
        self.last_read: Batches = []
        """What a life has read that was killed before it said whether that counts: the others may have had its gradients."""
        for group in groups:
            log = group.log()
            assert "came to another state" not in log and "Traceback" not in log, log[-3000:]
            read: Batches = []
            is_discarded = False
            for numbers, step, num, verdict, counted, digest in re.findall(
                rf"READ (\[.*?\])|{STEP}|STEP (\d+) (\w+)", log
            ):
                if numbers:
                    # A discarded step is tried again as it is, or its batches are read once more.
                    read, is_discarded = [*([] if is_discarded else read), json.loads(numbers)], False
                elif counted:
                    self.digests[int(counted)] = digest
                elif verdict == "commit":
                    self.read[int(step)], read, self.num_groups[int(step)] = read, [], int(num)
                    is_discarded = False
                elif verdict == "left_behind":  # it warms up, or the others went on
                    read = []
                else:
                    is_discarded = True
            self.last_read = self.last_read or read

    def of(self, step: int, num_groups: int) -> list[Batches]:
        """Return what it has contributed to a step to which so many groups have."""
        return [self.read[step]] if step in self.read else [self.last_read] if num_groups == 2 else []


def plain_digests(
    lives: Sequence[Lives],
    *,
    samples: int,
    accumulate: int,
    seed: int,
    fp16: int | None = None,
    two_losses: bool = False,
    optimizers: str = "one",
    schedules: int = 2,
    shape: str = "diffusers",
) -> list[str]:
    """Return the digest after each step of a plain loop in which the groups' batches of the step are one larger batch.

    `schedules`: the schedule steps so often in each, as accelerate has it: once for each process. A loop of glue's shape neither
    clips nor keeps an average.
    """
    torch.manual_seed(seed)
    model = plain.make_model()
    average = plain.Average(list(model.parameters())) if shape == "diffusers" else None
    of_job = plain.make_optimizers(model, optimizers)
    scheduler = torch.optim.lr_scheduler.LambdaLR(of_job[0], plain.schedule)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** (fp16 or 0), growth_interval=5, enabled=fp16 is not None)
    data = plain.Numbered(samples)
    digests = []
    for step in range(max(max(life.read) for life in lives) + 1):
        gradients = []
        num_groups = max(life.num_groups.get(step, 0) for life in lives)
        for batches in [batches for life in lives for batches in life.of(step, num_groups)]:
            for batch in batches:
                loss = plain.loss_of(model, default_collate([data[number] for number in batch]))
                for part in [loss / 4, 3 * loss / 4] if two_losses else [loss]:
                    scaler.scale(part / accumulate).backward(retain_graph=two_losses)
            gradients.append([parameter.grad for parameter in model.parameters()])
            model.zero_grad()
        for parameter, *of_groups in zip(model.parameters(), *gradients, strict=True):
            parameter.grad = sum(of_groups[1:], of_groups[0]) / len(of_groups)
        for optimizer in of_job:
            scaler.unscale_(optimizer)
        if average is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        before = scaler.get_scale()
        for optimizer in of_job:
            scaler.step(optimizer)
        scaler.update()
        for _ in range(schedules if scaler.get_scale() >= before else 0):
            scheduler.step()
        model.zero_grad()
        if average is not None:
            average.step(list(model.parameters()))
        digests.append(plain.digest_of(model, of_job, scheduler, average))
    return digests


def train_and_kill(
    job: FrameworkJob,
    folder: Path,
    *,
    killed: int,
    joins_at: int = 2,
    dies_at: int = 13,
    back_at: int = 24,
    comes_with: Sequence[str] = (),
) -> list[Lives]:
    """Run two groups to their end, one of which is killed and comes back; each waits for the other where it would not meet it.

    `comes_with`: arguments of its second life.
    """
    is_there, is_back = folder / "is there", folder / "is back"
    other = 1 - killed
    survivor = job.start(other, "--wait", str(joins_at), str(is_there), "--wait", str(back_at), str(is_back))
    survivor.wait_for(f"STEP {joins_at} ")
    first = job.start(killed, f"--hold={dies_at}")
    job.wait_until_asks(first)
    is_there.touch()
    first.wait_for(f"STEP {dies_at} ")
    first.kill()
    survivor.wait_for(f"STEP {back_at} ")
    again = job.start(killed, *comes_with)
    job.wait_until_asks(again)
    is_back.touch()
    assert [group.process.wait(timeout=240) for group in (survivor, again)] == [0, 0], again.log()[-3000:]
    lives = [Lives(survivor), Lives(first, again)]
    assert max(Lives(again).read) == max(lives[0].read) and len(Lives(again).read) > 5
    return lives if other == 0 else lives[::-1]


@pytest.mark.parametrize(
    ("options", "killed"),
    [
        pytest.param({}, 1, id="accumulation"),
        pytest.param({"samples": 104, "accumulate": 3, "workers": 2}, 1, id="short last window, workers"),
        pytest.param({"fp16": 126, "accumulate": 1}, 1, id="scaled losses that overflow at first"),
        pytest.param({}, 0, id="the group that speaks"),
        pytest.param({"flags": ["--subset", "--torch-clip"]}, 1, id="another sampler, torch's clipping"),
        pytest.param({"flags": ["--two-losses"]}, 1, id="two losses"),
        pytest.param({"flags": ["--optimizers=two"]}, 1, id="two optimizers that share each step"),
        pytest.param({"flags": ["--optimizers=eight-bit"]}, 1, id="state of eight bits"),
        pytest.param({"flags": ["--dynamo=eager"], "accumulate": 1}, 1, id="compiled"),
        pytest.param({"flags": ["--split-batches"], "accumulate": 1}, 1, id="batches that are split"),
        pytest.param({"shape": "glue", "accumulate": 1}, 1, id="the shape of run_glue_no_trainer"),
    ],
)
def test_each_step_has_the_bits_of_a_plain_loop(tmp_path: Path, options: dict[str, Any], killed: int) -> None:
    """The group that comes back reads what it would have read, in the same epoch, and no step is missing or made twice.

    Each group has a seed of its own: weights and order are those of the first one.
    """
    wanted = {"samples": 80, "accumulate": 2, "epochs": 8, "save_steps": 10, **options}
    flags, shape = wanted.pop("flags", []), wanted.pop("shape", "diffusers")
    arguments = start_arguments(tmp_path, seed="1{group}", **wanted)
    with FrameworkJob(tmp_path, group_script(tmp_path, shape), *arguments, *flags) as job:
        lives = train_and_kill(job, tmp_path, killed=killed)

    splits = "--split-batches" in flags
    num_steps = wanted["epochs"] * -(-wanted["samples"] // (4 if splits else 8) // wanted["accumulate"])
    digests = plain_digests(
        lives,
        samples=wanted["samples"],
        accumulate=wanted["accumulate"],
        seed=11 - killed,
        fp16=options.get("fp16"),
        two_losses="--two-losses" in flags,
        optimizers=next((flag.partition("=")[2] for flag in flags if flag.startswith("--optimizers")), "one"),
        schedules=1 if splits else 2,
        shape=shape,
    )
    assert len(digests) == num_steps
    for life in lives:
        assert life.digests == {step: digests[step - 1] for step in life.digests}
    assert sorted({*lives[0].digests, *lives[1].digests}) == list(range(1, num_steps + 1))
    # Within an epoch no sample is read twice, by whichever group.
    per_epoch = num_steps // wanted["epochs"]
    for epoch in range(wanted["epochs"]):
        steps = range(epoch * per_epoch, (epoch + 1) * per_epoch)
        seen = [n for life in lives for step in steps for batch in life.read.get(step, []) for n in batch]
        assert len(seen) == len({*seen})
    assert {path.name for path in tmp_path.glob("step_*")} == {f"step_{n}" for n in range(10, num_steps + 1, 10)}
    assert (tmp_path / "final.pt").is_file()


@pytest.mark.parametrize(("shape", "most"), [("diffusers", 7), ("glue", 6)])
def test_seven_lines_of_a_script_change_at_most(shape: str, most: int) -> None:
    """The groups of all other tests run the script that these lines make."""
    assert len(lines_added(shape)) == most


def start_arguments(folder: Path, **options: object) -> list[str]:
    wanted = {"folder": folder, "samples": 80, "accumulate": 2, "epochs": 6, **options}
    return [f"--{name.replace('_', '-')}={value}" for name, value in wanted.items()]


def digests_of(*groups: Group) -> dict[int, set[str]]:
    """Return what the ranks of all groups have said of their state after each step."""
    found: dict[int, set[str]] = {}
    for group in groups:
        for step, digest in re.findall(r"STEP (\d+) (\w+)", group.log()):
            found.setdefault(int(step), set()).add(digest)
    return found


@pytest.mark.parametrize("shape", SCRIPTS)
def test_all_groups_go_on_from_a_checkpoint(tmp_path: Path, shape: str) -> None:
    """Both are killed; the newest checkpoint holds the job's step, and the data go on with that.

    Each epoch that is evaluated then sees all samples once, in each group.
    """
    accumulate = 2 if shape == "diffusers" else 1
    arguments = start_arguments(tmp_path, accumulate=accumulate, epochs=3 * accumulate)
    with FrameworkJob(tmp_path, group_script(tmp_path, shape), *arguments, min_replicas=2) as job:
        wait = str(tmp_path / "never")
        first = [job.start(group, "--wait", "17", wait) for group in (0, 1)]
        for group in first:
            group.wait_for("STEP 17 ")
        for group in first:
            group.kill()
        (checkpoint,) = tmp_path.glob("step_*")
        again = [job.start(group, f"--resume={checkpoint}") for group in (0, 1)]
        assert [group.process.wait(timeout=240) for group in again] == [0, 0], again[0].log()[-3000:]
    assert checkpoint.name == "step_10"
    lives = [Lives(before, after) for before, after in zip(first, again, strict=True)]
    assert min(Lives(again[0]).read) == 10
    digests = plain_digests(lives, samples=80, accumulate=accumulate, seed=7, shape=shape)
    assert [life.digests for life in lives] == [{n + 1: digest for n, digest in enumerate(digests)}] * 2
    assert len(digests) == 30
    if shape == "glue":
        evaluated = [re.findall(r"EVALUATED (\d) (.*)", group.log()) for group in again]
        assert evaluated == [[(str(epoch), str([*range(10)])) for epoch in (1, 2)]] * 2


def test_a_group_that_is_started_again_as_if_all_had_died_goes_on_where_the_job_is(tmp_path: Path) -> None:
    """Whoever starts it gives it the same arguments as all, a checkpoint among them. It makes no step after the job's last."""
    with FrameworkJob(tmp_path, group_script(tmp_path), *start_arguments(tmp_path, epochs=8)) as job:
        lives = train_and_kill(job, tmp_path, killed=1, comes_with=[f"--resume={tmp_path / 'step_10'}"])
    digests = plain_digests(lives, samples=80, accumulate=2, seed=7)
    assert len(digests) == 40
    assert all(life.digests == {step: digests[step - 1] for step in life.digests} for life in lives)


def test_a_group_that_comes_too_late_ends_well_and_writes_nothing(tmp_path: Path) -> None:
    with FrameworkJob(tmp_path, group_script(tmp_path), *start_arguments(tmp_path, epochs=2), num_groups=2) as job:
        first = job.start(0)
        assert first.process.wait(timeout=240) == 0
        written = (tmp_path / "final.pt").stat().st_mtime_ns
        late = job.start(1)
        assert late.process.wait(timeout=240) == 0
    assert "READ" not in late.log() and "gets no more batches" in late.log()
    assert (tmp_path / "final.pt").stat().st_mtime_ns == written


def test_checkpoints_that_accelerate_names_have_the_job_s_step(tmp_path: Path) -> None:
    """The group that speaks is killed; the one that takes over goes on with the names, and keeps to the limit."""
    arguments = start_arguments(tmp_path, epochs=8, limit=2)
    with FrameworkJob(tmp_path, group_script(tmp_path), *arguments, "--automatic") as job:
        train_and_kill(job, tmp_path, killed=0)
    assert {path.name for path in (tmp_path / "checkpoints").iterdir()} == {"checkpoint_30", "checkpoint_40"}


def test_three_groups_have_the_same_bits(tmp_path: Path) -> None:
    """One of them is killed and comes back; within an epoch no sample is read twice."""
    with FrameworkJob(
        tmp_path,
        group_script(tmp_path),
        *start_arguments(tmp_path, samples=120, epochs=8),
        num_groups=3,
        min_replicas=2,
    ) as job:
        is_there, is_back = tmp_path / "is there", tmp_path / "is back"
        waits = ["--wait", "2", str(is_there), "--wait", "20", str(is_back)]
        others = [job.start(group, *waits) for group in (0, 1)]
        for group in others:
            group.wait_for("STEP 2 ")
        first = job.start(2, "--hold=9")
        job.wait_until_asks(first)
        is_there.touch()
        first.wait_for("STEP 9 ")
        first.kill()
        for group in others:
            group.wait_for("STEP 20 ")
        again = job.start(2)
        job.wait_until_asks(again)
        is_back.touch()
        assert [group.process.wait(timeout=240) for group in (*others, again)] == [0] * 3, again.log()[-3000:]
    lives = [Lives(others[0]), Lives(others[1]), Lives(first, again)]
    digests = digests_of(*others, first, again)
    assert sorted(digests) == list(range(1, 41)) and {len(of_step) for of_step in digests.values()} == {1}
    assert list(lives[0].num_groups.values()).count(3) > 20
    for epoch in range(8):
        steps = range(epoch * 5, (epoch + 1) * 5)
        seen = [n for life in lives for step in steps for batch in life.read.get(step, []) for n in batch]
        assert len(seen) == len({*seen}) > 60


@pytest.mark.parametrize("launcher", ["torchrun, two ranks", "accelerate launch"])
def test_under_a_launcher(tmp_path: Path, launcher: str) -> None:
    """accelerate wraps the model into torch's DDP then; the average over the groups comes after that within a group."""
    script, before, nproc = group_script(tmp_path), [], None
    if launcher == "accelerate launch":
        script, before = Path(launch.__file__), ["--cpu", "--num_processes=1", str(script)]
    else:
        nproc = 2
    with FrameworkJob(tmp_path, script, *before, *start_arguments(tmp_path, epochs=8), nproc=nproc) as job:
        is_there, is_back = tmp_path / "is there", tmp_path / "is back"
        survivor = job.start(0, "--wait", "2", str(is_there), "--wait", "15", str(is_back))
        survivor.wait_for("STEP 2 ")
        killed = job.start(1, "--hold=7")
        job.wait_until_asks(killed)
        is_there.touch()
        killed.wait_for("STEP 7 ")
        killed.kill()
        again = job.start(1)
        job.wait_until_asks(again)
        is_back.touch()
        ends = [group.process.wait(timeout=240) for group in (survivor, again)]
        assert ends == [0, 0], again.log()[-3000:]
    assert_each_step_is_there_once(survivor, killed, again)


def test_under_the_library_s_own_launcher(tmp_path: Path) -> None:
    """It starts both groups, and the one that is killed once more."""
    command = tmp_path / "torchft_ckpt_command.py"
    command.write_text("import runpy\n\nrunpy.run_module('torchft_ckpt', run_name='__main__', alter_sys=True)\n")
    is_there, is_back = tmp_path / "is there", tmp_path / "is back"
    waits = ["--wait", "2", str(is_there), "--wait", "20", str(is_back)]
    arguments = [*start_arguments(tmp_path, epochs=8), *waits]
    run = ["run", "--groups=2", "--min-replicas=1", "--", str(group_script(tmp_path))]
    with FrameworkJob(tmp_path, command, *run, *arguments) as job:
        both = job.start(0)
        for group in (0, 1):
            both.wait_for(rf"\[g{group}/r0\].*READ")
        is_there.touch()
        for group in (0, 1):
            both.wait_for(rf"\[g{group}/r0\] STEP ([7-9]|1\d|20) ")
        os.kill(int(re.findall(r"\[g1/r0\].* is process (\d+)", both.log())[-1]), signal.SIGKILL)
        both.wait_for(r"(?s)(\[g1/r0\][^\n]* is process .*){2}\[g1/r0\][^\n]*READ")
        is_back.touch()
        assert both.process.wait(timeout=180) == 0, both.log()[-3000:]
    assert_each_step_is_there_once(both)


def assert_each_step_is_there_once(*groups: Group) -> None:
    """Each step of eight epochs, with the same bits in all of the lives of the groups that made it."""
    assert not any("came to another state" in group.log() for group in groups)
    digests = digests_of(*groups)
    assert sorted(digests) == list(range(1, max(digests) + 1)) and max(digests) >= 20
    assert {len(of_step) for of_step in digests.values()} == {1}


class Alone:
    """Says of a manager what `FaultTolerantAccelerator` asks before the first step."""

    group_world_size, speaks = 1, False

    def current_step(self) -> int:
        return 0

    newest_step_of_peers = current_step

    def begins_step(self, optimizer: object) -> bool:
        return False

    takes_step = took_step = begins_step

    @property
    def hooks(self) -> Alone:
        return self

    def is_warming_up(self) -> bool:
        return False

    num_votes = 0

    def should_commit(self) -> bool:
        self.num_votes += 1
        return True

    def taking_step(self, optimizer: object) -> nullcontext:
        return nullcontext()

    def register_state_dict_fn(self, *args: object) -> None: ...
    def guard_optimizer(self, optimizer: object) -> None: ...
    def replica_id(self) -> str:
        return "group_0"

    def state_dict(self) -> dict[str, int]:
        return {}

    load_state_dict = state_dict


def accelerator(**options: object) -> FaultTolerantAccelerator:
    return FaultTolerantAccelerator(Alone(), **{"group": 1, "num_groups": 2, "cpu": True, **options})


def a_loader(**options: object) -> DataLoader:
    return DataLoader(plain.Numbered(16), batch_size=2, **options)


def test_the_loader_that_is_trained_on_is_divided_and_others_are_read_whole() -> None:
    first, second, shuffled = accelerator().prepare(a_loader(), a_loader(), a_loader(shuffle=True))
    with torch.no_grad():
        assert [batch["number"].tolist() for batch in first] == [[2, 3], [6, 7], [10, 11], [14, 15]]
        assert [len(loader) for loader in (first, second, shuffled)] == [4, 8, 4]


def test_what_was_prepared_is_prepared_once() -> None:
    one = accelerator()
    model = plain.make_model()
    (optimizer,) = plain.make_optimizers(model, "one")
    loader = a_loader(shuffle=True)
    prepared = one.prepare(model, optimizer, loader)
    assert all(first is second for first, second in zip(prepared, one.prepare(*prepared), strict=True))
    assert len(prepared[0]._forward_pre_hooks) == len(one._models) == len(one._optimizers) == len(one._loaders) == 1
    with pytest.raises(ConfigError, match="was prepared before"):
        one.prepare(loader)


def test_optimizers_share_each_step() -> None:
    one = accelerator()
    model = plain.make_model()
    model, first, second = one.prepare(model, *plain.make_optimizers(model, "two"))
    for _ in range(2):
        model(torch.ones(1, 8))
        assert first.step() and second.step()


@pytest.mark.parametrize("order", ["each in its turn", "one fake for both", "one of them less often"])
def test_optimizers_that_take_turns_are_refused_in_the_first_iteration(order: str) -> None:
    """As a generator's and a discriminator's do, in the loops of dcgan and wgan. It says which loop may do so."""
    one = accelerator()
    models = [plain.make_model() for _ in range(2)]
    optimizers = [torch.optim.Adam(model.parameters()) for model in models]
    generator, discriminator, of_generator, of_discriminator, loader = one.prepare(
        *models, *optimizers, a_loader(shuffle=True)
    )
    one._average = SimpleNamespace(put_back=bool, take=bool, forget=bool)

    def train() -> None:
        for step, batch in enumerate(loader):
            fake = generator(batch["input"])
            one.backward(discriminator(fake.detach()).mean() - discriminator(batch["input"]).mean())
            of_discriminator.step()
            of_discriminator.zero_grad()
            if order == "one of them less often" and step % 5 < 4:
                continue
            if order == "each in its turn":
                fake = generator(batch["input"])
            one.backward(-discriminator(fake).mean())
            of_generator.step()
            of_generator.zero_grad()

    with pytest.raises(ConfigError, match=r"1 of 2 optimizers .* take turns need a loop of your own, .*Optimizer"):
        train()
    assert one._manager.num_votes == 1


class Notes(GeneralTracker):
    """A tracker that keeps what is logged."""

    name, requires_logging_directory, tracker = "notes", False, None

    def __init__(self) -> None:
        super().__init__()
        self.logged: list[dict] = []

    def start(self) -> None: ...
    def store_init_configuration(self, values: dict) -> None: ...
    def log(self, values: dict, step: int | None = None, **kwargs: object) -> None:
        self.logged.append(values)


def test_a_tracker_that_was_kept_writes_while_its_group_speaks() -> None:
    """Asked for before the first step, when nobody knows who will speak."""
    notes = Notes()
    one = accelerator(log_with=[notes])
    one.init_trackers("run")
    kept = one.get_tracker("notes")
    kept.log({"loss": 1.0})
    one.num_begun = 1
    for speaks, loss in [(False, 2.0), (True, 3.0), (False, 4.0)]:
        one._manager.speaks = speaks
        kept.log({"loss": loss})
    assert notes.logged == [{"loss": 3.0}]


def test_a_function_that_skips_batches_and_knows_nothing_of_the_job_is_refused() -> None:
    """The accelerator's own method returns the loader, which is where it should be."""
    one = accelerator()
    loader = one.prepare(a_loader(shuffle=True))
    assert one.skip_first_batches(loader, 2) is loader
    with pytest.raises(ConfigError, match=r"accelerator\.skip_first_batches"):
        next(iter(skip_first_batches(loader, 2)))


@pytest.mark.parametrize("kind", ["DEEPSPEED", "FSDP", "MEGATRON_LM", "XLA"])
def test_what_divides_a_model_is_refused_by_name(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a plug-in, which needs a library of its own, or a launcher that sets the environment would have it."""
    monkeypatch.setattr(FaultTolerantAccelerator, "distributed_type", DistributedType[kind])
    with pytest.raises(ConfigError, match=DistributedType[kind].value):
        accelerator()


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (lambda: accelerator(num_groups=None), "NUM_REPLICA_GROUPS"),
        (lambda: accelerator(group=2), "it is 2 of 2, counted from 0"),
        (lambda: accelerator(dataloader_config=DataLoaderConfiguration(even_batches=False)), "even_batches"),
        (lambda: accelerator(dataloader_config=DataLoaderConfiguration(dispatch_batches=True)), "dispatch_batches"),
        (lambda: accelerator().join_uneven_inputs([], even_batches=False), "knows nothing of groups"),
        (lambda: accelerator().prepare(PureDistributedDataParallel(Alone(), plain.make_model())), "the model itself"),
        (lambda: accelerator().backward(torch.ones((), requires_grad=True)), "before its step has begun"),
    ],
)
def test_what_cannot_be_right_is_refused_by_name(
    wrong: Callable[[], object], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NUM_REPLICA_GROUPS", raising=False)
    with pytest.raises(ConfigError, match=words):
        wrong()
