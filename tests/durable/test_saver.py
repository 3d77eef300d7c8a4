"""One save of a job: who writes what, how often, and what its files look like to others."""

from __future__ import annotations

import dataclasses
import random
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from support.newest import newest_whole
from support.savers import (
    FILL_AFTER_S,
    ImaginedEvent,
    ImaginedTime,
    Plan,
    Story,
    check_state,
    newest_step,
    no_threads_left,
    plain_storage,
    put_on,
    save,
    state_of,
    worker_of,
)
from support.scripted_fs import Disk, Fault
from support.spmd_double import Layout as SpmdLayout
from support.spmd_double import SilentAdapter, SpmdAdapter, SpmdTensor, bits_of, random_bits, registered
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from torchft_ckpt.checkpointing.durable.names import METADATA, parse_part
from torchft_ckpt.checkpointing.durable.reading.checkpoint import why_not_whole
from torchft_ckpt.checkpointing.durable.reading.reader import CheckpointReader
from torchft_ckpt.checkpointing.durable.saving.saver import SavedCheckpoint, SaveMode, SaveOnlooker, SaveWorker
from torchft_ckpt.checkpointing.durable.storage.local_storage import LocalStorage
from torchft_ckpt.checkpointing.state.target import Want
from torchft_ckpt.core.boxes.geometry import Box, whole
from torchft_ckpt.errors import CheckpointDamagedError, CheckpointError, CheckpointNotFoundError, StorageError

LAYOUTS = [(1, 1), (3, 1), (1, 2), (2, 2), (4, 2)]
TWO_BY_TWO = Plan(num_replicas=2, num_ranks=2)


def read_by_dcp(directory: Path) -> dict[str, Any]:
    """What plain DCP loads into memory of its own, without a process group."""
    state: dict[str, Any] = state_of(1)
    for key, tensor in state["model"].items():
        state["model"][key] = torch.zeros_like(tensor)
    dcp.load(state, checkpoint_id=directory, no_dist=True)
    return state


def assert_same(read: dict[str, Any], step: int) -> None:
    expected = state_of(step)
    for key, tensor in expected["model"].items():
        assert np.array_equal(bits_of(read["model"][key]).numpy(), bits_of(tensor).numpy()), key
    assert read["optimizer"]["step"].item() == step
    assert (read["optimizer"]["lr"], tuple(read["optimizer"]["betas"])) == (0.1 * step, (0.9, 0.99))
    assert (read["name"], read["array"].tolist()) == (expected["name"], expected["array"].tolist())


def bytes_of_tensors(disk: Disk) -> int:
    checkpoint = newest_whole([plain_storage(disk)])
    return sum(
        piece.box.volume * tensor.dtype.itemsize for tensor in checkpoint.tensors.values() for piece in tensor.pieces
    )


ARRAY_BYTES = 40
"""Of what each rank has of its own, because no optimizer keeps an array alike."""
UNIQUE_BYTES = sum(tensor.nbytes for tensor in state_of(1)["model"].values()) + 8 + ARRAY_BYTES
LARGEST_STEP_BYTES = 64 * 1024


@pytest.mark.parametrize("shape", LAYOUTS)
def test_every_byte_is_written_once_and_evenly(shape: tuple[int, int]) -> None:
    story = save(Plan(*shape))
    assert not story.errors()
    assert newest_step(story.disk) == 120
    assert bytes_of_tensors(story.disk) == UNIQUE_BYTES + (shape[1] - 1) * ARRAY_BYTES
    written = [saved.written_bytes for saved in story.saved().values()]
    assert sum(written) == sum(
        len(content) for path, content in story.disk.files().items() if not path.endswith(METADATA)
    )
    if len(written) <= 4:  # else shares are smaller than what is cut
        assert max(written) - min(written) <= 2 * LARGEST_STEP_BYTES
    assert all(saved.num_fills == 0 for saved in story.saved().values())


def test_every_group_writes_a_copy_where_it_is_to() -> None:
    story = save(Plan(num_replicas=3, num_ranks=2, mode=SaveMode.EVERY_GROUP))
    assert not story.errors()
    assert newest_step(story.disk) == 120
    assert bytes_of_tensors(story.disk) == 3 * (UNIQUE_BYTES + ARRAY_BYTES)
    with_data = {path.rsplit("/", 1)[1][:7] for path in story.disk.files() if path.endswith(".distcp")}
    assert with_data == {f"__r{group}_g{rank}" for group in range(3) for rank in range(2)}
    with_own = {path.rsplit("/", 1)[1] for path in story.disk.files() if path.endswith(".json")}
    assert with_own == {f"part-r{group}-g{rank}-f0.json" for group in range(3) for rank in range(2)}


def test_every_group_of_its_own_copy_is_whole_by_itself() -> None:
    """On disks that only one host can read: what the others wrote is gone."""
    disk = save(Plan(num_replicas=2, num_ranks=2, mode=SaveMode.EVERY_GROUP)).disk
    for lost in (0, 1):
        rest = Disk()
        for path, content in disk.files().items():
            if f"r{lost}" not in path.rsplit("/", 1)[1]:
                rest.put(path, content)
        assert newest_step(rest) == 120


@pytest.mark.parametrize("shape", LAYOUTS)
def test_plain_dcp_reads_it(shape: tuple[int, int], tmp_path: Path) -> None:
    plan = Plan(*shape)
    directory = put_on(save(plan).disk, tmp_path) / str(plan.name)
    assert_same(read_by_dcp(directory), 120)
    dcp_to_torch_save(directory, tmp_path / "all.pt")
    assert_same(torch.load(tmp_path / "all.pt", weights_only=False), 120)


@pytest.mark.parametrize("seed", range(6))
def test_plain_dcp_reads_what_was_filled_and_what_a_slow_writer_wrote_twice(seed: int, tmp_path: Path) -> None:
    dice = random.Random(seed)
    plan = Plan(num_replicas=3, num_ranks=2, absent=frozenset([dice.randrange(6)]))
    slow = dice.choice(plan.members)
    story = save(plan, costs={slow: {7: 3 * FILL_AFTER_S}})
    assert not story.errors(), story.log()
    assert bytes_of_tensors(story.disk) >= UNIQUE_BYTES
    directory = put_on(story.disk, tmp_path) / str(plan.name)
    assert_same(read_by_dcp(directory), 120)


def test_a_slow_writer_finds_the_checkpoint_closed_and_adds_what_is_its_own() -> None:
    story = save(TWO_BY_TWO, costs={3: {4: 5 * FILL_AFTER_S}})
    assert all(saved.is_closed for saved in story.saved().values())
    checkpoint = newest_whole([plain_storage(story.disk)])
    reader = CheckpointReader(checkpoint)
    check_state(reader, 120)
    for member in range(4):
        replica, rank = divmod(member, 2)
        own = reader.own(f"group_{replica}", rank)
        assert isinstance(own, dict)
        assert (own["user"], own["random"]) == ([120, member], None)
    assert not checkpoint.divergent
    assert not checkpoint.left_aside


def test_a_writer_whose_file_still_grows_is_waited_for() -> None:
    """However long it takes: nothing is written twice."""
    plain = save(TWO_BY_TWO)
    writes = [operation.number for operation in plain.systems[3].log if operation.name == "write"]
    assert len(writes) > 5
    story = save(TWO_BY_TWO, costs={3: dict.fromkeys(writes, 0.7 * FILL_AFTER_S)})
    assert story.time.now_s > 3 * FILL_AFTER_S
    assert not story.errors()
    assert all(saved.num_fills == 0 and saved.is_closed for saved in story.saved().values())
    assert bytes_of_tensors(story.disk) == UNIQUE_BYTES + ARRAY_BYTES


def test_the_metadata_is_written_once_where_all_goes_well() -> None:
    story = save(Plan(num_replicas=4, num_ranks=2))
    writers = [
        member
        for member, system in story.systems.items()
        if any(operation.name == "rename" and METADATA in operation.path for operation in system.log)
    ]
    assert writers == [0]


def test_nothing_is_waited_for_where_only_this_host_sees_the_files() -> None:
    disk = Disk()
    worker = worker_of(Plan(num_replicas=2, num_ranks=2, mode=SaveMode.EVERY_GROUP), 1, plain_storage(disk))
    worker._task = dataclasses.replace(worker._task, is_storage_shared=False)
    worker.run()
    saved = worker.future.result(0)
    assert (saved.is_closed, saved.num_fills) == (False, 0)
    assert sorted(path.rsplit("/", 1)[1] for path in disk.files()) == ["__r0_g1_f0.distcp", "part-r0-g1-f0.json"]


# Looking on


def looked_on(plan: Plan, begins_s: float, leaves_s: float | None = None, **options: Any) -> tuple[Story, SaveOnlooker]:
    story = save(plan, onlooker=(begins_s, leaves_s), **options)
    assert story.onlooker is not None
    return story, story.onlooker


@pytest.mark.parametrize("begins_s", [0.0, 1.0, 100.0])
def test_who_looks_on_is_done_when_the_writers_have_closed_it_and_has_written_nothing(begins_s: float) -> None:
    plan = Plan(num_replicas=2, num_ranks=2)
    story, onlooker = looked_on(plan, begins_s, starts_s={1: 2.0, 2: 4.0})
    saved = onlooker.future.result(0)
    assert (saved.is_closed, saved.written_bytes, saved.num_fills) == (True, 0, 0)
    assert (saved.step, saved.name) == (plan.step, str(plan.name))
    assert {writer.is_closed for writer in story.saved().values()} == {True}
    assert sorted(story.disk.files()) == sorted(save(plan, starts_s={1: 2.0, 2: 4.0}).disk.files())


def test_who_looks_on_where_nobody_writes_anything_does_not_know_whether_it_is_whole_and_goes_on() -> None:
    plan = Plan(num_replicas=1, num_ranks=1, absent=frozenset([0]), fill_after_s=30.0)
    disk = Disk()
    story = Story(plan, ImaginedTime())
    onlooker = SaveOnlooker(plan.name, plain_storage(disk), fill_after_s=30.0, timeout_s=1800.0, clock=story.time)
    onlooker._woken = ImaginedEvent(story.time)
    story.time.run([(0.0, onlooker.run)])
    assert not onlooker.future.result(0).is_closed
    assert 5.0 <= story.time.now_s < 7.0 and not disk.files()


def test_a_storage_that_does_not_answer_is_looked_at_again_by_who_looks_on(caplog: pytest.LogCaptureFixture) -> None:
    class Away(LocalStorage):
        num_failed = 0

        def size(self, path: str) -> int | None:
            if path.endswith(METADATA) and self.num_failed < 3:
                self.num_failed += 1
                raise StorageError(f"{path}: nobody answers", path)
            return super().size(path)

    plan = Plan(num_replicas=1, num_ranks=1)
    _, onlooker = looked_on(plan, 0.0, storage_class=Away)
    assert onlooker.future.result(0).is_closed
    assert len([record for record in caplog.records if "it is looked at again" in record.message]) <= 2


# Going on to the next save


def test_who_still_writes_its_share_cannot_leave() -> None:
    disk = Disk()
    worker = worker_of(TWO_BY_TWO, 0, plain_storage(disk))
    assert not worker.leave()
    worker.cancel()
    worker.run()
    assert isinstance(worker.future.exception(0), CheckpointError)
    assert not [path for path in disk.files() if parse_part(path.rsplit("/", 1)[1])]


def test_who_only_waits_for_others_leaves_and_frees_its_copies() -> None:
    plan = Plan(num_replicas=2, num_ranks=2, absent=frozenset([3]), fill_after_s=60.0)
    story = save(plan, leaves_s={member: 1.0 for member in plan.members})
    assert not story.errors()
    assert not any(saved.is_closed for saved in story.saved().values())
    assert story.time.now_s < 4.0
    assert all(worker._state.snapshot.closed for worker in story.workers.values())


def test_a_save_that_one_group_alone_has_called_says_who_wrote_nothing_and_does_not_look_like_success(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """As `if rank == 0: save()` does, which never makes a whole checkpoint."""
    plan = Plan(num_replicas=3, num_ranks=1, absent=frozenset([1, 2]), fill_after_s=30.0)
    story = save(plan, leaves_s={0: 1.0})
    expected = "replica 1, replica 2 have written nothing for step 120: every replica group has to call save for it"
    assert expected in str(story.errors()[0]) and "the next save began" in str(story.errors()[0])
    assert story.time.now_s < 6.0
    assert [record.levelname for record in caplog.records if f"cannot become whole: {expected}" in record.message] == [
        "WARNING"
    ]


def test_a_group_that_begins_late_is_not_taken_for_one_that_has_not_called_save(
    caplog: pytest.LogCaptureFixture,
) -> None:
    plan = Plan(num_replicas=3, num_ranks=1, fill_after_s=30.0)
    story = save(plan, starts_s={1: 3.0, 2: 4.5}, leaves_s={0: 1.0})
    assert not story.errors() and newest_step(story.disk) == 120
    assert "written nothing" not in caplog.text


@pytest.mark.slow
def test_whenever_they_leave_the_last_writer_closes_the_checkpoint() -> None:
    for seed in range(60):
        dice = random.Random(seed)
        plan = Plan(*dice.choice([(2, 1), (2, 2), (3, 2)]))
        starts = {member: dice.choice([0.0, dice.uniform(0.0, 3.0)]) for member in plan.members}
        leaves = {member: at + dice.uniform(0.0, 2.0) for member, at in starts.items() if dice.random() < 0.8}
        story = save(plan, starts_s=starts, leaves_s=leaves)
        assert not story.errors(), (seed, story.log())
        assert METADATA in plain_storage(story.disk).names(str(plan.name)), (seed, story.log())
        assert newest_step(story.disk) == 120


@pytest.mark.slow
def test_who_leaves_while_one_has_died_leaves_the_hole_to_those_who_stay() -> None:
    for seed in range(30):
        dice = random.Random(seed)
        plan = Plan(num_replicas=3, num_ranks=2)
        dead, leaving = dice.sample(range(6), 2)
        while leaving % 2 == dead % 2:
            dead, leaving = dice.sample(range(6), 2)
        story = save(
            plan,
            faults={dead: {dice.randrange(12): Fault.DEATH_WITHIN}},
            leaves_s={leaving: dice.uniform(0.0, 3 * FILL_AFTER_S)},
        )
        assert set(story.errors()) <= {dead}, (seed, story.log())
        assert newest_step(story.disk) == 120, seed


# Giving up


def test_a_save_that_is_given_up_ends_at_once_and_frees_everything() -> None:
    story_plan = Plan(num_replicas=2, num_ranks=2, absent=frozenset([1, 3]))
    worker = worker_of(story_plan, 0, plain_storage(Disk()))
    with no_threads_left():
        thread = threading.Thread(target=worker.run)
        thread.start()
        while worker._needs_state:
            pass
        worker.cancel()
        thread.join(60)
        assert not thread.is_alive()
    assert "given up" in str(worker.future.exception(0))
    assert worker._state.snapshot.closed
    assert worker._state.snapshot._pool.held_bytes() == 0


def test_who_gives_up_names_the_missing_and_says_that_its_share_is_there() -> None:
    story = save(Plan(num_replicas=2, num_ranks=2, absent=frozenset([1, 3]), timeout_s=30.0))
    for error in story.errors().values():
        assert isinstance(error, CheckpointDamagedError)
        assert "replica 0 rank 1, replica 1 rank 1" in str(error)
        assert "this rank's share is there" in str(error)
    assert len(story.errors()) == 2


def test_a_part_that_was_damaged_before_it_was_closed_is_written_by_another_one() -> None:
    """Somebody's disk lies: the file has another length than its manifest says. All parts are there, nobody is waited for."""
    plan = TWO_BY_TWO
    disk = Disk()

    class Cutting(LocalStorage):
        """Loses the end of what member 2 wrote, before the others look."""

        def names(self, directory: str = "") -> list[str]:
            found = super().names(directory)
            path = f"/c/{plan.name}/__r1_g0_f0.distcp"
            files = disk.files()
            if "part-r1-g0-f0.json" in found and path in files and len(files[path]) > 100:
                disk.put(path, files[path][:100])
            return found

    story = save(plan, disk, storage_class=Cutting)
    assert not story.errors(), story.log()
    checkpoint = newest_whole([plain_storage(disk)])
    assert why_not_whole(checkpoint) is None
    assert checkpoint.left_aside
    assert newest_step(disk) == 120
    assert story.time.now_s < 2 * FILL_AFTER_S


def test_shares_are_known_without_asking_anybody() -> None:
    """Each member alone writes; together it is whole, though none has seen another's files."""
    whole_disk = Disk()
    for member in range(4):
        alone = Disk()
        plan = Plan(num_replicas=2, num_ranks=2, absent=frozenset(range(4)) - {member}, timeout_s=1.0)
        save(plan, alone)
        for path, content in alone.files().items():
            whole_disk.put(path, content)
    checkpoint = newest_whole([plain_storage(whole_disk)])
    assert newest_step(whole_disk) == 120
    boxes: dict[str, list[Box]] = {
        fqn: [piece.box for piece in tensor.pieces] for fqn, tensor in checkpoint.tensors.items()
    }
    assert len(boxes.pop("array")) == 2, "each rank of the first group has its own"
    assert all(len(set(of_tensor)) == len(of_tensor) for of_tensor in boxes.values())


def run_all(workers: Sequence[SaveWorker]) -> list[SavedCheckpoint]:
    """Have all of them save at once, in real time."""
    threads = [threading.Thread(target=worker.run) for worker in workers]
    for thread in threads:
        thread.start()
    saved = [worker.future.result(60) for worker in workers]
    for thread in threads:
        thread.join()
    return saved


@pytest.mark.parametrize(
    ("adapter", "copies"), [(SpmdAdapter(), 1.0), (SilentAdapter(), 2.0)], ids=["said", "not said"]
)
def test_tensors_of_an_adapter_that_says_who_holds_them_are_on_disk_once(
    adapter: SpmdAdapter, copies: float, tmp_path: Path
) -> None:
    """Two groups of two ranks, four devices in each group; every tile has a replica on each rank."""
    layouts = {
        "rows": SpmdLayout((2, 1), 2, places=((0, 2), (1, 3))),
        "columns": SpmdLayout((1, 2), 2, places=((0, 3), (1, 2))),
        "replicated": SpmdLayout((1, 1), 4, places=((0, 1), (2, 3))),
    }
    full = {name: random_bits((1536, 1024), torch.float32, seed=3) for name in layouts}
    full |= {f"small{number}": random_bits((64, 512), torch.float32, seed=number) for number in range(16)}
    layouts |= {name: layouts["rows"] for name in full if name not in layouts}
    plan, storage = Plan(num_replicas=2, num_ranks=2, fill_after_s=60.0), LocalStorage(tmp_path)
    with registered(adapter):
        states = [
            {name: SpmdTensor.of(tensor, layouts[name].of_rank(rank)) for name, tensor in full.items()}
            for rank in range(2)
        ]
        workers = [worker_of(plan, member, storage, state_of_rank=states[member % 2]) for member in range(4)]
    saved = run_all(workers)
    unique = sum(tensor.nbytes for tensor in full.values())
    on_disk = sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file())
    assert all(one.num_fills == 0 for one in saved)
    assert on_disk / unique <= copies + (0.01 if copies == 1 else 0.03)
    assert on_disk / unique >= copies
    written = [one.written_bytes for one in saved]
    assert max(written) <= 1.1 * sum(written) / 4
    by_dcp = {name: torch.zeros_like(tensor) for name, tensor in full.items()}
    dcp.load(by_dcp, checkpoint_id=tmp_path / str(plan.name), no_dist=True)
    wants = [Want(name, whole(tuple(tensor.shape)), torch.zeros_like(tensor)) for name, tensor in full.items()]
    CheckpointReader(newest_whole([storage])).read(wants)
    for want in wants:
        assert torch.equal(bits_of(by_dcp[want.name]), bits_of(full[want.name])), want.name
        assert torch.equal(bits_of(want.target), bits_of(full[want.name])), want.name


@pytest.mark.slow
def test_where_ranks_differ_in_what_they_know_of_holders_the_hole_is_found_and_named(tmp_path: Path) -> None:
    """An adapter must not do that: the ranks divide the save in different ways, and nobody has staged what is missing."""
    knows = SpmdLayout((2, 1), 2, places=((0, 2), (1, 3)))
    full = random_bits((512, 256), torch.float32, seed=5)
    plain = random_bits((700, 256), torch.float32, seed=6)
    plan, storage = Plan(num_replicas=2, num_ranks=2, fill_after_s=0.5), LocalStorage(tmp_path)
    with registered(SpmdAdapter()):
        layouts = [knows.of_rank(0), dataclasses.replace(knows.of_rank(1), places=None)]
        states = [{"spmd": SpmdTensor.of(full, layout), "plain": plain} for layout in layouts]
        workers = [worker_of(plan, member, storage, state_of_rank=states[member % 2]) for member in range(4)]
    threads = [threading.Thread(target=worker.run) for worker in workers]
    for thread in threads:
        thread.start()
    for worker, thread in zip(workers, threads, strict=True):
        with pytest.raises(CheckpointDamagedError, match=r"did not divide it alike .* missing are plain"):
            worker.future.result(60)
        thread.join()
    with pytest.raises(CheckpointNotFoundError, match="missing are plain"):
        newest_whole([storage])
