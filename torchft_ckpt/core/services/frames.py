"""This file counts the frames of a WebSocket (RFC 6455) in the bytes that come, before anybody takes them apart."""

from __future__ import annotations

_LONGER = {126: 2, 127: 8}
"""Bytes that the length has, where seven bits do not hold it."""


class FrameCounter:
    """Of one connection: all of its frames count, those of control and of pieces of messages too."""

    def __init__(self) -> None:
        self._head = b""
        """The beginning of a frame's head that is not here whole."""
        self._num_to_skip = 0
        """Of the frame that was counted last, so many bytes are still to come."""

    def count(self, data: bytes) -> int:
        """Return how many heads of frames end in these bytes, which follow those of the last call."""
        data, at, num = self._head + data, self._num_to_skip, 0
        while at + 2 <= len(data):
            length = data[at + 1] & 127
            num_longer = _LONGER.get(length, 0)
            start = at + 2 + num_longer + (4 if data[at + 1] & 128 else 0)  # a client masks what it says
            if start > len(data):
                break
            if num_longer:
                length = int.from_bytes(data[at + 2 : at + 2 + num_longer], "big")
            at, num = start + length, num + 1
        self._head, self._num_to_skip = data[at:], max(at - len(data), 0)
        return num
