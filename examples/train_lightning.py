"""Lightning's Trainer in replica groups that may die and come back: one `FaultToleranceStrategy` more than without.

    pip install ".[lightning]"
    python -m torchft_ckpt lighthouse --min-replicas 1 --bind 127.0.0.1:29510
    export TORCHFT_LIGHTHOUSE=http://127.0.0.1:29510 NUM_REPLICA_GROUPS=2
    REPLICA_GROUP_ID=0 python examples/train_lightning.py &
    REPLICA_GROUP_ID=1 python examples/train_lightning.py

The task: guess the next character of the source of Python's standard library from the 24 before it. The model is made on the
spot, and nothing is downloaded.
"""

from __future__ import annotations

import argparse
import hashlib
import logging
import os
import time
from pathlib import Path

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from torchft_ckpt import DistributedSampler, Manager, ProcessGroupGloo, ProcessGroupNCCL
from torchft_ckpt.errors import JobFinishedError
from torchft_ckpt.integrations.lightning import FaultToleranceStrategy

CONTEXT = 24


class NextCharacter(Dataset):
    """Item i is (the `CONTEXT` bytes from i, the byte after them): int64 tensors of shape (CONTEXT,) and ()."""

    def __init__(self, folder: Path) -> None:
        text = b"\n".join(path.read_bytes() for path in sorted(folder.glob("*.py")))
        self.text = torch.frombuffer(bytearray(text), dtype=torch.uint8)

    def __len__(self) -> int:
        return len(self.text) - CONTEXT

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        window = self.text[index : index + CONTEXT + 1].long()
        return window[:-1], window[-1]


class Guesser(LightningModule):
    """An embedding and two layers: about 230,000 parameters."""

    def __init__(self, num_steps: int, pause_s: float) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.layers = nn.Sequential(
            nn.Embedding(256, 24), nn.Flatten(), nn.Linear(24 * CONTEXT, 256), nn.GELU(), nn.Linear(256, 256)
        )

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        time.sleep(self.hparams["pause_s"])
        inputs, targets = batch
        loss = nn.functional.cross_entropy(self.layers(inputs), targets)
        self.log("loss", loss)
        if batch_idx % 100 == 0:  # a step is two batches
            print(f"step {self.global_step}: loss {loss.item():.3f}", flush=True)
        return loss

    def configure_optimizers(self) -> dict:
        optimizer = torch.optim.AdamW(self.parameters(), lr=2e-3)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, self.hparams["num_steps"])
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def digest_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """A fingerprint of weights, optimizer state and learning rates, to compare groups by."""
    hasher = hashlib.sha256(repr([group["lr"] for group in optimizer.param_groups]).encode())
    states = optimizer.state_dict()["state"]
    tensors = [*model.state_dict().values(), *(value for state in states.values() for value in state.values())]
    for tensor in tensors:
        hasher.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return hasher.hexdigest()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=500, help="optimizer steps of the job")
    parser.add_argument("--pause", type=float, default=0.0, help="seconds before each step, to have time to watch")
    parser.add_argument("--min-replica-size", type=int, default=1, help="train only with this many groups")
    parser.add_argument(
        "--output", default="train-lightning-out", help="for checkpoints and logs, the same of all groups"
    )
    parser.add_argument(
        "--resume", action="store_true", help="go on from the newest checkpoint in --output, if all ended"
    )
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    group, num_groups = int(os.environ.get("REPLICA_GROUP_ID", "0")), int(os.environ.get("NUM_REPLICA_GROUPS", "2"))
    if not torch.cuda.is_available():
        torch.set_num_threads(1)

    manager = Manager(
        pg=ProcessGroupNCCL() if torch.cuda.is_available() else ProcessGroupGloo(),
        load_state_dict=None,  # the strategy registers what is trained
        state_dict=None,
        min_replica_size=options.min_replica_size,
        replica_id=f"group_{group}",
    )
    data = NextCharacter(Path(os.__file__).parent)
    sampler = DistributedSampler(data, replica_rank=group, num_replica_groups=num_groups)
    strategy = FaultToleranceStrategy(manager)
    checkpoints = f"{options.output}/checkpoints"
    trainer = Trainer(
        strategy=strategy,
        max_steps=options.steps,
        accumulate_grad_batches=2,
        gradient_clip_val=1.0,
        logger=CSVLogger(options.output, name="logs", version=0, flush_logs_every_n_steps=1),
        log_every_n_steps=10,
        callbacks=[ModelCheckpoint(checkpoints, every_n_train_steps=100, save_last=True)],
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    model = Guesser(options.steps, options.pause / 2)  # a step is two batches
    loader = DataLoader(data, batch_size=32, sampler=sampler, drop_last=True)
    trainer.fit(model, loader, ckpt_path=strategy.resume_from(checkpoints) if options.resume else None)
    digest = digest_of(model, trainer.optimizers[0])
    print(f"[{group}] finished at step {manager.current_step()} with state {digest}", flush=True)
    manager.shutdown()


if __name__ == "__main__":
    try:
        main()
    except JobFinishedError as over:  # this group came when the others had made the last step
        print(over, flush=True)
