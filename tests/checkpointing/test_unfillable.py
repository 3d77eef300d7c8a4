"""What cannot be received into is known before the first byte, and refused by its name, at whatever door."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from support.resharding import imagined_rank
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from torchft_ckpt import Checkpointer, HTTPTransport, PeerReader, load_checkpoint
from torchft_ckpt.checkpointing.lock import StateDictLock
from torchft_ckpt.checkpointing.resharding.peers import JobPeers
from torchft_ckpt.errors import ConfigError, StateMismatchError, UnsupportedValueError

LONG = timedelta(seconds=90)
LONG_S = 90.0
NEGATIVE = timedelta(seconds=-1)
STEP = 3
FULL = torch.arange(12.0).view(3, 4)
Door = Callable[[dict[str, Any], dict[str, Any]], object]


def running() -> Iterator[HTTPTransport[Any]]:
    transport: HTTPTransport[Any] = HTTPTransport(hostname="127.0.0.1", bind="127.0.0.1", num_chunks=1)
    yield transport
    transport.shutdown()


source, destination = pytest.fixture(running, name="source"), pytest.fixture(running, name="destination")


def in_place(source: HTTPTransport[Any], destination: HTTPTransport[Any]) -> Door:
    def receive(state: dict[str, Any], local: dict[str, Any]) -> object:
        source.send_checkpoint([], STEP, state, LONG)
        return destination.fetch_checkpoint([source.metadata()], STEP, LONG, local_state=local, in_place=True)

    return receive


def sharded_in_place(source: HTTPTransport[Any], destination: HTTPTransport[Any]) -> Door:
    def receive(state: dict[str, Any], local: dict[str, Any]) -> object:
        source.send_checkpoint([], STEP, state, LONG)
        return destination.fetch_sharded([[source.metadata()]], 0, 1, STEP, LONG, local_state=local, in_place=True)

    return receive


def of_a_checkpoint(directory: Path) -> Door:
    def load(state: dict[str, Any], local: dict[str, Any]) -> object:
        checkpointer = Checkpointer(directory)
        saved = checkpointer.save(state, step=STEP).result(LONG_S)
        checkpointer.shutdown()
        return load_checkpoint(directory / saved.name, local)

    return load


def by_dcp(source: HTTPTransport[Any]) -> Door:
    def read(state: dict[str, Any], local: dict[str, Any]) -> object:
        source.send_checkpoint([], STEP, state, LONG)
        try:
            dcp.load(local, storage_reader=PeerReader([source.metadata()], timeout=LONG), no_dist=True)
        except CheckpointException as raised:
            (error,) = (failure[0] for failure in raised.failures.values())
            raise error from None
        return local

    return read


@pytest.fixture(params=["in_place", "sharded", "checkpoint", "dcp"])
def door(request: Any, source: HTTPTransport[Any], destination: HTTPTransport[Any], tmp_path: Path) -> Door:
    return {
        "in_place": lambda: in_place(source, destination),
        "sharded": lambda: sharded_in_place(source, destination),
        "checkpoint": lambda: of_a_checkpoint(tmp_path),
        "dcp": lambda: by_dcp(source),
    }[request.param]()


def read_only() -> np.ndarray:
    array = np.zeros((3, 4), np.float32)
    array.flags.writeable = False
    return array


def test_an_expanded_tensor_is_refused_before_anything_is_overwritten(door: Door) -> None:
    local = {"a": torch.zeros(3), "x": torch.zeros(1, 4).expand(3, 4)}
    with pytest.raises(
        StateMismatchError, match=r"x (has several elements in one place here|: elements share)"
    ) as raised:
        door({"a": torch.ones(3), "x": FULL}, local)
    assert not raised.value.state_overwritten
    assert local["a"].tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("kind", [in_place, sharded_in_place])
@pytest.mark.parametrize(
    ("here", "message"),
    [
        (lambda: torch.empty(3, 4, device="meta"), "x has no memory here, it is on the meta device"),
        (lambda: np.zeros((4, 3), np.float32).T, "x is a numpy array here that is not contiguous, or read-only"),
        (read_only, "x is a numpy array here that is not contiguous, or read-only"),
    ],
    ids=["meta", "strided array", "read-only array"],
)
def test_what_has_no_memory_to_receive_into_is_refused(
    kind: Any, here: Any, message: str, source: HTTPTransport[Any], destination: HTTPTransport[Any]
) -> None:
    local = {"a": torch.zeros(3), "x": here()}
    sent = FULL.numpy() if isinstance(local["x"], np.ndarray) else FULL
    with pytest.raises(StateMismatchError, match=f"{message}; nothing was received"):
        kind(source, destination)({"a": torch.ones(3), "x": sent}, local)
    assert local["a"].tolist() == [0.0, 0.0, 0.0]


def test_a_value_where_a_tensor_was_asked_for_is_refused(door: Door) -> None:
    local = {"a": torch.zeros(3), "x": torch.zeros(3, 4)}
    with pytest.raises(StateMismatchError, match="x"):
        door({"a": torch.ones(3), "x": 5}, local)
    assert local["a"].tolist() == [0.0, 0.0, 0.0]
    assert isinstance(local["x"], torch.Tensor)


def test_a_sparse_tensor_is_refused_by_its_path(door: Door) -> None:
    local = {"a": torch.zeros(3), "x": torch.zeros(3, 4).to_sparse()}
    with pytest.raises((UnsupportedValueError, StateMismatchError), match=r"x.*torch\.sparse_coo"):
        door({"a": torch.ones(3), "x": FULL}, local)
    assert local["a"].tolist() == [0.0, 0.0, 0.0]


def test_a_strided_tensor_and_an_inference_tensor_can_be_filled(door: Door) -> None:
    with torch.inference_mode():
        frozen, frozen_strided = torch.zeros(3, 4), torch.zeros(4, 3).t()
    local = {"strided": torch.zeros(4, 3).t(), "frozen": frozen, "both": frozen_strided}
    tied = FULL + 1
    door({"strided": FULL, "frozen": tied, "both": tied}, local)
    assert local["strided"].tolist() == FULL.tolist()
    assert frozen.tolist() == frozen_strided.tolist() == tied.tolist()


def test_shards_are_not_made_like_a_tensor_on_the_meta_device(
    source: HTTPTransport[Any], destination: HTTPTransport[Any]
) -> None:
    """Also beside the state: what arrives takes the device of what is here."""
    with imagined_rank(0, 2):
        mesh = init_device_mesh("cpu", (2,))
        here = DTensor.from_local(torch.empty(2, 4, device="meta"), mesh, [Shard(0)], run_check=False)
        source.send_checkpoint([], STEP, {"x": distribute_tensor(FULL.repeat(2, 1)[:4], mesh, [Shard(0)])}, LONG)
        with pytest.raises(StateMismatchError, match="x has no memory here"):
            destination.fetch_checkpoint([source.metadata()], STEP, LONG, local_state={"x": here})


def test_negative_timeouts_are_refused_at_every_door(
    source: HTTPTransport[Any], destination: HTTPTransport[Any], tmp_path: Path
) -> None:
    urls = [source.metadata()]
    doors: list[Callable[[], object]] = [
        lambda: source.send_checkpoint([], STEP, {}, NEGATIVE),
        lambda: destination.recv_checkpoint(0, urls[0], STEP, NEGATIVE),
        lambda: destination.fetch_checkpoint(urls, STEP, NEGATIVE),
        lambda: destination.fetch_sharded([urls], 0, 1, STEP, NEGATIVE, local_state={}),
        lambda: PeerReader(urls, timeout=NEGATIVE),
        lambda: JobPeers([urls]).pull(None, timeout=NEGATIVE),
        lambda: JobPeers([urls]).manifest(timeout=NEGATIVE),
        lambda: Checkpointer(tmp_path).wait(NEGATIVE),
        lambda: StateDictLock().acquire_write(NEGATIVE),
    ]
    for number, use in enumerate(doors):
        with pytest.raises(ConfigError, match=r"timeout=.*not negative"):
            use()
            pytest.fail(f"door {number} is open")


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (torch.eye(3).to_sparse(), "a tensor of layout torch.sparse_coo"),
        (torch.empty(2, device="meta"), "a tensor on the meta device"),
        (torch.nested.nested_tensor([torch.ones(1), torch.ones(2)]), "nested|layout"),
    ],
    ids=["sparse", "meta", "nested"],
)
def test_a_tensor_of_the_ranks_own_state_that_cannot_be_carried_is_refused(
    tmp_path: Path, value: torch.Tensor, message: str
) -> None:
    checkpointer = Checkpointer(tmp_path)
    with pytest.raises(UnsupportedValueError, match=f"own.*{message}"):
        checkpointer.save({"x": torch.ones(2)}, step=1, rank_state={"sampler": [value]})
    checkpointer.shutdown()
