"""The outer loop's benchmark: its arithmetic, on made-up steps, and what it says where links cannot be had."""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))
sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

from bench import command, diloco_bytes, diloco_figures, diloco_jobs, diloco_main, diloco_sync
from bench.diloco_figures import InnerStep, Kind
from bench.run import Run
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


@pytest.mark.parametrize(("value", "expected"), [(1.02, "+2.0%"), (0.99, "-1.0%")])
def test_how_far_a_loss_lies_above_another_is_written_with_its_sign(value: float, expected: str) -> None:
    assert diloco_figures.percent(diloco_figures.excess(value, 1.0)) == expected


def test_options_become_the_command_line_that_the_example_reads() -> None:
    arguments = diloco_jobs.arguments_of(groups=3, sync_every=12, quantize=True, no_ddp=False, kills=0)

    assert arguments == ["--groups=3", "--sync-every=12", "--quantize", "--kills=0"]
    assert diloco_jobs.options_of(arguments).period == 6


def test_the_steps_of_a_job_are_taken_from_its_groups_records() -> None:
    step = Step(
        at_s=2.0, took_s=0.5, round=3, num_counted=60, participants=2, contributed=True, loss=1.0, sent_bytes=700
    )
    record = JobRecord(name="x", num_groups=2, started_s=0.0, records=[[step], []])

    assert diloco_jobs.inner_steps(record) == [[InnerStep(took_s=0.5, round=3, sent_bytes=700)], []]


def test_names_of_figures_are_read_with_commas() -> None:
    assert command.parse_names("bytes, loss", diloco_main.FIGURES) == ["bytes", "loss"]


@pytest.mark.parametrize("text", ["", "bytes,last"])
def test_a_name_that_is_no_figure_is_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="is no figure"):
        command.parse_names(text, diloco_main.FIGURES)


@pytest.mark.parametrize("figure", [diloco_bytes, diloco_sync])
def test_where_there_are_no_links_the_figure_is_skipped_with_its_reason(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, figure: object
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    run = Run(quick=True, repeat=None, seed=1, log_dir=tmp_path, say=lambda _: None)

    section = figure.measure(run)  # type: ignore[attr-defined]

    assert (section.rows[0].ours, section.notes) == ("SKIPPED", ["SKIPPED: network namespaces need root"])


def test_what_was_measured_can_be_written_as_json() -> None:
    assert json.loads(json.dumps({kind.value: [1.0] for kind in Kind})) == {
        "plain": [1.0],
        "prepare": [1.0],
        "beside": [1.0],
        "sync": [1.0],
    }
