"""examples/train_ddp.py under torchrun, as for torchft: two groups, one lighthouse."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from torchft_ckpt import LighthouseServer

REPO = Path(__file__).resolve().parents[2]
SCRIPT = REPO / "examples" / "train_ddp.py"
NUM_STEPS = 30


def start_group(group: int, lighthouse: str, folder: Path) -> subprocess.Popen[bytes]:
    environment = os.environ | {
        "PYTHONPATH": str(REPO),
        "TORCHFT_LIGHTHOUSE": lighthouse,
        "REPLICA_GROUP_ID": str(group),
        "NUM_REPLICA_GROUPS": "2",
        "OMP_NUM_THREADS": "1",
    }
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nnodes=1", "--nproc-per-node=1"]
    options = [f"--steps={NUM_STEPS}", f"--report={folder / f'group_{group}.json'}"]
    with (folder / f"group_{group}.log").open("wb") as log:
        return subprocess.Popen([*torchrun, str(SCRIPT), *options], env=environment, stdout=log, stderr=log)


@pytest.mark.processes
def test_two_groups_under_torchrun_end_equal(tmp_path: Path) -> None:
    lighthouse = LighthouseServer(bind="127.0.0.1:0", min_replicas=2)
    groups = [start_group(group, lighthouse.address(), tmp_path) for group in range(2)]
    try:
        codes = [group.wait(timeout=240) for group in groups]
    finally:
        for group in groups:
            group.terminate()  # torchrun ends its worker with itself
            group.wait(timeout=30)
        lighthouse.shutdown()

    assert codes == [0, 0], "".join(path.read_text() for path in sorted(tmp_path.glob("*.log")))
    first, second = (json.loads((tmp_path / f"group_{group}.json").read_text()) for group in range(2))
    assert (first["step"], second["step"]) == (NUM_STEPS, NUM_STEPS)
    assert first["digest"] == second["digest"]
    assert first["loss"] < 5.0


def test_only_the_import_line_names_this_library() -> None:
    """What the script imports from here is what torchft 0.2.0 exports or has at the same place."""
    imports = [
        node
        for node in ast.walk(ast.parse(SCRIPT.read_text()))
        if isinstance(node, ast.ImportFrom | ast.Import) and "torchft_ckpt" in ast.unparse(node)
    ]

    assert [ast.unparse(node).split(" import ")[0] for node in imports] == ["from torchft_ckpt"]
