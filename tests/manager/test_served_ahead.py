"""What is served before the quorum of a step that follows a join: to whom, how long, and at what cost."""

from __future__ import annotations

import http.client
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
from support.late import AsksLate
from support.waiting import wait_until
from test_contributes_once_known_equal import Loop
from test_learners import Frozen, Gated, Paced, close, follow
from test_learners import _far_from_here as _far_from_here
from test_manager_in_process import together
from torch import nn

from torchft_ckpt import HTTPTransport, LighthouseServer
from torchft_ckpt.core.coordination import joining
from torchft_ckpt.errors import SourceLostError
from torchft_ckpt.manager.serving import StateServing

pytestmark = pytest.mark.slow


@pytest.fixture
def lighthouse() -> Iterator[LighthouseServer]:
    server = LighthouseServer("127.0.0.1:0", min_replicas=1, heartbeat_timeout_ms=5000)
    yield server
    server.shutdown()


class Attempts(Loop):
    """Counts its attempts at steps in what it registers, as a loop does that counts batches."""

    fails = False
    before_failing: Callable[[], object] = staticmethod(lambda: None)

    def first_extra(self) -> dict[str, Any]:
        return {"attempts": 0}

    def between_backward_and_step(self) -> None:
        self.extra = {"attempts": self.extra["attempts"] + 1}
        if self.fails:
            self.fails = False
            self.before_failing()
            self.manager.report_error(RuntimeError("a batch went wrong"))

    def own(self) -> object:
        return self.extra


class Norm(Attempts):
    """Has statistics that a forward pass changes, also that of a step which is discarded."""

    def build(self) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
        return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def own(self) -> object:
        return int(self.model.get_buffer("1.num_batches_tracked"))


class FailsEarly(Attempts):
    """Fails before its collectives, so that its vote against the step comes while others receive its state."""

    def scaled(self, loss: torch.Tensor) -> torch.Tensor:
        if self.fails:
            self.fails = False
            self.manager.report_error(RuntimeError("a batch went wrong"))
        return loss


class Skips(Attempts):
    """Leaves a step without a vote where its batch is bad, as scripts do that `continue` at a gradient that is no number."""

    skips = False

    def between_backward_and_step(self) -> None:
        super().between_backward_and_step()
        if self.skips:
            raise SkippedError


class SkippedError(Exception):
    pass


class ReceivesSlowly(HTTPTransport[Any]):
    """Its first three receives take longer than a group waits before it asks: the join, and two comparisons."""

    num_received = 0

    def fetch_checkpoint(self, *arguments: Any, **how: Any) -> Any:
        self.num_received += 1
        is_slow = self.num_received <= 3
        state = super().fetch_checkpoint(*arguments, **how)
        time.sleep(0.6 if is_slow else 0.0)
        return state


class NeverComes(HTTPTransport[Any]):
    """Of a group that is told to come for a state, and dies before it does."""

    def fetch_checkpoint(self, *arguments: Any, **how: Any) -> Any:
        raise SourceLostError("it is dead", party="test")


class RetiresAsBefore(HTTPTransport[Any]):
    """A user's, made for a version in which the method had no argument."""

    def retire_checkpoint(self) -> None:  # type: ignore[override]
        super().retire_checkpoint()


def look_at(replica: Attempts) -> None:
    """Somebody from outside begins to receive the state, and is slow from then on."""
    port = int(replica.manager._steps._transport.metadata().rsplit(":", 1)[1])
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    path = f"/v1/checkpoint/{replica.manager.current_step()}/manifest?wait_s=10"  # one that serves late, too
    connection.request("GET", path, headers={"X-Ckpt-Receiver": "onlooker"})
    assert connection.getresponse().status == 200


def serves_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let sources serve as they do where thousands of tensors are described: who receives asks before."""
    serve = StateServing.serve

    def serve_late(self: StateServing, *arguments: Any) -> None:
        time.sleep(0.05)
        serve(self, *arguments)

    monkeypatch.setattr(StateServing, "serve", serve_late)


def join(
    lighthouse: LighthouseServer,
    joiner: Attempts,
    *others: Attempts,
    step: Callable[[Attempts], object] = Attempts.step,
) -> None:
    """Let one come into the next step of the others."""

    def await_joiner_and_step(replica: Attempts) -> None:
        waiting = lighthouse._jobs.states["default"]._job.waiting
        if replica is not joiner:
            wait_until(lambda: joiner.manager._client.replica_id in waiting, "the joiner asks", 20)
        step(replica)

    together([*others, joiner], await_joiner_and_step)


@pytest.mark.parametrize(
    ("use_async_quorum", "transport", "is_looked_at"),
    [(False, HTTPTransport, False), (False, HTTPTransport, True), (True, NeverComes, False)],
    ids=["received", "looked at", "never asked for"],
)
def test_who_joins_after_a_step_that_all_left_without_a_vote_gets_the_state_of_now(
    lighthouse: LighthouseServer,
    monkeypatch: pytest.MonkeyPatch,
    use_async_quorum: bool,
    transport: type[HTTPTransport[Any]],
    is_looked_at: bool,
) -> None:
    """The state of that step was served to another one, and is still there: nothing has changed the parameters since."""
    serves_late(monkeypatch)
    how: dict[str, Any] = {"warm_up": False, "use_async_quorum": use_async_quorum}
    own = RetiresAsBefore(timeout=timedelta(seconds=20), hostname="127.0.0.1")
    a, b = Skips(lighthouse, "a", **how), Skips(lighthouse, "b", checkpoint_transport=own, **how)
    together([a, b], lambda replica: [replica.step() for _ in range(3)])
    told = transport(timeout=timedelta(seconds=20), hostname="127.0.0.1")
    c = Skips(lighthouse, "c", seed=1, checkpoint_transport=told, **how)
    for replica in (a, b, c):
        replica.skips = True

    def skip(replica: Attempts) -> None:
        with pytest.raises(SkippedError):
            replica.step()

    join(lighthouse, c, a, b, step=skip)
    if is_looked_at:
        look_at(a)
        look_at(b)
    a.skips = b.skips = False
    c.manager.shutdown()
    d = Skips(lighthouse, "d", seed=2, **how)
    join(lighthouse, d, a, b)
    together([a, b, d], lambda replica: [replica.step() for _ in range(2)])
    assert len({str(replica.own()) for replica in (a, b, d)}) == 1, [replica.own() for replica in (a, b, d)]
    for replica in (a, b, d):
        replica.manager.shutdown()


@pytest.mark.parametrize("is_looked_at", [False, True])
@pytest.mark.parametrize("kind", [Attempts, Norm])
def test_who_joins_after_a_discarded_step_gets_the_state_of_now(
    lighthouse: LighthouseServer, monkeypatch: pytest.MonkeyPatch, kind: type[Attempts], is_looked_at: bool
) -> None:
    """The step after a join is discarded, so the state has the same name when another group joins."""
    serves_late(monkeypatch)
    a, b = kind(lighthouse, "a", warm_up=False), kind(lighthouse, "b", warm_up=False)
    together([a, b], lambda replica: [replica.step() for _ in range(3)])
    c = kind(lighthouse, "c", seed=1, warm_up=False)
    join(lighthouse, c, a, b)
    a.fails = True
    if is_looked_at:
        a.before_failing = lambda: [look_at(replica) for replica in (a, b)]
    together([a, b, c], lambda replica: replica.step())
    assert [replica.manager.statistics().num_discarded for replica in (a, b)] == [1, 1]
    c.manager.shutdown()
    d = kind(lighthouse, "d", seed=2, warm_up=False)
    join(lighthouse, d, a, b)
    together([a, b, d], lambda replica: [replica.step() for _ in range(3)])
    assert len({str(replica.own()) for replica in (a, b, d)}) == 1, [replica.own() for replica in (a, b, d)]
    assert all(replica.manager.is_participating() for replica in (a, b, d))
    for replica in (a, b, d):
        replica.manager.shutdown()


def test_who_compares_again_after_a_discarded_step_compares_with_the_state_of_now(
    lighthouse: LighthouseServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has received the state of that name before, and its sources know it."""
    a, b = Attempts(lighthouse, "a", warm_up=False), Attempts(lighthouse, "b", warm_up=False)
    together([a, b], lambda replica: [replica.step() for _ in range(3)])
    transport = ReceivesSlowly(timeout=timedelta(seconds=20), hostname="127.0.0.1")
    c = Attempts(lighthouse, "c", seed=1, warm_up=False, checkpoint_transport=transport)
    join(lighthouse, c, a, b)
    a.fails = True
    together([a, b, c], lambda replica: replica.step())
    assert [replica.manager.statistics().num_discarded for replica in (a, b)] == [1, 1]
    serves_late(monkeypatch)
    join(lighthouse, c, a, b)
    together([a, b, c], lambda replica: [replica.step() for _ in range(2)])
    assert len({str(replica.own()) for replica in (a, b, c)}) == 1, [replica.own() for replica in (a, b, c)]
    assert all(replica.manager.is_participating() for replica in (a, b, c))
    for replica in (a, b, c):
        replica.manager.shutdown()


@pytest.mark.parametrize("use_async_quorum", [True, False])
def test_a_group_that_asks_late_and_a_source_that_tries_a_step_again_do_not_wait_for_each_other(
    monkeypatch: pytest.MonkeyPatch, use_async_quorum: bool
) -> None:
    """The source serves the state in its next quorum alone, which has to wait for the group."""
    monkeypatch.setattr(joining, "STANDSTILL_S", 0.2)
    lighthouse = LighthouseServer("127.0.0.1:0", min_replicas=2, heartbeat_timeout_ms=5000)
    source = FailsEarly(lighthouse, "a_source", warm_up=False)  # the first by its name
    source.fails = True
    late = FailsEarly(
        lighthouse,
        "late",
        seed=1,
        warm_up=False,
        checkpoint_transport=AsksLate(lighthouse, "a_source"),
        use_async_quorum=use_async_quorum,
        transfer_timeout=timedelta(seconds=60),
    )

    def train(replica: Attempts) -> None:
        until = time.monotonic() + 20
        while replica.manager.current_step() < 3 and time.monotonic() < until:
            replica.step()

    together([source, late], train)
    assert [replica.manager.current_step() for replica in (source, late)] == [3, 3]
    assert source.bits() == late.bits()
    for replica in (source, late):
        replica.manager.shutdown()
    lighthouse.shutdown()


def test_of_a_state_that_a_learner_receives_one_copy_is_made() -> None:
    """The next step also begins after one whose state was served, and nobody comes for its state."""
    run = Paced(Frozen)
    transport = Gated()
    learner = Frozen(run.server, "c", seed=7, warm_up=False, follow=True, checkpoint_transport=transport)

    def check() -> None:
        formed = learner.manager.view().quorum
        assert formed is not None
        sources = {source.replica_id for source in formed.sources}
        for replica in run.at_work:
            kept = replica.transport._snapshots.open_snapshots()  # type: ignore[attr-defined]
            is_source = replica.manager._client.replica_id in sources  # not where it has just joined itself
            assert [snapshot.outlives_step for snapshot in kept] == [True] * is_source

    follow(run, learner, transport, check)
    close(run, learner)  # type: ignore[arg-type]
