"""Groups that start without a state find each other: real managers and a real lighthouse in one process."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from support.durable_parts import NAME, PartsDouble, storage_in
from support.stores import hosted_store
from torch import nn

from torchft_ckpt import Checkpointer, HTTPTransport, LighthouseServer, Manager, Optimizer, ProcessGroupGloo
from torchft_ckpt.checkpointing.durable.cooperative_read.cold_start import ColdStart, MeetingPlace
from torchft_ckpt.checkpointing.state.target import Want
from torchft_ckpt.core.boxes.geometry import whole
from torchft_ckpt.core.durable.restore_source import RestoreSource
from torchft_ckpt.manager.cold_start import ColdStartGroup

SHORT = timedelta(seconds=20)


@pytest.fixture
def lighthouse() -> Iterator[LighthouseServer]:
    server = LighthouseServer("127.0.0.1:0", min_replicas=2, heartbeat_timeout_ms=5000)
    yield server
    server.shutdown()


@pytest.fixture
def start(lighthouse: LighthouseServer) -> Iterator[Callable[..., Rank]]:
    """Starts a rank; all are shut down at the end."""
    started: list[Rank] = []

    def make(name: str, **options: Any) -> Rank:
        rank = Rank(lighthouse, name, seed=len(started), **options)
        started.append(rank)
        return rank

    yield make
    for rank in started:
        rank.manager.shutdown()


class Rank:
    """A tiny model with its manager."""

    def __init__(self, lighthouse: LighthouseServer, name: str, seed: int, **options: Any) -> None:
        torch.manual_seed(seed)
        self.model = nn.Linear(8, 8)
        sgd = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.num_fetched = 0
        self.manager = Manager(
            ProcessGroupGloo(timeout=SHORT),
            self.load,
            self.model.state_dict,
            min_replica_size=2,
            lighthouse_addr=lighthouse.address(),
            replica_id=name,
            hostname="127.0.0.1",
            timeout=SHORT,
            **options,
        )
        self.optimizer = Optimizer(self.manager, sgd)

    def load(self, state: dict[str, Any]) -> None:
        self.num_fetched += 1
        self.model.load_state_dict(state)

    def step(self) -> bool:
        before = self.manager.current_step()
        self.optimizer.zero_grad()
        self.model(torch.ones(2, 8)).square().mean().backward()
        for parameter in self.model.parameters():
            assert parameter.grad is not None
            self.manager.allreduce(parameter.grad)
        self.optimizer.step()
        return self.manager.current_step() > before

    def bits(self) -> list[int]:
        return [bit for p in self.model.parameters() for bit in p.detach().view(torch.int32).flatten().tolist()]


def together(act: Callable[[Rank], Any], *ranks: Rank) -> list[Any]:
    with ThreadPoolExecutor(len(ranks)) as pool:
        return [future.result(60) for future in [pool.submit(act, rank) for rank in ranks]]


def gathers(rank: Rank) -> ColdStartGroup:
    gathering = rank.manager.cold_start(SHORT)
    assert gathering is not None
    return gathering


def test_three_groups_gather_at_one_store_and_none_of_them_fetches(start: Callable[..., Rank]) -> None:
    ranks = [start(name) for name in "abc"]
    found = together(gathers, *ranks)
    assert [(g.replica_rank, g.num_replicas, g.member, g.num_members) for g in found] == [
        (rank, 3, rank, 3) for rank in range(3)
    ]
    for gathering in found:
        gathering.store.set(f"here/{gathering.member}", "yes")
    assert all(found[0].store.get(f"here/{member}") == b"yes" for member in range(3))
    assert [rank.num_fetched for rank in ranks] == [0, 0, 0]
    assert [rank.manager.current_step() for rank in ranks] == [0, 0, 0]
    assert [rank.manager.is_behind for rank in ranks] == [True] * 3


@pytest.mark.parametrize("use_async_quorum", [True, False])
def test_what_is_restored_after_it_is_what_all_train_from(start: Callable[..., Rank], use_async_quorum: bool) -> None:
    a, b, c = (start(name, use_async_quorum=use_async_quorum) for name in "abc")
    together(gathers, a, b, c)
    for rank in (b, c):  # a, first of those that gathered, could read nothing
        with torch.no_grad():
            rank.model.load_state_dict(b.model.state_dict())
        rank.manager.load_state_dict({"step": 120, "batches_committed": 360})
    restored = b.bits()
    assert a.bits() != restored
    assert together(Rank.step, a, b, c) == [True] * 3
    assert [rank.manager.current_step() for rank in (a, b, c)] == [121] * 3
    assert a.bits() == b.bits() == c.bits() != restored


def test_a_job_that_begins_anew_after_it_takes_the_steps_that_it_always_took(start: Callable[..., Rank]) -> None:
    a, b = start("a"), start("b")
    together(gathers, a, b)
    for _ in range(2):
        assert together(Rank.step, a, b) == [True, True]
    assert a.bits() == b.bits()
    assert a.manager.statistics().num_discarded == b.manager.statistics().num_discarded == 0


@pytest.mark.slow
def test_who_comes_to_a_running_job_learns_its_step_and_disturbs_nobody(start: Callable[..., Rank]) -> None:
    a, b = start("a"), start("b")
    for _ in range(2):
        together(Rank.step, a, b)
    c = start("c")
    assert c.manager.newest_step_of_peers(SHORT) == 2
    found = gathers(c)
    assert (found.step_of_others, found.num_replicas, found.store) == (2, 1, None)
    assert together(Rank.step, a, b) == [True, True]
    assert a.manager.statistics().num_discarded == 0
    last: list[int] = []

    def trains(rank: Rank) -> None:
        while not last or rank.manager.current_step() < last[0]:
            rank.step()
            if rank is c and not last and rank.manager.current_step() > 0:
                last.append(rank.manager.current_step() + 3)

    together(trains, a, b, c)
    assert a.bits() == b.bits() == c.bits()
    assert c.manager.statistics().num_healed == 1


def test_nobody_holds_a_step_where_nobody_has_trained(start: Callable[..., Rank]) -> None:
    a, b = start("a"), start("b")
    assert together(lambda rank: rank.manager.newest_step_of_peers(SHORT), a, b) == [None, None]
    # What only this group holds is no peer's.
    together(Rank.step, a, b)
    b.manager.shutdown()
    until = time.monotonic() + 10
    while a.manager.newest_step_of_peers(SHORT) is not None and time.monotonic() < until:
        time.sleep(0.05)
    assert a.manager.newest_step_of_peers(SHORT) is None


def test_who_finds_nobody_to_gather_with_is_told_so_in_time(start: Callable[..., Rank]) -> None:
    a = start("a")  # min_replicas is 2
    assert a.manager.cold_start(timedelta(seconds=0.5)) is None
    b = start("b")
    assert together(Rank.step, a, b) == [True, True]


def test_all_ranks_of_two_groups_have_numbers_of_their_own(start: Callable[..., Rank]) -> None:
    stores = {name: hosted_store() for name in "ab"}

    def begin(name: str, rank: int) -> Rank:
        return start(name, rank=rank, world_size=2, store_addr="127.0.0.1", store_port=stores[name].port)

    with ThreadPoolExecutor(4) as pool:
        ranks = [future.result(30) for future in [pool.submit(begin, name, rank) for name in "ab" for rank in range(2)]]
    found = together(gathers, *ranks)
    assert [gathering.member for gathering in found] == [0, 1, 2, 3]
    assert {gathering.num_members for gathering in found} == {4}
    found[3].store.set("here", "yes")
    assert found[0].store.get("here") == b"yes"


def test_a_cold_start_reads_a_checkpoint_once_and_trains_on(start: Callable[..., Rank], tmp_path: Path) -> None:
    state = {"big": torch.randn(2048, 512), "model": nn.Linear(8, 8).state_dict()}
    double = PartsDouble({"state": state}, storage_in(tmp_path))
    double.write()
    ranks = [start(name) for name in "ab"]

    def begins(rank: Rank) -> tuple[int, dict[str, torch.Tensor]]:
        gathering = gathers(rank)
        assert gathering.store is not None
        transport: HTTPTransport[Any] = HTTPTransport(hostname="127.0.0.1")
        try:
            place = MeetingPlace(
                store=gathering.store,
                run=gathering.run,
                member=gathering.member,
                num_members=gathering.num_members,
                transport=transport,
            )
            cold_start = ColdStart([double.storage], place=place)
            for reading in cold_start.attempts():
                with reading as attempt:
                    targets = {fqn: torch.empty(tensor.shape) for fqn, tensor in attempt.reader.tensors.items()}
                    attempt.fill([Want(fqn, whole(tuple(target.shape)), target) for fqn, target in targets.items()])
        finally:
            transport.shutdown()
        prefix = "state.model."
        rank.model.load_state_dict(
            {fqn.removeprefix(prefix): t for fqn, t in targets.items() if fqn.startswith(prefix)}
        )
        rank.manager.load_state_dict({"step": attempt.checkpoint.name.step, "batches_committed": 7})
        return cold_start.bytes_from_storage, targets

    begun = together(begins, *ranks)
    total = sum(tensor.nbytes for tensor in double.tensors.values())
    assert sum(read for read, _ in begun) <= 1.02 * total + 2 * 64 * 1024
    assert all(torch.equal(targets["state.big"], state["big"]) for _, targets in begun)
    assert together(Rank.step, *ranks) == [True, True]
    assert [rank.manager.current_step() for rank in ranks] == [NAME.step + 1] * 2
    assert ranks[0].bits() == ranks[1].bits()


def test_where_the_first_that_restores_is_lost_the_others_meet_again_and_begin_from_one_checkpoint(
    start: Callable[..., Rank], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is lost when it has said what is read, and the others have begun to read: they go on under another first member."""
    saving = start("z")
    saving.manager.load_state_dict({"step": 120, "batches_committed": 360})
    saved = saving.bits()
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save({"default": saving.model.state_dict(), "torchft": saving.manager.state_dict()}, step=120).result(
        60
    )
    checkpointer.shutdown()
    saving.manager.shutdown()
    ranks = [start(name) for name in "abc"]
    has_begun = threading.Event()
    find_damage = ColdStart._find_damage

    def lost(cold_start: ColdStart, *args: Any) -> Any:
        if not has_begun.is_set():
            has_begun.set()
            ranks[0].manager.shutdown()  # its store, its transport and its connection to the lighthouse end
            raise KeyboardInterrupt
        return find_damage(cold_start, *args)

    monkeypatch.setattr(ColdStart, "_find_damage", lost)

    def restores(rank: Rank) -> object:
        own = Checkpointer(tmp_path, manager=rank.manager)
        try:
            restored = own.restore(timeout=SHORT)
            return restored.source, restored.step
        except KeyboardInterrupt:
            return None
        finally:
            own.shutdown()

    outcomes = together(restores, *ranks)
    assert outcomes == [None, (RestoreSource.STORAGE, 120), (RestoreSource.STORAGE, 120)]
    assert ranks[1].bits() == ranks[2].bits() == saved
    assert caplog.text.count("this rank meets the others again") == 2
    assert together(Rank.step, *ranks[1:]) == [True, True]
    assert [rank.manager.current_step() for rank in ranks[1:]] == [121, 121]
