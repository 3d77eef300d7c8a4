"""Whatever fails in a save, and wherever it is killed: the checkpoint before it can be read, the new one is right or not there.

Every operation of a save's file system is made to fail in every way, one case each (by default of those that are alike, such as
the writes of one file, the first and the last); what is left is looked at as another process would after a kill, and as a
machine would that lost its power at that moment.
"""

from __future__ import annotations

import itertools
import logging
import random
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from functools import cache

import pytest
from support.newest import newest_whole
from support.savers import (
    FILL_AFTER_S,
    Plan,
    Story,
    check_state,
    newest_step,
    plain_storage,
    save,
    worker_of,
)
from support.scripted_fs import DEATHS, ERRORS, Disk, Fault, Operation, ProcessDied
from support.thoroughness import THOROUGH, by_default

from torchft_ckpt.checkpointing.durable.names import METADATA, TEMPORARY, parts_in
from torchft_ckpt.checkpointing.durable.reading.reader import CheckpointReader
from torchft_ckpt.checkpointing.durable.saving.saver import SaveMode
from torchft_ckpt.checkpointing.serving.snapshot import Snapshot
from torchft_ckpt.core.durable.saving import SavingRank
from torchft_ckpt.errors import CheckpointDamagedError, CheckpointError, CheckpointNotFoundError, StorageError

pytestmark = pytest.mark.slow
CRASHES = range(by_default(2, thorough=4))
OLD, NEW, NEXT = 110, 120, 130
ALONE = Plan()
TWO_BY_TWO = Plan(num_replicas=2, num_ranks=2)
SPARE_S = 3.0


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    """Each of some thousand cases would log what it should."""
    logging.disable(logging.ERROR)
    yield
    logging.disable(logging.NOTSET)


@cache
def log_of(plan: Plan, before: int | None = None) -> dict[int, list[Operation]]:
    """What each member does in a save where all goes well, on a disk with that checkpoint."""
    return {member: system.log for member, system in save(plan, disk_with(before)).systems.items()}


def operations_of(plan: Plan, member: int, before: int | None = None) -> int:
    """How many operations that are."""
    return len(log_of(plan, before)[member])


def places_of(plan: Plan, member: int, before: int | None = None) -> list[int]:
    """The numbers of the operations at which to fail: the first and the last of each kind, or all in a thorough run."""
    log = log_of(plan, before)[member]
    if THOROUGH:
        return [operation.number for operation in log]
    kinds: dict[object, list[int]] = {}
    for operation in log:
        kind = operation.name, re.sub(r"\d+", "", operation.path), operation.detail.endswith(" at 0")
        kinds.setdefault(kind, []).append(operation.number)
    return sorted({number for numbers in kinds.values() for number in (numbers[0], numbers[-1])})


@cache
def _saved(step: int) -> Disk:
    story = save(Plan(step=step, save_id="q2-00000000"))
    assert not story.errors()
    return story.disk


def disk_with(step: int | None) -> Disk:
    """A disk on which a checkpoint of that step has been for long."""
    return Disk() if step is None else _saved(step).after_crash(0)


_newest_of: dict[object, int | None] = {}
_has_old: set[object] = set()


def newest_on(disk: Disk) -> int | None:
    """The step of the newest whole checkpoint, all of it read and right. Disks that are alike are read once for all cases."""
    seen = disk.fingerprint()
    if seen not in _newest_of:
        try:
            _newest_of[seen] = newest_step(disk)
        except CheckpointNotFoundError:
            _newest_of[seen] = None
    return _newest_of[seen]


def check_old(disk: Disk) -> None:
    seen = disk.fingerprint()
    if seen not in _has_old:
        checkpoint = newest_whole([plain_storage(disk)], step=OLD)
        check_state(CheckpointReader(checkpoint, num_threads=1), OLD)
        _has_old.add(seen)


def left_by(story: Story, crashes: Iterable[int] = CRASHES) -> Iterator[Disk]:
    """What others see after a kill of the processes, and what machines find that lost their power; what is alike, once."""
    found: list[dict[str, bytes]] = []
    for disk in (story.disk, *(story.disk.after_crash(seed) for seed in crashes)):
        files = {path: content for path, content in disk.files().items() if TEMPORARY not in path}
        if files not in found:
            found.append(files)
            yield disk


def check_freed(story: Story) -> None:
    for member, worker in story.workers.items():
        assert worker._state.snapshot.closed
        assert worker._state.snapshot._pool.held_bytes() == 0
        system = story.systems[member]
        opened_in_error = [at for at, fault in system.faults.items() if system.log[at].name.startswith("open")]
        assert system.is_dead or system.num_open <= len(opened_in_error), story.log()


# One rank


@pytest.mark.parametrize(("death", "before"), [*((death, OLD) for death in DEATHS), (Fault.DEATH_WITHIN, None)])
def test_death_at_any_operation_leaves_the_old_checkpoint_and_the_new_one_whole_or_invisible(
    death: Fault, before: int | None
) -> None:
    seen = set()
    for number in places_of(ALONE, 0, before):
        story = save(ALONE, disk_with(before), faults={0: {number: death}})
        assert isinstance(story.errors()[0], ProcessDied)
        for disk in left_by(story):
            newest = newest_on(disk)
            assert newest in (before, NEW), story.log()
            seen.add(newest)
            if before is not None and newest == NEW:
                check_old(disk)
    assert seen == {before, NEW}


def test_what_was_reported_as_saved_outlives_every_crash_of_the_machine() -> None:
    for plan in (ALONE, TWO_BY_TWO):
        story = save(plan, disk_with(OLD))
        assert not story.errors() and all(saved.is_closed for saved in story.saved().values())
        for seed in range(30):
            disk = story.disk.after_crash(seed)
            assert newest_on(disk) == NEW
            assert METADATA in plain_storage(disk).names(str(plan.name))


@pytest.mark.parametrize("fault", [*ERRORS, Fault.SHORT])
def test_an_error_of_any_operation_is_named_and_the_next_save_works(fault: Fault) -> None:
    places = places_of(ALONE, 0, OLD)
    for operation in log_of(ALONE, OLD)[0]:
        number = operation.number
        if number not in places:
            continue
        if fault is Fault.SHORT and operation.name not in ("write", "read_into"):
            continue
        story = save(ALONE, disk_with(OLD), faults={0: {number: fault}})
        error = story.errors().get(0)
        assert error is None or isinstance(error, StorageError), story.log()
        assert error is not None or newest_on(story.disk) == NEW
        assert fault is not Fault.SHORT or error is None
        check_freed(story)
        for disk in left_by(story, [number]):
            assert newest_on(disk) in (OLD, NEW), story.log()
        if places.index(number) % 4 == 0:
            assert not save(Plan(step=NEXT), story.disk).errors()
            assert newest_on(story.disk) == NEXT
            check_old(story.disk)


def test_a_disk_that_is_full_fails_saves_until_there_is_room() -> None:
    needed = save(ALONE, disk_with(OLD)).disk.num_bytes()
    before = disk_with(OLD).num_bytes()
    for capacity in range(before, needed, (needed - before) // by_default(10, thorough=20)):
        disk = disk_with(OLD)
        disk.capacity_bytes = capacity
        story = save(ALONE, disk)
        assert isinstance(story.errors()[0], StorageError)
        assert newest_on(disk) in (OLD, NEW)  # without room for the metadata it is whole all the same
        check_old(disk)
        check_freed(story)
        disk.capacity_bytes = None
        assert not save(Plan(step=NEXT), disk).errors()
        assert newest_on(disk) == NEXT


@pytest.mark.parametrize("death", DEATHS)
def test_the_directory_of_a_dead_save_is_not_used_by_the_one_after_the_restart(death: Fault) -> None:
    for number in range(3, operations_of(ALONE, 0, OLD), by_default(10, thorough=5)):
        story = save(ALONE, disk_with(OLD), faults={0: {number: death}})
        disk = story.disk.after_crash(number)
        left = {path: content for path, content in disk.files().items() if str(ALONE.name) in path}
        restarted = Plan(save_id="q1003-1a2b3c4d")
        assert not save(restarted, disk).errors()
        assert {path: content for path, content in disk.files().items() if str(ALONE.name) in path} == left
        assert newest_whole([plain_storage(disk)]).name in (restarted.name, ALONE.name)
        assert newest_on(disk) == NEW


# Several ranks


def check_survivors(story: Story, dead: Mapping[int, object], *, num_waits: int = 1) -> None:
    """Those who live say that it is whole; and it is, here and after every crash. No share was taken over twice.

    They have waited so many times, one after the other, for somebody who was silent.
    """
    survivors = [member for member in story.plan.members if member not in dead]
    assert not [member for member in survivors if member in story.errors()], story.log()
    assert all(story.saved()[member].is_closed for member in survivors), story.log()
    for disk in left_by(story, [1]):
        assert newest_on(disk) == NEW, story.log()
    assert story.time.now_s <= num_waits * story.plan.fill_after_s + SPARE_S, story.log()
    assert max(Counter(taken_over(story)).values(), default=0) <= 1, story.log()


def taken_over(story: Story) -> list[SavingRank]:
    """The shares that others than their owners have written."""
    names = plain_storage(story.disk).names(str(story.plan.name))
    return [story.plan.writers.share_of(SavingRank(*part[:2]), part.fill) for part in parts_in(names) if part.fill]


EACH_DEATH_AND_EACH_MEMBER = [
    *((0, death) for death in DEATHS),
    *((member, Fault.DEATH_WITHIN) for member in (1, 2, 3)),
]


@pytest.mark.parametrize(
    ("member", "death"), by_default(EACH_DEATH_AND_EACH_MEMBER, thorough=list(itertools.product(range(4), DEATHS)))
)
def test_one_of_four_dies_at_any_operation_and_the_others_complete_the_checkpoint(member: int, death: Fault) -> None:
    for number in places_of(TWO_BY_TWO, member):
        story = save(TWO_BY_TWO, faults={member: {number: death}})
        errors = story.errors()
        # Where others were quicker than when its operations were counted, it has fewer of them, and does not die.
        assert not errors or isinstance(errors[member], ProcessDied), story.log()
        check_survivors(story, errors and {member: None})


@pytest.mark.parametrize("fault", ERRORS)
def test_one_of_four_cannot_write_and_the_others_complete_the_checkpoint(fault: Fault) -> None:
    for number in places_of(TWO_BY_TWO, 2):
        story = save(TWO_BY_TWO, faults={2: {number: fault}})
        errors = story.errors()
        assert not errors or isinstance(errors[2], StorageError), story.log()
        check_survivors(story, errors and {2: None})
        check_freed(story)


@pytest.mark.parametrize("dead", [(0, 2), (1, 3)])
def test_both_replicas_of_a_rank_die_and_the_others_give_up_in_time(dead: tuple[int, int]) -> None:
    """Before their manifests are there: nobody knows what they held."""
    for number in (0, 3, 7):
        plan = Plan(num_replicas=2, num_ranks=2, timeout_s=60.0)
        faults = {member: {number: Fault.DEATH_WITHIN} for member in dead}
        story = save(plan, disk_with(OLD), faults=faults)
        for member in set(plan.members) - set(dead):
            assert isinstance(story.errors()[member], CheckpointDamagedError), story.log()
            assert "did not become whole within 60 s" in str(story.errors()[member])
        assert 60.0 <= story.time.now_s <= 62.0
        assert newest_on(story.disk) == OLD
        assert METADATA not in plain_storage(story.disk).names(str(plan.name))


def test_a_copy_of_every_group_survives_a_death_as_well() -> None:
    plan = Plan(num_replicas=2, num_ranks=2, mode=SaveMode.EVERY_GROUP)
    for member in range(4):
        for place in range(member, operations_of(plan, member), by_default(14, thorough=7)):
            story = save(plan, faults={member: {place: DEATHS[place // 7 % 3]}})
            check_survivors(story, {member: None})


def test_holes_that_all_survivors_can_fill_are_filled_once() -> None:
    """They do not look at the same moment, and still divide the work."""
    for seed in range(by_default(6, thorough=12)):
        dice = random.Random(seed)
        plan = Plan(num_replicas=3, num_ranks=2, absent=frozenset([dice.randrange(6)]))
        story = save(plan, starts_s={member: dice.uniform(0.0, 1.5) for member in plan.members})
        check_survivors(story, {})
        checkpoint = newest_whole([plain_storage(story.disk)])
        for tensor in checkpoint.tensors.values():
            written = sum(piece.box.volume for piece in tensor.pieces)
            copies = plan.num_ranks if tensor.fqn == "array" else 1  # which each rank has of its own
            assert written == copies * _volume(tensor.shape), (seed, tensor.fqn, written)
        assert story.time.now_s <= 1.5 + plan.fill_after_s + SPARE_S


def test_one_of_two_groups_is_silent_for_twice_as_long_as_it_takes_to_replace_it() -> None:
    for number in places_of(TWO_BY_TWO, 0)[:: by_default(3, thorough=1)]:
        story = save(TWO_BY_TWO, costs={member: {number: 2 * FILL_AFTER_S} for member in (0, 1)})
        assert not story.errors(), story.log()
        assert all(saved.is_closed for saved in story.saved().values()), story.log()
        assert newest_on(story.disk) == NEW
        assert max(story.saved()[member].took_s for member in (2, 3)) <= FILL_AFTER_S + SPARE_S, story.log()
        assert max(Counter(taken_over(story)).values(), default=0) <= 1, story.log()


def test_with_a_redundancy_of_three_two_groups_may_die() -> None:
    plan = Plan(num_replicas=4, num_ranks=1, redundancy=3)
    for seed in range(by_default(8, thorough=60)):
        dice = random.Random(seed)
        dead = {
            member: {dice.randrange(operations_of(plan, member)): dice.choice(DEATHS)}
            for member in dice.sample(range(4), 2)
        }
        story = save(plan, faults=dead)
        survivors = {*plan.members} - {*dead}
        assert all(story.saved()[member].is_closed for member in survivors), (seed, story.log())
        assert newest_on(story.disk) == NEW, seed
        assert story.time.now_s <= 3 * FILL_AFTER_S + SPARE_S, (seed, story.log())
        assert max(Counter(taken_over(story)).values(), default=0) <= 2, seed


@pytest.mark.parametrize("redundancy", [1, 2, 3])
def test_a_rank_keeps_no_more_than_the_shares_that_it_may_have_to_write(redundancy: int) -> None:
    """The trainer steps as soon as the save has begun, and one writer never comes: its backup keeps its share till the end."""
    plan = Plan(num_replicas=8, redundancy=redundancy)
    for member in (0, 5):
        worker = worker_of(plan, member, plain_storage(Disk()))
        snapshot = worker._state.snapshot
        worker.detach()
        staged = worker.stage()
        assert len(staged) == redundancy
        assert sum(share.num_bytes for share in staged) <= copied_aside(snapshot)
        assert (
            copied_aside(snapshot) <= sum(share.num_bytes for share in staged) + 2 * redundancy * snapshot.block_bytes
        )
        worker._task.storage.make_directory(str(plan.name))
        worker._write(0)
        worker._release({*range(1, redundancy)})
        backups = sum(share.num_bytes for share in staged[1:])
        assert backups <= copied_aside(snapshot) <= backups + 2 * redundancy * snapshot.block_bytes
        worker._release(set())
        assert copied_aside(snapshot) == 0
        worker._state.close()


def copied_aside(snapshot: Snapshot) -> int:
    return snapshot.statistics().num_blocks_copied_aside * snapshot.block_bytes


def test_any_number_of_faults_in_any_job() -> None:
    """Deaths, errors and delays at random. As long as one of each share's holders lives on, the checkpoint comes about.

    Where each group writes all, as long as each rank lives on in some group.
    """
    for seed in range(by_default(20, thorough=60)):
        dice = random.Random(seed)
        shape = dice.choice([(1, 1), (2, 1), (1, 2), (2, 2), (3, 1), (3, 2)])
        plan = Plan(*shape, mode=dice.choice([*SaveMode]), timeout_s=200.0)
        faults: dict[int, dict[int, Fault]] = {}
        costs: dict[int, dict[int, float]] = {}
        for member in plan.members:
            length = operations_of(plan, member, OLD)
            if dice.random() < 0.4:
                faults[member] = {dice.randrange(length): dice.choice([*DEATHS, *ERRORS])}
            if dice.random() < 0.3:
                costs[member] = {dice.randrange(length): dice.uniform(0.0, 4 * FILL_AFTER_S)}
        starts = {member: dice.uniform(0.0, 2.0) for member in plan.members}
        story = save(plan, disk_with(OLD), faults=faults, costs=costs, starts_s=starts)
        errors = story.errors()
        assert all(isinstance(error, (ProcessDied, StorageError, CheckpointDamagedError)) for error in errors.values())
        alive = {SavingRank(*divmod(member, plan.num_ranks)) for member in plan.members if member not in errors}
        if plan.mode is SaveMode.EVERY_GROUP:
            can_be_whole = len({member.rank for member in alive}) == plan.num_ranks
        else:
            shares = [SavingRank(*divmod(member, plan.num_ranks)) for member in plan.members]
            numbers = range(plan.writers.num_holders)
            holders = [{plan.writers.holder_of(share, number) for number in numbers} for share in shares]
            can_be_whole = all(alive & of_share for of_share in holders)
        newest = newest_on(story.disk)
        assert newest in (OLD, NEW), (seed, story.log())
        check_old(story.disk)
        if can_be_whole:
            assert newest == NEW, (seed, story.log())
            assert all(saved.is_closed for saved in story.saved().values()), seed
        crashed = newest_on(story.disk.after_crash(seed))
        assert crashed in (OLD, NEW), seed
        assert crashed == NEW or not story.saved(), (seed, story.log())


# Who else saves


def test_two_saves_of_one_step_do_not_meet() -> None:
    disk = Disk()
    first, second = Plan(save_id="q3-aa"), Plan(save_id="q4-bb")
    assert not save(first, disk).errors()
    before = disk.files()
    assert not save(second, disk).errors()
    assert before.items() <= disk.files().items()
    assert newest_whole([plain_storage(disk)]).name == second.name
    assert newest_on(disk) == NEW


@pytest.mark.parametrize("plan", [ALONE, TWO_BY_TWO])
def test_a_save_whose_part_is_there_already_is_refused_and_changes_nothing(plan: Plan) -> None:
    disk = save(plan).disk
    before = disk.files()
    story = save(plan, disk)
    for error in story.errors().values():
        assert isinstance(error, CheckpointError)
        assert "is there already" in str(error)
    assert len(story.errors()) == len(plan.members)
    assert disk.files() == before


def _volume(shape: tuple[int, ...]) -> int:
    volume = 1
    for size in shape:
        volume *= size
    return volume
