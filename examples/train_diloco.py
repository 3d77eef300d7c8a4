"""Streaming DiLoCo on a slow link: replica groups that are killed and come back, beside plain data-parallel training.

    python examples/train_diloco.py            # everything: groups, links of 50 Mbit/s, kills, both trainings, table, picture
    python examples/train_diloco.py --quick    # the same in 15 seconds

The links are network namespaces, which need Linux, root, `ip` and `tc`; without them it says so and runs on loopback. The
demo's GPT learns Python's standard library; `pip install ".[demo]"` brings what the picture needs.

What a replica group does is `train` below. Groups without links and kills:

    python -m torchft_ckpt run --groups 2 -- examples/train_diloco.py --groups 2
"""

from __future__ import annotations

import logging
import os
import sys
from datetime import timedelta

import torch
from diloco.options import Options, parse
from diloco.records import Recorder
from diloco.task import (
    Task,
    digest_of,
    make_inner_optimizer,
    progress_of,
    set_learning_rate,
    split,
)

from torchft_ckpt import DiLoCo, Manager, ProcessGroupGloo
from torchft_ckpt.errors import JobFinishedError


def train(options: Options, group: int) -> None:
    """Be one replica group, until all of them together have learned from the planned number of characters."""
    task = Task(options, group)
    model = task.model
    fragments = split(model, options.fragments)
    inner_optimizer = make_inner_optimizer(model)
    outer_optimizers: list[torch.optim.Optimizer] = [
        torch.optim.SGD(
            fragment.parameters(),
            lr=options.outer_learning_rate,
            momentum=options.outer_momentum,
            nesterov=True,
        )
        for fragment in fragments
    ]
    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=60)),
        load_state_dict=None,  # DiLoCo registers what a group that joins has to know
        state_dict=None,
        min_replica_size=1,
        use_async_quorum=False,
        replica_id=f"group_{group}",
    )
    diloco = DiLoCo(
        manager,
        fragments,
        inner_optimizer,
        outer_optimizers,
        sync_every=options.sync_every,
        fragment_sync_delay=options.delay,  # inner steps that go on beside a transfer
        fragment_update_alpha=options.alpha,
        use_bucketization=True,
        should_quantize=options.quantize,
    )
    with diloco, Recorder(options.records, options.interface, options.begin_in) as recorder:
        with torch.no_grad():
            task.loss(
                model, *task.batch(0)
            )  # the first forward pass: the loop finds the others, and the step that they are at
        inner_step = manager.current_step() * options.period
        num_in_last_round = manager.num_participants()
        while True:
            # What went into committed rounds is the same number in all groups, so they end after the same round.
            progress = progress_of(manager, options, options.period)
            if progress >= 1 and num_in_last_round >= options.end_with:
                break
            recorder.begin()
            rounds_before = manager.current_step()
            set_learning_rate(inner_optimizer, options.learning_rate, progress)

            inputs, targets = task.batch(inner_step)
            inner_optimizer.zero_grad()
            loss = task.loss(model, inputs, targets)
            loss.backward()
            inner_optimizer.step()  # DiLoCo hangs on it: begins a transfer after some of these steps, ends it after others

            inner_step += 1
            if manager.current_step() > rounds_before:
                num_in_last_round = manager.num_participants()
            recorder.step(
                round=manager.current_step(),
                num_counted=manager.batches_committed() * options.period,
                participants=num_in_last_round,
                loss=loss.item(),
            )
            if inner_step % 100 == 0:
                print(
                    f"[{group}] inner step {inner_step}, round {manager.current_step()} of {num_in_last_round} groups,"
                    f" loss {loss.item():.3f}",
                    flush=True,
                )
        diloco.restore_parameters()  # what all groups agreed on last, in place of this group's own
        digest = digest_of(model, outer_optimizers)
        held_out_loss = task.held_out_loss()
        recorder.finish(
            round=manager.current_step(),
            num_counted=manager.batches_committed() * options.period,
            digest=digest,
            held_out_loss=held_out_loss,
        )
    print(f"[{group}] ended after round {manager.current_step()}: held-out loss {held_out_loss:.4f}, state {digest}")
    manager.shutdown(finished=True)


def main() -> None:
    """Be a replica group where the environment names one, else start all of them."""
    options = parse(sys.argv[1:], __doc__ or "")
    if "REPLICA_GROUP_ID" not in os.environ:
        from diloco.launch import launch

        sys.exit(launch(options, sys.argv[1:]))
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    torch.set_num_threads(1)
    train(options, int(os.environ["REPLICA_GROUP_ID"]))


if __name__ == "__main__":
    try:
        main()
    except JobFinishedError as over:  # this group came when the others had made the last step
        print(over, flush=True)
