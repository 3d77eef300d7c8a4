"""Who holds what of a tensor, by arithmetic: each rank comes to the same answer, and it is what the ranks do hold."""

from __future__ import annotations

import logging
import random
import re
from typing import Any

import numpy as np
import pytest
import torch
from support.resharding import Layout, imagined_rank, random_layout
from support.spmd_double import Layout as SpmdLayout
from support.spmd_double import SilentAdapter, SpmdAdapter, SpmdTensor, random_spmd_layout, registered
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from torchft_ckpt.checkpointing.durable.saving.holdings import HoldingsIndex, OwnedBox, TensorHoldings, layout_of
from torchft_ckpt.checkpointing.durable.saving.holdings import Layout as TensorLayout
from torchft_ckpt.checkpointing.state.shards import adapter_of
from torchft_ckpt.core.boxes.geometry import Box, whole


def of(fqn: str, tensor: torch.Tensor, num_ranks: int = 1) -> tuple[TensorLayout, list[Box]]:
    """What a save knows of a tensor: its layout, and the boxes that are here."""
    adapter = adapter_of(tensor)
    return layout_of(fqn, tensor, num_ranks=num_ranks), [
        whole(tuple(tensor.shape))
    ] if adapter is None else adapter.boxes(tensor, fqn)


def of_all_ranks(layout: Layout, full: torch.Tensor, num_ranks: int) -> list[TensorHoldings]:
    found = []
    for rank in range(num_ranks):
        with imagined_rank(rank, num_ranks):
            found.append(HoldingsIndex(rank, num_ranks).holdings_of(*of("w", layout.make(full, rank))))
    return found


def test_a_plain_tensor_is_held_by_all_ranks() -> None:
    found = HoldingsIndex(1, 3).holdings_of(*of("w", torch.zeros(4, 3, dtype=torch.bfloat16)))
    held = [OwnedBox(whole((4, 3)), (0, 1, 2))]
    assert (found.fqn, found.shape, found.itemsize) == ("w", (4, 3), 2)
    assert (found.held, found.local, found.is_derivable) == (held, held, True)


def test_a_plain_tensor_of_a_pipeline_stage_is_its_ranks_own() -> None:
    found = HoldingsIndex(1, 3, is_replicated=False).holdings_of(*of("w", torch.zeros(4)))
    held = [OwnedBox(whole((4,)), (1,))]
    assert (found.held, found.local, found.is_derivable) == (held, held, False)


def test_an_empty_tensor_is_held_by_nobody() -> None:
    assert not HoldingsIndex(1, 3).holdings_of(*of("w", torch.zeros(0, 3))).held


def test_rows_that_do_not_come_out_even_leave_the_last_ranks_less_or_nothing() -> None:
    (first, *others) = of_all_ranks(Layout((4,), ((0, 0),)), torch.zeros(5, 2), 4)
    assert first.held == [
        OwnedBox(Box((0, 0), (2, 2)), (0,)),
        OwnedBox(Box((2, 0), (2, 2)), (1,)),
        OwnedBox(Box((4, 0), (1, 2)), (2,)),
    ]
    assert all(other.held == first.held for other in others)
    assert [list(one.local) for one in (first, *others)] == [[held] for held in first.held] + [[]]


def test_replicas_within_a_group_are_told() -> None:
    """HSDP in one group: the first dimension of the mesh replicates."""
    holdings = of_all_ranks(Layout((2, 2), ((1, 0),)), torch.zeros(4), 4)
    assert holdings[3].held == [OwnedBox(Box((0,), (2,)), (0, 2)), OwnedBox(Box((2,), (2,)), (1, 3))]


@pytest.mark.parametrize("seed", range(60))
def test_all_ranks_agree_and_say_what_each_of_them_holds(seed: int) -> None:
    dice = random.Random(seed)
    num_ranks = dice.randint(1, 6)
    shape = tuple(dice.randint(1, 9) for _ in range(dice.randint(1, 3)))
    layout = random_layout(dice, num_ranks, shape)
    numbers = torch.arange(int(np.prod(shape))).reshape(shape)
    boxes_of_rank: list[list[Box]] = []
    holdings: list[TensorHoldings] = []
    for rank in range(num_ranks):
        with imagined_rank(rank, num_ranks):
            tensor = layout.make(numbers, rank)
            try:
                holdings.append(HoldingsIndex(rank, num_ranks).holdings_of(*of("w", tensor)))
            except Exception as error:
                pytest.skip(f"no boxes: {error}")  # of strided shards
            adapter = adapter_of(tensor)
            boxes_of_rank.append(adapter.boxes(tensor, "w") if adapter else [whole(shape)])
    if not holdings[0].is_derivable:
        assert not any(one.is_derivable for one in holdings), seed
    for rank, one in enumerate(holdings):
        own = [box for box in boxes_of_rank[rank] if box.volume]
        assert [held.box for held in one.held if rank in held.ranks] == own, seed
        assert [held.box for held in one.local] == own, seed
        if one.is_derivable:
            assert one.held == holdings[0].held, seed
    covered = np.zeros(shape, dtype=bool)
    for boxes in boxes_of_rank:
        for box in boxes:
            covered[tuple(slice(low, low + size) for low, size in zip(box.offsets, box.sizes, strict=True))] = True
    assert covered.all()


def test_a_mesh_that_reaches_beyond_the_group_is_known_in_part() -> None:
    with imagined_rank(1, 4):
        mesh = DeviceMesh("cpu", torch.arange(4))
        tensor = DTensor.from_local(torch.zeros(2, 3), mesh, [Shard(0)], run_check=False)
        holdings = HoldingsIndex(1, 2).holdings_of(*of("w", tensor))
    assert holdings.held == [OwnedBox(Box((2, 0), (2, 3)), (1,))]
    assert not holdings.is_derivable


def test_another_place_in_the_same_mesh_has_another_box() -> None:
    """Meshes are equal whatever rank a process has: what is remembered of one must not be taken for the other."""
    full = torch.zeros(6, 2)
    layout = Layout((2,), ((0, 0),))
    kept = []
    for rank in (0, 1, 0):
        with imagined_rank(rank, 2):
            kept.append(layout.make(full, rank))
            adapter = adapter_of(kept[-1])
            assert adapter is not None
            assert adapter.boxes(kept[-1], "w") == [Box((3 * rank, 0), (3, 2))]


def test_layouts_are_worked_out_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from torchft_ckpt.checkpointing.durable.saving import holdings as module

    calls: list[object] = []
    work_out = module._boxes_on_mesh
    monkeypatch.setattr(module, "_boxes_on_mesh", lambda *args: (calls.append(args), work_out(*args))[1])
    with imagined_rank(0, 2):
        mesh = DeviceMesh("cpu", torch.arange(2))
        index = HoldingsIndex(0, 2)
        for number in range(20):
            tensor = DTensor.from_local(torch.zeros(3, 5), mesh, [Shard(number % 2)], run_check=False)
            index.holdings_of(*of(f"w{number}", tensor))
    assert len(calls) == 2


@pytest.mark.parametrize("num_ranks", [4, 3])
def test_of_a_class_whose_adapter_does_not_know_holders_a_rank_knows_its_own_boxes(num_ranks: int) -> None:
    """One that says nothing, or that knows of a group of another size only."""
    layout = SpmdLayout((4, 1), places=((0,), (3,), (1, 2), ()))
    tensor = SpmdTensor.of(torch.zeros(8, 3), layout.of_rank(2))
    with registered(SilentAdapter() if num_ranks == 4 else SpmdAdapter()):
        holdings = HoldingsIndex(2, num_ranks).holdings_of(*of("w", tensor, num_ranks))
    assert holdings.held == [OwnedBox(Box((2, 0), (2, 3)), (2,)), OwnedBox(Box((4, 0), (2, 3)), (2,))]
    assert not holdings.is_derivable
    assert tensor.num_moved == 0


@pytest.mark.parametrize("seed", range(60))
def test_what_an_adapter_says_is_known_to_all_ranks_alike(seed: int) -> None:
    """The oracle is a list of who holds each element, made from what each rank has."""
    dice = random.Random(seed)
    num_ranks = dice.randint(1, 5)
    shape = tuple(dice.randint(1, 7) for _ in range(dice.randint(1, 3)))
    layout = random_spmd_layout(dice, len(shape), num_ranks)
    holders: dict[int, set[int]] = {}
    numbers = np.arange(int(np.prod(shape))).reshape(shape)
    found = []
    with registered(SpmdAdapter()):
        for rank in range(num_ranks):
            tensor = SpmdTensor.of(torch.zeros(shape), layout.of_rank(rank))
            known, own = of("w", tensor, num_ranks)
            for box in own:
                for element in elements_of(box, numbers):
                    holders.setdefault(element, set()).add(rank)
            found.append(HoldingsIndex(rank, num_ranks).holdings_of(known, own))
            assert [held.box for held in found[-1].local] == sorted(box for box in own if box.volume), seed
            assert tensor.num_moved == 0
    assert all(one.is_derivable for one in found), seed
    assert all(one.held == found[0].held for one in found), seed
    said = {element: set(held.ranks) for held in found[0].held for element in elements_of(held.box, numbers)}
    assert said == holders, seed


def elements_of(box: Box, numbers: Any) -> list[int]:
    at = tuple(slice(low, low + size) for low, size in zip(box.offsets, box.sizes, strict=True))
    found: list[int] = numbers[at].flatten().tolist()
    return found


TOP, BOTTOM = Box((0, 0), (4, 3)), Box((4, 0), (4, 3))


class SayingAdapter(SpmdAdapter):
    """Says whatever it was given."""

    def __init__(self, said: Any) -> None:
        self.said = said

    def holders(self, tensor: torch.Tensor, num_ranks: int) -> Any:
        return self.said


def seen_by_rank_1(said: Any, num_tensors: int = 1) -> list[TensorHoldings]:
    """Of tensors of eight rows on two ranks, four rows on each."""
    index = HoldingsIndex(1, 2)
    tensor = SpmdTensor.of(torch.zeros(8, 3), SpmdLayout((2, 1), held=(1,)))
    with registered(SayingAdapter(said)):
        return [index.holdings_of(*of(f"w{number}", tensor, 2)) for number in range(num_tensors)]


def test_holders_may_be_said_in_any_order_with_any_integers_and_empty_boxes() -> None:
    said = [
        (Box((8, 0), (0, 3)), []),
        (Box(torch.Size((4, 0)), torch.Size((4, 3))), np.array([1, 0])),
        (TOP, range(1)),
    ]
    (found,) = seen_by_rank_1(said)
    assert found.held == [OwnedBox(TOP, (0,)), OwnedBox(BOTTOM, (0, 1))]
    assert (found.local, found.is_derivable) == ([OwnedBox(BOTTOM, (0, 1))], True)


def test_one_layout_is_one_object_so_that_its_bytes_are_counted_once() -> None:
    first, second = seen_by_rank_1([(TOP, [0]), (BOTTOM, [1])], 2)
    assert first.held is second.held


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ([(BOTTOM, [1])], r"nobody is said to hold \[0:4, 0:3\]"),
        ([], "nobody is said to hold"),
        ([(TOP, [0]), (Box((3, 0), (5, 3)), [1])], "overlap"),
        ([(TOP, [0]), (TOP, [1]), (BOTTOM, [1])], "overlap"),
        ([(TOP, [0]), (BOTTOM, [1, 2])], r"held by \(1, 2\) of 2 ranks"),
        ([(TOP, [-1]), (BOTTOM, [1])], r"held by \(-1,\) of 2 ranks"),
        ([(TOP, []), (BOTTOM, [1])], r"held by \(\) of 2 ranks"),
        ([(TOP, [0]), (BOTTOM, [1, 1])], r"held by \(1, 1\) of 2 ranks"),
        ([(TOP, [0]), (Box((4, 0), (5, 3)), [1])], "is no box of a tensor of shape"),
        ([(TOP, [0]), (Box((4,), (4,)), [1])], "is no box of a tensor of shape"),
        ([(TOP, [0, 1]), (BOTTOM, [1])], "rank 1 holds other boxes than are said of it"),
        ([(TOP, [0]), (BOTTOM, [0])], "rank 1 holds other boxes than are said of it"),
        ([(TOP, [0]), (BOTTOM, [1.5])], "float"),
        ([(TOP, 0), (BOTTOM, 1)], "int"),
        ([((0, 0), [0])], "tuple"),
        (7, "int"),
    ],
)
def test_holders_that_cannot_be_right_do_not_count_and_the_log_says_so_once(
    said: Any, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        found = seen_by_rank_1(said, 3)
    alone = [OwnedBox(BOTTOM, (1,))]
    assert [(one.held, one.local, one.is_derivable) for one in found] == [(alone, alone, False)] * 3
    (line,) = caplog.messages
    assert line.startswith("the holders that its adapter names for 'w0' do not count")
    assert re.search(why, line)
