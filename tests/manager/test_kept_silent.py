"""A group that would speak for its job, and is kept silent on another one's account, says so after a while."""

from __future__ import annotations

import logging
import time

import pytest

from torchft_ckpt.core.coordination.messages import CommitVote, Outcome
from torchft_ckpt.core.coordination.replica import ReplicaSettings, ReplicaState
from torchft_ckpt.manager.outcomes import StepOutcomes


def test_it_says_on_whose_account_after_ten_seconds_and_then_each_minute(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    outcomes = StepOutcomes("group_1", min_replica_size=0, max_retries=None)
    vote = CommitVote(quorum_id=1, epoch="e", step=1, approve=True)
    view = ReplicaState(ReplicaSettings(min_replica_size=1)).view()

    def step(at: float, silent_for: str = "group_0:1") -> int:
        """Return how many warnings there were by the end of a step at that moment."""
        monkeypatch.setattr(time, "monotonic", lambda: at)
        outcomes.ended(vote, Outcome.COMMIT, "", view._replace(silent_for=silent_for), 0.1)
        return sum("group_0:1 did so last" in record.message for record in caplog.records)

    with caplog.at_level(logging.WARNING):
        assert [step(at) for at in (0.0, 9.0, 10.0, 69.0, 70.0)] == [0, 0, 1, 1, 2]
        assert "group_1 has not spoken for the job for 10 s" in caplog.text
        assert step(80.0, silent_for="") == step(100.0) == step(109.0) == 2
