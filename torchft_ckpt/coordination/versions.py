"""Answers a party of another protocol version, if that is why its first message cannot be read.

`core` judges a hello that can be read, and names both versions. A hello of another version may have any shape; but in every
version, for ever, it is a JSON object with the number in `protocol`.
"""

from __future__ import annotations

from typing import Any

import msgspec

from torchft_ckpt.core.messages import MAX_MESSAGE_BYTES, PROTOCOL_VERSION, Count, Refused, clip
from torchft_ckpt.errors import ProtocolError

SAME_EVERYWHERE = "install the same version of torchft_ckpt everywhere"


class _First(msgspec.Struct):
    protocol: Count
    replica_id: Any = None


_decoder = msgspec.json.Decoder(_First)


def other_version(data: str | bytes) -> tuple[int, str] | None:
    """Return the version that a first message is of, and the replica id in it, where that is not ours; else None."""
    if len(data) > MAX_MESSAGE_BYTES:
        return None
    try:
        first = _decoder.decode(data)
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return None
    if first.protocol == PROTOCOL_VERSION:
        return None
    return first.protocol, clip(first.replica_id, 200) if isinstance(first.replica_id, str) else ""


def refuse_unreadable(data: str | bytes, error: ProtocolError, *, ours: str, party: str) -> Refused:
    """Return what to answer to a message that cannot be read: by both versions, where its is another.

    Args:
        data: the message.
        error: what is wrong with it.
        ours: who we are, as in "the lighthouse".
        party: who sent it.
    """
    other = other_version(data)
    if other is None:
        return Refused(code="protocol", reason=str(error)[:1000])
    version, name = other
    who = f"{name} ({party})" if name else party
    reason = f"{ours} speaks protocol {PROTOCOL_VERSION}, {who} speaks {version}; {SAME_EVERYWHERE}"
    return Refused(code="version", reason=reason)
