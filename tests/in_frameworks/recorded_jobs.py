"""Two replica groups of a script that a page shows, one of which is killed and comes back; and what they were trained on.

    lines = run_with_a_kill(tmp_path, REPO / "examples" / "train_timm.py", "--steps=40", num_steps=40)

What each step left is compared between the groups there. A test compares it with a plain loop over the same samples.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, NamedTuple

from framework_jobs import FrameworkJob, Group

RUNNER = Path(__file__).with_name("recorded.py")


class Step(NamedTuple):
    """A step of the job that counted."""

    number: int
    read: dict[int, list[int]]
    """The numbers of the samples, by group, of each that contributed."""
    values: dict[str, str]
    """A digest of each registered value as the step had left it, the same in all groups."""


def run_with_a_kill(
    folder: Path,
    script: Path,
    *arguments: str,
    num_steps: int,
    begins_at: int = 0,
    runner: Path = RUNNER,
) -> list[Step]:
    """Kill group 1 in the middle of a step, when a third of the steps is made, and start it again when half of them is.

    Args:
        begins_at: the step of the checkpoint from which both go on, as `arguments` say.

    Returns:
        the steps of the job, after that one and up to `num_steps`, in which each group's values were equal to the other's.
    """
    record, is_there, is_back = folder / "record", folder / "is_there", folder / "is_back"
    record.mkdir(parents=True)
    middle, third = (begins_at + num_steps) // 2, (num_steps - begins_at) // 3
    environment = {
        "RECORD": str(record),
        "GATES": f"{begins_at + 2}:{is_there} {middle}:{is_back}",
        "HELD": f"1:{begins_at + third}",
    }
    with FrameworkJob(folder, runner, str(script), *arguments, environment=environment) as job:
        survivor, killed = job.start(0), job.start(1)
        job.wait_until_met(survivor, killed)
        is_there.touch()
        killed.wait_for("HELD")
        killed.kill()
        survivor.wait_for_step(middle, participants=1)
        again = job.start(1)
        job.wait_until_asks(again)
        is_back.touch()
        for group in (survivor, again):
            code = group.process.wait(timeout=240)
            assert code == 0, f"{group.log_path.name} ended with {code}"
    steps = _steps_of(record, range(begins_at + 1, num_steps + 1))
    num_with_two = [len(step.read) for step in steps].count(2)
    came_in_at = min(step for step, num in again.steps() if num == 2)
    assert middle <= came_in_at < num_steps and num_with_two > third, (came_in_at, num_with_two)
    assert len(survivor.steps("discard")) == 1, "but for the step in which the other one was killed, none was discarded"
    assert said_of_differences(survivor, killed, again) == []
    return steps


def run_from_a_checkpoint(
    folder: Path,
    script: Path,
    *arguments: str,
    resume: str,
    saved_at: int,
    num_steps: int,
    runner: Path = RUNNER,
    nproc: int | None = None,
) -> list[Step]:
    """Kill both groups two steps after one of them has saved; start both from that, and kill one of them as above.

    Args:
        resume: the argument that says so. The group that comes back has it as well, while the job goes on.
        saved_at: the step of the checkpoint.
        nproc: of the first of these lives, as in `FrameworkJob`: under torchrun trainers may wrap a model in torch's DDP.

    Returns:
        the steps up to the checkpoint, and those after it of the second life, in which groups were equal.
    """
    record = folder / "first"
    record.mkdir()
    environment = {"RECORD": str(record), "GATES": f"{saved_at + 2}:{folder / 'never'}"}
    with FrameworkJob(
        folder, runner, str(script), *arguments, min_replicas=2, nproc=nproc, environment=environment
    ) as job:
        groups = [job.start(number) for number in (0, 1)]
        for group in groups:
            group.wait_for_step(saved_at + 2, participants=2)
        for group in groups:
            group.kill()
    before = _steps_of(record, range(1, saved_at + 1))
    after = run_with_a_kill(
        folder / "resumed", script, *arguments, resume, num_steps=num_steps, begins_at=saved_at, runner=runner
    )
    return before + after


def said_of_differences(*groups: Group) -> list[str]:
    """Return the lines in which this library says that replicas differ, or that a loop has changed what it may not."""
    lines = [line for group in groups for line in group.log().splitlines()]
    return [line for line in lines if re.search(r"torchft_ckpt\.\S+ WARNING", line) and "without a token" not in line]


def _steps_of(record: Path, numbers: range) -> list[Step]:
    lines: dict[int, dict[int, Any]] = {}
    for group in (0, 1):
        for text in (record / f"group_{group}.jsonl").read_text().splitlines():
            line = json.loads(text)
            if line["step"] <= numbers[-1]:
                lines.setdefault(line["step"], {})[group] = line
    assert sorted(lines) == list(numbers)
    steps = []
    for number, of_groups in sorted(lines.items()):
        first, *others = of_groups.values()
        assert first["values"]
        for other in others:
            different = [path for path in first["values"] if first["values"][path] != other["values"].get(path)]
            assert different == [] and first["values"].keys() == other["values"].keys(), f"step {number}"
        read = {group: line["read"] for group, line in of_groups.items() if line["contributes"]}
        assert {line["num_participants"] for line in of_groups.values()} == {len(read)}, f"step {number}"
        steps.append(Step(number, read, first["values"]))
    return steps
