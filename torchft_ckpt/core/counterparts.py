"""This file decides which ranks of the source groups one rank turns to first when it heals.

A group with as many ranks as this one most likely has the same layout: then each rank has everything from the rank of its own
number, and nobody else is asked. Only a group of another size, or a counterpart that turns out to hold other parts of the
tensors, makes a rank turn to all ranks of the sources.
"""

from __future__ import annotations

from collections.abc import Sequence


def counterparts(groups: Sequence[Sequence[str]], rank: int, world_size: int) -> list[str]:
    """Return the addresses of this rank's counterparts, the primary's first; none where the primary group is of another size.

    Args:
        groups: for each source group, the primary first, the addresses of its ranks; an empty one is not known.
        rank: this rank, in its group.
        world_size: how many ranks its group has.
    """
    able = [group for group in groups if any(group)]
    if not able or len(able[0]) != world_size:
        return []
    return [group[rank] for group in able if len(group) == world_size and group[rank]]
