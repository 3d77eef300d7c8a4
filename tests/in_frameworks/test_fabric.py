"""Loops on Lightning's Fabric in two replica groups: litgpt's, and one with two optimizers. One group is killed and comes back.

`scripts/test-integrations fabric` runs this in an environment that has Lightning; elsewhere it is skipped.
"""

from __future__ import annotations

import importlib.util
import os
import runpy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fingerprints import leaves
from framework_jobs import FrameworkJob
from recorded_jobs import Step, run_from_a_checkpoint, run_with_a_kill
from support.launched import REPO
from torch import nn

if importlib.util.find_spec("lightning") is None:
    pytest.skip("lightning is not installed; scripts/test-integrations runs this", allow_module_level=True)

SCRIPT = REPO / "examples" / "train_fabric.py"
TWO = Path(__file__).with_name("fabric_two_optimizers.py")
STEPS = 36
pytestmark = [pytest.mark.processes, pytest.mark.slow]


def average_into(parameters: list[nn.Parameter], gradients: list[list[torch.Tensor]]) -> None:
    """Let each parameter's gradient be the mean of those of the groups."""
    for parameter, *of_groups in zip(parameters, *gradients, strict=True):
        parameter.grad = sum(of_groups[1:], start=of_groups[0]) / len(of_groups)


def values_of(states: dict[str, Any]) -> dict[str, str]:
    return dict(leaves("", {name: part.state_dict() for name, part in states.items()}))


def run_litgpts(steps: list[Step]) -> Iterator[dict[str, str]]:
    """Yield what litgpt's loop in plain torch leaves after each step, as its next iteration begins."""
    script = runpy.run_path(str(SCRIPT))
    accumulate, data = script["ACCUMULATE"], script["Texts"](Path(os.__file__).parent)
    torch.manual_seed(script["SEED"])
    model = script["Guesser"]()
    optimizer = script["make_optimizer"](model)
    iter_num = 0

    def set_rate() -> None:
        for param_group in optimizer.param_groups:
            param_group["lr"] = script["get_lr"](iter_num, STEPS * accumulate)

    for step in steps:
        gradients = []
        for numbers in step.read.values():
            assert len(numbers) == accumulate * script["BATCH_SIZE"]
            for batch in torch.tensor(numbers).split(script["BATCH_SIZE"]):
                input_ids, targets = (torch.stack(texts) for texts in zip(*(data[int(i)] for i in batch), strict=True))
                with torch.autocast("cpu", torch.bfloat16):
                    logits = model(input_ids)
                loss = nn.functional.cross_entropy(logits.float().flatten(0, 1), targets.flatten())
                (loss / accumulate).backward()
            gradients.append([parameter.grad for parameter in model.parameters()])
            optimizer.zero_grad()
        average_into(list(model.parameters()), gradients)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        iter_num += accumulate - 1  # each iteration sets the rate, and the last of a window steps with it
        set_rate()
        optimizer.step()
        optimizer.zero_grad()
        iter_num += 1
        if step.number < STEPS:
            set_rate()
        yield values_of({"model": model, "optimizer": optimizer})


def run_two(steps: list[Step]) -> Iterator[dict[str, str]]:
    """Yield what the loop with two optimizers leaves after each step in plain torch."""
    script = runpy.run_path(str(TWO))
    torch.manual_seed(script["SEED"])
    data = script["make_data"]()
    model, (matrices, others) = script["make_training"]()
    for step in steps:
        gradients = []
        for numbers in step.read.values():
            features, targets = data[numbers]
            nn.functional.mse_loss(model(features), targets).backward()
            gradients.append([parameter.grad for parameter in model.parameters()])
            model.zero_grad()
        average_into(list(model.parameters()), gradients)
        matrices.step()
        others.step()
        model.zero_grad()
        yield values_of({"model": model, "matrices": matrices, "others": others})


def assert_as_plain(steps: list[Step], plain: Iterator[dict[str, str]]) -> None:
    for step, values in zip(steps, plain, strict=True):
        different = [path for path in values if values[path] != step.values.get(path)]
        assert different == [] and step.values.keys() == values.keys(), f"step {step.number}"


def test_each_step_of_litgpts_loop_is_that_of_a_plain_one_although_a_group_is_killed(tmp_path: Path) -> None:
    """Weights, AdamW's state and learning rate, of each of the steps that counted; and each checkpoint is there."""
    out = tmp_path / "out"
    steps = run_with_a_kill(tmp_path, SCRIPT, f"--steps={STEPS}", f"--output={out}", num_steps=STEPS)
    assert_as_plain(steps, run_litgpts(steps))
    assert [path.name for path in out.iterdir()] == ["step-00000020.pth"]


def test_all_groups_go_on_from_a_checkpoint_of_fabrics(tmp_path: Path) -> None:
    """One of them wrote it before all were killed: each step before it and after it is that of one plain loop."""
    out = tmp_path / "out"
    resume = f"--resume={out / 'step-00000020.pth'}"
    arguments = [f"--steps={STEPS}", f"--output={out}"]
    steps = run_from_a_checkpoint(tmp_path, SCRIPT, *arguments, resume=resume, saved_at=20, num_steps=STEPS, nproc=1)
    assert_as_plain(steps, run_litgpts(steps))
    before, after = (
        {number for step in part for of_group in step.read.values() for number in of_group}
        for part in (steps[:20], steps[20:])
    )
    assert not before & after, "it reads on in the epoch"


def test_two_optimizers_that_fabric_has_set_up_share_each_step(tmp_path: Path) -> None:
    """Fabric's class is a subclass of ours, and is not taken for a third optimizer."""
    steps = run_with_a_kill(tmp_path, TWO, f"--steps={STEPS}", num_steps=STEPS)
    assert_as_plain(steps, run_two(steps))


def test_fabrics_own_ddp_around_ours_is_refused_in_the_first_forward_pass(tmp_path: Path) -> None:
    """It would write gradients of one group alone over the average."""
    with FrameworkJob(tmp_path, SCRIPT, "--steps=5", "--strategy=ddp", f"--output={tmp_path / 'out'}") as job:
        group = job.start(0)
        assert group.process.wait(timeout=120) == 1
    assert "ConfigError: torch's DistributedDataParallel holds this one" in group.log()
    assert group.steps() == []
