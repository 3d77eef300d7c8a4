"""Says what each rank writes of a state: asks `core/durable/assignment.py` about a state that is being saved.

In two steps. The ranks of a group divide each tensor by what all of them know of it. Then the replicas of one rank divide that
rank's part; they run the same script, so what one of them knows of a tensor they all know. So a rank can work out not only its
own share, but also those of the same rank of other groups, which it backs up.

A group of a thousand ranks holds millions of boxes, but a model has few layouts. So what others hold is only counted, by
layout, and nothing but what this rank holds is looked at one by one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from torchft_ckpt.checkpointing.durable.saving.capture import CapturedState
from torchft_ckpt.checkpointing.durable.saving.holdings import OwnedBox, TensorHoldings
from torchft_ckpt.checkpointing.durable.saving.part_writer import PartShare
from torchft_ckpt.core.boxes.geometry import Box
from torchft_ckpt.core.durable.assignment import Holders, Item, assign_writes, balance_quotas, cut_by_quotas
from torchft_ckpt.core.durable.saving import SavingRank, Writers

_VALUE_BYTES = 1024
"""The length that the record of a plain value counts as."""
_MAX_KEPT = 8
"""Numbers of groups whose shares are kept: a job loses groups, and gets them back."""


class StagedShare(NamedTuple):
    """A share that a rank stages, and where it lies."""

    share: PartShare
    num_bytes: int
    """Of tensors."""
    blocks: int
    """Of the captured state, a bit for each, that the share has bytes in."""


class ShareBook:
    """The shares that one rank stages, worked out once for a layout and a number of groups. For one thread at a time."""

    def __init__(self) -> None:
        self._outline: object = None
        self._known: dict[object, list[StagedShare]] = {}

    def staged_by(
        self, state: CapturedState, writers: Writers, member: SavingRank, replicas: Sequence[int]
    ) -> list[StagedShare]:
        """Return what a rank stages: its own share, then the one of which it is the first backup, and so on."""
        if not self._has_outline(state.outline):
            self._outline, self._known = state.outline, {}
        key = writers._replace(replica_id=""), member, tuple(replicas)
        if key not in self._known:
            if len(self._known) >= _MAX_KEPT:
                del self._known[next(iter(self._known))]
            numbers = range(writers.num_holders)
            shares = shares_of(state, writers, [writers.share_of(member, number) for number in numbers], replicas)
            self._known[key] = [StagedShare(share, *state.extent_of(share.boxes)) for share in shares]
        return self._known[key]

    def _has_outline(self, outline: object) -> bool:
        try:
            return bool(outline == self._outline)
        except (ValueError, TypeError):  # an adapter has named holders in arrays, say
            return False


def shares_of(
    state: CapturedState, writers: Writers, members: Sequence[SavingRank], replicas: Sequence[int]
) -> list[PartShare]:
    """Return the shares of members that have one rank in their groups.

    Args:
        replicas: the replica groups that divide the work; others have nothing to write.
    """
    # In the order of memory, whoever holds them: a share is one run of blocks, and not also a small tensor here and there.
    pieces = sorted(
        _part_of_rank(state, writers.num_ranks, members[0].rank), key=lambda piece: (piece[0], piece[1].box)
    )
    num_tensors = len(state.holdings)
    # What each group has its own of comes from the first, and not in part from each.
    is_same_in_groups = [*(tensor.is_same_in_groups for tensor in state.holdings), *(True for _ in state.values)]
    first_groups = [(number, item) for number, item in pieces if not is_same_in_groups[number]]
    everywhere = [(number, item) for number, item in pieces if is_same_in_groups[number]]
    loads = [0] * len(replicas)
    loads[0] = sum(item.num_bytes for _, item in first_groups)
    all_replicas = tuple(range(len(replicas)))
    items = [item._replace(holders=all_replicas, shape=item.box.sizes) for _, item in everywhere]
    dealt = assign_writes(items, len(replicas), loads)
    shares: list[PartShare] = []
    for member in members:
        if member.replica not in replicas:
            shares.append(PartShare([], []))
            continue
        place = replicas.index(member.replica)
        of_member = [(everywhere[share.item][0], share.box) for share in dealt[place]]
        if place == 0:
            of_member += [(number, item.box) for number, item in first_groups]
        boxes = sorted(piece for piece in of_member if piece[0] < num_tensors)
        values = [number - num_tensors for number, _ in of_member if number >= num_tensors]
        shares.append(PartShare(boxes, values if state.is_replicated else range(len(state.values))))
    return shares


def _part_of_rank(state: CapturedState, num_ranks: int, rank: int) -> list[tuple[int, Item]]:
    """Return what one rank of a group, and its replicas, have to write; values are numbered after tensors.

    Values that only this rank may have are not among them: who has them writes them all.
    """
    everybody = tuple(range(num_ranks))
    totals = _totals(state.holdings)
    values = state.values if state.is_replicated else []
    if values:
        totals[everybody] += _VALUE_BYTES * len(values)
    quotas = balance_quotas(totals, num_ranks)
    classes: dict[Holders, list[tuple[int, Item]]] = {}
    pieces: list[tuple[int, Item]] = []
    # They count where ranks divide what they hold, all the same: ranks need not agree on who owns what.
    own = {number for number, tensor in enumerate(state.holdings) if tensor.is_ranks_own and tensor.held}
    for number in sorted(own):
        tensor, box = state.holdings[number], state.holdings[number].held[0].box
        pieces.append((number, Item(tensor.fqn, box, tensor.itemsize, box.sizes, (rank,))))
    for number, tensor in enumerate(state.holdings):
        for held in tensor.local:
            # Cut as if the box were all of the tensor, so in rows: what a share has of it is one run of memory to stage.
            item = Item(tensor.fqn, held.box, tensor.itemsize, held.box.sizes, held.ranks)
            # Where nobody of this group knows of it but this rank, it is this rank's.
            (classes.setdefault(held.ranks, []) if tensor.is_derivable else pieces).append((number, item))
    for number, value in enumerate(values, len(state.holdings)):
        item = Item(value.fqn, Box((0,), (_VALUE_BYTES,)), 1, (_VALUE_BYTES,), everybody, is_whole=True)
        classes.setdefault(everybody, []).append((number, item))
    for ranks, items in classes.items():
        for share in cut_by_quotas([item for _, item in items], quotas[ranks])[ranks.index(rank)]:
            number, item = items[share.item]
            if number not in own:
                pieces.append((number, item._replace(box=share.box)))
    return pieces


def _totals(holdings: Sequence[TensorHoldings]) -> Counter[Holders]:
    """Return how many bytes are held by which ranks, as far as all of them know it."""
    layouts: dict[int, Sequence[OwnedBox]] = {}
    bytes_of: Counter[int] = Counter()
    for tensor in holdings:
        if tensor.is_derivable:
            layouts[id(tensor.held)] = tensor.held
            bytes_of[id(tensor.held)] += tensor.itemsize
    totals: Counter[Holders] = Counter()
    for layout, itemsizes in bytes_of.items():
        for held in layouts[layout]:
            totals[held.ranks] += held.box.volume * itemsizes
    return totals
