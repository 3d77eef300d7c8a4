"""timm's scaler, schedule, averaged weights and loader in two replica groups: one is killed and comes back.

`scripts/test-integrations timm` runs this in an environment that has timm; elsewhere it is skipped.
"""

from __future__ import annotations

import importlib.util
import runpy
from pathlib import Path

import pytest
import torch
from fingerprints import leaves
from recorded_jobs import Step, run_from_a_checkpoint, run_with_a_kill
from support.launched import REPO
from torch.utils.data import Subset

if importlib.util.find_spec("timm") is None:
    pytest.skip("timm is not installed; scripts/test-integrations runs this", allow_module_level=True)

from timm_group import stand_in_for_operators

SCRIPT = REPO / "examples" / "train_timm.py"
RUNNER = Path(__file__).with_name("timm_group.py")
STEPS = 36
pytestmark = [pytest.mark.processes, pytest.mark.slow]


def run_plain(steps: list[Step]) -> list[dict[str, str]]:
    """Return what timm's own loop leaves after each step: its order, its wrappers, no fault tolerance.

    The gradients of a step are the mean of those of the groups that contributed to it, each accumulated over its own batches.
    """
    stand_in_for_operators()
    script = runpy.run_path(str(SCRIPT))
    device = torch.device("cpu")
    torch.manual_seed(script["SEED"])
    model = script["make_model"]()
    optimizer, lr_scheduler, model_ema, loss_scaler = script["make_training"](model, STEPS, device)
    dataset = script["Quarters"]()
    shards = [Subset(dataset, range(group, len(dataset), 2)) for group in range(2)]
    dataset.transform = script["make_loader"](shards[0], device) and shards[0].transform
    parameters, found = list(model.parameters()), []
    model.train()
    for num_updates, step in enumerate(steps, 1):
        sums = [torch.zeros_like(parameter) for parameter in parameters]
        for group, numbers in step.read.items():
            assert len(numbers) == script["ACCUMULATE"] * script["BATCH_SIZE"]
            for batch in torch.tensor(numbers).split(script["BATCH_SIZE"]):
                images, targets = zip(*(shards[group][number] for number in batch), strict=True)
                loss = script["loss_of"](model, torch.stack(images), torch.tensor(targets), device)
                loss_scaler(loss, optimizer, need_update=False)
            for total, parameter in zip(sums, parameters, strict=True):
                total += parameter.grad
            optimizer.zero_grad()
        for total, parameter in zip(sums, parameters, strict=True):
            parameter.grad = total / len(step.read)
        # The rest of NativeScaler's call, then the order of timm's train.py.
        loss_scaler._scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        loss_scaler._scaler.step(optimizer)
        loss_scaler._scaler.update()
        optimizer.zero_grad()
        model_ema.update(model, step=num_updates)
        lr_scheduler.step_update(num_updates=num_updates)
        states = {"model": model, "optimizer": optimizer, "model_ema": model_ema, "grad_scaler": loss_scaler}
        found.append(dict(leaves("", {name: part.state_dict() for name, part in states.items()})))
    return found


def assert_as_plain(steps: list[Step]) -> None:
    for step, plain in zip(steps, run_plain(steps), strict=True):
        different = [path for path in plain if plain[path] != step.values.get(path)]
        assert different == [] and step.values.keys() == plain.keys(), f"step {step.number}"


def test_each_step_is_that_of_timms_own_loop_although_a_group_is_killed(tmp_path: Path) -> None:
    """Weights, AdamW's state, learning rate, averaged weights and scale, of each of the steps that counted."""
    out = tmp_path / "out"
    steps = run_with_a_kill(tmp_path, SCRIPT, f"--steps={STEPS}", f"--output={out}", num_steps=STEPS, runner=RUNNER)
    assert_as_plain(steps)
    assert sorted(path.name for path in out.glob("checkpoint-*")) == ["checkpoint-20.pth.tar"]


def test_all_groups_go_on_from_a_checkpoint_of_timms_saver(tmp_path: Path) -> None:
    """One of them wrote it before all were killed: each step before it and after it is that of one plain loop."""
    out = tmp_path / "out"
    steps = run_from_a_checkpoint(
        tmp_path,
        SCRIPT,
        f"--steps={STEPS}",
        f"--output={out}",
        resume=f"--resume={out / 'checkpoint-20.pth.tar'}",
        saved_at=20,
        num_steps=STEPS,
        nproc=1,
        runner=RUNNER,
    )
    assert_as_plain(steps)
