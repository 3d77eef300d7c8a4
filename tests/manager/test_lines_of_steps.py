"""With TORCHFT_CKPT_LOG_EVERY_SEC a committed step that tells nothing new has a line now and then; what is new has one always."""

from __future__ import annotations

import logging
import time
from datetime import timedelta
from types import SimpleNamespace

import pytest

from torchft_ckpt.core.coordination.messages import CommitVote, Outcome
from torchft_ckpt.core.coordination.replica import ReplicaSettings, ReplicaState
from torchft_ckpt.manager.outcomes import StepOutcomes


@pytest.mark.parametrize(
    ("log_every_s", "lines"),
    [(0.0, [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]), (2.0, [1, 4, 5, 6, 7, 8, 10])],
    ids=["not set", "2 s"],
)
def test_a_step_has_a_line_if_it_tells_something_new_or_the_last_line_is_old(
    log_every_s: float, lines: list[int], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    outcomes = StepOutcomes("g", min_replica_size=0, max_retries=None, log_every=timedelta(seconds=log_every_s))
    view = ReplicaState(ReplicaSettings(min_replica_size=1)).view()

    def step(number: int, at: float, outcome: Outcome = Outcome.COMMIT, *, quorum: int = 1, sources: int = 0) -> None:
        monkeypatch.setattr(time, "monotonic", lambda: 100.0 + at)
        formed = SimpleNamespace(replica_world_size=2, sources=["a"] * sources)
        vote = CommitVote(quorum_id=quorum, epoch="e", step=number, approve=True)
        outcomes.ended(vote, outcome, "", view._replace(quorum=formed), 0.1)

    with caplog.at_level(logging.INFO):
        step(1, 0.0)
        step(2, 0.5)
        step(3, 1.9)
        step(4, 2.0)  # the last line is two seconds old
        step(5, 2.1, Outcome.DISCARD)
        step(6, 2.2, quorum=2)
        step(7, 2.3, quorum=2, sources=1)
        step(8, 4.4, quorum=2)
        step(9, 4.5, quorum=2)
        step(10, 4.6, quorum=3)
    assert [record.args[0] for record in caplog.records if "step=%d" in record.msg] == lines
