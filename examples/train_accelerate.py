"""A script for accelerate in replica groups that may die and come back: `FaultTolerantAccelerator` in place of `Accelerator`.

    pip install ".[accelerate]"
    python -m torchft_ckpt run --groups 2 -- examples/train_accelerate.py

The task: guess the next character of the source of Python's standard library. The loop is that of diffusers' and transformers'
scripts, with gradient accumulation, an average of the weights, and checkpoints.
"""

from __future__ import annotations

import argparse
import hashlib
import logging
import math
import os
import time
from pathlib import Path

import torch
from accelerate.utils import set_seed
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, Dataset

from torchft_ckpt import Manager, ProcessGroupGloo, ProcessGroupNCCL
from torchft_ckpt.integrations.accelerate import FaultTolerantAccelerator

CONTEXT = 32


class Windows(Dataset):
    """The windows of a text: so many characters, and the one that follows. The accelerator divides them among the groups."""

    def __init__(self, folder: Path) -> None:
        text = b"\n".join(path.read_bytes() for path in sorted(folder.glob("*.py")))[: 1 << 20]
        self.windows = torch.frombuffer(bytearray(text), dtype=torch.uint8).unfold(0, CONTEXT + 1, CONTEXT)

    def __len__(self) -> int:
        return len(self.windows)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        window = self.windows[index].long()
        return window[:-1], window[-1]


def make_model() -> nn.Module:
    return nn.Sequential(
        nn.Embedding(256, 16), nn.Flatten(), nn.Linear(16 * CONTEXT, 64), nn.GELU(), nn.Linear(64, 256)
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--pause", type=float, default=0.0, help="seconds before each step, to have time to watch")
    parser.add_argument("--output", type=Path, default=Path("train-accelerate-out"), help="the same of all groups")
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    torch.set_num_threads(1)

    is_on_gpu = torch.cuda.is_available()
    manager = Manager(
        pg=ProcessGroupNCCL() if is_on_gpu else ProcessGroupGloo(),
        load_state_dict=None,  # the accelerator registers what it prepares
        state_dict=None,
        min_replica_size=1,
        replica_id=f"group_{os.environ['REPLICA_GROUP_ID']}",
    )
    accelerator = FaultTolerantAccelerator(manager, gradient_accumulation_steps=2, cpu=not is_on_gpu)
    set_seed(0)
    model = make_model()
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.99))
    accelerator.register_for_checkpointing(average)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    loader = DataLoader(Windows(Path(os.__file__).parent), batch_size=32, shuffle=True, drop_last=True)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / math.sqrt(1 + step / 100))
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)

    completed_steps = accelerator.job_step
    for epoch in range(accelerator.job_epoch, options.epochs):
        for characters, following in loader:
            with accelerator.accumulate(model):
                loss = nn.functional.cross_entropy(model(characters), following)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                average.update_parameters(accelerator.unwrap_model(model))
                completed_steps = accelerator.job_step
                if completed_steps % 200 == 0 and accelerator.is_main_process:
                    accelerator.save_state(str(options.output / f"step_{completed_steps}"))
                time.sleep(options.pause)
        accelerator.print(f"epoch {epoch} ends at step {completed_steps}")
    if accelerator.is_main_process:
        accelerator.save_model(model, str(options.output / "final"))
    accelerator.end_training()
    if accelerator.is_over:
        print("this group came when the others had made the last step", flush=True)
        return manager.shutdown()
    hasher = hashlib.sha256()
    for tensor in [*accelerator.unwrap_model(model).state_dict().values(), *average.state_dict().values()]:
        hasher.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    print(f"finished at step {accelerator.job_step} with state {hasher.hexdigest()}", flush=True)
    manager.shutdown()


if __name__ == "__main__":
    main()
