"""The same task under plain data-parallel training: gradients are averaged over all groups at every step.

A replica group, as `train` of `examples/train_diloco.py` is one; the launcher starts both alike.
"""

from __future__ import annotations

import logging
import os
import sys
from datetime import timedelta
from pathlib import Path

import torch

if not __package__:  # run by its path: import what lies in the folder above
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from diloco.options import Options, parse
from diloco.records import Recorder
from diloco.task import Task, digest_of, make_inner_optimizer, progress_of, set_learning_rate
from torchft_ckpt import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo


def train(options: Options, group: int) -> None:
    """Be one replica group, until all of them together have learned from the planned number of characters."""
    task = Task(options, group)
    adamw = make_inner_optimizer(task.model)

    def state_dict() -> dict[str, object]:
        return {"model": task.model.state_dict(), "optimizer": adamw.state_dict()}

    def load_state_dict(state: dict) -> None:
        task.model.load_state_dict(state["model"])
        adamw.load_state_dict(state["optimizer"])

    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=60)),
        load_state_dict=load_state_dict,
        state_dict=state_dict,
        min_replica_size=max(1, options.groups - 1),
        replica_id=f"group_{group}",
    )
    model = DistributedDataParallel(manager, task.model)
    optimizer = Optimizer(manager, adamw)

    num_in_last_step = 0
    with Recorder(options.records, options.interface, options.begin_in) as recorder:
        while True:
            progress = progress_of(manager, options, 1)
            if progress >= 1 and num_in_last_step >= options.end_with:
                break
            recorder.begin()
            set_learning_rate(adamw, options.learning_rate, progress)
            inputs, targets = task.batch(manager.current_step())
            optimizer.zero_grad()
            loss = task.loss(model, inputs, targets)
            loss.backward()
            optimizer.step()
            num_in_last_step = manager.num_participants()
            recorder.step(
                round=manager.current_step(),
                num_counted=manager.batches_committed(),
                participants=num_in_last_step,
                contributed=manager.is_participating(),
                loss=loss.item(),
            )
        recorder.finish(
            round=manager.current_step(),
            num_counted=manager.batches_committed(),
            digest=digest_of(task.model, [adamw]),
            held_out_loss=task.held_out_loss(),
        )
    manager.shutdown(finished=True)


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    torch.set_num_threads(1)
    train(parse(sys.argv[1:], __doc__ or ""), int(os.environ["REPLICA_GROUP_ID"]))
