"""What is copied aside for receivers that are not done stays within a budget; who is too slow for it is told so."""

from __future__ import annotations

import asyncio
import copy
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch
from faulty_proxy import Answer, ScriptedProxy, Wire
from support.sources import BLOCK, make_transport

from torchft_ckpt.checkpointing.protocol import parse_metadata
from torchft_ckpt.checkpointing.resharding.peers import JobPeers
from torchft_ckpt.checkpointing.serving.buffers import BufferPool
from torchft_ckpt.errors import ConfigError, LeaseRevokedError, SourceRefusedError
from torchft_ckpt.memory import memory_bytes
from torchft_ckpt.testing.transport_conformance import differences

LONG = timedelta(seconds=90)
NUM_BLOCKS = 64
STEP = 3


def make_state() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {f"w{index}": torch.randn(8 * BLOCK // 4, generator=generator) for index in range(NUM_BLOCKS // 8)}


class Held:
    """A fault that lets some blocks pass, then holds answers until it is told to go on."""

    def __init__(self, num_blocks: int) -> None:
        self._left = num_blocks
        self.reached = threading.Event()
        self.go_on = threading.Event()

    async def __call__(self, answer: Answer, wire: Wire) -> None:
        self._left -= len(answer.blocks())
        if answer.kind == "blocks" and self._left < 0:
            self.reached.set()
            deadline = time.monotonic() + 60
            while not self.go_on.is_set() and time.monotonic() < deadline:
                await asyncio.sleep(0.005)
        await wire.send(answer.raw)


class Scene:
    """A source with a small budget, and receivers behind gates."""

    def __init__(self, proxy: ScriptedProxy, budget_blocks: int) -> None:
        self.source = make_transport(staging_budget_bytes=budget_blocks * BLOCK)
        self.state = make_state()
        self.old = copy.deepcopy(self.state)
        self._proxy = proxy
        self.threads = ThreadPoolExecutor(4)

    def serve(self, num_receivers: int) -> None:
        self.source.send_checkpoint(list(range(num_receivers)), STEP, self.state, timedelta(minutes=5))

    def pull(self, num_blocks: int) -> tuple[Held, Any]:
        """Start a receiver that serves nothing itself; return once it has so many blocks."""
        held, gate = Held(num_blocks), self._proxy.gate(parse_metadata(self.source.metadata()).port)
        gate.arm(held)
        client = JobPeers([[gate.url]])
        future = self.threads.submit(lambda: client.pull(STEP, timeout=LONG).state)
        assert held.reached.wait(120)
        return held, future

    def step(self) -> None:
        """What a trainer does."""
        self.source.disallow_checkpoint()
        for tensor in self.state.values():
            tensor.add_(1)

    def held_bytes(self) -> int:
        return self.source._pool.held_bytes()

    def close(self) -> None:
        self.source.shutdown()
        self.threads.shutdown()


@pytest.fixture
def make_scene() -> Iterator[Callable[[int], Scene]]:
    scenes: list[Scene] = []
    with ScriptedProxy() as proxy:

        def make(budget_blocks: int) -> Scene:
            scenes.append(Scene(proxy, budget_blocks))
            return scenes[-1]

        try:
            yield make
        finally:
            for scene in scenes:
                scene.close()


def test_a_real_receiver_that_was_too_slow_is_told_so(make_scene):
    scene = make_scene(20)
    scene.serve(2)
    slow_held, slow = scene.pull(3)
    fast_held, fast = scene.pull(50)
    scene.step()
    for held in (fast_held, slow_held):
        held.go_on.set()
    assert differences(fast.result(60), scene.old) == []
    with pytest.raises(LeaseRevokedError, match=r"410 revoked.*slowest of step 3.*ask for a later step"):
        slow.result(60)
    assert isinstance(slow.exception(), SourceRefusedError)
    assert scene.held_bytes() == 0


def test_within_the_budget_nobody_loses_anything(make_scene):
    scene = make_scene(NUM_BLOCKS)
    scene.serve(2)
    receivers = [scene.pull(3), scene.pull(50)]
    scene.step()
    for held, _ in receivers:
        held.go_on.set()
    assert [differences(future.result(60), scene.old) for _, future in receivers] == [[], []]
    assert scene.held_bytes() == 0


def test_a_late_comer_whose_place_was_revoked_is_told_so_while_another_is_still_served(make_scene):
    scene = make_scene(60)
    scene.serve(2)
    held, early = scene.pull(10)
    scene.step()
    late = make_transport()
    with pytest.raises(LeaseRevokedError, match="revoked"):
        late.recv_checkpoint(0, scene.source.metadata(), STEP, LONG)
    late.shutdown()
    held.go_on.set()
    assert differences(early.result(60), scene.old) == []


def test_the_only_receiver_is_told_as_well_why_it_gets_nothing(make_scene):
    scene = make_scene(20)
    scene.serve(1)
    held, receiver = scene.pull(10)
    scene.step()
    held.go_on.set()
    with pytest.raises(LeaseRevokedError):
        receiver.result(60)


def test_buffers_that_are_touched_ahead_are_within_the_budget():
    pool = BufferPool(BLOCK, 4 * BLOCK)
    pool.open("user")
    taken = [pool.take() for _ in range(3)]
    while pool.touch_one("user", 10):
        pass
    assert len(taken) == 3 and pool.held_bytes() <= 4 * BLOCK


def test_by_default_the_budget_is_a_quarter_of_the_memory():
    transport = make_transport()
    memory = memory_bytes()
    assert transport._pool.budget_bytes == (None if memory is None else memory // 4)
    transport.shutdown()


def test_a_negative_budget_is_refused():
    with pytest.raises(ConfigError, match="staging_budget_bytes"):
        make_transport(staging_budget_bytes=-1)
