"""One rank of a replica group that saves durable checkpoints and restores from them; a process of its own, reporting JSON lines.

All groups learn from the same batches, which the step names: so the digest of all full tensors after a step is the same in every
life of a job and for every group, and a state that was restored can be told from any other. (Not for every size of a group.)

Options, beside those of `Job.start`: `storage` and `local` (places), `tier`, `save_at` or `save_every` (steps), `waits_for_saves`
(for the one before to end), `layout` (`plain`, or `sharded` over the group's ranks), `restores_early` (before the Manager knows
the optimizer), and `hang`: {step, operation, file}: this rank's save of that step never returns from that operation on a file of
whose name that is a part, or not for so long (`for_s`). It says `hanging` then, and may be killed.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from concurrent.futures import Future
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))
from sharded.digest import digest_of
from sharded.task import batch_of, make_model
from train_hsdp import shard

from support.device import DEVICE, INNER_BACKEND
from support.trainer_process import begin, is_over, make_manager, report, report_step, state_functions
from torchft_ckpt import Checkpointer, HTTPTransport, Optimizer, SavedCheckpoint, Tier
from torchft_ckpt import checkpointer as checkpointer_module
from torchft_ckpt.checkpointing.durable.storage.local_storage import LocalStorage, OsSystem
from torchft_ckpt.errors import CheckpointError, ConfigError
from torchft_ckpt.fsdp import set_all_reduce_hook

BATCH_SIZE = 4


class HangingSystem(OsSystem):
    """The operating system, one operation of which does not return, or late."""

    def __init__(self, *, step: int, operation: str, file: str, for_s: float | None = None) -> None:
        self._for_s = for_s
        self._directory = f"step-{step:012d}."
        self._operation = operation
        self._file = file
        self._paths: dict[int, str] = {}

    def _consider(self, operation: str, path: str) -> None:
        if operation == self._operation and self._directory in path and self._file in Path(path).name:
            report("hanging", operation=operation, file=Path(path).name)
            self._operation = ""
            threading.Event().wait(self._for_s)

    def open_new(self, path: str) -> int:
        handle = super().open_new(path)
        self._paths[handle] = path
        return handle

    def write(self, handle: int, data: memoryview) -> int:
        written = super().write(handle, data[: max(1, len(data) // 2)])
        self._consider("write", self._paths[handle])
        return written

    def fsync(self, handle: int) -> None:
        self._consider("fsync", self._paths[handle])
        super().fsync(handle)

    def listdir(self, path: str) -> list[str]:
        names = super().listdir(path)
        for name in names:
            self._consider("list", os.path.join(path, name))
        return names

    def rename(self, old: str, new: str) -> None:
        self._consider("rename", new)
        super().rename(old, new)


def report_saved(step: int, future: Future[SavedCheckpoint]) -> None:
    error = future.exception()
    if error is not None:
        report("saved", step=step, error=type(error).__name__, message=str(error))
        return
    saved = future.result()
    report(
        "saved",
        step=saved.step,
        error=None,
        name=saved.name,
        is_closed=saved.is_closed,
        num_fills=saved.num_fills,
        written_bytes=saved.written_bytes,
    )


def main() -> None:
    options = begin()
    rank, num_ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if num_ranks > 1:
        dist.init_process_group(INNER_BACKEND, timeout=timedelta(seconds=30))
    model = make_model(options["seed"]).to(DEVICE)
    if options.get("layout", "plain") == "sharded":
        shard(model)
    adamw = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)

    load_state_dict, state_dict = state_functions(model, adamw)
    transport: HTTPTransport[Any] = HTTPTransport(timeout=timedelta(seconds=30), num_chunks=0, hostname="127.0.0.1")
    manager = make_manager(options, transport, load_state_dict, state_dict)
    if "hang" in options:
        system = HangingSystem(**options["hang"])
        checkpointer_module.open_storage = lambda location, **_: LocalStorage(location, system=system)
    checkpointer = Checkpointer(
        options["storage"],
        manager=manager,
        local_location=options.get("local"),
        fill_after=timedelta(seconds=options.get("fill_after_s", 30.0)),
    )
    is_sharded = options.get("layout", "plain") == "sharded"
    try:
        if options.get("restores_early"):
            checkpointer.restore()
    except ConfigError as error:
        report("refused", message=str(error))
    optimizer = Optimizer(manager, adamw)
    try:
        restored = checkpointer.restore()
    except CheckpointError as error:
        report("refused", message=str(error), error=type(error).__name__)
        raise
    report(
        "restored",
        pid=os.getpid(),
        source=restored.source.value,
        step=restored.step,
        reason=restored.reason,
        own=restored.rank_state,
        bytes_from_storage=restored.bytes_from_storage,
        bytes_from_peers=restored.bytes_from_peers,
        manager_step=manager.current_step(),
        batches_committed=manager.batches_committed(),
        digest=digest_of(**state_dict()),
        dtensors=sum(type(tensor).__name__ == "DTensor" for tensor in model.state_dict().values()),
        random=torch.rand(1).item(),
    )
    if is_sharded:
        set_all_reduce_hook(manager, model)
    save_at, save_every = options.get("save_at", []), options.get("save_every", 0)
    try:
        while not is_over(options, manager.current_step()):
            before = manager.statistics()
            optimizer.zero_grad()
            time.sleep(options.get("pause_s", 0.0))  # stands for a longer forward pass
            inputs, targets = (tensor.to(DEVICE) for tensor in batch_of(manager.quorum_step(), 0, rank, BATCH_SIZE))
            nn.functional.mse_loss(model(inputs), targets).backward()
            if not is_sharded:
                for work in [manager.allreduce(p.grad) for p in model.parameters() if p.grad is not None]:
                    work.wait()
            optimizer.step()
            step = manager.current_step()
            is_committed = report_step(manager, before, digest=digest_of(**state_dict()))
            if is_committed and (step in save_at or (save_every and step % save_every == 0)):
                if options.get("waits_for_saves", True):  # else one that is slow here is refused
                    checkpointer.wait()
                own = {"position": step, "rank": rank, "of": options["replica_id"]}
                future = checkpointer.save(rank_state=own, tier=Tier(options.get("tier", "storage")))
                future.add_done_callback(lambda done, step=step: report_saved(step, done))
        checkpointer.shutdown()
        report("done", step=manager.current_step(), digest=digest_of(**state_dict()))
        if num_ranks > 1:
            dist.barrier()
    finally:
        manager.shutdown()
        transport.shutdown()


if __name__ == "__main__":
    main()
