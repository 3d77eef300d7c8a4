"""Members of a job read one checkpoint together: each byte leaves storage once, the rest travels between them."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from support.cold_members import Job, KilledError, Member
from support.durable_parts import NAME, PartsDouble, flip_bit, rows, storage_in
from torch.distributed import PrefixStore

from torchft_ckpt.checkpointing.durable.cooperative_read import shared_read
from torchft_ckpt.checkpointing.durable.cooperative_read.rendezvous import KeyValueStore
from torchft_ckpt.checkpointing.durable.cooperative_read.shared_read import BoxedTensor, SharedRead, deal_reading
from torchft_ckpt.checkpointing.durable.names import CheckpointName
from torchft_ckpt.checkpointing.durable.reading.checkpoint import read_checkpoint
from torchft_ckpt.checkpointing.durable.reading.reader import CheckpointReader
from torchft_ckpt.checkpointing.serving import handlers
from torchft_ckpt.checkpointing.state.target import Want
from torchft_ckpt.core.boxes.geometry import Box, whole
from torchft_ckpt.errors import (
    CheckpointNotFoundError,
    SourceLostError,
    SourceRefusedError,
    StateMismatchError,
    StorageError,
)

TOKEN = "a secret"
SHORT = timedelta(seconds=1)
ROWS, COLUMNS = 1024, 512


def state_of(seed: int = 0) -> dict[str, Any]:
    """4 MiB of weights, sharded in most tests, 2 MiB that every rank holds, and small things."""
    generator = torch.Generator().manual_seed(seed)
    return {
        "model": {
            "weight": torch.randn(ROWS, COLUMNS, generator=generator),
            "weight2": torch.randn(ROWS // 2, COLUMNS, generator=generator).to(torch.bfloat16),
            "shared": torch.randn(COLUMNS, ROWS, generator=generator),
            "bias": torch.randn(7, generator=generator),
            "step": torch.tensor(120.0),
            "empty": torch.empty(0, 4),
        },
        "lr": 0.5,
    }


@pytest.fixture
def job_of() -> Iterator[Callable[[int], Job]]:
    jobs: list[Job] = []

    def make(num_members: int) -> Job:
        jobs.append(Job(num_members))
        return jobs[-1]

    yield make
    for job in jobs:
        job.close()


def num_bytes_of(state: dict[str, Any]) -> int:
    return sum(tensor.nbytes for tensor in state["model"].values())


def save(path: Path, state: dict[str, Any], name: CheckpointName = NAME, num_replicas: int = 1) -> PartsDouble:
    double = PartsDouble(state, storage_in(path), name=name, num_replicas=num_replicas)
    double.write()
    return double


def test_four_groups_read_each_byte_once_and_each_reads_a_quarter(tmp_path: Path, job_of: Callable[[int], Job]) -> None:
    state = state_of()
    double = save(tmp_path, state)
    job = job_of(4)
    members = job.starts(lambda _: [double.storage])
    job.reads()
    for member in members:
        member.check(state)
    read = [member.num_read for member in members]
    assert sum(read) <= 1.02 * num_bytes_of(state) + 4 * 64 * 1024, read
    assert max(read) <= 1.1 * sum(read) / 4 + 64 * 1024, read
    assert [member.num_members for member in members] == [4] * 4
    assert all(member.cold_start.bytes_from_peers > num_bytes_of(state) // 2 for member in members)


def test_groups_of_two_ranks_read_their_shards_and_what_all_hold_once(
    tmp_path: Path, job_of: Callable[[int], Job]
) -> None:
    state = state_of()
    double = save(tmp_path, state)
    job = job_of(4)
    members = job.starts(lambda _: [double.storage])
    for member in members:  # member = replica * 2 + rank; uneven shards, one tensor by columns
        rank = member.number % 2
        member.boxes = {
            "model.weight": [rows((ROWS, COLUMNS), [0, 600])[rank]],
            "model.weight2": [rows((ROWS // 2, COLUMNS), [0, 300], dim=1)[rank]],
        }
    job.reads()
    for member in members:
        member.check(state)
    read = [member.num_read for member in members]
    # Columns of a piece that was written by rows: their blocks are read by both who need some of them.
    columns = state["model"]["weight2"].nbytes
    assert sum(read) <= 1.02 * num_bytes_of(state) + 8 * 64 * 1024 + 3 * columns, read


def test_a_default_device_does_not_matter(tmp_path: Path, job_of: Callable[[int], Job]) -> None:
    """Each disk has what another member wants: it is read for that one, into memory that is made for it."""
    state = state_of()
    disks = [tmp_path / f"disk{number}" for number in range(3)]
    write_parts(disks, state)
    job = job_of(3)
    members = job.starts(lambda number: [storage_in(disks[number])])
    for member in members:
        cuts = [ROWS * at // 3 for at in range(3)]
        box = rows((ROWS, COLUMNS), cuts)[(member.number + 1) % 3]
        member.boxes = {f"model.{name}": [box] if name == "weight" else [] for name in state["model"]}

    def fill(member: Member) -> None:
        assert member.attempt is not None
        wants = member.wants()
        with torch.device("meta"):
            member.attempt.fill(wants)

    job.do(lambda member: member.reads(fill))
    for member in members:
        member.check(state)


def test_members_of_any_layout_get_what_they_want(tmp_path: Path, job_of: Callable[[int], Job]) -> None:
    state = state_of()
    double = save(tmp_path, state)
    job = job_of(3)
    members = job.starts(lambda _: [double.storage])
    members[0].boxes = {"model.weight": rows((ROWS, COLUMNS), [0, 100, 900])}
    members[1].boxes = {"model.weight": rows((ROWS, COLUMNS), [0, 333], dim=1)[:1], "model.shared": []}
    job.reads()
    for member in members:
        member.check(state)


def test_local_disks_with_a_part_each_are_whole_together(tmp_path: Path, job_of: Callable[[int], Job]) -> None:
    state = state_of()
    num_members = 3
    disks = [tmp_path / f"disk{number}" for number in range(num_members)]
    write_parts(disks, state)
    job = job_of(num_members)
    members = job.starts(lambda number: [storage_in(disks[number])])
    job.reads()
    for member in members:
        member.check(state)
        assert member.reader.values()["lr"] == 0.5 or member.reader.values()["lr"][1] == 0.5
    read = [member.num_read for member in members]
    assert sum(read) <= 1.02 * num_bytes_of(state) + 4 * 64 * 1024, read


def write_parts(
    disks: Sequence[Path], state: dict[str, Any], name: CheckpointName = NAME, written: int | None = None
) -> None:
    """Each disk has its share of the rows; the first has the small things as well. `written`: so many of them are there."""
    for number, disk in enumerate(disks[:written]):
        double = PartsDouble(state, storage_in(disk), name=name, num_replicas=len(disks))
        pieces: dict[str, list[Box]] = {}
        for fqn, tensor in double.tensors.items():
            if tensor.dim() < 2 and not number:
                pieces[fqn] = [whole(tuple(tensor.shape))]
            elif tensor.dim() == 2 and tensor.numel():
                cuts = [tensor.shape[0] * at // len(disks) for at in range(len(disks))]
                pieces[fqn] = [rows(tuple(tensor.shape), cuts)[number]]
        double.write(replica=number, pieces=pieces)


def test_the_newest_step_that_is_whole_over_all_disks_is_taken(
    tmp_path: Path, job_of: Callable[[int], Job], caplog: pytest.LogCaptureFixture
) -> None:
    old, new = state_of(1), state_of(2)
    disks = [tmp_path / f"disk{number}" for number in range(3)]
    write_parts(disks, old, CheckpointName(100, "q1-a"))
    write_parts(disks, new, CheckpointName(120, "q2-b"), written=2)  # the third died before it wrote
    job = job_of(3)
    members = job.starts(lambda number: [storage_in(disks[number])])
    job.reads()
    for member in members:
        assert member.step == 100
        member.check(old)
    assert "checkpoint step-000000000120.q2-b is skipped" in caplog.text


def test_a_step_that_is_asked_for_is_found_however_many_are_newer(
    tmp_path: Path, job_of: Callable[[int], Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torchft_ckpt.checkpointing.durable.cooperative_read.plan.MAX_CANDIDATES", 2)
    state = state_of()
    for step in range(100, 106):
        save(tmp_path, state, CheckpointName(step, "q1-a"))
    job = job_of(2)
    members = job.starts(lambda _: [storage_in(tmp_path)], step=101)
    job.reads()
    assert [member.step for member in members] == [101, 101]


@pytest.mark.slow
def test_a_disk_that_is_gone_with_its_host_takes_the_newest_step_with_it(
    tmp_path: Path, job_of: Callable[[int], Job]
) -> None:
    old, new = state_of(1), state_of(2)
    disks = [tmp_path / f"disk{number}" for number in range(3)]
    for disk in disks:
        save(disk, old, CheckpointName(100, "q1-a"))
    write_parts(disks, new, CheckpointName(120, "q2-b"))
    job = job_of(3)
    members = job.starts(lambda number: [storage_in(disks[number])], patience=SHORT)
    job.reads(*members[:2])
    for member in members[:2]:
        assert member.step == 100
        member.check(old)


def test_where_there_is_nothing_all_are_told(tmp_path: Path, job_of: Callable[[int], Job]) -> None:
    job = job_of(2)
    job.starts(lambda _: [storage_in(tmp_path)])

    def fails(member: Member) -> str:
        with pytest.raises(CheckpointNotFoundError) as raised:
            member.reads()
        return str(raised.value)

    assert all("no whole checkpoint over 2 members together" in str(message) for message in job.do(fails))


@pytest.mark.slow
def test_a_member_that_never_comes_is_left_out(tmp_path: Path, job_of: Callable[[int], Job]) -> None:
    state = state_of()
    double = save(tmp_path, state)
    job = job_of(3)
    members = job.starts(lambda _: [double.storage], patience=SHORT)
    job.reads(*members[:2])
    for member in members[:2]:
        member.check(state)
    assert sum(member.num_read for member in members[:2]) <= 1.02 * num_bytes_of(state) + 4 * 64 * 1024
    # It comes now, and reads by itself.
    members[2].reads()
    members[2].check(state)
    assert members[2].num_members == 1


@pytest.mark.slow
def test_a_member_that_dies_before_it_reads_costs_its_share(
    tmp_path: Path, job_of: Callable[[int], Job], caplog: pytest.LogCaptureFixture
) -> None:
    state = state_of()
    double = save(tmp_path, state)
    job = job_of(3)
    members = job.starts(lambda _: [double.storage])

    def acts(member: Member) -> None:
        if member is members[2]:
            with pytest.raises(KilledError):
                member.reads(dies_instead_of_reading)
        else:
            member.reads()

    job.do(acts)
    for member in members[:2]:
        member.check(state)
    third = num_bytes_of(state) // 3
    assert all(member.num_read > 1.5 * third for member in members[:2])
    assert "that member 2 did not serve in time" in caplog.text


def dies_instead_of_reading(member: Member) -> None:
    """It is killed when it has said what it wants."""
    member.reader.read = member.is_killed  # type: ignore[assignment, method-assign]
    member.fills()


def test_a_member_that_dies_while_it_serves_costs_its_share(
    tmp_path: Path, job_of: Callable[[int], Job], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    state = state_of()
    double = save(tmp_path, state)
    job = job_of(3)
    members = job.starts(lambda _: [double.storage])
    has_served = threading.Event()
    send = members[1].transport.send_checkpoint

    def serves(*args: Any, **kwargs: Any) -> None:
        send(*args, **kwargs)
        snapshot = members[1].transport._snapshots.open_snapshots()[0]
        register = snapshot.register

        def registers(*arguments: Any) -> bool:
            answer = register(*arguments)
            if not has_served.is_set():
                has_served.set()
                threading.Thread(target=members[1].transport.shutdown, daemon=True).start()
            return answer

        monkeypatch.setattr(snapshot, "register", registers)

    monkeypatch.setattr(members[1].transport, "send_checkpoint", serves)
    job.reads(members[0], members[1], members[2])
    assert has_served.is_set()
    for member in members:
        member.check(state)
    assert "by itself that member 1 was to give it" in caplog.text


def test_a_member_whose_storage_fails_says_so_and_the_others_read_what_it_should_have(
    tmp_path: Path, job_of: Callable[[int], Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    state = state_of()
    save(tmp_path, state)
    job = job_of(3)
    members = job.starts(lambda _: [storage_in(tmp_path)])

    def acts(member: Member) -> None:
        if member is not members[1]:
            member.reads()
            return
        (storage,) = member.storages

        def fails(*args: Any) -> None:
            raise StorageError("the mount is gone", "storage")

        def cannot_read(member: Member) -> None:
            monkeypatch.setattr(storage, "read_into", fails)
            monkeypatch.setattr(storage, "read", fails)
            member.fills()

        with pytest.raises(StorageError):
            member.reads(cannot_read)

    job.do(acts)
    for member in (members[0], members[2]):
        member.check(state)


@pytest.mark.slow
def test_a_damaged_piece_is_nobodys_state(tmp_path: Path, job_of: Callable[[int], Job]) -> None:
    state = state_of()
    double = save(tmp_path, state)
    (data,) = (tmp_path / str(NAME)).glob("*.distcp")
    flip_bit(data, data.stat().st_size // 2)
    job = job_of(3)
    job.starts(lambda _: [double.storage])

    def acts(member: Member) -> bool:
        with pytest.raises(CheckpointNotFoundError, match="damaged"):
            member.reads()
        return True

    assert job.do(acts) == [True] * 3


def test_who_wants_what_is_not_there_hears_so_and_the_others_read_on(
    tmp_path: Path, job_of: Callable[[int], Job]
) -> None:
    state = state_of()
    double = save(tmp_path, state)
    job = job_of(3)
    members = job.starts(lambda _: [double.storage])

    def acts(member: Member) -> None:
        if member is not members[1]:
            member.reads()
            return
        other = [Want("model.other", Box((0,), (1,)), torch.zeros(1))]
        with pytest.raises(StateMismatchError):
            member.reads(lambda member: member.attempt.fill(other))  # type: ignore[union-attr]

    job.do(acts)
    for member in (members[0], members[2]):
        member.check(state)
        assert member.num_members == 2


def test_a_store_that_is_gone_leaves_everybody_to_read_alone_and_nobody_to_begin(
    tmp_path: Path, job_of: Callable[[int], Job]
) -> None:
    state = state_of()
    double = save(tmp_path, state)
    job = job_of(2)
    members = job.starts(lambda _: [double.storage])

    def store_ends() -> None:
        job.store = None  # type: ignore[assignment]  # its server ends with it

    both_read = threading.Barrier(2, action=store_ends)

    def fill(member: Member) -> None:
        both_read.wait(30)
        member.fills()

    def acts(member: Member) -> None:
        with pytest.raises(SourceLostError, match="the store at which the members meet cannot be reached") as caught:
            member.reads(fill)
        assert caught.value.state_overwritten

    job.do(acts)
    for member in members:
        member.check(state)
        assert member.num_read >= num_bytes_of(state)


def test_a_target_may_be_wanted_twice_and_have_any_strides(tmp_path: Path, job_of: Callable[[int], Job]) -> None:
    state = state_of()
    double = save(tmp_path, state)
    job = job_of(2)
    job.starts(lambda _: [double.storage])
    box = whole((ROWS, COLUMNS))

    def reads(member: Member) -> list[torch.Tensor]:
        targets = [torch.zeros(COLUMNS, ROWS).t(), torch.zeros(ROWS, COLUMNS)]
        wants = [Want("model.weight", box, target) for target in targets]
        member.reads(lambda member: member.attempt.fill(wants))  # type: ignore[union-attr]
        return targets

    for targets in job.do(reads):
        for target in targets:  # type: ignore[attr-defined]
            assert torch.equal(target, state["model"]["weight"])


def test_shares_cover_what_is_wanted_once_and_are_read_by_who_can(tmp_path: Path) -> None:
    state = state_of()
    double = save(tmp_path, state)
    checkpoint = read_checkpoint([double.storage], NAME)
    part = checkpoint.parts[0].name
    box = whole((ROWS, COLUMNS))
    wanted = {0: {"model.weight": [box]}, 1: {"model.weight": [box]}, 2: {"model.weight": [box], "model.none": [box]}}
    shares = deal_reading(checkpoint.tensors, wanted, {part: frozenset({1, 2})}, 3)
    assert shares[0] == []
    volumes = [sum(piece.volume for _, piece in of_member) for of_member in shares]
    assert sum(volumes) == box.volume
    assert abs(volumes[1] - volumes[2]) <= COLUMNS * 64
    # Who can read it does not want it.
    shares = deal_reading(checkpoint.tensors, {0: wanted[0], 1: {}}, {part: frozenset({1})}, 3)
    assert [len(of_member) for of_member in shares] == [0, 1, 0]


@pytest.mark.slow
def test_a_member_that_stands_still_is_not_waited_for_without_end(
    tmp_path: Path, job_of: Callable[[int], Job], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    state = state_of()
    double = save(tmp_path, state)
    job = job_of(2)
    members = job.starts(lambda _: [double.storage], patience=SHORT)
    goes_on = threading.Event()

    def fill(member: Member) -> None:
        if member is members[1]:
            read = member.reader.read

            def reads(wants: Sequence[Want]) -> None:
                goes_on.wait(30)
                read(wants)

            monkeypatch.setattr(member.reader, "read", reads)
        member.fills()
        goes_on.set()

    job.do(lambda member: member.reads(fill))
    for member in members:
        member.check(state)


@pytest.mark.slow
def test_a_member_leaves_only_when_the_others_have_what_it_serves(
    tmp_path: Path, job_of: Callable[[int], Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    state = state_of()
    double = save(tmp_path, state)
    job = job_of(2)
    members = job.starts(lambda _: [double.storage])
    goes_on, has_left = threading.Event(), threading.Event()
    fetch = SharedRead._fetch

    def fetches_late(read: SharedRead, *args: Any) -> bool:
        assert read._rendezvous.leads or goes_on.wait(30)
        return fetch(read, *args)

    monkeypatch.setattr(SharedRead, "_fetch", fetches_late)

    def fill(member: Member) -> None:
        member.fills()
        if member is members[0]:
            has_left.set()

    with ThreadPoolExecutor(2) as pool:
        reading = [pool.submit(member.reads, fill) for member in members]
        assert not has_left.wait(1.0)
        goes_on.set()
        for future in reading:
            future.result(60)
    for member in members:
        member.check(state)
        assert member.num_read < 0.6 * num_bytes_of(state)


@pytest.mark.slow
def test_a_part_that_only_a_dead_member_could_read_is_a_named_error(
    tmp_path: Path, job_of: Callable[[int], Job]
) -> None:
    state = state_of()
    disks = [tmp_path / f"disk{number}" for number in range(3)]
    write_parts(disks, state)
    job = job_of(3)
    members = job.starts(lambda number: [storage_in(disks[number])])

    def acts(member: Member) -> None:
        if member is members[2]:
            with pytest.raises(KilledError):
                member.reads(dies_instead_of_reading)
            return
        with pytest.raises(CheckpointNotFoundError, match="no piece"):
            member.reads()

    job.do(acts)


@pytest.mark.slow
def test_what_only_a_member_could_read_that_has_died_since_it_came_does_not_count(
    tmp_path: Path, job_of: Callable[[int], Job]
) -> None:
    old, new = state_of(1), state_of(2)
    disks = [tmp_path / f"disk{number}" for number in range(3)]
    for disk in disks:
        save(disk, old, CheckpointName(100, "q1-a"))
    write_parts(disks, new, CheckpointName(120, "q2-b"))
    job = job_of(3)
    members = job.starts(lambda number: [storage_in(disks[number])])
    rendezvous = members[2].cold_start._rendezvous
    publish = rendezvous.publish

    def dies_after(topic: str, message: Any) -> None:
        publish(topic, message)
        members[2].is_killed()

    rendezvous.publish = dies_after  # type: ignore[method-assign]

    def acts(member: Member) -> None:
        if member is members[2]:
            with pytest.raises(KilledError):
                member.reads()
        else:
            member.reads()

    job.do(acts)
    for member in members[:2]:
        assert member.step == 100
        member.check(old)


def test_members_with_a_token_read_each_byte_once_too_and_show_it_to_nobody(
    tmp_path: Path, job_of: Callable[[int], Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The token is the transport's where the read is given none."""
    shown: list[str | None] = []
    matches = handlers.bearer_matches
    monkeypatch.setattr(
        handlers, "bearer_matches", lambda header, token: shown.append(header) or matches(header, token)
    )
    state = state_of()
    double = save(tmp_path, state)
    job = job_of(3)
    members = job.starts(lambda _: [double.storage], transport_token=TOKEN)
    job.reads()
    for member in members:
        member.check(state)
    assert sum(member.num_read for member in members) <= 1.02 * num_bytes_of(state) + 4 * 64 * 1024
    assert shown == []


@pytest.mark.slow
def test_what_was_said_at_an_earlier_start_of_the_same_name_counts_for_nothing(
    tmp_path: Path, job_of: Callable[[int], Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = keys_put(monkeypatch)
    state = state_of()
    double = save(tmp_path, state)
    job = job_of(2)
    earlier = job.starts(lambda _: [double.storage], transport_token=TOKEN, start="first")
    job.reads()
    assert earlier[0].num_members == 2
    say_again(job, keys, "/1")
    victim = Member(job, 0, [double.storage], transport_token=TOKEN, start="second", patience=SHORT)
    job.members.append(victim)
    victim.reads()
    victim.check(state)
    assert victim.num_members == 1


def test_what_the_first_member_said_at_an_earlier_start_leads_nobody_to_an_older_checkpoint(
    tmp_path: Path, job_of: Callable[[int], Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = keys_put(monkeypatch)
    save(tmp_path, state_of(1), CheckpointName(100, "q1-a"))
    job = job_of(2)
    job.starts(lambda _: [storage_in(tmp_path)], transport_token=TOKEN, start="first")
    job.reads()
    save(tmp_path, state_of(2), CheckpointName(120, "q2-b"))
    say_again(job, keys, "/0")
    victim = Member(job, 1, [storage_in(tmp_path)], transport_token=TOKEN, start="second", patience=SHORT)
    job.members.append(victim)
    with pytest.raises(SourceRefusedError, match="go on from checkpoint step-000000000100"):
        victim.reads()
    assert victim.step == 120


def keys_put(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Return all keys of the store that are put from here on."""
    keys: set[str] = set()
    put = KeyValueStore.put

    def puts(store: KeyValueStore, key: str, data: bytes) -> None:
        keys.update((store._key(key), store._key(key, 0)))
        put(store, key, data)

    monkeypatch.setattr(KeyValueStore, "put", puts)
    return keys


def say_again(job: Job, keys: set[str], of: str) -> None:
    """Put what a member said at the first start into the place of the second one."""
    first, second = PrefixStore("first", job.store), PrefixStore("second", job.store)
    for key in keys:
        if key.removesuffix("/chunk0").endswith(of):
            second.set(key, first.get(key))  # type: ignore[arg-type]


@pytest.mark.parametrize("token", [None, TOKEN])
def test_a_piece_that_another_gives_is_what_was_saved_or_is_read_again(
    tmp_path: Path,
    job_of: Callable[[int], Job],
    token: str | None,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """One of the members has bad memory: what it serves has a right digest, of other values."""
    state = state_of()
    double = save(tmp_path, state)
    job = job_of(2)
    members = job.starts(lambda _: [double.storage], transport_token=token)
    read_share = shared_read._read_share

    def reads(reader: CheckpointReader, *arguments: Any) -> dict[str, BoxedTensor]:
        served = read_share(reader, *arguments)
        if reader is members[1].reader:
            for boxed in served.values():
                boxed.pieces = [(box, data + 1) for box, data in boxed.pieces]
        return served

    monkeypatch.setattr(shared_read, "_read_share", reads)
    job.reads()
    for member in members:
        member.check(state)
    assert "by others that are not as they were written, and reads them by itself" in caplog.text
    assert members[0].cold_start.bytes_from_peers > 0
