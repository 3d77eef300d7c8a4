"""Replica groups of one in this process, each a tiny model with a Manager, and their lighthouse: all end with their test."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

import pytest
import torch
from torch import nn

from support.at_once import at_once
from torchft_ckpt import Checkpointer, LighthouseServer, Manager, Optimizer, ProcessGroupGloo

SHORT = timedelta(seconds=20)
_seeding = threading.Lock()
"""torch's generator is the process's; replicas are made on several threads."""
Ends = TypeVar("Ends", Manager, LighthouseServer, Checkpointer)
made: list[Manager | LighthouseServer | Checkpointer] = []
"""By this test, in order."""


def ends(one: Ends) -> Ends:
    """Return it, and have it shut down when the test is over."""
    made.append(one)
    return one


def end_all() -> None:
    """Shut down what the test has made, the last first, each whatever becomes of the others."""
    with contextlib.ExitStack() as stack:
        for one in made:
            stack.callback(one.shutdown)
        made.clear()


@pytest.fixture(autouse=True)
def all_end() -> Iterator[None]:
    """Whatever becomes of a test, nothing of these outlives it: for the `conftest.py` of tests that make them."""
    yield
    end_all()


def lighthouse_of(least: int, **options: Any) -> LighthouseServer:
    """Return a lighthouse that forms quorums of so many groups at least."""
    return ends(LighthouseServer("127.0.0.1:0", min_replicas=least, **{"heartbeat_timeout_ms": 30_000, **options}))


def manager_of(
    lighthouse: LighthouseServer | str, load: Any, state: Any, *, name: str | None = "alone", **options: Any
) -> Manager:
    """Return the Manager of a group; of one rank, and with Gloo, unless the options say something else."""
    usual = {
        "pg": options.get("pg") or ProcessGroupGloo(timeout=SHORT),
        "min_replica_size": 1,
        "lighthouse_addr": lighthouse if isinstance(lighthouse, str) else lighthouse.address(),
        "hostname": "127.0.0.1",
        "timeout": SHORT,
    }
    return ends(Manager(load_state_dict=load, state_dict=state, replica_id=name, **{**usual, **options}))


class Replica:
    """A tiny model with its manager."""

    def __init__(self, lighthouse: LighthouseServer | str, name: str | None, seed: int = 0, **options: Any) -> None:
        with _seeding:
            torch.manual_seed(seed)
            self.model, self.sgd = self.build()
        load, state = options.pop("load_state_dict", self.load), options.pop("state_dict", self.state)
        self.manager = manager_of(lighthouse, load, state, name=name, **options)
        self.optimizer = Optimizer(self.manager, self.sgd)

    def build(self) -> tuple[nn.Module, torch.optim.Optimizer]:
        """Return the model and its optimizer."""
        model = nn.Linear(8, 8)
        return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def load(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.sgd.load_state_dict(state["sgd"])

    def state(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "sgd": self.sgd.state_dict()}

    def batch(self) -> torch.Tensor:
        return torch.ones(2, 8)

    def step(self) -> bool:
        before = self.manager.statistics().num_committed
        self.optimizer.zero_grad()
        self.model(self.batch()).square().mean().backward()
        for parameter in self.model.parameters():
            assert parameter.grad is not None
            self.manager.allreduce(parameter.grad)
        self.optimizer.step()
        return self.manager.statistics().num_committed > before

    def bits(self) -> list[list[int]]:
        return [p.detach().view(torch.int32).flatten().tolist() for p in self.model.parameters()]


def together(replicas: list[Replica], act: Callable[[Replica], Any]) -> list[Any]:
    """Do the same on all replicas at once, as their processes would."""
    return at_once(*(partial(act, replica) for replica in replicas))


def shutdown(*replicas: Replica) -> None:
    for replica in replicas:
        replica.manager.shutdown()


class Run:
    """Two groups that train until a third one is through with what it does."""

    def __init__(self, replica: type[Replica] = Replica, **options: Any) -> None:
        self.server = lighthouse_of(2)
        self.at_work = [replica(self.server, name, **options) for name in ("a", "b")]
        self.last_step = 1 << 30
        pool = ThreadPoolExecutor(2)
        self._loops = [pool.submit(self.train, replica) for replica in self.at_work]
        pool.shutdown(wait=False)  # its threads end with the loops
        self.wait_for_steps(2)

    def train(self, replica: Replica) -> None:
        while replica.manager.current_step() < self.last_step:
            replica.step()

    def wait_for_steps(self, count: int) -> None:
        until = [replica.manager.current_step() + count for replica in self.at_work]
        give_up_at = time.monotonic() + 60
        while any(r.manager.current_step() < step for r, step in zip(self.at_work, until, strict=True)):
            assert time.monotonic() < give_up_at
            time.sleep(0.01)

    def end(self, joined: Replica) -> None:
        """All train to the same step, once the one that joined is in."""
        while not joined.manager.is_participating():
            joined.step()
        self.last_step = joined.manager.current_step() + 10
        self.train(joined)
        for loop in self._loops:
            loop.result(60)

    def ends_alike(self, joined: Replica) -> None:
        """So it ends, with the same bits in all groups, and those at work have discarded no step."""
        self.end(joined)
        assert [replica.manager.statistics().num_discarded for replica in self.at_work] == [0, 0]
        assert len({str(replica.bits()) for replica in (*self.at_work, joined)}) == 1
