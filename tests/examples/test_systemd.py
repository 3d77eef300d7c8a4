"""The unit for the lighthouse is one that systemd takes, and its command one that this version takes."""

from __future__ import annotations

import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

UNIT = Path(__file__).resolve().parents[2] / "examples" / "systemd" / "torchft-lighthouse.service"


def test_the_lighthouse_gets_the_time_that_it_takes_to_see_groups_off() -> None:
    from torchft_ckpt.cli.lighthouse import _LEAVE_PATIENCE_S

    settings = dict(line.split("=", 1) for line in UNIT.read_text().splitlines() if "=" in line and line[0] != "#")
    assert int(settings["TimeoutStopSec"]) > _LEAVE_PATIENCE_S
    command, *options = shlex.split(settings["ExecStart"])
    assert Path(command).name == "torchft-ckpt"
    assert options == ["lighthouse", "--min-replicas", "2", "--bind", "[::]:29510"]


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd here")
def test_systemd_takes_it(tmp_path: Path) -> None:
    """With a program and a user that there are."""
    unit = tmp_path / UNIT.name
    unit.write_text(
        UNIT.read_text().replace("/opt/torchft_ckpt/bin/torchft-ckpt", "/bin/true").replace("User=torchft", "User=root")
    )
    done = subprocess.run(["systemd-analyze", "verify", str(unit)], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
