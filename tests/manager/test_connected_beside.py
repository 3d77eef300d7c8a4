"""A group comes into a running job with Gloo: its process group is made while the others train, or it stays outside."""

from __future__ import annotations

import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from support.replicas import SHORT, Replica, Run
from support.waiting import wait_until

from torchft_ckpt import ProcessGroupGloo


def status(run: Run) -> str:
    with urllib.request.urlopen(f"{run.server.address()}/?job=default", timeout=30) as answer:
        return str(answer.read().decode())


class Noting(ProcessGroupGloo):
    """Notes where it was configured, and whether a collective ran there; cannot be connected beside while it is cut off."""

    cut_off = ""

    def __init__(self) -> None:
        super().__init__(SHORT)
        self.places: list[str] = []

    def configure(self, store_addr: str, *arguments: Any, **options: Any) -> None:
        self.places.append(store_addr)
        super().configure(store_addr, *arguments, **options)

    def connect_beside(self, store_addr: str, replica_id: str, rank: int, world_size: int) -> Callable[[], None]:
        def fails() -> None:
            raise OSError(self.cut_off)

        if self.cut_off == "at once":
            fails()
        return fails if self.cut_off else super().connect_beside(store_addr, replica_id, rank, world_size)


@pytest.mark.usefixtures("patient")
def test_the_first_quorum_of_a_newcomer_takes_the_process_group_that_was_made_beside() -> None:
    run = Run()
    group = Noting()
    joined = Replica(run.server, "c", seed=7, pg=group)
    discarded = [replica.manager.statistics().num_discarded for replica in run.at_work]
    run.end(joined)
    assert ["/beside-" in place for place in group.places] == [True], group.places
    assert len({str(replica.bits()) for replica in (*run.at_work, joined)}) == 1
    assert [replica.manager.statistics().num_discarded for replica in run.at_work] == discarded


@pytest.mark.parametrize("how", ["at once", "a moment later"])
def test_one_that_cannot_be_connected_waits_outside_and_comes_in_when_it_can_be(how: str) -> None:
    run = Run()
    group = Noting()
    group.cut_off = how
    joined = Replica(run.server, "c", seed=7, pg=group)
    before = [replica.manager.statistics() for replica in run.at_work]
    with ThreadPoolExecutor(1) as pool:
        came = pool.submit(run.end, joined)
        why = f": {how}). Each has to reach the others at every port"
        wait_until(lambda: why in status(run), "the operator can read why", look_every_s=0.1)
        run.wait_for_steps(5)
        assert group.places == []
        assert [r.manager.statistics().num_discarded for r in run.at_work] == [was.num_discarded for was in before]
        group.cut_off = ""
        came.result(180)
    assert len({str(replica.bits()) for replica in (*run.at_work, joined)}) == 1
