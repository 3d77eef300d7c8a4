"""When a run of discarded steps is worth a warning, and what the warning says."""

from __future__ import annotations

import itertools

import pytest

from torchft_ckpt.core.training.discards import DiscardRun, pauses_s

SLOW = "a:1: CollectiveFailedError: gloo: a collective failed (timed out); b:1 had not come to a collective"


def said(run: DiscardRun, *reasons: str) -> list[str | None]:
    return [run.discarded(reason) for reason in reasons]


def test_three_in_a_row_for_one_cause_are_said_once_with_group_and_setting() -> None:
    run = DiscardRun()
    assert said(run, SLOW, SLOW) == [None, None]
    warning = run.discarded(SLOW)
    assert warning is not None
    assert warning.startswith(f"3 steps in a row did not count here for one cause: {SLOW}. ")
    assert "TORCHFT_TIMEOUT_SEC" in warning
    assert said(run, SLOW, SLOW, SLOW, SLOW) == [None] * 4


def test_a_step_that_counts_ends_the_run() -> None:
    run = DiscardRun()
    for _ in range(5):
        assert said(run, SLOW, SLOW) == [None, None]
        run.committed()
    assert said(run, SLOW, SLOW)[-1] is None
    assert run.discarded(SLOW) is not None
    run.committed()
    assert said(run, SLOW, SLOW) == [None, None]
    assert run.discarded(SLOW) is not None


def test_several_causes_in_turn_are_none() -> None:
    run = DiscardRun()
    assert said(run, *[SLOW, "c:1 gave step 7 up"] * 5) == [None] * 10


def test_a_cause_nobody_knows_a_setting_for_is_that_of_one_group_however_often_that_was_started() -> None:
    lives = (f"group_1:{n}0d51ac9-7e3c-4d8e-a1f0-0123456789ab: ValueError: batch {n} of 1.{n} s" for n in range(3))
    run = DiscardRun()
    warning = said(run, *lives)[-1]
    assert warning is not None and warning.endswith("ValueError: batch 2 of 1.2 s")
    run.committed()
    assert said(run, *(f"group_{n}: ValueError: why" for n in range(5))) == [None] * 5


@pytest.mark.parametrize(
    ("reason", "setting"),
    [
        ("a:1: ProcessGroupConfigureError: rank 2 never came to the store", "TORCHFT_CKPT_HOSTNAME"),
        ("the decision is not known", "TORCHFT_TIMEOUT_SEC"),
        ("c:1: nothing heard from it for 5.0 s", "--heartbeat-timeout-ms"),
        (
            "a:1 waits in collective 2 of the step (sum), and b:1 has ended the step: the loops of the groups differ",
            "docs/",
        ),
        ("c:1 gave step 7 up", "docs/"),
    ],
)
def test_what_would_help_is_named(reason: str, setting: str) -> None:
    warning = said(DiscardRun(), *[reason] * 3)[-1]
    assert warning is not None and setting in warning and reason in warning


def test_a_discarded_step_is_tried_again_at_once_and_then_after_longer_and_longer_pauses() -> None:
    assert list(itertools.islice(pauses_s(), 7)) == [0.0, 0.05, 0.1, 0.2, 0.4, 0.5, 0.5]
