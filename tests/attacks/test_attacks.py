"""Each attack that once succeeded is tried again, as its author ran it: in a thorough run, as they take minutes together.

One that a test tries with the same bytes has no script. The mend of each other one has its own, quicker tests beside the code.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.thoroughness import THOROUGH

ATTACKS = sorted(Path(__file__).parent.glob("f[0-9]*.py"))
TIMEOUT_S = 600.0


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.skipif(not THOROUGH, reason="attacks take minutes; scripts/test --thorough tries them")
@pytest.mark.parametrize("attack", ATTACKS, ids=lambda path: path.stem)
def test_an_attack_that_once_succeeded_does_not(attack: Path) -> None:
    path = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, str(attack)],
        env=os.environ | {"PYTHONPATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert done.returncode == 0, done.stdout[-4000:]
    assert done.stdout.strip().splitlines()[-1].startswith("held"), done.stdout[-4000:]
