"""The newest checkpoint that can be read: damaged ones are passed over, and by all members alike."""

from __future__ import annotations

import logging
import threading
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from torch.distributed import PrefixStore, TCPStore

from torchft_ckpt import Checkpointer, HTTPTransport
from torchft_ckpt.checkpointing.durable.reading.loading import ReadWants, load_into
from torchft_ckpt.checkpointing.durable.reading.reader import CheckpointReader
from torchft_ckpt.checkpointing.durable.storage.fsspec_storage import open_storage
from torchft_ckpt.checkpointing.durable.together.exchange import StoreExchange
from torchft_ckpt.checkpointing.durable.together.finding import MeetingPlace, ReadTogether, read_newest
from torchft_ckpt.errors import CheckpointDamagedError, CheckpointNotFoundError

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
) -> tuple[int, dict[str, torch.Tensor], ReadTogether[None]]:
    """`unreadable`: which member cannot read the checkpoint of which step."""
    state = state_of(0)

    def make(reader: CheckpointReader, read_wants: ReadWants) -> None:
        if place is not None and unreadable == (place.member, reader.checkpoint.name.step):
            raise CheckpointDamagedError(f"{reader.location} cannot be read here", reader.location)
        load_into(reader, state, read_wants)

    outcome = read_newest([open_storage(directory)], make, step=None, place=place)
    return outcome.step, state, outcome


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


def members_read(
    directory: Path, num_members: int, *, settled: str | None = None, unreadable: tuple[int, int] | None = None
) -> list[object]:
    """Read as so many members, each with a transport of its own; `settled`: what others settled before they came."""
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=30))
    outcomes: list[object] = [None] * num_members
    if settled is not None:
        StoreExchange(PrefixStore("verdict/0", PrefixStore("test", server))).settle("outcome", settled.encode())

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


def test_a_member_that_gives_one_up_before_it_reads_is_not_waited_for(
    directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Else the others would look for it while it looks for them at the next one."""
    with caplog.at_level(logging.WARNING):
        outcomes = members_read(directory, 3, unreadable=(1, 3))
    assert all(isinstance(outcome, tuple) for outcome in outcomes), outcomes
    assert [outcome[0] for outcome in outcomes] == [2, 2, 2]  # type: ignore[index]
    assert [outcome[2].bytes_from_storage < 4 * SIZE for outcome in outcomes] == [True] * 3  # type: ignore[index]
    assert "did not come in time" not in caplog.text


def test_members_that_found_another_one_than_was_settled_read_that_one(directory: Path) -> None:
    (older,) = directory.glob("step-000000000002.*")
    for outcome in members_read(directory, 2, settled=f"fine {older.name}"):
        assert isinstance(outcome, tuple), outcome
        step, state, _ = outcome
        assert step == 2
        assert all(torch.equal(state[name], value) for name, value in state_of(2).items())


def test_what_was_settled_and_is_not_there_is_an_error_that_says_that_memory_was_written_to(directory: Path) -> None:
    outcomes = members_read(directory, 2, settled="fine step-000000000009.gone")
    assert [type(outcome) for outcome in outcomes] == [CheckpointNotFoundError] * 2
    assert all(outcome.state_overwritten for outcome in outcomes if isinstance(outcome, CheckpointNotFoundError))


def test_members_that_find_none_that_can_be_read_all_say_so(directory: Path) -> None:
    for step in (1, 2, 3):
        flip_a_bit_of(directory, step)
    assert [type(outcome) for outcome in members_read(directory, 2)] == [CheckpointNotFoundError] * 2


def test_damage_that_shows_before_anything_was_read_is_no_torn_state(directory: Path) -> None:
    def make(reader: CheckpointReader, read_wants: ReadWants) -> None:
        raise CheckpointDamagedError("its values cannot be read", reader.location)

    with pytest.raises(CheckpointNotFoundError, match=r"damaged: .*its values cannot be read") as caught:
        read_newest([open_storage(directory)], make, step=None, place=None)
    assert (caught.value.state_overwritten, "torn" in str(caught.value)) == (False, False)
