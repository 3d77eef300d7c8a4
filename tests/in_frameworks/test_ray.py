"""Ray Train's `TorchftConfig`, unmodified, by the alias: the worker of a replica group is killed, and Ray starts it again."""

from __future__ import annotations

import importlib.util
import os
import re
import signal
from pathlib import Path

import pytest
from framework_jobs import Group
from support.launched import REPO
from support.waiting import wait_until

if importlib.util.find_spec("ray") is None:
    pytest.skip("ray is not installed; scripts/test-integrations runs this", allow_module_level=True)

JOB = Path(__file__).with_name("ray_job.py")
EXAMPLES = REPO / "examples"
STEPS = 300
pytestmark = [pytest.mark.processes, pytest.mark.slow]


def test_a_worker_that_was_killed_comes_back_and_ends_bit_equal(tmp_path: Path) -> None:
    """The example says what comes of weights, optimizer state and learning-rate schedule, as a digest.

    The survivor stands still at step 60 until Ray has started the other group again, however long that takes; and at step 1 until
    both have computed something. When all are gone, a run for more steps goes on from the last checkpoint of the first one.
    """
    is_there, is_back = tmp_path / "is_there", tmp_path / "is_back"
    gates = f"1:{is_there},60:{is_back}"
    driver = driven(tmp_path, "first.log", gates, STEPS)
    try:
        driver.wait_for(r"verdict=left_behind|participants=2/\d+ verdict=commit", 300)
        is_there.touch()
        driver.wait_for_step(20, participants=2, timeout_s=300)
        killed, before = _processes(driver)[1], len(driver.log())
        os.kill(killed, signal.SIGKILL)
        wait_until(lambda: _processes(driver)[1] != killed, "Ray starts the group again", 300)
        is_back.touch()
        # One heals at the beginning, too: the groups begin with other weights.
        wait_until(lambda: "heal=yes" in driver.log()[before:], "the group heals", 200)
        assert driver.process.wait(timeout=500) == 0
    finally:
        driver.close()
    assert "participants=1/1 verdict=commit" in driver.log()[before:], "the other one did not train alone"
    ended = dict(re.findall(r"group (\d) finished at (step .*)", driver.log()))
    assert ended["0"] == ended["1"]
    assert ended["0"].startswith(f"step {STEPS}: state ")
    assert "without a token" not in driver.log()
    assert (Path(_checkpoint_of_ray(driver)) / "weights.pt").exists()

    more = driven(tmp_path, "more.log", gates, STEPS + 50)
    try:
        assert more.process.wait(timeout=500) == 0
    finally:
        more.close()
    assert min(step for step, _ in more.steps()) == STEPS
    ended = dict(re.findall(r"group (\d) finished at (step .*)", more.log()))
    assert ended["0"] == ended["1"]


def driven(folder: Path, log: str, gates: str, num_steps: int) -> Group:
    """Start the example, which saves its checkpoints in a folder of `folder`."""
    options = [
        "--groups=2",
        f"--steps={num_steps}",
        "--pause=0.2",
        f"--storage={folder}",
        f"--checkpoints={folder / 'ours'}",
    ]
    environment = {
        "PYTHONPATH": f"{REPO}{os.pathsep}{EXAMPLES}",
        "RAY_DEDUP_LOGS": "0",
        "RAY_USAGE_STATS_ENABLED": "0",
        "OMP_NUM_THREADS": "1",
    }
    return Group(folder / log, JOB, [gates, *options], environment)


def _checkpoint_of_ray(driver: Group) -> str:
    return re.findall(r"Ray's checkpoint: Checkpoint\(filesystem=local, path=(.*)\)", driver.log())[-1]


def _processes(driver: Group) -> dict[int, int]:
    """Return the newest process of each group."""
    return {int(group): int(pid) for group, pid in re.findall(r"group (\d) is process (\d+)", driver.log())}
