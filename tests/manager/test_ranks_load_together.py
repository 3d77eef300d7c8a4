"""The ranks of a group load a state at one place of their loops, or none of them does.

A loop that goes by `current_step()` calls other collectives of its group otherwise in one rank than in the next.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import pytest
from support.stores import hosted_store
from test_manager_in_process import SHORT, Replica, together
from torch.distributed import TCPStore

from torchft_ckpt import HTTPTransport, LighthouseServer
from torchft_ckpt.errors import SourceLostError


@pytest.fixture
def lighthouse() -> Iterator[LighthouseServer]:
    server = LighthouseServer("127.0.0.1:0", min_replicas=1, heartbeat_timeout_ms=5000)
    yield server
    server.shutdown()


class Slow(HTTPTransport[Any]):
    """Its first receives fail, or wait for the middle of the loop's first iterations."""

    def __init__(self, *, num_late: int = 0, num_failures: int = 0) -> None:
        super().__init__(timeout=SHORT, hostname="127.0.0.1")
        self.num_late, self.num_failures = num_late, num_failures
        self.is_beside_forward = threading.Event()

    def fetch_checkpoint(self, sources: Sequence[str], step: int, timeout: timedelta, **how: Any) -> Any:
        if self.num_failures:
            self.num_failures -= 1
            raise SourceLostError("the source is gone", "source")
        if self.num_late:
            self.num_late -= 1
            assert self.is_beside_forward.wait(20)
        return super().fetch_checkpoint(sources, step, timeout, **how)


class Rank(Replica):
    """A rank of a group of two; it notes at which step it is before its forward pass, in each iteration."""

    name: str
    steps: list[int]
    between: Callable[[], object]

    def train(self, last_step: list[int]) -> None:
        """Train until all are at the last step, which a group names that has healed."""
        self.steps, before = [], -1
        while not last_step or self.manager.current_step() < last_step[0]:
            self.optimizer.zero_grad()
            before = self.manager.current_step()
            self.steps.append(before)
            self.between()
            for parameter in self.model.parameters():
                parameter.grad = parameter.detach().clone()
                self.manager.allreduce(parameter.grad)
            self.optimizer.step()
            if self.name == "comes_back" and self.manager.statistics().num_healed and not last_step:
                last_step.append(self.manager.current_step() + 3)  # nobody is further than one step ahead


def group(lighthouse: LighthouseServer, name: str, store: TCPStore, transports: Sequence[Slow]) -> list[Rank]:
    def rank(number: int) -> Rank:
        made = Rank(
            lighthouse,
            name,
            number,
            rank=number,
            world_size=2,
            store_addr="127.0.0.1",
            store_port=store.port,
            checkpoint_transport=transports[number],
        )
        made.name = name
        made.between = transports[number].is_beside_forward.set
        return made

    return together([0, 1], rank)  # type: ignore[list-item, arg-type]


@pytest.mark.slow
@pytest.mark.parametrize("use", ["late", "fails", "fails twice"])
def test_ranks_are_at_one_step_in_each_iteration_although_one_is_slow_or_gets_no_state(
    lighthouse: LighthouseServer, use: str
) -> None:
    transports = {
        "late": lambda: Slow(num_late=1),
        "fails": lambda: Slow(num_failures=1),
        "fails twice": lambda: Slow(num_failures=2),
    }
    stores = [hosted_store(), hosted_store()]
    stays = group(lighthouse, "stays", stores[0], [Slow(), Slow()])
    together(stays, lambda replica: [replica.step() for _ in range(2)])
    back = group(lighthouse, "comes_back", stores[1], [Slow(), transports[use]()])

    last_step: list[int] = []
    together([*stays, *back], lambda rank: rank.train(last_step))  # type: ignore[attr-defined]

    assert back[0].steps == back[1].steps
    assert [rank.manager.statistics().num_healed for rank in back] == [1, 1]
    assert {str(rank.bits()) for rank in (stays[0], back[0])} == {str(stays[0].bits())}
    assert [rank.manager.statistics().num_discarded for rank in stays] == [0, 0]
    for rank in [*stays, *back]:
        rank.manager.shutdown()
