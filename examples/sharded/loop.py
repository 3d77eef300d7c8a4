"""The training loop of one rank; how its group shards the model is the scripts' affair."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn

from sharded.digest import digest_of
from sharded.options import Options
from sharded.task import Model, batch_of, make_model
from torchft_ckpt import Manager, Optimizer, ProcessGroupGloo, ProcessGroupNCCL
from torchft_ckpt.fsdp import set_all_reduce_hook


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Where a rank is in its group: ranks with the same `data_rank` learn from the same samples."""

    data_rank: int


def train(options: Options, shard: Callable[[Model], Place]) -> None:
    """Be one rank of a replica group until the job has committed its steps.

    Args:
        options: of the command line.
        shard: applies `fully_shard`, and what else the script likes, on the group's ranks.
    """
    group = int(os.environ.get("REPLICA_GROUP_ID", "0"))
    logging.basicConfig(level=logging.INFO, format=f"%(asctime)s [{group}] %(name)s %(levelname)s %(message)s")
    has_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if has_gpu else torch.device("cpu")
    if has_gpu:
        torch.cuda.set_device(device)  # NCCL connects the current device
    torch.set_num_threads(1)
    # Two kinds of process group: PyTorch's own stays inside the replica group and dies with it, the manager's crosses groups.
    dist.init_process_group("nccl" if has_gpu else "gloo", timeout=timedelta(seconds=60))
    rank = dist.get_rank()

    model = make_model(options.seed + group).to(device)  # the first quorum makes all groups equal
    place = shard(model)
    adamw = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=3e-3)

    def state_dict() -> dict[str, object]:
        return {"model": model.state_dict(), "optimizer": adamw.state_dict()}

    def load_state_dict(state: dict) -> None:
        model.load_state_dict(state["model"])
        adamw.load_state_dict(state["optimizer"])

    manager = Manager(
        pg=(ProcessGroupNCCL if has_gpu else ProcessGroupGloo)(timeout=timedelta(seconds=30)),
        load_state_dict=load_state_dict,
        state_dict=state_dict,
        min_replica_size=options.min_replica_size,
        replica_id=f"group_{group}",
        timeout=timedelta(seconds=30),
    )
    set_all_reduce_hook(manager, model)
    optimizer = Optimizer(manager, adamw)

    loss = torch.tensor(float("nan"))
    while manager.current_step() < options.steps:
        optimizer.zero_grad()  # starts the quorum
        # The step counter says which batch comes next, also after a step that was discarded: its batch is repeated.
        data_group = 0 if options.same_batch else group
        batch = batch_of(manager.current_step(), data_group, place.data_rank, options.batch_size)
        inputs, targets = (tensor.to(device) for tensor in batch)
        loss = nn.functional.mse_loss(model(inputs), targets)
        loss.backward()
        before = manager.current_step()
        optimizer.step()  # commits, or discards the step on every group alike
        if rank == 0:
            verdict = "" if manager.current_step() > before else " discarded"
            print(
                f"[{group}] step {manager.current_step()} loss {loss.item():.4f}"
                f" participants {manager.num_participants()}{verdict}",
                flush=True,
            )

    digest = digest_of(**state_dict())
    if rank == 0:
        print(f"[{group}] finished at step {manager.current_step()} with state {digest}", flush=True)
        if options.report is not None:
            report = {"step": manager.current_step(), "loss": loss.item(), "digest": digest}
            options.report.write_text(json.dumps(report))
    dist.barrier()
    manager.shutdown(finished=True)
    dist.destroy_process_group()
