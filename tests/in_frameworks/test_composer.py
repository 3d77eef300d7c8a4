"""Replica groups of Composer's Trainer, in real processes: one is killed, is started again, and ends with the bits of the other.

Each step that counts is computed again by a plain loop of torch, over the batches that the groups have trained on.
"""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from framework_jobs import FrameworkJob, Group, assert_equal_states

job = pytest.importorskip("composer_job")

from composer import Time, Timestamp  # noqa: E402
from composer.optim import CosineAnnealingScheduler  # noqa: E402

SCRIPT = Path(__file__).with_name("composer_job.py")
NUM_STEPS, DISCARDED, HELD_AT = 80, 9, 25


def tried(group: Group) -> dict[int, list[int]]:
    """Return which samples it trained on, by the step before the one that counts."""
    found = re.findall(r"TRIED (\d+) \[(.*)\]", group.log())
    return {int(step): [int(number) for number in ids.split(",")] for step, ids in found}


def counted(group: Group) -> dict[int, tuple[int, str]]:
    """Return of each step that counted how many contributed, and the digest of the state after it."""
    found = re.findall(r"COUNTED (\d+) (\d+) (\w+)", group.log())
    return {int(step): (int(num), digest) for step, num, digest in found}


def plain_digests(batches: list[list[list[int]]]) -> list[str]:
    """Return the digest after each step of a plain loop; `batches`: of each step, those of its groups, by sample numbers."""
    _, inputs, targets = job.make_data().tensors
    model = job.Net()
    optimizer = job.make_optimizer(model)
    duration = Time.from_timestring(f"{NUM_STEPS}ba")

    def rate(num_steps: int) -> float:  # Composer's clock moves after its schedule
        at = SimpleNamespace(timestamp=Timestamp(batch=max(num_steps - 1, 0)), max_duration=duration)
        return CosineAnnealingScheduler()(at)

    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
    digests = []
    for of_groups in batches:
        gradients = []
        for samples in of_groups:
            model.zero_grad()
            for part in torch.tensor(samples).split(job.MICROBATCH_SIZE):
                loss = torch.nn.functional.mse_loss(model.layers(inputs[part]), targets[part])
                loss.mul(len(part) / len(samples)).backward()
            gradients.append([parameter.grad for parameter in model.parameters()])
        for parameter, *shares in zip(model.parameters(), *gradients, strict=True):
            parameter.grad = sum(shares[1:], shares[0]) / len(shares)
        optimizer.step()
        scheduler.step()
        digests.append(job.digest_of(model, optimizer))
    return digests


@pytest.mark.processes
@pytest.mark.slow
def test_a_group_is_killed_and_each_step_that_counts_is_that_of_a_plain_loop(tmp_path: Path) -> None:
    here, back, never, folder = (tmp_path / name for name in ("here", "back", "never", "checkpoints"))
    gates = ["--wait", "1", str(here), "--wait", str(HELD_AT), str(back)]
    with FrameworkJob(tmp_path, SCRIPT, f"--steps={NUM_STEPS}", f"--folder={folder}") as groups:
        first = groups.start(0, f"--report-at={DISCARDED}", *gates)
        first.wait_for_step(1)
        second = groups.start(1, "--wait", str(HELD_AT - 8), str(never))
        groups.wait_until_asks(second)
        here.touch()
        second.wait_for_step(HELD_AT - 8, participants=2)
        second.kill()
        first.wait_for_step(HELD_AT)
        again = groups.start(1)
        groups.wait_until_asks(again)  # there are checkpoints already: save_overwrite
        back.touch()
        ends = first.end(), again.end()
    assert_equal_states(*ends)
    assert ends[0]["step"] == NUM_STEPS, "a discarded iteration counts neither in the job nor on Composer's clock"
    assert ends[0]["values"]["/clock/batch"] == str(NUM_STEPS)
    done, later = counted(first), counted(again)
    assert list(done) == list(range(NUM_STEPS))
    assert len(later) > 5, "it came in, and trained on"
    before = counted(second)
    for step, (_, digest) in (*before.items(), *later.items()):
        assert digest == done[step][1], f"after step {step}"
    batches = []
    for step, (num, _) in done.items():
        others = [tried(again if step in later else second)[step]] if num == 2 else []
        batches.append([tried(first)[step], *others])
    nums = [num for num, _ in done.values()]
    assert (nums[0], nums[HELD_AT - 1], nums[-1]) == (1, 1, 2)
    assert plain_digests(batches) == [digest for _, digest in done.values()]
    saved = sorted(int(path.name.split("-ba")[1].split("-")[0]) for path in folder.glob("ep*.pt"))
    assert saved == list(range(10, NUM_STEPS + 1, 10)), "whoever spoke for the job"


@pytest.mark.processes
@pytest.mark.slow
def test_all_groups_go_on_from_a_file_of_composers(tmp_path: Path) -> None:
    """One of them wrote it before all were killed; the other one dies once more, and comes back with the same `load_path`.

    torchrun starts the first of these lives, one rank of each group.
    """
    folder, there, back, never = (tmp_path / name for name in ("checkpoints", "there", "back", "never"))
    arguments = [f"--steps={NUM_STEPS}", f"--folder={folder}"]
    with FrameworkJob(tmp_path, SCRIPT, *arguments, min_replicas=2, nproc=1) as groups:
        first = [groups.start(group, "--wait", "22", str(never)) for group in (0, 1)]
        for group in first:
            group.wait_for("^COUNTED 21 ")
        for group in first:
            group.kill()
    (load,) = (f"--load={path}" for path in folder.glob("ep*-ba20-rank0.pt"))
    waits = ["--wait", "21", str(there), "--wait", "40", str(back)]
    (tmp_path / "second").mkdir()
    with FrameworkJob(tmp_path / "second", SCRIPT, *arguments) as groups:
        survivor = groups.start(0, load, *waits)
        survivor.wait_for_step(21)
        killed = groups.start(1, load, "--wait", "30", str(never))
        groups.wait_until_asks(killed)
        there.touch()
        killed.wait_for_step(30, participants=2)
        killed.kill()
        survivor.wait_for_step(40)
        again = groups.start(1, load)
        groups.wait_until_asks(again)
        back.touch()
        ends = survivor.end(), again.end()
    assert_equal_states(*ends)
    assert ends[0]["values"]["/clock/batch"] == str(ends[0]["step"]) == str(NUM_STEPS)
    before, done, with_it, later = map(counted, (first[0], survivor, killed, again))
    assert counted(first[1]) == before
    assert all(done[step] == said for step, said in (*with_it.items(), *later.items()))
    batches, digests = [], []
    for step in range(NUM_STEPS):
        life, other = first if step < 20 else (survivor, again if step in later else killed)
        num, digest = counted(life)[step]
        batches.append([tried(life)[step], *([tried(other)[step]] if num == 2 else [])])
        digests.append(digest)
    assert [len(of_step) for of_step in batches].count(2) > 30
    assert plain_digests(batches) == digests
    for epoch in range(0, NUM_STEPS, 10):  # no sample is read twice in it, by whichever group
        read = [number for of_step in batches[epoch : epoch + 10] for of_group in of_step for number in of_group]
        assert len(read) == len({*read})
