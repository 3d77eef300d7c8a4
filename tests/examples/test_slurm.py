"""examples/slurm/groups.sbatch without Slurm: `srun` and `scontrol` are small programs here. tests/in_slurm has Slurm itself."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from torchft_ckpt.__main__ import _parser
from torchft_ckpt.cli.run import _plan

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "slurm" / "groups.sbatch"


def run_task(folder: Path, status: int, restarts: int = 0) -> tuple[int, list[str], list[str]]:
    """Run the script as task 1 of 3, whose groups end with `status`; return its own, srun's arguments and scontrol's."""
    folder.joinpath("srun").write_text(f'#!/bin/sh\nprintf "%s\\n" "$@" > {folder}/ran\nexit {status}\n')
    folder.joinpath("scontrol").write_text(f'#!/bin/sh\nprintf "%s\\n" "$@" > {folder}/asked\n')
    for name in ("srun", "scontrol"):
        folder.joinpath(name).chmod(0o755)
    variables = {
        "PATH": f"{folder}:{os.environ['PATH']}",
        "TORCHFT_LIGHTHOUSE": "first:29510",
        "SLURM_ARRAY_JOB_ID": "4711",
        "SLURM_ARRAY_TASK_ID": "1",
        "SLURM_ARRAY_TASK_COUNT": "3",
        "SLURM_RESTART_COUNT": str(restarts),
    }
    done = subprocess.run(["bash", str(SCRIPT), "train.py", "--steps", "9"], env=variables, check=False, timeout=120)
    asked = folder / "asked"
    return (
        done.returncode,
        (folder / "ran").read_text().splitlines(),
        asked.read_text().split() if asked.exists() else [],
    )


def test_the_task_starts_its_group_as_run_takes_it(tmp_path: Path) -> None:
    _, arguments, _ = run_task(tmp_path, 0)
    options = _parser().parse_args(arguments[arguments.index("torchft_ckpt") + 1 :])
    plan = _plan(options)
    assert (list(plan.groups), plan.num_all_groups, options.job) == ([1], 3, "slurm-4711")
    assert options.command == ["--", "train.py", "--steps", "9"]
    assert plan.left_status == 75


@pytest.mark.parametrize(
    ("status", "restarts", "comes_back"),
    [
        (0, 0, False),
        (1, 19, True),
        (1, 20, False),
        (75, 0, True),
        (75, 20, True),
    ],
)
def test_a_group_that_failed_or_left_is_queued_again(
    tmp_path: Path, status: int, restarts: int, comes_back: bool
) -> None:
    """One that left was asked to, each time: that is no failure, and is not counted."""
    own, _, asked = run_task(tmp_path, status, restarts)
    assert asked == (["requeue", "4711_1"] if comes_back else [])
    assert own == (0 if comes_back else status)
