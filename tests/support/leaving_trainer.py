"""One rank of a replica group that leaves when it gets SIGTERM; a process of its own, reporting JSON lines.

All groups learn from the same batches, which the step names, and the ranks of a group meet in each step: one that left after
another step than its neighbour would leave that one waiting.

Options, beside those of `Job.start`: `storage` (where the save of a group that leaves goes; none: no save), `deadline_s`,
`pause_s` (of a forward pass), `save_every` (steps; all groups save), `hangs_in` ("save"; or "loop", at the step in the file
`hang` in `control`), `outer` (inner steps of a round of DiLoCo), `logs_loss` (averages something between two steps),
`has_worker` (a process of a DataLoader, which lives until this one ends; this rank then leads a process group, as one of
torchrun's does).
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))
from sharded.digest import digest_of
from sharded.task import batch_of, make_model

from support.device import DEVICE, INNER_BACKEND
from support.trainer_process import begin, is_over, make_manager, report, report_step, state_functions
from torchft_ckpt import Checkpointer, DiLoCo, HTTPTransport, Manager, Optimizer

BATCH_SIZE = 4


def main() -> None:
    options = begin()
    rank, num_ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if num_ranks > 1:
        dist.init_process_group(INNER_BACKEND, timeout=timedelta(seconds=30))
    model = make_model(options["seed"] - rank).to(DEVICE)  # the same on all ranks of a group
    adamw = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    load_state_dict, state_dict = state_functions(model, adamw)
    transport: HTTPTransport[Any] = HTTPTransport(timeout=timedelta(seconds=30), num_chunks=0, hostname="127.0.0.1")
    outer = options.get("outer", 0)
    functions = (None, None) if outer else (load_state_dict, state_dict)
    manager = make_manager(options, transport, *functions)
    checkpointer = Checkpointer(options["storage"], manager=manager) if "storage" in options else None

    def save() -> Any:
        report("saving", step=manager.current_step())
        if options.get("hangs_in") == "save":
            threading.Event().wait()
        return checkpointer.save() if checkpointer is not None else None

    manager.leave_on(signal.SIGTERM, save, timedelta(seconds=options.get("deadline_s", 25.0)))
    if options.get("has_worker"):
        os.setpgid(0, 0)
    report("ready", pid=os.getpid())
    loop: Any = contextlib.nullcontext()
    optimizer: Any = adamw
    if outer:
        outer_optimizer = torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9, nesterov=True)
        loop = DiLoCo(manager, [model], adamw, outer_optimizer, sync_every=outer)
    else:
        optimizer = Optimizer(manager, adamw)
    try:
        with loop:
            train(options, manager, model, optimizer, checkpointer, rank=rank, num_ranks=num_ranks)
        if manager.should_leave():
            report("left", step=manager.current_step(), digest=digest_of(**state_dict()))
        else:
            report("done", step=manager.current_step(), digest=digest_of(**state_dict()))
            if num_ranks > 1:
                dist.barrier()
    finally:
        manager.shutdown()
        if checkpointer is not None:
            checkpointer.shutdown()
        transport.shutdown()


def begin_worker(_: int) -> None:
    os.setpgid(0, 0)


def endless(loader: DataLoader[int]) -> Iterator[Any]:
    while True:
        yield from loader


def train(
    options: dict[str, Any],
    manager: Manager,
    model: nn.Module,
    optimizer: Any,
    checkpointer: Checkpointer | None,
    *,
    rank: int,
    num_ranks: int,
) -> None:
    data = endless(DataLoader(range(64), num_workers=1, persistent_workers=True, worker_init_fn=begin_worker))
    outer, save_every = options.get("outer", 0), options.get("save_every", 0)
    while not is_over(options, manager.current_step()):
        before = manager.statistics()
        optimizer.zero_grad()
        time.sleep(options.get("pause_s", 0.0))  # stands for a longer forward pass
        if options.get("has_worker"):
            next(data)
        inputs, targets = (tensor.to(DEVICE) for tensor in batch_of(manager.quorum_step(), 0, rank, BATCH_SIZE))
        nn.functional.mse_loss(model(inputs), targets).backward()
        for param in model.parameters():
            if param.grad is None:
                continue
            if num_ranks > 1:
                dist.all_reduce(param.grad)
            if not outer:
                manager.allreduce(param.grad).wait()
        optimizer.step()
        after = manager.statistics()
        step, is_committed = manager.current_step(), after.num_committed > before.num_committed
        if not outer or is_committed or after.num_discarded > before.num_discarded:
            report_step(manager, before)
        if options.get("logs_loss") and not outer and not manager.is_leaving:
            manager.allreduce(torch.ones(1, device=DEVICE)).wait()
        if checkpointer is not None and is_committed and save_every and step % save_every == 0:
            checkpointer.save()
        hang = Path(options["control"]) / "hang"
        if options.get("hangs_in") == "loop" and hang.exists() and step >= int(hang.read_text()):
            report("hanging")
            threading.Event().wait()
        if manager.should_leave():
            return


if __name__ == "__main__":
    main()
