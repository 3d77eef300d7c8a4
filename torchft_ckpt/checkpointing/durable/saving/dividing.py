"""What this rank writes of a state when nobody is lost: `core/shares.py` asked about a state that is being saved.

A group of a thousand ranks holds millions of boxes, but a model has few layouts. So what others hold is only counted, by layout,
and nothing but what this rank holds is looked at one by one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from torchft_ckpt.checkpointing.durable.saving.capture import CapturedState
from torchft_ckpt.checkpointing.durable.saving.holdings import Held, TensorHoldings
from torchft_ckpt.checkpointing.durable.saving.part_writer import PartShare, Writers
from torchft_ckpt.core.boxes import Box
from torchft_ckpt.core.saving import Member
from torchft_ckpt.core.shares import Holders, Item, cut_by_quotas, deal_shares, level_quotas

_VALUE_BYTES = 1024
"""What the record of a plain value is counted as."""


def own_share(state: CapturedState, writers: Writers, member: Member, replicas: Sequence[int]) -> PartShare:
    """Return this rank's share of a state.

    Args:
        state: as this rank holds it.
        writers: who saves.
        member: this rank.
        replicas: the replica groups that divide the work; this rank's is one of them.
    """

    def members(ranks: Sequence[int], is_alike: bool) -> Holders:
        # What each group has its own of comes from the first, and not in part from each.
        of = replicas if is_alike else replicas[:1]
        return tuple(writers.number_of(replica, rank) for replica in of for rank in ranks)

    me = writers.number_of(*member)
    everybody = members(range(writers.num_ranks), True)
    totals = _totals(state.holdings, members)
    if state.values:
        totals[everybody] += _VALUE_BYTES * len(state.values)
    quotas = level_quotas(totals, writers.num_members)
    classes: dict[Holders, list[tuple[int, Item]]] = {}
    alone: list[tuple[int, Item]] = []
    for number, tensor in enumerate(state.holdings):
        for held in tensor.mine:
            holders = members(held.ranks, tensor.is_alike)
            if me not in holders:
                continue
            item = Item(tensor.fqn, held.box, tensor.itemsize, tensor.shape, holders)
            if tensor.is_known_to_all:
                classes.setdefault(item.holders, []).append((number, item))
            else:  # nobody of this group knows of it but this rank: its replicas share it with it, all of it together
                alone.append((number, item))
    num_tensors = len(state.holdings)
    for number, value in enumerate(state.values):
        item = Item(value.fqn, Box((0,), (_VALUE_BYTES,)), 1, (_VALUE_BYTES,), everybody, is_whole=True)
        classes.setdefault(everybody, []).append((num_tensors + number, item))
    boxes: list[tuple[int, Box]] = []
    values: list[int] = []
    for holders, items in classes.items():
        place = holders.index(me)
        for share in cut_by_quotas([item for _, item in items], quotas[holders])[place]:
            number = items[share.item][0]
            if number < num_tensors:
                boxes.append((number, share.box))
            else:
                values.append(number - num_tensors)
    for share in deal_shares([item for _, item in alone], writers.num_members, _loads(quotas, writers.num_members))[me]:
        boxes.append((alone[share.item][0], share.box))
    return PartShare(sorted(boxes), values)


def _loads(quotas: Mapping[Holders, Sequence[int]], num_members: int) -> list[int]:
    """Return how many bytes each member takes of what all ranks know of."""
    loads = [0] * num_members
    for holders, of_holders in quotas.items():
        for holder, quota in zip(holders, of_holders, strict=True):
            loads[holder] += quota
    return loads


def _totals(holdings: Sequence[TensorHoldings], members: Callable[[Sequence[int], bool], Holders]) -> Counter[Holders]:
    """Return how many bytes are held by whom, as far as all ranks know of them."""
    layouts: dict[int, Sequence[Held]] = {}
    bytes_of: Counter[tuple[int, bool]] = Counter()
    for tensor in holdings:
        if tensor.is_known_to_all:
            layouts[id(tensor.held)] = tensor.held
            bytes_of[id(tensor.held), tensor.is_alike] += tensor.itemsize
    totals: Counter[Holders] = Counter()
    for (layout, is_alike), itemsizes in bytes_of.items():
        for held in layouts[layout]:
            totals[members(held.ranks, is_alike)] += held.box.volume * itemsizes
    return totals
