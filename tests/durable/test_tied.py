"""Weights that share memory on one side alone are right, or refused by name, whichever way they come."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from support.name_twins import Job, on_mesh
from support.resharding import LONG, Group, imagined_rank, make_transport
from torch.distributed.tensor import DTensor

from torchft_ckpt import load_checkpoint
from torchft_ckpt.checkpointing import StateDictLock
from torchft_ckpt.errors import StateMismatchError
from torchft_ckpt.manager.state_registry import StateRegistry

State = dict[str, Any]
Way = Callable[[Path, State, State], None]
"""Brings a state into another one."""


def by_load(directory: Path, there: State, here: State) -> None:
    job = Job(directory, 1)
    assert not job.save(lambda _: there)
    job.load(lambda _: here)


def by_restore(directory: Path, there: State, here: State) -> None:
    job = Job(directory, 1)
    assert not job.save(lambda _: there)
    job.load(lambda _: here, restores=True)


def from_dcp(directory: Path, there: State, here: State) -> None:
    dcp.save(there, checkpoint_id=directory / "theirs", no_dist=True)
    load_checkpoint(directory / "theirs", here)


def by_a_join(directory: Path, there: State, here: State) -> None:
    source, destination = make_transport(), make_transport()
    try:
        source.send_checkpoint([1], 1, there, LONG)
        destination.fetch_checkpoint([source.metadata()], 1, LONG, local_state=here, in_place=True)
    finally:
        source.shutdown()
        destination.shutdown()


def from_another_layout(directory: Path, there: State, here: State) -> None:
    """As a `take_over` from a group of another size does."""
    destination = make_transport()
    with Group([there, there], 1, num_receivers=1) as group, imagined_rank(0, 1):
        try:
            destination.fetch_sharded([group.urls], 0, 1, 1, LONG, local_state=here, in_place=True)
        finally:
            destination.shutdown()


LINE = torch.arange(200.0)
FROM_STORAGE: list[Way] = [by_load, by_restore, from_dcp]
WAYS: list[Way] = [*FROM_STORAGE, by_a_join, from_another_layout]


def apart() -> State:
    return {"embed": torch.arange(9000.0), "head": -torch.arange(9000.0), "bias": torch.ones(3)}


def tied(more: float = 0.0) -> State:
    state = apart()
    state["head"] = state["embed"].add_(more)
    return state


def zeros(state: State) -> State:
    for tensor in state.values():
        tensor.zero_()
    return state


@pytest.mark.parametrize("way", WAYS)
def test_weights_that_are_tied_here_alone_are_refused_by_name(tmp_path: Path, way: Way) -> None:
    """One overwrote the other, and from storage it was not even the same one for all of it."""
    with pytest.raises(StateMismatchError, match=r"embed, head"):
        way(tmp_path, apart(), zeros(tied()))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("make", [apart, tied])
def test_weights_that_were_tied_there_come_to_both(tmp_path: Path, way: Way, make: Callable[[], State]) -> None:
    here = zeros(make())
    way(tmp_path, tied(), here)
    assert all(torch.equal(here[name], tensor) for name, tensor in tied().items())


@pytest.mark.parametrize("way", WAYS)
def test_weights_that_are_equal_there_without_being_tied_come_from_storage_to_ones_that_are_tied(
    tmp_path: Path, way: Way
) -> None:
    there, here = {name: tensor.clone() for name, tensor in tied().items()}, zeros(tied())
    if way not in FROM_STORAGE:  # before a byte is received: whether they are equal is not known
        with pytest.raises(StateMismatchError, match=r"embed, head"):
            way(tmp_path, there, here)
        return
    way(tmp_path, there, here)
    assert all(torch.equal(here[name], tensor) for name, tensor in there.items())


def test_what_a_join_that_is_not_received_in_place_leaves_unset_is_named() -> None:
    """The load function is given both, and may do with them what it likes."""
    here = zeros(tied())

    def load(state: State) -> None:
        for name, tensor in state.items():
            here[name].copy_(tensor)

    registry = StateRegistry(StateDictLock())
    registry.register("default", load, lambda: here)
    registry.load({"default": apart()})
    assert registry.not_returned({"default": apart()}).paths == ("default.embed",)


def views(base: torch.Tensor) -> State:
    """Of one memory: overlapping, strided, of another dtype, in no place that its size divides."""
    return {
        "all": base,
        "rows": base[3:40],
        "more": base[20:60],
        "columns": base[:, 1::2],
        "t": base.t(),
        "bytes": base.view(torch.uint8)[:, 3:9],
    }


@pytest.mark.parametrize("way", WAYS)
def test_views_of_one_memory_come_as_they_were_and_one_that_differs_in_an_element_is_refused(
    tmp_path: Path, way: Way
) -> None:
    def base() -> torch.Tensor:
        return torch.arange(600.0).reshape(60, 10)

    here = views(torch.zeros(60, 10))
    way(tmp_path / "same", views(base()), here)
    assert torch.equal(here["all"], base())
    for name in here:
        there = {other: tensor.clone() for other, tensor in views(base()).items()}
        there[name][-1, -1] += 1
        with pytest.raises(StateMismatchError, match=r"share memory here.*: all|all, .* share memory here"):
            way(tmp_path / name, there, views(torch.zeros(60, 10)))


@pytest.mark.parametrize("stride", [2, 100])
@pytest.mark.parametrize("way", WAYS)
def test_elements_of_one_tensor_that_share_memory_here_come_equal_or_are_refused(
    tmp_path: Path, way: Way, stride: int
) -> None:
    """Of several values for one place some came, without a word; with the longer stride there is room for all of them."""

    def crowded(values: torch.Tensor) -> State:
        return {"w": values.as_strided((2, 2, 2), (1, 1, stride)), "bias": torch.ones(3)}

    here = crowded(torch.zeros(200))
    there = {name: tensor.clone(memory_format=torch.contiguous_format) for name, tensor in crowded(LINE).items()}
    if way in FROM_STORAGE:
        way(tmp_path / "equal", there, here)
        assert torch.equal(here["w"], there["w"])
    there["w"][0, 1, 0] += 1000
    with pytest.raises(StateMismatchError, match=r"share memory here"):
        way(tmp_path / "different", there, here)


def test_what_shares_memory_here_and_is_not_received_into_is_handed_over_as_it_was_saved(tmp_path: Path) -> None:
    """Nothing is overwritten; what the load function makes of it is its own affair."""
    there, one = {"w": LINE[:4], "v": -LINE[:4]}, torch.zeros(1).expand(4)
    job = Job(tmp_path, 1)
    assert not job.save(lambda _: there)
    [state] = job.load(lambda _: {"w": one, "v": one}, restores=True)
    assert all(torch.equal(state[name], tensor) for name, tensor in there.items())


@pytest.mark.parametrize("restores", [False, True])
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_shards_that_are_tied_here_alone_are_refused_and_those_that_were_tied_there_are_not(
    tmp_path: Path, num_ranks: int, restores: bool
) -> None:
    def state_of(rank: int, is_tied: bool, ranks: int) -> State:
        embed, head = (on_mesh(sign * torch.arange(10.0), rank, range(ranks), 0) for sign in (1, -1))
        return {"embed": embed, "head": embed if is_tied else head}

    def empty(is_tied: bool) -> Callable[[int], State]:
        return lambda rank: {name: one.zero_() for name, one in state_of(rank, is_tied, num_ranks).items()}

    for is_tied in (False, True):
        job = Job(tmp_path / str(is_tied), 2)
        assert not job.save(lambda rank, is_tied=is_tied: state_of(rank, is_tied, 2))
        for is_tied_here in (False, True):
            if is_tied_here and not is_tied:
                with pytest.raises(StateMismatchError, match=r"embed, head"):
                    job.load(empty(is_tied_here), num_ranks, restores=restores)
                continue
            for rank, state in enumerate(job.load(empty(is_tied_here), num_ranks, restores=restores)):
                with imagined_rank(rank, num_ranks):
                    expected = state_of(rank, is_tied, num_ranks)
                for name, one in expected.items():
                    assert isinstance(one, DTensor) and torch.equal(state[name].to_local(), one.to_local())


@pytest.mark.parametrize("restores", [False, True])
def test_tied_weights_that_drifted_between_ranks_still_load_and_it_is_said(
    tmp_path: Path, restores: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """One name was written by rank 0 and the other one by rank 1, each of which tied them."""
    job = Job(tmp_path, 2)
    assert not job.save(tied)
    caplog.clear()
    for state in job.load(lambda _: zeros(tied()), restores=restores):
        assert any(torch.equal(state["embed"], torch.arange(9000.0) + more) for more in (0, 1)), "of one rank"
    assert (
        caplog.text.count("embed, head share memory here, and do not hold the same there, as their ranks did not") == 2
    )


@pytest.mark.parametrize("restores", [False, True])
def test_weights_that_drifted_between_ranks_and_were_tied_on_none_are_refused(tmp_path: Path, restores: bool) -> None:
    """That ranks differ is no reason to take them for tied: each of them shows that its own two are not alike."""
    job = Job(tmp_path, 2)
    assert not job.save(lambda rank: {name: tensor + rank for name, tensor in apart().items()})
    with pytest.raises(StateMismatchError, match=r"embed, head share memory here"):
        job.load(lambda _: zeros(tied()), restores=restores)
