"""Members of a job read one checkpoint together: each byte leaves storage once, the rest travels between them.

Members are threads here, each with a storage, a transport and a connection to the store of its own; the store is real.
"""

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
from support.durable_parts import NAME, PartsDouble, flip_bit, rows, storage_in
from torch.distributed import PrefixStore, TCPStore

from torchft_ckpt import HTTPTransport
from torchft_ckpt.checkpointing.durable.names import CheckpointName
from torchft_ckpt.checkpointing.durable.reading.checkpoint import read_checkpoint
from torchft_ckpt.checkpointing.durable.reading.reader import CheckpointReader
from torchft_ckpt.checkpointing.durable.storage.contract import Storage
from torchft_ckpt.checkpointing.durable.together import shared_read
from torchft_ckpt.checkpointing.durable.together.agreement import _decode_shown, _settle_whole, _show, _Union
from torchft_ckpt.checkpointing.durable.together.boxed import BoxedTensor
from torchft_ckpt.checkpointing.durable.together.dealing import deal_reading
from torchft_ckpt.checkpointing.durable.together.exchange import StoreExchange
from torchft_ckpt.checkpointing.durable.together.shared_read import SharedRead
from torchft_ckpt.checkpointing.serving import handlers
from torchft_ckpt.checkpointing.state.target import Want
from torchft_ckpt.core.boxes import Box, whole
from torchft_ckpt.errors import (
    CheckpointDamagedError,
    CheckpointNotFoundError,
    SourceRefusedError,
    StateMismatchError,
    StorageError,
)

TOKEN = "a secret"
PATIENCE = timedelta(seconds=20)
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


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


class Part:
    """One member."""

    def __init__(
        self,
        job: Job,
        number: int,
        storages: Sequence[Storage],
        *,
        transport_token: str | None = None,
        start: str = "read",
        run: str = "run",
        **options: Any,
    ) -> None:
        self.number = number
        self.transport: HTTPTransport[Any] = HTTPTransport(
            hostname="127.0.0.1", block_bytes=64 * 1024, token=transport_token
        )
        self.store = TCPStore("127.0.0.1", job.store.port, is_master=False, wait_for_workers=False)
        self.shared = SharedRead(
            storages,
            exchange=StoreExchange(PrefixStore(start, self.store), token=transport_token or "", run=run),
            member=number,
            num_members=job.num_members,
            transport=self.transport,
            **{"patience": PATIENCE, "stall_timeout": timedelta(seconds=2), **options},
        )
        self.boxes: dict[str, list[Box]] = {}
        self.got: dict[tuple[str, Box], torch.Tensor] = {}
        self.reader: CheckpointReader | None = None

    def wants(self) -> list[Want]:
        assert self.reader is not None
        for name, tensor in self.reader.tensors.items():
            for box in self.boxes.get(name, [whole(tensor.shape)]):
                self.got[name, box] = torch.full(box.sizes, 77, dtype=tensor.dtype)
        return [Want(name, box, target) for (name, box), target in self.got.items()]

    def reads(self) -> None:
        self.reader = self.shared.agree()
        self.shared.read(self.wants())

    def dies(self) -> None:
        """As a process does: its sockets close."""
        self.transport.shutdown()

    def check(self, state: dict[str, Any]) -> None:
        """What it got is what was saved, bit by bit."""
        assert self.got
        for (name, box), target in self.got.items():
            saved = state["model"][name.removeprefix("model.")]
            expected = saved[tuple(slice(low, low + size) for low, size in zip(box.offsets, box.sizes, strict=True))]
            assert torch.equal(bytes_of(target), bytes_of(expected)), (self.number, name, box)

    @property
    def num_read(self) -> int:
        return self.shared.statistics().bytes_from_storage


class Job:
    """Members that meet."""

    def __init__(self, num_members: int) -> None:
        self.num_members = num_members
        self.store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.parts: list[Part] = []

    def starts(self, storages_of: Callable[[int], Sequence[Storage]], **options: Any) -> list[Part]:
        self.parts = [Part(self, number, storages_of(number), **options) for number in range(self.num_members)]
        return self.parts

    def reads(self, *parts: Part) -> None:
        self.do(lambda part: part.reads(), *parts)

    def do(self, act: Callable[[Part], object], *parts: Part) -> list[object]:
        chosen = parts or self.parts
        with ThreadPoolExecutor(len(chosen)) as pool:
            return [future.result(60) for future in [pool.submit(act, part) for part in chosen]]

    def close(self) -> None:
        for part in self.parts:
            part.transport.shutdown()


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
    parts = job.starts(lambda _: [double.storage])
    job.reads()
    for part in parts:
        part.check(state)
    read = [part.num_read for part in parts]
    assert sum(read) <= 1.02 * num_bytes_of(state) + 4 * 64 * 1024, read
    assert max(read) <= 1.1 * sum(read) / 4 + 64 * 1024, read
    assert [part.shared.statistics().num_members for part in parts] == [4] * 4
    assert all(part.shared.statistics().bytes_from_peers > num_bytes_of(state) // 2 for part in parts)


def test_groups_of_two_ranks_read_their_shards_and_what_all_hold_once(
    tmp_path: Path, job_of: Callable[[int], Job]
) -> None:
    state = state_of()
    double = save(tmp_path, state)
    job = job_of(4)
    parts = job.starts(lambda _: [double.storage])
    for part in parts:  # member = replica * 2 + rank; uneven shards, one tensor by columns
        rank = part.number % 2
        part.boxes = {
            "model.weight": [rows((ROWS, COLUMNS), [0, 600])[rank]],
            "model.weight2": [rows((ROWS // 2, COLUMNS), [0, 300], dim=1)[rank]],
        }
    job.reads()
    for part in parts:
        part.check(state)
    read = [part.num_read for part in parts]
    # Columns of a piece that was written by rows: their blocks are read by both who need some of them.
    columns = state["model"]["weight2"].nbytes
    assert sum(read) <= 1.02 * num_bytes_of(state) + 8 * 64 * 1024 + 3 * columns, read


def test_a_default_device_does_not_matter(tmp_path: Path, job_of: Callable[[int], Job]) -> None:
    """Each disk has what another member wants: it is read for that one, into memory that is made for it."""
    state = state_of()
    disks = [tmp_path / f"disk{number}" for number in range(3)]
    write_parts(disks, state)
    job = job_of(3)
    parts = job.starts(lambda number: [storage_in(disks[number])])
    for part in parts:
        cuts = [ROWS * at // 3 for at in range(3)]
        box = rows((ROWS, COLUMNS), cuts)[(part.number + 1) % 3]
        part.boxes = {f"model.{name}": [box] if name == "weight" else [] for name in state["model"]}

    def read(part: Part) -> None:
        part.reader = part.shared.agree()
        wants = part.wants()
        with torch.device("meta"):
            part.shared.read(wants)

    job.do(read)
    for part in parts:
        part.check(state)


def test_members_of_any_layout_get_what_they_want(tmp_path: Path, job_of: Callable[[int], Job]) -> None:
    state = state_of()
    double = save(tmp_path, state)
    job = job_of(3)
    parts = job.starts(lambda _: [double.storage])
    parts[0].boxes = {"model.weight": rows((ROWS, COLUMNS), [0, 100, 900])}
    parts[1].boxes = {"model.weight": rows((ROWS, COLUMNS), [0, 333], dim=1)[:1], "model.shared": []}
    job.reads()
    for part in parts:
        part.check(state)


def test_local_disks_with_a_part_each_are_whole_together(tmp_path: Path, job_of: Callable[[int], Job]) -> None:
    state = state_of()
    num_members = 3
    disks = [tmp_path / f"disk{number}" for number in range(num_members)]
    write_parts(disks, state)
    job = job_of(num_members)
    parts = job.starts(lambda number: [storage_in(disks[number])])
    job.reads()
    for part in parts:
        part.check(state)
        assert part.reader is not None
        assert part.reader.values()["lr"] == 0.5 or part.reader.values()["lr"][1] == 0.5
    read = [part.num_read for part in parts]
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
    parts = job.starts(lambda number: [storage_in(disks[number])])
    job.reads()
    for part in parts:
        assert part.reader is not None and part.reader.checkpoint.name.step == 100
        part.check(old)
    assert "checkpoint step-000000000120.q2-b is skipped" in caplog.text


def test_a_step_that_is_asked_for_is_found_however_many_are_newer(
    tmp_path: Path, job_of: Callable[[int], Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torchft_ckpt.checkpointing.durable.together.agreement.MAX_CANDIDATES", 2)
    state = state_of()
    for step in range(100, 106):
        save(tmp_path, state, CheckpointName(step, "q1-a"))
    job = job_of(2)
    job.starts(lambda _: [storage_in(tmp_path)])
    found = job.do(lambda part: part.shared.agree(101).checkpoint.name.step)
    assert found == [101, 101]


def test_a_disk_that_is_gone_with_its_host_takes_the_newest_step_with_it(
    tmp_path: Path, job_of: Callable[[int], Job]
) -> None:
    old, new = state_of(1), state_of(2)
    disks = [tmp_path / f"disk{number}" for number in range(3)]
    for disk in disks:
        save(disk, old, CheckpointName(100, "q1-a"))
    write_parts(disks, new, CheckpointName(120, "q2-b"))
    job = job_of(3)
    parts = job.starts(lambda number: [storage_in(disks[number])], patience=SHORT)
    job.reads(*parts[:2])
    for part in parts[:2]:
        assert part.reader is not None and part.reader.checkpoint.name.step == 100
        part.check(old)


def test_where_there_is_nothing_all_are_told(tmp_path: Path, job_of: Callable[[int], Job]) -> None:
    job = job_of(2)
    job.starts(lambda _: [storage_in(tmp_path)])

    def fails(part: Part) -> str:
        with pytest.raises(CheckpointNotFoundError) as raised:
            part.reads()
        return str(raised.value)

    assert all("no whole checkpoint over 2 members together" in str(message) for message in job.do(fails))


def test_a_member_that_never_comes_is_left_out(tmp_path: Path, job_of: Callable[[int], Job]) -> None:
    state = state_of()
    double = save(tmp_path, state)
    job = job_of(3)
    parts = job.starts(lambda _: [double.storage], patience=SHORT)
    job.reads(*parts[:2])
    for part in parts[:2]:
        part.check(state)
    assert sum(part.num_read for part in parts[:2]) <= 1.02 * num_bytes_of(state) + 4 * 64 * 1024
    # It comes now, and reads by itself.
    parts[2].reads()
    parts[2].check(state)
    assert parts[2].shared.statistics().num_members == 1


def test_a_member_that_dies_before_it_reads_costs_its_share(
    tmp_path: Path, job_of: Callable[[int], Job], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = state_of()
    double = save(tmp_path, state)
    job = job_of(3)
    parts = job.starts(lambda _: [double.storage])
    die_instead_of_reading(parts[2], monkeypatch)

    def acts(part: Part) -> None:
        if part is parts[2]:
            with pytest.raises(KilledError):
                part.reads()
        else:
            part.reads()

    job.do(acts)
    for part in parts[:2]:
        part.check(state)
    third = num_bytes_of(state) // 3
    assert all(part.num_read > 1.5 * third for part in parts[:2])
    assert "that member 2 did not serve in time" in caplog.text


class KilledError(BaseException):
    """The process was killed here."""


def die_instead_of_reading(part: Part, monkeypatch: pytest.MonkeyPatch) -> None:
    agree = part.shared.agree

    def agrees(step: int | None = None) -> CheckpointReader:
        reader = agree(step)

        def read(wants: Sequence[Want]) -> None:
            part.dies()
            raise KilledError

        monkeypatch.setattr(reader, "read", read)
        return reader

    monkeypatch.setattr(part.shared, "agree", agrees)


def test_a_member_that_dies_while_it_serves_costs_its_share(
    tmp_path: Path, job_of: Callable[[int], Job], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    state = state_of()
    double = save(tmp_path, state)
    job = job_of(3)
    parts = job.starts(lambda _: [double.storage])
    has_served = threading.Event()
    send = parts[1].transport.send_checkpoint

    def serves(*args: Any, **kwargs: Any) -> None:
        send(*args, **kwargs)
        snapshot = parts[1].transport._shelf.open_snapshots()[0]
        register = snapshot.register

        def registers(*arguments: Any) -> bool:
            answer = register(*arguments)
            if not has_served.is_set():
                has_served.set()
                threading.Thread(target=parts[1].dies, daemon=True).start()
            return answer

        monkeypatch.setattr(snapshot, "register", registers)

    monkeypatch.setattr(parts[1].transport, "send_checkpoint", serves)
    job.reads(parts[0], parts[1], parts[2])
    assert has_served.is_set()
    for part in parts:
        part.check(state)
    assert "by itself that member 1 was to give it" in caplog.text


def test_a_member_whose_storage_fails_says_so_and_the_others_read_what_it_should_have(
    tmp_path: Path, job_of: Callable[[int], Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    state = state_of()
    save(tmp_path, state)
    job = job_of(3)
    parts = job.starts(lambda _: [storage_in(tmp_path)])

    def acts(part: Part) -> None:
        if part is not parts[0]:
            part.reads()
            return
        part.reader = part.shared.agree()
        (storage,) = part.shared._storages

        def fails(*args: Any) -> None:
            raise StorageError("the mount is gone", "storage")

        monkeypatch.setattr(storage, "read_into", fails)
        monkeypatch.setattr(storage, "read", fails)
        with pytest.raises(StorageError):
            part.shared.read(part.wants())

    job.do(acts)
    for part in parts[1:]:
        part.check(state)


def test_a_damaged_piece_is_nobodys_state(tmp_path: Path, job_of: Callable[[int], Job]) -> None:
    state = state_of()
    double = save(tmp_path, state)
    (data,) = (tmp_path / str(NAME)).glob("*.distcp")
    flip_bit(data, data.stat().st_size // 2)
    job = job_of(3)
    job.starts(lambda _: [double.storage])

    def acts(part: Part) -> bool:
        with pytest.raises(CheckpointDamagedError):
            part.reads()
        return True

    assert job.do(acts) == [True] * 3


def test_who_wants_what_is_not_there_hears_so_and_the_others_read_on(
    tmp_path: Path, job_of: Callable[[int], Job]
) -> None:
    state = state_of()
    double = save(tmp_path, state)
    job = job_of(3)
    parts = job.starts(lambda _: [double.storage])

    def acts(part: Part) -> None:
        if part is not parts[1]:
            part.reads()
            return
        part.shared.agree()
        with pytest.raises(StateMismatchError):
            part.shared.read([Want("model.other", Box((0,), (1,)), torch.zeros(1))])

    job.do(acts)
    for part in (parts[0], parts[2]):
        part.check(state)
        assert part.shared.statistics().num_members == 2


def test_a_store_that_is_gone_leaves_everybody_to_read_alone(tmp_path: Path, job_of: Callable[[int], Job]) -> None:
    state = state_of()
    double = save(tmp_path, state)
    job = job_of(2)
    parts = job.starts(lambda _: [double.storage])

    def agrees(part: Part) -> None:
        part.reader = part.shared.agree()

    job.do(agrees)
    job.store = None  # type: ignore[assignment]  # its server ends with it
    job.do(lambda part: part.shared.read(part.wants()))
    for part in parts:
        part.check(state)
        assert part.num_read >= num_bytes_of(state)


def test_a_target_may_be_wanted_twice_and_have_any_strides(tmp_path: Path, job_of: Callable[[int], Job]) -> None:
    state = state_of()
    double = save(tmp_path, state)
    job = job_of(2)
    job.starts(lambda _: [double.storage])
    box = whole((ROWS, COLUMNS))

    def reads(part: Part) -> list[torch.Tensor]:
        targets = [torch.zeros(COLUMNS, ROWS).t(), torch.zeros(ROWS, COLUMNS)]
        part.shared.agree()
        part.shared.read([Want("model.weight", box, target) for target in targets])
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


def test_a_member_that_stands_still_is_not_waited_for_without_end(
    tmp_path: Path, job_of: Callable[[int], Job], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    state = state_of()
    double = save(tmp_path, state)
    job = job_of(2)
    parts = job.starts(lambda _: [double.storage], patience=SHORT)
    goes_on = threading.Event()

    def acts(part: Part) -> None:
        part.reader = part.shared.agree()
        if part is parts[1]:
            read = part.reader.read

            def reads(wants: Sequence[Want]) -> None:
                goes_on.wait(30)
                read(wants)

            monkeypatch.setattr(part.reader, "read", reads)
        part.shared.read(part.wants())
        goes_on.set()

    job.do(acts)
    for part in parts:
        part.check(state)


def test_a_member_leaves_only_when_the_others_have_what_it_serves(
    tmp_path: Path, job_of: Callable[[int], Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    state = state_of()
    double = save(tmp_path, state)
    job = job_of(2)
    parts = job.starts(lambda _: [double.storage])
    goes_on, has_left = threading.Event(), threading.Event()
    fetch = parts[1].shared._fetch

    def fetches_late(*args: Any) -> bool:
        assert goes_on.wait(30)
        return fetch(*args)

    monkeypatch.setattr(parts[1].shared, "_fetch", fetches_late)

    def acts(part: Part) -> None:
        part.reads()
        if part is parts[0]:
            has_left.set()
            part.dies()

    with ThreadPoolExecutor(2) as pool:
        reading = [pool.submit(acts, part) for part in parts]
        assert not has_left.wait(1.0)
        goes_on.set()
        for future in reading:
            future.result(60)
    for part in parts:
        part.check(state)
        assert part.num_read < 0.6 * num_bytes_of(state)


def test_a_part_that_only_a_dead_member_could_read_is_a_named_error(
    tmp_path: Path, job_of: Callable[[int], Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    state = state_of()
    disks = [tmp_path / f"disk{number}" for number in range(3)]
    write_parts(disks, state)
    job = job_of(3)
    parts = job.starts(lambda number: [storage_in(disks[number])])
    die_instead_of_reading(parts[2], monkeypatch)

    def acts(part: Part) -> None:
        with pytest.raises(KilledError if part is parts[2] else CheckpointDamagedError, match=r"no piece|^$"):
            part.reads()

    job.do(acts)


def test_one_who_heard_less_than_the_others_comes_to_what_they_settled(
    tmp_path: Path, job_of: Callable[[int], Job]
) -> None:
    state = state_of()
    disks = [tmp_path / f"disk{number}" for number in range(3)]
    write_parts(disks, state)
    job = job_of(3)
    parts = job.starts(lambda number: [storage_in(disks[number])], patience=SHORT)
    meetings = [part.shared._meeting for part in parts]
    views = [read_checkpoint([storage_in(disk)], NAME) for disk in disks]
    for number in (1, 2):
        _show(views[number], frozenset(), meetings[number], [])
    first = _Union(views[1], 1, meetings[1].hear(f"shown {NAME}", _decode_shown, [2]))
    assert _settle_whole(meetings[1], [0, 1, 2], first)[0] == (1, 2)  # it did not hear of member 0, which is late
    late = _Union(views[2], 2, {})
    assert "missing" in (late.reason or "")
    members, reason = _settle_whole(meetings[2], [0, 1, 2], late)
    assert members == (1, 2) and reason == first.reason
    with pytest.raises(SourceRefusedError, match="did not wait for member 0"):
        _settle_whole(meetings[0], [0, 1, 2], _Union(views[0], 0, {}))


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
    parts = job.starts(lambda _: [double.storage], transport_token=TOKEN)
    job.reads()
    for part in parts:
        part.check(state)
    assert sum(part.num_read for part in parts) <= 1.02 * num_bytes_of(state) + 4 * 64 * 1024
    assert shown == []


def test_what_was_said_at_an_earlier_start_of_the_same_name_counts_for_nothing(
    tmp_path: Path, job_of: Callable[[int], Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    keys: set[str] = set()
    put, settle = StoreExchange.put, StoreExchange.settle

    def puts(exchange: StoreExchange, key: str, data: bytes) -> None:
        keys.update((key, f"{key}/chunk0"))
        put(exchange, key, data)

    def settles(exchange: StoreExchange, key: str, proposal: bytes) -> bytes:
        keys.add(key)
        return settle(exchange, key, proposal)

    monkeypatch.setattr(StoreExchange, "put", puts)
    monkeypatch.setattr(StoreExchange, "settle", settles)
    state = state_of()
    double = save(tmp_path, state)
    job = job_of(2)
    earlier = job.starts(lambda _: [double.storage], transport_token=TOKEN, start="first")
    job.reads()
    assert earlier[0].shared.members == (0, 1)
    old, again = PrefixStore("first", job.store), PrefixStore("second", job.store)
    for key in keys:
        if not key.removesuffix("/chunk0").endswith("/0"):
            again.set(key, old.get(key))
    victim = Part(job, 0, [double.storage], transport_token=TOKEN, start="second", patience=SHORT)
    job.parts.append(victim)
    victim.reads()
    victim.check(state)
    assert victim.shared.members == (0,)


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
    parts = job.starts(lambda _: [double.storage], transport_token=token)
    read_share = shared_read._read_share

    def reads(reader: CheckpointReader, *arguments: Any) -> dict[str, BoxedTensor]:
        served = read_share(reader, *arguments)
        if reader is parts[1].reader:
            for boxed in served.values():
                boxed.pieces = [(box, data + 1) for box, data in boxed.pieces]
        return served

    monkeypatch.setattr(shared_read, "_read_share", reads)
    job.reads()
    for part in parts:
        part.check(state)
    assert "by others that are not as they were written, and reads them by itself" in caplog.text
    assert parts[0].shared.statistics().bytes_from_peers > 0
