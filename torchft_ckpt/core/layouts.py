"""This file decides which groups can be in one quorum, as far as the layout of their tensors goes.

Gradients are averaged rank by rank: rank r of each group with rank r of the others, element by element of what they hold. So
groups that train together have the same number of ranks, and each rank the same boxes of the tensors as its counterparts: one
*layout*. A collective between others would end in an error at best; Gloo ends the whole process.

A group of another layout can have the state of those that train, and can take over when they are gone. Until then it waits.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence


def trains_in(
    layouts: Mapping[str, str], *, last_quorum: Collection[str], holders: Collection[str], candidates: Sequence[str]
) -> str:
    """Return the layout of the next quorum.

    It is that of the members of the last quorum who live, as those who ask for the next one say; else of who holds the newest
    state; else the one that most have.

    Args:
        layouts: of living groups, by replica id, as of their last request; empty: not known yet.
        last_quorum: members of the last quorum.
        holders: who holds the newest state.
        candidates: who asks for a quorum.
    """
    back = [replica_id for replica_id in last_quorum if replica_id in set(candidates)]
    for those in (back, last_quorum, holders):
        known = sorted(replica_id for replica_id in those if layouts.get(replica_id))
        if known:
            return layouts[known[0]]
    counts = Counter(layouts[replica_id] for replica_id in sorted(candidates) if layouts.get(replica_id))
    return counts.most_common(1)[0][0] if counts else ""


def of_another_layout(layouts: Mapping[str, str], layout: str, *, at_work: Collection[str] = ()) -> set[str]:
    """Return the living groups that cannot be in a quorum of this layout; one whose layout is not known can.

    Those at work, of the last quorum, are waited for: what they have now they say when they ask again.
    """
    return {
        replica_id
        for replica_id, own in layouts.items()
        if layout and own and own != layout and replica_id not in at_work
    }


def combine_layouts(of_ranks: Sequence[str]) -> str:
    """Return the layout of a group as one word, from what each of its ranks says of the boxes that it holds."""
    digest = 0
    for number, layout in enumerate(of_ranks):
        for character in f"{number}:{layout};":
            digest = (digest * 1_000_003 ^ ord(character)) & 0xFFFFFFFFFFFF
    return f"{len(of_ranks)} ranks, {digest:012x}"
