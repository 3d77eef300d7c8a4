"""A replica group that trains by StepLoader, and in turns with it another model by DistributedDataParallel with accumulation.

It waits for how many pairs of steps to take, and reports what each took. Or it takes steps by StepLoader alone, in microbatches
that sleep, and one group dies in one of them.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import nullcontext
from datetime import timedelta
from typing import Any

import torch
from torch import nn, optim
from torch.utils.data import DataLoader, DistributedSampler

from bench.models import SmallTransformer
from bench.transport_links import enter
from bench.wire import Commands, Reporter
from torchft_ckpt import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo, StepLoader

MICROBATCH_SIZE, _LENGTH = 4, 64
_TIMEOUT = timedelta(seconds=30)


class _Side:
    """A model and its Manager."""

    def __init__(self, options: dict[str, Any], name: str) -> None:
        torch.manual_seed(options["seed"])
        self.options = options
        self.model = SmallTransformer()
        self.rows = torch.randint(0, 256, (4096, _LENGTH + 1))
        inner = optim.AdamW(self.model.parameters(), lr=1e-4)

        def load_state_dict(state: dict[str, Any]) -> None:
            self.model.load_state_dict(state["model"])
            inner.load_state_dict(state["optimizer"])

        self.manager = Manager(
            ProcessGroupGloo(timeout=_TIMEOUT),
            load_state_dict,
            lambda: {"model": self.model.state_dict(), "optimizer": inner.state_dict()},
            min_replica_size=options.get("min_replicas", options["num_groups"]),
            timeout=_TIMEOUT,
            rank=0,
            world_size=1,
            lighthouse_addr=options["lighthouse"],
            replica_id=f"group_{options['group']}",
            hostname=options.get("host", "127.0.0.1"),
            job=name,
        )
        self.optimizer = Optimizer(self.manager, inner)

    def loss(self, forward: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
        logits = forward(tokens[:, :-1])
        return nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


class _Ddp(_Side):
    """The loop of today: batches of one group, of which the last one's backward pass averages the gradients."""

    def __init__(self, options: dict[str, Any]) -> None:
        super().__init__(options, "ddp")
        self._forward = DistributedDataParallel(self.manager, self.model)
        self._num = options["num_microbatches"] // options["num_groups"]
        self._batches = self._endless()

    def _endless(self) -> Iterator[torch.Tensor]:
        sampler: DistributedSampler[torch.Tensor] = DistributedSampler(
            self.rows,  # type: ignore[arg-type]
            num_replicas=self.options["num_groups"],
            rank=self.options["group"],
        )
        while True:
            yield from DataLoader(self.rows, batch_size=MICROBATCH_SIZE, sampler=sampler)  # type: ignore[arg-type]

    def step(self) -> bool:
        self.optimizer.zero_grad()
        for number in range(self._num):
            with nullcontext() if number == self._num - 1 else self._forward.no_sync():
                (self.loss(self._forward, next(self._batches)) / self._num).backward()
        return bool(self.optimizer.step())


class _Exact(_Side):
    """The loop of `docs/guides/exact-steps.md`."""

    def __init__(self, options: dict[str, Any]) -> None:
        super().__init__(options, "exact")
        size = MICROBATCH_SIZE * options["num_microbatches"]
        steps = StepLoader(self.manager, self.rows, global_batch_size=size, microbatch_size=MICROBATCH_SIZE)
        self._steps, self.inside_s, self.dies = iter(steps), 0.0, False

    def step(self) -> bool:
        step = next(self._steps)
        self.optimizer.zero_grad()
        for number, batch in enumerate(step):
            began = time.perf_counter()
            time.sleep(self.options.get("sleeps_s", 0.0))
            if self.dies and number == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            loss = self.loss(self.model, batch)
            loss.backward()
            step.log(loss=loss)
            self.inside_s += time.perf_counter() - began
        return bool(self.optimizer.step())


_SIDES: dict[str, type[_Ddp | _Exact]] = {"ddp": _Ddp, "exact": _Exact}


def _take_pairs(sides: dict[str, _Ddp | _Exact], num_pairs: int) -> dict[str, list[dict[str, float]]]:
    """Take so many steps of each that count, in turns; return what each took, at last."""
    steps: dict[str, list[dict[str, float]]] = {name: [] for name in sides}
    for number in range(num_pairs):
        for name in [*sides] if number % 2 else [*sides][::-1]:
            while sides[name].manager.current_step() == number:
                began, used_s = time.perf_counter(), time.process_time()
                sides[name].step()
            steps[name].append({"wall_s": time.perf_counter() - began, "cpu_s": time.process_time() - used_s})
    return steps


def _take_steps(exact: _Exact, num_steps: int, dies: int | None) -> list[dict[str, float]]:
    """Take so many steps that count; return what each took, and how much of that the bodies of inner loops."""
    steps = []
    for number in range(num_steps):
        exact.inside_s, exact.dies, began = 0.0, number == dies, time.perf_counter()
        while exact.manager.current_step() == number:
            exact.step()
        steps.append({"wall_s": time.perf_counter() - began, "inside_s": exact.inside_s})
    return steps


def main() -> None:
    """Import, report `ready`, do what it is told; an exception is reported as `died` and ends the process."""
    options: dict[str, Any] = json.loads(sys.argv[1])
    reporter, commands = Reporter(), Commands()
    logging.basicConfig(level="WARNING", format="%(created).3f %(name)s %(message)s")
    torch.set_num_threads(1)
    if namespace := options.get("namespace"):
        enter(namespace)
    reporter.emit("ready")
    command = commands.next()
    with reporter.telling_death():
        if "num_steps" in command:
            reporter.emit("steps", steps=_take_steps(_Exact(options), command["num_steps"], command["dies"]))
        else:
            sides = {name: side(options) for name, side in _SIDES.items()}
            reporter.emit("pairs", steps=_take_pairs(sides, command["num_pairs"]))
        commands.next()


if __name__ == "__main__":
    main()
