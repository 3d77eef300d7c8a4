"""This file decides what to say to a replica group that asks, between steps, where the newest state is.

The newest state that a living member holds is named only if nothing newer is known to have been committed: else its
holders are gone, or have not been heard of since, and the quorum has to find out.

All who ask are sent to the same primary, because they find each other through it; the other sources are spread over them.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable

from torchft_ckpt.core.lighthouse_records import Member
from torchft_ckpt.core.messages import LocateState, Source, StateLocated, StateVersion
from torchft_ckpt.core.recovery import MAX_SOURCES


def locate_state(
    asker: Member,
    message: LocateState,
    members: Iterable[Member],
    *,
    newest_step: int,
    is_valid: Callable[[StateVersion], bool],
    rolled_back_to: StateVersion,
) -> StateLocated:
    """Answer a question.

    Args:
        asker: who asked.
        message: what it asked.
        members: who is connected, the asker included.
        newest_step: the highest committed step that anybody is known to have reached.
        is_valid: whether a state has a name that counts.
        rolled_back_to: where the job went back on purpose.
    """
    living = sorted(members, key=lambda member: member.replica_id)
    newest = max((member.version for member in living if is_valid(member.version)), default=StateVersion())
    if not newest.proven or newest.step < newest_step:
        return StateLocated(request_id=message.request_id, rolled_back_to=rolled_back_to)
    holders = [
        Source(replica_id=member.replica_id, replica_rank=rank, checkpoint_addresses=member.checkpoint_addresses)
        for rank, member in enumerate(living)
        if member is not asker and member.version == newest and member.checkpoint_addresses
    ]
    primary, others = holders[:1], holders[1:]
    first = zlib.crc32(asker.replica_id.encode()) % max(1, len(others))
    return StateLocated(
        request_id=message.request_id,
        version=newest,
        is_held=message.version == newest,
        sources=[*primary, *others[first:], *others[:first]][:MAX_SOURCES],
        rolled_back_to=rolled_back_to,
    )
