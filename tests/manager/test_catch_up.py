"""Catching up with a running job between its rounds: real managers, lighthouse and transports in one process.

A replica's thread that is in its inner phase is one that does nothing here: whatever a joiner gets, it gets without it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.at_once import at_once
from support.ports import reserved_port
from support.replicas import manager_of
from support.stores import hosted_store
from support.waiting import wait_until

from torchft_ckpt import HTTPTransport, LighthouseServer
from torchft_ckpt.checkpointing.serving.snapshot import Snapshot, SnapshotPhase
from torchft_ckpt.errors import SourceLostError, StateDictLoadError, TransferTimeoutError
from torchft_ckpt.manager import between_steps

pytestmark = pytest.mark.slow

SHORT = timedelta(seconds=20)
NUM_FLOATS = 512 * 1024
BLOCK_BYTES = 64 * 1024


@pytest.fixture
def replicas() -> Iterator[list[Replica]]:
    """Those that are to be shut down at the end."""
    started: list[Replica] = []
    yield started
    for replica in started:
        replica.close()


class Replica:
    """One rank with a state that changes when a round is committed, and an inner optimizer that does not touch it."""

    def __init__(self, lighthouse: LighthouseServer, name: str, seed: int = 0, **options: Any) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.weights = torch.randn(NUM_FLOATS, generator=generator)
        self.loaded: list[int] = []
        self.fails_to_load = False
        self.transport: HTTPTransport[Any] = HTTPTransport(
            timeout=SHORT,
            num_chunks=1,
            hostname="127.0.0.1",
            block_bytes=BLOCK_BYTES,
            stall_timeout=timedelta(seconds=60),
        )
        explicitly_locked = options.pop("explicitly_locked", True)
        self.manager = manager_of(
            lighthouse,
            None,
            None,
            name=name,
            min_replica_size=options.pop("min_replica_size", 1),
            checkpoint_transport=self.transport,
            **options,
        )
        self.manager.register_state_dict_fn(
            "outer", self.load, lambda: {"weights": self.weights}, explicitly_locked=explicitly_locked
        )

    def load(self, state: dict[str, Any]) -> None:
        if self.fails_to_load:
            raise ValueError("no")
        self.weights.copy_(state["weights"])
        self.loaded.append(self.manager.current_step())

    def round(self, *, contributes: bool = True, wait: bool = True) -> bool:
        """One round; the inner phase before it took no time."""
        self.manager.start_quorum(contributes=contributes, wait=wait)
        average = torch.full((8,), 0.25)
        self.manager.allreduce(average).wait()
        if not self.manager.should_commit():
            return False
        self.manager.disallow_state_dict_read()
        self.weights += average.repeat(NUM_FLOATS // 8)
        self.manager.allow_state_dict_read()
        self.manager.offer_state()
        return True

    def bits(self) -> bytes:
        return self.weights.view(torch.uint8).numpy().tobytes()

    def dies(self) -> None:
        """Its connections close, whatever it is doing."""
        self.transport.shutdown(wait=False)
        self.manager.shutdown(wait=False)

    def close(self) -> None:
        self.manager.shutdown()
        self.transport.shutdown()


def start(replicas: list[Replica], lighthouse: LighthouseServer, name: str, **options: Any) -> Replica:
    replicas.append(Replica(lighthouse, name, seed=len(replicas), **options))
    return replicas[-1]


def running_source(replicas: list[Replica], lighthouse: LighthouseServer, name: str = "source") -> Replica:
    """A replica that has committed three rounds and is in its next inner phase."""
    source = start(replicas, lighthouse, name)
    assert [source.round() for _ in range(3)] == [True] * 3
    return source


def looks_on(replica: Replica, lighthouse: LighthouseServer) -> None:
    """Ask for the next quorum as one that did not train; return when the lighthouse has heard it, and it may be in that."""
    replica.manager.start_quorum(contributes=False, wait=False)
    wait_until(lambda: replica.manager.replica_id() in lighthouse._jobs.states["default"]._job.waiting)
    wait_until(lambda: is_connected(replica, lighthouse))


def is_connected(replica: Replica, lighthouse: LighthouseServer) -> bool:
    """Whether it has been connected with those who train; else it comes in a round later."""
    state = lighthouse._jobs.states["default"]
    return state._job.quorum_members.keys() <= {*state.members[replica.manager.replica_id()].met}


@contextmanager
def held_transfer(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[threading.Event, threading.Event]]:
    """The first block that any source is about to send waits. Yields (it is waiting, let it go on)."""
    begun, go_on = threading.Event(), threading.Event()
    lend = Snapshot.lend

    def waiting_lend(snapshot: Snapshot, first: int, last: int) -> AbstractContextManager[list[memoryview]]:
        if last - first >= BLOCK_BYTES // 2 and not go_on.is_set():
            begun.set()
            assert go_on.wait(120)
        return lend(snapshot, first, last)

    monkeypatch.setattr(Snapshot, "lend", waiting_lend)
    try:
        yield begun, go_on
    finally:
        go_on.set()


# ---------------------------------------------------------------------------------------------------- in an inner phase


def test_a_checkpoint_that_was_restored_is_not_given_up_for_the_weights_that_others_began_with(
    replicas: list[Replica], lighthouse: LighthouseServer
) -> None:
    source = start(replicas, lighthouse, "source")
    source.manager.start_quorum(contributes=False, wait=True)
    source.manager.offer_state()
    assert source.manager.catch_up()
    joiner = start(replicas, lighthouse, "joiner")
    before = joiner.bits()
    joiner.manager.load_state_dict({"step": 5, "batches_committed": 5})

    assert not joiner.manager.catch_up()

    assert (joiner.bits(), joiner.loaded, joiner.manager.current_step()) == (before, [], 5)


def test_a_joiner_catches_up_while_the_source_does_nothing(
    lighthouse: LighthouseServer, replicas: list[Replica]
) -> None:
    source = running_source(replicas, lighthouse)
    joiner = start(replicas, lighthouse, "joiner")
    assert joiner.manager.is_behind

    assert joiner.manager.catch_up()

    assert not joiner.manager.is_behind
    assert (joiner.manager.current_step(), joiner.manager.batches_committed()) == (3, 3)
    assert joiner.bits() == source.bits()


def test_inner_steps_beside_a_transfer_take_no_lock_and_cause_no_copy(
    lighthouse: LighthouseServer, replicas: list[Replica], monkeypatch: pytest.MonkeyPatch
) -> None:
    source = running_source(replicas, lighthouse)
    joiner = start(replicas, lighthouse, "joiner")
    inner = torch.optim.SGD([torch.nn.Parameter(torch.zeros(4))], lr=0.1)
    source.manager.guard_optimizer(inner)
    inner.param_groups[0]["params"][0].grad = torch.ones(4)
    writes: list[object] = []
    source.transport.lock.add_before_write(lambda: writes.append("write"))

    with held_transfer(monkeypatch) as (begun, go_on), ThreadPoolExecutor(1) as pool:
        caught_up = pool.submit(joiner.manager.catch_up)
        assert begun.wait(120)
        for _ in range(10):
            inner.step()
        (snapshot,) = source.transport._snapshots.open_snapshots()
        statistics = snapshot.statistics()
        go_on.set()
        assert caught_up.result(60)

    assert (statistics.phase, statistics.num_blocks_copied_aside, writes) == (SnapshotPhase.LIVE, 0, [])
    assert joiner.bits() == source.bits()


def test_a_source_that_commits_meanwhile_gives_the_old_state_whole_and_then_the_new_one(
    lighthouse: LighthouseServer, replicas: list[Replica], monkeypatch: pytest.MonkeyPatch
) -> None:
    source = running_source(replicas, lighthouse)
    old = source.bits()
    joiner = start(replicas, lighthouse, "joiner")
    seen: list[bytes] = []
    load = joiner.load
    monkeypatch.setitem(
        joiner.manager.hooks.registry._load, "outer", lambda state: (load(state), seen.append(joiner.bits()))
    )

    with held_transfer(monkeypatch) as (begun, go_on), ThreadPoolExecutor(1) as pool:
        caught_up = pool.submit(joiner.manager.catch_up)
        assert begun.wait(120)
        assert source.round()
        go_on.set()
        assert caught_up.result(60)

    assert seen == [old, source.bits()]
    assert joiner.manager.current_step() == 4


def test_a_joiner_follows_a_source_that_went_on_before_it_was_asked(
    lighthouse: LighthouseServer, replicas: list[Replica], monkeypatch: pytest.MonkeyPatch
) -> None:
    source = running_source(replicas, lighthouse)
    joiner = start(replicas, lighthouse, "joiner")
    fetch = joiner.transport.fetch_checkpoint
    asked: list[int] = []

    def fetch_late(sources: Sequence[str], step: int, timeout: timedelta, **how: Any) -> Any:
        asked.append(step)
        if len(asked) == 1:
            assert source.round()
        return fetch(sources, step, timeout, **how)

    monkeypatch.setattr(joiner.transport, "fetch_checkpoint", fetch_late)
    assert joiner.manager.catch_up()

    assert asked == [3, 4]
    assert joiner.bits() == source.bits()


def test_who_holds_the_newest_state_fetches_nothing_and_its_offer_stands(
    lighthouse: LighthouseServer, replicas: list[Replica]
) -> None:
    source = running_source(replicas, lighthouse)
    before = source.transport._snapshots.open_snapshots()

    assert source.manager.catch_up()

    assert source.loaded == []
    assert source.transport._snapshots.open_snapshots() == before


# ------------------------------------------------------------------------------------------------------------- failures


def test_where_nothing_is_proven_there_is_nothing_to_catch_up_with(
    lighthouse: LighthouseServer, replicas: list[Replica]
) -> None:
    first, second = start(replicas, lighthouse, "first"), start(replicas, lighthouse, "second")

    assert at_once(first.manager.catch_up, second.manager.catch_up) == [False, False]
    assert first.manager.is_behind


def test_a_state_that_is_not_kept_still_is_offered_by_nobody(
    lighthouse: LighthouseServer, replicas: list[Replica]
) -> None:
    source = start(replicas, lighthouse, "source", explicitly_locked=False)
    assert source.round()
    assert source.transport._snapshots.open_snapshots() == []
    joiner = start(replicas, lighthouse, "joiner", explicitly_locked=False)

    assert joiner.manager.catch_up() is False


def test_a_source_that_dies_leaves_the_others(
    lighthouse: LighthouseServer, replicas: list[Replica], monkeypatch: pytest.MonkeyPatch
) -> None:
    source = running_source(replicas, lighthouse, "a")
    second = start(replicas, lighthouse, "b")
    assert second.manager.catch_up()
    second.manager.offer_state()
    looks_on(second, lighthouse)
    joiner = start(replicas, lighthouse, "joiner")

    with held_transfer(monkeypatch) as (begun, go_on), ThreadPoolExecutor(1) as pool:
        caught_up = pool.submit(joiner.manager.catch_up)
        assert begun.wait(120)
        source.dies()
        go_on.set()
        assert caught_up.result(30)

    assert joiner.manager.current_step() == second.manager.current_step()
    assert joiner.bits() == second.bits()


def test_where_the_only_source_dies_there_is_nothing_to_be_had(
    lighthouse: LighthouseServer, replicas: list[Replica], monkeypatch: pytest.MonkeyPatch
) -> None:
    source = running_source(replicas, lighthouse)
    joiner = start(replicas, lighthouse, "joiner")
    before = joiner.bits()

    with held_transfer(monkeypatch) as (begun, go_on), ThreadPoolExecutor(1) as pool:
        caught_up = pool.submit(joiner.manager.catch_up)
        assert begun.wait(120)
        source.dies()
        go_on.set()
        assert caught_up.result(30) is False

    assert joiner.bits() == before


@pytest.mark.slow
def test_a_state_that_nobody_gives_ends_with_the_limit(
    lighthouse: LighthouseServer, replicas: list[Replica], monkeypatch: pytest.MonkeyPatch
) -> None:
    source = running_source(replicas, lighthouse)
    source.transport.withdraw_checkpoint()
    source.transport.disallow_checkpoint()
    joiner = start(replicas, lighthouse, "joiner")

    with pytest.raises(TransferTimeoutError, match=r"joiner.* could not catch up within 1 s"):
        joiner.manager.catch_up(timedelta(seconds=1))
    assert joiner.manager.is_behind


def test_a_state_that_could_not_be_loaded_is_torn_until_it_is_caught_up_with_again(
    lighthouse: LighthouseServer, replicas: list[Replica]
) -> None:
    source = running_source(replicas, lighthouse)
    joiner = start(replicas, lighthouse, "joiner")
    joiner.fails_to_load = True
    with pytest.raises(StateDictLoadError, match="the state that was here is torn") as caught:
        joiner.manager.catch_up()
    assert caught.value.state_overwritten
    assert joiner.manager.is_behind
    joiner.manager.offer_state()
    assert joiner.transport._snapshots.open_snapshots() == []

    joiner.fails_to_load = False
    assert joiner.manager.catch_up()

    assert joiner.bits() == source.bits()


def test_a_state_that_was_torn_and_could_not_be_caught_up_with_in_time_is_said_to_be_torn(
    lighthouse: LighthouseServer, replicas: list[Replica], monkeypatch: pytest.MonkeyPatch
) -> None:
    running_source(replicas, lighthouse)
    joiner = start(replicas, lighthouse, "joiner")
    late = [0.0]
    monkeypatch.setattr(between_steps, "time", SimpleNamespace(monotonic=lambda: time.monotonic() + late[0]))

    def die_half_way(*_: object, **__: object) -> object:
        late[0] = 3600.0  # that is the only attempt
        error = SourceLostError("lost midway", "source")
        error.mark_torn()
        raise error

    monkeypatch.setattr(joiner.transport, "fetch_checkpoint", die_half_way)
    with pytest.raises(TransferTimeoutError, match="lost midway; the state that was here is torn") as caught:
        joiner.manager.catch_up(timedelta(seconds=60))
    assert caught.value.state_overwritten and joiner.manager.is_behind


@pytest.fixture
def port() -> Iterator[int]:
    with reserved_port() as port:
        yield port


def test_a_lighthouse_that_is_away_is_waited_for(port: int, replicas: list[Replica]) -> None:
    server = LighthouseServer(f"127.0.0.1:{port}", min_replicas=1, heartbeat_timeout_ms=5000)
    source = running_source(replicas, server)
    joiner = start(replicas, server, "joiner")
    server.shutdown()
    with ThreadPoolExecutor(1) as pool:
        caught_up = pool.submit(joiner.manager.catch_up)
        time.sleep(0.3)  # whether the question was dropped or is on its way makes no difference to what must follow
        server = LighthouseServer(f"127.0.0.1:{port}", min_replicas=1, heartbeat_timeout_ms=5000)
        answer = caught_up.result(60)
    try:
        if not answer:  # the source was not back yet when the question was asked again
            wait_until(lambda: source.manager.replica_id() in server._jobs.states["default"].members)
            assert joiner.manager.catch_up()
        assert joiner.bits() == source.bits()
    finally:
        joiner.close()
        source.close()
        server.shutdown()


# --------------------------------------------------------------------------------------------------------- into the job


def test_who_caught_up_takes_the_outcome_of_the_next_round_and_adds_nothing(
    lighthouse: LighthouseServer, replicas: list[Replica]
) -> None:
    source = running_source(replicas, lighthouse)
    joiner = start(replicas, lighthouse, "joiner")
    assert joiner.manager.catch_up()
    looks_on(joiner, lighthouse)

    def joins() -> tuple[bool, bool]:
        joiner.manager.wait_quorum()
        average = torch.full((8,), 1e9)  # whatever is in it, it must not count
        joiner.manager.allreduce(average).wait()
        took_part = joiner.manager.is_participating()
        committed = joiner.manager.should_commit()
        joiner.weights += average.repeat(NUM_FLOATS // 8)
        joiner.manager.offer_state()
        return took_part, committed

    assert at_once(source.round, joins) == [True, (False, True)]
    assert source.manager.num_participants() == 1
    assert joiner.bits() == source.bits()
    assert joiner.loaded == [0], "nothing was loaded in the round"

    assert at_once(source.round, joiner.round) == [True, True]
    assert source.manager.num_participants() == 2
    assert joiner.bits() == source.bits()


def test_a_waiting_spectator_holds_up_nobody_and_is_not_told_to_begin_alone(
    lighthouse: LighthouseServer, replicas: list[Replica]
) -> None:
    source = running_source(replicas, lighthouse)
    spectators = [start(replicas, lighthouse, f"spectator{i}") for i in range(3)]
    for spectator in spectators:
        assert spectator.manager.catch_up()
        looks_on(spectator, lighthouse)
        assert spectator.manager._steps.has_quorum
    assert not any(spectator.manager._steps._quorum.done() for spectator in spectators)  # type: ignore[union-attr]
    source.close()

    for spectator in spectators:
        spectator.manager.wait_quorum()
    assert [spectator.manager.is_participating() for spectator in spectators] == [True] * 3


# ------------------------------------------------------------------------------------------------------- standing offers


def test_an_offer_that_nobody_takes_costs_no_copy_and_ends_with_the_next_change(
    lighthouse: LighthouseServer, replicas: list[Replica]
) -> None:
    source = running_source(replicas, lighthouse)
    (offered,) = source.transport._snapshots.open_snapshots()
    source.manager.offer_state()
    assert source.transport._snapshots.open_snapshots() == [offered], "it stands already"
    assert (offered.phase, offered.digests) == (SnapshotPhase.LIVE, {})

    source.manager.disallow_state_dict_read()
    statistics = offered.statistics()
    source.manager.allow_state_dict_read()

    assert (statistics.phase, statistics.num_blocks_copied_aside) == (SnapshotPhase.CLOSED, 0)


def test_one_that_comes_in_is_served_by_the_offer_that_stands(
    lighthouse: LighthouseServer, replicas: list[Replica], monkeypatch: pytest.MonkeyPatch
) -> None:
    source = running_source(replicas, lighthouse)
    (offered,) = source.transport._snapshots.open_snapshots()
    joiner = start(replicas, lighthouse, "joiner")
    published: list[object] = []
    put = source.transport._snapshots.put
    monkeypatch.setattr(
        source.transport._snapshots,
        "put",
        lambda snapshot, **how: (published.append(snapshot), put(snapshot, **how))[1],
    )

    def comes() -> bool:
        member = lighthouse._jobs.states["default"].members.get(joiner.manager.replica_id())
        if member is None or member.request is None or not member.request.at_end:
            return False
        return is_connected(joiner, lighthouse)

    def round_once_it_comes() -> bool:
        wait_until(comes)
        return source.round()

    assert at_once(round_once_it_comes, lambda: joiner.round(contributes=False)) == [True, True]
    assert joiner.bits() == source.bits() and joiner.manager.statistics().num_healed == 1
    assert offered not in published
    steps = [snapshot.step for snapshot in published]  # type: ignore[attr-defined]
    assert steps == [4], "only the offer after the commit"


def test_received_in_place_where_nothing_of_worth_is_here(
    lighthouse: LighthouseServer, replicas: list[Replica], monkeypatch: pytest.MonkeyPatch
) -> None:
    source = running_source(replicas, lighthouse)
    joiner = start(replicas, lighthouse, "joiner")
    addresses: list[int] = []
    load = joiner.load
    monkeypatch.setitem(
        joiner.manager.hooks.registry._load,
        "outer",
        lambda state: (addresses.append(state["weights"].data_ptr() - joiner.weights.data_ptr()), load(state)),
    )
    assert joiner.manager.catch_up()
    assert source.round()
    assert joiner.manager.catch_up()

    assert addresses[0] == 0
    assert addresses[1] != 0, "the older state is one to go back to until the newer one is here"
    assert joiner.bits() == source.bits()


# ---------------------------------------------------------------------------------------------------- groups of two ranks


def two_ranks(replicas: list[Replica], lighthouse: LighthouseServer, name: str) -> list[Replica]:
    store = hosted_store()
    pair = at_once(
        *(
            lambda rank=rank: Replica(  # type: ignore[misc]
                lighthouse, name, seed=rank, rank=rank, world_size=2, store_addr="127.0.0.1", store_port=store.port
            )
            for rank in range(2)
        )
    )
    replicas.extend(pair)
    pair[0].store = store
    return pair


def test_both_ranks_of_a_group_come_to_one_version_though_the_source_went_on_between_them(
    lighthouse: LighthouseServer, replicas: list[Replica], monkeypatch: pytest.MonkeyPatch
) -> None:
    sources = two_ranks(replicas, lighthouse, "source")
    for _ in range(2):
        assert at_once(*(source.round for source in sources)) == [True, True]
    joiners = two_ranks(replicas, lighthouse, "joiner")
    fetch = joiners[1].transport.fetch_checkpoint
    asked: list[int] = []

    def fetch_late(addresses: Sequence[str], step: int, timeout: timedelta, **how: Any) -> Any:
        asked.append(step)
        if len(asked) == 1:
            while joiners[0].loaded != [0]:
                time.sleep(0.01)
            assert at_once(*(source.round for source in sources)) == [True, True]
        return fetch(addresses, step, timeout, **how)

    monkeypatch.setattr(joiners[1].transport, "fetch_checkpoint", fetch_late)
    assert at_once(*(joiner.manager.catch_up for joiner in joiners)) == [True, True]

    assert [joiner.manager.current_step() for joiner in joiners] == [3, 3]
    assert asked == [2, 3]
    assert [joiner.bits() for joiner in joiners] == [source.bits() for source in sources]


@pytest.mark.slow
def test_no_rank_is_done_before_the_other_holds_the_state(
    lighthouse: LighthouseServer, replicas: list[Replica], monkeypatch: pytest.MonkeyPatch
) -> None:
    sources = two_ranks(replicas, lighthouse, "source")
    assert at_once(*(source.round for source in sources)) == [True, True]
    joiners = two_ranks(replicas, lighthouse, "joiner")
    fetch = joiners[1].transport.fetch_checkpoint
    may_fetch = threading.Event()

    def fetch_late(*args: Any, **how: Any) -> Any:
        assert may_fetch.wait(120)
        return fetch(*args, **how)

    monkeypatch.setattr(joiners[1].transport, "fetch_checkpoint", fetch_late)
    with ThreadPoolExecutor(2) as pool:
        first, second = (pool.submit(joiner.manager.catch_up) for joiner in joiners)
        while not joiners[0].loaded:
            time.sleep(0.01)
        with pytest.raises(TimeoutError):
            first.result(0.3)
        may_fetch.set()
        assert (first.result(60), second.result(60)) == (True, True)


def test_a_rank_that_holds_the_state_waits_for_the_one_whose_transfer_failed(
    lighthouse: LighthouseServer, replicas: list[Replica], monkeypatch: pytest.MonkeyPatch
) -> None:
    sources = two_ranks(replicas, lighthouse, "source")
    assert at_once(*(source.round for source in sources)) == [True, True]
    joiners = two_ranks(replicas, lighthouse, "joiner")
    fetch = joiners[1].transport.fetch_checkpoint
    asked: list[int] = []

    def fetch_twice(addresses: Sequence[str], step: int, timeout: timedelta, **how: Any) -> Any:
        asked.append(step)
        if len(asked) == 1:
            wait_until(lambda: joiners[0].loaded == [0])
            raise SourceLostError("the source closed the connection")
        return fetch(addresses, step, timeout, **how)

    monkeypatch.setattr(joiners[1].transport, "fetch_checkpoint", fetch_twice)
    limit = timedelta(seconds=40)
    assert at_once(*(lambda j=joiner: j.manager.catch_up(limit) for joiner in joiners)) == [True, True]  # type: ignore[misc]

    assert (asked, joiners[0].loaded, joiners[1].loaded) == ([1, 1], [0], [0])
    assert [joiner.bits() for joiner in joiners] == [source.bits() for source in sources]
