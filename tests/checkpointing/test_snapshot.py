"""A snapshot is the state of its step whatever the trainer does, copies only what must be copied, and is freed in time."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from datetime import timedelta

import pytest
import torch
from support.thoroughness import by_default

from torchft_ckpt.checkpointing.lock import StateDictLock
from torchft_ckpt.checkpointing.serving.buffers import BufferPool
from torchft_ckpt.checkpointing.serving.snapshot import BlockGoneError, Snapshot, SnapshotPhase
from torchft_ckpt.checkpointing.serving.snapshot_registry import FRESH_S, Availability, SnapshotRegistry
from torchft_ckpt.errors import CheckpointError, UnsupportedValueError

BLOCK = 4096
LONG_S = 90.0


def blocks(numbers: Iterable[int]) -> int:
    return sum(1 << number for number in numbers)


class Scene:
    """A trainer's tensors, and a snapshot of them: 4 blocks of contiguous memory, then 2 blocks of a strided tensor."""

    def __init__(self, num_expected: int = 1, step: int = 7) -> None:
        self.lock = StateDictLock(timedelta(seconds=60))
        self.pool = BufferPool(BLOCK)
        self.weight = torch.arange(4 * BLOCK // 4, dtype=torch.float32)
        self.strided = torch.arange(2 * BLOCK // 4, dtype=torch.float32).view(32, 64).t()
        self.old_bytes = bytes(self.weight.untyped_storage()) + bytes(self.strided.contiguous().untyped_storage())
        self.snapshot = Snapshot(
            {"w": self.weight, "s": self.strided}, step=step, lock=self.lock, pool=self.pool, num_expected=num_expected
        )

    def mutate(self) -> None:
        self.weight.add_(1000)
        self.strided.add_(1000)

    def read_all(self) -> bytes:
        step = 1000  # not a divisor of anything
        total = self.snapshot.total_bytes
        return b"".join(self.snapshot.read(at, min(at + step, total)) for at in range(0, total, step))


def test_a_state_that_no_receiver_takes_is_said_once_by_its_largest_value(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torchft_ckpt.checkpointing.serving.snapshot.MAX_MANIFEST_BYTES", 2000)
    for step in (1, 2):
        state = {"w": torch.ones(2), "user": {"replay": [b"x" * 3000, b"y" * 10], "lr": 0.1}, "step": step}
        snapshot = Snapshot(
            state, step=step, lock=StateDictLock(timedelta(seconds=60)), pool=BufferPool(BLOCK), num_expected=1
        )
        snapshot.manifest_bytes()
        snapshot.close()
    (said,) = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert "no group can heal from here" in said and "'user.replay.0'" in said


def test_a_live_snapshot_is_read_without_any_buffer():
    scene = Scene()
    assert (scene.read_all(), scene.pool.held_bytes()) == (scene.old_bytes, 0)


def test_a_detached_snapshot_reads_the_old_state_after_a_mutation():
    scene = Scene()
    scene.snapshot.detach()
    scene.mutate()
    assert scene.read_all() == scene.old_bytes


def test_a_snapshot_that_was_half_read_goes_on_with_the_old_state():
    scene = Scene()
    first = scene.snapshot.read(0, 5000)
    scene.snapshot.detach()
    scene.mutate()
    assert first + scene.snapshot.read(5000, scene.snapshot.total_bytes) == scene.old_bytes


def test_taking_the_write_lock_detaches_before_the_writer_can_mutate():
    scene = Scene()
    scene.lock.add_before_write(scene.snapshot.detach)
    with scene.lock.write():
        scene.mutate()
    assert scene.read_all() == scene.old_bytes


def test_only_what_the_receiver_does_not_have_is_copied_aside():
    scene = Scene()
    scene.snapshot.register("a")
    scene.snapshot.contact("a", 0.0, received=blocks([0, 1, 4]))
    scene.snapshot.detach()
    assert scene.snapshot.statistics().num_blocks_copied_aside == 3
    assert [scene.snapshot.holds(block * BLOCK, (block + 1) * BLOCK) for block in range(6)] == [
        False, False, True, True, False, True,
    ]  # fmt: skip


def test_two_receivers_need_what_either_of_them_does_not_have():
    scene = Scene(num_expected=2)
    for receiver, held in (("a", [0, 1, 2]), ("b", [0, 1, 3])):
        scene.snapshot.register(receiver)
        scene.snapshot.contact(receiver, 0.0, received=blocks(held))
    scene.snapshot.detach()
    assert scene.snapshot.statistics().num_blocks_copied_aside == 4


def test_an_expected_receiver_that_has_not_come_yet_needs_everything():
    scene = Scene(num_expected=2)
    scene.snapshot.register("a")
    scene.snapshot.contact("a", 0.0, received=blocks(range(6)))
    scene.snapshot.detach()
    scene.mutate()
    assert scene.snapshot.register("b")
    assert scene.read_all() == scene.old_bytes


def test_copies_are_freed_as_the_receiver_acknowledges_them():
    scene = Scene()
    scene.snapshot.register("a")
    scene.snapshot.detach()
    addresses = {buffer.address for buffer in scene.snapshot._copies.values()}
    scene.snapshot.contact("a", 0.0, received=blocks([0, 1, 2]))
    assert scene.snapshot.statistics().num_blocks_copied_aside == 3
    assert {scene.pool.take().address for _ in range(3)} < addresses


def test_the_last_receiver_that_is_done_closes_a_detached_snapshot_and_frees_its_memory():
    scene = Scene(num_expected=2)
    for receiver in ("a", "b"):
        scene.snapshot.register(receiver)
    scene.snapshot.detach()
    scene.snapshot.finish("a")
    assert (scene.snapshot.closed, scene.pool.held_bytes()) == (False, 6 * BLOCK)
    scene.snapshot.finish("b")
    assert (scene.snapshot.closed, scene.pool.held_bytes()) == (True, 0)


def test_a_snapshot_that_everybody_has_is_closed_without_a_copy():
    scene = Scene()
    scene.snapshot.register("a")
    scene.snapshot.finish("a")
    scene.snapshot.detach()
    assert (scene.snapshot.statistics().phase, scene.pool.held_bytes()) == (SnapshotPhase.CLOSED, 0)


def test_a_snapshot_that_nobody_was_told_of_is_closed_when_the_state_changes():
    scene = Scene(num_expected=0)
    scene.snapshot.detach()
    assert scene.snapshot.closed


def test_a_receiver_that_comes_when_parts_are_gone_is_not_registered():
    scene = Scene()
    scene.snapshot.register("a")
    scene.snapshot.contact("a", 0.0, received=blocks([0]))
    scene.snapshot.detach()
    assert not scene.snapshot.register("b")


def test_a_receiver_may_start_again_as_long_as_everything_is_there():
    scene = Scene()
    scene.snapshot.register("a")
    scene.snapshot.contact("a", 0.0, received=blocks([0, 1]))
    assert scene.snapshot.register("a")
    scene.snapshot.detach()
    assert scene.snapshot.statistics().num_blocks_copied_aside == 6


def test_bytes_of_a_closed_snapshot_are_gone():
    scene = Scene()
    scene.snapshot.close()
    with pytest.raises(BlockGoneError, match="step 7"):
        scene.snapshot.read(0, 1)


def test_a_live_snapshot_is_not_read_while_a_writer_holds_the_lock():
    scene, entered, leave, results = Scene(), threading.Event(), threading.Event(), []

    def write() -> None:
        with scene.lock.write():
            entered.set()
            leave.wait(LONG_S)

    writer = threading.Thread(target=write)
    reader = threading.Thread(target=lambda: results.append(scene.snapshot.read(0, 10)))
    writer.start()
    assert entered.wait(LONG_S)
    reader.start()
    reader.join(0.05)
    assert results == []
    leave.set()
    reader.join(LONG_S)
    writer.join(LONG_S)
    assert results == [scene.old_bytes[:10]]


def test_a_detached_snapshot_is_read_while_a_writer_holds_the_lock():
    scene, results = Scene(), []
    scene.lock.add_before_write(scene.snapshot.detach)
    with scene.lock.write():
        scene.mutate()
        reader = threading.Thread(target=lambda: results.append(scene.snapshot.read(0, 10)))
        reader.start()
        reader.join(LONG_S)
    assert results == [scene.old_bytes[:10]]


def test_live_memory_that_is_lent_is_given_back_before_the_state_may_be_mutated():
    scene, detached = Scene(), threading.Event()

    def detach() -> None:
        scene.snapshot.detach()
        detached.set()

    trainer = threading.Thread(target=detach)
    with scene.snapshot.lend(0, 5000) as views:
        trainer.start()
        assert not detached.wait(0.05)
        seen = b"".join(views)
    assert detached.wait(LONG_S)
    trainer.join(LONG_S)
    assert seen == scene.old_bytes[:5000]


def test_a_buffer_that_is_being_sent_is_not_filled_with_something_else():
    scene = Scene()
    scene.snapshot.detach()
    with scene.snapshot.lend(0, BLOCK) as views:
        scene.snapshot.close()
        newer = Snapshot({"w": scene.weight.add(5)}, step=8, lock=scene.lock, pool=scene.pool, num_expected=1)
        newer.detach()
        assert b"".join(views) == scene.old_bytes[:BLOCK]


def test_over_budget_the_slowest_receiver_loses_its_lease_and_the_others_keep_theirs():
    scene = Scene(num_expected=2)
    scene.pool.budget_bytes = 3 * BLOCK
    for receiver, held in (("fast", [0, 1, 2]), ("slow", [0])):
        scene.snapshot.register(receiver)
        scene.snapshot.contact(receiver, 0.0, received=blocks(held))
    scene.snapshot.detach()
    assert [scene.snapshot.is_revoked(name) for name in ("fast", "slow")] == [False, True]
    assert scene.snapshot.statistics().num_blocks_copied_aside == 3
    assert scene.snapshot.read(3 * BLOCK, 4 * BLOCK) == scene.old_bytes[3 * BLOCK : 4 * BLOCK]


def test_over_budget_those_who_have_not_come_lose_their_lease_first():
    scene = Scene(num_expected=3)
    scene.pool.budget_bytes = 5 * BLOCK
    scene.snapshot.register("a")
    scene.snapshot.contact("a", 0.0, received=blocks([0]))
    scene.snapshot.detach()
    assert (scene.snapshot.is_revoked("a"), scene.snapshot.is_revoked("late")) == (False, True)
    assert not scene.snapshot.register("late")


def test_without_any_budget_nothing_is_copied_and_the_snapshot_ends():
    scene = Scene()
    scene.pool.budget_bytes = 0
    scene.snapshot.register("a")
    scene.snapshot.detach()
    assert (scene.snapshot.closed, scene.pool.held_bytes(), scene.snapshot.is_revoked("a")) == (True, 0, True)


def test_the_budget_is_one_for_all_snapshots_together():
    first, second = Scene(), Scene()
    second.pool.budget_bytes = 7 * BLOCK
    second.snapshot._pool = first.snapshot._pool = second.pool
    for scene in (first, second):
        scene.snapshot.register("a")
        scene.snapshot.detach()
    assert [scene.snapshot.is_revoked("a") for scene in (first, second)] == [False, True]
    assert second.pool.held_bytes() == 6 * BLOCK and first.read_all() == first.old_bytes


def test_a_receiver_that_is_silent_loses_its_lease_and_what_was_kept_for_it():
    scene = Scene()
    scene.snapshot.register("a", now=100.0)
    scene.snapshot.detach()
    scene.snapshot.lapse(silent_since=100.0)
    assert not scene.snapshot.closed
    scene.snapshot.lapse(silent_since=100.5)
    assert (scene.snapshot.closed, scene.pool.held_bytes()) == (True, 0)


def test_a_receiver_that_takes_some_of_what_it_is_sent_is_not_silent():
    scene = Scene()
    scene.snapshot.register("a", now=100.0)
    scene.snapshot.detach()
    scene.snapshot.contact("a", 1000.0)
    scene.snapshot.lapse(silent_since=999.0)
    assert not scene.snapshot.closed


def test_buffers_are_reused_by_the_next_snapshot_and_freed_with_the_last():
    scene = Scene()
    scene.snapshot.register("a")
    scene.snapshot.detach()
    addresses = {buffer.address for buffer in scene.snapshot._copies.values()}
    second = Snapshot({"w": scene.weight}, step=8, lock=scene.lock, pool=scene.pool, num_expected=1)
    scene.snapshot.finish("a")
    second.detach()
    assert {buffer.address for buffer in second._copies.values()} <= addresses
    second.close()
    assert scene.pool.held_bytes() == 0


def test_touching_ahead_stops_at_what_is_needed():
    scene = Scene()
    scene.snapshot.register("a")
    scene.snapshot.contact("a", 0.0, received=blocks([0, 1]))
    num_touched = 0
    while scene.snapshot.touch_buffer_ahead():
        num_touched += 1
    assert (num_touched, scene.pool.held_bytes()) == (4, 4 * BLOCK)
    scene.snapshot.detach()
    assert scene.pool.held_bytes() == 4 * BLOCK


def saving() -> Scene:
    """With one reader that will be long, as a save is: for it blocks are copied beside the forward pass."""
    scene = Scene(num_expected=0)
    scene.lock.add_before_write(scene.snapshot.detach)
    scene.snapshot.register("save")
    return scene


def copy_all_ahead(scene: Scene) -> int:
    return sum(iter(scene.snapshot.copy_ahead, False))


@pytest.mark.parametrize("num_ahead", [2, 6])
def test_what_was_copied_ahead_is_completed_by_the_step(num_ahead):
    scene = saving()
    scene.pool.budget_bytes = num_ahead * BLOCK
    assert copy_all_ahead(scene) == num_ahead, "within the budget"
    scene.pool.budget_bytes = 6 * BLOCK
    with scene.lock.write():
        scene.mutate()
    assert (scene.read_all(), scene.snapshot.phase) == (scene.old_bytes, SnapshotPhase.DETACHED)
    assert scene.snapshot.statistics().num_blocks_copied_aside == 6, "those that were copied ahead count once"
    scene.snapshot.finish("save")
    scene.snapshot.close()
    assert (scene.snapshot.copy_ahead(), scene.pool.held_bytes()) == (False, 0)


def test_blocks_that_the_reader_has_are_not_copied_ahead():
    scene = saving()
    scene.snapshot.contact("save", 0.0, received=blocks([0, 2]))
    assert copy_all_ahead(scene) == 4


def test_a_trainer_that_steps_while_blocks_are_copied_ahead_never_tears_them():
    for _ in range(by_default(60, thorough=400)):
        scene = saving()
        ahead = threading.Thread(target=copy_all_ahead, args=(scene,))
        ahead.start()
        with scene.lock.write():
            scene.mutate()
        ahead.join()
        assert scene.read_all() == scene.old_bytes
        scene.snapshot.close()


@pytest.mark.parametrize("name", ["weight", "strided"])
def test_a_storage_that_was_freed_is_an_error_and_no_crash(name):
    scene = Scene()
    getattr(scene, name).untyped_storage().resize_(0)
    with pytest.raises(CheckpointError, match="storage was freed"):
        scene.read_all()


def test_a_detach_that_cannot_copy_closes_the_snapshot_and_raises_nothing(caplog):
    scene = Scene()
    scene.weight.untyped_storage().resize_(0)
    scene.snapshot.detach()
    assert scene.snapshot.closed and "cannot be kept" in caplog.text


def test_while_blocks_are_copied_aside_everything_can_still_be_read_and_nobody_new_can_begin(monkeypatch):
    scene, seen = Scene(), []
    scene.snapshot.register("a")
    scene.snapshot.contact("a", 0.0, received=blocks([0]))
    real_copy = scene.snapshot._copy_block

    def copy_and_look(block: int, phase: SnapshotPhase) -> None:
        real_copy(block, phase)
        seen.append(
            (scene.snapshot.statistics().phase, scene.read_all() == scene.old_bytes, scene.snapshot.register("b"))
        )

    monkeypatch.setattr(scene.snapshot, "_copy_block", copy_and_look)
    scene.snapshot.detach()
    assert seen == [(SnapshotPhase.DETACHING, True, False)] * 5, "once for each block that is needed"
    assert scene.snapshot.statistics().num_blocks_copied_aside == 5


def test_a_snapshot_that_is_closed_while_it_is_copied_aside_stays_closed(monkeypatch):
    scene = Scene()
    real_copy = scene.snapshot._copy_block

    def copy_and_close(block: int, phase: SnapshotPhase) -> None:
        real_copy(block, phase)
        scene.snapshot.close()

    monkeypatch.setattr(scene.snapshot, "_copy_block", copy_and_close)
    scene.snapshot.detach()
    assert (scene.snapshot.statistics().phase, scene.pool.held_bytes()) == (SnapshotPhase.CLOSED, 0)


def test_a_snapshot_whose_memory_was_let_go_is_read_from_its_copies():
    scene = Scene()
    scene.snapshot.stage()
    scene.mutate()
    assert (scene.snapshot.phase, scene.read_all()) == (SnapshotPhase.DETACHED, scene.old_bytes)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an accelerator")
def test_accelerator_memory_is_staged_before_the_training_stream_may_overwrite_it():
    lock, pool = StateDictLock(), BufferPool(BLOCK)
    weight = torch.zeros(32 * 1024 * 1024, device="cuda")
    strided, on_cpu = torch.arange(4096.0, device="cuda").view(64, 64).t(), torch.tensor(3.0)
    expected = bytes(strided.cpu().contiguous().untyped_storage())
    weight.fill_(1)  # still running when the snapshot is opened
    snapshot = Snapshot({"w": weight, "s": strided, "c": on_cpu}, step=1, lock=lock, pool=pool, num_expected=1)
    snapshot.detach()
    for tensor in (weight, strided, on_cpu):
        tensor.fill_(9)
    torch.cuda.synchronize()
    (w_start, w_length), (s_start, s_length) = snapshot.manifest.segments[1:]
    assert snapshot.read(0, 4) == bytes(torch.tensor(3.0).untyped_storage())
    assert snapshot.read(s_start, s_start + s_length) == expected
    ones = torch.frombuffer(bytearray(snapshot.read(w_start, w_start + w_length)), dtype=torch.float32)
    assert bool((ones == 1).all())
    snapshot.close()


def test_a_state_that_cannot_be_carried_leaves_nothing_open():
    lock, pool = StateDictLock(), BufferPool(BLOCK)
    with pytest.raises(UnsupportedValueError):
        Snapshot({"x": object()}, step=1, lock=lock, pool=pool, num_expected=1)
    pool.give(pool.take())
    assert pool.held_bytes() == 0


def test_the_shelf_answers_for_the_newest_snapshot_of_a_step():
    registry, scenes = SnapshotRegistry(), [Scene(step=3), Scene(step=3)]
    for scene in scenes:
        registry.put(scene.snapshot, lease_ends=100.0)
    assert registry.find(3) == (Availability.SERVING, scenes[1].snapshot)
    assert registry.find_by_id(scenes[0].snapshot.id) is scenes[0].snapshot


def test_the_shelf_knows_what_may_still_come_from_what_is_over():
    registry = SnapshotRegistry()
    assert registry.find(3) == (Availability.NOT_YET, None)
    scene = Scene(step=3)
    registry.put(scene.snapshot, lease_ends=100.0)
    scene.snapshot.close()
    assert [registry.find(step)[0] for step in (2, 3, 4)] == [
        Availability.OVER,
        Availability.NOT_YET,
        Availability.NOT_YET,
    ]


def test_a_lease_that_has_ended_closes_its_snapshot_and_frees_its_memory():
    registry, scene = SnapshotRegistry(), Scene()
    registry.put(scene.snapshot, lease_ends=100.0)
    registry.detach_all()
    assert (registry.expire(99.9), scene.pool.held_bytes()) == ([], 6 * BLOCK)
    assert (registry.expire(100.0), scene.pool.held_bytes()) == ([scene.snapshot], 0)


@pytest.mark.parametrize("num_expected", [0, 1])
def test_one_snapshot_too_many_closes_the_oldest_and_names_it_if_somebody_waits_for_it(num_expected):
    registry, scenes = SnapshotRegistry(max_snapshots=2), [Scene(num_expected, step) for step in range(3)]
    closed = [registry.put(scene.snapshot, lease_ends=100.0) for scene in scenes]
    assert closed == [[], [], [scenes[0].snapshot] * num_expected]
    assert [scene.snapshot.closed for scene in scenes] == [True, False, False]


def test_what_is_closed_already_does_not_count_as_one_too_many():
    registry, scenes = SnapshotRegistry(), [Scene() for _ in range(3)]
    registry.put(scenes[0].snapshot, lease_ends=100.0)
    registry.put(scenes[1].snapshot, lease_ends=100.0)
    scenes[1].snapshot.close()
    assert registry.put(scenes[2].snapshot, lease_ends=100.0) == []
    assert not scenes[0].snapshot.closed, "somebody may be reading it"


def test_a_receiver_that_starts_on_a_newer_snapshot_is_off_the_older():
    registry, old, new = SnapshotRegistry(), Scene(step=3), Scene(step=4)
    for scene in (old, new):
        registry.put(scene.snapshot, lease_ends=100.0)
        assert registry.register(scene.snapshot, "a", 0.0)
        registry.detach_all()
    assert (old.snapshot.closed, new.snapshot.closed) == (True, False)


def test_what_its_owner_left_long_ago_is_not_the_newest_though_somebody_receives_it():
    registry, old = SnapshotRegistry(), Scene(step=3)
    registry.put(old.snapshot, lease_ends=100.0, now=10.0)
    registry.register(old.snapshot, "a", 10.0)
    registry.detach_all()
    registry.is_at(4, 11.0)
    registry.is_at(5, 12.0)
    assert (registry.find_latest(11.0 + FRESH_S), registry.has_pending_request(6, 13.0, 15.0)) == (old.snapshot, False)
    assert (registry.find_latest(11.1 + FRESH_S), registry.has_pending_request(6, 13.1, 15.0)) == (None, True)
    assert [entry.is_fresh for now in (11.0, 11.1) for entry in registry.index(now + FRESH_S).snapshots] == [
        True,
        False,
    ]
    assert registry.find(3) == (Availability.SERVING, old.snapshot), "who received it by its number goes on"


def test_a_step_that_is_tried_again_from_the_same_state_was_not_left():
    registry, scene = SnapshotRegistry(), Scene(step=3)
    registry.put(scene.snapshot, lease_ends=100.0, now=0.0)
    registry.is_at(4, 1.0)
    registry.is_at(3, 2.0)
    assert registry.find_latest(50.0) is scene.snapshot


def test_what_is_retired_goes_unless_it_is_kept_for_those_that_are_awaited():
    registry, scene = SnapshotRegistry(), Scene(step=3, num_expected=1)
    registry.put(scene.snapshot, lease_ends=100.0)
    registry.retire_all(keeps_awaited=True)
    assert registry.find(3, "a") == (Availability.SERVING, scene.snapshot), "it has not come yet"
    registry.register(scene.snapshot, "a", 0.0)
    registry.retire_all(keeps_awaited=True)
    assert registry.find(3, "b") == (Availability.SERVING, scene.snapshot), "it receives"
    scene.snapshot.finish("a")
    registry.retire_all(keeps_awaited=True)
    assert (scene.snapshot.closed, registry.find(3, "b")) == (True, (Availability.NOT_YET, None))
    again = Scene(step=3, num_expected=1)
    registry.put(again.snapshot, lease_ends=100.0)
    registry.retire_all()
    assert (again.snapshot.closed, registry.find(3, "b")) == (True, (Availability.NOT_YET, None))


def test_wishes_for_steps_far_ahead_do_not_push_out_the_one_for_the_next():
    registry = SnapshotRegistry()
    registry.is_at(4, 0.0)
    registry.request_snapshot(5, 1.0)
    for number in range(1000):
        registry.request_snapshot(6 + number, 2.0)
    assert (registry.has_pending_request(5, 3.0, 15.0), len(registry._requests)) == (True, 16)
    registry.is_at(100, 4.0)
    registry.request_snapshot(101, 5.0)  # the others are over
    assert (registry.has_pending_request(101, 6.0, 15.0), len(registry._requests)) == (True, 1)


def test_nobody_is_served_one_more_while_as_many_as_may_be_open_are_received():
    """It would end the oldest, which somebody reads; the wish is heard when one of them is done."""
    registry, scenes = SnapshotRegistry(max_snapshots=2), [Scene(step=step) for step in (3, 4)]
    for scene in scenes:
        registry.put(scene.snapshot, lease_ends=100.0, now=0.0)
        registry.register(scene.snapshot, f"reader of {scene.snapshot.step}", 0.0)
        registry.detach_all()
    registry.is_at(5, 1.0)
    assert registry.find_latest(9.0) is None
    assert not registry.has_pending_request(5, 9.0, 15.0)
    scenes[0].snapshot.finish("reader of 3")
    assert registry.has_pending_request(5, 9.0, 15.0)
