"""What may change though nobody announces it is copied aside at once, and read from the copy from then on."""

from __future__ import annotations

import itertools
import random
import threading
from datetime import timedelta
from typing import Any

import numpy as np
import pytest
import torch

from torchft_ckpt.checkpointing.lock import StateDictLock
from torchft_ckpt.checkpointing.serving.buffers import BufferPool
from torchft_ckpt.checkpointing.serving.snapshot import Snapshot

BLOCK = 4096


class Scene:
    """A state of tensors and an array, a snapshot of it with one reader, and the bytes that it had."""

    def __init__(self, state: dict[str, Any], budget_bytes: int | None = None) -> None:
        self.state = state
        self.lock = StateDictLock(timedelta(seconds=60))
        self.pool = BufferPool(BLOCK, budget_bytes)
        self.snapshot = Snapshot(state, step=1, lock=self.lock, pool=self.pool, num_expected=0)
        self.lock.add_before_write(self.snapshot.detach)
        self.snapshot.register("save")
        self.old = self.read()

    def read(self) -> bytes:
        total = self.snapshot.total_bytes
        return b"".join(self.snapshot.read(at, min(at + 3001, total)) for at in range(0, total, 3001))

    def set_apart(self, *names: str) -> bool:
        return self.snapshot.set_apart([address_of(self.state[name]) for name in names])

    def write(self, *names: str) -> None:
        for name in names:
            self.state[name] += 1


def address_of(value: Any) -> int:
    return value.ctypes.data if isinstance(value, np.ndarray) else value.data_ptr()


def test_it_is_read_as_it_was_and_the_rest_as_it_is_until_the_step() -> None:
    scene = Scene({"weight": torch.zeros(3 * BLOCK // 4), "codebook": torch.zeros(2 * BLOCK // 4)})
    assert scene.set_apart("codebook")
    assert scene.snapshot.statistics().num_blocks_copied_aside == 2
    scene.write("codebook")
    assert scene.read() == scene.old
    with scene.lock.write():
        scene.write("weight", "codebook")
    assert scene.read() == scene.old
    assert scene.snapshot.statistics().num_blocks_copied_aside == 5


@pytest.mark.parametrize("seed", range(60))
def test_any_part_of_any_state_can_be_set_apart(seed: int) -> None:
    generator = random.Random(seed)
    print(f"seed {seed}")
    state: dict[str, Any] = {}
    for number in range(generator.randint(1, 12)):
        size = generator.choice([1, 7, 500, 1024, 1500, 5000])
        kind = generator.choice(["plain", "strided", "tied", "part", "array", "bytes"])
        tensors = [value for value in state.values() if isinstance(value, torch.Tensor) and value.is_contiguous()]
        if kind == "array":
            state[str(number)] = np.full(size, number, dtype=np.float32)
        elif kind == "bytes":
            state[str(number)] = torch.full((size,), number, dtype=torch.uint8)
        elif kind == "strided":
            state[str(number)] = torch.full((size, 2), number, dtype=torch.float32).t()[:, ::2]
        elif kind == "tied" and tensors:
            state[str(number)] = generator.choice(tensors)
        elif kind == "part" and tensors:
            state[str(number)] = generator.choice(tensors)[1:]
        else:
            state[str(number)] = torch.full((size,), number, dtype=torch.float32)
    scene = Scene(state)
    apart = [name for name in state if generator.random() < 0.4 and state[name].size]
    apart = [name for name in apart if not isinstance(state[name], torch.Tensor) or state[name].numel()]
    assert scene.set_apart(*apart)
    scene.write(*apart)
    assert scene.read() == scene.old
    with scene.lock.write():
        scene.write(*state)
    assert scene.read() == scene.old
    scene.snapshot.finish("save")
    assert scene.pool.held_bytes() == 0


def test_without_room_nothing_is_copied_and_the_save_goes_on() -> None:
    scene = Scene({"weight": torch.zeros(BLOCK // 4), "frozen": torch.zeros(3 * BLOCK // 4)}, budget_bytes=2 * BLOCK)
    assert not scene.set_apart("frozen")
    assert scene.snapshot.statistics().num_blocks_copied_aside == 0
    assert scene.read() == scene.old


def test_where_the_system_has_no_memory_the_trainer_hears_of_it_and_nothing_leaks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of many blocks, which are copied in threads; what was copied in time is read from its copy."""
    monkeypatch.setattr("torchft_ckpt.checkpointing.serving.snapshot._SPREAD_FROM_BYTES", BLOCK)
    scene = Scene({"codebook": torch.zeros(40 * BLOCK // 4)}, budget_bytes=50 * BLOCK)
    take, lock, num_taken = scene.pool.take, threading.Lock(), itertools.count()

    def take_a_few() -> Any:
        with lock:
            if next(num_taken) == 9:
                raise MemoryError("of the test")
        return take()

    monkeypatch.setattr(scene.pool, "take", take_a_few)
    assert not scene.set_apart("codebook")
    assert scene.read() == scene.old
    scene.snapshot.close()
    assert scene.pool.num_available() == 50
    assert scene.pool.held_bytes() == 0


def test_memory_that_is_lent_is_not_used_again_before_it_is_given_back() -> None:
    scene = Scene({"codebook": torch.full((BLOCK // 4,), 7.0)})
    scene.pool.open("another")
    scene.set_apart("codebook")
    with scene.snapshot.lend(0, BLOCK) as views:
        closing = threading.Thread(target=scene.snapshot.close)
        closing.start()
        while not scene.snapshot.closed:
            closing.join(0.001)
        taken = scene.pool.take()
        taken.view[:] = bytes(BLOCK)
        assert bytes(views[0]) == scene.old
    closing.join(60)
    scene.pool.give(taken)
    scene.pool.close("another")
    assert scene.pool.held_bytes() == 0
