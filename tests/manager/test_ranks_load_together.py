"""The ranks of a group load a state at one place of their loops, or none of them does.

A loop that goes by `current_step()` calls other collectives of its group otherwise in one rank than in the next.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import pytest
from support.replicas import SHORT, Replica, together
from support.stores import hosted_store
from torch.distributed import TCPStore

from torchft_ckpt import HTTPTransport, LighthouseServer
from torchft_ckpt.errors import SourceLostError


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
            self.is_beside_forward.clear()
            self.is_beside_forward.wait(1.5)  # unless it began just before; nobody waits so long before a forward pass
        return super().fetch_checkpoint(sources, step, timeout, **how)


class Rank(Replica):
    """A rank of a group of two; it notes at which step it is before its forward pass, in each iteration."""

    name: str
    steps: list[int]
    is_beside_forward: threading.Event

    def begin_forward(self) -> None:
        self.is_beside_forward.set()

    def train(self, last_step: list[int]) -> None:
        """Train until all are at the last step, which a group names that has healed."""
        self.steps, before = [], -1
        while not last_step or self.manager.current_step() < last_step[0]:
            self.optimizer.zero_grad()
            before = self.manager.current_step()
            self.steps.append(before)
            self.begin_forward()
            for parameter in self.model.parameters():
                parameter.grad = parameter.detach().clone()
                self.manager.allreduce(parameter.grad)
            self.optimizer.step()
            if self.name == "comes_back" and self.manager.statistics().num_healed and not last_step:
                last_step.append(self.manager.current_step() + 3)  # nobody is further than one step ahead


def group(
    lighthouse: LighthouseServer, name: str, store: TCPStore, transports: Sequence[Slow], kind: type[Rank] = Rank
) -> list[Rank]:
    def rank(number: int) -> Rank:
        made = kind(
            lighthouse,
            name,
            number,
            rank=number,
            world_size=2,
            store_addr="127.0.0.1",
            store_port=store.port,
            checkpoint_transport=transports[number],
        )
        made.name, made.is_beside_forward = name, transports[number].is_beside_forward
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


class Inner:
    """The collectives that the ranks of a group call among themselves: they have to be the same on all of them."""

    def __init__(self, num_ranks: int) -> None:
        self._barrier = threading.Barrier(num_ranks, timeout=60)
        self._names = [""] * num_ranks

    def call(self, rank: int, name: str) -> None:
        self._names[rank] = name
        self._barrier.wait()
        names = set(self._names)
        self._barrier.wait()
        assert len(names) == 1, f"the ranks call {names}"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("differs", "num_late"), [([0, 1], 2), ([1], 1), ([0], 2)], ids=["both", "one", "the quick one"]
)
def test_ranks_that_came_to_another_state_than_the_source_load_it_in_one_place(
    lighthouse: LighthouseServer, differs: list[int], num_late: int
) -> None:
    """What `load_state_dict` calls collectives for, as those of sharded models do, all ranks of a group load, or none."""
    inner = Inner(2)

    class Sharded(Rank):
        def __init__(self, *args: Any, rank: int, **options: Any) -> None:
            self.rank, self.drifts, self.has_loaded = rank, False, False
            super().__init__(*args, rank=rank, **options)
            self.sgd.register_step_post_hook(lambda *_: self.drift())

        def begin_forward(self) -> None:
            super().begin_forward()
            inner.call(self.rank, "forward")

        def load(self, state: dict[str, Any]) -> None:
            inner.call(self.rank, "load")
            super().load(state)
            self.drifts, self.has_loaded = self.rank in differs and not self.has_loaded, True

        def drift(self) -> None:
            """Its first step is another one than that of the others."""
            if self.drifts:
                self.drifts = False
                self.model.bias.data.add_(1)

    stores = [hosted_store(), hosted_store()]
    stays = group(lighthouse, "stays", stores[0], [Slow(), Slow()])
    together(stays, lambda replica: [replica.step() for _ in range(2)])
    back = group(lighthouse, "comes_back", stores[1], [Slow(num_late=1), Slow(num_late=num_late)], Sharded)

    last_step: list[int] = []

    def train(rank: Any) -> None:
        try:
            rank.train(last_step)
        except BaseException:
            last_step.append(rank.manager.current_step() + 3)  # the others end too
            raise

    together([*stays, *back], train)

    assert back[0].steps == back[1].steps
    assert [rank.manager.statistics().num_corrected for rank in back] == [int(0 in differs), int(1 in differs)]
    assert {str(rank.bits()) for rank in (stays[0], back[0])} == {str(stays[0].bits())}
    for rank in [*stays, *back]:
        rank.manager.shutdown()
