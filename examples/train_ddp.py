"""Fault-tolerant data-parallel training, written as for torchft 0.2.0: only the import line is another.

A group that dies is started again, and goes on where the others are. One that gets SIGTERM ends its step with the others and
leaves, which costs them nothing (torchft has no `leave_on`, `should_leave`).

    python -m torchft_ckpt run --groups 2 -- examples/train_ddp.py

The task: guess the next character of the source of Python's standard library from the 24 before it.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import logging
import os
import signal
import time
from datetime import timedelta
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset
from torchdata.stateful_dataloader import StatefulDataLoader

from torchft_ckpt import (
    DistributedDataParallel,
    DistributedSampler,
    HTTPTransport,
    Manager,
    Optimizer,
    ProcessGroupGloo,
    ProcessGroupNCCL,
)
from torchft_ckpt.errors import JobFinishedError

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


def make_model() -> nn.Module:
    """An embedding and two layers: about 230,000 parameters."""
    return nn.Sequential(
        nn.Embedding(256, 24),
        nn.Flatten(),
        nn.Linear(24 * CONTEXT, 256),
        nn.GELU(),
        nn.Linear(256, 256),
    )


def digest_of(tensors: dict[str, Tensor]) -> str:
    """A fingerprint of the tensors' raw bytes, to compare replicas by."""
    hasher = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        raw = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        hasher.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        hasher.update(raw.numpy().tobytes())
    return hasher.hexdigest()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=500, help="committed steps to train")
    parser.add_argument("--pause", type=float, default=0.0, help="seconds before each step, to have time to watch")
    parser.add_argument("--batch-size", type=int, default=64, help="samples of a group in a step")
    parser.add_argument("--min-replica-size", type=int, default=2, help="commit only with this many groups")
    parser.add_argument("--report", type=Path, help="write the final step, loss and digest here, as JSON")
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s")

    replica_group = int(os.environ.get("REPLICA_GROUP_ID", "0"))
    num_replica_groups = int(os.environ.get("NUM_REPLICA_GROUPS", "2"))
    group_rank = int(os.environ.get("RANK", "0"))
    group_size = int(os.environ.get("WORLD_SIZE", "1"))
    device = (
        torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        if torch.cuda.is_available()
        else torch.device("cpu")
    )
    if device.type == "cuda":
        torch.cuda.set_device(device)  # the Manager connects NCCL on the current device of this thread
    else:
        torch.set_num_threads(1)

    dataset = NextCharacter(Path(os.__file__).parent)
    sampler = DistributedSampler(
        dataset,
        replica_rank=replica_group,
        num_replica_groups=num_replica_groups,
        group_rank=group_rank,
        num_replicas=group_size,
        shuffle=True,
        seed=0,
    )
    dataloader = StatefulDataLoader(dataset, batch_size=options.batch_size, sampler=sampler, drop_last=True)

    module = make_model().to(device)
    adamw = torch.optim.AdamW(module.parameters(), lr=2e-3)
    loss_function = nn.CrossEntropyLoss()
    # A loaded position counts from the next iterator on, so the one in use is given up.
    batches = None

    def state_dict() -> dict[str, object]:
        return {
            "model": module.state_dict(),
            "optim": adamw.state_dict(),
            "dataloader": dataloader.state_dict(),
            "epoch": sampler.epoch,
        }

    def load_state_dict(state: dict) -> None:
        nonlocal batches
        module.load_state_dict(state["model"])
        adamw.load_state_dict(state["optim"])
        sampler.set_epoch(state["epoch"])
        dataloader.load_state_dict(state["dataloader"])
        batches = None

    process_group = (
        ProcessGroupNCCL(timeout=timedelta(seconds=30))
        if device.type == "cuda"
        else ProcessGroupGloo(timeout=timedelta(seconds=30))
    )
    manager = Manager(
        pg=process_group,
        min_replica_size=options.min_replica_size,
        load_state_dict=load_state_dict,
        state_dict=state_dict,
        replica_id=f"train_ddp_{replica_group}",
        timeout=timedelta(seconds=30),
        checkpoint_transport=HTTPTransport(timeout=timedelta(seconds=30), num_chunks=0),
    )
    manager.leave_on(signal.SIGTERM)
    model = DistributedDataParallel(manager, module)
    optimizer = Optimizer(manager, adamw)

    loss = torch.tensor(float("nan"))
    while manager.current_step() < options.steps:
        if batches is None:
            batches = iter(dataloader)
        batch = next(batches, None)
        if batch is None:  # the epoch is over
            sampler.set_epoch(sampler.epoch + 1)
            batches = None
            continue
        time.sleep(options.pause)
        inputs, targets = (tensor.to(device) for tensor in batch)

        optimizer.zero_grad()  # starts the quorum
        loss = loss_function(model(inputs), targets)
        loss.backward()
        optimizer.step()  # commits, or discards the step on every group alike

        if manager.current_step() % 50 == 0:
            print(
                f"[{replica_group}] step {manager.current_step()} loss {loss.item():.3f} "
                f"groups {manager.num_participants()}",
                flush=True,
            )
        if manager.should_leave():
            print(f"[{replica_group}] left at step {manager.current_step()}", flush=True)
            manager.shutdown()
            return

    digest = digest_of(
        module.state_dict()
        | {
            f"{index}.{name}": value
            for index, values in adamw.state_dict()["state"].items()
            for name, value in values.items()
        }
    )
    print(f"[{replica_group}] finished at step {manager.current_step()} with state {digest}", flush=True)
    if options.report is not None and group_rank == 0:
        report = {"step": manager.current_step(), "loss": loss.item(), "digest": digest}
        options.report.write_text(json.dumps(report))
    manager.shutdown(finished=True)


if __name__ == "__main__":
    try:
        main()
    except JobFinishedError as over:  # this group came when the others had made the last step
        print(over, flush=True)
