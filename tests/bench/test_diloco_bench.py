"""The outer loop's benchmark: its arithmetic, on made-up steps, and what it says where links cannot be had."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))
sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

from bench import diloco_figures, diloco_jobs
from bench.diloco_figures import InnerStep, Kind
from diloco.job import JobRecord
from diloco.records import Step


def rounds_of(*lengths: int, sent_a_round: int = 100) -> list[InnerStep]:
    """Return the steps of rounds of so many inner steps; each takes its position in its round, in seconds."""
    return [
        InnerStep(
            took_s=float(position),
            round=number + (position == length),
            sent_bytes=sent_a_round * (number + (position == length)),
        )
        for number, length in enumerate(lengths)
        for position in range(1, length + 1)
    ]


def test_a_round_is_plain_steps_one_that_prepares_some_beside_the_transfer_and_one_that_ends_it() -> None:
    kinds = [diloco_figures.kind_of(position, 6, 3) for position in range(1, 7)]

    assert kinds == [Kind.PLAIN, Kind.PLAIN, Kind.PREPARE, Kind.BESIDE, Kind.BESIDE, Kind.SYNC]


def test_without_a_delay_a_transfer_begins_and_ends_in_the_sync_step() -> None:
    assert [diloco_figures.kind_of(position, 3, 0) for position in (1, 2, 3)] == [Kind.PLAIN, Kind.PLAIN, Kind.SYNC]


def test_durations_are_sorted_by_what_their_steps_do_from_a_round_on() -> None:
    durations = diloco_figures.by_kind(rounds_of(4, 4, 4), period=4, delay=1, skip_rounds=1)

    assert durations == {Kind.PLAIN: [1, 2, 1, 2], Kind.PREPARE: [3, 3], Kind.BESIDE: [], Kind.SYNC: [4, 4]}


def test_a_round_of_another_length_is_no_figure() -> None:
    """One was tried again, or a group came in the middle; the steps after the last round are no round."""
    steps = [*rounds_of(4, 7, 4), InnerStep(took_s=99.0, round=3, sent_bytes=0)]

    durations = diloco_figures.by_kind(steps, period=4, delay=1, skip_rounds=0)

    assert durations[Kind.SYNC] == [4, 4] and 99.0 not in durations[Kind.PLAIN]


def test_bytes_are_counted_from_the_end_of_one_round_to_the_end_of_another() -> None:
    steps = rounds_of(5, 5, 5, 5, sent_a_round=100)

    assert diloco_figures.bytes_a_step(steps, first_round=1, last_round=3, steps_a_round=5) == 20.0


@pytest.mark.parametrize(("first", "last"), [(1, 9), (9, 10)])
def test_a_group_that_was_not_there_for_both_rounds_has_no_figure(first: int, last: int) -> None:
    assert diloco_figures.bytes_a_step(rounds_of(5, 5), first_round=first, last_round=last, steps_a_round=5) is None


def test_a_kind_is_put_over_plain_steps_by_their_medians() -> None:
    durations = {Kind.PLAIN: [1.0, 2.0, 9.0], Kind.SYNC: [3.0], Kind.BESIDE: []}

    figures = [diloco_figures.over_plain(durations, kind) for kind in (Kind.SYNC, Kind.BESIDE)]

    assert figures == [1.5, None]


def test_groups_are_put_together() -> None:
    together = diloco_figures.joined([{Kind.SYNC: [1.0]}, {Kind.SYNC: [2.0], Kind.PLAIN: [3.0]}])

    assert (together[Kind.SYNC], together[Kind.PLAIN], together[Kind.PREPARE]) == ([1.0, 2.0], [3.0], [])


def test_the_steps_of_a_job_are_taken_from_its_groups_records() -> None:
    step = Step(
        at_s=2.0, took_s=0.5, round=3, num_counted=60, participants=2, contributed=True, loss=1.0, sent_bytes=700
    )
    record = JobRecord(name="x", num_groups=2, started_s=0.0, records=[[step], []])

    assert diloco_jobs.inner_steps(record) == [[InnerStep(took_s=0.5, round=3, sent_bytes=700)], []]
