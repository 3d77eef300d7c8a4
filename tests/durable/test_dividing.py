"""Who writes what of a state: of what each replica group has its own of, and of tensors that an adapter knows."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection
from typing import Any

import numpy as np
import pytest
import torch
from support.spmd_double import Layout, SilentAdapter, SpmdAdapter, SpmdTensor, random_spmd_layout, registered

from torchft_ckpt.checkpointing.durable.saving.capture import CapturedState
from torchft_ckpt.checkpointing.durable.saving.dividing import own_share
from torchft_ckpt.checkpointing.durable.saving.holdings import HoldingsIndex
from torchft_ckpt.checkpointing.durable.saving.part_writer import PartShare, Writers
from torchft_ckpt.checkpointing.lock import StateDictLock
from torchft_ckpt.checkpointing.serving.buffers import BufferPool
from torchft_ckpt.core.boxes import Box, whole
from torchft_ckpt.core.coverage import subtract
from torchft_ckpt.core.saving import Member

NUM_RANKS = 2


def shares_of(num_replicas: int, of_group: set[str]) -> dict[Member, PartShare]:
    """What each member writes of a state that all of them hold whole, but for the tensors that are each group's own."""
    shares = {}
    for replica in range(num_replicas):
        for rank in range(NUM_RANKS):
            state: dict[str, Any] = {
                "weight": torch.zeros(3000, 128),
                "statistics": torch.zeros(512, 128),
                "count": torch.tensor(3),
            }
            state["array"] = np.zeros((512, 128))
            own = {id(state[name]) for name in of_group}
            shares[Member(replica, rank)] = share_of(state, Member(replica, rank), num_replicas, NUM_RANKS, own)
    return shares


def share_of(
    state: dict[str, Any], member: Member, num_replicas: int, num_ranks: int, of_group: Collection[int] = ()
) -> PartShare:
    """What a member writes of its state."""
    captured = CapturedState(
        state,
        step=1,
        own=None,
        lock=StateDictLock(),
        pool=BufferPool(64 * 1024),
        index=HoldingsIndex(member.rank, num_ranks),
        of_group=of_group,
    )
    try:
        return own_share(captured, Writers(num_replicas, num_ranks, ""), member, range(num_replicas))
    finally:
        captured.close()


@pytest.mark.parametrize("num_replicas", [1, 2, 3])
@pytest.mark.parametrize("of_group", [set(), {"statistics", "count"}, {"weight", "statistics", "count"}])
def test_what_each_group_has_its_own_of_comes_from_the_first_and_all_is_written_once(
    num_replicas: int, of_group: set[str]
) -> None:
    shapes = {"weight": (3000, 128), "statistics": (512, 128), "count": (), "array": (512, 128)}
    shares = shares_of(num_replicas, of_group)
    for place, (name, shape) in enumerate(shapes.items()):
        boxes = [box for share in shares.values() for tensor, box in share.boxes if tensor == place]
        assert not subtract([whole(shape)], boxes)
        assert sum(box.volume for box in boxes) == whole(shape).volume
        writers = {member.replica for member, share in shares.items() if any(at == place for at, _ in share.boxes)}
        assert name not in {*of_group, "array"} or writers == {0}
    if num_replicas < 3 and "weight" not in of_group:  # there is enough of what others can write
        itemsizes = (4, 4, 8, 8)
        loads = {member: sum(box.volume * itemsizes[at] for at, box in share.boxes) for member, share in shares.items()}
        most = max(loads, key=lambda member: loads[member])
        writes_own_alone = not any(at == 0 for at, _ in shares[most].boxes)  # nobody can take that from it
        assert loads[most] <= 1.1 * sum(loads.values()) / len(loads) + 64 * 1024 or writes_own_alone, loads


@pytest.mark.parametrize("seed", range(25))
def test_ranks_that_do_not_agree_on_what_is_their_groups_own_leave_no_hole(seed: int) -> None:
    """Each rank's optimizer may own other parameters than its neighbour's, and none where its shard is empty."""
    generator = random.Random(seed)
    print(f"seed {seed}")
    num_replicas, num_ranks = generator.randint(1, 3), generator.randint(1, 4)
    shapes = [(generator.randint(1, 900), generator.choice([1, 64, 512])) for _ in range(generator.randint(1, 8))]
    own = [{at for at in range(len(shapes)) if generator.random() < 0.4} for _ in range(num_ranks)]
    shares = {}
    for replica in range(num_replicas):
        for rank in range(num_ranks):
            state = {f"t{at}": torch.zeros(shape) for at, shape in enumerate(shapes)}
            ids = {id(state[f"t{at}"]) for at in own[rank]}
            shares[replica, rank] = share_of(state, Member(replica, rank), num_replicas, num_ranks, ids)
    for at, shape in enumerate(shapes):
        boxes = [box for share in shares.values() for tensor, box in share.boxes if tensor == at]
        assert not subtract([whole(shape)], boxes)
        assert sum(box.volume for box in boxes) == whole(shape).volume
        for (replica, rank), share in shares.items():
            assert replica == 0 or at not in own[rank] or all(tensor != at for tensor, _ in share.boxes)


# --- tensors that an adapter knows -----------------------------------------------------------------------------------


def spmd_shares(
    adapter: SpmdAdapter, num_replicas: int, num_ranks: int, state_of: Callable[[int], dict[str, Any]]
) -> dict[Member, PartShare]:
    """What each member writes of a state that all replicas hold alike."""
    with registered(adapter):
        return {
            Member(replica, rank): share_of(state_of(rank), Member(replica, rank), num_replicas, num_ranks)
            for replica in range(num_replicas)
            for rank in range(num_ranks)
        }


@pytest.mark.parametrize("adapter", [SpmdAdapter(), SilentAdapter()], ids=["said", "not said"])
@pytest.mark.parametrize("seed", range(25))
def test_every_element_is_written_once_by_one_who_holds_it_and_where_nobody_says_once_by_each_rank(
    adapter: SpmdAdapter, seed: int
) -> None:
    """The oracle counts element by element."""
    dice = random.Random(seed)
    num_replicas, num_ranks = dice.randint(1, 3), dice.randint(1, 3)
    shapes = [(dice.choice((1, 7, 500)), dice.choice((1, 5, 300))) for _ in range(dice.randint(1, 5))]
    layouts = [random_spmd_layout(dice, 2, num_ranks) for _ in shapes]
    held = np.zeros((num_ranks, len(shapes), 500, 300), dtype=np.int32)

    def state_of(rank: int) -> dict[str, Any]:
        tensors = zip(shapes, layouts, strict=True)
        return {
            "plain": torch.zeros(300, 300),
            "spmd": [SpmdTensor(shape, torch.float32, layout.of_rank(rank)) for shape, layout in tensors],
        }

    for rank in range(num_ranks):
        for number, (shape, layout) in enumerate(zip(shapes, layouts, strict=True)):
            for box in layout.boxes_of(layout.places[rank] if layout.places else (), shape):
                held[rank, number][at(box)] = 1
    written = np.zeros_like(held)
    plain = np.zeros((300, 300), dtype=np.int32)
    for member, share in spmd_shares(adapter, num_replicas, num_ranks, state_of).items():
        for number, box in share.boxes:
            if number == 0:
                plain[at(box)] += 1
            else:
                written[member.rank, number - 1][at(box)] += 1
    assert (plain == 1).all(), seed
    if type(adapter) is SilentAdapter:
        assert (written == held).all(), seed
    else:
        assert (written.sum(axis=0) == held.any(axis=0)).all(), seed
        assert (written <= held).all(), seed


def at(box: Box) -> tuple[slice, ...]:
    return tuple(slice(low, low + size) for low, size in zip(box.offsets, box.sizes, strict=True))


@pytest.mark.parametrize("rows", [60, 2048], ids=["too small to be cut", "cut"])
@pytest.mark.parametrize(("adapter", "copies"), [(SpmdAdapter(), 1), (SilentAdapter(), 2)], ids=["said", "not said"])
def test_replicas_and_holders_write_about_as_much_as_each_other(adapter: SpmdAdapter, copies: int, rows: int) -> None:
    """Four devices in two ranks that both hold all: two tiles of rows, of which each has a replica in each rank."""
    layout = Layout((2, 1), 2, places=((0, 2), (1, 3)))

    def state_of(rank: int) -> dict[str, Any]:
        return {"spmd": [SpmdTensor((rows, 256), torch.float32, layout.of_rank(rank)) for _ in range(80)]}

    shares = spmd_shares(adapter, 3, 2, state_of)
    loads = [sum(box.volume * 4 for _, box in share.boxes) for share in shares.values()]
    assert sum(loads) == copies * 80 * rows * 256 * 4
    assert max(loads) <= 1.1 * sum(loads) / len(loads), loads


def test_what_one_rank_alone_knows_of_fills_up_what_the_first_group_writes_of_its_own() -> None:
    """Three MiB of the first group's own, on both its ranks; four of each rank that nobody else knows of."""
    layout = Layout((2, 1), places=((0,), (1,)))
    shares = {}
    with registered(SilentAdapter()):
        for replica in range(2):
            for rank in range(2):
                state: dict[str, Any] = {"statistics": torch.zeros(6 * 256, 1024)}
                state["spmd"] = [SpmdTensor((512, 1024), torch.float32, layout.of_rank(rank)) for _ in range(8)]
                member, own = Member(replica, rank), {id(state["statistics"])}
                shares[member] = share_of(state, member, 2, 2, own)
    loads = [sum(box.volume * 4 for _, box in share.boxes) for share in shares.values()]
    assert sum(loads) == (6 + 8 * 2) * 2**20
    assert max(loads) <= 1.1 * sum(loads) / len(loads), loads
