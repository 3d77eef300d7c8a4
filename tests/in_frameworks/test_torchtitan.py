"""torchtitan 0.3.0 by `torchft_ckpt.compat.torchft`: its debug model in two groups of two ranks; one is killed and comes back."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
from framework_jobs import FrameworkJob, Group, State, assert_equal_states

if importlib.util.find_spec("torchtitan") is None:
    pytest.skip("torchtitan is not installed; scripts/test-integrations runs this", allow_module_level=True)

ON_CPU = Path(__file__).with_name("torchtitan_on_cpu.py")
pytestmark = [pytest.mark.processes, pytest.mark.slow]


def run_with_a_kill(folder: Path, config: str, *, kill_at: int, num_steps: int) -> tuple[Group, Group]:
    """Kill group 1 when `kill_at` steps of the job are committed; return group 0 and group 1's second run, ended.

    Both begin together, however long each of them takes to start. Group 0 trains on alone, and stands still in the middle until
    group 1 is there again.
    """
    is_there, is_back = folder / "is_there", folder / "is_back"
    arguments = [
        "--module=torchtitan_on_cpu",
        f"--config={config}",
        "--fault_tolerance.replica_id={group}",
        "--fault_tolerance.group_size=2",
        f"--training.steps={num_steps}",
        f"--dump_folder={folder}",
    ]
    environment = {
        "PRINT_STATE": "yes",
        "GATES": f"1:{is_there} {num_steps // 2}:{is_back}",
    }
    with FrameworkJob(
        folder, ON_CPU, *arguments, nproc=2, by="torchft_ckpt.compat.torchft", environment=environment
    ) as job:
        survivor, killed = job.start(0), job.start(1)
        for group in (survivor, killed):
            group.wait_for("Training starts at step", timeout_s=300)
        is_there.touch()
        killed.wait_for_step(kill_at, participants=2, timeout_s=300)
        killed.kill()
        again = job.start(1)
        again.wait_for("Training starts at step", timeout_s=300)
        is_back.touch()
        survivor.end(timeout_s=300)
        again.end(timeout_s=300)
    assert 1 in [participants for _, participants in survivor.steps()], "it did not train alone"
    assert again.steps()[-1][1] == 2, "they do not train together again"
    return survivor, again


def test_hsdp_survives_a_kill_and_ends_bit_equal(tmp_path: Path) -> None:
    """Weights, optimizer state, schedule and learning rate, rank by rank."""
    survivor, again = run_with_a_kill(tmp_path, "hsdp", kill_at=5, num_steps=30)
    for rank in range(2):
        (mine,), (theirs,) = _states(survivor, rank).values(), _states(again, rank).values()
        assert_equal_states(mine, theirs)


@pytest.mark.parametrize(("config", "kill_at"), [("diloco", 3), ("local_sgd", 2)])
def test_an_outer_loop_survives_a_kill_and_agrees_bit_by_bit(config: str, kill_at: int, tmp_path: Path) -> None:
    """After each round that both groups were in: global parameters, outer optimizers, step, schedule and learning rate.

    Between two rounds all else is each group's own.
    """
    survivor, again = run_with_a_kill(tmp_path, config, kill_at=kill_at, num_steps=48)
    for rank in range(2):
        mine, theirs = _states(survivor, rank), _states(again, rank)
        together = mine.keys() & theirs.keys()
        assert len(together) >= 3
        for at in together:
            assert_equal_states(mine[at], theirs[at])


def _states(group: Group, rank: int) -> dict[int, State]:
    """Return what a rank said of its state, by the job's step: of HSDP at the end, else after each round."""
    return {state["step"]: state for state in group.states() if state["values"]["/trainer/rank"] == str(rank)}
