"""A replica group of a plain loop, with a learning-rate schedule. It prints its state, and which process it is."""

from __future__ import annotations

import argparse
import logging
import os

import torch
from fingerprints import print_state, say
from gates import Gates
from torch import nn

from torchft_ckpt import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument(
        "--wait", nargs=2, metavar=("STEP", "FILE"), help="stand still before a step until a file exists"
    )
    parser.add_argument("--begin", metavar="FILE", help="stand still at step 1 until this file exists")
    options = parser.parse_args()
    gates = Gates([*([options.wait] if options.wait else []), *([("1", options.begin)] if options.begin else [])])
    logging.basicConfig(level=logging.INFO, format="%(name)s %(levelname)s %(message)s")
    group, rank = os.environ["REPLICA_GROUP_ID"], int(os.environ["RANK"])
    say(f"group {group} rank {rank} is process {os.getpid()}")

    torch.manual_seed(int(group))
    module = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 1))
    adamw = torch.optim.AdamW(module.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(adamw, options.steps)
    adamw.register_step_post_hook(lambda *_: schedule.step())
    parts = {"model": module, "optimizer": adamw, "schedule": schedule}
    manager = Manager(ProcessGroupGloo(), None, None, min_replica_size=1, replica_id=f"group_{group}")
    for name, part in parts.items():
        manager.register_state_dict_fn(name, part.load_state_dict, part.state_dict)
    model, optimizer = DistributedDataParallel(manager, module), Optimizer(manager, adamw)
    while manager.current_step() < options.steps:
        gates.go_on(manager.current_step(), manager.view().num_participants)
        optimizer.zero_grad()
        model(torch.randn(16, 8)).square().mean().backward()
        optimizer.step()
    print_state(step=manager.current_step(), **{name: part.state_dict() for name, part in parts.items()})
    manager.shutdown(finished=True)


if __name__ == "__main__":
    main()
