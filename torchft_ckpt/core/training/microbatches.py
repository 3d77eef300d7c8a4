"""This file decides who computes which microbatches of a step, in which order their gradients are summed, and what each sees.

The microbatches of a step are numbered 0 to M-1, and are the leaves of a binary tree: the left half of a node has the largest
power of two of them that leaves something to the right one (RFC 6962). A *node* is a pair `(first, end)`. The sum of a node is
the sum of its left half plus that of its right one, whoever computed them. So a step's sum is always the same expression. A group
that has all microbatches of a node has to show one gradient for them.

Who computes what follows from what each group says that it has computed. A node counts for the first group that has it. What
nobody has is dealt in nodes as large as fit, so that the most loaded group has as little as possible. In some steps two further
groups compute one microbatch too (`audited`): what they have computed is compared, and not summed.

Samples and random numbers are functions of a seed, the step and the microbatch alone. An epoch is a permutation that is worked
out at one place, so it needs no table.
"""

from __future__ import annotations

import hashlib
import heapq
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TypeAlias, TypeVar

Node: TypeAlias = tuple[int, int]
"""The microbatches from the first number to the second, without that."""
V = TypeVar("V")

_ROUNDS = 6
_WORD = (1 << 64) - 1


def split(node: Node) -> tuple[Node, Node]:
    """Return the halves of a node of more than one microbatch."""
    first, end = node
    middle = first + (1 << ((end - first - 1).bit_length() - 1))
    return (first, middle), (middle, end)


def family(node: Node, num_microbatches: int) -> tuple[Node, Node] | None:
    """Return a node's parent and its sibling; None: it is the root, or no node of the tree."""
    parent = (0, num_microbatches)
    while parent[0] <= node[0] < node[1] <= parent[1] and parent[1] - parent[0] > 1:
        left, right = split(parent)
        if node in (left, right):
            return parent, right if node == left else left
        parent = left if node[1] <= left[1] else right
    return None


def is_node(node: Node, num_microbatches: int) -> bool:
    return node == (0, num_microbatches) or family(node, num_microbatches) is not None


def cover(microbatches: Collection[int], num_microbatches: int) -> list[Node]:
    """Return the largest nodes that consist of these microbatches alone, from left to right."""
    ordered, found = sorted(microbatches), list[Node]()

    def visit(node: Node) -> None:
        first, end = node
        num_here = bisect_left(ordered, end) - bisect_left(ordered, first)
        if num_here == end - first:
            found.append(node)
        elif num_here:
            for half in split(node):
                visit(half)

    visit((0, num_microbatches))
    return found


def members(nodes: Iterable[Node]) -> list[int]:
    """Return the microbatches of nodes."""
    return [one for first, end in nodes for one in range(first, end)]


def fold(nodes: Mapping[Node, V], num_microbatches: int, add: Callable[[V, V], V]) -> V:
    """Return the value of the root from those of nodes that cover it. `add` gets the left half's and the right half's."""

    def value(node: Node) -> V:
        if node in nodes:
            return nodes[node]
        left, right = split(node)
        return add(value(left), value(right))

    return value((0, num_microbatches))


def accept(claims: Sequence[Iterable[Node]], num_microbatches: int) -> list[list[Node]]:
    """Return which nodes count, of those that each group says it has computed.

    One that overlaps another that counts does not, nor one that is no node of the tree.
    """
    taken: set[int] = set()
    accepted: list[list[Node]] = []
    for nodes in claims:
        accepted.append([])
        for node in sorted(nodes):
            if is_node(node, num_microbatches) and taken.isdisjoint(range(*node)):
                taken.update(range(*node))
                accepted[-1].append(node)
    return accepted


def deal(num_microbatches: int, has: Sequence[Sequence[Node] | None]) -> list[list[int]]:
    """Return the microbatches that each group has or computes, in ascending order; together all of them, each once.

    Args:
        has: the nodes that count of each group (`accept`); None: it takes none. One at least takes some.
    """
    own = [members(nodes or ()) for nodes in has]
    free = set(range(num_microbatches)).difference(*own)
    room = _room([len(one) if nodes is not None else None for one, nodes in zip(own, has, strict=True)], len(free))
    spaces = [(-space, group) for group, space in enumerate(room) if space]
    heapq.heapify(spaces)
    left = [(first - end, first, end) for first, end in cover(free, num_microbatches)]
    heapq.heapify(left)
    while left:
        size, first, end = heapq.heappop(left)
        space, group = spaces[0]
        if space <= size:
            own[group] += range(first, end)
            heapq.heapreplace(spaces, (space - size, group)) if space < size else heapq.heappop(spaces)
        else:
            for a, b in split((first, end)):
                heapq.heappush(left, (a - b, a, b))
    return [sorted(one) for one in own]


def _room(loads: Sequence[int | None], num_free: int) -> list[int]:
    """Return how many more each takes, so that the largest load is as small as possible; None takes none."""
    room = [0] * len(loads)
    heap = [(load, group) for group, load in enumerate(loads) if load is not None]
    heapq.heapify(heap)
    for _ in range(num_free):
        load, group = heap[0]
        room[group] += 1
        heapq.heapreplace(heap, (load + 1, group))
    return room


def audited(step: int, every: int, num_microbatches: int) -> int | None:
    """Return which microbatch of a step further groups compute too: one in each so many steps; 0: in none."""
    return random_key(0, step, "audited") % num_microbatches if every and (step + 1) % every == 0 else None


def auditors(step: int, owner: int, able: Collection[int]) -> list[int]:
    """Return which groups compute that microbatch: the one that it was dealt to, then up to two others of those that are able."""
    others = sorted({*able} - {owner})
    at = random_key(0, step, "auditors") % max(1, len(others))
    return [owner, *(others[at:] + others[:at])[:2]]


def slowdown(num_microbatches: int, num_groups: int) -> float:
    """Return how many times as long a step takes if one of the groups is away."""
    return -(-num_microbatches // max(1, num_groups - 1)) / -(-num_microbatches // num_groups)


def random_key(seed: int, step: int, what: int | str) -> int:
    """Return the seed of all random numbers of a part of a step, 63 bits."""
    digest = hashlib.blake2b(f"{seed}/{step}/{what}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def sample_at(position: int, num_samples: int, seed: int) -> int:
    """Return the sample at a position of the endless stream, in which each epoch is another permutation of the samples.

    It is a Feistel network over the next even power of two (Luby and Rackoff, 1988). A value beyond the last sample goes through
    it again.
    """
    epoch, place = divmod(position, num_samples)
    half = max(1, ((num_samples - 1).bit_length() + 1) // 2)
    mask = (1 << half) - 1
    key = random_key(seed, epoch, "epoch")
    while True:
        left, right = place >> half, place & mask
        for turn in range(_ROUNDS):
            mixed = (right + (key >> turn) + turn * 0x9E3779B97F4A7C15) * 0xBF58476D1CE4E5B9 & _WORD
            mixed = (mixed ^ mixed >> 31) * 0x94D049BB133111EB & _WORD
            left, right = right, left ^ (mixed >> 29 & mask)
        place = left << half | right
        if place < num_samples:
            return place
