"""What ties this library to others is imported when it is first needed, and is found without an import in the user's script."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import torchft_ckpt

PACKAGE = Path(torchft_ckpt.__file__).parent
FOUND = "\nprint('FOUND', *sorted(name for name in sys.modules if name.startswith('torchft_ckpt.integrations')))\n"

SUBMODULES = """
import torchft_ckpt as torchft
for name in ["process_group", "manager", "local_sgd", "checkpointing", "coordination", "optim", "_torchft"]:
    assert getattr(torchft, name).__name__ == "torchft_ckpt." + name
assert torchft.process_group.ManagedProcessGroup
assert not hasattr(torchft, "no_such_module")
"""
"""Submodules are attributes of a package that was only imported."""

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
checkpointer = Checkpointer(sys.argv[1], manager=manager, timeout=timedelta(seconds=60))
checkpointer.save().result(60)
checkpointer.shutdown()
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

dcp.save({"w": torch.ones(3)}, checkpoint_id=sys.argv[1] + "/dcp", no_dist=True)
state = {"w": torch.zeros(3)}
assert "torchft_ckpt.integrations.dcp.reader" not in sys.modules
torchft_ckpt.load_checkpoint(sys.argv[1] + "/dcp", state)
assert state["w"].tolist() == [1, 1, 1]
"""


@pytest.mark.processes
def test_what_ties_this_library_to_others_is_imported_when_it_is_needed_and_not_before(tmp_path: Path) -> None:
    """In one fresh interpreter, which says after each part what it has imported."""
    program = FOUND.join([f"import sys\n{SUBMODULES}{JOB}", XLA, "from torchft_ckpt import *", DCP, ""])
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=PACKAGE.parent,
    )
    assert done.returncode == 0, done.stdout[-500:] + done.stderr[-2500:]
    prefix = "torchft_ckpt.integrations"
    lines = [line.split()[1:] for line in done.stdout.splitlines() if line.startswith("FOUND")]
    found = [{name.removeprefix(prefix).removeprefix(".") for name in line} for line in lines]
    of_job, of_xla, of_all_names, of_dcp = found
    assert of_job == set(), "a job that trains and saves durable checkpoints needs none"
    assert of_xla == {"", "xla"}, "the first tensor on such a device finds its adapter"
    # The planners and the peer reader are public names of the package, so `*` asks for them.
    assert "dcp.peer_reader" in of_all_names and "dcp.reader" not in of_all_names
    assert "dcp.reader" in of_dcp, "a directory of DCP finds its reader"
