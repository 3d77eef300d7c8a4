"""A group loads the state at the end of an iteration that does not count, and what its loop changes before its next step goes
back."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from support.stores import hosted_store
from test_joining_a_running_job import Run
from test_manager_in_process import Replica, together
from test_ranks_load_together import Inner, Rank, Slow, group

from torchft_ckpt import LighthouseServer, Manager
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


@pytest.mark.slow
def test_all_ranks_of_a_group_load_again_where_the_loop_of_one_has_changed_something(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """What `load_state_dict` calls collectives for, as those of sharded models do, all ranks of a group load, or none."""
    inner, loads = Inner(2), [0, 0]

    class Moving(Rank):
        def __init__(self, *args: Any, rank: int, **options: Any) -> None:
            self.rank, self.has_moved = rank, False
            super().__init__(*args, rank=rank, **options)

        def load(self, state: dict[str, Any]) -> None:
            inner.call(self.rank, "load")
            super().load(state)
            loads[self.rank] += 1

        def train(self, last_step: list[int]) -> None:
            try:
                assert not self.step()
                if self.rank == 1:
                    self.sgd.param_groups[0]["momentum"] = 5.0
                    self.model.bias.data.add_(1)
                super().train(last_step)
            except BaseException:
                last_step.append(self.manager.current_step() + 3)  # the others end too
                raise

    server = LighthouseServer("127.0.0.1:0", min_replicas=1, heartbeat_timeout_ms=5000)
    stores = [hosted_store(), hosted_store()]
    stays = group(server, "stays", stores[0], [Slow(), Slow()])
    together(stays, lambda replica: [replica.step() for _ in range(2)])
    back = group(server, "comes_back", stores[1], [Slow(), Slow()], Moving)
    last_step: list[int] = []
    with caplog.at_level(logging.WARNING, "torchft_ckpt"):
        together([*stays, *back], lambda rank: rank.train(last_step))  # type: ignore[attr-defined]
    assert loads == [2, 2] and "default.model.bias" in caplog.text and "it is put back" in caplog.text
    assert len({str(rank.bits()) for rank in (stays[1], back[1])}) == 1
    assert [rank.manager.statistics().num_discarded for rank in stays] == [0, 0]
    for rank in [*stays, *back]:
        rank.manager.shutdown()
    server.shutdown()


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
