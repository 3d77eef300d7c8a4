"""Real managers, a real lighthouse, Gloo: groups that use other parameters, and one that comes later."""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import Any

import pytest
import torch
from support.fake_outer_manager import run_replicas
from torch import nn

from torchft_ckpt import DistributedDataParallel, LighthouseServer, Manager, Optimizer, ProcessGroupGloo
from torchft_ckpt.ddp import PureDistributedDataParallel

LIMIT = timedelta(seconds=20)


class Branches(nn.Module):
    """One of four branches a step."""

    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

    def forward(self, batch: torch.Tensor, number: int) -> torch.Tensor:
        return self.branches[number](batch)


@pytest.mark.slow
@pytest.mark.parametrize("wrap", [DistributedDataParallel, PureDistributedDataParallel])
def test_a_group_that_comes_later_ends_bit_equal_to_groups_that_each_use_other_branches(wrap: Any) -> None:
    server = LighthouseServer("127.0.0.1:0", min_replicas=2)
    models = [Branches() for _ in range(3)]
    has_begun, stops_at = threading.Event(), [10**9]

    def train(rank: int) -> tuple[int, list[list[int]]]:
        model = models[rank]
        adamw = torch.optim.AdamW(model.parameters(), lr=0.01)

        def load(state: dict[str, Any]) -> None:
            model.load_state_dict(state["model"])
            adamw.load_state_dict(state["adamw"])

        if rank == 2:
            has_begun.wait(20)
        manager = Manager(
            ProcessGroupGloo(timeout=LIMIT),
            load,
            lambda: {"model": model.state_dict(), "adamw": adamw.state_dict()},
            min_replica_size=2,
            lighthouse_addr=server.address(),
            replica_id=f"group_{rank}",
            hostname="127.0.0.1",
            timeout=LIMIT,
        )
        wrapped, optimizer = wrap(manager, model), Optimizer(manager, adamw)
        while manager.current_step() < stops_at[0]:
            optimizer.zero_grad()
            # The group that comes later uses a branch that no other ever does.
            branch = 3 if rank == 2 and not manager.statistics().num_healed else (manager.current_step() + rank) % 3
            wrapped(torch.full((2, 4), rank + 1.0), branch).square().sum().backward()
            optimizer.step()
            if manager.current_step() >= 3:
                has_begun.set()
            if rank == 2 and manager.statistics().num_committed == 1:
                stops_at[0] = manager.current_step() + 3
        manager.shutdown()
        return len(adamw.state), [p.detach().view(torch.int32).flatten().tolist() for p in model.parameters()]

    first, second, third = run_replicas(3, train)
    assert first == second == third
    assert first[0] == 6  # a bias and a weight of three branches: the fourth has no state in any group
    server.shutdown()
