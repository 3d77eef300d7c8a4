"""This file decides which of the ranks that hold the same bytes writes them, or reads them for the others. Nobody is asked.

Every member of a job gets the same answer from the same list: what there is, and who holds what. Items that the same members
hold are laid end to end and cut, so that those with less to do so far get more; what only one member holds comes first, and
what all hold last, so it fills what is uneven. Members that are not told of each other's items (stages of a pipeline under
names of their own) may leave a hole or write something twice; a hole shows in the manifests, and the checkpoint does not count
then.

The question is torchtitan's issue 709, and that of orbax's `replica_id`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

from torchft_ckpt.core.boxes.geometry import Box

MIN_CUT_BYTES = 64 * 1024
"""What is smaller is not cut: each piece costs a kilobyte beside its data."""
MAX_PIECE_BYTES = 16 * 1024 * 1024
_MIN_COLUMN_BYTES = 256 * 1024
_COLUMN_PIECES = 8
_ROWS_PER_HOLDER = 16


class Item(NamedTuple):
    """A box that several members hold alike."""

    name: str
    box: Box
    itemsize: int
    """Bytes of an element."""
    shape: tuple[int, ...]
    """Of the whole tensor."""
    holders: tuple[int, ...]
    """Members, ascending."""
    is_whole: bool = False
    """It must not be cut."""

    @property
    def num_bytes(self) -> int:
        return self.box.volume * self.itemsize


class Share(NamedTuple):
    """A box that one member writes."""

    item: int
    """Place of the item in the list."""
    box: Box


Holders = tuple[int, ...]


def assign_writes(items: Sequence[Item], num_members: int, loads: Sequence[int] | None = None) -> list[list[Share]]:
    """Return the shares of each member: every element of every item exactly once, with one of its holders.

    Loads differ by about `MIN_CUT_BYTES`, or one row of a tensor, for each set of members, as far as holders allow it.

    Args:
        items: in an order that all members agree on; what is empty is nobody's.
        num_members: members are numbered from 0.
        loads: bytes that each member writes already; default: nothing.

    Raises:
        ValueError: an item has a holder that is no member, or none.
    """
    classes: dict[Holders, list[int]] = {}
    for index, item in enumerate(items):
        if not item.holders or not all(0 <= holder < num_members for holder in item.holders):
            raise ValueError(f"{item.name} is held by {item.holders} of {num_members} members")
        classes.setdefault(item.holders, []).append(index)
    totals = {holders: sum(items[index].num_bytes for index in indexes) for holders, indexes in classes.items()}
    quotas = balance_quotas(totals, num_members, loads)
    shares: list[list[Share]] = [[] for _ in range(num_members)]
    for holders in sorted(classes):
        indexes = classes[holders]
        for place, of_place in enumerate(cut_by_quotas([items[index] for index in indexes], quotas[holders])):
            shares[holders[place]] += [Share(indexes[share.item], share.box) for share in of_place]
    return shares


def balance_quotas(
    totals: Mapping[Holders, int], num_members: int, loads: Sequence[int] | None = None
) -> dict[Holders, list[int]]:
    """Return how much each holder takes of what is held by the same members, so that all have about the same to do.

    Args:
        totals: bytes, by who holds them.
        num_members: members are numbered from 0.
        loads: bytes that each member writes already; default: nothing.
    """
    filled = [0] * num_members if loads is None else [*loads]
    quotas: dict[Holders, list[int]] = {}
    for holders in sorted(totals, key=lambda holders: (len(holders), holders)):
        quotas[holders] = _level(totals[holders], [filled[holder] for holder in holders])
        for holder, quota in zip(holders, quotas[holders], strict=True):
            filled[holder] += quota
    return quotas


def cut_by_quotas(items: Sequence[Item], quotas: Sequence[int]) -> list[list[Share]]:
    """Return what each of the holders takes of items that the same members hold.

    Args:
        items: in an order that they agree on.
        quotas: bytes for each holder, in their order; together as many as there are.
    """
    shares: list[list[Share]] = [[] for _ in quotas]
    for place, share in _cut(items, quotas):
        shares[place].append(share)
    return shares


def split_for_files(box: Box, shape: Sequence[int], itemsize: int) -> list[Box]:
    """Cut a share into pieces that are written, and can be read, one by one.

    Rows need no small pieces, because they can be read in part. A box that is cut in another dimension than its first is cut
    there further, because who reads it on another mesh most likely wants a part of that dimension.
    """
    dim = _cut_dim(box, shape, 1)
    limit = MAX_PIECE_BYTES
    if any(size > 1 for size in box.sizes[:dim]):
        limit = min(limit, max(_MIN_COLUMN_BYTES, -(-box.volume * itemsize // _COLUMN_PIECES)))
    num_bytes = box.volume * itemsize
    if num_bytes <= limit or not box.sizes:
        return [box]
    rows = box.sizes[dim]
    num_pieces = min(-(-num_bytes // limit), rows)
    cuts = [rows * number // num_pieces for number in range(num_pieces + 1)]
    pieces = [_rows(box, dim, low, high) for low, high in pairwise(cuts)]
    if num_pieces < rows or all(size == 1 for size in _rows(box, dim, 0, 1).sizes):
        return pieces
    return [smaller for piece in pieces for smaller in split_for_files(piece, shape, itemsize)]


def _cut(items: Sequence[Item], quotas: Sequence[int]) -> list[tuple[int, Share]]:
    """Lay items end to end and cut them by quotas: (place among the holders, share)."""
    place, left, last = 0, quotas[0], len(quotas) - 1
    dealt: list[tuple[int, Share]] = []
    for index, item in enumerate(items):
        if not item.num_bytes:
            continue
        if item.is_whole or not item.box.sizes or item.num_bytes < 2 * MIN_CUT_BYTES:
            dim, rows = 0, 1
        else:
            is_fine = item.box.sizes == item.shape and item.num_bytes // item.shape[0] <= MIN_CUT_BYTES
            dim = (
                0 if is_fine else _cut_dim(item.box, item.shape, len(quotas))
            )  # rows lie in memory one after the other
            rows = item.box.sizes[dim]
        row_bytes = item.num_bytes // rows
        least = min(-(-MIN_CUT_BYTES // row_bytes), rows)
        at = 0
        while at < rows:
            while place < last and 2 * left < least * row_bytes:
                place += 1
                left += quotas[place]
            taken = max((2 * left + row_bytes) // (2 * row_bytes), least)
            if place == last or rows - at - taken < least:
                taken = rows - at
            dealt.append((place, Share(index, item.box if taken == rows else _rows(item.box, dim, at, at + taken))))
            left -= taken * row_bytes
            at += taken
    return dealt


def _level(total: int, loads: Sequence[int]) -> list[int]:
    """Divide a number of bytes so that loads, with it, are as even as can be. The parts add up to it."""
    order = sorted(range(len(loads)), key=lambda place: (loads[place], place))
    below = 0
    num_filled = len(order)
    for number, place in enumerate(order):
        if number and loads[place] * number - below >= total:
            num_filled = number
            break
        below += loads[place]
    level, more = divmod(total + sum(loads[place] for place in order[:num_filled]), num_filled)
    parts = [0] * len(loads)
    for number, place in enumerate(order[:num_filled]):
        parts[place] = level + (number < more) - loads[place]
    return parts


def _cut_dim(box: Box, shape: Sequence[int], num_parts: int) -> int:
    """Return the dimension to cut: the one that is sharded already, else the first that is long enough, else the longest."""
    sizes = box.sizes
    if not sizes:
        return 0
    enough = min(_ROWS_PER_HOLDER * num_parts, max(sizes))
    sharded = [dim for dim, size in enumerate(sizes) if size < shape[dim] and size >= enough]
    long = [dim for dim, size in enumerate(sizes) if size >= enough]
    return (sharded or long)[0]


def _rows(box: Box, dim: int, low: int, high: int) -> Box:
    return Box(
        (*box.offsets[:dim], box.offsets[dim] + low, *box.offsets[dim + 1 :]),
        (*box.sizes[:dim], high - low, *box.sizes[dim + 1 :]),
    )
