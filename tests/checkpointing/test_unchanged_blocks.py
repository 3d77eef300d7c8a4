"""What is here already with the right digest is not sent again, and what is here never gets into a result unverified."""

from __future__ import annotations

import asyncio
import copy
import sys
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import faulty_proxy
import pytest
import torch
from faulty_proxy import Answer, FaultyProxy, ScriptedProxy, Wire, pass_on
from support.sources import BLOCK, make_transport

from torchft_ckpt.checkpointing.progress import TransferProgress
from torchft_ckpt.checkpointing.protocol import parse_metadata
from torchft_ckpt.errors import DigestMismatchError, TransferError
from torchft_ckpt.testing.transport_conformance import differences

LONG = timedelta(seconds=90)
ITEMS = BLOCK // 4
STEP = 3


def noise(num_items: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(num_items, generator=torch.Generator().manual_seed(seed))


class Scene:
    """A source behind a gate that counts, and a destination."""

    def __init__(self, proxy: ScriptedProxy) -> None:
        self.source, self.destination = make_transport(), make_transport()
        self.gate = proxy.gate(parse_metadata(self.source.metadata()).port)
        self.progress: list[TransferProgress] = []
        self.num_block_bytes = 0
        self.fault = pass_on
        self.gate.arm(self._count)

    async def _count(self, answer: Answer, wire: Wire) -> None:
        if answer.kind == "blocks" and answer.status == 200:
            self.num_block_bytes += len(answer.body) - 16 * len(answer.blocks())
        await self.fault(answer, wire)

    def fetch(self, state: Any, local: Any, in_place: bool) -> Any:
        """Send and fetch; check what no case may break."""
        before = copy.deepcopy(local)
        self.source.send_checkpoint([1], STEP, state, LONG)
        received = self.destination.fetch_checkpoint(
            [self.gate.url], STEP, LONG, local_state=local, in_place=in_place, on_progress=self.progress.append
        )
        assert differences(received, state) == []
        assert in_place or differences(local, before) == []
        assert in_place or not _addresses(received) & _addresses(local)
        last = self.progress[-1]
        assert last.received_bytes == self.num_block_bytes
        assert last.received_bytes + last.skipped_bytes == last.total_bytes
        return received

    @property
    def num_skipped(self) -> int:
        return self.progress[-1].skipped_bytes // BLOCK


def _addresses(state: dict[str, torch.Tensor]) -> set[int]:
    return {tensor.untyped_storage().data_ptr() for tensor in state.values()}


@pytest.fixture
def scene() -> Iterator[Scene]:
    with ScriptedProxy() as proxy:
        scene = Scene(proxy)
        yield scene
        scene.source.shutdown()
        scene.destination.shutdown()


both_ways = pytest.mark.parametrize("in_place", [True, False], ids=["in_place", "beside"])


# ---------------------------------------------------------------------------------------------------- what is skipped


@both_ways
def test_frozen_weights_are_not_sent(scene, in_place):
    frozen = {f"base{index}": noise(5 * ITEMS, index) for index in range(10)}
    state = {**frozen, "adapter": noise(3 * ITEMS, 100)}
    local = {**{name: tensor.clone() for name, tensor in frozen.items()}, "adapter": torch.zeros(3 * ITEMS)}
    scene.fetch(state, local, in_place)
    assert (scene.num_skipped, scene.num_block_bytes) == (50, 3 * BLOCK)


@both_ways
def test_frozen_weights_of_many_layers_are_not_sent(scene, in_place):
    frozen = {f"base{index}": noise(3 * ITEMS, index) for index in range(150)}
    state = {**frozen, "adapter": noise(3 * ITEMS, 1000)}
    local = {**{name: tensor.clone() for name, tensor in frozen.items()}, "adapter": torch.zeros(3 * ITEMS)}
    scene.fetch(state, local, in_place)
    assert scene.num_block_bytes <= 10 * BLOCK


@both_ways
def test_where_all_is_equal_no_block_is_sent(scene, in_place):
    state = {f"w{index}": noise(5 * ITEMS + 7 * index, index) for index in range(6)}
    local = copy.deepcopy(state)
    scene.fetch(state, local, in_place)
    assert scene.num_block_bytes == 0 and scene.gate.paths[0].startswith(f"/v1/checkpoint/{STEP}/manifest")
    assert [path for path in scene.gate.paths if "/blocks/" in path] == []


@both_ways
def test_where_nothing_is_equal_all_is_sent_and_little_is_asked_before(scene, in_place):
    state = {f"w{index}": noise(8 * ITEMS, index) for index in range(10)}
    scene.fetch(state, {name: tensor + 1 for name, tensor in state.items()}, in_place)
    digests = [path for path in scene.gate.paths if "/digests" in path]
    assert scene.num_skipped == 0 and scene.num_block_bytes == 80 * BLOCK
    assert len(digests) <= 1 and all(path.count(",") < 20 for path in digests)


@pytest.mark.slow
@both_ways
def test_one_small_tensor_that_changed_among_many_costs_its_neighbourhood(scene, in_place):
    """64 bytes each, 64 to a block, 32 blocks."""
    state = {f"w{index}": noise(16, index) for index in range(2048)}
    local = {name: tensor.clone() for name, tensor in state.items()}
    local["w1000"] += 1
    scene.fetch(state, local, in_place)
    assert 1 <= scene.num_block_bytes // BLOCK <= 8


@both_ways
def test_one_changed_bit_of_a_large_tensor_costs_a_block(scene, in_place):
    state = {"w": noise(40 * ITEMS)}
    local = {"w": state["w"].clone()}
    local["w"].view(torch.int32)[ITEMS * 3 + 5] ^= 1 << 31
    scene.fetch(state, local, in_place)
    assert scene.num_block_bytes == BLOCK


@both_ways
def test_minus_zero_and_other_nans_are_other_bits(scene, in_place):
    state = {"w": torch.zeros(3 * ITEMS), "n": torch.full((3 * ITEMS,), float("nan"))}
    local = {"w": -state["w"], "n": (state["n"].view(torch.int32) | 1).view(torch.float32)}
    scene.fetch(state, local, in_place)
    assert scene.num_skipped == 0


@both_ways
def test_a_tensor_of_another_name_does_not_count_as_here(scene, in_place):
    state = {"w": noise(5 * ITEMS)}
    scene.fetch(state, {"v": state["w"].clone()}, in_place)
    assert scene.num_block_bytes == 5 * BLOCK


def test_a_local_tensor_that_does_not_fit_is_fetched_whole_where_nothing_is_received_into_it(scene):
    state = {"w": noise(5 * ITEMS), "history": noise(5 * ITEMS, 1)}
    scene.fetch(state, {"w": state["w"].clone(), "history": noise(4 * ITEMS, 1)}, in_place=False)
    assert scene.num_block_bytes == 5 * BLOCK


# ---------------------------------------------------------------------------------------------- while the trainer goes on


def test_a_local_state_that_changes_during_the_transfer_never_gets_into_the_result(scene):
    """It is copied first and compared then, so a block is the source's or is fetched."""
    ours = noise(64 * ITEMS)
    local = {f"w{index}": ours[index * 4 * ITEMS : (index + 1) * 4 * ITEMS] for index in range(16)}
    state = {name: tensor.clone() for name, tensor in local.items()}
    scene.source.send_checkpoint([1], STEP, state, timedelta(minutes=10))
    stop = threading.Event()

    def train() -> None:
        while not stop.is_set():
            ours.neg_()

    trainer = threading.Thread(target=train)
    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    trainer.start()
    try:
        for _ in range(15):
            received = scene.destination.fetch_checkpoint([scene.gate.url], STEP, LONG, local_state=local)
            assert differences(received, state) == []
    finally:
        sys.setswitchinterval(interval_s)
        stop.set()
        trainer.join(60)


def test_a_local_state_that_changes_between_comparing_and_the_end_is_not_in_the_result(scene):
    state = {"same": noise(8 * ITEMS), "other": noise(8 * ITEMS, 1)}
    local = {"same": state["same"].clone(), "other": torch.zeros(8 * ITEMS)}
    compared, go_on = threading.Event(), threading.Event()

    async def hold(answer: Answer, wire: Wire) -> None:
        if answer.kind == "blocks":
            compared.set()
            deadline = time.monotonic() + 60
            while not go_on.is_set() and time.monotonic() < deadline:
                await asyncio.sleep(0.005)
        await wire.send(answer.raw)

    scene.fault = hold
    scene.source.send_checkpoint([1], STEP, state, LONG)
    got: list[Any] = []
    thread = threading.Thread(
        target=lambda: got.append(scene.destination.fetch_checkpoint([scene.gate.url], STEP, LONG, local_state=local))
    )
    thread.start()
    assert compared.wait(120)
    local["same"].fill_(7)
    go_on.set()
    thread.join(60)
    assert differences(got, [state]) == []
    assert scene.num_block_bytes == 8 * BLOCK


# ------------------------------------------------------------------------------------------------------------- resumed


def fail_after(scene: Scene, num_bytes: int, local: Any, in_place: bool, times: int = 1) -> None:
    """Fetch through a proxy that damages the byte of each connection, over one stream that takes blocks in order.

    On a busy machine the stream may connect anew before it comes to that byte, and the fetch end well: then all of it is here
    in place, or nothing is kept, and it begins again.
    """
    in_a_row = 0
    while in_a_row < times:
        with FaultyProxy(parse_metadata(scene.source.metadata()).port, faulty_proxy.flip_bit_at(num_bytes)) as proxy:
            try:
                scene.destination.fetch_checkpoint([proxy.url], STEP, LONG, local_state=local, in_place=in_place)
            except DigestMismatchError:
                in_a_row += 1
            else:
                if in_place:
                    return
                in_a_row = 0


@pytest.mark.parametrize("arrived", [0.25, 0.6, 0.95])
@pytest.mark.parametrize("in_place", [True, False], ids=["in_place", "kept_memory"])
def test_blocks_of_a_failed_receive_are_not_sent_again(scene, in_place, arrived):
    """20 tensors of 16 blocks: at most the one that was under way, and a few around, come twice."""
    state = {f"w{index}": noise(16 * ITEMS, index) for index in range(20)}
    local = {name: torch.zeros(16 * ITEMS) for name in state} if in_place else None
    scene.source.send_checkpoint([1], STEP, state, LONG)
    fail_after(scene, int(arrived * 320 * BLOCK), local, in_place)
    received = scene.destination.fetch_checkpoint([scene.gate.url], STEP, LONG, local_state=local, in_place=in_place)
    assert differences(received, state) == []
    assert scene.num_block_bytes // BLOCK <= 320 - 320 * arrived + 16 + 4


@pytest.mark.parametrize("in_place", [True, False], ids=["in_place", "kept_memory"])
def test_the_first_third_of_one_large_tensor_is_not_sent_again(scene, in_place):
    state = {"w": noise(300 * ITEMS)}
    local = {"w": torch.zeros(300 * ITEMS)} if in_place else None
    scene.source.send_checkpoint([1], STEP, state, LONG)
    fail_after(scene, 100 * BLOCK, local, in_place)
    received = scene.destination.fetch_checkpoint([scene.gate.url], STEP, LONG, local_state=local, in_place=in_place)
    assert differences(received, state) == []
    assert scene.num_block_bytes // BLOCK <= 220


@pytest.mark.parametrize("arrived", [0.25, 0.6, 0.95])
def test_blocks_of_a_failed_receive_beside_a_local_state_are_not_sent_again(scene, arrived):
    """As a Manager fetches: beside the state that is here. A bias is in nearly every block, and shorter than one."""
    state = {f"w{index}": noise(16 * ITEMS, index) for index in range(20)}
    state |= {f"w{index}.bias": noise(5, index) for index in range(20)}
    local = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    scene.source.send_checkpoint([1], STEP, state, LONG)
    fail_after(scene, int(arrived * 320 * BLOCK), local, in_place=False)
    scene.fetch(state, local, in_place=False)
    assert scene.num_block_bytes // BLOCK <= 320 - 320 * arrived + 16 + 5


def test_what_is_here_and_what_a_failed_receive_brought_are_both_not_sent_again(scene):
    """A frozen half is here; of the trained half some has arrived; the source has trained one tensor of it since."""
    frozen = {f"a{index}": noise(16 * ITEMS, index) for index in range(10)}
    trained = {f"b{index}": noise(16 * ITEMS, 100 + index) for index in range(10)}
    local = {name: tensor.clone() for name, tensor in frozen.items()}
    local |= {name: torch.zeros(16 * ITEMS) for name in trained}
    scene.source.send_checkpoint([1], STEP, {**frozen, **trained}, LONG)
    fail_after(scene, 100 * BLOCK, local, in_place=False)
    scene.fetch({**frozen, **trained, "b1": noise(16 * ITEMS, 999)}, local, in_place=False)
    assert scene.num_block_bytes // BLOCK <= 16 + 160 - 100 + 16 + 4


def test_attempts_that_all_fail_get_further_each_time(scene):
    state = {f"w{index}": noise(16 * ITEMS, index) for index in range(20)}
    local = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    scene.source.send_checkpoint([1], STEP, state, LONG)
    fail_after(scene, 75 * BLOCK, local, in_place=False, times=4)
    scene.fetch(state, local, in_place=False)
    assert scene.num_block_bytes // BLOCK <= 320 - 4 * 70 + 16


def test_a_source_that_is_lost_before_it_began_costs_nothing_of_what_was_kept(scene):
    state = {f"w{index}": noise(16 * ITEMS, index) for index in range(20)}
    local = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    scene.source.send_checkpoint([1], STEP, state, LONG)
    fail_after(scene, 200 * BLOCK, local, in_place=False)

    async def cut(answer: Answer, wire: Wire) -> None:
        if answer.kind == "digests":
            await wire.cut()
        await wire.send(answer.raw)

    scene.fault = cut
    with pytest.raises(TransferError):
        scene.destination.fetch_checkpoint([scene.gate.url], STEP, LONG, local_state=local)
    scene.fault = pass_on
    scene.fetch(state, local, in_place=False)
    assert scene.num_block_bytes // BLOCK <= 320 - 200 + 20


def test_the_kept_memory_of_another_step_is_not_taken_for_this_one(scene):
    scene.source.send_checkpoint([1], STEP, {"w": noise(64 * ITEMS)}, LONG)
    fail_after(scene, 60 * BLOCK, None, in_place=False)
    new = {"w": noise(64 * ITEMS, 1)}
    scene.source.send_checkpoint([1], STEP, new, LONG)
    assert differences(scene.destination.fetch_checkpoint([scene.gate.url], STEP, LONG), new) == []
    assert scene.num_block_bytes == 64 * BLOCK
