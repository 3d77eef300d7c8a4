"""A group that is further behind than a step receives the state outside of the quorum. Nobody notices it before it is close."""

from __future__ import annotations

import logging
import math
import os
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
from support.waiting import wait_until
from test_joining_a_running_job import Run, step
from test_manager_in_process import Replica
from torch import nn

from torchft_ckpt import HTTPTransport
from torchft_ckpt.checkpointing.progress import TransferProgress
from torchft_ckpt.core.coordination import joining, learning
from torchft_ckpt.core.coordination.messages import Role
from torchft_ckpt.core.coordination.replica import StepPhase
from torchft_ckpt.errors import TransferCancelledError
from torchft_ckpt.manager.recovery import Recovery
from torchft_ckpt.manager.redo_replay import Replay
from torchft_ckpt.manager.saving import NotSaving, save_identity

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


class WideModel(nn.Linear):
    """Its wide weights are trained, too."""

    def __init__(self) -> None:
        super().__init__(8, 8)
        self.wide = nn.Parameter(torch.randn(512, 512))

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return super().forward(batch.to(self.weight.dtype)) + (self.wide * self.wide.sin().detach()).mean()


class Wide(Replica):
    """All of its state is trained."""

    optimizer_of: Callable[[nn.Module], torch.optim.Optimizer] = staticmethod(
        lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    )
    dtype = torch.float32

    def __init__(self, *arguments: Any, **options: Any) -> None:
        transport = HTTPTransport[Any](
            timeout=timedelta(seconds=30), num_chunks=0, hostname="127.0.0.1", block_bytes=4096
        )
        self.transport = options.setdefault("checkpoint_transport", transport)
        if self.transport is not transport:
            transport.shutdown()
        super().__init__(*arguments, **options)

    def build(self) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = WideModel().to(self.dtype)
        return model, self.optimizer_of(model)

    def all_bits(self) -> list[bytes]:
        state = [value for _, one in sorted(self.sgd.state_dict()["state"].items()) for value in one.values()]
        tensors = [*self.model.parameters(), *(value for value in state if isinstance(value, torch.Tensor))]
        return [tensor.detach().view(-1).view(torch.uint8).numpy().tobytes() for tensor in tensors]


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

    def measure_rate(self, sources: Sequence[str]) -> float | None:
        return SLOW_RATE

    def cancel_recv(self) -> None:
        self._is_cancelled.set()
        super().cancel_recv()


@pytest.fixture(autouse=True)
def _far_from_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """A state seems to take long to receive, and gradients are never taken for too slow, however busy this machine is."""
    monkeypatch.setattr(joining, "FIRST_RATE", SLOW_RATE)
    monkeypatch.setattr(learning, "_KEEPS_UP", math.inf)
    monkeypatch.setattr(learning, "_HOPELESS", math.inf)


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
        run.close(*others)
        raise
    finally:
        pool.shutdown()


def close(run: Run, joined: Frozen) -> None:
    run.close(joined)
    for replica in (*run.at_work, joined):
        replica.transport.shutdown()  # type: ignore[attr-defined]


def quorum_ids(run: Run) -> set[int]:
    return {replica.manager.statistics().quorum_id for replica in run.at_work}


def test_the_others_train_on_while_it_receives_and_it_joins_without_the_weights_that_stay_as_they_are() -> None:
    run = Paced(Frozen)
    discarded = [replica.manager.statistics().num_discarded for replica in run.at_work]
    transport = Gated()
    joined = Frozen(run.server, "c", seed=7, warm_up=False, follow=True, checkpoint_transport=transport)
    follow(run, joined, transport)
    assert not transport.failed, "its sources keep the state over 20 commits"
    assert [replica.manager.statistics().num_discarded for replica in run.at_work] == discarded
    assert len({str(replica.bits()) for replica in (*run.at_work, joined)}) == 1
    assert len({replica.frozen.numpy().tobytes() for replica in (*run.at_work, joined)}) == 1  # type: ignore[attr-defined]
    followed, *later = transport.fetched
    assert followed.received_bytes >= FROZEN_BYTES
    assert sum(progress.received_bytes for progress in later) < FROZEN_BYTES / 10
    close(run, joined)


def follow(
    run: Paced, learner: Replica, transport: Gated, check_meanwhile: Callable[[], object] = lambda: None
) -> None:
    """Let a learner receive a state, the others make 20 steps meanwhile, and the learner come as far as it can."""
    before = quorum_ids(run)
    with beside(run, learner) as pool:
        first = pool.submit(learner.step)
        assert transport.began.acquire(timeout=30)
        run.wait_for_steps(20)
        assert quorum_ids(run) == before and not first.done()
        now = learner.manager.view()
        assert now.quorum is not None and (now.quorum.role, now.quorum.follows) == (Role.LEARNER, True)
        check_meanwhile()
        run.pause_until_it_asks(learner, transport.may_go_on.set)
        first.result(60)
    run.end(learner)


REPLAYED: dict[str, tuple[Callable[[nn.Module], torch.optim.Optimizer], torch.dtype]] = {
    "SGD": (Wide.optimizer_of, torch.float32),
    "AdamW": (lambda m: torch.optim.AdamW(m.parameters(), lr=1e-2, fused=True), torch.float32),
    "NAdam bf16": (lambda m: torch.optim.NAdam(m.parameters(), lr=1e-2), torch.bfloat16),
    "ASGD bf16": (lambda m: torch.optim.ASGD(m.parameters(), lr=1e-2, t0=3), torch.bfloat16),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", REPLAYED)
def test_it_replays_the_steps_that_the_others_make_meanwhile_and_receives_nothing_when_it_joins(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Wide, "optimizer_of", staticmethod(REPLAYED[name][0]))
    monkeypatch.setattr(Wide, "dtype", REPLAYED[name][1])
    run = Paced(Wide)
    discarded = [replica.manager.statistics().num_discarded for replica in run.at_work]
    transport = Gated()
    joined = Wide(run.server, "c", seed=7, warm_up=False, follow=True, checkpoint_transport=transport)
    follow(run, joined, transport)
    assert joined.manager._replay.num_replayed >= 20
    assert [replica.manager.statistics().num_discarded for replica in run.at_work] == discarded
    assert len({str(replica.all_bits()) for replica in (*run.at_work, joined)}) == 1  # type: ignore[attr-defined]
    followed, *later = transport.fetched
    assert followed.received_bytes >= 2**19
    assert [progress.received_bytes for progress in later] == [0] * len(later) and later
    close(run, joined)


@pytest.mark.slow
def test_entries_that_come_beside_the_forward_pass_are_applied_at_the_vote_and_the_next_step_counts_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Recovery, "_has_entries", lambda self, plan: False)
    run = Paced(Wide)
    transport = Gated()
    joined = Wide(run.server, "c", seed=7, warm_up=False, follow=True, checkpoint_transport=transport)
    follow(run, joined, transport)
    assert joined.manager._replay.num_replayed >= 20
    assert len({str(replica.all_bits()) for replica in (*run.at_work, joined)}) == 1  # type: ignore[attr-defined]
    assert joined.manager.statistics().num_healed == 2, "it followed, and joined: nothing was loaded after that"
    close(run, joined)


@pytest.mark.slow
def test_a_replay_that_was_not_exact_is_found_before_the_group_contributes(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """At its vote the others wait, so what it replayed is not compared there, but before it asks for the next step."""
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(Recovery, "_has_entries", lambda self, plan: False)
    run = Paced(Wide)
    transport = Gated()
    joined = Wide(run.server, "c", seed=7, warm_up=False, follow=True, checkpoint_transport=transport)
    apply, weight = Replay.apply, joined.model.get_parameter("wide")

    def apply_wrong(self: Replay, *arguments: Any) -> None:
        apply(self, *arguments)
        with torch.no_grad():
            weight.view(-1)[3] += 1.0

    monkeypatch.setattr(Replay, "apply", apply_wrong)
    follow(run, joined, transport)
    for replica in (*run.at_work, joined):
        assert replica.manager.is_participating()
    assert len({str(replica.all_bits()) for replica in (*run.at_work, joined)}) == 1  # type: ignore[attr-defined]
    assert joined.manager.statistics().num_corrected >= 1
    assert any("came to another state" in line and "model.wide" in line for line in caplog.messages)
    close(run, joined)


@pytest.mark.slow
def test_a_group_that_leaves_in_the_step_that_it_joined_in_saves_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Whether its replay was exact nobody knows yet. The others hold that state."""
    monkeypatch.setattr(Recovery, "_has_entries", lambda self, plan: False)
    run = Paced(Wide)
    transport = Gated()
    joined = Wide(run.server, "c", seed=7, warm_up=False, follow=True, checkpoint_transport=transport)
    saved: list[int] = []
    joined.manager.leave_on(signal.SIGUSR1, lambda: saved.append(joined.manager.current_step()))
    apply = Replay.apply

    def apply_and_leave(self: Replay, *arguments: Any) -> None:
        apply(self, *arguments)
        os.kill(os.getpid(), signal.SIGUSR1)
        wait_until(lambda: joined.manager.view().is_leaving or _wishes_to_leave(run), "it is to leave", 20)

    monkeypatch.setattr(Replay, "apply", apply_and_leave)
    with beside(run, joined) as pool:
        first = pool.submit(joined.step)
        assert transport.began.acquire(timeout=30)
        run.wait_for_steps(10)
        run.pause_until_it_asks(joined, transport.may_go_on.set)
        first.result(60)
    assert joined.manager.should_leave()
    assert saved == [] and joined.manager.view().unverified
    assert any("leaves without a save: it has just joined" in line for line in caplog.messages)
    assert isinstance(save_identity(joined.manager), NotSaving)
    run.last_step = 0
    close(run, joined)  # type: ignore[arg-type]


def _wishes_to_leave(run: Run) -> bool:
    (state,) = run.server._jobs.states.values()
    return any(member.wishes_to_leave for member in state.members.values())


@pytest.mark.parametrize("budget", ["the state and entries", "half of the state", "nothing"])
def test_while_it_warms_up_it_receives_what_it_may_into_memory_of_its_own(budget: str) -> None:
    """The others make 20 steps in its first iteration. After it the rest of that state comes, and these steps are replayed."""
    run = Paced(Wide)
    discarded = [replica.manager.statistics().num_discarded for replica in run.at_work]
    least, most = {
        "the state and entries": (2 * FROZEN_BYTES, 100 * FROZEN_BYTES),
        "half of the state": (FROZEN_BYTES * 3 // 4, FROZEN_BYTES),
        "nothing": (0, 0),
    }[budget]
    transport = Gated()
    joined = Wide(run.server, "c", seed=7, follow=True, follow_budget_bytes=most, checkpoint_transport=transport)
    weights = joined.all_bits()
    with beside(run, joined) as pool:
        assert not step(joined, meanwhile=lambda: run.wait_for_steps(20))
        assert joined.all_bits() == weights, "nothing is written to a model that computes"
        early = joined.manager._replay._early
        if most:  # its request is answered at once
            run.may_train.clear()
        first = pool.submit(joined.step)
        assert transport.began.acquire(timeout=30)
        run.pause_until_it_asks(joined, transport.may_go_on.set)
        first.result(60)
    run.end(joined)
    assert [replica.manager.statistics().num_discarded for replica in run.at_work] == discarded
    assert len({str(replica.all_bits()) for replica in (*run.at_work, joined)}) == 1  # type: ignore[attr-defined]
    followed, *later = transport.fetched
    assert least <= followed.total_bytes - followed.received_bytes + 8192 and followed.skipped_bytes <= most
    assert (early is not None and early.fetched_to.step > early.version.step + 2) == (most > 2 * FROZEN_BYTES)
    assert [progress.received_bytes for progress in later] == [0] * len(later) and later
    assert joined.manager._replay.num_replayed >= (18 if most else 0), (
        "else it gets a state of after its first iteration"
    )
    close(run, joined)


def test_a_transfer_outlives_the_join_of_another_group() -> None:
    """Its sources withdraw what they served to a joiner when the step is committed, and not what the learner receives."""
    run = Paced(Frozen)
    transport = Gated()
    learner = Frozen(run.server, "c", seed=7, warm_up=False, follow=True, checkpoint_transport=transport)
    other = Frozen(run.server, "d", seed=8, warm_up=False, follow=False)
    with beside(run, learner, other) as pool:
        first = pool.submit(learner.step)
        assert transport.began.acquire(timeout=30)
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


def test_it_stops_receiving_and_joins_when_the_others_are_too_few() -> None:
    run = Paced(Frozen)
    transport = Gated()
    learner = Frozen(run.server, "c", seed=7, warm_up=False, follow=True, checkpoint_transport=transport)
    with beside(run, learner) as pool:
        first = pool.submit(learner.step)
        assert transport.began.acquire(timeout=30)
        gone = run.at_work.pop()
        gone.manager.shutdown()
        gone.transport.shutdown()  # type: ignore[attr-defined]
        # The loop of the other one waits now: two groups have to be there.
        run._loops.pop().exception(60)
        assert transport.began.acquire(timeout=30), "it asked, and loads before its forward pass"
        assert learner.manager.view().quorum.role is Role.INLINE  # type: ignore[union-attr]
        transport.may_go_on.set()
        assert first.result(60), "its first step counts"
    run.end(learner)
    assert len({str(replica.bits()) for replica in (*run.at_work, learner)}) == 1
    close(run, learner)


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.parametrize("victim", ["learner", "source"])
def test_a_kill_while_a_group_follows_costs_what_it_would_cost_without(tmp_path: Path, victim: str) -> None:
    options = {"frozen_mb": 8, "rate": 4e6, "digest_each_step": True}
    with running_job(tmp_path, pause_s=0.02, **options) as job:
        groups = [job.start(f"group_{i}")[0] for i in range(3)]
        for group in groups:
            group.wait_for_step(5)
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


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.parametrize("victim", ["nobody", "a source"])
def test_a_group_that_was_killed_replays_what_the_others_did_meanwhile_and_receives_nothing_at_the_join(
    tmp_path: Path, victim: str
) -> None:
    """AdamW trains all of it. The gradients of a step take 0.3 of a step to be served, by two sources together."""
    tau_s, gradient_bytes = 0.15, 4 * (64 * 256 + 256 + 256 * 64 + 64)
    served = gradient_bytes / (0.3 * tau_s) / 2
    options = {"pause_s": tau_s, "serve_bytes_per_s": served, "digest_each_step": True, "rate": 5e4}
    num_survivors = 2 if victim == "nobody" else 3
    with running_job(tmp_path, **options) as job:
        groups = [job.start(f"group_{i}")[0] for i in range(num_survivors + 1)]
        for group in groups:
            group.wait_for_step(2)
        groups.pop().kill()
        for group in groups:
            group.wait_for_step(group.steps()[-1]["step"] + 3)
        restarted_at, name = time.monotonic(), f"group_{num_survivors}"
        slow = job.control(name) / "slow"
        slow.write_text("2")
        learner = job.start(name, follow=True)[0]
        learner.wait_for_event("fetching")
        slow.unlink()
        if victim == "a source":
            groups[0].wait_for_step(groups[0].steps()[-1]["step"] + 3)
            groups.pop().signal(signal.SIGKILL)
        learner.wait_for(lambda e: e["event"] == "step" and e["committed"] and e["contributed"])
        discarded = [sum(not s["committed"] for s in group.steps(since=restarted_at)) for group in groups]
        reports = job.finish(5)
        assert max(discarded) <= (0 if victim == "nobody" else 1), discarded
        assert len({(report["step"], report["digest"]) for report in reports}) == 1, reports
        by_step: dict[int, set[str]] = {}
        for step in [step for rank in (*groups, learner) for step in rank.steps()]:
            if step["committed"] and (step["contributed"] or step["healed"]):
                by_step.setdefault(step["step"], set()).add(step["digest"])
        assert all(len(digests) == 1 for digests in by_step.values()), by_step
        first, *later = [e["received_bytes"] for e in learner.events if e["event"] == "fetched"]
        assert first > 2 * gradient_bytes and later == [0] * len(later) and later, (first, later)


class Averaged(Wide):
    """Keeps an average of its weights, beside the optimizer's hooks."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self.average = torch.zeros(512)
        super().__init__(*arguments, **options)

    def state(self) -> dict[str, Any]:
        return {**super().state(), "average": self.average}

    def load(self, state: dict[str, Any]) -> None:
        super().load(state)
        self.average.copy_(state["average"])

    def step(self) -> bool:
        counts = super().step()
        if counts:
            self.average.lerp_(self.model.wide[0].detach(), 0.5)  # type: ignore[index]
        return counts


@pytest.mark.slow
def test_what_a_replay_cannot_know_is_received_at_the_join_and_named(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    run = Paced(Averaged)
    transport = Gated()
    joined = Averaged(run.server, "c", seed=7, warm_up=False, follow=True, checkpoint_transport=transport)
    follow(run, joined, transport)
    assert joined.manager._replay.num_replayed >= 20
    replicas = [*run.at_work, joined]
    assert len({str(replica.all_bits()) for replica in replicas}) == 1  # type: ignore[attr-defined]
    assert len({replica.average.numpy().tobytes() for replica in replicas}) == 1  # type: ignore[attr-defined]
    assert 0 < transport.fetched[1].received_bytes < 10 * 4096
    assert any(
        "differ, of" in record.message and "user.default.average" in record.message for record in caplog.records
    ), caplog.text
    close(run, joined)


class Looped(Wide):
    """Two backward passes a step, clipping, a schedule, a gradient missing in every other step, an average kept by a hook."""

    optimizer_of = staticmethod(
        lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=True, amsgrad=True)
    )

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self.average = torch.zeros(512)
        super().__init__(*arguments, **options)
        self.sgd.register_step_post_hook(
            lambda *_: self.average.lerp_(self.model.get_parameter("wide")[0].detach(), 0.5)
        )
        self.schedule = self.manager.scheduler(torch.optim.lr_scheduler.ExponentialLR(self.sgd, 0.99))

    def state(self) -> dict[str, Any]:
        return {**super().state(), "average": self.average}

    def load(self, state: dict[str, Any]) -> None:
        super().load(state)
        self.average.copy_(state["average"])

    def all_bits(self) -> list[bytes]:
        return [*super().all_bits(), self.average.numpy().tobytes()]

    def step(self) -> bool:
        before = self.manager.statistics().num_committed
        self.optimizer.zero_grad()
        for value in (1.0, 2.0):
            self.model(torch.full((2, 8), value)).square().mean().backward()
        if self.manager.quorum_step() % 2:
            self.model.get_parameter("bias").grad = None
        for parameter in self.model.parameters():
            if parameter.grad is not None:
                self.manager.allreduce(parameter.grad).wait()
        nn.utils.clip_grad_norm_(self.model.parameters(), 0.1)
        self.optimizer.step()
        self.schedule.step()
        return self.manager.statistics().num_committed > before


@pytest.mark.slow
def test_what_a_loop_does_to_gradients_and_by_hooks_is_replayed_with_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Paced(Looped)
    transport = Gated()
    joined = Looped(run.server, "c", seed=7, warm_up=False, follow=True, checkpoint_transport=transport)
    follow(run, joined, transport)
    assert joined.manager._replay.num_replayed >= 20
    assert len({str(replica.all_bits()) for replica in (*run.at_work, joined)}) == 1  # type: ignore[attr-defined]
    assert [progress.received_bytes for progress in transport.fetched[1:]] == [0] * (len(transport.fetched) - 1)
    assert len(transport.fetched) > 1
    close(run, joined)


class Closing(Wide):
    """Steps with a closure, which nobody can replay."""

    def step(self) -> bool:
        self.optimizer.zero_grad()
        loss = self.model(torch.ones(2, 8)).square().mean()
        loss.backward()
        for parameter in self.model.parameters():
            assert parameter.grad is not None
            self.manager.allreduce(parameter.grad)
        counts = self.manager.should_commit()
        if counts:
            with self.manager.taking_step():
                self.sgd.step(lambda: loss.item())
        return counts


class Sparse(Wide):
    """Makes gradients sparse before the step."""

    def step(self) -> bool:
        before = self.manager.statistics().num_committed
        self.optimizer.zero_grad()
        self.model(torch.ones(2, 8)).square().mean().backward()
        for parameter in self.model.parameters():
            assert parameter.grad is not None
            self.manager.allreduce(parameter.grad).wait()
        for parameter in self.model.parameters():
            assert parameter.grad is not None
            parameter.grad = parameter.grad.to_sparse()
        self.optimizer.step()
        return self.manager.statistics().num_committed > before


def lbfgs(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=1, history_size=2)


def sparse_adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SparseAdam(model.parameters(), lr=1e-2)


@pytest.mark.slow
@pytest.mark.parametrize("case", ["LBFGS", "SparseAdam"])
def test_steps_that_cannot_be_replayed_are_refused_with_the_reason_and_the_group_joins_all_the_same(
    case: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    kind = Closing if case == "LBFGS" else Sparse
    monkeypatch.setattr(Wide, "optimizer_of", staticmethod(lbfgs if case == "LBFGS" else sparse_adam))
    run = Paced(kind)
    transport = Gated()
    joined = kind(run.server, "c", seed=7, warm_up=False, follow=True, checkpoint_transport=transport)
    follow(run, joined, transport)
    assert joined.manager._replay.num_replayed == 0
    assert len({str(replica.all_bits()) for replica in (*run.at_work, joined)}) == 1  # type: ignore[attr-defined]
    reason = "steps with a closure" if case == "LBFGS" else "is sparse"
    assert any("cannot replay" in record.message and reason in record.message for record in caplog.records), caplog.text
    close(run, joined)
