"""Loops move their place in the data in the middle of a step, while the quorum is held for a group that is given their state."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch
from support.replicas import Replica, Run

from torchft_ckpt.core.coordination.replica import StepPhase
from torchft_ckpt.ddp import PureDistributedDataParallel

CLEARS_LAST = "continues, and clears gradients at the end of its iterations"
_QUIET = range(33, 48)
"""At 32 and 64 steps, and at each other power of two, all groups are compared, and their loops wait. Here they do not."""


LEAVE_OUT = ("continues", "catches an error", CLEARS_LAST)


class Case:
    """What the loops do. `is_on`: those at work leave the batch out that they have read, once."""

    def __init__(self, how: str) -> None:
        self.how = how
        self.is_on, self.votes = threading.Event(), threading.Event()
        self.has_loaded = False


class Reading(Replica):
    """It reads a batch in each step, by its place, which is registered."""

    def __init__(self, *arguments: Any, case: Case, **options: Any) -> None:
        self.case = case
        self.place = self.num_left_out = 0
        self.read: dict[int, int] = {}
        """Which batch, by the number of the step, if that counts."""
        super().__init__(*arguments, **options)
        self.network = PureDistributedDataParallel(self.manager, self.model) if case.how == CLEARS_LAST else self.model

    def state(self) -> dict[str, Any]:
        return {**super().state(), "place": self.place}

    def load(self, state: dict[str, Any]) -> None:
        super().load(state)
        self.place = state["place"]

    def forward(self) -> torch.Tensor:
        loss: torch.Tensor = self.network(torch.full((2, 8), 1.0 + self.place % 2)).square().mean()
        return loss

    def leaves_out(self, how: str) -> bool:
        if self.case.how != how or self.num_left_out:
            return False
        while self.manager.view().phase is StepPhase.ASKING and not self.case.is_on.wait(0.001):
            pass
        self.num_left_out += self.case.is_on.is_set()
        return self.case.is_on.is_set()

    def step(self) -> bool:
        step, before = self.manager.current_step(), self.manager.statistics().num_committed
        if self.case.votes.is_set() and not self.case.has_loaded:
            self.case.is_on.wait(0.1)  # so the other two come together long before the groups are compared again
        if self.case.how != CLEARS_LAST:
            self.optimizer.zero_grad()
        if self.case.how == "clears twice":
            self.forward()
            self.place += 1
            self.optimizer.zero_grad()
        try:
            loss = self.forward()
            if self.leaves_out("catches an error"):
                raise ValueError("a broken sample")
        except ValueError:
            self.place += 1
            return False
        if self.leaves_out("continues") or self.leaves_out(CLEARS_LAST):
            self.place += 1
            return False
        loss.backward()  # type: ignore[no-untyped-call]
        if self.case.how == "accumulates":
            self.place += 1
            self.forward().backward()  # type: ignore[no-untyped-call]
        for parameter in self.model.parameters() if self.case.how != CLEARS_LAST else ():
            assert parameter.grad is not None
            self.manager.allreduce(parameter.grad)
        self.votes()
        self.optimizer.step()
        if self.case.how == CLEARS_LAST:
            self.optimizer.zero_grad()
        if counts := self.manager.statistics().num_committed > before:
            self.read[step] = self.place
            self.place += 1
        return counts

    def votes(self) -> None:
        """It is about to vote."""


class Newcomer(Reading):
    """It loads for as long as the others need to leave a batch out, which it does not."""

    def __init__(self, run: Run, case: Case) -> None:
        self.others: list[Any] = run.at_work
        super().__init__(run.server, "c", seed=7, case=case)
        self.num_left_out = 1

    def votes(self) -> None:
        give_up_at = time.monotonic() + 60
        while not self.case.votes.is_set() and time.monotonic() < give_up_at:
            step = max(other.manager.current_step() for other in self.others)
            if step >= 32 and (step * 32 >> step.bit_length() - 1) in _QUIET:
                self.case.votes.set()
            threading.Event().wait(0.001)

    def load(self, state: dict[str, Any]) -> None:
        super().load(state)
        self.case.is_on.set()
        give_up_at, leaves_out = time.monotonic() + 30, self.case.how in LEAVE_OUT
        while leaves_out and not all(other.num_left_out for other in self.others) and time.monotonic() < give_up_at:
            threading.Event().wait(0.001)
        self.case.is_on.clear()
        self.case.has_loaded = True


def join(case: Case) -> tuple[list[Any], Newcomer]:
    """Return those at work and the group that has come in to them, after ten more steps."""
    run = Run(Reading, case=case)
    joined = Newcomer(run, case)
    run.end(joined)
    others: list[Any] = run.at_work
    assert [{step: other.read[step] for step in joined.read} for other in others] == [joined.read] * 2
    every = [*others, joined]
    assert len({str(replica.bits()) for replica in every}) == len({replica.place for replica in every}) == 1
    return others, joined


@pytest.mark.parametrize("how", LEAVE_OUT)
def test_a_step_does_not_count_that_one_begins_with_a_batch_which_the_others_left_out_while_it_loaded(how: str) -> None:
    """They are the source of its state, and had moved on from that in the same step. All make the step again, and begin alike."""
    others, _ = join(Case(how))
    assert [other.manager.statistics().num_discarded for other in others] == [1, 1]


@pytest.mark.parametrize("how", ["clears twice", "accumulates"])
def test_loops_that_do_so_in_each_step_lose_none_as_the_one_that_comes_in_does_the_same(how: str) -> None:
    others, joined = join(Case(how))
    assert [other.manager.statistics().num_discarded for other in others] == [0, 0]
    assert [replica.manager.statistics().num_corrected for replica in (*others, joined)] == [0, 0, 0]
