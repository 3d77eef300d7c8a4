"""This file decides which groups can be in one quorum, as far as the layout of their tensors goes.

Gradients are averaged rank by rank: rank r of each group with rank r of the others, element by element of what they hold. So
groups that train together have the same number of ranks, and each rank the same boxes of the tensors as its counterparts: one
*layout*. A collective between others would end in an error at best; Gloo ends the whole process.

A group of another layout can have the state of those that train, and can take over when they are gone. Until then it waits.

A group may train fewer of the same parameters than the others, or have others of them frozen. One that does, and is behind, may
not know yet at which step it is: a loop that unfreezes layers at a step, or adds them to its optimizer, has to be told the step
first. So it gets the state alone, outside of the quorum (`Role.LEARNER`), and asks again. One that holds the newest state and
still differs waits.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import zip_longest

from torchft_ckpt.core.coordination.lighthouse_records import Member
from torchft_ckpt.core.coordination.messages import StateVersion, clip

SEPARATOR = "; "
"""Between the items of a layout in words."""
_SHORTEST_PAUSE_S = 0.2
_LONGEST_PAUSE_S = 10.0


def trains_in(
    layouts: Mapping[str, str], *, last_quorum: Collection[str], holders: Collection[str], candidates: Sequence[str]
) -> str:
    """Return the layout of the next quorum.

    It is the one that most have of the members of the last quorum who ask for the next one; else of all of them who live; else
    of those who hold the newest state; else of those who ask. Of equally many, the one of the first by name.

    Args:
        layouts: of living groups, by replica id, as of their last request; empty: not known yet.
        last_quorum: members of the last quorum.
        holders: who holds the newest state.
        candidates: who asks for a quorum.
    """
    back = [replica_id for replica_id in last_quorum if replica_id in set(candidates)]
    for those in (back, last_quorum, holders, candidates):
        counts = Counter(layouts[replica_id] for replica_id in sorted(those) if layouts.get(replica_id))
        if counts:
            return counts.most_common(1)[0][0]
    return ""


def of_another_layout(layouts: Mapping[str, str], layout: str, *, at_work: Collection[str] = ()) -> set[str]:
    """Return the living groups that cannot be in a quorum of this layout; one whose layout is not known can.

    Those at work, of the last quorum, are waited for: what they have now they say when they ask again.
    """
    return {
        replica_id
        for replica_id, own in layouts.items()
        if layout and own and own != layout and replica_id not in at_work
    }


def groups_apart(
    members: Mapping[str, Member],
    *,
    last_quorum: Collection[str],
    candidates: Collection[str],
    is_valid: Callable[[StateVersion], bool],
) -> dict[str, str]:
    """Return the groups that cannot train with the others, each with the reason for the operator.

    Either they have other parameters than the next quorum, or others of the same parameters are frozen.

    Args:
        members: by replica id, those that are connected.
        last_quorum: members of the last quorum.
        candidates: members that ask for a quorum.
        is_valid: whether a state has a name that counts.
    """

    def apart(values: dict[str, str]) -> dict[str, str]:
        """Return the groups with another value than the next quorum, each with a group that has that one."""
        if len(set(values.values()) - {""}) < 2:
            return {}
        valid = [members[replica_id] for replica_id in values if is_valid(members[replica_id].version)]
        newest = max((member.version for member in valid), default=None)
        right = trains_in(
            values,
            last_quorum=[replica_id for replica_id in last_quorum if replica_id in values],
            holders=[member.replica_id for member in valid if member.version == newest],
            candidates=[replica_id for replica_id in candidates if replica_id in values],
        )
        at_work = set(last_quorum).difference(candidates)
        like = next((replica_id for replica_id, own in values.items() if own == right), "")
        return dict.fromkeys(sorted(of_another_layout(values, right, at_work=at_work)), like)

    found = {
        replica_id: _why_apart(members[replica_id].layout_text, replica_id, members[like].layout_text, like)
        for replica_id, like in apart(
            alike_as_far_as_known({m: member.layout for m, member in members.items()})
        ).items()
    }
    # What a loop has frozen as its iteration ends may be what it thaws for its next step: it says that when it asks for the step.
    alike = {
        replica_id: "" if member.request is not None and member.asked.at_end else member.frozen
        for replica_id, member in members.items()
        if replica_id not in found
    }
    for replica_id, like in apart(alike).items():
        found[replica_id] = _why_apart(members[replica_id].frozen, replica_id, members[like].frozen, like)
    return found


def _why_apart(own: str, replica_id: str, theirs: str, like: str) -> str:
    return (
        f"{replica_id} cannot train with {like}: {clip(what_differs(own, theirs))}. It waits until its parameters are the same,"
        " in the same order, or until those groups are gone"
    )


def alike_as_far_as_known(layouts: Mapping[str, str]) -> dict[str, str]:
    """Return layouts as they are to be compared: without the places of parameters in the state, where one of them has none.

    A layout is a digest, and behind a dot one of the places, where these are known.
    """
    if all("." in layout for layout in layouts.values() if layout):
        return dict(layouts)
    return {replica_id: without_places(layout) for replica_id, layout in layouts.items()}


def without_places(layout: str) -> str:
    return layout.partition(".")[0]


def combine_ranks(layouts: Sequence[str]) -> str:
    """Return the layout of a group, from those of its ranks."""
    digest = combine_layouts([without_places(layout) for layout in layouts])
    places = [layout.partition(".")[2] for layout in layouts]
    return f"{digest}.{combine_layouts(places)}" if digest and all(places) else digest


def combine_layouts(of_ranks: Sequence[str]) -> str:
    """Return the layout of a group as one word, from what each of its ranks says of the boxes that it holds."""
    digest = 0
    for number, layout in enumerate(of_ranks):
        for character in f"{number}:{layout};":
            digest = (digest * 1_000_003 ^ ord(character)) & 0xFFFFFFFFFFFF
    return f"{len(of_ranks)} ranks, {digest:012x}"


def what_differs(own: str, theirs: str) -> str:
    """Say where two layouts in words begin to differ, from the side of the first."""
    for mine, other in zip_longest(own.split(SEPARATOR), theirs.split(SEPARATOR), fillvalue=""):
        if mine != other:
            return f"it has {mine or 'no more parameters'}, they have {other or 'no more parameters'}"
    return "their ranks hold other parameters, or other parts of them"


def is_part_of(own: str, theirs: str) -> bool:
    """Return whether all parameters of one layout in words are among those of another, in ranks of the same number.

    The same ones in another order are no part: no state that such a group gets changes its order.
    """
    ranks, *mine = own.split(SEPARATOR)
    their_ranks, *others = theirs.split(SEPARATOR)
    count, their_count = (Counter(item.rpartition(": ")[2] for item in items) for items in (mine, others))
    is_reordered = count == their_count and mine != others
    return bool(mine) and ranks == their_ranks and count <= their_count and not is_reordered


def pause_before_learning_again_s(num_learned: int) -> float:
    """Return how long a group waits for the state after it got it so many times and still could not train with the others."""
    return min(_LONGEST_PAUSE_S, _SHORTEST_PAUSE_S * 2.0 ** min(num_learned, 16)) if num_learned else 0.0
