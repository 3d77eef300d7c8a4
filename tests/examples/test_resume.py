"""examples/resume.py: every process of a job is killed; started again, it goes on as if nothing had been."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import resume
from support.nursery import FORKING

REPO = Path(__file__).resolve().parents[2]
SCRIPT = REPO / "examples" / "resume.py"
NUM_STEPS, SAVE_EVERY, KILL_AT = 32, 8, 17


def diary(path: Path, event: str) -> list[dict[str, object]]:
    return [entry for entry in map(json.loads, path.read_text().splitlines()) if entry["event"] == event]


def losses(path: Path) -> dict[object, object]:
    return {entry["step"]: entry["loss"] for entry in diary(path, "step")}


@pytest.mark.processes
@pytest.mark.slow
def test_a_job_that_was_killed_as_a_whole_goes_on_bit_for_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The script tells the story in this process; its groups and lighthouses are processes of their own."""
    folder = tmp_path / "story"
    options = [f"--steps={NUM_STEPS}", f"--save-every={SAVE_EVERY}", f"--kill-at={KILL_AT}", "--pace=0.1", "--groups=2"]
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), "--demo", f"--folder={folder}", *options])
    monkeypatch.setattr(resume, "subprocess", FORKING)

    assert resume.main() == 0
    # Its own word is not taken for it.
    before, after, never = (folder / name for name in ("first_life", "second_life", "never_killed"))
    for group in ("group_0.jsonl", "group_1.jsonl"):
        (restored,) = diary(after / group, "restored")
        assert (restored["source"], restored["has_own"]) == ("storage", True)
        saved = restored["step"]
        assert isinstance(saved, int) and saved % SAVE_EVERY == 0 and saved > KILL_AT - SAVE_EVERY
        assert not diary(before / group, "finished")
        assert set(losses(before / group)) >= {*range(1, KILL_AT + 1)}
        assert losses(after / group) == {
            step: loss for step, loss in losses(never / group).items() if isinstance(step, int) and step > saved
        }
    ends = {
        (entry["step"], entry["digest"])
        for life in (after, never)
        for group in ("group_0.jsonl", "group_1.jsonl")
        for entry in diary(life / group, "finished")
    }
    assert len(ends) == 1 and {step for step, _ in ends} == {NUM_STEPS}
