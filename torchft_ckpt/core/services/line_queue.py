"""Lines on their way to a stream that may take nothing for a while: how many are kept, who waits, and what is left out."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from enum import Enum

PIECE_BYTES = 4096
"""At most so much is written at once: a pipe takes that whole, so lines of two writers do not mix."""


class Put(Enum):
    """The fate of lines that were put."""

    TAKEN = "taken"
    LEFT_OUT = "left out"
    NO_ROOM = "no room"
    """Come again when a piece is written, or at `stuck_at`."""


class LineQueue:
    """The lines between those who speak and the one who writes to a stream. Not thread-safe.

    It takes lines until it holds `capacity`. Then they have to wait, which a pipe makes its writer do too. A stream that has
    not taken a piece for `patience_s` is stuck, and whoever reads it may never come back: from then on lines are left out, so
    that nobody waits for ever. Where lines are missing, a line says how many.

    Args:
        capacity: in bytes; what is urgent finds room up to twice of that.
        patience_s: after so long with one piece a stream is stuck.
    """

    def __init__(self, *, capacity: int, patience_s: float) -> None:
        self._capacity = capacity
        self._patience_s = patience_s
        self._pieces: deque[bytes] = deque()
        self._num_bytes = 0
        self._writing_since: float | None = None
        self._num_writing = 0
        self._num_left_out = 0

    @property
    def num_bytes(self) -> int:
        """The bytes that are kept, those that are being written included."""
        return self._num_bytes

    def stuck_at(self, now: float) -> float:
        """Return the earliest time at which the stream is stuck, if it takes nothing from now on."""
        return (now if self._writing_since is None else self._writing_since) + self._patience_s

    def is_stuck(self, now: float) -> bool:
        """Whether the stream has taken nothing for `patience_s`."""
        return now >= self.stuck_at(now)

    def put(self, lines: Sequence[bytes], now: float, *, is_urgent: bool = False) -> Put:
        """Take lines, each with its end; all of them or none.

        Args:
            lines: what to write.
            now: in seconds, on a clock that never goes back.
            is_urgent: whoever brings them does not wait, so there is room for more of them, and never `NO_ROOM`.
        """
        if self._num_bytes >= (2 * self._capacity if is_urgent else self._capacity):
            if not (is_urgent or self.is_stuck(now)):
                return Put.NO_ROOM
            self._num_left_out += len(lines)
            return Put.LEFT_OUT
        self.say_what_is_missing()
        for line in lines:
            self._add(line)
        return Put.TAKEN

    def say_what_is_missing(self) -> None:
        """Add the line that says how many are missing here, if any are."""
        if self._num_left_out:
            self._add(b"[launcher] lines that are left out here, because nobody read this: %d\n" % self._num_left_out)
            self._num_left_out = 0

    def begin(self, now: float) -> bytes:
        """Return the next piece, which is being written until `written`: whole lines, or a part of a long one; empty: none.

        Args:
            now: in seconds, on the clock of `put`.
        """
        piece: list[bytes] = []
        size = 0
        while self._pieces and size + len(self._pieces[0]) <= PIECE_BYTES:
            piece.append(self._pieces.popleft())
            size += len(piece[-1])
        if piece:
            self._writing_since = now
            self._num_writing = size
        return b"".join(piece)

    def written(self) -> None:
        """Note that the stream has taken the piece."""
        self._num_bytes -= self._num_writing
        self._num_writing = 0
        self._writing_since = None

    def _add(self, line: bytes) -> None:
        self._num_bytes += len(line)
        while len(line) > PIECE_BYTES:
            self._pieces.append(line[:PIECE_BYTES])
            line = line[PIECE_BYTES:]
        self._pieces.append(line)
