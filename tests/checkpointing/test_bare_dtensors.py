"""A transport by itself, as torchft's Manager calls it, returns DTensors where this process has their mesh, or says why not."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pytest
import torch
from support.resharding import imagined_rank
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from torchft_ckpt import HTTPTransport
from torchft_ckpt.checkpointing.state.local_state import LocalState
from torchft_ckpt.checkpointing.state.shards import KnownMeshes, MeshLayout
from torchft_ckpt.core.boxes.geometry import Box
from torchft_ckpt.errors import StateMismatchError

SHORT = timedelta(seconds=90)
FULL = torch.arange(48.0).view(8, 6)


def sharded(mesh: DeviceMesh, placements: list[Placement], full: torch.Tensor = FULL) -> DTensor:
    return distribute_tensor(full, mesh, placements, src_data_rank=None)


@contextmanager
def served(state: object) -> Iterator[str]:
    source: HTTPTransport[Any] = HTTPTransport(SHORT)
    source.send_checkpoint([1], 3, state, SHORT)
    yield source.metadata()
    source.shutdown()


def receive(metadata: str, **options: Any) -> Any:
    transport: HTTPTransport[Any] = HTTPTransport(SHORT, **options)
    try:
        return transport.recv_checkpoint(0, metadata, 3, SHORT)
    finally:
        transport.shutdown()


def check_alike(received: object, sent: DTensor) -> None:
    assert isinstance(received, DTensor)
    assert (received.shape, received.placements, received.stride()) == (sent.shape, sent.placements, sent.stride())
    assert received.device_mesh == sent.device_mesh
    assert torch.equal(received.to_local(), sent.to_local())
    sent.detach().copy_(received)  # as a load_state_dict does


@pytest.mark.parametrize("rank", [0, 2])
@pytest.mark.parametrize("names", [None, ("dp",)])
def test_a_mesh_over_the_default_process_group_needs_nothing_else(rank: int, names: tuple[str, ...] | None) -> None:
    with imagined_rank(rank, 3):
        mesh = init_device_mesh("cpu", (3,), mesh_dim_names=names)
        state = {
            "rows": sharded(mesh, [Shard(0)]),
            "columns": sharded(mesh, [Shard(1)]),
            "all": sharded(mesh, [Replicate()]),
        }
        with served(state) as metadata:
            received = receive(metadata)
        for name, sent in state.items():
            check_alike(received[name], sent)


def test_the_mesh_of_the_state_that_is_here_serves_for_what_is_not_here_yet() -> None:
    """An optimizer's moments, before its first step."""
    with imagined_rank(1, 4):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        model = {"w": sharded(mesh, [Shard(0), Shard(1)])}
        moment = sharded(mesh, [_StridedShard(0, split_factor=2), Shard(0)])
        with served({"model": model, "moment": moment}) as metadata:
            received = receive(metadata, state_dict=lambda: {"model": {"w": sharded(mesh, [Shard(0), Shard(1)]) * 0}})
        check_alike(received["model"]["w"], model["w"])
        check_alike(received["moment"], moment)


def test_without_such_a_mesh_each_part_is_named_and_none_passes_for_the_whole() -> None:
    with imagined_rank(1, 4):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        state = {"model": {"w": sharded(mesh, [Shard(0), Replicate()])}}
        with served(state) as metadata, pytest.raises(StateMismatchError) as caught:
            receive(metadata)
    for text in ("model.w is ", "mesh 2x2 (dp, tp) of cpu", "none is known in this process", "state_dict="):
        assert text in str(caught.value)


def test_a_process_outside_of_any_group_is_told_so() -> None:
    with imagined_rank(1, 2):
        state = {"w": sharded(init_device_mesh("cpu", (2,)), [Shard(0)])}
        serving = served(state)
        metadata = serving.__enter__()
    with pytest.raises(StateMismatchError, match=r"w is .*mesh 2 of cpu, of which none is known"):
        receive(metadata)
    serving.__exit__(None, None, None)


def test_another_rank_s_part_is_refused() -> None:
    with imagined_rank(1, 2):
        serving = served({"w": sharded(init_device_mesh("cpu", (2,)), [Shard(0)])})
        metadata = serving.__enter__()
    with imagined_rank(0, 2), pytest.raises(StateMismatchError, match="of which this rank's part is"):
        receive(metadata)
    serving.__exit__(None, None, None)


def test_one_that_is_whole_on_each_rank_is_plain_where_there_is_no_mesh_and_a_line_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with imagined_rank(0, 2):
        serving = served({"w": sharded(init_device_mesh("cpu", (2,)), [Replicate()])})
        metadata = serving.__enter__()
    with caplog.at_level(logging.WARNING):
        received = receive(metadata)
    serving.__exit__(None, None, None)
    assert type(received["w"]) is torch.Tensor
    assert torch.equal(received["w"], FULL)
    assert any("w is a DTensor there" in record.getMessage() for record in caplog.records)


@pytest.mark.parametrize(
    "changes",
    [
        {"placements": [[5]]},
        {"placements": [[0, 0]]},
        {"placements": [[0, 1, 2]]},
        {"placements": []},
        {"placements": [[0], [0]]},
        {"stride": [1]},
        {"placements": [[0, 2]]},
        {"placements": [[1]]},
    ],
)
def test_a_layout_that_cannot_be_or_is_not_this_ranks_is_refused(changes: dict[str, Any]) -> None:
    good: dict[str, Any] = {"device": "cpu", "mesh": [2], "names": None, "placements": [[0]], "stride": [6, 1]}
    with imagined_rank(1, 2):
        meshes = KnownMeshes([])
        assert meshes.why_not(MeshLayout(**good), (8, 6), [Box((4, 0), (4, 6))]) is None
        assert meshes.why_not(MeshLayout(**{**good, **changes}), (2**40, 6), [Box((4, 0), (4, 6))])


def test_who_has_a_tensor_of_that_name_keeps_its_own_layout() -> None:
    with imagined_rank(0, 2):
        mesh = init_device_mesh("cpu", (2,))
        with served({"w": sharded(mesh, [Replicate()])}) as metadata:
            received = receive(metadata, state_dict=lambda: {"w": torch.zeros(8, 6)})
        assert type(received["w"]) is torch.Tensor
        assert LocalState({"w": received["w"]}).get("w") is not None
