"""A reader that will be long has the state copied aside beside the forward pass, so that the trainer does not wait for it."""

from __future__ import annotations

import threading
from datetime import timedelta

import torch

from torchft_ckpt.checkpointing.lock import StateDictLock
from torchft_ckpt.checkpointing.serving.buffers import BufferPool
from torchft_ckpt.checkpointing.serving.snapshot import Snapshot, SnapshotPhase

BLOCK = 4096
NUM_BLOCKS = 6


class Scene:
    """Six blocks of a trainer's memory, and a snapshot of it with one reader."""

    def __init__(self, budget_bytes: int | None = None) -> None:
        self.lock = StateDictLock(timedelta(seconds=5))
        self.pool = BufferPool(BLOCK, budget_bytes)
        self.weight = torch.arange(NUM_BLOCKS * BLOCK // 4, dtype=torch.int32)
        self.old = bytes(self.weight.numpy())
        self.snapshot = Snapshot({"w": self.weight}, step=1, lock=self.lock, pool=self.pool, num_expected=0)
        self.lock.add_before_write(self.snapshot.detach)
        self.snapshot.register("save")

    def copy_all_ahead(self) -> int:
        num = 0
        while self.snapshot.copy_ahead():
            num += 1
        return num

    def mutate(self) -> None:
        with self.lock.write():
            self.weight.neg_()

    def read(self) -> bytes:
        return self.snapshot.read(0, self.snapshot.total_bytes)


def test_a_state_that_was_copied_ahead_is_that_of_before_the_step() -> None:
    scene = Scene()
    assert scene.copy_all_ahead() == NUM_BLOCKS
    scene.mutate()
    assert (scene.read(), scene.snapshot.phase) == (scene.old, SnapshotPhase.DETACHED)


def test_what_was_copied_ahead_in_part_is_completed_by_the_step() -> None:
    scene = Scene()
    assert scene.snapshot.copy_ahead() and scene.snapshot.copy_ahead()
    scene.mutate()
    assert scene.read() == scene.old
    assert scene.snapshot.statistics().num_blocks_copied_aside == NUM_BLOCKS


def test_blocks_that_the_reader_has_are_not_copied() -> None:
    scene = Scene()
    scene.snapshot.contact("save", 0.0, received=0b101)
    assert scene.copy_all_ahead() == NUM_BLOCKS - 2


def test_nothing_is_copied_beyond_the_budget_or_after_the_step() -> None:
    scene = Scene(budget_bytes=2 * BLOCK)
    assert scene.copy_all_ahead() == 2
    scene.snapshot.close()
    assert not scene.snapshot.copy_ahead()
    assert scene.pool.held_bytes() == 0


def test_copies_that_were_made_ahead_count_once_against_the_budget() -> None:
    scene = Scene(budget_bytes=NUM_BLOCKS * BLOCK)
    assert scene.copy_all_ahead() == NUM_BLOCKS
    scene.mutate()
    assert scene.read() == scene.old, "the reader kept its lease"


def test_all_is_freed_at_the_end() -> None:
    scene = Scene()
    scene.copy_all_ahead()
    scene.snapshot.finish("save")
    scene.snapshot.close()
    assert scene.pool.held_bytes() == 0


def test_a_trainer_that_steps_while_blocks_are_copied_ahead_never_tears_them() -> None:
    for _ in range(200):
        scene = Scene()
        ahead = threading.Thread(target=scene.copy_all_ahead)
        ahead.start()
        scene.mutate()
        ahead.join()
        assert scene.read() == scene.old
        scene.snapshot.close()
        assert scene.pool.held_bytes() == 0
