"""What a server can send from: a snapshot of its own, or blocks that it has of somebody else's."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Protocol


class Served(Protocol):
    """Bytes of one state, in blocks. Every member may be used from any thread."""

    id: str
    step: int
    total_bytes: int
    block_bytes: int
    num_blocks: int
    digests: dict[int, bytes]

    @property
    def closed(self) -> bool:
        """Whether nothing can be read any more."""

    def holds(self, start: int, stop: int) -> bool:
        """Whether bytes [start, stop) can be read now."""

    def lend(self, start: int, stop: int) -> AbstractContextManager[list[memoryview]]:
        """Lend the memory of bytes [start, stop), for as long as one send that does not wait takes."""

    def note_sent(self, block: int) -> None:
        """Note that a block is being sent to somebody."""

    def contact(self, receiver: str, now: float, *, received: int = 0, address: str | None = None) -> None:
        """Note that a receiver is alive, has these blocks, and serves them at an address."""

    def is_revoked(self, receiver: str | None) -> bool:
        """Whether the receiver's lease was ended because it was too slow."""
