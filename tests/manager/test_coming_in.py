"""A group loads the state at the end of an iteration that does not count, and what its loop changes before its next step goes
back."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from test_joining_a_running_job import Run
from test_manager_in_process import Replica

from torchft_ckpt import Manager
from torchft_ckpt.manager import coming_in
from torchft_ckpt.manager.saving import NotSaving, save_identity


@pytest.fixture(autouse=True)
def loads_at_end(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(Manager, "_loads_at_end", True)
    return


class Counting(Replica):
    """Its state has a count, and a large tensor that no optimizer owns."""

    def __init__(self, *arguments: Any, seed: int = 0, **options: Any) -> None:
        self.count, self.average = 0, torch.zeros(64, 64)
        super().__init__(*arguments, seed=seed, **options)

    def state(self) -> dict[str, Any]:
        return {**super().state(), "count": self.count, "average": self.average}

    def load(self, state: dict[str, Any]) -> None:
        super().load(state)
        self.count = state["count"]
        self.average.copy_(state["average"])

    def step(self) -> bool:
        counts = super().step()
        if counts:
            self.count += 1
            self.average.add_(1.0)
        return counts


@pytest.mark.parametrize("use_async_quorum", [True, False])
def test_a_group_is_in_its_first_quorum_as_a_holder_and_the_others_lose_no_step(use_async_quorum: bool) -> None:
    run = Run(use_async_quorum=use_async_quorum)
    joined = Replica(run.server, "c", seed=7, use_async_quorum=use_async_quorum)
    assert not joined.step()
    now = joined.manager.view()
    assert now.came_in and not now.is_behind and joined.manager.statistics().num_healed == 1
    assert joined.step() and joined.manager.is_participating()
    run.end(joined)
    assert [replica.manager.statistics().num_discarded for replica in run.at_work] == [0, 0]
    assert len({str(replica.bits()) for replica in (*run.at_work, joined)}) == 1
    run.close(joined)


def test_who_has_just_come_in_writes_nothing_for_the_job() -> None:
    run = Run()
    joined = Replica(run.server, "c", seed=7)
    assert not joined.step()
    found = save_identity(joined.manager)
    assert isinstance(found, NotSaving) and "trained no step" in found.reason
    run.end(joined)
    run.close(joined)


def test_what_the_loop_changes_before_its_next_step_goes_back_by_name(caplog: pytest.LogCaptureFixture) -> None:
    run = Run(Counting)
    joined = Counting(run.server, "c", seed=7)
    assert not joined.step()
    before = joined.count, joined.sgd.param_groups[0]["lr"]
    joined.count += 1
    joined.sgd.param_groups[0]["lr"] = 5.0
    with caplog.at_level(logging.WARNING, "torchft_ckpt"):
        joined.optimizer.zero_grad()
    assert (joined.count, joined.sgd.param_groups[0]["lr"]) == before
    assert "default.count" in caplog.text and "it is put back" in caplog.text
    run.end(joined)
    assert {replica.count for replica in (*run.at_work, joined)} == {joined.manager.current_step()}
    run.close(joined)


def test_a_large_tensor_that_the_loop_changes_is_received_again_and_copied_from_then_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(coming_in, "MAX_COPIED_BYTES", 1024)
    run = Run(Counting)
    joined = Counting(run.server, "c", seed=7)
    with caplog.at_level(logging.WARNING, "torchft_ckpt"):
        for _ in range(2):
            assert not joined.step()
            joined.average.add_(1.0)
    assert "default.average" in caplog.text and "it is received again" in caplog.text
    assert joined.step(), "it was copied, and is put back"
    run.end(joined)
    assert len({str(replica.average) for replica in (*run.at_work, joined)}) == 1
    assert [replica.manager.statistics().num_discarded for replica in run.at_work] == [0, 0]
    run.close(joined)


def test_a_loop_that_skips_iterations_without_a_vote_loads_as_the_third_one_begins(
    caplog: pytest.LogCaptureFixture,
) -> None:
    run = Run()
    joined = Replica(run.server, "c", seed=7)
    for _ in range(2):
        joined.optimizer.zero_grad()
        joined.manager.ensure_step()
        joined.model(torch.ones(2, 8)).square().mean().backward()
        assert joined.manager.view().is_behind
    with caplog.at_level(logging.WARNING, "torchft_ckpt"):
        assert joined.step()
    assert "two iterations in a row have ended without should_commit" in caplog.text
    run.end(joined)
    assert len({str(replica.bits()) for replica in (*run.at_work, joined)}) == 1
    run.close(joined)


def test_the_only_survivor_of_two_that_need_each_other_waits_until_the_other_is_back() -> None:
    run = Run(min_replica_size=2)
    lost = run.at_work.pop()
    lost.manager.shutdown(wait=False)
    joined = Replica(run.server, "c", seed=7, min_replica_size=2)
    run._loops.pop().exception(60)
    run.end(joined)
    assert run.at_work[0].bits() == joined.bits()
    run.close(joined)
