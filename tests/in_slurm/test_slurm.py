"""examples/slurm as a user submits it: a lighthouse, and an array of three groups. One goes away in each of Slurm's ways.

It always comes back to a job that went on, and all end bit-equal.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from one_node import REPO, Slurm, free_ports, one_node, wait_until

SCRIPTS = REPO / "examples" / "slurm"
TRAINER = Path(__file__).with_name("train.py")
VICTIM = 1
FAR_STEPS = 60
"""So many steps are before the end when the groups hear of it."""


class Array:
    """The array of the groups: their tasks at Slurm, and what their logs say."""

    def __init__(self, slurm: Slurm) -> None:
        self.slurm = slurm
        (port,) = free_ports(1)
        self.lighthouse = f"127.0.0.1:{port}"
        self.lighthouse_job = slurm.call(
            "sbatch", "--parsable", str(SCRIPTS / "lighthouse.sbatch"), "2", self.lighthouse
        )
        self.job = self.submit("--array=0-2", "--cpus-per-task=2")

    def submit(self, *options: str, **variables: str) -> str:
        command = [
            "sbatch",
            "--parsable",
            *options,
            str(SCRIPTS / "groups.sbatch"),
            str(TRAINER),
            str(self.slurm.folder),
        ]
        return self.slurm.call(*command, TORCHFT_LIGHTHOUSE=self.lighthouse, **variables)

    def task(self, group: int) -> str:
        return f"{self.job}_{group}"

    def log(self, group: int) -> str:
        path = self.slurm.folder / f"group_{group}.log"
        return path.read_text() if path.exists() else ""

    def reports(self, group: int) -> list[dict[str, Any]]:
        marked = (line.partition("] ")[2] for line in self.log(group).splitlines(keepends=True) if line.endswith("}\n"))
        return [json.loads(line) for line in marked if line.startswith("{")]

    def last_step(self, group: int) -> int:
        return max((report["step"] for report in self.reports(group) if report["event"] == "step"), default=0)

    def lives(self, group: int) -> int:
        return sum(report["event"] == "ready" for report in self.reports(group))

    def trains_with_all(self, group: int, life: int) -> bool:
        reports = self.reports(group)
        starts = [number for number, report in enumerate(reports) if report["event"] == "ready"]
        return len(starts) >= life and any(
            report["event"] == "step" and report["contributed"] and report["participants"] == 3
            for report in reports[starts[life - 1] :]
        )

    def end(self) -> list[tuple[int, str]]:
        """Have all groups end at one step; return the step and the digest of each."""
        last = max(self.last_step(group) for group in range(3)) + FAR_STEPS
        stop = self.slurm.folder / "stop"
        stop.with_suffix(".new").write_text(str(last))
        stop.with_suffix(".new").rename(stop)
        wait_until(lambda: not self.slurm.call("squeue", "--noheader", "--name=groups"), "all tasks have ended")
        return [
            (report["step"], report["digest"])
            for group in range(3)
            for report in self.reports(group)
            if report["event"] == "done"
        ]


@pytest.fixture
def array(tmp_path: Path) -> Iterator[Array]:
    with one_node(tmp_path) as slurm:
        array = Array(slurm)
        wait_until(lambda: all(array.trains_with_all(group, 1) for group in range(3)), "all groups train")
        yield array


def see_the_group_come_back_and_all_end_equal(array: Array) -> None:
    at = array.last_step(0)
    wait_until(lambda: array.last_step(0) > at + 5, "the others go on")
    wait_until(lambda: array.trains_with_all(VICTIM, 2), "the group is back")
    ends = array.end()
    assert len(ends) == 3
    assert len(set(ends)) == 1, ends


def test_a_group_that_fails_has_itself_queued_again(array: Array) -> None:
    array.slurm.call("scancel", f"{array.task(VICTIM)}.0")  # the step alone

    see_the_group_come_back_and_all_end_equal(array)
    assert array.slurm.field(array.task(VICTIM), "Restarts") == "1"


def test_a_group_whose_time_is_nearly_over_has_itself_queued_again(array: Array) -> None:
    """Slurm sends what `--signal` of the script names, as it does some time before the limit."""
    array.slurm.call("scancel", "--batch", "--signal=USR1", array.task(VICTIM))

    see_the_group_come_back_and_all_end_equal(array)
    assert array.slurm.field(array.task(VICTIM), "Restarts") == "1"


def test_a_group_that_slurm_queues_again_comes_back(array: Array) -> None:
    """As after preemption, or the loss of its node."""
    array.slurm.call("scontrol", "requeue", array.task(VICTIM))

    see_the_group_come_back_and_all_end_equal(array)
    assert array.slurm.field(array.task(VICTIM), "Restarts") == "1"


def test_a_group_that_was_cancelled_stays_away_until_it_is_submitted_again(array: Array) -> None:
    array.slurm.call("scancel", array.task(VICTIM))
    wait_until(lambda: array.slurm.field(array.task(VICTIM), "JobState") == "CANCELLED", "it was cancelled")
    at = array.last_step(0)
    wait_until(lambda: array.last_step(0) > at + 100, "the others go on")
    assert array.lives(VICTIM) == 1
    array.submit(f"--array={VICTIM}", NUM_REPLICA_GROUPS="3", TORCHFT_CKPT_JOB=f"slurm-{array.job}")

    see_the_group_come_back_and_all_end_equal(array)


def test_the_groups_wait_for_a_lighthouse_that_is_queued_again(array: Array) -> None:
    lighthouse = array.lighthouse_job
    array.slurm.call("scontrol", "requeue", lighthouse)
    wait_until(
        lambda: [array.slurm.field(lighthouse, name) for name in ("Restarts", "JobState")] == ["1", "RUNNING"],
        "it runs again",
    )
    at = array.last_step(0)
    wait_until(lambda: array.last_step(0) > at + 5, "the groups go on")

    ends = array.end()
    assert len(ends) == 3
    assert len(set(ends)) == 1, ends
    assert [array.lives(group) for group in range(3)] == [1, 1, 1]
