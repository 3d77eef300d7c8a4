"""A committed step that tells nothing new has a line now and then (TORCHFT_CKPT_LOG_EVERY_SEC); what is new has one always."""

from __future__ import annotations

import logging
import re
import time
from datetime import timedelta

import pytest
from support import answers

from torchft_ckpt.config import LOG_EVERY, parse_pause, resolve
from torchft_ckpt.core.coordination.messages import Answer, CommitVote, Outcome, StateVersion
from torchft_ckpt.core.coordination.replica import ReplicaSettings, ReplicaState
from torchft_ckpt.manager.outcomes import StepOutcomes


@pytest.mark.parametrize(
    ("log_every_s", "lines"),
    [(0.0, [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11]), (2.0, [1, 4, 5, 6, 7, 9, 11])],
    ids=["each", "2 s"],
)
def test_a_step_has_a_line_if_it_tells_something_new_or_the_last_line_is_old(
    log_every_s: float, lines: list[int], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    outcomes = StepOutcomes("g", min_replica_size=0, max_retries=None, log_every=timedelta(seconds=log_every_s))
    view = ReplicaState(ReplicaSettings(min_replica_size=1)).view()

    def step(number: int, at: float, outcome: Outcome = Outcome.COMMIT, *, quorum: int = 1) -> None:
        monkeypatch.setattr(time, "monotonic", lambda: 100.0 + at)
        vote = CommitVote(quorum_id=quorum, epoch="e", step=number, approve=True)
        outcomes.ended(vote, outcome, "", view._replace(quorum=answers.formed(1, StateVersion())), 0.1)

    with caplog.at_level(logging.INFO):
        step(1, 0.0)
        step(2, 0.5)
        step(3, 1.9)
        step(4, 2.0)  # the last line is two seconds old
        step(5, 2.1, Outcome.DISCARD)
        step(6, 2.15)  # it counts again
        step(7, 2.2, quorum=2)
        step(8, 2.3, quorum=2)
        step(9, 4.4, quorum=2)
        step(10, 4.5, quorum=2)
        step(11, 4.6, quorum=3)
    found = [re.match(r"step=(\d+) ", record.getMessage()) for record in caplog.records]
    assert [int(match[1]) for match in found if match] == lines


def test_a_long_reason_is_folded(caplog: pytest.LogCaptureFixture) -> None:
    outcomes = StepOutcomes("g", min_replica_size=0, max_retries=None)
    view = ReplicaState(ReplicaSettings(min_replica_size=1)).view()
    vote = CommitVote(quorum_id=1, epoch="e", step=7, approve=True)
    reset = "the connection to group-2-of-rack-17:01234567 was reset; "
    why = "group_1:0123abcd: CollectiveFailedError: " + reset * 8 + "x" * 220
    with caplog.at_level(logging.INFO):
        outcomes.ended(vote, Outcome.DISCARD, why, view._replace(quorum=answers.formed(1, StateVersion())), 0.1)
    first, *others = caplog.records[0].getMessage().splitlines()
    assert first.startswith(
        "step=7 quorum=1 participants=0/2 verdict=discard heal=no took=0.100s reason='group_1:0123abcd"
    )
    assert len(others) == 4 and all(line.startswith("    ") for line in others)
    assert max(map(len, [first, *others[:-1]])) <= 200, "only a word that is longer makes a longer line"
    assert " ".join([first, *map(str.strip, others)]).endswith(f"reason={why!r}")


@pytest.mark.parametrize(
    ("answer", "heals"),
    [
        (answers.formed(1, StateVersion()), "no"),
        (answers.alone(1, StateVersion()), "yes"),  # it gets the newest state at the end
        (answers.given(1, StateVersion()), "yes"),
        (answers.alone(1, StateVersion(), leaving=True), "no"),
    ],
)
def test_a_line_says_whether_the_group_is_behind_and_receives_a_state(
    answer: Answer, heals: str, caplog: pytest.LogCaptureFixture
) -> None:
    outcomes = StepOutcomes("g", min_replica_size=0, max_retries=None)
    view = ReplicaState(ReplicaSettings(min_replica_size=1)).view()._replace(quorum=answer)
    with caplog.at_level(logging.INFO):
        outcomes.ended(CommitVote(quorum_id=1, epoch="e", step=7, approve=False), Outcome.DISCARD, "why", view, 0.1)
    assert f" verdict=discard heal={heals} " in caplog.text


@pytest.mark.parametrize(("text", "seconds"), [("0", 0.0), ("0.0", 0.0), ("0.5", 0.5), ("", 2.0)])
def test_the_pause_may_be_none(text: str, seconds: float) -> None:
    pause = resolve(None, LOG_EVERY, timedelta(seconds=2), parse_pause, {LOG_EVERY[0]: text})
    assert pause == timedelta(seconds=seconds)
