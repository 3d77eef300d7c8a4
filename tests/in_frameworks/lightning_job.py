"""One replica group of a Lightning job, as its user writes it: accumulates, clips, schedules, logs, saves, validates.

It prints what it read for which step, which checkpoint it wrote, and its state at the end. It goes slowly until all groups train.
In a step it waits for one of them to be killed, or to get SIGTERM; and some steps later, until it may be met again.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from fingerprints import print_state, say
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint, StochasticWeightAveraging
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins.io import TorchCheckpointIO
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from torchft_ckpt import DistributedSampler, Manager, ProcessGroupGloo
from torchft_ckpt.errors import JobFinishedError
from torchft_ckpt.integrations.lightning import FaultToleranceModelParallelStrategy, FaultToleranceStrategy

NUM_SAMPLES, BATCH_SIZE, ACCUMULATE, NUM_FEATURES = 168, 4, 2, 16
"""An epoch of one of two groups has 21 batches: 11 steps, and the last one has one batch."""
HELD_AT = 13
"""In this step, or the first after it in which two groups train, both wait until they may go on: then one of them is killed."""
STANDS_AFTER, SLOWER_S = 10, 0.1


def make_data() -> TensorDataset:
    """Samples (number, features, target)."""
    random = torch.Generator().manual_seed(3)
    features = torch.randn(NUM_SAMPLES, NUM_FEATURES, generator=random)
    return TensorDataset(torch.arange(NUM_SAMPLES), features, features.sum(1, keepdim=True).tanh())


def sampler_of(
    group: int, data: TensorDataset, *, num_groups: int = 2, rank: int = 0, num_ranks: int = 1
) -> DistributedSampler:
    return DistributedSampler(
        data,
        replica_rank=group,
        num_replica_groups=num_groups,
        group_rank=rank,
        num_replicas=num_ranks,
        shuffle=True,
        seed=5,
    )


class Net(LightningModule):
    def __init__(self, seed: int, num_steps: int) -> None:
        super().__init__()
        self.save_hyperparameters()
        torch.manual_seed(seed)
        self.layers = nn.Sequential(nn.Linear(NUM_FEATURES, 32), nn.Tanh(), nn.Linear(32, 1))
        self.num_groups: Callable[[], int] | None = None  # no Manager: StochasticWeightAveraging makes a deep copy
        self.note = f"seed {seed}"
        self.go_on = self.is_back = Path()
        self.pause_s = 0.0
        self.stands_after = STANDS_AFTER
        self.stands_at: int | None = None
        """A step that it does not make alone until it may be met again, which is none before one was killed."""
        self.num_alone = 0
        """Batches since it was to be met."""
        self.num_wanted = int(os.environ.get("NUM_REPLICA_GROUPS", "1"))
        self.has_met = False
        self.logs_more = False
        """Also means of epochs, and of one rank."""

    def training_step(self, batch: tuple[Tensor, ...], batch_idx: int) -> Tensor:
        numbers, features, targets = batch
        say(f"READ {self.trainer.global_step} {batch_idx % ACCUMULATE} {numbers.tolist()}")
        if self.num_groups is not None:
            self.take_time(self.num_groups())
        loss = nn.functional.mse_loss(self.layers(features), targets)
        self.log("loss", loss)
        if self.logs_more:
            self.log("epoch's loss", loss, on_step=False, on_epoch=True)
            if self.global_rank == 0:
                self.log("of rank 0", loss, rank_zero_only=True)
        return loss

    def take_time(self, num_groups: int) -> None:
        self.has_met = self.has_met or num_groups >= self.num_wanted
        if not self.has_met:
            self.num_alone += 1
            time.sleep(SLOWER_S * self.num_alone)
        elif num_groups == 1:
            time.sleep(0.2)
            if self.stands_at is not None and self.trainer.global_step >= self.stands_at:
                self.stand_until(self.is_back)
                self.stands_at, self.has_met, self.num_alone = None, False, 0
        elif self.pause_s:
            time.sleep(self.pause_s)
        elif self.trainer.global_step >= HELD_AT and not self.go_on.exists():
            say(f"HELD {self.trainer.global_step}")
            self.stands_at = self.trainer.global_step + self.stands_after
            self.stand_until(self.go_on)

    def stand_until(self, path: Path) -> None:
        while not path.exists():
            time.sleep(0.05)

    def validation_step(self, batch: tuple[Tensor, ...], batch_idx: int) -> None:
        _, features, targets = batch
        self.log("val_loss", nn.functional.mse_loss(self.layers(features), targets))

    def configure_optimizers(self) -> dict[str, Any]:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, self.hparams["num_steps"])
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["note"] = self.note

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.note = checkpoint["note"]


class ShardedNet(Net):
    def configure_model(self) -> None:
        from torch.distributed.fsdp import FSDPModule, fully_shard

        if not isinstance(self.layers, FSDPModule):
            mesh = self.device_mesh["data_parallel"]
            for layer in (self.layers[0], self.layers[2]):
                fully_shard(layer, mesh=mesh)
            fully_shard(self.layers, mesh=mesh)


class Averages(Callback):
    """Keeps an average whose decay follows from the step that it reads, and a copy of the weights of every third step.

    It counts what it hears of batches, so that those of a step which does not count would leave a trace.
    """

    def setup(self, trainer: Trainer, module: LightningModule, stage: str) -> None:
        self.average, self.copied = ([p.detach().clone() for p in module.parameters()] for _ in range(2))
        self.heard = {"begins": 0, "zero_grads": 0, "ends": 0, "number": 0}

    def state_dict(self) -> dict[str, Any]:
        return {"average": self.average, "copied": self.copied, "heard": dict(self.heard)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.average, self.copied, self.heard = state["average"], state["copied"], dict(state["heard"])

    def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
        self.step = trainer.global_step
        self.heard["begins"] += 1

    def on_before_zero_grad(self, *_: Any) -> None:
        self.heard["zero_grads"] += 1

    def on_train_batch_end(self, trainer: Trainer, module: LightningModule, _: Any, batch: Any, number: int) -> None:
        self.heard["ends"] += 1
        self.heard["number"] = number
        if trainer.global_step == self.step:  # of a batch that is accumulated
            return
        weights = [parameter.detach() for parameter in module.parameters()]
        for average, weight in zip(self.average, weights, strict=True):
            average.lerp_(weight, 9 / (10 + self.step))
        if self.step % 3 == 0:
            self.copied = [weight.clone() for weight in weights]


class TellingIO(TorchCheckpointIO):
    def __init__(self, slow_step: int = 0, slow_s: float = 0.0) -> None:
        self.slow_step, self.slow_s = slow_step, slow_s

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        step, began = checkpoint["global_step"], time.time()
        say(f"WROTE {Path(path).name} {step}")
        if step == self.slow_step:
            time.sleep(self.slow_s)
        super().save_checkpoint(checkpoint, path, storage_options)
        say(f"BETWEEN {began} {time.time()} {Path(path).name}")


def make_trainer(folder: Path, num_steps: int, **options: Any) -> Trainer:
    return Trainer(
        accelerator="cpu",
        max_steps=num_steps,
        accumulate_grad_batches=options.pop("accumulate", ACCUMULATE),
        gradient_clip_val=0.05,
        logger=CSVLogger(folder, name="logs", version=0, flush_logs_every_n_steps=1),
        log_every_n_steps=1,
        callbacks=[
            ModelCheckpoint(folder / "checkpoints", every_n_train_steps=5, save_top_k=-1, filename="{step}"),
            ModelCheckpoint(folder / "best", monitor="val_loss", save_top_k=2, filename="{epoch}"),
        ],
        enable_model_summary=False,
        num_sanity_val_steps=0,
        use_distributed_sampler=False,
        **options,
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--sharded", action="store_true")
    parser.add_argument("--leaves", action="store_true")
    parser.add_argument("--averages", action="store_true", help="by a callback of the user's and one of Lightning's")
    parser.add_argument("--pause", type=float, default=0.0)
    parser.add_argument("--slow-save", type=float, default=0.0, help="seconds that the save of step 10 takes")
    parser.add_argument("--min-replica-size", type=int, default=1)
    parser.add_argument("--stands-after", type=int, default=STANDS_AFTER, help="this many steps after that one")
    parser.add_argument("--exact", action="store_true", help="steps of the whole data set, whoever is there")
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(name)s %(levelname)s %(message)s")
    torch.set_num_threads(1)
    group, rank = int(os.environ["REPLICA_GROUP_ID"]), int(os.environ.get("RANK", 0))
    num_ranks = int(os.environ.get("WORLD_SIZE", 1))

    manager = Manager(
        pg=ProcessGroupGloo(),
        load_state_dict=None,
        state_dict=None,
        min_replica_size=options.min_replica_size,
        replica_id=f"group_{group}",
    )
    data = make_data()
    num_groups = int(os.environ["NUM_REPLICA_GROUPS"])
    sampler = sampler_of(group, data, num_groups=num_groups, rank=rank, num_ranks=num_ranks)
    loader = DataLoader(data, batch_size=BATCH_SIZE, sampler=sampler, drop_last=True)
    exact = {"global_batch_size": 4 * BATCH_SIZE} if options.exact else {}
    accumulate = 1 if options.exact else ACCUMULATE
    if options.sharded:
        strategy: Any = FaultToleranceModelParallelStrategy(
            manager, data_parallel_size=num_ranks, tensor_parallel_size=1, **exact
        )
        trainer = make_trainer(
            options.folder, options.steps, strategy=strategy, devices=num_ranks, accumulate=accumulate
        )
    else:
        strategy = FaultToleranceStrategy(manager, **exact)
        plugins = [TellingIO(10, options.slow_save)]
        trainer = make_trainer(options.folder, options.steps, strategy=strategy, plugins=plugins, accumulate=accumulate)
    # Other weights in each life of each group: what is equal at the end came from the others.
    seed = 0 if options.exact else int.from_bytes(os.urandom(4), "big")
    model = (ShardedNet if options.sharded else Net)(seed, options.steps)
    if options.exact and not options.sharded:
        model.layers.insert(1, nn.BatchNorm1d(32))
        model.layers.append(nn.Dropout(0.1))
    model.logs_more = options.exact
    model.stands_after = options.stands_after
    if num_groups > 1 or not options.exact:
        model.num_groups = lambda: manager.num_participants()
    model.go_on, model.is_back = (options.folder.parent / name for name in ("go_on", "is_back"))
    model.pause_s = options.pause
    averages: list[Any] = []
    if options.averages:
        averages = [Averages(), StochasticWeightAveraging(swa_lrs=5e-3, swa_epoch_start=1, annealing_epochs=3)]
        trainer.callbacks[:0] = averages
    say(f"PID {rank} {os.getpid()}")
    if options.leaves:
        manager.leave_on(signal.SIGTERM, save=lambda: trainer.save_checkpoint(options.folder / "left.ckpt"))
    trainer.fit(model, loader, DataLoader(data, batch_size=42))
    print_state(
        step=manager.current_step(),
        rank={"rank": rank},
        trainer={"global_step": trainer.global_step, "epoch": trainer.current_epoch},
        model=model.state_dict(),
        optimizer=trainer.optimizers[0].state_dict(),
        scheduler=trainer.lr_scheduler_configs[0].scheduler.state_dict(),
        hooks={"note": model.note},
        averages=[one.state_dict() for one in averages],
        best={"paths": sorted(Path(path).name for path in trainer.checkpoint_callbacks[1].best_k_models)},
    )
    manager.shutdown()


if __name__ == "__main__":
    try:
        main()
    except JobFinishedError as over:
        say(str(over))
