"""A script as a user writes it: it restores from a folder, trains a small model by a `StepLoader`, and saves once.

Several ranks of a group shard the model.
"""

from __future__ import annotations

import argparse
import logging
import os
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from torchft_ckpt import Checkpointer, Manager, Optimizer, ProcessGroupGloo, StepLoader

MOVED_AT, SAVED_AT, NUM_STEPS = 2, 6, 12


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("checkpoints")
    parser.add_argument("--wrong-at", type=int, help="multiply wrongly in this step")
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    rank, num_ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    norm = nn.BatchNorm1d(8) if num_ranks == 1 else nn.LayerNorm(8)  # buffers would be each rank's own
    model = nn.Sequential(nn.Linear(2, 8), norm, nn.Dropout(0.1), nn.Linear(8, 1))
    if num_ranks > 1:
        dist.init_process_group("gloo")
        for part in (model[0], model[3], model):
            fully_shard(part)
    inner = torch.optim.AdamW(model.parameters(), lr=1e-2)
    found = {"scale": 1.0}

    def load(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        inner.load_state_dict(state["optimizer"])
        found.update(state["found"])

    # A job of two groups, with a digest of all of its state at each fourth step.
    manager = Manager(
        ProcessGroupGloo(),
        load,
        lambda: {"model": model.state_dict(), "optimizer": inner.state_dict(), "found": dict(found)},
        min_replica_size=2,
        check_equal_every=4,
    )
    rows = torch.randn(64, 2, generator=torch.Generator().manual_seed(1))
    sizes = {"global_batch_size": 16, "microbatch_size": 4, "num_steps": NUM_STEPS}
    steps = StepLoader(manager, rows, **sizes, rank_in_microbatch=(rank, num_ranks))
    optimizer = Optimizer(manager, inner)
    scheduler = manager.scheduler(torch.optim.lr_scheduler.CosineAnnealingLR(inner, len(steps)))
    saver = Checkpointer(options.checkpoints, manager=manager)
    saver.restore()
    for step in steps:
        optimizer.zero_grad()
        for batch in step:
            is_wrong = step.number == options.wrong_at and steps.microbatch == 1
            loss = model(batch * (1 + 1e-6) if is_wrong else batch).square().mean()
            loss.backward()
        if optimizer.step():
            scheduler.step()
            if manager.current_step() == MOVED_AT:
                found["scale"] = 0.5  # it moves before the checkpoint, and never again
            if manager.current_step() == SAVED_AT:
                saver.save().result()
    saver.save().result()
    saver.shutdown()
    if num_ranks > 1:
        dist.barrier()
    manager.shutdown(finished=True)


if __name__ == "__main__":
    main()
