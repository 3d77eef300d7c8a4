"""What is received is one state: of one name, whole, of tensors that are known here, with everything that can be had of it."""

from __future__ import annotations

import itertools
import threading
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
from support.resharding import LONG, Group, Layout, LyingSource, Reply, imagined_rank, make_transport
from torch.distributed.tensor import DTensor

from torchft_ckpt.checkpointing import http_transport
from torchft_ckpt.checkpointing.fetching.streams import Stream
from torchft_ckpt.checkpointing.lock import StateDictLock
from torchft_ckpt.checkpointing.resharding import fetch as fetch_module
from torchft_ckpt.checkpointing.resharding import peers as peers_module
from torchft_ckpt.checkpointing.resharding import plan as plan_module
from torchft_ckpt.checkpointing.resharding import transfer as transfer_module
from torchft_ckpt.checkpointing.resharding.peers import JobPeers
from torchft_ckpt.core.boxes.geometry import MAX_CELLS, Box, refine
from torchft_ckpt.errors import SourceRefusedError, StateMismatchError, UnsupportedValueError
from torchft_ckpt.manager.checking import ParameterLayout
from torchft_ckpt.manager.state_registry import StateRegistry

ROWS = Layout((2,), ((0, 0),))


def sharded(full: torch.Tensor, rank: int = 0) -> torch.Tensor:
    return ROWS.make(full, rank)


def test_ranks_that_hold_the_step_of_different_quorums_do_not_make_one_state():
    states = []
    for rank in range(2):
        with imagined_rank(rank, 2):
            own = {"step": 7, "quorum_id": 3 + rank, "epoch": "e", "batches_committed": 1}
            states.append({"user": {"w": sharded(torch.ones(4, 2), rank)}, "torchft": own})
    receiver = make_transport()
    with Group(states, 7) as group, pytest.raises(SourceRefusedError, match=r"do not hold one state.*'quorum_id': 4"):
        receiver.fetch_sharded([group.urls], 0, 1, 7, LONG, local_state={"user": {"w": torch.zeros(4, 2)}})
    receiver.shutdown()


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("rank", [0, 2])
def test_a_part_of_a_tensor_that_is_not_known_here_is_not_taken_for_all_of_it(in_place: bool, rank: int) -> None:
    source, receiver = make_transport(), make_transport()
    try:
        with imagined_rank(rank, 3):
            source.send_checkpoint([0], 7, {"w": torch.ones(2), "moment": sharded(torch.ones(6, 2), rank)}, LONG)
            with pytest.raises(StateMismatchError, match=r"what is wanted.*moment is .* of float32\[6, 2\] there"):
                receiver.fetch_checkpoint(
                    [source.metadata()], 7, LONG, local_state={"w": torch.zeros(2)}, in_place=in_place
                )
    finally:
        source.shutdown()
        receiver.shutdown()


def test_who_may_become_the_source_keeps_what_is_here_already(monkeypatch: pytest.MonkeyPatch) -> None:
    """The primary dies when nearly all is here, after both have gone on to another step."""
    monkeypatch.setattr(plan_module, "PART_BYTES", 4096)
    monkeypatch.setattr(transfer_module, "_FIRST_BYTES", 8192)
    monkeypatch.setattr(transfer_module, "_RUN_S", 0.01)
    monkeypatch.setattr(fetch_module, "_ACKNOWLEDGED_S", 0.0)
    primary_is_gone, most_is_here = threading.Event(), threading.Event()
    receive = Stream._receive
    num_received = 0

    def slow(self: Stream, *arguments: Any) -> bool:
        nonlocal num_received
        num_received += 1
        if num_received == 25:
            most_is_here.set()
            assert primary_is_gone.wait(120)
        return receive(self, *arguments)

    monkeypatch.setattr(Stream, "_receive", slow)
    full = torch.randn(1024, 32, generator=torch.Generator().manual_seed(1))
    groups = [Group([{"w": full.clone()}], 7) for _ in range(2)]
    receiver = make_transport()
    received: list[Any] = []

    def run() -> None:
        received.append(
            receiver.fetch_sharded(
                [group.urls for group in groups], 0, 1, 7, LONG, local_state={"w": torch.zeros_like(full)}
            )
        )

    thread = threading.Thread(target=run)
    thread.start()
    try:
        assert most_is_here.wait(120)
        for group in groups:
            group.transports[0].disallow_checkpoint()
        groups[0].transports[0].shutdown()
        primary_is_gone.set()
        thread.join(30)
        assert torch.equal(received[0]["w"].view(torch.int32), full.view(torch.int32))
    finally:
        primary_is_gone.set()
        thread.join(30)
        receiver.shutdown()
        for group in groups:
            group.transports[0].shutdown()


def test_chunks_that_lie_as_those_of_no_mesh_do_cost_no_time():
    diagonal = [Box((at, at, at), (1, 1, 1)) for at in range(64)]
    with pytest.raises(ValueError, match=f"more than {MAX_CELLS} pieces"):
        refine(Box((0, 0, 0), (64, 64, 64)), diagonal)


def test_a_group_without_dead_ranks_is_read_where_the_first_has_one() -> None:
    full = torch.arange(8.0).view(4, 2)
    states = []
    for rank in range(2):
        with imagined_rank(rank, 2):
            states.append({"w": sharded(full, rank)})
    with Group(states, 7) as first, Group(states, 7) as second:
        first.transports[1].shutdown()
        pulled = JobPeers([first.urls, second.urls]).pull(None, timeout=timedelta(seconds=20))
    assert pulled.step == 7
    assert torch.equal(pulled.state["w"], full)


def test_ranks_of_all_groups_are_asked_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """They train in step; only who hears of a step before it comes can serve it."""
    monkeypatch.setattr(peers_module, "_GRACE_S", 60.0)  # a group that answers later is left aside
    monkeypatch.setattr(http_transport, "_REQUEST_S", 120.0)  # nor is what one has asked for forgotten meanwhile
    ranks = [make_transport() for _ in range(3)]
    is_over = threading.Event()
    served: set[int] = set()

    def train() -> None:
        asks_by = 0.0
        for step in range(100_000):
            for rank in ranks:
                rank.advance_to(step)
            hears_by = time.monotonic() + 10
            # First one rank is asked which step is the newest; then all for one ahead, of which one may hear late.
            while any(asked := [rank.has_pending_request(step) for rank in ranks]) or time.monotonic() < asks_by:
                if all(asked) or (any(asked) and (not served or time.monotonic() > hears_by)):
                    for rank in itertools.compress(ranks, asked):
                        rank.send_checkpoint([], step, {"w": torch.full((4,), float(step))}, LONG)
                    served.add(step)
                    asks_by = 0.0 if all(asked) else time.monotonic() + 10
                    break
                if is_over.wait(0.01):
                    return
            if is_over.wait(0.05):
                return
            for rank in ranks:
                rank.disallow_checkpoint()

    thread = threading.Thread(target=train)
    thread.start()
    try:
        held = JobPeers([[rank.metadata()] for rank in ranks]).hold(None, time.monotonic() + 120)
        assert [group != [None] for group in held.addresses] == [True, True, True]
        assert held.step in served
    finally:
        is_over.set()
        thread.join()
        for rank in ranks:
            rank.shutdown()


# Ranks of a source that hold other things under one name


def drifted_ranks(size: int, drifts: int | None) -> list[dict[str, Any]]:
    """What four ranks hold, sharded in pairs: statistics of each rank's own, and what they should hold alike."""
    states = []
    for rank in range(4):
        with imagined_rank(rank, 4):
            more = 0.5 if rank == drifts else 0.0
            full = torch.arange(float(size)) + more
            states.append(
                {
                    "bn.mean": torch.full((5,), 10.0 + (rank if drifts is not None else 0)),
                    "ln": full,
                    "w": Layout((2, 2), ((1, 0),)).make(full + 0.25, rank),
                    "fsdp": Layout((4,), ((0, 0),)).make(torch.arange(8.0), rank),
                    "rank": rank,
                }
            )
    return states


@pytest.mark.slow
@pytest.mark.parametrize("size", [900, 50_000, 1_300_000])
@pytest.mark.parametrize("drifts", [None, 0, 2])
def test_what_ranks_of_a_source_do_not_hold_alike_is_of_one_rank_and_is_named(
    size: int, drifts: int | None, caplog: pytest.LogCaptureFixture
) -> None:
    """It was put together from several ranks, without a word."""
    states = drifted_ranks(size, drifts)
    told = "ranks of a group do not hold alike what several of them hold: "
    with Group(states, 7, num_receivers=6) as group:
        pulled = [JobPeers([group.urls]).pull(None, timeout=LONG).state]
        for num_ranks in (2, 4):
            receiver = make_transport()
            for rank in range(num_ranks):
                with imagined_rank(rank, num_ranks):
                    here = {
                        **{name: torch.zeros(states[0][name].shape) for name in ("bn.mean", "ln", "w")},
                        "fsdp": Layout((num_ranks,), ()).make(torch.zeros(8), rank),
                        "rank": None,
                    }
                    pulled.append(receiver.fetch_sharded([group.urls], rank, num_ranks, 7, LONG, local_state=here))
            receiver.shutdown()
    for state, of in zip(pulled, [0, 0, 0, 0, 1, 2, 3], strict=True):
        assert torch.equal(state["bn.mean"], states[of]["bn.mean"])
        assert torch.equal(state["ln"], states[of]["ln"])
        halves = [states[number]["w"].to_local() for number in (of // 2 * 2, of // 2 * 2 + 1)]
        assert torch.equal(state["w"], torch.cat(halves))
    named = [record.getMessage() for record in caplog.records if told in record.getMessage()]
    assert len(named) == (0 if drifts is None else len(pulled))
    assert all(f"{name} (" in one for one in named for name in ("bn.mean", "ln", "w"))


@pytest.mark.parametrize("how", ["cut", "hang"])
def test_a_rank_that_says_nothing_of_its_copies_gives_none(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And is not waited for until its connection counts as lost."""
    monkeypatch.setattr(fetch_module, "_COMPARED_WITHIN_S", 0.1 if how == "hang" else 60.0)

    def refuse_digests(reply: Reply) -> None:
        if reply.kind == "parts/digests":
            reply.cut() if how == "cut" else reply.hang()
        else:
            reply.send()

    states = [{"bn.mean": torch.full((5,), 10.0 + rank)} for rank in range(2)]
    with Group(states, 7) as group, LyingSource(group.urls[1], refuse_digests) as silent:
        pulled = JobPeers([[group.urls[0], silent.url]]).pull(7, timeout=LONG)
    assert torch.equal(pulled.state["bn.mean"], torch.full((5,), 10.0))


# What a Manager makes of it


def registry_of(state: Any, *optimizers: torch.optim.Optimizer, load: Any = None) -> StateRegistry:
    registry = StateRegistry(StateDictLock())
    registry.register("default", load or (lambda state: None), state, explicitly_locked=True, optimizers=optimizers)
    return registry


def test_an_outer_optimizer_without_state_gets_it_as_shards():
    def make() -> tuple[torch.nn.Parameter, torch.optim.Optimizer, StateRegistry]:
        weight = torch.nn.Parameter(sharded(torch.ones(6, 2)))
        outer = torch.optim.SGD([weight], lr=0.5, momentum=0.5, nesterov=True)
        return weight, outer, registry_of(outer.state_dict, outer, load=outer.load_state_dict)

    with imagined_rank(0, 2):
        weight, outer, theirs = make()
        weight.grad = torch.ones_like(weight)
        outer.step()
        source, receiver = make_transport(), make_transport()
        source.send_checkpoint([0], 7, theirs.capture(), LONG)
        own_weight, own_outer, ours = make()
        ours.layout()
        local = ours.capture_to_receive()
        ours.load(receiver.fetch_checkpoint([source.metadata()], 7, LONG, local_state=local))
        momentum = own_outer.state[own_weight]["momentum_buffer"]
        assert isinstance(momentum, DTensor)
        assert torch.equal(momentum.to_local(), outer.state[weight]["momentum_buffer"].to_local())
        own_weight.grad = torch.ones_like(own_weight)
        own_outer.step()
        source.shutdown()
        receiver.shutdown()


def test_a_layout_is_that_of_the_state_where_no_optimizer_is_known_and_follows_new_parameters():
    with imagined_rank(0, 2):
        weight = torch.nn.Parameter(sharded(torch.zeros(6, 2)))
        registry = registry_of(lambda: {"w": weight})
        assert registry.layout().is_sharded
        assert registry_of(lambda: {"w": torch.zeros(2)}).layout() == ParameterLayout()
        optimizer = torch.optim.SGD([weight], lr=0.1)
        registry.guard(optimizer)
        before = registry.layout()
        optimizer.add_param_group({"params": [torch.nn.Parameter(sharded(torch.zeros(8, 2)))]})
        assert registry.layout() != before


def test_a_state_that_only_another_transport_can_carry_has_no_layout():
    registry = registry_of(lambda: {"w": object()})
    assert registry.layout() == ParameterLayout()
    transport = make_transport()
    with pytest.raises(UnsupportedValueError):
        transport.send_checkpoint([0], 1, registry.capture(), LONG)
    transport.shutdown()


@pytest.mark.parametrize("is_sharded_alike", [True, False])
def test_what_is_received_in_place_counts_as_a_write_to_the_tensors_that_are_here(is_sharded_alike: bool) -> None:
    source, receiver = make_transport(), make_transport()
    with imagined_rank(0, 2):
        source.send_checkpoint([0], 7, {"w": sharded(torch.ones(6, 2)) if is_sharded_alike else torch.ones(6, 2)}, LONG)
        local = sharded(torch.zeros(6, 2))
        before = local._version
        if is_sharded_alike:
            receiver.fetch_checkpoint([source.metadata()], 7, LONG, local_state={"w": local}, in_place=True)
        else:
            urls = [[source.metadata()]]
            receiver.fetch_sharded(urls, 0, 2, 7, LONG, local_state={"w": local}, in_place=True)
        assert torch.equal(local.to_local(), torch.ones(3, 2))
        assert local._version > before
    source.shutdown()
    receiver.shutdown()
