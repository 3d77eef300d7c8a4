"""What a script does after `optimizer.step()`, beside an outer loop: a group that comes into a running job does as the others.

Real managers on threads, two groups of one rank.
"""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from torchft_ckpt import DiLoCo, LighthouseServer, LocalSGD, Manager, ProcessGroupGloo

LONG_S = 60.0
SYNC_EVERY = 4
NUM_ROUNDS_ALONE = 3
NUM_ROUNDS_TOGETHER = 3


class Script:
    """A training script of one group: its state is of model, inner optimizer, schedule and a count of its iterations.

    It steps the schedule where everybody does, after the optimizer, and counts an iteration as it begins.
    """

    def __init__(self, address: str, number: int, kind: str, delay: int) -> None:
        torch.manual_seed(number)
        self._batches = torch.Generator().manual_seed(number)
        self.model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))
        self.inner = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.schedule = LambdaLR(self.inner, lambda step: 1 / (1 + step))
        self.iteration = 0
        self.manager = Manager(
            ProcessGroupGloo(timeout=timedelta(seconds=20)),
            self._load,
            self._state,
            min_replica_size=1,
            use_async_quorum=False,
            replica_id=f"group_{number}",
            lighthouse_addr=address,
            hostname="127.0.0.1",
            timeout=timedelta(seconds=20),
        )
        self.loop: Any
        if kind == "local_sgd":
            self.loop = LocalSGD(self.manager, self.model, self.inner, SYNC_EVERY)
        else:
            outer = torch.optim.SGD(self.model.parameters(), lr=0.7, momentum=0.9, nesterov=True)
            self.loop = DiLoCo(self.manager, [self.model], self.inner, outer, SYNC_EVERY, fragment_sync_delay=delay)

    def _state(self) -> dict[str, Any]:
        return {
            "model": self.model.state_dict(),
            "inner": self.inner.state_dict(),
            "schedule": self.schedule.state_dict(),
            "iteration": self.iteration,
        }

    def _load(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.inner.load_state_dict(state["inner"])
        self.schedule.load_state_dict(state["schedule"])
        self.iteration = state["iteration"]

    def train(self, told: threading.Event, after: int) -> dict[int, tuple[int, int, float]]:
        """Train until both groups were in some rounds; return where the script was after each of those.

        `told`: set after so many rounds.
        """
        seen: dict[int, tuple[int, int, float]] = {}
        num_rounds = 0
        with self.loop:
            while len(seen) < NUM_ROUNDS_TOGETHER:
                self.iteration += 1
                self.inner.zero_grad()
                batch = torch.randn(8, 4, generator=self._batches)
                self.model(batch).sub(batch.flip(1)).square().mean().backward()
                self.inner.step()
                self.schedule.step()
                counts = self.manager.statistics()
                if counts.num_committed > num_rounds:
                    num_rounds = counts.num_committed
                    if num_rounds >= after:
                        told.set()
                    if self.manager.num_participants() == 2:
                        place = self.iteration, self.schedule.last_epoch, self.inner.param_groups[0]["lr"]
                        seen[self.manager.current_step()] = place
        return seen


@pytest.mark.parametrize(("kind", "delay"), [("diloco", 0), ("diloco", 1), ("local_sgd", 0)])
def test_a_group_that_comes_has_the_schedule_of_the_others_after_each_round(kind: str, delay: int) -> None:
    """Their state is of the middle of an iteration, behind the optimizer's step; what follows that is still to be done."""
    lighthouse = LighthouseServer("127.0.0.1:0", min_replicas=1, join_timeout_ms=10_000)
    may_come = threading.Event()

    def run(number: int, told: threading.Event) -> dict[int, tuple[int, int, float]]:
        script = Script(lighthouse.address(), number, kind, delay)
        try:
            return script.train(told, NUM_ROUNDS_ALONE)
        finally:
            script.manager.shutdown()

    try:
        with ThreadPoolExecutor(2) as pool:
            first = pool.submit(run, 0, may_come)
            assert may_come.wait(LONG_S)
            second = pool.submit(run, 1, threading.Event())
            there, here = first.result(LONG_S), second.result(LONG_S)
    finally:
        lighthouse.shutdown()
    assert len(here) == NUM_ROUNDS_TOGETHER
    assert here == there
