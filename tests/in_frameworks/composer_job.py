"""A replica group of Composer's Trainer: microbatches, a schedule of Composer's own, checkpoints in one folder for all groups.

It prints `TRIED step [ids]` before each vote, `COUNTED step participants digest` after each step that counts, and its state at
the end. `--report-at STEP`: it reports an error in that step once, so that the step is discarded. `--wait STEP FILE`, more than
once: it stands still after that step until the file exists, and then goes slowly until another group trains with it.
"""

# ruff: noqa: E402

from __future__ import annotations

import argparse
import logging
import os
import sys
import types
from pathlib import Path
from typing import Any

# A torchvision that was built for CUDA declares its operators nowhere else; Composer uses its image transforms alone.
sys.modules.setdefault("torchvision._meta_registrations", types.ModuleType("torchvision._meta_registrations"))

import torch
from composer import Callback, ComposerModel, Trainer
from composer.optim import CosineAnnealingScheduler
from fingerprints import digest, print_state, say
from gates import Gates
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from torchft_ckpt import DistributedDataParallel, DistributedSampler, Manager, Optimizer, ProcessGroupGloo
from torchft_ckpt.errors import JobFinishedError

COUNTS = ("epoch", "batch", "sample", "token", "batch_in_epoch", "sample_in_epoch", "token_in_epoch")
BATCH_SIZE, MICROBATCH_SIZE, NUM_SAMPLES = 8, 4, 160


class AdamW(Optimizer):
    """Composer names the state of an optimizer by its class: it saves this one's under the name of the one in it."""


class Batches(DataLoader):
    """A loader that can be left: Composer then begins to read where its clock is."""

    is_left = False

    def __iter__(self) -> Any:
        self.is_left = False
        for batch in super().__iter__():
            yield batch
            if self.is_left:
                return


class FollowsJob(Callback):
    """Composer's clock counts the steps of the job, and its place in the data is that of the clock."""

    def __init__(self, manager: Manager, batches: Batches) -> None:
        self.manager, self.batches = manager, batches

    def fit_start(self, state: Any, logger: Any) -> None:
        def load(counts: dict[str, int]) -> None:
            state.timestamp = self.clock = state.timestamp.copy(**counts)
            self.batches.is_left = True

        def get() -> dict[str, int]:
            return {name: int(getattr(self.clock, name)) for name in COUNTS}

        self.clock = state.timestamp
        self.manager.register_state_dict_fn("clock", load, get)
        if int(state.timestamp.batch) > self.manager.current_step():  # a checkpoint was loaded
            self.manager.load_state_dict({"step": int(state.timestamp.batch), "batches_committed": 0})

    def batch_end(self, state: Any, logger: Any) -> None:
        if not self.manager.last_step_counted():
            state.timestamp = self.clock
            self.batches.is_left = True
        self.clock = state.timestamp

    def epoch_end(self, state: Any, logger: Any) -> None:
        if self.batches.is_left:  # the epoch goes on
            state.timestamp = state.previous_timestamp = self.clock
        self.clock = state.timestamp


class Net(ComposerModel):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.layers = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))

    def forward(self, batch: Any) -> torch.Tensor:
        return self.layers(batch[1])

    def loss(self, outputs: torch.Tensor, batch: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        return nn.functional.mse_loss(outputs, batch[2])


def make_data() -> TensorDataset:
    """Return numbered samples."""
    inputs = torch.randn(NUM_SAMPLES, 6, generator=torch.Generator().manual_seed(1))
    return TensorDataset(torch.arange(NUM_SAMPLES), inputs, torch.tanh(inputs[:, :3] - inputs[:, 3:]))


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def digest_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    return digest(model=model.state_dict(), optimizer=optimizer.state_dict())


class Recorder(Callback):
    """Says what is tried, and what counts."""

    def __init__(
        self, manager: Manager, model: nn.Module, optimizer: torch.optim.Optimizer, options: argparse.Namespace
    ) -> None:
        self.manager, self.model, self.optimizer = manager, model, optimizer
        self.report_at, self.gates = options.report_at, Gates(options.wait)

    def after_train_batch(self, state: Any, logger: Any) -> None:
        step = self.manager.current_step()
        say(f"TRIED {step} {state.batch[0].tolist()}")
        if step == self.report_at:
            self.report_at = -1
            self.manager.report_error(RuntimeError("the test says so"))

    def batch_end(self, state: Any, logger: Any) -> None:
        if self.manager.last_step_counted():
            num = self.manager.view().num_participants
            say(f"COUNTED {self.manager.current_step() - 1} {num} {digest_of(self.model, self.optimizer)}")
            self.gates.go_on(self.manager.current_step(), num)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--report-at", type=int, default=-1)
    parser.add_argument("--load", help="a checkpoint")
    parser.add_argument("--wait", nargs=2, action="append", default=[])
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    group, num_groups = int(os.environ["REPLICA_GROUP_ID"]), int(os.environ["NUM_REPLICA_GROUPS"])

    model, data = Net(), make_data()
    adamw = make_optimizer(model)
    manager = Manager(ProcessGroupGloo(), None, None, min_replica_size=1, replica_id=f"group_{group}")
    manager.register_state_dict_fn("model", model.load_state_dict, model.state_dict)
    manager.register_state_dict_fn("optimizer", adamw.load_state_dict, adamw.state_dict)
    sampler = DistributedSampler(data, replica_rank=group, num_replica_groups=num_groups, shuffle=True, seed=3)
    batches = Batches(data, batch_size=BATCH_SIZE, sampler=sampler, drop_last=True)
    trainer = Trainer(
        model=model,
        optimizers=adamw,
        schedulers=CosineAnnealingScheduler(),
        train_dataloader=batches,
        max_duration=f"{options.steps}ba",
        device="cpu",
        device_train_microbatch_size=MICROBATCH_SIZE,
        callbacks=[FollowsJob(manager, batches), Recorder(manager, model, adamw, options)],
        save_folder=str(options.folder),
        save_interval=lambda state, event: manager.speaks and int(state.timestamp.batch) % 10 == 0,
        save_overwrite=True,
        load_path=options.load,
        progress_bar=False,
    )
    trainer.state.model = DistributedDataParallel(manager, trainer.state.model)
    trainer.state.optimizers = AdamW(manager, adamw)
    (scheduler,) = trainer.state.schedulers
    manager.scheduler(scheduler)
    try:
        trainer.fit()
    except JobFinishedError as over:
        say(str(over))
        return
    clock = {name: int(getattr(trainer.state.timestamp, name)) for name in COUNTS}
    states = {"model": model.state_dict(), "optimizer": adamw.state_dict(), "clock": clock}
    print_state(step=manager.current_step(), scheduler={"last_epoch": scheduler.last_epoch}, **states)
    manager.shutdown(finished=True)


if __name__ == "__main__":
    main()
