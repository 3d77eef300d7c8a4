"""torchft's own `PGTransport` in our Manager: it commits, heals to the bit, and says once that it unpickles.

`scripts/test-torchft` runs this in an environment that has torchft; elsewhere it is skipped.
"""

from __future__ import annotations

import importlib.util
import logging
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import nn

from torchft_ckpt import LighthouseServer, Manager, Optimizer, ProcessGroupGloo

if importlib.util.find_spec("torchft") is None:
    pytest.skip("torchft is not installed; scripts/test-torchft runs this", allow_module_level=True)

pytestmark = [pytest.mark.slow]
SHORT = timedelta(seconds=30)


class Replica:
    """A tiny model, its manager, and torchft's transport on its process group."""

    def __init__(self, lighthouse: LighthouseServer, seed: int, model: nn.Module, use_async_quorum: bool) -> None:
        from torchft.checkpointing.pg_transport import PGTransport

        self.model = model
        self.adam = torch.optim.AdamW(model.parameters(), lr=0.1)
        group = ProcessGroupGloo(timeout=SHORT)
        self.manager = Manager(
            group,
            self.load,
            self.state,
            min_replica_size=1,
            use_async_quorum=use_async_quorum,
            lighthouse_addr=lighthouse.address(),
            replica_id=f"group_{seed}",
            hostname="127.0.0.1",
            timeout=SHORT,
            checkpoint_transport=PGTransport(group, SHORT, torch.device("cpu")),
        )
        self.optimizer = Optimizer(self.manager, self.adam)

    def load(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.adam.load_state_dict(state["optimizer"])

    def state(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optimizer": self.adam.state_dict()}

    def step(self) -> bool:
        before = self.manager.statistics().num_committed
        self.optimizer.zero_grad()
        self.model(torch.ones(2, 8)).square().mean().backward()
        for parameter in self.model.parameters():
            assert parameter.grad is not None
            self.manager.allreduce(parameter.grad)
        self.optimizer.step()
        return self.manager.statistics().num_committed > before

    def bits(self) -> list[list[int]]:
        moments = [value for of_one in self.adam.state.values() for value in of_one.values()]
        return [t.detach().view(torch.int32).flatten().tolist() for t in (*self.model.parameters(), *moments)]


@pytest.mark.parametrize("use_async_quorum", [True, False])
def test_groups_heal_by_torchfts_transport_and_commit_each_step(
    use_async_quorum: bool, caplog: pytest.LogCaptureFixture
) -> None:
    server = LighthouseServer("127.0.0.1:0", min_replicas=2)
    models = []
    for seed in range(2):
        torch.manual_seed(seed)
        models.append(nn.Linear(8, 8))
    with caplog.at_level(logging.WARNING, logger="torchft_ckpt"), ThreadPoolExecutor(2) as pool:
        replicas = list(pool.map(lambda n: Replica(server, n, models[n], use_async_quorum), range(2)))
        committed = list(pool.map(lambda replica: [replica.step() for _ in range(4)], replicas))
        assert committed == [[True] * 4] * 2
        assert replicas[0].bits() == replicas[1].bits()
        replicas[1].manager.report_torn_state()
        committed = list(pool.map(lambda replica: [replica.step() for _ in range(4)], replicas))
        assert committed[0] == [True] * 4
        assert replicas[0].bits() == replicas[1].bits()
    assert sum("unpickles" in record.getMessage() for record in caplog.records) == 2
    for replica in replicas:
        replica.manager.shutdown()
    server.shutdown()
