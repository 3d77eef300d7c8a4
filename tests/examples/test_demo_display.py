"""Live progress, drawn into memory."""

from __future__ import annotations

import io

from demo import events
from demo.display import Display, describe, progress
from demo.timeline import Life, Timeline
from rich.console import Console


def step_ended(step: int, at_s: float, *, committed: bool = True) -> events.StepEnded:
    return events.StepEnded(
        at_s=at_s,
        started_s=at_s - 0.5,
        step=step,
        committed=committed,
        contributed=True,
        participants=3,
        quorum_id=7,
        loss=1.25,
    )


def make_timeline() -> Timeline:
    life = Life(group=0, number=1, spawned_s=0.0, imported_s=1.0)
    for committed in (True, False):
        life.record(step_ended(42, 2.0, committed=committed))
    return Timeline(num_groups=2, started_s=0.0, lives=[life])


def test_without_a_terminal_progress_is_plain_lines() -> None:
    text = io.StringIO()
    with Display(Console(file=text, width=120), num_steps=100) as display:
        display.note(make_timeline(), "SIGKILL to group_1")
        display.refresh(make_timeline())
        display.refresh(make_timeline())  # too early for another line

    lines = [line.split(" s  ", 1)[1].strip() for line in text.getvalue().splitlines()]
    assert lines == ["SIGKILL to group_1", "step 42 of 100   group_0 training loss=1.250"]


def test_progress_says_how_long_it_may_still_take() -> None:
    timeline = Timeline(num_groups=2, started_s=0.0)
    assert progress(timeline, 100) == "starting torch"
    life = Life(group=0, number=1, spawned_s=0.0)
    timeline.lives.append(life)
    assert (progress(timeline, 100), describe(life)) == ("starting torch", "group_0 starting torch")
    life.imported_s = 20.0
    assert progress(timeline, 100) == "making the first step"
    for step, at_s in ((1, 30.0), (2, 30.5), (21, 40.0)):
        life.record(step_ended(step, at_s))
    assert progress(timeline, 100) == "step 21 of 100, 40 s left"
    life.record(step_ended(103, 90.0))
    assert progress(timeline, 100) == "step 103 of 100, ending"


def test_on_a_terminal_a_table_shows_each_group_and_the_latest_notes_below_it() -> None:
    text = io.StringIO()
    console = Console(file=text, width=100, height=30, force_terminal=True, color_system=None)
    with Display(console, num_steps=100) as display:
        display.note(make_timeline(), "SIGKILL to group_1")
        display.refresh(make_timeline())
        frame = text.getvalue()

    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in frame.splitlines() if "│ group_" in line]
    assert rows == [["group_0", "2", "training", "42", "1.250", "7", "3", "1"]]
    assert "step 42 of 100, 0 kills" in frame
    assert any(line.strip().endswith("s  SIGKILL to group_1") and "step" not in line for line in frame.splitlines())
