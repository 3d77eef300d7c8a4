"""One rank of a replica group that holds the examples' model as shards; a process of its own. It reports as `trainer.py` does.

`seed` is one for all ranks of a group, and `tensor_parallel` is the option of `train_fsdp.py`. All groups learn from the
same batches, so neither who contributed nor a step that was repeated changes a bit: whatever happens to the job, the digest of
all full tensors after a step is the one of a run in which nothing happened.
"""

from __future__ import annotations

import os
import sys
import time
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from support.device import DEVICE, INNER_BACKEND
from support.trainer_process import begin, is_over, make_manager, report, report_step, state_functions

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))
from sharded.digest import digest_of
from sharded.task import batch_of, make_model
from train_fsdp import shard

from torchft_ckpt import HTTPTransport, Optimizer
from torchft_ckpt.core.coordination import joining
from torchft_ckpt.fsdp import set_all_reduce_hook

BATCH_SIZE = 4


def describe(tensor: torch.Tensor, model: nn.Module) -> list[str]:
    """Class, placements and whether it is on the very mesh of this process, for the test to compare."""
    if not isinstance(tensor, DTensor):
        return [type(tensor).__name__]
    own = any(isinstance(p, DTensor) and p.device_mesh is tensor.device_mesh for p in model.parameters())
    return ["DTensor", str(tensor.placements), str(list(tensor.shape)), "own mesh" if own else "another mesh"]


def main() -> None:
    options = begin()
    dist.init_process_group(INNER_BACKEND, timeout=timedelta(seconds=30))
    model = make_model(options["seed"]).to(DEVICE)
    place = shard(model, SimpleNamespace(tensor_parallel=options.get("tensor_parallel", 0)))  # type: ignore[arg-type]
    adamw = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)

    load, state_dict = state_functions(model, adamw)

    def load_state_dict(state: dict[str, Any]) -> None:
        described = {
            f"{index}.{name}": describe(tensor, model)
            for index, values in state["optimizer"]["state"].items()
            for name, tensor in values.items()
        }
        report("loading", had_state=len(adamw.state), optimizer=described)
        load(state)

    transport: HTTPTransport[Any] = HTTPTransport(timeout=timedelta(seconds=30), num_chunks=0, hostname="127.0.0.1")
    spare = options.get("spare", False)
    follow = options.get("follow", False) or spare
    if "rate" in options:
        joining.FIRST_RATE = options["rate"]
    settings = {"join_stall_limit": timedelta(seconds=60) if follow else None, "spare": spare}
    manager = make_manager(options, transport, load_state_dict, state_dict, **settings)
    report("ready", pid=os.getpid())
    set_all_reduce_hook(manager, model)
    optimizer = Optimizer(manager, adamw)
    try:
        while not is_over(options, manager.current_step()):
            before = manager.statistics()
            for parameter in model.blocks[0].parameters():
                parameter.requires_grad_(manager.current_step() >= options.get("unfreezes_at", 0))
            optimizer.zero_grad()
            time.sleep(options.get("pause_s", 0.0))  # stands for a longer forward pass
            inputs, targets = (
                tensor.to(DEVICE) for tensor in batch_of(manager.current_step(), 0, place.data_rank, BATCH_SIZE)
            )
            loss = nn.functional.mse_loss(model(inputs), targets)
            loss.backward()
            optimizer.step()
            # Of a step that was not committed one rank may hold the others' state and one may not: there is nothing to gather.
            is_committed = manager.statistics().num_committed > before.num_committed
            report_step(manager, before, digest=digest_of(**state_dict()) if is_committed else "")
        report("done", step=manager.current_step(), digest=digest_of(**state_dict()))
        dist.barrier()
    finally:
        manager.shutdown()
        transport.shutdown()


if __name__ == "__main__":
    main()
