"""A tensor that torch writes to in place while its state is served: what was captured arrives, or an error that names it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
from support.resharding import imagined_rank
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from torchft_ckpt.checkpointing import HTTPTransport
from torchft_ckpt.checkpointing.lock import StateDictLock
from torchft_ckpt.checkpointing.serving.buffers import BufferPool
from torchft_ckpt.checkpointing.serving.sending import digest_blocks
from torchft_ckpt.checkpointing.serving.snapshot import Snapshot
from torchft_ckpt.checkpointing.state.versions import StateVersions
from torchft_ckpt.errors import SourceRefusedError, StateChangedError
from torchft_ckpt.manager.volatile import Unsteady, copy_volatile, tensors_in

LONG = timedelta(seconds=90)
BLOCK = 4096
STEP = 3


class Scene:
    """A snapshot of two tensors of three blocks each, with one receiver."""

    def __init__(self, versions: Callable[[dict[str, Any]], StateVersions] | None = None) -> None:
        self.state = {"first": torch.ones(3 * BLOCK // 4), "second": torch.full((3 * BLOCK // 4,), 2.0)}
        self.lock = StateDictLock(timedelta(seconds=60))
        self.snapshot = Snapshot(
            self.state,
            step=STEP,
            lock=self.lock,
            pool=BufferPool(BLOCK),
            num_expected=0,
            versions=None if versions is None else versions(self.state),
        )
        self.lock.add_before_write(self.snapshot.detach)
        self.snapshot.register("a")
        self.old = self.read(0, 6)

    def read(self, first: int, stop: int) -> bytes:
        return self.snapshot.read(first * BLOCK, stop * BLOCK)


def test_it_is_named_and_the_others_are_read_as_they_were() -> None:
    scene = Scene()
    scene.state["second"].add_(1)
    with pytest.raises(StateChangedError, match="step 3: 'second' was written to in place") as raised:
        scene.read(2, 4)
    assert raised.value.party == "second"
    assert scene.read(0, 3) == scene.old[: 3 * BLOCK]
    with scene.lock.write():
        for tensor in scene.state.values():
            tensor.zero_()
    assert scene.read(0, 3) == scene.old[: 3 * BLOCK]
    with pytest.raises(StateChangedError, match="'second'"):
        scene.read(5, 6)


def test_a_write_while_it_is_lent_is_found_when_it_is_returned_and_gives_no_digest() -> None:
    scene = Scene()
    with pytest.raises(StateChangedError, match="'first'"):
        with scene.snapshot.lend(0, BLOCK):
            scene.state["first"].mul_(2)
    with pytest.raises(StateChangedError, match="'first'"):
        digest_blocks(scene.snapshot, [0])
    assert scene.snapshot.digests == {}


def test_values_that_were_put_back_are_a_change_all_the_same() -> None:
    """What was read in between may be anything."""
    scene = Scene()
    scene.state["first"].add_(1).sub_(1)
    with pytest.raises(StateChangedError, match="'first'"):
        scene.read(0, 1)


def test_copies_from_before_the_write_count() -> None:
    scene = Scene()
    for _ in range(5):  # all blocks but the first
        scene.snapshot.copy_ahead()
    scene.state["first"].zero_()
    assert scene.read(1, 3) == scene.old[BLOCK : 3 * BLOCK]
    with pytest.raises(StateChangedError, match="'first'"):
        scene.read(0, 1)
    with scene.lock.write():
        scene.state["second"].zero_()
    assert scene.read(1, 6) == scene.old[BLOCK:]
    with pytest.raises(StateChangedError, match="'first'"):
        scene.read(0, 1)


def test_a_write_under_the_lock_is_none() -> None:
    scene = Scene()
    with scene.lock.write():
        scene.state["first"].zero_()
    assert scene.read(0, 6) == scene.old


def test_a_write_between_capture_and_snapshot_is_found() -> None:
    """They are on different threads: the training thread has gone on when the quorum is there."""

    def written_to(state: dict[str, Any]) -> StateVersions:
        versions = StateVersions(state.values())
        state["second"].add_(1)
        return versions

    with pytest.raises(StateChangedError, match="'second'"):
        Scene(written_to)


def test_what_changed_is_copied_when_it_is_captured_the_next_time() -> None:
    model = nn.Linear(32, 32)
    sgd = torch.optim.SGD(model.parameters())
    unsteady = Unsteady()
    held = copy_volatile(model.state_dict(), [sgd], unsteady)
    assert all(
        held.state[name] is not None and held.state[name].data_ptr() == p.data_ptr()
        for name, p in model.named_parameters()
    )
    snapshot = Snapshot(
        held.state, step=STEP, lock=StateDictLock(), pool=BufferPool(BLOCK), num_expected=1, versions=held.versions
    )
    with torch.no_grad():
        model.weight.add_(1)
    snapshot.detach()
    again = copy_volatile(model.state_dict(), [sgd], unsteady).state
    assert again["weight"].data_ptr() != model.weight.data_ptr()
    assert again["bias"].data_ptr() == model.bias.data_ptr()


def test_what_lies_elsewhere_in_each_step_is_copied_when_it_changed_twice() -> None:
    """Weights that are put back by `p.data = kept` are never at the address at which they were found to change."""
    unsteady = Unsteady()
    model = nn.Linear(32, 32)
    sgd = torch.optim.SGD(model.parameters())
    for _ in range(2):
        held = copy_volatile(model.state_dict(), [sgd], unsteady)
        snapshot = Snapshot(
            held.state, step=STEP, lock=StateDictLock(), pool=BufferPool(BLOCK), num_expected=1, versions=held.versions
        )
        kept = [p.detach().clone() for p in model.parameters()]
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(1)
        snapshot.detach()
        for parameter, value in zip(model.parameters(), kept, strict=True):
            parameter.data = value
    again = copy_volatile(model.state_dict(), [sgd], unsteady).state
    assert all(again[name].data_ptr() != p.data_ptr() for name, p in model.named_parameters())


@pytest.mark.parametrize(
    "write",
    [
        lambda weight: weight.add_(1),
        lambda weight: weight.to_local().add_(1),
    ],
    ids=["whole", "local"],
)
def test_writes_to_a_sharded_parameter_or_to_its_local_tensor_are_found(write: Callable[[Any], object]) -> None:
    """A state dict has tensors of its own on the same memory: the parameter's counters are those that count."""
    with imagined_rank(0, 2):
        mesh = init_device_mesh("cpu", (2,))
        weight = nn.Parameter(distribute_tensor(torch.ones(2048, 4), mesh, [Shard(0)], src_data_rank=None))
        sgd = torch.optim.SGD([weight])
        unsteady = Unsteady()
        held = copy_volatile({"weight": weight.detach()}, [sgd], unsteady)
        snapshot = Snapshot(
            held.state, step=STEP, lock=StateDictLock(), pool=BufferPool(BLOCK), num_expected=0, versions=held.versions
        )
        assert snapshot.read(0, BLOCK) == torch.ones(BLOCK // 4).numpy().tobytes()
        with torch.no_grad():
            write(weight)
        with pytest.raises(StateChangedError, match="'weight'"):
            snapshot.read(0, BLOCK)
        (copied,) = tensors_in(copy_volatile({"weight": weight.detach()}, [sgd], unsteady).state)
        assert copied.to_local().data_ptr() != weight.to_local().data_ptr()


# ----------------------------------------------------------------------------------------------------- between processes


def running() -> Iterator[HTTPTransport[Any]]:
    transport: HTTPTransport[Any] = HTTPTransport(
        hostname="127.0.0.1", bind="127.0.0.1", num_chunks=1, block_bytes=BLOCK
    )
    yield transport
    transport.shutdown()


source, other, destination = (pytest.fixture(running, name=name) for name in ("source", "other", "destination"))


def fetch(destination: HTTPTransport[Any], sources: list[HTTPTransport[Any]]) -> Any:
    return destination.fetch_checkpoint([source.metadata() for source in sources], STEP, LONG)


def fetch_sharded(destination: HTTPTransport[Any], sources: list[HTTPTransport[Any]]) -> Any:
    local = {"w": torch.zeros(5000), "b": torch.zeros(3)}
    return destination.fetch_sharded([[source.metadata()] for source in sources], 0, 1, STEP, LONG, local_state=local)


@pytest.mark.parametrize("by", [fetch, fetch_sharded])
def test_a_receiver_is_refused_by_name_and_the_source_says_so_once(
    by: Any, source: HTTPTransport[Any], destination: HTTPTransport[Any], caplog: pytest.LogCaptureFixture
) -> None:
    state = {"w": torch.ones(5000), "b": torch.ones(3)}
    caplog.set_level(logging.WARNING, "torchft_ckpt.checkpointing.serving")
    source.send_checkpoint([0, 1], STEP, state, LONG)
    state["w"].add_(1)
    for _ in range(2):
        with pytest.raises(SourceRefusedError, match=r"410 changed.*'w' was written to in place.*ask for a later step"):
            by(destination, [source])
    told = [record.getMessage() for record in caplog.records if record.name.endswith("serving.handlers")]
    assert len(told) == 1 and "'w'" in told[0] and "state_dict_lock.write()" in told[0]
    source.send_checkpoint([0], STEP, state, LONG)
    assert by(destination, [source])["w"].unique().tolist() == [2.0]


@pytest.mark.parametrize("by", [fetch, fetch_sharded])
def test_another_source_makes_up_for_it(
    by: Any, source: HTTPTransport[Any], other: HTTPTransport[Any], destination: HTTPTransport[Any]
) -> None:
    states = [{"w": torch.ones(5000), "b": torch.ones(3)} for _ in range(2)]
    for transport, state in zip((source, other), states, strict=True):
        transport.send_checkpoint([0], STEP, state, LONG)
    states[0]["w"].add_(1)
    assert by(destination, [source, other])["w"].unique().tolist() == [1.0]
