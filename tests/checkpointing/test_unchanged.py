"""What training leaves alone is sent from where it is, and its digests of before are known; whatever else was written is not."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

import pytest
import torch
from torch import nn

from torchft_ckpt.checkpointing.lock import StateDictLock
from torchft_ckpt.checkpointing.serving.buffers import BufferPool
from torchft_ckpt.checkpointing.serving.sending import body_of_blocks, digest_blocks
from torchft_ckpt.checkpointing.serving.snapshot import BlockGoneError, Snapshot
from torchft_ckpt.checkpointing.serving.unchanged import Marked
from torchft_ckpt.checkpointing.state.blocks import DIGEST_BYTES, digest_of
from torchft_ckpt.errors import StateChangedError
from torchft_ckpt.manager.state_registry import StateRegistry

BLOCK = 4096
NUM = 1 << 20
"""Values of a tensor: 4 MiB, more than is copied when a state is captured."""


class Scene:
    """A frozen tensor, one that is trained, and an average that the loop keeps; each of 4 MiB."""

    def __init__(self) -> None:
        self.lock = StateDictLock(timedelta(seconds=60))
        self.frozen, self.trained = (nn.Parameter(torch.full((NUM,), value)) for value in (1.0, 8.0))
        self.frozen.requires_grad_(False)
        self.average, self.count = torch.full((NUM,), 3.0), torch.zeros(8)  # too small to be left where it is
        self.optimizer = torch.optim.SGD([self.frozen, self.trained], lr=0.5)
        self.registry = StateRegistry(self.lock)
        self.registry.register("user", lambda _: None, self.state)
        self.registry.guard(self.optimizer)
        self.before: Marked | None = None

    def state(self) -> dict[str, torch.Tensor]:
        parts = {"frozen": self.frozen, "trained": self.trained, "average": self.average, "count": self.count}
        return {name: part.detach() for name, part in parts.items()}

    def capture(self, step: int) -> Snapshot:
        captured = self.registry.capture_to_serve()
        return Snapshot(
            captured.state,
            step=step,
            lock=self.lock,
            pool=BufferPool(BLOCK),
            num_expected=1,
            versions=captured.versions,
            outlives_step=True,
            before=self.before,
        )

    def serve(self, step: int) -> Snapshot:
        """Capture a state, and have all digests of it computed."""
        snapshot = self.capture(step)
        self.before = snapshot.marked
        digest_blocks(snapshot, range(snapshot.num_blocks))
        return snapshot

    def train(self) -> None:
        self.trained.grad = torch.ones(NUM)
        with self.lock.write():
            self.optimizer.step()
        self.count += 1


def blocks_of(snapshot: Snapshot, value: float) -> set[int]:
    """The blocks that hold nothing but a value."""
    told = bytes(torch.full((BLOCK // 4,), value).untyped_storage())
    size, total = snapshot.block_bytes, snapshot.total_bytes
    return {n for n in range(snapshot.num_blocks) if snapshot.read(n * size, min((n + 1) * size, total)) == told}


def by_hand(scene: Scene) -> None:
    scene.average.mul_(0.5)


def unseen(scene: Scene) -> None:
    scene.average.data = scene.average.data * 0.5  # no counter says so


def in_its_place(scene: Scene) -> None:
    scene.average.data.mul_(0.5)


def anew(scene: Scene) -> None:
    scene.average = scene.average * 0.5


@pytest.mark.parametrize("moves", [by_hand, unseen, in_its_place, anew])
def test_of_a_later_step_only_what_was_left_alone_is_known_and_not_copied_aside(moves: Callable[[Scene], None]) -> None:
    scene = Scene()
    first = scene.serve(1)
    first.close()
    scene.train()
    moves(scene)
    later = scene.capture(2)
    known = set(later.known_digests)
    later.register("a")
    assert known == blocks_of(later, 1.0), "the frozen tensor, and not the average"
    assert all(later.known_digests[block] == first.digests[block] for block in known)
    later.detach()
    assert later.statistics().num_blocks_copied_aside == later.num_blocks - len(known)
    old = later.read(0, later.total_bytes)
    scene.train()
    assert later.read(0, later.total_bytes) == old
    later.close()


def test_a_tensor_that_is_trained_after_all_is_not_sent_as_if_it_were_left_alone() -> None:
    scene = Scene()
    scene.serve(1).close()
    scene.train()
    later = scene.serve(2)
    later.register("a")
    (block, *_) = blocks_of(later, 1.0)
    later.detach()
    scene.frozen.requires_grad_(True)
    scene.frozen.grad = torch.ones(NUM)
    scene.train()
    with pytest.raises(StateChangedError, match="frozen"):
        later.read(block * BLOCK, (block + 1) * BLOCK)
    later.close()
    again = scene.serve(3)
    assert not blocks_of(again, 1.0)
    again.close()


def test_what_is_trained_is_not_taken_for_left_alone_if_no_counter_says_that_a_value_of_it_was_written() -> None:
    scene = Scene()
    scene.serve(1).close()
    known = set[int]()
    for value in (0, NUM // 2, NUM - 1):  # whichever of them is no part of a sample
        scene.trained.data[value] = 0.0
        later = scene.capture(2)
        known |= blocks_of(later, 8.0) & later.known_digests.keys()
        later.close()
    assert not known


def test_a_parameter_that_lies_in_a_buffer_which_the_optimizer_owns_is_trained_with_it() -> None:
    """As Apex and Megatron have them: the optimizer knows the buffer alone, and no counter of the parameter moves."""
    scene = Scene()
    flat = nn.Parameter(torch.full((2 * NUM,), 1.0))
    scene.frozen.data, scene.trained.data = flat.data[:NUM], flat.data[NUM:]
    scene.optimizer = torch.optim.SGD([flat], lr=0.5)
    scene.registry = StateRegistry(scene.lock)
    scene.registry.register("user", lambda _: None, scene.state)
    scene.registry.guard(scene.optimizer)
    scene.serve(1).close()
    later = scene.capture(2)
    assert not blocks_of(later, 1.0) & later.known_digests.keys()
    later.close()


@pytest.mark.parametrize("fused", [False, True])
def test_what_is_frozen_no_longer_is_sent_to_nobody_as_it_was(*, fused: bool) -> None:
    """A fused step is one that no counter tells."""
    scene = Scene()
    scene.optimizer = torch.optim.AdamW([scene.frozen, scene.trained], fused=fused)
    scene.registry.guard(scene.optimizer)
    scene.serve(1).close()
    scene.train()
    later = scene.serve(2)
    scene.lock.add_before_write(later.detach)
    later.register("a")
    (block, *_) = blocks_of(later, 1.0)
    scene.train()
    assert later.read(block * BLOCK, (block + 1) * BLOCK)
    scene.frozen.requires_grad_(True)
    scene.frozen.grad = torch.ones(NUM)
    scene.train()
    with pytest.raises(BlockGoneError):
        later.read(block * BLOCK, (block + 1) * BLOCK)


def test_what_moves_now_and_then_costs_one_receiver_and_nobody_else() -> None:
    """It is copied aside from then on, and what is trained is not taken for what changes without the lock."""
    scene = Scene()

    def moves_average() -> None:
        with scene.lock.write():
            scene.average.mul_(0.5)

    scene.serve(1).close()
    scene.train()
    later = scene.serve(2)
    later.register("a")
    later.detach()
    scene.train()
    (block, *_) = blocks_of(later, 3.0)
    moves_average()
    with pytest.raises(StateChangedError, match="average"):
        later.read(block * BLOCK, (block + 1) * BLOCK)
    later.close()
    scene.serve(3).close()
    again = scene.serve(4)
    assert again.known_digests.keys() >= blocks_of(again, 1.5)
    again.register("a")
    again.detach()
    whole = again.read(0, again.total_bytes)
    moves_average()
    assert again.read(0, again.total_bytes) == whole
    assert scene.registry.capture_to_serve().state["user"]["trained"].data_ptr() == scene.trained.data_ptr()
    again.close()


def test_a_block_that_is_sent_is_digested_as_it_is_sent() -> None:
    """Whatever was known of it: who holds nothing gets what is here."""
    scene = Scene()
    scene.serve(1).close()
    later = scene.capture(2)
    (block, *_) = blocks_of(later, 1.0)
    scene.frozen.data[:] = 5.0  # which no counter tells
    body, sent = body_of_blocks(later, range(block, block + 1)), bytearray()

    def send(views: list[memoryview]) -> int:
        sent.extend(b"".join(views))
        return sum(view.nbytes for view in views)

    while not body.done:
        body.advance(send)
    assert sent[-DIGEST_BYTES:] == digest_of(block, sent[:-DIGEST_BYTES])
    later.close()


def test_what_was_captured_twice_within_a_step_may_change_before_the_next() -> None:
    """Only what an earlier step had left alone is left where it is."""
    scene = Scene()
    scene.serve(1).close()
    again = scene.serve(1)
    again.register("a")
    again.detach()
    assert again.statistics().num_blocks_copied_aside == again.num_blocks
    again.close()


def test_nothing_is_taken_for_left_alone_if_the_loop_holds_the_lock_itself() -> None:
    scene = Scene()
    scene.registry = StateRegistry(scene.lock)
    scene.registry.register("user", lambda _: None, scene.state)
    scene.serve(1).close()
    later = scene.capture(2)
    assert not later.known_digests
    later.close()
