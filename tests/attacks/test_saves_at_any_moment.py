"""Saves at any moment of a step, in a process of its own, whose main thread takes the signals: a few; 250 in a thorough run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.thoroughness import by_default

TIMEOUT_S = 480.0


@pytest.mark.processes
@pytest.mark.slow
def test_a_save_at_any_moment_is_whole_and_of_one_step_or_says_why_not() -> None:
    script = Path(__file__).with_name("saves_at_any_moment.py")
    num_saves = by_default(20, thorough=250)
    path = os.pathsep.join([str(script.parents[1]), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, str(script), "--saves", str(num_saves)],
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert done.returncode == 0, done.stdout[-4000:]
    assert f"{num_saves} saves: " in done.stdout and done.stdout.endswith("held\n"), done.stdout
