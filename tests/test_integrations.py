"""What ties this library to others is imported when it is first needed, and is found without an import in the user's script."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import torchft_ckpt

PACKAGE = Path(torchft_ckpt.__file__).parent
FOUND = "\nprint('FOUND', *sorted(name for name in sys.modules if name.startswith('torchft_ckpt.integrations')))\n"

JOB = """
import torch
from datetime import timedelta
from torchft_ckpt import Checkpointer, DistributedDataParallel, LighthouseServer, Manager, Optimizer, ProcessGroupGloo

lighthouse = LighthouseServer("127.0.0.1:0", min_replicas=1)
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
manager = Manager(
    ProcessGroupGloo(), model.load_state_dict, model.state_dict, min_replica_size=1, lighthouse_addr=lighthouse.address(),
    replica_id="alone", hostname="127.0.0.1",
)
optimizer = Optimizer(manager, torch.optim.SGD(model.parameters(), lr=0.1))
wrapped = DistributedDataParallel(manager, model)
while manager.current_step() < 2:
    optimizer.zero_grad()
    wrapped(torch.ones(3, 4)).square().mean().backward()
    optimizer.step()
"""

SAVES = """
checkpointer = Checkpointer(sys.argv[1], manager=manager, timeout=timedelta(seconds=60))
checkpointer.save().result(60)
checkpointer.shutdown()
"""

ENDS = """
manager.shutdown()
lighthouse.shutdown()
"""

XLA = """
import torch, torchft_ckpt
from torchft_ckpt.checkpointing.state.shards import adapter_of

class OnAnotherDevice(torch.Tensor):
    @property
    def device(self):
        return torch.device("xla", 0)

assert adapter_of(torch.ones(2)) is None
assert "torchft_ckpt.integrations.xla" not in sys.modules
adapter_of(torch.ones(2).as_subclass(OnAnotherDevice))
"""

DCP = """
import torch, torchft_ckpt
import torch.distributed.checkpoint as dcp

dcp.save({"w": torch.ones(3)}, checkpoint_id=sys.argv[1], no_dist=True)
state = {"w": torch.zeros(3)}
assert not [name for name in sys.modules if name.startswith("torchft_ckpt.integrations")]
torchft_ckpt.load_checkpoint(sys.argv[1], state)
assert state["w"].tolist() == [1, 1, 1]
"""


def imported_by(program: str, *arguments: str) -> set[str]:
    """Run a program in a fresh interpreter; return the modules of `integrations` that it has imported at its end."""
    done = subprocess.run(
        [sys.executable, "-c", f"import sys\n{program}{FOUND}", *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=PACKAGE.parent,
    )
    assert done.returncode == 0, done.stdout[-500:] + done.stderr[-2500:]
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("FOUND")]
    return {name.removeprefix("torchft_ckpt.integrations").removeprefix(".") for name in line.split()[1:]}


@pytest.mark.processes
@pytest.mark.parametrize(
    "program",
    [
        "from torchft_ckpt import *",
        "import torchft_ckpt.checkpointing, torchft_ckpt.checkpointer, torchft_ckpt.manager",
    ],
)
def test_importing_the_library_imports_no_integration(program: str) -> None:
    found = imported_by(program)
    # The planners and the peer reader are public names of the package, so `*` asks for them.
    assert found == (set() if "*" not in program else found - {"xla", "dcp.reader"})


@pytest.mark.processes
def test_a_job_that_trains_and_saves_durable_checkpoints_imports_none(tmp_path: Path) -> None:
    assert imported_by(JOB + SAVES + ENDS, str(tmp_path)) == set()


@pytest.mark.processes
def test_the_first_tensor_on_an_xla_device_finds_its_adapter() -> None:
    assert imported_by(XLA) == {"", "xla"}


@pytest.mark.processes
def test_a_directory_of_dcp_finds_its_reader(tmp_path: Path) -> None:
    assert "dcp.reader" in imported_by(DCP, str(tmp_path / "checkpoint"))
