"""A replica group that trains the demo's GPT in turns: under DiLoCo, or by itself with a process group that it does not use.

It waits for `go`, then trains as long as it has taken fewer inner steps than the last `until` that it was told. After each
turn it reports of each inner step how long it took, the processor time of all threads, and how long the same step of a twin
took: a second model that nothing is added to, trained in turn with the first. It keeps to one core.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import Any

import torch
from diloco.options import Options
from diloco.task import Task, make_inner_optimizer, set_learning_rate, split
from torch import optim

from bench.diloco_jobs import options_of
from bench.wire import Commands, Reporter
from torchft_ckpt import DiLoCo, Manager, ProcessGroupGloo


class _Copy:
    """A model and its optimizer."""

    def __init__(self, options: Options, group: int) -> None:
        self.task = Task(options, group)
        self.inner = make_inner_optimizer(self.task.model)
        set_learning_rate(self.inner, options.learning_rate, 0.5)
        self._batches = [self.task.batch(number) for number in range(16)]

    def step(self, number: int) -> tuple[float, float]:
        """Take an inner step; return its seconds, and processor seconds of all threads."""
        inputs, targets = self._batches[number % len(self._batches)]
        began, used_s = time.perf_counter(), time.process_time()
        self.inner.zero_grad()
        self.task.loss(self.task.model, inputs, targets).backward()
        self.inner.step()
        return time.perf_counter() - began, time.process_time() - used_s

    @torch.no_grad()
    def look(self) -> None:
        """Make a forward pass, and no step."""
        self.task.loss(self.task.model, *self._batches[0])


def _with_diloco(settings: dict[str, Any], options: Options, copy: _Copy) -> DiLoCo:
    """Return the loop around a copy's inner steps."""
    fragments = split(copy.task.model, options.fragments)
    outer: list[optim.Optimizer] = [
        optim.SGD(fragment.parameters(), lr=0.7, momentum=0.9, nesterov=True) for fragment in fragments
    ]
    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=30)),
        load_state_dict=None,
        state_dict=None,
        min_replica_size=options.groups,
        use_async_quorum=False,
        rank=0,
        world_size=1,
        lighthouse_addr=settings["lighthouse"],
        replica_id=f"group_{settings['group']}",
        hostname="127.0.0.1",
    )
    return DiLoCo(
        manager,
        fragments,
        copy.inner,
        outer,
        options.sync_every,
        use_bucketization=True,
        fragment_sync_delay=options.delay,
        fragment_update_alpha=options.alpha,
    )


def _take(mine: _Copy, twin: _Copy | None, number: int) -> tuple[float, float, float]:
    """Take an inner step of both, each first in turn; return seconds, processor seconds, the twin's seconds."""
    before = twin.step(number)[0] if twin is not None and number % 2 else 0.0
    took_s, used_s = mine.step(number)
    after = twin.step(number)[0] if twin is not None and not number % 2 else 0.0
    return took_s, used_s, before or after


def _train(settings: dict[str, Any], options: Options, commands: Commands, reporter: Reporter) -> None:
    mine = _Copy(options, settings["group"])
    twin = _Copy(options, settings["group"]) if settings["has_twin"] else None
    reporter.emit("ready")
    commands.next()
    loop: AbstractContextManager[Any] = nullcontext()
    if settings["lighthouse"]:
        loop = _with_diloco(settings, options, mine)
    else:
        torch.distributed.init_process_group(
            "gloo", init_method=settings["init_method"], rank=settings["group"], world_size=options.groups
        )
    steps: list[tuple[float, float, float]] = []
    number = until = 0
    with loop:
        mine.look()  # the first forward pass, in which the loop finds the others
        reporter.emit("entered")
        while True:
            if number >= until:
                if steps:
                    reporter.emit("turn", steps=steps)
                    steps = []
                until = commands.next()["until"]
                continue
            steps.append(_take(mine, twin, number))
            number += 1


def main() -> None:
    """Import, report `ready`, wait for `go`, train; an exception is reported as `died` and ends the process."""
    settings: dict[str, Any] = json.loads(sys.argv[1])
    reporter, commands = Reporter(), Commands()
    logging.basicConfig(level="WARNING", format="%(created).3f %(name)s %(message)s")
    torch.set_num_threads(1)
    if sys.platform == "linux":
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[settings["group"] % len(cores)]})
    with reporter.telling_death():
        _train(settings, options_of(settings["arguments"]), commands, reporter)


if __name__ == "__main__":
    main()
