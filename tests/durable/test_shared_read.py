"""Ranks of a group read one checkpoint together: each byte leaves storage once, the rest travels between them."""

from __future__ import annotations

import json
import logging
import math
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash
from support.durable_parts import NAME, PartsDouble, flip_bit, rows, storage_in
from support.reading_ranks import Group, Member
from support.relay import Passing, Relay

from torchft_ckpt.checkpointing.durable.cooperative_read import lookup
from torchft_ckpt.checkpointing.durable.cooperative_read.shared_read import deal_reading
from torchft_ckpt.checkpointing.durable.names import CheckpointName
from torchft_ckpt.checkpointing.durable.reading.checkpoint import read_checkpoint
from torchft_ckpt.checkpointing.state.target import Want
from torchft_ckpt.core.boxes.geometry import Box, whole
from torchft_ckpt.errors import (
    CheckpointDamagedError,
    CheckpointNotFoundError,
    SourceLostError,
    StateMismatchError,
    StorageError,
)

ROWS, COLUMNS = 1024, 512
OLDER = CheckpointName(NAME.step - 20, NAME.save_id)


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
def group_of() -> Iterator[Callable[..., Group]]:
    groups: list[Group] = []

    def make(num_ranks: int, *places: Path, **options: Any) -> Group:
        """`places`: one that all see, or one of each rank."""
        groups.append(Group(num_ranks, lambda rank: [storage_in(places[rank % len(places)])], **options))
        return groups[-1]

    yield make
    for group in groups:
        group.close()


def num_bytes_of(state: dict[str, Any]) -> int:
    return sum(tensor.nbytes for tensor in state["model"].values())


def save(path: Path, state: dict[str, Any], name: CheckpointName = NAME) -> None:
    PartsDouble(state, storage_in(path), name=name).write()


def flip_in(place: Path, name: CheckpointName) -> None:
    (data,) = (place / str(name)).glob("*.distcp")
    flip_bit(data, data.stat().st_size // 2)


@pytest.mark.parametrize("token", [None, "a secret"])
def test_four_ranks_with_equal_boxes_read_each_byte_once_and_each_reads_a_quarter(
    tmp_path: Path, group_of: Callable[..., Group], token: str | None
) -> None:
    state = state_of()
    save(tmp_path, state)
    group = group_of(4, tmp_path, token=token)
    assert group.do() == [NAME.step] * 4
    for member in group.members:
        member.check(state)
    read = [member.num_read for member in group.members]
    assert sum(read) <= 1.02 * num_bytes_of(state) + 4 * 64 * 1024, read
    assert max(read) <= 1.1 * sum(read) / 4 + 64 * 1024, read
    assert all(member.bytes_from_peers > num_bytes_of(state) // 2 for member in group.members)
    # What comes from others, and what is digested, is told as it goes on: who looks after the group waits for as long.
    assert all(m.shared.done_bytes >= m.bytes_from_peers * (2 if token else 1) for m in group.members)


def test_ranks_read_their_shards_and_what_all_hold_once(tmp_path: Path, group_of: Callable[..., Group]) -> None:
    state = state_of()
    save(tmp_path, state)
    group = group_of(2, tmp_path)
    for member in group.members:  # uneven shards, one tensor by columns
        member.boxes = {
            "model.weight": [rows((ROWS, COLUMNS), [0, 600])[member.rank]],
            "model.weight2": [rows((ROWS // 2, COLUMNS), [0, 300], dim=1)[member.rank]],
        }
    group.do()
    for member in group.members:
        member.check(state)
    # Columns of a piece that was written by rows: their blocks are read by both who need some of them.
    columns = state["model"]["weight2"].nbytes
    read = [member.num_read for member in group.members]
    assert sum(read) <= 1.02 * num_bytes_of(state) + 4 * 64 * 1024 + columns, read


def test_a_default_device_does_not_matter(tmp_path: Path, group_of: Callable[..., Group]) -> None:
    """Each disk has what another rank wants: it is read for that one, into memory that is made for it."""
    state = state_of()
    disks = [tmp_path / f"disk{number}" for number in range(3)]
    write_parts(disks, state)
    group = group_of(3, *disks)
    for member in group.members:
        cuts = [ROWS * at // 3 for at in range(3)]
        box = rows((ROWS, COLUMNS), cuts)[(member.rank + 1) % 3]
        member.boxes = {f"model.{name}": [box] if name == "weight" else [] for name in state["model"]}

    def fill(member: Member) -> None:
        wants = member.wants()
        with torch.device("meta"):
            member.shared.read(wants)

    group.do(lambda member: member.reads(fill))
    for member in group.members:
        member.check(state)


def test_ranks_of_any_layout_get_what_they_want(tmp_path: Path, group_of: Callable[..., Group]) -> None:
    state = state_of()
    save(tmp_path, state)
    group = group_of(3, tmp_path)
    group.members[0].boxes = {"model.weight": rows((ROWS, COLUMNS), [0, 100, 900])}
    group.members[1].boxes = {"model.weight": rows((ROWS, COLUMNS), [0, 333], dim=1)[:1], "model.shared": []}
    group.do()
    for member in group.members:
        member.check(state)


def test_disks_with_a_part_each_are_whole_together(tmp_path: Path, group_of: Callable[..., Group]) -> None:
    state = state_of()
    disks = [tmp_path / f"disk{number}" for number in range(3)]
    write_parts(disks, state)
    group = group_of(3, *disks)
    group.do()
    for member in group.members:
        member.check(state)
        assert member.reader.values()["lr"] == 0.5 or member.reader.values()["lr"][1] == 0.5
    read = [member.num_read for member in group.members]
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
    tmp_path: Path, group_of: Callable[..., Group], caplog: pytest.LogCaptureFixture
) -> None:
    old, new = state_of(1), state_of(2)
    disks = [tmp_path / f"disk{number}" for number in range(3)]
    write_parts(disks, old, CheckpointName(100, "q1-a"))
    write_parts(disks, new, CheckpointName(120, "q2-b"), written=2)  # the third died before it wrote
    group = group_of(3, *disks)
    assert group.do() == [100] * 3
    for member in group.members:
        member.check(old)
    assert "checkpoint step-000000000120.q2-b is skipped" in caplog.text


def test_a_step_that_is_asked_for_is_found_however_many_are_newer(
    tmp_path: Path, group_of: Callable[..., Group], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lookup, "MAX_CANDIDATES", 2)
    for step in range(100, 106):
        save(tmp_path, state_of(), CheckpointName(step, "q1-a"))
    assert group_of(2, tmp_path, step=101).do() == [101, 101]


def test_a_rank_that_sees_nothing_is_given_all_by_the_others(tmp_path: Path, group_of: Callable[..., Group]) -> None:
    state = state_of()
    save(tmp_path, state)
    group = group_of(3, tmp_path, tmp_path, tmp_path / "not mounted")
    assert group.do() == [NAME.step] * 3
    for member in group.members:
        member.check(state)
    assert group.members[2].num_read == 0 < group.members[2].bytes_from_peers


def test_where_there_is_nothing_all_are_told(tmp_path: Path, group_of: Callable[..., Group]) -> None:
    for outcome in group_of(2, tmp_path).do():
        assert isinstance(outcome, CheckpointNotFoundError) and "no whole checkpoint in" in str(outcome)


def test_where_no_storage_can_be_listed_that_is_not_taken_for_an_empty_one(
    tmp_path: Path, group_of: Callable[..., Group], monkeypatch: pytest.MonkeyPatch
) -> None:
    group = group_of(2, tmp_path / "0", tmp_path / "1")

    def fails(path: str = "") -> list[str]:
        raise StorageError("503: slow down", "storage")

    monkeypatch.setattr(group.members[0].storages[0], "names", fails)
    for outcome in group.do():
        assert isinstance(outcome, StorageError) and "503" in str(outcome)


# Damage, and ranks that do not go on


def test_a_damaged_one_is_passed_over_by_all_with_a_reason(
    tmp_path: Path, group_of: Callable[..., Group], caplog: pytest.LogCaptureFixture
) -> None:
    for name in (OLDER, NAME):
        save(tmp_path, state_of(name.step), name)
    flip_in(tmp_path, NAME)
    group = group_of(3, tmp_path)
    assert group.do() == [OLDER.step] * 3
    for member in group.members:
        member.check(state_of(OLDER.step))
    assert f"checkpoint {NAME} is skipped" in caplog.text


def test_where_all_are_damaged_each_is_named_by_all(tmp_path: Path, group_of: Callable[..., Group]) -> None:
    for name in (OLDER, NAME):
        save(tmp_path, state_of(), name)
        flip_in(tmp_path, name)
    for outcome in group_of(3, tmp_path).do():
        assert isinstance(outcome, CheckpointNotFoundError)
        assert f"damaged: {NAME}" in str(outcome) and f"; {OLDER}: " in str(outcome)


@pytest.mark.parametrize("when", ["before it reads", "after it has read"])
@pytest.mark.parametrize("finds", [[0], [2], [1, 2]])
def test_damage_that_some_ranks_alone_find_sends_all_of_them_back(
    tmp_path: Path, group_of: Callable[..., Group], when: str, finds: list[int]
) -> None:
    for name in (OLDER, NAME):
        save(tmp_path, state_of(name.step), name)
    group = group_of(3, tmp_path)

    def fill(member: Member) -> None:
        is_found = member.rank in finds and member.reader.checkpoint.name == NAME
        if is_found and when == "before it reads":
            raise CheckpointDamagedError("its disk says something else: /data/\udcff", "disk")
        member.fills()
        if is_found:
            raise CheckpointDamagedError("its disk says something else: /data/\udcff", "disk")
        member.ranks.say("that it can be loaded", lookup._Seen({}), lookup._decode_seen)

    assert group.do(lambda member: member.reads(fill)) == [OLDER.step] * 3
    for member in group.members:
        member.check(state_of(OLDER.step))


def test_who_wants_what_is_not_there_hears_so_and_the_others_hear_why(
    tmp_path: Path, group_of: Callable[..., Group]
) -> None:
    save(tmp_path, state_of())
    group = group_of(3, tmp_path)
    other = [Want("model.other", Box((0,), (1,)), torch.zeros(1))]

    def fill(member: Member) -> None:
        member.shared.read(other) if member.rank == 1 else member.fills()

    first, second, third = group.do(lambda member: member.reads(fill))
    assert isinstance(second, StateMismatchError)
    for outcome in (first, third):
        assert isinstance(outcome, SourceLostError) and "rank 1 of this group does not go on: StateMis" in str(outcome)


def test_where_the_storage_of_one_rank_fails_all_hear_why(
    tmp_path: Path, group_of: Callable[..., Group], monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, state_of())
    group = group_of(3, tmp_path)

    def fails(*args: Any) -> None:
        raise StorageError("the mount is gone", "storage")

    def fill(member: Member) -> None:
        if member.rank == 1:
            (storage,) = member.storages
            monkeypatch.setattr(storage, "read_into", fails)
            monkeypatch.setattr(storage, "read", fails)
        member.fills()

    first, second, third = group.do(lambda member: member.reads(fill))
    assert isinstance(second, StorageError)
    assert all(isinstance(one, SourceLostError) and "the mount is gone" in str(one) for one in (first, third))


def test_what_another_rank_does_not_give_is_read(
    tmp_path: Path, group_of: Callable[..., Group], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its server cannot be reached from there."""
    state = state_of()
    save(tmp_path, state)
    group = group_of(2, tmp_path)
    monkeypatch.setattr(
        group.members[1].transport, "send_checkpoint", lambda *args: group.members[1].transport.shutdown()
    )
    assert group.do() == [NAME.step] * 2
    for member in group.members:
        member.check(state)
    assert "rank 0 reads" in caplog.text and "that rank 1 was to give it" in caplog.text


def test_who_stands_on_the_way_between_two_ranks_alters_nothing_unseen(
    tmp_path: Path, group_of: Callable[..., Group], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """He puts 666 at the beginning of every part, with the digest that belongs to it. Where to look, no store says: votes do."""
    state = state_of()
    save(tmp_path, state)
    group = group_of(2, tmp_path, token="a secret")

    def poison(passing: Passing) -> None:
        if not passing.path.endswith("/parts") or passing.status != 200:
            return
        data, at = bytearray(passing.body), 0
        for _, _, seed, _, sizes in json.loads(passing.request_body)["parts"]:
            stop = at + 4 * math.prod(sizes)
            struct.pack_into("<f", data, at, 666.0)
            data[stop : stop + 16] = xxhash.xxh3_128_digest(bytes(data[at:stop]), seed=seed)
            at = stop + 16
        passing.body = bytes(data)

    for member in group.members:
        member.boxes = {"model.weight2": []}  # the others are of float32
    transport = group.members[1].transport
    with Relay(int(transport.metadata().rpartition(":")[2]), answer=poison) as relay:
        monkeypatch.setattr(transport, "metadata", lambda: f"http://127.0.0.1:{relay.port}")
        assert group.do() == [NAME.step] * 2
        assert any(passing.path.endswith("/parts") for passing in relay.passed)
    for member in group.members:
        member.check(state)
    assert "it was altered on the way" in caplog.text


# Who reads what


def test_a_target_may_be_wanted_twice_and_have_any_strides(tmp_path: Path, group_of: Callable[..., Group]) -> None:
    state = state_of()
    save(tmp_path, state)
    box = whole((ROWS, COLUMNS))
    got: list[torch.Tensor] = []

    def fill(member: Member) -> None:
        targets = [torch.zeros(COLUMNS, ROWS).t(), torch.zeros(ROWS, COLUMNS)]
        member.shared.read([Want("model.weight", box, target) for target in targets])
        got.extend(targets)

    group_of(2, tmp_path).do(lambda member: member.reads(fill))
    assert len(got) == 4 and all(torch.equal(target, state["model"]["weight"]) for target in got)


def test_shares_cover_what_is_wanted_once_and_are_read_by_who_can(tmp_path: Path) -> None:
    save(tmp_path, state_of())
    checkpoint = read_checkpoint([storage_in(tmp_path)], NAME)
    part = checkpoint.parts[0].name
    box = whole((ROWS, COLUMNS))
    wanted = {"model.weight": [box]}
    shares = deal_reading(checkpoint.tensors, [wanted] * 3, {part: frozenset({1, 2})})
    assert shares[0] == []
    volumes = [sum(piece.volume for _, piece in of_rank) for of_rank in shares]
    assert sum(volumes) == box.volume
    assert abs(volumes[1] - volumes[2]) <= COLUMNS * 64
    # Who can read it does not want it.
    shares = deal_reading(checkpoint.tensors, [wanted, {}], {part: frozenset({1})})
    assert [len(of_rank) for of_rank in shares] == [0, 1]


def test_a_rank_is_done_only_when_the_others_have_what_it_serves(
    tmp_path: Path, group_of: Callable[..., Group], monkeypatch: pytest.MonkeyPatch
) -> None:
    state = state_of()
    save(tmp_path, state)
    group = group_of(2, tmp_path)
    is_done = threading.Event()
    fetch = group.members[1].transport.fetch_boxes

    def fetches_late(*args: Any) -> None:
        assert not is_done.wait(0.3)
        fetch(*args)

    monkeypatch.setattr(group.members[1].transport, "fetch_boxes", fetches_late)

    def act(member: Member) -> int:
        step = member.reads()
        is_done.set()
        return step

    assert group.do(act) == [NAME.step] * 2
    assert all(member.num_read < 0.6 * num_bytes_of(state) for member in group.members)


def test_one_rank_alone_reads_all_of_it(tmp_path: Path, group_of: Callable[..., Group], caplog: Any) -> None:
    caplog.set_level(logging.WARNING)
    for name in (OLDER, NAME):
        save(tmp_path, state_of(name.step), name)
    flip_in(tmp_path, NAME)
    group = group_of(1, tmp_path)
    assert group.do() == [OLDER.step]
    group.members[0].check(state_of(OLDER.step))
