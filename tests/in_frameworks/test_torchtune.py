"""torchtune's recipe for one device in two replica groups: one is killed and comes back.

`scripts/test-integrations torchtune` runs this in an environment that has torchtune; elsewhere it is skipped.
"""

from __future__ import annotations

import importlib.util
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from fingerprints import leaves
from recorded_jobs import Step, run_from_a_checkpoint, run_with_a_kill
from support.launched import REPO

if importlib.util.find_spec("torchtune") is None:
    pytest.skip("torchtune is not installed; scripts/test-integrations runs this", allow_module_level=True)

SCRIPT = REPO / "examples" / "train_torchtune.py"
EPOCHS, STEPS = 5, 45
pytestmark = [pytest.mark.processes, pytest.mark.slow]


def run_plain(steps: list[Step], folder: Path) -> Iterator[dict[str, str]]:
    """Yield what torchtune's recipe leaves after each step: its own setup and loss, and no fault tolerance.

    A step's gradients are those of all tokens of all groups, by the number of these tokens.
    """
    script = runpy.run_path(str(SCRIPT))
    cfg = script["make_config"](EPOCHS, str(folder))
    recipe = script["Recipe"](cfg)
    recipe.setup(cfg)
    dataset, collate = recipe._dataloader.dataset, recipe._dataloader.collate_fn
    parameters = list(recipe._model.parameters())
    # With one group the schedule is as long as its epochs are; in the job an epoch is that of two.
    recipe._lr_scheduler = recipe._setup_lr_scheduler(cfg.lr_scheduler, num_training_steps=STEPS, last_epoch=-1)
    for step in steps:
        sums, num_tokens = [torch.zeros_like(parameter) for parameter in parameters], 0
        for numbers in step.read.values():
            assert len(numbers) == cfg.batch_size * cfg.gradient_accumulation_steps
            for samples in torch.tensor(numbers).split(cfg.batch_size):
                batch = collate([dataset[int(number)] for number in samples])
                tokens = (batch["labels"] != -100).sum()
                num_tokens += tokens.item()
                (recipe._loss_step(batch) * tokens).backward()
            for total, parameter in zip(sums, parameters, strict=True):
                total += parameter.grad
            recipe._optimizer.zero_grad()
        # Exact for one group and for two: both numbers are halved.
        for total, parameter in zip(sums, parameters, strict=True):
            parameter.grad = total / len(step.read) * (1 / torch.tensor(num_tokens / len(step.read)))
        torch.nn.utils.clip_grad_norm_(parameters, cfg.clip_grad_norm)
        recipe._optimizer.step()
        recipe._optimizer.zero_grad()
        recipe._lr_scheduler.step()
        parts = {"model": recipe._model, "optimizer": recipe._optimizer, "scheduler": recipe._lr_scheduler}
        yield dict(leaves("", {name: part.state_dict() for name, part in parts.items()}))


def assert_as_plain(steps: list[Step], folder: Path) -> None:
    for step, plain in zip(steps, run_plain(steps, folder), strict=True):
        different = [path for path in plain if plain[path] != step.values.get(path)]
        assert different == [] and step.values.keys() == plain.keys(), f"step {step.number}"
    assert sorted(path.name for path in folder.glob("epoch_*")) == [f"epoch_{n:06d}.pt" for n in range(EPOCHS)]


def test_each_step_is_that_of_the_recipe_although_a_group_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights, AdamW's state, learning rate and schedule, of each of the steps that counted; each epoch is saved once."""
    monkeypatch.setattr(sys, "path", [str(SCRIPT.parent), *sys.path])
    out = tmp_path / "out"
    steps = run_with_a_kill(tmp_path, SCRIPT, f"--epochs={EPOCHS}", f"--output={out}", num_steps=STEPS)
    assert_as_plain(steps, out)


def test_all_groups_go_on_from_what_the_recipe_has_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of them saved after two epochs, before all were killed: each step before and after is that of one plain loop."""
    monkeypatch.setattr(sys, "path", [str(SCRIPT.parent), *sys.path])
    out = tmp_path / "out"
    arguments = [f"--epochs={EPOCHS}", f"--output={out}"]
    steps = run_from_a_checkpoint(
        tmp_path, SCRIPT, *arguments, resume="--resume", saved_at=18, num_steps=STEPS, nproc=1
    )
    # The recipe makes its schedule anew: so many calls of it were made in this process, which nothing but a warning reads.
    made_anew = "/scheduler/_step_count"
    steps = [step._replace(values={**step.values, made_anew: repr(step.number + 1)}) for step in steps]
    assert_as_plain(steps, out)
