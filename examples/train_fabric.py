"""litgpt's loop on Lightning's Fabric, in replica groups that may die and come back.

    pip install ".[fabric]"
    python -m torchft_ckpt run --groups 2 -- examples/train_fabric.py --steps 600 --pause 0.2

The task: guess the next character of the source of Python's standard library. The model is made on the spot, and nothing is
downloaded.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import itertools
import logging
import math
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from lightning.fabric import Fabric
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from torchft_ckpt import (
    DistributedDataParallel,
    DistributedSampler,
    Manager,
    Optimizer,
    ProcessGroupGloo,
    ProcessGroupNCCL,
)
from torchft_ckpt.errors import JobFinishedError

SEED, ACCUMULATE, BATCH_SIZE, CONTEXT = 42, 2, 4, 32
"""Batches of a step, texts of a batch, and characters of a text."""


class Texts(Dataset):
    """Item i is (the i-th `CONTEXT` bytes, the bytes that follow each of them): int64 tensors of shape (CONTEXT,)."""

    def __init__(self, folder: Path) -> None:
        text = b"\n".join(path.read_bytes() for path in sorted(folder.glob("*.py"))[:10])
        self.text = torch.frombuffer(bytearray(text), dtype=torch.uint8)

    def __len__(self) -> int:
        return (len(self.text) - 1) // CONTEXT

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        window = self.text[index * CONTEXT : (index + 1) * CONTEXT + 1].long()
        return window[:-1], window[1:]


class Guesser(nn.Module):
    """A transformer of one layer: the logits of the next byte, at each place."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes, self.places = nn.Embedding(256, 64), nn.Embedding(CONTEXT, 64)
        self.layer = nn.TransformerEncoderLayer(64, 4, 256, dropout=0.0, batch_first=True, norm_first=True)
        self.head = nn.Linear(64, 256)

    def forward(self, input_ids: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(CONTEXT, device=input_ids.device)
        return self.head(self.layer(self.bytes(input_ids) + self.places.weight, src_mask=mask, is_causal=True))


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1, betas=(0.9, 0.95))


def get_lr(iter_num: int, max_iters: int, warmup_iters: int = 10) -> float:
    """A linear warm-up, then a cosine, by the batches of a group."""
    if iter_num < warmup_iters:
        return 1e-3 * (iter_num + 1) / warmup_iters
    return 5e-4 * (1.0 + math.cos(math.pi * iter_num / max_iters))


def cycle(loader: Any, sampler: DistributedSampler, num_read: int) -> Iterator[Any]:
    """Yield all batches of all epochs, but for the first `num_read`."""
    epoch, begin = divmod(num_read, len(loader))
    while True:
        sampler.set_epoch(epoch)
        yield from itertools.islice(loader, begin, None)
        epoch, begin = epoch + 1, 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=600, help="optimizer steps of the job")
    parser.add_argument("--pause", type=float, default=0.0, help="seconds before each step, to have time to watch")
    parser.add_argument("--output", default="train-fabric-out", help="for checkpoints, the same of all groups")
    parser.add_argument("--resume", help="a checkpoint to go on from, the same of all groups")
    parser.add_argument(
        "--strategy", default="auto", help="Fabric's; with `ddp` the first forward pass raises ConfigError"
    )
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s")

    fabric = Fabric(devices=1, precision="bf16-mixed", strategy=options.strategy)
    fabric.launch()
    fabric.seed_everything(SEED)  # another one in each group is as good: the first weights are those of one of them
    group, num_groups = int(os.environ["REPLICA_GROUP_ID"]), int(os.environ["NUM_REPLICA_GROUPS"])  # of the launcher
    manager = Manager(
        pg=ProcessGroupNCCL() if fabric.device.type == "cuda" else ProcessGroupGloo(),
        load_state_dict=None,  # registered below
        state_dict=None,
        min_replica_size=1,
        replica_id=f"group_{group}",
    )
    plain_model = Guesser().to(fabric.device)
    plain_optimizer = make_optimizer(plain_model)
    for name, part in {"model": plain_model, "optimizer": plain_optimizer}.items():
        manager.register_state_dict_fn(name, part.load_state_dict, part.state_dict)
    ddp = DistributedDataParallel(manager, plain_model)
    model = fabric.setup(ddp)
    optimizer = fabric.setup_optimizers(Optimizer(manager, plain_optimizer))

    dataset = Texts(Path(os.__file__).parent)
    sampler = DistributedSampler(dataset, replica_rank=group, num_replica_groups=num_groups, shuffle=True, seed=SEED)
    loader = fabric.setup_dataloaders(DataLoader(dataset, batch_size=BATCH_SIZE, sampler=sampler, drop_last=True))

    state = {"model": model, "optimizer": optimizer, "iter_num": 0, "job": manager}  # was: "step_count": 0
    if options.resume:
        fabric.load(options.resume, state)
    for input_ids, targets in cycle(loader, sampler, manager.current_step() * ACCUMULATE):
        step_count = manager.current_step()  # was: state["step_count"] += 1 after optimizer.step()
        if step_count >= options.steps:
            break
        num_accumulated = state["iter_num"] % ACCUMULATE
        state["iter_num"] = step_count * ACCUMULATE + num_accumulated  # was: it went on counting
        for param_group in optimizer.param_groups:
            param_group["lr"] = get_lr(state["iter_num"], options.steps * ACCUMULATE)
        state["iter_num"] += 1
        is_accumulating = state["iter_num"] % ACCUMULATE != 0
        with ddp.no_sync() if is_accumulating else contextlib.nullcontext():  # was: fabric.no_backward_sync(model, ...)
            logits = model(input_ids)
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
            fabric.backward(loss / ACCUMULATE)
        if is_accumulating:
            continue
        fabric.clip_gradients(model, optimizer, max_norm=1.0)
        counts = optimizer.step()
        optimizer.zero_grad()
        if counts and manager.speaks and manager.current_step() % 20 == 0:  # was: in each process of rank zero
            fabric.print(f"step {manager.current_step()}: loss {loss.item():.3f}")
            fabric.save(Path(options.output, f"step-{manager.current_step():08d}.pth"), state)
        time.sleep(options.pause)

    digest = hashlib.sha256()
    for value in plain_model.state_dict().values():
        digest.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    print(f"[{group}] finished at step {manager.current_step()} with state {digest.hexdigest()}", flush=True)
    manager.shutdown(finished=True)


if __name__ == "__main__":
    try:
        main()
    except JobFinishedError as over:  # this group came when the others had made the last step
        print(over, flush=True)
