"""The newest checkpoint that can be read: damaged ones are passed over, and by all members alike."""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from support.cold_members import PATIENCE, Job, KilledError, Member
from support.durable_parts import NAME, PartsDouble, flip_bit, storage_in
from support.ports import reserved_port
from torch.distributed import PrefixStore, TCPStore

from torchft_ckpt import Checkpointer, HTTPTransport
from torchft_ckpt.checkpointing.durable.cooperative_read import rendezvous
from torchft_ckpt.checkpointing.durable.cooperative_read.cold_start import ColdStart, MeetingPlace
from torchft_ckpt.checkpointing.durable.names import CheckpointName
from torchft_ckpt.checkpointing.durable.reading.loading import load_into
from torchft_ckpt.checkpointing.durable.storage.fsspec_storage import open_storage
from torchft_ckpt.errors import (
    CheckpointDamagedError,
    CheckpointError,
    CheckpointNotFoundError,
    SourceLostError,
    SourceRefusedError,
    StorageError,
)

SIZE = 400_000


def state_of(step: int) -> dict[str, torch.Tensor]:
    return {"weight": torch.arange(SIZE, dtype=torch.int32) * step, "bias": torch.full((7,), step)}


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    checkpointer = Checkpointer(tmp_path)
    for step in (1, 2, 3):
        checkpointer.save(state_of(step), step=step).result(60)
    checkpointer.shutdown()
    return tmp_path


def flip_a_bit_of(directory: Path, step: int) -> None:
    (path,) = directory.glob(f"step-{step:012d}.*/*.distcp")
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 16
    path.write_bytes(data)


def read(
    directory: Path, place: MeetingPlace | None = None, unreadable: tuple[int, int] | None = None
) -> tuple[int, dict[str, torch.Tensor], ColdStart]:
    """`unreadable`: which member cannot read the checkpoint of which step."""
    state = state_of(0)
    cold_start = ColdStart([open_storage(directory)], place=place)
    for reading in cold_start.attempts():
        with reading as attempt:
            if place is not None and unreadable == (place.member, attempt.checkpoint.name.step):
                raise CheckpointDamagedError(f"{attempt.reader.location} cannot be read here", attempt.reader.location)
            load_into(attempt.reader, state, attempt.fill)
    return attempt.checkpoint.name.step, state, cold_start


def test_a_damaged_newest_one_is_passed_over_with_a_reason(directory: Path, caplog: pytest.LogCaptureFixture) -> None:
    flip_a_bit_of(directory, 3)
    with caplog.at_level(logging.WARNING):
        step, state, _ = read(directory)
    assert step == 2
    assert all(torch.equal(state[name], value) for name, value in state_of(2).items())
    assert [
        record for record in caplog.records if "step-000000000003" in record.message and "skipped" in record.message
    ]


def test_where_all_are_damaged_each_is_named(directory: Path) -> None:
    for step in (1, 2, 3):
        flip_a_bit_of(directory, step)
    with pytest.raises(CheckpointNotFoundError):
        read(directory)


def members_read(directory: Path, num_members: int, *, unreadable: tuple[int, int] | None = None) -> list[object]:
    """Read as so many members, each with a transport of its own."""
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=30))
    outcomes: list[object] = [None] * num_members

    def run(member: int) -> None:
        client = TCPStore("127.0.0.1", server.port, is_master=False, timeout=timedelta(seconds=30))
        transport: HTTPTransport[object] = HTTPTransport(hostname="127.0.0.1", bind="127.0.0.1")
        try:
            place = MeetingPlace(
                store=PrefixStore("test", client),
                run="test",
                member=member,
                num_members=num_members,
                transport=transport,
            )
            outcomes[member] = read(directory, place, unreadable)
        except BaseException as error:
            outcomes[member] = error
        finally:
            transport.shutdown()

    threads = [threading.Thread(target=run, args=(member,)) for member in range(num_members)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(90)
    return outcomes


@pytest.mark.parametrize("damaged", [[], [3], [3, 2]])
def test_members_take_the_same_one_and_read_it_once(directory: Path, damaged: list[int]) -> None:
    for step in damaged:
        flip_a_bit_of(directory, step)
    expected = 3 - len(damaged)
    outcomes = members_read(directory, 3)
    for outcome in outcomes:
        assert isinstance(outcome, tuple), outcome
        step, state, _ = outcome
        assert step == expected
        assert all(torch.equal(state[name], value) for name, value in state_of(expected).items())
    if not damaged:
        from_storage = [outcome[2].bytes_from_storage for outcome in outcomes if isinstance(outcome, tuple)]
        assert sum(from_storage) <= 1.1 * SIZE * 4


@pytest.mark.parametrize("member", [0, 1])
def test_a_member_that_gives_one_up_before_it_reads_is_not_waited_for(
    directory: Path, member: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Else the others would look for it while it looks for them at the next one."""
    with caplog.at_level(logging.WARNING):
        outcomes = members_read(directory, 3, unreadable=(member, 3))
    assert all(isinstance(outcome, tuple) for outcome in outcomes), outcomes
    assert [outcome[0] for outcome in outcomes] == [2, 2, 2]  # type: ignore[index]
    assert [outcome[2].bytes_from_storage < 4 * SIZE for outcome in outcomes] == [True] * 3  # type: ignore[index]
    assert "did not come in time" not in caplog.text


def test_members_that_find_none_that_can_be_read_all_say_so(directory: Path) -> None:
    for step in (1, 2, 3):
        flip_a_bit_of(directory, step)
    assert [type(outcome) for outcome in members_read(directory, 2)] == [CheckpointNotFoundError] * 2


def test_damage_that_shows_before_anything_was_read_is_no_torn_state(directory: Path) -> None:
    with pytest.raises(CheckpointNotFoundError, match=r"damaged: .*its values cannot be read") as caught:
        for reading in ColdStart([open_storage(directory)]).attempts():
            with reading as attempt:
                raise CheckpointDamagedError("its values cannot be read", attempt.reader.location)
    assert (caught.value.state_overwritten, "torn" in str(caught.value)) == (False, False)


# A member is lost, late, or cannot read


SHORT = timedelta(seconds=1)
STATE: dict[str, Any] = {"model": {"weight": torch.arange(30_000.0), "bias": torch.ones(7)}}
OLDER = CheckpointName(NAME.step - 20, NAME.save_id)


@pytest.fixture
def job_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Job]]:
    """Makes a job whose members see two checkpoints of one storage, and look often whether the others are there."""
    monkeypatch.setattr(rendezvous, "WAIT_SLICE_S", 0.1)
    for name in (OLDER, NAME):
        PartsDouble(STATE, storage_in(tmp_path), name=name).write()
    jobs: list[Job] = []

    def make(num_members: int, **options: Any) -> Job:
        jobs.append(Job(num_members))
        jobs[-1].starts(lambda _: [storage_in(tmp_path)], **options)
        return jobs[-1]

    yield make
    for job in jobs:
        job.close()


def outcomes_of(job: Job, act: Callable[[Member], object] = Member.reads) -> list[object]:
    """Return for each member the step that it begins from, or what it raised."""

    def run(member: Member) -> object:
        try:
            act(member)
        except (CheckpointError, KilledError) as error:
            return error
        return member.step

    return job.do(run)


def killed_at(topic: str, member: Member, *, says_it: bool = False) -> None:
    """Have a member be killed when it is about to publish something about a topic, or has just done so."""
    own = member.cold_start._rendezvous
    publish = own.publish

    def dies(about: str, message: Any) -> None:
        if about.partition(" ")[0] != topic:
            return publish(about, message)
        if says_it:
            publish(about, message)
        return member.is_killed()

    own.publish = dies  # type: ignore[method-assign]


@pytest.mark.slow
@pytest.mark.parametrize("topic", ["start", "manifests", "word", "readers", "decision"])
@pytest.mark.parametrize("says_it", [False, True])
def test_where_the_first_member_dies_before_it_has_decided_nobody_begins(
    job_of: Callable[..., Job], topic: str, says_it: bool
) -> None:
    """Also where the others have read all by then: they cannot know what each of them has read."""
    job = job_of(3, patience=SHORT)
    killed_at(topic, job.members[0], says_it=says_it)
    first, *others = outcomes_of(job)
    assert isinstance(first, KilledError)
    if (topic, says_it) == ("decision", True):
        assert others == [NAME.step] * 2  # it was said to all
        return
    assert [type(outcome) for outcome in others] == [SourceLostError] * 2
    for member, outcome in zip(job.members[1:], others, strict=True):
        assert "member 0, which leads the cold start, is gone" in str(outcome)
        assert isinstance(outcome, SourceLostError)
        assert outcome.state_overwritten == (member.attempt is not None)


def test_where_the_first_member_cannot_go_on_the_others_hear_why(job_of: Callable[..., Job]) -> None:
    job = job_of(3)

    def fill(member: Member) -> None:
        if member is job.members[0]:
            raise StorageError("the mount is gone", "storage")
        member.fills()

    first, *others = outcomes_of(job, lambda member: member.reads(fill))
    assert isinstance(first, StorageError)
    for outcome in others:
        assert isinstance(outcome, SourceLostError)
        assert "member, which leads the cold start, failed: StorageError: the mount is gone" in str(outcome)


@pytest.mark.parametrize("at", ["_look", "_lead", "_publish", "_find_damage"])
@pytest.mark.parametrize("error", [OSError("no file descriptors"), MemoryError(), KeyboardInterrupt()], ids=repr)
def test_whatever_stops_the_first_member_the_others_hear_of_it_at_once(
    job_of: Callable[..., Job], monkeypatch: pytest.MonkeyPatch, at: str, error: BaseException
) -> None:
    """Its process lives on, so that nobody could tell."""
    job = job_of(2)
    cold_start = job.members[0].cold_start

    def stops(*args: Any) -> None:
        raise error

    monkeypatch.setattr(cold_start if at == "_find_damage" else cold_start._planner, at, stops)

    def reads(member: Member) -> object:
        with pytest.raises((type(error), CheckpointError)) as caught:
            member.reads()
        return caught.value

    started_at = time.monotonic()
    first, second = job.do(reads)
    assert error in (first, getattr(first, "__cause__", None))
    assert isinstance(second, SourceLostError) and "leads the cold start, failed" in str(second)
    assert time.monotonic() - started_at < PATIENCE.total_seconds() / 2


@pytest.mark.slow
def test_where_the_first_member_stops_between_the_plan_and_its_reading_the_others_hear_of_it_at_once(
    job_of: Callable[..., Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They wait for who reads what, which it never says."""
    job = job_of(2)
    planner = job.members[0].cold_start._planner
    choose = planner.choose

    def stops(damaged: Any) -> None:
        choose(damaged)
        raise MemoryError

    monkeypatch.setattr(planner, "choose", stops)

    def reads(member: Member) -> object:
        with pytest.raises((MemoryError, SourceLostError)) as caught:
            member.reads()
        return caught.value

    started_at = time.monotonic()
    _, second = job.do(reads)
    assert "failed: MemoryError" in str(second)
    assert time.monotonic() - started_at < PATIENCE.total_seconds() / 2


@pytest.mark.slow
def test_a_first_member_that_gives_up_between_two_attempts_says_so(job_of: Callable[..., Job]) -> None:
    job = job_of(2, patience=SHORT)
    attempts = job.members[0].cold_start.attempts()
    next(attempts)
    attempts.close()  # type: ignore[attr-defined]
    with pytest.raises(SourceLostError, match="failed: GeneratorExit"):
        job.members[1].reads()


@pytest.mark.parametrize("at", ["read", "choose", "damage"])
def test_a_reason_that_utf8_has_not_reaches_the_others(
    job_of: Callable[..., Job], monkeypatch: pytest.MonkeyPatch, at: str
) -> None:
    """As the name of a file may be in an error."""
    job = job_of(2)
    what = "no such file: /data/\udcff"

    def fails(*args: Any) -> None:
        raise StorageError(what, "storage")

    if at == "choose":
        monkeypatch.setattr(job.members[0].cold_start._planner, "_lead", fails)

    def fill(member: Member) -> None:
        if member is job.members[0] and at == "read":
            fails()
        if member is job.members[0] and member.step == NAME.step and at == "damage":
            raise CheckpointDamagedError(what, "storage")
        member.fills()

    outcomes = outcomes_of(job, lambda member: member.reads(fill))
    if at == "damage":
        assert outcomes == [OLDER.step] * 2
        return
    assert isinstance(outcomes[0], StorageError)
    assert isinstance(outcomes[1], SourceLostError) and "no such file: /data/?" in str(outcomes[1])


@pytest.mark.slow
def test_a_first_member_that_dies_is_missed_though_somebody_listens_at_its_address(job_of: Callable[..., Job]) -> None:
    """As its own restart does where ports are fixed."""
    job = job_of(2, patience=SHORT)
    first = job.members[0]
    own = first.cold_start._rendezvous
    publish = own.publish
    listening: list[socket.socket] = []

    def dies(about: str, message: Any) -> None:
        if not about.startswith("decision"):
            return publish(about, message)
        port = int(first.transport.metadata().rpartition(":")[2])
        first.dies()
        listening.append(socket.create_server(("", port)))
        raise KilledError

    own.publish = dies  # type: ignore[method-assign]
    try:
        outcome = outcomes_of(job)[1]
    finally:
        for one in listening:
            one.close()
    assert isinstance(outcome, SourceLostError) and "member 0, which leads the cold start, is gone" in str(outcome)


@pytest.mark.slow
def test_a_first_member_whose_address_refuses_leads_as_any(job_of: Callable[..., Job]) -> None:
    """The others read by themselves what it does not serve."""
    job = job_of(2, patience=SHORT)
    first = job.members[0]
    has_read = threading.Event()

    def fill(member: Member) -> None:
        member.fills()
        if member is first:
            assert has_read.wait(30)
            time.sleep(2 * SHORT.total_seconds())  # the other waits for the decision, longer than for who says nothing
        has_read.set()

    with reserved_port() as port:
        first.cold_start._planner._contact = msgspec.structs.replace(
            first.cold_start._planner._contact, address=f"http://127.0.0.1:{port}"
        )
        assert outcomes_of(job, lambda member: member.reads(fill)) == [NAME.step] * 2
    for member in job.members:
        member.check(STATE)


@pytest.mark.slow
def test_a_first_member_that_comes_much_later_is_waited_for_until_it_has_decided(
    job_of: Callable[..., Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It downloads, or tokenises; no word says that it is gone."""
    monkeypatch.setattr(rendezvous, "_LEADERS_FACTOR", 0.2)
    job = job_of(2, patience=SHORT)
    other_has_read = threading.Event()

    def fill(member: Member) -> None:
        member.fills()
        other_has_read.set()

    def act(member: Member) -> None:
        if member is job.members[0]:
            assert other_has_read.wait(30)
            time.sleep(3 * 0.2)
            member.reads()
        else:
            member.reads(fill)

    assert outcomes_of(job, act) == [NAME.step] * 2


@pytest.mark.slow
def test_a_first_member_that_never_comes_leads_nobody(job_of: Callable[..., Job]) -> None:
    job = job_of(2, patience=timedelta(seconds=0.2), timeout=timedelta(seconds=0.5))
    with pytest.raises(
        SourceLostError, match="member 0, which leads the cold start, has said nothing about start in time"
    ):
        job.members[1].reads()
    job.members[1].check(STATE)  # it read by itself, and does not know whether the others did


@pytest.mark.slow
def test_a_member_that_is_not_led_in_time_reads_by_itself_and_goes_on_where_all_read_the_same(
    job_of: Callable[..., Job], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The first member hangs before it says what is read; when it comes back, it names what the other has read."""
    job = job_of(2, patience=SHORT)
    other_has_read = threading.Event()
    planner = job.members[0].cold_start._planner
    lead = planner._lead

    def hangs(*args: Any) -> Any:
        assert other_has_read.wait(30)
        return lead(*args)

    monkeypatch.setattr(planner, "_lead", hangs)

    def fill(member: Member) -> None:
        member.fills()
        other_has_read.set()

    assert outcomes_of(job, lambda member: member.reads(fill)) == [NAME.step] * 2
    assert "member 1 looks for a checkpoint by itself" in caplog.text


@pytest.mark.slow
def test_a_late_member_goes_on_with_what_the_others_have_read_or_not_at_all(
    job_of: Callable[..., Job], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    job = job_of(4, patience=SHORT)
    flip_in(tmp_path, NAME)
    assert job.do(lambda member: member.reads(), *job.members[:2]) == [None, None]
    assert [member.step for member in job.members[:2]] == [OLDER.step] * 2
    with pytest.raises(CheckpointDamagedError):  # it does not go back by itself
        job.members[2].reads()
    flip_in(tmp_path, NAME)  # back
    with pytest.raises(SourceRefusedError, match=f"go on from checkpoint {OLDER}, and this member has read {NAME}"):
        job.members[3].reads()


@pytest.mark.slow
def test_a_member_that_comes_late_to_a_start_where_there_was_nothing_finds_nothing(tmp_path: Path) -> None:
    job = Job(2)
    first, late = job.starts(lambda _: [storage_in(tmp_path)], patience=SHORT)
    with pytest.raises(CheckpointNotFoundError, match="over 1 members together"):
        first.reads()
    PartsDouble(STATE, storage_in(tmp_path)).write()
    with pytest.raises(
        SourceLostError, match="the first member, which leads the cold start, failed: it found no checkpoint"
    ):
        late.reads()
    job.close()


@pytest.mark.slow
def test_a_late_member_that_finds_nothing_does_not_begin_where_the_first_one_failed_otherwise(
    tmp_path: Path, job_of: Callable[..., Job]
) -> None:
    """The job is not at its beginning: there is a checkpoint, which this member does not see."""
    job_of(1)
    job = Job(2)
    first, late = job.starts(
        lambda number: [storage_in(tmp_path if not number else tmp_path / "other")], patience=SHORT
    )

    def fails(member: Member) -> None:
        raise StorageError("the mount is gone", "storage")

    with pytest.raises(StorageError):
        first.reads(fails)
    with pytest.raises(SourceLostError, match="failed: StorageError: the mount is gone"):
        late.reads()
    job.close()


@pytest.mark.slow
def test_a_late_member_that_finds_nothing_begins_with_nothing_where_nobody_found_anything(tmp_path: Path) -> None:
    job = Job(2)
    first, late = job.starts(lambda _: [storage_in(tmp_path)], patience=SHORT)
    for member in (first, late):
        with pytest.raises(CheckpointNotFoundError):
            member.reads()
    job.close()


def test_where_no_storage_can_be_listed_that_is_not_taken_for_an_empty_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = Job(2)
    members = job.starts(lambda number: [storage_in(tmp_path / str(number))])

    def fails(path: str = "") -> list[str]:
        raise StorageError("503: slow down", "storage")

    monkeypatch.setattr(members[0].storages[0], "names", fails)
    first, second = outcomes_of(job)
    assert isinstance(first, StorageError) and "503" in str(first)
    assert isinstance(second, SourceLostError) and "failed: 503: slow down" in str(second)
    job.close()


@pytest.mark.slow
def test_a_member_that_dies_before_its_report_is_not_waited_for(job_of: Callable[..., Job]) -> None:
    job = job_of(3)
    killed_at("report", job.members[2])
    assert outcomes_of(job)[:2] == [NAME.step] * 2


@pytest.mark.slow
def test_a_member_that_sees_nothing_is_given_all_by_the_others(tmp_path: Path, job_of: Callable[..., Job]) -> None:
    job_of(1)
    job = Job(3)
    members = job.starts(lambda number: [storage_in(tmp_path / "not mounted" if number == 2 else tmp_path)])
    job.reads()
    for member in members:
        member.check(STATE)
    assert members[2].num_read == 0 < members[2].cold_start.bytes_from_peers
    job.close()


@pytest.mark.slow
def test_damage_that_one_member_alone_finds_sends_all_of_them_back(job_of: Callable[..., Job]) -> None:
    job = job_of(3)

    def fill(member: Member) -> None:
        member.fills()
        if member is job.members[2] and member.step == NAME.step:
            raise CheckpointDamagedError("its disk says something else", "disk")

    assert outcomes_of(job, lambda member: member.reads(fill)) == [OLDER.step] * 3


@pytest.mark.slow
def test_damage_that_is_found_when_the_others_wait_no_longer_is_an_error(job_of: Callable[..., Job]) -> None:
    job = job_of(2, patience=timedelta(seconds=0.5))
    others_go_on = threading.Event()

    def fill(member: Member) -> None:
        member.fills()
        if member is job.members[1]:
            assert others_go_on.wait(30)
            raise CheckpointDamagedError("its disk says something else", "disk")

    def act(member: Member) -> None:
        member.reads(fill)
        others_go_on.set()

    first, second = outcomes_of(job, act)
    assert first == NAME.step
    assert isinstance(second, CheckpointDamagedError)


@pytest.mark.slow
@pytest.mark.parametrize(
    "word",
    [
        b"{}",
        b"\xff",
        b"[" * 100_000,
        b'{"type":"plan","checkpoint":"../elsewhere","num_batches":0,"readers":{}}',
        b'{"type":"plan","checkpoint":"step-000000000120.q3-1a2b3c4d","num_batches":1,"readers":{}}',
        b'{"type":"plan","checkpoint":"step-000000000120.q3-1a2b3c4d","num_batches":99999,"readers":{}}',
    ],
)
def test_a_word_of_the_first_member_that_cannot_be_used_is_an_error_by_name(
    job_of: Callable[..., Job], monkeypatch: pytest.MonkeyPatch, word: bytes
) -> None:
    """It is not executed, and takes no memory."""
    job = job_of(2, patience=SHORT)
    first, second = job.members
    own = first.cold_start._rendezvous

    def says_that(damaged: object) -> None:
        own.store.put(f"{own._prefix}manifests 0 0/0", b'{"texts":{"part-r0-g0-f0.json":"{}"}}')
        own.store.put(f"{own._prefix}word 0/0", word)
        first.is_killed()

    monkeypatch.setattr(first.cold_start._planner, "_lead", says_that)
    outcome = outcomes_of(job)[1]
    assert isinstance(outcome, SourceLostError | SourceRefusedError) and "member 0" in str(outcome)
    assert second.attempt is None or second.step == NAME.step  # it has read by itself, and does not begin


def flip_in(place: Path, name: CheckpointName) -> None:
    """Flip a bit in the middle of the tensors of a checkpoint; once more, and it is as it was."""
    (data,) = (place / str(name)).glob("*.distcp")
    flip_bit(data, data.stat().st_size // 2)
