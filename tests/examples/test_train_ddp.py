"""examples/train_ddp.py under torchrun, as for torchft: two groups, one lighthouse."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.run
import train_ddp
from support.launched import REPO, fork_into
from support.nursery import ForkedIntoFile

from torchft_ckpt import LighthouseServer

SCRIPT = REPO / "examples" / "train_ddp.py"
NUM_STEPS = 30


def start_group(group: int, script: Path, *arguments: str, lighthouse: str, folder: Path) -> ForkedIntoFile:
    return fork_into(
        folder / f"group_{group}.log",
        script,
        *arguments,
        f"--steps={NUM_STEPS}",
        f"--report={folder / f'group_{group}.json'}",
        TORCHFT_LIGHTHOUSE=lighthouse,
        REPLICA_GROUP_ID=str(group),
        NUM_REPLICA_GROUPS="2",
        OMP_NUM_THREADS="1",
    )


@pytest.mark.processes
@pytest.mark.slow
def test_a_group_under_torchrun_and_one_without_end_equal(tmp_path: Path) -> None:
    lighthouse = LighthouseServer(bind="127.0.0.1:0", min_replicas=2)
    where: Any = {"lighthouse": lighthouse.address(), "folder": tmp_path}
    one_worker = ["--standalone", "--nnodes=1", "--nproc-per-node=1"]
    groups = [
        start_group(0, Path(torch.distributed.run.__file__), *one_worker, str(SCRIPT), **where),
        start_group(1, SCRIPT, **where),
    ]
    try:
        codes = [group.wait(timeout=240) for group in groups]
    finally:
        for group in groups:
            group.terminate()  # torchrun ends its worker with itself
            group.wait(timeout=30)
        lighthouse.shutdown()

    assert codes == [0, 0]
    first, second = (json.loads((tmp_path / f"group_{group}.json").read_text()) for group in range(2))
    assert (first["step"], second["step"]) == (NUM_STEPS, NUM_STEPS)
    assert first["digest"] == second["digest"]
    assert first["loss"] < 5.0


def test_on_gpus_a_rank_makes_its_own_device_current_before_anything_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """The Manager connects NCCL on the current device, which is device 0 in all ranks of a group until it is set."""
    seen = []

    def set_device(device: torch.device) -> None:
        seen.append(device)
        raise InterruptedError("there is no GPU here")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_device", set_device)
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setattr("sys.argv", ["train_ddp.py"])
    with pytest.raises(InterruptedError, match="there is no GPU here"):
        train_ddp.main()
    assert seen == [torch.device("cuda", 1)]


def test_only_the_import_line_names_this_library() -> None:
    """What the script imports from here is what torchft 0.2.0 exports or has at the same place.

    But for the error that ends a group which came when the job was over, of which torchft knows nothing.
    """
    imports = [
        node
        for node in ast.walk(ast.parse(SCRIPT.read_text()))
        if isinstance(node, ast.ImportFrom | ast.Import) and "torchft_ckpt" in ast.unparse(node)
    ]

    imports = [node for node in imports if ast.unparse(node) != "from torchft_ckpt.errors import JobFinishedError"]
    assert [ast.unparse(node).split(" import ")[0] for node in imports] == ["from torchft_ckpt"]
