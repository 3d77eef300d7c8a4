"""What any reconfigurable process group does: both that the library ships keep the contract."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from datetime import timedelta

import pytest
import torch
from support.fake_process_group import FakeFabric, FakeProcessGroup
from support.rings import Ring, is_connecting
from support.waiting import wait_until
from torch.distributed import ReduceOp

from torchft_ckpt.errors import ProcessGroupAbortedError
from torchft_ckpt.process_group import ProcessGroup, ProcessGroupGloo, ProcessGroupWrapper
from torchft_ckpt.testing.process_group_conformance import CHECKS, Check, ConformanceError, MakeGroup

TIMEOUT = timedelta(seconds=30)
each_kind = pytest.mark.parametrize("kind", ["gloo", "fake"])


def maker(kind: str) -> MakeGroup:
    fabric = FakeFabric()
    return lambda: ProcessGroupGloo(TIMEOUT) if kind == "gloo" else FakeProcessGroup(fabric, TIMEOUT)


@each_kind
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_the_process_group_conforms(kind: str, check: Check) -> None:
    check(maker(kind))


def test_the_check_finds_a_group_that_swallows_an_abort() -> None:
    class Deaf(ProcessGroupWrapper):
        def abort(self, errored: bool = True) -> None: ...

    make = maker("fake")
    with pytest.raises(ConformanceError, match="after an abort"):
        for check in CHECKS:
            if "abort_ends_an_operation" in check.__name__:
                check(lambda: Deaf(pg=make()))


def test_the_check_finds_a_group_that_reduces_wrongly() -> None:
    class Wrong(FakeProcessGroup):
        def size(self) -> int:
            return super().size() + 1

    fabric = FakeFabric()
    with pytest.raises(ConformanceError, match="rank and size"):
        for check in CHECKS:
            check(lambda: Wrong(fabric, TIMEOUT))


@pytest.fixture(params=["gloo", "fake"])
def ring(request: pytest.FixtureRequest, new_address: Callable[[], str]) -> Iterator[Ring]:
    make = maker(request.param)
    ring = Ring([make() for _ in range(3)], new_address)
    yield ring
    ring.close()


def test_a_second_configure_ends_the_first(ring: Ring) -> None:
    first, second = ring.new_address(), ring.new_address()
    outcomes: list[object] = []
    thread = threading.Thread(
        target=lambda: outcomes.extend(ring.each(lambda rank, pg: pg.configure(first, "r0", 0, 2, 6), [0]))
    )
    thread.start()
    wait_until(lambda: is_connecting(ring.members[0]), "member 0 waits for the others")
    pool = [threading.Thread(target=ring.members[r].configure, args=(second, f"r{r}", r, 3, 7)) for r in range(3)]
    for member in pool:
        member.start()
    for member in [*pool, thread]:
        member.join()
    assert [type(outcome) for outcome in outcomes] == [ProcessGroupAbortedError]

    def reduce(rank: int, group: ProcessGroup) -> list[float]:
        tensor = torch.ones(2)
        group.allreduce([tensor], ReduceOp.SUM).wait()
        return tensor.tolist()

    assert ring.each(reduce) == [[3.0] * 2] * 3
