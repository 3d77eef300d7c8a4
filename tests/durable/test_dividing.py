"""Who writes what of a state: of what each replica group has its own of, and of tensors that an adapter knows."""

from __future__ import annotations

import functools
import operator
import random
from collections.abc import Callable, Collection
from typing import Any

import numpy as np
import pytest
import torch
from support.spmd_double import Layout, SilentAdapter, SpmdAdapter, SpmdTensor, random_spmd_layout, registered

from torchft_ckpt.checkpointing.durable.saving.capture import CapturedState
from torchft_ckpt.checkpointing.durable.saving.dividing import ShareBook, StagedShare, shares_of
from torchft_ckpt.checkpointing.durable.saving.holdings import HoldingsIndex
from torchft_ckpt.checkpointing.durable.saving.part_writer import PartShare
from torchft_ckpt.checkpointing.lock import StateDictLock
from torchft_ckpt.checkpointing.serving.buffers import BufferPool
from torchft_ckpt.core.boxes.geometry import Box, subtract, whole
from torchft_ckpt.core.durable.saving import SavingRank, Writers

NUM_RANKS = 2
BLOCK_BYTES = 64 * 1024


def all_shares(num_replicas: int, of_group: set[str]) -> dict[SavingRank, PartShare]:
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
            shares[SavingRank(replica, rank)] = share_of(state, SavingRank(replica, rank), num_replicas, NUM_RANKS, own)
    return shares


def share_of(
    state: dict[str, Any], member: SavingRank, num_replicas: int, num_ranks: int, of_group: Collection[int] = ()
) -> PartShare:
    """What a member writes of its state."""
    captured = capture(state, member.rank, num_ranks, of_group)
    try:
        return shares_of(captured, Writers(num_replicas, num_ranks), [member], range(num_replicas))[0]
    finally:
        captured.close()


def capture(state: dict[str, Any], rank: int, num_ranks: int, of_group: Collection[int] = ()) -> CapturedState:
    """The state of a rank as a save has it."""
    return CapturedState(
        state,
        step=1,
        own={},
        lock=StateDictLock(),
        pool=BufferPool(BLOCK_BYTES),
        index=HoldingsIndex(rank, num_ranks),
        group_local_ids=of_group,
    )


@pytest.mark.parametrize("num_replicas", [1, 2, 3])
@pytest.mark.parametrize("of_group", [set(), {"statistics", "count"}, {"weight", "statistics", "count"}])
def test_what_each_group_has_its_own_of_comes_from_the_first_and_all_is_written_once(
    num_replicas: int, of_group: set[str]
) -> None:
    """But for what is small: each rank of the first group has its own of it."""
    shapes = {"weight": (3000, 128), "statistics": (512, 128), "count": (), "array": (512, 128)}
    shares = all_shares(num_replicas, of_group)
    for place, (name, shape) in enumerate(shapes.items()):
        boxes = [box for share in shares.values() for tensor, box in share.boxes if tensor == place]
        assert not subtract([whole(shape)], boxes)
        copies = NUM_RANKS if name == "count" and name in of_group else 1
        assert sum(box.volume for box in boxes) == copies * whole(shape).volume
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
            shares[replica, rank] = share_of(state, SavingRank(replica, rank), num_replicas, num_ranks, ids)
    for at, shape in enumerate(shapes):
        boxes = [box for share in shares.values() for tensor, box in share.boxes if tensor == at]
        assert not subtract([whole(shape)], boxes)
        is_each_ranks = num_ranks > 1 and 4 * shape[0] * shape[1] < 128 * 1024
        owners = [rank for rank in range(num_ranks) if at in own[rank]] if is_each_ranks else []
        for rank in owners:
            assert [box for tensor, box in shares[0, rank].boxes if tensor == at] == [whole(shape)]
        others = [
            box
            for (_, rank), share in shares.items()
            if rank not in owners
            for tensor, box in share.boxes
            if tensor == at
        ]
        missing = sum(box.volume for box in subtract([whole(shape)], others))
        assert sum(box.volume for box in others) == whole(shape).volume - missing, "no element twice"
        assert not missing or owners
        for (replica, rank), share in shares.items():
            assert replica == 0 or at not in own[rank] or all(tensor != at for tensor, _ in share.boxes)


# --- tensors that an adapter knows -----------------------------------------------------------------------------------


def spmd_shares(
    adapter: SpmdAdapter, num_replicas: int, num_ranks: int, state_of: Callable[[int], dict[str, Any]]
) -> dict[SavingRank, PartShare]:
    """What each member writes of a state that all replicas hold alike."""
    with registered(adapter):
        return {
            SavingRank(replica, rank): share_of(state_of(rank), SavingRank(replica, rank), num_replicas, num_ranks)
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
                member, own = SavingRank(replica, rank), {id(state["statistics"])}
                shares[member] = share_of(state, member, 2, 2, own)
    loads = [sum(box.volume * 4 for _, box in share.boxes) for share in shares.values()]
    assert sum(loads) == (6 + 8 * 2) * 2**20
    assert max(loads) <= 1.1 * sum(loads) / len(loads), loads


# --- what is staged --------------------------------------------------------------------------------------------------


def staged_by(
    book: ShareBook, num_replicas: int, member: SavingRank, redundancy: int, state: dict[str, Any] | None = None
) -> list[StagedShare]:
    """What a rank of groups of two ranks stages; its state has the layout of every other by default."""
    captured = capture(large_state() if state is None else state, member.rank, NUM_RANKS)
    try:
        writers = Writers(num_replicas, NUM_RANKS, redundancy=redundancy)
        return book.staged_by(captured, writers, member, range(num_replicas))
    finally:
        captured.close()


def large_state() -> dict[str, Any]:
    """Small tensors lie between the large ones."""
    layers = (
        {f"w{number}": torch.zeros(700 + 100 * number, 257), f"step{number}": torch.zeros(3)} for number in range(20)
    )
    return {name: tensor for layer in layers for name, tensor in layer.items()}


@pytest.mark.parametrize("redundancy", [1, 2, 3])
@pytest.mark.parametrize("num_replicas", [1, 2, 3, 8])
def test_a_rank_works_out_the_shares_that_it_backs_up_as_their_owners_do(num_replicas: int, redundancy: int) -> None:
    writers = Writers(num_replicas, NUM_RANKS, redundancy=redundancy)
    members = [SavingRank(replica, rank) for replica in range(num_replicas) for rank in range(NUM_RANKS)]
    staged = {member: staged_by(ShareBook(), num_replicas, member, redundancy) for member in members}
    for member in members:
        assert len(staged[member]) == min(redundancy, num_replicas)
        for number, share in enumerate(staged[member]):
            assert share.share == staged[writers.share_of(member, number)][0].share


@pytest.mark.parametrize("num_replicas", [2, 8])
@pytest.mark.parametrize("redundancy", [1, 2])
def test_hardly_more_is_staged_than_the_shares(num_replicas: int, redundancy: int) -> None:
    """But for the ends of the blocks in which they begin and end."""
    staged = staged_by(ShareBook(), num_replicas, SavingRank(1, 1), redundancy)
    blocks = 0
    for share in staged:
        assert share.num_bytes == sum(box.volume * 4 for _, box in share.share.boxes)
        blocks |= share.blocks
    num_bytes = sum(share.num_bytes for share in staged)
    held = sum(tensor.nbytes for tensor in large_state().values())
    assert abs(num_bytes - redundancy * held / num_replicas / NUM_RANKS) < 0.05 * num_bytes
    assert num_bytes <= blocks.bit_count() * BLOCK_BYTES <= num_bytes + 2 * redundancy * BLOCK_BYTES


def test_columns_of_a_sharded_tensor_are_divided_among_replicas_in_rows() -> None:
    """What a share has of a tensor is one run of memory, so that no more is staged."""
    layout = Layout((1, 2), places=((0,), (1,)))
    with registered(SpmdAdapter()):
        state = {"w": SpmdTensor((4096, 512), torch.float32, layout.of_rank(1))}
        staged = staged_by(ShareBook(), 4, SavingRank(2, 1), 2, state)
    assert [share.num_bytes for share in staged] == [1024 * 256 * 4] * 2
    assert all(share.blocks.bit_count() <= 16 + 1 for share in staged)


def test_shares_are_worked_out_once_for_a_layout_and_a_number_of_groups() -> None:
    book, member = ShareBook(), SavingRank(0, 0)
    two = staged_by(book, 2, member, 2)
    three = staged_by(book, 3, member, 2)
    assert staged_by(book, 2, member, 2) is two
    assert staged_by(book, 3, member, 2) is three
    other = {**large_state(), "more": torch.zeros(3)}
    assert staged_by(book, 2, member, 2, other) is not two
    assert staged_by(book, 2, member, 2, other) == staged_by(ShareBook(), 2, member, 2, other)
    assert staged_by(book, 2, member, 2) == two


def test_small_tensors_that_all_ranks_hold_are_staged_with_what_lies_beside_them() -> None:
    """Else each of a rank's share would cost a block."""
    layout = Layout((2, 1), places=((0,), (1,)))
    with registered(SpmdAdapter()):
        state: dict[str, Any] = {}
        for number in range(60):
            state[f"w{number}"] = SpmdTensor((512, 128), torch.float32, layout.of_rank(0))
            state[f"step{number}"] = torch.zeros(5)
        for share in staged_by(ShareBook(), 3, SavingRank(1, 0), 2, state):
            assert share.blocks.bit_count() * BLOCK_BYTES <= share.num_bytes + 2 * BLOCK_BYTES


@pytest.mark.parametrize(("num_replicas", "redundancy"), [(3, 1), (3, 2), (8, 2)])
def test_a_share_is_read_whole_after_the_trainer_has_stepped(num_replicas: int, redundancy: int) -> None:
    """Few and long rows are divided in columns: from one to the next lie blocks in which nothing of the share lies."""
    for replica in range(num_replicas):
        state = {"experts": torch.arange(8 * 96 * 768.0).view(8, 96, 768), "bias": torch.arange(768.0)}
        before = {name: tensor.clone() for name, tensor in state.items()}
        captured = capture(state, 0, 1)
        writers = Writers(num_replicas, 1, redundancy=redundancy)
        staged = ShareBook().staged_by(captured, writers, SavingRank(replica, 0), range(num_replicas))
        captured.stage(functools.reduce(operator.or_, (share.blocks for share in staged)))
        captured.detach()
        for tensor in state.values():
            tensor.zero_()
        for share in staged:
            for index, box in share.share.boxes:
                name = captured.manifest.tensors[index].fqn
                read = torch.empty(box.sizes)
                captured.read(index, box, memoryview(read.numpy()).cast("B"))
                assert torch.equal(read, before[name][at(box)])
        captured.close()
