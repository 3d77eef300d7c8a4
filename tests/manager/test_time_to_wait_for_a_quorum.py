"""A group waits for a quorum for `quorum_timeout` and its retries, and while others come in that time stands still."""

from __future__ import annotations

from datetime import timedelta
from types import SimpleNamespace

import pytest
from support import answers
from test_replica_view import client

from torchft_ckpt.core.coordination.messages import QuorumFormed, QuorumPending, StateVersion
from torchft_ckpt.core.coordination.replica import StepFacts, StepPlan, StepWishes
from torchft_ckpt.errors import QuorumTimeoutError
from torchft_ckpt.manager import step_client

FORMED = answers.formed(
    1,
    StateVersion(step=0, quorum_id=1, epoch="life"),
    quorum_id=1,
    epoch="life",
    replica_world_size=1,
    num_contributors=1,
    num_voters=1,
    names_state=True,
)


def waits(monkeypatch: pytest.MonkeyPatch, heard: dict[float, QuorumPending | QuorumFormed]) -> StepPlan:
    """Wait for a quorum at most twice for five seconds, and hear what is heard after so many seconds."""
    one, now, coming = client(), 100.0, sorted(heard)
    monkeypatch.setattr(
        one, "link", SimpleNamespace(waiting_for=lambda: "the lighthouse", is_lighthouse_away=False), raising=False
    )
    monkeypatch.setattr(step_client, "time", SimpleNamespace(monotonic=lambda: now))

    def wait(seconds: float) -> None:
        nonlocal now
        if not coming or 100.0 + coming[0] > now + seconds:
            now += seconds
            return
        after_s = coming.pop(0)
        now = 100.0 + after_s
        one._lock.release()
        one._hear(heard[after_s])
        one._lock.acquire()

    monkeypatch.setattr(one._changed, "wait", wait)
    assert one.begin(StepWishes(), StepFacts()).request_id == FORMED.request_id
    return one.await_plan(timedelta(seconds=5), 1)


def pending(held_s: float = 0.0) -> QuorumPending:
    return QuorumPending(reason="held" if held_s else "too few", waited_s=1.0, held_s=held_s)


def test_a_group_gives_up_when_its_attempts_are_over(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        QuorumTimeoutError, match=r"within 10\.0 s \(too few\); quorum_timeout is 5 s, quorum_retries 1"
    ):
        waits(monkeypatch, {1.0: pending(), 10.1: FORMED})


def test_the_time_for_which_a_quorum_is_held_for_others_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = waits(monkeypatch, {4.0: pending(10.0), 9.0: pending(10.0), 17.0: pending(), 22.9: FORMED})
    assert plan.formed is FORMED
    with pytest.raises(
        QuorumTimeoutError, match=r"within 10\.0 s, besides 13\.0 s for which it was held for others, \(too few\)"
    ):
        waits(monkeypatch, {4.0: pending(10.0), 9.0: pending(10.0), 17.0: pending(), 23.1: FORMED})


def test_a_lighthouse_that_is_lost_while_it_holds_a_quorum_is_not_waited_for_without_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(QuorumTimeoutError, match=r"besides 10\.0 s"):
        waits(monkeypatch, {4.0: pending(10.0), 20.1: FORMED})
