"""The ranks of a group that follows apply redo entries together: the step of an optimizer of sharded tensors may wait for all."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
from support.stores import hosted_store
from test_learners import Gated, Wide
from test_ranks_load_together import Inner

from torchft_ckpt import LighthouseServer
from torchft_ckpt.core.coordination import joining, learning
from torchft_ckpt.core.coordination.replica import StepPhase
from torchft_ckpt.errors import SourceRefusedError

NUM_RANKS = 2


@pytest.fixture(autouse=True)
def _far_from_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """A state seems to take long to receive, and gradients are never taken for too slow, however busy this machine is."""
    monkeypatch.setattr(joining, "FIRST_RATE", 100_000.0)
    monkeypatch.setattr(learning, "_KEEPS_UP", float("inf"))
    monkeypatch.setattr(learning, "_HOPELESS", float("inf"))
    monkeypatch.setattr(learning, "MAX_ATTEMPTS", 1)


class Rank(Wide):
    """A rank whose forward pass and whose optimizer call collectives of the group."""

    def __init__(self, *arguments: Any, inner: Inner, rank: int, **options: Any) -> None:
        self.inner, self.rank = inner, rank
        super().__init__(*arguments, rank=rank, **options)
        self.model.register_forward_pre_hook(lambda *_: inner.call(rank, "forward"))
        self.sgd.register_step_pre_hook(lambda *_: inner.call(rank, "step"))


class Job:
    """Two groups of two ranks that train, and can be held between two steps."""

    def __init__(self) -> None:
        self.server = LighthouseServer("127.0.0.1:0", min_replicas=2)
        self.last_step, self.may_train = 1 << 30, threading.Event()
        self.may_train.set()
        self.pool = ThreadPoolExecutor(6)
        self.stores = [hosted_store() for _ in range(3)]
        self.at_work = [rank for name in ("a", "b") for rank in self.group(name)]
        self.loops = [self.pool.submit(self.train, rank) for rank in self.at_work]
        self.wait_for_steps(2)

    def group(self, name: str, make: Callable[[int], dict[str, Any]] = lambda rank: {}, **options: Any) -> list[Rank]:
        store, inner = self.stores["abc".index(name)], Inner(NUM_RANKS)
        options |= {"world_size": NUM_RANKS, "store_addr": "127.0.0.1", "store_port": store.port, "inner": inner}
        ranks = range(NUM_RANKS)
        made = [self.pool.submit(lambda r=r: Rank(self.server, name, 7, rank=r, **make(r), **options)) for r in ranks]  # type: ignore[misc]
        return [one.result(60) for one in made]

    def train(self, rank: Rank) -> None:
        while rank.manager.current_step() < self.last_step:
            assert self.may_train.wait(60)
            rank.step()

    def wait_for_steps(self, count: int) -> None:
        until = min(rank.manager.current_step() for rank in self.at_work) + count
        give_up_at = time.monotonic() + 60
        while min(rank.manager.current_step() for rank in self.at_work) < until:
            assert time.monotonic() < give_up_at
            time.sleep(0.01)

    def end(self, *joined: Rank) -> None:
        """All train to the same step, once those that joined are in."""
        in_step: list[Future[None]] = [self.pool.submit(self.train_until_in, rank) for rank in joined]
        for one in in_step:
            one.result(60)
        for loop in self.loops:
            loop.result(60)

    def train_until_in(self, rank: Rank) -> None:
        while self.last_step == 1 << 30:
            rank.step()
            if rank.rank == 0 and rank.manager.is_participating():
                self.last_step = rank.manager.current_step() + 10
        self.train(rank)

    def close(self, *joined: Rank) -> None:
        self.last_step = 0
        self.may_train.set()
        for rank in (*self.at_work, *joined):
            rank.manager.shutdown()
            rank.transport.shutdown()
        self.pool.shutdown()
        self.server.shutdown()


@pytest.mark.slow
@pytest.mark.parametrize("case", ["all entries come", "one rank's entries do not come"])
def test_all_ranks_of_a_group_replay_the_same_steps_or_none_does(case: str, caplog: pytest.LogCaptureFixture) -> None:
    job = Job()
    transports = [Gated() for _ in range(NUM_RANKS)]
    joined: list[Rank] = []
    try:
        joined += job.group("c", lambda rank: {"checkpoint_transport": transports[rank]}, warm_up=False, follow=True)
        discarded = [rank.manager.statistics().num_discarded for rank in job.at_work]
        is_refused = case != "all entries come"
        if is_refused:
            refuse_entries_after_the_third(joined[1])
        firsts = [job.pool.submit(rank.step) for rank in joined]
        for transport in transports:
            assert transport.began.acquire(timeout=30)
        job.wait_for_steps(20)
        job.may_train.clear()
        for transport in transports:
            transport.may_go_on.set()
        if not is_refused:
            wait_until_they_ask(joined)
        job.may_train.set()
        for first in firsts:
            first.result(60)
        job.end(*joined)
        assert [rank.manager.statistics().num_discarded for rank in job.at_work] == discarded
        assert len({str(rank.all_bits()) for rank in (*job.at_work, *joined)}) == 1
        num_replayed = [rank.manager._replay.num_replayed for rank in joined]
        if is_refused:
            assert "group rank 1: this entry is refused" in caplog.text
        else:
            assert num_replayed[0] == num_replayed[1] >= 20
            for transport in transports:
                later = transport.fetched[1:]
                assert [progress.received_bytes for progress in later] == [0] * len(later) and later
    finally:
        job.close(*joined)


def wait_until_they_ask(ranks: list[Rank]) -> None:
    give_up_at = time.monotonic() + 60
    while not all(
        (now := rank.manager.view()).quorum is not None and now.phase is StepPhase.ASKING and now.quorum.follows
        for rank in ranks
    ):
        assert time.monotonic() < give_up_at
        time.sleep(0.01)


def refuse_entries_after_the_third(rank: Rank) -> None:
    replay = rank.manager._replay
    fetch_next, num_fetched = replay._fetch_next, 0

    def fetch(timeout_s: float) -> bool:
        nonlocal num_fetched
        num_fetched += 1
        if num_fetched == 4:
            raise SourceRefusedError("this entry is refused", party="redo log")
        return fetch_next(timeout_s)

    replay._fetch_next = fetch  # type: ignore[method-assign]
