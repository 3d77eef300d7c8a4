"""A group that is further behind than a step receives the state outside of the quorum. Nobody notices it before it is close."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from support.groups import running_job
from support.replicas import Replica, Run, end_all
from support.waiting import wait_until
from torch import nn

from torchft_ckpt import HTTPTransport
from torchft_ckpt.checkpointing.progress import TransferProgress
from torchft_ckpt.core.coordination import beside as beside_the_quorum
from torchft_ckpt.core.coordination import joining, learning
from torchft_ckpt.core.coordination.messages import Role
from torchft_ckpt.core.coordination.replica import StepPhase
from torchft_ckpt.errors import TransferCancelledError
from torchft_ckpt.manager import recovery

pytestmark = pytest.mark.slow

FROZEN_BYTES = 4 * 512 * 512
SLOW_RATE = 100_000.0
"""Bytes a second: the frozen weights take ten seconds, all else a few milliseconds."""


class Frozen(Replica):
    """Most of its state stays as it is."""

    def __init__(self, *arguments: Any, seed: int = 0, **options: Any) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.frozen = nn.Parameter(torch.randn(512, 512, generator=generator), requires_grad=False)
        transport = HTTPTransport[Any](
            timeout=timedelta(seconds=30), num_chunks=0, hostname="127.0.0.1", block_bytes=4096
        )
        self.transport = options.setdefault("checkpoint_transport", transport)
        if self.transport is not transport:
            transport.shutdown()
        super().__init__(*arguments, seed=seed, **options)

    def state(self) -> dict[str, Any]:
        return {**super().state(), "frozen": {"weight": self.frozen.detach()}}

    def load(self, state: dict[str, Any]) -> None:
        super().load(state)
        with torch.no_grad():
            self.frozen.copy_(state["frozen"]["weight"])


class Gated(HTTPTransport[Any]):
    """Fetches wait until they may go on, or are cancelled."""

    def __init__(self) -> None:
        super().__init__(timeout=timedelta(seconds=30), num_chunks=0, hostname="127.0.0.1", block_bytes=4096)
        self.began, self.may_go_on = threading.Semaphore(0), threading.Event()
        self.fetched: list[TransferProgress] = []
        self.failed: list[str] = []
        self._is_cancelled = threading.Event()

    def fetch_checkpoint(self, sources: Sequence[str], step: int, timeout: timedelta, **how: Any) -> Any:
        self._is_cancelled.clear()
        self.began.release()
        while not self.may_go_on.wait(0.01):
            if self._is_cancelled.is_set():
                raise TransferCancelledError("cancelled", party="test")
        tell: Callable[[TransferProgress], None] = how.pop("on_progress")
        seen: list[TransferProgress] = []

        def note(progress: TransferProgress) -> None:
            seen.append(progress)
            tell(progress)

        try:
            state = super().fetch_checkpoint(sources, step, timeout, on_progress=note, **how)
        except Exception as error:
            self.failed.append(str(error))
            raise
        self.fetched.append(seen[-1])
        return state

    def cancel_recv(self) -> None:
        self._is_cancelled.set()
        super().cancel_recv()


@pytest.fixture(autouse=True)
def _far_from_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """A state seems to take long to receive."""
    monkeypatch.setattr(joining, "FIRST_RATE", SLOW_RATE)


class Paced(Run):
    """Those who train can be held between two steps."""

    def __init__(self, replica: type[Replica]) -> None:
        self.may_train = threading.Event()
        self.may_train.set()
        super().__init__(replica)

    def train(self, replica: Replica) -> None:
        while replica.manager.current_step() < self.last_step:
            assert self.may_train.wait(60)
            replica.step()

    def pause_until_it_asks(self, learner: Replica, go_on: Callable[[], None]) -> None:
        """Hold those who train until a learner that is let go on has come as far as it can."""
        self.may_train.clear()
        go_on()
        give_up_at = time.monotonic() + 60
        while (now := learner.manager.view()).quorum is None or not (
            now.phase is StepPhase.ASKING and now.quorum.follows
        ):
            assert time.monotonic() < give_up_at
            time.sleep(0.01)
        self.may_train.set()


@contextmanager
def beside(run: Run, *others: Replica) -> Iterator[ThreadPoolExecutor]:
    """Yield threads for others. Where the body fails they end, and those of the run."""
    pool = ThreadPoolExecutor(2)
    try:
        yield pool
    except BaseException:
        run.last_step = 0
        end_all()
        raise
    finally:
        pool.shutdown()


def close(run: Run, joined: Frozen) -> None:
    end_all()
    for replica in (*run.at_work, joined):
        replica.transport.shutdown()  # type: ignore[attr-defined]


def quorum_ids(run: Run) -> set[int]:
    return {replica.manager.statistics().quorum_id for replica in run.at_work}


def follow(
    run: Paced, learner: Replica, transport: Gated, check_meanwhile: Callable[[], object] = lambda: None
) -> None:
    """Let a learner receive a state, the others make 20 steps meanwhile, and the learner come as far as it can."""
    before = quorum_ids(run)
    with beside(run, learner) as pool:
        first = pool.submit(learner.step)
        assert transport.began.acquire(timeout=60)
        run.wait_for_steps(20)
        assert quorum_ids(run) == before and not first.done()
        now = learner.manager.view()
        assert now.quorum is not None and (now.quorum.role, now.quorum.follows) == (Role.LEARNER, True)
        check_meanwhile()
        run.pause_until_it_asks(learner, transport.may_go_on.set)
        first.result(60)
    run.end(learner)


def test_a_transfer_outlives_the_join_of_another_group() -> None:
    """Its sources withdraw what they served to a joiner when the step is committed, and not what the learner receives."""
    run = Paced(Frozen)
    transport = Gated()
    learner = Frozen(run.server, "c", seed=7, checkpoint_transport=transport)
    other = Frozen(run.server, "d", seed=8, join_stall_limit=None)
    with beside(run, learner, other) as pool:
        first = pool.submit(learner.step)
        assert transport.began.acquire(timeout=60)
        while not other.manager.is_participating():
            other.step()
        run.at_work.append(other)
        run._loops.append(pool.submit(run.train, other))
        run.wait_for_steps(5)
        run.pause_until_it_asks(learner, transport.may_go_on.set)
        first.result(60)
        assert transport.fetched[0].received_bytes >= FROZEN_BYTES and not transport.failed
        run.end(learner)
    assert len({str(replica.bits()) for replica in (*run.at_work, learner)}) == 1
    close(run, learner)


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.parametrize("victim", ["learner", "source"])
def test_a_kill_while_a_group_follows_costs_what_it_would_cost_without(tmp_path: Path, victim: str) -> None:
    options = {"frozen_mb": 8, "rate": 4e6, "digest_each_step": True}
    with running_job(tmp_path, pause_s=0.02, **options) as job:
        groups = job.start_groups(3, until=5)
        control = job.control("group_3")
        control.mkdir()
        (control / "slow").write_text("600")
        learner = job.start("group_3", follow=True)[0]
        learner.wait_for_event("fetching")
        step, quorum = groups[0].steps()[-1]["step"], groups[0].steps()[-1]["quorum"]
        groups[0].wait_for_step(step + 20)
        assert groups[0].steps()[-1]["quorum"] == quorum, "nobody reconnects for one that follows"
        killed_at = time.monotonic()
        survivors = groups if victim == "learner" else groups[:2]
        (learner if victim == "learner" else groups[2]).signal(signal.SIGKILL)
        for group in survivors:
            group.wait_for_step(max(g.steps()[-1]["step"] for g in survivors) + 5)
            discarded = sum(not s["committed"] for s in group.steps(since=killed_at))
            assert discarded <= (0 if victim == "learner" else 1)
        (control / "slow").unlink()
        if victim == "source":
            learner.kill()  # or it would sleep on
        learner = job.start("group_3", follow=True)[0]
        learner.wait_for(lambda e: e["event"] == "step" and e["committed"] and e["contributed"])
        reports = job.finish()
        assert len({(report["step"], report["digest"]) for report in reports}) == 1, reports


@pytest.mark.parametrize(("rests", "least", "most"), [(19.0, 1, 1), (0.0, 3, 1000)], ids=["a while", "not at all"])
def test_a_spare_keeps_what_it_has_received_for_a_while_and_takes_the_place_of_a_lost_group(
    rests: float, least: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others make 20 steps. What it receives again is only what these have changed."""
    monkeypatch.setattr(recovery, "RESTS", rests)
    monkeypatch.setattr(recovery, "SAY_EVERY_S", 0.05 if not rests else learning.SAY_EVERY_S)
    monkeypatch.setattr(beside_the_quorum, "pause_before_learning_again_s", lambda *_: 0.0)
    run = Paced(Frozen)
    transport = Gated()
    transport.may_go_on.set()
    spare = Frozen(run.server, "c", seed=7, spare=True, checkpoint_transport=transport)
    with beside(run, spare) as pool:
        first = pool.submit(spare.step)
        wait_until(lambda: len(transport.fetched) >= least, "it has received a state")
        run.wait_for_steps(20)
        wait_until(lambda: len(transport.fetched) >= least, "it has received a state")
        assert len(transport.fetched) <= most and not first.done()
        gone = run.at_work.pop()
        gone.manager.shutdown()
        gone.transport.shutdown()  # type: ignore[attr-defined]
        first.result(60)
        run._loops.pop().exception(60)
        run.end(spare)
    assert len({str(replica.bits()) for replica in (*run.at_work, spare)}) == 1
    assert sum(progress.received_bytes for progress in transport.fetched) < 1.5 * FROZEN_BYTES
    close(run, spare)
