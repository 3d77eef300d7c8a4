"""Groups that start without a state: one reads, the others receive it. Real managers and a real lighthouse in one process."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from support.at_once import at_once
from support.replicas import SHORT, Replica, lighthouse_of
from support.stores import hosted_store
from torch import nn

from torchft_ckpt import Checkpointer, LighthouseServer, Restored
from torchft_ckpt.__main__ import main
from torchft_ckpt.checkpointing.durable.reading.reader import CheckpointReader
from torchft_ckpt.checkpointing.durable.storage.local_storage import LocalStorage
from torchft_ckpt.core.coordination import starting
from torchft_ckpt.core.coordination.messages import Start, Starts, StartTold, StateLocated
from torchft_ckpt.core.durable.restore_source import RestoreSource
from torchft_ckpt.errors import CheckpointError, CheckpointNotFoundError, SourceLostError, StorageError
from torchft_ckpt.manager import restoring, step_client
from torchft_ckpt.manager import starting as starting_rank
from torchft_ckpt.manager.healing import Healing
from torchft_ckpt.manager.serving import StateServing
from torchft_ckpt.manager.starting import StartingRank

WIDTH = 512
BYTES = 4 * WIDTH * (WIDTH + 1)


@pytest.fixture
def lighthouse() -> LighthouseServer:
    return lighthouse_of(2)


@pytest.fixture
def start(lighthouse: LighthouseServer) -> Callable[..., Rank]:
    """Starts a rank."""
    started: list[Rank] = []

    def make(name: str, **options: Any) -> Rank:
        rank = Rank(lighthouse, name, seed=len(started), **options)
        started.append(rank)
        return rank

    return make


class Rank(Replica):
    """A tiny model with its manager."""

    def __init__(self, lighthouse: LighthouseServer, name: str, seed: int, **options: Any) -> None:
        self.num_fetched = 0
        super().__init__(lighthouse, name, seed, min_replica_size=2, **options)

    def build(self) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = nn.Linear(WIDTH, WIDTH)
        return model, torch.optim.SGD(model.parameters(), lr=0.1)

    def state(self) -> dict[str, Any]:
        return self.model.state_dict()

    def load(self, state: dict[str, Any]) -> None:
        self.num_fetched += 1
        self.model.load_state_dict(state)

    def batch(self) -> torch.Tensor:
        return torch.ones(2, WIDTH)

    def begins(self) -> int:
        """Step until a step counts: one that read by itself may have to come in as any newcomer, in an iteration for itself.

        Returns how many steps it has taken.
        """
        return 1 if self.step() else 1 + self.begins()


def together(act: Callable[[Rank], Any], *ranks: Rank) -> list[Any]:
    return at_once(*(partial(act, rank) for rank in ranks))


def restores(place: Path, local: Path | None = None, **options: Any) -> Callable[[Rank], Restored | Exception]:
    """Returns what restores a rank, and returns what it raises."""

    def restore(rank: Rank) -> Restored | Exception:
        checkpointer = Checkpointer(place, manager=rank.manager, local_location=local)
        try:
            return checkpointer.restore(**{"timeout": SHORT, **options})
        except Exception as error:
            return error
        finally:
            checkpointer.shutdown()

    return restore


@pytest.fixture
def saved(tmp_path: Path, start: Callable[..., Rank]) -> dict[int, list[list[int]]]:
    """A job's checkpoints of two steps, and what is in them."""
    ranks = [start(name) for name in "yz"]
    bits: dict[int, list[list[int]]] = {}
    checkpointers = [Checkpointer(tmp_path, manager=rank.manager) for rank in ranks]
    for step in (1, 2):
        assert together(Rank.step, *ranks) == [True, True]
        for future in [one.save(rank_state={"at": step, "who": number}) for number, one in enumerate(checkpointers)]:
            future.result(30)
        bits[step] = ranks[0].bits()
    for rank, checkpointer in zip(ranks, checkpointers, strict=True):
        checkpointer.shutdown()
        rank.manager.shutdown()
    return bits


def flip_a_bit(place: Path, step: int) -> None:
    (path, *_) = sorted(place.glob(f"step-{step:012d}.*/*.distcp"))
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 16
    path.write_bytes(data)


def outcomes(found: list[Restored | Exception]) -> list[tuple[RestoreSource, int | None] | Exception]:
    return [(one.source, one.step) if isinstance(one, Restored) else one for one in found]


STORAGE = RestoreSource.STORAGE


def test_one_of_four_groups_reads_each_byte_once_and_the_others_receive_it(
    start: Callable[..., Rank], tmp_path: Path, saved: dict[int, list[list[int]]]
) -> None:
    ranks = [start(name) for name in "abcd"]
    found = together(restores(tmp_path), *ranks)
    assert outcomes(found) == [(STORAGE, 2)] * 4
    from_storage = [one.bytes_from_storage for one in found]
    assert sorted(from_storage)[:3] == [0, 0, 0] and BYTES <= sum(from_storage) <= 1.02 * BYTES
    assert sum(one.bytes_from_peers > 0 for one in found) == 3
    assert [rank.bits() for rank in ranks] == [saved[2]] * 4
    assert [rank.manager.current_step() for rank in ranks] == [2] * 4
    assert together(Rank.step, *ranks) == [True] * 4
    assert len({str(rank.bits()) for rank in ranks}) == 1


def test_who_begins_with_the_others_does_not_get_the_state_under_the_name_that_it_had_as_they_started(
    start: Callable[..., Rank], tmp_path: Path, saved: dict[int, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one that gives it is slow to serve it under the name that the job has for it, and still offers it as one that starts.

    It was refused, so the other computed its first iteration for itself alone.
    """
    ranks, has_ended = [start(name) for name in "ab"], threading.Event()
    together(restores(tmp_path), *ranks)
    serve, fetch = StateServing.serve, Healing._run

    def serve_late(*how: Any, **more: Any) -> None:
        has_ended.wait(0.3)
        serve(*how, **more)

    def fetches(*how: Any) -> Any:
        try:
            return fetch(*how)
        finally:
            has_ended.set()

    monkeypatch.setattr(StateServing, "serve", serve_late)
    monkeypatch.setattr(Healing, "_run", fetches)
    assert together(Rank.begins, *ranks) == [1, 1]


def test_each_gets_what_its_ranks_saved_of_their_own(
    start: Callable[..., Rank], tmp_path: Path, saved: dict[int, list[list[int]]]
) -> None:
    found = together(restores(tmp_path), *(start(name) for name in "yz"))
    assert [one.rank_state for one in found] == [{"at": 2, "who": 0}, {"at": 2, "who": 1}]


def test_groups_of_two_ranks_read_each_byte_once_within_the_group_that_reads(
    start: Callable[..., Rank], tmp_path: Path, saved: dict[int, list[list[int]]]
) -> None:
    stores = {name: hosted_store() for name in "ab"}

    def begin(name: str, rank: int) -> Rank:
        return start(name, rank=rank, world_size=2, store_addr="127.0.0.1", store_port=stores[name].port)

    with ThreadPoolExecutor(4) as pool:
        ranks = [future.result(30) for future in [pool.submit(begin, name, rank) for name in "ab" for rank in range(2)]]
    found = together(restores(tmp_path), *ranks)
    assert outcomes(found) == [(STORAGE, 2)] * 4
    assert BYTES <= sum(one.bytes_from_storage for one in found) <= 1.02 * BYTES + 2 * 64 * 1024
    assert [rank.bits() for rank in ranks] == [saved[2]] * 4
    assert together(Rank.step, *ranks) == [True] * 4


@pytest.fixture
def start_groups(start: Callable[..., Rank]) -> Callable[..., list[Rank]]:
    """Starts groups of so many ranks each."""

    def begin(**sizes: int) -> list[Rank]:
        stores = {name: hosted_store() for name in sizes}

        def one(name: str, rank: int) -> Rank:
            return start(name, rank=rank, world_size=sizes[name], store_addr="127.0.0.1", store_port=stores[name].port)

        with ThreadPoolExecutor(sum(sizes.values())) as pool:
            begun = [pool.submit(one, name, rank) for name, size in sizes.items() for rank in range(size)]
            return [future.result(30) for future in begun]

    return begin


@pytest.mark.parametrize("sizes", [{"a": 2, "b": 2}, {"a": 1, "b": 1}])
def test_what_differs_between_ranks_comes_to_its_rank_or_somebody_says_so(
    start_groups: Callable[..., list[Rank]], tmp_path: Path, sizes: dict[str, int], caplog: pytest.LogCaptureFixture
) -> None:
    """Each rank of a group has a stage of its own, and all stages have one name."""
    saved = start_groups(y=2, z=2)
    for rank in saved:
        nn.init.constant_(rank.model.weight, 1.0 + rank.manager.group_rank)
    assert together(Rank.step, *saved) == [True] * 4
    checkpointers = [Checkpointer(tmp_path, manager=rank.manager, is_replicated=False) for rank in saved]
    for future in [one.save() for one in checkpointers]:
        future.result(30)
    bits = [rank.bits() for rank in saved]
    assert bits[:2] == bits[2:] and bits[0] != bits[1]
    for rank, checkpointer in zip(saved, checkpointers, strict=True):
        checkpointer.shutdown()
        rank.manager.shutdown()
    caplog.clear()
    ranks = start_groups(**sizes)
    found = together(restores(tmp_path), *ranks)
    assert outcomes(found) == [(STORAGE, 1)] * len(ranks)
    assert [bits.index(rank.bits()) for rank in ranks] == [rank.manager.group_rank for rank in ranks]
    assert "in groups of 2 ranks each rank gets what the same rank wrote" in caplog.text


def test_damage_that_two_find_sends_all_groups_to_the_checkpoint_before(
    start: Callable[..., Rank], tmp_path: Path, saved: dict[int, list[list[int]]], caplog: pytest.LogCaptureFixture
) -> None:
    flip_a_bit(tmp_path, 2)
    ranks = [start(name) for name in "abc"]
    found = together(restores(tmp_path), *ranks)
    assert outcomes(found) == [(STORAGE, 1)] * 3
    assert [rank.bits() for rank in ranks] == [saved[1]] * 3
    assert sorted(one.bytes_from_storage for one in found)[:2] == [0, 0]
    assert caplog.text.count("as other groups have found") == 1


def test_where_all_are_damaged_nobody_begins_at_step_0(
    start: Callable[..., Rank], tmp_path: Path, saved: dict[int, list[list[int]]]
) -> None:
    for step in (1, 2):
        flip_a_bit(tmp_path, step)
    for found in together(restores(tmp_path), start("a"), start("b")):
        assert isinstance(found, CheckpointNotFoundError) and "damaged: step-000000000002" in str(found)


def holds_up(monkeypatch: pytest.MonkeyPatch, act: Callable[[], object]) -> threading.Event:
    """Have the first rank that reads do something before that; return what is set then."""
    has_begun = threading.Event()
    read = CheckpointReader.read_own

    def reads(reader: CheckpointReader, *args: Any) -> None:
        if not has_begun.is_set():
            has_begun.set()
            act()
        read(reader, *args)

    monkeypatch.setattr(CheckpointReader, "read_own", reads)
    return has_begun


def test_where_the_one_that_reads_is_lost_the_next_one_reads(
    start: Callable[..., Rank], tmp_path: Path, saved: dict[int, list[list[int]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = [start(name) for name in "abc"]

    def dies() -> None:
        ranks[0].manager.shutdown()  # its transport and its connection to the lighthouse end
        raise OSError("it is killed")

    holds_up(monkeypatch, dies)
    lost, *found = together(restores(tmp_path), *ranks)
    assert isinstance(lost, CheckpointError) and lost.state_overwritten
    assert outcomes(found) == [(STORAGE, 2)] * 2
    assert [rank.bits() for rank in ranks[1:]] == [saved[2]] * 2
    assert together(Rank.step, *ranks[1:]) == [True, True]


def test_where_the_one_that_reads_stands_still_the_next_one_reads_and_it_comes_in_later(
    start: Callable[..., Rank], tmp_path: Path, saved: dict[int, list[list[int]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(starting, "STALLS_S", 1.5)
    others_have_it = threading.Event()
    holds_up(monkeypatch, lambda: others_have_it.wait(30))
    ranks = [start(name) for name in "ab"]

    def restore(rank: Rank) -> Restored | Exception:
        found = restores(tmp_path)(rank)
        others_have_it.set()
        return found

    assert outcomes(together(restore, *ranks)) == [(STORAGE, 2)] * 2
    assert [rank.bits() for rank in ranks] == [saved[2]] * 2
    assert together(Rank.begins, *ranks) == [True, True]


def test_who_is_told_to_begin_and_has_nothing_reads_what_it_can(
    start: Callable[..., Rank], tmp_path: Path, saved: dict[int, list[list[int]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    begins = StateLocated(request_id=1, starts=StartTold(does=Start.BEGINS))
    monkeypatch.setattr(StartingRank, "says", lambda *_: begins)
    a = start("a")
    assert outcomes([restores(tmp_path)(a)]) == [(STORAGE, 2)]
    assert a.bits() == saved[2] and a.manager.current_step() == 2


def refuses(monkeypatch: pytest.MonkeyPatch, rank: Rank, *, is_torn: bool = False) -> list[str]:
    """Nothing that others send comes through to a rank; return whom it was to receive it from, each time."""
    starting_rank = rank.manager.hooks.starting_rank()
    asked: list[str] = []

    def receives(located: StateLocated, limit: timedelta) -> Exception | None:
        asked.append(" ".join(sorted(source.replica_id[0] for source in located.sources)))
        if is_torn:
            starting_rank.client.load_torn()
        return SourceLostError("a firewall", "network")

    monkeypatch.setattr(starting_rank, "receive", receives)
    return asked


@pytest.mark.parametrize("is_torn", [False, True])
def test_a_group_that_receives_nothing_reads_it_itself(
    start: Callable[..., Rank],
    tmp_path: Path,
    saved: dict[int, list[list[int]]],
    monkeypatch: pytest.MonkeyPatch,
    is_torn: bool,
) -> None:
    ranks = [start(name) for name in "ab"]
    asked = refuses(monkeypatch, ranks[1], is_torn=is_torn)
    found = together(restores(tmp_path), *ranks)
    assert outcomes(found) == [(STORAGE, 2)] * 2 and asked == ["a", "a"]
    assert [rank.bits() for rank in ranks] == [saved[2]] * 2
    assert all(one.bytes_from_storage >= BYTES for one in found)
    assert together(Rank.begins, *ranks) == [True, True]


def test_ranks_of_which_one_receives_nothing_have_one_state(
    start_groups: Callable[..., list[Rank]],
    tmp_path: Path,
    saved: dict[int, list[list[int]]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ranks = start_groups(a=2, b=2)
    asked = refuses(monkeypatch, ranks[3], is_torn=True)
    assert outcomes(together(restores(tmp_path), *ranks)) == [(STORAGE, 2)] * 4 and asked == ["a", "a"]
    assert [rank.bits() for rank in ranks] == [saved[2]] * 4
    assert together(Rank.begins, *ranks) == [True] * 4


def test_one_that_says_it_has_a_later_state_and_serves_none_holds_nobody_up(
    start: Callable[..., Rank], tmp_path: Path, saved: dict[int, list[list[int]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(starting_rank, "STALLS_S", 1.0)
    liar, *ranks = (start(name) for name in "zab")
    step, is_over = 2**39, threading.Event()
    liar.manager.load_state_dict({"step": step, "batches_committed": 0})
    says = Starts(holds=f"step-{step:012d}.q1-a")
    lying = liar.manager.hooks.starting_rank()

    def lies() -> None:
        while not is_over.wait(0.1):
            lying.says(says, time.monotonic() + 5.0)

    with ThreadPoolExecutor(1) as pool:
        pool.submit(lies)
        found = together(restores(tmp_path), *ranks)
        is_over.set()
    assert outcomes(found) == [(STORAGE, 2)] * 2
    assert [rank.bits() for rank in ranks] == [saved[2]] * 2


@pytest.mark.parametrize("allows", [False, True])
def test_nobody_begins_at_step_0_beside_a_checkpoint_of_one_that_is_gone_unless_that_is_allowed(
    start: Callable[..., Rank], lighthouse: LighthouseServer, tmp_path: Path, allows: bool
) -> None:
    gone, *ranks = (start(name) for name in "zab")
    name = "step-000000000008.q1-a"
    gone.manager.hooks.starting_rank().says(Starts(readable=name), time.monotonic() + 5.0)
    gone.manager.shutdown()
    if allows:
        assert main(["allow-step-loss", "--lighthouse", lighthouse.address()]) == 0
    for found in together(restores(tmp_path), *ranks):
        if allows:
            assert isinstance(found, Restored) and found.source is RestoreSource.NOTHING
        else:
            assert isinstance(found, CheckpointNotFoundError) and f"it can read {name}" in str(found)


def test_an_older_checkpoint_than_that_of_one_that_is_gone_is_taken_with_a_word(
    start: Callable[..., Rank], tmp_path: Path, saved: dict[int, list[list[int]]], caplog: pytest.LogCaptureFixture
) -> None:
    gone, *ranks = (start(name) for name in "wab")
    name = "step-000000000008.q1-a"
    gone.manager.hooks.starting_rank().says(Starts(readable=name), time.monotonic() + 5.0)
    gone.manager.shutdown()
    assert outcomes(together(restores(tmp_path), *ranks)) == [(STORAGE, 2)] * 2
    assert caplog.text.count(f"{name} is newer, and nobody who is here can read it") == 2


def test_what_a_rank_computes_as_it_loads_counts_as_going_on_and_waiting_does_not(
    start: Callable[..., Rank], tmp_path: Path, saved: dict[int, list[list[int]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[int] = []
    counts: list[Callable[[], int]] = []
    at_work, load = StartingRank.at_work, Rank.load

    def watched(starting: StartingRank, starts: Starts, done_bytes: Callable[[], int]) -> Any:
        counts.append(done_bytes)
        return at_work(starting, starts, done_bytes)

    def loads(rank: Rank, state: dict[str, Any]) -> None:
        if not done:  # the one that reads
            before, until = counts[0](), time.thread_time() + 0.3
            threading.Event().wait(0.3)
            waited = counts[0]()
            while time.thread_time() < until:
                pass
            done.extend([waited - before, counts[0]() - waited])
        load(rank, state)

    monkeypatch.setattr(StartingRank, "at_work", watched)
    monkeypatch.setattr(Rank, "load", loads)
    assert outcomes(together(restores(tmp_path), *[start(name) for name in "ab"])) == [(STORAGE, 2)] * 2
    assert done[0] <= 1 and done[1] >= 2


def test_who_comes_to_a_running_job_heals_from_it_and_disturbs_nobody(
    start: Callable[..., Rank], tmp_path: Path, saved: dict[int, list[list[int]]]
) -> None:
    a, b = start("a"), start("b")
    together(restores(tmp_path), a, b)
    together(Rank.step, a, b)
    c = start("c")
    assert c.manager.newest_step_of_peers(SHORT) == 3
    found = restores(tmp_path)(c)
    assert isinstance(found, Restored), found
    assert (found.source, found.step, found.bytes_from_storage, found.rank_state) == (RestoreSource.PEERS, 3, 0, None)
    assert together(Rank.step, a, b) == [True, True]
    assert a.manager.statistics().num_discarded == 0


def test_who_finds_nobody_to_start_with_reads_for_itself_in_time(
    start: Callable[..., Rank], tmp_path: Path, saved: dict[int, list[list[int]]], caplog: pytest.LogCaptureFixture
) -> None:
    a = start("a")  # min_replicas is 2
    assert outcomes([restores(tmp_path, timeout=timedelta(seconds=3))(a)]) == [(STORAGE, 2)]
    assert "starts with nobody: 1 of at least 2 replica groups are here" in caplog.text
    b = start("b")
    assert together(Rank.step, a, b) == [True, True]
    assert a.bits() == b.bits()


def test_a_rank_that_does_not_restore_is_waited_for_by_none_of_its_group(
    start: Callable[..., Rank], tmp_path: Path, saved: dict[int, list[list[int]]]
) -> None:
    store = hosted_store()
    with ThreadPoolExecutor(2) as pool:
        options = {"world_size": 2, "store_addr": "127.0.0.1", "store_port": store.port}
        ranks = [one.result(30) for one in [pool.submit(start, "a", rank=rank, **options) for rank in range(2)]]
        waiting = pool.submit(restores(tmp_path), ranks[0])
        time.sleep(0.2)
        pool.submit(ranks[1].manager.start_quorum)
        found = waiting.result(30)
        assert (isinstance(found, SourceLostError) and "another rank of this group asks for a step" in str(found)) or (
            "group rank 1 asks for a step" in str(found)
        )
        for rank in ranks:
            rank.manager.shutdown()


def test_who_waits_for_one_that_reads_says_so(
    start: Callable[..., Rank],
    tmp_path: Path,
    saved: dict[int, list[list[int]]],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(restoring, "PENDING_LOG_S", 0.2)
    holds_up(monkeypatch, lambda: said(caplog, "s to start: a:"))
    assert outcomes(together(restores(tmp_path), *[start(name) for name in "ab"])) == [(STORAGE, 2)] * 2
    assert "s to start: a:" in caplog.text and "reads a checkpoint, and gives it to the others" in caplog.text


def test_a_rank_that_waits_for_the_others_of_its_group_says_for_which(
    start_groups: Callable[..., list[Rank]],
    tmp_path: Path,
    saved: dict[int, list[list[int]]],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(step_client, "PENDING_LOG_S", 0.2)
    first, second = start_groups(a=2)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(restores(tmp_path, timeout=timedelta(seconds=4)), first)
        said(caplog, "for other ranks of this group to restore the checkpoint with it: group ranks 1 have not come")
        found = [restores(tmp_path, timeout=timedelta(seconds=0.5))(second), waiting.result(60)]
    assert outcomes(found) == [(STORAGE, 2)] * 2


def said(caplog: pytest.LogCaptureFixture, text: str) -> None:
    """Wait until the log has it."""
    until = time.monotonic() + 120
    while text not in caplog.text and time.monotonic() < until:
        time.sleep(0.01)
    assert text in caplog.text


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_nobody_begins_at_step_0_if_one_of_two_storages_cannot_be_listed(
    start_groups: Callable[..., list[Rank]],
    tmp_path: Path,
    saved: dict[int, list[list[int]]],
    monkeypatch: pytest.MonkeyPatch,
    num_ranks: int,
) -> None:
    names = LocalStorage.names

    def fails(storage: LocalStorage, directory: str = "") -> list[str]:
        if storage.location == str(tmp_path):
            raise StorageError("the share is away", "storage")
        return names(storage, directory)

    monkeypatch.setattr(LocalStorage, "names", fails)
    ranks = start_groups(a=num_ranks)
    restore = restores(tmp_path, timeout=timedelta(seconds=3), local=tmp_path / "disk")
    for found in together(restore, *ranks):
        assert isinstance(found, CheckpointNotFoundError) and "the share is away" in str(found)


def test_who_receives_a_checkpoint_of_which_it_can_read_nothing_says_that_its_own_state_is_not_restored(
    start: Callable[..., Rank], tmp_path: Path, saved: dict[int, list[list[int]]], caplog: pytest.LogCaptureFixture
) -> None:
    """The disk of its host is a new one."""
    there, here = start("y"), start("z")
    places = {there: tmp_path, here: tmp_path / "new"}
    found = together(lambda rank: restores(places[rank])(rank), there, here)
    assert outcomes(found) == [(STORAGE, 2)] * 2
    assert [one.rank_state for one in found] == [{"at": 2, "who": 0}, None]
    assert "it came from another group, and this rank can read nothing of the checkpoint" in caplog.text
